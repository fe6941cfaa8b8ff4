import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType

from normfuse.models import tensor_file
from normfuse.models.config import RopeScaling
from normfuse.models.functional import build
from normfuse.models.huggingface import load, save
from normfuse.models.huggingface_config import from_huggingface, to_huggingface

FAMILIES = {
    "llama": {},
    "llama tied": {"tie_embeddings": True},
    "qwen2": {"attention_bias": True, "num_heads": 3, "num_kv_heads": 1},
    "qwen3": {"qk_norm": True},
}


@pytest.fixture(params=FAMILIES)
def config(small, request):
    return dataclasses.replace(small, **FAMILIES[request.param])


def _llama(path, tokens):
    """Logits of a checkpoint folder, from its own names and settings, in float64."""
    settings = json.loads((path / "config.json").read_text())
    weights = {}
    for file in path.glob("*.safetensors"):
        arrays = tensor_file.read(file)
        weights.update({name: np.asarray(array, np.float64) for name, array in arrays.items()})
    norm = lambda x, w: (
        w * (x / np.sqrt((x * x).mean(-1, keepdims=True) + settings["rms_norm_eps"]))
    )
    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(settings["num_hidden_layers"]):
        at = lambda name, i=i: weights[f"model.layers.{i}.{name}.weight"]
        h = norm(x, at("input_layernorm"))
        x = x + _self_attention(settings, weights, f"model.layers.{i}.self_attn", h, norm)
        h = norm(x, at("post_attention_layernorm"))
        gate = h @ at("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    head = "model.embed_tokens" if settings["tie_word_embeddings"] else "lm_head"
    return norm(x, weights["model.norm.weight"]) @ weights[f"{head}.weight"].T


def _self_attention(settings, weights, scope, x, norm):
    seq, width = x.shape[0], settings["head_dim"]
    frequencies = 1 / settings["rope_theta"] ** (np.arange(0, width, 2) / width)
    angles = np.arange(seq)[:, None] * np.tile(frequencies, 2)  # (seq, width)
    halves = lambda x: np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], axis=-1)

    def heads(name):
        y = x @ weights[f"{scope}.{name}_proj.weight"].T
        y = y + weights.get(f"{scope}.{name}_proj.bias", 0)
        y = y.reshape(seq, -1, width).transpose(1, 0, 2)  # (heads, seq, width)
        if f"{scope}.{name}_norm.weight" in weights:
            y = norm(y, weights[f"{scope}.{name}_norm.weight"])
        return y if name == "v" else y * np.cos(angles) + halves(y) * np.sin(angles)

    repeats = settings["num_attention_heads"] // settings["num_key_value_heads"]
    q, k, v = heads("q"), heads("k").repeat(repeats, 0), heads("v").repeat(repeats, 0)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(width)
    scores[:, ~np.tri(seq, dtype=bool)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    out = (shares / shares.sum(-1, keepdims=True)) @ v
    return out.transpose(1, 0, 2).reshape(seq, -1) @ weights[f"{scope}.o_proj.weight"].T


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_saved_checkpoint_computes_the_same_elsewhere(config, noisy, rng, tmp_path, framework, jit):
    model = build(framework, config)
    params = model.from_dict(noisy(config, rng))
    save(tmp_path, model, params)
    tokens = rng.integers(0, config.vocab_size, 10)
    expected = _llama(tmp_path, tokens)
    got = jit(model.apply)(params, tokens[None])[0]
    # 100 roundings, as in test_transformer.py.
    assert np.abs(got - expected).max() < 100 * 2**-24 * np.abs(expected).max()


@pytest.mark.parametrize("into", ["nnx", "eqx"])
def test_round_trip_in_several_files_is_exact(config, noisy, rng, tmp_path, into):
    values = noisy(config, rng)
    model = build("nnx", config)
    save(tmp_path, model, model.from_dict(values), max_file_bytes=4000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded, params = load(tmp_path, into)
    assert loaded == build(into, config)
    for name, value in loaded.to_dict(params).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, values[name])


def test_saving_again_leaves_nothing_of_before(small, noisy, rng, tmp_path):
    model = build("nnx", small)
    save(tmp_path, model, model.from_dict(noisy(small, rng)), max_file_bytes=4000)
    values = noisy(small, rng)
    save(tmp_path, model, model.from_dict(values))
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    loaded, params = load(tmp_path, "nnx")
    np.testing.assert_array_equal(loaded.to_dict(params)["norm.scale"], values["norm.scale"])


def test_bfloat16_is_stored_and_widened(small, noisy, rng, tmp_path):
    model, values = build("nnx", small), noisy(small, rng)
    save(tmp_path, model, model.from_dict(values), dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    rounded = values["head.kernel"].astype(ml_dtypes.bfloat16)
    for param_dtype in "float32", "bfloat16":
        loaded, params = load(tmp_path, "eqx", param_dtype=param_dtype, dtype="bfloat16")
        assert loaded.config.param_dtype == param_dtype
        head = loaded.to_dict(params)["head.kernel"]
        assert head.dtype == param_dtype
        np.testing.assert_array_equal(head, rounded.astype(param_dtype))


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
def test_load_puts_every_shard_where_it_belongs(
    small, noisy, rng, tmp_path, eight_devices, framework
):
    values = noisy(small, rng)
    model = build("nnx", small)
    save(tmp_path, model, model.from_dict(values))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    loaded, params = load(tmp_path, framework, mesh=mesh)
    places = loaded.shardings(loaded.abstract, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, places))
    for name, value in loaded.to_dict(params).items():
        np.testing.assert_array_equal(value, values[name])


def test_files_are_those_of_the_safetensors_package(rng, tmp_path):
    package = pytest.importorskip("safetensors.flax")
    arrays = {
        name: rng.standard_normal((3, 5)).astype(dtype)
        for name, dtype in (("a", np.float32), ("b", np.float16), ("c", ml_dtypes.bfloat16))
    }
    arrays["empty"] = np.zeros((0, 4), np.float32)
    tensor_file.write(tmp_path / "ours", arrays)
    theirs = package.load_file(tmp_path / "ours")
    package.save_file({k: jnp.asarray(v) for k, v in arrays.items()}, tmp_path / "theirs")
    ours = tensor_file.read(tmp_path / "theirs")
    for name, array in arrays.items():
        for other in theirs[name], ours[name]:
            assert other.dtype == array.dtype
            np.testing.assert_array_equal(other, array)


def test_config_round_trip(config):
    assert from_huggingface(to_huggingface(config)) == config
    assert from_huggingface(to_huggingface(config), remat="block").remat == "block"


def test_llama_31_config_is_read(small):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = to_huggingface(small) | {"rope_theta": 500000.0, "head_dim": None}
    config |= {"hidden_size": 32, "num_key_value_heads": None}
    before = from_huggingface(config | {"rope_scaling": scaling})
    assert (before.head_dim, before.num_kv_heads, before.rope_theta) == (8, 4, 500000.0)
    assert before.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    del config["rope_theta"]  # from version 5 of transformers on
    after = from_huggingface(config | {"rope_parameters": scaling | {"rope_theta": 500000.0}})
    assert after == before
    assert from_huggingface(to_huggingface(before)) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' must be one of 'llama', 'qwen2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
    ],
)
def test_configs_of_other_models_are_refused(small, changes, message):
    with pytest.raises(ValueError) as error:
        from_huggingface({**to_huggingface(small), **changes})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True, "qk_norm": True}, "both attention_bias and qk_norm"),
        ({"attention_bias": True}, "num_heads=4 times head_dim=8 must be dim=24"),
    ],
)
def test_configs_no_family_has_are_not_written(small, changes, message):
    with pytest.raises(ValueError, match=message):
        to_huggingface(dataclasses.replace(small, **changes))


