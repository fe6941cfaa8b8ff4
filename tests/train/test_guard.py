"""Steps that must not be taken: losses that are not finite, and spikes."""

import numpy as np
import pytest

from normfuse.train import step


def test_loss_that_is_not_finite_stops_before_the_update(train, tmp_path, lines):
    code, _, err = train(**{"optim.lr": 1e30, "optim.clip": 0, "checkpoint.every": 1})
    assert code == 1
    assert "Traceback" not in err
    step = next(x["step"] for x in lines(tmp_path / "run") if x.get("event") == "not finite")
    batch = tmp_path / "run" / f"bad_batch_{step}.npy"
    assert f"step {step}: not finite: loss" in err and str(batch) in err
    assert np.load(batch).shape == (8, 17)
    last = tmp_path / "run" / "checkpoints" / str(step - 1)
    assert str(last) in err and last.is_dir()
    assert not (tmp_path / "run" / "checkpoints" / str(step)).exists()
    assert max(x["step"] for x in lines(tmp_path / "run") if "loss" in x) == step


@pytest.fixture
def unlucky(monkeypatch):
    """Spoils the loss and gradient of some batches; a poisoned state would be beyond help."""
    whole = step.loss_and_gradient

    def spoil(divisor, loss_by, gradient_by):
        import jax
        import jax.numpy as jnp

        def sometimes(model, params, tokens, **options):
            loss, gradient = whole(model, params, tokens, **options)
            hit = tokens.sum() % divisor == 0
            scaled = jax.tree.map(lambda g: g * jnp.where(hit, gradient_by, 1.0), gradient)
            return loss * jnp.where(hit, loss_by, 1.0), scaled

        monkeypatch.setattr(step, "loss_and_gradient", sometimes)

    return spoil


def test_bad_steps_may_be_left_out(unlucky, train, tmp_path, lines):
    unlucky(3, 1.0, np.inf)
    code, out, err = train(guard="skip:9")
    assert (code, err) == (0, "")
    left_out = [x for x in lines(tmp_path / "run") if x.get("skipped")]
    assert 1 <= len(left_out) <= 5
    assert out.count("update skipped") == len(left_out)
    assert all(x["grad_norm"] is None and x["loss"] > 0 for x in left_out)


def test_spike_stops_and_the_state_before_it_goes_on(unlucky, train, tmp_path, lines, losses):
    """Saved is the state before the spike: continued without it, the run is one that skipped it."""
    unlucky(7, 9.0, 1.0)
    options = {"steps": 40, "optim.lr": 1e-3}
    code, out, err = train(**options)
    assert code == 1 and "Traceback" not in err
    run = tmp_path / "run"
    spike = next(x for x in lines(run) if x.get("event") == "spike")
    assert spike["step"] > 20  # the first are not judged
    last = run / "checkpoints" / str(spike["step"] - 1)
    assert f"step {spike['step']}: spike: loss {spike['loss']:.4f}" in err
    assert f"last good checkpoint is {last}" in err and last.is_dir()
    assert np.load(run / f"bad_batch_{spike['step']}.npy").sum() % 7 == 0

    skip = {"guard": "skip:30", **options}
    code, out, _ = train(**skip)
    assert code == 0 and f"continuing after step {spike['step'] - 1}" in out
    assert train(**skip, out_dir=tmp_path / "whole")[0] == 0
    assert losses(run) == losses(tmp_path / "whole")
    left_out = {x["step"] for x in lines(run) if x.get("skipped")}
    assert spike["step"] in left_out and min(left_out) == spike["step"]
