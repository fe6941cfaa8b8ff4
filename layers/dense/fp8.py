"""The product of a dense layer in FP8: three products of quantized operands, forward and backward.

    y = s_x s_w (q_x · q_w)      dx = s_g s_w (q_g · q_wᵀ)      dW = s_x s_g (q_xᵀ · q_g)

with x ≈ s_x q_x, W ≈ s_w q_w and dy ≈ s_g q_g (docs/quantization.md). Tensor cores take FP8
operands that are both contracted over their last dimension, so each is quantized in two layouts at
once. The backward keeps codes. Tangents are those of dequantized operands, in the compute dtype;
there is no second derivative.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding

from ...native.dtypes import compute_dtype
from ...native.implementation import BEST, Order, Unsupported, report
from ...native.launch import target_for
from ..core.arguments import Quantization
from ..core.derivative import Function, differentiable
from ..core.op import Batching, Derivative, Loose, Op, Placement, equally_varying
from ..core.sharding import axes_of, whole
from ..quantization.gated import hidden
from ..quantization.quantize import Codes, Quantized, decoded, no_second_derivative, quantize
from ..quantization.quantize import fits as dimensions_fit
from .matmul import (
    Product,
    asked,
    batched,
    batched_sharding,
    explicit,
    gathered,
    matmul,
    with_main_gradient,
)

FORMAT = "float8_e4m3fn"
CAPABILITY = 89  # compute capability times ten that FP8 products need


def fits(kernel: Any, contract: int) -> bool:
    """Returns whether a kernel's shape allows FP8 products: multiples of 16 each way."""
    if contract not in (0, kernel.ndim - 1) or (contract and kernel.ndim != 2):
        return False
    n = kernel.shape[contract]
    return n > 0 and dimensions_fit(n, kernel.size // n)


# ---------------------------------------------------------------- products of codes


@dataclasses.dataclass(frozen=True)
class Contraction:
    """`einsum(f"{a},{b}->{out}")` of codes, times their two scales."""

    op: str  # the function the user called
    a: str
    b: str
    out: str
    dtype: str  # the result's
    wide: str  # codes are widened to it if FP8 products cannot serve
    out_sharding: NamedSharding | jax.P | None = None
    # (0 or 1, letters) of an operand whose codes are also there in this order, as one more operand:
    # devices that gather codes gather these.
    others: tuple[tuple[int, str], ...] = ()

    def sizes(self, a: Any, b: Any) -> list[int]:
        """Returns the sizes of the product as one of matrices, for each example of a batch."""
        length = dict(zip(self.a, a.shape)) | dict(zip(self.b, b.shape))
        every = set(self.a) & set(self.b) & set(self.out)
        groups = set(self.a) - set(self.b), set(self.b) - set(self.a)
        summed = (set(self.a) & set(self.b)) - every
        return [math.prod(length[d] for d in group) for group in (*groups, summed)]


def define_product(
    spec: Contraction,
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    *others: Array,
    over: tuple[str, ...] = (),
    scatter: tuple[tuple[str, int], ...] = (),
    arriving: Sequence[int] = (),
    apart: bool | None = None,
    given: bool = True,
    precision: Any = None,
) -> list[Array]:
    """`(a, b, a_scale, b_scale, *others) -> (a_scale · b_scale · a · b,)`.

    One FP8 call of cuBLASLt where sizes allow, which is `given` both scales, so that nothing
    multiplies them before; otherwise it has their product, in the dtype of the sums.

    Each device's part of the sum is added `over` mesh axes, and over those of `scatter`, which are
    left to split a dimension of the result. Operands that are `arriving` are made of `others`.

    Behind a barrier, `apart`, no two products share an operand. XLA would merge those that do,
    unless they are large: with a copy of the other operands, a pass over each part of the result,
    and nothing added in them (beta = 0). None: where XLA has nothing to split between devices.
    """
    if apart is None:
        mesh = jax.typeof(a).sharding.mesh
        split = set(mesh.axis_names) - set(mesh.manual_axes)
        apart = math.prod(mesh.shape[name] for name in split) == 1
    operands = [a, b]
    for (i, text), other in zip(spec.others, others):
        if i in arriving:
            operands[i] = jnp.transpose(other, [text.index(c) for c in (spec.a, spec.b)[i]])
    fits_fp8 = dimensions_fit(*spec.sizes(*operands))
    a, b = map(decoded, operands)
    # Sums of codes go beyond float16; bfloat16 has float32's range.
    sums = compute_dtype(spec.dtype) if spec.dtype == "float16" else jnp.dtype(spec.dtype)
    options = {"out_sharding": spec.out_sharding, "preferred_element_type": sums}
    multiply = functools.partial(jnp.einsum, f"{spec.a},{spec.b}->{spec.out}", **options)
    scaled = lambda raw, s, t: raw * (s * t).astype(sums)
    widened = lambda a, b, *by: scaled(multiply(a.astype(spec.wide), b.astype(spec.wide)), *by)

    def in_fp8(a: Array, b: Array, *by: Array) -> Array:
        a, b = jax.lax.optimization_barrier((a, b)) if apart else (a, b)
        if not given:
            return scaled(multiply(a, b, precision=precision), *by)
        # bfloat16 holds a code times a power of two: GPUs without FP8 multiply what stands here.
        meant = lambda q, s: q.astype(jnp.bfloat16) * s.astype(jnp.bfloat16)
        # A scalar's reshape would move behind its conversion, which XLA then does not see to be
        # undone where cuBLASLt wants float32: each would take a kernel.
        return multiply(*map(meant, (a, b), jax.lax.optimization_barrier(by)))

    if fits_fp8:
        y = jax.lax.platform_dependent(a, b, a_scale, b_scale, cuda=in_fp8, default=widened)
    else:
        y = widened(a, b, a_scale, b_scale)
    for name, dim in scatter:
        y = jax.lax.psum_scatter(y, name, scatter_dimension=dim, tiled=True)
    return [(jax.lax.psum(y, over) if over else y).astype(spec.dtype)]


def _batch_product(op: Op, args: Any, dims: Any, *, spec: Contraction, order: Order) -> Any:
    """A batch dimension is one more letter, of those operands that have it."""
    spec, args, dims = replace(spec, others=()), args[:4], dims[:4]
    if any(d is not None for d in dims[2:]):  # cuBLASLt has one scale for an operand
        each = functools.partial(define_product, spec, given=False)
        return jax.vmap(each, tuple(dims))(*args), [0]
    sharding = batched_sharding(spec.out_sharding, args, dims)
    fields = dict(zip(("a", "b", "out"), batched((spec.a, spec.b, spec.out), dims)))
    return op(replace(spec, **fields, out_sharding=sharding), *args, order=order), [0]


def require_fp8(ctx: Any, spec: Any, order: Order) -> Order:
    """Says once where a GPU has no FP8 product; an error where the order rules that out."""
    if "cuda" not in ctx.module_context.platforms:
        return order
    try:
        target = target_for(ctx)
        has_one = target.portable or target.capability >= CAPABILITY
        reason = (
            f"compute capability {target.capability / 10} has no FP8 product (8.9 and newer have)"
        )
    except Unsupported as error:  # an older GPU
        has_one, reason = False, str(error)
    if not has_one:
        report(spec.op, reason, strict=order.strict, by="a product of widened operands")
    return order


def _product_dims(spec: Contraction, *_: int) -> tuple[list[Any], list[Any]]:
    letters = list(dict.fromkeys(spec.a + spec.b))
    a, b, out = (tuple(map(letters.index, text)) for text in (spec.a, spec.b, spec.out))
    return [a, b, (), (), *[Loose(map(letters.index, text)) for _, text in spec.others]], [out]


def _share_product(
    spec: Contraction, sizes: Mapping[str, int], shapes: Sequence[Any], specs: Sequence[jax.P]
) -> tuple[list[jax.P], Callable[..., list[Array]]]:
    """How devices share a product: each scales its part before it is summed, in one dtype.

    XLA would sum before the multiplication, so that it could not add up what two products sum.
    Codes are gathered where an operand is split otherwise than the result, which decides. Where
    they are there in two orders, all products gather one of them, once, and transpose it.
    """
    texts = spec.a, spec.b, "", "", *[text for _, text in spec.others], spec.out
    length = dict(zip(spec.a, shapes[0])) | dict(zip(spec.b, shapes[1]))
    none = dict.fromkeys(length, ())
    stored = [
        none | dict(zip(text, map(axes_of, whole(one, len(text)))))
        for text, one in zip(texts, specs)
    ]
    divides = lambda c, names: length[c] % math.prod(sizes[name] for name in names) == 0
    axes = _axes_of_letters(spec.out, stored[0], stored[1], stored[-1], divides)
    spec_of = lambda text, axes: jax.P(*[axes[c] or None for c in text])
    places = [spec_of(text, axes) for text in texts]
    gathers = lambda i: any(set(stored[i][c]) - set(axes[c]) for c in texts[i])
    arriving = [i for i, _ in spec.others if gathers(i)]
    for i in arriving:  # nobody reads these: they stay where they are
        there = {c: names if divides(c, names) else () for c, names in stored[i].items()}
        places[i] = spec_of(texts[i], there)
    over = [name for c in length if c not in spec.out for name in axes[c]]
    scatter = _scattered(spec.out, axes, stored[-1], over, divides)
    over = [name for name in over if name not in dict(scatter)]
    axes |= {spec.out[dim]: stored[-1][spec.out[dim]] for _, dim in scatter}
    places[-1] = spec_of(spec.out, axes)
    # The product decides the layout of gathered arrays, through a barrier for each product anew.
    apart = not (gathers(0) or gathers(1))
    options = {"over": tuple(over), "scatter": tuple(scatter), "arriving": arriving, "apart": apart}
    return places, functools.partial(define_product, spec, **options)


_Axes = dict[str, tuple[str, ...]]  # the mesh axes that split each letter


def _axes_of_letters(
    out: str, a: _Axes, b: _Axes, result: _Axes, divides: Callable[..., bool]
) -> _Axes:
    """The axes that devices compute a product along, each for the first letter that wants it.

    First both operands' for what is summed, then for the result's letters its own and those of the
    operands, last for what is summed either operand's.
    """
    axes: _Axes = dict.fromkeys(a, ())
    summed = [c for c in a if c not in out]
    both = [(c, [name for name in a[c] if name in b[c]]) for c in summed]
    kept = [(c, stored[c]) for stored in (result, a, b) for c in out]
    for c, wanted in [*both, *kept, *[(c, a[c] or b[c]) for c in summed]]:
        taken = {name for names in axes.values() for name in names}
        free = tuple(name for name in wanted if name not in taken)
        if not axes[c] and divides(c, free):
            axes[c] = free
    return axes


def _scattered(
    out: str, axes: _Axes, result: _Axes, over: Sequence[str], divides: Callable[..., bool]
) -> list[tuple[str, int]]:
    """The axes of a sum that are left to split a dimension of the result.

    One sum and a slice of it is a reduce-scatter to XLA, but not if only some of its axes split
    the result (a kernel's gradient over "data" and "fsdp").
    """
    if not set(over) - {name for c in out for name in result[c]}:
        return []
    last = [(dim, c, result[c][-1]) for dim, c in enumerate(out) if result[c]]
    fits = lambda c: result[c][:-1] == axes[c] and divides(c, result[c])
    return [(name, dim) for dim, c, name in last if name in over and fits(c)]


def _product_types(spec: Contraction, a: Any, b: Any, *_: Any) -> Any:
    """Returns the result's type where no mesh is a part of it."""
    varying = any(one.manual_axis_type.varying for one in (a, b))
    if a.sharding.mesh.explicit_axes or varying:
        return None
    length = dict(zip(spec.a, a.shape)) | dict(zip(spec.b, b.shape))
    return [jax.ShapeDtypeStruct([length[letter] for letter in spec.out], spec.dtype)]


product = Op(
    "fp8_product",
    define_product,
    Placement(_product_dims, share=_share_product),
    Batching(rule=_batch_product),
    types=_product_types,
    before=require_fp8,
)


def products_saveable(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: keeps the results of FP8 products that batch nothing.

    Those of a gated MLP's first products it keeps as codes, which are all that the backward reads.
    For FP8 what `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` is for others.
    """
    if primitive is not product.primitive:
        return primitive is hidden.primitive
    spec = params["spec"]
    return not set(spec.a) & set(spec.b) & set(spec.out)


# ---------------------------------------------------------------- the recipe


@dataclasses.dataclass(frozen=True)
class Fp8(Function):
    """The recipe: all that is known of the FP8 products of one input when they are traced.

    As a function (`core.op`) it is a dense layer's product of args, a kernel and its main
    gradient. The args are (x,), or (x, q, qt or None, scale) where codes of x are there: then the
    product reads these, not its values; its tangent is theirs.
    """

    op: str  # the function the user called
    product: Product  # the operands' dimensions, as letters
    dtype: str  # the compute dtype
    order: Order = BEST  # kernels to try

    @property
    def labels(self) -> tuple[str, str, str]:
        """The letters of rows, of the summed dimension and of the outputs."""
        rows, summed = self.product.x[:-1], self.product.x[-1]
        return rows, summed, self.product.out[len(rows) :]

    @property
    def contract(self) -> bool:
        """Says that the kernel is stored (out, in)."""
        return self.product.kernel[0] != self.labels[1]

    @property
    def placed(self) -> bool:
        """Says that the results' dimensions are placed on a mesh one by one."""
        return self.product.out_sharding is not None

    def with_batch(self) -> "Fp8":
        return replace(self, product=self.product.with_batch())

    # -------- codes

    def codes(self, args: Sequence[Array], *, transposed: bool) -> Quantized:
        """Returns the codes of x as it lies and, for the gradient of a kernel, transposed."""
        if len(args) == 1:
            (x,), codes = args, Codes(FORMAT, True, transposed, self.op)
            return quantize(x, codes, split=x.ndim - 1, order=self.order)
        x, q, qt, scale = args
        of_x = lambda codes: derived(Codes(op=self.op), codes, x)[0]
        if transposed and qt is None:  # a program was cut to its results, then differentiated
            qt = jnp.moveaxis(q, -1, 0)
        return Quantized(of_x(q), of_x(qt) if transposed else None, scale)

    def kernel_codes(self, kernel: Array, *, forward: bool, backward: bool) -> Quantized:
        """Returns the codes of a kernel: q (out, in) for the forward, qt (in, out) otherwise."""
        has_q, has_qt = (forward, backward) if self.contract else (backward, forward)
        codes = Codes(FORMAT, has_q, has_qt, self.op)
        if kernel.dtype == jnp.float64:  # not quantized
            kernel = kernel.astype(jnp.float32)
        w = quantize(kernel, codes, split=1, rows=False, order=self.order)
        return w if self.contract else Quantized(w.qt, w.q, w.scale)

    def backward_codes(self, w: Quantized, x: Array) -> Array:
        """Returns the kernel's codes (in, out), as the gradient of x reads them."""
        _, summed, outs = self.labels
        return gathered(self.product, w.qt, summed + outs, x, self.product.x, summed=True)

    def gradient_codes(self, dy: Array, *, q: bool, qt: bool) -> Quantized:
        """Returns codes of a result's gradient: q for the gradient of x, qt for the kernel's."""
        codes = Codes(FORMAT, q, qt, self.op)
        return quantize(dy, codes, split=len(self.labels[0]), order=self.order)

    def widened(self, codes: Array, scale: Array) -> Array:
        """The numbers that codes mean, in the compute dtype."""
        wide = compute_dtype(self.dtype)  # float16 has no scales below 2^-24
        return (decoded(codes).astype(wide) * scale.astype(wide)).astype(self.dtype)

    # -------- products of codes

    def _multiply(
        self,
        labels: str,
        a: tuple[Array, Array],
        b: tuple[Array, Array],
        dtype: jax.typing.DTypeLike,
        sharding: Any,
        others: dict[tuple[int, str], Array | None] | None = None,
    ) -> Array:
        """Returns the product of codes with their scales, of which `others` lie otherwise, too."""
        x, w, out = labels.replace("->", ",").split(",")
        apart = {at: array for at, array in (others or {}).items() if array is not None}
        dtype = jnp.dtype(dtype).name
        spec = Contraction(self.op, x, w, out, dtype, self.dtype, sharding, tuple(apart))
        return product(spec, a[0], b[0], a[1], b[1], *apart.values(), order=self.order)[0]

    def multiply(self, x: Array, xq: Quantized, w: Quantized) -> Array:
        """Returns the product of codes; x says how its rows lie."""
        rows, summed, outs = self.labels
        codes = gathered(self.product, w.q, outs + summed, x, self.product.x, summed=True)
        if codes is not w.q and w.qt is not None:
            codes = jnp.moveaxis(self.backward_codes(w, x), 0, -1)
        # The backward reads these too, so that nothing more is kept and one gather serves both.
        others = {(0, summed + rows): xq.qt, (1, summed + outs): w.qt}
        labels = f"{rows}{summed},{outs}{summed}->{rows}{outs}"
        placed = self.product.out_sharding
        return self._multiply(
            labels, (xq.q, xq.scale), (codes, w.scale), self.dtype, placed, others
        )

    def input_gradient(self, g: Quantized, w: tuple[Array, Array], like: Any) -> Array:
        """Returns the gradient of x, of the type `like`, from codes of dy and of the kernel."""
        rows, summed, outs = self.labels
        labels = f"{rows}{outs},{summed}{outs}->{rows}{summed}"
        return self._multiply(labels, (g.q, g.scale), w, like.dtype, explicit(like))

    def kernel_gradient(self, x: tuple[Array, Array], g: Quantized, like: Any) -> Array:
        """Returns the gradient of the kernel, of the type `like`, from codes of xᵀ and dyᵀ."""
        (rows, summed, outs), contract = self.labels, self.contract
        sums = compute_dtype(self.dtype)
        dtype = like.dtype if like.dtype in (jnp.dtype(self.dtype), sums) else sums
        operands = [(x, summed + rows), ((g.qt, g.scale), outs + rows)]
        if contract:  # so that the result needs no transpose
            operands.reverse()
        (a, of_a), (b, of_b) = operands
        others = {(0 if contract else 1, rows + outs): g.q}
        labels = f"{of_a},{of_b}->{self.product.kernel}"
        gradient = self._multiply(labels, a, b, dtype, explicit(like), others)
        return gradient.astype(like.dtype)

    # -------- products of what codes mean, in the compute dtype

    def along_x(self, dx: Array, w: tuple[Array, Array]) -> Array:
        """Returns dx · kernel, of the kernel's codes (in, out)."""
        rows, summed, outs = self.labels
        dot = functools.partial(jnp.einsum, out_sharding=self.product.out_sharding)
        return dot(f"{rows}{summed},{summed}{outs}->{rows}{outs}", dx, self.widened(*w))

    def along_kernel(self, x: tuple[Array, Array], dkernel: Array) -> Array:
        """Returns x · dkernel, of the codes of xᵀ."""
        (rows, summed, outs), stored = self.labels, self.product.kernel
        dkernel = gathered(self.product, dkernel.astype(self.dtype), stored, x[0], summed + rows)
        dot = functools.partial(jnp.einsum, out_sharding=self.product.out_sharding)
        return dot(f"{summed}{rows},{stored}->{rows}{outs}", self.widened(*x), dkernel)

    # -------- the dense layer's product

    def forward(self, operands: Any, moved: tuple[bool, ...] | None) -> Any:
        """Returns `(y,)`, and the kernel's codes (in, out) and those of xᵀ, with their scales."""
        args, kernel, _ = operands
        if not moved:
            args = mark_input(self, operands)
        of_x, *of_kernel = moved or (False,) * 3
        xq = self.codes(args, transposed=any(of_kernel))
        w = self.kernel_codes(kernel, forward=True, backward=of_x)
        y = self.multiply(args[0], xq, w)
        of_w = (self.backward_codes(w, args[0]), w.scale) if of_x else None
        return [y], (of_w, (xq.qt, xq.scale) if any(of_kernel) else None)

    def tangents(self, *tangents: Any) -> list[Any]:
        dargs, dkernel, dmain = tangents
        return [dargs[0], *asked(dkernel, dmain)]

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> list[Array]:
        (w, x), (dx, *dkernels) = kept, tangents
        terms = [] if dx is None else [self.along_x(dx, w)]
        terms += [self.along_kernel(x, d) for d in dkernels if d is not None]
        return [functools.reduce(jnp.add, terms)]

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> list[Any]:
        ((dy,), (w, x)), (dx, *dkernels) = (cts, kept), likes
        of_kernel = any(d is not None for d in dkernels)
        g = self.gradient_codes(dy, q=dx is not None, qt=of_kernel)
        gradients = [None if dx is None else self.input_gradient(g, w, dx)]
        return gradients + [d if d is None else self.kernel_gradient(x, g, d) for d in dkernels]

    def rows(self, kept: Any) -> Any:
        """The codes of xᵀ have them behind its columns."""
        return None if self.placed else ((-1, kept[1] and (1, -1)), [0, -1, -1])


def multiply(
    op: str,
    x: Array,
    kernel: Array,
    *,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
    quantization: Quantization = None,
    order: Order = BEST,
) -> Array:
    """Returns the product of a dense layer, `matmul` or the same in FP8.

    A kernel with a dimension that is no multiple of 16 multiplies in the compute dtype.
    """
    options = {"dtype": dtype, "contract": contract, "out_sharding": out_sharding}
    if quantization is None:
        return matmul(x, kernel, **options)
    if not fits(kernel, contract):
        reason = f"a kernel of shape {kernel.shape} has a dimension that is no multiple of 16"
        report(op, f"{reason}, so it multiplies in the compute dtype", by="an unquantized product")
        return matmul(x, kernel, **options)
    product = Product.of(x.ndim, kernel.ndim, contract, None, out_sharding)
    spec = Fp8(op, product, jnp.dtype(dtype).name, order)
    x, kernel, main = equally_varying(x.astype(dtype), *with_main_gradient(kernel))
    return differentiable(spec, (x,), kernel, main)[0]


# ---------------------------------------------------------------- inputs whose codes are there


def _batch_derived(op: Op, args: Any, dims: Any, *, spec: Codes, order: Order) -> Any:
    (value,) = op(spec, *args, order=order)
    return [value], dims[:1]


derived = Op(
    "fp8_derived",
    lambda spec, value, *sources: [value],
    batching=Batching(rule=_batch_derived),
    derivative=Derivative(jvp=no_second_derivative),
)
"""`(value, *sources) -> (value,)`, which follows from them in a first derivative's residuals."""

input_p = Primitive("normfuse_fp8_input")
"""`x -> x`: marks in a traced program an x that FP8 products quantize; see `mark_input`."""
input_p.def_impl(lambda x, **_: x)
input_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(input_p, lambda ctx, x, **_: [x])


@dataclasses.dataclass(frozen=True)
class Marked:
    """A function that `fuse` may call with the codes of its input."""

    spec: Any  # a function of `core.op`, of args as in `Fp8`
    tree: Any  # the structure of its operands
    ndims: tuple[int, ...]  # ndim of each of their arrays
    batched: bool = False  # the function was vmapped in a way that spec lacks


def mark_input(spec: Any, operands: Any) -> tuple[Array, ...]:
    """Returns the first of a function's operands, args, within it, marked if they are (x,)."""
    args, *_ = operands
    if len(args) > 1:
        return args
    leaves, tree = jax.tree.flatten(operands)
    marked = Marked(spec, tree, tuple(a.ndim for a in leaves))
    return (input_p.bind(args[0], marked=marked),)


def _batch_input(args: Any, dims: Any, *, marked: Marked) -> Any:
    (x,), (dim,) = args, dims
    marked = replace(
        marked,
        spec=marked.spec.with_batch(),
        ndims=(marked.ndims[0] + 1, *marked.ndims[1:]),
        batched=marked.batched or dim != 0 or marked.spec.placed,
    )
    return input_p.bind(jnp.moveaxis(x, dim, 0), marked=marked), 0


batching.primitive_batchers[input_p] = _batch_input
