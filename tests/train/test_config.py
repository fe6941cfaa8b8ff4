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
    ("content", "line", "parts"),
    [
        ("steps: 3\noptim:\n  lr: 0.1\n  warmpu: 3\n", 4, ["'optim.warmpu'", "'optim.warmup'"]),
        ("stpes: 3\n", 1, ["'stpes'", "'steps'"]),
        ("lr: 0.1\n", 1, ["'lr'", "'optim.lr'"]),
        ("\nmesh:\n  sideways:\n    a: 1\n", 3, ["'mesh.sideways'"]),
        ("steps:\n  a: 1\n", 1, ["'steps'"]),
        ("mesh: 3\n", 1, ["'mesh'"]),
        ("config: other.yaml\n", 1, ["'config'"]),
        ("steps: many\n", 1, ["steps", "'many'", "int"]),
        ("steps: 3.5\n", 1, ["steps", "3.5", "int"]),
        ("steps: true\n", 1, ["steps", "True", "int"]),
        ("a: 1\nsteps: null\n", 1, ["'a'"]),
        ("optim:\n  lr: fast\n", 2, ["optim.lr", "'fast'", "float"]),
        ("framework: torch\n", 1, ["framework", "'torch'", "nnx, eqx"]),
        ("preset: huge\n", 1, ["preset", "'huge'", "tiny"]),
        ("steps: 1\nsteps: 2\n", 2, ["'steps'", "twice"]),
        ("mesh:\n  data: 1\nmesh.data: 2\n", 3, ["'mesh.data'", "twice"]),
    ],
)
def test_yaml_mistakes_name_path_and_line(yaml_file, content, line, parts):
    path = yaml_file(content)
    with pytest.raises(UsageError) as caught:
        parse(["train", "--config", str(path)])
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    for part in parts:
        assert part in message


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
