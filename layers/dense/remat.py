"""Products whose left operand is computed again in the backward, not kept (rematerialisation).

A dense layer's gradient needs its input. Where that is a normalised x, or a gated activation, it is
as large as the arrays it was made of, which are kept anyway: so it is made again, by one pass over
memory (for an activation, by the pass that computes the gradients).

    y_i = value(args) · kernel_i

The tangent of all products together is one operation, linear in the tangents, whose transpose is
the backward as one would write it by hand.

References: Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.sharding import NamedSharding

from ...native.implementation import BEST, Order
from ..core.op import Op, batch_at, match, placed
from ..core.sharding import whole
from ..norm import op as rms_norm
from ..norm.spec import Norm
from . import epilogue, product_gradient
from .epilogue import Epilogue, Scalar
from .matmul import (
    Product,
    chained,
    dot,
    equally_varying,
    input_gradient,
    kernel_gradient,
    operand_of,
    with_main_gradient,
)
from .matmul import tangent as product_tangent
from .product_gradient import Gradient

# ---------------------------------------------------------------- the left operand


class Producer(Protocol):
    """A value made of `args`: how to compute it, compute it again, and differentiate it.

    `kept` holds the backward's other inputs, one value a row at most. Tangents and gradients that
    are zero, or not asked for, are None.
    """

    @property
    def op(self) -> str:
        """The function the user called."""
        ...

    def forward(self, *args: Array) -> Sequence[Array]:
        """`(value, *kept)`."""
        ...

    def again(self, args, kept) -> Array:
        """The value."""
        ...

    def tangent(self, args, kept, dargs) -> Array:
        """The value's tangent; not all of `dargs` are None."""
        ...

    def backward(
        self, dvalue, args, kept, wanted: tuple[bool, ...], with_value: bool
    ) -> tuple[list[Any], Any]:
        """The gradients of `args`, and the value if `with_value`."""
        ...

    def value_type(self, args) -> Any:
        """The value's type."""
        ...

    def rows(self, count: int) -> list[bool]:
        """For each of `count` args, whether it has rows; the others are parameters."""
        ...

    def batched(self) -> "Producer":
        """The same for args with one more dimension of rows before the others."""
        ...


@dataclasses.dataclass(frozen=True)
class Normalised:
    """`rms_norm(x[, scale])` over the last axis, in `dtype`.

    The backward makes the value again in the pass that computes the gradients. With `apart` it is a
    pass of its own, which reads x once more; but then x's gradient takes the place of the value's,
    and the backward needs no other array of x's size.
    """

    op: str
    eps: float
    scale_offset: float
    dtype: str
    order: Order
    apart: bool = False

    def _norm(self, args: Sequence[Any], **flags: Any) -> Norm:
        return Norm(
            op=self.op,
            axes=(args[0].ndim - 1,),
            eps=self.eps,
            scale_offset=self.scale_offset,
            out_dtype=self.dtype,
            has_scale=len(args) > 1,
            **flags,
        )

    def forward(self, *args):
        return rms_norm.forward(self._norm(args, with_rstd=True), *args, order=self.order)

    def again(self, args, kept):
        return rms_norm.apply(self._norm(args), *args, *kept, order=self.order)[0]

    def tangent(self, args, kept, dargs):
        moving = [d for d in dargs if d is not None]
        moves = dargs[0] is not None, any(d is not None for d in dargs[1:]), False
        norm = self._norm(args, moves=moves)
        return rms_norm.tangent(norm, *args, *kept, *moving, order=self.order)[0]

    def backward(self, dvalue, args, kept, wanted, with_value):
        together = with_value and not self.apart
        norm = self._norm(args, with_dscale=any(wanted[1:]), with_value=together)
        found = rms_norm.pullback(norm, dvalue, *args, *kept, order=self.order)
        value = found.pop() if together else None
        if with_value and self.apart:
            value = self.again(args, kept)
        gradients = [g.astype(a.dtype) if w else None for g, a, w in zip(found, args, wanted)]
        return gradients + [None] * (len(args) - len(gradients)), value

    def value_type(self, args):
        return jax.typeof(args[0]).update(dtype=jnp.dtype(self.dtype), weak_type=False)

    def rows(self, count):
        return [True, False][:count]

    def batched(self):
        return self


