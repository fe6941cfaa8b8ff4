"""Compiling a run's step: the programs' cache, and explained errors."""

import contextlib
import math
import os
import re
from collections.abc import Iterator

import jax

from ..native import cache
from . import RunError, UsageError
from .step import Program

# Allocators say so in these words, under whatever code: RESOURCE_EXHAUSTED, INTERNAL, UNKNOWN.
_MEMORY = re.compile("RESOURCE_EXHAUSTED|out.of.memory|failed to allocate|bad_alloc", re.I)


def keep_compiled_programs() -> None:
    """Turns JAX's persistent compilation cache on, unless the user has configured it.

    Its folder is `xla` in the kernel cache's, under the same conditions. If it does not meet them,
    every process compiles again.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = cache.usable("xla")
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if not os.access(folder, os.W_OK):  # else JAX warns for each program it cannot write
        jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def lower(program: Program, batch_size: int, seq_len: int) -> jax.stages.Lowered:
    """Traces a run's step; UsageError if the implementation asked for cannot serve."""
    try:
        return program.lower(batch_size, seq_len)
    except* NotImplementedError as group:
        causes = "; ".join(str(error) for error in group.exceptions)
        causes = causes.replace("implementation=None", "--implementation auto")
        if "--implementation auto" not in causes:
            causes += ". Use --implementation auto to let the best that there is serve"
        raise UsageError(f"--implementation cannot serve here: {causes}") from None


@contextlib.contextmanager
def explained(
    remedy: str = "Use more --microbatches (or a smaller --batch-size), --model.remat block, or "
    "spread the state over more devices with --mesh.fsdp.",
) -> Iterator[None]:
    """Turns running out of device memory into a RunError that tells a remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not _MEMORY.search(str(error)):
            raise
        first = str(error).splitlines()[0].rstrip(".")
        raise RunError(f"out of device memory: {first}. {remedy}") from None
