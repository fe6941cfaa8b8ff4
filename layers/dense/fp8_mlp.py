"""A gated MLP in FP8: all that lies between its products reads and writes FP8 codes in one pass.

    a = x · W_gate (+ bias)    b = x · W_up (+ bias)    h = f(a) · b    y = h · W_down

Each product is as in `fp8`. The hidden array h is never written: one pass over a and b finds
maxima, a second one writes codes of h, a and b. The backward keeps those of a and b alone. One pass
over them and dh writes the codes of their gradients and of hᵀ, which it computes again, with bounds
from the maxima of the forward (docs/quantization.md); the gradients of biases are sums of what
these codes say. Without W_up b is 1.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.implementation import BEST, Order
from ..core.op import Op, batch_at, match, placed
from ..quantization import gated
from ..quantization.quantize import Quantized, decoded
from .epilogue import SCALARS, Scalar
from .fp8 import (
    Fp8,
    Input,
    backward_codes,
    fits,
    forward,
    gradient_codes,
    input_gradient,
    kernel_codes,
    kernel_gradient,
    mark_input,
    moves,
    operands_of,
    product_with_kernel,
    product_with_x,
    transposed,
    vmap_tangent,
    vmapped,
    widened,
)
from .matmul import Product, asked, chained, equally_varying


@dataclasses.dataclass(frozen=True)
class Mlp:
    """All that is known of the MLP when it is traced."""

    input: Input  # the input of gate and up; all products have the same letters
    gated: gated.Gated  # the activation between them
    has_biases: bool = False  # the first products have biases
    hidden_sharding: jax.P | None = None  # the hidden arrays', on a mesh of Auto axes

    @property
    def fp8(self) -> Fp8:
        """Each of the products."""
        return self.input.fp8

    @property
    def count(self) -> int:
        """How many products there are before the activation."""
        return 1 + self.gated.has_up

    def split(self, operands: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns what belongs to the first kernels, to the last one and to the biases."""
        end = 2 * self.count
        return operands[:end], operands[end : end + 2], operands[end + 2 :]

    def with_batch(self) -> "Mlp":
        """Returns the same of rows with one more dimension, the first."""
        return replace(self, input=self.input.with_batch())

    @property
    def placed(self) -> bool:
        """Whether dimensions of hidden arrays are placed on a mesh one by one."""
        return self.hidden_sharding is not None

    def of_codes(self) -> "Mlp":
        """Returns the same MLP of an x whose codes are there."""
        return replace(self, input=self.input.of_codes())

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.fp8.op

    @property
    def order(self) -> Order:
        """Which kernels are to serve."""
        return self.fp8.order


def serves(kernels: list[Array], contract: int, function: Scalar | None) -> bool:
    """Returns whether the MLP can be one function in FP8: shapes, and a bound of the slope."""
    shapes = all(fits(kernel, contract) and kernel.ndim == 2 for kernel in kernels)
    return shapes and function is not None and has_slope(function)


def has_slope(function: Scalar) -> bool:
    """Whether a bound of the slope is known: of the library's own activations, not of namesakes."""
    own = SCALARS.get(function.name)
    texts = lambda scalar: (scalar.source, scalar.derivative)
    return function.name in gated.SLOPES and own is not None and texts(own) == texts(function)


