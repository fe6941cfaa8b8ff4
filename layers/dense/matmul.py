"""The product of a dense layer, whose kernel's gradient is the output of one GEMM.

To JAX, `x @ kernel.astype(bfloat16)` is a rounding and a product, so the gradient of a float32
kernel is rounded to bfloat16 by the product's derivative and widened again by the rounding's. Here
the rounding belongs to the product: the gradient is one GEMM of bfloat16 operands that writes
float32. XLA then folds `sum + gradient` into that GEMM when gradients are accumulated.

The forward product and both backward ones are ordinary `dot_general`s; the only operation here is
the tangent in the direction of the kernel, so that its transpose can choose the GEMM's output.

A bfloat16 kernel has a bfloat16 gradient in JAX: the output of its GEMM rounded, then widened again
by whoever sums gradients in float32. So with such a kernel the product takes a float32 array of
zeros of the kernel's shape. The product does not depend on it, but where the zeros have a tangent,
its derivative along the kernel is along the zeros instead. The gradient of these zeros is therefore
the kernel's *main gradient*, as the GEMM writes it. `normfuse.accumulate_gradients` asks for it;
otherwise nothing uses the zeros.
"""

import dataclasses
import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from ...native.dtypes import NARROW, compute_dtype
from ...native.implementation import Order
from ..core.op import Op, batch_at, vary, varying_axes
from ..core.sharding import axes_of, whole, without


@dataclasses.dataclass(frozen=True)
class Product:
    """`einsum(f"{x},{kernel}->{out}")`, in x's dtype."""

    x: str
    kernel: str
    out: str
    precision: str | None
    out_sharding: NamedSharding | jax.P | None
    op: str = "dense"

    @classmethod
    def of(
        cls,
        x_ndim: int,
        kernel_ndim: int,
        contract: int,
        precision: str | None = None,
        out_sharding: NamedSharding | jax.P | None = None,
    ) -> "Product":
        """The product of x's last axis with the kernel's axis `contract`.

        The kernel's other axes follow x's in the result.
        """
        letters = string.ascii_letters
        rows, inside = letters[: x_ndim - 1], letters[x_ndim - 1]
        outside = letters[x_ndim : x_ndim + kernel_ndim - 1]
        return cls(
            x=rows + inside,
            kernel=outside[:contract] + inside + outside[contract:],
            out=rows + outside,
            precision=precision,
            out_sharding=out_sharding,
        )


