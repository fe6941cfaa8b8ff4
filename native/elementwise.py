"""A scalar function on every element: one device's share, by NVRTC or the system's C++ compiler."""

import functools
import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import cache, compiler, device, elementwise_code, host_compiler, registry
from .compiler import CompileError
from .elementwise_code import THREADS, Function, Layout
from .elementwise_signature import resolve
from .fallback import Unsupported
from .kernel import Kernel
from .launch import launch

Dims = tuple[tuple[int, ...], ...]
Types = tuple[tuple[str, str], ...]
_WORD = 16  # bytes that a thread loads at once
_HALVES = ("float16", "bfloat16")


def result_shape(operands: Sequence, placed: Dims) -> tuple[int, ...]:
    """The shape of the results, of operands that have the dimensions `placed` of it."""
    sizes = {d: n for a, have in zip(operands, placed) for d, n in zip(have, a.shape)}
    return tuple(sizes[d] for d in range(len(sizes)))


def compute_dtype(type_: str, bound: Types) -> jnp.dtype:
    """What a value of a C++ type is computed in: float32 for half precision."""
    name = resolve(type_, dict(bound))
    return jnp.dtype("float32" if name in _HALVES else name)


def spread(operand: jax.Array, have: Sequence[int], ndim: int) -> jax.Array:
    """`operand` with a dimension of size 1 for each of `ndim` that it lacks."""
    return jnp.expand_dims(operand, [d for d in range(ndim) if d not in have])


def definition(
    *operands: jax.Array, function: Function, placed: Dims, bound: Types, out: tuple[str, ...]
) -> list[jax.Array]:
    """The user's definition on the operands, in the dtypes that the function computes in."""
    shape = result_shape(operands, placed)
    if function.definition is None:
        return _undefined.bind(*operands, name=function.name, shape=shape, out=out)
    wide = [
        spread(a, have, len(shape)).astype(compute_dtype(type_, bound))
        for a, have, (type_, _) in zip(operands, placed, function.operands, strict=True)
    ]
    results = function.definition(*wide)
    return [
        jnp.broadcast_to(jnp.asarray(r), shape).astype(dtype)
        for r, dtype in zip(results, out, strict=True)
    ]


