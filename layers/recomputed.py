"""Products whose left operand is computed again in the backward, not kept.

A dense layer's gradient needs its input. Where that is a normalised x, or a gated activation, it is
as large as what it was made of, which is kept anyway: so it is made again, by one pass over memory
(for an activation, by the pass that computes the gradients).

    y_i = value(args) · kernel_i

The tangent of all products together is one primitive, linear in the tangents, whose transpose is
the backward as one would write it by hand.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from ..native.fallback import Order
from . import product_gradient
from .main_gradient import marked
from .matmul import (
    Product,
    dot,
    equally_varying,
    kernel_gradient,
    operand_of,
    tangent_p,
)
from .op import batch_at, compile_when_eager, match
from .producers import Producer


@dataclasses.dataclass(frozen=True)
class Products:
    """What is known when the products are traced.

    Attributes:
      producer: how the left operand is made.
      contract: the kernels' summed axis: 0 for Flax's `(in, out)`, 1 for Equinox's `(out, in)`.
      precision, out_sharding: of the products.
      gradient: which kernels are to make the left operand's gradient and pull it back.
      keep: whether the left operand is kept after all.
    """

    producer: Producer
    contract: int
    precision: str | None
    out_sharding: NamedSharding | jax.P | None
    gradient: Order
    keep: bool

    def of(self, value, kernel) -> Product:
        """The product with one kernel."""
        return Product.of(value.ndim, kernel.ndim, self.contract, self.precision, self.out_sharding)


def products(
    producer: Producer,
    args: tuple[jax.Array, ...],
    kernels: tuple[jax.Array, ...],
    *,
    contract: int = 0,
    out_sharding: NamedSharding | jax.P | None = None,
    gradient: Order | None = None,
    keep: bool = False,
) -> tuple[jax.Array, ...]:
    """The products of what `producer` makes of `args` with each kernel, in the dtype it has.

    Gradients are those of `normfuse.layers.matmul.matmul`; of the left operand nothing is kept, or
    itself if `keep`.
    `gradient` says which kernels are to make it again and pull its gradient back, if not the best.
    """
    precision = jax.config.jax_default_matmul_precision  # the backward's too
    gradient = gradient or Order((), strict=False)
    spec = Products(producer, contract, precision, out_sharding, gradient, keep)
    pairs = [marked(kernel) for kernel in kernels]
    count = len(kernels)
    arrays = equally_varying(*args, *(k for k, _ in pairs), *(main for _, main in pairs))
    left, right = arrays[: len(args)], arrays[len(args) :]
    return _products(spec, tuple(left), tuple(right[:count]), tuple(right[count:]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products(spec: Products, args, kernels, mains) -> tuple[jax.Array, ...]:
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
    tangents = products_p.bind(
        *args, *kept, *operands, *moving, spec=spec, moves=moves, sizes=sizes
    )
    return tuple(results), tuple(tangents)


# ---------------------------------------------------------------- the tangent

products_p = Primitive("normfuse_products_tangent")
products_p.multiple_results = True


@dataclasses.dataclass
class _Operands:
    """The primitive's operands by what they are; None for a tangent that is zero."""

    args: list[Any]
    kept: list[Any]
    kernels: list[Any]
    value: Any  # the left operand, if that is kept
    dargs: list[Any]
    dkernels: list[list[Any]]  # for each kernel: its tangent, and that of its main gradient

    @classmethod
    def read(cls, operands, spec, moves, sizes) -> "_Operands":
        args, kept, kernels = sizes
        given = list(operands)
        take = lambda count: [given.pop(0) for _ in range(count)]
        first = take(args), take(kept), take(kernels)
        value = first[1].pop() if spec.keep else None
        linear = [given.pop(0) if moved else None for moved in moves]
        pairs = zip(linear[args : args + kernels], linear[args + kernels :])
        return cls(*first, value, linear[:args], [list(pair) for pair in pairs])


