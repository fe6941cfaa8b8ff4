"""The modules of three frameworks against the frameworks' own: one table of layers for all."""

import dataclasses
import inspect
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from numpy_interpreter import evaluated
from parity import assert_nearer, assert_no_worse

from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx

f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
KEY = jax.random.key(3)
N, M = 128, 16
NORMS, KINDS = ["RMSNorm", "LayerNorm"], ["RMSNorm", "LayerNorm", "Linear"]
FRAMEWORKS = {
    "nnx": (ours_nnx, nnx),
    "linen": (ours_linen, nn),
    "eqx": (ours_eqx, eqx.nn),
}
# The dtypes of x, the parameters and the layer; Equinox's layers have none.
DTYPES = [(f32, f32, None), (bf16, f32, None), (bf16, bf16, f32), (f16, f32, bf16)]


class Pure(NamedTuple):
    """A layer as a function of its parameters, which have Flax's names and layout."""

    apply: Any  # a function of (params, x)
    params: dict[str, jax.Array]


def pure(framework, home, kind, features=N, dtypes=(None, f32, None), **options) -> Pure:
    _, param_dtype, dtype = dtypes
    sizes = (features, M) if kind == "Linear" else (features,)
    if framework == "eqx":
        named = {"use_bias": False} if kind == "RMSNorm" else {}
        keys = {"key": KEY} if kind == "Linear" else {}
        layer = getattr(home, kind)(*sizes, **{"dtype": param_dtype} | named | keys | options)
        arrays, static = eqx.partition(layer, eqx.is_array)
        leaves, tree = jax.tree.flatten(arrays)
        names = ["kernel" if kind == "Linear" else "scale", "bias"][: len(leaves)]
        turned = lambda name, a: a.T if name == "kernel" else a

        def apply(params, x):
            parts = jax.tree.unflatten(tree, [turned(name, params[name]) for name in names])
            layer = eqx.combine(parts, static)
            return (jax.vmap(layer) if x.ndim > 1 else layer)(x)

        return Pure(apply, {name: turned(name, a) for name, a in zip(names, leaves)})
    options = {"dtype": dtype, "param_dtype": param_dtype} | options
    if framework == "nnx":
        graph, state = nnx.split(getattr(home, kind)(*sizes, rngs=nnx.Rngs(3), **options))
        apply = lambda params, x: nnx.merge(graph, params)(x)
        return Pure(apply, nnx.to_pure_dict(state))
    if kind == "Linear":
        layer = home.Dense(M, **options)
    else:
        layer = getattr(home, kind)(**options)
    params = layer.init(KEY, jnp.ones((2, features)))["params"]
    return Pure(lambda params, x: layer.apply({"params": params}, x), dict(params))


def pair(framework, kind, rng, **options):
    """Ours and theirs, with the same random parameters."""
    exact = {"use_fast_variance": False} if kind == "LayerNorm" and framework != "eqx" else {}
    layers = [pure(framework, home, kind, **options | exact) for home in FRAMEWORKS[framework]]
    ours, theirs = (jax.tree.map(lambda a: (a.shape, a.dtype), layer.params) for layer in layers)
    assert ours == theirs
    jax.tree.map(np.testing.assert_array_equal, *(layer.params for layer in layers))
    noisy = lambda a: a + jnp.asarray(rng.random(a.shape) / 3, a.dtype)
    return *(layer.apply for layer in layers), jax.tree.map(noisy, layers[0].params)


def gradients(apply, params, x, dy):
    y, pull = jax.vjp(apply, params, x)
    return y, *pull(dy.astype(y.dtype))


