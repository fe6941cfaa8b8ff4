"""Batching: `vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rms_norm_cases import Batch, Case, stack, total

pytestmark = pytest.mark.oldest

BOTH = {"backward": 1, "forward": 1}
OVER = {
    "rms_norm": [(2, None), (-2, None), (None, 1), (3, 0)],
    "residual_rms_norm": [(0, 0, None), (None, 3, None), (0, 1, 1), (None, 2, 0)],
}
EVERY = [(op, in_axes) for op, all_axes in OVER.items() for in_axes in all_axes]


def mapped_scale(in_axes):
    return in_axes[-1] is not None


@pytest.mark.parametrize("op, in_axes", EVERY, ids=str)
def test_vmap(op, in_axes, serve):
    """`vmap` over any operand and axis"""
    batch = Batch(op, in_axes)
    run = serve.partly if mapped_scale(in_axes) else serve
    run(batch.case, jax.vmap(batch.case, in_axes), *batch.args, expected=batch.each("values"))


@pytest.mark.parametrize("op, in_axes", EVERY, ids=str)
def test_vmap_of_grad(op, in_axes, serve):
    """`vmap(grad)`: gradients of each example's own, of scale too"""
    batch = Batch(op, in_axes)
    fn = jax.vmap(batch.case.grad, (*in_axes, *(0 for _ in batch.cts)))
    expected = batch.each("gradients")
    serve.partly(batch.case, fn, *batch.args, *batch.cts, expected=expected, calls=BOTH)


@pytest.mark.parametrize("op, in_axes", EVERY, ids=str)
def test_grad_of_vmap(op, in_axes, serve):
    """`grad(vmap)`: shared operands sum over the examples"""
    batch = Batch(op, in_axes)

    def loss(*args_and_cts):
        return jax.vmap(batch.case.loss, (*in_axes, *(0 for _ in batch.cts)))(*args_and_cts).sum()

    run = serve.partly if mapped_scale(in_axes) else serve
    fn = jax.grad(loss, batch.case.argnums)
    run(batch.case, fn, *batch.args, *batch.cts, expected=batch.together(), calls=BOTH)


@pytest.mark.parametrize("frozen", ["x", "scale"])
def test_vmap_of_grad_by_one_operand(frozen, serve):
    """`vmap(grad)` by one operand"""
    batch = Batch("rms_norm", (0, None))
    wrt = int(frozen == "x")
    fn = jax.vmap(jax.grad(batch.case.loss, wrt), (0, None, 0))
    calls = BOTH if frozen == "scale" else {"forward": 1}  # the kernel's dx would be thrown away
    expected = [batch.each("gradients")[wrt]]
    serve.partly(batch.case, fn, *batch.args, *batch.cts, expected=expected, calls=calls)


def test_unused_gradient_of_each_examples_scale_is_not_computed(serve):
    """`vmap(grad)` by x alone"""
    batch = Batch("rms_norm", (0, None))
    fn = jax.vmap(jax.grad(batch.case.loss), (0, None, 0))
    expected = batch.each("gradients")[:1]
    serve(batch.case, fn, *batch.args, *batch.cts, expected=expected, calls=BOTH)


def test_cotangents_alone(serve):
    """`vmap` of a pullback over cotangents"""
    batch = Batch("residual_rms_norm", (None, None, None))
    _, pullback = jax.vjp(batch.case, *batch.case.args)
    fn = jax.vmap(pullback)
    expected = batch.each("gradients")
    serve.partly(batch.case, fn, batch.cts, expected=expected, calls={"backward": 1})


def test_tangents_alone(serve):
    """`vmap` of a `jvp` over tangents"""
    batch = Batch("rms_norm", (None, None))
    tangents = tuple(np.stack(t) for t in zip(*(e.tangents for e in batch.examples)))
    fn = jax.vmap(lambda *tangents: jax.jvp(batch.case, batch.args, tangents)[1])
    serve.partly(batch.case, fn, *tangents, expected=batch.each("pushed"))


def test_axis_that_moves_with_the_batch(serve):
    """`vmap` with normalised axes that are not last, in front of and behind the batch"""
    for axis in (0, 1, (0, 2)):
        for at in (0, 1, 2, 3):
            batch = Batch("rms_norm", (at, None), axis=axis, shape=(4, 5, 6))
            fn = jax.vmap(batch.case, (at, None))
            serve(batch.case, fn, *batch.args, expected=batch.each("values"))


def test_out_axes(case, serve):
    """`out_axes`"""
    batch = Batch(case.op, (1,) * (len(case.args) - 1) + (None,))
    fn = jax.vmap(batch.case, batch.in_axes, out_axes=2)
    moved = [
        y.map(lambda a: np.moveaxis(np.broadcast_to(a, (3, 8, 2, 16)), 0, 2))
        for y in batch.each("values")
    ]
    serve(batch.case, fn, *batch.args, expected=moved)


