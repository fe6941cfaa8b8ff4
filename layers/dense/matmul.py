"""The product of a dense layer, whose kernel's gradient is the output of one GEMM.

To JAX, `x @ kernel.astype(bfloat16)` is a rounding and a product, so the gradient of a float32
kernel is rounded to bfloat16 by the product's derivative and widened again by the rounding's. Here
the rounding belongs to the product: the gradient is one GEMM of bfloat16 operands that writes
float32. XLA then folds `sum + gradient` into that GEMM when gradients are accumulated.

The forward product and both backward ones are ordinary `dot_general`s.

A bfloat16 kernel has a bfloat16 gradient in JAX: the output of its GEMM rounded, then widened again
by whoever sums gradients in float32. So with such a kernel the product takes a float32 array of
zeros of the kernel's shape. The product does not depend on it, but where the zeros have a tangent,
its derivative along the kernel is along the zeros instead. The gradient of these zeros is therefore
the kernel's *main gradient*, as the GEMM writes it. `normfuse.accumulate_gradients` asks for it;
otherwise nothing uses the zeros.

The left operand may be an activation, as large as the arrays it is made of, which are kept anyway:
then it is not kept for the backward, but made again by the pass that computes their gradients (Chen
et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174).
"""

import dataclasses
import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from ...native.dtypes import NARROW, compute_dtype
from ...native.implementation import Order
from ..core.derivative import Function, differentiable
from ..core.op import Batching, Derivative, Op, batch_at, equally_varying, jvp_along, moves, placed
from ..core.sharding import axes_of, whole, without
from . import epilogue
from .epilogue import Epilogue


@dataclasses.dataclass(frozen=True)
class Product:
    """`einsum(f"{x},{kernel}->{out}")`, in x's dtype."""

    x: str
    kernel: str
    out: str
    precision: str | None
    out_sharding: NamedSharding | jax.P | None

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

    def with_batch(self) -> "Product":
        x, kernel, out = batched((self.x, self.kernel, self.out), (0, None))
        return dataclasses.replace(self, x=x, kernel=kernel, out=out)


@dataclasses.dataclass(frozen=True)
class Activated:
    """The left operand `activation(z) · up`, or without up: its epilogue, placed as said."""

    epilogue: Epilogue
    order: Order
    sharding: jax.P | None = None

    def forward(self, args: Sequence[Array | None]) -> Array:
        """Returns the value of z and up, which may be None."""
        (value,) = epilogue.forward(self.epilogue, *args, None, order=self.order)
        return placed(value, self.sharding)

    def backward(self, dvalue: Array, args: Sequence[Array | None], with_value: bool) -> Any:
        """Returns the gradients of args and, if `with_value`, the value; else None."""
        dvalue = placed(dvalue, self.sharding)  # and not as the gradient of the layer's output
        spec = dataclasses.replace(self.epilogue, with_value=with_value)
        *gradients, _, value = epilogue.backward(spec, dvalue, *args, None, order=self.order)
        return gradients, value

    def with_batch(self) -> "Activated":
        if self.sharding is None:
            return self
        return dataclasses.replace(self, sharding=jax.P(jax.P.UNCONSTRAINED, *self.sharding))


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
    return product((x.astype(dtype),), kernel, contract=contract, out_sharding=out_sharding)