def expected(framework, kind, params, x, dy, compute):
    """The layer and its gradients by the framework's rule of promotion, in float64."""
    first = framework == "nnx" or kind == "Linear"  # operands are cast to the compute dtype first
    seen = lambda a: a.astype(compute) if first else a
    x, params = seen(x), {name: seen(a) for name, a in params.items()}
    if kind == "Linear":
        a, g, k = map(reference.wide, (x, dy, params["kernel"]))
        b = reference.wide(params["bias"])
        products = {
            "y": (a @ k + b, np.abs(a) @ np.abs(k) + np.abs(b)),
            "x": (g @ k.T, np.abs(g) @ np.abs(k.T)),
            "kernel": (a.T @ g, np.abs(a.T) @ np.abs(g)),
            "bias": (g.sum(0), np.abs(g).sum(0)),
        }
        return {name: reference.Expected(*each, N) for name, each in products.items()}
    eps = 1e-5 if framework == "eqx" else 1e-6
    if kind == "RMSNorm":
        y = reference.forward(x, params["scale"], eps=eps)[0]
        return {"y": y} | dict(
            zip(("x", "scale"), reference.backward(dy, x, params["scale"], eps=eps))
        )
    back = reference.layer_backward(dy, x, params["scale"], eps=eps)
    y = reference.layer_forward(x, params["scale"], params["bias"], eps=eps)
    return {"y": y} | dict(zip(("x", "scale", "bias"), back))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_as_exact_as_the_frameworks(framework, kind, rng):
    """So are their dtypes, and initial values and names of parameters."""
    for dtypes in DTYPES[:2] if framework == "eqx" else DTYPES:
        x_dtype, param_dtype, dtype = dtypes
        x = jnp.asarray(rng.standard_normal((6, N)), x_dtype)
        compute = jnp.dtype(dtype or jnp.promote_types(x_dtype, param_dtype))
        rows = M if kind == "Linear" else N
        out = x_dtype if framework == "eqx" and kind in NORMS else compute
        dy = jnp.asarray(rng.standard_normal((6, rows)), out)
        ours, theirs, params = pair(framework, kind, rng, dtypes=dtypes)
        exact = expected(framework, kind, params, x, dy, compute)
        y, dparams, dx = gradients(ours, params, x, dy)
        y_theirs, dparams_theirs, dx_theirs = evaluated(gradients)(theirs, params, x, dy)
        assert_no_worse(y, y_theirs, exact["y"])
        assert_no_worse(dx, dx_theirs, exact["x"])
        for name, gradient in dparams.items():
            assert_no_worse(gradient, dparams_theirs[name], exact[name])


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_when_a_norm_casts(framework, rng):
    """To the layer's dtype: nnx before the statistics, Linen the result."""
    ours, _, params = pair(framework, "RMSNorm", rng, dtypes=(f32, f32, bf16))
    x = jnp.asarray(rng.standard_normal((16, N)), f32)
    before = reference.forward(x.astype(bf16), params["scale"].astype(bf16))[0]
    after = reference.forward(x, params["scale"])[0]
    right, wrong = (before, after) if framework == "nnx" else (after, before)
    found = ours(params, x)
    assert found.dtype == bf16
    assert_nearer(found, right, wrong)
    off = np.abs(np.asarray(found, np.float64) - right.value)
    assert (off <= 2.0**-8 * np.abs(right.value)).all()  # one rounding, of half an ulp of bfloat16


def test_gradients_of_float32_parameters_are_not_rounded(rng):
    """In float32 from bfloat16 products and sums; Flax's own are rounded."""
    for kind, name in ("RMSNorm", "scale"), ("LayerNorm", "bias"), ("Linear", "kernel"):
        ours, theirs, params = pair("nnx", kind, rng, dtypes=(bf16, f32, bf16))
        x = jnp.asarray(rng.standard_normal((64, N)), bf16)
        dy = jnp.asarray(rng.standard_normal(ours(params, x).shape), bf16)
        mine, flax = (gradients(apply, params, x, dy)[1][name] for apply in (ours, theirs))
        assert np.any(mine.astype(bf16).astype(f32) != mine)
        assert np.all(flax.astype(bf16).astype(f32) == flax)  # else our docs are out of date


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_norms_run_natively(framework, rng):
    """One kernel, also of an array that is vmapped twice; x is not widened in memory."""
    x, layer = jnp.ones((4, N), bf16), None
    for kind in NORMS:
        dtypes = (bf16, f32, bf16)
        layer = pure(framework, FRAMEWORKS[framework][0], kind, dtypes=dtypes)
        compiled = jax.jit(layer.apply).lower(layer.params, x).compile()
        assert hlo.calls(compiled) == {"forward": 1} and hlo.count(compiled, "convert") == 0
    assert layer is not None
    twice = jax.jit(jax.vmap(layer.apply, (None, 0)))
    assert hlo.calls(twice.lower(layer.params, x[:, None]).compile()) == {"forward": 1}


