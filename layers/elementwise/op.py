"""Element-wise functions as operations: definition, loops in C++ and CUDA, sharding, derivative.

Operands that lack dimensions of the result are not expanded in memory: `placed` says which they
have, and a dimension that vmap adds is one more that an operand may lack.

Where a derivative is C++ text, the tangent is the kernel of a function linear in the tangents, and
its transpose that of one linear in the cotangents: nothing between is written to memory. What these
kernels cannot do (a derivative in plain JAX, or a second derivative) is put together from the
derivatives as operations of their own, and JAX differentiates that.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from ...native import cache, compiler, host_compiler, registry
from ...native.compiler import CompileError
from ...native.dtypes import NARROW
from ...native.implementation import Order, Unsupported
from ...native.kernel import Kernel
from ...native.launch import Target, call_host, launch, target_for
from ..core.op import Dims, Loose, Op, Split, match, vary, varying_axes
from . import code
from .code import THREADS, Function, Layout
from .function import Linear, Primal
from .signature import resolve

Places = tuple[tuple[int, ...], ...]
Types = tuple[tuple[str, str], ...]
_WORD = 16  # bytes that a thread loads at once


@dataclasses.dataclass(frozen=True)
class Loop:
    """All that is known of a call when it is traced.

    Attributes:
      function: applied to every element.
      placed: for each operand, the dimensions of the result it has.
      bound: the dtype of each template parameter.
      out: the results' dtypes.
      sequence: the operation's operands by their positions in the function; the first is the
        leading one.
    """

    function: Function
    placed: Places
    bound: Types
    out: tuple[str, ...]
    sequence: tuple[int, ...] = ()

    @property
    def op(self) -> str:
        """The function's name."""
        return self.function.name

    def restored(self, operands: Sequence[Any]) -> list[Any]:
        """Returns the operation's operands in the function's order."""
        found = dict(zip(self.sequence, operands, strict=True))
        return [found[k] for k in range(len(self.sequence))]


def result_shape(operands: Sequence, placed: Places) -> tuple[int, ...]:
    """The shape of the results, of operands that have the dimensions `placed` of it."""
    sizes = {d: n for a, have in zip(operands, placed) for d, n in zip(have, a.shape)}
    return tuple(sizes[d] for d in range(len(sizes)))


def compute_dtype(type_: str, bound: Types) -> jnp.dtype:
    """What a value of a C++ type is computed in: float32 for half precision."""
    name = resolve(type_, dict(bound))
    return jnp.dtype("float32" if name in NARROW else name)


def spread(operand: jax.Array, have: Sequence[int], ndim: int) -> jax.Array:
    """`operand` with a dimension of size 1 for each of `ndim` that it lacks."""
    return jnp.expand_dims(operand, [d for d in range(ndim) if d not in have])


def define(loop: Loop, *operands: jax.Array) -> list[jax.Array]:
    """The user's definition on the operands, in the dtypes that the function computes in."""
    function, placed, bound, out = loop.function, loop.placed, loop.bound, loop.out
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


