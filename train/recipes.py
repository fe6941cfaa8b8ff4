"""The settings a preset is trained with, unless a YAML file or a flag says otherwise."""

import dataclasses
from typing import Any

from ..models.config import PRESETS
from .config import (
    CheckpointConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    Preset,
    TrainConfig,
)

# Small batches: in the few hundred thousand tokens that two CPU cores read in a minute and a half,
# many small steps learn more than few large ones.
_TINY: dict[str, Any] = dict(
    steps=700,
    batch_size=8,
    seq_len=128,
    precision="float32",
    optim=OptimConfig(lr=3e-3, final_lr=0.05),
)

# Learning rates are GPT-3's for these sizes (arXiv:2005.14165, table 2.1). Batches are as large as
# one GPU of 80 GB takes without microbatches (8b: eight of them), and divide over eight. Compiled
# for an H200, the step of 1b takes 38 GiB with remat "dots", which repeats no GEMM, with cuDNN's
# attention or XLA's; with "none" 43 GiB, but about 90 with XLA's attention, which keeps its scores.
_LARGE: dict[str, dict[str, Any]] = {
    "small": dict(batch_size=32, seq_len=1024, steps=2_000, lr=6e-4, remat="none"),
    "medium": dict(batch_size=32, seq_len=1024, steps=4_000, lr=3e-4, remat="dots"),
    "1b": dict(batch_size=8, seq_len=2048, steps=10_000, lr=2e-4, remat="dots"),
    "8b": dict(batch_size=16, seq_len=2048, steps=20_000, lr=1.2e-4, remat="block"),
}


def recipe(preset: Preset) -> TrainConfig:
    """Gives the complete configuration a preset starts from."""
    model = _model(preset)
    if preset == "tiny":
        return TrainConfig(preset=preset, model=model, **_TINY)
    settings = dict(_LARGE[preset])
    lr, remat = settings.pop("lr"), settings.pop("remat")
    return TrainConfig(
        preset=preset,
        model=dataclasses.replace(model, remat=remat),
        precision="bfloat16",
        optim=OptimConfig(lr=lr),
        eval=EvalConfig(every=250, tokens=262_144, final_tokens=524_288),
        checkpoint=CheckpointConfig(every=500),
        **settings,
    )


def _model(preset: Preset) -> ModelConfig:
    shape = dataclasses.asdict(PRESETS[preset])
    return ModelConfig(**{f.name: shape[f.name] for f in dataclasses.fields(ModelConfig)})
