"""Dense layers in every context of JAX's: one table, since they share `core` and its derivative.

In each context a layer has the values and gradients that it has by itself.
"""

import functools
import re

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from flax import nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients, dense, gated_dense, gated_product
from normfuse.layers import linen
from normfuse.layers import nnx as nnx_layers
from normfuse.layers.dense import gated
from normfuse.layers.dense.fp8 import products_saveable
from normfuse.layers.quantization import kernel_codes_saveable

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, IN, OUT = (8, 4), 32, 48


def silu(z):
    return z / (1 + np.exp(-z))


def mlp(x, gate, up, down, bias, *, implementation=None, **options):
    kernels, biases = {"gate": gate, "up": up, "down": down}, {"gate": bias, "up": bias}
    options |= {"dtype": x.dtype, "implementation": implementation, "activation": "silu"}
    return gated.mlp(x, kernels, biases, **options)


# name -> (layer, shapes of what follows x, the same in NumPy)
LAYERS = {
    "dense": (
        functools.partial(dense, activation="silu"),
        [(IN, OUT), (OUT,)],
        lambda x, k, b: silu(x @ k + b),
    ),
    "gated_dense": (gated_dense, [(IN, OUT)] * 2, lambda x, g, u: silu(x @ g) * (x @ u)),
    "gated_product": (
        lambda x, k, **o: gated_product(x, 2 - x, k, **o),
        [(IN, OUT)],
        lambda x, k: (silu(x) * (2 - x)) @ k,
    ),
    "mlp": (
        mlp,
        [(IN, OUT), (IN, OUT), (OUT, IN), (OUT,)],
        lambda x, g, u, d, b: (silu(x @ g + b) * (x @ u + b)) @ d,
    ),
}
OPS = {name: layer for name, (layer, *_) in LAYERS.items()} | {
    f"{name}, fp8": functools.partial(layer, quantization="fp8")
    for name, (layer, *_) in LAYERS.items()
}


def draw(rng, name, dtype=f32, parameters=None):
    """(operands, a gradient of the result)."""
    shapes = LAYERS[name.removesuffix(", fp8")][1]
    arrays = [rng.standard_normal((*ROWS, IN)), *map(rng.standard_normal, shapes)]
    arrays = [a / np.sqrt(a.shape[0]) if a.ndim == 2 else a for a in arrays]
    args = [jnp.asarray(a, dtype if i == 0 else parameters or dtype) for i, a in enumerate(arrays)]
    out = jax.eval_shape(OPS[name], *args)
    return args, jnp.asarray(rng.standard_normal(out.shape), dtype)


def both_ways(op):
    """(args, dy) -> (y, the gradients of all of args)."""

    def run(args, dy):
        y, pull = jax.vjp(op, *args)
        return y, list(pull(dy))

    return run


@functools.cache
def case(name):
    """(operands, a gradient of the result, the result and its gradients)."""
    args, dy = draw(np.random.default_rng([*name.encode()]), name)
    return args, dy, jax.jit(both_ways(OPS[name]))(args, dy)


