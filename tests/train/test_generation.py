"""`normfuse generate`, from a run and from a Hugging Face folder, and `normfuse export`."""

import json

import jax
import numpy as np
import pytest

from normfuse.models.config import TransformerConfig
from normfuse.models.functional import build
from normfuse.models.huggingface import load, save
from normfuse.train import generation
from normfuse.train.cli import main
from normfuse.train.text import load as load_text


def test_generate_continues_the_prompt(finished, capsys):
    run = str(finished[0])
    arguments = ["--prompt", "the norm", "--tokens", "5", "--temperature", "0"]
    assert main(["generate", run, *arguments]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the norm") and len(first) >= len("the norm") + 2
    assert main(["generate", run, *arguments]) == 0
    assert capsys.readouterr().out == first


def test_no_more_is_added_than_fits_unless_asked_for(finished, capsys):
    """The run's context is of 32 bytes."""
    run = str(finished[0])
    assert main(["generate", run, "--prompt", "the norm", "--temperature", "0"]) == 0
    added = capsys.readouterr().out.removesuffix("\n").removeprefix("the norm")
    assert 0 < len(added.encode()) and len(added) <= 32 - len("the norm")
    assert main(["generate", run, "--prompt", "the norm " * 4]) == 2
    assert "a prompt of 36 tokens" in capsys.readouterr().err


def test_samples_are_drawn_at_once(finished, capsys):
    run = str(finished[0])
    options = ["--prompt", "the norm", "--tokens", "5", "--temperature", "9"]
    assert main(["generate", run, *options, "--samples", "3"]) == 0
    texts = capsys.readouterr().out.removesuffix("\n").split("\n\nthe norm")
    assert len(texts) == 3 and len(set(texts)) > 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--samples", "0"], "--samples 0"),
        (["--seed", str(2**64)], f"--seed {2**64}"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--top-k", "0"], "--top-k 0"),
        (["--top-p", "nan"], "--top-p nan"),
        (["--tokens", "500"], "--tokens 500 exceed max_seq_len=32"),
    ],
)
def test_bad_arguments_are_explained(finished, capsys, arguments, part):
    assert main(["generate", str(finished[0]), "--tokens", "4", *arguments]) == 2
    error = capsys.readouterr().err
    assert part in error and "Traceback" not in error


def test_folder_of_nothing_is_explained(tmp_path, capsys):
    assert main(["generate", str(tmp_path)]) == 2
    assert "neither a checkpoint nor a config.json" in capsys.readouterr().err


def test_an_exported_run_says_the_same(finished, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    run, folder = finished[0], tmp_path / "model"
    assert main(["export", str(run), str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}\n"
    said = []
    for source in run, folder:
        arguments = ["--prompt", "the nörm\t\n", "--tokens", "9", "--temperature", "0"]
        assert main(["generate", str(source), *arguments]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(said[0]) > len("the nörm\t\n")
    assert main(["export", str(run), str(folder)]) == 2
    assert f"FOLDER {folder} cannot be written: {folder} exists already" in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(folder)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert main(["export", str(run), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert load(tmp_path / "half", "eqx")[0].config == load(folder, "eqx")[0].config


@pytest.mark.parametrize("documents", [False, True])
def test_train_generate_and_export_feed_the_same_tokens(
    train, tmp_path, capsys, monkeypatch, text_file, documents
):
    """With a template of <bos> and <eos>: around documents, but not into one stream of text."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    marks = [("<bos>", 0), ("<eos>", 1)]
    names = [name for name, _ in marks]
    lines = text_file.read_text().splitlines()
    tokenizer.train_from_iterator(lines, 300, special_tokens=names, show_progress=False)
    template = tokenizers.processors.TemplateProcessing("<bos> $A <eos>", special_tokens=marks)
    tokenizer.post_processor = template
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / ("x.jsonl" if documents else "x.txt")
    write = (lambda line: json.dumps({"text": line})) if documents else str
    source.write_text("\n".join(map(write, lines)))
    given = {"data.path": source, "data.tokenizer": tmp_path / "tokenizer.json"}
    sizes = {"seq_len": 16, "vocab_size": 384}
    text = load_text(str(source), **sizes, tokenizer=str(tmp_path / "tokenizer.json"))
    counted = [int(np.sum(np.r_[text.train, text.held_out] == token)) for _, token in marks]
    # The document that begins to be held out is cut in two.
    assert counted[0] == counted[1] and counted[0] - documents * len(lines) in (0, documents)
    assert text.tokenizer.decode(text.train[:30]).startswith("<bos>" * documents + lines[0])

    fed, run = [], generation.generate
    monkeypatch.setattr(generation, "generate", lambda *a, **b: fed.append(a[2]) or run(*a, **b))
    assert train(steps=1, **given)[0] == 0
    source, folder = tmp_path / "run", tmp_path / "model"
    assert main(["export", str(source), str(folder)]) == 0
    for place in source, folder:
        assert main(["generate", str(place), "--prompt", "the norm", "--tokens", "2"]) == 0
    exported = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = [*[0] * documents, *tokenizer.encode("the norm", add_special_tokens=False).ids]
    assert exported.encode("the norm").ids == expected
    assert [rows[0].tolist() for rows in fed] == [expected, expected]


def test_hugging_face_folder_speaks(tmp_path, capsys, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["the norm of a row "], vocab_size=270, show_progress=False)
    content = tokenizer.to_str()
    shape = dict(dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=24)
    model = build("eqx", TransformerConfig(vocab_size=272, max_seq_len=64, **shape))
    save(tmp_path, model, model.init(jax.random.key(0)))
    arguments = ["generate", str(tmp_path), "--prompt", "the row", "--tokens", "4"]
    assert main(arguments) == 2
    assert "tokenizer.json cannot be read" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text(content)
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("the row")

    # The model reads the tokens that the template puts before a text; they are not printed.
    prompts, run = [], generation.generate

    def recorded(model, params, rows, *arguments, **options):
        prompts.extend(rows)
        return run(model, params, rows, *arguments, **options)

    monkeypatch.setattr(generation, "generate", recorded)
    template = json.loads(content)
    begin = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(template))
    assert main(arguments) == 0
    assert prompts[0].tolist() == [0, *tokenizer.encode("the row").ids]
    assert capsys.readouterr().out.startswith("the row")
    (tmp_path / "config.json").write_text("{}")
    assert main(arguments) == 2
    assert "model_type=None" in capsys.readouterr().err
