"""Quantizing an array on any mesh: the codes of a sharded array have one scale.

An array is a matrix whose rows are its dimensions before `split`, and its columns the others. Its
maximum is that of all devices, so that a mesh gives the result of one device.

Codes are passed on as bytes: `jax.checkpoint` rounds floating arrays that it keeps, and it takes
float8_e4m3fn, which has numbers to 448, for a format that ends at 240 (jax-ml/jax#22244).
"""

import dataclasses
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ...native.implementation import BEST, Order
from ..core.op import Dims, Op, Split
from . import kernels
from .definition import define_quantize
from .kernels import Codes


@dataclasses.dataclass(frozen=True)
class Quantize:
    """The static description of a quantized array."""

    codes: Codes  # the results for the matrix
    split: int  # number of leading dimensions that are its rows
    # vmap's dimension joins the rows, under one scale; otherwise each of the stacked arrays has a
    # scale of its own.
    rows: bool

    @property
    def op(self) -> str:
        """The function the user called."""
        return self.codes.op


class Quantized(NamedTuple):
    """`x ≈ scale · decoded(q)`."""

    q: Any  # uint8, of x's shape; None where it was not asked for
    qt: Any  # its transpose, the columns' dimensions before the rows'; None where not asked for
    scale: Array  # (), float32, a power of two


def _matrix(spec: Quantize, x: Array) -> Array:
    return x.reshape(math.prod(x.shape[: spec.split]), math.prod(x.shape[spec.split :]))


def _restored(spec: Quantize, x: Array, results: list[Array]) -> list[Array]:
    *codes, scale = results
    shapes = [x.shape] * spec.codes.has_q
    shapes += [(*x.shape[spec.split :], *x.shape[: spec.split])] * spec.codes.has_qt
    return [
        *[as_bytes(c.reshape(s)) for c, s in zip(codes, shapes, strict=True)],
        scale.reshape(()),
    ]


def as_bytes(codes: Array) -> Array:
    """Returns FP8 codes as uint8."""
    return jax.lax.bitcast_convert_type(codes, jnp.uint8)


def decoded(codes: Array, dtype: str = "float8_e4m3fn") -> Array:
    """Returns bytes as the FP8 codes that they are; codes of another dtype as they are."""
    return jax.lax.bitcast_convert_type(codes, dtype) if codes.dtype == jnp.uint8 else codes


def define(spec: Quantize, x: Array) -> list[Array]:
    """`(x,) -> ([q,] [qt,] scale ())` in plain JAX."""
    return _restored(spec, x, define_quantize(_matrix(spec, x), **spec.codes.flags))


def _body(spec: Quantize, split: Split, x: Array, *, order: Order) -> list[Array]:
    if x.size == 0:
        return define(spec, x)
    matrix, every = _matrix(spec, x), range(x.ndim)
    if not split.over(every):
        return _restored(spec, x, kernels.quantize(spec.codes, matrix, order=order))
    (maximum,) = kernels.amax(spec.codes, matrix, order=order)
    # Bits order non-negative numbers as their values do. XLA joins reductions of one dtype, so it
    # joins those of all kernels, which wait for nothing, with none that waits for an activation.
    reduced = jnp.float32 if spec.rows else jnp.int32
    maximum = split.pmax(jax.lax.bitcast_convert_type(maximum, reduced), every)
    maximum = jax.lax.bitcast_convert_type(maximum, jnp.float32)
    return _restored(spec, x, kernels.cast(spec.codes, matrix, maximum, order=order))


def _dims(spec: Quantize, ndim: int) -> Dims:
    every = tuple(range(ndim))
    qt = (*every[spec.split :], *every[: spec.split])
    return (every,), (*[every] * spec.codes.has_q, *[qt] * spec.codes.has_qt, ())


def _batch(op: Op, args: Any, dims: Any, *, spec: Quantize, order: Order) -> Any:
    (x,), (dim,) = args, dims
    codes = spec.codes
    if not spec.rows:
        results = jax.vmap(lambda x: define(spec, x), dim)(x)
        return results, [0] * len(results)
    columns = x.ndim - 1 - spec.split
    results = op(replace(spec, split=spec.split + 1), jnp.moveaxis(x, dim, 0), order=order)
    return results, [*[0] * codes.has_q, *[columns] * codes.has_qt, None]


_rules = {"batch": _batch, "jvp": kernels.no_second_derivative}
op = Op("quantize_array", define, dims=_dims, body=_body, **_rules)


def kernel_codes_saveable(primitive: Any, *_: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: keeps the FP8 codes of kernels, two bytes an element.

    Without it a rematerialised layer quantizes its kernel twice a step.
    """
    return primitive is op.primitive and not params["spec"].rows


def quantize(
    x: Array, codes: Codes, *, split: int, rows: bool = True, order: Order = BEST
) -> Quantized:
    """Returns the codes of `x`, of a kernel where not `rows`; see `Quantize`."""
    *found, scale = op(Quantize(codes, split, rows), x, order=order)
    return Quantized(found[0] if codes.has_q else None, found[-1] if codes.has_qt else None, scale)
