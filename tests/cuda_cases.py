"""Operands for RMSNorm's CUDA kernels, and the expected results of any way to run them.

A runner is `run(kernel, operands, params) -> list of NumPy arrays`: on an emulator, through the
CUDA driver, or through XLA.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import reference
from reference import Expected, assert_close, wide

from normfuse.layers.norm import cuda

EPS = 1e-6
DTYPES = ("bfloat16", "float32", "float16", "float64")

Run = Callable[[str, Sequence[np.ndarray], dict], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays of shape (outer, n, inner), and the flags of one call.

    `x` and `out` are the dtypes of x and y (and of dy); `other` that of the residual and of dh;
    `scale` None for no scale.
    """

    shape: tuple[int, int, int]
    x: str = "bfloat16"
    scale: str | None = "float32"
    out: str = "bfloat16"
    other: str = "bfloat16"
    residual: bool = False
    offset: float = 0.0

    def __str__(self):
        shape = "x".join(map(str, self.shape))
        flags = f"{'+' + self.other if self.residual else ''}{'@' + str(self.offset)}"
        return f"{shape}-{self.x}-{self.scale}-{self.out}{flags}"

    @property
    def compute(self) -> str:
        """The compute type."""
        used = [self.x, self.scale, self.out] + [self.other] * self.residual
        return "float64" if "float64" in used else "float32"

    def draw(self, *seeds: int) -> list[np.ndarray]:
        """Standard normal arrays: x-like, out-like, other-like, then the scale."""
        rng = np.random.default_rng([*seeds, *self.shape])
        dtypes = (self.x, self.out, self.other)
        arrays = [rng.standard_normal(self.shape, np.float32).astype(jnp.dtype(d)) for d in dtypes]
        scale = 1 + 0.25 * rng.standard_normal(self.shape[1])
        return [*arrays, scale.astype(jnp.dtype(self.scale or "float32"))]

    @property
    def flags(self) -> dict:
        """Params that every kernel with a scale takes."""
        return {"scale_offset": self.offset, "has_scale": self.scale is not None}


def check_forward(run: Run, case: Case) -> None:
    """`forward` gives y, h and rstd within rounding."""
    x, _, other, scale = case.draw(1)
    more = [other] * case.residual + [scale] * (case.scale is not None)
    params = {"eps": EPS, "out_dtype": jnp.dtype(case.out), "has_residual": case.residual}
    results = run("forward", [x, *more], params | case.flags | {"with_rstd": True})
    if case.residual:
        x = reference.add(x, other)
        h = results.pop(1)
        assert h.dtype == x.dtype
        _assert_sum(h, x, case)
        x = h  # statistics come from the stored sum
    expected = reference.forward(
        x, scale if case.scale else None, eps=EPS, axes=1, scale_offset=case.offset
    )
    for result, dtype, want in zip(results, (case.out, case.compute), expected, strict=True):
        assert result.dtype == dtype
        assert_close(result, want, case.compute)


def check_cast_before(run: Run, case: Case) -> None:
    """`forward` and `apply` round to the input's dtype before they multiply."""
    x, _, other, scale = case.draw(5)
    flags = case.flags | {"eps": EPS, "out_dtype": jnp.dtype(case.out), "cast_before": True}
    more = {"has_residual": case.residual, "with_rstd": True}
    y, *h, rstd = run("forward", [x, *[other] * case.residual, scale], flags | more)
    h = reference.add(x, other) if case.residual else x
    want, known = reference.round_before_weight(h, scale, eps=EPS, axes=1, out=case.out)
    assert known.mean() > 0.98 and y.dtype == case.out
    assert y[known].tobytes() == want[known].tobytes()
    (again,) = run("apply", [h, scale, rstd], flags)
    assert again.tobytes() == y.tobytes()


