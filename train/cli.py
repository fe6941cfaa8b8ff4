"""The command `normfuse`: `train`, `generate`, `export`, `report`, `plan`, `info` and `cache`.

Nothing here imports JAX before the flags are read, nor packages of the extra `train` before a
command needs them.
"""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg, subcommand

from ..models.config import Dtype
from . import RunError, UsageError
from .arguments import one_line, printable, reason
from .config import TrainConfig, defaults, parsed
from .shutdown import StopRequest

_TOKENS = 240  # tokens that `generate` adds by default


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue prompts with a trained run or a Hugging Face model.

    The model is the newest checkpoint of a training run, or a Hugging Face folder of Llama,
    Mistral, Qwen2, Qwen3, OLMo 2, Gemma, Gemma 2 or Gemma 3 (text): config.json, safetensors and
    tokenizer.json.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run, its --out-dir; or of the Hugging Face model."""
    prompt: Annotated[
        UseAppendAction[tuple[str, ...]],
        arg(metavar="TEXT", help_behavior_hint="(default: 'def ')"),
    ] = ()
    """Text to continue; may be repeated, and all are continued at once."""
    tokens: Annotated[
        int | None, arg(metavar="INT", help_behavior_hint=f"(default: {_TOKENS}, or as fit)")
    ] = None
    """Largest number of tokens to add."""
    samples: int = 1
    """Continuations of each prompt, drawn at once."""
    stop: Annotated[str | None, arg(metavar="TEXT", help_behavior_hint="")] = None
    """End a continuation before this token."""
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
    """Compare training runs: a table, and a page with plots of loss, throughput and profile."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...", help_behavior_hint="")]
    """Folders of runs, their --out-dir."""
    html: Path = Path("report.html")
    """The page to write: one file that includes the plots."""
    pictures: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Also write the plots as files to this folder."""


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
    huggingface: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder with the config.json of a Hugging Face model, instead of the preset's."""


@dataclasses.dataclass(frozen=True)
class Info:
    """Show versions, devices, the kernel cache, and which implementation each op would use."""

    all: Annotated[bool, FlagCreatePairsOff] = False
    """Show the ops on platforms that this machine does not have, too."""


@dataclasses.dataclass(frozen=True)
class CacheShow:
    """List the cached kernels."""


@dataclasses.dataclass(frozen=True)
class CacheClear:
    """Remove all cached kernels."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """Show or clear the cache of compiled kernels."""

    action: Annotated[
        Annotated[CacheShow, subcommand("show", prefix_name=False)]
        | Annotated[CacheClear, subcommand("clear", prefix_name=False)],
        arg(name=""),
    ] = CacheShow()


_COMMANDS = ("train", "generate", "export", "report", "plan", "info", "cache")


def parse(argv: list[str]) -> TrainConfig | Generate | Export | Report | Plan | Info | Cache:
    """Parses a command line.

    Raises:
      UsageError: a flag or value is unknown, or the file of `--config` has a mistake.
      SystemExit: after `--help`.
    """
    _refuse_empty(argv)
    with _explained_imports():
        given = argv[1:] if argv[0] in ("train", "plan") else []
        if argv[0] == "plan" and not any(word.startswith("--config") for word in given):
            given = ["--preset=1b", *given]
        config = defaults(given)
    planned = Plan(**vars(config))
    commands: Any = (
        Annotated[TrainConfig, subcommand("train", default=config)]
        | Annotated[Generate, subcommand("generate")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Report, subcommand("report")]
        | Annotated[Plan, subcommand("plan", default=planned)]
        | Annotated[Info, subcommand("info")]
        | Annotated[Cache, subcommand("cache")]
    )
    about = "Native RMSNorm and fused Dense layers for JAX, and a trainer that uses them."
    return parsed(commands, argv, "normfuse", description=about)


def _refuse_empty(argv: list[str]) -> None:
    """Raises a UsageError for an empty word outside a prompt: "$UNSET" in a shell.

    As a path it would be the current folder.
    """
    texts = "--prompt", "--stop", "--sample.prompt"
    for before, word in itertools.pairwise(argv):
        flag, equals, value = word.partition("=")
        flag = flag if equals and flag.startswith("--") else before if word == "" else None
        if flag is not None and value == "" and flag not in texts:
            what = flag if flag.startswith("--") else f"an argument of `normfuse {argv[0]}`"
            raise UsageError(f"{what} is empty: give a value, or leave it out.")


def run(command: TrainConfig | Generate | Export | Report | Plan | Info | Cache) -> None:
    """Runs a parsed command, and prints its result; UsageError or RunError if it failed."""
    match command:
        case Plan():
            with _explained_imports():
                from .plan import plan
            plan(command.gpu, command.gpus, command.huggingface, command)
        case TrainConfig():
            with _explained_imports():
                from .run import train
            train(command)
        case Generate():
            with _explained_imports():
                from .generation import continue_prompts
            options = {**vars(command), "fit": command.tokens is None}
            folder, prompts = options.pop("run"), options.pop("prompt") or ("def ",)
            tokens = _TOKENS if command.tokens is None else command.tokens
            text = "\n\n".join(continue_prompts(folder, prompts, **options | {"tokens": tokens}))
            print(printable(text) if sys.stdout.isatty() else text, flush=True)
        case Export():
            with _explained_imports():
                from .generation import export
            export(command.run, command.folder, command.dtype)
            print(f"wrote {command.folder}")
        case Report():
            with _explained_imports():
                from .report import report
            report(command.runs, command.html, command.pictures)
        case Info() | Cache():
            _inspect(command)


@contextlib.contextmanager
def _explained_imports() -> Iterator[None]:
    """Turns a missing package into a UsageError that tells how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"the package {error.name} is missing: pip install 'normfuse[train]'"
        raise UsageError(message) from None


