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
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import NamedSharding

from ...native.dtypes import compute_dtype
from ...native.implementation import BEST, Order, report
from ...native.launch import compute_capability_of
from ..core.arguments import Quantization
from ..core.op import Op, batch_at
from ..quantization.kernels import Codes
from ..quantization.op import Quantized, decoded, quantize
from .matmul import (
    Product,
    batched,
    batched_sharding,
    equally_varying,
    gathered,
    matmul,
    with_main_gradient,
)

FORMAT = "float8_e4m3fn"
_MULTIPLE = 16  # of every dimension of an FP8 product
_CAPABILITY = 89  # compute capability times ten that FP8 products need


def fits(kernel: Any, contract: int) -> bool:
    """Returns whether a kernel's shape allows FP8 products: multiples of 16 each way."""
    if contract not in (0, kernel.ndim - 1) or (contract and kernel.ndim != 2):
        return False
    n = kernel.shape[contract]
    return n > 0 and n % _MULTIPLE == 0 and kernel.size // n % _MULTIPLE == 0 and kernel.size > 0


# ---------------------------------------------------------------- products of codes


@dataclasses.dataclass(frozen=True)
class Contraction:
    """`einsum(f"{a},{b}->{out}")` of codes, times a scale.

    Attributes:
      op: the function the user called.
      dtype: of the result.
      wide: what codes are widened to where FP8 products cannot serve.
    """

    op: str
    a: str
    b: str
    out: str
    dtype: str
    wide: str
    out_sharding: NamedSharding | jax.P | None = None

    def sizes(self, a: Any, b: Any) -> list[int]:
        """Returns the sizes of the product as one of matrices, for each example of a batch."""
        of = dict(zip(self.a, a.shape)) | dict(zip(self.b, b.shape))
        every = set(self.a) & set(self.b) & set(self.out)
        groups = set(self.a) - set(self.b), set(self.b) - set(self.a)
        summed = (set(self.a) & set(self.b)) - every
        return [math.prod(of[d] for d in group) for group in (*groups, summed)]


def define_product(spec: Contraction, a: Array, b: Array, scale: Array) -> list[Array]:
    """`(a, b, scale) -> (scale · a · b,)`: one FP8 call of cuBLASLt where sizes allow."""
    a, b = decoded(a), decoded(b)
    # Sums of codes go beyond float16; bfloat16 has float32's range.
    sums = compute_dtype(spec.dtype) if spec.dtype == "float16" else jnp.dtype(spec.dtype)
    options = {"out_sharding": spec.out_sharding, "preferred_element_type": sums}
    multiply = functools.partial(jnp.einsum, f"{spec.a},{spec.b}->{spec.out}", **options)
    widened = lambda a, b: multiply(a.astype(spec.wide), b.astype(spec.wide))
    if all(size and size % _MULTIPLE == 0 for size in spec.sizes(a, b)):
        raw = jax.lax.platform_dependent(a, b, cuda=multiply, default=widened)
    else:
        raw = widened(a, b)
    return [(raw * scale.astype(sums)).astype(spec.dtype)]


def _batch_product(op: Op, args: Any, dims: Any, *, spec: Contraction, order: Order) -> Any:
    """A batch dimension is one more letter, of those operands that have it."""
    a, b, scale = args
    if dims[2] is not None:
        results = jax.vmap(functools.partial(define_product, spec), tuple(dims))(*args)
        return results, [0]
    sharding = batched_sharding(spec.out_sharding, args, dims)
    fields = dict(zip(("a", "b", "out"), batched((spec.a, spec.b, spec.out), dims)))
    return op(replace(spec, **fields, out_sharding=sharding), a, b, scale, order=order), [0]


def _require_fp8(ctx: Any, spec: Contraction, order: Order) -> Order:
    """Says once where a GPU has no FP8 product; an error where the order rules that out."""
    capability = compute_capability_of(ctx) if "cuda" in ctx.module_context.platforms else None
    if capability is not None and capability < _CAPABILITY:
        reason = f"compute capability {capability / 10} has no FP8 product (8.9 and newer have)"
        report(spec.op, reason, strict=order.strict, by="a product of widened operands")
    return order


