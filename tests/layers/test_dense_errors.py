"""Dense layers with placements that a mesh lacks, or operands that do not fit: clear errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from normfuse import dense, gated_dense, gated_product

X, S, K, BACK = jnp.ones((8, 3)), jnp.ones(3), jnp.ones((3, 10)), jnp.ones((10, 3))
HIDDEN = jnp.ones((8, 10))

OPS = {  # with a result of (8, 10)
    "dense": lambda **o: dense(X, K, **o),
    "gated_dense": lambda **o: gated_dense(X, K, K, **o),
    "gated_product": lambda **o: gated_product(X, X, K, **o),
}
WRONG = [
    P(None, "tensor"),  # does not divide 10
    P(None, ("data", "tensor")),
    P("model"),  # no axis of the mesh
    P("data", "data"),
    P("data", None, "tensor"),
    "data",
]


def mesh(kind):
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(kind,) * 2)


def refuses(argument, spec, call):
    """JAX refuses the placement when the op is traced, and its message shows the spec."""
    with pytest.raises(Exception, match="sharding|[Ss]pec|P[(]") as error:
        jax.eval_shape(lambda: call(**{argument: spec}))
    assert re.search("data|tensor|model", str(error.value))


@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("op", OPS)
def test_out_sharding_that_cannot_place_the_result(eight_devices, op, quantization):
    call = functools.partial(OPS[op], quantization=quantization)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        for spec in WRONG:
            refuses("out_sharding", spec, call)
    refuses("out_sharding", P("data"), call)


def test_hidden_sharding_that_cannot_place_the_hidden_layer(eight_devices):
    call = lambda **o: gated_product(HIDDEN, HIDDEN, BACK, **o)
    with jax.set_mesh(mesh(AxisType.Auto)):
        for spec in WRONG[2:]:
            refuses("hidden_sharding", spec, call)
        for spec in P(P.UNCONSTRAINED, None), WRONG[0]:  # XLA pads what an axis does not divide
            np.testing.assert_allclose(jax.jit(lambda s=spec: call(hidden_sharding=s))(), 7.310586)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        refuses("hidden_sharding", P("data"), call)


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
