"""How a value reaches a function does not matter: the ways in which people write a loss."""

import dataclasses
import functools

import equinox as eqx
import flax.linen as nn
import fuse_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from flax import nnx
from fuse_cases import draw
from jax import lax

import normfuse
from normfuse.layers import nnx as ours_nnx

B, T, E, H, V = 4, 16, 32, 64, 48
BATCH = {"x": draw(0, B, T, E), "y": jnp.arange(B * T).reshape(B, T) % V}


def gated(gate, up, down):
    return lambda x: down(jax.nn.silu(gate(x)) * up(x))


class NnxTrunk(nnx.Module):
    def __init__(self, rngs):
        linear = lambda n, m: nnx.Linear(n, m, use_bias=False, rngs=rngs)
        self.first, self.norm = linear(E, E), nnx.RMSNorm(E, rngs=rngs)
        self.gate, self.up, self.down = linear(E, H), linear(E, H), linear(H, E)

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        return x + gated(self.gate, self.up, self.down)(self.norm(x))


class LinenTrunk(nn.Module):
    @nn.compact
    def __call__(self, x):
        linear = lambda n: nn.Dense(n, use_bias=False)
        x = jnp.tanh(linear(E)(x))
        return x + gated(linear(H), linear(H), linear(E))(nn.RMSNorm()(x))


