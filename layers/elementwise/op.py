"""Element-wise functions as operations: definition, loops in C++ and CUDA, sharding, derivative.

Operands that lack dimensions of the result are not expanded in memory: `placed` says which they
have, and a dimension that vmap adds is one more that an operand may lack.

Where a derivative is C++ text, the tangent and the gradient are each one kernel. Otherwise, and for
second derivatives, JAX differentiates a function in plain JAX.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import ad

from ...native import host_compiler
from ...native.compiler import Image, image_of
from ...native.dtypes import NARROW
from ...native.implementation import Order, Unsupported
from ...native.kernel import Kernel
from ...native.launch import Target, call_host, launch, target_for
from ..core.derivative import tangents_of
from ..core.op import (
    Batching,
    Derivative,
    Dims,
    Loose,
    Op,
    Placement,
    jvp_along,
    match,
    moves,
    vary,
    varying_axes,
)
from . import code
from .code import THREADS, Function, Layout, Pairs
from .function import Plain, Primal
from .signature import resolve

Arrays = Sequence[Array]
Results = list[Array]
_WORD = 16  # bytes that a thread loads at once


@dataclasses.dataclass(frozen=True)
class Loop:
    """The static description of a call."""

    function: Function  # applied to every element
    placed: tuple[tuple[int, ...], ...]  # for each operand, the dimensions of the result it has
    bound: Pairs  # the dtype of each template parameter
    out: tuple[str, ...]  # the results' dtypes
    lead: int = 0  # the operand whose sharding decides; it has every dimension

    @property
    def op(self) -> str:
        return self.function.name

    def shape(self, operands: Sequence[Any]) -> tuple[int, ...]:
        sizes = {d: n for a, have in zip(operands, self.placed) for d, n in zip(have, a.shape)}
        return tuple(sizes[d] for d in range(len(sizes)))

    def types(self, operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(self.shape(operands), jnp.dtype(name)) for name in self.out]

    def of(self, function: Function, placed: Sequence[Any], out: Sequence[str]) -> "Loop":
        """Returns the loop of another function, of operands and results of its own."""
        return Loop(function, tuple(placed), self.bound, tuple(out))


def compute_dtype(type_: str, bound: Pairs) -> jnp.dtype:
    """Returns the dtype that computes a value of a C++ type: float32 for half precision."""
    name = resolve(type_, dict(bound))
    return jnp.dtype("float32" if name in NARROW else name)


def spread(operand: Array, have: Sequence[int], ndim: int) -> Array:
    """Returns `operand` with a dimension of size 1 for each of `ndim` that it lacks."""
    return jnp.expand_dims(operand, [d for d in range(ndim) if d not in have])


def by_jax(plain: Plain, loop: Loop, *operands: Array) -> Results:
    """Returns the results of a function in plain JAX, in the dtypes that the C++ computes in."""
    shape = loop.shape(operands)
    wide = [
        spread(a, have, len(shape)).astype(compute_dtype(type_, loop.bound))
        for a, have, (type_, _) in zip(operands, loop.placed, loop.function.operands, strict=True)
    ]
    results = zip(plain(*wide), loop.out, strict=True)
    return [jnp.broadcast_to(jnp.asarray(r), shape).astype(dtype) for r, dtype in results]


def define(loop: Loop, *operands: Array) -> Results:
    if loop.function.definition is None:
        raise NotImplementedError(
            f"{loop.op}: C++ is compiled for CPUs and NVIDIA GPUs, not for this platform. Pass "
            "definition=, the function in plain JAX, to elementwise."
        )
    return by_jax(loop.function.definition, loop, *operands)


# ---------------------------------------------------------------- one device's share


def layout_of(loop: Loop, operands: Sequence[Any]) -> tuple[Layout, tuple[int, ...]]:
    """Returns the layout of a loop over these operands, and its run-time sizes."""
    shape = loop.shape(operands)
    if not all(isinstance(n, int) for n in shape):
        raise Unsupported("a loop is compiled for shapes that are known, and this one is symbolic")
    sizes, masks = code.collapse(shape, loop.placed)
    stored = tuple(a.dtype.name for a in operands) + loop.out
    results = [1] * len(loop.out)
    moved = [jnp.dtype(t).itemsize for t, mask in zip(stored, (*masks, *results)) if mask & 1]
    vector = max(1, min(_WORD // min(moved), 2 * _WORD // max(moved)))
    if any(mask not in (0, (1 << len(sizes)) - 1) for mask in masks):
        vector = math.gcd(vector, sizes[-1])  # a thread's elements are of one row
    layout = Layout(loop.bound, stored, masks, len(sizes), vector)
    wide = math.prod(shape) + layout.tile >= 2**32
    return dataclasses.replace(layout, wide=wide), sizes


def _explained(body: Callable[..., Any], loop: Loop, *operands: Array) -> Results:
    """Runs `body`; raises one clear error if neither it nor a definition can serve."""
    if 0 in loop.shape(operands):
        return [jnp.zeros(t.shape, t.dtype) for t in loop.types(operands)]
    try:
        return body(loop, *operands)
    except Unsupported as error:
        if loop.function.definition is not None:
            raise
        raise NotImplementedError(
            f"{loop.op}: {error}. Pass definition=, the function in plain JAX, to elementwise, "
            "and it will serve where C++ cannot."
        ) from error


def _on_cpu(arch: str, loop: Loop, *operands: Array) -> Results:
    layout, sizes = layout_of(loop, operands)
    image = _library(arch, loop, layout)
    data, lengths = np.frombuffer(image.data, np.uint8), np.array(sizes, np.int64)
    return call_host(
        "normfuse_elementwise",
        operands,
        loop.types(operands),
        image=data,
        digest=image.digest,
        layout=str(layout),
        sizes=lengths,
    )


def _on_cuda(target: Target, loop: Loop, *operands: Array) -> Results:
    layout, sizes = layout_of(loop, operands)
    source, types = code.cuda_source(loop.function, layout), loop.types(operands)
    ints = math.prod(sizes), *sizes
    grid = -(-ints[0] // layout.tile)
    return launch(
        source, source.name, operands, types, target=target, grid=grid, block=THREADS, ints=ints
    )


def _library(arch: str, loop: Loop, layout: Layout) -> Image:
    text = code.host_source(loop.function, layout)
    # These call the C library for each element, so that no loop with them is vectorised.
    rewritten = any(re.search(r"(?:atan|pow)", piece) for _, piece in loop.function.pieces)
    flags = () if rewritten else (host_compiler.WITHOUT_ERRNO,)
    return host_compiler.library(f"elementwise_{loop.op}", text, arch, *flags)


def _host_arch(ctx: Any) -> str:
    exported = ctx.module_context.lowering_parameters.for_export
    return host_compiler.PORTABLE if exported else host_compiler.host()


class _Compiled(Kernel):
    """A kernel whose C++ is compiled for the processor at hand too."""

    def native(self, platform: str | None, ctx: Any) -> Callable[..., Any]:
        of_host = functools.partial(_on_cpu, _host_arch(ctx))
        body = of_host if platform == "cpu" else super().native(platform, ctx)
        return functools.partial(_explained, body)

    def fused_by_xla(self, platform: str | None) -> bool:
        return False  # the user's own C++ serves on CPUs: report it if it cannot


kernel = _Compiled(
    "elementwise_loop",
    define,
    {"cuda": _on_cuda},
    types=lambda loop, *operands: loop.types(operands),
)


# ---------------------------------------------------------------- the operation


def call(loop: Loop, operands: Arrays, order: Order) -> Results:
    """Applies the loop's function to operands that have the dimensions `placed` of the result."""
    operands, placed, shape = list(operands), list(loop.placed), loop.shape(operands)
    whole = [k for k, have in enumerate(placed) if len(have) == len(shape)]
    if not whole:  # each lacks a dimension: the largest is expanded
        k = max(range(len(operands)), key=lambda k: operands[k].size)
        operands[k] = jnp.broadcast_to(spread(operands[k], placed[k], len(shape)), shape)
        placed[k], whole = tuple(range(len(shape))), [k]
    split = [k for k in whole if any(jax.typeof(operands[k]).sharding.spec)]
    lead = (split or whole)[0]
    first = operands[lead] = vary(operands[lead], varying_axes(*operands))
    matched = [match(a, first, have) for a, have in zip(operands, placed)]
    loop = dataclasses.replace(loop, placed=tuple(placed), lead=lead)
    return elementwise(loop, *matched, order=order)


