"""The dense op against float64 numpy: values, gradients, activations and errors."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.test_util import check_grads

from normfuse import dense
from normfuse.layers.core.activations import ACTIVATIONS

pytestmark = pytest.mark.optimized

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16


def f64(array):
    return np.asarray(array).astype(np.float64)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def product_bound(a, b, dtype):
    """The error of a product summed in float32 and rounded once to `dtype`.

    A float32 sum of n terms, in any order, is off by at most n eps/2 times the sum of magnitudes.
    """
    magnitude = np.abs(a) @ np.abs(b)
    return a.shape[-1] * eps(f32) / 2 * magnitude + eps(dtype) / 2 * np.abs(a @ b) + 1e-30


def operands(rng, x=f32, kernel=f32, bias=f32, rows=(5, 3), n=48, out=20):
    return (
        jnp.asarray(rng.standard_normal((*rows, n)), x),
        jnp.asarray(rng.standard_normal((n, out)) / 7, kernel),
        jnp.asarray(rng.standard_normal(out), bias),
    )


def loss(x, kernel, bias=None, **options):
    return jnp.sum(jnp.sin(dense(x, kernel, bias, **options).astype(f32)))


# ---------------------------------------------------------------- values and gradients


@pytest.mark.parametrize(
    "x_dtype, kernel_dtype, dtype",
    half([f32, bf16, f16], [f32, bf16, f16], [None, f32, bf16, f16]),
)
def test_dense_matches_float64(rng, x_dtype, kernel_dtype, dtype):
    x, kernel, bias = operands(rng, x_dtype, kernel_dtype)
    y = dense(x, kernel, bias, dtype=dtype)
    compute = jnp.dtype(dtype or x_dtype)
    a, b, c = (f64(v.astype(compute)) for v in (x, kernel, bias))
    z = a @ b
    # The product is rounded, then its sum with the bias.
    bound = product_bound(a, b, compute) * (1 + eps(compute)) + eps(compute) / 2 * np.abs(z + c)
    assert np.all(np.abs(f64(y) - (z + c)) <= bound)
    assert y.dtype == compute and y.shape == (5, 3, 20)


@pytest.mark.parametrize("dtype", [f32, bf16, f16])
@pytest.mark.parametrize("kernel_dtype", [f32, bf16, f16])
def test_parameter_gradients_are_not_rounded_to_the_compute_dtype(rng, kernel_dtype, dtype):
    x, kernel, bias = operands(rng, dtype, kernel_dtype, rows=(400,))
    dy = jnp.asarray(rng.standard_normal((400, 20)), dtype)
    _, vjp = jax.vjp(functools.partial(dense, dtype=dtype), x, kernel, bias)
    dx, dkernel, dbias = vjp(dy)
    a, g, k = f64(x), f64(dy), f64(kernel.astype(dtype))
    # Only the rounding to the parameter's own dtype, and that of float32 sums over 400 rows.
    assert np.all(np.abs(f64(dkernel) - a.T @ g) <= product_bound(a.T, g, kernel_dtype))
    assert np.all(np.abs(f64(dbias) - g.sum(0)) <= 200 * eps(f32) * np.abs(g).sum(0))
    assert np.all(np.abs(f64(dx) - g @ k.T) <= product_bound(g, k.T, dtype))
    assert (dx.dtype, dkernel.dtype, dbias.dtype) == (dtype, kernel_dtype, f32)


def test_kernel_gradient_is_one_gemm_from_bfloat16_to_float32(rng):
    x, kernel, bias = operands(rng, bf16)
    traced = jax.jit(jax.grad(loss, 1)).trace(x, kernel, bias)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = re.findall(r"(%\d+) = stablehlo.dot_general.*: (\(.*)", text)
    result, types = products[-1]  # the kernel's: x is not differentiated
    assert types == "(tensor<5x3x48xbf16>, tensor<5x3x20xbf16>) -> tensor<48x20xf32>"
    assert len(products) == 2 and f"return {result}" in text  # nothing is done to it after


def test_float64_is_computed_in_float64(rng):
    with jax.enable_x64(True):
        x, kernel, bias = operands(rng, jnp.float64, jnp.float64, jnp.float64, n=8, out=3)
        y = dense(x, kernel, bias, activation="tanh")
        want = np.tanh(f64(x) @ f64(kernel) + f64(bias))
        np.testing.assert_allclose(f64(y), want, rtol=0, atol=16 * eps(jnp.float64))
        assert y.dtype == jnp.float64
        check_grads(functools.partial(dense, activation="gelu"), (x, kernel, bias), order=2)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0, 3)])
def test_any_number_of_rows(rng, rows):
    x, kernel, bias = operands(rng, rows=rows)
    want = f64(x) @ f64(kernel) + f64(bias)
    # 48 terms of order 1, then the bias: 49 roundings of eps/2 at most.
    np.testing.assert_allclose(f64(dense(x, kernel, bias)), want, rtol=0, atol=49 * 3 * eps(f32))
    dkernel, dbias = jax.grad(loss, (1, 2))(x, kernel, bias)
    g = np.cos(want).reshape(-1, 20)
    np.testing.assert_allclose(f64(dbias), g.sum(0), rtol=0, atol=1e-4)
    np.testing.assert_allclose(f64(dkernel), f64(x).reshape(-1, 48).T @ g, rtol=0, atol=1e-4)


def test_no_features(rng):
    x, kernel, bias = operands(rng, n=0)
    np.testing.assert_array_equal(dense(x, kernel, bias), np.broadcast_to(bias, (5, 3, 20)))
    assert jax.grad(loss, 1)(x, kernel, bias).shape == (0, 20)


def test_several_output_axes(rng):
    x, _, _ = operands(rng)
    kernel = jnp.asarray(rng.standard_normal((48, 4, 6)), f32)
    bias = jnp.asarray(rng.standard_normal((4, 6)), f32)
    want = np.einsum("abi,ihd->abhd", f64(x), f64(kernel)) + f64(bias)
    np.testing.assert_allclose(f64(dense(x, kernel, bias)), want, rtol=0, atol=1e-4)
    flat = jax.grad(loss, (1, 2))(x, kernel.reshape(48, 24), bias.reshape(24))
    for several, one in zip(jax.grad(loss, (1, 2))(x, kernel, bias), flat):
        np.testing.assert_allclose(f64(several).ravel(), f64(one).ravel(), rtol=0, atol=1e-4)


# ---------------------------------------------------------------- activations

REFERENCE = {
    "elu": lambda z: np.where(z > 0, z, np.expm1(z)),
    "gelu": np.vectorize(lambda z: z / 2 * (1 + math.erf(z / math.sqrt(2)))),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "leaky_relu": lambda z: np.where(z > 0, z, 0.01 * z),
    "mish": lambda z: z * np.tanh(np.log1p(np.exp(z))),
    "quick_gelu": lambda z: z / (1 + np.exp(-1.702 * z)),
    "relu": lambda z: np.maximum(z, 0),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "softplus": lambda z: np.log1p(np.exp(z)),
    "squared_relu": lambda z: np.maximum(z, 0) ** 2,
    "swish": lambda z: z / (1 + np.exp(-z)),
    "tanh": np.tanh,
}


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_by_name(rng, name):
    x, kernel, bias = operands(rng, bf16)
    y = dense(x, kernel, bias, activation=name)
    # The activation is in float32, on the product as the compute dtype stores it; 1e-5 is for the
    # cancellation in 1 + erf and 1 + tanh of negative z.
    z = f64(jnp.matmul(x, kernel.astype(bf16))) + f64(bias.astype(bf16))
    np.testing.assert_allclose(f64(y), REFERENCE[name](z), rtol=eps(bf16) / 2 + 1e-5, atol=1e-6)


def test_activation_as_a_function(rng):
    x, kernel, bias = operands(rng, bf16)
    seen = []

    def activation(z):
        seen.append(z.dtype)
        return jnp.square(z)

    y = dense(x, kernel, bias, activation=activation)
    z = f64(jnp.matmul(x, kernel.astype(bf16))) + f64(bias.astype(bf16))
    np.testing.assert_allclose(f64(y), z**2, rtol=eps(bf16))
    assert set(seen) == {jnp.dtype(f32)}


def test_activation_keeps_nothing_wide_for_the_backward(rng):
    x, kernel, bias = operands(rng, bf16)
    _, vjp = jax.vjp(functools.partial(dense, activation="gelu_tanh"), x, kernel, bias)
    kept = [a for a in jax.tree.leaves(vjp) if jnp.shape(a) == (5, 3, 20)]
    assert [a.dtype for a in kept] == [bf16]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "error, shapes, options, message",
    [
        (ValueError, ((2, 3), (4, 5)), {}, r"first axis .*, 3; got kernel of shape \(4, 5\)"),
        (ValueError, ((2, 3), (4, 3)), {}, r"pass kernel.T if it is stored \(out, in\)"),
        (ValueError, ((2, 3), (3,)), {}, r"kernel must be \(in, \*out\), got shape \(3,\)"),
        (ValueError, ((), (3, 4)), {}, r"x must be \(\*rows, in\), got a scalar"),
        (ValueError, ((2, 3), (3, 4), (3,)), {}, r"bias must have .* \(4,\); got \(3,\)"),
        (ValueError, ((2, 3), (3, 4), (1, 4)), {}, r"bias must have .* \(4,\); got \(1, 4\)"),
        (ValueError, ((2, 3), (3, 4)), {"activation": "gleu"}, r"one of 'elu', .* got 'gleu'"),
        (TypeError, ((2, 3), (3, 4)), {"activation": 3}, r"activation must be None, .* got int"),
        (ValueError, ((2, 3), (3, 4)), {"activation": jnp.sum}, r"activation must keep the shape"),
        (TypeError, ((2, 3), (3, 4)), {"dtype": jnp.int8}, r"dtype must be one of .* got int8"),
        (ValueError, ((2, 3), (3, 4)), {"implementation": "cuda"}, r"implementation must name"),
    ],
)
def test_dense_rejects(error, shapes, options, message):
    with pytest.raises(error, match=message):
        dense(*[jnp.ones(shape) for shape in shapes], **options)


@pytest.mark.parametrize(
    "argument, dtype", [("x", jnp.int32), ("kernel", jnp.complex64), ("bias", jnp.bool_)]
)
def test_dense_rejects_dtypes(argument, dtype):
    args = {"x": jnp.ones((2, 3)), "kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    args[argument] = args[argument].astype(dtype)
    with pytest.raises(TypeError, match=rf"{argument} must be one of .*, got .*; cast it first"):
        dense(**args)


def test_native_without_an_activation_is_the_product(rng):
    x, kernel, bias = operands(rng)
    for one in (None, bias):
        native = dense(x, kernel, one, implementation="native")
        np.testing.assert_array_equal(native, dense(x, kernel, one, implementation="xla"))
    with pytest.raises(NotImplementedError, match="dense: .*no kernel for an activation that is"):
        dense(x, kernel, activation=lambda z: z, implementation="native")
