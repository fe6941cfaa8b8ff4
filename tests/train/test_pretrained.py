"""`normfuse train --init-from`: Hugging Face models are trained on, and come out as such."""

import json
import shutil

import jax
import numpy as np
import pytest
from huggingface_models import FOLDER, write

from normfuse.models.huggingface import load
from normfuse.train.cli import main

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path):
    """Gives the folder of a recorded model of 48 words, with a tokenizer that adds <s>."""

    def make(name):
        place = tmp_path / name
        (tmp_path / "recipe").mkdir()
        shutil.copytree(write(name, tmp_path / "recipe"), place)
        words = {chr(ord("!") + i): i for i in range(47)} | {"<s>": 47}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token="!"))
        tokenizer.add_special_tokens(["<s>"])
        template = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 47)])
        tokenizer.post_processor = template
        tokenizer.save(str(place / "tokenizer.json"))
        return place

    return make


@pytest.fixture
def flags(tmp_path, text_file):
    base = {"out-dir": tmp_path / "run", "data.path": text_file, "steps": 1, "batch-size": 8}
    base |= {"seq-len": 8, "eval.every": 0, "eval.final-tokens": 64}
    return lambda **more: ["train", *(f"--{k}={v}" for k, v in (base | more).items())]


# Scaled wavelengths and tied embeddings; biases. With so small a rate no parameter changes.
@pytest.mark.parametrize("name, framework", [("llama31_tied", "nnx"), ("qwen2", "eqx")])
def test_from_their_folder_to_theirs(folder, flags, tmp_path, capsys, name, framework):
    theirs, run, ours = folder(name), tmp_path / "run", tmp_path / "model"
    still = {"init-from": theirs, "optim.lr": 1.2e-38, "optim.weight-decay": 0}
    assert main(flags(**still, framework=framework)) == 0
    assert main(["export", str(run), str(ours)]) == 0
    expected = np.load(FOLDER / name / "expected.npz")
    model, params = load(ours, framework)
    assert model.config == load(theirs, framework)[0].config
    logits = expected["logits"]
    # 100 roundings of the largest logit for each, as tests/models/test_huggingface.py has it.
    difference = np.abs(jax.jit(model.apply)(params, expected["tokens"]) - logits)
    assert difference.max() < 200 * 2**-24 * np.abs(logits).max()
    said = json.loads((ours / "config.json").read_text())
    assert said["model_type"] == json.loads((theirs / "config.json").read_text())["model_type"]
    assert (ours / "tokenizer.json").read_text() == (theirs / "tokenizer.json").read_text()
    capsys.readouterr()
    texts = []
    for place in run, ours:
        assert (
            main(["generate", str(place), "--prompt", "'(-", "--tokens=4", "--temperature=0"]) == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].replace(" ", "").startswith("'(-")


def test_a_run_learns_and_goes_on_without_the_folder(folder, flags, tmp_path, capsys, lines):
    theirs, run = folder("llama"), tmp_path / "run"
    assert main(flags(**{"init-from": theirs, "optim.lr": 1e-2, "steps": 4})) == 0
    assert lines(run)[3]["loss"] < lines(run)[0]["loss"] - 0.1
    shutil.rmtree(theirs)
    assert main(["train", "--config", str(run / "config.yaml"), "--steps", "5"]) == 0
    out = capsys.readouterr().out
    assert f"weights     {theirs}" in out and "continuing after step 4" in out


def test_other_models_are_refused(folder, flags, tmp_path, capsys):
    theirs = folder("llama")
    assert main(flags(**{"init-from": theirs, "model.dim": 32, "model.norm-eps": 0.5})) == 2
    error = capsys.readouterr().err
    assert "--model.dim is 32, there 24; --model.norm-eps is 0.5, there 1e-06" in error
    (theirs / "tokenizer.json").unlink()
    assert main(flags(**{"init-from": theirs})) == 2
    assert "holds no tokenizer.json: give --data.tokenizer FILE" in capsys.readouterr().err
    settings = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(settings | {"model_type": "gemma"}))
    assert main(flags(**{"init-from": theirs})) == 2
    assert "model_type='gemma' must be one of 'llama', " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