def check(name, got, want):
    """Sums in another order, some of which may have the next FP8 code then."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        limit = 1e-3 if "fp8" in name else 64 * 2.0**-23
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), name


@pytest.mark.parametrize("name", LAYERS)
def test_values_are_those_of_float64(name, rng):
    """Parameters in float32 have gradients that no rounding to the compute dtype has touched."""
    for dtype in (f32, bf16):
        args, dy = draw(rng, name, dtype, f32)
        y, gradients = jax.jit(both_ways(OPS[name]))(args, dy)
        assert [a.dtype for a in (y, *gradients)] == [dtype, *(a.dtype for a in args)]
        want = LAYERS[name][2](*(np.asarray(a, np.float64) for a in args))
        # Some tens of roundings in float32; in bfloat16 at each product and at the activation.
        limit = {f32: 64 * 2.0**-23, bf16: 8 * 2.0**-8}[dtype]
        np.testing.assert_allclose(
            np.asarray(y, np.float64), want, rtol=0, atol=limit * np.abs(want).max()
        )
        xla = functools.partial(OPS[name], implementation="xla")
        for a, b in zip(gradients, jax.jit(both_ways(xla))(args, dy)[1], strict=True):
            a, b = (np.asarray(g, np.float64) for g in (a, b))
            np.testing.assert_allclose(a, b, rtol=0, atol=limit * np.abs(b).max())
        assert np.any(gradients[-1] != gradients[-1].astype(bf16).astype(f32))


# ---------------------------------------------------------------- contexts


def by_rows(axis):
    """vmap over an axis of rows; parameters are shared."""
    return lambda op: lambda x, *p: jax.vmap(lambda x: op(x, *p), axis, axis)(x)


def scanned(op):
    """A loop over stacks of one."""
    step = lambda x, p: (x, op(x, *p))
    return lambda x, *p: jax.lax.scan(step, x, [a[None] for a in p])[1][0]


def checkpointed(**options):
    return lambda op: jax.checkpoint(op, **options)


CONTEXTS = {
    "vmap": by_rows(0),
    "vmap over the second axis": by_rows(1),
    "vmap of vmap": lambda op: by_rows(0)(by_rows(0)(op)),
    "scan": scanned,
    "scan of checkpoint": lambda op: scanned(jax.checkpoint(op)),
    "checkpoint": checkpointed(),
    "checkpoint of products": checkpointed(policy=jax.checkpoint_policies.dots_saveable),
    "checkpoint of FP8 products": checkpointed(policy=products_saveable),
    "checkpoint of kernels' codes": checkpointed(policy=kernel_codes_saveable),
    "cond": lambda op: lambda x, *p: jax.lax.cond(x[0, 0, 0] < 9, op, lambda *a: 0 * op(*a), x, *p),
}
# Each context with a layer of either kind, by turns: what they share is `core`'s.
PAIRS = [(c, [*OPS][4 * fp8 + (i + fp8) % 4]) for i, c in enumerate(CONTEXTS) for fp8 in (0, 1)]


@pytest.mark.parametrize("context, name", PAIRS)
def test_a_context_changes_nothing(context, name):
    args, dy, want = case(name)
    check(name, jax.jit(both_ways(CONTEXTS[context](OPS[name])))(args, dy), want)


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_each_example(name):
    """vmap of gradients, and gradients of stacked parameters, also of one x: as one by one."""
    args, dy, _ = case(name)
    run = jax.jit(both_ways(OPS[name]))
    axes = [0, *[None] * (len(args) - 1)]
    got = jax.jit(jax.vmap(lambda x, *rest: run([x, *rest[:-1]], rest[-1]), (*axes, 0)))
    if "fp8" not in name:
        want = [run([args[0][i], *args[1:]], dy[i]) for i in range(ROWS[0])]
        want = jax.tree.map(lambda *each: jnp.stack(each), *want)
        check(name, got(*args, dy), want)
    factors = [1, 1] if "fp8" in name else [1, -0.5]  # in FP8 all examples' rows share a scale
    stacks = [jnp.stack([a * f for f in factors]) for a in args]
    found = jax.jit(both_ways(jax.vmap(OPS[name])))(stacks, jnp.stack([dy, dy]))
    one = [run([a * f for a in args], dy) for f in factors]
    check(name, found, jax.tree.map(lambda *each: jnp.stack(each), *one))
    shared = jax.vmap(OPS[name], (None, *[0] * (len(args) - 1)))
    found = jax.jit(both_ways(shared))([args[0], *stacks[1:]], jnp.stack([dy, dy]))
    ys, gradients = zip(*[run([args[0], *(a * f for a in args[1:])], dy) for f in factors])
    dx, *rest = [jnp.stack(each) for each in zip(*gradients)]
    check(name, found, (jnp.stack(ys), [dx.sum(0), *rest]))


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_ensembles_in_bfloat16(name, rng):
    """Float32 gradients of float32 kernels, whichever operands have a batch dimension, on CPUs too,
    where XLA lacks some products of bfloat16 that are float32."""
    args, dy = draw(rng, name, bf16, f32)
    args, dy = [args[0][:, 0], *args[1:]], dy[:, 0]  # x of two dimensions: one product for all
    loss = lambda *args: jnp.sum((OPS[name](*args).astype(f32) - dy) ** 2)
    run = jax.grad(loss, (*range(len(args)),))
    stacks = [jnp.stack([a, a * 0.5]) for a in args]
    for first in (0, None):
        axes = (first, *[None if first == 0 else 0] * (len(args) - 1))
        pick = lambda axis, a, stack: a if axis is None else stack
        given = [*map(pick, axes, args, stacks)]
        each = [[a if axis is None else a[i] for axis, a in zip(axes, given)] for i in (0, 1)]
        for compiled in (jax.jit, lambda f: f):
            found = compiled(jax.vmap(run, axes))(*given)
            want = [jnp.stack(pair) for pair in zip(*(run(*one) for one in each))]
            assert found[1].dtype == f32
            for a, b in zip(found, want, strict=True):  # bfloat16 values, rounded in another order
                a, b = (np.asarray(v, np.float64) for v in (a, b))
                assert np.linalg.norm(a - b) <= 2.0**-6 * np.linalg.norm(b)
    text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert re.search(r"dot_general .*bf16>, .*bf16>\) -> tensor<\w*xf32>", text), "one GEMM"


def test_gradients_of_nested_batches_in_bfloat16(rng):
    """Of all of x's for each gradient of the results: a batch dimension that one operand has."""
    draw = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), bf16)
    kernel, x, dy = draw(5, 6).astype(f32), draw(2, 3, 4, 5), draw(3, 4, 6)
    one = lambda x, dy: jax.vjp(lambda k: dense(x, k, dtype=bf16), kernel)[1](dy)[0]
    got = jax.jit(jax.vmap(jax.vmap(one), (0, None)))(x, dy)
    assert got.dtype == f32
    np.testing.assert_array_equal(got, np.einsum("CBab,Bac->CBbc", *map(np.float32, (x, dy))))


