"""One of the norms on one set of random operands, and its expected results and derivatives.

Every op is called as a function of `(x[, residual][, scale][, bias])` that returns a tuple, and is
differentiated through `loss`: the sum of its results times given cotangents.
"""

import copy
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from reference import Expected, assert_close

import normfuse


class Case:
    """An op, its operands (numpy arrays), and expectations in float64.

    Args:
      op: the name of a public function, after "residual_" where it is called with a residual.
      shape: of x.
      x, residual, scale, bias: dtypes; scale or bias None for none.
      fill: turns standard normal values into an operand's.
      seed: of the random values.
      options: given to the op.
    """

    def __init__(
        self,
        op="rms_norm",
        shape=(8, 2, 16),
        *,
        x="float32",
        residual="float32",
        scale="float32",
        bias=None,
        fill=lambda values: values,
        seed=0,
        **options,
    ):
        rng = np.random.default_rng(seed)
        draw = lambda shape, dtype: fill(rng.standard_normal(shape)).astype(jnp.dtype(dtype))
        self.op, self.options, self.has_residual = op, options, op.startswith("residual_")
        self.has_scale, self.has_bias = scale is not None, bias is not None
        self.axes, _ = reference.dims(np.empty(shape), options.get("axis", -1))
        operands = [(shape, x)]
        operands += [(shape, residual)] * self.has_residual
        own = tuple(shape[a] for a in self.axes)
        operands += [(own, dtype) for dtype in (scale, bias) if dtype is not None]
        self.args = tuple(draw(*operand) for operand in operands)
        self.tangents = tuple(draw(*operand) for operand in operands)
        dtypes = [a.dtype for a in self.args] + [jnp.dtype(options.get("dtype") or x)]
        self.compute = "float64" if np.float64 in dtypes else "float32"
        y = jnp.dtype(options.get("dtype") or x)
        self.cts = (draw(shape, y),)
        if self.has_residual:
            self.cts += (draw(shape, self.h.dtype),)
        if op == "rms_norm_with_rstd":
            rows = tuple(n for i, n in enumerate(shape) if i not in self.axes)
            self.cts += (draw(rows, self.compute),)

    def __call__(self, *args, **options):
        """The op's results, always a tuple; `options` on top of the case's own."""
        given, (x, *args) = {**self.options, **options}, args
        if self.has_residual:
            given["residual"] = args.pop(0)
        if self.has_bias:
            given["bias"] = args.pop()
        out = getattr(normfuse, self.op.removeprefix("residual_"))(x, *args, **given)
        return out if isinstance(out, tuple) else (out,)

    @property
    def scale(self):
        return self.args[1 + self.has_residual] if self.has_scale else None

    @property
    def bias(self):
        return self.args[-1] if self.has_bias else None

    @property
    def h(self):
        """The array that is normalised."""
        return reference.add(*self.args[:2]) if self.has_residual else self.args[0]

    def replace(self, **changes) -> "Case":
        """The same op on other operands: `args`, `cts` or `tangents`."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def argnums(self):
        return tuple(range(len(self.args)))

    def loss(self, *args_and_cts, **options):
        """A scalar whose gradient is the pullback of the cotangents."""
        n = len(self.args)
        out = self(*args_and_cts[:n], **options)
        cts = args_and_cts[n:] or self.cts
        return sum(jnp.sum(o.astype(self.compute) * ct) for o, ct in zip(out, cts, strict=True))

    def grad(self, *args_and_cts, **options):
        """The gradients by every operand."""
        return jax.grad(functools.partial(self.loss, **options), self.argnums)(*args_and_cts)

    @property
    def _options(self):
        kept = {k: v for k, v in self.options.items() if k in ("eps", "scale_offset")}
        return {**kept, "axes": self.axes}

    def values(self) -> list[Expected]:
        """The results of the op."""
        if "layer_norm" in self.op:
            y = reference.layer_forward(self.h, self.scale, self.bias, **self._options)
            return [y, Expected(reference.wide(self.h), np.zeros(()))][: 1 + self.has_residual]
        y, rstd = reference.forward(self.h, self.scale, **self._options)
        y = reference.plus(y, self.bias, self.axes)
        if self.has_residual:
            return [y, Expected(reference.wide(self.h), np.zeros(()))]
        return [y, rstd] if self.op == "rms_norm_with_rstd" else [y]

    def gradients(self) -> list[Expected]:
        """The results of `grad`."""
        dh = self.cts[1] if self.has_residual else None
        if "layer_norm" in self.op:
            found = self.cts[0], self.h, self.scale, dh
            dx, dscale, dbias = reference.layer_backward(*found, **self._options)
            grads = [dx] * (1 + self.has_residual)
            return grads + [dscale] * self.has_scale + [dbias] * self.has_bias
        dx, dscale = reference.backward(self.cts[0], self.h, self.scale, dh, **self._options)
        if self.op == "rms_norm_with_rstd":
            more = self._through_rstd(lambda rstd: rstd * reference.wide(self.cts[1]))
            value = dx.value + more  # JAX adds the two cotangents, each in x's dtype already
            rounded = np.abs(dx.value) + np.abs(more) + np.abs(value)
            dx = Expected(value, dx.size + np.abs(more), dx.length, rounded)
        grads = [dx] * (1 + self.has_residual) + [dscale] * self.has_scale
        return grads + [reference.sum_of_rows(self.cts[0], self.axes)] * self.has_bias

    def pushed(self) -> list[Expected]:
        """The tangents of the results along `tangents`."""
        dscale = self.tangents[1 + self.has_residual] if self.has_scale else None
        dbias = self.tangents[-1] if self.has_bias else None
        dh = self.tangents[0]
        if self.has_residual:
            dh = reference.add(*self.tangents[:2])
        if "layer_norm" in self.op:
            parameters = dscale, dbias
            dy = reference.layer_tangent(self.h, self.scale, dh, *parameters, **self._options)
        else:
            dy = reference.tangent(self.h, self.scale, dh, dscale, **self._options)
            dy = reference.plus(dy, dbias, self.axes)
        if self.has_residual:
            # XLA may keep more of the sum's tangent than its dtype holds: one rounding either way
            ratio = float(jnp.finfo(dh.dtype).eps / jnp.finfo(self.cts[0].dtype).eps)
            dy = Expected(dy.value, dy.size, dy.length, np.abs(dy.value) + dy.size * ratio)
            return [dy, Expected(reference.wide(dh), np.zeros(()))]
        if self.op == "rms_norm_with_rstd":
            each = self._through_rstd(lambda rstd: rstd) * reference.wide(dh)
            size = np.abs(each).sum(self.axes)
            return [dy, Expected(each.sum(self.axes), size, self.h.size)]
        return [dy]

    def _through_rstd(self, times):
        """The derivative of rstd by each element of x, times a value of each row's."""
        options = {**self._options, "scale_offset": 0.0}
        rstd = reference.normalise(self.h, None, **options)[1]
        n = self.h.size // max(rstd.size, 1)
        row = -(rstd**2) * times(rstd) / n
        return np.expand_dims(row, self.axes) * reference.wide(self.h)

    def check(self, got, expected, slack=1.0):
        """Compares arrays with expectations, in order."""
        got = jax.tree.leaves(got)
        assert len(got) == len(expected)
        for one, other in zip(got, expected):
            assert_close(one, other, self.compute, slack)


