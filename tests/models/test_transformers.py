"""The models of `transformers`: what it saved and computed is recorded; live where it is installed.

`python tests/huggingface_models.py` made the records, with transformers 5 and torch 2.13.
"""

import json
import re

import huggingface_models
import numpy as np
import pytest
from huggingface_models import FOLDER, MODELS

from normfuse.models import tensor_file
from normfuse.models.generate import generate
from normfuse.models.huggingface import load, save


def _assert_equal(ours, theirs):
    # Both are float32: two layers of sums of up to 40 products and a softmax. 100 roundings of the
    # largest logit, as against the float64 reference in test_transformer.py, for each of the two.
    assert np.abs(ours - theirs).max() < 200 * 2**-24 * np.abs(theirs).max()


@pytest.mark.parametrize("framework", ["nnx", "eqx"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_recorded(name, framework, jit):
    expected = np.load(FOLDER / name / "expected.npz")
    model, params = load(FOLDER / name, framework)
    _assert_equal(jit(model.apply)(params, expected["tokens"]), expected["logits"])
    assert np.ptp(expected["logits"]) > 1


@pytest.mark.parametrize("name", ["llama31_tied", "qwen3"])
def test_greedy_text_is_that_recorded(name):
    expected = np.load(FOLDER / name / "expected.npz")
    model, params = load(FOLDER / name, "nnx")
    found = generate(model, params, expected["prompts"], 12, temperature=0)
    np.testing.assert_array_equal(found, expected["drawn"])


@pytest.mark.parametrize("name", MODELS)
def test_what_was_loaded_is_saved_with_the_same_names_and_settings(name, tmp_path):
    model, params = load(FOLDER / name, "eqx")
    save(tmp_path, model, params, dtype="bfloat16")
    theirs = [tensor_file.read(file) for file in (FOLDER / name).glob("*.safetensors")]
    theirs = {key: array for file in theirs for key, array in file.items()}
    ours = tensor_file.read(tmp_path / "model.safetensors")
    assert set(ours) == set(theirs)
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array)
    read = lambda path: json.loads((path / "config.json").read_text())
    ours, theirs = read(tmp_path), read(FOLDER / name)
    shared = set(ours) & set(theirs)
    assert {"model_type", "hidden_size", "num_key_value_heads", "rms_norm_eps"} <= shared
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


@pytest.mark.filterwarnings("ignore")  # of two large packages, about themselves
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_with_the_package_itself(name, tmp_path, jit):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = huggingface_models.make(name, seed=1)
    expected = huggingface_models.results(model, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    ours, params = load(tmp_path / "theirs", "nnx")
    _assert_equal(jit(ours.apply)(params, expected["tokens"]), expected["logits"])

    save(tmp_path / "ours", ours, params, max_file_bytes=20_000)
    assert re.fullmatch(r"model-\d+-of-\d+", sorted((tmp_path / "ours").glob("*"))[1].stem)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(
        huggingface_models.results(again, seed=1)["logits"], expected["logits"]
    )
