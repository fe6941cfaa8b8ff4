"""Random losses for `fuse`: compositions of equations over logits, beside the same function.

    python tests/fuse/fuzz_losses.py --losses 2000 --seed 0

A loss is a list of steps, each of values that there are: wide ones, of rows and words, and narrow
ones, a number for each row. Values and gradients are compared in float64, and where the loss is in
bfloat16, as close to float64 as theirs. Some are eager, some have rows of NaN and of infinities,
labels outside and weights of 0. Loss number n is the same in each run. Some losses combine rows,
and have to stay.
"""

import argparse
import collections
import contextlib
import functools
import pathlib
import sys
import time
import warnings

if __name__ == "__main__":  # the helpers of the tests
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpy_interpreter  # noqa: E402

BATCH, FEATURES, WORDS = 3, 4, 16
SIZES = 12, 15, 21, 39  # of rows; chunks divide the first alone


@jax.custom_jvp
def own_rule(a):
    return jnp.sin(a)


own_rule.defjvp(lambda primals, tangents: (own_rule(*primals), tangents[0] * jnp.tanh(primals[0])))


@jax.custom_vjp
def own_gradient(a):
    return a * a / 3


own_gradient.defvjp(lambda a: (own_gradient(a), a), lambda a, ct: (jnp.cos(a) * ct,))

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
        a.shape
    ),
    "swapped": lambda a: (
        jnp.cos(jnp.swapaxes(a.reshape(BATCH, -1, WORDS), 0, 1)).swapaxes(0, 1).reshape(a.shape)
    ),
    "checkpointed": jax.checkpoint(lambda a: jnp.sin(a) * a),
    "masked": lambda a: jnp.where(jnp.arange(WORDS) < 13, a, -1e9) / 1e9,
    "later": lambda a: jnp.where(jnp.arange(len(a))[:, None] > 4, a, a / 2),
    "own rule": own_rule,
    "own gradient": own_gradient,
    "noisy": lambda a: a + jax.random.normal(jax.random.key(3), a.shape, a.dtype) / 4,
    "sparse": lambda a: jax.nn.relu(a - (jnp.sort(a, -1)[:, -4:].sum(-1, keepdims=True) - 1) / 4),
    "last": lambda a: jnp.where(a >= jax.lax.top_k(a, 5)[0][:, -1:], a, -4),
    "exp": lambda a: jnp.exp(jnp.minimum(a, 3)),
    "log": lambda a: jnp.log1p(jnp.abs(a)),
    "narrower": lambda a: a.astype(jnp.float32).astype(a.dtype),
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
    "min": lambda a: a.min(-1),
    "any": lambda a: jnp.any(a > 2, -1).astype(a.dtype),
    "product": lambda a: jnp.prod(1 + jnp.tanh(a) / 9, -1),
    "masked": lambda a: jnp.mean(a, -1, where=jnp.arange(WORDS) % 3 > 0),
}
PICKED = {
    "along": lambda a, y: jnp.take_along_axis(a, y[:, None], 1)[:, 0],
    "at": lambda a, y: a[jnp.arange(len(a)), y],
    "each": lambda a, y: jax.vmap(lambda row, i: row[i])(a, y),
    "hot": lambda a, y: (a * jax.nn.one_hot(y, WORDS, dtype=a.dtype)).sum(-1),
    "product": lambda a, y: jnp.einsum("rv,rv->r", a, jax.nn.one_hot(y, WORDS, dtype=a.dtype)),
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


def texts(each):
    return each.reshape(BATCH, -1)


ENDS = {  # of a number for each row, another and weights
    "weighted": lambda n, m, w: jnp.sum(n * w),
    "weighted mean": lambda n, m, w: jnp.sum(n * w) / jnp.maximum(jnp.sum(w > 0), 1),
    "masked": lambda n, m, w: jnp.sum(jnp.where(w > 0, n, 0)) / jnp.sum(w > 0),
    "two": lambda n, m, w: n.mean() + 0.1 * jnp.mean(m * m),
    "two, masked": lambda n, m, w: (n * w).sum() / 7 - jnp.where(w[0] > 0, m.mean() / 3, 0),
    "texts": lambda n, m, w: texts(n).sum(1) @ jnp.arange(1.0, 1 + BATCH, dtype=n.dtype),
    "mean of texts": lambda n, m, w: jnp.mean(texts(n).sum(1) / (1 + texts(w > 0).sum(1))),
    "tanh of texts": lambda n, m, w: jnp.tanh(texts(n).mean(1)).sum() + m.mean(),
    "root": lambda n, m, w: jnp.sqrt(1 + jnp.mean(n) ** 2) * 3,
    "product": lambda n, m, w: n.mean() * jnp.tanh(m.mean()),
    "dot": lambda n, m, w: n @ w,
    "largest": lambda n, m, w: n.max() + m.sum() / 9,
    "several": lambda n, m, w: jnp.tanh(jnp.stack([n, m], -1).mean(0)).sum(),
    "several, weighted": lambda n, m, w: jnp.square(w @ jnp.stack([n, m, n * m], -1)).sum(),
    "several, kept": lambda n, m, w: jnp.sin(jnp.mean((n * w)[:, None], 0, keepdims=True)).sum(),
    "several, of words": lambda n, m, w: jnp.tanh((n[:, None] * jnp.arange(3.0)).mean(0)).max(),
}
BESIDE = {  # what is returned beside the loss
    "nothing": lambda n, m, w: (),
    "rows": lambda n, m, w: n,
    "totals": lambda n, m, w: (m.mean(), jnp.argmax(n)),
}


def write(seed):
    """Returns the steps of a loss, (kind, name, numbers that choose its operands), and its end."""
    rng = np.random.default_rng(seed)
    kinds = ["unary"] * 4 + ["reduced"] * 3 + ["picked"] * 2 + ["binary"] * 2 + ["spread"] * 2
    kinds += ["of a narrow"]
    steps = []
    for _ in range(rng.integers(3, 12)):
        kind = str(rng.choice(kinds)) if rng.random() > 0.02 else "combined"
        table = TABLES[kind]
        steps.append((kind, str(rng.choice([*table])), *map(int, rng.integers(0, 99, 2))))
    return steps, str(rng.choice([*ENDS])), str(rng.choice([*BESIDE]))


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
    steps, end, beside = write(seed)

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
        ends = each + REDUCED["mean"](wide[-1]), narrow[-1], weights
        return ENDS[end](*ends), BESIDE[beside](*ends)

    return loss


def arguments(seed, hostile=False, dtype=jnp.float64):
    keys, rows = jax.random.split(jax.random.key(seed), 6), SIZES[seed // 7 % 4]
    shapes = (rows, FEATURES), (FEATURES, WORDS), (rows, FEATURES), (FEATURES, WORDS)
    arrays = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes)]
    y, weights = jax.random.randint(keys[4], (rows,), 0, WORDS), jnp.sin(jnp.arange(rows * 1.0))
    if hostile:
        strange = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0, 1e300], dtype)
        arrays[0] = arrays[0].at[2, 1].set(strange[seed % 5]).at[7].set(strange[seed // 5 % 5])
        y = y.at[jnp.arange(5)].set(jnp.array([-1, -100, WORDS, 10**6, -WORDS]))
        weights = weights.at[jnp.arange(3, 9)].set(0) * (seed % 11 > 0)
    return *arrays, y, weights.astype(dtype)


def check(found, want, exact, narrow, rounding):
    """Asserts that a result is theirs, or as close to float64."""
    if not narrow or found.dtype == np.int64:
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(want))
        scale = np.abs(np.nan_to_num(want, posinf=0, neginf=0)).max() + 1e-3
        np.testing.assert_allclose(found / scale, want / scale, rtol=rounding, atol=rounding)
        return
    ours, theirs = (np.abs(np.asarray(a, np.float64) - exact).max() for a in (found, want))
    assert ours <= 4 * theirs + 32 * jnp.finfo(found.dtype).eps * np.abs(exact).max() + 1e-6


@contextlib.contextmanager
def uncompiled():
    """Runs chunks by NumPy, too, which is sooner done than that XLA compiles them."""
    from normfuse.layers.core.op import Split
    from normfuse.layers.fuse import region

    def rule(params, *operands):
        spec, operands = params["spec"], params["tree"].unflatten(operands)
        one = functools.partial(region._body, spec, Split(((),) * len(spec.rows), ()))
        chunks = jax.make_jaxpr(functools.partial(one, order=params["order"]))(*operands)
        return numpy_interpreter.evaluate(chunks, *operands)

    names = [op.primitive.name for op in (region.rows, region.gradients)]
    numpy_interpreter.CALLS.add(rule)
    numpy_interpreter.RULES.update(dict.fromkeys(names, rule))
    try:
        yield
    finally:
        for name in names:
            del numpy_interpreter.RULES[name]


def run(seed):
    """Returns how a loss was served; raises AssertionError where it differs."""
    from normfuse import fuse

    loss, reports, hostile = loss_of(seed), [], seed % 5 == 3
    narrow = functools.partial(arguments, seed, dtype=jnp.bfloat16) if seed % 5 == 4 else None
    args = arguments(seed, hostile) if narrow is None else narrow()
    rounds = any(name == "narrower" for _, name, *_ in write(seed)[0])  # to float32
    rounding = 1e-5 if rounds else 1e-9
    by_numpy = numpy_interpreter.evaluated
    wrap = {0: jax.jit, 5: lambda f: f}.get(seed % 20, by_numpy)  # compiled, or eager

    def both(f, args, wrap=by_numpy):
        times = lambda *args: (lambda value, aux: (value * 3, aux))(*f(*args))
        moved = (0, 1, 2, 3, 5) if seed % 3 else (0, 1)
        return wrap(jax.value_and_grad(times, moved, has_aux=True))(*args)

    with warnings.catch_warnings(), uncompiled():
        warnings.simplefilter("ignore")
        found, want = both(fuse(loss, report=reports.append), args, wrap), both(loss, args)
        wide = [a.astype(jnp.float64) if a.dtype == jnp.bfloat16 else a for a in args]
        exact = want if narrow is None else both(loss, wide)
    for each in zip(*map(jax.tree.leaves, (found, want, exact)), strict=True):
        check(*map(np.asarray, each), narrow, rounding)
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
    from normfuse.layers.fuse import losses, search

    search.SMALLEST = losses.SMALLEST = 8
    jax.config.update("jax_enable_x64", True)
    start = time.time()
    failures, served = run_many(range(options.seed, options.seed + options.losses))
    print(dict(served), f"{len(failures)} failed: {failures}, {time.time() - start:.0f} s")
