"""Functions that differ a little from what `fuse` knows, in float64, where nothing is rounding.

MLPs, which are not served in float64, are compared in float32.
"""

import itertools
import math

import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse.test_spellings import case as spellings
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from normfuse.layers.fuse import constants

T, N, V = 16, 512, 1024


def draw(i, *shape):
    return np.random.default_rng(i).standard_normal(shape)


def keeps(function, args, served, dtype=jnp.float64):
    """Compares `fuse(function)` with the function; it serves the domain `served`, or nothing."""
    wide = dtype == jnp.float64
    with jax.enable_x64(wide):
        args = [
            jnp.asarray(x, dtype if np.issubdtype(x.dtype, np.floating) else None) for x in args
        ]
        found, fused = fuse_cases.compare(
            function, args, jit=False, rounding=1e-10 if wide else 1e-5
        )
    assert set(found) == ({served} if served else set()), fused


# ---------------------------------------------------------------- constants


def rms(count, factor=1.0, width=N):
    return lambda x, w: x * lax.rsqrt((x * x).sum(-1, keepdims=True) / count + 1e-6) * factor * w


def deviation(x):
    return x - x.mean(-1, keepdims=True)


def moments(count):
    def norm(x, w):
        mean = x.mean(-1, keepdims=True)
        variance = (x * x).sum(-1, keepdims=True) / count - mean * mean
        return (x - mean) * lax.rsqrt(variance + 1e-6) * w

    return norm


