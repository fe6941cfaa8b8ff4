"""What the norms refuse, and how they say so; what `implementation` means."""

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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import normfuse
from normfuse import dense, gated_dense, layer_norm, rms_norm, rms_norm_with_rstd
from normfuse.native import implementation

X, SCALE = jnp.ones((4, 6, 8)), jnp.ones(8)
OPS = {f.__name__: f for f in (rms_norm, rms_norm_with_rstd, layer_norm)}


# what is given, x being (4, 6, 8) if it is not; the exception; what its message must contain:
# argument, value, rule or remedy
BAD = {
    "scale of another length": ({"scale": jnp.ones(7)}, ValueError, ["scale", "(8,)", "(7,)"]),
    "scale broadcastable": ({"scale": jnp.ones(1)}, ValueError, ["scale", "(8,)", "(1,)"]),
    "scale scalar": ({"scale": 2.0}, ValueError, ["scale", "(8,)", "()"]),
    "scale of other axes": (
        {"scale": jnp.ones(8), "axis": (1, 2)},
        ValueError,
        ["scale", "(6, 8)", "axis=(1, 2)", "(8,)"],
    ),
    "scale in the order axis was given": (
        {"scale": jnp.ones((8, 6)), "axis": (2, 1)},
        ValueError,
        ["scale", "(6, 8)", "(8, 6)"],
    ),
    "bias of another length": ({"bias": jnp.ones(7)}, ValueError, ["bias", "(8,)", "(7,)"]),
    "bias integer": ({"bias": jnp.ones(8, int)}, TypeError, ["bias", "int32", "bias.astype"]),
    "scale integer": ({"scale": jnp.ones(8, int)}, TypeError, ["scale", "int32", "scale.astype"]),
    "scale complex": ({"scale": jnp.ones(8, complex)}, TypeError, ["scale", "complex64"]),
    "scale string": ({"scale": "ones"}, TypeError, ["scale", "'ones'", "array"]),
    "x integer": ({"x": jnp.ones((4, 8), int)}, TypeError, ["x", "int32", "x.astype"]),
    "x boolean": ({"x": jnp.ones((4, 8), bool)}, TypeError, ["x", "bool", "x.astype"]),
    "x complex": ({"x": jnp.ones((4, 8), complex)}, TypeError, ["x", "complex64", "float32"]),
    "x float8": ({"x": jnp.ones((4, 8), jnp.float8_e4m3fn)}, TypeError, ["x", "float8_e4m3fn"]),
    "x list of integers": ({"x": [[1, 2]]}, TypeError, ["x", "int32"]),
    "x None": ({"x": None}, TypeError, ["x", "None", "array"]),
    "x scalar": ({"x": 3.0}, ValueError, ["x", "axis", "scalar"]),
    "eps nan": ({"eps": float("nan")}, ValueError, ["eps", "finite", "nan"]),
    "eps infinite": ({"eps": np.inf}, ValueError, ["eps", "finite", "inf"]),
    "eps negative": ({"eps": -1e-6}, ValueError, ["eps", "at least 0", "-1e-06"]),
    "eps string": ({"eps": "1e-6"}, TypeError, ["eps", "number", "'1e-6'"]),
    "eps None": ({"eps": None}, TypeError, ["eps", "number", "None"]),
    "eps larger than float32's": ({"eps": 1e39}, ValueError, ["eps", "3.40282e+38", "1e+39"]),
    "eps of hundreds of digits": ({"eps": 10**400}, ValueError, ["eps", "finite"]),
    "eps boolean": ({"eps": True}, TypeError, ["eps", "number", "True"]),
    "eps of one element": ({"eps": np.ones(1)}, TypeError, ["eps", "number", "array([1.])"]),
    "eps complex": ({"eps": 1j}, TypeError, ["eps", "number", "1j"]),
    "scale_offset nan": ({"scale_offset": float("nan")}, ValueError, ["scale_offset", "finite"]),
    "scale_offset array": (
        {"scale_offset": np.ones(2)},
        TypeError,
        ["scale_offset", "number", "array([1., 1.])"],
    ),
    "axis too large": ({"axis": 3}, ValueError, ["axis", "-3", "2", "(4, 6, 8)", "got 3"]),
    "axis too small": ({"axis": -4}, ValueError, ["axis", "-3", "got -4"]),
    "axis one of several": ({"axis": (0, 5)}, ValueError, ["axis", "(0, 5)", "(4, 6, 8)"]),
    "axis twice": ({"axis": (2, -1)}, ValueError, ["axis", "twice", "(2, -1)"]),
    "axis empty": ({"axis": ()}, ValueError, ["axis", "got ()"]),
    "axis float": ({"axis": 1.0}, TypeError, ["axis", "int", "1.0"]),
    "axis None": ({"axis": None}, TypeError, ["axis", "int", "None"]),
    "dtype integer": ({"dtype": jnp.int32}, TypeError, ["dtype", "float32", "int32"]),
    "dtype unknown": ({"dtype": "float31"}, TypeError, ["dtype", "bfloat16", "'float31'"]),
    "dtype no text": ({"dtype": "\ud800"}, TypeError, ["dtype", "'\\ud800'"]),
    "implementation unknown": (
        {"implementation": "cuda"},
        ValueError,
        ["implementation", "'native', 'pallas', 'xla'", "'cuda'"],
    ),
    "implementation one of several unknown": (
        {"implementation": ("native", "fast")},
        ValueError,
        ["implementation", "'native'", "('native', 'fast')"],
    ),
    "implementation empty": ({"implementation": ()}, ValueError, ["implementation", "()", "None"]),
    "implementation number": ({"implementation": 3}, TypeError, ["implementation", "None", "3"]),
    "implementation of numbers": ({"implementation": [1]}, TypeError, ["implementation", "[1]"]),
}


