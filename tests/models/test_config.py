import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from normfuse.models import parameters
from normfuse.models.config import (
    PRESETS,
    RopeScaling,
    TransformerConfig,
    flops_per_token,
    num_parameters,
)
from normfuse.models.functional import build

# 124 M and 350 M are GPT-2's sizes, 1.24 B and 8.03 B what Llama 3 states.
SIZES = {"tiny": 0.7e6, "small": 124e6, "medium": 350e6, "1b": 1.236e9, "8b": 8.03e9}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_the_size_it_is_named_after(preset):
    count = num_parameters(PRESETS[preset])
    assert count == pytest.approx(SIZES[preset], rel=0.05 if preset == "tiny" else 0.03)
    assert count == sum(math.prod(shape) for shape in parameters.shapes(PRESETS[preset]).values())


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_largest_preset_is_built_without_allocating(framework):
    model = build(framework, PRESETS["8b"])
    leaves = jax.tree.leaves(model.abstract)
    assert sum(leaf.size for leaf in leaves) == num_parameters(PRESETS["8b"])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": True},
        {"attention_bias": True},
        {"norms": "both", "qk_norm": True, "qk_norm_over": "projection"},
        {"norms": "post", "gated": False},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_num_parameters_counts_the_models_own(small, changes, tied):
    config = dataclasses.replace(small, tie_embeddings=tied, **changes)
    for framework in "nnx", "eqx":
        leaves = jax.tree.leaves(build(framework, config).abstract)
        assert num_parameters(config) == sum(leaf.size for leaf in leaves)


def test_flops_per_token_counts_the_products_of_a_training_step(small, equations):
    model, seq = build("nnx", small), 16
    loss = lambda params: jnp.sum(model.apply(params, jnp.zeros((2, seq), jnp.int32)))
    step = jax.make_jaxpr(jax.grad(loss))(model.abstract)
    counted = sum(_dot_flops(eqn) for eqn in equations(step.jaxpr))
    assert counted == flops_per_token(small, seq) * 2 * seq


def _dot_flops(eqn) -> int:
    # Attention has two products, and four in its backward but for the scores computed again.
    products = {"normfuse_attention": 2, "normfuse_attention_gradients": 4}
    if count := products.get(eqn.primitive.name):
        q, k = (operand.aval for operand in eqn.invars[:2])
        return count * 2 * q.size * k.shape[-3]
    if eqn.primitive.name != "dot_general":
        return 0
    ((contracted, _), _) = eqn.params["dimension_numbers"]
    summed = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    return 2 * summed * math.prod(eqn.outvars[0].aval.shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"dim": 0}, "dim=0 must be an integer of at least 1"),
        ({"num_layers": 2.0}, "num_layers=2.0 must be an integer"),
        ({"vocab_size": True}, "vocab_size=True must be an integer"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 must be below 2**31"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be finite and not negative"),
        ({"norm_eps": math.nan}, "norm_eps=nan must be finite"),
        ({"norm_eps": "1e-5"}, "norm_eps='1e-5' must be finite"),
        ({"rope_theta": math.inf}, "rope_theta=inf must be finite"),
        ({"rope_theta": 1e39}, "rope_theta=1e+39 must be finite"),  # no float32 is
        ({"rope_theta": 10**400}, "rope_theta=1000"),
        ({"rope_scaling": {}}, "rope_scaling={} must be a RopeScaling or None"),
        ({"qk_norm": 1}, "qk_norm=1 must be one of True, False"),
        ({"dtype": "fp8"}, "dtype='fp8' must be one of 'float32', 'bfloat16'"),
        ({"param_dtype": "int8"}, "param_dtype='int8' must be one of"),
        ({"remat": "full"}, "remat='full' must be one of 'none', 'block', 'dots'"),
        ({"attention": "flash"}, "attention='flash' must be one of 'auto', 'xla', 'cudnn'"),
        ({"implementation": "cuda"}, "implementation='cuda' must be one of"),
        ({"implementation": ("native", "cuda")}, "implementation='cuda' must be one of"),
        ({"norms": "none"}, "norms='none' must be one of 'pre', 'post', 'both'"),
        ({"norm_offset": math.inf}, "norm_offset=inf must be finite"),
        ({"qk_norm_over": "row"}, "qk_norm_over='row' must be one of 'head', 'projection'"),
        ({"query_scale_dim": 0}, "query_scale_dim=0 must be finite, above 0"),
        ({"attention_softcap": -1.0}, "attention_softcap=-1.0 must be finite, above 0"),
        ({"logits_softcap": "30"}, "logits_softcap='30' must be finite, above 0"),
        ({"sliding_window": 0}, "sliding_window=0 must be an integer of at least 1"),
        ({"layer_pattern": ""}, "layer_pattern='' must be letters L (local) and G (global)"),
        ({"layer_pattern": "LX"}, "layer_pattern='LX' must be letters L"),
        ({"local_rope_theta": 100.0}, "local_rope_theta=100.0 needs a sliding_window"),
        ({"activation": "tanh"}, "activation='tanh' must be one of 'silu'"),
        ({"gated": 1}, "gated=1 must be one of True, False"),
        ({"attention": "cudnn", "attention_softcap": 5.0}, "attention='cudnn' cannot go with att"),
        ({"quantization": "int8"}, "quantization='int8' must be one of None, 'fp8'"),
        ({"quantization": "fp8", "dtype": "float64"}, "cannot go with dtype='float64'"),
    ],
)
def test_config_rejects(small, changes, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(small, **changes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 0.5}, "factor=0.5 must be at least 1"),
        ({"factor": "8"}, "factor='8' must be at least 1"),
        ({"factor": math.inf}, "factor=inf must be at least 1, and finite"),
        ({"low_freq_factor": math.nan}, "(nan, 4.0) must be positive and ascending"),
        ({"low_freq_factor": 4.0}, "(4.0, 4.0) must be positive and ascending"),
        ({"original_max_seq_len": 0}, "original_max_seq_len=0 must be an integer of at least 1"),
    ],
)
def test_rope_scaling_rejects(changes, message):
    with pytest.raises(ValueError) as error:
        RopeScaling(**changes)
    assert message in str(error.value)


def test_config_is_hashable_and_frozen(small):
    assert hash(small) == hash(dataclasses.replace(small))
    with pytest.raises(dataclasses.FrozenInstanceError):
        small.dim = 1
    assert isinstance(small, TransformerConfig)
