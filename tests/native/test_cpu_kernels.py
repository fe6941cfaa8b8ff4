"""The CPU handlers themselves, called through `jax.ffi`, against float64 NumPy."""

import itertools

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.oldest

DTYPES = ("float64", "float32", "bfloat16", "float16")
EPS = 1e-6
SHAPES = [
    *((outer, n, 1) for n in (*range(1, 18), 64, 127) for outer in (1, 199)),
    *((3, n, 1) for n in (1000, 1024, 4097)),
    *((outer, 65536, 1) for outer in (1, 2)),
    *((outer, n, inner) for outer in (1, 5) for n in (1, 7, 300) for inner in (3, 16)),
    (0, 64, 1),
    (0, 7, 3),
    (2, 30, 1100),
    (2, 65536, 3),
    (700, 96, 1),
]


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(ml_dtypes.finfo(dtype).dtype)


def compute_dtype(*dtypes):
    return "float64" if "float64" in dtypes else "float32"


def assert_rounded(actual, expected, terms, compute):
    """`actual` is `expected` but for its own rounding and that of the arithmetic in `compute`.

    An element is a sum of products of few factors: each operation adds half an ulp of its result,
    eight whole ones are allowed, of the size of the `terms` that were added (they may cancel).
    Results below the last addend may be zero: XLA flushes subnormals, all but those of float16,
    which are no subnormals in the compute type.
    """
    out = ml_dtypes.finfo(actual.dtype)
    limit = (
        float(out.eps) / 2 * np.abs(expected)
        + 8 * np.finfo(compute).eps * terms
        + float(out.smallest_subnormal if actual.dtype == "float16" else out.smallest_normal)
    )
    error = np.abs(actual.astype(np.float64) - expected)
    assert np.all(error <= limit), (
        f"off by {np.max(error / limit):.3g} times what rounding explains"
    )


def check_forward(call, x, scale, offset=0.0, residual=None, y_dtype=None, h_dtype=None):
    outer, n, inner = x.shape
    y_dtype, h_dtype = y_dtype or x.dtype.name, h_dtype or x.dtype.name
    operands = [a for a in (x, residual, scale) if a is not None]
    extra = [] if residual is None else [h_dtype]
    compute = compute_dtype(*(a.dtype.name for a in operands), y_dtype, *extra)
    results = [(x.shape, t) for t in (y_dtype, *extra)] + [((outer, inner), compute)]
    flags = {"has_residual": residual is not None, "has_scale": scale is not None}
    flags |= {"eps": EPS, "scale_offset": offset}
    y, *h, rstd = call("forward", operands, results, **flags, with_rstd=True)
    exact = x.astype(np.float64)
    if residual is not None:
        other = residual.astype(np.float64)
        assert_rounded(h[0], exact + other, np.abs(exact) + np.abs(other), compute)
        exact = h[0].astype(np.float64)  # statistics come from the stored sum
    exact_rstd = 1 / np.sqrt(np.mean(exact * exact, 1) + EPS)
    assert_rounded(rstd, exact_rstd, exact_rstd, compute)
    weight, size = weights(scale, offset, n)
    normal = exact * exact_rstd[:, None]
    assert_rounded(y, normal * weight, np.abs(normal) * size, compute)


def check_backward(call, dy, x, scale, offset=0.0, dh=None, dx_dtype=None):
    outer, n, inner = x.shape
    dx_dtype = dx_dtype or x.dtype.name
    operands = [a for a in (dy, x, scale, dh) if a is not None]
    compute = compute_dtype(*(a.dtype.name for a in operands), dx_dtype)
    h, g = x.astype(np.float64), dy.astype(np.float64)
    rstd = (1 / np.sqrt(np.mean(h * h, 1) + EPS)).astype(compute)
    operands.insert(len(operands) - (dh is not None), rstd)
    results = [(x.shape, dx_dtype), ((n,), compute)]
    flags = {"has_residual": dh is not None, "has_scale": scale is not None, "scale_offset": offset}
    dx, dscale = call("backward", operands, results, **flags, with_dscale=True)
    r = rstd.astype(np.float64)[:, None]
    weight, size = weights(scale, offset, n)
    c, c_terms = (np.mean(a, 1, keepdims=True) for a in (g * weight * h, np.abs(g * h) * size))
    exact = r * g * weight - h * r**3 * c
    terms = r * np.abs(g) * size + np.abs(h) * r**3 * c_terms
    if dh is not None:
        exact, terms = exact + dh.astype(np.float64), terms + np.abs(dh.astype(np.float64))
    assert_rounded(dx, exact, terms, compute)
    shares = g * h * r
    assert_rounded(dscale, shares.sum((0, 2)), np.abs(shares).sum((0, 2)), compute)


def weights(scale, offset, n):
    """scale + offset, and the size of the larger: the sum may cancel, its rounding does not."""
    if scale is None:
        return np.ones((n, 1)), np.ones((n, 1))
    scale = scale.astype(np.float64)[:, None]
    return scale + offset, np.abs(scale) + abs(offset)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_forward_of_every_dtype_mix(x_dtype, call, rng):
    for scale_dtype, y_dtype in itertools.product(DTYPES, DTYPES):
        x, scale = draw(rng, (5, 37, 1), x_dtype), draw(rng, 37, scale_dtype)
        check_forward(call, x, scale, y_dtype=y_dtype)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_forward_with_residual_of_every_dtype_mix(x_dtype, call, rng):
    for residual_dtype, h_dtype in itertools.product(DTYPES, DTYPES):
        x, residual = draw(rng, (5, 37, 1), x_dtype), draw(rng, (5, 37, 1), residual_dtype)
        check_forward(call, x, draw(rng, 37, "float32"), residual=residual, h_dtype=h_dtype)


@pytest.mark.parametrize("x_dtype", DTYPES)
def test_backward_of_every_dtype_mix(x_dtype, call, rng):
    for dy_dtype, scale_dtype, dx_dtype in itertools.product(DTYPES, DTYPES, DTYPES):
        dy, x = draw(rng, (5, 37, 1), dy_dtype), draw(rng, (5, 37, 1), x_dtype)
        check_backward(call, dy, x, draw(rng, 37, scale_dtype), dx_dtype=dx_dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(shape, call, rng):
    x, residual, dy = (draw(rng, shape, "float32") for _ in range(3))
    scale = draw(rng, shape[1], "float32")
    check_forward(call, x, scale)
    check_forward(call, x, scale, residual=residual)
    check_backward(call, dy, x, scale)
    check_backward(call, dy.astype(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16), scale)


def test_without_scale(call, rng):
    x, dy = draw(rng, (9, 130, 1), "bfloat16"), draw(rng, (9, 130, 1), "bfloat16")
    check_forward(call, x, None)
    check_backward(call, dy, x, None)


@pytest.mark.parametrize("inner", [1, 5])
def test_scale_offset_and_residual_gradient(inner, call, rng):
    x, dy, dh = (draw(rng, (9, 130, inner), t) for t in ("float32", "bfloat16", "float16"))
    for scale_dtype in ("float32", "bfloat16"):
        scale = draw(rng, 130, scale_dtype)
        check_forward(call, x, scale, offset=1.0)
        check_backward(call, dy, x, scale, offset=1.0, dh=dh)
        check_backward(call, dy, x, scale, dh=dh)
