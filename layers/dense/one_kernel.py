"""A dense layer in one kernel (`implementation="pallas"`): product, bias and activation.

    y = activation(x · kernel + bias)

The kernel's operation is partitioned as `jnp.matmul` is. Its derivative is made of ordinary
operations: the product's, whose kernel gradient is the output of one GEMM of XLA's, and the
activation's, recomputed from z = x · kernel + bias, which the kernel also writes when there is
something to differentiate. For an activation that kernels know, the epilogue computes it: one
pass in z's place, with the bias's gradient.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P

from ...native.dtypes import compute_dtype
from ...native.implementation import Order, Unsupported, report
from ...native.kernel import Kernel
from ..core.op import Dims, Op, Split, reshard_like, vary, varying_axes
from ..core.sharding import axes_of
from .epilogue import Activation, finish, finish_tangent, resolve, scalar_of
from .matmul import matmul


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """The static description of the layer."""

    op: str = "dense"  # the function the user called
    activation: Activation = None  # one that a kernel can compute, as the user gave it
    contract: int = 0  # the kernel's summed axis
    has_bias: bool = False
    keep: bool = False  # return z too
    precision: str | None = None  # the product's precision

    @property
    def function(self) -> Callable[[Array], Array] | None:
        """The activation as a function."""
        return resolve(self.activation)


# ---------------------------------------------------------------- the kernel, on matrices


def define(spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y[, z]`: z = x · w + bias, y = activation(z).

    x and w have one dtype, which y and z are rounded to; the rest is float32 (or float64).
    """
    compute = compute_dtype(x.dtype)
    z = jax.lax.dot(x, w, precision=spec.precision, preferred_element_type=compute)
    for b in bias:
        z = z + b.astype(compute)
    y = z if spec.function is None else spec.function(z)
    return [y.astype(x.dtype), *[z.astype(x.dtype)] * spec.keep]


def _on_pallas(target: Any, spec: Dense, *operands: Array) -> list[Array]:
    from . import pallas  # imported when it is first used

    options = {"function": spec.function, "precision": spec.precision, "keep": spec.keep}
    return pallas.serve(target, *operands, **options)


kernel = Kernel("dense", define, {"pallas": _on_pallas})


# ---------------------------------------------------------------- the operation
# x (*rows, k), kernel (k, *outs)[, bias (*outs)] -> y[, z], both (*rows, *outs)


def _as_matrices(run: Callable[..., Any], x: Array, w: Array, *bias: Array) -> list[Array]:
    """`run`, a function of matrices, on one device's arrays of any rank."""
    rows, outs = x.shape[:-1], w.shape[1:]
    flat = [x.reshape(math.prod(rows), x.shape[-1]), w.reshape(x.shape[-1], math.prod(outs))]
    results = run(*flat, *[b.reshape(-1) for b in bias])
    return [r.reshape(*rows, *outs) for r in results]


