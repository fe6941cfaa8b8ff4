"""Gradients summed over microbatches: exact in float32, reduced once, in every framework."""

import itertools

import equinox as eqx
import flax.linen as nn
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import (
    accumulate_gradients,
    dense,
    gated_dense,
    gated_product,
    linear_cross_entropy,
    rms_norm,
)
from normfuse.layers import eqx as ours_eqx
from normfuse.layers import linen as ours_linen
from normfuse.layers import nnx as ours_nnx

f32, bf16 = jnp.float32, jnp.bfloat16
DIM, HIDDEN, COUNT = 16, 24, 4


def parameters(rng, dtype=bf16):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / 4, dtype)
    return {
        "scale": jnp.ones(DIM),
        "gate": draw(2, DIM, HIDDEN),
        "up": draw(2, DIM, HIDDEN),
        "down": draw(2, HIDDEN, DIM),
        "tied": 4 * draw(DIM, DIM),  # looked up, and multiplied with
    }


def loss(params, tokens):
    """Layers that are scanned and rematerialised, a tied kernel, an auxiliary output."""
    x = params["tied"].astype(bf16)[tokens]

    @jax.checkpoint
    def layer(x, kernels):
        h = gated_dense(rms_norm(x, params["scale"]), kernels[0], kernels[1])
        return x + dense(h, kernels[2]), None

    x, _ = jax.lax.scan(layer, x, (params["gate"], params["up"], params["down"]))
    logits = jax.jit(lambda x: dense(x, params["tied"]))(x).astype(f32)
    return jnp.mean(jax.nn.logsumexp(logits, -1)), jnp.max(logits, (1, 2))


def draw_tokens(rng, rows=8):
    return jnp.asarray(rng.integers(0, DIM, (COUNT, rows, 5)))


def relative(got, want):
    norm = lambda a: np.linalg.norm(np.asarray(a, np.float64))
    errors = jax.tree.map(lambda a, b: norm(np.float64(a) - np.float64(b)) / norm(b), got, want)
    return max(jax.tree.leaves(errors))


def test_sums_are_those_of_float32_gradients(rng):
    """Kernels in float32 that hold bfloat16 values: the same products, gradients never rounded."""
    params, tokens = parameters(rng), draw_tokens(rng)
    run = lambda p: accumulate_gradients(loss, p, tokens, has_aux=True)
    (value, aux), got = jax.jit(run)(params)
    wide = jax.tree.map(lambda a: a.astype(f32), params)
    each = jax.jit(jax.value_and_grad(lambda p, t: loss(p, t)[0]))
    losses, gradients = zip(*[each(wide, t) for t in tokens])
    want = jax.tree.map(lambda *g: sum(np.float64(a) for a in g) / COUNT, *gradients)
    assert relative(got, want) < 1e-6
    assert {a.dtype for a in jax.tree.leaves(got)} == {jnp.dtype(f32)}
    np.testing.assert_allclose(value, np.mean(losses), rtol=1e-6)
    assert aux.shape == (COUNT, 8)
    rounded = [jax.jit(jax.grad(lambda p, t: loss(p, t)[0]))(params, t) for t in tokens]
    plain = jax.tree.map(lambda *g: sum(np.float64(a) for a in g) / COUNT, *rounded)
    assert relative(plain, want) > 1e-4  # the ordinary gradient loses so much