# ---------------------------------------------------------------- options


X = np.random.default_rng(0).standard_normal((2, 8)).astype("f4")
promote = lambda *args, dtype=None, **_: [None if a is None else a.astype(f32) for a in args[0]]
doubled = lambda *args, **kwargs: jax.lax.dot_general(*args, **kwargs) * 2
# Options of a layer, and x, that a framework's own code serves.
THEIRS: dict[str, list[tuple[str, dict[str, Any], Any]]] = {
    "nnx": [
        ("RMSNorm", {"promote_dtype": lambda args, dtype=None: args}, X),
        ("RMSNorm", {"reduction_axes": (0, 1), "feature_axes": 1}, X),
        ("LayerNorm", {"epsilon": jnp.array(0.5)}, X),
        ("RMSNorm", {}, np.arange(16).reshape(2, 8)),
        ("RMSNorm", {}, X * (1 + 1j)),
        ("Linear", {"precision": "highest"}, X),
        ("Linear", {"preferred_element_type": f32, "dtype": bf16}, X),
        ("Linear", {"dot_general": doubled}, X),
        ("Linear", {"promote_dtype": promote}, X.astype(bf16)),
        ("Linear", {}, np.arange(8)),
        ("Linear", {}, X + 1j),
    ],
    "linen": [
        ("RMSNorm", {"reduction_axes": (0, 1), "feature_axes": 1}, X),
        ("LayerNorm", {"force_float32_reductions": False}, X),
        ("RMSNorm", {"epsilon": jnp.array(0.5)}, X),
        ("RMSNorm", {}, np.arange(16).reshape(2, 8)),
        ("Linear", {"precision": "highest"}, X),
        ("Linear", {"dot_general": doubled}, X),
        ("Linear", {"dot_general_cls": lambda: doubled}, X),
        ("Linear", {}, np.arange(8)),
        ("Linear", {}, X + 1j),
    ],
    "eqx": [
        ("RMSNorm", {}, X[0] + 1j),
        ("Linear", {}, np.arange(8)),
        ("Linear", {}, X[0] + 1j),
    ],
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_options_that_the_framework_serves(framework):
    for kind, options, x in THEIRS[framework]:
        options, x = {"dtype": None, **options} if framework != "eqx" else options, jnp.asarray(x)
        mine, theirs = (pure(framework, home, kind, 8, **options) for home in FRAMEWORKS[framework])
        got, want = (layer.apply(layer.params, x) for layer in (mine, theirs))
        np.testing.assert_array_equal(got, want, err_msg=f"{kind} {options}")
        assert got.dtype == want.dtype
        if kind == "Linear" and not jnp.iscomplexobj(x):
            layer = pure(framework, FRAMEWORKS[framework][0], kind, 8, activation="silu", **options)
            got = layer.apply(layer.params, x)
            np.testing.assert_allclose(got, jax.nn.silu(want), rtol=1e-2, atol=1e-2)
        with pytest.raises(NotImplementedError, match="native"):
            strict = {"implementation": "native"} | options
            layer = pure(framework, FRAMEWORKS[framework][0], kind, 8, **strict)
            layer.apply(layer.params, x)


def test_masks_and_axis_names(rng):
    x, mask = jnp.asarray(X), np.arange(8) < 5
    for kind in NORMS:
        ours, theirs = (getattr(home, kind)(8, rngs=nnx.Rngs(0)) for home in FRAMEWORKS["nnx"])
        np.testing.assert_array_equal(ours(x, mask=mask), theirs(x, mask=mask))
        ours, theirs = (getattr(home, kind)() for home in FRAMEWORKS["linen"])
        params = theirs.init(KEY, x)
        got, want = (layer.apply(params, x, mask=mask) for layer in (ours, theirs))
        np.testing.assert_array_equal(got, want)
    options = {"axis_name": "i", "rngs": nnx.Rngs(0)}
    ours, theirs = (home.RMSNorm(4, **options) for home in FRAMEWORKS["nnx"])
    halves = x.reshape(2, 2, 4).swapaxes(0, 1)
    got, want = (jax.vmap(layer, axis_name="i")(halves) for layer in (ours, theirs))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_options_of_flax_norms(framework, rng):
    cases = [{"use_scale": False}, {"epsilon": 0.5}, {"use_fast_variance": False}]
    cases += [{"reduction_axes": axes, "feature_axes": axes} for axes in (-1, (-1, -2))]
    for options in cases:
        axes = options.get("feature_axes", -1)
        x = jnp.asarray(rng.standard_normal((3, 4, 6)), f32)
        if framework == "nnx":
            features = 24 if axes == (-1, -2) else 6
            ours, theirs = (
                home.RMSNorm(features, rngs=nnx.Rngs(0), **options)(x) for home in FRAMEWORKS["nnx"]
            )
        else:
            ours, theirs = (
                home.RMSNorm(**options).init_with_output(KEY, x)[0] for home in FRAMEWORKS["linen"]
            )
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=str(options))