def _inspect(command: Info | Cache) -> None:
    from ..layers import info
    from ..native import cache, compiler
    from ..native.implementation import Unsupported

    try:
        match command:
            case Info(every_platform):
                text = info.info(every_platform)
            case Cache(CacheClear()):
                text = f"removed {cache.clear()} files from {cache.directory()}"
            case _:
                text = info.show()
    except (cache.Refused, Unsupported, compiler.CompileError, ValueError) as error:
        raise RunError(str(error)) from error
    print(text)


_ADDRESS_SPACE = 2 << 30  # with less, XLA aborts the process when it starts its threads


def main(argv: list[str] | None = None) -> int:
    """Runs a command, of the process's words by default.

    Returns: 0 for success or a clean stop, 1 for a run that failed, 2 for usage.
    """
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if argv[0] == "--version":
            print(version("normfuse"))
        elif argv[0] not in (*_COMMANDS, "-h", "--help"):
            close = difflib.get_close_matches(argv[0], _COMMANDS, 1)
            hint = f"Did you mean {close[0]!r}?" if close else "`normfuse --help` lists them."
            raise UsageError(f"unknown command {argv[0]!r}. {hint}")
        else:
            if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _ADDRESS_SPACE:
                raise MemoryError
            run(parse(argv))
    except UsageError as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except SystemExit as exit:  # tyro ends like this
        return exit.code if isinstance(exit.code, int) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        _close_output()
    except MemoryError:
        return _fail("out of memory: this process may not have as much as it needs (ulimit -v)", 1)
    except OSError as error:  # a full disk, a file that vanished: no bug, so no traceback
        return _fail(reason(error), 1)
    return 0


def entry(argv: list[str] | None = None) -> NoReturn:
    """Runs a command as `main` does, and exits.

    A Ctrl-C ends the process at once, until `train` notes it to save and stop. As Python's
    KeyboardInterrupt it would be lost in whatever callback it interrupts: JAX runs one at every
    garbage collection, and imports collect hundreds of times. A signal during the exit changes
    nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else ignored: `nohup … &`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    StopRequest.afterwards = signal.SIG_IGN
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # in a locale without all characters
    code = main(argv)
    try:
        sys.stdout.flush()
    except OSError:  # the interpreter would flush again, and exit with 120
        _close_output()
    sys.exit(code)


def _close_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: object, code: int) -> int:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {one_line(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    entry()
