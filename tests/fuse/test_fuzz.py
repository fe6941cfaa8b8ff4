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


@pytest.mark.parametrize("mode", fuzz.MODES)
def test_a_wrong_rewrite_is_found(monkeypatch, mode):
    """The fuzzer reports a `fuse` that moves results or drops gradients."""
    exact = mode == "float32"
    changes = {
        "values": lambda y: y * (1.01 if exact else 1.5),
        "gradients": jax.lax.stop_gradient,
        "an offset": lambda y: y + (0.1 if exact else 1),
    }
    for name, change in changes.items():

        def wrong(function, *, report, change=change, **options):
            def run(*args):
                report(type("Report", (), {"rows": ()}))
                return jax.tree.map(change, function(*args))

            return run

        monkeypatch.setattr(normfuse, "fuse", wrong)
        count = 8 if exact else 4
        failed, counts = fuzz.run_many(range(count), show=lambda text: None, mode=mode)
        assert len(failed) >= count // 2, (name, counts)


@pytest.mark.parametrize(
    "seed, mode, served",
    [
        pytest.param(80653, "float32", 1, id="a quotient by a sum of deviations"),
        pytest.param(80975, "float32", 1, id="scores of 1e8"),
        pytest.param(101691, "float32", 1, id="scores divided by 1e-3"),
        pytest.param(600096, "bfloat16", 0, id="scores plus -2e4 in a jit"),
    ],
)
def test_an_ill_conditioned_program_is_not_wrong(seed, mode, served):
    failed, counts = fuzz.run_many([seed], mode=mode)
    assert not failed and counts["ill-conditioned"] <= 1
    assert counts["programs with a site"] == served
