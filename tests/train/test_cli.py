"""The command itself: its help, and how quickly it comes."""

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

from normfuse.train.cli import main

_COMMANDS = ("train", "generate", "export", "report", "plan", "info", "cache")


def test_help_names_every_command_and_each_explains_itself(capsys):
    for argv in ([], ["--help"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert all(f" {command} " in out for command in _COMMANDS)
    for command in _COMMANDS:
        assert main([command, "--help"]) == 0
        assert f"usage: normfuse {command}" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("normfuse")
    assert main(["trian"]) == 2
    assert "'trian' is no command: did you mean train?" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["train", "--setps", "3"], ["plan", "--help"]])
def test_flags_are_read_without_frameworks(argv):
    program = f"""
import sys
from normfuse.train.cli import main
main({argv!r})
heavy = {{"flax", "equinox", "orbax", "grain", "optax", "matplotlib"}} & set(sys.modules)
sys.exit(f"imported: {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Packages that the extras install and JAX does not need.
_EXTRAS = "equinox flax grain matplotlib optax orbax safetensors tokenizers yaml"
# Arguments, exit code, and a part of the output.
_WITHOUT = [
    (["info"], 0, "normfuse "),
    (["cache"], 0, "kernel cache: "),
    (["train", "--help"], 0, "--steps"),
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
from normfuse.train.cli import main
for argv in {[argv for argv, *_ in _WITHOUT]!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(argv)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = map(json.loads, done.stdout.splitlines())
    for (argv, expected, said), (code, out, err) in zip(_WITHOUT, answers, strict=True):
        assert code == expected, (argv, err)
        assert said in (err if code else out), argv
        assert not code or err.count("\n") == 1, argv
