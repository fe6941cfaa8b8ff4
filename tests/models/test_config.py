import dataclasses
import math

import jax
import pytest

from normfuse.models import parameters
from normfuse.models.config import (
    PRESETS,
    RopeScaling,
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
    [{}, {"qk_norm": True}, {"attention_bias": True}],
)
@pytest.mark.parametrize("tied", [True, False])
def test_num_parameters_counts_the_models_own(small, changes, tied):
    config = dataclasses.replace(small, tie_embeddings=tied, **changes)
    for framework in "nnx", "eqx":
        leaves = jax.tree.leaves(build(framework, config).abstract)
        assert num_parameters(config) == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"num_layers": 2.0}, "num_layers=2.0 must be an integer"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 must be below 2**31"),
        ({"norm_eps": -1.0}, "norm_eps=-1.0 must be finite and not negative"),
        ({"rope_theta": 1e39}, "rope_theta=1e+39 must be finite"),  # no float32 is
        ({"rope_scaling": {}}, "rope_scaling={} must be a RopeScaling or None"),
        ({"qk_norm": 1}, "qk_norm=1 must be one of True, False"),
        ({"remat": "full"}, "remat='full' must be one of 'none', 'block', 'dots'"),
        ({"implementation": "cuda"}, "implementation='cuda' must be one of"),
        ({"implementation": ("native", "cuda")}, "implementation='cuda' must be one of"),
        ({"sliding_window": 0}, "sliding_window=0 must be an integer of at least 1"),
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
        ({"factor": math.inf}, "factor=inf must be at least 1, and finite"),
        ({"low_freq_factor": 4.0}, "(4.0, 4.0) must be positive and ascending"),
        ({"original_max_seq_len": 0}, "original_max_seq_len=0 must be an integer of at least 1"),
    ],
)
def test_rope_scaling_rejects(changes, message):
    with pytest.raises(ValueError) as error:
        RopeScaling(**changes)
    assert message in str(error.value)