def define_on_arrays(spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """The layer in plain JAX."""
    return _as_matrices(functools.partial(define, spec), x, w, *bias)


def _body(spec: Dense, split: Split, x: Array, w: Array, *bias: Array, order: Order) -> list[Array]:
    """One device's share; if the summed axis is split, it has a part of every sum."""
    summed = [x.ndim - 1]
    empty = 0 in x.shape or 0 in w.shape
    if not split.over(summed) and not empty:
        return _as_matrices(functools.partial(kernel, spec, order=order), x, w, *bias)
    product = replace(spec, activation=None, has_bias=False, keep=False)
    run = define if empty else functools.partial(kernel, order=order)
    (part,) = _as_matrices(functools.partial(run, product), x, w)
    z = split.psum(part, summed)
    sums = z.astype(compute_dtype(z.dtype))
    for b in bias:
        sums = sums + b
    y = sums if spec.function is None else spec.function(sums)
    return [y.astype(z.dtype), *[sums.astype(z.dtype)] * spec.keep]


def _dims(spec: Dense, x_ndim: int, w_ndim: int) -> Dims:
    """x has its rows and the summed dimension; the kernel adds the output's."""
    x = tuple(range(x_ndim))
    outs = tuple(range(x_ndim, x_ndim + w_ndim - 1))
    inputs = (x, (x_ndim - 1, *outs), *[outs] * spec.has_bias)
    return inputs, ((*x[:-1], *outs),) * (1 + spec.keep)


def _one_by_one(spec: Dense, *operands: Array, order: Order) -> list[Array]:
    """Examples that have kernels of their own take turns."""
    return sequential_vmap(functools.partial(layer, spec, order=order))(*operands)


def _batch(
    op: Op, args: Any, dims: Any, *, spec: Dense, order: Order
) -> tuple[list[Array], list[int]]:
    """A batch of x is one more dimension of rows, the first: x's last is the summed one."""
    x_dim, *others = dims
    if any(dim is not None for dim in others):
        results = jax.vmap(functools.partial(_one_by_one, spec, order=order), tuple(dims))(*args)
    else:
        results = op(spec, jnp.moveaxis(args[0], x_dim, 0), *args[1:], order=order)
    return results, [0] * len(results)


layer = Op("dense_layer", define_on_arrays, dims=_dims, body=_body, leads=(0, 1), batch=_batch)


def _fitting(x: Array, w: Array, *bias: Array) -> list[Array]:
    """Returns the operands with shardings that go together, where shardings are part of the type.

    x keeps its own; the kernel is gathered over mesh axes that x's dimensions use, and split over
    the axes of x's last dimension.
    """
    meshes = [jax.typeof(a).sharding.mesh for a in (x, w)]
    if not any(mesh.explicit_axes for mesh in meshes):
        return [x, w, *bias]
    if not meshes[0].explicit_axes:
        x = reshard_like(x, w, P(*[None] * x.ndim))
    x_spec, stored = jax.typeof(x).sharding.spec, jax.typeof(w).sharding.spec
    taken = {a for entry in x_spec for a in axes_of(entry)}
    out = tuple(None if taken & set(axes_of(entry)) else entry for entry in stored[1:])
    w = reshard_like(w, x, P(x_spec[-1], *out))
    return [x, w, *[reshard_like(b, x, P(*out)) for b in bias]]


# ---------------------------------------------------------------- the layer, and its derivative


def dense_in_one_kernel(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    order: Order,
) -> Array:
    """Returns `activation(x · kernel + bias)` for x `(*rows, n)`, rounded once to `dtype`.

    The kernel has any rank; its axis `contract` has n elements, and the others, which are the
    bias's, follow x's rows in the result. The activation is element-wise, given float32 (float64
    for float64). `order` says which kernels to try.

    Raises:
      NotImplementedError: if no kernel of a strict `order` can serve, or if the activation is not a
        function of numbers alone.
    """
    from ...native.pallas import portable

    spec = Dense(
        activation=activation,
        contract=contract,
        has_bias=bias is not None,
        precision=jax.config.jax_default_matmul_precision,
    )
    if spec.function is not None:
        try:
            portable.check(spec.function, compute_dtype(dtype))
        except Unsupported as error:
            report("dense", str(error), strict=True, names=["pallas"])
    arrays = [x.astype(dtype), kernel, *[bias] * (bias is not None)]
    axes = varying_axes(*arrays)
    return _fused(spec, order, *[vary(a, axes) for a in arrays])[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _fused(spec: Dense, order: Order, x: Array, kernel: Array, *bias: Array) -> list[Array]:
    """y, and z if kept."""
    kernel = jnp.moveaxis(kernel.astype(x.dtype), spec.contract, 0)
    operands = _fitting(x, kernel, *[b.astype(compute_dtype(x.dtype)) for b in bias])
    return layer(spec, *operands, order=order)


@functools.partial(_fused.defjvp, symbolic_zeros=True)
def _(spec, order, primals, tangents):
    (x, kernel, *bias), (dx, dkernel, *dbias) = primals, tangents
    kept = replace(spec, keep=spec.keep or spec.activation is not None)
    y, *z = _fused(kept, order, x, kernel, *bias)
    product = functools.partial(matmul, dtype=x.dtype, contract=spec.contract)
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(jax.jvp(lambda x: product(x, kernel), (x,), (dx,))[1])
    if not isinstance(dkernel, SymbolicZero):
        terms.append(jax.jvp(lambda kernel: product(x, kernel), (kernel,), (dkernel,))[1])
    dproduct = functools.reduce(jnp.add, terms or [jnp.zeros_like(y)])
    rest = functools.partial(_rest, z[0] if z else y, dproduct, bias, dbias, dtype=x.dtype)
    dy = rest(spec.activation)
    return ([y, z[0]], [dy, rest(None)]) if spec.keep else ([y], [dy])


def _rest(
    z: Array,
    dproduct: Array,
    bias: list[Array],
    dbias: list[Any],
    activation: Activation,
    *,
    dtype: jax.typing.DTypeLike,
) -> Array:
    """The tangent of bias and activation, in one pass each way."""
    moving = [d for d in dbias if not isinstance(d, SymbolicZero)]
    if (function := scalar_of(activation)) is not None:
        return finish_tangent(function, z, dproduct, *moving, dtype=dtype)
    if not moving:
        return jax.jvp(lambda z: finish(z, None, activation, dtype), (z,), (dproduct,))[1]
    (shift,) = (jnp.zeros_like(b) for b in bias)  # z has the bias already
    after = lambda z, shift: finish(z, shift, activation, dtype)
    return jax.jvp(after, (z, shift), (dproduct, *moving))[1]
