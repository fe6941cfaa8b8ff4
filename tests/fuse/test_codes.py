"""In FP8, norms write codes for products of other functions, whatever is around them."""

import collections
import functools
import re

import fp8_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from flax import nnx
from fp8_recipe import check_all, dense_recipe, recipe, rows, with_norm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, fuse, layer_norm, rms_norm, rms_norm_with_rstd
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.dense import fp8_norm, gated
from normfuse.native.implementation import BEST
from normfuse.native.jaxpr import inner

f32, bf16 = jnp.float32, jnp.bfloat16
DIM = 32
in_fp8 = functools.partial(fuse, quantization="fp8")
in_fp8_nnx = functools.partial(ours_nnx.fuse, quantization="fp8")
multiply = functools.partial(dense, quantization="fp8")


def draw(rng, *shape, dtype=f32, mean=0.0):
    return jnp.asarray(mean + rng.standard_normal(shape), dtype)


def operands(rng, *widths, rows=(2, 8), dtype=bf16):
    """x, scale, and a kernel of each width."""
    kernels = [draw(rng, DIM, width) / 8 for width in widths]
    return draw(rng, *rows, DIM, dtype=dtype), draw(rng, DIM, mean=2.0), *kernels


def both_ways(layer):
    """The results of a layer and its gradients, for a gradient that follows from the results."""

    def run(*args):
        y, pull = jax.vjp(layer, *args)
        return y, pull(jax.tree.map(jnp.cos, y))

    return run


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def reported(function, *args):
    """The report on a function, and its results."""
    reports = []
    results = jax.jit(in_fp8(function, report=reports.append))(*args)
    return codes(reports), results


def codes(reports):
    """The rows of the norms that write codes, or might."""
    return [row for row in reports[0].rows if row.domain == "codes"]


def counts(function, *args):
    """How often a program normalises, looks for a maximum and normalises into codes."""
    found = collections.Counter()

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name.removeprefix("normfuse_")
            found[name] += name != "quantize_array" or eqn.params["spec"].rows
            for program in inner(eqn):
                look(program)

    look(jax.make_jaxpr(function)(*args).jaxpr)
    names = "quantize_norm_array", "quantize_array", "norm_gradient"
    return [found[name] for name in names]


# ---------------------------------------------------------------- values


def one(x, scale, kernel, dtype=None, cast="after"):
    """A norm, and a product that knows nothing of it."""
    return multiply(rms_norm(x, scale, dtype=dtype, cast=cast), kernel)


coded = in_fp8(one)  # the recipe describes it, as the first test checks


@pytest.mark.optimized
@pytest.mark.parametrize("dtype, cast", [(f32, "before"), (bf16, "after"), (bf16, "before")])
def test_values_and_gradients_are_those_of_the_recipe(dtype, cast, rng):
    """Both casts round once, from float32."""
    args = operands(rng, 48, dtype=dtype)
    dy = draw(rng, 2, 8, 48, dtype=dtype)

    def run(*args):
        y, pull = jax.vjp(functools.partial(coded, cast=cast), *args)
        return y, list(pull(dy))

    check_all(jax.jit(run)(*args), recipe("norm", args, dy, activation=None))


NORMS = {  # (norm of x and its parameters, centred, parameters of each example)
    "layer_norm": (lambda x, s, b: layer_norm(x, s, b), True, False),
    "layer_norm without a bias": (lambda x, s: layer_norm(x, s), True, False),
    "rms_norm with a bias": (lambda x, s, b: rms_norm(x, s, b), False, False),
    "layer_norm of examples": (lambda x, s, b: layer_norm(x, s[:, None], b[:, None]), True, True),
    "rms_norm of examples": (lambda x, s: rms_norm(x, s[:, None]), False, True),
}


def operands_of(name, rng, dtype=bf16, tokens=16):
    """x, the norm's parameters and a kernel."""
    function, _, examples = NORMS[name]
    count = function.__code__.co_argcount - 1
    rows = (2,) if examples else ()
    mean = lambda i: 2.0 - i
    parameters = [draw(rng, *rows, DIM, mean=mean(i)) for i in range(count)]
    x = draw(rng, 2, tokens, DIM, dtype=dtype, mean=3.0)
    return x, *parameters, draw(rng, DIM, 48) / 8


