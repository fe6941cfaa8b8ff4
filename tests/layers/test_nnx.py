"""The NNX modules against Flax's own: results, gradients, parameters, options and errors."""

import inspect
import typing

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from parity import assert_nearer, assert_no_worse

from normfuse.layers import nnx as ours_nnx
from normfuse.layers.core.activations import resolve
from normfuse.layers.nnx import Linear, RMSNorm

pytestmark = [pytest.mark.oldest, pytest.mark.optimized]

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
SOME = [
    (f32, f32, None),
    (bf16, f32, None),
    (f16, bf16, None),
    (bf16, bf16, f32),
    (f32, f32, bf16),
    (f16, f32, bf16),
]


def named(dtypes):
    return "-".join("none" if d is None else jnp.dtype(d).name for d in dtypes)


def norms(rng, n, **options):
    """Ours and Flax's with the same random scale."""
    layers = RMSNorm(n, rngs=nnx.Rngs(0), **options), nnx.RMSNorm(n, rngs=nnx.Rngs(0), **options)
    if layers[0].scale is not None:
        scale = jnp.asarray(1 + rng.random(n) / 3, layers[0].scale.dtype)
        for layer in layers:
            layer.scale[...] = scale
    return layers


def gradients(layer, x, dy):
    loss = lambda layer, x: jnp.sum(layer(x).astype(f32) * dy.astype(f32))
    return nnx.grad(loss, argnums=(0, 1))(layer, x)


# ---------------------------------------------------------------- RMSNorm: results


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_rms_norm_is_as_exact_as_flax(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 128)), x_dtype)
    ours, theirs = norms(rng, 128, param_dtype=param_dtype, dtype=dtype)
    compute = jnp.dtype(dtype or jnp.promote_types(x_dtype, param_dtype))
    seen = x.astype(compute), ours.scale[...].astype(compute)  # cast first, then statistics
    assert_no_worse(ours(x), theirs(x), reference.forward(*seen)[0])


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_rms_norm_gradients_are_as_exact_as_flax(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 128)), x_dtype)
    ours, theirs = norms(rng, 128, param_dtype=param_dtype, dtype=dtype)
    compute = jnp.dtype(dtype or jnp.promote_types(x_dtype, param_dtype))
    seen = x.astype(compute), ours.scale[...].astype(compute)
    dy = jnp.asarray(rng.standard_normal((6, 128)), compute)
    (dscale, dx), (dscale_flax, dx_flax) = gradients(ours, x, dy), gradients(theirs, x, dy)
    exact = reference.backward(dy, *seen)
    assert_no_worse(dx, dx_flax, exact[0])
    assert_no_worse(dscale["scale"][...], dscale_flax["scale"][...], exact[1])


def test_rms_norm_casts_before_the_statistics(rng):
    x = jnp.asarray(rng.standard_normal((16, 256)), f32)
    ours, _ = norms(rng, 256, dtype=bf16)
    scale = ours.scale[...]
    right = reference.forward(x.astype(bf16), scale.astype(bf16))[0]
    assert_nearer(ours(x), right, reference.forward(x, scale)[0])


def test_scale_gradient_is_not_rounded(rng):
    x = jnp.asarray(rng.standard_normal((64, 32)), bf16)
    dy = jnp.asarray(rng.standard_normal((64, 32)), bf16)
    ours, theirs = norms(rng, 32, dtype=bf16)
    exact = reference.backward(dy, x, ours.scale[...].astype(bf16))[1]
    got, flax = (gradients(layer, x, dy)[0]["scale"][...] for layer in (ours, theirs))
    assert_no_worse(got, got, exact)
    assert np.any(got.astype(bf16).astype(f32) != got)
    assert np.all(
        flax.astype(bf16).astype(f32) == flax
    )  # else the wording of our docs is out of date


