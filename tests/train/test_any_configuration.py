"""Whatever is asked for: a run starts, or one message says what is wrong. Never a traceback."""

import contextlib
import dataclasses
import io
import tempfile
import typing
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
_INTEGERS = st.one_of(_SMALL, st.sampled_from([-(2**63), -2, -1, 0, 2**31, 2**64]))
_FLOATS = st.one_of(
    st.floats(0, 1), st.sampled_from([0.0, -1.0, 2.0, 1e-300, 1e300, float("nan"), float("inf")])
)
_TEXTS = st.sampled_from(
    ["", "-", "none", "skip:1", "skip:", "bpe:300", "é", "a b", "\0", "x" * 99]
)


def _values(hint):
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if options and isinstance(options[0], str):
        return st.one_of(st.sampled_from(options), _TEXTS)
    plain = options[0] if options else hint
    kinds = {int: _INTEGERS, float: _FLOATS, bool: st.booleans(), str: _TEXTS, Path: _TEXTS}
    return st.one_of(kinds[plain], kinds[plain], _TEXTS)  # mostly of the right type


def _settings(values, largest):
    # Hundreds of layers are no mistake, and take a minute to describe.
    few = lambda name, value: not (name.endswith("layers") and isinstance(value, int) and value > 8)
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


def _start(argv: list[str], go) -> tuple[int, str]:
    """Runs the command with `go` in place of all that comes after the run was made."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "go", go)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    return code, err.getvalue()


def _check(code: int, error: str):
    assert code in (0, 2)
    assert "Traceback" not in error and (code == 0 or error.strip())


_QUICK = dict(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@settings(max_examples=120, **_QUICK)
@given(chosen=_settings(_values, 5), in_file=st.booleans())
def test_any_settings_start_a_run_or_are_explained(flags, text_file, chosen, in_file):
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        base = [word for word in flags() if not word.startswith("--out-dir")]
        if in_file:
            Path("run.yaml").write_text(yaml.safe_dump(dict(chosen)))
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


@settings(max_examples=12, **_QUICK)
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
