import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.models import parameters
from normfuse.models.config import PRESETS
from normfuse.models.functional import build
from normfuse.models.sharding import BATCH, Sharding, constrain, on_mesh, validate
from normfuse.models.transformer import embed

AXES = ("data", "fsdp", "tensor")
MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 2), (2, 2, 2)]
CASES = [(sizes, Sharding()) for sizes in MESHES] + [
    (sizes, Sharding.sequence_parallel(by_rows=rows))
    for sizes in MESHES
    if sizes[2] > 1
    for rows in (False, True)[: 1 + (sizes == (1, 1, 2))]
]
SEQ = 20  # so that no activation has a parameter's number of elements


def _mesh(sizes, axes=AXES):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def _loss(model, params, tokens):
    logits, targets = model.apply(params, tokens[:, :-1]), tokens[:, 1:]
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _compiled(model, mesh, jit):
    """One training gradient, its parameters and their gradients sharded alike."""
    with jax.set_mesh(mesh):
        places = model.shardings(model.abstract, mesh)
        on = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        params = jax.tree.map(on, model.abstract, places)
        batch = NamedSharding(mesh, on_mesh(P(BATCH, None), mesh.axis_names))
        tokens = jax.ShapeDtypeStruct((8, SEQ + 1), jnp.int32, sharding=batch)
        gradient = jax.value_and_grad(lambda params, tokens: _loss(model, params, tokens))
        whole = NamedSharding(mesh, P())
        step = jit(gradient, out_shardings=(whole, places)).lower(params, tokens).compile()

    def run(values, rows):
        return step(jax.device_put(model.from_dict(values), places), jax.device_put(rows, batch))

    return run


@pytest.fixture(scope="module", params=["nnx", "eqx"])
def framework(request):
    return request.param


@pytest.fixture(scope="module")
def deep(small, framework):
    """One framework has one layer and the other two: what a layer adds shows."""
    return dataclasses.replace(small, num_layers={"nnx": 2, "eqx": 1}[framework])


@pytest.fixture(scope="module")
def unsharded(deep, noisy, framework, jit):
    rng = np.random.default_rng(0)
    values, rows = noisy(deep, rng), rng.integers(0, deep.vocab_size, (8, SEQ + 1), np.int32)
    model = build(framework, deep)
    loss, gradient = jit(jax.value_and_grad(lambda p: _loss(model, p, rows)))(
        model.from_dict(values)
    )
    return values, rows, loss, parameters.to_dict(gradient)


@pytest.mark.parametrize("framework, case", half(["nnx", "eqx"], CASES), indirect=["framework"])
def test_sharded_gradient_is_the_unsharded_one(
    deep, jit, eight_devices, unsharded, framework, case
):
    sizes, sharding = case
    values, rows, loss, gradient = unsharded
    model = build(framework, deep, sharding)
    run = _compiled(model, _mesh(sizes), jit)
    _check_gradient(*run(values, rows), loss, gradient)


def _check_gradient(got_loss, got, loss, gradient):
    """Those of one device."""
    assert abs(got_loss - loss) < 1e-5
    for name, value in parameters.to_dict(got).items():
        assert np.abs(np.asarray(value) - gradient[name]).max() < 1e-5, name


@pytest.mark.optimized  # LLVM's vectorising depends on the shape of a shard
def test_initial_parameters_are_the_same_bits_on_every_mesh(small, eight_devices):
    config = dataclasses.replace(small, num_layers=1, tie_embeddings=True)
    model = build("nnx", config)
    expected = parameters.to_dict(jax.jit(model.init)(jax.random.key(7)))
    places = model.shardings(model.abstract, _mesh((2, 2, 2)))
    made = jax.jit(model.init, out_shardings=places)(jax.random.key(7))
    for name, value in parameters.to_dict(made).items():
        assert value.sharding == parameters.to_dict(places)[name]
        np.testing.assert_array_equal(value, expected[name])


def test_constrain_does_nothing_without_a_mesh():
    x = jnp.ones((4, 6))
    assert constrain(x, P("data", "tensor")) is x
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: constrain(x, P("data")))(x))
    with jax.set_mesh(_mesh((1, 1, 1))):
        assert constrain(x, P("data", "tensor")) is x


def test_constrain_leaves_out_axes_that_do_not_divide(eight_devices, jit):
    x = jnp.arange(24.0).reshape(2, 1, 12)  # two prompts, one token each
    mesh = _mesh((2, 2, 2))
    with jax.set_mesh(mesh):
        y = jit(lambda x: constrain(x, P(BATCH, "tensor", "fsdp")))(x)
    assert y.sharding == NamedSharding(mesh, P("data", None, "fsdp"))
    np.testing.assert_array_equal(y, x)


def test_constrain_leaves_out_axes_that_shard_map_has_taken(eight_devices, jit):
    mesh = _mesh((2, 2, 2))
    x = jnp.arange(32.0).reshape(8, 4)
    local = jax.shard_map(
        lambda x: constrain(2 * x, P(BATCH, "tensor")),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jit(local)(x), 2 * x)