@pytest.mark.parametrize("axes", [0, (-1, -2), (0, 2)])
def test_rms_norm_over_other_axes(rng, axes):
    x = jnp.asarray(rng.standard_normal((4, 6, 8)), f32)
    n = np.prod([x.shape[a] for a in np.atleast_1d(axes)])
    ours, theirs = norms(rng, int(n), reduction_axes=axes, feature_axes=axes)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"use_scale": False},
        {"use_scale": False, "dtype": bf16},
        {"use_scale": False, "feature_axes": 0},
        {"use_fast_variance": False},
        {"epsilon": 0.5},
        {"epsilon": 0.0},
    ],
    ids=str,
)
def test_rms_norm_options(rng, options):
    x = jnp.asarray(rng.standard_normal((4, 8)), f32)
    ours, theirs = norms(rng, 8, **options)
    dtype = options.get("dtype", f32)
    seen = x.astype(dtype), None if ours.scale is None else ours.scale[...]
    exact = reference.forward(*seen, eps=options.get("epsilon", 1e-6))[0]
    assert_no_worse(ours(x), theirs(x), exact)
    assert hlo.calls(jax.jit(ours).lower(x).compile()) == {"forward": 1}


def test_rms_norm_of_nothing_and_of_zeros(rng):
    ours, theirs = norms(rng, 8)
    x = jnp.zeros((0, 8))
    assert ours(x).shape == theirs(x).shape == (0, 8)
    np.testing.assert_array_equal(gradients(ours, x, x)[0]["scale"][...], np.zeros(8))
    np.testing.assert_array_equal(ours(jnp.zeros((2, 8))), np.zeros((2, 8)))
    ours, theirs = norms(rng, 8, epsilon=0.0)
    assert np.all(np.isnan(ours(jnp.zeros(8)))) and np.all(np.isnan(theirs(jnp.zeros(8))))
    assert RMSNorm(0, rngs=nnx.Rngs(0))(jnp.ones((2, 0))).shape == (2, 0)


# ---------------------------------------------------------------- RMSNorm: Flax's own code


def promote(args, *, dtype=None):
    return tuple(a.astype(f32) for a in args)


FLAX_ONLY = {
    "promote_dtype": ({"promote_dtype": promote}, jnp.ones((2, 8), bf16) * 3),
    "feature_axes": ({"reduction_axes": (0, 1), "feature_axes": 1}, jnp.arange(16.0).reshape(2, 8)),
    "epsilon": ({"epsilon": jnp.array(0.5)}, jnp.arange(16.0).reshape(2, 8)),
    "int32": ({}, jnp.arange(16).reshape(2, 8)),
    "complex64": ({}, jnp.arange(16.0).reshape(2, 8) * (1 + 1j)),
}


@pytest.mark.parametrize("case", FLAX_ONLY)
def test_rms_norm_options_that_flax_serves(rng, case):
    options, x = FLAX_ONLY[case]
    ours, theirs = norms(rng, 8, **options)
    got, want = ours(x), theirs(x)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype
    strict = RMSNorm(8, rngs=nnx.Rngs(0), implementation="native", **options)
    with pytest.raises(NotImplementedError, match="nnx.RMSNorm.*native"):
        strict(x)


def test_rms_norm_mask_and_axis_name(rng):
    ours, theirs = norms(rng, 8)
    x, mask = jnp.asarray(rng.standard_normal((2, 8)), f32), jnp.arange(8) < 5
    np.testing.assert_array_equal(ours(x, mask=mask), theirs(x, mask))
    ours, theirs = norms(rng, 4, axis_name="i")
    halves = x.reshape(2, 2, 4).swapaxes(0, 1)
    got, want = (jax.vmap(layer, axis_name="i")(halves) for layer in (ours, theirs))
    np.testing.assert_array_equal(got, want)


def test_rms_norm_runs_natively(rng):
    x = jnp.asarray(rng.standard_normal((4, 8)), bf16)
    layer = RMSNorm(8, rngs=nnx.Rngs(0), implementation="native")
    compiled = jax.jit(layer).lower(x).compile()
    assert hlo.calls(compiled) == {"forward": 1}
    assert hlo.count(compiled, "convert") == 0  # x is not widened in memory


# ---------------------------------------------------------------- Linear


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_linear_is_flax_bit_for_bit(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 32)), x_dtype)
    options = {"param_dtype": param_dtype, "dtype": dtype, "bias_init": nnx.initializers.normal()}
    ours, theirs = (c(32, 16, rngs=nnx.Rngs(3), **options) for c in (Linear, nnx.Linear))
    got, want = ours(x), theirs(x)
    np.testing.assert_array_equal(got, want)
    assert got.dtype == want.dtype