@pytest.mark.parametrize(
    "shape, options",
    [
        ((4, 6), {}),
        (8, {"use_weight": False}),
        (8, {"use_weight": False, "use_bias": False}),
        (8, {"eps": 0.5}),
        ((), {}),
        (0, {}),
    ],
    ids=str,
)
def test_options_of_equinox_norms(rng, shape, options):
    noisy = lambda a: a + jnp.asarray(rng.random(a.shape) / 3, a.dtype)
    theirs = jax.tree.map(noisy, eqx.nn.RMSNorm(shape, **options))
    ours = ours_eqx.RMSNorm(shape, **options)
    ours = jax.tree.unflatten(jax.tree.structure(ours), jax.tree.leaves(theirs))
    for dtype in (f32, bf16):
        x = jnp.asarray(rng.standard_normal(ours.shape), dtype)
        got, want = ours(x), theirs(x)
        np.testing.assert_allclose(got.astype(f32), want.astype(f32), rtol=0.008, atol=1e-6)
        assert got.dtype == want.dtype and got.shape == want.shape


@pytest.mark.parametrize("activation", [None, "tanh"])
def test_linear_options_that_equinox_serves(rng, activation):
    vector = jnp.asarray(rng.standard_normal(8), f32)
    wide_bias = lambda layer: eqx.tree_at(lambda m: m.bias, layer, jnp.ones(4, f32))
    same = lambda layer: layer
    for features, options, change, x in [
        (("scalar", 4), {}, same, vector[0]),
        ((8, "scalar"), {}, same, vector),
        ((8, 4), {"dtype": bf16}, wide_bias, vector.astype(bf16)),
        ((8, 4), {"use_bias": False}, same, jnp.outer(vector, vector[:3])),
        ((0, 4), {}, same, vector[:0]),
    ]:
        ours = change(ours_eqx.Linear(*features, **options, key=KEY, activation=activation))
        theirs = change(eqx.nn.Linear(*features, **options, key=KEY))
        got, want = ours(x), theirs(x)
        want = want if activation is None else jnp.tanh(want)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert got.dtype == want.dtype and got.shape == want.shape