class Batch:
    """Several cases as one call of `vmap`: what is mapped is stacked, the rest is the first's.

    Args:
      in_axes: for each operand, where its batch dimension is, or None.
      size: how many examples.
      options: of every `Case`.
    """

    def __init__(self, op, in_axes, size=3, **options):
        self.examples = [Case(op, seed=i, **options) for i in range(size)]
        self.in_axes = tuple(in_axes)
        self.share(self, in_axes)

    def share(self, other: "Batch", in_axes) -> None:
        """Takes the operands that are not mapped over from the first example of `other`."""
        first, in_axes = other.examples[0], tuple(in_axes)
        pick = lambda arrays: tuple(
            own if axis is not None else shared
            for own, shared, axis in zip(arrays, first.args, in_axes)
        )
        self.examples = [case.replace(args=pick(case.args)) for case in self.examples]
        self.case = self.examples[0]
        self.args = tuple(
            arrays[0] if axis is None else np.stack(arrays, axis)
            for arrays, axis in zip(zip(*(e.args for e in self.examples)), self.in_axes)
        )
        self.cts = tuple(np.stack(cts) for cts in zip(*(e.cts for e in self.examples)))

    def each(self, method: str) -> list[Expected]:
        """`values` or `gradients` of every example, stacked in front."""
        return [stack(column) for column in zip(*(getattr(e, method)() for e in self.examples))]

    def together(self) -> list[Expected]:
        """Gradients of the sum of every example's loss, by the operands as they are given."""
        return [
            total(g) if axis is None else g.map(lambda a, axis=axis: np.moveaxis(a, 0, axis))
            for g, axis in zip(self.each("gradients"), self.in_axes)
        ]


