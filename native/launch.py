"""Calls a CUDA kernel from a traced JAX function: compiled for the target, launched by XLA."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from . import cache
from .compiler import Source, kernel_source
from .device import Target

Dims = int | Sequence[int]


def launch(
    source: str | Source,
    kernel: str,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    target: Target,
    grid: Dims,
    block: Dims,
    macros: Mapping[str, str | int] | None = None,
    cluster: Dims = 1,
    shared: int = 0,
    ints: Sequence[int] = (),
    floats: Sequence[float] = (),
    doubles: Sequence[float] = (),
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Runs `kernel` of `source` on one device's arrays and returns its results.

    The kernel's parameters are pointers to the operands, pointers to the results, then the scalars
    as `long long`, `float` and `double`, in this order. A workspace is one more result. Nothing is
    initialised: a kernel writes every element of its results.

    Args:
      source: the name of a file in `native/kernels`, or a source of your own.
      kernel: the name of an `extern "C" __global__` function in it.
      operands, results: at most 64 with the scalars; row-major and contiguous.
      target: what to compile for.
      grid, block, cluster: up to three sizes each, x first. An empty grid runs nothing.
      macros: compile-time constants; their names are longer than one letter.
      shared: bytes of dynamic shared memory.
      ints, floats, doubles: run-time scalars.
      aliases: operand -> result that takes its place in memory; XLA copies an operand that is
        still needed.

    Raises:
      CompilerMissing: if NVRTC or CUDA's headers are not installed.
      CompileError: if the source does not compile.
    """
    if isinstance(source, str):
        source = kernel_source(source)
    image = cache.get(source, macros or {}, target.arch)
    call: Any = jax.ffi.ffi_call(
        "normfuse_launch", list(results), input_output_aliases=dict(aliases or {})
    )
    return call(
        *operands,
        image=np.frombuffer(image.data, np.uint8),
        digest=image.digest,
        kernel=kernel,
        grid=_three(grid),
        block=_three(block),
        cluster=_three(cluster),
        shared=np.int64(shared),
        ints=np.array(ints, np.int64),
        floats=np.array(floats, np.float32),
        doubles=np.array(doubles, np.float64),
    )


def _three(sizes: Dims) -> np.ndarray:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return np.array(sizes + (1,) * (3 - len(sizes)), np.int64)
