"""Layers by the recipe of docs/quantization.md in NumPy, with the errors that are allowed.

An operand that is computed on the way is known to within its rounding, which may give it the next
code: the reference carries for every number how far from it a computation may be.
"""

import dataclasses
import functools

import fp8_reference
import jax
import jax.numpy as jnp
import numpy as np

f32 = jnp.float32


def silu(z):
    return z / (1 + np.exp(-z))


def silu_slope(z):
    sigmoid = 1 / (1 + np.exp(-z))
    return sigmoid * (1 + z * (1 - sigmoid))


def unit(dtype) -> float:
    """Half of the distance between 1 and the next number."""
    return float(jnp.finfo(dtype).eps) / 2


def arithmetic(terms, length=1):
    """The error of a sum of `length` terms in float32, as in `reference.Expected`."""
    return terms * (8 + np.sqrt(length)) * unit(f32)


@dataclasses.dataclass(frozen=True)
class Near:
    """Numbers in float64, and how far from each a computation in float32 may be."""

    value: np.ndarray
    slack: np.ndarray

    @property
    def size(self):
        return np.abs(self.value) + self.slack

    def __add__(self, other):
        value, slack = self.value + other.value, self.slack + other.slack
        return Near(value, slack + arithmetic(self.size + other.size))

    def __mul__(self, other):
        slack = np.abs(self.value) * other.slack + self.slack * other.size
        return Near(self.value * other.value, slack + arithmetic(self.size * other.size))

    def __matmul__(self, other):
        slack = np.abs(self.value) @ other.slack + self.slack @ other.size
        slack = slack + arithmetic(self.size @ other.size, self.value.shape[-1])
        return Near(self.value @ other.value, slack)

    @property
    def T(self):  # noqa: N802
        return Near(self.value.T, self.slack.T)

    def apply(self, function, steepest):
        """`function` of each, which changes by at most `steepest` times its argument's change."""
        value = function(self.value)
        return Near(value, steepest * self.slack + arithmetic(np.abs(self.value) + np.abs(value)))

    def sum(self, axis):
        slack = self.slack.sum(axis, keepdims=True)
        slack = slack + arithmetic(self.size.sum(axis, keepdims=True), self.value.shape[axis])
        return Near(self.value.sum(axis, keepdims=True), slack)

    def rounded(self, dtype):
        smallest = float(jnp.finfo(dtype).smallest_subnormal)
        return Near(self.value, self.slack + unit(dtype) * self.size + smallest)

    def quantized(self, bound=None):
        """Its codes' values, by one scale for all: that of its maximum, or of a bound (a Near)."""
        low, high = self.value - self.slack, self.value + self.slack
        size = self if bound is None else bound
        bounds = [fp8_reference.amax(v) for v in (size.size, size.size - 2 * size.slack)]
        codes = [decoded(v, bound) for v in (low, high) for bound in bounds]
        middle = decoded(self.value, bounds[0])
        return Near(middle, np.maximum(*(np.abs(f(codes, 0) - middle) for f in (np.max, np.min))))


@dataclasses.dataclass(frozen=True)
class Bounded(Near):
    """Numbers that are quantized with a bound of their own."""

    bound: np.float32

    def quantized(self, bound=None):
        assert bound is None
        return super().quantized(exact(self.bound))


def decoded(values, bound=None):
    codes, scale = fp8_reference.quantize(values, bound=bound)
    return np.asarray(codes, np.float64) * np.float64(scale)


def exact(array) -> Near:
    wide = np.asarray(array, np.float64)
    return Near(wide, np.zeros_like(wide))


def rows(array) -> Near:
    return exact(np.reshape(np.asarray(array), (-1, np.shape(array)[-1])))


def product(x: Near, kernel, dtype) -> Near:
    return (x.quantized() @ exact(kernel).quantized()).rounded(dtype)


def pulled(x: Near, kernel, dy: Near, dtype) -> tuple[Near, Near]:
    """The gradients of a product."""
    g = dy.quantized()
    dx = (g @ exact(kernel).quantized().T).rounded(dtype)
    return dx, (x.quantized().T @ g).rounded(kernel.dtype)


def epilogue(z: Near, bias, activation) -> tuple[Near, Near]:
    """(activation(z + bias), its slope)."""
    a = z if bias is None else z + exact(bias)
    if activation is None:
        return a, exact(np.ones_like(a.value))
    return a.apply(silu, 1.1), a.apply(silu_slope, 0.5)