def matmul(
    x: Array,
    kernel: Array,
    *,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """Returns the product of x's last axis with the kernel's axis `contract`, computed in `dtype`.

    `contract` is 0 for Flax's `(in, out)`, 1 for Equinox's `(out, in)`; the kernel's other axes
    follow x's rows in the result. The kernel's gradient has its dtype, and for float32 (float64) is
    the GEMM's own output. Sums run in float32 or wider. `out_sharding` is as for
    `jax.lax.dot_general`: needed if both operands are split over the summed axis on an Explicit
    mesh.
    """
    precision = jax.config.jax_default_matmul_precision  # the backward's too
    product = Product.of(x.ndim, kernel.ndim, contract, precision, out_sharding)
    return _matmul(product, *equally_varying(x.astype(dtype), *with_main_gradient(kernel)))


product_p = Primitive("normfuse_product")
"""`x -> x`: marks in a traced program the x of a product that is made here, for `fuse`."""
product_p.def_impl(lambda x: x)
product_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(product_p, lambda ctx, x: [x])
ad.deflinear(product_p, lambda dx: [dx])
batching.primitive_batchers[product_p] = lambda args, dims: (product_p.bind(*args), *dims)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul(product: Product, x: Array, kernel: Array, main: Array | None) -> Array:
    del main
    return dot(product, product_p.bind(x), operand_of(product, x, kernel))


@functools.partial(_matmul.defjvp, symbolic_zeros=True)
def _(product, primals, tangents):
    (x, kernel, _), (dx, dkernel, dmain) = primals, tangents
    operand = operand_of(product, x, kernel)  # once: an FSDP kernel is gathered once for both ways
    y = dot(product, x, operand)
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(dot(product, dx, operand))
    for dk in asked(dkernel, dmain):
        if dk is not None and not isinstance(dk, SymbolicZero):
            terms += tangent(product, x, dk)
    return y, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(y)


def dot(product: Product, x: Array, operand: Array) -> Array:
    """Returns the product with a kernel from `operand_of`."""
    summed = ((len(product.x) - 1,), (product.kernel.index(product.x[-1]),))
    return lax.dot_general(
        x,
        operand,
        (summed, ((), ())),
        precision=product.precision,
        out_sharding=product.out_sharding,
    )


def operand_of(product: Product, x: Any, kernel: Array) -> Array:
    """Returns the kernel as the GEMM reads it: rounded, and gathered over axes that split rows."""
    return gathered(product, kernel.astype(x.dtype), product.kernel, x, product.x)


def gathered(
    product: Product, kernel: Array, labels: str, x: Any, x_labels: str, *, summed: bool = False
) -> Array:
    """Returns the kernel, on an Explicit mesh gathered over the axes that split the rows of x.

    The letters are those of `product`; either operand's dimensions may be in another order there.
    The `summed` dimension is left to XLA unless asked for.
    """
    sharding = jax.typeof(kernel).sharding
    if not sharding.mesh.explicit_axes:
        return kernel
    rows = zip(x_labels, jax.typeof(x).sharding.spec)
    taken = {axis for letter, entry in rows if letter in product.out for axis in axes_of(entry)}
    stored = whole(sharding.spec, kernel.ndim)
    spec = tuple(
        entry if letter in product.x and not summed else without(entry, taken)
        for letter, entry in zip(labels, stored)
    )
    return kernel if spec == stored else jax.sharding.reshard(kernel, jax.P(*spec))


# ---------------------------------------------------------------- the tangent


def define_tangent(product: Product, x: Array, kernel: Array) -> list[Array]:
    """`(x, dkernel) -> (dy,)`, linear in both."""
    return [
        jnp.einsum(
            f"{product.x},{product.kernel}->{product.out}",
            x,
            operand_of(product, x, kernel),
            precision=product.precision,
            out_sharding=product.out_sharding,
        )
    ]


def input_gradient(product: Product, dy: Array, x: Any, operand: Array) -> Array:
    """Returns the gradient of x, given by its type, for the kernel as the GEMM reads it."""
    return jnp.einsum(
        f"{product.out},{product.kernel}->{product.x}",
        dy,
        operand,
        precision=product.precision,
        out_sharding=_explicit(x),
    )


def kernel_gradient(product: Product, dy: Array, x: Array, kernel: Any) -> Array:
    """Returns the gradient of the kernel, given by its type: the GEMM's output, if in float32."""
    sums = compute_dtype(x.dtype)
    written = kernel.dtype if kernel.dtype in (x.dtype, sums) else sums
    dkernel = jnp.einsum(
        f"{product.x},{product.out}->{product.kernel}",
        x,
        dy,
        precision=product.precision,
        preferred_element_type=written,
        out_sharding=_explicit(kernel),
    )
    return dkernel.astype(kernel.dtype)


def _jvp(primals: Any, tangents: Any, *, spec: Product, order: Order) -> Any:
    (x, kernel), (dx, dkernel) = primals, tangents
    (y,) = tangent(spec, x, kernel, order=order)
    terms = [] if type(dx) is ad.Zero else tangent(spec, dx, kernel)
    terms += [] if type(dkernel) is ad.Zero else tangent(spec, x, dkernel)
    return [y], [functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(y)]


def _transpose(cts: Any, x: Any, kernel: Any, *, spec: Product, order: Order) -> list[Any]:
    del order
    (dy,) = cts
    if type(dy) is ad.Zero:
        return [None, None]
    if ad.is_undefined_primal(x):
        return [input_gradient(spec, dy, x.aval, operand_of(spec, x.aval, kernel)), None]
    return [None, kernel_gradient(spec, dy, x, kernel.aval)]


def _batch(op: Op, args: Any, dims: Any, *, spec: Product, order: Order) -> Any:
    """A batch dimension is one more letter, first in the result: it stays one GEMM."""
    letters = batched((spec.x, spec.kernel, spec.out), dims)
    sharding = batched_sharding(spec.out_sharding, args, dims)
    fields = dict(zip(("x", "kernel", "out"), letters), out_sharding=sharding)
    return op(dataclasses.replace(spec, **fields), *args, order=order), [0]


def batched(labels: tuple[str, str, str], dims: Any) -> tuple[str, str, str]:
    """Returns a product's letters with one more, at `dims` of the operands, first in the result."""
    a, b, out = labels
    letter = next(c for c in string.ascii_letters if c not in a + b)
    at = lambda text, dim: text if dim is None else text[:dim] + letter + text[dim:]
    return at(a, dims[0]), at(b, dims[1]), letter + out


def batched_sharding(sharding: Any, args: Any, dims: Any) -> jax.P | None:
    """Returns the result's sharding with a first dimension that is split as the batch is."""
    if sharding is None:
        return None
    array, dim = next((a, d) for a, d in zip(args, dims) if d is not None)
    split = whole(jax.typeof(array).sharding.spec, array.ndim)[dim]
    return jax.P(split, *(sharding.spec if isinstance(sharding, NamedSharding) else sharding))


tangent = Op("matmul_tangent", define_tangent, batch=_batch, jvp=_jvp, transpose=_transpose)


# ---------------------------------------------------------------- main gradients

kernel_p = Primitive("normfuse_kernel")
"""`(kernel, zeros) -> (kernel, zeros)`: marks in a traced program which zeros are a kernel's."""
kernel_p.multiple_results = True
kernel_p.def_impl(lambda *operands: list(operands))
kernel_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(kernel_p, lambda ctx, *values: list(values))
ad.primitive_jvps[kernel_p] = lambda primals, tangents: (kernel_p.bind(*primals), list(tangents))


def _batch_kernel(args: Any, dims: Any) -> tuple[list[Array], list[int]]:
    """A batch of kernels has a batch of zeros, whose gradients are theirs.

    Both come first: XLA on CPUs has no float32 product of bfloat16 batches that lie elsewhere.
    """
    size = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    return kernel_p.bind(*[batch_at(a, d, 0, size) for a, d in zip(args, dims)]), [0, 0]


batching.primitive_batchers[kernel_p] = _batch_kernel


def with_main_gradient(kernel: Array) -> tuple[Array, Array | None]:
    """Returns the kernel, and the zeros whose gradient is its main gradient.

    None for a kernel in float32 or wider: its own gradient is not rounded.
    """
    if kernel.dtype.name not in NARROW:
        return kernel, None
    kernel, zeros = kernel_p.bind(kernel, lax.full_like(kernel, 0, dtype=jnp.float32))
    return kernel, zeros


def asked(dkernel: Any, dmain: Any = None) -> tuple[Any, Any]:
    """Returns a product's tangents along its kernel and its zeros, with None for one of them.

    A tangent of the zeros asks for the main gradient, which then has all that the kernel's own
    would have from this product.
    """
    moves = dmain is not None and not isinstance(dmain, SymbolicZero | ad.Zero)
    return (None, dmain) if moves else (dkernel, None)


# ---------------------------------------------------------------- shardings in types


def equally_varying(*arrays: Array | None) -> list[Any]:
    """Returns the arrays varying over the same manual axes.

    Under shard_map with check_vma the transpose of what is added here sums the gradients.
    """
    axes = varying_axes(*arrays)
    return [None if a is None else vary(a, axes) for a in arrays]


def _explicit(aval: Any) -> NamedSharding | None:
    return aval.sharding if aval.sharding.mesh.explicit_axes else None


# ---------------------------------------------------------------- one x of several products
# cuBLAS can add an array to a product as it writes it (beta = 1). XLA uses that for a sum with a
# product on its left, once a call: in `(v + k) + q`, as JAX sums the gradients of an array that is
# read three times, the second addition stays a pass over all of x's size; `v + (k + q)` has none.
# Before JAX 0.12, with Triton (`xla_gpu_enable_triton_gemm`), XLA takes products away before it
# looks for such sums, and no order of them helps.


def chained(parts: Sequence[Array]) -> Array:
    """Returns the sum of products, so that XLA adds each to those before it in its own call."""
    return functools.reduce(lambda before, part: part + before, parts)


@dataclasses.dataclass(frozen=True)
class Shared:
    """The number of products that read x."""

    count: int
    op: str = "dense"  # the function the user called


def shared(x: Array, count: int) -> list[Array]:
    """Returns x for each of `count` products, whose gradients are then `chained`."""
    return [x] if count == 1 else _shared(Shared(count), x)


def _push_shared(primals: Any, tangents: Any, *, spec: Shared, order: Order) -> Any:
    (x,), (dx,) = primals, tangents
    moved = [dx] * spec.count if type(dx) is ad.Zero else _shared(spec, dx, order=order)
    return [x] * spec.count, moved  # one x: a scan would keep each result for the backward


def _sum_shared(cts: Any, x: Any, *, spec: Shared, order: Order) -> list[Any]:
    del x, spec, order
    live = [ct for ct in cts if type(ct) is not ad.Zero]
    return [chained(live) if live else None]


def _batch_shared(op: Op, args: Any, dims: Any, *, spec: Shared, order: Order) -> Any:
    return op(spec, *args, order=order), [dims[0]] * spec.count


_shared = Op(
    "shared",
    lambda spec, x: [x] * spec.count,
    batch=_batch_shared,
    jvp=_push_shared,
    transpose=_sum_shared,
)
