"""Whatever a file, a folder or an argument holds: it serves, or one line says what is wrong."""

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normfuse.train import RunError, generation, metrics
from normfuse.train.checks import check
from normfuse.train.cli import main
from normfuse.train.metrics import MetricsLog
from normfuse.train.run import Run

_QUICK = dict(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def _run(argv: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return code, out.getvalue(), err.getvalue()


def _check(code: int, error: str, codes=(0, 1, 2)):
    assert code in codes, error
    if code and "helptext" not in error:  # tyro's own
        assert re.fullmatch("(checkpoint of step .*\n|moved it .*\n)*error: .+\n", error), error
    assert "Traceback" not in error
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", error), error


# ---------------------------------------------------------------- YAML

_VALUES = [
    "!!python/object/apply:os.system [ls]",
    "!!timestamp 2024-13-45",
    "!!timestamp x",
    "2024-13-45",
    "2024-02-30 25:61:61",
    "&a [*a]",
    "&a {mesh: *a}",
    "*nobody",
    "[" * 2000,
    "{a: " * 2000,
    "!!binary '*'",
    "!!binary aGVsbG8=",
    "!!int ''",
    "!!int x",
    "!!float x",
    "!!bool maybe",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!unknown 3",
    "0x" + "f" * 5000,
    "9" * 5000,
    "1" + ":59" * 500,
    ".inf",
    ".nan",
    "~",
    "[1, 2]",
    "{a: 1}",
    "|\n  text\n  text",
    "'\\0'",
    '"\\0"',
    '"\\e[2J"',
    "\x07",
    "- 1",
    "%TAG",
    "1e999",
    "yes",
    "7",
]
_NAMES = ["steps", "optim.lr", "mesh", "data.path", "seed", "config", "<<", "? [1]\n", "&k ? k\n"]
_LINES = st.tuples(st.sampled_from(_NAMES), st.sampled_from(_VALUES)).map(": ".join)
_YAML = st.one_of(
    st.lists(_LINES, max_size=3).map("\n".join).map(str.encode),
    st.sampled_from(_VALUES).map(str.encode),
    st.text(max_size=30).map(lambda text: text.encode(errors="surrogatepass")),
    st.binary(max_size=30),
)


@settings(max_examples=80, **_QUICK)
@given(content=_YAML)
def test_any_yaml_is_read_or_explained(content):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder, "run.yaml")
        path.write_bytes(content)
        patch.setattr("normfuse.train.run.train", check)
        code, _, error = _run(["train", "--config", str(path)])
    _check(code, error, (0, 2))


@pytest.mark.parametrize("value", _VALUES, ids=lambda value: value[:20])
def test_each_yaml_value_is_read_or_explained_where_a_number_stands(tmp_path, monkeypatch, value):
    path = tmp_path / "run.yaml"
    path.write_text(f"seed: 1\nsteps: {value}\n")
    monkeypatch.setattr("normfuse.train.run.train", check)
    code, _, error = _run(["train", "--config", str(path)])
    _check(code, error, (0, 2))
    assert "steps" in error or str(path) in error or value in ("7", "0x" + "f" * 5000)


# ---------------------------------------------------------------- folders

_FILES = [
    "metrics.jsonl",
    "text.json",
    "config.yaml",
    "checkpoints",
    "checkpoints/6",
    "checkpoints/6/record/metadata",
    "checkpoints/6/params/manifest.ocdbt",
    "profile/breakdown.json",
    "sample.txt",
    ".lock",
]
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
_KEYS = ["step", "loss", "lr", "tokens", "tokens_per_s", "step_time_s", "val_loss", "event"]
_KEYS += ["val_bits_per_byte", "from_step", "tokens_per_byte", "references", "idle", "$x$"]
_LINE = st.dictionaries(st.sampled_from(_KEYS), st.one_of(st.integers(0, 9), _JSON), max_size=6)
_CONTENTS = st.one_of(
    st.lists(_LINE.map(json.dumps), max_size=5).map("\n".join).map(str.encode),
    st.binary(max_size=20),
    st.sampled_from([b"[" * 9999, b'{"step": 1e400, "loss": ' + b"9" * 5000 + b"}", b"\0"]),
)


def _fifo(path: Path):
    os.mkfifo(path)


_BECOMES = {
    "nothing": lambda path: None,
    "a folder": Path.mkdir,
    "a pipe that nobody writes": _fifo,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}
_DAMAGE = st.one_of(st.sampled_from(list(_BECOMES)), _CONTENTS)
_FOLDERS = ["run", "[/x]", "[bold]", "$x$ \\$", "_a", "\x1b[2J", "é ∞ 語", "a\nb", "-x", "x" * 200]


def _damaged(folder: Path, damages: list[tuple[str, object]]):
    for name, damage in damages:
        path = folder / name
        if not path.parent.is_dir() or path.parent.is_symlink():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if isinstance(damage, bytes):
            path.write_bytes(damage)
        else:
            _BECOMES[damage](path)


@pytest.fixture
def stopped_at_compilation(monkeypatch):
    def compile(lowered):
        raise RunError("compiling")

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)


