"""Shared by the tests of contexts."""

import contextlib
import functools

import hlo
import jax
import pytest
from jax.sharding import AxisType
from rms_norm_cases import Case
from support_table import record

FORWARD = {"forward": 1}


class Serve:
    """Runs a function in a context, and checks its values and the kernels that served it."""

    def __init__(self, request):
        self._request = request

    def __call__(
        self, case, fn, *args, expected, calls=FORWARD, note="", title=None, plain=False, **jit
    ):
        """Compiles `fn(*args)`; its results must be `expected`, by exactly the kernels `calls`.

        `plain` where part of the work is plain HLO by definition: a tangent, say.

        Returns:
          The compiled function's text and its results.
        """
        compiled = jax.jit(fn, **jit).lower(*args).compile()
        text = hlo.text(compiled)
        results = compiled(*args)
        case.check(results, expected)
        if calls is not None:
            assert hlo.calls(text) == calls
        outcome = "native" if calls else hlo.served(text)
        self.record(outcome + " + plain" * plain, note, title)
        return text, results

    def record(self, outcome, note="", title=None):
        record(self._request, outcome, note, title)

    @contextlib.contextmanager
    def refused(self, exception, match, note):
        """The context raises a clear error; `note` names it and the way out."""
        with pytest.raises(exception, match=match):
            yield
        self.record("refused", note)


@pytest.fixture
def serve(request) -> Serve:
    return Serve(request)


@pytest.fixture
def case() -> Case:
    """x of (8, 2, 16), a residual and a scale: an op of several operands and results."""
    return _case()


_case = functools.cache(functools.partial(Case, "residual_rms_norm"))


def _mesh(*types):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


@pytest.fixture
def auto_mesh(eight_devices):
    return _mesh(AxisType.Auto, AxisType.Auto)


@pytest.fixture
def explicit_mesh(eight_devices):
    return _mesh(AxisType.Explicit, AxisType.Explicit)


@pytest.fixture
def mixed_mesh(eight_devices):
    return _mesh(AxisType.Explicit, AxisType.Auto)
