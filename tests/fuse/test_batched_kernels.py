"""Kernels with a batch dimension: experts, vmapped layers, stages of a pipeline, ensembles."""

import functools
import re

import fuse_cases
import jax
import jax.numpy as jnp
import pytest
from fuse_cases import draw
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

E, R, W, H = 3, 32, 32, 48
silu, tanh = jax.nn.silu, jnp.tanh


def kernels(*shapes):
    return {str(i): draw(i + 1, E, *shape, scale=0.2) for i, shape in enumerate(shapes)}


def experts(p, x):
    product = functools.partial(jnp.einsum, "ecd,edf->ecf")
    return product(silu(product(x, p["0"])) * product(x, p["1"]), p["2"])


def layers(p, x):
    """Equinox's, stored (out, in), with biases that are vmapped too."""
    of_one = lambda gate, down, bias, x: down @ jax.nn.relu(gate @ x + bias)
    return jax.vmap(jax.vmap(of_one, (None, None, None, 0)))(p["0"], p["1"], p["2"], x)


def ensemble(p, x):
    """Members with one input, whose products are one product of all their columns."""
    return jax.vmap(lambda a, b, c: (silu(x[0] @ a) * (x[0] @ b)) @ c)(p["0"], p["1"], p["2"])


def stages(p, x):
    """Those of a pipeline, which shift what they pass on."""
    step = lambda x, _: (jnp.roll(jax.vmap(lambda w, x: tanh(x @ w))(p["0"], x), 1, 0), None)
    return jax.lax.scan(step, x, None, length=2)[0]


def heads(p, x):
    """A kernel for each head, behind the tokens."""
    return jnp.einsum("hbd,hde->bhe", x, p["0"])


X = draw(0, E, R, W)
GATED = (W, H), (W, H), (H, W)
# (function, its parameters, rows without quantization, rows in FP8)
CASES = {
    "experts": (
        experts,
        kernels(*GATED),
        {f"mlp {E} of {R} x {H} -> {W}, silu, float32": "gated_product"},
        {f"mlp {E} of {R} x {H} -> {W}, silu, float32": "GatedMLP, fp8"},
    ),
    "layers": (
        layers,
        kernels((H, W), (W, H), (H,)),
        {f"mlp {E} of {R} x {H} -> {W}, relu, float32": "gated_product"},
        {f"mlp {E} of {R} x {H} -> {W}, relu, float32": "GatedMLP, fp8"},
    ),
    "ensemble": (
        ensemble,
        kernels(*GATED),
        {f"mlp {E} of {R} x {H} -> {W}, silu, float32": "gated_product"},
        {
            f"product {R} x {W} -> {E * H}, float32": "dense, fp8",
            f"mlp {E} of {R} x {H} -> {W}, silu, float32": "gated_product, fp8",
        },
    ),
    "stages": (
        stages,
        kernels((W, W), (W, W)),
        {},
        {f"product {E} of {R} x {W} -> {W}, float32 in scan": "dense, fp8"},
    ),
    "heads": (
        heads,
        kernels((W, W), (W, W)),
        {},
        {f"product {E} of {R} x {W} -> {W}, float32": "dense, fp8"},
    ),
}


def rows(fused):
    return {row.what: row.served or f"not: {row.reason}" for row in fused.rows}


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name][2]])
def test_values_and_gradients(name):
    function, params, want, _ = CASES[name]
    _, fused = fuse_cases.compare(function, (params, X))
    assert rows(fused) == want


def both(function):
    """The gradient of a sum by the parameters, and the values."""
    loss = lambda p, x: (jnp.cos(y := function(p, x)).sum(), y)
    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("name", CASES)
def test_values_in_fp8(name):
    function, params, _, want = CASES[name]
    function = lambda p, x, own=function: tanh(own(p, x))
    fused = fuse_cases.Fused(function, quantization="fp8")
    got = both(fused)(params, X)
    assert rows(fused) == want, fused
    for a, b in zip(*map(jax.tree.leaves, (got, both(function)(params, X))), strict=True):
        error = jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-6)
        assert error < 0.15, error  # two or three products, each of which rounds to 1 / 16


def test_each_kernel_has_its_scale():
    """A kernel that is 2^30 as small as another one is rounded as relatively."""
    small = jnp.exp2(jnp.array([0.0, -30, 0]))[:, None, None]
    params = CASES["heads"][1] | {"0": CASES["heads"][1]["0"] * small}
    got, want = (
        jnp.take(f(params, X), 1, 1)
        for f in (
            fuse_cases.Fused(lambda *args: 2 * heads(*args), quantization="fp8"),
            lambda *args: 2 * heads(*args),
        )
    )
    assert jnp.linalg.norm(got - want) < 0.06 * jnp.linalg.norm(want)


