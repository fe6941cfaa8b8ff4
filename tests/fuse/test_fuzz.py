"""Some random programs; `python tests/fuse/fuzz.py` runs as many as wanted."""

import jax
import pytest
from fuse import fuzz

import normfuse

EACH = 12


@pytest.mark.parametrize("first", range(0, 3 * EACH, EACH))
def test_random_programs(first):
    failed, counts = fuzz.run_many(range(first, first + EACH))
    assert not failed
    assert counts["programs"] > 0.8 * EACH  # JAX refuses few
    assert counts["programs with a site"] > 0.15 * EACH  # and many are served


def test_programs_are_the_same_each_time():
    once, again = ([str(fuzz.write(seed)) for seed in range(20)] for _ in range(2))
    assert once == again


@pytest.mark.parametrize("moved", ["values", "gradients"])
def test_a_wrong_rewrite_is_found(monkeypatch, moved):
    """The fuzzer reports a `fuse` that moves results or drops gradients."""
    change = {"values": lambda y: y * 1.01, "gradients": jax.lax.stop_gradient}[moved]

    def wrong(function, *, report):
        def run(*args):
            report(type("Report", (), {"rows": ()}))
            return jax.tree.map(change, function(*args))

        return run

    monkeypatch.setattr(normfuse, "fuse", wrong)
    failed, _ = fuzz.run_many(range(4), show=lambda text: None)
    assert len(failed) >= 2
