"""Gated RMSNorm: the norm of a product with a gate, or its product with one, as one operation.

With a = activation(z), w = scale + scale_offset and x̂ = h · rstd, where rstd = 1 / sqrt(mean(h²) +
eps), all sums in float32 (float64 where an operand is float64):

    gate="after"    h = x          y = x̂ · w · a
    gate="before"   h = x · a      y = x̂ · w

The backward is one pass too: it reads dy, x and z, and writes dx and dz. Rows that lie on several
devices, that are not contiguous or that are too long for a kernel to hold are normalised by
RMSNorm's own kernels, between loops of XLA's for the gate. So are all rows on the CPU, where XLA's
loops have vectorised exponentials and what they write stays in the caches.

References: Dao and Gu, "Transformers are SSMs", arXiv:2405.21060 (Mamba 2); Yang et al., "Gated
Delta Networks", arXiv:2412.06464 (Qwen3-Next's).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.interpreters import ad

from ...native.implementation import Implementation, Order
from ...native.kernel import Kernel
from ..core.arguments import floating
from ..core.op import Dims, Op, Split
from . import cuda, op
from .op import along_rows, dtype_of, rows_of, weight_of
from .spec import Norm

GateActivation = Literal["silu", "sigmoid"]
Run = Callable[..., Sequence[Array]]  # `(norm, *operands)` of RMSNorm without a gate


def gated_rms_norm(
    x: Array,
    z: Array,
    scale: Array | None = None,
    *,
    gate: Literal["after", "before"] = "after",
    activation: GateActivation = "silu",
    group_size: int | None = None,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    dtype: jax.typing.DTypeLike | None = None,
    implementation: Implementation = None,
) -> Array:
    """RMSNorm over the last axis with a gate, as Mamba 2 and Qwen3-Next have it.

        gate="after"    y = rms_norm(x, scale) · activation(z)
        gate="before"   y = rms_norm(x · activation(z), scale)

    Nothing is rounded between x, z and y. On GPUs it is one pass over the activations in each
    direction: three arrays forward, five backward. Computed and sharded as `rms_norm` is.

    Args:
      x: any shape; float64, float32, bfloat16 or float16.
      z: the gate's argument, of x's shape; any of those dtypes.
      scale: as for `rms_norm`.
      gate: "after" for Qwen3-Next's and FLA's `FusedRMSNormGated`, and Mamba 2's with
        `norm_before_gate=True`; "before" for Mamba 2's default.
      activation: "silu" or "sigmoid".
      group_size: features that are normalised together, where those of a row form several groups
        (Mamba 2's); scale then still has the shape of x's last axis. None for all of them.
      eps, scale_offset, dtype, implementation: as for `rms_norm`, but there is no Pallas kernel.

    Returns:
      An array of x's shape and sharding.

    Raises:
      TypeError, ValueError, NotImplementedError: as `rms_norm`, and ValueError for a z that is not
        of x's shape, an unknown gate or activation, or a group size that does not divide a row.

    References:
      Dao and Gu, "Transformers are SSMs", arXiv:2405.21060; Yang et al., "Gated Delta Networks",
      arXiv:2412.06464.

    >>> import jax.numpy as jnp
    >>> from normfuse import gated_rms_norm
    >>> y = gated_rms_norm(jnp.array([3.0, 4.0]), jnp.array([0.0, 2.0]))
    >>> [round(value, 3) for value in y.tolist()]
    [0.0, 1.993]
    """
    name = "gated_rms_norm"
    x, z = floating(name, "x", x), floating(name, "z", z)
    if z.shape != x.shape:
        raise ValueError(f"{name}: z must have x's shape {x.shape}, got {z.shape}")
    for argument, value, known in (
        ("gate", gate, ("after", "before")),
        ("activation", activation, get_args(GateActivation)),
    ):
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name}: {argument} must be one of {known}, got {value!r}")
    shape = x.shape
    if group_size is not None:
        x, z, scale = _grouped(name, x, z, scale, group_size)
    norm, (x, *own) = op.check(name, x, scale, None, eps, -1, scale_offset, dtype)
    norm = replace(norm, gate=gate, activation=activation, with_rstd=False)
    return op.call(forward, norm, [x, z, *own], implementation)[0].reshape(shape)


def _grouped(
    name: str, x: Array, z: Array, scale: Any, group_size: Any
) -> tuple[Array, Array, Array | None]:
    """Returns the operands with a row's groups in a dimension of their own, before the last."""
    features = x.shape[-1] if x.ndim else 0
    if not isinstance(group_size, int) or group_size < 1 or features % group_size:
        raise ValueError(
            f"{name}: group_size must be a whole number that divides the {features} features of x, "
            f"got {group_size!r}"
        )
    if scale is not None:
        scale = floating(name, "scale", scale)
        if scale.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: scale must have the shape of x's last axis, {x.shape[-1:]}, for "
                f"group_size={group_size}; got {scale.shape}"
            )
        scale = scale.reshape(-1, group_size)
    shape = (*x.shape[:-1], features // group_size, group_size)
    return x.reshape(shape), z.reshape(shape), scale


# ---------------------------------------------------------------- definitions, in plain JAX


def gate_of(norm: Norm, z: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Returns activation(z) and its derivative."""
    z = z.astype(dtype)
    s = jax.nn.sigmoid(z)
    slope = s * jax.nn.sigmoid(-z)  # without cancellation
    return (s, slope) if norm.activation == "sigmoid" else (z * s, s + z * slope)


def define_forward(norm: Norm, x: Array, z: Array, *scale: Array) -> list[Array]:
    """`(x, z[, scale]) -> (y[, rstd])`"""
    return compose_forward(op.define_forward, norm, x, z, *scale)


def define_backward(norm: Norm, dy: Array, x: Array, z: Array, *rest: Array) -> list[Array]:
    """`(dy, x, z[, scale], rstd) -> (dx, dz[, dscale])`"""
    return compose_backward(op.define_backward, norm, dy, x, z, *rest)


def compose_forward(run: Run, norm: Norm, x: Array, z: Array, *scale: Array) -> list[Array]:
    """The forward around `run`, that of RMSNorm."""
    dtype = dtype_of(x, z, *scale, out=norm.out_dtype)
    gate, _ = gate_of(norm, z, dtype)
    alone = replace(norm, gate="", activation="")
    if norm.gate == "before":
        return list(run(alone, x.astype(dtype) * gate, *scale))
    y, *rstd = run(replace(alone, out_dtype=dtype.name), x, *scale)
    return [(y * gate).astype(norm.out_dtype), *[a.astype(dtype) for a in rstd]]


def compose_backward(
    run: Run, norm: Norm, dy: Array, x: Array, z: Array, *rest: Array
) -> list[Array]:
    """The backward around `run`, that of RMSNorm."""
    dtype, (*scale, rstd) = dtype_of(dy, x, z, *rest), rest
    gate, slope = gate_of(norm, z, dtype)
    wide_dy, wide = dy.astype(dtype), x.astype(dtype)
    alone = replace(norm, gate="", activation="")
    if norm.gate == "before":
        dh, *dscale = run(alone, dy, wide * gate, *rest)
        return [(dh * gate).astype(x.dtype), (dh * wide * slope).astype(z.dtype), *dscale]
    dx, *dscale = run(alone, wide_dy * gate, x, *rest)
    y = wide * along_rows(norm, rstd.astype(dtype)) * weight_of(norm, list(scale), x, dtype)
    return [dx, (wide_dy * y * slope).astype(z.dtype), *dscale]


def define_tangent(norm: Norm, x: Array, z: Array, *rest: Array) -> list[Array]:
    """The tangent of y: `(x, z[, scale], rstd[, dx][, dscale][, dz]) -> dy`."""
    dtype = dtype_of(x, z, *rest, out=norm.out_dtype)
    scale, (rstd, *moving) = list(rest[: norm.has_scale]), rest[norm.has_scale :]
    gate, slope = gate_of(norm, z, dtype)
    w, wide, rstd = weight_of(norm, scale, x, dtype), x.astype(dtype), along_rows(norm, rstd)
    before, found = norm.gate == "before", iter(a.astype(dtype) for a in moving)
    dx = next(found) if norm.moves[0] else None
    dscale = next(found) if norm.moves[1] else None
    dgate = next(found) * slope if norm.moves[2] else None
    h = wide * gate if before else wide
    normal, dnormal, dy = h * rstd, None, jnp.zeros(x.shape, dtype)
    dh = jnp.zeros(x.shape, dtype)
    if dx is not None:
        dh = dh + (dx * gate if before else dx)
    if before and dgate is not None:
        dh = dh + wide * dgate
    if dx is not None or before:
        dnormal = rstd * (dh - normal * jnp.mean(normal * dh, norm.axes, keepdims=True))
        dy = dy + dnormal * w
    if dscale is not None:
        dy = dy + normal * jnp.expand_dims(dscale, rows_of(norm, x))
    if not before:
        dy = dy * gate
        if dgate is not None:
            dy = dy + normal * w * dgate
    return [dy.astype(norm.out_dtype)]


# ---------------------------------------------------------------- kernels, on (outer, n, inner)


def _on_cuda(compose: Run, fused: Callable[..., Any], kernel: Kernel) -> Callable[..., list[Array]]:
    def body(target: Any, norm: Norm, *operands: Array) -> list[Array]:
        done = fused(target, norm, *operands)
        if done is not None:
            return done
        alone = functools.partial(kernel.bodies["cuda"], target)
        return list(compose(alone, norm, *operands))

    return body


forward_kernel = Kernel(
    "gated_rms_norm_forward",
    define_forward,
    {
        "cpu": functools.partial(compose_forward, op.forward_kernel.bodies["cpu"]),
        "cuda": _on_cuda(compose_forward, cuda.gated_forward, op.forward_kernel),
    },
)
backward_kernel = Kernel(
    "gated_rms_norm_backward",
    define_backward,
    {
        "cpu": functools.partial(compose_backward, op.backward_kernel.bodies["cpu"]),
        "cuda": _on_cuda(compose_backward, cuda.gated_backward, op.backward_kernel),
    },
)


# ---------------------------------------------------------------- one device's share


def _forward_body(
    norm: Norm, split: Split, x: Array, z: Array, *scale: Array, order: Order
) -> list[Array]:
    if x.size == 0:
        return define_forward(norm, x, z, *scale)
    if split.over(norm.axes):
        run = lambda norm, *operands: op.forward_body(norm, split, *operands, order=order)
        return compose_forward(run, norm, x, z, *scale)
    operands = [op.canonical(norm, a) for a in (x, z)]
    operands += [op.parameter_values(norm, a) for a in scale]
    y, *rstd = forward_kernel(op.local(norm), *operands, order=order)
    return [op.restore(norm, y, x.shape), *[op.restore_row_values(norm, a, x.shape) for a in rstd]]


def _backward_body(
    norm: Norm, split: Split, dy: Array, x: Array, z: Array, *rest: Array, order: Order
) -> list[Array]:
    rows = rows_of(norm, x)
    if x.size == 0:
        dx, dz, *more = define_backward(norm, dy, x, z, *rest)
        return [dx, dz, *[split.psum(d, rows) for d in more]]
    if split.over(norm.axes):
        run = lambda norm, *operands: op.backward_body(norm, split, *operands, order=order)
        return compose_backward(run, norm, dy, x, z, *rest)
    *scale, rstd = rest
    operands = [op.canonical(norm, a) for a in (dy, x, z)]
    operands += [*[op.parameter_values(norm, a) for a in scale], op.row_values(norm, rstd)]
    dx, dz, *more = backward_kernel(op.local(norm), *operands, order=order)
    shape = tuple(x.shape[a] for a in (*norm.heads, *norm.axes))
    sums = [split.psum(d, rows).reshape(shape) for d in more]
    return [op.restore(norm, dx, x.shape), op.restore(norm, dz, x.shape), *sums]


# ---------------------------------------------------------------- sharding


def _forward_dims(norm: Norm, ndim: int) -> Dims:
    """`(x, z[, scale]) -> (y[, rstd])`"""
    x, rows, scale = op.dims_of(norm, ndim)
    return (x, x, *[scale] * norm.has_scale), (x, *[rows] * norm.with_rstd)


def _backward_dims(norm: Norm, ndim: int) -> Dims:
    """`(dy, x, z[, scale], rstd) -> (dx, dz[, dscale])`"""
    x, rows, scale = op.dims_of(norm, ndim)
    return (x, x, x, *[scale] * norm.has_scale, rows), (x, x, *[scale] * norm.with_dscale)


def _tangent_dims(norm: Norm, ndim: int) -> Dims:
    """`(x, z[, scale], rstd[, dx][, dscale][, dz]) -> dy`"""
    x, rows, scale = op.dims_of(norm, ndim)
    moving = [x] * norm.moves[0], [scale] * norm.moves[1], [x] * norm.moves[2]
    return (x, x, *[scale] * norm.has_scale, rows, *sum(moving, [])), (x,)


# ---------------------------------------------------------------- vmap over a parameter


def _forward_unfused(norm: Norm, *operands: Array, order: Order) -> list[Array]:
    return compose_forward(functools.partial(op.forward, order=order), norm, *operands)


def _backward_unfused(norm: Norm, *operands: Array, order: Order) -> list[Array]:
    return compose_backward(functools.partial(op.backward, order=order), norm, *operands)


# ---------------------------------------------------------------- derivative
# As RMSNorm's: the tangent is plain HLO and linear, its transpose is the native backward.


def _forward_jvp(primals: Any, tangents: Any, *, spec: Norm, order: Order) -> Any:
    x, z, *scale = primals
    dx, dz, *dscale = tangents
    y, rstd = forward(replace(spec, with_rstd=True), *primals, order=order)
    given = [dx, *dscale, dz]
    is_moving = [type(t) is not ad.Zero for t in given]
    moves = is_moving[0], bool(dscale) and is_moving[1], is_moving[-1]
    norm = replace(spec, with_rstd=False, moves=moves)
    moving = [t for t, moves in zip(given, is_moving) if moves]
    (dy,) = tangent(norm, x, z, *scale, rstd, *moving, order=order)
    if not spec.with_rstd:
        return [y], [dy]
    of_rstd = lambda x, z: define_forward(spec, x, z, *scale)[1]
    directions = tuple(map(ad.instantiate_zeros, (dx, dz)))
    return [y, rstd], [dy, jax.jvp(of_rstd, (x, z), directions)[1]]


def _transpose_tangent(cts: Any, x: Any, z: Any, *rest: Any, spec: Norm, order: Order) -> list[Any]:
    count = spec.has_scale + 1
    known, linear = rest[:count], rest[count:]
    nothing = [None] * (2 + count)
    (dy,) = cts
    if type(dy) is ad.Zero:
        return nothing + [None] * len(linear)
    norm = replace(spec, with_dscale=spec.moves[1], moves=(False,) * 3)
    dx, dz, *dscale = backward(norm, dy, x, z, *known, order=order)
    found = [*[dx] * spec.moves[0], *dscale, *[dz] * spec.moves[2]]
    return nothing + [
        d.astype(t.aval.dtype) if ad.is_undefined_primal(t) else None
        for d, t in zip(found, linear, strict=True)
    ]


# ---------------------------------------------------------------- operations

tangent = Op(
    "gated_rms_norm_tangent",
    define_tangent,
    dims=_tangent_dims,
    batched=op.batched,
    transpose=_transpose_tangent,
)
backward = Op(
    "gated_rms_norm_gradient",
    define_backward,
    dims=_backward_dims,
    body=_backward_body,
    leads=(1,),
    unfused=_backward_unfused,
    batched=op.batched,
    without_last=lambda norm: op.without(norm, "with_dscale"),
)
forward = Op(
    "gated_rms_norm",
    define_forward,
    dims=_forward_dims,
    body=_forward_body,
    unfused=_forward_unfused,
    batched=op.batched,
    jvp=_forward_jvp,
    backward=backward,
    without_last=lambda norm: op.without(norm, "with_rstd"),
)
