"""A product whose left operand is computed again in the backward, not kept (rematerialisation).

A dense layer's gradient needs its input. Where that is a gated activation, it is as large as the
arrays it was made of, which are kept anyway: so it is made again, by the pass that computes their
gradients.

    y = value(args) · kernel

The tangent is one operation, linear in the tangents, whose transpose is the backward as one would
write it by hand.

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import NamedSharding

from ...native.implementation import Order
from ..core.op import Op, batch_at, match, placed
from . import epilogue
from .epilogue import Epilogue, Scalar
from .matmul import (
    Product,
    asked,
    dot,
    equally_varying,
    input_gradient,
    kernel_gradient,
    operand_of,
    product_p,
    with_main_gradient,
)
from .matmul import tangent as product_tangent

# ---------------------------------------------------------------- the left operand


@dataclasses.dataclass(frozen=True)
class Activated:
    """`function(z) · up`, or without up, in `dtype`, placed as `sharding` says."""

    op: str
    function: Scalar
    has_up: bool
    dtype: str
    order: Order
    sharding: jax.P | None = None

    def epilogue(self, args: Sequence[Any], **flags: Any) -> Epilogue:
        """Returns the epilogue of `args`, or a derivative of it."""
        return Epilogue(
            op=self.op,
            function=self.function,
            axes=(),
            has_up=self.has_up,
            out_dtype=self.dtype,
            **flags,
        )

    def forward(self, args: Sequence[Array]) -> Array:
        """Returns the value."""
        (value,) = epilogue.forward(self.epilogue(args), *args, order=self.order)
        return placed(value, self.sharding)

    def tangent(self, args: Sequence[Array], dargs: Sequence[Any]) -> Array:
        """Returns the value's tangent; zero tangents are None, and not all are."""
        moving = [d for d in dargs if d is not None]
        moves = dargs[0] is not None, any(d is not None for d in dargs[1:]), False
        spec = self.epilogue(args, moves=moves)
        return epilogue.tangent(spec, *args, *moving, order=self.order)[0]

    def backward(self, dvalue: Array, args: Sequence[Array], with_value: bool) -> list[Array]:
        """Returns the gradients of args and, if `with_value`, the value."""
        dvalue = placed(dvalue, self.sharding)  # and not as the gradient of the layer's output
        spec = self.epilogue(args, with_value=with_value)
        return epilogue.backward(spec, dvalue, *args, order=self.order)

    def value_type(self, args: Sequence[Array]) -> Any:
        """Returns the value's type."""
        z = jax.typeof(args[0])
        return z.update(dtype=jnp.dtype(self.dtype), weak_type=False)

    def batched(self) -> "Activated":
        """Returns the same for args with one more dimension of rows before the others."""
        if self.sharding is None:
            return self
        return replace(self, sharding=jax.P(jax.P.UNCONSTRAINED, *self.sharding))


# ---------------------------------------------------------------- the product


@dataclasses.dataclass(frozen=True)
class Remat:
    """All that is known when the product is traced."""

    value: Activated  # how the left operand is made
    contract: int  # the kernel's summed axis: 0 for Flax's `(in, out)`, 1 for Equinox's `(out, in)`
    precision: str | None  # of the product
    out_sharding: NamedSharding | jax.P | None  # of the product
    keep: bool  # whether the left operand is kept after all

    def of(self, value: Any, kernel: Any) -> Product:
        """Returns the product with a kernel."""
        return Product.of(value.ndim, kernel.ndim, self.contract, self.precision, self.out_sharding)


def product(
    value: Activated,
    args: tuple[Array, ...],
    kernel: Array,
    *,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
    keep: bool = False,
) -> Array:
    """Returns the product of `value` of args with a kernel, in its dtype.

    Gradients are those of `matmul.matmul`; the value is kept only with `keep`.
    """
    precision = jax.config.jax_default_matmul_precision  # the backward's too
    spec = Remat(value, contract, precision, out_sharding, keep)
    *given, kernel, main = equally_varying(*args, *with_main_gradient(kernel))
    return _product(spec, tuple(given), kernel, main)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _product(spec: Remat, args: tuple[Array, ...], kernel: Array, main: Any) -> Array:
    del main
    value = product_p.bind(spec.value.forward(args))
    one = spec.of(value, kernel)
    return dot(one, value, operand_of(one, value, kernel))


@functools.partial(_product.defjvp, symbolic_zeros=True)
def _(spec, primals, tangents):
    args, kernel, _ = primals
    value = spec.value.forward(args)
    one = spec.of(value, kernel)
    operand = operand_of(one, value, kernel)
    y = dot(one, value, operand)
    dargs, *dkernels = tangents
    linear = [*dargs, *asked(*dkernels)]
    moves = tuple(t is not None and not isinstance(t, SymbolicZero) for t in linear)
    if not any(moves):
        return y, jnp.zeros_like(y)
    moving = [t for t, moved in zip(linear, moves) if moved]
    kept = [value] * spec.keep
    return y, tangent(Linear(spec, moves), *args, *kept, operand, *moving)[0]


