"""A few hundred random programs; `python tests/fuse/fuzz.py` runs as many as wanted."""

import jax
import pytest
from fuse import fuzz

import normfuse

EACH = 40


@pytest.mark.parametrize("first", range(0, 3 * EACH, EACH))
def test_random_programs(first):
    failed, counts = fuzz.run_many(range(first, first + EACH))
    assert not failed, [seed for seed, _ in failed]
    assert counts["programs"] > 0.8 * EACH  # JAX refuses few
    assert counts["programs with a site"] > 0.15 * EACH  # and many are served


def test_programs_are_the_same_each_time():
    assert [str(fuzz.write(seed)) for seed in range(20)] == [
        str(fuzz.write(seed)) for seed in range(20)
    ]


def test_a_wrong_rewrite_is_found(monkeypatch):
    """The fuzzer reports a `fuse` that moves results or drops gradients."""
    changes = {
        "values": lambda y: y * 1.01,
        "gradients": jax.lax.stop_gradient,
        "an offset": lambda y: y + 0.1,
    }
    for name, change in changes.items():

        def wrong(function, *, report, change=change):
            def run(*args):
                report(type("Report", (), {"rows": ()}))
                return jax.tree.map(change, function(*args))

            return run

        monkeypatch.setattr(normfuse, "fuse", wrong)
        failed, counts = fuzz.run_many(range(8), show=lambda text: None)
        assert len(failed) >= 4, name
