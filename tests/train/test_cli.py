"""The command itself: its help, and how quickly it comes."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from normfuse.train import cli
from normfuse.train.cli import main
from normfuse.train.display import shell_command


def test_help_names_every_command(capsys):
    for argv in ([], ["--help"], ["-h"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        for command in ("train", "generate", "export", "report", "plan", "info", "cache"):
            assert f" {command} " in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("normfuse")


@pytest.mark.parametrize("command", ["train", "generate", "export", "report", "plan"])
def test_commands_explain_themselves(capsys, command):
    assert main([command, "--help"]) == 0
    assert f"usage: normfuse {command}" in capsys.readouterr().out


def test_commands_to_copy_are_called_as_this_one(monkeypatch, tmp_path):
    program = tmp_path / "bin" / "normfuse"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program), "train"])
    monkeypatch.setenv("PATH", str(program.parent))
    assert shell_command("generate") == "normfuse generate"
    monkeypatch.setenv("PATH", "/nowhere")
    assert shell_command("generate") == f"{program} generate"
    monkeypatch.setattr(sys, "argv", ["normfuse/train/__main__.py"])
    assert shell_command("train") == f"{sys.executable} -m normfuse.train"
    assert shell_command("generate") == f"{sys.executable} -m normfuse.train.cli generate"


def test_unknown_command_suggests_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert main(["qqq"]) == 2
    assert "normfuse --help" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "--setps", "3"],
        ["generate", "--help"],
        ["plan", "--help"],
    ],
)
def test_flags_are_read_without_jax(argv):
    program = f"""
import sys
from normfuse.train import cli
from normfuse.train.cli import main
main({argv!r})
heavy = {{"jax", "flax", "equinox", "orbax", "grain", "optax", "matplotlib"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Packages that the extras install and JAX does not need.
_EXTRAS = "equinox flax grain matplotlib optax orbax rich safetensors tensorboardX tokenizers yaml"


# Arguments, exit code, and a part of the output.
_COMMANDS = [
    (["info"], 0, "normfuse "),
    (["cache"], 0, "kernel cache: "),
    (["train", "--help"], 0, "--steps"),
    (["generate", "--help"], 0, "--prompt"),
    (["train"], 2, "pip install 'normfuse[train]'"),
    (["train", "--config", __file__], 2, "pip install 'normfuse[train]'"),
    (["generate", "run"], 2, "pip install 'normfuse[train]'"),
    (["plan"], 2, "pip install 'normfuse[train]'"),
    (["report", "run"], 2, "pip install 'normfuse[train]'"),
]


def test_commands_without_the_extras():
    """`info` and `cache` need none; the others name the one they need, in one line."""
    program = f"""
import contextlib, io, json, sys
sys.modules.update(dict.fromkeys({_EXTRAS.split()!r}))
from normfuse.train import cli
from normfuse.train.cli import main
for argv in {[argv for argv, *_ in _COMMANDS]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(argv)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = map(json.loads, done.stdout.splitlines())
    for (argv, expected, said), (code, out, err) in zip(_COMMANDS, found, strict=True):
        assert code == expected, (argv, err)
        assert said in (err if code else out), argv
        assert not code or err.count("\n") == 1, argv


def test_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m normfuse.train --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.startswith("usage: normfuse train")
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_no_memory_is_one_line(monkeypatch, capsys):
    def fail(_):
        raise MemoryError

    monkeypatch.setattr(cli, "run", fail)
    assert cli.main(["cache"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory") and error.count("\n") == 1