@pytest.mark.optimized
@pytest.mark.parametrize("name, dtype", half(NORMS, [f32, bf16]), ids=str)
def test_other_norms_write_the_codes_of_the_recipe(name, dtype, rng):
    """In one pass, from float32; with the gradients of x, scale, bias and kernel."""
    function, centred, _ = NORMS[name]
    x, *parameters, kernel = args = operands_of(name, rng, dtype)
    dy = draw(rng, 2, 16, 48, dtype=dtype)
    layer = lambda x, *rest: multiply(function(x, *rest[:-1]), rest[-1])

    def run(*args):
        y, pull = jax.vjp(in_fp8(layer), *args)
        return y, list(pull(dy))

    of = lambda n: dense_recipe(n, [kernel], None, rows(dy), dtype, None)
    check_all(jax.jit(run)(*args), with_norm(of, x, *parameters, centred=centred))
    report, _ = reported(layer, *args)
    assert [row.served for row in report] == ["1 × dense"]
    assert counts(both_ways(in_fp8(layer)), *args) == [1, 1, 1]


@pytest.mark.parametrize("name", NORMS)
def test_codes_are_those_of_the_norm_in_float32(name, rng):
    """Bit for bit, with the bound of its parameters."""
    function, _, _ = NORMS[name]
    *args, _ = operands_of(name, rng)
    args = [*args[:2], *[64 * bias for bias in args[2:]]]  # it decides the bound
    y = jax.jit(lambda x, *p: function(x.astype(f32), *p))(*args)
    equations = jax.make_jaxpr(lambda *a: function(*a))(*args).eqns
    (params,) = [e.params for e in equations if e.primitive.name == "normfuse_norm"]
    spec, tree = params["spec"], params["tree"]
    _, made = jax.jit(lambda *a: fp8_norm.encode(spec, tree.unflatten(a), BEST))(*args)
    scale, *bias = args[1:]
    bound = jnp.sqrt(jnp.float32(DIM)) * jnp.abs(scale) + (jnp.abs(bias[0]) if bias else 0)
    want = fp8_layers.quantize(y.reshape(-1, DIM), bound=jnp.max(bound))
    assert made.scale == want.scale
    np.testing.assert_array_equal(
        made.q.reshape(-1, DIM), np.asarray(want.q).view(np.uint8).reshape(-1, DIM)
    )


def test_products_of_one_norm_read_the_same_codes(rng):
    """They have other kernels, dtypes and row dimensions; one pass each way."""
    x, scale, *kernels = args = operands(rng, 16, 48, 32)
    kernels[1] = args[3].astype(bf16)

    def three(x, scale, a, b, c):
        y = rms_norm(x, scale, dtype=f32)
        rows = y.astype(bf16).reshape(-1, DIM)
        return multiply(y.astype(bf16), a), multiply(rows, b)[None], jax.jit(multiply)(y, c)

    args = x, scale, *kernels
    report, got = reported(three, *args)
    assert [row.served for row in report] == ["3 × dense"]
    for y, kernel, dtype in zip(got, kernels, (bf16, bf16, f32)):
        alone = coded(x, scale, kernel, dtype=dtype)
        np.testing.assert_array_equal(y.reshape(alone.shape), alone)
    # Each result's gradient is quantized.
    assert counts(both_ways(in_fp8(three)), *args) == [1, 3, 1]


def test_a_sum_and_its_norm(rng):
    x, scale, kernel = operands(rng, 48)
    residual = draw(rng, *x.shape)

    def apart(x, residual, scale, kernel):
        y, h = rms_norm(x, scale, residual=residual, dtype=bf16)
        return multiply(y, kernel), h

    def together(x, residual, scale, kernel):
        h = (x.astype(f32) + residual).astype(f32)
        return coded(h, scale, kernel, dtype=bf16), h

    got, want = (
        jax.jit(both_ways(f))(x, residual, scale, kernel) for f in (in_fp8(apart), together)
    )
    assert_equal(got[0], want[0])
    for a, b in zip(got[1], want[1]):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2)