def check_heads(run: Run, case: Case, heads: int) -> None:
    """All kernels on (outer, heads, n) give each head's own results, within rounding."""
    outer, n, _ = case.shape
    shape = (outer, heads, n)
    x, dy, dh = (
        a.reshape(shape) for a in dataclasses.replace(case, shape=(outer, heads * n, 1)).draw(6)[:3]
    )
    scale = 1 + 0.25 * np.random.default_rng(n).standard_normal((heads, n))
    scale = scale.astype(jnp.dtype(case.scale))
    seen = {"axes": (2,), "heads": (1,), "has_residual": case.residual} | case.flags
    more, out = [dh] * case.residual, {"eps": EPS, "out_dtype": jnp.dtype(case.out)}
    y, *h, rstd = run("forward", [x, *more, scale], seen | out | {"with_rstd": True})
    h = h[0] if h else x
    (again,) = run("apply", [h, scale, rstd], seen | out)
    assert again.tobytes() == y.tobytes()
    (sums,) = run("row_statistics", [h], {"axes": (2,), "heads": (1,)})
    seen["with_dscale"] = True
    dx, dscale = run("backward", [dy, h, scale, rstd, *more], seen)
    (dots,) = run("row_dots", [dy, h, scale], seen)
    known = [dy, h, scale, rstd, *more, dots]
    halves = run("backward_apply", known, seen | {"count": float(n)})
    assert rstd.shape == sums.shape == dots.shape == shape[:2] and dscale.shape == (heads, n)
    options = {"eps": EPS, "scale_offset": case.offset}
    for i in range(heads):
        of_y, of_rstd = reference.forward(h[:, i], scale[i], **options)
        of_dx, of_dscale = reference.backward(
            dy[:, i], h[:, i], scale[i], dh[:, i] if case.residual else None, **options
        )
        assert_close(y[:, i], of_y, case.compute)
        assert_close(rstd[:, i], of_rstd, case.compute)
        for a, b in ((dx, dscale), halves):
            assert_close(a[:, i], of_dx, case.compute)
            assert_close(b[i], of_dscale, case.compute)


def check_backward(run: Run, case: Case) -> None:
    """`backward` gives dx and dscale within rounding."""
    x, dy, dh, scale = case.draw(2)
    rstd = reference.normalise(x, None, eps=EPS, axes=1)[1].astype(case.compute)
    operands = [dy, x] + [scale] * (case.scale is not None) + [rstd] + [dh] * case.residual
    params = {"has_residual": case.residual, "with_dscale": True}
    dx, dscale = run("backward", operands, params | case.flags)
    expected = reference.backward(
        dy,
        x,
        scale if case.scale else None,
        dh if case.residual else None,
        eps=EPS,
        axes=1,
        scale_offset=case.offset,
    )
    assert (dx.dtype, dscale.dtype) == (case.x, case.compute)
    assert_close(dx, expected[0], case.compute)
    assert_close(dscale, expected[1], case.compute)


def check_halves(run: Run, case: Case) -> None:
    """`row_statistics`, `apply`, `row_dots` and `backward_apply`, within rounding."""
    x, dy, dh, scale = case.draw(3)
    outer, n, inner = case.shape
    weight, wide_x, wide_dy = np.ones((1, 1, 1)), wide(x), wide(dy)
    if case.scale:
        weight = (wide(scale) + case.offset)[None, :, None]
    scales = [scale] * (case.scale is not None)

    (sums,) = run("row_statistics", [x], {})
    assert_close(sums, Expected((wide_x**2).sum(1), (wide_x**2).sum(1), n), sums.dtype.name)

    rng = np.random.default_rng(n)
    rstd = rng.uniform(0.5, 1.5, (outer, inner)).astype(case.compute)
    each = wide(rstd)[:, None]
    (y,) = run("apply", [x, *scales, rstd], case.flags | {"out_dtype": jnp.dtype(case.out)})
    assert y.dtype == case.out
    assert_close(y, Expected(wide_x * each * weight, np.abs(wide_x * each * weight)), case.compute)

    (dots,) = run("row_dots", [dy, x, *scales], case.flags)
    terms = wide_dy * weight * wide_x
    assert_close(dots, Expected(terms.sum(1), np.abs(terms).sum(1), n), dots.dtype.name)

    dots = rng.standard_normal((outer, inner)).astype(case.compute)
    operands = [dy, x, *scales, rstd] + [dh] * case.residual + [dots]
    params = {"has_residual": case.residual, "with_dscale": True, "count": 2.0 * n}
    dx, dscale = run("backward_apply", operands, params | case.flags)
    parts = [each * wide_dy * weight, -wide_x * each**3 * wide(dots)[:, None] / (2 * n)]
    parts += [wide(dh)] if case.residual else []
    assert dx.dtype == case.x
    assert_close(dx, Expected(sum(parts), sum(map(np.abs, parts))), case.compute)
    terms = wide_dy * wide_x * each
    expected = Expected(terms.sum((0, 2)), np.abs(terms).sum((0, 2)), outer * inner)
    assert_close(dscale, expected, case.compute)


def _assert_sum(h, expected, case: Case) -> None:
    """h is the rounded sum; where the compute type is narrower than exact, twice rounded."""
    exact, size = wide(expected), np.abs(wide(expected))
    assert_close(h, Expected(exact, size), case.compute)


def many_rows(monkeypatch) -> None:
    """From here on the backward is that of many rows."""
    monkeypatch.setattr(cuda, "one_launch_layout", lambda *_, **__: None)


def mixes() -> list[tuple[str, str | None, str]]:
    """(x, scale, out) such that each pair of dtypes of any two of them is met."""
    found = []
    for i, j in itertools.product(range(4), range(4)):
        found.append((DTYPES[i], DTYPES[j], DTYPES[(i + j) % 4]))
    return found
