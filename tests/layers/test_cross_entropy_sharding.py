"""linear_cross_entropy on meshes: values, and only the necessary communication."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import linear_cross_entropy

BATCH, SEQ, N, VOCABULARY, IGNORE = 8, 16, 24, 64, -100
OPTIONS = {"ignore": IGNORE, "softcap": 5.0, "z_loss": 0.1, "chunk_rows": 6}
MESHES = {  # shape, axes, x's rows, the kernel (n, vocab)
    "data": ((8,), ("data",), P("data"), P()),
    "sequence": ((2, 4), ("data", "seq"), P("data", "seq"), P()),
    "FSDP": ((8,), ("fsdp",), P("fsdp"), P("fsdp", None)),
    "FSDP, by words": ((2, 4), ("data", "fsdp"), P(("data", "fsdp")), P(None, "fsdp")),
    "tensor": ((4, 2), ("data", "tensor"), P("data"), P(None, "tensor")),
    "all": ((2, 2, 2), ("data", "fsdp", "tensor"), P(("data", "fsdp")), P("fsdp", "tensor")),
}
KINDS = [AxisType.Auto, AxisType.Explicit]


def draw(rng, contract=0, dtype=jnp.float32):
    x = jnp.asarray(rng.standard_normal((BATCH, SEQ, N)), dtype)
    stored = (N, VOCABULARY) if contract == 0 else (VOCABULARY, N)
    kernel = jnp.asarray(rng.standard_normal(stored) / 2, dtype)
    labels = rng.integers(0, VOCABULARY, (BATCH, SEQ))
    labels[0, :5] = IGNORE
    return x, kernel, jnp.asarray(labels, jnp.int32)


def loss_and_gradients(reduction, contract=0, **options):
    def loss(x, kernel, labels):
        options_ = OPTIONS | {"contract": contract, "reduction": reduction} | options
        found = linear_cross_entropy(x, kernel, labels, **options_)
        return sum(jnp.sum(each**2) for each in jax.tree.leaves(found))

    return jax.value_and_grad(loss, (0, 1))


def close(found, expected, atol=1e-5):
    """Sums in another order, of 128 rows at most."""
    for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        e = np.asarray(e)
        np.testing.assert_allclose(np.asarray(f), e, 2e-5, atol * np.abs(e).max(initial=0))


def on_mesh(name, kind, fn, arrays, specs, count):
    """The compiled `fn` of arrays with these specs, and its checked results.

    The first `count` arrays have gradients, with their shardings.
    """
    shape, names, *_ = MESHES[name]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    places = [NamedSharding(mesh, spec) for spec in specs]
    auto = {"out_shardings": (None, tuple(places[:count]))} if kind == AxisType.Auto else {}
    with jax.set_mesh(mesh):
        placed = [jax.device_put(*pair) for pair in zip(arrays, places, strict=True)]
        compiled = jax.jit(fn, **auto).lower(*placed).compile()
        found = compiled(*placed)
    close(found, jax.jit(fn)(*arrays))
    for gradient, place in zip(found[1], places):
        assert gradient.sharding.is_equivalent_to(place, gradient.ndim)
    return compiled


@pytest.mark.parametrize(
    "name, kind, reduction",
    [
        ("data", AxisType.Auto, "mean"),
        ("sequence", AxisType.Explicit, "mean"),
        ("FSDP", AxisType.Explicit, "none"),
        ("FSDP, by words", AxisType.Auto, "none"),
        ("tensor", AxisType.Auto, "mean"),
        ("tensor", AxisType.Explicit, "none"),
        ("tensor", AxisType.Auto, "entropy"),
        ("all", AxisType.Explicit, "mean"),
    ],
    ids=str,
)
def test_values_and_collectives(eight_devices, rng, name, kind, reduction):
    _, names, rows, stored = MESHES[name]
    contract = len(name) % 2
    stored = P(*reversed((*stored, None, None)[:2])) if contract else stored
    # A loop's collectives stand in a program once: there is none where there are some in it.
    chunk = {"chunk_rows": None} if "tensor" in names and reduction == "mean" else {}
    statistics = 3
    if reduction == "entropy":
        reduction, statistics = "none", 4
        chunk["with_entropy"] = True
    fn = loss_and_gradients(reduction, contract, **chunk)
    compiled = on_mesh(name, kind, fn, draw(rng, contract), (rows, stored, rows), 2)
    parts = 2 if "tensor" in names else 1
    count = BATCH * SEQ * parts // 8
    # The loss, and of the mean its count; the kernel's gradient once; and with the vocabulary in
    # parts three numbers a row, a fourth of its entropy, and x's gradient.
    reduced = statistics - 2 + N * VOCABULARY // parts  # the entropies' sum of squares
    reduced += (statistics * count + count * N) * (parts > 1)
    expected = {("all-reduce", "f32"): reduced}
    if reduction == "mean":
        expected["all-reduce", "s32"] = 1
    if "fsdp" in names:
        expected["all-gather", "f32"] = N * VOCABULARY // parts  # once
    seen = hlo.communicated(compiled)
    if name == "sequence":  # a sum over two axes takes two steps for what is plain HLO
        seen["all-reduce", "f32"] -= 1
        if reduction == "mean":
            seen["all-reduce", "s32"] -= 1
    assert seen == expected


@pytest.mark.parametrize("name, kind", half(MESHES, KINDS), ids=str)
def test_weights_and_a_bias_move_nothing_but_sums(eight_devices, rng, name, kind):
    """Sums of weights, and the bias's gradient, split as words; a device has its rows' losses."""
    _, names, rows, stored = MESHES[name]
    x, kernel, labels = draw(rng)
    weights = jnp.asarray(rng.uniform(0.5, 2, labels.shape), jnp.float32).at[2].set(0)
    bias = jnp.asarray(rng.standard_normal(VOCABULARY), jnp.float32)
    options = OPTIONS | {"chunk_rows": None, "label_smoothing": 0.1}
    loss = lambda x, k, b, w, labels: linear_cross_entropy(
        x, k, labels, bias=b, weights=w, **options
    )
    fn, arrays = jax.value_and_grad(loss, (0, 1, 2, 3)), (x, kernel, bias, weights, labels)
    words = P("tensor") if "tensor" in names else P()
    compiled = on_mesh(name, kind, fn, arrays, (rows, stored, words, rows, rows), 4)
    parts = 2 if "tensor" in names else 1
    count = BATCH * SEQ * parts // 8
    reduced = 1 + 2 + (N + 1) * VOCABULARY // parts + (3 * count + count * N) * (parts > 1)
    expected = {("all-reduce", "f32"): reduced}
    if "fsdp" in names:
        expected["all-gather", "f32"] = N * VOCABULARY // parts
    seen = hlo.communicated(compiled)
    if name == "sequence":
        seen["all-reduce", "f32"] -= 3
    assert seen == expected


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_without_features(eight_devices, kind):
    """Each word is as likely as any other of the whole vocabulary."""
    x, kernel, labels = jnp.ones((16, 0)), jnp.ones((0, 32)), jnp.zeros(16, jnp.int32)
    specs = P("data"), P(None, "tensor"), P("data")
    on_mesh("tensor", kind, loss_and_gradients("none"), (x, kernel, labels), specs, 2)


def test_in_shard_map(eight_devices, rng):
    """Rows over every axis: each device's loss is of its own rows."""
    x, kernel, labels = draw(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    weights = jnp.asarray(rng.uniform(0.5, 2, labels.shape), jnp.float32)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data"), P(), P("data"), P("data")),
        out_specs=(P("data"), P()),
    )
    def run(x, kernel, labels, weights):
        loss = lambda kernel: linear_cross_entropy(x, kernel, labels, weights=weights, **OPTIONS)
        value, dkernel = jax.value_and_grad(loss)(kernel)
        return value[None], dkernel  # of what does not vary, the sum already

    values, dkernel = jax.jit(run)(x, kernel, labels, weights)
    one = lambda k, x, labels, w: linear_cross_entropy(x, k, labels, weights=w, **OPTIONS)
    each = lambda k: jax.vmap(functools.partial(one, k))(x, labels, weights)
    close((values, dkernel), (each(kernel), jax.grad(lambda k: each(k).sum())(kernel)))