def test_linear_out_sharding(rng, eight_devices):
    del eight_devices
    x = jnp.asarray(rng.standard_normal((4, 8)), f32)
    layer = ours_nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    want = layer(x)
    with jax.set_mesh(jax.make_mesh((8,), ("t",))):
        split = jax.device_put(x, jax.P(None, "t"))
        layer.kernel.set_value(jax.device_put(layer.kernel[...], jax.P("t", None)))
        layer.bias.set_value(jax.device_put(layer.bias[...], jax.P()))
        got = layer(split, out_sharding=jax.P())
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- constructors and state


@pytest.mark.parametrize("kind", KINDS)
def test_constructors_take_what_the_frameworks_take(kind):
    extras = {"implementation", "activation", "quantization"}
    given = inspect.signature(getattr(nnx, kind).__init__).parameters
    defaults = {k: p.default for k, p in given.items() if p.default is not p.empty}
    sizes = (16, 8) if kind == "Linear" else (16,)
    layers = [getattr(h, kind)(*sizes, rngs=nnx.Rngs(7), **defaults) for h in FRAMEWORKS["nnx"]]
    visible = [{k: v for k, v in vars(m).items() if not k.startswith("_")} for m in layers]
    assert visible[0].keys() - visible[1].keys() <= extras
    assert all(visible[0][name] == visible[1][name] for name in defaults.keys() & visible[1].keys())
    metadata = [
        [v.get_metadata() for v in jax.tree.leaves(nnx.state(layer), is_leaf=is_variable)]
        for layer in layers
    ]
    assert metadata[0] == metadata[1]

    name = "Dense" if kind == "Linear" else kind
    mine, theirs = (dataclasses.fields(getattr(home, name)) for home in FRAMEWORKS["linen"])
    positional = [
        [(f.name, f.default) for f in fields if not f.kw_only] for fields in (mine, theirs)
    ]
    assert positional[0] == positional[1]
    assert {f.name for f in mine} - {f.name for f in theirs} <= extras

    parameters = [inspect.signature(getattr(h, kind)).parameters for h in FRAMEWORKS["eqx"]]
    mine, theirs = ([(p.name, p.kind, p.default) for p in one.values()] for one in parameters)
    mine = [one for one in mine if one[0] not in extras | {"kwargs"}]  # the framework reads these
    assert mine == [one for one in theirs if one[0] != "elementwise_affine"]


def is_variable(node):
    return isinstance(node, nnx.Variable)


def test_equinox_leaves_have_their_paths_and_the_rest_is_static():
    for kind, sizes, options in (("RMSNorm", (16,), {}), ("Linear", (16, 8), {"key": KEY})):
        layers = [getattr(home, kind)(*sizes, **options) for home in FRAMEWORKS["eqx"]]
        ours, theirs = ([p for p, _ in jax.tree.leaves_with_path(layer)] for layer in layers)
        assert ours == theirs
        state = {k for k, v in vars(layers[0]).items() if not eqx.is_array(v)}
        assert state - vars(layers[1]).keys() <= {"implementation", "activation", "quantization"}
    options = {"activation": "gelu", "implementation": ["pallas", "xla"]}
    tree = jax.tree.structure(ours_eqx.Linear(4, 4, key=KEY, **options))
    assert tree.num_leaves == 2 and hash(tree) == hash(tree)


class Model(nn.Module):
    """Layers with names that Linen makes up from their classes."""

    norm: type
    dense: type

    @nn.compact
    def __call__(self, x, _=None):
        return x + self.dense(8)(self.norm()(x)), None