def multiply_mlp(
    op: str,
    x: Array,
    kernels: list[Array],
    down: Array,
    function: Scalar,
    *,
    dtype: jax.typing.DTypeLike,
    biases: Sequence[Array] = (),
    contract: int = 0,
    hidden_sharding: jax.P | None = None,
    order: Order = BEST,
) -> Array:
    """Returns `f(x · kernels[0]) · (x · kernels[1]) · down` for operands that `serves` allows.

    Biases, one for each of the kernels or none, are added before f and the product.
    """
    dtype = jnp.dtype(dtype).name
    fp8 = Fp8(op, Product.of(x.ndim, 2, contract, None, None), dtype, order)
    hidden = gated.Gated(function, op, len(kernels) == 2)
    spec = Mlp(Input(fp8), hidden, bool(biases), hidden_sharding)
    x, *biases = equally_varying(x.astype(dtype), *biases)
    args, operands = operands_of(x, [*kernels, down])
    return _mlp(spec, args, (*operands, *biases))[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _mlp(spec: Mlp, args: tuple[Array, ...], operands: Any) -> tuple[Array, ...]:
    """Operands: a kernel and its main gradient, of gate, up and down; biases of gate and up."""
    args = mark_input(_mlp, spec, args, operands)
    made = spec.input.codes(args, transposed=False)
    y, _ = _products(spec, args[0], made, operands, (False,) * (1 + len(operands)))
    return (y,)


@functools.partial(_mlp.defjvp, symbolic_zeros=True)
def _(spec, primals, tangents):
    (args, operands), ((dx, *_), doperands) = primals, tangents
    end = 2 * (spec.count + 1)
    pairs = [asked(*doperands[i : i + 2]) for i in range(0, end, 2)]
    doperands = *sum(pairs, ()), *doperands[end:]
    of_x, moved = moves(dx), tuple(map(moves, doperands))
    made = spec.input.codes(args, transposed=any(spec.split(moved)[0]))
    y, kept = _products(spec, args[0], made, operands, (of_x, *moved))
    moving = [dx] * of_x + [t for t in doperands if moves(t)]
    linear = Tangent(spec, (of_x, *moved))
    dy = tangent(linear, *kept, *moving)[0] if moving else jnp.zeros_like(y)
    return (y,), (dy,)


def _products(
    spec: Mlp, x: Array, xq: Any, operands: Any, moves: tuple[bool, ...]
) -> tuple[Array, list[Array]]:
    """The result of what has the codes `xq`, and the residuals in the order of `Residuals`."""
    firsts, (down, _), biases = spec.split(operands)
    first_moves, _, bias_moves = map(any, spec.split(moves[1:]))
    codes = [kernel_codes(spec.fp8, w, forward=True, backward=moves[0]) for w in firsts[::2]]
    arrays = [placed(forward(spec.fp8, x, xq, w), spec.hidden_sharding) for w in codes]
    arrays = [_plus(a, bias) for a, bias in zip(arrays, biases)] or arrays
    q, scale, *hidden = gated.hidden(spec.gated, *arrays, order=spec.order)
    before_down = moves[0] or first_moves or bias_moves
    wd = kernel_codes(spec.fp8, down, forward=True, backward=before_down)
    y = forward(spec.fp8, arrays[0], Quantized(q, None, scale), wd)
    absent = jnp.zeros((), jnp.float32)
    back = lambda product, w, like, there: backward_codes(product, w, like) if there else absent
    return y, [
        *(xq.qt if first_moves else absent, xq.scale),
        *(r for w in codes for r in (back(spec.fp8, w, x, moves[0]), w.scale)),
        *(back(spec.fp8, wd, arrays[0], before_down), wd.scale),
        *hidden,
    ]


def _plus(array: Array, bias: Array) -> Array:
    """Returns array + bias, without a cast in between: cuBLAS adds it as it writes a product."""
    bias = match(bias.astype(array.dtype), array, [array.ndim - 1])
    return array + jnp.expand_dims(bias, range(array.ndim - 1))


# ---------------------------------------------------------------- the tangent


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent of the MLP, along x, the kernels with their main gradients, and the biases.

    Its operands are those of `Residuals`, then the tangents that there are. A residual that no
    tangent needs is a scalar zero. `vmaps` are as in `fp8`.
    """

    mlp: Mlp
    moves: tuple[bool, ...]
    vmaps: tuple[tuple[bool, ...], ...] = ()

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.mlp.op

    def read(self, operands: Any) -> "Residuals":
        """Returns the operands by their names."""
        given = list(operands)
        take = lambda: (given.pop(0), given.pop(0))
        count = self.mlp.count
        x, kernels, down = take(), [take() for _ in range(count)], take()
        arrays, limits = [take() for _ in range(count)], [given.pop(0) for _ in range(3)]
        linear = [given.pop(0) if moved else None for moved in self.moves]
        dx, (*firsts, of_down, biases) = linear[0], self.mlp.split(linear[1:])
        of_firsts = [firsts[0][i : i + 2] for i in range(0, 2 * count, 2)]
        biases = biases or [None] * count
        return Residuals(x, kernels, down, arrays, limits, linear, dx, of_firsts, of_down, biases)


@dataclasses.dataclass
class Residuals:
    """What the forward kept, and the tangents; pairs are codes and their scale."""

    x: tuple[Any, Any]  # codes of xᵀ
    kernels: list[tuple[Any, Any]]  # codes (in, out) of gate and up
    down: tuple[Any, Any]  # codes (in, out) of down
    arrays: list[tuple[Any, Any]]  # codes of a and b, before the activation
    limits: list[Any]  # of |f(a)|, |b| and |h|
    linear: list[Any]  # all tangents, None where there is none: first that of x, then these
    dx: Any
    of_firsts: list[list[Any]]  # those of gate's and up's kernels and main gradients
    of_down: list[Any]
    biases: list[Any]  # gate's and up's

    @property
    def hidden(self) -> list[Any]:
        """What `gated.hidden` left for the backward."""
        return [*sum(self.arrays, ()), *self.limits]


def define_tangent(spec: Tangent, *operands: Array) -> list[Array]:
    """`(residuals, tangents) -> (dy,)`, of the dequantized operands in the compute dtype."""
    if spec.vmaps:
        return vmapped(define_tangent, spec)(*operands)
    mlp, r, terms = spec.mlp, spec.read(operands), []
    if any(t is not None for t in (r.dx, *r.biases, *sum(r.of_firsts, []))):
        moved, arrays = [], [widened(mlp.fp8, *pair) for pair in r.arrays]
        for array, kernel, dkernels, dbias in zip(arrays, r.kernels, r.of_firsts, r.biases):
            parts = [product_with_x(mlp.fp8, *r.x, d) for d in dkernels if d is not None]
            parts += [] if r.dx is None else [product_with_kernel(mlp.fp8, r.dx, *kernel)]
            along = functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(array)
            moved.append(along if dbias is None else _plus(along, dbias))
        h = lambda *arrays: gated.define_h(*arrays, function=mlp.gated.function)[0]
        _, dh = jax.jvp(h, tuple(arrays), tuple(moved))
        dh = dh.astype(mlp.fp8.dtype)
        terms.append(product_with_kernel(mlp.fp8, dh, *r.down))
    if of_down := [d for d in r.of_down if d is not None]:
        qt, scale = gated.hidden_codes(mlp.gated, *r.hidden)
        terms += [product_with_x(mlp.fp8, qt, scale, d) for d in of_down]
    return [functools.reduce(jnp.add, terms)]


def _gradients(spec: Tangent, dys: Any, residuals: Sequence[Any], likes: Sequence[Any]) -> Any:
    """The gradient for each tangent, given by its type; None for one without a type."""
    mlp, r, (dy,) = spec.mlp, spec.read([*residuals, *likes]), dys
    there = lambda tangents: any(d is not None for d in tangents)
    before_down = there([r.dx, *r.biases, *sum(r.of_firsts, [])])
    g = gradient_codes(mlp.fp8, dy, q=before_down, qt=there(r.of_down))
    one = lambda x, g, d: None if d is None else kernel_gradient(mlp.fp8, x[0], x[1], g, d)
    each = lambda x, g, of: [one(x, g, d) for d in of]
    found: list[Any] = [None] * (1 + 2 * mlp.count)
    biases: list[Any] = []
    if not before_down:
        hidden = gated.hidden_codes(mlp.gated, *r.hidden)
    else:
        like = jax.typeof(r.arrays[0][0]).update(dtype=jnp.dtype(mlp.fp8.dtype))
        dh = placed(input_gradient(mlp.fp8, g, *r.down, like), mlp.hidden_sharding)
        results = gated.hidden_gradients(mlp.gated, dh, *r.hidden, order=mlp.order)
        codes, hidden = results[:-2], results[-2:]
        ways = [Quantized(*codes[i : i + 3]) for i in range(0, len(codes), 3)]
        if r.dx is not None:
            terms = [input_gradient(mlp.fp8, way, *w, r.dx) for way, w in zip(ways, r.kernels)]
            found[0] = chained(terms)
        found[1:] = [f for way, of in zip(ways, r.of_firsts) for f in each(r.x, way, of)]
        biases = [None if d is None else _bias_gradient(way, d) for way, d in zip(ways, r.biases)]
    found += each(hidden, g, r.of_down)
    return [f for f, moved in zip([*found, *biases], spec.moves) if moved]


def _bias_gradient(way: Quantized, like: Any) -> Array:
    """The sum over rows of what codes say: one byte an element, where no other array is left."""
    total = jnp.sum(decoded(way.qt).astype(jnp.float32), range(1, way.qt.ndim)) * way.scale
    explicit = like.sharding.mesh.explicit_axes
    return (jax.sharding.reshard(total, like.sharding) if explicit else total).astype(like.dtype)


def _batch(op: Op, operands: Any, dims: Any, *, spec: Tangent, order: Order) -> Any:
    """A batch dimension of the rows is one more dimension of them, the first."""
    size = next(a.shape[d] for a, d in zip(operands, dims) if d is not None)
    r, at = spec.read(operands), spec.read(dims)
    scales = [at.x[1], *(scale for _, scale in at.arrays), *at.limits]
    parameters = [*sum((*at.kernels, at.down), ()), *at.linear[1:]]
    if spec.vmaps or any(d is not None for d in [*scales, *parameters]):
        return vmap_tangent(op, operands, dims, spec, order)
    place = lambda a, d, to: batch_at(a, d, to, size) if a.ndim else a
    moved = [place(r.x[0], at.x[0], 1), r.x[1]]
    moved += [part for pair in (*r.kernels, r.down) for part in pair]
    moved += [place(a, d, 0) for a, d in zip(r.hidden, (*sum(at.arrays, ()), *at.limits))]
    moved += [] if r.dx is None else [batch_at(r.dx, at.dx, 0, size)]
    moved += [t for t in r.linear[1:] if t is not None]
    return op(replace(spec, mlp=spec.mlp.with_batch()), *moved, order=order), [0]


tangent = Op("fp8_mlp_tangent", define_tangent, batch=_batch, transpose=transposed(_gradients))