class EqxTrunk(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.RMSNorm
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        linear = lambda n, m, i: eqx.nn.Linear(n, m, use_bias=False, key=jax.random.fold_in(key, i))
        self.first, self.norm = linear(E, E, 0), eqx.nn.RMSNorm(E, use_bias=False)
        self.gate, self.up, self.down = linear(E, H, 1), linear(E, H, 2), linear(H, E, 3)

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        return x + gated(self.gate, self.up, self.down)(self.norm(x))


@dataclasses.dataclass(frozen=True)
class Framework:
    """A trunk and a head, how they are applied to an example, and the framework's own words."""

    parts: tuple
    apply: object
    fuse: object = normfuse.fuse
    grad: object = jax.value_and_grad
    jit: object = jax.jit

    def example(self, parts, x, y):
        log_p = jax.nn.log_softmax(self.apply(parts, x))
        return -jnp.mean(jnp.take_along_axis(log_p, y[:, None], 1))

    def loss(self, parts, batch):
        log_p = jax.nn.log_softmax(self.apply(parts, batch["x"]))
        return -jnp.mean(jnp.take_along_axis(log_p, batch["y"][..., None], -1))


def of_nnx():
    parts = NnxTrunk(nnx.Rngs(0)), nnx.Linear(E, V, use_bias=False, rngs=nnx.Rngs(1))
    apply = lambda parts, x: parts[1](parts[0](x))
    return Framework(parts, apply, ours_nnx.fuse, nnx.value_and_grad, nnx.jit)


def of_linen():
    trunk, head, x = LinenTrunk(), nn.Dense(V, use_bias=False), BATCH["x"]
    parts = trunk.init(jax.random.key(0), x), head.init(jax.random.key(1), x)
    return Framework(parts, lambda parts, x: head.apply(parts[1], trunk.apply(parts[0], x)))


def of_equinox():
    parts = EqxTrunk(jax.random.key(0)), eqx.nn.Linear(E, V, False, key=jax.random.key(1))

    def apply(parts, x):
        each = lambda x: parts[1](parts[0](x))
        for _ in x.shape[1:]:
            each = jax.vmap(each)
        return each(x)

    return Framework(parts, apply, grad=eqx.filter_value_and_grad, jit=eqx.filter_jit)


FRAMEWORKS = {
    name: functools.cache(make)
    for name, make in {"nnx": of_nnx, "linen": of_linen, "equinox": of_equinox}.items()
}
IDIOMS = {}


def idiom(function):
    """A function of a framework and of `fuse` that returns a loss and gradients."""
    IDIOMS[function.__name__] = function
    return function


@idiom
def an_argument(of, fuse):
    return of.jit(of.grad(fuse(of.loss)))(of.parts, BATCH)


@idiom
def closed_over_in_a_jitted_step(of, fuse):
    def step(parts, batch):
        def loss_fn(parts):
            return of.loss(parts, batch)

        return of.grad(fuse(loss_fn))(parts)

    return of.jit(step)(of.parts, BATCH)


@idiom
def closed_over_as_arrays(of, fuse):
    x, y = BATCH["x"], BATCH["y"]
    return of.jit(of.grad(fuse(lambda parts: of.loss(parts, {"x": x, "y": y}))))(of.parts)


MICROBATCHES = jax.tree.map(lambda a: a.reshape(2, B // 2, *a.shape[1:]), BATCH)


@idiom
def microbatches_within(of, fuse):
    def loss_fn(parts):
        add = lambda total, batch: (total + of.loss(parts, batch) / 2, None)
        return lax.scan(add, jnp.zeros(()), MICROBATCHES)[0]

    return of.jit(of.grad(fuse(loss_fn)))(of.parts)


@idiom
def partial(of, fuse):
    return of.jit(of.grad(fuse(functools.partial(of.loss, batch=BATCH))))(of.parts)


@idiom
def microbatches_around(of, fuse):
    """A scan of gradients, of a loss that closes over its microbatch."""
    if of.fuse is ours_nnx.fuse:
        graph, state = nnx.split(of.parts)
        loss = lambda state, batch: of.loss(nnx.merge(graph, state), batch)
    else:
        state, loss = of.parts, of.loss

    def add(total, batch):
        found = jax.value_and_grad(fuse(lambda state: loss(state, batch)))(state)
        return jax.tree.map(lambda a, b: a + b / 2, total, found), None

    @jax.jit
    def step(state):
        zeros = jax.tree.map(jnp.zeros_like, state)
        return lax.scan(add, (jnp.zeros(()), zeros), MICROBATCHES)[0]

    return step(state)


@idiom
def vmapped_examples(of, fuse):
    def loss_fn(parts, batch):
        each = jax.vmap(functools.partial(of.example, parts))
        return jnp.mean(each(batch["x"], batch["y"]))

    return of.jit(of.grad(fuse(loss_fn)))(of.parts, BATCH)


@idiom
def has_aux(of, fuse):
    def loss_fn(parts):
        value = of.loss(parts, BATCH)
        return value, {"loss": value, "tokens": BATCH["y"].size}

    (value, aux), gradients = of.grad(fuse(loss_fn), has_aux=True)(of.parts)
    assert aux["tokens"] == B * T and jnp.shape(aux["loss"]) == ()
    return value, gradients


@idiom
def the_second_argument(of, fuse):
    loss_fn = lambda batch, parts: of.loss(parts, batch)
    if of.fuse is ours_nnx.fuse:
        return nnx.value_and_grad(fuse(loss_fn), argnums=1)(BATCH, of.parts)
    return jax.value_and_grad(fuse(loss_fn), argnums=1, allow_int=True)(BATCH, of.parts)


@idiom
def functional(of, fuse):
    """States or parameters as an argument; the model is put together within."""
    if of.fuse is ours_nnx.fuse:
        graph, params, rest = nnx.split(of.parts, nnx.Param, ...)
        loss_fn = lambda params, rest: of.loss(nnx.merge(graph, params, rest), BATCH)
        return jax.jit(jax.value_and_grad(fuse(loss_fn)))(params, rest)
    params, static = eqx.partition(of.parts, eqx.is_inexact_array)
    loss_fn = lambda params: of.loss(eqx.combine(params, static), BATCH)
    return jax.jit(jax.value_and_grad(fuse(loss_fn)))(params)


HEADS = {}  # idioms whose gradient is that of the head alone


def of_the_head(function):
    HEADS[function.__name__] = function
    return function


@of_the_head
def a_frozen_argument(of, fuse):
    loss_fn = lambda head, trunk, batch: of.loss((trunk, head), batch)
    return of.jit(of.grad(fuse(loss_fn)))(of.parts[1], of.parts[0], BATCH)


@of_the_head
def a_frozen_trunk_closed_over(of, fuse):
    trunk, head = of.parts
    return of.jit(of.grad(fuse(lambda head: of.loss((trunk, head), BATCH))))(head)


class Noisy(nnx.Module):
    """A model whose calls draw dropout and move running statistics."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.batch = nnx.Linear(E, E, rngs=rngs), nnx.BatchNorm(E, rngs=rngs)
        self.norm, self.drop = nnx.RMSNorm(E, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(self.batch(self.first(x))))


@pytest.mark.parametrize("fuse", [normfuse.fuse, ours_nnx.fuse], ids=["fuse", "nnx.fuse"])
def test_functional_steps_return_their_new_states(fuse):
    """States are arguments, a model is made within, and its new state is a result."""

    def run(wrap):
        graph, params, rest = nnx.split(Noisy(), nnx.Param, ...)

        def loss_fn(params, rest, x):
            model = nnx.merge(graph, params, rest, copy=True)
            return jnp.mean(model(x) ** 3), nnx.state(model, nnx.Not(nnx.Param))

        step = jax.jit(jax.value_and_grad(wrap(loss_fn), has_aux=True))
        (value, rest), gradients = step(params, rest, BATCH["x"])
        return jax.tree.map(of_key, (value, nnx.to_pure_dict(rest), gradients))

    reports = []
    got, want = run(functools.partial(fuse, report=reports.append)), run(lambda f: f)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), got, want)
    assert fuse_cases.served(reports[-1]) == {"norm": 1}, str(reports[-1])


def of_key(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def leaves(found):
    value, gradients = found
    return [value, *jax.tree.leaves(gradients)]


@functools.cache
def reference(name, head):
    of = FRAMEWORKS[name]()
    if head:
        return leaves(a_frozen_argument(of, lambda function: function))
    return leaves(an_argument(of, lambda function: function))


@pytest.mark.parametrize("name, written", half(FRAMEWORKS, [*IDIOMS, *HEADS]))
def test_idioms(name, written):
    """The sites are those of a loss that takes all as arguments, and so are the gradients."""
    of, how = FRAMEWORKS[name](), (IDIOMS | HEADS)[written]
    reports = []
    fuse = functools.partial(of.fuse, report=reports.append)
    found = leaves(how(of, fuse))
    assert fuse_cases.served(reports[-1]) == {"norm": 1, "mlp": 1, "loss": 1}, str(reports[-1])
    for got, want in zip(found, reference(name, written in HEADS), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("written, name", half([*HEADS, *IDIOMS], FRAMEWORKS))
def test_idioms_in_fp8(name, written):
    of, how = FRAMEWORKS[name](), (IDIOMS | HEADS)[written]
    reports = []
    fuse = functools.partial(of.fuse, quantization="fp8", report=reports.append)
    if name == "nnx":  # whose transformations write into the model
        how(of, fuse)
    else:
        jax.eval_shape(lambda: leaves(how(of, fuse)))
    served = fuse_cases.served(reports[-1])
    assert served.pop("codes", 1) == 1
    assert served == {"norm": 1, "mlp": 1, "loss": 1, "product": 1}, str(reports[-1])
    (mlp,) = [row for row in reports[-1].fused if row.domain == "mlp"]
    assert mlp.served == "GatedMLP, fp8", str(reports[-1])


# ---------------------------------------------------------------- what is a parameter, what is data

R, W = 64, 32
DFT = np.cos(np.outer(np.arange(W), np.arange(W)) * 2 * np.pi / W).astype(np.float32)
TABLE, POOL, X = jnp.asarray(DFT), jnp.eye(R) + jnp.ones((R, R)), draw(0, R, W)
P = {"a": draw(1, W, W), "b": draw(2, W, 16), "c": draw(3, 16, W), "big": draw(4, W, W * W)}
LOW_RANK = {"b": P["b"], "c": P["c"]}
FROZEN = {"layers": [{"kernel": np.asarray(draw(5, W, W))}]}


tanh = jnp.tanh
# (function, its arguments, how many products FP8 serves, the reason of another one)
KINDS = {
    "rows and a NumPy table": (
        lambda x: tanh(x @ DFT),
        (X,),
        0,
        "DFT, which the function closes over, is taken for data",
    ),
    "a frozen model of NumPy arrays": (
        lambda p, x: tanh(x @ p["a"]) - tanh(x @ FROZEN["layers"][0]["kernel"]),
        (P, X),
        2,
        "",
    ),
    "pooled rows, beside parameters": (
        lambda p, x: tanh(tanh(POOL @ x) @ p["a"]),
        (P, X),
        1,
        "POOL, which the function closes over, is taken for data",
    ),
    "rows and iota": (
        lambda x: tanh(x @ jnp.cos(jnp.outer(*[jnp.arange(W) / W] * 2))),
        (X,),
        0,
        "a product with constants",
    ),
    "activations and a table": (
        lambda p, x: tanh(tanh(x @ p["a"]) @ TABLE),
        (P, X),
        1,
        "TABLE, which the function closes over, is taken for data",
    ),
    "a table and activations": (
        lambda p, x: tanh(POOL @ tanh(x @ p["a"])),
        (P, X),
        1,
        "POOL, which the function closes over",
    ),
    "the squares of x": (
        lambda x: tanh(x.T @ x) @ jnp.ones((W, 1)),
        (X,),
        0,
        "a product of an array with what is made of it",
    ),
    "x and what is made of it": (
        lambda x: tanh(x.T @ tanh(x)),
        (X,),
        0,
        "a product of an array with what is made of it",
    ),
    "a kernel of x": (
        lambda x, w: tanh(x @ tanh(x[:W] * w)),
        (X, P["a"]),
        0,
        "a product of an array with what is made of it",
    ),
    "a hypernetwork": (
        lambda p, x, c: tanh(x @ (c @ p["big"]).reshape(W, W)),
        (P, X, X[0]),
        0,
        "its kernel is made of parameters",
    ),
    "a hypernetwork of arrays": (
        lambda x, c, w: tanh(x @ (c @ w).reshape(W, W)),
        (X, X[0], P["big"]),
        0,
        "its kernel is made of parameters",
    ),
    "merged LoRA": (
        lambda p, x: tanh(x @ (p["a"] + p["b"] @ p["c"])),
        (P, X),
        0,
        "a product of two parameters",
    ),
    "merged LoRA of closed-over kernels": (
        lambda p: tanh(X @ (P["a"] + p["b"] @ p["c"])),
        (LOW_RANK,),
        0,
        "X, which the function closes over, is taken for data",
    ),
    "LoRA beside closed-over kernels": (
        lambda p: tanh(X @ P["a"] + tanh(X @ p["b"]) @ p["c"]),
        (LOW_RANK,),
        3,
        "",
    ),
    "a kernel of parameters": (
        lambda p, x: tanh(p["a"].T @ tanh(p["a"])) + tanh(x @ p["a"])[:W],
        (P, X),
        1,
        "what is made of parameters alone",
    ),
    "scores of a closed-over batch": (
        lambda p: tanh(tanh(X @ p["a"]) @ X.T),
        (P,),
        1,
        "X, which the function closes over, is taken for data",
    ),
    "a kernel at the left": (lambda p, x: tanh(p["a"] @ tanh(p["a"] @ x.T)), (P, X), 2, ""),
    "a model closed over": (lambda x: tanh(tanh(x @ P["a"]) @ P["b"]), (X,), 2, ""),
    "one kernel of a tree, at the left": (
        lambda p, x: tanh(p["a"] @ tanh(x.T)),
        ({"a": P["a"]}, X),
        1,
        "",
    ),
    "noise": (
        lambda p, key: tanh(jax.random.normal(key, (R, W)) @ p["a"]),
        (P, jax.random.key(0)),
        1,
        "",
    ),
}


@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_a_parameter(name, differentiated):
    function, args, count, reason = KINDS[name]
    fused = fuse_cases.Fused(lambda *args: function(*args).sum(), quantization="fp8", serves=False)
    jax.eval_shape(jax.grad(fused, allow_int=True) if differentiated else fused, *args)
    products = [row for row in fused.rows if row.domain == "product"]
    assert sum("fp8" in row.served for row in products) == count, fused
    assert not reason or any(reason in row.reason for row in products), fused


def test_a_row_names_what_the_function_closes_over():
    fused = fuse_cases.Fused(lambda x: tanh(x @ P["a"]).sum(), quantization="fp8")
    jax.eval_shape(fused, X)
    (row,) = fused.rows
    assert row.what == f"product {R} x {W} -> {W}, float32, by P", fused


HEADS_KERNEL = draw(5, W, 4, 32)


@pytest.mark.parametrize(
    "args, by",
    [
        ((X, {"k": HEADS_KERNEL, "b": P["b"]}), None),
        ((X, HEADS_KERNEL), None),
        (({"x": X, "y": X}, {"k": HEADS_KERNEL}), 1),
    ],
    ids=["a tree of more matrices", "arrays", "differentiated, beside a batch of more"],
)
def test_a_kernel_may_have_more_dimensions_than_rows(args, by):
    """It is the differentiated one; else that of the larger tree, or contracted by its first."""

    def function(x, k):
        (x, *_), (k, *_) = (jax.tree.leaves(x), [*jax.tree.leaves(k)][::-1])
        return tanh(jnp.einsum("rw,wnh->rnh", x, k)).sum()

    fused = fuse_cases.Fused(function, quantization="fp8")
    jax.eval_shape(fused if by is None else jax.grad(fused, by), *args)
    (row,) = fused.rows
    assert row.what == f"product {R} x {W} -> 128, float32", fused


@pytest.mark.parametrize("jitted", [False, True])
def test_parameters_that_are_closed_over_one_by_one(jitted):
    """What a derivative is being taken by are parameters, also as variables; no stopped ones."""
    rows = []

    def loss(p, x):
        a, b, c, table = p["a"], p["b"], p["c"].astype(jnp.bfloat16), jax.lax.stop_gradient(p["d"])
        mlp = lambda x: tanh(((jax.nn.silu(x @ a) * (x @ a)) @ b) @ c) @ table
        fused = fuse_cases.Fused(lambda x: mlp(x).sum(), quantization="fp8")
        y = fused(x)
        rows.append([(row.domain, row.served or row.reason) for row in fused.rows])
        return y

    params = P | {"d": TABLE}
    gradient = jax.grad(loss)
    got = (jax.jit(gradient) if jitted else gradient)(params, X)
    assert rows[-1] == [
        ("mlp", "GatedMLP, fp8"),
        ("product", "dense, fp8"),
        ("product", "table, which the function closes over, is taken for data"),
    ]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


def test_what_is_computed_from_parameters_is_none():
    """An array that the function closes over has a tangent, too, if parameters made it."""

    def loss(p, x):
        h = tanh(x @ p["a"])
        fused = fuse_cases.Fused(lambda p: tanh(tanh(h @ p["a"]) @ h.T).sum(), quantization="fp8")
        y = fused(p)
        assert [row.reason for row in fused.rows] == [
            "",
            "h, which the function closes over, is taken for data",
        ], fused
        return y

    jax.eval_shape(jax.grad(loss), P, X)
