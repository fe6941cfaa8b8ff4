"""Bad input is one clear error; what `implementation` means; where plain HLO serves."""

import functools
import logging
import re

import hlo
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import PartitionSpec as P

import normfuse
from normfuse import dense, gated_dense, layer_norm, rms_norm, rms_norm_with_rstd
from normfuse.layers.core import arguments
from normfuse.native import implementation

X, SCALE = jnp.ones((4, 6, 8)), jnp.ones(8)
NORMS = {f.__name__: f for f in (rms_norm, rms_norm_with_rstd, layer_norm)}

# arguments of a norm of (4, 6, 8), what is raised, and the argument, value, rule or remedy named
BAD_NORMS = [
    ({"scale": jnp.ones(7)}, ValueError, "scale", r"\(8,\)", r"\(7,\)"),
    ({"scale": 2.0}, ValueError, "scale", r"\(8,\)", r"\(\)"),
    ({"scale": SCALE, "axis": (1, 2)}, ValueError, "scale", r"\(6, 8\)", r"axis=\(1, 2\)"),
    ({"scale": jnp.ones((8, 6)), "axis": (2, 1)}, ValueError, "scale", r"\(6, 8\)", r"\(8, 6\)"),
    ({"bias": jnp.ones(7)}, ValueError, "bias", r"\(8,\)", r"\(7,\)"),
    ({"bias": jnp.ones(8, int)}, TypeError, "bias", "int32", "bias.astype"),
    ({"scale": jnp.ones(8, int)}, TypeError, "scale", "int32", "scale.astype"),
    ({"x": jnp.ones((4, 8), int)}, TypeError, "x", "int32", "x.astype"),
    ({"x": jnp.ones((4, 8), complex)}, TypeError, "x", "complex64", "float32"),
    ({"x": jnp.ones((4, 8), jnp.float8_e4m3fn)}, TypeError, "x", "float8_e4m3fn"),
    ({"x": None}, TypeError, "x", "None", "array"),
    ({"x": 10**30}, TypeError, "x", "10{30}", "array"),
    ({"x": 3.0}, ValueError, "x", "axis", "scalar"),
    ({"eps": float("nan")}, ValueError, "eps", "finite", "nan"),
    ({"eps": -1e-6}, ValueError, "eps", "at least 0", "-1e-06"),
    ({"eps": "1e-6"}, TypeError, "eps", "number", "'1e-6'"),
    ({"eps": 1e39}, ValueError, "eps", r"3.40282e\+38", r"1e\+39"),
    ({"eps": 10**400}, ValueError, "eps", "finite"),
    ({"eps": np.ones(1)}, TypeError, "eps", "number", r"array\(\[1.\]\)"),
    ({"scale_offset": float("nan")}, ValueError, "scale_offset", "finite"),
    ({"axis": 3}, ValueError, "axis", "-3", r"\(4, 6, 8\)", "got 3"),
    ({"axis": (0, 5)}, ValueError, "axis", r"\(0, 5\)", r"\(4, 6, 8\)"),
    ({"axis": (2, -1)}, ValueError, "axis", "twice", r"\(2, -1\)"),
    ({"axis": ()}, ValueError, "axis", r"got \(\)"),
    ({"axis": 1.0}, TypeError, "axis", "int", "1.0"),
    ({"dtype": jnp.int32}, TypeError, "dtype", "float32", "int32"),
    ({"residual": jnp.ones((4, 6, 7))}, ValueError, r"residual", r"\(4, 6, 7\)", "broadcast_to"),
    ({"residual": jnp.ones((1, 6, 8))}, ValueError, r"residual", r"\(1, 6, 8\)", "broadcast_to"),
    ({"residual": jnp.ones(X.shape, int)}, TypeError, "residual must be", "int32", "l.astype"),
]


