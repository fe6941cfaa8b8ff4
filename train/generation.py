"""`normfuse generate`: continues a prompt with a trained run."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from normfuse.train.errors import RunError, UsageError
from normfuse.train.outdir import OutDir


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """Continues a prompt with the newest checkpoint of a training run."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of the run, its --out-dir."""
    prompt: str = "def "
    """What to continue."""
    tokens: int = 240
    """How many tokens to add."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""
    top_k: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """Draw from this many of the likeliest tokens only."""
    top_p: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = None
    """Draw from the likeliest tokens that together have this probability only."""
    seed: int = 0
    """Of the draws."""


def main(argv: list[str]):
    """Prints a prompt and its continuation.

    Raises:
      UsageError: the folder holds no run, or an argument is out of range.
      RunError: every checkpoint is damaged.
    """
    config = tyro.cli(GenerateConfig, prog="normfuse generate", args=argv)
    out = OutDir(config.run)
    if not out.has_checkpoints():
        raise UsageError(f"RUN {out.path} holds no checkpoint: give the folder of a training run.")
    if not config.prompt:
        raise UsageError("--prompt '' must hold at least one character.")
    model, params = _load(out)

    from normfuse.train.ending import sample

    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    try:
        print(sample(model, params, **{k: v for k, v in options.items() if k != "run"}))
    except ValueError as error:
        raise UsageError(str(error)) from None


def _load(out: OutDir):
    """Restores the model and its parameters, on the first device."""
    import jax

    from normfuse.models.config import TransformerConfig
    from normfuse.models.functional import build
    from normfuse.train.checkpoint import Checkpoints
    from normfuse.train.compilation import keep_compiled_programs

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
    return model, checkpoints.restore_params(jax.tree.map(place, model.abstract))
