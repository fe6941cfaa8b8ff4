"""Norms with scale and shift of each example: against the norm's expectations for each alone."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import Collective
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from rms_norm_cases import Case

from normfuse import adaptive_layer_norm, adaptive_rms_norm

OPS = {"rms_norm": adaptive_rms_norm, "layer_norm": adaptive_layer_norm}


@pytest.fixture(params=OPS)
def norm(request) -> str:
    return request.param


def drawn(shape, examples, dtype="float32", shift=True, seed=0):
    """The operands and dy."""
    rng = np.random.default_rng(seed)
    own = (*shape[:examples], shape[-1])
    args = [rng.standard_normal(shape).astype(jnp.dtype(dtype))]
    args += [rng.standard_normal(own, np.float32) for _ in range(1 + shift)]
    return args, rng.standard_normal(shape).astype(jnp.dtype(dtype))


def both(fn, args, dy):
    @jax.jit
    def run(args, dy):
        y, pull = jax.vjp(fn, *args)
        return y, pull(dy)

    return run(tuple(args), dy)


def check(norm, args, dy, y, grads, examples):
    """Each example alone is a norm with a bias."""
    flat = lambda a: np.asarray(a).reshape(-1, *a.shape[examples:])
    case = Case(norm, (1, 4), bias="float32", scale_offset=1.0)
    case.has_bias = len(args) == 3
    rows = lambda a: a.reshape(-1, a.shape[-1])
    for i, x in enumerate(flat(args[0])):
        own = [flat(a)[i] for a in args[1:]]
        alone = case.replace(args=(rows(x), *own), cts=(rows(flat(dy)[i]),), axes=(1,))
        alone.check([rows(flat(y)[i])], alone.values())
        dx, *sums = [flat(g)[i] for g in grads]
        alone.check([rows(dx), *sums], alone.gradients())


@pytest.mark.optimized
@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize(
    "shape, examples, shift",
    [
        ((3, 7, 24), 1, True),
        ((2, 3, 5, 24), 2, True),
        ((2, 3, 5, 24), 1, False),
        ((4, 24), 1, True),
    ],
    ids=str,
)
def test_values_and_gradients(norm, shape, examples, shift, implementation):
    args, dy = drawn(
        shape, examples, "bfloat16" if implementation == "native" else "float32", shift
    )
    fn = functools.partial(OPS[norm], implementation=implementation)
    y, grads = both(fn, args, dy)
    check(norm, args, dy, y, grads, examples)
    assert [g.dtype for g in grads] == [a.dtype for a in args] and y.dtype == args[0].dtype


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (0, None, None), (2, 0, 0), (3, None, 0)], ids=str)
def test_vmap(norm, in_axes):
    op = OPS[norm]
    args, dy = drawn((2, 3, 5, 8), 2)
    args = [a if axis is not None else a[0] for a, axis in zip(args, in_axes)]
    placed = [np.moveaxis(a, 0, axis or 0) if axis else a for a, axis in zip(args, in_axes)]
    y, grads = both(jax.vmap(op, in_axes), placed, dy)
    expected = [
        both(op, [a if n is None else a[i] for a, n in zip(args, in_axes)], dy[i]) for i in range(2)
    ]
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    close(y, np.stack([one for one, _ in expected]))
    for k, axis in enumerate(in_axes):
        each = np.stack([grads[k] for _, grads in expected])
        close(grads[k], each.sum(0) if axis is None else np.moveaxis(each, 0, axis))


@pytest.mark.newest
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_second_order(norm, mode):
    with jax.enable_x64(True):
        args, _ = drawn((2, 3, 4), 1, "float64")
        args = [a.astype("float64") for a in args]
        fn = functools.partial(OPS[norm], eps=0.1)
        check_grads(fn, args, order=2, modes=[mode], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "spec", [P("data", None, None), P("data", "model", None), P("data", None, "model")], ids=str
)
def test_meshes(eight_devices, norm, kind, spec):
    """Sums cross the devices that have tokens of one example, or parts of one row, alone."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    args, dy = drawn((8, 2, 16), 1)
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    with jax.set_mesh(mesh):
        placed = [put(args[0], spec), *[put(a, P("data", spec[2])) for a in args[1:]]]
        fn = functools.partial(OPS[norm], implementation="native")
        ct = put(dy, spec)
        y, grads = both(fn, placed, ct)
        check(norm, args, dy, y, grads, 1)
        run = jax.jit(lambda args, dy: jax.vjp(fn, *args)[1](dy))
        found = hlo.collectives(run.lower(tuple(placed), ct).compile())
    if spec[2] is None:
        assert found == [Collective("all-reduce", 2 * 2 * 16 * 4)] * (spec[1] is not None)


def test_bad_input_is_named(norm):
    op, name = OPS[norm], f"adaptive_{norm}"
    x, one = jnp.ones((4, 6, 8)), jnp.ones((4, 8))
    wrong = [one[:, :7], jnp.ones(8), jnp.ones((6, 8)), jnp.ones((4, 6, 1, 8))]
    for scale in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: scale must .*\(4, 6, 8\); got"):
            op(x, scale)
    with pytest.raises(ValueError, match=rf"^{name}: shift must have scale's shape .*, got \(8,\)"):
        op(x, one, jnp.ones(8))
    with pytest.raises(TypeError, match=f"^{name}: shift must be one of .*int32"):
        op(x, one, jnp.ones((4, 8), int))
    with pytest.raises(NotImplementedError, match="Pallas kernels take one scale"):
        op(x, one, implementation="pallas")
