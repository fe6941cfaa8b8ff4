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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...native.implementation import BEST, Order
from ..core.activations import Scalar
from ..core.derivative import Function, differentiable
from ..core.op import equally_varying, jvp_along, match, placed
from ..quantization import gated
from ..quantization.quantize import Quantized, decoded
from .fp8 import Fp8, fits, mark_input
from .matmul import Product, asked, chained, with_main_gradient


class Kept(NamedTuple):
    """The forward's residuals; pairs are codes and their scale, None where nothing reads them."""

    x: Any  # codes of xᵀ
    kernels: Any  # a pair for each of gate and up, codes (in, out)
    down: Any  # codes (in, out) of down
    hidden: Any  # the results of `gated.hidden` that the backward reads


@dataclasses.dataclass(frozen=True)
class Mlp(Function):
    """All that is known of the MLP when it is traced.

    As a function (`core.op`): of args as in `Fp8`; pairs of a kernel and its main gradient,
    of gate, up and down; biases of gate and up, or none.
    """

    fp8: Fp8  # each of the products: all have the same letters
    gated: gated.Gated  # the activation between them
    hidden_sharding: jax.P | None = None  # the hidden arrays', on a mesh of Auto axes

    @property
    def op(self) -> str:
        return self.fp8.op

    @property
    def placed(self) -> bool:
        """Says that dimensions of hidden arrays are placed on a mesh one by one."""
        return self.hidden_sharding is not None

    def with_batch(self) -> "Mlp":
        return replace(self, fp8=self.fp8.with_batch())

    def _split(self, flat: Sequence[Any]) -> tuple[Any, list[Any], Any, list[Any]]:
        """Returns x's part, in pairs the first kernels' and down's, and the biases'."""
        x, *rest = flat
        count = 1 + self.gated.has_up
        pairs = [rest[2 * i : 2 * i + 2] for i in range(count + 1)]
        return x, pairs[:-1], pairs[-1], rest[2 * count + 2 :] or [None] * count

    def forward(self, operands: Any, moved: tuple[bool, ...] | None) -> Any:
        args, pairs, biases = operands
        if not moved:
            args = mark_input(self, operands)
        of_x, of_firsts, _, of_biases = self._split(moved or [False] * (1 + 2 * len(pairs)))
        of_firsts = any(map(any, of_firsts))
        before_down, fp8, x = of_x or of_firsts or any(of_biases), self.fp8, args[0]
        xq = fp8.codes(args, transposed=of_firsts)
        codes = [fp8.kernel_codes(w, forward=True, backward=of_x) for w, _ in pairs[:-1]]
        arrays = [placed(fp8.multiply(x, xq, w), self.hidden_sharding) for w in codes]
        arrays = [_plus(a, bias) for a, bias in zip(arrays, biases)] or arrays
        q, scale, *hidden = gated.hidden(self.gated, *arrays, order=fp8.order)
        down = fp8.kernel_codes(pairs[-1][0], forward=True, backward=before_down)
        y = fp8.multiply(arrays[0], Quantized(q, None, scale), down)
        return [y], Kept(
            (xq.qt, xq.scale) if of_firsts else None,
            [(fp8.backward_codes(w, x), w.scale) for w in codes] if of_x else None,
            (fp8.backward_codes(down, arrays[0]), down.scale) if before_down else None,
            hidden,
        )

    def tangents(self, *tangents: Any) -> list[Any]:
        dargs, pairs, dbiases = tangents
        return [dargs[0], *[d for pair in pairs for d in asked(*pair)], *dbiases]

    def tangent(self, kept: Kept, tangents: Sequence[Any]) -> list[Array]:
        """The tangent of the MLP of the dequantized operands, in the compute dtype."""
        fp8, (dx, of_firsts, of_down, of_biases), terms = self.fp8, self._split(tangents), []
        if kept.down is not None:
            pairs = kept.hidden[:-3]
            arrays = [fp8.widened(*pairs[i : i + 2]) for i in range(0, len(pairs), 2)]
            along = []
            for i, (array, dkernels, dbias) in enumerate(zip(arrays, of_firsts, of_biases)):
                parts = [fp8.along_kernel(kept.x, d) for d in dkernels if d is not None]
                parts += [] if dx is None else [fp8.along_x(dx, kept.kernels[i])]
                total = functools.reduce(jnp.add, parts) if parts else jnp.zeros_like(array)
                along.append(total if dbias is None else _plus(total, dbias))
            h = functools.partial(gated.define_h, self.gated)
            (dh, _) = jvp_along(h, arrays, along)[1]
            dh = dh.astype(fp8.dtype)
            terms.append(fp8.along_x(dh, kept.down))
        if of_down := [d for d in of_down if d is not None]:
            qt, scale = gated.hidden_codes(self.gated, *kept.hidden)
            h = qt, scale
            terms += [fp8.along_kernel(h, d) for d in of_down]
        return [functools.reduce(jnp.add, terms)]

    def gradients(self, cts: Any, kept: Kept, likes: Sequence[Any]) -> list[Any]:
        (dy,), fp8, (dx, of_firsts, of_down, of_biases) = cts, self.fp8, self._split(likes)
        there = lambda types: any(t is not None for t in types)
        before_down = there([dx, *of_biases, *sum(of_firsts, [])])
        g = fp8.gradient_codes(dy, q=before_down, qt=there(of_down))
        each = lambda x, g, types: [d if d is None else fp8.kernel_gradient(x, g, d) for d in types]
        if not before_down:
            h = gated.hidden_codes(self.gated, *kept.hidden)
            return [None] * (1 + 2 * len(of_firsts)) + each(h, g, of_down) + of_biases
        like = jax.typeof(kept.hidden[0]).update(dtype=jnp.dtype(fp8.dtype))
        dh = placed(fp8.input_gradient(g, kept.down, like), self.hidden_sharding)
        *codes, ht, h_scale = gated.hidden_gradients(self.gated, dh, *kept.hidden, order=fp8.order)
        ways = [Quantized(*codes[i : i + 3]) for i in range(0, len(codes), 3)]
        gradients: list[Any] = [None]
        if dx is not None:
            terms = [fp8.input_gradient(way, w, dx) for way, w in zip(ways, kept.kernels)]
            gradients = [chained(terms)]
        gradients += [d for way, types in zip(ways, of_firsts) for d in each(kept.x, way, types)]
        gradients += each((ht, h_scale), g, of_down)
        return gradients + [
            d if d is None else _bias_gradient(w, d) for w, d in zip(ways, of_biases)
        ]

    def rows(self, kept: Kept) -> Any:
        """The codes of xᵀ have them behind its columns; scales and limits are all rows'."""
        hidden = [*[0, -1] * (1 + self.gated.has_up), *[-1] * 3]
        return Kept(kept.x and (1, -1), -1, -1, hidden), [0, *[-1] * 8]