LINEAR = nnx_layers.Linear(8, 4, dtype=bf16, rngs=nnx.Rngs(0))
OF_MODULES = {
    "nnx": lambda k, x: nnx.merge(nnx.graphdef(LINEAR), {"kernel": k, "bias": jnp.zeros(4)})(x),
    "linen": lambda k, x: linen.Dense(4, use_bias=False, dtype=bf16).apply(
        {"params": {"kernel": k}}, x
    ),
}


@pytest.mark.parametrize("framework", OF_MODULES)
def test_ensembles_of_modules_and_second_derivatives_in_bfloat16(framework, rng):
    """Each beside the same in float32: bfloat16 rounds x, kernels, results and their gradients."""
    kernels, x = jnp.asarray(rng.standard_normal((3, 8, 4)), f32), jnp.ones((2, 8))
    ours = lambda k, x: jnp.sum(OF_MODULES[framework](k, x).astype(f32) ** 2)
    plain = lambda k, x: jnp.sum((x @ k) ** 2)
    for of in (
        lambda loss: jax.vmap(jax.grad(loss), (0, None)),
        lambda loss: jax.vmap(jax.hessian(loss), (0, None)),
        lambda loss: jax.vmap(lambda k, x: accumulate_gradients(loss, k, x[None])[1], (0, None)),
    ):
        got, want = (jax.jit(of(loss))(kernels, x) for loss in (ours, plain))
        assert got.dtype == f32
        assert np.linalg.norm(got - want) <= 2.0**-6 * np.linalg.norm(want)


@pytest.mark.parametrize("name", OPS)
def test_forward_and_reverse_mode_agree(name, rng):
    """⟨dy, J t⟩ of both; in FP8 the reverse differs by its own quantization of dy."""
    args, dy, (want, gradients) = case(name)
    along, _ = draw(rng, name)
    y, moved = jax.jit(lambda *args: jax.jvp(OPS[name], args, tuple(along)))(*args)
    pairs = [tuple(map(np.ravel, pair)) for pair in zip(gradients, along, strict=True)]
    reverse = sum(np.vdot(g, t) for g, t in pairs)
    size = sum(np.linalg.norm(g) * np.linalg.norm(t) for g, t in pairs)
    check(name, y, want)
    assert abs(np.vdot(moved, dy) - reverse) < (0.02 if "fp8" in name else 1e-5) * size