def _rewrite(path, edit):
    arrays = {name: np.array(array) for name, array in tensor_file.read(path).items()}
    edit(arrays)
    tensor_file.write(path, arrays)


def test_load_rejects_arrays_that_do_not_fit(small, noisy, rng, tmp_path):
    model, file = build("nnx", small), tmp_path / "model.safetensors"
    save(tmp_path, model, model.from_dict(noisy(small, rng)))
    _rewrite(file, lambda arrays: arrays.update({"model.rotary_emb.inv_freq": np.zeros(4, "f4")}))
    load(tmp_path, "nnx")  # a buffer, not a parameter
    _rewrite(file, lambda arrays: arrays.update({"model.bias": np.zeros(4, "f4")}))
    with pytest.raises(ValueError, match="holds more than the model: model.bias"):
        load(tmp_path, "nnx")
    _rewrite(file, lambda arrays: [arrays.pop("model.bias"), arrays.pop("lm_head.weight")])
    with pytest.raises(ValueError, match="lacks lm_head.weight"):
        load(tmp_path, "nnx")
    _rewrite(file, lambda arrays: arrays.update({"lm_head.weight": np.zeros((24, 48), "f4")}))
    with pytest.raises(ValueError, match=r"head.kernel|lm_head.weight must have shape \(48, 24\)"):
        load(tmp_path, "nnx")


def test_damaged_files_are_named(small, noisy, rng, tmp_path):
    model, file = build("nnx", small), tmp_path / "model.safetensors"
    save(tmp_path, model, model.from_dict(noisy(small, rng)))
    content = file.read_bytes()
    for damaged in content[:-1], content[:100], b"", b"\x10" + 7 * b"\0" + 16 * b"?":
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match="model.safetensors"):
            load(tmp_path, "nnx")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load(tmp_path, "nnx")


def test_integers_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="a is int32; only floating"):
        tensor_file.write(tmp_path / "file", {"a": np.zeros(3, np.int32)})
    assert not list(tmp_path.iterdir())