def nested(op, outer, inner):
    """Two levels of examples: batches of batches, and their operands for `vmap(vmap)`."""
    batches = [Batch(op, inner, size=2, fill=lambda v, k=k: v + k / 8) for k in range(3)]
    for batch in batches[1:]:
        batch.share(batches[0], outer)
    args = tuple(
        arrays[0] if axis is None else np.stack(arrays, axis)
        for arrays, axis in zip(zip(*(b.args for b in batches)), outer)
    )
    return batches, args, tuple(np.stack(cts) for cts in zip(*(b.cts for b in batches)))


NESTED = [((1, None), (2, None)), ((0, 0), (1, 0))]


@pytest.mark.parametrize("outer, inner", NESTED, ids=str)
def test_vmap_twice(outer, inner, serve):
    """`vmap(vmap)`"""
    batches, args, _ = nested("rms_norm", outer, inner)
    fn = jax.vmap(jax.vmap(batches[0].case, inner), outer)
    expected = [stack(column) for column in zip(*(b.each("values") for b in batches))]
    run = serve.partly if mapped_scale(inner) or mapped_scale(outer) else serve
    run(batches[0].case, fn, *args, expected=expected)


@pytest.mark.parametrize("outer, inner", NESTED, ids=str)
def test_vmap_twice_of_grad(outer, inner, serve):
    """`vmap(vmap(grad))`"""
    batches, args, cts = nested("rms_norm", outer, inner)
    fn = jax.vmap(jax.vmap(batches[0].case.grad, (*inner, 0)), (*outer, 0))
    expected = [stack(column) for column in zip(*(b.each("gradients") for b in batches))]
    serve.partly(batches[0].case, fn, *args, *cts, expected=expected, calls=BOTH)


def test_vmap_of_grad_of_vmap(serve):
    """`vmap(grad(vmap))`: sums within an example, one gradient for each"""
    batches, args, cts = nested("rms_norm", (0, None), (0, None))
    case = batches[0].case
    loss = lambda x, scale, ct: jax.vmap(case.loss, (0, None, 0))(x, scale, ct).sum()
    fn = jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0))
    each = [[b.each("gradients")[0], total(b.each("gradients")[1])] for b in batches]
    expected = [stack(column) for column in zip(*each)]
    serve.partly(case, fn, *args, *cts, expected=expected, calls=BOTH)


def test_jacobian_of_each_example(serve):
    """`vmap(jacrev)`"""
    batch = Batch("rms_norm", (0, None), shape=(5,))
    fn = jax.vmap(jax.jacrev(lambda *args: batch.case.loss(*args) ** 2), (0, None))
    losses = [np.sum(e.values()[0].value * batch.case.cts[0]) for e in batch.examples]
    grads = [e.replace(cts=batch.case.cts).gradients()[0] for e in batch.examples]
    chain = [g.map(lambda a, loss=loss: 2 * abs(loss) * a) for g, loss in zip(grads, losses)]
    signs = np.sign(losses)[:, None]
    expected = stack(chain).map(lambda a: a * signs)
    size = np.abs(expected.size) + np.abs(expected.size).max()  # the loss itself cancels
    expected = type(expected)(expected.value, size, expected.length)
    serve.partly(batch.case, fn, *batch.args, expected=[expected], calls=BOTH)


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_spmd_axis_name(explicit, auto_mesh, explicit_mesh, serve):
    """`spmd_axis_name`, the batch split over a mesh axis"""
    mesh = explicit_mesh if explicit else auto_mesh
    batch = Batch("rms_norm", (0, None), size=4)
    split = jax.device_put(batch.args[0], NamedSharding(mesh, P("data", None, None, None)))
    cts = jax.device_put(batch.cts[0], NamedSharding(mesh, P("data", None, None, None)))
    with jax.set_mesh(mesh):
        name = {} if explicit else {"spmd_axis_name": "data"}
        fn = jax.vmap(batch.case, (0, None), **name)
        text, (y,) = serve(batch.case, fn, split, batch.args[1], expected=batch.each("values"))
        assert y.sharding.is_equivalent_to(split.sharding, y.ndim)
        assert "all-gather" not in text
        fn = jax.vmap(batch.case.grad, (0, None, 0), **name)
        args, expected = (split, batch.args[1], cts), batch.each("gradients")
        text, _ = serve.partly(batch.case, fn, *args, expected=expected, calls=BOTH)
        assert "all-gather" not in text


def test_vmap_over_nothing(serve):
    """`vmap` of a function that ignores what is mapped"""
    case = Case("rms_norm")
    fn = jax.vmap(lambda _: case(*case.args))
    serve(case, fn, jnp.zeros(3), expected=[stack(case.values() * 3)])


def test_examples_of_no_rows(serve):
    """`vmap` over no example at all"""
    case = Case("rms_norm", (0, 2, 16))
    fn = jax.jit(jax.vmap(case.grad, (0, None, 0)))
    dx, dscale = fn(*case.args, *case.cts)
    assert dx.shape == (0, 2, 16) and dscale.shape == (0, 16)
    serve.record("native")