@pytest.mark.parametrize("dtypes", SOME, ids=named)
def test_linear_gradients_are_as_exact_as_flax(rng, dtypes):
    x_dtype, param_dtype, dtype = dtypes
    x = jnp.asarray(rng.standard_normal((6, 32)), x_dtype)
    options = {"param_dtype": param_dtype, "dtype": dtype}
    ours, theirs = (c(32, 16, rngs=nnx.Rngs(3), **options) for c in (Linear, nnx.Linear))
    compute = jnp.dtype(dtype or jnp.promote_types(x_dtype, param_dtype))
    dy = jnp.asarray(rng.standard_normal((6, 16)), compute)
    (params, dx), (params_flax, dx_flax) = gradients(ours, x, dy), gradients(theirs, x, dy)
    a, g, k = (reference.wide(v.astype(compute)) for v in (x, dy, ours.kernel[...]))
    for name, got, want, exact, size in [
        ("x", dx, dx_flax, g @ k.T, np.abs(g) @ np.abs(k.T)),
        ("kernel", params["kernel"], params_flax["kernel"], a.T @ g, np.abs(a.T) @ np.abs(g)),
        ("bias", params["bias"], params_flax["bias"], g.sum(0), np.abs(g).sum(0)),
    ]:
        assert_no_worse(got[...], want[...], reference.Expected(exact, size, 32)), name


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_linear_options_that_flax_serves(rng, activation):
    values = jnp.asarray(rng.standard_normal((3, 8)), f32)
    dot_general = lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs) * 2
    function = resolve(activation) or (lambda z: z)
    for options, x in [
        ({"precision": "highest"}, values),
        ({"preferred_element_type": f32, "dtype": bf16}, values),
        ({"dot_general": dot_general}, values),
        ({"promote_dtype": promote}, values.astype(bf16)),
        ({"use_bias": False}, values),
        ({}, jnp.arange(8)),
        ({}, values + 1j),
    ]:
        if activation == "gelu" and jnp.iscomplexobj(x):
            continue  # there is no complex error function
        ours = Linear(8, 4, rngs=nnx.Rngs(0), activation=activation, **options)
        theirs = nnx.Linear(8, 4, rngs=nnx.Rngs(0), **options)
        got, want = ours(x), function(theirs(x))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
        assert got.dtype == want.dtype


def test_linear_activation_is_fused_with_the_bias(rng):
    x = jnp.asarray(rng.standard_normal((6, 32)), bf16)
    ours = Linear(32, 16, rngs=nnx.Rngs(0), dtype=bf16, activation="silu")
    theirs = nnx.Linear(32, 16, rngs=nnx.Rngs(0), dtype=bf16, use_bias=False)
    theirs.kernel[...] = ours.kernel[...]
    z = reference.wide(theirs(x)) + reference.wide(ours.bias[...].astype(bf16))
    np.testing.assert_allclose(reference.wide(ours(x)), z / (1 + np.exp(-z)), rtol=0.004, atol=1e-6)


def test_linear_out_sharding(rng, eight_devices):
    del eight_devices
    x = jnp.asarray(rng.standard_normal((4, 8)), f32)
    layer = Linear(8, 16, rngs=nnx.Rngs(0))
    want = layer(x)
    with jax.set_mesh(jax.make_mesh((8,), ("t",))):
        split = jax.device_put(x, jax.P(None, "t"))
        layer.kernel.set_value(jax.device_put(layer.kernel[...], jax.P("t", None)))
        layer.bias.set_value(jax.device_put(layer.bias[...], jax.P()))
        got = layer(split, out_sharding=jax.P())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- parameters