# The dimension that "tensor" splits is that of heads, of hidden features or of words, never `dim`.
SPLIT = {
    "embedding": {"embed": ("tensor", "fsdp")},
    "kernel": {"head": ("fsdp", "tensor"), "o": ("tensor", "fsdp"), "down": ("tensor", "fsdp")}
    | dict.fromkeys(("q", "k", "v", "gate", "up"), ("fsdp", "tensor")),
    "bias": dict.fromkeys("qkv", ("tensor",)),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_has_a_spec(preset):
    for name in parameters.shapes(PRESETS[preset]):
        *_, layer, kind = name.split(".")
        wanted = (None,) if kind == "scale" else SPLIT[kind][layer]
        assert Sharding().parameter(name) == P(*wanted), name
    with pytest.raises(KeyError, match="layers.0.bogus.kernel"):
        Sharding().parameter("layers.0.bogus.kernel")


def test_shardings_follow_the_layout_of_each_framework(small, eight_devices):
    mesh = _mesh((4, 2), ("fsdp", "tensor"))
    flax, equinox = build("nnx", small), build("eqx", small)
    placed = flax.shardings(flax.abstract, mesh)
    assert placed["layers"][0]["mlp"]["up"]["kernel"].spec == P("fsdp", "tensor")
    placed = equinox.shardings(equinox.abstract, mesh)
    assert placed.layers[0].mlp.up.weight.spec == P("tensor", "fsdp")
    assert placed.layers[0].mlp_norm.weight.spec == P(None)


@pytest.mark.parametrize(
    ("changes", "mesh", "options", "message"),
    [
        (
            {},
            {"tensor": 4},
            {},
            "num_kv_heads=2 cannot be split over mesh axis 'tensor' of size 4: it must be a "
            "multiple of 4. Change num_kv_heads, or make the axis 1 or 2.",
        ),
        ({"num_kv_heads": 4, "mlp_dim": 42}, {"tensor": 4}, {}, "mlp_dim=42 cannot be split"),
        ({}, {"data": 2, "fsdp": 5}, {}, "dim=24 cannot be split over mesh axis 'fsdp' of size 5"),
        (
            {},
            {"data": 2, "fsdp": 4},
            {"batch_size": 12},
            "batch_size=12 cannot be split over mesh axis 'data' of size 2 x 'fsdp' of size 4: it "
            "must be a multiple of 8",
        ),
        (
            {},
            {"tensor": 2},
            {"seq_len": 15, "sharding": Sharding.sequence_parallel()},
            "seq_len=15 cannot be split over mesh axis 'tensor' of size 2",
        ),
        ({}, {"model": 2}, {}, "mesh axis 'model' is unknown to the transformer"),
    ],
)
def test_validate_names_the_dimension_and_the_axis(small, changes, mesh, options, message):
    with pytest.raises(ValueError) as error:
        validate(dataclasses.replace(small, **changes), mesh, **options)
    assert message in str(error.value)


def test_a_parameter_that_the_mesh_does_not_divide_is_refused(small, eight_devices):
    model = build("nnx", dataclasses.replace(small, mlp_dim=42))
    places = model.shardings(model.abstract, _mesh((1, 1, 8)))
    with pytest.raises(ValueError, match=r"partitioned 8 times, but the dimension size is 42"):
        jax.jit(model.init, out_shardings=places)(jax.random.key(0))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_fits_common_meshes(preset):
    for mesh in {"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 4}:
        validate(PRESETS[preset], mesh, batch_size=8, seq_len=128)


@pytest.mark.parametrize("seq", [4, 16])
def test_a_look_up_moves_the_fewer_of_rows_and_words(eight_devices, seq, rng):
    """Over "fsdp"; each token's vector and gradient are those of one device."""
    words, dim, mesh = 64, 16, _mesh((1, 8, 1))
    table = rng.standard_normal((words, dim), np.float32)
    tokens = rng.integers(0, words, (8, seq), np.int32)
    tokens[0, 0], tokens[3, 1], tokens[5, 2:4] = -1, words, 7
    weights = rng.standard_normal((8, seq, dim), np.float32)

    def loss(table, tokens):
        x = embed(tokens, table, "bfloat16", Sharding())
        known = jnp.where(jnp.isnan(x), 0, x)
        return jnp.sum(known.astype(jnp.float32) * weights), x

    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    given = place(table, P("fsdp", None)), place(tokens, P(BATCH, None))
    step = jax.jit(jax.grad(loss, has_aux=True), out_shardings=(given[0].sharding, None))
    with jax.set_mesh(mesh):
        program = step.lower(*given).compile()
        gradient, x = program(*given)
    outside = (tokens < 0) | (tokens >= words)
    expected = np.where(outside[..., None], np.nan, table[tokens % words].astype(x.dtype))
    np.testing.assert_array_equal(x.astype(jnp.float32), expected.astype(np.float32))
    added = np.zeros(table.shape)
    # The loss's gradient is rounded as the vectors are; the sums are float32, of few terms.
    np.add.at(added, tokens[~outside], weights.astype(x.dtype).astype(np.float64)[~outside])
    np.testing.assert_allclose(gradient, added, rtol=1e-6, atol=1e-6)
    moved = {match[1] for match in re.finditer(r"= \w+\[(\d+,[\d,]+)\]\S* all-", program.as_text())}
    assert (f"{words},{dim}" in moved) == (seq == 16)
    assert (f"8,{seq},{dim}" in moved) == (seq == 4)