@dataclasses.dataclass(frozen=True)
class Activated:
    """`function(z) · up`, or without up, in `dtype`, placed as `sharding` says.

    If `stacked`, z is `(*rows, 2, in)` and has both.
    """

    op: str
    function: Scalar
    has_up: bool
    dtype: str
    order: Order
    sharding: jax.P | None = None
    stacked: bool = False

    def epilogue(self, args: Sequence[Any], **flags: Any) -> Epilogue:
        """Returns the epilogue of `args`, or a derivative of it."""
        return Epilogue(
            op=self.op,
            function=self.function,
            axes=(),
            has_up=self.has_up,
            stack=args[0].ndim - 2 if self.stacked else None,
            out_dtype=self.dtype,
            **flags,
        )

    def forward(self, *args):
        (value,) = epilogue.forward(self.epilogue(args), *args, order=self.order)
        return [placed(value, self.sharding)]

    def again(self, args, kept):
        del kept
        return self.forward(*args)[0]

    def tangent(self, args, kept, dargs):
        del kept
        moving = [d for d in dargs if d is not None]
        moves = dargs[0] is not None, any(d is not None for d in dargs[1:]), False
        spec = self.epilogue(args, moves=moves)
        return epilogue.tangent(spec, *args, *moving, order=self.order)[0]

    def backward(self, dvalue, args, kept, wanted, with_value):
        del kept
        dvalue = placed(dvalue, self.sharding)  # and not as the gradient of the layer's output
        spec = self.epilogue(args, with_value=with_value)
        found = epilogue.backward(spec, dvalue, *args, order=self.order)
        value = found.pop() if with_value else None
        return [g.astype(a.dtype) if w else None for g, a, w in zip(found, args, wanted)], value

    def value_type(self, args):
        z = jax.typeof(args[0])
        if self.stacked:
            half = lambda entries: (*entries[:-2], entries[-1])
            spec = jax.P(*half(whole(z.sharding.spec, z.ndim)))
            sharding = NamedSharding(z.sharding.mesh, spec)
            z = z.update(shape=half(z.shape), sharding=sharding)
        return z.update(dtype=jnp.dtype(self.dtype), weak_type=False)

    def rows(self, count):
        return [True] * count

    def batched(self):
        if self.sharding is None:
            return self
        return replace(self, sharding=jax.P(jax.P.UNCONSTRAINED, *self.sharding))


# ---------------------------------------------------------------- the products


@dataclasses.dataclass(frozen=True)
class Products:
    """What is known when the products are traced."""

    producer: Producer  # how the left operand is made
    contract: int  # the kernels' summed axis: 0 for Flax's `(in, out)`, 1 for Equinox's `(out, in)`
    precision: str | None  # of the products
    out_sharding: NamedSharding | jax.P | None  # of the products
    gradient: Order  # which kernels are to make the left operand's gradient and pull it back
    keep: bool  # whether the left operand is kept after all

    def of(self, value: Any, kernel: Any) -> Product:
        """Returns the product with one kernel."""
        return Product.of(value.ndim, kernel.ndim, self.contract, self.precision, self.out_sharding)