def test_a_derivative_rule_may_call_it_on_tangents():
    """Then JAX transposes the product itself, and not the tangent that it has."""
    x, kernel = (jnp.asarray(np.eye(3, 4), jnp.bfloat16), jnp.ones((4, 2), jnp.bfloat16))

    @jax.custom_jvp
    def scaled(kernel):
        return dense(x, kernel)

    @scaled.defjvp
    def _(primals, tangents):
        return scaled(*primals), 2 * dense(x, *tangents)

    dy = jnp.asarray([[1, 2], [3, 4], [5, 6]], jnp.bfloat16)
    (pulled,) = jax.vjp(scaled, kernel)[1](dy)
    (transposed,) = jax.linear_transpose(functools.partial(dense, x), kernel)(dy)
    want = [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert pulled.dtype == transposed.dtype == kernel.dtype
    assert (transposed.tolist(), pulled.tolist()) == (want, [[2 * n for n in row] for row in want])


def test_remat_policies_see_the_product():
    args, dy, _ = case("dense")

    def products(policy):
        run = both_ways(jax.checkpoint(OPS["dense"], policy=policy))
        return str(jax.make_jaxpr(run)(args, dy)).count("dot_general[")

    policies = jax.checkpoint_policies
    assert products(policies.nothing_saveable) == products(policies.dots_saveable) + 1


def test_default_matmul_precision_reaches_the_backward():
    args, dy, _ = case("dense")

    def gradients(args, dy):
        with jax.default_matmul_precision("highest"):
            pull = jax.vjp(dense, *args)[1]
        return pull(dy)

    text = jax.jit(gradients).lower(args, dy).as_text()
    assert text.count("dot_general") == text.count("precision = [HIGHEST, HIGHEST]") == 2


SECOND = {
    "reverse over reverse": lambda f, x: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(f)(x))))(x),
    "forward over reverse": lambda f, x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
    "forward over forward": lambda f, x: jax.jvp(lambda x: jax.jvp(f, (x,), (x,))[1], (x,), (x,)),
}


@pytest.mark.parametrize("name", OPS)
def test_second_derivatives(name):
    """Those of plain JAX; in FP8 there are none, and one clear error."""
    args, _, _ = case(name)
    parts = [
        (order, lambda op, i=i: lambda a: jnp.sum(jnp.sin(op(*args[:i], a, *args[i + 1 :]))), i)
        for order in SECOND.values()
        for i in (0, 1)
    ]
    if "fp8" in name:
        message = "^[a-zA-Z_]+: quantization='fp8' has first derivatives only; .*=None"
        for order, of, i in parts:
            with pytest.raises(TypeError, match=message):
                jax.eval_shape(lambda a, order=order, of=of: order(of(OPS[name]), a), args[i])
        return
    theirs = functools.partial(OPS[name], implementation="xla")
    run = jax.jit(lambda f: [order(of(f), args[i]) for order, of, i in parts], static_argnums=0)
    for got, want in zip(run(OPS[name]), run(theirs), strict=True):
        check(name, got, want)


# ---------------------------------------------------------------- meshes

SPECS = {  # x, kernels, the result
    "rows": (P("data"), P(), P("data")),
    "fsdp": (P(("data", "tensor")), P("data"), P(("data", "tensor"))),
    "columns": (P("data"), P(None, "tensor"), P("data", None, "tensor")),
}


def on_mesh(kind):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)