def product(
    args: tuple[Array, *tuple[Array | None, ...]],
    kernel: Array,
    *,
    value: Activated | None = None,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """Returns the product of `value` of args, or of the only one, with a kernel, in its dtype."""
    precision = jax.config.jax_default_matmul_precision  # the backward's too
    one = Product.of(args[0].ndim, kernel.ndim, contract, precision, out_sharding)
    *operands, kernel, main = equally_varying(*args, *with_main_gradient(kernel))
    return differentiable(_MatMul(one, value), tuple(operands), kernel, main)[0]


product_p = Primitive("normfuse_product")
"""`x -> x`: marks in a traced program the x of a product that is made here, for `fuse`."""
product_p.def_impl(lambda x: x)
product_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(product_p, lambda ctx, x: [x])
ad.deflinear(product_p, lambda dx: [dx])
batching.primitive_batchers[product_p] = lambda args, dims: (product_p.bind(*args), *dims)


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


# ---------------------------------------------------------------- the derivative


@dataclasses.dataclass(frozen=True)
class _MatMul(Function):
    """The product of a left operand, x or `value` of args, with a kernel."""

    product: Product
    value: Activated | None

    def left(self, args: Sequence[Array]) -> Array:
        return args[0] if self.value is None else self.value.forward(args)

    def forward(self, operands: Any, moved: tuple[bool, ...] | None) -> Any:
        """Returns `(y,)`, and args and the kernel, as far as they are read."""
        args, kernel, _ = operands
        x = self.left(args)
        x = x if moved else product_p.bind(x)
        operand = operand_of(self.product, x, kernel)  # once: FSDP gathers it once for both ways
        *of_args, of_kernel, of_main = moved or (False,) * (len(args) + 2)
        recomputed = self.value is not None and any(of_args)
        kept = list(args) if recomputed or of_kernel or of_main else None
        one = self.product
        dims = ((len(one.x) - 1,), (one.kernel.index(one.x[-1]),)), ((), ())
        options = {"precision": one.precision, "out_sharding": one.out_sharding}
        y = lax.dot_general(x, operand, dims, **options)
        return [y], (kept, operand if any(of_args) else None)

    def _product(self, labels: str, a: Array, b: Array, sharding: Any, **options: Any) -> Array:
        options |= {"precision": self.product.precision, "out_sharding": sharding}
        return jnp.einsum(labels, a, b, **options)

    def tangents(self, *tangents: Any) -> list[Any]:
        dargs, dkernel, dmain = tangents
        return [*dargs, *asked(dkernel, dmain)]

    def tangent(self, kept: Any, tangents: Sequence[Any]) -> list[Array]:
        (args, operand), (*dargs, dkernel, dmain), one = kept, tangents, self.product
        labels, terms = f"{one.x},{one.kernel}->{one.out}", []
        if operand is not None:
            dx = dargs[0]
            if self.value is not None:
                _, (dx,) = jvp_along(lambda *args: [self.left(args)], args, dargs)
            terms.append(self._product(labels, dx, operand, one.out_sharding))
        for d in (dkernel, dmain):
            if d is not None:
                x = self.left(args)
                d = operand_of(one, x, d)
                terms.append(self._product(labels, x, d, one.out_sharding))
        return [functools.reduce(jnp.add, terms)]

    def gradients(self, cts: Any, kept: Any, likes: Sequence[Any]) -> list[Any]:
        ((dy,), (args, operand)), (*of_args, dkernel, dmain) = (cts, kept), likes
        one = self.product
        of_kernel = dkernel is not None or dmain is not None
        like, dargs = of_args[0], []
        if self.value is not None:
            # All that the value is made of is there from the forward on, so XLA would make it again
            # at once, and keep it: recomputing was to save that.
            args, _ = lax.optimization_barrier((args, dy))
            dtype = jnp.dtype(self.value.epilogue.out_dtype)
            like = jax.typeof(args[0]).update(dtype=dtype, weak_type=False)
        x = args[0] if of_kernel else None
        if operand is not None and any(d is not None for d in of_args):
            labels = f"{one.out},{one.kernel}->{one.x}"
            dargs = [self._product(labels, dy, operand, explicit(like))]
            if self.value is not None:
                dargs, x = self.value.backward(dargs[0], args, of_kernel)
        elif of_kernel:
            x = self.left(args)
        dargs += [None] * (len(of_args) - len(dargs))
        pairs: Any = zip(dargs, of_args)
        gradients = [None if d is None else g.astype(d.dtype) for g, d in pairs]
        each = [dkernel, dmain]
        left: Any = x  # None only where neither is asked for
        return gradients + [None if d is None else self._kernel_gradient(left, dy, d) for d in each]

    def _kernel_gradient(self, x: Array, dy: Array, kernel: Any) -> Array:
        """The gradient of the kernel, given by its type: the GEMM's output, if in float32."""
        one, sums = self.product, compute_dtype(x.dtype)
        labels = f"{one.x},{one.out}->{one.kernel}"
        plain = functools.partial(self._product, labels, sharding=explicit(kernel))
        if kernel.dtype == x.dtype or sums == x.dtype:
            return plain(x, dy).astype(kernel.dtype)
        # XLA on CPUs casts the operands, which is exact, but not in all layouts of batches.
        cast = lambda x, dy: plain(x.astype(sums), dy.astype(sums))
        wide = functools.partial(plain, preferred_element_type=sums)
        return lax.platform_dependent(x, dy, cpu=cast, default=wide).astype(kernel.dtype)

    def rows(self, kept: Any) -> Any:
        """The arguments have them, and so has the left operand."""
        if self.product.out_sharding is not None:
            return None
        of_args = [0] if self.value is None else [0, 0]  # z and up
        return (0, -1), [*of_args, -1, -1]

    def with_batch(self) -> "_MatMul":
        value = self.value and self.value.with_batch()
        return dataclasses.replace(self, product=self.product.with_batch(), value=value)

    def with_kernels(self, kept: Any, tangents: Sequence[Any]) -> "_MatMul | None":
        """The product of several kernels, or of an x for each: it stays one GEMM."""
        (args, operand), (dx, *dkernels) = kept, tangents
        of_x, of_kernel = (
            {*flags} - {None} for flags in ((*(args or ()), dx), (operand, *dkernels))
        )
        placed = self.product.out_sharding is not None
        if self.value is not None or placed or len(of_x) > 1 or len(of_kernel) > 1:
            return None
        dims = [0 if True in flags else None for flags in (of_x, of_kernel)]
        x, kernel, out = batched((self.product.x, self.product.kernel, self.product.out), dims)
        product = dataclasses.replace(self.product, x=x, kernel=kernel, out=out)
        return dataclasses.replace(self, product=product)


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


# ---------------------------------------------------------------- main gradients

kernel_p = Primitive("normfuse_kernel")
"""`(kernel, zeros) -> (kernel, zeros)`: marks in a traced program which zeros are a kernel's."""
kernel_p.multiple_results = True
kernel_p.def_impl(lambda *operands: list(operands))
kernel_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(kernel_p, lambda ctx, *values: list(values))
ad.primitive_jvps[kernel_p] = lambda primals, tangents: (kernel_p.bind(*primals), list(tangents))
ad.primitive_transposes[kernel_p] = lambda cts, *_: list(cts)


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
    return (None, dmain) if moves(dmain) else (dkernel, None)


# ---------------------------------------------------------------- shardings in types


def explicit(aval: Any) -> NamedSharding | None:
    """Returns the sharding of a type on an Explicit mesh; None elsewhere."""
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


def shared(x: Array, count: int) -> list[Array]:
    """Returns x for each of `count` products, whose gradients are then `chained`."""
    return [x] if count == 1 else _shared(count, x)


def _push_shared(primals: Any, tangents: Any, *, spec: int, order: Order) -> Any:
    (x,), (dx,) = primals, tangents
    moved = [dx] * spec if type(dx) is ad.Zero else _shared(spec, dx, order=order)
    return [x] * spec, moved  # one x: a scan would keep each result for the backward


def _sum_shared(cts: Any, x: Any, *, spec: int, order: Order) -> list[Any]:
    del x, spec, order
    live = [ct for ct in cts if type(ct) is not ad.Zero]
    return [chained(live) if live else None]


def _batch_shared(op: Op, args: Any, dims: Any, *, spec: int, order: Order) -> Any:
    return op(spec, *args, order=order), [dims[0]] * spec


_shared = Op(
    "shared",
    lambda count, x: [x] * count,
    batching=Batching(rule=_batch_shared),
    derivative=Derivative(jvp=_push_shared, transpose=_sum_shared),
)
