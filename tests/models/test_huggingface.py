"""Checkpoints in Hugging Face's format: ours read elsewhere, theirs read here.

`transformers` itself recorded what it saved and computed, and is tested live where it is installed.
`python tests/huggingface_models.py` made the records, which name its version and torch's.
"""

import dataclasses
import functools
import json
import stat

import huggingface_models
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from combinations import half
from huggingface_models import FOLDER, MODELS, write
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from normfuse.models import huggingface
from normfuse.models.config import RopeScaling
from normfuse.models.functional import build
from normfuse.models.generate import generate
from normfuse.models.huggingface import from_huggingface, load, save, to_huggingface

FAMILIES = {
    "llama": {},
    "llama tied": {"tie_embeddings": True},
    "qwen2": {"attention_bias": True, "num_heads": 3, "num_kv_heads": 1},
    "qwen3": {"qk_norm": True},
    "mistral": {"sliding_window": 6},
}


@pytest.fixture(params=FAMILIES)
def config(small, request):
    return dataclasses.replace(small, **FAMILIES[request.param])


def _arrays(folder):
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: array for file in files for name, array in file.items()}


def _settings(folder):
    return json.loads((folder / "config.json").read_text())


# ---------------------------------------------------------------- with transformers itself


def _assert_equal(ours, theirs):
    # Both are float32: two layers of sums of up to 40 products and a softmax. Some 20 roundings in
    # a row, each relative to the largest value around, and as many again in the length summed: 100
    # of the largest logit for each of the two.
    assert np.abs(ours - theirs).max() < 200 * 2**-24 * np.abs(theirs).max()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a recorded model by its name, and the results of `transformers` with it."""

    @functools.cache
    def find(name):
        expected = np.load(FOLDER / name / "expected.npz")
        return write(name, tmp_path_factory.mktemp(name)), expected

    return find


@pytest.mark.parametrize("name, framework", half(MODELS, ["eqx", "nnx"]))
def test_logits_are_those_recorded(recorded, name, framework, jit):
    folder, expected = recorded(name)
    model, params = load(folder, framework)
    _assert_equal(jit(model.apply)(params, expected["tokens"]), expected["logits"])
    assert np.ptp(expected["logits"]) > 1


def test_a_framework_is_asked_for_and_the_model_is_called(recorded):
    folder, expected = recorded("llama")
    with pytest.raises(ValueError, match="framework=None must be one of 'nnx', 'eqx'"):
        load(folder)
    model, params = load(folder, "nnx")
    np.testing.assert_array_equal(
        model(params, expected["tokens"]), model.apply(params, expected["tokens"])
    )


# In each framework some; the cache is one. Windows are shorter than prompt and text.
@pytest.mark.parametrize("name", ["llama31_tied", "qwen3", "mistral"])
def test_greedy_text_is_that_recorded(recorded, name):
    folder, expected = recorded(name)
    model, params = load(folder, "eqx" if name in ("mistral", "qwen3") else "nnx")
    found = generate(model, params, expected["prompts"], 12, temperature=0)
    np.testing.assert_array_equal(found, expected["drawn"])


@pytest.mark.parametrize("name", MODELS)
def test_what_was_loaded_is_saved_with_the_same_names_and_settings(recorded, name, tmp_path):
    folder, _ = recorded(name)
    model, params = load(folder, "eqx")
    save(tmp_path, model, params, dtype="bfloat16")
    theirs, ours = _arrays(folder), _arrays(tmp_path)
    assert set(ours) == set(theirs)
    for key, array in theirs.items():
        assert ours[key].dtype == array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(ours[key], array)
    ours, theirs = _settings(tmp_path), _settings(folder)
    shared = set(ours) & set(theirs)
    assert {"model_type", "hidden_size", "num_key_value_heads", "rms_norm_eps"} <= shared
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


@pytest.mark.filterwarnings("ignore")  # two large packages warn about themselves
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_with_the_package_itself(name, tmp_path, jit):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = huggingface_models.make(name, seed=1)
    expected = huggingface_models.results(model, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    ours, params = load(tmp_path / "theirs", "nnx")
    _assert_equal(jit(ours.apply)(params, expected["tokens"]), expected["logits"])

    save(tmp_path / "ours", ours, params)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(
        huggingface_models.results(again, seed=1)["logits"], expected["logits"]
    )


# ---------------------------------------------------------------- saving


def test_round_trip_is_exact(config, noisy, rng, tmp_path):
    into = "nnx" if config.num_kv_heads == 1 else "eqx"
    values = noisy(config, rng)
    model = build("nnx" if into == "eqx" else "eqx", config)
    save(tmp_path, model, model.from_dict(values))
    loaded, params = load(tmp_path, into)
    assert loaded == build(into, config)
    for name, value in loaded.to_dict(params).items():
        assert value.dtype == jnp.float32
        np.testing.assert_array_equal(value, values[name])


def test_bfloat16_is_stored_and_widened(small, noisy, rng, tmp_path):
    model, values = build("nnx", small), noisy(small, rng)
    save(tmp_path, model, model.from_dict(values), dtype="bfloat16")
    assert _settings(tmp_path)["torch_dtype"] == "bfloat16"
    rounded = values["head.kernel"].astype(ml_dtypes.bfloat16)
    for param_dtype in "float32", "bfloat16":
        loaded, params = load(tmp_path, "eqx", param_dtype=param_dtype, dtype="bfloat16")
        assert loaded.config.param_dtype == param_dtype
        head = loaded.to_dict(params)["head.kernel"]
        assert head.dtype == param_dtype
        np.testing.assert_array_equal(head, rounded.astype(param_dtype))


def test_load_puts_every_shard_where_it_belongs(small, noisy, rng, tmp_path, eight_devices):
    values = noisy(small, rng)
    model = build("nnx", small)
    save(tmp_path, model, model.from_dict(values))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    loaded, params = load(tmp_path, "eqx", mesh=mesh)
    places = loaded.shardings(loaded.abstract, mesh)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, params, places))
    for name, value in loaded.to_dict(params).items():
        np.testing.assert_array_equal(value, values[name])


# ---------------------------------------------------------------- folders


def _assert_holds(folder, values, **overrides):
    model, params = load(folder, "nnx", **overrides)
    for name, value in model.to_dict(params).items():
        np.testing.assert_array_equal(value, values[name])


def test_a_folder_is_new_and_complete(small, noisy, rng, tmp_path):
    model, values = build("nnx", small), noisy(small, rng)
    params = model.from_dict(values)
    folder = tmp_path / "models" / "copy"
    save(folder, model, params, files={"tokenizer.json": "{}"})
    modes = {stat.filemode(file.stat().st_mode) for file in folder.iterdir()}
    assert len(modes) == 1  # those of any other file, not the library's -rw-------
    assert (folder / "tokenizer.json").read_text() == "{}"
    _assert_holds(folder, values)
    with pytest.raises(FileExistsError, match="copy exists already: save to a"):
        save(folder, model, params)
    assert [path.name for path in folder.parent.iterdir()] == ["copy"]


def test_saving_that_fails_leaves_nothing(small, tmp_path, monkeypatch):
    def full(arrays, file, **options):
        raise OSError(28, "No space left on device", str(file))

    monkeypatch.setattr(huggingface, "save_file", full)
    model = build("nnx", small)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "new", model, model.init(jax.random.key(0)))
    assert not list(tmp_path.iterdir())


def test_a_single_file_is_read_rather_than_an_older_index(small, noisy, rng, tmp_path):
    """`transformers` reads it too; of the index's files none need be there."""
    model, values = build("nnx", small), noisy(small, rng)
    save(tmp_path, model, model.from_dict(values))
    index = {"weight_map": dict.fromkeys(_arrays(tmp_path), "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    _assert_holds(tmp_path, values)


def test_a_stored_head_of_a_model_called_tied_is_not_dropped(small, noisy, rng, tmp_path):
    """One that is the embedding, as older files store a tied one, is tied."""
    model, values = build("nnx", small), noisy(small, rng)
    save(tmp_path, model, model.from_dict(values))
    settings = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="lm_head.weight is not .*Pass tie_embeddings=False"):
        _assert_holds(tmp_path, values)
    _assert_holds(tmp_path, values, tie_embeddings=False)
    tied = {name: value for name, value in values.items() if not name.startswith("head.")}
    _assert_holds(tmp_path, tied, tie_embeddings=True)
    embedding = values["embed.embedding"]
    _rewrite(tmp_path / "model.safetensors", lambda x: x.update({"lm_head.weight": embedding}))
    _assert_holds(tmp_path, tied)


# ---------------------------------------------------------------- configurations


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
    both = {"rope_scaling": scaling, "rope_parameters": scaling | {"rope_theta": 500000.0}}
    assert from_huggingface(config | both) == before
    assert from_huggingface(to_huggingface(before)) == before


def test_settings_that_are_missing_are_those_of_the_family(small):
    """Its own files leave out values equal to its defaults, and older ones later settings."""
    # Heads of keys, and a head's width, which is not hidden_size / num_attention_heads in all.
    heads = {"mistral": (8, 12), "qwen2": (32, 12), "qwen3": (32, 128), "llama": (64, 12)}
    for name, expected in heads.items():
        settings = to_huggingface(dataclasses.replace(small, **FAMILIES[name]))
        settings = {
            k: v for k, v in settings.items() if k not in ("num_key_value_heads", "head_dim")
        }
        config = from_huggingface(settings | {"num_attention_heads": 64, "hidden_size": 64 * 12})
        assert (config.num_kv_heads, config.head_dim) == expected, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' must be one of 'llama', 'mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' must be 'silu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "must all be 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 2}, "must all be 'full_attention'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type=None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type='linear' must be"),
        (
            {
                "rope_parameters": {"rope_theta": 1e6},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "rope_scaling={'type': 'linear', 'factor': 2} and rope_parameters={'rope_theta': 10",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_configs_of_other_models_are_refused(small, changes, message):
    with pytest.raises(ValueError) as error:
        from_huggingface({**to_huggingface(small), **changes})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True, "qk_norm": True}, "qwen3 is nearest, but has no attention_bias"),
        ({"attention_bias": True}, "llama is nearest, but has no attention_bias=True"),
        ({"sliding_window": 6, "qk_norm": True}, "mistral is nearest, but has no qk_norm=True"),
    ],
)
def test_configs_no_family_has_are_not_written(small, changes, message):
    with pytest.raises(ValueError, match=message):
        to_huggingface(dataclasses.replace(small, **changes))