def dense_recipe(x: Near, kernels, bias, dy: Near, dtype, activation):
    """(y, dx, the gradients of kernels and of the bias) of a dense or a gated layer."""
    zs = [product(x, kernel, dtype) for kernel in kernels]
    y, slope = epilogue(zs[0], None if bias is None else bias.astype(dtype), activation)
    wide = [dy if activation is None else dy * slope]
    if len(zs) > 1:
        wide = [dy * zs[1] * slope, dy * y]
        y = y * zs[1]
    dzs = wide if activation is None else [dz.rounded(dtype) for dz in wide]
    pairs = [pulled(x, kernel, dz, dtype) for kernel, dz in zip(kernels, dzs)]
    dx = functools.reduce(lambda a, b: (a + b).rounded(dtype), [dx for dx, _ in pairs])
    found = [dkernel for _, dkernel in pairs]
    if bias is not None:
        found.append(dzs[0].sum(0).rounded(bias.dtype))
    return y.rounded(dtype), dx, found


def of_rows(parameter, count) -> Near:
    """A parameter, or those of each example, against `count` rows."""
    wide = exact(parameter)
    if wide.value.ndim == 1:
        return wide
    return exact(np.repeat(wide.value, count // len(wide.value), 0))


def normalised(x, scale, bias=None, centred=False) -> tuple[Near, Near, Bounded]:
    """(rstd, x̂, x̂ · scale + bias), which is quantized from float32 by its bound."""
    wide, n = rows(x), x.shape[-1]
    if centred:
        mean = np.mean(wide.value, 1, keepdims=True)
        wide = wide + Near(-mean, arithmetic(np.abs(mean), n))
    mean = (wide * wide).sum(1).value / n
    rstd = Near(1 / np.sqrt(mean + 1e-6), arithmetic(1 / np.sqrt(mean + 1e-6), n))
    unscaled = wide * rstd
    y = unscaled * of_rows(scale, len(wide.value))
    bound = np.sqrt(np.float32(n)) * np.abs(np.asarray(scale, np.float32))
    if bias is not None:
        y = y + of_rows(bias, len(wide.value))
        bound = bound + np.abs(np.asarray(bias, np.float32))
    return rstd, unscaled, Bounded(y.value, y.slack, np.max(bound))


def with_norm(recipe, x, scale, bias=None, centred=False):
    """The same of the norm of x."""
    parameters = [scale] if bias is None else [scale, bias]
    y, dn, found = recipe(normalised(x, *parameters, centred=centred)[2])
    return y, [*norm_gradients(dn, x, scale, bias=bias, centred=centred), *found]


def norm_gradients(dn: Near, h, scale, dh=None, bias=None, centred=False) -> list[Near]:
    """The gradients of h, scale and bias for dn, that of the norm of h, and dh, that of h."""
    rstd, unscaled, _ = normalised(h, scale, bias, centred)
    moved, share = dn * of_rows(scale, len(dn.value)), exact(-1 / h.shape[-1])
    along = (moved * unscaled).sum(1) * share
    if centred:
        moved = moved + moved.sum(1) * share
    dx = rstd * (moved + unscaled * along)
    dx = dx if dh is None else dx + rows(dh)
    sums = [dn * unscaled, *([] if bias is None else [dn])]
    split = lambda a: np.reshape(a, (*np.shape(scale)[:-1], -1, a.shape[-1]))
    sums = [Near(split(a.value), split(a.slack)).sum(-2).rounded(scale.dtype) for a in sums]
    return [dx.rounded(h.dtype), *sums]


def product_recipe(gate, up, kernel, dy: Near, dtype):
    """(y, gradients) of gated_product."""
    value, slope = epilogue(rows(gate), None, "silu")
    hidden = (value * rows(up)).rounded(dtype)
    y = product(hidden, kernel, dtype)
    dh, dkernel = pulled(hidden, kernel, dy, dtype)
    return y, [
        (dh * rows(up) * slope).rounded(gate.dtype),
        (dh * value).rounded(up.dtype),
        dkernel,
    ]


def recipe(layer, args, dy, activation="silu"):
    """(y, the gradients of all operands) of the layer, for the gradient dy of its result.

    "norm" is a dense layer of a norm that writes its codes.
    """
    dtype, wide = args[0].dtype, rows(dy)
    if layer == "gated_product":
        return product_recipe(*args, wide, dtype)
    of = functools.partial(dense_recipe, dy=wide, dtype=dtype, activation=activation)
    x, *rest = args
    scale = rest.pop(0) if layer == "norm" else None
    kernels, bias = (rest, None) if "gated" in layer else (rest[:1], (*rest[1:], None)[0])
    if scale is not None:
        return with_norm(lambda n: of(n, kernels, bias), x, scale)
    y, dx, found = of(rows(x), kernels, bias)
    return y, [dx, *found]


def check(got, near: Near):
    """`got` is within the slack of the recipe."""
    values = np.asarray(got, np.float64).reshape(near.value.shape)
    error = np.abs(values - near.value)
    if not error.size:
        return
    worst = np.unravel_index(np.argmax(error - near.slack), error.shape)
    assert np.all(error <= near.slack), (worst, values[worst], near.value[worst], near.slack[worst])


def check_all(found, expected):
    for got, near in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        check(got, near)