def layout_of(loop: Loop, operands: Sequence[Any]) -> tuple[Layout, tuple[int, ...]]:
    """Returns what a loop over these operands is compiled for, and the sizes it is given."""
    placed, bound, out = loop.placed, loop.bound, loop.out
    shape = result_shape(operands, placed)
    if not all(isinstance(n, int) for n in shape):
        raise Unsupported("a loop is compiled for shapes that are known, and this one is symbolic")
    sizes, masks = code.collapse(shape, placed)
    stored = tuple(a.dtype.name for a in operands) + out
    moved = [jnp.dtype(t).itemsize for t, m in zip(stored, (*masks, *[1] * len(out))) if m & 1]
    vector = max(1, min(_WORD // min(moved), 2 * _WORD // max(moved)))
    if any(mask not in (0, (1 << len(sizes)) - 1) for mask in masks):
        vector = math.gcd(vector, sizes[-1])  # a thread's elements are of one row
    packs = code.PACKS
    wide = math.prod(shape) + THREADS * vector * packs >= 2**32
    return Layout(bound, stored, masks, len(sizes), vector, packs, wide), sizes


def _types(loop: Loop, operands: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    shape = result_shape(operands, loop.placed)
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(name)) for name in loop.out]


def _on_cpu(arch: str, loop: Loop, *operands: jax.Array) -> list[jax.Array]:
    layout, sizes = layout_of(loop, operands)
    with _explained(loop.function):
        image = _library(arch, loop.function, layout)
    return call_host(
        "normfuse_elementwise",
        operands,
        _types(loop, operands),
        image=np.frombuffer(image.data, np.uint8),
        digest=image.digest,
        sizes=np.array(sizes, np.int64),
    )


def _library(arch: str, function: Function, layout: Layout) -> compiler.Image:
    layout = Layout(layout.bound, layout.stored, layout.masks, layout.dimensions)
    text = code.host_source(function, layout)
    return host_compiler.library(f"elementwise_{function.name}", text, arch)


def _kernel_source(function: Function, layout: Layout) -> compiler.Source:
    if code.uses_complex(layout) and compiler.standard_library() is None:
        raise Unsupported(
            "complex functions need CUDA's C++ headers (cuda/std/complex), which are not "
            "installed: `pip install nvidia-cuda-cccl`"
        )
    return code.cuda_source(function, layout)


def _host_arch(ctx: Any) -> str:
    exported = ctx.module_context.lowering_parameters.for_export
    return host_compiler.PORTABLE if exported else host_compiler.host()


def _on_cuda(target: Target, loop: Loop, *operands: jax.Array) -> list[jax.Array]:
    layout, sizes = layout_of(loop, operands)
    count = math.prod(sizes)
    with _explained(loop.function):
        return launch(
            _kernel_source(loop.function, layout),
            f"elementwise_{loop.function.name}",
            operands,
            _types(loop, operands),
            target=target,
            grid=-(-count // layout.tile),
            block=THREADS,
            ints=(count, *sizes),
        )


def _compile_early(ctx: Any, loop: Loop, order: Order) -> Order:
    """Compiles what a lowering for one device would, so that a mistake in the text is raised here.

    Where a mesh has Auto axes, XLA asks for a device's share later, and would wrap the error.
    """
    for platform in ctx.module_context.platforms:
        try:
            layout, _ = layout_of(loop, loop.restored(ctx.avals_in))
            with _explained(loop.function):
                if platform == "cpu":
                    _library(_host_arch(ctx), loop.function, layout)
                elif platform == "cuda":
                    source = _kernel_source(loop.function, layout)
                    cache.get(source, {}, target_for(ctx).arch)
        except Unsupported:
            continue  # the lowering says what serves instead
    return order


class _explained:
    """Adds the lines of the user's text that a compiler's log names."""

    def __init__(self, function: Function):
        self.pieces = dict(function.pieces)
        self.name = function.name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, CompileError):
            raise CompileError(explain(str(error), self.pieces)) from None


def explain(log: str, pieces: dict[str, str]) -> str:
    """Returns `log`, with each line of `pieces` that it names."""
    shown = {}
    for file, number in re.findall(r"^(<[^>\n]*>)[(:](\d+)", log, re.MULTILINE):
        lines = pieces.get(file, "").splitlines()
        if 0 < int(number) <= len(lines):
            shown[file, int(number)] = lines[int(number) - 1]
    quoted = [f"  {file} line {number}:  {line.strip()}" for (file, number), line in shown.items()]
    return "\n".join([log.rstrip(), *quoted])


def _or_explain(serve: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `serve`; where it cannot and no definition can stand in, one error that says so."""

    @functools.wraps(serve)
    def checked(target: Any, loop: Loop, *operands: jax.Array) -> list[jax.Array]:
        if 0 in result_shape(operands, loop.placed):
            return [jnp.zeros(t.shape, t.dtype) for t in _types(loop, operands)]
        try:
            return serve(target, loop, *operands)
        except Unsupported as error:
            if loop.function.definition is not None:
                raise
            raise NotImplementedError(
                f"{loop.op}: {error}. Pass definition=, the function in plain JAX, to "
                "elementwise, and it will serve where C++ cannot."
            ) from error

    return checked


class _Compiled(Kernel):
    """A kernel whose C++ is compiled for the processor at hand too."""

    def native(self, platform: str | None, ctx: Any) -> Callable[..., Any]:
        if platform == "cpu":
            return functools.partial(_or_explain(_on_cpu), _host_arch(ctx))
        return super().native(platform, ctx)

    def fused_by_xla(self, platform: str | None) -> bool:
        return False  # the user's own C++ serves on CPUs: report it if it cannot


def _undefined_types(*operands: Any, name: str, shape: Any, out: Any) -> list[Any]:
    del name
    like = operands[0]
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return [
        like.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)
        for dtype in out
    ]


def _missing(ctx: Any, *values: Any, name: str, **_: Any) -> None:
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
kernel = _Compiled("elementwise_loop", define, {"cuda": _or_explain(_on_cuda)})


def call(
    function: Function,
    operands: Sequence[jax.Array],
    placed: Places,
    *,
    bound: Types,
    out: tuple[str, ...],
    order: Order,
) -> list[jax.Array]:
    """Applies `function` to operands that have the dimensions `placed` of the result."""
    shape = result_shape(operands, placed)
    whole = [k for k, have in enumerate(placed) if len(have) == len(shape)]
    if not whole:  # each lacks a dimension: the largest is expanded
        operands, largest = list(operands), max(operands, key=lambda a: a.size)
        k = next(k for k, a in enumerate(operands) if a is largest)
        expanded = spread(largest, placed[k], len(shape))
        operands[k], whole = jnp.broadcast_to(expanded, shape), [k]
        placed = (*placed[:k], tuple(range(len(shape))), *placed[k + 1 :])
    split = [k for k in whole if any(jax.typeof(operands[k]).sharding.spec)]
    lead = (split or whole)[0]
    sequence = (lead, *[k for k in range(len(placed)) if k != lead])
    first = vary(operands[lead], varying_axes(*operands))
    matched = [first, *[match(operands[k], first, placed[k]) for k in sequence[1:]]]
    return elementwise(Loop(function, placed, bound, out, sequence), *matched, order=order)


# ---------------------------------------------------------------- the operation


def define_whole(loop: Loop, *operands: jax.Array) -> list[jax.Array]:
    """The definition; without one the kernel on whole arrays, which XLA gathers for it."""
    restored = loop.restored(operands)
    return kernel(loop, *restored) if loop.function.definition is None else define(loop, *restored)


def _body(loop: Loop, split: Split, *operands: jax.Array, order: Order) -> list[jax.Array]:
    del split
    return kernel(loop, *loop.restored(operands), order=order)


def _dims(loop: Loop, ndim: int) -> Dims:
    whole = tuple(range(ndim))
    placed = [loop.placed[k] for k in loop.sequence]
    inputs = [d if i == 0 or d == whole else Loose(d) for i, d in enumerate(placed)]
    return tuple(inputs), (whole,) * len(loop.out)


def _batch(op: Op, args: Any, batched: Any, *, spec: Loop, order: Order) -> Any:
    """The batch dimension is one more of the result's; operands without it lack it."""
    del op
    placed, operands, batched = spec.placed, spec.restored(args), spec.restored(batched)
    ndim = max(map(len, placed))
    at = next((b for b, have in zip(batched, placed) if b is not None and len(have) == ndim), 0)
    moved, new = [], []
    for operand, b, have in zip(operands, batched, placed):
        shifted = tuple(d + (d >= at) for d in have)
        if b is not None:
            place = sum(d < at for d in have)
            operand = jnp.moveaxis(operand, b, place)
            shifted = (*shifted[:place], at, *shifted[place:])
        moved.append(operand)
        new.append(shifted)
    results = call(spec.function, moved, tuple(new), bound=spec.bound, out=spec.out, order=order)
    return results, [at] * len(results)


# ---------------------------------------------------------------- derivative


def _jvp(primals: Any, tangents: Any, *, spec: Loop, order: Order) -> Any:
    function, placed, out = spec.function, spec.placed, spec.out
    options = {"bound": spec.bound, "order": order}
    primals, tangents = spec.restored(primals), spec.restored(tangents)
    results = call(function, primals, placed, out=out, **options)
    moving = tuple(k for k, t in enumerate(tangents) if type(t) is not ad.Zero)
    outputs = tuple(j for j, dtype in enumerate(out) if jnp.issubdtype(dtype, jnp.inexact))
    moves: list[Any] = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    if moving and outputs:
        rule = _primal_jvp if isinstance(function, Primal) else _linear_jvp
        found = rule(function, primals, tangents, moving, outputs, placed, out, options)
        for j, tangent in zip(outputs, found, strict=True):
            moves[j] = tangent
    return results, moves


def _primal_jvp(function, primals, tangents, moving, outputs, placed, out, options):
    if function.differentiable is not None:
        plain = functools.partial(_plain, function.differentiable, function, placed, out, options)
        found = _jvp_of(plain, primals, tangents, moving)
        return [found[j] for j in outputs]
    _same_kind(function, moving, outputs, options["bound"])
    types = tuple(out[j] for j in outputs)
    if all(isinstance(function.partial(k), tuple) for k in moving):
        operands = [*primals, *[tangents[k] for k in moving]]
        all_dims = (*placed, *[placed[k] for k in moving])
        return call(function.tangent(moving, outputs), operands, all_dims, out=types, **options)
    sources = [(k, tangents[k], placed[k]) for k in moving]
    return _products(function, primals, placed, sources, outputs, False, types, options)


def _linear_jvp(function, primals, tangents, moving, outputs, placed, out, options):
    base = len(function.base.operands)
    if all(k >= base for k in moving):
        operands = [*primals[:base], *[tangents[k] for k in moving]]
        derived = function.only([k - base for k in moving])
        all_dims = (*placed[:base], *[placed[k] for k in moving])
        return call(derived, operands, all_dims, out=out, **options)
    _same_kind(function.base, [k for k in moving if k < base], function.outputs, options["bound"])

    def plain(*operands):
        names = function.outputs if function.transposed else function.moving
        sources = list(zip(names, operands[base:], placed[base:], strict=True))
        targets = function.moving if function.transposed else function.outputs
        return _products(
            function.base,
            operands[:base],
            placed[:base],
            sources,
            targets,
            function.transposed,
            out,
            options,
        )

    found = _jvp_of(plain, primals, tangents, moving)
    return [found[j] for j in outputs]


def _products(function, operands, placed, sources, targets, transposed, out, options):
    """Σ derivative · source, for each target: of operations that JAX can differentiate."""
    shape = result_shape(operands, placed)
    slopes = {}

    def slope(k, j):
        if k not in slopes:
            slopes[k] = _slopes(function, k, operands, placed, options)
        return slopes[k][j]

    results = []
    for target, dtype in zip(targets, out, strict=True):
        terms = []
        for source, array, have in sources:
            factor = slope(*((target, source) if transposed else (source, target)))
            terms.append(factor * spread(array, have, len(shape)).astype(factor.dtype))
        results.append(functools.reduce(jnp.add, terms).astype(dtype))
    return results


def _slopes(function, k, operands, placed, options):
    """The derivative of each result with respect to operand k, in what they are computed in."""
    partial = function.partial(k)
    types = tuple(compute_dtype(t, options["bound"]).name for t, _ in function.results)
    if not isinstance(partial, tuple):
        return _plain(partial, function, placed, types, options, *operands)
    return [
        call(one, operands, placed, out=(dtype,), **options)[0]
        for one, dtype in zip(partial, types, strict=True)
    ]


def _plain(plain, function, placed, out, options, *operands):
    """A function in plain JAX on the operands, in the dtypes that the C++ computes in."""
    shape = result_shape(operands, placed)
    wide = [
        spread(a, have, len(shape)).astype(compute_dtype(type_, options["bound"]))
        for a, have, (type_, _) in zip(operands, placed, function.operands, strict=True)
    ]
    results = [jnp.asarray(r) for r in plain(*wide)]
    return [jnp.broadcast_to(r, shape).astype(t) for r, t in zip(results, out, strict=True)]


def _jvp_of(plain, primals, tangents, moving):
    def of(*moved):
        operands = list(primals)
        for k, one in zip(moving, moved, strict=True):
            operands[k] = one
        return plain(*operands)

    at = tuple(primals[k] for k in moving)
    return jax.jvp(of, at, tuple(tangents[k] for k in moving))[1]


def _same_kind(function, moving, outputs, bound):
    """Products of numbers are derivatives of real functions of reals, and of holomorphic ones."""
    kinds = {compute_dtype(function.operands[k][0], bound).kind for k in moving}
    kinds |= {compute_dtype(function.results[j][0], bound).kind for j in outputs}
    if len(kinds) > 1:
        raise TypeError(
            f"{function.name} takes and returns both real and complex numbers, and has no "
            "derivative that is one number: pass elementwise derivative=, the whole function in "
            "plain JAX"
        )


def _transpose(cts: Any, *args: Any, spec: Loop, order: Order) -> list[Any]:
    function, placed, bound = spec.function, spec.placed, spec.bound
    if not isinstance(function, Linear):
        raise NotImplementedError(f"{function.name} is not linear and cannot be transposed")
    operands, base = spec.restored(args), len(function.base.operands)
    linear = [k for k, a in enumerate(operands) if ad.is_undefined_primal(a)]
    present = [j for j, ct in enumerate(cts) if type(ct) is not ad.Zero]
    if not present or not linear:
        return [None] * len(args)
    whole = tuple(range(jax.typeof(cts[present[0]]).ndim))
    types = tuple(  # of what is summed below: what it was computed in
        a.dtype.name if have == whole else compute_dtype(type_, bound).name
        for a, have, type_ in (
            (operands[k].aval, placed[k], function.operands[k][0]) for k in linear
        )
    )
    results = call(
        function.transpose([k - base for k in linear], present),
        [*operands[:base], *[cts[j] for j in present]],
        (*placed[:base], *[whole] * len(present)),
        bound=bound,
        out=types,
        order=order,
    )
    found = {}
    for k, result in zip(linear, results, strict=True):
        if placed[k] != whole:
            result = jnp.sum(result, [d for d in whole if d not in placed[k]])
        found[k] = result.astype(operands[k].aval.dtype)
    return [found.get(k) for k in spec.sequence]


elementwise = Op(
    "elementwise",
    define_whole,
    dims=_dims,
    body=_body,
    batch=_batch,
    before=_compile_early,
    jvp=_jvp,
    transpose=_transpose,
)
