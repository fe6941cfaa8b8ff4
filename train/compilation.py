"""Compiling a run's step: programs kept for the next run, and failures explained."""

import contextlib
import os
from pathlib import Path

import jax
import platformdirs

from .errors import RunError, UsageError
from .step import Program


def keep_compiled_programs():
    """Turns JAX's persistent compilation cache on, unless the user has placed it.

    `NORMFUSE_CACHE_DIR` moves it. Where it cannot be written to, programs are compiled each time.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    base = os.environ.get("NORMFUSE_CACHE_DIR") or platformdirs.user_cache_dir("normfuse")
    folder = Path(base) / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))


def lower(program: Program, batch_size: int, seq_len: int) -> jax.stages.Lowered:
    """Traces a run's step.

    Raises:
      UsageError: the implementation asked for cannot serve.
    """
    try:
        return program.lower(batch_size, seq_len)
    except* NotImplementedError as group:
        causes = "; ".join(str(error) for error in group.exceptions)
        raise UsageError(f"--implementation cannot serve here: {causes}") from None


@contextlib.contextmanager
def explained(step: jax.stages.Compiled | None = None):
    """Turns running out of device memory into a RunError with what was needed and the cures."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            f"out of device memory: {str(error).splitlines()[0]}\n{_memory(step)}"
            "Use more --microbatches (or a smaller --batch-size), --model.remat block, or spread "
            "the state over more devices by --mesh.fsdp."
        ) from None


def _memory(step: jax.stages.Compiled | None) -> str:
    analysis = step.memory_analysis() if step is not None else None
    if analysis is None:
        return ""
    parts = {
        "state and batch": analysis.argument_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
    }
    listed = ", ".join(f"{name} {size / 2**20:,.1f} MiB" for name, size in parts.items())
    return f"The compiled step needs on each device: {listed}.\n"