def test_linen_transforms(rng):
    x = jnp.asarray(rng.standard_normal((4, 5, 8)), f32)
    results = []
    for home in FRAMEWORKS["linen"]:
        remat = nn.remat(Model, prevent_cse=False)
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        model = nn.scan(remat, length=3, **options)(home.RMSNorm, home.Dense)
        variables = model.init(jax.random.key(0), x, None)
        f = lambda v, model=model: jnp.sum(jnp.sin(model.apply(v, x, None)[0]))
        results.append((variables, jax.jit(jax.grad(f))(variables)))
    (ours, got), (theirs, want) = results
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, got, want)


def test_equinox_vmap_is_one_product():
    """Of batches of sequences, with the weight as it is stored."""
    block = eqx.nn.Sequential([ours_eqx.RMSNorm(16), ours_eqx.Linear(16, 16, key=KEY)])
    text = jax.jit(jax.vmap(jax.vmap(block))).lower(jnp.ones((4, 3, 16))).as_text()
    assert "(tensor<4x3x16xf32>, tensor<16x16xf32>) -> tensor<4x3x16xf32>" in text
    assert "transpose" not in text


# ---------------------------------------------------------------- bad input


def test_bad_input_is_one_clear_error():
    x, rngs = jnp.ones((2, 8)), nnx.Rngs(0)
    norms = [ours_nnx.RMSNorm, ours_nnx.LayerNorm], [ours_linen.RMSNorm, ours_linen.LayerNorm]
    makers = [lambda eps, c=c: c(8, epsilon=eps, rngs=rngs) for c in norms[0]]
    makers += [lambda eps, c=c: c(epsilon=eps) for c in norms[1]]
    makers += [lambda eps, c=c: c(8, eps=eps) for c in (ours_eqx.RMSNorm, ours_eqx.LayerNorm)]
    for make in makers:
        for eps in (float("nan"), float("inf"), -1e-6):
            with pytest.raises(ValueError, match=r"Norm: eps(ilon)? must be (finite|at least 0)"):
                make(eps)
        with pytest.raises(TypeError, match=r"Norm: eps(ilon)? must be a .*number.*, got True"):
            make(True)
    linears = [
        (lambda **k: ours_nnx.Linear(8, 4, rngs=rngs, **k), nnx.PReLU()),
        (lambda **k: ours_eqx.Linear(8, 4, key=KEY, **k), eqx.nn.PReLU()),
        (lambda **k: ours_linen.Dense(4, **k), None),
    ]
    for make, prelu in linears:
        with pytest.raises(ValueError, match="activation must be one of"):
            make(activation="swoosh")
        with pytest.raises(ValueError, match="implementation must name one of"):
            make(implementation="cuda")
        if prelu is not None:
            with pytest.raises(TypeError, match="activation must hold no arrays, got PReLU"):
                make(activation=prelu)
    norm, linear = ours_nnx.RMSNorm(8, rngs=rngs), ours_nnx.Linear(8, 4, rngs=rngs)
    eqx_norm, eqx_linear = ours_eqx.RMSNorm(8), ours_eqx.Linear(8, 4, key=KEY)
    init = lambda layer, x: layer.init(KEY, x)
    cases = [
        (lambda: norm(x[:, :7]), r"nnx.RMSNorm: x must have num_features=8 .* \(2, 7\)"),
        (lambda: norm(jnp.ones(())), "nnx.RMSNorm: x must have an axis .* a scalar"),
        (lambda: linear(x[:, :7]), r"nnx.Linear: inputs must have in_features=8 .* \(2, 7\)"),
        (lambda: init(ours_linen.RMSNorm(), jnp.ones(())), "nn.RMSNorm: x must have an axis"),
        (lambda: init(ours_linen.Dense(4), jnp.ones(())), "nn.Dense: inputs must be .* a scalar"),
        (lambda: eqx_norm(x), r"shape \(8,\), got .*; .* jax.vmap\(norm\)"),
        (lambda: eqx_linear(x), r"shape \(8,\), got .*; .* jax.vmap\(linear\)"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="eqx.nn.RMSNorm: x must be floating, got int32; cast it"):
        eqx_norm(jnp.arange(8))
