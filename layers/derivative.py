"""Differentiation of a normalisation: forward, its tangent, and the native backward as transpose.

The tangent is an operation of its own, linear in the tangents, in plain HLO; its transpose is the
native backward. So reverse mode runs kernels wherever JAX transposes (grad, linearize, scan, remat,
vmap), while forward mode and higher orders are JAX's own derivatives of the definitions.
"""

import functools

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..native.jax_private import on_unused_results
from .op import Op


def link(forward: Op, tangent: Op, backward: Op) -> None:
    """Makes `tangent` the derivative of `forward`, and `backward` the transpose of `tangent`.

    forward is `(x[, residual][, scale]) -> (y[, h], rstd)`, where h = x + residual; tangent is
    `(h[, scale], rstd[, dh][, dscale]) -> (dy[, dh])`; backward is
    `(dy, h[, scale], rstd[, dh]) -> (dh[, dscale])`. So the residual's gradient passes through the
    tangent, and is added by the backward kernel rather than after it.
    """
    ad.primitive_jvps[forward.primitive] = functools.partial(_forward_jvp, forward, tangent)
    ad.primitive_transposes[tangent.primitive] = functools.partial(_transpose_tangent, backward)
    ad.primitive_transposes[backward.primitive] = functools.partial(_transpose_backward, tangent)
    for op in (tangent, backward):
        differentiate_plainly(op)
    on_unused_results(forward.primitive, functools.partial(_drop_last, "with_rstd"))
    on_unused_results(backward.primitive, functools.partial(_drop_last, "with_dscale"))


def differentiate_plainly(op: Op) -> None:
    """Makes the derivative of `op` that of its definition: plain HLO."""
    ad.primitive_jvps[op.primitive] = functools.partial(_plain_jvp, op)


def _forward_jvp(forward, tangent, primals, tangents, *, with_rstd, **params):
    x, *rest = primals
    dx, *drest = tangents
    y, *h, rstd = forward(*primals, with_rstd=True, **params)
    if params["has_residual"]:
        dx = ad.add_tangents(_cast(dx, h[0].dtype), _cast(drest.pop(0), h[0].dtype))
        rest.pop(0)
    here = h[0] if h else x
    moves = tuple(type(t) is not ad.Zero for t in (dx, *drest))
    moves += (False,) * (2 - len(moves))
    del params["eps"]
    moving = [t for t in (dx, *drest) if type(t) is not ad.Zero]
    dy, *dh = tangent(here, *rest, rstd, *moving, moves=moves, **params)
    results, dresults = [y, *h], [dy, *(dh or [dx] * len(h))]
    if with_rstd:
        results.append(rstd)
        dresults.append(_rstd_tangent(here, rstd, dx, params["axes"]))
    return results, dresults


def _rstd_tangent(x, rstd, dx, axes):
    if type(dx) is ad.Zero:
        return ad.Zero(jax.typeof(rstd).to_tangent_aval())
    normal = x.astype(rstd.dtype) * jnp.expand_dims(rstd, axes)
    return -rstd * (rstd * jnp.mean(normal * dx.astype(rstd.dtype), axes))


def _cast(tangent, dtype):
    """The tangent in `dtype`; a symbolic zero stays one."""
    if type(tangent) is ad.Zero:
        return ad.Zero(tangent.aval.update(dtype=dtype))
    return tangent.astype(dtype)


def _transpose_tangent(backward, cts, x, *rest, has_scale, has_residual, moves, **params):
    del params["out_dtype"], has_residual
    constants, linear = rest[: has_scale + 1], rest[has_scale + 1 :]
    nothing = [None] * (1 + len(constants))
    dy, *dh = cts
    dh = [ct for ct in dh if type(ct) is not ad.Zero]
    if type(dy) is ad.Zero:
        return nothing + [*dh, *[None] * (len(linear) - len(dh))]
    flags = {"has_scale": has_scale, "has_residual": bool(dh), "with_dscale": moves[1]}
    results = backward(dy, x, *constants, *dh, **flags, **params)
    results = [r for r, moved in zip(results, moves) if moved]
    return nothing + [
        r.astype(t.aval.dtype) if ad.is_undefined_primal(t) else None
        for r, t in zip(results, linear, strict=True)
    ]


def _transpose_backward(tangent, cts, dy, x, *rest, has_scale, has_residual, with_dscale, **params):
    constants, dh = rest[: has_scale + 1], rest[has_scale + 1 :]
    moves = tuple(type(ct) is not ad.Zero for ct in cts) + (False,) * (not with_dscale)
    out = [None] * (2 + len(constants) + len(dh))
    if dh and ad.is_undefined_primal(dh[0]) and moves[0]:
        out[-1] = cts[0].astype(dh[0].aval.dtype)
    if ad.is_undefined_primal(dy) and any(moves):
        moving = [ct for ct in cts if type(ct) is not ad.Zero]
        flags = {"has_scale": has_scale, "has_residual": False, "moves": moves}
        flags["out_dtype"] = dy.aval.dtype.name
        out[0] = tangent(x, *constants, *moving, **flags, **params)[0]
    return out


def _plain_jvp(op, primals, tangents, **params):
    fn = lambda *operands: op.plain(*operands, **params)
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return op(*primals, **params), jax.jvp(fn, primals, tuple(tangents))[1]


def _drop_last(flag, used, eqn):
    """Dead code: the last result, which `flag` asks for, is not computed when nobody uses it."""
    if not any(used):
        return [False] * len(eqn.invars), None
    if not used[-1] and eqn.params[flag]:
        eqn = eqn.replace(outvars=eqn.outvars[:-1], params={**eqn.params, flag: False})
    return [True] * len(eqn.invars), eqn