# ---------------------------------------------------------------- the tangent


@dataclasses.dataclass(frozen=True)
class Linear:
    """The tangent of a product, and which of its operands move."""

    remat: Remat
    moves: tuple[bool, ...]  # for each of args, the kernel and its main gradient: it has a tangent

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.remat.value.op


@dataclasses.dataclass
class _Operands:
    """The operation's operands by what they are; None for a tangent that is zero."""

    args: list[Any]
    value: Any  # the left operand, if that is kept
    kernel: Any
    dargs: list[Any]
    dkernels: list[Any]  # the kernel's tangent, and that of its main gradient

    @classmethod
    def read(cls, spec: Linear, operands: Sequence[Any]) -> "_Operands":
        count, given = len(spec.moves) - 2, iter(operands)
        args = [next(given) for _ in range(count)]
        value = next(given) if spec.remat.keep else None
        kernel = next(given)
        linear = [next(given) if moved else None for moved in spec.moves]
        return cls(args, value, kernel, linear[:count], linear[count:])


def define_tangent(linear: Linear, *operands: Any) -> list[Array]:
    """The product's tangent."""
    o, spec, terms = _Operands.read(linear, operands), linear.remat, []
    if any(d is not None for d in o.dargs):
        dvalue = spec.value.tangent(o.args, o.dargs)
        terms.append(dot(spec.of(dvalue, o.kernel), dvalue, o.kernel))
    if any(d is not None for d in o.dkernels):
        value = spec.value.forward(o.args) if o.value is None else o.value
        one = spec.of(value, o.kernel)
        terms += [t for d in o.dkernels if d is not None for t in product_tangent(one, value, d)]
    return [functools.reduce(jnp.add, terms)]


def _transpose(cts: Any, *operands: Any, spec: Linear, order: Order) -> list[Any]:
    del order
    remat, o, (dy,) = spec.remat, _Operands.read(spec, operands), cts
    known = len(operands) - sum(spec.moves)
    if type(dy) is ad.Zero:
        return [None] * len(operands)
    wanted, of_kernel = any(map(_is_wanted, o.dargs)), any(map(_is_wanted, o.dkernels))
    one = remat.of(remat.value.value_type(o.args), o.kernel)
    # All that the value is made of is there from the forward on, so XLA would make it again at
    # once, and keep it: recomputing was to save that.
    args, _ = jax.lax.optimization_barrier((o.args, dy))
    again = of_kernel and o.value is None
    dargs: list[Any] = []
    value: Any = o.value
    if wanted:
        like = remat.value.value_type(args)
        dargs = remat.value.backward(input_gradient(one, dy, like, o.kernel), args, again)
        value = dargs.pop() if again else value
    elif again:
        value = remat.value.forward(args)
    dargs += [None] * (len(args) - len(dargs))
    dargs = [g.astype(a.dtype) if _is_wanted(d) else None for g, a, d in zip(dargs, args, o.dargs)]
    dargs += [
        kernel_gradient(one, dy, value, d.aval) if _is_wanted(d) else None for d in o.dkernels
    ]
    return [None] * known + [g for g, moved in zip(dargs, spec.moves, strict=True) if moved]


def _is_wanted(tangent: Any) -> bool:
    return tangent is not None and ad.is_undefined_primal(tangent)


def _batch(op: Op, operands: Any, dims: Any, *, spec: Linear, order: Order) -> Any:
    """A batch dimension of the rows is one more dimension of them, the first."""
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    count, remat = len(spec.moves) - 2, spec.remat
    roles = [*[True] * (count + remat.keep), False, *[True] * sum(spec.moves[:count])]
    roles += [False] * (len(operands) - len(roles))
    separate = any(dim is not None and not row for dim, row in zip(dims, roles))
    if remat.out_sharding is not None or separate:
        fn = functools.partial(define_tangent, spec)
        return jax.vmap(fn, tuple(dims), axis_size=size)(*operands), [0]
    moved = [batch_at(a, dim, 0, size) if row else a for a, dim, row in zip(operands, dims, roles)]
    moved = [match(a, moved[0], range(a.ndim)) if row else a for a, row in zip(moved, roles)]
    remat = replace(remat, value=remat.value.batched())
    return op(replace(spec, remat=remat), *moved, order=order), [0]


tangent = Op("products_tangent", define_tangent, batch=_batch, transpose=_transpose)
