"""The command `normfuse`: `train`, `generate`, `export`, `report`, `plan`, `info` and `cache`.

Nothing here imports JAX before the flags are read, nor packages of the extra `train` before a
command needs them.
"""

import dataclasses
import difflib
import io
import itertools
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import Positional, UseAppendAction, arg, subcommand

from ..models.config import Dtype
from . import RunError, UsageError
from .arguments import one_line, printable, reason
from .checks import check_pretrained
from .config import TrainConfig, defaults, flag_value, preset_config
from .shutdown import end_by_ctrl_c


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts with a trained run or a Hugging Face model.

    The model is the newest checkpoint of a training run, or a Hugging Face folder of Llama,
    Mistral, Qwen2 or Qwen3: config.json, safetensors and tokenizer.json.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run, its --out-dir; or of the Hugging Face model."""
    prompt: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="TEXT", help_behavior_hint="(default: 'def ')"),
    ] = ()
    """Text to continue; may be repeated, and all are continued at once."""
    tokens: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint="(default: 240, or as fit)")
    ] = None
    """Largest number of tokens to add."""
    samples: int = 1
    """Continuations of each prompt, drawn at once."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""
    top_k: Annotated[int | None, arg(metavar="INT", help_behavior_hint="")] = None
    """Draw only from this many of the likeliest tokens."""
    top_p: Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Draw only from the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the draws."""


@dataclasses.dataclass(frozen=True)
class Export:
    """Write a run's newest checkpoint as a Hugging Face model, with its tokenizer.

    `normfuse generate` and the transformers library take the folder.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run, its --out-dir."""
    folder: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Folder to write; it must not exist, or be empty."""
    dtype: Dtype = "float32"
    """Dtype to store the parameters in."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Compare training runs: a table, and a plot of their losses."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...", help_behavior_hint="")]
    """Folders of runs, their --out-dir."""
    plot: Path = Path("losses.png")
    """The picture to write, a PNG."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(TrainConfig):
    """Compile the step of a run for GPUs that need not be here: its memory and collectives.

    Takes the flags of `normfuse train`, whose values those of the printed run are. Needs
    normfuse[cuda13], but no GPU, and a minute or more.
    """

    gpu: Annotated[str, arg(metavar="H200|H100")] = "H200"
    """Kind of GPU."""
    gpus: int = 8
    """Number of GPUs, from 1 to 1024; more than 8 must be whole hosts of 8."""


@dataclasses.dataclass(frozen=True)
class Info:
    """Show versions, devices, the kernel cache, and which implementation each op would use."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """Show or clear the cache of compiled kernels."""

    action: Positional[Literal["show", "clear"]] = "show"
    """Say how many kernels are cached, or remove all."""


_COMMANDS = ("train", "generate", "export", "report", "plan", "info", "cache")


def parse(argv: list[str]) -> TrainConfig | Generate | Export | Report | Plan | Info | Cache:
    """Parses a command line.

    Raises:
      UsageError: an argument is empty or no text, or the file of `--config` cannot be read.
      SystemExit: after `--help`, or tyro has printed which flag or value is unknown.
    """
    config = planned = None
    if argv[0] not in _COMMANDS and not argv[0].startswith("-"):
        near = difflib.get_close_matches(argv[0], _COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}."
        raise UsageError(f"{argv[0]!r} is no command: {meant}")
    if argv[0] in ("train", "plan"):
        config, flags = defaults(argv[1:], "1b" if argv[0] == "plan" else "tiny")
        planned, argv = Plan(**vars(config)), [argv[0], *flags]
    for before, word in itertools.pairwise(argv):
        if word == "" or re.fullmatch(r"--[\w.-]+=", word):  # of a shell's "$UNSET"
            named = word or (before if before[0] == "-" else f"The argument after {before}")
            raise UsageError(f"{named} is empty: give a value, or leave it out.")
        if not word.isascii() and word.encode(errors="replace").decode() != word:
            raise UsageError(f"{word!r} is no UTF-8 text.")
    commands: Any = (
        Annotated[TrainConfig, subcommand("train", default=config or preset_config("tiny"))]
        | Annotated[Generate, subcommand("generate")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Report, subcommand("report")]
        | Annotated[Plan, subcommand("plan", default=planned or Plan(**vars(preset_config("1b"))))]
        | Annotated[Info, subcommand("info")]
        | Annotated[Cache, subcommand("cache")]
    )
    about = "Native RMSNorm and fused Dense layers for JAX, and a trainer that uses them."
    command = tyro.cli(commands, args=argv, prog="normfuse", description=about)
    if config is not None and config.init_from is not None:
        check_pretrained(command, config)
    return command


def run(command: TrainConfig | Generate | Export | Report | Plan | Info | Cache) -> None:
    """Runs a parsed command, and prints its result; UsageError or RunError if it failed."""
    match command:
        case Plan():
            from .plan import plan

            plan(command.gpu, command.gpus, command)
        case TrainConfig():
            from .run import train

            train(command)
        case Generate():
            from .generation import continue_prompts

            text = "\n\n".join(continue_prompts(**vars(command)))
            print(printable(text) if sys.stdout.isatty() else text)
        case Export():
            from .generation import export

            export(command.run, command.folder, command.dtype)
            print(f"wrote {command.folder}")
        case Report():
            from .report import report

            report(command.runs, command.plot)
        case Info() | Cache():
            _inspect(command)


def _inspect(command: Info | Cache) -> None:
    from ..layers import info
    from ..native import cache, compiler
    from ..native.implementation import Unsupported

    try:
        match command:
            case Info():
                text = info.info()
            case Cache("clear"):
                text = f"removed {cache.clear()} files from {cache.directory()}"
            case _:
                text = "\n".join(info.cached())
    except (cache.Refused, Unsupported, compiler.CompileError, ValueError) as error:
        raise RunError(str(error)) from error
    print(text)


def main(argv: list[str] | None = None) -> int:
    """Runs a command, of the process's words by default.

    Returns: 0 for success or a clean stop, 1 for a run that failed, 2 for usage.
    """
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if argv[0] == "--version":
            print(version("normfuse"))
        else:
            run(parse(argv))
    except UsageError as error:
        return _fail(f"{error}{_with_file(argv)}", 2)
    except ModuleNotFoundError as error:
        return _fail(f"the package {error.name} is missing: pip install 'normfuse[train]'", 2)
    except RunError as error:
        return _fail(error, 1)
    except SystemExit as exit:  # tyro ends like this
        if exit.code and (file := _with_file(argv)):
            _fail(f"the flags are not understood{file}", 2)
        return exit.code if isinstance(exit.code, int) else 2
    except BrokenPipeError:
        pass  # the reader, `head` for example, has seen enough
    except OSError as error:  # a full disk, a file that vanished: no bug, so no traceback
        return _fail(reason(error), 1)
    return 0


def entry(argv: list[str] | None = None) -> NoReturn:
    """Runs a command as `main` does, and exits."""
    end_by_ctrl_c()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in a locale without all characters
    code = main(argv)
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would flush again, and exit with 120
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _with_file(argv: list[str]) -> str:
    path = flag_value(argv, "--config")
    return f" (with the settings in {path})" if path else ""


def _fail(message: object, code: int) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    entry()
