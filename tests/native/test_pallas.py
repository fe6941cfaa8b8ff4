"""The Pallas kernels: values of every backend, interpreted, and lowered programs."""

import functools
import logging
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from norm_kernels import KERNELS, norm_of
from reference import Expected, assert_close, wide

from normfuse import dense, rms_norm
from normfuse.layers.dense import pallas as dense_pallas
from normfuse.layers.dense.epilogue import ACTIVATIONS
from normfuse.layers.norm import pallas as norm_pallas
from normfuse.native import implementation, launch
from normfuse.native.implementation import Order, Unsupported
from normfuse.native.pallas import blocks, portable, triton
from normfuse.native.pallas.lowering import Target

# JAX's, to those who ask for it; `test_the_deprecation_is_shown` looks at it.
pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]

CPU = Target("cpu", cores=2)
FLAGS = {"scale_offset": 1.0, "has_scale": True}


def calls(shape, x="bfloat16", residual=True):
    """kernel -> (operands, params) for x of `shape`, (outer, n, inner)."""
    rng = np.random.default_rng(0)
    draw = lambda shape, dtype: jnp.asarray(rng.standard_normal(shape), dtype)
    outer, n, inner = shape
    big = [draw(shape, x) for _ in range(3)]
    scale, rows = draw(n, "float32"), jnp.abs(draw((outer, inner), "float32")) + 0.5
    dots, more = draw((outer, inner), "float32"), [big[2]] * residual
    both, to = FLAGS | {"has_residual": residual}, {"out_dtype": jnp.dtype(x)}
    last = {"with_dscale": True}
    return {
        "forward": ([big[0], *more, scale], both | to | {"eps": 1e-6, "with_rstd": True}),
        "row_statistics": ([big[0]], {}),
        "apply": ([big[0], scale, rows], FLAGS | to),
        "backward": ([*big[:2], scale, rows, *more], both | last),
        "row_dots": ([*big[:2], scale], FLAGS),
        "backward_apply": ([*big[:2], scale, rows, *more, dots], both | last | {"count": 7.0}),
    }