product = Op("fp8_product", define_product, batch=_batch_product, before=_require_fp8)


def products_saveable(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: keeps the results of FP8 products that batch nothing.

    For FP8 what `jax.checkpoint_policies.dots_with_no_batch_dims_saveable` is for others.
    """
    if primitive is not product.primitive:
        return False
    spec = params["spec"]
    return not set(spec.a) & set(spec.b) & set(spec.out)


# ---------------------------------------------------------------- the layer's product


@dataclasses.dataclass(frozen=True)
class Fp8:
    """All that is known of the layer's product when it is traced.

    Attributes:
      op: the function the user called.
      product: the operands' dimensions, as letters.
      dtype: the compute dtype.
      order: which kernels are to serve.
    """

    op: str
    product: Product
    dtype: str
    order: Order = BEST

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
    return _matmul(spec, *equally_varying(x.astype(dtype), *with_main_gradient(kernel)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul(spec: Fp8, x: Array, kernel: Array, main: Array | None) -> Array:
    del main
    w = kernel_codes(spec, kernel, forward=True, backward=False)
    return forward(spec, x, x_codes(spec, x, transposed=False), w)


@functools.partial(_matmul.defjvp, symbolic_zeros=True)
def _(spec, primals, tangents):
    x, kernel, _ = primals
    moves = tuple(t is not None and not isinstance(t, SymbolicZero) for t in tangents)
    xq = x_codes(spec, x, transposed=moves[1] or moves[2])
    w = kernel_codes(spec, kernel, forward=True, backward=moves[0])
    y = forward(spec, x, xq, w)
    if not any(moves):
        return y, jnp.zeros_like(y)
    kept = [backward_codes(spec, w, x), w.scale] if moves[0] else []
    kept += [xq.qt, xq.scale] if moves[1] or moves[2] else []
    moving = [t for t, moved in zip(tangents, moves) if moved]
    return y, tangent(Tangent(spec, moves), *kept, *moving)[0]


def x_codes(spec: Fp8, x: Array, *, transposed: bool) -> Quantized:
    """Returns the codes of x as it lies and, where the kernel has a gradient, transposed."""
    codes = Codes(FORMAT, True, transposed, spec.op)
    return quantize(x, codes, split=x.ndim - 1, order=spec.order)


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
    return gathered(spec.product, _codes(spec, w, forward=False), summed + outs, x, spec.product.x)


def forward(spec: Fp8, x: Array, xq: Quantized, w: Quantized) -> Array:
    """Returns the product of codes; x says how its rows lie."""
    rows, summed, outs = spec.labels
    codes = gathered(spec.product, _codes(spec, w, forward=True), outs + summed, x, spec.product.x)
    dot = spec.contraction(
        rows + summed, outs + summed, rows + outs, spec.dtype, spec.product.out_sharding
    )
    return product(dot, xq.q, codes, xq.scale * w.scale, order=spec.order)[0]


# ---------------------------------------------------------------- the tangent


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent of the product, in the directions of x, the kernel and its main gradient.

    Its operands are the kernel's codes (in, out) and scale where x moves; xᵀ's codes (in, rows) and
    scale where the kernel does; then the tangents.
    """

    fp8: Fp8
    moves: tuple[bool, ...]

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.fp8.op

    def read(self, operands: Any) -> tuple[Any, ...]:
        """Returns (kernel codes, scale, x codes, scale, tangents), None for what is not there."""
        given = list(operands)
        take = lambda there: given.pop(0) if there else None
        w = take(self.moves[0]), take(self.moves[0])
        x = take(any(self.moves[1:])), take(any(self.moves[1:]))
        return *w, *x, [take(moved) for moved in self.moves]


def define_tangent(spec: Tangent, *operands: Array) -> list[Array]:
    """`(..., tangents) -> (dy,)`, of the dequantized operands."""
    w, w_scale, x, x_scale, (dx, *dkernels) = spec.read(operands)
    fp8 = spec.fp8
    terms = [] if dx is None else [product_with_kernel(fp8, dx, w, w_scale)]
    terms += [product_with_x(fp8, x, x_scale, d) for d in dkernels if d is not None]
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


def _transpose(cts: Any, *operands: Any, spec: Tangent, order: Order) -> list[Any]:
    del order
    (dy,) = cts
    nothing = [None] * len(operands)
    if type(dy) is ad.Zero:
        return nothing
    w, w_scale, x, x_scale, linear = spec.read(operands)
    fp8, (dx, *dkernels) = spec.fp8, linear
    wanted = lambda t: t is not None and ad.is_undefined_primal(t)
    g = gradient_codes(fp8, dy, q=wanted(dx), qt=any(map(wanted, dkernels)))
    found: list[Any] = [None, None, None]
    if wanted(dx):
        found[0] = input_gradient(fp8, g, w, w_scale, dx.aval)
    for i, d in enumerate(dkernels, 1):
        if wanted(d):
            found[i] = kernel_gradient(fp8, x, x_scale, g, d.aval)
    return nothing[: len(operands) - sum(spec.moves)] + [
        f for f, moved in zip(found, spec.moves) if moved
    ]


def gradient_codes(fp8: Fp8, dy: Array, *, q: bool, qt: bool) -> Quantized:
    """Returns the codes of a result's gradient: q for the gradient of x, qt for the kernel's."""
    rows, _, _ = fp8.labels
    return quantize(dy, Codes(FORMAT, q, qt, fp8.op), split=len(rows), order=fp8.order)


def input_gradient(fp8: Fp8, g: Quantized, w: Array, w_scale: Array, like: Any) -> Array:
    """Returns the gradient of x, of the type `like`, from codes of dy and of the kernel."""
    rows, summed, outs = fp8.labels
    operands = rows + outs, summed + outs, rows + summed
    dot = fp8.contraction(*operands, like.dtype, _explicit(like))
    return product(dot, g.q, w, g.scale * w_scale, order=fp8.order)[0]


def kernel_gradient(fp8: Fp8, x: Array, x_scale: Array, g: Quantized, like: Any) -> Array:
    """Returns the gradient of the kernel, of the type `like`, from codes of xᵀ and dyᵀ."""
    rows, summed, outs = fp8.labels
    sums = compute_dtype(fp8.dtype)
    dtype = like.dtype if like.dtype in (jnp.dtype(fp8.dtype), sums) else sums
    a, b = (x, summed + rows), (g.qt, outs + rows)
    a, b = (b, a) if fp8.contract else (a, b)  # so that the result needs no transpose
    dot = fp8.contraction(a[1], b[1], fp8.product.kernel, dtype, _explicit(like))
    return product(dot, a[0], b[0], x_scale * g.scale, order=fp8.order)[0].astype(like.dtype)


def _explicit(aval: Any) -> NamedSharding | None:
    return aval.sharding if aval.sharding.mesh.explicit_axes else None


def _batch(op: Op, operands: Any, dims: Any, *, spec: Tangent, order: Order) -> Any:
    """A batch dimension of the rows is one more dimension of them, the first."""
    w, w_scale, x, x_scale, (dx, *dkernels) = spec.read(dims)
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    of_kernels = [w, w_scale, x_scale, *dkernels]
    if any(d is not None for d in of_kernels) or spec.fp8.product.out_sharding is not None:
        fn = functools.partial(define_tangent, spec)
        return jax.vmap(fn, tuple(dims), axis_size=size)(*operands), [0]
    del x, dx
    w, w_scale, x, x_scale, tangents = spec.read(operands)
    at = spec.read(dims)
    moved = [w, w_scale] if spec.moves[0] else []
    if any(spec.moves[1:]):
        moved += [batch_at(x, at[2], 1, size), x_scale]
    moved += [batch_at(tangents[0], at[4][0], 0, size)] if spec.moves[0] else []
    moved += [t for t in tangents[1:] if t is not None]
    return op(replace(spec, fp8=spec.fp8.with_batch()), *moved, order=order), [0]


tangent = Op("fp8_tangent", define_tangent, batch=_batch, transpose=_transpose)