def _tangent(*operands, spec, moves, sizes):
    o = _Operands.read(operands, spec, moves, sizes)
    dvalue = value = None
    if any(d is not None for d in o.dargs):
        dvalue = spec.producer.tangent(o.args, o.kept, o.dargs)
    if any(d is not None for pair in o.dkernels for d in pair):
        value = spec.producer.again(o.args, o.kept) if o.value is None else o.value
    left: Any = value if dvalue is None else dvalue
    results = []
    for kernel, pair in zip(o.kernels, o.dkernels):
        product = spec.of(left, kernel)
        terms = [] if dvalue is None else [dot(product, dvalue, kernel)]
        terms += [tangent_p.bind(value, d, product=product) for d in pair if d is not None]
        if not terms:  # this kernel does not move, nor does what it multiplies
            terms = [jnp.zeros_like(dot(product, left, kernel))]
        results.append(functools.reduce(jnp.add, terms))
    return results


def _transpose(cts, *operands, spec, moves, sizes):
    o = _Operands.read(operands, spec, moves, sizes)
    producer, live = spec.producer, [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    dargs, value, like = [None] * len(o.args), o.value, producer.value_type(o.args)
    wanted = tuple(map(_is_wanted, o.dargs))
    of_kernels = any(_is_wanted(d) for i in live for d in o.dkernels[i])
    if live:
        o.args, o.kept = _not_before([cts[i] for i in live], (o.args, o.kept))
    if live and any(wanted):
        each = [(spec.of(like, o.kernels[i]), cts[i], o.kernels[i]) for i in live]
        again = of_kernels and value is None
        dargs, made = product_gradient.gradients(
            producer, each, o.args, o.kept, wanted, again, spec.gradient
        )
        value = made if again else value
    elif of_kernels and value is None:
        value = producer.again(o.args, o.kept)

    def dkernel(i, which):
        d = o.dkernels[i][which]
        if i not in live or not _is_wanted(d):
            return None
        return kernel_gradient(spec.of(like, d.aval), cts[i], value, d.aval)

    dargs += [dkernel(i, which) for which in (0, 1) for i in range(len(o.kernels))]
    return [None] * sum(sizes) + [g for g, moved in zip(dargs, moves, strict=True) if moved]


def _not_before(cts, arrays):
    """`arrays`, to be read only once `cts` are there.

    All that the left operand is made of is there from the forward on, so XLA would make it again at
    once, and keep it: what recomputing was to save.
    """
    return jax.lax.optimization_barrier((arrays, cts))[0]


def _is_wanted(tangent) -> bool:
    return tangent is not None and ad.is_undefined_primal(tangent)


def _batch(operands, dims, *, spec, moves, sizes):
    """A batch dimension of the rows is one more dimension of them, the first."""
    params = {"spec": spec, "moves": moves, "sizes": sizes}
    rows = spec.producer.rows(sizes[0])
    roles = [*rows, *[True] * sizes[1], *[False] * sizes[2]]
    roles += [row for row, moved in zip(rows, moves) if moved]
    roles += [False] * (len(operands) - len(roles))
    if spec.out_sharding is not None or any(
        dim is not None and not row for dim, row in zip(dims, roles)
    ):
        size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
        fn = jax.vmap(functools.partial(_tangent, **params), tuple(dims), axis_size=size)
        return fn(*operands), [0] * sizes[2]
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    moved = [batch_at(a, dim, 0, size) if row else a for a, dim, row in zip(operands, dims, roles)]
    moved = [match(a, moved[0], range(a.ndim)) if row else a for a, row in zip(moved, roles)]
    params["spec"] = dataclasses.replace(spec, producer=spec.producer.batched())
    return products_p.bind(*moved, **params), [0] * sizes[2]


def _jvp(primals, tangents, **params):
    tangents = tuple(ad.instantiate_zeros(t) for t in tangents)
    return jax.jvp(functools.partial(_tangent, **params), tuple(primals), tangents)


compile_when_eager(products_p)
products_p.def_abstract_eval(
    lambda *avals, **params: jax.make_jaxpr(functools.partial(_tangent, **params))(*avals).out_avals
)
mlir.register_lowering(products_p, mlir.lower_fun(_tangent, multiple_results=True))
ad.primitive_jvps[products_p] = _jvp
ad.primitive_transposes[products_p] = _transpose
batching.primitive_batchers[products_p] = _batch
