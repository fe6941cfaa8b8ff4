"""Random losses for `fuse`: compositions of equations over logits, beside the same function.

    python tests/fuse/fuzz_losses.py --losses 2000 --seed 0

A loss is a list of steps, each of values that there are: wide ones, of rows and words, and narrow
ones, a number for each row. Values and gradients are compared in float64. Loss number n is the same
in each run. Some losses combine rows, and have to stay.
"""

import argparse
import collections
import pathlib
import sys
import time
import warnings

if __name__ == "__main__":  # the helpers of the tests
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from numpy_interpreter import evaluated  # noqa: E402

ROWS, BATCH, FEATURES, WORDS = 12, 3, 4, 16

UNARY = {
    "tanh": jnp.tanh,
    "square": lambda a: a * a / 4,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "log_softmax": jax.nn.log_softmax,
    "softmax": jax.nn.softmax,
    "smaller": lambda a: jnp.exp(-jnp.abs(a)),
    "stopped": jax.lax.stop_gradient,
    "clipped": lambda a: jnp.clip(a, -1, 2),
    "cumulated": lambda a: jnp.cumsum(a, -1) / 4,
    "sorted": lambda a: jnp.sort(a, -1),
    "turned": lambda a: jnp.flip(a, -1),
    "moved": lambda a: jnp.roll(a, 3, -1),
    "cut": lambda a: jnp.pad(a[:, 2:], ((0, 0), (1, 1))),
    "joined": lambda a: jnp.concatenate([a[:, 8:], -a[:, :8]], 1),
    "there and back": lambda a: jnp.sin(a.T).T,
    "reshaped": lambda a: (a.reshape(BATCH, -1, WORDS) * jnp.arange(1.0, 4)[:, None, None]).reshape(
        ROWS, WORDS
    ),
    "swapped": lambda a: (
        jnp.cos(jnp.swapaxes(a.reshape(BATCH, -1, WORDS), 0, 1)).swapaxes(0, 1).reshape(ROWS, -1)
    ),
    "checkpointed": jax.checkpoint(lambda a: jnp.sin(a) * a),
    "masked": lambda a: jnp.where(jnp.arange(WORDS) < 13, a, -1e9) / 1e9,
    "later": lambda a: jnp.where(jnp.arange(ROWS)[:, None] > 4, a, a / 2),
}
REDUCED = {
    "sum": lambda a: a.sum(-1),
    "mean": lambda a: a.mean(-1),
    "max": lambda a: a.max(-1),
    "lse": lambda a: jax.nn.logsumexp(a, -1),
    "std": lambda a: jnp.sqrt(a.var(-1) + 1),
    "argmax": lambda a: a.argmax(-1).astype(a.dtype) / 9,
    "top": lambda a: jax.lax.top_k(a, 3)[0].sum(-1),
    "dot": lambda a: a @ jnp.linspace(-1, 1, WORDS),
    "norm": lambda a: jnp.linalg.norm(a + 3, axis=-1),
}
PICKED = {
    "along": lambda a, y: jnp.take_along_axis(a, y[:, None], 1)[:, 0],
    "at": lambda a, y: a[jnp.arange(ROWS), y],
    "hot": lambda a, y: (a * jax.nn.one_hot(y, WORDS)).sum(-1),
    "product": lambda a, y: jnp.einsum("rv,rv->r", a, jax.nn.one_hot(y, WORDS)),
}
BINARY = {
    "plus": lambda a, b: a + b,
    "less": lambda a, b: a - b,
    "times": lambda a, b: a * jnp.tanh(b),
    "over": lambda a, b: a / (1 + b * b),
    "where": lambda a, b: jnp.where(a > b, a, b / 2),
    "both": jnp.logaddexp,
}
COMBINED = {
    "of all": lambda a: a / (1 + jnp.max(jnp.abs(a))),
    "of a word": lambda a: a - a.mean(0),
    "of rows": lambda a: jnp.cumsum(a, 0) / 9,
}