@pytest.mark.parametrize("op, bad", half(NORMS, range(len(BAD_NORMS))))
def test_bad_input_of_norms_is_named(op, bad):
    options, exception, *words = BAD_NORMS[bad]
    if "residual" in words[0] and op == "rms_norm_with_rstd":
        op = "layer_norm"
    with pytest.raises(exception) as caught:
        NORMS[op](**{"x": X, **options})
    message = str(caught.value)
    assert message.startswith(f"{op}: "), message
    assert [word for word in words if not re.search(word, message)] == [], message


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_with_rstd"])
def test_unknown_cast_is_named(op):
    for cast in ("late", None, jnp.bfloat16):
        with pytest.raises(ValueError, match=f"{op}: cast must be 'after' or 'before', got "):
            NORMS[op](X, SCALE, cast=cast)


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("argument", ["eps", "scale_offset"])
def test_traced_number_is_named(op, argument):
    with pytest.raises(TypeError, match=rf"{argument} must be .*known when the op is traced"):
        jax.jit(lambda value: NORMS[op](X, **{argument: value}))(1e-6)


def test_concrete_numbers_of_any_kind_are_numbers():
    want = rms_norm(X, SCALE, eps=0.5)
    for eps in (np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        np.testing.assert_array_equal(rms_norm(X, SCALE, eps=eps), want)


SQUARE = np.ones((2, 2), np.float32)
OPS = {
    "dense": lambda **options: dense(SQUARE, SQUARE, **options),
    "gated_dense": lambda **options: gated_dense(SQUARE, SQUARE, SQUARE, **options),
    "gated_product": lambda **options: normfuse.gated_product(SQUARE, SQUARE, SQUARE, **options),
    "linear_cross_entropy": lambda **options: normfuse.linear_cross_entropy(
        SQUARE, SQUARE, [0, 1], **options
    ),
    "rms_norm": lambda **options: rms_norm(SQUARE, **options),
    "rms_norm_with_rstd": lambda **options: rms_norm_with_rstd(SQUARE, **options),
    "layer_norm": lambda **options: layer_norm(SQUARE, **options),
    "attention": lambda **options: normfuse.attention(*[SQUARE[None, None]] * 3, **options),
    "elementwise": lambda **options: normfuse.elementwise(
        "template <class T> T same(T x) { return x; }", **options
    )(SQUARE),
}
NAMES = r"implementation must name .*'xla',? got"
ANY = [  # every operation takes these
    ({"implementation": 5}, (TypeError, ValueError), "implementation must .* got 5; None takes"),
    ({"implementation": ["xla", 3]}, (TypeError, ValueError), r"mentation must .* got \['xla',"),
    ({"implementation": "cuda"}, ValueError, f"{NAMES} 'cuda'; None"),
    ({"implementation": ("xla", "fast")}, ValueError, r"implementation.*\('xla', 'fast'\)"),
    ({"implementation": ()}, ValueError, r"implementation.*\(\).*None"),
    ({"dtype": 3}, TypeError, "dtype must be .*got 3"),
]
SOME = [
    ("linear_cross_entropy", {"with_lse": 3}, TypeError, "with_lse must be True or False, got 3"),
    ("linear_cross_entropy", {"with_entropy": 3}, TypeError, "with_entropy must be True or False"),
    ("rms_norm", {"implementation": "cuda"}, ValueError, "^rms_norm: implementation must name"),
    ("attention", {"implementation": "cuda"}, ValueError, "^attention: implementation must name"),
    ("linear_cross_entropy", {"contract": 1.0}, ValueError, "contract must be 0, .* got 1.0"),
    ("linear_cross_entropy", {"contract": SQUARE}, ValueError, r"contract must .* got array\("),
    ("linear_cross_entropy", {"reduction": SQUARE}, ValueError, r"reduction must .* got array\("),
    ("linear_cross_entropy", {"logits_dtype": "int32"}, TypeError, "logits_dtype must .*got int32"),
]


@pytest.mark.parametrize(
    "op, options, error, message", [*((op, *row) for op in OPS for row in ANY), *SOME]
)
def test_bad_options_are_named_with_their_value_and_the_way_out(op, options, error, message):
    with pytest.raises(error, match=message):
        OPS[op](**options)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU serves it")
def test_the_variable_is_named_where_it_asks_for_what_cannot_serve(monkeypatch):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "native")
    message = "implementation='native' cannot serve here: .* set NORMFUSE_IMPLEMENTATION, now "
    with pytest.raises(NotImplementedError, match=message + "'native', to 'native,xla', to let"):
        OPS["linear_cross_entropy"]().block_until_ready()


# ---------------------------------------------------------------- implementation


def kernels(fn, *args):
    return hlo.calls(jax.jit(fn).lower(*args).compile())