def test_replicas_reduce_once(rng, eight_devices):
    del eight_devices
    params, tokens = parameters(rng, f32), draw_tokens(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    scalar = lambda p, t: jnp.sum(loss(p, t)[0])
    want = jax.jit(lambda p, t: accumulate_gradients(scalar, p, t))(params, tokens)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        split = jax.device_put(tokens, NamedSharding(mesh, P(None, "data")))
        run = jax.jit(lambda p, t: accumulate_gradients(scalar, p, t, replicas="data"))
        compiled = run.lower(placed, split).compile()
        got = compiled(placed, split)
    # Activations are bfloat16, and XLA rounds them elsewhere when a replica has one row.
    assert relative(got[1], want[1]) < 2.0**-7
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    size = sum(4 * a.size for a in jax.tree.leaves(params)) + 4
    assert [(c.kind, c.bytes) for c in hlo.collectives(compiled)] == [("all-reduce", size)]


# ---------------------------------------------------------------- losses that differentiate

SIZE = 16


def layers():
    """{layer: (parameters in bfloat16, `(parameters, x) -> array`)}, of x `(rows, SIZE)`."""
    square = lambda *lead: (jnp.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 7 - 3).astype(bf16) / 8
    k, labels = square(), jnp.arange(SIZE)
    ours = ours_nnx.Linear(SIZE, SIZE, param_dtype=bf16, dtype=bf16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(ours)
    linear = ours_eqx.Linear(SIZE, SIZE, dtype=bf16, activation="tanh", key=jax.random.key(0))
    options = {"param_dtype": bf16, "dtype": bf16}
    linen = nn.Sequential(
        [ours_linen.GatedMLP(SIZE, **options), ours_linen.Dense(SIZE, use_bias=False, **options)]
    )
    return {
        "dense": (k, lambda k, x: jnp.tanh(dense(x, k))),
        "tied": (k, lambda k, x: jnp.tanh(dense(dense(x, k), k.T) + x @ k)),
        "gated_dense": ((k, k.T), lambda p, x: gated_dense(x, *p)),
        "gated_product": (k, lambda k, x: gated_product(x, x[::-1], k)),
        "linear_cross_entropy": (k, lambda k, x: linear_cross_entropy(x, k, labels)),
        "nnx": (state, lambda p, x: jnp.tanh(nnx.merge(graph, p)(x))),
        "eqx": (linear, lambda model, x: jax.vmap(model)(x)),
        "linen": (linen.init(jax.random.key(0), jnp.ones((2, SIZE), bf16)), linen.apply),
    }


def squares(tree):
    return sum(jnp.mean(a.astype(f32) ** 2) for a in jax.tree.leaves(tree))


INNER = {
    "vjp": lambda f, p, x: jax.vjp(lambda x: f(p, x), x)[1](f(p, x)),
    "jvp": lambda f, p, x: jax.jvp(lambda x: f(p, x), (x,), (x,)),
    "jvp along the kernel": lambda f, p, x: jax.jvp(lambda p: f(p, x), (p,), (p,)),
    "linearize": lambda f, p, x: jax.linearize(lambda x: f(p, x), x)[1](x),
    "grad, the layer used again": lambda f, p, x: f(p, jax.grad(lambda x: squares(f(p, x)))(x)),
    "grad of the kernel": lambda f, p, x: jax.grad(lambda p: squares(f(p, x)))(p),
    "jacfwd": lambda f, p, x: jax.jacfwd(lambda x: f(p, x))(x),
}


def around_it(f):
    """f with a derivative of the user's own."""
    own = jax.custom_vjp(f)
    own.defvjp(lambda p, x: jax.vjp(f, p, x), lambda back, dy: back(dy))
    return own


WITHIN = {
    "": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_vjp": around_it,
    "scan": lambda f: lambda p, x: jax.lax.scan(lambda x, _: (f(p, x), None), x, length=2)[0],
    "cond": lambda f: lambda p, x: jax.lax.cond(jnp.sum(x) > 0, f, lambda p, x: 2 * f(p, x), p, x),
}


def mean_of_gradients(loss, p, xs):
    """The mean of the ordinary gradients, summed in float32."""
    each = [eqx.filter_grad(loss)(p, x) for x in xs]
    return jax.tree.map(lambda *g: sum(a.astype(f32) for a in g) / len(xs), *each)


@pytest.mark.parametrize(
    "layer, within",
    [*((layer, "") for layer in layers()), *(("dense", name) for name in WITHIN if name)],
)
def test_losses_may_differentiate_their_layers(layer, within, rng):
    """Force losses, penalties on gradients, MeanFlow, SAM: all of the gradient arrives."""
    params, f = layers()[layer]
    f, xs = WITHIN[within](f), jnp.asarray(rng.standard_normal((1, SIZE, SIZE)), bf16)
    losses = {name: lambda p, x, i=i: squares(i(f, p, x)) for name, i in INNER.items()}
    if within or layer != "dense":  # and custom_vjp has no forward mode
        chosen = ["vjp", "grad of the kernel"] + ["jvp along the kernel"] * (not within)
        losses = {name: losses[name] for name in chosen}
    value = lambda p, x: squares(f(p, x))
    if within == "checkpoint":  # and around the derivative
        losses |= {f"{name}, in it": jax.checkpoint(loss) for name, loss in losses.items()}
    if within == "scan":
        each = lambda loss: lambda p, x: jnp.sum(jax.lax.map(lambda x: loss(p, x), x[None]))
        losses |= {f"{name}, in it": each(loss) for name, loss in losses.items()}

    @eqx.filter_jit
    def run(p, xs):
        found = {name: accumulate_gradients(loss, p, xs)[1] for name, loss in losses.items()}
        want = {name: mean_of_gradients(loss, p, xs) for name, loss in losses.items()}
        twice = lambda p: squares(accumulate_gradients(value, p, xs))
        found["differentiated"] = eqx.filter_grad(twice)(p)
        found["float32"] = accumulate_gradients(value, p, xs)[1]
        plain = lambda p: squares((value(p, xs[0]), mean_of_gradients(value, p, xs)))
        want["differentiated"] = eqx.filter_grad(plain)(p)
        want["float32"] = mean_of_gradients(value, p, xs)
        return found, want

    found, want = run(params, xs)
    for name in found:
        # Seven or fewer roundings to bfloat16 lie between either gradient and the exact one.
        assert relative(found[name], want[name]) < 2 * 7 * 2.0**-9, name
    if within not in ("cond", "custom_vjp"):  # kernels are followed
        for leaf in jax.tree.leaves(found["float32"]):
            assert leaf.dtype == f32 and (leaf.ndim < 2 or jnp.any(leaf != leaf.astype(bf16)))


def test_a_custom_vjp_has_the_cotangent_of_each_microbatchs_own_loss():
    """Clipped gradients, injected losses and FP8's amax history are not linear in theirs."""

    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, dx: (jnp.clip(dx, -0.5, 0.5),))
    for dtype, count in (bf16, 1), (bf16, 3), (f32, 4):
        kernel, xs = jnp.ones((2, 1), dtype), jnp.ones((count, 3, 2), dtype)
        loss = lambda k, x: jnp.sum(clipped(dense(x, k)).astype(f32))
        _, gradient = jax.jit(lambda k, xs, loss=loss: accumulate_gradients(loss, k, xs))(
            kernel, xs
        )
        assert gradient.ravel().tolist() == [1.5, 1.5]  # three rows, 0.5 each


# ---------------------------------------------------------------- frameworks


def around_batches(kind):
    """A loss whose own derivative closes over a value of its batch."""

    def loss(kernel, x):
        total = jnp.tanh(x.sum())
        if kind == "custom_vjp":
            scaled = jax.custom_vjp(lambda y: y * total)
            scaled.defvjp(lambda y: (y * total, None), lambda _, dy: (dy * total * 2,))
        elif kind == "custom_jvp":
            scaled = jax.custom_jvp(lambda y: y * total)
            scaled.defjvp(lambda y, dy: (y[0] * total, dy[0] * total * 2))
        else:
            scaled = jax.custom_gradient(lambda y: (y * total, lambda dy: dy * total * 2))
        return jax.nn.relu(scaled(dense(x, kernel))).astype(f32).sum()

    return loss


@pytest.mark.parametrize("kind", ["custom_vjp", "custom_jvp", "custom_gradient"])
@pytest.mark.parametrize("within", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_own_derivatives_that_close_over_values_of_the_loss(kind, within, rng):
    loss = around_batches(kind)
    kernel, xs = (jnp.asarray(rng.standard_normal(n), bf16) for n in ((5, 6), (3, 4, 5)))
    value, gradient = within(lambda *args: accumulate_gradients(loss, *args))(kernel, xs)
    each = [jax.value_and_grad(loss)(kernel, x) for x in xs]
    assert gradient.dtype == f32
    want = np.mean([np.float64(g) for _, g in each], 0)  # bfloat16 sums of few products
    np.testing.assert_allclose(gradient, want, rtol=0, atol=2.0**-7 * np.abs(want).max())
    np.testing.assert_allclose(value, np.mean([v for v, _ in each]), rtol=2.0**-7)


def nnx_with_state():
    """Its split model, as the guide has it."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(DIM, DIM, rngs=rngs),
        nnx.BatchNorm(DIM, momentum=0.5, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, x, rest):
        model = nnx.merge(graph, params, rest, copy=True)
        return jnp.mean(model(x) ** 2), nnx.state(model, nnx.Not(nnx.Param))

    return params, rest, loss


def test_state_goes_from_one_microbatch_to_the_next(rng):
    """The Variables and keys of an nnx model: as in a loop in Python."""
    params, state, loss = nnx_with_state()
    xs = jnp.asarray(rng.standard_normal((COUNT, 6, DIM)), f32)
    with_aux = lambda p, x, s: (loss(p, x, s)[0], x[0, 0], loss(p, x, s)[1])
    run = lambda p, xs, s: accumulate_gradients(with_aux, p, xs, state=s, has_aux=True)
    (value, aux, after), got = eqx.filter_jit(run)(params, xs, state)
    alone = lambda p, xs, s: accumulate_gradients(loss, p, xs, state=s)
    assert eqx.filter_eval_shape(alone, params, xs, state)[0][0].shape == ()
    each = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
    values, gradients = [], []
    for x in xs:
        (one, state), gradient = each(params, x, state)
        values.append(one)
        gradients.append(gradient)
    assert len(set(map(float, values))) == COUNT
    np.testing.assert_allclose(value, np.mean(values), rtol=1e-5)
    assert aux.tolist() == xs[:, 0, 0].tolist()
    want = jax.tree.map(lambda *g: sum(g) / COUNT, *map(jax.tree.leaves, gradients))
    for a, b in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_small_gradients_in_float16_keep_their_bits():
    """Divided by eight before they are float32, they would be below float16's smallest number."""
    kernel, xs = jnp.ones((4, 3), jnp.float16), jnp.ones((8, 2, 4), jnp.float16)
    narrow = lambda k, x: jnp.sum(dense(x, k).astype(f32)) * 2.0**-24
    wide = lambda k, x: jnp.sum(x.astype(f32) @ k.astype(f32)) * 2.0**-24  # but for the gradient
    for loss, count in itertools.product((narrow, wide), (7, 8)):
        run = lambda k, n=count, loss=loss: accumulate_gradients(loss, k, xs[:n])
        _, gradient = jax.jit(run)(kernel)
        np.testing.assert_allclose(gradient, 2 * 2.0**-24, rtol=1e-6)


def test_complex_parameters():
    """Their gradients are those of `jax.grad`, as of the poles of a state space model."""
    poles, xs = jnp.asarray([0.5 + 2j, 1 - 1j], jnp.complex64), jnp.arange(6.0).reshape(3, 2)
    loss = lambda p, x: jnp.sum(jnp.abs(p["poles"] * x + 1j) ** 2)
    value, gradient = accumulate_gradients(loss, {"poles": poles, "step": 3}, xs)
    mean = lambda p: jnp.mean(jax.vmap(loss, (None, 0))({"poles": p}, xs))
    assert gradient["step"] is None
    np.testing.assert_allclose(value, mean(poles), rtol=1e-6)
    np.testing.assert_allclose(gradient["poles"], jax.grad(mean)(poles), rtol=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_auxiliary_outputs_may_be_constants(count):
    half = jnp.bfloat16(0.5)
    aux = {"rows": 3, "rate": 0.5, "half": half, "of": np.arange(2.0, dtype=np.float32)}
    loss = lambda p, x: (jnp.sum(x @ p), aux)
    run = lambda p: accumulate_gradients(loss, p, jnp.ones((count, 3, 2)), has_aux=True)
    for call in (run, jax.jit(run)):
        (_, found), _ = call(jnp.ones((2, 1)))
        assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(found))
        np.testing.assert_array_equal(found["rows"], [3] * count)
        assert found["half"].dtype == "bfloat16"
        np.testing.assert_array_equal(found["of"], [[0, 1]] * count)
    value, gradient = accumulate_gradients(lambda p, x: 2.0, jnp.ones(2), jnp.ones((count, 3)))
    assert (value, gradient.tolist()) == (2, [0, 0])


@pytest.mark.parametrize("at, quantization", [(1, None), (2, "fp8")])
def test_ensembles_of_kernels(rng, at, quantization):
    """vmap over a kernel: each has its own main gradient."""
    kernels = jnp.asarray(rng.standard_normal((3, 16, 8)), jnp.bfloat16)
    batches = jnp.asarray(rng.standard_normal((2, 4, 16)), jnp.bfloat16)

    def loss(kernels, x):
        each = jax.vmap(lambda kernel: dense(x, kernel, quantization=quantization), at)
        return jnp.sum(jnp.sin(each(kernels).astype(jnp.float32)))

    given = jnp.moveaxis(kernels, 0, at)
    run = jax.jit(lambda *args: accumulate_gradients(loss, *args)[1])
    gradient, first = run(given, batches), run(given, batches[:1])
    apart = [jax.grad(lambda k, x=x: loss(k, x))(given).astype(f32) for x in batches]
    assert gradient.dtype == f32 and gradient.shape == given.shape
    # A rounding of y and one of each microbatch's gradient, which the main gradient does without.
    largest = float(jnp.abs(apart[0]).max())
    np.testing.assert_allclose(gradient, sum(apart) / 2, rtol=0, atol=2**-6 * largest)
    assert jnp.any(first != first.astype(jnp.bfloat16).astype(f32))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"batches": jnp.ones(())}, ValueError, "one leading axis of microbatches"),
        ({"batches": jnp.ones((0, 2, 3))}, ValueError, r"a microbatch or more, got .*\(0, 2, 3\)"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function, got int"),
        ({"batches": (jnp.ones((2, 3)), jnp.ones((3, 3)))}, ValueError, r"\(2, 3\), \(3, 3\)"),
        (
            {"params": [jnp.ones(2)] * 2, "specs": [None]},
            ValueError,
            "specs must have the structure",
        ),
        ({"specs": "data"}, TypeError, "specs must be a PartitionSpec or None .* got 'data'"),
        ({"loss_fn": lambda p, x: x @ p}, ValueError, r"scalar loss, got shape \(3, 1\)"),
        ({"loss_fn": lambda p, x: (jnp.sum(x), x)}, ValueError, "got a tuple; .*has_aux=True"),
        ({"loss_fn": lambda p, x: jnp.sum(x), "has_aux": True}, ValueError, r"\(loss, aux\), got"),
        ({"replicas": "data"}, ValueError, "must be an Auto axis .* got 'data' and"),
        ({"replicas": "data", "state": 1.0}, ValueError, "each replica would change state"),
        (
            {"state": 1.0, "loss_fn": lambda p, x, s: jnp.sum(x)},
            ValueError,
            r"with state loss_fn must return \(loss, state\), got shape \(\)",
        ),
    ],
)
def test_bad_input_is_one_clear_error(change, error, message):
    arguments = {
        "loss_fn": lambda p, x: jnp.sum(x @ p),
        "params": jnp.ones((2, 1)),
        "batches": jnp.ones((4, 3, 2)),
    }
    with pytest.raises(error, match=message):
        accumulate_gradients(**(arguments | change))


def test_a_batch_that_is_not_split_is_named_where_the_model_fails():
    """Its rows are taken for microbatches."""
    with pytest.raises((TypeError, IndexError)) as caught:  # JAX's own, which changes
        accumulate_gradients(lambda p, x: jnp.sum(x[:, 0] @ p), jnp.ones(2), jnp.ones((4, 3)))
    notes = " ".join(caught.value.__notes__)
    assert "one of 4 microbatches, of shapes [(3,)]" in notes


def test_rows_that_replicas_do_not_divide(eight_devices):
    del eight_devices
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        with pytest.raises(ValueError, match=r"8 replicas must divide .* got shape \(4, 3, 2\)"):
            accumulate_gradients(
                lambda p, x: jnp.sum(x @ p), jnp.ones((2, 1)), jnp.ones((4, 3, 2)), replicas="data"
            )


@pytest.mark.parametrize("of", [lambda m: m, nnx.state, lambda m: {"model": [nnx.state(m)]}])
def test_variables_that_are_no_parameters_are_refused(of):
    """They would be parameters: each microbatch would begin with the same."""
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"is a RngCount.* give the rest as state="):
        accumulate_gradients(lambda p, x: 0.0, of(model), jnp.ones((4, 3)))