PAIRS = {
    "RMSNorm": (RMSNorm, nnx.RMSNorm, (16,), {}),
    "RMSNorm without scale": (RMSNorm, nnx.RMSNorm, (16,), {"use_scale": False}),
    "RMSNorm with metadata": (RMSNorm, nnx.RMSNorm, (16,), {"scale_metadata": {"note": "a"}}),
    "Linear": (Linear, nnx.Linear, (16, 8), {}),
    "Linear in bfloat16": (Linear, nnx.Linear, (16, 8), {"param_dtype": bf16}),
    "Linear without bias": (Linear, nnx.Linear, (16, 8), {"use_bias": False}),
    "Linear with metadata": (Linear, nnx.Linear, (16, 8), {"kernel_metadata": {"note": "a"}}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_parameters_and_state_are_flax_own(pair):
    ours, theirs, args, options = PAIRS[pair]
    states = [nnx.state(c(*args, rngs=nnx.Rngs(7), **options)) for c in (ours, theirs)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    metadata = [[v.get_metadata() for v in jax.tree.leaves(s, is_leaf=is_variable)] for s in states]
    assert metadata[0] == metadata[1]


def is_variable(node):
    return isinstance(node, nnx.Variable)


@pytest.mark.parametrize("pair", ["RMSNorm", "Linear"])
def test_state_loads_both_ways(pair, tmp_path):
    import orbax.checkpoint as ocp

    ours, theirs, args, options = PAIRS[pair]
    checkpointer = ocp.StandardCheckpointer()
    for i, (source, target) in enumerate([(ours, theirs), (theirs, ours)]):
        state = jax.tree.map(lambda a: a + 3, nnx.state(source(*args, rngs=nnx.Rngs(1))))
        layer = target(*args, rngs=nnx.Rngs(2))
        nnx.update(layer, state)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), state)
        checkpointer.save(tmp_path / str(i), state)
        checkpointer.wait_until_finished()
        layer = target(*args, rngs=nnx.Rngs(2))
        nnx.update(layer, checkpointer.restore(tmp_path / str(i), nnx.state(layer)))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(layer), state)
    checkpointer.close()


@pytest.mark.parametrize("pair", ["RMSNorm", "Linear"])
def test_constructors_take_what_flax_takes(pair):
    ours, theirs, args, _ = PAIRS[pair]
    given = inspect.signature(theirs.__init__).parameters
    defaults = {k: p.default for k, p in given.items() if p.default is not p.empty}
    assert len(defaults) > 7
    layers = [c(*args, rngs=nnx.Rngs(0), **defaults) for c in (ours, theirs)]
    visible = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in layers]
    extras = visible[0].keys() - visible[1].keys()
    assert extras <= {"implementation", "activation", "quantization"}
    for name in defaults.keys() & visible[1].keys():
        assert visible[0][name] == visible[1][name]


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Linear"])
def test_editors_see_what_flax_takes(name):
    """Each argument of Flax's constructor is named, and what it requires is required."""
    given = inspect.signature(getattr(nnx, name).__init__).parameters
    mine = inspect.signature(getattr(ours_nnx, name).__init__).parameters
    (kwargs,) = typing.get_args(mine["kwargs"].annotation)
    assert given.keys() <= mine.keys() | kwargs.__annotations__.keys()
    assert not mine.keys() & kwargs.__annotations__.keys()
    required = {k for k, p in given.items() if p.default is p.empty} - mine.keys()
    assert kwargs.__required_keys__ == required


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("epsilon", [float("nan"), float("inf"), -1e-6])
def test_rejects_epsilon(epsilon):
    with pytest.raises(ValueError, match="epsilon must be finite and at least 0"):
        RMSNorm(8, epsilon=epsilon, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="epsilon must be a number, got True"):
        RMSNorm(8, epsilon=True, rngs=nnx.Rngs(0))


def test_rejects_shapes_and_names():
    norm, linear = RMSNorm(8, rngs=nnx.Rngs(0)), Linear(8, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"nnx.RMSNorm: x must have num_features=8 .* \(2, 7\)"):
        norm(jnp.ones((2, 7)))
    with pytest.raises(ValueError, match=r"nnx.RMSNorm: x must have an axis .* a scalar"):
        norm(jnp.ones(()))
    with pytest.raises(ValueError, match=r"nnx.Linear: inputs must have in_features=8 .* \(2, 7\)"):
        linear(jnp.ones((2, 7)))
    with pytest.raises(ValueError, match="activation must be one of"):
        Linear(8, 4, activation="swoosh", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="activation must hold no arrays, got PReLU"):
        Linear(8, 4, activation=nnx.PReLU(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="implementation must name one of"):
        RMSNorm(8, implementation="cuda", rngs=nnx.Rngs(0))


def test_linear_without_features():
    zeros = Linear(0, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    assert zeros(jnp.ones((2, 0))).shape == (2, 4)  # Flax's shape too
    try:
        nnx.Linear(0, 4, rngs=nnx.Rngs(0))
    except ZeroDivisionError:  # JAX before 0.11: its initialisers divide by the number of features
        with pytest.raises(ValueError, match="at least 1 for this kernel_init, got 0 and 4"):
            Linear(0, 4, rngs=nnx.Rngs(0))
    else:
        assert Linear(0, 4, rngs=nnx.Rngs(0)).kernel.shape == (0, 4)
