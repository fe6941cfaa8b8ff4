"""A user's activation inside a kernel: the same function, on what every Pallas backend has.

Backends miss some of the functions that activations are made of, and not the same ones. Those are
replaced by others here, for float32: erf to 1e-7 of 1, the others to a few roundings.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive, primitives

from ..implementation import Unsupported
from ..jaxpr import results_of, value_of

# erf(x) = x P(x²) / Q(x²) for |x| < 3.75, highest power first; it is 1 in float32 beyond.
_ERF_P = (2.2905065e-4, 3.4082910e-3, 5.0955695e-2, 1.8520832e-1, 1.1283791)
_ERF_Q = (-1.1791603e-7, 2.3547966e-5, 1.0179625e-3, 1.4070470e-2, 1.1098505e-1, 4.9746925e-1, 1.0)
_ERF_ONE = 3.7439211
# erf(x) = x S(2 (x / 3.2)² − 1) for |x| < 3.2, to 1.4e-5: no division, which takes GPUs long.
_SHORT = (-5.8029973e-3, 1.4789448e-2, -1.7704743e-2, 2.7749924e-2, -5.3089137e-2, 8.2372638e-2)
_SHORT += (-1.1403461e-1, 1.5416110e-1, -2.1728352e-1, 4.4133758e-1)
_SHORT_ONE = 3.2

Scalar = Callable[[jax.Array], jax.Array]

# Operations of which each element of a result depends on one element of each operand.
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp convert_element_type copy cos cosh digamma div eq erf
    erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic
    lt max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n sign
    sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()
)


def check(function: Scalar, dtype: jax.typing.DTypeLike) -> None:
    """Raises Unsupported if a kernel cannot compute `function` tile by tile.

    ValueError if it does not keep the shape of its input.
    """
    tile, once = jax.ShapeDtypeStruct((8, 128), dtype), "and a kernel gives it one tile at a time"
    captured = f"the activation captures an array or a traced value, {once}"
    captured += "; write its constants as numbers"
    try:
        closed = jax.make_jaxpr(function)(tile)
    except (TypeError, ValueError) as error:  # an array that does not broadcast with a tile
        raise Unsupported(f"{captured}, or: {error}") from error
    if any(isinstance(c, Tracer) or np.size(c) > 1 for c in closed.consts):
        raise Unsupported(captured)
    shapes = [getattr(aval, "shape", None) for aval in closed.out_avals]
    if shapes != [tile.shape]:
        changes = f"{function!r} makes {shapes} of {tile.shape}"
        raise ValueError(f"activation must keep the shape of its input; {changes}")
    for eqn in _every(closed.jaxpr):
        scalars = eqn.invars and all(getattr(v.aval, "shape", ()) == () for v in eqn.invars)
        if eqn.primitive.name not in _ELEMENTWISE and not scalars:  # scalars have nothing to mix
            mixes = f"it has the operation {eqn.primitive.name!r}"
            raise Unsupported(f"the activation is not element-wise, {once}: {mixes}")


def portable(
    function: Callable[..., list[jax.Array]], *, short: bool = False, exact: bool = False
) -> Callable[..., list[jax.Array]]:
    """Returns `function`, with what some backend misses replaced.

    Where `short`, erf is right to five digits: for results that bfloat16 rounds to three. Where
    `exact`, tanh is made of an exponential: the hardware's is right to 2^-11 of 1, which is
    for results that bfloat16 rounds, and takes half the time.
    """
    replaced = _REPLACED | (_SHORTER if short else {}) | (_EXACT if exact else {})

    return lambda *arrays: _evaluate(replaced, _traced(function, *arrays), arrays)


def differentiable(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns `function`, of one array or several, whose derivative kernels can have.

    JAX's own derivative of erf is right to the last bit, by operations that kernels do not have.
    """

    def call(*arrays):
        closed = _traced(function, *arrays)
        if not any(eqn.primitive in _SMOOTH for eqn in _every(closed.jaxpr)):
            return function(*arrays)
        return _evaluate(_SMOOTH, closed, arrays)[0]

    return call


