"""Differentiation of element-wise functions: one kernel for a tangent, one for a gradient.

Where a derivative is C++ text, the tangent is the kernel of a function linear in the tangents, and
its transpose that of one linear in the cotangents: nothing between is written to memory. What these
kernels cannot do (a derivative in plain JAX, or a second derivative) is put together from the
derivatives as operations of their own, and JAX differentiates that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from ..native.elementwise import compute_dtype, result_shape, spread
from .elementwise_function import Linear, Primal
from .elementwise_op import call, op, restored


def _jvp(primals, tangents, *, function, placed, order, bound, out, strict, axes):
    del axes
    options = {"bound": bound, "strict": strict}
    primals, tangents = restored(primals, order), restored(tangents, order)
    results = call(function, primals, placed, out=out, **options)
    moving = tuple(k for k, t in enumerate(tangents) if type(t) is not ad.Zero)
    outputs = tuple(j for j, dtype in enumerate(out) if jnp.issubdtype(dtype, jnp.inexact))
    moves: list[Any] = [ad.Zero(jax.typeof(r).to_tangent_aval()) for r in results]
    if moving and outputs:
        rule = _primal_jvp if isinstance(function, Primal) else _linear_jvp
        found = rule(function, primals, tangents, moving, outputs, placed, out, options)
        for j, tangent in zip(outputs, found, strict=True):
            moves[j] = tangent
    return results, moves


def _primal_jvp(function, primals, tangents, moving, outputs, placed, out, options):
    if function.differentiable is not None:
        plain = functools.partial(_plain, function.differentiable, function, placed, out, options)
        found = _jvp_of(plain, primals, tangents, moving)
        return [found[j] for j in outputs]
    _same_kind(function, moving, outputs, options["bound"])
    types = tuple(out[j] for j in outputs)
    if all(isinstance(function.partial(k), tuple) for k in moving):
        operands = [*primals, *[tangents[k] for k in moving]]
        all_dims = (*placed, *[placed[k] for k in moving])
        return call(function.tangent(moving, outputs), operands, all_dims, out=types, **options)
    sources = [(k, tangents[k], placed[k]) for k in moving]
    return _products(function, primals, placed, sources, outputs, False, types, options)


def _linear_jvp(function, primals, tangents, moving, outputs, placed, out, options):
    base = len(function.base.operands)
    if all(k >= base for k in moving):
        operands = [*primals[:base], *[tangents[k] for k in moving]]
        derived = function.only([k - base for k in moving])
        all_dims = (*placed[:base], *[placed[k] for k in moving])
        return call(derived, operands, all_dims, out=out, **options)
    _same_kind(function.base, [k for k in moving if k < base], function.outputs, options["bound"])

    def plain(*operands):
        names = function.outputs if function.transposed else function.moving
        sources = list(zip(names, operands[base:], placed[base:], strict=True))
        targets = function.moving if function.transposed else function.outputs
        return _products(
            function.base,
            operands[:base],
            placed[:base],
            sources,
            targets,
            function.transposed,
            out,
            options,
        )

    found = _jvp_of(plain, primals, tangents, moving)
    return [found[j] for j in outputs]


def _products(function, operands, placed, sources, targets, transposed, out, options):
    """Σ derivative · source, for each target: of operations that JAX can differentiate."""
    shape = result_shape(operands, placed)
    slopes = {}

    def slope(k, j):
        if k not in slopes:
            slopes[k] = _slopes(function, k, operands, placed, options)
        return slopes[k][j]

    results = []
    for target, dtype in zip(targets, out, strict=True):
        terms = []
        for source, array, have in sources:
            factor = slope(*((target, source) if transposed else (source, target)))
            terms.append(factor * spread(array, have, len(shape)).astype(factor.dtype))
        results.append(functools.reduce(jnp.add, terms).astype(dtype))
    return results


def _slopes(function, k, operands, placed, options):
    """The derivative of each result with respect to operand k, in what they are computed in."""
    partial = function.partial(k)
    types = tuple(compute_dtype(t, options["bound"]).name for t, _ in function.results)
    if not isinstance(partial, tuple):
        return _plain(partial, function, placed, types, options, *operands)
    return [
        call(one, operands, placed, out=(dtype,), **options)[0]
        for one, dtype in zip(partial, types, strict=True)
    ]


def _plain(plain, function, placed, out, options, *operands):
    """A function in plain JAX on the operands, in the dtypes that the C++ computes in."""
    shape = result_shape(operands, placed)
    wide = [
        spread(a, have, len(shape)).astype(compute_dtype(type_, options["bound"]))
        for a, have, (type_, _) in zip(operands, placed, function.operands, strict=True)
    ]
    results = [jnp.asarray(r) for r in plain(*wide)]
    return [jnp.broadcast_to(r, shape).astype(t) for r, t in zip(results, out, strict=True)]


def _jvp_of(plain, primals, tangents, moving):
    def of(*moved):
        operands = list(primals)
        for k, one in zip(moving, moved, strict=True):
            operands[k] = one
        return plain(*operands)

    at = tuple(primals[k] for k in moving)
    return jax.jvp(of, at, tuple(tangents[k] for k in moving))[1]


def _same_kind(function, moving, outputs, bound):
    """Products of numbers are derivatives of real functions of reals, and of holomorphic ones."""
    kinds = {compute_dtype(function.operands[k][0], bound).kind for k in moving}
    kinds |= {compute_dtype(function.results[j][0], bound).kind for j in outputs}
    if len(kinds) > 1:
        raise TypeError(
            f"{function.name} takes and returns both real and complex numbers, and has no "
            "derivative that is one number: pass elementwise derivative=, the whole function in "
            "plain JAX"
        )


def _transpose(cts, *args, function, placed, order, bound, out, strict, axes):
    del axes, out
    if not isinstance(function, Linear):
        raise NotImplementedError(f"{function.name} is not linear and cannot be transposed")
    operands, base = restored(args, order), len(function.base.operands)
    linear = [k for k, a in enumerate(operands) if ad.is_undefined_primal(a)]
    present = [j for j, ct in enumerate(cts) if type(ct) is not ad.Zero]
    if not present or not linear:
        return [None] * len(args)
    whole = tuple(range(jax.typeof(cts[present[0]]).ndim))
    types = tuple(  # of what is summed below: what it was computed in
        a.dtype.name if have == whole else compute_dtype(type_, bound).name
        for a, have, type_ in (
            (operands[k].aval, placed[k], function.operands[k][0]) for k in linear
        )
    )
    results = call(
        function.transpose([k - base for k in linear], present),
        [*operands[:base], *[cts[j] for j in present]],
        (*placed[:base], *[whole] * len(present)),
        bound=bound,
        out=types,
        strict=strict,
    )
    found = {}
    for k, result in zip(linear, results, strict=True):
        if placed[k] != whole:
            result = jnp.sum(result, [d for d in whole if d not in placed[k]])
        found[k] = result.astype(operands[k].aval.dtype)
    return [found.get(k) for k in order]


def register() -> None:
    """Makes the op differentiable."""
    ad.primitive_jvps[op.primitive] = _jvp
    ad.primitive_transposes[op.primitive] = _transpose