def layout_of(
    operands: Sequence, placed: Dims, bound: Types, out: tuple[str, ...]
) -> tuple[Layout, tuple[int, ...]]:
    """What a loop over these operands is compiled for, and the sizes it is given."""
    shape = result_shape(operands, placed)
    if not all(isinstance(n, int) for n in shape):
        raise Unsupported("a loop is compiled for shapes that are known, and this one is symbolic")
    sizes, masks = elementwise_code.collapse(shape, placed)
    stored = tuple(a.dtype.name for a in operands) + out
    moved = [jnp.dtype(t).itemsize for t, m in zip(stored, (*masks, *[1] * len(out))) if m & 1]
    vector = max(1, min(_WORD // min(moved), 2 * _WORD // max(moved)))
    if any(mask not in (0, (1 << len(sizes)) - 1) for mask in masks):
        vector = math.gcd(vector, sizes[-1])  # a thread's elements are of one row
    packs = elementwise_code.PACKS
    wide = math.prod(shape) + THREADS * vector * packs >= 2**32
    return Layout(bound, stored, masks, len(sizes), vector, packs, wide), sizes


def _types(operands, placed, out):
    shape = result_shape(operands, placed)
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for name in out]


def _cpu(arch: str, *operands, function, placed, bound, out):
    layout, sizes = layout_of(operands, placed, bound, out)
    types = _types(operands, placed, out)
    with _explained(function):
        image = _library(arch, function, layout)
    return jax.ffi.ffi_call("normfuse_elementwise", types)(
        *operands,
        image=np.frombuffer(image.data, np.uint8),
        digest=image.digest,
        sizes=np.array(sizes, np.int64),
    )


def _library(arch, function, layout):
    layout = Layout(layout.bound, layout.stored, layout.masks, layout.dimensions)
    text = elementwise_code.host_source(function, layout)
    return host_compiler.library(f"elementwise_{function.name}", text, arch)


def _kernel_source(function, layout):
    if elementwise_code.uses_complex(layout) and compiler.standard_library() is None:
        raise Unsupported(
            "complex functions need CUDA's C++ headers (cuda/std/complex), which are not "
            "installed: `pip install nvidia-cuda-cccl`"
        )
    return elementwise_code.cuda_source(function, layout)


def _host_arch(ctx) -> str:
    exported = ctx.module_context.lowering_parameters.for_export
    return host_compiler.PORTABLE if exported else host_compiler.host()


def _cuda(target, *operands, function, placed, bound, out):
    layout, sizes = layout_of(operands, placed, bound, out)
    count = math.prod(sizes)
    with _explained(function):
        return launch(
            _kernel_source(function, layout),
            f"elementwise_{function.name}",
            operands,
            _types(operands, placed, out),
            target=target,
            grid=-(-count // layout.tile),
            block=THREADS,
            ints=(count, *sizes),
        )


def compile_for(ctx, avals, *, function, placed, bound, out) -> None:
    """Compiles what a lowering for one device would, so that a mistake in the text is raised here.

    Where a mesh has Auto axes, XLA asks for a device's share later, and would wrap the error.
    """
    for platform in ctx.module_context.platforms:
        try:
            layout, _ = layout_of(avals, placed, bound, out)
            with _explained(function):
                if platform == "cpu":
                    _library(_host_arch(ctx), function, layout)
                elif platform == "cuda":
                    source = _kernel_source(function, layout)
                    cache.get(source, {}, device.target_for(ctx).arch)
        except Unsupported:
            continue  # the lowering says what serves instead


class _explained:
    """Adds to a compiler's log the lines of the user's text that it speaks of."""

    def __init__(self, function: Function):
        self.pieces = dict(function.pieces)
        self.name = function.name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, CompileError):
            raise CompileError(explain(str(error), self.pieces)) from None


def explain(log: str, pieces: dict[str, str]) -> str:
    """`log`, with each line of `pieces` that it speaks of."""
    shown = {}
    for file, number in re.findall(r"^(<[^>\n]*>)[(:](\d+)", log, re.MULTILINE):
        lines = pieces.get(file, "").splitlines()
        if 0 < int(number) <= len(lines):
            shown[file, int(number)] = lines[int(number) - 1]
    quoted = [f"  {file} line {number}:  {line.strip()}" for (file, number), line in shown.items()]
    return "\n".join([log.rstrip(), *quoted])


def _served(serve):
    """`serve`; where it cannot and there is no definition to stand in, one error that says so."""

    @functools.wraps(serve)
    def checked(target, *operands, function, placed, bound, out):
        if 0 in result_shape(operands, placed):
            return [jnp.zeros(t.shape, t.dtype) for t in _types(operands, placed, out)]
        try:
            return serve(target, *operands, function=function, placed=placed, bound=bound, out=out)
        except Unsupported as error:
            if function.definition is not None:
                raise
            raise NotImplementedError(
                f"{function.name}: {error}. Pass definition=, the function in plain JAX, to "
                "elementwise, and it will serve where C++ cannot."
            ) from error

    return checked


class _Elementwise(Kernel):
    """A kernel whose C++ is compiled for the processor at hand too."""

    def _native(self, platform, ctx):
        if platform == "cpu":
            return functools.partial(_served(_cpu), _host_arch(ctx))
        return super()._native(platform, ctx)

    def _is_one_loop(self, platform):
        return False  # the user's own C++ serves on CPUs: that it cannot is worth a word


def _undefined_types(*operands, name, shape, out):
    del name
    like = operands[0]
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return [
        like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)
        for dtype in out
    ]


def _missing(ctx, *values, name, **_):
    where = "/".join(ctx.module_context.platforms)
    raise NotImplementedError(
        f"{name}: C++ is compiled for CPUs and NVIDIA GPUs, not for {where}. Pass definition=, the "
        "function in plain JAX, to elementwise."
    )


_undefined = Primitive("normfuse_undefined")
_undefined.multiple_results = True
_undefined.def_abstract_eval(_undefined_types)
mlir.register_lowering(_undefined, _missing)

registry.register()
kernel = _Elementwise("elementwise", definition, cuda=_served(_cuda))
