"""The product of a dense layer, whose kernel's gradient is the output of one GEMM.

To JAX, `x @ kernel.astype(bfloat16)` is a rounding and a product, so the gradient of a float32
kernel is rounded to bfloat16 by the product's derivative and widened again by the rounding's. Here
the rounding belongs to the product: the gradient is one GEMM of bfloat16 operands that writes
float32. XLA then folds `sum + gradient` into that GEMM when gradients are accumulated.

The forward product and both backward ones are ordinary `dot_general`s; the only primitive here is
the tangent in the direction of the kernel, so that its transpose can choose the GEMM's output.
"""

import dataclasses
import functools
import string

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from .main_gradient import marked
from .rounding import wide
from .specs import axes_of, whole, without


@dataclasses.dataclass(frozen=True)
class Product:
    """`einsum(f"{x},{kernel}->{out}")`, in x's dtype."""

    x: str
    kernel: str
    out: str
    precision: str | None
    out_sharding: NamedSharding | jax.P | None

    @classmethod
    def of(cls, x_ndim, kernel_ndim, contract, precision=None, out_sharding=None) -> "Product":
        """x's last axis with the kernel's axis `contract`; its others follow x's in the result."""
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
    x: jax.Array,
    kernel: jax.Array,
    *,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
) -> jax.Array:
    """The product of x's last axis with the kernel's axis `contract`, computed in `dtype`.

    Args:
      x: `(*rows, n)`.
      kernel: any rank; its axis `contract` has n elements, the others follow x's rows in the
        result. Its gradient has its dtype, and for float32 (float64) is the GEMM's own output.
      dtype: of both operands of the GEMM and of the result; sums run in float32 or wider.
      contract: 0 for Flax's `(in, out)`, 1 for Equinox's `(out, in)`.
      out_sharding: of the result, where both operands are split over the summed axis on an Explicit
        mesh, as for `jax.lax.dot_general`.
    """
    precision = jax.config.jax_default_matmul_precision  # the backward's too
    product = Product.of(x.ndim, kernel.ndim, contract, precision, out_sharding)
    return _matmul(product, *equally_varying(x.astype(dtype), *marked(kernel)))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _matmul(product: Product, x: jax.Array, kernel: jax.Array, main: jax.Array | None) -> jax.Array:
    del main
    return dot(product, x, operand_of(product, x, kernel))


@functools.partial(_matmul.defjvp, symbolic_zeros=True)
def _(product, primals, tangents):
    (x, kernel, _), (dx, dkernel, dmain) = primals, tangents
    operand = operand_of(product, x, kernel)  # once: an FSDP kernel is gathered once for both ways
    y = dot(product, x, operand)
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(dot(product, dx, operand))
    for tangent in (dkernel, dmain):
        if tangent is not None and not isinstance(tangent, SymbolicZero):
            terms.append(tangent_p.bind(x, tangent, product=product))
    return y, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(y)


def dot(product, x, operand):
    summed = ((len(product.x) - 1,), (product.kernel.index(product.x[-1]),))
    return lax.dot_general(
        x,
        operand,
        (summed, ((), ())),
        precision=product.precision,
        out_sharding=product.out_sharding,
    )


def operand_of(product, x, kernel):
    """The kernel as the GEMM reads it: rounded, and gathered over mesh axes that split the rows."""
    kernel = kernel.astype(x.dtype)
    sharding = jax.typeof(kernel).sharding
    if not sharding.mesh.explicit_axes:
        return kernel
    rows = zip(product.x, jax.typeof(x).sharding.spec)
    taken = {axis for letter, entry in rows if letter in product.out for axis in axes_of(entry)}
    stored = whole(sharding.spec, kernel.ndim)
    spec = tuple(
        entry if letter in product.x else without(entry, taken)
        for letter, entry in zip(product.kernel, stored)
    )
    return kernel if spec == stored else jax.sharding.reshard(kernel, jax.P(*spec))


# ---------------------------------------------------------------- the tangent

tangent_p = Primitive("normfuse_matmul_tangent")


def _tangent(x, kernel, *, product):
    return jnp.einsum(
        f"{product.x},{product.kernel}->{product.out}",
        x,
        operand_of(product, x, kernel),
        precision=product.precision,
        out_sharding=product.out_sharding,
    )


def input_gradient(product, dy, x, operand):
    """The gradient of x, given by its type, for the kernel as the GEMM reads it."""
    return jnp.einsum(
        f"{product.out},{product.kernel}->{product.x}",
        dy,
        operand,
        precision=product.precision,
        out_sharding=_explicit(x),
    )


def kernel_gradient(product, dy, x, kernel):
    """The gradient of the kernel, given by its type: the GEMM's own output, if in float32."""
    sums = wide(x.dtype)
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


def _transpose_x(dy, x, kernel, *, product):
    return input_gradient(product, dy, x.aval, operand_of(product, x.aval, kernel))


def _transpose_kernel(dy, x, kernel, *, product):
    return kernel_gradient(product, dy, x, kernel.aval)


def _batch(args, dims, *, product):
    """A batch dimension is one more letter, first in the result."""
    letter = next(c for c in string.ascii_letters if c not in product.x + product.kernel)
    x, kernel = (
        label if dim is None else label[:dim] + letter + label[dim:]
        for label, dim in zip((product.x, product.kernel), dims)
    )
    sharding = product.out_sharding
    if sharding is not None:
        array, dim = next((a, d) for a, d in zip(args, dims) if d is not None)
        split = whole(jax.typeof(array).sharding.spec, array.ndim)[dim]
        spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
        sharding = jax.P(split, *spec)
    product = dataclasses.replace(
        product, x=x, kernel=kernel, out=letter + product.out, out_sharding=sharding
    )
    return tangent_p.bind(*args, product=product), 0


tangent_p.def_impl(_tangent)
tangent_p.def_abstract_eval(
    lambda x, kernel, *, product: jax.make_jaxpr(functools.partial(_tangent, product=product))(
        x, kernel
    ).out_avals[0]
)
mlir.register_lowering(tangent_p, mlir.lower_fun(_tangent, multiple_results=False))
ad.defbilinear(tangent_p, _transpose_x, _transpose_kernel)
batching.primitive_batchers[tangent_p] = _batch


# ---------------------------------------------------------------- shardings in types


def equally_varying(*arrays):
    """Under shard_map with check_vma: the transpose of what is added here sums the gradients."""
    of = lambda a: jax.typeof(a).manual_axis_type.varying
    every = frozenset().union(*(of(a) for a in arrays if a is not None))
    return [
        lax.pcast(a, tuple(every - of(a)), to="varying") if a is not None and every - of(a) else a
        for a in arrays
    ]


def _explicit(aval):
    return aval.sharding if aval.sharding.mesh.explicit_axes else None
