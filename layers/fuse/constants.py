"""Constants of a program, computed by NumPy where its result is proved to be XLA's.

An equation of constants is computed if its primitive has a rule here and its dtypes are booleans,
NumPy's integers, float16, bfloat16, float32 or float64. Whatever XLA leaves to the implementation
is unknown: a division by zero, a float out of an integer's range, an integer's least number divided
by -1, the greater of a NaN, a wrapping iota. Of reductions, sums of equal numbers have a rule.
JAX's own evaluation would need a compiled program for each kind of equation (50 ms), and says less:
within a larger program XLA keeps more digits of bfloat16 than alone.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """A constant in its value's dtype.

    Attributes:
      x: the array.
      exact: every device and every order of operations gives these bits, as of integers and
        booleans. Numbers that were rounded are near what XLA computes: enough for a factor, and not
        for what jumps (a comparison, a cast to integers).
    """

    x: Any
    exact: bool = True

    @functools.cached_property
    def normal(self) -> bool:
        """False if a number is subnormal: some devices compute with 0 instead."""
        if _is_integral(self.x.dtype):
            return True
        size = np.abs(self.x)
        least = _FLOATS[self.x.dtype].smallest_normal
        return bool(((size == 0) | (size >= least) | (size != size)).all())

    @property
    def uniform(self) -> "Known | None":
        """The number, bit for bit, that all elements are; else None."""
        if not self.x.size:
            return None
        first = self.x.reshape(-1)[0]
        same = (self.x == first).all()  # not of NaN
        if same and first == 0 and not _is_integral(self.x.dtype):
            same = (np.signbit(self.x) == np.signbit(first)).all()
        return Known(np.asarray(first), self.exact) if same else None


_FLOATS = {np.dtype(d): jnp.finfo(d) for d in ("float16", jnp.bfloat16, "float32", "float64")}
ARITHMETIC = 2.0**-48
"""Relative rounding of what rules compute from constants, in float64; no tolerance on these."""
_DIGITS = {dtype: 2.0 ** (found.nmant + 1) for dtype, found in _FLOATS.items()}
"""Integers up to these are exact."""


def _is_integral(dtype: Any) -> bool:
    return dtype.kind in "biu"


def is_supported(dtype: Any) -> bool:
    """Tells if there are rules for numbers of this dtype."""
    return dtype in _FLOATS or _is_integral(dtype)


def slack(x: float, dtype: Any) -> float:
    """Returns the relative distance to a number of the real numbers that a dtype rounds to it.

    That is half a unit in the last place of 16 bits; two units of more bits, because functions such
    as rsqrt are that far.
    """
    found = _FLOATS.get(np.dtype(dtype))
    if found is None or not math.isfinite(x):
        return 0.0
    mantissa, exponent = math.frexp(abs(x))
    unit = 2.0 ** (exponent - 1 - found.nmant) / abs(x)
    if found.bits > 16:
        return 2 * unit
    return unit / 4 if mantissa == 0.5 else unit / 2  # a power of two has closer numbers below


def known(x: Any) -> Known | None:
    """Returns an array from outside as a constant."""
    return Known(x) if is_supported(x.dtype) else None


def evaluated(name: str, params: Mapping[str, Any], out: Any, operands: Any) -> Known | None:
    """Returns the result of an equation of constants; None where it is not proved.

    Args:
      name, params: the primitive's.
      out: the type of the result.
      operands: `Known`s.
    """
    if name not in RULES or name not in _MOVES and not all(o.normal for o in operands):
        return None
    if not is_supported(out.dtype):
        return None
    try:
        with np.errstate(all="ignore"):
            found = RULES[name](params, out, *operands)
    except Exception:  # sizes that are not known, say
        return None
    return None if found is None or found.x.dtype != out.dtype else found


def uniform(name: str, params: Mapping[str, Any], out: Any, operands: Any) -> Known | None:
    """Returns the number that all elements of a result are, where the operands are such numbers."""
    if name in _LAYOUTS:
        return operands[0]
    return evaluated(name, params, out, operands) if name in _OF_ELEMENTS else None


# ---------------------------------------------------------------- the same elements elsewhere


def _placed(n: int, sizes: Mapping[int, int]) -> list[int]:
    return [sizes.get(i, 1) for i in range(n)]


def _broadcast(p: Any, x: Any) -> Any:
    shape = p["shape"]
    sizes = dict(zip(map(int, p["broadcast_dimensions"]), x.shape))
    return np.broadcast_to(x.reshape(_placed(len(shape), sizes)), shape)


def _slice(p: Any, x: Any) -> Any:
    strides = p["strides"] or [1] * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _reshape(p: Any, x: Any) -> Any:
    return (x if p["dimensions"] is None else x.transpose(p["dimensions"])).reshape(p["new_sizes"])


_LAYOUTS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "expand_dims": lambda p, x: np.expand_dims(x, p["dimensions"]),
    "reshape": _reshape,
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": _slice,
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
} | dict.fromkeys("copy pcast pvary stop_gradient sharding_constraint".split(), lambda p, x: x)


SAME_ELEMENTS = frozenset((*_LAYOUTS, "convert_element_type"))
_MOVES = frozenset((*_LAYOUTS, "concatenate", "select_n"))


def _concatenate(p: Any, out: Any, *operands: Known) -> Known:
    x = np.concatenate([o.x for o in operands], p["dimension"])
    return Known(x, all(o.exact for o in operands))


# ---------------------------------------------------------------- elements, one by one


_OF_WHOLE = frozenset("add mul square sub".split())
"""Results of floats are exact where all of them are integers; others may be rounded."""


def _is_whole(x: Any) -> bool:
    """Tells if numbers are integers, below which a float has all others."""
    sizes = np.abs(np.asarray(x).astype(np.float64))
    return bool(((sizes == np.rint(sizes)) & (sizes <= _DIGITS[x.dtype])).all())


COMPARED = {name: getattr(operator, name) for name in "eq ge gt le lt ne".split()}
_JUMPS = frozenset((*COMPARED, "floor", "is_finite", "sign"))
"""A float's last digit may change these as a whole."""
_STEADY = frozenset("abs max min neg".split()) | _JUMPS
"""Results are exact where operands are."""

