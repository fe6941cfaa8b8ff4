"""Whether a module computes a gated MLP with three linear layers, found from values.

The module's call is traced with small kernels, evaluated by NumPy and compared in float64 with each
assignment of the layers to gate, up and down, and each activation.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from .recognize import (
    Casts,
    Different,
    Trace,
    check,
    check_smooth,
    check_steps,
    equations,
    evaluate,
    probe_shape,
    roundings,
    trace,
)

_FLOAT32 = 2.0**-23
_SMALL = 24, 40  # features and hidden features of probes
_LARGEST = 1 << 20  # elements of a kernel, where the module takes no other sizes than its own


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


_erfc = np.vectorize(math.erfc, otypes=[float])
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda a: a * _sigmoid(a),
    "gelu": lambda a: a / 2 * _erfc(-a / math.sqrt(2)),
    "gelu_tanh": lambda a: a * _sigmoid(math.sqrt(8 / math.pi) * (a + 0.044715 * a**3)),
    "quick_gelu": lambda a: a * _sigmoid(1.702 * a),
    "relu": lambda a: np.maximum(a, 0),
    "squared_relu": lambda a: np.maximum(a, 0) ** 2,
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}
# What a relu may be written with, a maximum or one comparison that selects or multiplies: probes
# meet both of its pieces.
_RELU = "max", "lt", "le", "gt", "ge"


@dataclasses.dataclass(frozen=True)
class GatedFormula:
    """`down(activation(gate(x)) · up(x))`: the attributes that hold the layers."""

    gate: str
    up: str
    down: str
    activation: str


@dataclasses.dataclass(frozen=True)
class GatedCandidate:
    """A module that may be a gated MLP."""

    # Computes a copy of the module for (its parameters in the order of `parameters`, x, whether its
    # layers are to compute in float32).
    call: Callable[[list[Any], Any, bool], Any]
    # Of each, the attribute of its layer, "kernel" or "bias", and the dtype.
    parameters: tuple[tuple[str, str, str], ...]
    # Of each layer, its input features and its output features.
    sizes: Mapping[str, tuple[int, int]]
    contract: int  # 0 where kernels are `(in, out)`, 1 where they are `(out, in)`
    ranks: tuple[int, ...]  # of probe inputs, until one is recognised

    def trace(
        self, probe: "_Probe", x_dtype: str, wide: bool = False, rows: tuple[int, ...] | None = None
    ) -> Trace:
        """Returns the call's trace for parameters and an x as the probe's, or of other `rows`.

        Raises:
          Different: if the call fails, or does what no gated MLP does.
        """
        dtypes = ["float32" if wide else dtype for *_, dtype in self.parameters]
        values = [jax.ShapeDtypeStruct(v.shape, d) for v, d in zip(probe.values, dtypes)]
        shape = probe.shape if rows is None else (*rows, probe.features)
        x = jax.ShapeDtypeStruct(shape, x_dtype)
        own = trace(lambda values, x: self.call(values, x, wide), values, x)
        check(own, shape)
        return own


def roles(sizes: Mapping[str, tuple[int, int]]) -> list[tuple[str, str, str]]:
    """Returns the orders (gate, up, down) of three layers that their sizes allow."""
    if len(sizes) != 3:
        return []
    return [
        (gate, up, down)
        for gate, up, down in itertools.permutations(sizes)
        if sizes[gate] == sizes[up] == sizes[down][::-1]
    ]


def gated(candidate: GatedCandidate) -> tuple[GatedFormula, int]:
    """Returns what a module computes, and the rank of x for which it was found.

    Raises:
      Different: if it is not a gated MLP.
    """
    first = None
    for rank in candidate.ranks:
        try:
            return _gated(candidate, *traced(candidate, rank, "float32", wide=True)), rank
        except Different as error:
            if first is None or "its call fails" in str(first):
                first = error
    assert first is not None
    raise first


def casts(candidate: GatedCandidate, found: GatedFormula, rank: int, x_dtype: str) -> Casts:
    """Returns the result's dtype for a rank and dtype of x, verified like `gated`.

    Raises:
      Different: if the module does not compute the formula in one dtype.
    """
    probe, own = traced(candidate, rank, x_dtype)
    out = own.out_avals[0].dtype.name
    products = [e for e in equations(own.jaxpr) if e.primitive.name == "dot_general"]
    operands: list[Any] = [v.aval for e in products for v in e.invars]
    if other := {aval.dtype.name for aval in operands} - {out}:
        raise Different(f"for {x_dtype} it multiplies {', '.join(sorted(other))}, returns {out}")
    dtypes = [dtype for *_, dtype in candidate.parameters]
    _, error, excess = probe.error(own, found, x_dtype, dtypes)
    if not excess <= 1:
        raise Different(
            f"for {x_dtype} it differs from a gated MLP by {error:.2g} of the largest value"
        )
    return Casts(None, None, "after", out, error)


def _gated(candidate: GatedCandidate, probe: "_Probe", own: Trace) -> GatedFormula:
    dtypes = ["float32"] * len(candidate.parameters)
    formulas = [
        GatedFormula(*order, activation)
        for order in roles(candidate.sizes)
        for activation in _ACTIVATIONS
    ]
    found = [(probe.error(own, f, "float32", dtypes), f) for f in formulas]
    found.sort(key=lambda each: np.nan_to_num(each[0][0], nan=np.inf))
    (_, error, excess), formula = found[0]
    if not excess <= 1:
        raise Different(
            "it has three linear layers, and is not down(activation(gate(x)) · up(x)): the "
            f"nearest, {formula.activation}, differs by {error:.2g} of the largest value"
        )
    if found[1][0][2] <= 1:
        first, second = (f"{f.down}({f.activation}({f.gate}) · {f.up})" for _, f in found[:2])
        raise Different(f"its rounding hides whether it is {first} or {second}")
    _check_pieces(own, formula)
    return formula


def _check_pieces(own: Trace, formula: GatedFormula) -> None:
    """Raises Different if a module has a piecewise operation that its activation does not need.

    Others may guard against NaN or overflow, where no probe is.
    """
    if formula.activation not in ("relu", "squared_relu"):
        return check_smooth(own)
    check_smooth(own, but=(*_RELU, "select_n"))
    names = [equation.primitive.name for equation in equations(own.jaxpr)]
    if sum(name in _RELU for name in names) > 1 or names.count("select_n") > 1:
        raise Different(f"it has more pieces than {formula.activation}")


def traced(
    candidate: GatedCandidate, rank: int, x_dtype: str, wide: bool = False
) -> tuple["_Probe", Trace]:
    """Returns a probe and its trace: a small one, or one of the module's own sizes."""
    orders = roles(candidate.sizes)
    if not orders:
        raise Different("the sizes of its layers are not those of a gated MLP")
    own = candidate.sizes[orders[0][0]]
    hidden = _SMALL[own[0] != own[1]]  # kernels that are square stay square
    probe = _Probe(candidate, _SMALL[0], hidden, rank)
    try:
        return probe, candidate.trace(probe, x_dtype, wide)
    except Different:
        if own[0] * own[1] > _LARGEST:
            raise
    probe = _Probe(candidate, *own, rank)
    return probe, candidate.trace(probe, x_dtype, wide)


