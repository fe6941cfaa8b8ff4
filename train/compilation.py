"""Compiling a run's step: the programs' cache, explained errors, and the kernels called."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence

import jax

from ..native import cache
from . import RunError, UsageError
from .step import Program

# Families of ops, each with patterns for the names of its kernels, native or Pallas, and of the
# functions that say why plain XLA serves; the last one has all other functions.
_FAMILIES = {
    "norms": ("rms_norm|^norm_", "rms_norm"),
    "softmax": ("softmax", "cross_entropy"),  # of the loss
    "activations": ("epilogue|dense", ""),
}
# Custom calls of Pallas kernels: on GPUs by Triton and by Mosaic, and on TPUs.
_PALLAS = r"__gpu\$xla\.gpu\.triton|mosaic_gpu\w*|tpu_custom_call"


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


def implementations(hlo: str, reasons: Sequence[tuple[str, str]] = ()) -> dict[str, str]:
    """Returns which implementation serves each family of ops in a compiled program's text.

    `reasons` are `fallbacks()`, why plain XLA serves; empty if the user asked for it.
    """
    kernels: dict[str, set[str]] = {"native": set(), "Pallas": set()}  # implementation -> names
    for line in hlo.splitlines():
        if target := re.search(rf'custom_call_target="(?:normfuse_(\w+)|{_PALLAS})"', line):
            if target[1] is None:
                kernels["Pallas"].update(re.findall(r'op_name="([^"]*)"', line))
            else:  # all CUDA kernels have one target and their name as an attribute
                kernel = re.search(r'\bkernel = "(\w+)"', line)
                kernels["native"].add(kernel[1] if kernel else target[1])
    if not kernels["Pallas"]:  # on CPUs Pallas interprets: the program has loops, no custom call
        kernels["interpreted Pallas"] = set(re.findall(r"/(pallas_\w+)/while", hlo))
    served, reasons = {}, list(reasons)
    for family, (names, functions) in _FAMILIES.items():
        found = [
            f"{implementation} kernels"
            for implementation, calls in kernels.items()
            if any(re.search(names, call) for call in calls)
        ]
        why = {reason for op, reason in reasons if functions in op}
        reasons = [(op, reason) for op, reason in reasons if functions not in op]
        if why or not found:
            found.append("plain XLA" + (f" ({'; '.join(sorted(why))})" if why else ""))
        served[family] = ", ".join(found)
    return served


@contextlib.contextmanager
def explained(step: jax.stages.Compiled | None = None) -> Iterator[None]:
    """Turns running out of device memory into a RunError that tells sizes and remedies."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(
            f"out of device memory: {str(error).splitlines()[0]}\n{_memory(step)}"
            "Use more --microbatches (or a smaller --batch-size), --model.remat block, or spread "
            "the state over more devices with --mesh.fsdp."
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