def _definition(loop: Loop, *operands: Array) -> Results:
    """The definition; without one the kernel on whole arrays, which XLA gathers for it."""
    served_by = kernel if loop.function.definition is None else define
    return served_by(loop, *operands)


def _dims(loop: Loop, *ndims: int) -> Dims:
    whole = tuple(range(ndims[loop.lead]))
    inputs = [whole if have == whole else Loose(have) for have in loop.placed]
    return inputs, [whole] * len(loop.out)


def _batch(op: Op, args: Any, batched: Any, *, spec: Loop, order: Order) -> Any:
    """The batch dimension becomes one of the result's, which some operands lack."""
    del op
    ndim = max(map(len, spec.placed))
    whole = [b for b, have in zip(batched, spec.placed) if b is not None and len(have) == ndim]
    at = whole[0] if whole else 0
    moved, placed = [], []
    for operand, b, have in zip(args, batched, spec.placed):
        shifted = tuple(d + (d >= at) for d in have)
        if b is not None:
            place = sum(d < at for d in have)
            operand = jnp.moveaxis(operand, b, place)
            shifted = (*shifted[:place], at, *shifted[place:])
        moved.append(operand)
        placed.append(shifted)
    results = call(spec.of(spec.function, placed, spec.out), moved, order)
    return results, [at] * len(results)


