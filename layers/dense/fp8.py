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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from ...native.dtypes import compute_dtype
from ...native.implementation import BEST, Order, report
from ...native.launch import compute_capability_of
from ..core.arguments import Quantization
from ..core.op import Loose, Op, batch_at
from ..core.sharding import axes_of, whole
from ..quantization.gated import hidden
from ..quantization.quantize import Codes, Quantized, decoded, no_second_derivative, quantize
from ..quantization.quantize import fits as dimensions_fit
from .matmul import (
    Product,
    asked,
    batched,
    batched_sharding,
    equally_varying,
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
        of = dict(zip(self.a, a.shape)) | dict(zip(self.b, b.shape))
        every = set(self.a) & set(self.b) & set(self.out)
        groups = set(self.a) - set(self.b), set(self.b) - set(self.a)
        summed = (set(self.a) & set(self.b)) - every
        return [math.prod(of[d] for d in group) for group in (*groups, summed)]


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

    if dimensions_fit(*spec.sizes(a, b)):
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
    capability = compute_capability_of(ctx) if "cuda" in ctx.module_context.platforms else None
    if capability is not None and capability < CAPABILITY:
        reason = f"compute capability {capability / 10} has no FP8 product (8.9 and newer have)"
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
    texts, of = (spec.a, spec.b, "", "", *[text for _, text in spec.others], spec.out), []
    length = dict(zip(spec.a, shapes[0])) | dict(zip(spec.b, shapes[1]))
    for text, one in zip(texts, specs):
        of.append(dict.fromkeys(length, ()) | dict(zip(text, map(axes_of, whole(one, len(text))))))
    axes: dict[str, tuple[str, ...]] = dict.fromkeys(length, ())

    def take(letter: str, wanted: Sequence[str]) -> None:
        taken = {name for names in axes.values() for name in names}
        free = tuple(name for name in wanted if name not in taken)
        if not axes[letter] and length[letter] % math.prod(sizes[name] for name in free) == 0:
            axes[letter] = free

    summed = [letter for letter in length if letter not in spec.out]
    for letter in summed:
        take(letter, [name for name in of[0][letter] if name in of[1][letter]])
    for places in (of[-1], of[0], of[1]):
        for letter in spec.out:
            take(letter, places[letter])
    for letter in summed:
        take(letter, of[0][letter] or of[1][letter])
    over = [name for letter in summed for name in axes[letter]]
    found = [jax.P(*[axes[letter] or None for letter in text]) for text in texts]
    parts = lambda letter, names: (
        () if length[letter] % math.prod(map(sizes.__getitem__, names)) else names
    )
    gathers = lambda i: any(set(of[i][c]) - set(axes[c]) for c in texts[i])
    arriving = [i for i, _ in spec.others if gathers(i)]
    for i in arriving:  # nobody reads these: they stay where they are
        found[i] = jax.P(*[parts(letter, of[i][letter]) or None for letter in texts[i]])
    # One sum and a slice of it is a reduce-scatter to XLA, but not if only some of its axes split
    # the result (a kernel's gradient over "data" and "fsdp").
    scatter = []
    out = of[-1]
    if set(over) - {name for letter in spec.out for name in out[letter]}:
        for dim, letter in enumerate(spec.out):
            name = out[letter][-1] if out[letter] else None
            wanted = math.prod(sizes[one] for one in out[letter])
            if name in over and out[letter][:-1] == axes[letter] and not length[letter] % wanted:
                scatter.append((name, dim))
                over.remove(name)
                axes[letter] = out[letter]
    found[-1] = jax.P(*[axes[letter] or None for letter in spec.out])
    # The product decides the layout of gathered arrays, through a barrier for each product anew.
    apart = not (gathers(0) or gathers(1))
    options = {"over": tuple(over), "scatter": tuple(scatter), "arriving": arriving, "apart": apart}
    return found, functools.partial(define_product, spec, **options)


product = Op(
    "fp8_product",
    define_product,
    dims=_product_dims,
    batch=_batch_product,
    share=_share_product,
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


# ---------------------------------------------------------------- the layer's product


@dataclasses.dataclass(frozen=True)
class Fp8:
    """All that is known of the layer's product when it is traced."""

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
        """Whether the kernel is stored (out, in)."""
        return self.product.kernel[0] != self.labels[1]

    def with_batch(self) -> "Fp8":
        """Returns the same of rows with one more dimension, the first."""
        product = self.product
        x, _, out = batched((product.x, product.kernel, product.out), (0, None))
        return replace(self, product=replace(product, x=x, out=out))

    def contraction(self, a: str, b: str, out: str, dtype: Any, sharding: Any) -> Contraction:
        """Returns a product of codes with these letters."""
        return Contraction(self.op, a, b, out, jnp.dtype(dtype).name, self.dtype, sharding)


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
    (y,) = _product(Input(spec), *operands_of(x.astype(dtype), [kernel]))
    return y


def moves(tangent: Any) -> bool:
    """Returns whether there is a tangent, in a rule with symbolic zeros."""
    return tangent is not None and not isinstance(tangent, SymbolicZero)


@dataclasses.dataclass(frozen=True)
class Input:
    """What FP8 products read: x, or codes of it that are there."""

    fp8: Fp8  # of the products
    # Whether the arguments are (x, q, qt or None, scale). The products read codes of x, not its
    # values; its tangent is theirs.
    encoded: bool = False

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.fp8.op

    def with_batch(self) -> "Input":
        """Returns the same of rows with one more dimension, the first."""
        return replace(self, fp8=self.fp8.with_batch())

    @property
    def placed(self) -> bool:
        """Whether the results' dimensions are placed on a mesh one by one."""
        return self.fp8.product.out_sharding is not None

    def of_codes(self) -> "Input":
        """Returns the same products of an x whose codes are there."""
        return replace(self, encoded=True)

    def codes(self, args: Sequence[Array], *, transposed: bool) -> Quantized:
        """Returns the codes of x as it lies and, for the gradient of a kernel, transposed."""
        if not self.encoded:
            (x,), codes = args, Codes(FORMAT, True, transposed, self.fp8.op)
            return quantize(x, codes, split=x.ndim - 1, order=self.fp8.order)
        x, q, qt, scale = args
        of_x = lambda codes: derived(Derived(self.fp8.op), codes, x)[0]
        if transposed and qt is None:  # a program was cut to its results, then differentiated
            qt = jnp.moveaxis(q, -1, 0)
        return Quantized(of_x(q), of_x(qt) if transposed else None, scale)


@dataclasses.dataclass(frozen=True)
class Derived:
    """Which function the user called."""

    op: str


def _batch_derived(op: Op, args: Any, dims: Any, *, spec: Derived, order: Order) -> Any:
    (value,) = op(spec, *args, order=order)
    return [value], dims[:1]


derived = Op(
    "fp8_derived",
    lambda spec, value, *sources: [value],
    batch=_batch_derived,
    jvp=no_second_derivative,
)
"""`(value, *sources) -> (value,)`, which follows from them in a first derivative's residuals."""


def operands_of(x: Array, kernels: Sequence[Array]) -> tuple[tuple[Array], tuple[Any, ...]]:
    """Returns (x,), and each kernel and its main gradient, placed alike."""
    given = [with_main_gradient(kernel) for kernel in kernels]
    x, *flat = equally_varying(x, *[part for pair in given for part in pair])
    return (x,), tuple(flat)


input_p = Primitive("normfuse_fp8_input")
"""`x -> x`: marks in a traced program an x that FP8 products quantize; see `mark_input`."""
input_p.def_impl(lambda x, **_: x)
input_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(input_p, lambda ctx, x, **_: [x])


@dataclasses.dataclass(frozen=True)
class Marked:
    """What `fuse` has to know to call a function with the codes of its input."""

    call: Callable[..., Any]  # `(spec, args, operands) -> results`, a `custom_jvp`
    spec: Any  # with `of_codes`; its arguments are (x,)
    tree: Any  # the structure of (args, operands)
    ndims: tuple[int, ...]  # ndim of each of their arrays
    batched: bool = False  # the function was vmapped in a way that spec lacks


def mark_input(
    call: Callable[..., Any], spec: Any, args: tuple[Array, ...], operands: Any
) -> tuple[Array, ...]:
    """Returns the arguments of `call(spec, args, operands)`, within it, marked if they are (x,)."""
    if len(args) != 1:
        return args
    leaves, tree = jax.tree.flatten((args, operands))
    marked = Marked(call, spec, tree, tuple(a.ndim for a in leaves))
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(spec: Input, args: tuple[Array, ...], operands: Any) -> tuple[Array]:
    """Operands: the kernel and its main gradient."""
    args = mark_input(_product, spec, args, operands)
    made = spec.codes(args, transposed=False)
    w = kernel_codes(spec.fp8, operands[0], forward=True, backward=False)
    return (forward(spec.fp8, args[0], made, w),)


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _(spec, primals, tangents):
    (args, operands), ((dx, *_), doperands) = primals, tangents
    doperands = asked(*doperands)
    moved = moves(dx), *map(moves, doperands)
    made = spec.codes(args, transposed=any(moved[1:]))
    w = kernel_codes(spec.fp8, operands[0], forward=True, backward=moved[0])
    y = forward(spec.fp8, args[0], made, w)
    if not any(moved):
        return (y,), (jnp.zeros_like(y),)
    kept = [backward_codes(spec.fp8, w, args[0]), w.scale] if moved[0] else []
    kept += [made.qt, made.scale] if any(moved[1:]) else []
    moving = [t for t in (dx, *doperands) if moves(t)]
    return (y,), (tangent(Tangent(spec.fp8, moved), *kept, *moving)[0],)


def kernel_codes(spec: Fp8, kernel: Array, *, forward: bool, backward: bool) -> Quantized:
    """Returns the kernel's codes: (out, in) for the forward, (in, out) for the backward."""
    has_q, has_qt = (forward, backward) if spec.contract else (backward, forward)
    codes = Codes(FORMAT, has_q, has_qt, spec.op)
    if kernel.dtype == jnp.float64:  # not quantized
        kernel = kernel.astype(jnp.float32)
    return quantize(kernel, codes, split=1, rows=False, order=spec.order)


def _codes(spec: Fp8, w: Quantized, *, forward: bool) -> Any:
    return w.q if spec.contract == forward else w.qt


def backward_codes(spec: Fp8, w: Quantized, x: Array) -> Array:
    """Returns the kernel's codes (in, out), as the gradient of x reads them."""
    _, summed, outs = spec.labels
    codes = _codes(spec, w, forward=False)
    return gathered(spec.product, codes, summed + outs, x, spec.product.x, summed=True)


def forward(spec: Fp8, x: Array, xq: Quantized, w: Quantized) -> Array:
    """Returns the product of codes; x says how its rows lie."""
    rows, summed, outs = spec.labels
    stored, other = _codes(spec, w, forward=True), _codes(spec, w, forward=False)
    codes = gathered(spec.product, stored, outs + summed, x, spec.product.x, summed=True)
    if codes is not stored and other is not None:
        codes = jnp.moveaxis(backward_codes(spec, w, x), 0, -1)
    dot = spec.contraction(
        rows + summed, outs + summed, rows + outs, spec.dtype, spec.product.out_sharding
    )
    # The backward reads these too, so that nothing more is kept and one gather serves both.
    others = {} if xq.qt is None else {(0, summed + rows): xq.qt}
    others |= {} if other is None else {(1, summed + outs): other}
    return multiply_codes(dot, (xq.q, xq.scale), (codes, w.scale), others, spec.order)


_Scaled = tuple[Array, Array]  # codes and their scale


def multiply_codes(
    spec: Contraction, a: _Scaled, b: _Scaled, others: dict[Any, Array], order: Order
) -> Array:
    """Returns the product of codes, of which `others` are there in another order, too."""
    spec, scales = replace(spec, others=tuple(others)), (a[1], b[1])
    return product(spec, a[0], b[0], *scales, *others.values(), order=order)[0]


# ---------------------------------------------------------------- the tangent


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent of a product, in the directions of x, the kernel and its main gradient.

    Its operands are the kernel's codes (in, out) and scale where x moves; xᵀ's codes (in, rows)
    and scale where the kernel does; then the tangents. In `vmaps` over kernels, the outermost
    first, those that are marked have one more dimension, the first.
    """

    fp8: Fp8  # of the product
    moves: tuple[bool, ...]  # of x, the kernel and its main gradient
    vmaps: tuple[tuple[bool, ...], ...] = ()

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.fp8.op

    def read(self, operands: Any) -> "Residuals":
        """Returns the operands by their names, None for what is not there."""
        given = list(operands)
        take = lambda there: given.pop(0) if there else None
        pair = lambda there: (take(there), take(there))
        kernel, x = pair(self.moves[0]), pair(any(self.moves[1:]))
        return Residuals(kernel, x, *[take(moved) for moved in self.moves])


class Residuals(NamedTuple):
    """What the forward kept, and the tangents; codes come with their scale."""

    kernel: tuple[Any, Any]  # codes (in, out)
    x: tuple[Any, Any]  # codes of xᵀ
    dx: Any
    dkernel: Any
    dmain: Any


def define_tangent(spec: Tangent, *operands: Array) -> list[Array]:
    """`(..., tangents) -> (dy,)`, of the dequantized operands."""
    if spec.vmaps:
        return vmapped(define_tangent, spec)(*operands)
    fp8, r = spec.fp8, spec.read(operands)
    terms = [] if r.dx is None else [product_with_kernel(fp8, r.dx, *r.kernel)]
    terms += [product_with_x(fp8, *r.x, d) for d in (r.dkernel, r.dmain) if d is not None]
    return [functools.reduce(jnp.add, terms)]


def widened(fp8: Fp8, codes: Array, scale: Array) -> Array:
    """Returns what codes mean, in the compute dtype."""
    wide = compute_dtype(fp8.dtype)  # float16 has no scales below 2^-24
    return (decoded(codes).astype(wide) * scale.astype(wide)).astype(fp8.dtype)


def product_with_kernel(fp8: Fp8, dx: Array, w: Array, w_scale: Array) -> Array:
    """Returns dx · kernel, of the kernel's codes (in, out), in the compute dtype."""
    rows, summed, outs = fp8.labels
    labels = f"{rows}{summed},{summed}{outs}->{rows}{outs}"
    dot = functools.partial(jnp.einsum, out_sharding=fp8.product.out_sharding)
    return dot(labels, dx, widened(fp8, w, w_scale))


def product_with_x(fp8: Fp8, x: Array, x_scale: Array, dkernel: Array) -> Array:
    """Returns x · dkernel, of the codes of xᵀ, in the compute dtype."""
    rows, summed, outs = fp8.labels
    labels = f"{summed}{rows},{fp8.product.kernel}->{rows}{outs}"
    dkernel = dkernel.astype(fp8.dtype)
    dkernel = gathered(fp8.product, dkernel, fp8.product.kernel, x, summed + rows)
    dot = functools.partial(jnp.einsum, out_sharding=fp8.product.out_sharding)
    return dot(labels, widened(fp8, x, x_scale), dkernel)


def _gradients(spec: Tangent, dys: Any, residuals: Sequence[Any], likes: Sequence[Any]) -> Any:
    """The gradient for each tangent, given by its type; None for one without a type."""
    r, fp8, (dy,) = spec.read([*residuals, *likes]), spec.fp8, dys
    of_kernel = r.dkernel, r.dmain
    g = gradient_codes(fp8, dy, q=r.dx is not None, qt=any(d is not None for d in of_kernel))
    found = [None if r.dx is None else input_gradient(fp8, g, *r.kernel, r.dx)]
    found += [d if d is None else kernel_gradient(fp8, *r.x, g, d) for d in of_kernel]
    return [f for f, moved in zip(found, spec.moves) if moved]


def gradient_codes(fp8: Fp8, dy: Array, *, q: bool, qt: bool) -> Quantized:
    """Returns the codes of a result's gradient: q for the gradient of x, qt for the kernel's."""
    rows, _, _ = fp8.labels
    return quantize(dy, Codes(FORMAT, q, qt, fp8.op), split=len(rows), order=fp8.order)


def input_gradient(fp8: Fp8, g: Quantized, w: Array, w_scale: Array, like: Any) -> Array:
    """Returns the gradient of x, of the type `like`, from codes of dy and of the kernel."""
    rows, summed, outs = fp8.labels
    operands = rows + outs, summed + outs, rows + summed
    dot = fp8.contraction(*operands, like.dtype, _explicit(like))
    return product(dot, g.q, w, g.scale, w_scale, order=fp8.order)[0]


def kernel_gradient(fp8: Fp8, x: Array, x_scale: Array, g: Quantized, like: Any) -> Array:
    """Returns the gradient of the kernel, of the type `like`, from codes of xᵀ and dyᵀ."""
    rows, summed, outs = fp8.labels
    sums = compute_dtype(fp8.dtype)
    dtype = like.dtype if like.dtype in (jnp.dtype(fp8.dtype), sums) else sums
    a, b = ((x, x_scale), summed + rows), ((g.qt, g.scale), outs + rows)
    a, b = (b, a) if fp8.contract else (a, b)  # so that the result needs no transpose
    others = {} if g.q is None else {(0 if fp8.contract else 1, rows + outs): g.q}
    dot = fp8.contraction(a[1], b[1], fp8.product.kernel, dtype, _explicit(like))
    return multiply_codes(dot, a[0], b[0], others, fp8.order).astype(like.dtype)


def _explicit(aval: Any) -> NamedSharding | None:
    return aval.sharding if aval.sharding.mesh.explicit_axes else None


def _batch(op: Op, operands: Any, dims: Any, *, spec: Tangent, order: Order) -> Any:
    """A batch dimension of the rows is one more dimension of them, the first."""
    r, at = spec.read(operands), spec.read(dims)
    in_parts = spec.vmaps or spec.fp8.product.out_sharding is not None
    of_kernel = at.x[1], *at.kernel, at.dkernel, at.dmain
    if in_parts or any(d is not None for d in of_kernel):
        return vmap_tangent(op, operands, dims, spec, order)
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    moved = [*r.kernel] if spec.moves[0] else []
    moved += [batch_at(r.x[0], at.x[0], 1, size), r.x[1]] if any(spec.moves[1:]) else []
    moved += [batch_at(r.dx, at.dx, 0, size)] if spec.moves[0] else []
    moved += [d for d in (r.dkernel, r.dmain) if d is not None]
    return op(replace(spec, fp8=spec.fp8.with_batch()), *moved, order=order), [0]


# ---------------------------------------------------------------- tangents and their transposes


def vmap_tangent(op: Op, operands: Any, dims: Any, spec: Any, order: Order) -> Any:
    """The batching rule of a tangent whose kernels have a batch dimension: one more of `vmaps`."""
    moved = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(operands, dims)]
    has = tuple(d is not None for d in dims)
    results = op(replace(spec, vmaps=(has, *spec.vmaps)), *moved, order=order)
    return results, [0] * len(results)


def vmapped(function: Callable[..., Any], spec: Any, *lead: int) -> Callable[..., Any]:
    """Returns `function` of a tangent's operands in the outermost of its vmaps."""
    axes = [0 if has else None for has in spec.vmaps[0]]
    one = functools.partial(function, replace(spec, vmaps=spec.vmaps[1:]))
    return jax.vmap(one, (*lead, *axes))


def transposed(gradients: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Returns the transpose of a tangent by `gradients(spec, dys, residuals, likes)`.

    `dys` are the gradients of the results, None for zeros. `likes` are the types of what has a
    gradient, None for other tangents.
    """

    def in_vmaps(spec: Any, dys: Any, residuals: Sequence[Any], likes: Sequence[Any]) -> list[Any]:
        if not spec.vmaps:
            return gradients(spec, dys, residuals, likes)
        has = spec.vmaps[0][len(residuals) :]
        inner = [like if like is None or not h else _unstacked(like) for like, h in zip(likes, has)]
        one = lambda spec, dys, *residuals: in_vmaps(spec, dys, residuals, inner)
        within = replace(spec, vmaps=(spec.vmaps[0][: len(residuals)], *spec.vmaps[1:]))
        found = vmapped(one, within, 0)(dys, *residuals)
        summed = [f if f is None or h else jnp.sum(f, 0) for f, h in zip(found, has)]
        return [f if f is None else f.astype(like.dtype) for f, like in zip(summed, likes)]

    def transpose(cts: Any, *operands: Any, spec: Any, order: Order) -> list[Any]:
        del order
        dys = tuple(None if type(dy) is ad.Zero else dy for dy in cts)
        if all(dy is None for dy in dys):
            return [None] * len(operands)
        count = len(operands) - sum(spec.moves)
        tangents = operands[count:]
        likes = [t.aval if ad.is_undefined_primal(t) else None for t in tangents]
        return [None] * count + in_vmaps(spec, dys, operands[:count], likes)

    return transpose


def _unstacked(aval: Any) -> Any:
    """Returns the type of one of the arrays that are stacked."""
    sharding = NamedSharding(aval.sharding.mesh, jax.P(*aval.sharding.spec[1:]))
    return aval.update(shape=aval.shape[1:], sharding=sharding)


tangent = Op("fp8_tangent", define_tangent, batch=_batch, transpose=transposed(_gradients))