@pytest.mark.parametrize("op, bad", half(OPS, BAD))
def test_bad_input_is_named(op, bad):
    given, exception, words = BAD[bad]
    with pytest.raises(exception) as caught:
        OPS[op](**{"x": X, **given})
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    if "implementation" not in given:
        assert message.startswith(f"{op}: "), message


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_with_rstd"])
@pytest.mark.parametrize("cast", ["late", None, jnp.bfloat16], ids=str)
def test_unknown_cast_is_named(op, cast):
    with pytest.raises(ValueError, match=f"{op}: cast must be 'after' or 'before', got "):
        OPS[op](X, SCALE, cast=cast)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("argument", ["eps", "scale_offset"])
def test_traced_number_is_named(op, argument):
    with pytest.raises(TypeError, match=rf"{argument} must be .*known when the op is traced"):
        jax.jit(lambda value: OPS[op](X, **{argument: value}))(1e-6)


def test_concrete_numbers_of_any_kind_are_numbers():
    want = rms_norm(X, SCALE, eps=0.5)
    for eps in (np.float32(0.5), np.float64(0.5), np.array(0.5), jnp.float32(0.5)):
        np.testing.assert_array_equal(rms_norm(X, SCALE, eps=eps), want)


@pytest.mark.parametrize(
    "op, shape", half(["rms_norm", "layer_norm"], [(4, 6, 7), (6, 8), (1, 6, 8), (8,)]), ids=str
)
def test_residual_of_another_shape_is_named(op, shape):
    norm = OPS[op]
    with pytest.raises(ValueError) as caught:
        norm(X, SCALE, residual=jnp.ones(shape))
    message = str(caught.value)
    for word in (f"{norm.__name__}: residual", "(4, 6, 8)", str(shape), "jnp.broadcast_to"):
        assert word in message


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
def test_wrong_dtypes_of_a_residual_are_named(norm):
    name = norm.__name__
    with pytest.raises(TypeError, match=rf"^{name}: residual must be .*int32.*residual\.astype"):
        norm(X, residual=jnp.ones(X.shape, int))
    with pytest.raises(TypeError, match=f"^{name}: residual_dtype must be one of .*, got int8"):
        norm(X, residual=X, residual_dtype=jnp.int8)
    with pytest.raises(ValueError, match=f"^{name}: .* got bfloat16 without a residual; give res"):
        norm(X, residual_dtype=jnp.bfloat16)


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
def test_implementation_is_what_runs(implementation, calls):
    fn = functools.partial(rms_norm, implementation=implementation)
    assert kernels(fn, X, SCALE) == calls
    np.testing.assert_allclose(fn(X, SCALE), np.ones(X.shape), rtol=1e-5)


def test_plain_implementation_has_the_same_derivatives():
    rng = np.random.default_rng(0)
    x = rng.standard_normal(X.shape).astype(np.float32)
    loss = lambda x, scale, name: jnp.sum(rms_norm(x, scale, implementation=name) ** 3)
    for got, want in zip(*(jax.grad(loss, (0, 1))(x, SCALE, name) for name in ("xla", "native"))):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


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