def serves(kernels: list[Array], contract: int, function: Scalar | None) -> bool:
    """Returns whether the MLP can be one function in FP8: shapes, and a bound of the slope."""
    if function is None or not all(fits(k, contract) and k.ndim == 2 for k in kernels):
        return False
    return function.name in gated.SLOPES


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
    parts = [part for kernel in (*kernels, down) for part in with_main_gradient(kernel)]
    x, *parts = equally_varying(x.astype(dtype), *parts, *biases)
    pairs = tuple((parts[2 * i], parts[2 * i + 1]) for i in range(len(kernels) + 1))
    operands = (x,), pairs, tuple(parts[2 * len(pairs) :])
    return differentiable(Mlp(fp8, hidden, hidden_sharding), *operands)[0]


def _plus(array: Array, bias: Array) -> Array:
    """Returns array + bias, without a cast in between: cuBLAS adds it as it writes a product."""
    bias = match(bias.astype(array.dtype), array, [array.ndim - 1])
    return array + jnp.expand_dims(bias, range(array.ndim - 1))


def _bias_gradient(way: Quantized, like: Any) -> Array:
    """The sum over rows of what codes say: one byte an element, where no other array is left."""
    total = jnp.sum(decoded(way.qt).astype(jnp.float32), range(1, way.qt.ndim)) * way.scale
    explicit = like.sharding.mesh.explicit_axes
    return (jax.sharding.reshard(total, like.sharding) if explicit else total).astype(like.dtype)