def test_what_else_reads_y_gets_it(rng):
    """y is that of the norm, its derivative goes through the same backward, and a line says so."""
    x, scale, kernel = args = operands(rng, DIM)

    def block(x, scale, kernel):
        y = rms_norm(x, scale)
        return y, multiply(y, kernel)

    report, (y, z) = reported(block, *args)
    assert report[0].served.startswith("1 × dense; y is written too, for the function's res")
    assert_equal(y, jax.jit(rms_norm)(x, scale))
    assert_equal(z, jax.jit(coded)(*args))
    assert counts(both_ways(in_fp8(block)), *args) == [1, 1, 1]
    got, want = (jax.jit(both_ways(f))(*args)[1] for f in (in_fp8(block), block))
    for a, b in zip(got, want):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


# ---------------------------------------------------------------- transformations

CONTEXTS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: jax.vmap(f, (0, None, None)),
    "scan": lambda f: (
        lambda x, s, w: jax.lax.scan(
            lambda x, p: (f(x, *p), None), x, (jnp.stack([s, s / 2]), jnp.stack([w, w / 2]))
        )[0]
    ),
    "cond": lambda f: lambda x, *p: jax.lax.cond(x[0, 0, 0] > 9, lambda x, *p: x, f, x, *p),
    "fori_loop": lambda f: lambda *a: jax.lax.fori_loop(0, 2, lambda i, x: f(x, *a[1:]), a[0]),
    "shard_map": lambda f: jax.shard_map(
        f,
        mesh=jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,)),
        in_specs=(P("d"), P(), P()),
        out_specs=P("d"),
    ),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_within_and_around_transformations(context, rng):
    """A function is served as its parts are, with gradients around it."""
    args, around = operands(rng, DIM), CONTEXTS[context]
    if context == "fori_loop":
        args = (args[0], *map(jax.lax.stop_gradient, args[1:]))
        push = lambda f: lambda *a: jax.jvp(f, a, tuple(map(jnp.cos, a)))
    else:
        push = both_ways
    expected = jax.jit(push(around(coded)))(*args)
    assert_equal(jax.jit(push(in_fp8(around(one))))(*args), expected)
    report, _ = reported(around(one), *args)
    assert [row.served for row in report] == ["1 × dense"]


def test_a_forward_alone_writes_one_layout(rng):
    args = operands(rng, 48)
    vmapped = functools.partial(jax.vmap, in_axes=(0, None, None))
    for run in (in_fp8(one), in_fp8(vmapped(one)), vmapped(in_fp8(one))):
        text = jax.jit(run).lower(*args).as_text()
        assert "has_q = true, has_qt = false" in text
        assert "has_q = true, has_qt = true" not in text
    text = jax.jit(both_ways(in_fp8(one))).lower(*args).as_text()
    assert text.count("has_q = true, has_qt = true") == 3  # x, the kernel and dy


