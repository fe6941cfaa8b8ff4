import dataclasses
import math
import os
import re
import subprocess
import sys

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
# Arrays that are gathered, and summed, on each mesh (the table of docs/guides/parallelism.md):
# first those outside the layers (embedding, last norm, head, loss), then what every layer adds.
GATHERED = {
    ((8, 1, 1), False): (0, 0),
    ((1, 8, 1), False): (2, 7),
    ((1, 1, 2), False): (0, 0),
    ((1, 1, 2), True): (2, 4),
    ((2, 2, 2), False): (2, 7),
    ((2, 2, 2), True): (4, 13),
}
SUMMED = {
    ((8, 1, 1), False): (4, 9),
    ((1, 8, 1), False): (4, 9),
    ((1, 1, 2), False): (5, 7),
    ((1, 1, 2), True): (6, 9),
    ((2, 2, 2), False): (10, 23),
    ((2, 2, 2), True): (10, 23),
}


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

    return step.as_text(), run


def _collectives(hlo, kind):
    """Shapes of the results of every collective of a kind, over all replicas of tuples."""
    lines = re.findall(rf"= (.*?) {kind}(?:-start)?\(", hlo)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]


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
    hlo, run = _compiled(model, _mesh(sizes), jit)
    _check_gradient(*run(values, rows), loss, gradient)
    _check_communication(deep, hlo, sizes, sharding)


def _check_gradient(got_loss, got, loss, gradient):
    """Those of one device."""
    assert abs(got_loss - loss) < 1e-5
    for name, value in parameters.to_dict(got).items():
        assert np.abs(np.asarray(value) - gradient[name]).max() < 1e-5, name


def _check_communication(config, hlo, sizes, sharding):
    gathered = _collectives(hlo, "all-gather")
    shapes = parameters.shapes(config)
    # Elements a device multiplies with: FSDP's pieces joined, tensor parallelism's part kept.
    parts = {math.prod(shape) // sizes[2] for shape in shapes.values() if len(shape) == 2}
    activations = [shape for shape in gathered if math.prod(shape) not in parts]
    for kind in "all-to-all", "collective-permute":
        assert not _collectives(hlo, kind)
    if math.prod(sizes) > 1:
        key = sizes, sharding != Sharding()
        expected = [
            outside + each * config.num_layers for outside, each in (GATHERED[key], SUMMED[key])
        ]
        assert [len(gathered), len(_collectives(hlo, "all-reduce"))] == expected
    batch = 8 // (sizes[0] * sizes[1])
    if sharding == Sharding():
        assert not activations
        assert bool(gathered) == (sizes[1] > 1)
    else:
        # Each half of a block gathers its input forward and its output's gradient backward; the
        # output projection gathers once, and so does the embedding's gradient.
        assert activations == [(batch, SEQ, config.dim)] * (4 * config.num_layers + 2)
    # Without data and FSDP every device sees the whole batch: no gradient is left to be summed.
    if sizes[0] * sizes[1] == 1 and sizes[2] > 1:
        reduced = {shape for shape in _collectives(hlo, "all-reduce") if len(shape) == 2}
        assert reduced <= {(batch, SEQ)}  # the loss's maximum and sum over the vocabulary


@pytest.mark.parametrize(
    "framework, remat, keep",
    [("nnx", "block", False), ("eqx", "block", True), ("nnx", "dots", True)],
    indirect=["framework"],
)
def test_kernels_are_gathered_again_unless_kept(
    deep, jit, eight_devices, unsharded, framework, remat, keep
):
    values, rows, loss, gradient = unsharded
    config = dataclasses.replace(deep, remat=remat)
    model = build(framework, config, Sharding(keep_gathered=keep))
    hlo, run = _compiled(model, _mesh((1, 8, 1)), jit)
    outside, each = GATHERED[(1, 8, 1), False]
    times = 1 if keep else 2
    assert len(_collectives(hlo, "all-gather")) == outside + times * each * config.num_layers
    outside, each = SUMMED[(1, 8, 1), False]
    assert len(_collectives(hlo, "all-reduce")) == outside + each * config.num_layers
    _check_gradient(*run(values, rows), loss, gradient)


def test_explicit_mesh_gives_the_same_gradient(deep, jit, eight_devices, unsharded, framework):
    values, rows, loss, gradient = unsharded
    model = build(framework, deep)
    mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Explicit,) * 3)
    with jax.set_mesh(mesh):
        places = model.shardings(model.abstract, mesh)
        params = jax.device_put(model.from_dict(values), places)
        tokens = jax.device_put(rows, NamedSharding(mesh, P(BATCH, None)))
        typed = jax.eval_shape(model.apply, params, tokens[:, :-1])
        assert typed.sharding.spec == P(BATCH, None, "tensor")
        step = jit(jax.value_and_grad(lambda params, tokens: _loss(model, params, tokens)))
        got_loss, got = step(params, tokens)
    _check_gradient(got_loss, got, loss, gradient)
    assert jax.tree.all(jax.tree.map(lambda x, place: x.sharding == place, got, places))


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


_PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from normfuse.models.config import TransformerConfig
from normfuse.models.functional import build
from normfuse.models.sharding import Sharding

def compile(tied, sharding):
    config = TransformerConfig(vocab_size=64, dim=32, num_layers=1, num_heads=4, num_kv_heads=2,
                               head_dim=8, mlp_dim=64, max_seq_len=16, tie_embeddings=tied)
    model = build("nnx", config, sharding)
    places = model.shardings(model.abstract, mesh)
    loss = lambda params, tokens: jnp.mean(jax.nn.logsumexp(model.apply(params, tokens), -1))
    batch = NamedSharding(mesh, P(("data", "fsdp"), None))
    step = jax.jit(jax.grad(loss), in_shardings=(places, batch), out_shardings=places)
    step.lower(model.abstract, jax.ShapeDtypeStruct((8, 16), jnp.int32)).compile()

mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
jax.set_mesh(mesh)
compile(True, Sharding())
compile(False, Sharding.sequence_parallel())

print("The warning, provoked:", file=sys.stderr, flush=True)
place = lambda x, *spec: jax.lax.with_sharding_constraint(x, P(*spec))
bad = lambda x: place(2 * place(x, None, "data", "fsdp"), ("fsdp", "tensor")) + 1
jax.jit(bad).lower(jax.ShapeDtypeStruct((8, 8, 8), jnp.float32)).compile()
"""


def test_nothing_is_rematerialised_in_full(eight_devices):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0"}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 0, run.stderr
    ours, provoked = run.stderr.split("The warning, provoked:")
    warning = "Involuntary full rematerialization"
    assert warning in provoked  # else its text has changed, and what follows proves nothing
    assert warning not in ours


def test_constrain_does_nothing_without_a_mesh():
    x = jnp.ones((4, 6))
    assert constrain(x, P("data", "tensor")) is x
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: constrain(x, P("data")))(x))
    with jax.set_mesh(_mesh((1, 1, 1))):
        assert constrain(x, P("data", "tensor")) is x


def test_constrain_places_on_the_mesh_in_context(eight_devices, jit):
    x = jnp.arange(32.0).reshape(8, 4)
    mesh = _mesh((4, 2), ("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        y = jit(lambda x: constrain(x, P(BATCH, "tensor")))(x)
    assert y.sharding == NamedSharding(mesh, P("fsdp", "tensor"))
    np.testing.assert_array_equal(y, x)


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


@pytest.mark.parametrize("preset", PRESETS)
def test_every_parameter_has_a_spec(preset):
    for name, shape in parameters.shapes(PRESETS[preset]).items():
        assert len(Sharding().parameter(name)) == len(shape), name
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
        ({"num_kv_heads": 4, "vocab_size": 50}, {"tensor": 4}, {}, "vocab_size=50 cannot be"),
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


def test_shardings_name_a_parameter_that_the_mesh_does_not_divide(small, eight_devices):
    model = build("nnx", dataclasses.replace(small, mlp_dim=42))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.\w+\.kernel of shape \(.*'tensor': 8"):
        model.shardings(model.abstract, _mesh((1, 1, 8)))


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