def check_rows(candidate: GatedCandidate, rows: tuple[int, ...], x_dtype: str) -> None:
    """Raises Different if a call for an x of so many rows computes anything else than for few."""
    probe, known = traced(candidate, len(rows) + 1, x_dtype)
    check_steps(known, candidate.trace(probe, x_dtype, rows=rows))


class _Probe:
    """Kernels, biases and rows for one size."""

    def __init__(self, candidate: GatedCandidate, features: int, hidden: int, rank: int):
        rng = np.random.default_rng(0)
        self.candidate, self.rank, self.features = candidate, rank, features
        *_, down = roles(candidate.sizes)[0]
        self.values: list[np.ndarray] = []
        for layer, kind, _ in candidate.parameters:
            n, m = (hidden, features) if layer == down else (features, hidden)
            shape = (m,) if kind == "bias" else (n, m) if candidate.contract == 0 else (m, n)
            self.values.append((rng.standard_normal(shape) / math.sqrt(n)).astype(np.float32))
        # Rows of several magnitudes tell activations apart, and show a limit on values.
        scale = np.array([1e-3, 0.1, 1.0, 3.0, 30.0, 0.0])
        self.shape = probe_shape(len(scale), features, rank)
        rows = len(scale) if rank == 1 else math.prod(self.shape[:-1])
        x = rng.standard_normal((rows, features)) * np.resize(scale, (rows, 1))
        self.x = x.astype(np.float32)

    def error(
        self, own: Trace, formula: GatedFormula, x_dtype: str, dtypes: list[str]
    ) -> tuple[float, float, float]:
        """Returns how far a trace is from a formula in float64.

        That is the largest difference of a row relative to its largest value, the median of rows
        and the maximum, and the maximum relative to what rounding explains.
        """
        x = self.x.astype(x_dtype)
        values = [value.astype(dtype) for value, dtype in zip(self.values, dtypes)]
        if self.rank == 1:
            y = np.stack([evaluate(own, *values, row) for row in x])
        else:
            y = evaluate(own, *values, x.reshape(self.shape)).reshape(x.shape)
        names = [parameter[:2] for parameter in self.candidate.parameters]
        given = {name: value.astype(np.float64) for name, value in zip(names, values)}

        def layer(name, x, dx):
            """The layer's output, and what rounding may add to an error of its input."""
            kernel, bias = given[name, "kernel"], given.get((name, "bias"), np.zeros(()))
            kernel = kernel if self.candidate.contract == 0 else kernel.T
            size = np.abs(x) @ np.abs(kernel) + np.abs(bias)
            y = x @ kernel + bias
            # a float32 sum of n terms, and two roundings of the result (product and bias)
            summed = (8 + math.sqrt(x.shape[-1])) * _FLOAT32 * size
            return y, summed + 2 * narrow * (np.abs(y) + np.abs(bias)) + dx @ np.abs(kernel)

        narrow, wide = max(roundings(own)), x.astype(np.float64)
        with np.errstate(all="ignore"):
            a, da = layer(formula.gate, wide, narrow * np.abs(wide))
            b, db = layer(formula.up, wide, narrow * np.abs(wide))
            f = _ACTIVATIONS[formula.activation](a)
            slope = 1.2 + 2 * np.abs(a) * (formula.activation == "squared_relu")
            # an activation's own roundings, four of |a|: 1 + tanh(u) cancels where a < 0
            df = slope * da + 4 * narrow * (np.abs(f) + np.abs(a))
            dh = df * np.abs(b) + np.abs(f) * db + narrow * np.abs(f * b)
            exact, allowed = layer(formula.down, f * b, dh)
            off = np.abs(y.astype(np.float64) - exact)
            excess = float(np.max(off / (allowed + 1e-30)))
            rows = np.max(off, -1) / (np.max(np.abs(exact), -1) + 1e-30)
            return float(np.median(rows)), float(np.max(rows)), excess