@pytest.mark.parametrize(
    "name, spec, kind",
    half(
        ["layer_norm", "layer_norm of examples"],
        [P("d"), P(None, "d"), P(None, None, "d")],
        [AxisType.Auto, AxisType.Explicit],
    ),
    ids=str,
)
def test_other_norms_on_a_mesh(name, spec, kind, rng, eight_devices):
    """Examples, their rows, of which 16 are on each device, or features are split."""
    function, _, examples = NORMS[name]
    x, *parameters, kernel = operands_of(name, rng, tokens=32)
    x = jnp.concatenate([x] * 2)
    parameters = [jnp.concatenate([p, 2 * p]) if examples else p for p in parameters]
    args, devices = (x, *parameters, kernel), (2 if spec == P(None, "d") else 4)
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(kind,))
    layer = multiply
    if kind == AxisType.Explicit and spec[-1] == "d" and len(spec) == 3:
        layer = functools.partial(multiply, out_sharding=P())
    run = in_fp8(lambda x, *rest: layer(function(x, *rest[:-1]), rest[-1]))
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, spec))]
        given += [jax.device_put(p, NamedSharding(mesh, P())) for p in args[1:]]
        got = jax.jit(both_ways(run))(*given)
    one = lambda x, *rest: multiply(function(x, *rest[:-1]), rest[-1])
    # Beside one device in FP8, and beside plain products, whose operands are not rounded to codes.
    for run, off in ((in_fp8(one), 0.02), (one, 0.08)):
        want = jax.jit(both_ways(run))(*args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.linalg.norm(a - b) < off * np.linalg.norm(b)


# ---------------------------------------------------------------- MLPs with biases

gelu = functools.partial(jax.nn.gelu, approximate=True)
WHOLE = {  # (MLP of x, up, its bias, down, its bias; kernels stored (out, in))
    "bias": (lambda y, w, a, d, b: gelu(y @ w + a) @ d + b, False),
    "Conv1D": (  # GPT-2's
        lambda y, w, a, d, b: (
            gelu(jax.lax.dot_general(y, w.T, (((2,), (0,)), ((), ()))) + a) @ d.T + b
        ),
        True,
    ),
}
PARTS = {
    "a bias of each row": lambda y, w, a, d, b: gelu(y @ w + jnp.sin(y[..., :1]) * a) @ d + b,
    "read twice": lambda y, w, a, d, b: gelu((z := y @ w) + a) @ d + z[..., :DIM],
}


def mlp_operands(rng):
    kernels = draw(rng, DIM, 64, dtype=bf16) / 8, draw(rng, 64, DIM, dtype=bf16) / 8
    biases = draw(rng, 64, dtype=bf16), draw(rng, DIM, dtype=bf16)
    return [draw(rng, 2, 8, DIM, dtype=bf16), *[a for two in zip(kernels, biases) for a in two]]


def served(function, *args):
    reports = []
    results = jax.jit(both_ways(in_fp8(function, report=reports.append)))(*args)
    return [row.served for row in reports[0].rows if row.domain in ("mlp", "codes")], results


@pytest.mark.parametrize("name", WHOLE)
def test_an_mlp_with_biases_is_one_function(name, rng):
    """And its LayerNorm writes the codes that it reads."""
    function, stored = WHOLE[name]
    x, up, a, down, b = mlp_operands(rng)
    ones, zeros = jnp.ones(DIM, bf16), jnp.zeros(DIM, bf16)
    mlp = lambda x, *rest: jnp.tanh(function(layer_norm(x, ones, zeros), *rest))
    args = [x, up.T, a, down.T, b] if stored else [x, up, a, down, b]
    rows, got = served(mlp, *args)
    assert rows == ["GatedMLP, fp8", "1 × GatedMLP"]
    options = {"activation": "gelu_tanh", "dtype": bf16, "implementation": None}
    options |= {"quantization": "fp8", "contract": int(stored)}

    def ours(x, up, a, down, b):
        y = gated.mlp(layer_norm(x, ones, zeros), {"up": up, "down": down}, {"up": a}, **options)
        return jnp.tanh(y + b)

    _, want = served(ours, *args)
    assert_equal(got, want)


@pytest.mark.parametrize("name", PARTS)
def test_an_mlp_with_more_than_biases_is_apart(name, rng):
    rows, (y, _) = served(
        lambda *args: jnp.tanh(PARTS[name](*args)), *mlp_operands(np.random.default_rng(0))
    )
    assert "gated_product, fp8" in rows and "GatedMLP, fp8" not in rows
    want = jnp.tanh(PARTS[name](*mlp_operands(np.random.default_rng(0))))
    assert np.linalg.norm((y - want).astype(f32)) < 0.1 * np.linalg.norm(want.astype(f32))


class Counting(nnx.Module):
    """Its call changes all that a module may hold, and returns a part of it."""

    def __init__(self, rngs):
        self.norm, self.up = nnx.RMSNorm(DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
        self.calls, self.last, self.seen = 0, nnx.data(jnp.zeros(())), nnx.List()

    def __call__(self, x):
        self.calls += 1
        self.last = x[0, 0]
        self.seen.append(nnx.Intermediate(jnp.sum(x)))
        return self.up(self.norm(x)), self.norm


@pytest.mark.parametrize("transform", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_nnx_model_is_changed_as_by_its_own_call(rng, transform):
    want = Counting(nnx.Rngs(0))
    model, x = nnx.clone(want), draw(rng, 16, DIM)
    run = transform(in_fp8_nnx(lambda model, x: model(x)))
    for at in (x, 2 * x):
        want(at)
        _, norm = run(model, at)
    assert norm is model.norm
    assert nnx.graphdef(model) == nnx.graphdef(want) and model.calls == 2
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(want))


# ---------------------------------------------------------------- look-alikes


def through_scan(x, scale, kernel):
    y = rms_norm(x, scale)
    return jax.lax.scan(lambda c, row: (c, multiply(row, kernel)), 0, y)[1]


def statistics(x, scale, kernel):
    y, rstd = rms_norm_with_rstd(x, scale)
    return multiply(y, kernel), rstd


REASONS = {  # (function, part of the reason)
    "few rows of an example": (
        lambda x, s, w: multiply(layer_norm(x, x[:, :1], scale_offset=1.0), w),
        "its examples have a number of rows that is no multiple of 16",
    ),
    "axes": (
        lambda x, s, w: multiply(rms_norm(x, axis=(1, 2)), w),
        r"normalises axes \(1, 2\) of 3",
    ),
    "heads": (
        lambda x, s, w: multiply(rms_norm(x, jnp.ones((8, DIM))), w),
        "its scale differs between heads",
    ),
    "pallas": (
        lambda x, s, w: multiply(rms_norm(x, s, implementation=("pallas", "xla")), w),
        "implementation='pallas' has no kernel",
    ),
    "a product in between": (
        lambda x, s, w: multiply(2 * rms_norm(x, s), w),
        r"no FP8 product reads it; its readers: mul at test_codes.py:\d+",
    ),
    "no FP8": (lambda x, s, w: dense(rms_norm(x, s), w), "no FP8 product reads it; its readers: "),
    "a transpose": (
        lambda x, s, w: multiply(rms_norm(x, s).swapaxes(0, 1), w),
        "no FP8 product reads it; its readers: transpose",
    ),
    "a loop between": (through_scan, "no FP8 product reads it; its readers: scan"),
    "statistics": (statistics, "its statistics are results too"),
    "kernels": (
        lambda x, s, w: jax.vmap(lambda w: multiply(rms_norm(x, s), w))(jnp.stack([w, w])),
        "no FP8 product reads it; its readers: (custom_jvp_call|_product)",
    ),
}


def test_a_scale_by_an_einsum_is_the_norms(rng):
    """MaxText's spelling, which a transpose follows."""

    def function(x, scale, kernel):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return multiply(jnp.einsum("...k,k->...k", y, scale), kernel)

    (row,), _ = reported(function, *operands(rng, DIM))
    assert row.served == "1 × dense"


@pytest.mark.parametrize("name", REASONS)
def test_the_report_says_why_not_and_the_results_stay(name, rng):
    args, (function, reason) = operands(rng, DIM), REASONS[name]
    report, got = reported(function, *args)
    assert not any(row.served for row in report)
    assert any(re.search(reason, row.reason) for row in report), report
    assert_equal(got, jax.jit(function)(*args))


def test_a_reshape_that_transposes_is_not_followed(rng):
    x, scale, kernel = operands(rng, 16, rows=(DIM,))

    def run(x, scale, kernel):
        y = jax.lax.reshape(rms_norm(x, scale), (DIM, DIM), dimensions=(1, 0))
        return multiply(y, kernel)

    reports = []
    got = in_fp8(run, report=reports.append)(x, scale, kernel)
    assert_equal(got, run(x, scale, kernel))
    assert not any(row.served for row in reports[0].fused)
