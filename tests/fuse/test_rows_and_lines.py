"""Rows that say what happens, and where: lines of lookups and codes, heads, maxima, relus."""

import inspect
import pathlib

import equinox as eqx
import fuse_cases
import jax
import jax.numpy as jnp
import pytest
from flax import linen
from fuse_cases import draws
from jax.ad_checkpoint import checkpoint_name

N = 64
f32, bf16 = jnp.float32, jnp.bfloat16


def here():
    """The line after the one that calls this, as reports write it."""
    return f"{pathlib.Path(__file__).name}:{inspect.currentframe().f_back.f_lineno + 1}"


def rows_of(function, *args, **options):
    fused = fuse_cases.Fused(function, serves=False, **options)
    jax.make_jaxpr(fused)(*args)
    return fused.rows


def of_norm(named):
    """An RMSNorm, one of whose statistics remat may keep."""

    def norm(x, scale):
        mean = jnp.mean(x * x, -1, keepdims=True)
        mean = checkpoint_name(mean, "mean") if named == "mean" else mean
        rstd = jax.lax.rsqrt(mean + 1e-6)
        rstd = checkpoint_name(rstd, "rstd") if named == "rstd" else rstd
        return x * rstd * scale

    return norm


def palm(x, scale):
    """PaLM's: the root of the width comes after the scale."""
    return jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6) * x * scale * N**0.5


def palm_early(x, scale):
    """The root of the width is a factor of the statistic."""
    return x * (jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-6) * N**0.5) * scale


def palm_within(x, scale):
    return x * jnp.sqrt(N / (jnp.sum(x**2, -1, keepdims=True) + 1e-6)) * scale


def centred(x, scale):
    mean = checkpoint_name(x.mean(-1, keepdims=True), "mean")
    var = checkpoint_name(((x - mean) ** 2).mean(-1, keepdims=True), "var")
    return (x - mean) * jax.lax.rsqrt(var + 1e-6) * scale


@pytest.mark.parametrize(
    "norm", [of_norm("mean"), of_norm("rstd"), palm, palm_early, palm_within, centred]
)
def test_norms_with_named_statistics_and_late_factors(norm):
    args = draws((3, 5, N), (N,))
    fuse_cases.compare(norm, args)
    (row,) = rows_of(norm, *args)
    assert row.domain == "norm" and row.served


def normed(h):
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


# Functions of a layer's result and a residual stream; the dtypes that each norm's kernel reads.
SUMS = {
    "widened": (lambda x, r: (h := x.astype(f32) + r, normed(h)), [(bf16, f32)]),
    "widened, second": (lambda x, r: (h := r + x.astype(f32), normed(h)), [(f32, bf16)]),
    "both widened": (lambda x, r: normed(x.astype(f32) + r.astype(bf16).astype(f32)), None),
    "read twice": (lambda x, r: ((w := x.astype(f32)) * 2, normed(w + r)), [(f32, f32)]),
    "returned": (lambda x, r: ((w := x.astype(f32)), normed(w + r)), [(f32, f32)]),
    "a norm's": (
        lambda x, r: normed(normed(x.astype(f32)).astype(bf16).astype(f32) + r),
        [(bf16,), (bf16, f32)],
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_norm_widens_what_it_adds(name):
    """No pass over memory widens it before; a norm whose result it is is computed once."""
    function, wanted = SUMS[name]
    x, r = draws((3, 5, N), (3, 5, N))
    whole = lambda x, r: function(x.astype(bf16), r)
    fuse_cases.compare(whole, (x, r), rounding=2**-8)
    program = jax.make_jaxpr(fuse_cases.Fused(whole, serves=False))(x, r)
    inner = (e.params["jaxpr"].eqns for e in program.eqns if e.primitive.name == "jit")
    read = [
        tuple(v.aval.dtype for v in e.invars)
        for equations in inner
        for e in equations
        if e.primitive.name == "normfuse_norm"
    ]
    assert sorted(read, key=len) == (wanted or [(bf16, f32)])


def test_a_relu_that_is_vmapped_is_one():
    mlp = eqx.nn.MLP(N, N, 2 * N, 1, key=jax.random.key(0))  # relu is its default
    arrays, static = eqx.partition(mlp, eqx.is_array)
    model = lambda arrays, x: jax.vmap(jax.vmap(eqx.combine(arrays, static)))(x)
    fuse_cases.compare(model, (arrays, *draws((4, 8, N))))
    (row,) = rows_of(model, arrays, *draws((4, 8, N)))
    assert "relu" in row.what and row.served


PARAMETERS = dict(zip(("w", "head"), draws((N, N), (N, 128))))


def double(p, x):
    return (x @ p["w"]) @ p["head"]


@pytest.mark.parametrize(
    "around",
    [
        lambda f: jax.checkpoint(f),
        lambda f: lambda p, x: jax.lax.scan(lambda c, x: (c, f(p, x)), 0, x[None])[1],
        lambda f: lambda p, x: jax.lax.cond(x[0, 0] > 0, f, lambda p, x: 2 * f(p, x), p, x),
        lambda f: jax.jit(f),
    ],
    ids=["remat", "scan", "cond", "jit"],
)
def test_heads_that_are_returned_from_within_stay(around):
    rows = rows_of(around(double), PARAMETERS, *draws((32, N)), quantization="fp8")
    assert sum(row.reason == "it is the function's result" for row in rows) == 1, rows
    assert any(row.served for row in rows)


def test_a_maximum_is_no_softmax():
    top = lambda p, x: jnp.max(double(p, x), -1).sum()
    rows = rows_of(top, PARAMETERS, *draws((32, N)), quantization="fp8")
    assert [row.served for row in rows] == ["dense, fp8"] * 2


def test_lookups_have_the_line_that_looks_up():
    table, ids = jnp.ones((50, N), bf16), jnp.arange(8)
    embed = linen.Embed(50, N, param_dtype=bf16)
    variables = embed.init(jax.random.key(0), ids)
    lines = []

    def taken(table, ids):
        lines.append(here())
        return jnp.take(table, ids, axis=0)

    def embedded(table, ids):
        lines.append(here())
        return embed.apply(table, ids)

    for function, values in (taken, table), (embedded, variables):
        (row,) = rows_of(function, values, ids)
        assert row.where.split()[-1] == lines[-1], row


def test_codes_have_the_line_of_their_own_norm():
    def model(p, x):
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) @ p["w"]
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) @ p["head"] * 2

    rows = rows_of(model, PARAMETERS, *draws((32, N)), quantization="fp8")
    codes = [row.where.split()[-1] for row in rows if row.domain == "codes"]
    norms = [row.where.split()[-1] for row in rows if row.domain == "norm"]
    assert len({*codes}) == 2 and sorted(codes) == sorted(norms), rows


def capped(x, w, b, y):
    """A loss whose logits have a bias, and then a soft cap."""
    z = 30 * jnp.tanh((x @ w + b) / 30)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1))


def test_a_loss_with_a_bias_and_a_soft_cap_has_a_row():
    """No kernel takes both; rows do."""
    x, w, b = draws((32, 16), (16, 2048), (2048,))
    args = x, w, b, jnp.arange(32) * 7
    fuse_cases.compare(capped, args)
    (row,) = [row for row in rows_of(capped, *args) if row.domain == "loss"]
    assert row.served