def products(
    producer: Producer,
    args: tuple[Array, ...],
    kernels: tuple[Array, ...],
    *,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
    gradient: Order | None = None,
    keep: bool = False,
) -> tuple[Array, ...]:
    """Returns the products of the value of `producer` with each kernel, in its dtype.

    Gradients are those of `matmul.matmul`; of the left operand nothing is kept, or itself if
    `keep`. `gradient` says which kernels are to make it again and pull its gradient back, if not
    the best.
    """
    precision = jax.config.jax_default_matmul_precision  # the backward's too
    gradient = gradient or BEST
    spec = Products(producer, contract, precision, out_sharding, gradient, keep)
    pairs = [with_main_gradient(kernel) for kernel in kernels]
    count = len(kernels)
    arrays = equally_varying(*args, *(k for k, _ in pairs), *(main for _, main in pairs))
    left, right = arrays[: len(args)], arrays[len(args) :]
    return _products(spec, tuple(left), tuple(right[:count]), tuple(right[count:]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products(spec: Products, args, kernels, mains) -> tuple[Array, ...]:
    del mains
    value, *_ = spec.producer.forward(*args)
    made = [(spec.of(value, kernel), kernel) for kernel in kernels]
    return tuple(dot(product, value, operand_of(product, value, k)) for product, k in made)


@functools.partial(_products.defjvp, symbolic_zeros=True)
def _(spec, primals, tangents):
    args, kernels, _ = primals
    value, *kept = spec.producer.forward(*args)
    kept += [value] * spec.keep
    operands, results = [], []
    for kernel in kernels:
        product = spec.of(value, kernel)
        operands.append(operand_of(product, value, kernel))
        results.append(dot(product, value, operands[-1]))
    linear = [t for group in tangents for t in group]
    moves = tuple(t is not None and not isinstance(t, SymbolicZero) for t in linear)
    if not any(moves):
        return tuple(results), tuple(map(jnp.zeros_like, results))
    moving = [t for t, moved in zip(linear, moves) if moved]
    sizes = len(args), len(kept), len(kernels)
    linear = Linear(spec, moves, sizes)
    return tuple(results), tuple(tangent(linear, *args, *kept, *operands, *moving))


# ---------------------------------------------------------------- the tangent


@dataclasses.dataclass(frozen=True)
class Linear:
    """The tangent of products, and which of their operands move."""

    products: Products
    moves: tuple[bool, ...]  # for each of args, kernels and main gradients: it has a tangent
    sizes: tuple[int, int, int]  # how many args, kept arrays and kernels there are

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.products.producer.op


@dataclasses.dataclass
class _Operands:
    """The operation's operands by what they are; None for a tangent that is zero."""

    args: list[Any]
    kept: list[Any]
    kernels: list[Any]
    value: Any  # the left operand, if that is kept
    dargs: list[Any]
    dkernels: list[list[Any]]  # for each kernel: its tangent, and that of its main gradient

    @classmethod
    def read(cls, spec: Linear, operands: Sequence[Any]) -> "_Operands":
        args, kept, kernels = spec.sizes
        given = list(operands)
        take = lambda count: [given.pop(0) for _ in range(count)]
        first = take(args), take(kept), take(kernels)
        value = first[1].pop() if spec.products.keep else None
        linear = [given.pop(0) if moved else None for moved in spec.moves]
        pairs = zip(linear[args : args + kernels], linear[args + kernels :])
        return cls(*first, value, linear[:args], [list(pair) for pair in pairs])


def define_tangent(linear: Linear, *operands: Any) -> list[Array]:
    """The tangents of all products."""
    o, spec = _Operands.read(linear, operands), linear.products
    dvalue: Any = None
    value: Any = None
    if any(d is not None for d in o.dargs):
        dvalue = spec.producer.tangent(o.args, o.kept, o.dargs)
    if any(d is not None for pair in o.dkernels for d in pair):
        value = spec.producer.again(o.args, o.kept) if o.value is None else o.value
    left: Any = value if dvalue is None else dvalue
    results = []
    for kernel, pair in zip(o.kernels, o.dkernels):
        product = spec.of(left, kernel)
        terms = [] if dvalue is None else [dot(product, dvalue, kernel)]
        for d in pair:
            terms += [] if d is None else product_tangent(product, value, d)
        if not terms:  # this kernel does not move, nor does what it multiplies
            terms = [jnp.zeros_like(dot(product, left, kernel))]
        results.append(functools.reduce(jnp.add, terms))
    return results


def _transpose(cts: Any, *operands: Any, spec: Linear, order: Order) -> list[Any]:
    del order
    products, o = spec.products, _Operands.read(spec, operands)
    producer, live = products.producer, [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    like = producer.value_type(o.args)
    value: Any = o.value
    dargs: list[Any] = [None] * len(o.args)
    wanted = tuple(map(_is_wanted, o.dargs))
    of_kernels = any(_is_wanted(d) for i in live for d in o.dkernels[i])
    if live:
        o.args, o.kept = _not_before([cts[i] for i in live], (o.args, o.kept))
    if live and any(wanted):
        each = [(products.of(like, o.kernels[i]), cts[i], o.kernels[i]) for i in live]
        again = of_kernels and value is None
        dargs, made = _pull_back(producer, each, o.args, o.kept, wanted, again, products.gradient)
        value = made if again else value
    elif of_kernels and value is None:
        value = producer.again(o.args, o.kept)

    def dkernel(i, which):
        d = o.dkernels[i][which]
        if i not in live or not _is_wanted(d):
            return None
        return kernel_gradient(products.of(like, d.aval), cts[i], value, d.aval)

    dargs += [dkernel(i, which) for which in (0, 1) for i in range(len(o.kernels))]
    moved = [g for g, moved in zip(dargs, spec.moves, strict=True) if moved]
    return [None] * sum(spec.sizes) + moved


def _pull_back(
    producer: Producer,
    products: Sequence[tuple[Product, Array, Array]],
    args: Sequence[Array],
    kept: Sequence[Array],
    wanted: tuple[bool, ...],
    with_value: bool,
    order: Order,
) -> tuple[list[Any], Any]:
    """`producer.backward` of the gradient that its value has from `products`.

    `products` holds for each the product, its result's gradient, and the kernel as its GEMM reads
    it. `order` says which kernels are to serve.
    """
    (product, dy, kernel), *others = products
    if isinstance(producer, Activated) and not others:
        spec = producer.epilogue(args, with_value=with_value)
        spec = Gradient(spec, product, producer.sharding)
        if reason := product_gradient.unfit(spec, dy, kernel):
            product_gradient.report_unfused(spec, reason, order)
        else:
            found = product_gradient.gradient(spec, dy, kernel, *args, order=order)
            value = found.pop() if with_value else None
            return [g.astype(a.dtype) if w else None for g, a, w in zip(found, args, wanted)], value
    like = producer.value_type(args)
    terms = [input_gradient(product, dy, like, kernel) for product, dy, kernel in products]
    return producer.backward(chained(terms), args, kept, wanted, with_value)


def _not_before(cts: Any, arrays: Any) -> Any:
    """`arrays`, to be read only once `cts` are there.

    All that the left operand is made of is there from the forward on, so XLA would make it again at
    once, and keep it: what recomputing was to save.
    """
    return jax.lax.optimization_barrier((arrays, cts))[0]


def _is_wanted(tangent: Any) -> bool:
    return tangent is not None and ad.is_undefined_primal(tangent)


def _batch(op: Op, operands: Any, dims: Any, *, spec: Linear, order: Order) -> Any:
    """A batch dimension of the rows is one more dimension of them, the first."""
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    products, sizes = spec.products, spec.sizes
    rows = products.producer.rows(sizes[0])
    roles = [*rows, *[True] * sizes[1], *[False] * sizes[2]]
    roles += [row for row, moved in zip(rows, spec.moves) if moved]
    roles += [False] * (len(operands) - len(roles))
    separate = any(dim is not None and not row for dim, row in zip(dims, roles))
    if products.out_sharding is not None or separate:
        fn = functools.partial(define_tangent, spec)
        return jax.vmap(fn, tuple(dims), axis_size=size)(*operands), [0] * sizes[2]
    moved = [batch_at(a, dim, 0, size) if row else a for a, dim, row in zip(operands, dims, roles)]
    moved = [match(a, moved[0], range(a.ndim)) if row else a for a, row in zip(moved, roles)]
    products = replace(products, producer=products.producer.batched())
    return op(replace(spec, products=products), *moved, order=order), [0] * sizes[2]


tangent = Op("products_tangent", define_tangent, batch=_batch, transpose=_transpose)
