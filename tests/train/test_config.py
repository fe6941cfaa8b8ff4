"""Configuration: preset < file < flags, and every mistake named where it was made."""

import dataclasses

import pytest

from normfuse.train import UsageError
from normfuse.train.cli import parse
from normfuse.train.config import dump, preset_config


@pytest.fixture
def yaml_file(tmp_path):
    def write(content: str):
        path = tmp_path / "run.yaml"
        path.write_text(content)
        return path

    return write


def test_without_arguments_it_is_the_tiny_recipe():
    assert parse(["train"]) == preset_config("tiny")


def test_preset_gives_the_defaults_of_its_size():
    config = parse(["train", "--preset", "small", "--steps", "7"])
    assert config == dataclasses.replace(preset_config("small"), steps=7)
    assert config.model.dim == 768


def test_flags_override_the_file_and_the_file_the_preset(yaml_file):
    path = yaml_file("preset: small\nsteps: 11\noptim:\n  lr: 1e-4\nmesh.fsdp: 2\nbatch-size: 4\n")
    config = parse(["train", "--config", str(path), "--steps", "12"])
    assert (config.preset, config.steps, config.optim.lr) == ("small", 12, 1e-4)
    assert (config.mesh.fsdp, config.batch_size, config.model.num_layers) == (2, 4, 12)
    assert parse(["train", "--config", str(path), "--preset", "tiny"]).model.num_layers == 3


def test_dump_reads_back_the_same(yaml_file):
    config = parse(["train", "--preset", "1b", "--optim.lr", "3e-5", "--out-dir", "somewhere"])
    again = parse(["train", "--config", str(yaml_file(dump(config)))])
    assert dataclasses.replace(again, config=None) == config


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("steps: 3\noptim:\n  lr: 0.1\n  warmpu: 3\n", ["--optim.warmpu=3", "--optim.warmup"]),
        ("stpes: 3\n", ["--stpes=3", "train --help"]),
        ("\nmesh:\n  sideways:\n    a: 1\n", ["--mesh.sideways.a=1"]),
        ("steps:\n  a: 1\n", ["--steps.a=1"]),
        ("mesh: 3\n", ["--mesh=3"]),
        ("a: null\n", ["--a=None"]),
        ("steps: many\n", ["--steps", "'many'", "--steps INT"]),
        ("steps: 3.5\n", ["--steps", "'3.5'", "--steps INT"]),
        ("steps: true\n", ["--steps", "'True'", "--steps INT"]),
        ("steps: null\n", ["--steps", "'None'", "--steps INT"]),
        ("profile: 3\n", ["3"]),
        ("optim:\n  lr: fast\n", ["--optim.lr", "'fast'", "--optim.lr FLOAT"]),
        ("framework: torch\n", ["--framework", "'torch'", "'nnx'"]),
        ("preset: huge\n", ["--preset", "'huge'", "'tiny'"]),
        ("data.path: [a]\n", ["'data.path' is ['a']; a file gives a flag one word"]),
        ("config: other.yaml\n", ["'config' is 'other.yaml'"]),
        ("out_dir: ''\n", ["'out_dir' is ''"]),
    ],
)
def test_mistakes_in_a_file_name_the_setting_and_the_value(yaml_file, capsys, content, parts):
    path = yaml_file(content)
    with pytest.raises(UsageError, match=f"--config {path}") as caught:
        parse(["train", "--config", str(path)])
    message = str(caught.value) + capsys.readouterr().err
    for part in parts:
        assert part in message


def test_switches_are_set_and_unset(yaml_file):
    path = str(yaml_file("profile: true\ndata: {documents: true}\nmodel.gated: false\n"))
    config = parse(["train", "--config", path, "--data.no-documents"])
    assert (config.profile, config.data.documents, config.model.gated) == (True, False, False)


@pytest.mark.parametrize("content", ["- 1\n", "just text\n", "a: [1\n"])
def test_files_that_are_no_settings_are_refused(yaml_file, content):
    with pytest.raises(UsageError, match="run.yaml"):
        parse(["train", "--config", str(yaml_file(content))])


def test_empty_file_changes_nothing(yaml_file):
    config = parse(["train", "--config", str(yaml_file("# nothing\n"))])
    assert dataclasses.replace(config, config=None) == preset_config("tiny")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match="nowhere.yaml"):
        parse(["train", "--config", str(tmp_path / "nowhere.yaml")])