NORMS = {  # and what serves them
    "mean": (rms(N), "norm"),
    "one of 512 less": (rms(N - 1), ""),
    "one of 512 more": (rms(N + 1), ""),
    "a length times the root of 512": (rms(1, math.sqrt(N)), "norm"),
    "a length times 22.6": (rms(1, 22.6), ""),
    "variance": (lambda x, w: rms(N)(deviation(x), w), "norm"),
    "unbiased variance": (lambda x, w: rms(N - 1)(deviation(x), w), ""),
    "a mean of one less": (
        lambda x, w: rms(N)(x - x.sum(-1, keepdims=True) / (N - 1), w),
        "norm",  # another x's, which is not centred
    ),
    "moments": (moments(N), "norm"),
    "moments of one less": (moments(N - 1), ""),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_mean_is_one(name):
    norm, served = NORMS[name]
    keeps(norm, [draw(0, T, N), draw(1, N)], served)


def test_a_hidden_array_that_is_cast_to_integers_stays():
    hidden = lambda x, gate, up: jax.nn.silu(x @ gate) * (x @ up)
    mlp = lambda x, gate, up, down: hidden(x, gate, up).astype(int).astype(x.dtype) @ down
    args = [draw(0, 2 * T, 32), *(draw(i, 32, 32) for i in (1, 2, 3))]
    keeps(mlp, args, "", jnp.float32)


ROOT = math.sqrt(2 / math.pi)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("number", [1.0, 0.75, 512.0, 1 / 768])
def test_a_constant_stands_for_what_its_dtype_rounds_to_it(number, dtype):
    """One of 16 bits not for its neighbours; others for those within two units of the last."""
    dtype = jnp.dtype(dtype)
    x = np.asarray(number, dtype)
    neighbours = [np.nextafter(x, np.asarray(end, dtype)) for end in (0, np.inf)]
    with jax.enable_x64():
        apart = [abs(float(n) / float(x) - 1) for n in neighbours]
        slack = constants.slack(float(x), dtype)
    assert abs(number / float(x) - 1) <= slack
    if dtype.itemsize == 2:
        assert min(apart) / 2 <= slack < min(apart)
    else:
        assert max(apart) <= slack <= 4.1 * min(apart)


def gelu(root=ROOT, cube=0.044715):
    return lambda z: 0.5 * z * (1 + jnp.tanh(root * (z + cube * z**3)))


ACTIVATIONS = {
    "silu": (jax.nn.silu, True),
    "1.04 silu": (lambda z: 1.04 * jax.nn.silu(z), False),
    "0.985 silu": (lambda z: 0.985 * jax.nn.silu(z), False),
    "1.001 silu": (lambda z: 1.001 * jax.nn.silu(z), False),
    "silu of 1.04 z": (lambda z: jax.nn.silu(1.04 * z), False),
    "z sigmoid(1.02 z)": (lambda z: z * jax.nn.sigmoid(1.02 * z), False),
    "z sigmoid(1.702 z)": (lambda z: z * jax.nn.sigmoid(1.702 * z), False),
    "silu and a thousandth": (lambda z: jax.nn.silu(z) + 1e-3 * z, False),
    "gelu": (gelu(), True),
    "gelu of .8": (gelu(root=0.8), False),
    "gelu of .79788": (gelu(root=0.79788), False),
    "gelu of .0447": (gelu(cube=0.0447), False),
    "gelu of ten digits": (gelu(root=0.7978845608), True),
    "gelu of z / 1.41": (lambda z: 0.5 * z * (1 + lax.erf(z / 1.41)), False),
    "1.01 relu": (lambda z: 1.01 * jax.nn.relu(z), False),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_one(name):
    activation, served = ACTIVATIONS[name]
    mlp = lambda x, gate, up, down: (activation(x @ gate) * (x @ up)) @ down
    args = [draw(0, 2 * T, 32), *(draw(i, 32, 32) / 6 for i in (1, 2, 3))]
    keeps(mlp, args, "mlp" if served else "", jnp.float32)


@pytest.mark.parametrize("root", [ROOT, 0.76])
def test_constants_of_bfloat16_are_what_it_rounds_to(root):
    mlp = lambda x, up, down: gelu(root)(x @ up) @ down
    args = [draw(0, 2 * T, 32), draw(1, 32, 32) / 6, draw(2, 32, 32) / 6]
    args = [jnp.asarray(x, jnp.bfloat16) for x in args]
    fused = fuse_cases.Fused(mlp, serves=False)
    found = fused(*args).astype(jnp.float32)
    np.testing.assert_allclose(found, mlp(*args).astype(jnp.float32), rtol=0.03, atol=0.03)
    assert fused.served() == ({"mlp": 1} if root == ROOT else {}), fused


def loss(change=lambda z: z, lse=1.0, pick=1.0):
    def function(x, kernel, labels):
        z = change(x @ kernel)
        picked = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        return lse * jax.nn.logsumexp(z, -1) - pick * picked

    return function


def smoothed(rest):
    def function(x, kernel, labels):
        target = 0.9 * jax.nn.one_hot(labels, V, dtype=x.dtype) + rest
        return -jnp.sum(target * jax.nn.log_softmax(x @ kernel), -1)

    return function


LOSSES = {
    "a temperature": loss(lambda z: z / 0.7),
    "a temperature near 1": loss(lambda z: z * 1.0000005),
    "log-sum-exps times a number near 1": loss(lse=1.0000005),
    "log-sum-exps less nearly all of a logit": loss(pick=0.9999995),
    "float32 operands": lambda x, w, y: loss()(*(a.astype("f4").astype("f8") for a in (x, w)), y),
    "smoothed labels": smoothed(0.1 / V),
    "smoothed labels that are not quite 1": smoothed(0.1 / (V - 1)),
}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_its_factors(name, rows):
    each = LOSSES[name]
    function = each if rows else lambda *args: each(*args).sum()
    args = [draw(0, T, 32), draw(1, 32, V), np.arange(T) * 7 % V]
    keeps(function, args, "loss")


@pytest.mark.parametrize("factor", [0.5, 0.7])
def test_a_factor_that_operands_would_round_stays(factor):
    def total(x, kernel, labels):
        z = lax.dot(x, kernel, preferred_element_type=jnp.float32) * factor
        return jnp.sum(jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, labels[:, None], 1)[:, 0])

    args = [jnp.asarray(draw(i, *s), jnp.bfloat16) for i, s in enumerate([(T, 32), (32, V)])]
    args.append(jnp.arange(T) * 7 % V)
    fused = fuse_cases.Fused(total, serves=False)
    assert abs(fused(*args) / total(*args) - 1) < 1e-6
    (row,) = fused.rows
    by = "linear_cross_entropy" if factor == 0.5 else "rows"  # whose operands stay as they are
    assert row.served.startswith(by), fused


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_vectors_are_scaled_in_float32(offset):
    """A bfloat16 scale that the program multiplies in float32 is not rounded again."""

    def norm(x, w):
        return rms(N)(x, w.astype(jnp.float32) * 1.3 + offset)

    x, w = jnp.asarray(draw(0, T, N), jnp.float32), jnp.asarray(draw(1, N), jnp.bfloat16)
    fused = fuse_cases.Fused(norm)
    np.testing.assert_allclose(fused(x, w), norm(x, w), rtol=2e-5, atol=1e-6)


# ---------------------------------------------------------------- dimensions of size 1


def attend(mask):
    def attention(q, k, v, p):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * 8**-0.5
        p = jax.nn.softmax(jnp.where(mask(p), s, -1e30), -1)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    return attention


def index():
    return jnp.arange(T)


def behind():
    return index()[:, None] - index()


def of_rows(d, p):
    return (d[:, :, None] >= p[:, None, :])[:, None]


MASKS = {  # arithmetic on positions with one of them, from a row of positions p
    "from the first": lambda p: of_rows(p - p[:, :1], p - p[:, :1]),
    "to the last": lambda p: of_rows(p[:, -1:] - p, p[:, -1:] - p),
    "iota from its first": lambda _: of_rows(index()[None] - index()[None, 2:3], index()[None] - 3),
    "from one on": lambda _: index() >= index()[2:3],
    "rows from one on": lambda _: (index()[:, None] >= index()[2:3]) | (behind() == 0),
    "times one": lambda _: index()[:, None] * index()[1:2] >= index(),
    "a window of differences": lambda _: (behind() >= behind()[3:4] - 2) | (behind() == 0),
    "columns from one on": lambda _: (behind() >= 0) & (index()[5:6] <= index()) | (behind() == 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_positions_of_one_element_are_for_all(name):
    heads = [draw(i, 2, T, 4, 8) for i in range(3)]
    positions = np.stack([np.arange(T) + 3, np.arange(T)])
    keeps(attend(MASKS[name]), [*heads, positions], "attention")


INDEXED = {
    "updates": lambda x, p: jnp.zeros((2 * T, 8), x.dtype).at[p + p[1:2]].set(x),
    "reads": lambda x, p: x[p[3:] - p[1:2]],
    "reads in steps": lambda x, p: x[p[:6] * p[2:3]],
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_of_one_element_are_for_all(name):
    keeps(lambda x: INDEXED[name](x, index()), [draw(0, T, 8)], "indexing")


# ---------------------------------------------------------------- one other number of each spelling

SHARE = 12
"""Of all numbers of the spellings, one in so many is changed."""


def near(x):
    """Returns a number near another, of its dtype."""
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        return np.asarray(x + 1, x.dtype)
    if not np.isfinite(x) or abs(x) > 1e30:  # a mask's fill
        return np.asarray(-1e5, x.dtype)
    return np.asarray(x * 1.001 if x else 0.001, x.dtype)


def changes(closed):
    """Yields a program with each of its numbers changed in turn."""
    equations = closed.jaxpr.eqns
    for n, eqn in enumerate(equations):
        for other in changes_of(eqn):
            jaxpr = closed.jaxpr.replace(eqns=[*equations[:n], other, *equations[n + 1 :]])
            yield closed.replace(jaxpr=jaxpr)


def changes_of(eqn):
    for i, v in enumerate(eqn.invars):
        if isinstance(v, Literal) and not v.aval.ndim and v.aval.dtype != bool:
            number = Literal(near(np.asarray(v.val, v.aval.dtype)), v.aval)
            yield eqn.replace(invars=[*eqn.invars[:i], number, *eqn.invars[i + 1 :]])
    if eqn.primitive.name == "integer_pow":
        yield eqn.replace(params=eqn.params | {"y": eqn.params["y"] + 1})
    if eqn.primitive.name in ("jit", "pjit"):
        for inner in changes(eqn.params["jaxpr"]):
            yield eqn.replace(params=eqn.params | {"jaxpr": inner})


def program_of(case, dtype):
    """Returns the program of a spelling and its operands; None where it insists on its dtypes."""
    function, args = case.make()
    leaves, tree = jax.tree.flatten(fuse_cases.cast(args, dtype))
    flat = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))
    try:
        return jax.make_jaxpr(flat)(*leaves), leaves
    except TypeError:  # a carry, say, that it casts to float32
        return None


@pytest.mark.parametrize("part", range(4))
def test_one_other_number(part):
    """A spelling with another number is another function, which `fuse` serves as that or leaves."""
    count = 0
    for k, case in enumerate(spellings[part::4]):
        wide = "mlp" not in case.expected
        with jax.enable_x64(wide):
            if (read := program_of(case, jnp.float64 if wide else jnp.float32)) is None:
                continue
            closed, leaves = read
            rounding = 3e-5 if "f32[" in str(closed) else 1e-9
            for changed in itertools.islice(changes(closed), k % SHARE, None, SHARE):
                function = jaxpr_as_fun(changed)
                fused = fuse_cases.Fused(function, serves=False)
                jax.eval_shape(fused, *leaves)
                if served := fused.served():
                    both_ways = fuse_cases.evaluated(fuse_cases.both_ways)
                    theirs, ours = (both_ways(f, leaves) for f in (function, fused))
                    try:
                        fuse_cases.check(ours, theirs, function, leaves, rounding, strict=False)
                    except AssertionError as error:
                        error.add_note(f"{case.name}, {served}:\n{changed}")
                        raise
                    count += 1
    assert count > 5