def _traced(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns the closed jaxpr of a function of such arrays."""
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])


def _within(eqn: Any) -> Any:
    """Returns the closed jaxpr that an equation calls, or None."""
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return inner if hasattr(inner, "consts") else None


def _every(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of those within."""
    for eqn in jaxpr.eqns:
        inner = _within(eqn)
        yield from _every(inner.jaxpr) if inner else (eqn,)


def _evaluate(replaced: Mapping[Primitive, Callable], closed: Any, args: Sequence) -> list:
    """Returns a closed jaxpr's results on `args`; its constants are numbers."""
    jaxpr, consts = closed.jaxpr, [np.asarray(c).item() for c in closed.consts]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        operands = [value_of(atom, values) for atom in eqn.invars]
        if eqn.primitive in replaced:
            results = [replaced[eqn.primitive](*operands, **eqn.params)]
        elif inner := _within(eqn):
            results = _evaluate(replaced, inner, operands)
        else:
            results = results_of(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom, values) for atom in jaxpr.outvars]


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> Any:
    return functools.reduce(lambda sum, c: sum * x + c, coefficients[1:], coefficients[0])


def _erf(x: jax.Array) -> jax.Array:
    x = jnp.clip(x, -_ERF_ONE, _ERF_ONE)
    square = x * x
    return x * (_polynomial(square, _ERF_P) / _polynomial(square, _ERF_Q))


def _erf_to_five_digits(x: jax.Array) -> jax.Array:
    x = jnp.clip(x, -_SHORT_ONE, _SHORT_ONE)
    return x * _polynomial(x * x * (2 / _SHORT_ONE**2) - 1.0, _SHORT)


def _log1p(x: jax.Array, **_: Any) -> jax.Array:
    u = 1.0 + x  # log(u) · x / (u − 1): the rounding of u cancels (Kahan)
    one = u == 1.0
    return jnp.where(one, x, jnp.log(u) * x / jnp.where(one, 1.0, u - 1.0))


def _expm1(x: jax.Array, **_: Any) -> jax.Array:
    t = jnp.tanh(0.5 * jnp.minimum(x, 1.0))
    return jnp.where(x > 1.0, jnp.exp(x) - 1.0, 2.0 * t / (1.0 - t))


def _integer_pow(x: jax.Array, *, y: int, **_: Any) -> jax.Array:
    if y < 0:
        return 1.0 / _integer_pow(x, y=-y)
    power = None
    while y:
        if y & 1:
            power = x if power is None else power * x
        x, y = x * x, y >> 1
    return jnp.ones_like(x) if power is None else power


_REPLACED = {
    primitives.add_jaxvals_p: lambda x, y, **_: x + y,  # in derivatives
    primitives.copy_p: lambda x, **_: x,
    primitives.expm1_p: _expm1,
    primitives.integer_pow_p: _integer_pow,
    primitives.log1p_p: _log1p,
    primitives.logistic_p: lambda x, **_: 1.0 / (1.0 + jnp.exp(-x)),
    primitives.square_p: lambda x, **_: x * x,
}


@jax.custom_jvp
def _smooth_erf(x: jax.Array) -> jax.Array:
    return jax.lax.erf(x)


@_smooth_erf.defjvp
def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return _smooth_erf(x), 2 / np.sqrt(np.pi).item() * jnp.exp(-x * x) * dx


def _with_erf(erf: Scalar) -> dict[Primitive, Callable[..., jax.Array]]:
    return {
        primitives.erf_p: lambda x, **_: erf(x),
        primitives.erfc_p: lambda x, **_: 1.0 - erf(x),
    }


_REPLACED |= _with_erf(_erf)
_SMOOTH, _SHORTER = _with_erf(_smooth_erf), _with_erf(_erf_to_five_digits)
_EXACT = {primitives.tanh_p: lambda x, **_: 1.0 - 2.0 / (1.0 + jnp.exp(2.0 * x))}
