"""The lines that open a run: what is trained, on what, where."""

import importlib.metadata

import jax
from jax.sharding import Mesh

from ..models.config import num_parameters
from ..native.implementation import fallbacks
from .config import TrainConfig
from .data import Text, looks_binary
from .display import Display, short
from .peak import peak_flops

# Begins the name of every FFI target of ours in a compiled program.
TARGET_PREFIX = "normfuse_"
_FRAMEWORKS = {"nnx": "Flax nnx", "eqx": "Equinox"}


def introduce(config: TrainConfig, text: Text, mesh: Mesh, display: Display):
    """Says what a run will do."""
    parameters = num_parameters(config.transformer())
    display.fact(
        "model",
        f"{config.preset}, {short(parameters)} parameters, {_FRAMEWORKS[config.framework]}, "
        f"{config.precision} (normfuse {importlib.metadata.version('normfuse')})",
    )
    files = f"{text.files} files, " if text.files > 1 else ""
    display.fact("text", f"{text.name}, {files}{len(text):,} bytes")
    display.fact("sha256", text.sha256)
    if looks_binary(text):
        display.note("the text holds zero bytes: is it binary? It is learned as bytes.", "yellow")
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    kind = mesh.devices.flat[0].device_kind
    display.fact("mesh", f"{axes}, of {mesh.size} {kind} device{'s' * (mesh.size > 1)}")
    peak = peak_flops(kind, config.precision)
    if peak is not None:
        display.fact("peak", f"{peak / 1e12:g} TFLOP/s a device in {config.precision}, for MFU")
    elif jax.default_backend() != "cpu":
        display.fact("peak", f"of {kind} not known: MFU is not shown")
    display.fact("folder", str(config.out_dir))


def say_what_serves(step: jax.stages.Compiled, display: Display):
    """Says whether the compiled step runs the native norms, and if it does not, why."""
    reasons = sorted({reason for op, reason in fallbacks() if op.startswith("rms_norm")})
    if TARGET_PREFIX in (step.as_text() or ""):
        display.fact("norms", "native kernels")
    else:
        display.fact("norms", "plain XLA" + (f": {'; '.join(reasons)}" if reasons else ""))
