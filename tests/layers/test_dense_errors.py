"""Dense layers with placements that a mesh lacks, or operands that do not fit: clear errors."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, gated_dense, gated_product

X, S, K, BACK = jnp.ones((8, 3)), jnp.ones(3), jnp.ones((3, 10)), jnp.ones((10, 3))
HIDDEN = jnp.ones((8, 10))

OPS = {  # with a result of (8, 10)
    "dense": lambda **o: dense(X, K, **o),
    "gated_dense": lambda **o: gated_dense(X, K, K, **o),
    "gated_product": lambda **o: gated_product(X, X, K, **o),
}
SPECS = {
    P(None, "tensor"): r"splits dimension 1 of \(8, 10\) over 4 devices, which do not divide 10; "
    "leave 'tensor' out of it, or pad to 12",
    P(
        None, ("data", "tensor")
    ): "over 8 devices, .* leave 'data', 'tensor' out of it, or pad to 16",
    P("model"): "names the axis 'model'; name one that the mesh has, of {'data': 2, 'tensor': 4}",
    P("data", "data"): "names the axis 'data' twice; leave one of them out",
    P("data", None, None): r"has more entries than \(8, 10\) has dimensions; leave out 1",
}


def mesh(kind):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)


def refuses(argument, spec, message, call):
    """The error, raised before anything is compiled, names the argument and its value."""
    (op,) = [name for name, fn in OPS.items() if fn is call] or ["gated_product"]
    with pytest.raises(ValueError, match=rf"^{op}: {argument}=\S.*{message}") as error:
        jax.eval_shape(lambda: call(**{argument: spec}))
    assert str(spec) in str(error.value)


@pytest.mark.parametrize("op", OPS)
def test_out_sharding_that_cannot_place_the_result(eight_devices, op):
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        for spec, message in SPECS.items():
            refuses("out_sharding", spec, message, OPS[op])
    with jax.set_mesh(mesh(AxisType.Auto)):
        remedy = "for Explicit axes, and 'data' is Auto; leave it out"
        refuses("out_sharding", P("data"), remedy, OPS[op])
    refuses("out_sharding", P("data"), "needs a mesh .* under jax.set_mesh", OPS[op])
    with pytest.raises(TypeError, match=f"^{op}: out_sharding must be a PartitionSpec .* 'data'"):
        OPS[op](out_sharding="data")
    with pytest.raises(ValueError, match="splits dimension 1 .* do not divide 10"):
        OPS[op](out_sharding=NamedSharding(explicit, P(None, "tensor")))


def test_hidden_sharding_that_cannot_place_the_hidden_layer(eight_devices):
    call = lambda **o: gated_product(HIDDEN, HIDDEN, BACK, **o)
    with jax.set_mesh(mesh(AxisType.Auto)):
        for spec, message in SPECS.items():
            refuses("hidden_sharding", spec, message, call)
        free = P(P.UNCONSTRAINED, None)
        assert jax.jit(lambda: call(hidden_sharding=free))().shape == (8, 3)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        refuses("hidden_sharding", P("data"), r"'data' is Explicit; .*jax.sharding.reshard", call)


B = jnp.ones(4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: gated_dense(X, K, K[:, :2]), r"kernel_up must .* \(3, 10\), got"),
        (lambda: gated_dense(X, K, K, activation=None), "activation must .* got None"),
        (lambda: gated_dense(X, BACK, BACK), r"kernel_gate's first axis .*kernel_gate.T"),
        (lambda: gated_product(X, X[:1], K), r"up must have gate's shape \(8, 3\)"),
        (lambda: gated_product(X, X, BACK), "kernel's first axis must .* gate's last"),
        (lambda: gated_product(X, X, K, B), r"gated_product: bias must have .* \(10,\); got \(4"),
        (lambda: gated_product(X, HIDDEN, K), r"up must have gate's shape \(8, 3\), got \(8, 10\)"),
        (lambda: gated_product(X, X, K, activation=None), "for a bilinear layer pass lambda z: z"),
        *[
            (
                lambda op=op: OPS[op](activation="gleu"),
                f"{op}: activation must be one of .* got 'gleu'",
            )
            for op in OPS
        ],
    ],
)
def test_operands_that_do_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call)