@pytest.mark.parametrize(
    "implementation, calls",
    [
        (None, {"forward": 1}),
        ("native", {"forward": 1}),
        ("xla", {}),
        (("native", "xla"), {"forward": 1}),
        (["xla", "native"], {}),
        (("native", "pallas"), {"forward": 1}),
        ("pallas", {}),
        (("pallas", "xla"), {}),
    ],
)
def test_implementation_is_what_runs(implementation, calls, rng):
    fn = functools.partial(rms_norm, implementation=implementation)
    assert kernels(fn, X, SCALE) == calls
    x, scale = rng.standard_normal(X.shape), rng.standard_normal(8)
    want = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(fn(jnp.float32(x), jnp.float32(scale)), want, rtol=1e-5, atol=1e-6)


def test_environment_names_the_implementation(monkeypatch):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "xla")
    assert kernels(lambda x: rms_norm(x), X) == {}
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "native, xla")
    assert kernels(lambda x: rms_norm(x), X) == {"forward": 1}
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "")
    assert kernels(lambda x: rms_norm(x), X) == {"forward": 1}


def test_environment_is_a_preference_where_an_op_has_no_such_kernels(monkeypatch):
    kernel = np.ones((X.shape[-1], 2), np.float32)
    for value in ("native", "pallas"):
        monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", value)
        np.testing.assert_allclose(dense(X, kernel), X @ kernel, rtol=1e-5)
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "native")
    assert kernels(lambda x: rms_norm(x), X) == {"forward": 1}


@pytest.mark.parametrize("value", ["cuda", "native,fast", ","])
def test_wrong_environment_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", value)
    with pytest.raises(ValueError, match="NORMFUSE_IMPLEMENTATION must name one of 'native'"):
        rms_norm(X)


def test_missing_implementation_says_which_there_are():
    kernel = np.ones((X.shape[-1], 2), np.float32)
    with pytest.raises(NotImplementedError, match="^dense has no 'pallas'.*it has 'native', 'xla'"):
        dense(X, kernel, implementation="pallas")


def refuse(name):
    def serve(order):
        raise NotImplementedError(f"{name} cannot, strict={order.strict}")

    return serve


def test_sequence_that_cannot_serve_raises_every_cause():
    serve = {"native": refuse("native"), "xla": refuse("xla")}
    with pytest.raises(ExceptionGroup) as caught:
        arguments.choose("rms_norm", ("native", "pallas", "xla"), serve)
    assert "rms_norm" in str(caught.value) and "['native', 'pallas', 'xla']" in str(caught.value)
    causes = [str(e) for e in caught.value.exceptions]
    assert causes[0] == "native cannot, strict=False"  # plain HLO may stand in: xla follows
    assert causes[2] == "xla cannot, strict=True"
    assert re.search("no 'pallas'", causes[1])
    assert all(isinstance(e, NotImplementedError) for e in caught.value.exceptions)


def test_other_errors_are_not_taken_for_a_refusal():
    def broken(order):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        arguments.choose("rms_norm", None, {"native": broken, "xla": lambda order: 1})


# ---------------------------------------------------------------- where native cannot serve


def partly_manual(mesh, implementation):
    """The norm where shard_map leaves "model" to XLA."""
    norm = functools.partial(rms_norm, implementation=implementation)
    options = {"mesh": mesh, "in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(jax.shard_map(norm, axis_names={"data"}, **options))


def test_plain_hlo_is_logged_once_and_listed(auto_mesh, caplog, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    with caplog.at_level(logging.DEBUG, "normfuse"):
        jax.jit(jax.grad(lambda x: rms_norm(x).sum()))(X)  # native
        partly_manual(auto_mesh, "xla")(X)  # asked for
        assert not [r for r in caplog.records if r.name == "normfuse"]
        assert normfuse.fallbacks() == []
        for asked in (None, ("native", "xla"), None):
            np.testing.assert_allclose(partly_manual(auto_mesh, asked)(X), X, rtol=1e-5)
    (record,) = [r for r in caplog.records if r.name == "normfuse"]
    assert record.levelno == logging.INFO
    ((op, reason),) = normfuse.fallbacks()
    assert op == "rms_norm" and "['data']" in reason
    assert op in record.getMessage() and reason in record.getMessage()