def stack(examples) -> Expected:
    """One expectation for several, along a new dimension in front."""
    values, sizes = zip(*(np.broadcast_arrays(e.value, e.size) for e in examples))
    rounded = [np.abs(e.value) if e.rounded is None else e.rounded for e in examples]
    return Expected(np.stack(values), np.stack(sizes), examples[0].length, np.stack(rounded))


def total(stacked: Expected) -> Expected:
    """The sum over the dimension in front."""
    n = len(stacked.value)
    return Expected(stacked.value.sum(0), stacked.size.sum(0), stacked.length + n)


REPLICATED = P()
SPECS = {  # placements of a case's x (8, 2, 16) on a mesh of data=4, model=2
    "rows": P("data", None, None),
    "rows over both axes": P(("data", "model"), None, None),
    "rows in two dimensions": P("data", "model", None),
    "features": P("data", None, "model"),
    "features over both axes": P(None, None, ("data", "model")),
    "replicated": P(None, None, None),
}


def put(mesh, case, spec, scale=REPLICATED) -> tuple[list[jax.Array], list[jax.Array]]:
    """The operands and cotangents on a mesh; scale replicated, or stored as `scale` says."""
    place = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    *big, last = case.args
    return [place(a, spec) for a in big] + [place(last, scale)], [
        place(ct, spec) for ct in case.cts
    ]


def both(*cases: Case, **options):
    """The ops and their pullbacks as one compiled function of each one's (operands, cotangents)."""

    @jax.jit
    def run(*given):
        results = []
        for case, (args, cts) in zip(cases, given, strict=True):
            out, pullback = jax.vjp(functools.partial(case, **options), *args)
            results.append((out, pullback(cts)))
        return results

    return run


def check_both(*cases: Case, **options):
    """Values, gradients and dtypes of these cases, in one program."""
    found = both(*cases, **options)(*[(case.args, case.cts) for case in cases])
    for case, (out, grads) in zip(cases, found):
        case.check(out, case.values())
        case.check(grads, case.gradients())
        assert [g.dtype for g in grads] == [a.dtype for a in case.args]
        assert out[0].dtype == case.cts[0].dtype


# ---------------------------------------------------------------- tables

FLOATS = ("float32", "bfloat16", "float16")
MIXES = [*itertools.product(FLOATS, (*FLOATS, None), FLOATS)]
WIDE = [
    m for m in itertools.product(("float64", "float32", "bfloat16"), repeat=3) if "float64" in m
]
AXES = [-1, 0, 1, -2, (0,), (1, 2), (2, 1), (0, 2), (-1, 0), (0, 1, 2, 3), (1, 3), (0, 1)]
