"""Launches CUDA kernels, and calls C++ ones, from a traced JAX function.

A CUDA kernel is compiled for the `Target` of the lowering it is part of, and launched by XLA.
"""

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .compiler import Source, image_of, kernel_source
from .dtypes import CUDA_TYPES, FLOATING, compute_dtype
from .implementation import Unsupported

Dims = int | Sequence[int]


def launch(
    source: str | Source,
    kernel: str,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    target: "Target",
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
    image = image_of(source, macros or {}, target.arch)
    return call_host(
        "normfuse_launch",
        operands,
        results,
        aliases=aliases,
        image=np.frombuffer(image.data, np.uint8),
        digest=image.digest,
        dtypes=signature([a.dtype.name for a in operands], [a.dtype.name for a in results]),
        elements=np.array([math.prod(a.shape) for a in (*operands, *results)], np.int64),
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


def signature(operands: Iterable[str], results: Iterable[str]) -> str:
    """Returns dtypes as handlers take them: "float32 bfloat16 -> float32"."""
    return " ".join([*operands, "->", *results])


def call_host(
    target: str,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: Mapping[int, int] | None = None,
    **attributes: Any,
) -> list[jax.Array]:
    """Calls the C++ handler that `native/bindings.cc` registers as `target`, as `launch` does.

    `attributes` are the handler's; numbers are NumPy scalars of the types it declares.
    """
    call = jax.ffi.ffi_call(target, list(results), input_output_aliases=dict(aliases or {}))
    return list(call(*operands, **attributes))


def cuda_compute_dtype(dtypes: Iterable[jnp.dtype]) -> jnp.dtype:
    """Returns float64 if one dtype is, else float32; Unsupported for one that no kernel takes."""
    dtypes = list(dtypes)
    for dtype in dtypes:
        if dtype.name not in FLOATING:
            raise Unsupported(f"no CUDA kernel takes {dtype.name} (only {', '.join(FLOATING)})")
    return compute_dtype(*dtypes)


def type_macros(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Returns the macro `<NAME>_TYPE` of each array."""
    return {f"{name}_TYPE": CUDA_TYPES[array.dtype.name] for name, array in arrays.items()}


def column_sum(launch: Callable[..., Any], target: "Target", partial: jax.Array) -> jax.Array:
    """Returns the sums over the blocks' rows of `partial`, in order, by the caller's `launch`."""
    count, columns = partial.shape
    vector = 16 // partial.dtype.itemsize
    if columns % vector or columns // (32 * vector) < target.multiprocessors * 3 // 4:
        vector = 1  # more blocks, each with a row for every warp
    warps = 16 if vector > 1 else 32
    (sums,) = launch(
        "column_sum.cu",
        "column_sum",
        [partial],
        [jax.ShapeDtypeStruct((columns,), partial.dtype)],
        target=target,
        macros={"COMPUTE_TYPE": CUDA_TYPES[partial.dtype.name], "VECTOR": vector, "WARPS": warps},
        grid=-(-columns // (32 * vector)),
        block=32 * warps,
        ints=(count, columns),
    )
    return sums


# ---------------------------------------------------------------- targets

OLDEST = 80  # compute capability 8.0: bfloat16 arithmetic and asynchronous copies
PORTABLE = f"compute_{OLDEST}"

# Shared memory one block may use, in KiB (CUDA C++ Programming Guide, compute capabilities). With
# what CUDA takes from every block it is that of a multiprocessor.
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99}
RESERVED_BYTES = 1 << 10


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU architecture, and the numbers that shape launches.

    `sm_90` and the like give machine code for that architecture alone, `compute_80` gives PTX that
    runs on it and on every later one.
    """

    arch: str  # NVRTC's name for the architecture
    multiprocessors: int  # their number, known or assumed
    name: str = ""  # the driver's name for it; empty if no device is attached

    @functools.cached_property
    def capability(self) -> int:
        """Compute capability times ten: the least the image runs on."""
        return int(re.sub(r"\D", "", self.arch))

    @functools.cached_property
    def portable(self) -> bool:
        """True for PTX, which the driver finishes for the device it finds."""
        return self.arch.startswith("compute_")

    @functools.cached_property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may use on every device the image runs on."""
        known = _SHARED_KIB.get(self.capability)
        return (min(_SHARED_KIB.values()) if self.portable or known is None else known) << 10

    def blocks_with(self, shared: int) -> int:
        """How many blocks with so many bytes of shared memory a multiprocessor has at once."""
        return (self.shared_memory + RESERVED_BYTES) // (shared + RESERVED_BYTES)

    @functools.cached_property
    def clusters(self) -> bool:
        """True where blocks can form clusters and read each other's shared memory."""
        return self.capability >= 90


def target_for(ctx: Any) -> Target:
    """Returns the target of a lowering: `ctx` is JAX's LoweringRuleContext.

    The attached device being lowered for; else `NORMFUSE_CUDA_ARCH`; else (export, text checks, no
    GPU) PTX for compute capability 8.0. Raises Unsupported for a GPU below that, ValueError if
    `NORMFUSE_CUDA_ARCH` names no architecture.
    """
    module = ctx.module_context
    for device in () if module.lowering_parameters.for_export else _gpus(module):
        capability = compute_capability(device)
        if capability is not None:
            return attached_target(device, capability)
    return named_target(os.environ.get("NORMFUSE_CUDA_ARCH") or PORTABLE)


@functools.cache
def named_target(name: str, said: str = "NORMFUSE_CUDA_ARCH") -> Target:
    """Returns the target called `sm_90`, `90`, `9.0`, `sm_90a` or, for PTX, `compute_90`.

    `said` is where the user named it. Raises ValueError for any other name, Unsupported for compute
    capability below 8.0.
    """
    match = re.fullmatch(r"(sm_|compute_|)(\d{1,2})(\.(?=\d))?(\d)([af]?)", name.strip())
    if match is None:
        raise ValueError(
            f"{said}={name!r} names no architecture: use sm_90 (or 9.0) for machine code, "
            "compute_90 for PTX"
        )
    kind, major, _, minor, variant = match.groups()
    capability = int(major) * 10 + int(minor)
    _require(capability, f"architecture {name}")
    return Target(f"{kind or 'sm_'}{capability}{variant}", _assumed(capability))


def compute_capability(device: Any) -> int | None:
    """Returns the compute capability times ten of a JAX device; None if it is no NVIDIA GPU."""
    match = re.fullmatch(r"(\d+)\.(\d)", str(getattr(device, "compute_capability", "")))
    return int(match[1]) * 10 + int(match[2]) if match and device.platform == "gpu" else None


def attached_target(device: Any, capability: int) -> Target:
    """Returns the target of a JAX device that has this compute capability, times ten.

    Raises Unsupported below 8.0.
    """
    _require(capability, f"{device.device_kind} ({device})")
    cores = int(getattr(device, "core_count", 0)) or _assumed(capability)
    return Target(f"sm_{capability}", cores, device.device_kind)


def _assumed(capability: int) -> int:
    """Returns the multiprocessors of A100, H100 and B200, or the middle of the range."""
    return {80: 108, 90: 132, 100: 148}.get(capability, 128)


def _require(capability: int, whose: str) -> None:
    if capability < OLDEST:
        raise Unsupported(
            f"{whose} has compute capability {capability / 10}, and the CUDA kernels need "
            f"{OLDEST / 10} or newer"
        )


def _gpus(module: Any) -> list[Any]:
    """Returns the GPUs that `module`, JAX's ModuleContext, is lowered for, as far as it says."""
    axes = module.axis_context
    mesh: Any = getattr(axes, "mesh", None)
    devices = list(getattr(axes, "device_assignment", None) or ())
    if isinstance(mesh, Mesh):  # an AbstractMesh, as of an Explicit mesh, has no devices
        devices += mesh.devices.flat
    gpus = [device for device in devices if device.platform == "gpu"]
    if not gpus and module.backend is not None:  # a described topology has no local devices
        devices = [*module.backend.local_devices(), *module.backend.devices()]
        gpus = [device for device in devices if device.platform == "gpu"]
    return gpus