def test_integers_are_not_written(small, tmp_path):
    model = build("nnx", small)
    with pytest.raises(ValueError, match="dtype='int32' must be one of 'float32'"):
        save(tmp_path / "folder", model, model.abstract, dtype="int32")
    assert not list(tmp_path.iterdir())


def _rewrite(path, edit):
    arrays = load_file(path)
    edit(arrays)
    save_file(arrays, path)


def test_load_rejects_arrays_that_do_not_fit(small, noisy, rng, tmp_path):
    model, file = build("nnx", small), tmp_path / "model.safetensors"
    save(tmp_path, model, model.from_dict(noisy(small, rng)))
    buffer, extra = ({name: np.zeros(4, "f4")} for name in ("x.rotary_emb.inv_freq", "model.bias"))
    _rewrite(file, lambda arrays: arrays.update(buffer))
    load(tmp_path, "nnx")  # no parameter
    trouble = {
        r"model.bias must have shape none, the file has \(4,\)": lambda a: a.update(extra),
        r"lm_head.weight must have shape \(48, 24\), the file has none": lambda a: (
            a.pop("model.bias") is a.pop("lm_head.weight")
        ),
        r"lm_head.weight must have shape \(48, 24\), the file has \(24, 48\)": lambda a: a.update(
            {"lm_head.weight": np.zeros((24, 48), "f4")}
        ),
    }
    for message, edit in trouble.items():
        _rewrite(file, edit)
        with pytest.raises(ValueError, match=message):
            load(tmp_path, "nnx")
