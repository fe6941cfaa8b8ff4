"""Whatever is asked for: a run starts, or one line says what is wrong. Never a traceback."""

import contextlib
import dataclasses
import io
import re
import tempfile
import typing
import warnings
from pathlib import Path

import jax
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normfuse.train.cli import main
from normfuse.train.compilation import lower
from normfuse.train.config import TrainConfig
from normfuse.train.run import Run

_LEFT_OUT = ("config", "distributed")  # a file is written below; processes are not started


def _fields(cls, prefix=""):
    """Yields every setting's dotted name and type."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _fields(hint, f"{prefix}{name}.")
        elif name not in _LEFT_OUT and not prefix.startswith(_LEFT_OUT):
            yield prefix + name, hint


_SMALL = st.sampled_from([1, 2, 3, 4, 8, 16, 32, 64, 256, 257])
_LARGE = [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400]
_INTEGERS = st.one_of(_SMALL, st.sampled_from([-(2**63), -(2**31), -2, -1, 0, *_LARGE]))
_FLOATS = st.one_of(
    st.floats(0, 1),
    st.sampled_from([0.0, -1.0, 2.0, 1e-300, 1e-39, 0.99999999999, 3.5e38, 1e300]),
    st.sampled_from([float("nan"), float("inf")]),
)
_TEXTS = st.sampled_from(
    ["", "-", "none", "skip:1", "skip:", f"skip:{'9' * 30}", "bpe:300", f"bpe:{'9' * 5000}"]
    + ["é", "a b", "\0", "\udcff", "\x1b[2J", "a\nb", "x" * 300, "x/" * 3000, "9" * 5000]
    + ["~no-such-user/x", "~", "/dev/zero", "/proc/self/mem", "/proc/x", "**/*", "["]
)


def _values(hint):
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    plain = options[0] if options else hint
    if choices := [x for x in (*options, *typing.get_args(plain)) if isinstance(x, str)]:
        return st.one_of(st.sampled_from(choices), _TEXTS)
    kinds = {int: _INTEGERS, float: _FLOATS, bool: st.booleans(), str: _TEXTS, Path: _TEXTS}
    return st.one_of(kinds[plain], kinds[plain], _TEXTS)  # mostly of the right type


def _settings(values, largest):
    # Thousands of layers are no mistake, and take a minute to describe.
    few = lambda name, value: (
        not (name.endswith("layers") and isinstance(value, int) and 8 < value < 1e4)
    )
    one = lambda item: st.tuples(st.just(item[0]), values(item[1])).filter(lambda x: few(*x))
    chosen = st.lists(st.sampled_from(list(_fields(TrainConfig))), max_size=largest, unique=True)
    return chosen.flatmap(lambda items: st.tuples(*map(one, items)))


def _words(chosen) -> list[str]:
    words = []
    for name, value in chosen:
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            *groups, last = flag.removeprefix("--").split(".")
            words.append("--" + ".".join([*groups, last if value else f"no-{last}"]))
        else:
            words.append(f"{flag}={value}")
    return words


def _dumped(chosen) -> str:
    try:
        return yaml.safe_dump(dict(chosen), allow_unicode=True)
    except ValueError:  # Python writes no integer of so many digits
        return "\n".join(f"{name}: {value}" for name, value in chosen)


def _start(argv: list[str], go) -> tuple[int, str]:
    """Runs the command with `go` instead of everything after the run was made."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(Run, "go", go)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    return code, err.getvalue()


def _check(code: int, error: str):
    assert code in (0, 2), error
    assert error == "" if code == 0 else re.fullmatch("error: .+\n", error), error
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", error), error


_QUICK = dict(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.newest
@settings(max_examples=60, **_QUICK)
@given(chosen=_settings(_values, 5), in_file=st.booleans())
def test_any_settings_start_a_run_or_are_explained(flags, text_file, chosen, in_file):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        base = [word for word in flags() if not word.startswith("--out-dir")]
        if in_file:
            Path("run.yaml").write_text(_dumped(chosen), encoding="utf-8", errors="surrogatepass")
            given_words = ["--config", "run.yaml"]
            names = {name.replace("_", "-") for name, _ in chosen}
            base = [word for word in base if word.split("=")[0][2:] not in names]
        else:
            given_words = _words(chosen)
        _check(*_start(["train", *base, *given_words], lambda run, stack: None))


_SHAPES = [
    name
    for name, hint in _fields(TrainConfig)
    if hint is int and name.split(".")[0] in ("model", "mesh", "batch_size", "seq_len")
] + ["microbatches"]


@pytest.mark.newest
@settings(max_examples=6, **_QUICK)
@given(
    chosen=st.lists(
        st.tuples(st.sampled_from(_SHAPES), st.sampled_from([1, 2, 3, 4, 8, 16])), max_size=4
    ),
    framework=st.sampled_from(["nnx", "eqx"]),
    remat=st.sampled_from(["none", "block", "dots"]),
)
def test_any_shape_is_refused_before_it_is_traced_or_traced(flags, chosen, framework, remat):
    traced = []

    def go(run, stack):
        traced.append(lower(run.program, run.config.batch_size, run.config.seq_len))

    words = [f"--{name.replace('_', '-')}={value}" for name, value in chosen]
    more = [f"--framework={framework}", f"--model.remat={remat}"]
    code, error = _start(["train", *flags(), *words, *more], go)
    _check(code, error)
    assert bool(traced) == (code == 0) and all(isinstance(x, jax.stages.Lowered) for x in traced)
