"""Steps that must not be taken: losses that are not finite."""

import jax.numpy as jnp
import numpy as np

from normfuse.train import step as training


def test_loss_that_is_not_finite_stops_before_the_update(train, tmp_path, lines, monkeypatch):
    """And the state before it goes on, where the cause is mended."""
    whole = training.loss_and_gradient

    def sometimes(model, params, tokens, **options):
        loss, gradient = whole(model, params, tokens, **options)
        return jnp.where(tokens.sum() % 3 == 1, jnp.nan, loss), gradient

    with monkeypatch.context() as patch:
        patch.setattr(training, "loss_and_gradient", sometimes)
        code, _, err = train(**{"checkpoint.every": 1})
    assert code == 1
    assert "Traceback" not in err
    step = next(x["step"] for x in lines(tmp_path / "run") if x.get("event") == "not finite")
    assert step > 1
    batch = tmp_path / "run" / f"bad_batch_{step}.npy"
    assert f"step {step}: not finite: loss" in err and str(batch) in err
    assert np.load(batch).shape == (8, 17) and np.load(batch).sum() % 3 == 1
    last = tmp_path / "run" / "checkpoints" / str(step - 1)
    assert str(last) in err and last.is_dir()
    assert not (tmp_path / "run" / "checkpoints" / str(step)).exists()
    assert max(x["step"] for x in lines(tmp_path / "run") if "loss" in x) == step
    code, out, _ = train(**{"checkpoint.every": 1})
    assert code == 0 and f"continuing after step {step - 1}" in out
    assert [x["step"] for x in lines(tmp_path / "run") if "lr" in x] == [1, 2, 3, 4, 5, 6]