def _compile_early(ctx: Any, loop: Loop, order: Order) -> Order:
    """Compiles the kernels of one device now, so that a mistake in the text is raised here.

    Where a mesh has Auto axes, XLA asks for a device's share later, and would wrap the error.
    """
    for platform in ctx.module_context.platforms:
        with contextlib.suppress(Unsupported):  # the lowering reports it, and its substitute
            layout, _ = layout_of(loop, ctx.avals_in)
            if platform == "cpu":
                _library(_host_arch(ctx), loop, layout)
            elif platform == "cuda":
                image_of(code.cuda_source(loop.function, layout), {}, target_for(ctx).arch)
    return order


# ---------------------------------------------------------------- derivative


def _tangent(loop: Loop, operands: Arrays, tangents: Arrays, *, order: Order) -> Results:
    """Returns the tangent of the result of a function whose derivative is C++ text."""
    moving = [k for k, t in enumerate(tangents) if t is not None]
    function: Any = loop.function
    placed = [*loop.placed, *[loop.placed[k] for k in moving]]
    tangent = loop.of(function.derived("tangent", tuple(moving)), placed, loop.out)
    return call(tangent, [*operands, *[tangents[k] for k in moving]], order)


def _gradients(
    loop: Loop, cts: Any, operands: Any, _: Any, wanted: Sequence[bool], *, order: Order
) -> list[Any]:
    """The gradients of the operands, by one kernel and the sums of broadcast ones."""
    (ct,), moving = cts, [k for k, wants in enumerate(wanted) if wants]
    function: Any = loop.function
    every = tuple(range(ct.ndim))
    types = [  # compute dtypes of the arrays summed below
        operands[k].dtype.name
        if loop.placed[k] == every
        else compute_dtype(function.operands[k][0], loop.bound).name
        for k in moving
    ]
    gradient = function.derived("gradient", tuple(moving))
    results = call(loop.of(gradient, (*loop.placed, every), types), [*operands, ct], order)
    gradients: list[Any] = [None] * len(wanted)
    for k, result in zip(moving, results, strict=True):
        absent = [d for d in every if d not in loop.placed[k]]
        gradients[k] = jnp.sum(result, absent) if absent else result
    return gradients


def _jvp(primals: Any, tangents: Any, *, spec: Loop, order: Order) -> Any:
    results, function = call(spec, primals, order), spec.function
    if not jnp.issubdtype(spec.out[0], jnp.inexact):
        return results, [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    is_primal = isinstance(function, Primal)
    plain = function.differentiable if is_primal else function.definition
    if plain is not None:
        return results, jvp_along(functools.partial(by_jax, plain, spec), primals, tangents)[1]
    if not is_primal:
        name = function.name.rpartition("_")[0]
        raise TypeError(
            f"{name} has first derivatives only, since these are C++ text; for second ones pass "
            "elementwise definition= too, the function in plain JAX"
        )
    for k, tangent in enumerate(tangents):
        if moves(tangent):
            function.partial(k)  # raises an error where there is none
    dresults = tangents_of(elementwise, _gradients, spec, primals, tangents, results, order=order)
    return results, dresults


elementwise = Op(
    "elementwise",
    _definition,
    Placement(
        _dims,
        lambda loop, split, *operands, order: kernel(loop, *operands, order=order),
        leads=lambda loop: (loop.lead,),
    ),
    Batching(rule=_batch),
    Derivative(jvp=_jvp, tangent=_tangent),
    types=lambda loop, *operands: loop.types(operands),
    before=_compile_early,
)
