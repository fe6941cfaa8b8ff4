"""Scale and bias of the norms broadcast against x: each row against the norm of itself alone."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import half
from hlo import Collective
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from reference import Expected
from rms_norm_cases import Case, stack

import normfuse
from normfuse import rms_norm

NORMS = ["rms_norm", "layer_norm"]
SHAPE = (2, 3, 5, 24)
EXAMPLE = (2, 1, 1, 24)
OWN = {  # shapes of scale and bias
    "examples": (EXAMPLE, EXAMPLE),
    "examples in two dimensions": ((2, 3, 1, 24), (2, 3, 1, 24)),
    "examples, without a bias": (EXAMPLE, None),
    "a bias of each example": (None, EXAMPLE),
    "heads": ((5, 24), (5, 24)),
    "heads in two dimensions": ((3, 5, 24), None),
    "a scale of each head, a bias of each example": ((5, 24), EXAMPLE),
    "a scale of each example, a bias of all": (EXAMPLE, (24,)),
    "neither the first nor the last": ((3, 1, 24), (1, 1, 1, 24)),
    "rows": (SHAPE, None),
}


def drawn(shape, scale, bias, dtype="float32", residual=False):
    """The operands, as `Case` takes them, and the cotangents."""
    rng = np.random.default_rng(0)
    large = [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(2 + 2 * residual)]
    own = [rng.standard_normal(s, np.float32) for s in (scale, bias) if s is not None]
    return [*large[: 1 + residual], *own], large[1 + residual :]


def case_of(op, scale=True, bias=True):
    case = Case(op, (1, 4), scale_offset=1.0)
    return case.replace(has_scale=bool(scale), has_bias=bool(bias), axes=(1,))


def both(fn, args, cts):
    @jax.jit
    def run(args, cts):
        out, pull = jax.vjp(fn, *args)
        return out, pull(cts)

    return run(tuple(args), cts)


def expected(case, args, cts):
    """Values and gradients of the rows alone; those of parameters are added up as NumPy would."""
    shape, n = args[0].shape, args[0].shape[-1]
    rows = lambda a: np.broadcast_to(a, shape).reshape(-1, 1, n)
    large = 1 + case.has_residual
    values, gradients = [], []
    for *large_and_own, ct in zip(*map(rows, args), zip(*map(rows, cts))):
        own = [a[0] for a in large_and_own[large:]]
        alone = case.replace(args=(*large_and_own[:large], *own), cts=ct)
        values.append(alone.values())
        gradients.append(alone.gradients())
    whole = lambda e: e.map(lambda a: a.reshape(shape))
    values, gradients = ([whole(stack(c)) for c in zip(*found)] for found in (values, gradients))
    return values, [summed(e, a.shape) for e, a in zip(gradients, args)]


def summed(e: Expected, shape) -> Expected:
    """The sum over the dimensions that an array of `shape` lacks, or has one element of."""
    missing = e.value.ndim - len(shape)
    over = tuple(i for i in range(e.value.ndim) if i < missing or shape[i - missing] == 1)
    terms = int(np.prod([e.value.shape[i] for i in over]))
    total = lambda a: a.sum(over).reshape(shape)
    return Expected(total(e.value), total(e.size), e.length + terms)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "op, own, implementation", half(["residual_rms_norm", "layer_norm"], OWN, ["native", "xla"])
)
def test_values_and_gradients(op, own, implementation):
    """The gradient of "xla" is JAX's own, which rounds its parts to the dtype of x."""
    dtype = "bfloat16" if implementation == "native" else "float32"
    args, cts = drawn(SHAPE, *OWN[own], dtype, residual=op.startswith("residual_"))
    case = case_of(op, *OWN[own])
    out, grads = both(functools.partial(case, implementation=implementation), args, tuple(cts))
    values, gradients = expected(case, args, cts)
    case.check(out, values)
    case.check(grads, gradients)
    assert [g.dtype for g in grads] == [a.dtype for a in args] and out[0].dtype == dtype


@pytest.mark.parametrize(
    "norm, kind, spec",
    half(
        NORMS,
        [AxisType.Auto, AxisType.Explicit],
        [P("data", None, None), P("data", "model", None), P("data", None, "model")],
    ),
    ids=str,
)
def test_meshes(eight_devices, norm, kind, spec):
    """Sums cross the devices that have tokens of one example, or parts of one row, alone."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    args, cts = drawn((8, 2, 16), (8, 1, 16), (8, 1, 16))
    case = case_of(norm)
    put = lambda a, s: jax.device_put(a, NamedSharding(mesh, s))
    with jax.set_mesh(mesh):
        placed = [put(args[0], spec), *[put(a, P("data", None, spec[2])) for a in args[1:]]]
        fn = functools.partial(case, implementation="native")
        cts_placed = tuple(put(ct, spec) for ct in cts)
        out, grads = both(fn, placed, cts_placed)
        values, gradients = expected(case, args, cts)
        case.check(out, values)
        case.check(grads, gradients)
        run = jax.jit(lambda args, cts: jax.vjp(fn, *args)[1](cts))
        found = hlo.collectives(run.lower(tuple(placed), cts_placed).compile())
    if spec[2] is None:
        assert found == [Collective("all-reduce", 2 * 2 * 16 * 4)] * (spec[1] is not None)


X = jnp.ones((4, 6, 8))
BEFORE = "and any dimensions before it must broadcast against x's"


@pytest.mark.parametrize("argument", ["scale", "bias"])
@pytest.mark.parametrize(
    "shape, axis, words",
    [
        ((4, 6, 1, 8), -1, ["(8,)", BEFORE]),
        ((3, 1, 8), -1, ["(8,)", BEFORE]),
        ((4, 8), -1, ["(8,)", "; write {}[:, None] for one of each example"]),
        ((4, 48), (1, 2), ["(6, 8)", BEFORE]),
        ((6, 1), 1, ["(6,)"]),  # no dimensions before an axis that is not the last
        ((6, 1), (1, 2), ["(6, 8)", "; write jnp.broadcast_to({}, (6, 8))"]),
    ],
    ids=str,
)
def test_what_does_not_broadcast_is_named(argument, shape, axis, words):
    with pytest.raises(ValueError) as caught:
        rms_norm(X, **{argument: jnp.ones(shape)}, axis=axis)
    message = str(caught.value)
    for word in (f"rms_norm: {argument} must have the shape of", f"got {shape} for x of", *words):
        assert word.format(argument) in message, message
    assert (BEFORE in message) == (BEFORE in words or axis in (-1, (1, 2)))


@pytest.mark.parametrize("norm", NORMS)
def test_kernels_that_take_one_scale_say_so(norm):
    with pytest.raises(NotImplementedError, match="Pallas kernels take one scale"):
        getattr(normfuse, norm)(X, jnp.ones((4, 1, 8)), implementation="pallas")
