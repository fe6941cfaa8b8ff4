"""`normfuse generate`: continues prompts with a trained run."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from .errors import RunError, UsageError
from .outdir import OutDir

_TOKENS = 240


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continues prompts with the newest checkpoint of a training run, or with a Hugging Face
    folder of Llama, Qwen2 or Qwen3: config.json, safetensors and tokenizer.json."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, its --out-dir; or of the Hugging Face model."""
    prompt: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        tyro.conf.arg(metavar="TEXT", help_behavior_hint="(default: 'def ')"),
    ] = ()
    """What to continue; may be given several times, and all are continued at once."""
    tokens: Annotated[
        int | None,
        tyro.conf.arg(metavar="INT", help_behavior_hint=f"(default: {_TOKENS}, or what fits)"),
    ] = None
    """How many tokens to add at most."""
    samples: int = 1
    """How many continuations of each prompt, drawn at once."""
    stop: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """A continuation ends before this token."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Draw from this many of the likeliest tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Draw from the likeliest tokens that together have this probability only."""
    seed: int = 0
    """Of the draws."""


def main(argv: list[str]):
    """Prints each prompt and its continuations.

    Raises:
      UsageError: the folder holds no run, or an argument is out of range.
      RunError: every checkpoint is damaged.
    """
    config = tyro.cli(GenerateConfig, prog="normfuse generate", args=argv)
    out = OutDir(config.run)
    prompts = config.prompt or ("def ",)
    if not all(prompts):
        raise UsageError("--prompt '' must hold at least one character.")
    if config.samples < 1:
        raise UsageError(f"--samples {config.samples} must be at least 1.")
    if out.has_checkpoints():
        model, params, tokenizer = _load_run(out)
    elif (config.run / "config.json").is_file():
        model, params, tokenizer = _load_huggingface(config.run)
    else:
        raise UsageError(
            f"RUN {out.path} holds neither a checkpoint nor a config.json: give the folder of a "
            "training run or of a Hugging Face model."
        )

    from .ending import room_after, sample

    # Of a prompt that leaves no room, `sample` says so.
    fitting = max(min(_TOKENS, room_after(model, tokenizer, prompts)), 1)
    names = {f.name for f in dataclasses.fields(config)} - {"run", "prompt", "tokens"}
    options = {name: getattr(config, name) for name in names}
    tokens = fitting if config.tokens is None else config.tokens
    try:
        texts = sample(model, params, tokenizer, prompts, tokens, **options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print("\n\n".join(texts))


def _load_run(out: OutDir):
    """Restores a run's model, parameters and tokenizer, on the first device."""
    import jax

    from ..models.config import TransformerConfig
    from ..models.functional import build
    from .checkpoint import Checkpoints
    from .compilation import keep_compiled_programs
    from .tokenizer import Bytes, read_tokenizer

    keep_compiled_programs()
    warn = lambda text: print(text, file=sys.stderr)
    checkpoints = Checkpoints(out.checkpoints, report=warn)
    newest = checkpoints.newest_record()
    if newest is None:
        raise RunError(f"every checkpoint in {out.checkpoints} is damaged.")
    saved = newest[1]["config"]
    model = build(saved["framework"], TransformerConfig(**saved["model"], dtype=saved["precision"]))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    params = checkpoints.restore_params(jax.tree.map(place, model.abstract))
    is_bytes = newest[1]["text"].get("tokenizer") == Bytes.name
    return model, params, Bytes() if is_bytes else read_tokenizer(out.tokenizer)


def _load_huggingface(folder: Path):
    from ..models.huggingface import load
    from .compilation import keep_compiled_programs
    from .tokenizer import read_tokenizer

    keep_compiled_programs()
    tokenizer = read_tokenizer(folder)
    try:
        model, params = load(folder, "nnx")
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN {folder} cannot be read: {error}") from None
    return model, params, tokenizer