def check(got, want, terms):
    """Both round once to their own dtype, and sum `terms` terms in float32 in orders of theirs."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        value = wide(b)
        size = np.full(value.shape, 2 * np.abs(value).max())
        twice = 2 * np.abs(value)  # two roundings may differ by a whole unit
        assert_close(a, Expected(value, size, terms, twice))


@pytest.mark.parametrize(
    "backend, name, shape",
    half(["blocks", "triton"], calls((1, 1, 1)), [(37, 100, 1), (3, 7, 4), (2, 9000, 1)]),
    ids=str,
)
def test_kernels_match_the_definition(monkeypatch, backend, name, shape):
    backend = {"blocks": blocks, "triton": triton}[backend]
    monkeypatch.setattr(norm_pallas.Rows, "_backend", backend)
    if shape[1] == 9000:  # rows that no kernel holds: the sums first, in pieces
        monkeypatch.setattr(backend, "fits", lambda n: False)
    elif backend is blocks:  # several tiles of rows, the last one beyond the end
        monkeypatch.setattr(blocks, "_ELEMENTS", 16 * 128)
    operands, params = calls(shape)[name]
    kernel, norm = KERNELS[name], norm_of(params)
    got = jax.jit(functools.partial(kernel.bodies["pallas"], CPU, norm))(*operands)
    check(got, kernel.definition(norm, *operands), terms=shape[1] + shape[0])


@pytest.mark.parametrize("size", [(5, 7, 3), (33, 600, 130)], ids=str)
@pytest.mark.parametrize("backend", ["blocks", "hopper"])
def test_products_match_float64(monkeypatch, backend, size):
    target = CPU
    if backend == "hopper":
        plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
        if not hasattr(plgpu, "InterpretGPUParams"):
            pytest.skip("this JAX cannot interpret Mosaic GPU kernels")
        interpreted = functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(plgpu, "kernel", interpreted)
        target = Target("cuda", cores=2, capability=90)
    (m, k, n), rng = size, np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.standard_normal(s), "bfloat16") for s in ((m, k), (k, n), (n,)))
    options = {"function": jax.nn.relu, "precision": None, "keep": True}
    y, z = jax.jit(functools.partial(dense_pallas.serve, target, **options))(x, w, b)
    sums = wide(x) @ wide(w) + wide(b)
    size = np.abs(wide(x)) @ np.abs(wide(w)) + np.abs(wide(b))
    assert_close(z, Expected(sums, size, k))
    assert_close(y, Expected(np.maximum(sums, 0), size, k))


def made_portable(function, **options):
    """`portable.portable` of a function of one array."""
    return lambda x: portable.portable(lambda x: [function(x)], **options)(x)[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_on_what_every_backend_has(name):
    x = jnp.concatenate([jnp.linspace(-12, 12, 2001), jnp.array([0.0, 1e-4, -1e-4, 1e-20])])
    got, want = (fn(x) for fn in (made_portable(ACTIVATIONS[name]), ACTIVATIONS[name]))
    # erf is within 1e-7 of its own value near 0 and of 1 elsewhere; others to a few roundings
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7 * 12)


def test_the_short_erf_is_right_to_five_digits():
    x = jnp.linspace(-8, 8, 20001)
    for fn in (jax.lax.erf, jax.lax.erfc):
        error = jnp.abs(made_portable(fn, short=True)(x) - fn(x))
        assert 1e-6 < jnp.max(error) < 1.5e-5


def test_a_function_of_all_that_is_replaced():
    fn = lambda x: x**-3 + jax.nn.sigmoid(jnp.log1p(x) + jnp.expm1(x)) * jax.lax.erf(x) + x**5
    x = jnp.linspace(0.5, 3, 64)
    np.testing.assert_allclose(made_portable(fn)(x), fn(x), rtol=2e-6)


# ---------------------------------------------------------------- lowering

S = jax.ShapeDtypeStruct
PALLAS = {"implementation": "pallas"}
TRITON = "__gpu$xla.gpu.triton"
NORMS = {
    ("cuda", "sm_90"): TRITON,
    ("cuda", "sm_80"): TRITON,
    ("rocm", ""): TRITON,
    ("tpu", ""): "tpu_custom_call",
}
# By dtype; where there is no kernel, what the error says.
SIZE = "compute capability 9.0 and operands of bfloat16 or float16"
PRODUCTS = {
    ("cuda", "sm_90"): {"bfloat16": "mosaic_gpu_v2", "float16": "mosaic_gpu_v2", "float32": SIZE},
    ("cuda", "sm_80"): dict.fromkeys(("bfloat16", "float16", "float32"), SIZE),
    ("rocm", ""): dict.fromkeys(("bfloat16", "float16", "float32"), SIZE),
    ("tpu", ""): {
        "bfloat16": "tpu_custom_call",
        "float16": "bfloat16, float32 on tpu, not float16",
        "float32": "tpu_custom_call",
    },
}


def lowered(fn, *args, platform):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def count(text, target):
    return text.count(f"custom_call @{target}(")


@pytest.mark.parametrize("platform, name", NORMS)
@pytest.mark.parametrize("x64", [False, True])
def test_norms_lower_to_kernels(arch, platform, name, x64):
    arch(name)

    def loss(x, r, scale):
        y, h = rms_norm(x, scale, residual=r, **PALLAS)
        return jnp.sum(jnp.sin(y.astype("float32"))) + jnp.sum(h.astype("float32"))

    with jax.enable_x64(x64):
        for n, number in ((100, 2), (40000, 4)):
            x = S((24, n), "bfloat16")
            text = lowered(jax.grad(loss, (0, 1, 2)), x, x, S((n,), "float32"), platform=platform)
            assert count(text, NORMS[platform, name]) == number


@pytest.mark.parametrize("platform, name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_products_lower_to_kernels(arch, platform, name, dtype):
    arch(name)
    target = PRODUCTS[platform, name][dtype]
    if " " in target:
        with pytest.raises(NotImplementedError, match=target):
            product(dtype, "gelu", platform)
        return
    for one in ("gelu", "softplus", lambda z: jnp.where(z > 1, z, 0.1 * z**3)):
        text = product(dtype, one, platform)
        assert count(text, target) == 1 and "stablehlo.dot_general" not in text


def product(dtype, function, platform):
    operands = S((50, 72), dtype), S((72, 40), dtype), S((40,), "float32")
    fn = functools.partial(dense, activation=function, **PALLAS)
    return lowered(fn, *operands, platform=platform)


def test_nothing_asked_for_is_pallas_on_tpus_alone(caplog, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    x = S((8, 64), "bfloat16")
    assert count(lowered(rms_norm, x, platform="tpu"), "tpu_custom_call") == 1
    assert not implementation.fallbacks()
    assert "custom_call" not in lowered(rms_norm, x, platform="rocm")
    assert implementation.fallbacks() == [("rms_norm", "on rocm, this platform has no kernel")]
    with caplog.at_level(logging.INFO, "normfuse"):
        text = lowered(rms_norm, S((8, 64), "float16"), platform="tpu")
    assert "custom_call" not in text
    assert "served by plain HLO: on tpu, Pallas kernels take" in caplog.text


def test_cuda_without_the_compiler_is_what_was_asked_for_and_logged(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(implementation, "_substituted", {})
    monkeypatch.setattr(implementation, "_plain", {})
    x = S((1024, 72), "bfloat16")
    with caplog.at_level(logging.INFO, "normfuse"):
        assert "custom_call" not in lowered(rms_norm, x, platform="cuda")
        either = functools.partial(rms_norm, implementation=("native", "pallas"))
        assert count(lowered(either, x, platform="cuda"), TRITON) == 1
    for by in ("plain HLO", "Pallas"):
        assert f"is served by {by}: on cuda, CUDA kernels are compiled" in caplog.text


# ---------------------------------------------------------------- Triton, and a JAX without it


def norm_on(platform, implementation="pallas"):
    jax.clear_caches()
    return lowered(
        functools.partial(rms_norm, implementation=implementation),
        S((1024, 72), "bfloat16"),
        platform=platform,
    )


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Triton is not deprecated there")
def test_the_deprecation_is_shown_to_who_asks_for_it(arch):
    arch("sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for platform in ("cuda", "rocm"):
            norm_on(platform, None)
    for platform in ("cuda", "rocm"):
        with pytest.warns(DeprecationWarning, match="The Pallas Triton backend is deprecated"):
            norm_on(platform)


def _without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)


def _without_a_name(monkeypatch):
    monkeypatch.delattr("jax.experimental.pallas.triton.CompilerParams")


def _without_the_lowering(monkeypatch):
    from jax._src.pallas import core

    name = "jax._src.pallas.triton.pallas_call_registration"
    monkeypatch.delattr(name, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    rule_of = core.get_lowering_rule  # JAX 0.10 keeps rules once they are registered
    rule = lambda kind, platform: None if "triton" in kind.__module__ else rule_of(kind, platform)
    monkeypatch.setattr(core, "get_lowering_rule", rule)


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
@pytest.mark.parametrize(
    "remove, why",
    [
        (_without_the_module, "has no Triton back end for Pallas any more"),
        (_without_a_name, "has no Triton back end for Pallas any more"),
        (_without_the_lowering, "Cannot lower pallas_call"),
    ],
)
def test_a_jax_without_triton_is_one_clear_error(arch, monkeypatch, platform, remove, why):
    arch("sm_90" if platform == "cuda" else "")
    monkeypatch.delitem(sys.modules, triton.__name__)
    monkeypatch.delattr("normfuse.native.pallas.triton")
    remove(monkeypatch)
    with pytest.raises(
        NotImplementedError, match=f"^rms_norm: implementation='pallas'.*{why}"
    ) as e:
        norm_on(platform)
    assert "Use implementation=None to let native kernels or plain HLO serve" in str(e.value)
    assert "custom_call" not in norm_on(platform, ("pallas", "xla"))
    default = norm_on(platform, None)
    assert ("custom_call @normfuse_launch" in default) == (platform == "cuda")
    if platform == "cuda":  # Mosaic GPU stays
        assert count(product("bfloat16", "gelu", "cuda"), "mosaic_gpu_v2") == 1


# ---------------------------------------------------------------- unserved contexts


def sums(x, order, dtype="float32"):
    return lowered(lambda x: rms_norm(x, implementation=order), S((8, 64), dtype), platform=x)


def test_an_old_gpu_is_refused(monkeypatch):
    def old(ctx):
        raise Unsupported("Tesla T4 has compute capability 7.5")

    monkeypatch.setattr(launch, "target_for", old)
    jax.clear_caches()
    with pytest.raises(NotImplementedError, match="'pallas' cannot serve.*capability 7.5"):
        sums("cuda", "pallas")
    assert "custom_call" not in sums("cuda", None)


def test_more_elements_than_32_bits_count_is_refused():
    with pytest.raises(NotImplementedError, match="index with 32 bits"):
        lowered(
            functools.partial(rms_norm, **PALLAS), S((2**21, 1024), "bfloat16"), platform="rocm"
        )


@pytest.mark.parametrize("traced", [False, True])
def test_an_activation_that_captures_an_array_is_refused(traced):
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))

    def layer(shift):
        return dense(x, w, activation=lambda z: z + shift, **PALLAS)

    with pytest.raises(NotImplementedError, match="captures an array or a traced value"):
        jax.jit(layer)(jnp.float32(1)) if traced else layer(jnp.arange(8.0))
    np.testing.assert_array_equal(layer(2.0), x @ w + 2)
    shift = jnp.arange(8.0)
    either = dense(x, w, activation=lambda z: z + shift, implementation=("pallas", "xla"))
    np.testing.assert_array_equal(either, x @ w + shift)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("reduce_max", jax.nn.softmax),
        ("iota", lambda z: z + jax.lax.broadcasted_iota(z.dtype, z.shape, 1)),
        ("rev", jax.jit(lambda z: z[:, ::-1])),
    ],
)
def test_an_activation_that_mixes_elements_is_refused(name, activation):
    """A kernel has one tile of a row, and another size of it on another device."""
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    with pytest.raises(NotImplementedError, match=f"not element-wise.*{name!r}"):
        dense(x, w, activation=activation, **PALLAS)
    either = dense(x, w, activation=activation, implementation=("pallas", "xla"))
    np.testing.assert_allclose(either, activation(x @ w), rtol=1e-6)


@pytest.mark.parametrize(
    "activation",
    [jax.nn.leaky_relu, jax.nn.elu, jax.nn.mish, jax.nn.hard_swish, jax.nn.softplus, jax.nn.selu],
)
def test_activations_of_jax_are_element_wise(activation):
    x = jnp.linspace(-3, 3, 32).reshape(4, 8)
    found = dense(x, jnp.eye(8), activation=activation, **PALLAS)
    np.testing.assert_allclose(found, activation(x), rtol=1e-5, atol=1e-6)


def test_an_activation_that_changes_the_shape_is_refused():
    with pytest.raises(ValueError, match="activation must keep the shape"):
        dense(jnp.ones((4, 8)), jnp.ones((8, 8)), activation=jnp.sum, **PALLAS)


def test_symbolic_shapes_are_refused():
    from jax import export

    (b,) = export.symbolic_shape("b")
    with pytest.raises(NotImplementedError, match="this is symbolic"):
        export.export(jax.jit(functools.partial(rms_norm, **PALLAS)))(S((b, 8), "float32"))


def test_kernels_of_the_local_tier_take_an_order():
    x = jnp.ones((3, 5, 1))
    (got,) = KERNELS["row_statistics"](norm_of({}), x, order=Order(("pallas",), strict=True))
    np.testing.assert_array_equal(got, np.full((3, 1), 5.0))