def test_argument_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", "xla")
    assert kernels(lambda x: rms_norm(x, implementation="native"), X) == {"forward": 1}


@pytest.mark.parametrize("value", ["cuda", "native,fast", ","])
def test_wrong_environment_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("NORMFUSE_IMPLEMENTATION", value)
    with pytest.raises(ValueError, match="NORMFUSE_IMPLEMENTATION must name one of 'native'"):
        rms_norm(X)


def test_missing_implementation_says_which_there_are():
    kernel = np.ones((X.shape[-1], 2), np.float32)
    with pytest.raises(NotImplementedError, match="gated_dense has no 'pallas'.*'native'"):
        gated_dense(X, kernel, kernel, implementation="pallas")


def refuse(name):
    def serve(strict):
        raise NotImplementedError(f"{name} cannot, strict={strict}")

    return serve


def test_sequence_that_cannot_serve_raises_every_cause():
    serve = {"native": refuse("native"), "xla": refuse("xla")}
    with pytest.raises(ExceptionGroup) as caught:
        implementation.choose("rms_norm", ("native", "pallas", "xla"), serve)
    assert "rms_norm" in str(caught.value) and "['native', 'pallas', 'xla']" in str(caught.value)
    causes = [str(e) for e in caught.value.exceptions]
    assert causes[0] == "native cannot, strict=False"  # plain HLO may stand in: xla follows
    assert causes[2] == "xla cannot, strict=True"
    assert re.search("no 'pallas'", causes[1])
    assert all(isinstance(e, NotImplementedError) for e in caught.value.exceptions)


def test_other_errors_are_not_taken_for_a_refusal():
    def broken(strict):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        implementation.choose("rms_norm", None, {"native": broken, "xla": lambda strict: 1})


# ---------------------------------------------------------------- where native cannot serve


@pytest.fixture
def mesh(eight_devices):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def partly_manual(mesh, implementation):
    """The norm where shard_map leaves "model" to XLA."""
    norm = functools.partial(rms_norm, implementation=implementation)
    mapped = jax.shard_map(
        norm, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    return jax.jit(mapped)


def exported(mesh, implementation):
    """The norm exported for eight devices from Auto axes."""
    fn = jax.jit(functools.partial(rms_norm, implementation=implementation))
    return jax.export.export(fn)(jax.device_put(X, NamedSharding(mesh, P("data"))))


def test_strict_native_refuses_partly_manual_shard_map(mesh):
    with pytest.raises(NotImplementedError) as caught:
        partly_manual(mesh, "native")(X)
    message = str(caught.value)
    for word in ("rms_norm: ", "'native'", "['data']", "['model']", "over every axis", "None"):
        assert word in message


def test_strict_native_refuses_export_for_several_devices_from_auto_axes(mesh):
    with pytest.raises(NotImplementedError) as caught:
        exported(mesh, "native")
    message = str(caught.value)
    for word in ("rms_norm: ", "'native'", "export", "Auto", "Explicit", "shard_map", "None"):
        assert word in message


@pytest.mark.parametrize("context", [partly_manual, exported])
@pytest.mark.parametrize("implementation", [None, ("native", "xla")], ids=str)
def test_plain_hlo_serves_there_otherwise(mesh, context, implementation):
    result = context(mesh, implementation)
    if context is partly_manual:
        np.testing.assert_allclose(result(X), np.ones(X.shape), rtol=1e-5)
    else:
        assert "normfuse" not in re.sub(r"loc\(.*", "", result.mlir_module())


def test_plain_hlo_is_logged_once_and_listed(mesh, caplog, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    with caplog.at_level(logging.INFO, "normfuse"):
        for asked in (None, ("native", "xla"), None):
            partly_manual(mesh, asked)(X)
    (record,) = [r for r in caplog.records if r.name == "normfuse"]
    assert record.levelno == logging.INFO
    ((op, reason),) = normfuse.fallbacks()
    assert op == "rms_norm" and "['data']" in reason
    assert op in record.getMessage() and reason in record.getMessage()


def test_native_is_not_logged(caplog, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    with caplog.at_level(logging.DEBUG, "normfuse"):
        jax.jit(jax.grad(lambda x: rms_norm(x).sum()))(X)
    assert not [r for r in caplog.records if r.name == "normfuse"] and normfuse.fallbacks() == []


def test_asking_for_plain_hlo_is_not_logged(mesh, monkeypatch):
    monkeypatch.setattr(implementation, "_plain", {})
    partly_manual(mesh, "xla")(X)
    assert normfuse.fallbacks() == []