@pytest.mark.parametrize("contract, reduction, smoothing", [(0, "none", 0.25), (1, "sum", 0.0)])
def test_words_that_no_row_has_change_nothing(eight_devices, rng, contract, reduction, smoothing):
    """Devices compute with 1040 words each, of which they have 1030."""
    words = 2060
    x, _, _ = draw(rng)
    kernel, bias = rng.standard_normal((N, words)), rng.standard_normal(words)
    # On both sides of where the words of the second device begin
    labels = jnp.asarray(rng.integers(1020, 1050, (BATCH, SEQ)), jnp.int32)
    kernel = jnp.asarray(kernel.T if contract else kernel, jnp.float32)

    def loss(x, kernel, bias, chosen=linear_cross_entropy):
        options = {"contract": contract, "reduction": reduction, "bias": bias}
        options["label_smoothing"] = smoothing
        found = chosen(x, kernel, labels, **options, with_entropy=True)
        return sum(jnp.sum(each**2) for each in found)

    def plain(x, kernel, labels, contract, reduction, bias, label_smoothing, with_entropy):
        log_p = jax.nn.log_softmax(x @ (kernel.T if contract else kernel) + bias)
        each = -jnp.take_along_axis(log_p, labels[..., None], -1)[..., 0]
        each = (1 - label_smoothing) * each - label_smoothing * log_p.mean(-1)
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
        return each.sum() if reduction == "sum" else each, entropy

    both = lambda chosen: jax.value_and_grad(functools.partial(loss, chosen=chosen), (0, 1, 2))
    kind, of_words = (AxisType.Auto, P("tensor")) if contract else (AxisType.Explicit, P())
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    stored = P("tensor", None) if contract else P(None, "tensor")
    expected = jax.jit(both(plain))(x, kernel, jnp.float32(bias))
    with jax.set_mesh(mesh):
        places = zip((x, kernel, jnp.float32(bias)), (P("data"), stored, of_words))
        arrays = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in places]
        close(jax.jit(both(linear_cross_entropy))(*arrays), expected)