ELEMENTWISE: dict[str, tuple[Callable[..., Any], str]] = {
    "abs": (np.abs, "if"),
    "add": (np.add, "iuf"),
    "and": (np.bitwise_and, "biu"),
    "div": (lambda a, b: _int_div(a, b) if _is_integral(a.dtype) else np.divide(a, b), "iuf"),
    "exp": (np.exp, "f"),
    "floor": (np.floor, "f"),
    "is_finite": (np.isfinite, "f"),
    "log": (np.log, "f"),
    "max": (np.maximum, "biuf"),
    "min": (np.minimum, "biuf"),
    "mul": (np.multiply, "iuf"),
    "neg": (np.negative, "iuf"),
    "not": (np.invert, "biu"),
    "or": (np.bitwise_or, "biu"),
    "pow": (np.power, "f"),
    "rsqrt": (lambda x: np.ones((), x.dtype) / np.sqrt(x), "f"),
    "sign": (np.sign, "iuf"),
    "sqrt": (np.sqrt, "f"),
    "square": (np.square, "iuf"),
    "sub": (np.subtract, "iuf"),
    "xor": (np.bitwise_xor, "biu"),
} | {name: (compare, "biuf") for name, compare in COMPARED.items()}
"""NumPy's functions of elements by JAX's names, and the kinds of operands that they are proved for:
booleans, signed and unsigned integers, floats. Both wrap integers that overflow."""


def _int_div(a: Any, b: Any) -> Any:
    """Integer division as XLA has it: towards zero."""
    return a // b + ((a % b != 0) & ((a < 0) != (b < 0)))


def _is_left_open(name: str, x: Any, y: Any) -> Any:
    """Tells if XLA leaves the result of numbers to the implementation."""
    signed = x.dtype.kind == "i"
    if name == "div":
        least = signed and (x == np.iinfo(x.dtype).min).any() and (y == np.array(-1)).any()
        return (y == 0).any() or least
    if name == "abs":
        return signed and (x == np.iinfo(x.dtype).min).any()
    floats = not _is_integral(x.dtype)
    return floats and name in ("max", "min") and ((x != x).any() or (y != y).any())


def _element(name: str, p: Any, out: Any, *operands: Known) -> Known | None:
    compute, kinds = ELEMENTWISE[name]
    arrays = [o.x for o in operands]
    kind = "f" if arrays[0].dtype in _FLOATS else arrays[0].dtype.kind
    exact = all(o.exact for o in operands)
    if kind not in kinds or any(x.dtype != arrays[0].dtype for x in arrays):
        return None
    if name in _JUMPS and not exact or _is_left_open(name, arrays[0], arrays[-1]):
        return None
    y = np.asarray(compute(*arrays))
    if kind == "f" and exact and name not in _STEADY:
        exact = name in _OF_WHOLE and all(map(_is_whole, (*arrays, y)))
    return Known(y, exact)


def _convert(p: Any, out: Any, given: Known) -> Known | None:
    """Casts as NumPy: integers wrap, floats are cut towards 0 where an integer can be that."""
    x, to = given.x, out.dtype
    if _is_integral(x.dtype) and _is_integral(to):
        return Known(x.astype(to))
    if _is_integral(x.dtype):
        whole = np.abs(x.astype(np.float64))
        return Known(x.astype(to), bool((whole <= _DIGITS[to]).all()))
    if not _is_integral(to):
        y = x.astype(to)
        same = (y.astype(np.float64) == x.astype(np.float64)) | (x != x)
        return Known(y, given.exact and bool(same.all()))
    if not given.exact:
        return None
    if to.kind == "b":
        return Known(x != 0)
    whole, limits = np.trunc(x.astype(np.float64)), np.iinfo(to)
    fits = (whole >= float(limits.min)) & (whole < float(limits.max // 2 + 1) * 2)
    return Known(whole.astype(to)) if fits.all() else None


def _select(p: Any, out: Any, which: Known, *cases: Known) -> Known | None:
    if len(cases) != 2 or which.x.dtype.kind != "b":
        return None
    no, yes = cases
    return Known(np.where(which.x, yes.x, no.x), no.exact and yes.exact)


def _iota(p: Any, out: Any) -> Known | None:
    shape, dim = p["shape"], p["dimension"]
    along = _convert(p, out, Known(np.arange(shape[dim])))
    if along is None or (along.x.astype(np.float64) != np.arange(shape[dim])).any():
        return None
    x = along.x.reshape(_placed(len(shape), {dim: -1}))
    return Known(np.broadcast_to(x, shape), along.exact)


_layout = lambda move: lambda p, out, given: Known(move(p, given.x), given.exact)
RULES: dict[str, Callable[..., Known | None]] = {
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "iota": _iota,
    "select_n": _select,
}
RULES |= {name: _layout(move) for name, move in _LAYOUTS.items()}
RULES |= {name: functools.partial(_element, name) for name in ELEMENTWISE}
_OF_ELEMENTS = frozenset((*ELEMENTWISE, "convert_element_type", "select_n"))