@settings(max_examples=8, **_QUICK)
@given(
    name=st.sampled_from(_FOLDERS),
    damages=st.lists(st.tuples(st.sampled_from(_FILES), _DAMAGE), max_size=3),
    command=st.sampled_from(["report", "report", "train", "generate"]),
)
def test_any_folder_serves_or_is_explained(
    finished, flags, options, stopped_at_compilation, name, damages, command
):
    with tempfile.TemporaryDirectory() as top, contextlib.chdir(top):
        folder = shutil.copytree(finished[0], Path(top, name))
        _damaged(folder, damages)
        told = f"./{name}" if name.startswith("-") else name
        if command == "train":
            argv = ["train", *flags(out_dir=told, lock_timeout=0, **options)]
        else:
            more = ["--html", "page.html"] if command == "report" else ["--tokens", "1"]
            argv = [command, told, *more]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(generation, "sample", lambda *_, **__: ["text"])
            code, out, error = _run(argv)
    _check(code, error)
    assert "\x1b" not in out


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("command", ["report", "generate", "train", "text", "config", "tokenizer"])
@pytest.mark.parametrize(
    "path",
    [
        "~no-such-user/x",
        "x" * 300,
        "x/" * 3000,
        "\udcff",
        "pipe",
        "loop",
        "closed/x",
        "file/x",
        "\x1b[2J",
    ],
    ids=ascii,
)
def test_paths_that_cannot_be(tmp_path, monkeypatch, small_run, text_file, command, path):
    monkeypatch.chdir(tmp_path)
    _fifo(Path("pipe"))
    Path("loop").symlink_to("loop")
    Path("file").touch()
    real = os.stat

    def stat(file, *arguments, **options):  # these tests may be run by root
        if str(file).endswith("closed/x"):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *arguments, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(Run, "go", lambda *_: None)
    named = {"train": {"out_dir": path}, "text": {"data.path": path}}.get(command, {})
    named |= {"config": {"config": path}, "tokenizer": {"data.tokenizer": path}}.get(command, {})
    argv = small_run(text_file, tmp_path / "run", **named)
    code, _, error = _run([command, path] if not named else ["train", *argv])
    # A loop is met when the folder is made.
    serves = command == "train" and path in ("\x1b[2J", "closed/x", "loop")
    _check(code, error, (0, 2) if serves else (2,))


