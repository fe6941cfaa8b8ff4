"""The Pallas kernels as XLA runs them, on an NVIDIA GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from rms_norm_cases import Case

from normfuse.layers.dense import one_kernel, product_gradient
from normfuse.layers.dense.epilogue import ACTIVATIONS, SCALARS, Epilogue
from normfuse.layers.dense.matmul import Product
from normfuse.layers.dense.one_kernel import Dense
from normfuse.layers.dense.product_gradient import Gradient
from normfuse.native import launch
from normfuse.native.implementation import Order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
PALLAS = Order(("pallas",), strict=True)


@pytest.mark.parametrize("op", ["rms_norm", "residual_rms_norm"])
@pytest.mark.parametrize("n", [1, 7, 100, 1024, 5120, 16384, 40000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_norms_match_reference(op, n, dtype):
    with jax.enable_x64(dtype == "float64"):
        case = Case(op, (3, 37, n), x=dtype, residual=dtype, scale_offset=1.0)
        fn = functools.partial(case, implementation="pallas")
        case.check(jax.jit(fn)(*case.args), case.values())
        grad = functools.partial(case.grad, implementation="pallas")
        case.check(jax.jit(grad)(*case.args), case.gradients())


def test_norm_over_other_axes():
    case = Case("rms_norm", (6, 40, 9, 5), axis=(1, 2))
    case.check(jax.jit(functools.partial(case, implementation="pallas"))(*case.args), case.values())


def test_gradients_are_the_same_bits_every_time():
    case = Case("rms_norm", (1, 4096, 512), x="bfloat16")
    fn = jax.jit(functools.partial(case.grad, implementation="pallas"))
    first, *others = [[np.asarray(g) for g in fn(*case.args)] for _ in range(5)]
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_array_equal(a, b)


SIZES = [(1, 1, 1), (3, 5, 7), (64, 64, 64), (100, 1000, 72), (128, 256, 512), (257, 4096, 264)]
SIZES += [(1000, 72, 2056), (3000, 640, 1928), (8, 4096, 4096), (4096, 512, 64)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_match_reference(size, dtype):
    check_product(size, dtype, jax.nn.relu, lambda z: np.maximum(z, 0))


def require_hopper():
    if launch.compute_capability(jax.devices()[0]) != 90:
        pytest.skip("the product's kernels are for Hopper")


def check_product(size, dtype, function, expected, *, bias=True, slack=1.0):
    require_hopper()
    m, k, n = size
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, dtype)
    x, w = jnp.asarray(rng.standard_normal((m, k)), dtype), draw(k, n)
    b = [draw(n)] * bias
    spec = Dense(activation=function, has_bias=bias, keep=True, precision="highest")
    y, z = jax.jit(functools.partial(one_kernel.kernel, spec, order=PALLAS))(x, w, *b)
    wide = [reference.wide(a) for a in (x, w, *b)]
    exact = wide[0] @ wide[1] + (wide[2] if bias else 0)
    size = np.abs(wide[0]) @ np.abs(wide[1]) + (np.abs(wide[2]) if bias else 0)
    reference.assert_close(z, reference.Expected(exact, size, k), slack=slack)
    # every activation here changes by at most 1.2 times what its argument does
    limit = reference.Expected(expected(exact), 1.2 * size, k)
    reference.assert_close(y, limit, slack=slack)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_reference(name):
    def exact(z):
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            return np.asarray(ACTIVATIONS[name](jnp.asarray(z)))

    # a squared relu changes by 2|z|, here up to 10; bfloat16's hardware tanh is off by 2^-11
    check_product((130, 96, 200), "bfloat16", ACTIVATIONS[name], exact, bias=False, slack=12.0)


GRADIENTS = [(128, 64, 256), (264, 192, 576), (3000, 640, 1984), (2048, 1024, 4096)]


def check_gradient(size, dtype, gated, name, contract=1, slack=1.0):
    """One kernel for the product and the activation's gradient, against float64."""
    require_hopper()
    (m, k, n), rng = size, np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    arrays = [draw(m, k), draw(n, k), *[draw(m, n) for _ in range(1 + gated)]]
    epilogue = Epilogue(
        function=SCALARS[name], axes=(), has_up=gated, with_value=True, out_dtype=dtype
    )
    spec = Gradient(epilogue, Product.of(2, 2, contract=1 - contract))
    dy, w, *rest = arrays
    run = jax.jit(functools.partial(product_gradient.kernel, spec, order=PALLAS))
    got = run(dy, w if contract else w.T, *rest)
    dy, w, z, *up = map(reference.wide, arrays)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        one = jnp.ones(z.shape)
        y, slope = map(np.asarray, jax.jvp(SCALARS[name], (jnp.asarray(z),), (one,)))
    up = up[0] if up else np.ones_like(z)
    dh, size = dy @ w.T, np.abs(dy) @ np.abs(w).T
    terms = np.abs(z)  # y's terms: a gelu's are z / 2 and z erf(z) / 2, which cancel
    want = [
        (dh * up * slope, size * np.abs(up)),
        (dh * y, size * np.abs(y) + np.abs(dh) * terms),
        (y * up, np.abs(up) * terms),
    ]
    for found, (value, terms) in zip(got, want if gated else want[::2], strict=True):
        reference.assert_close(found, reference.Expected(value, terms, k), slack=slack)


@pytest.mark.parametrize("size", GRADIENTS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("contract", [0, 1])
def test_fused_gradients_match_reference(size, dtype, gated, contract):
    check_gradient(size, dtype, gated, "relu", contract)


@pytest.mark.parametrize("name", SCALARS)
def test_fused_gradients_of_activations_match_reference(name):
    # A derivative is up to 1.13, a squared relu's 10; in bfloat16 erf is off by 1.4e-5, and tanh by
    # 2^-11.
    check_gradient((136, 128, 320), "bfloat16", True, name, slack=12.0)