KINDS = [AxisType.Auto, AxisType.Explicit]
EVERY = [(*pair, KINDS[i // 2 % 2]) for i, pair in enumerate(half(OPS, SPECS))]


@pytest.mark.parametrize("name, split, kind", EVERY, ids=str)
def test_a_mesh_changes_nothing(name, split, kind, eight_devices):
    del eight_devices
    args, dy, want = case(name)
    row, kernel, out = SPECS[split]
    if "mlp" in name and split == "columns":
        kernel, out = P(), P("data")
    mesh = on_mesh(kind)
    with jax.set_mesh(mesh):
        spec = lambda a: row if a.ndim == 3 else kernel if a.ndim == 2 else P(*kernel[1:])
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        given = [place(a, spec(a)) for a in args]
        check(name, jax.jit(both_ways(OPS[name]))(given, place(dy, out)), want)


SPLITS = [  # x, the kernel
    (P("data"), P()),
    (P("data"), P("data")),
    (P("data"), P(None, "data")),
    (P("data"), P(None, "tensor")),
    (P("data"), P("data", "tensor")),
    (P("data", None, "tensor"), P()),
    (P("data", None, "tensor"), P(None, "tensor")),
    (P("data", None, "tensor"), P("tensor")),
    (P(("data", "tensor")), P("data", "tensor")),
]


@pytest.mark.parametrize("specs", SPLITS, ids=str)
def test_an_auto_mesh_has_the_collectives_of_plain_jax(specs, eight_devices):
    del eight_devices
    (args, dy, want), mesh = case("dense"), on_mesh(AxisType.Auto)
    plain = lambda x, kernel, bias: jax.nn.silu(x @ kernel + bias)
    like = tuple(NamedSharding(mesh, spec) for spec in (*specs, P()))
    given = [jax.device_put(a, sharding) for a, sharding in zip(args, like, strict=True)]
    gradients = lambda op: lambda args, dy: both_ways(op)(args, dy)[1]
    ours, theirs = (
        jax.jit(gradients(op), out_shardings=list(like)).lower(given, dy).compile()
        for op in (OPS["dense"], plain)
    )
    check("dense", ours(given, dy), want[1])
    kinds = lambda compiled: [c.kind for c in hlo.collectives(compiled)]
    assert kinds(ours) == kinds(theirs)


def test_an_explicit_mesh_with_out_sharding(eight_devices):
    del eight_devices
    (args, _, _), mesh = case("dense"), on_mesh(AxisType.Explicit)
    want = dense(*args)
    with jax.set_mesh(mesh):
        specs = (P("data", None, "tensor"), P("tensor"), P())
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
        f = jax.jit(functools.partial(dense, out_sharding=P("data", None, None)))
        check("dense", f(*args), want)
        assert [c.kind for c in hlo.collectives(f.lower(*args).compile())] == ["all-reduce"]
        batched = jax.vmap(functools.partial(dense, out_sharding=P(None, None)), (0, None, None))
        total = lambda f: lambda *a: jnp.sum(f(*a) ** 2)
        found = [jax.jit(jax.grad(total(one), (0, 1, 2)))(*args) for one in (batched, f)]
        check("dense", *found)


@pytest.mark.parametrize(
    "name, check_vma", half(["dense", "gated_dense", "gated_product", "mlp"], [True, False])
)
def test_shard_map_changes_nothing(name, check_vma, eight_devices):
    del eight_devices
    args, dy, want = case(name)
    rows = P(("data", "tensor"))
    specs = (rows, *[P()] * (len(args) - 1))
    options = {"in_specs": specs, "out_specs": rows, "check_vma": check_vma}
    mapped = jax.shard_map(OPS[name], mesh=on_mesh(AxisType.Auto), **options)
    check(name, jax.jit(both_ways(mapped))(args, dy), want)


def test_a_partly_manual_shard_map_changes_nothing(eight_devices):
    del eight_devices
    args, dy, want = case("dense")
    specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data"), "axis_names": {"data"}}
    mapped = jax.shard_map(OPS["dense"], mesh=on_mesh(AxisType.Auto), **specs)
    check("dense", jax.jit(both_ways(mapped))(args, dy), want)


# ---------------------------------------------------------------- programs that leave the process


def allowed():
    calls = ("quantize", "quantize_amax", "quantize_cast", "quantize_gated", "quantize_gated_amax")
    calls += ("quantize_gated_gradient", "launch")
    return [export.DisabledSafetyCheck.custom_call(f"normfuse_{name}") for name in calls]


@pytest.mark.parametrize(
    "name, symbolic", [("dense", False), ("mlp", True), ("gated_product, fp8", False)]
)
def test_export_changes_nothing(name, symbolic):
    args, dy, want = case(name)
    run, types = jax.jit(both_ways(OPS[name])), (args, dy)
    if symbolic:
        (rows,) = export.symbolic_shape("b")
        of = lambda a: (rows, *a.shape[1:]) if a.ndim == 3 else a.shape
        types = jax.tree.map(lambda a: jax.ShapeDtypeStruct(of(a), a.dtype), types)
    exported = export.export(run, disabled_checks=allowed())(*types)
    again = jax.jit(export.deserialize(exported.serialize()).call)
    check(name, again(args, dy), want)
