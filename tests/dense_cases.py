"""A dense layer on one set of random operands, and its expected results and derivatives.

It has the interface of `rms_norm_cases.Case`: y = silu(x · kernel + bias).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference import Expected, assert_close, wide

from normfuse import dense


def silu(z):
    return z / (1 + np.exp(-z))


def silu_slope(z):
    sigmoid = 1 / (1 + np.exp(-z))
    return sigmoid * (1 + z * (1 - sigmoid))


class DenseCase:
    """x of (8, 2, 16), a kernel of (16, 12) and a bias, in float32."""

    compute = "float32"
    op = "dense"

    def __init__(self, shape=(8, 2, 16), out=12, seed=0):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
        self.args = draw(*shape), draw(shape[-1], out) / 4, draw(out)
        self.tangents = draw(*shape), draw(shape[-1], out) / 4, draw(out)
        self.cts = (draw(*shape[:-1], out),)

    def __call__(self, x, kernel, bias, **options):
        return (dense(x, kernel, bias, activation="silu", **options),)

    def loss(self, *args_and_cts, **options):
        """A scalar whose gradient is the pullback of the cotangents."""
        cts = args_and_cts[3:] or self.cts
        return jnp.sum(self(*args_and_cts[:3], **options)[0] * cts[0])

    def grad(self, *args_and_cts, **options):
        """The gradients by every operand."""
        return jax.grad(functools.partial(self.loss, **options), (0, 1, 2))(*args_and_cts)

    def _sums(self):
        """z, and the magnitudes of its terms."""
        x, kernel, bias = map(wide, self.args)
        return x @ kernel + bias, np.abs(x) @ np.abs(kernel) + np.abs(bias)

    def values(self) -> list[Expected]:
        """The op's results; silu changes by at most 1.1 times its argument's change."""
        z, size = self._sums()
        return [Expected(silu(z), 1.1 * size, self.args[0].shape[-1])]

    def gradients(self) -> list[Expected]:
        """The results of `grad`; silu's slope changes by at most half of its argument's change."""
        (z, size), (x, kernel, _), ct = self._sums(), map(wide, self.args), wide(self.cts[0])
        dz, loose = ct * silu_slope(z), np.abs(ct) * (1.1 + 0.5 * size)
        flat = lambda a: a.reshape(-1, a.shape[-1])
        rows = flat(x).shape[0] + x.shape[-1]
        return [
            Expected(dz @ kernel.T, loose @ np.abs(kernel).T, sum(kernel.shape)),
            Expected(flat(x).T @ flat(dz), np.abs(flat(x)).T @ flat(loose), rows),
            Expected(flat(dz).sum(0), flat(loose).sum(0), rows),
        ]

    def pushed(self) -> list[Expected]:
        """The tangent of the result along `tangents`."""
        (z, size), (x, kernel, _) = self._sums(), map(wide, self.args)
        dx, dkernel, dbias = map(wide, self.tangents)
        dz = dx @ kernel + x @ dkernel + dbias
        terms = np.abs(dx) @ np.abs(kernel) + np.abs(x) @ np.abs(dkernel) + np.abs(dbias)
        return [Expected(dz * silu_slope(z), terms * (1.1 + 0.5 * size), 2 * x.shape[-1])]

    def check(self, got, expected, slack=1.0):
        """Compares arrays with expectations, in order."""
        got = jax.tree.leaves(got)
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_close(one, other, self.compute, slack)