def write(seed):
    """Returns the steps of a loss: (kind, name, numbers that choose its operands)."""
    rng = np.random.default_rng(seed)
    kinds = ["unary"] * 4 + ["reduced"] * 3 + ["picked"] * 2 + ["binary"] * 2 + ["spread"] * 2
    kinds += ["of a narrow"]
    steps = []
    for _ in range(rng.integers(3, 12)):
        kind = str(rng.choice(kinds)) if rng.random() > 0.02 else "combined"
        table = TABLES[kind]
        steps.append((kind, str(rng.choice([*table])), *map(int, rng.integers(0, 99, 2))))
    return steps, int(rng.integers(0, 4))


TABLES = {
    "unary": UNARY,
    "reduced": REDUCED,
    "picked": PICKED,
    "binary": BINARY,
    "spread": BINARY,
    "of a narrow": dict.fromkeys(["tanh", "softplus", "smaller", "square", "sigmoid"]),
    "combined": COMBINED,
}


def loss_of(seed):
    """Returns the function of a loss."""
    steps, end = write(seed)

    def loss(x, w, other, v, y, weights):
        z = x @ w
        wide = [z, other @ v, z + weights[:, None]][: 2 + seed % 2]
        narrow = [jax.nn.logsumexp(z, -1)]
        for kind, name, i, j in steps:
            a, b = wide[-1 - i % min(3, len(wide))], wide[j % len(wide)]
            n = narrow[j % len(narrow)]
            if kind == "unary":
                wide.append(UNARY[name](a))
            elif kind == "reduced":
                narrow.append(REDUCED[name](a))
            elif kind == "picked":
                narrow.append(PICKED[name](a, y))
            elif kind == "binary":
                wide.append(BINARY[name](a, b))
            elif kind == "spread":
                wide.append(BINARY[name](a, n[:, None]))
            elif kind == "of a narrow":
                narrow.append(UNARY[name](n))
            else:
                wide.append(COMBINED[name](a))
        each = sum(jnp.tanh(n) * (k + 1) for k, n in enumerate(narrow[-3:]))
        each = each + REDUCED["mean"](wide[-1])
        ends = each * weights, jnp.where(weights > 0, each, 0), each.reshape(BATCH, -1).sum(1), each
        return ends[end].sum() + wide[-1].sum() * (end == 3) / 50, each

    return loss


def arguments(seed):
    keys = jax.random.split(jax.random.key(seed), 6)
    shapes = (ROWS, FEATURES), (FEATURES, WORDS), (ROWS, FEATURES), (FEATURES, WORDS)
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes)]
    return *arrays, jax.random.randint(keys[4], (ROWS,), 0, WORDS), jnp.sin(jnp.arange(ROWS * 1.0))


def run(seed):
    """Returns how a loss was served; raises AssertionError where it differs."""
    from normfuse import fuse

    loss, args, reports = loss_of(seed), arguments(seed), []
    both = lambda f: jax.value_and_grad(f, (0, 1, 2, 3, 5), has_aux=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = jax.jit(both(fuse(loss, report=reports.append)))(*args)
        want = evaluated(both(loss))(*args)
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        scale = np.abs(b).max() + 1e-3
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-9, atol=1e-9)
    rows = [row for row in reports[0].rows if row.domain in ("loss", "program")]
    failed = [row.reason for row in rows if "could not be" in row.reason]
    assert not failed, failed
    by = [row.served.split(":")[0] or "left" for row in rows]
    return "rows" if "rows" in by else by[0] if by else "nothing"


def run_many(seeds, show=print):
    """Returns the losses that fail, and how many are served by what."""
    failed, counts = [], collections.Counter()
    for seed in seeds:
        try:
            counts[run(seed)] += 1
        except Exception as error:
            failed.append(seed)
            show(f"loss {seed}: {write(seed)}\n{type(error).__name__}: {str(error)[:500]}")
    return failed, counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--losses", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from normfuse.layers.fuse import losses, region

    region.SMALLEST = losses.SMALLEST = 8
    jax.config.update("jax_enable_x64", True)
    start = time.time()
    failures, served = run_many(range(options.seed, options.seed + options.losses))
    print(dict(served), f"{len(failures)} failed: {failures}, {time.time() - start:.0f} s")