def test_batches_in_two_orders_are_two_products():
    """Groups of as many experts: the hidden array's have another order than the kernel's."""
    shape = lambda w: w.reshape(2, 2, *w.shape[1:])
    params = {"0": draw(1, 4, W, H, scale=0.1), "1": draw(2, 4, H, W, scale=0.1)}

    def function(p, x):
        h = silu(jnp.einsum("abrd,abdf->abrf", x, shape(p["0"])))
        return 2 * jnp.einsum("abrf,bafd->abrd", h, shape(p["1"]))

    args = params, draw(3, 2, 2, R, W)
    fused = fuse_cases.Fused(function, quantization="fp8")
    got, want = (jax.jit(f)(*args) for f in (fused, function))
    assert jnp.linalg.norm(got - want) < 0.1 * jnp.linalg.norm(want), fused


KEYS = {"keys": draw(5, E, R, W)}
LEFT = {  # attentions, and their like: functions of parameters and x
    "keys of a batch": (
        lambda p, b: jnp.einsum("eqd,ekd->eqk", tanh(b["x"] @ p["0"][0]), b["keys"]),
        "argument 1 is taken for data",
    ),
    "arrays by themselves": (
        lambda x, keys: tanh(jnp.einsum("eqd,ekd->eqk", x, keys)),
        "argument 1 is taken for data: kernels with a batch dimension are parts of a tree",
    ),
    "values of a batch": (
        lambda p, b: jnp.einsum(
            "eqk,ekd->eqd", tanh(jnp.einsum("eqd,ekd->eqk", b["x"] @ p["0"][0], b["x"])), b["keys"]
        ),
        "argument 1 is taken for data",
    ),
    "parameters": (
        lambda p, b: jnp.einsum("eij,ejk->eik", p["0"], p["1"]),
        "a product of two parameters",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_attends_is_no_kernel(name):
    function, reason = LEFT[name]
    alone = name == "arrays by themselves"
    args = (X, KEYS["keys"]) if alone else (kernels(*[(W, W)] * 3), KEYS | {"x": X})
    fused = fuse_cases.Fused(lambda *args: tanh(function(*args)), quantization="fp8", serves=False)
    jax.eval_shape(fused, *args)
    left = [row for row in fused.rows if not row.served]
    assert [row.reason for row in left if reason in row.reason], fused
    assert not any(" of " in row.what for row in fused.rows), fused


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_experts_that_devices_share_exchange_maxima_alone(kind):
    """On Auto axes they are served where they are; on Explicit ones they stay."""
    mesh = jax.make_mesh((2,), ("e",), axis_types=(getattr(AxisType, kind),))
    function, sizes = lambda p, x: tanh(experts(p, x)), [(2, *shape) for shape in GATED]
    with jax.set_mesh(mesh):
        place = lambda x: jax.device_put(x, NamedSharding(mesh, P("e")))
        params = {str(i): place(draw(i, *size)) for i, size in enumerate(sizes)}
        fused = fuse_cases.Fused(function, quantization="fp8", serves=kind == "Auto")
        step = jax.jit(lambda p, x: jax.grad(lambda p: fused(p, x).sum())(p))
        text = step.lower(params, place(X[:2])).compile().as_text()
    if kind == "Auto":
        assert [*rows(fused).values()] == ["GatedMLP, fp8"], fused
        results = re.findall(r"= (.*?) (?:all-|reduce-scatter|collective-)[a-z-]*\(", text)
        assert results and all(set(re.findall(r"f32\[\d*\]", r)) == {"f32[1]"} for r in results)
    else:
        assert "batch dimension, on a mesh of Explicit axes" in str(fused)


@pytest.mark.parametrize("stored", ["cndh", "dcnh", "cnhd"])
def test_kernels_of_heads_on_explicit_axes(stored):
    """Columns that devices share are not joined to others, within a scan or outside."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    sizes = {"c": 3, "n": 4, "d": W, "h": 16}
    spec = P(None, *["model" if letter == "n" else None for letter in stored])
    kernel = draw(1, 2, *[sizes[letter] for letter in stored], scale=0.2)

    def layer(x, w):
        q, k, v = jnp.einsum(f"btd,{stored}->cbtnh", x, w)
        return x + tanh(q * k + v)[..., :2, :].reshape(x.shape, out_sharding=P("data")), None

    function = lambda p, x: jax.lax.scan(layer, x, p["w"])[0] / 2
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        args = {"w": place(kernel, spec)}, place(draw(0, 2, R, W), P("data"))
        fused = fuse_cases.Fused(function, quantization="fp8")
        got, want = both(fused)(*args), both(function)(*args)
    assert [*rows(fused).values()] == ["dense, fp8"], fused
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.sharding == b.sharding
        assert jnp.linalg.norm(a - b) < 0.15 * jnp.linalg.norm(b)