def test_texts_that_cannot_be_read_are_not_left_out(
    tmp_path, monkeypatch, small_run, text_file, capsys
):
    """As `chmod 0` makes a folder for all but root."""
    (tmp_path / "texts" / "closed").mkdir(parents=True)
    for folder in ("texts", "texts/closed"):
        shutil.copy(text_file, tmp_path / folder / "text.txt")
    real, access = os.scandir, os.access

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    allowed = lambda path, *rest: not str(path).endswith("closed") and access(path, *rest)
    monkeypatch.setattr(os, "access", allowed)
    monkeypatch.setattr(Run, "go", lambda *_: None)
    for path in ("texts", "texts/**/*.txt", "texts/*/*.txt", "texts/c*/x"):
        code, _, error = _run(["train", *small_run(tmp_path / path, tmp_path / "run")])
        _check(code, error, (2,))
        assert f"{tmp_path / 'texts' / 'closed'}: Permission denied" in error


@settings(max_examples=30, **_QUICK)
@given(
    numbers=st.dictionaries(
        st.sampled_from(["tokens", "samples", "top-k", "top-p", "temperature", "seed"]),
        st.sampled_from([-(2**64), -1, 0, 1, 2**31, 2**63, 10**400, 1e-300, 1e300, "nan", "", "x"]),
        min_size=1,
    ),
    texts=st.dictionaries(
        st.sampled_from(["prompt", "stop"]), st.sampled_from(["", "a", "\udcff", "\0", "é", "aa"])
    ),
)
def test_any_arguments_of_generate_serve_or_are_named(finished, numbers, texts):
    words = [f"--{name}={value}" for name, value in (numbers | texts).items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_load_run", lambda out: (None, None, None))
        patch.setattr(generation, "sample", lambda *_, **__: ["text"])
        code, _, error = _run(["generate", str(finished[0]), *words])
    _check(code, error, (0, 2))
    assert code == 0 or any(f"--{name}" in error for name in numbers | texts)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--tokens", "500"], "--tokens 500 exceed max_seq_len=32"),
        (["--tokens", "2", "--samples", str(2**31 - 1)], "--samples 2147483647 of 1 prompts need"),
        (["--stop", "ab"], "--stop 'ab' must be one token"),
    ],
)
def test_what_the_model_does_not_take_is_named_by_its_flag(finished, capsys, arguments, part):
    assert main(["generate", str(finished[0]), *arguments]) == 2
    assert part in capsys.readouterr().err


# ---------------------------------------------------------------- metrics


@settings(max_examples=100, **_QUICK)
@given(content=_CONTENTS, from_step=st.integers(0, 9))
def test_any_line_of_metrics_is_kept_or_dropped_on_resume(content, from_step):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        whole = b'{"step": 0, "loss": 1.5}\n'
        path.write_bytes(whole + content)
        MetricsLog(path, from_step=from_step).close()
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert lines[0] == {"step": 0, "loss": 1.5} and lines[-1]["event"] == "resume"
    assert all(line.get("step", 0) <= from_step for line in lines[:-1])


def test_metrics_are_reported_without_what_they_lack(finished, tmp_path, capsys):
    """A loss in words, a step without its time: the others are shown."""
    run = shutil.copytree(finished[0], tmp_path / "run")
    lines = metrics.read(run / "metrics.jsonl")
    lines[0]["loss"] = "high"
    second = next(line for line in lines if line["step"] == 2 and "loss" in line)
    del second["step_time_s"], second["tokens"], second["lr"]
    for line in lines:
        line.pop("val_bits_per_byte", None)
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if str(run) in line)
    assert row.split()[1] == "6" and f"{lines[-2]['loss']:.4f}" in row.split()


@pytest.mark.parametrize("name", _FOLDERS, ids=ascii)
def test_report_shows_any_folder_by_its_name(finished, tmp_path, capsys, name):
    run = shutil.copytree(finished[0], tmp_path / name)
    page = tmp_path / "page.html"
    assert main(["report", str(run), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    plain = name.replace("\x1b", "\\x1b").replace("\n", "\\n")
    assert f"{tmp_path}/{plain}" in out and "\x1b" not in out
    assert "\x1b" not in page.read_text()
