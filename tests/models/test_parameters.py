import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normfuse.models import parameters
from normfuse.models.functional import build


@pytest.fixture(scope="module")
def initial(small, jit):
    config = dataclasses.replace(small, attention_bias=True, qk_norm=True, dim=512, vocab_size=512)
    key = jax.random.key(0)
    values = jit(lambda key: parameters.initial_parameters(config, key))(key)
    return {name: np.asarray(value) for name, value in values.items()}


def test_initial_scales_are_one_and_biases_zero(initial):
    for name, value in initial.items():
        if value.ndim == 1:
            np.testing.assert_array_equal(value, float(name.endswith("scale")))


def test_initial_matrices_are_centred_and_as_wide_as_said(initial):
    for name, value in initial.items():
        if value.ndim == 2:
            into_residual = name.split(".")[-2] in ("o", "down")
            std = 0.02 / np.sqrt(2 * 2) if into_residual else 0.02  # two layers
            # Four standard errors of a uniform draw's mean and variance.
            assert abs(value.mean()) < 4 * std / np.sqrt(value.size), name
            assert abs(value.var() / std**2 - 1) < 4 * np.sqrt(0.8 / value.size), name
            assert np.abs(value).max() <= np.float32(np.sqrt(3) * std), name


def test_initial_matrices_differ_from_each_other(initial):
    first = {value.flat[0] for value in initial.values() if value.ndim == 2}
    assert len(first) == sum(value.ndim == 2 for value in initial.values())


def test_initial_values_do_not_depend_on_the_rest_of_the_model(small, jit):
    name, key = "layers.0.mlp.up.kernel", jax.random.key(5)
    other = dataclasses.replace(
        small, num_heads=2, vocab_size=16, attention_bias=True, param_dtype="bfloat16"
    )
    draw = lambda config: jit(lambda key: parameters.initial_parameters(config, key)[name])(key)
    np.testing.assert_array_equal(draw(small).astype(jnp.bfloat16), draw(other))


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_dictionary_round_trip(small, noisy, rng, framework):
    model = build(framework, dataclasses.replace(small, qk_norm=True, attention_bias=True))
    values = noisy(model.config, rng)
    params = model.from_dict(values)
    assert jax.tree.structure(params) == jax.tree.structure(model.abstract)
    back = model.to_dict(params)
    assert back.keys() == values.keys() == parameters.shapes(model.config).keys()
    for name, value in values.items():
        np.testing.assert_array_equal(back[name], value)


def test_frameworks_store_kernels_in_their_own_layout(small, noisy, rng):
    values = noisy(small, rng)
    flax = build("nnx", small).from_dict(values)
    equinox = build("eqx", small).from_dict(values)
    kernel = values["layers.1.mlp.down.kernel"]
    np.testing.assert_array_equal(flax["layers"][1]["mlp"]["down"]["kernel"], kernel)
    np.testing.assert_array_equal(equinox.layers[1].mlp.down.weight, kernel.T)
    np.testing.assert_array_equal(equinox.embed.weight, values["embed.embedding"])
    np.testing.assert_array_equal(equinox.norm.weight, values["norm.scale"])
    np.testing.assert_array_equal(equinox.head.weight, values["head.kernel"].T)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.pop("norm.scale"), "missing norm.scale, left over none"),
        (lambda values: values.update(extra=values["norm.scale"]), "missing none, left over extra"),
        (
            lambda values: values.update({"head.kernel": values["head.kernel"].T}),
            "head.kernel must have shape (24, 48), got (48, 24)",
        ),
    ],
)
@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_from_dict_rejects(small, noisy, rng, framework, edit, message):
    values = noisy(small, rng)
    edit(values)
    with pytest.raises(ValueError) as error:
        build(framework, small).from_dict(values)
    assert message in str(error.value)
