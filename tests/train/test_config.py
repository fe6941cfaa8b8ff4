"""Configuration: preset < file < flags, and every mistake named with its key and value."""

import dataclasses

import pytest

from normfuse.train.cli import main, parse
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


def _nested(form: str) -> str:
    """Aliases of aliases: a billion values in a page."""
    names = [f"a{i}: &a{i} {form.format(i - 1)}" for i in range(1, 30)]
    return "\n".join(["a0: &a0 {x: 1}", *names])


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (
            "steps: 3\noptim:\n  lr: 0.1\n  warmpu: 3\n",
            ["--optim.warmpu=3", "--optim.warmup", "run.yaml"],
        ),
        ("seed: 1\nsteps: 0\n", ["--steps 0 must be", "run.yaml"]),
        ("preset: tiny\nconfig: b.yaml\n", ["line 2: config is no setting"]),
        ("help: true\n", ["line 1: help is no setting"]),
        ("steps: 3\nsteps: 4\n", ["line 2: steps is in line 1 too"]),
        ("mesh: {data: 2}\nmesh: {fsdp: 2}\n", ["line 2: mesh is in line 1 too"]),
        ("mesh: {data: 2}\nmesh.data: 1\n", ["line 2: mesh.data is in line 1 too"]),
        ("batch-size: 3\nbatch_size: 4\n", ["line 2: batch-size is in line 1 too"]),
        ("optim.lr: [1, 2]\n", ["line 1: optim.lr must be one value"]),
        ("? [1]\n: 2\n", ["--?=2", "run.yaml"]),
        (_nested("{{x: *a{0}, y: *a{0}}}"), ["is one of too many"]),
        (_nested("[*a{0}, *a{0}]"), ["line 2: a1 must be one value"]),
        ("\nmesh:\n  sideways:\n    a: 1\n", ["--mesh.sideways.a=1"]),
        ("mesh: 3\n", ["--mesh=3"]),
        ("steps: many\n", ["--steps", "'many'", "run.yaml"]),
        ("steps: null\n", ["--steps", "None"]),
        ("mesh.sequence: 3\n", ["line 1: mesh.sequence is 3, not true or false"]),
        ("optim:\n  lr: fast\n", ["--optim.lr", "'fast'"]),
        ("preset: huge\n", ["--preset", "'huge'", "'tiny'"]),
        ("out_dir: ''\n", ["--out-dir= is empty"]),
        ("- 1\n", ["run.yaml", "name: value"]),
        ("a: [1\n", ["run.yaml cannot be read"]),
        ("!!python/object/apply:os.system [ls]", ["run.yaml cannot be read"]),
        ("[" * 2000, ["run.yaml cannot be read"]),
        ("&a {mesh: *a}", ["run.yaml cannot be read"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_mistakes_in_a_file_name_the_setting_and_the_value(yaml_file, capsys, content, parts):
    assert main(["train", "--config", str(yaml_file(content))]) == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    for part in parts:
        assert part in message


def test_switches_are_set_and_unset(yaml_file):
    path = yaml_file("model.qk_norm: true\nmesh: {sequence: true}\nmodel.tie_embeddings: false\n")
    config = parse(["train", "--config", str(path), "--mesh.no-sequence"])
    assert (config.model.qk_norm, config.mesh.sequence) == (True, False)
    assert not config.model.tie_embeddings and parse(["train"]).model.tie_embeddings


def test_empty_file_changes_nothing(yaml_file):
    config = parse(["train", "--config", str(yaml_file("# nothing\n"))])
    assert dataclasses.replace(config, config=None) == preset_config("tiny")
