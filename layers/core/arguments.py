"""Checks of arguments: each mistake is one error that names the argument, its value and the fix."""

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...native.dtypes import FLOATING
from ...native.implementation import BEST, NAMES, NATIVE, Implementation, Order, together

T = TypeVar("T")
Recipe = Literal["fp8"]
"""How products are quantized: docs/quantization.md."""

Quantization = Recipe | None


def array_of(op: str, argument: str, value: Any) -> jax.Array:
    """Returns `value` as an array; TypeError otherwise."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{op}: {argument} must be an array, got {value!r}") from None


def floating(op: str, argument: str, value: Any) -> jax.Array:
    """Returns `value` as an array of a floating dtype; TypeError otherwise."""
    array = array_of(op, argument, value)
    if array.dtype.name not in FLOATING:
        raise TypeError(
            f"{op}: {argument} must be one of {', '.join(FLOATING)}, got {array.dtype.name}; "
            f"cast it first, for example {argument}.astype(jnp.float32)"
        )
    return array


def floating_dtype(op: str, dtype: Any, default: Any, argument: str = "dtype") -> str:
    """Returns the name of `dtype`, or of `default` where it is None; TypeError if not floating.

    float64 becomes float32 where JAX's 64-bit types are off, with JAX's own warning.
    """
    try:
        name = jnp.dtype(default if dtype is None else dtype).name
    except (TypeError, ValueError):
        name = ascii(dtype)
    if name not in FLOATING:
        raise TypeError(f"{op}: {argument} must be one of {', '.join(FLOATING)}, got {name}")
    if name == "float64":
        name = jax.eval_shape(lambda: jnp.empty((), name)).dtype.name
    return name


def check_quantization(op: str, quantization: Any, dtype: Any = None) -> None:
    """Raises ValueError for an unknown `quantization`, TypeError if `dtype` cannot have it."""
    if quantization is None:
        return
    if not isinstance(quantization, str) or quantization not in get_args(Recipe):
        listed = " or ".join(map(repr, (None, *get_args(Recipe))))
        raise ValueError(f"{op}: quantization must be {listed}, got {quantization!r}")
    if dtype is not None and jnp.dtype(dtype).name == "float64":
        raise TypeError(
            f"{op}: quantization={quantization!r} takes float32, bfloat16 and float16, got "
            "float64; leave quantization out, or set dtype"
        )


def options_of(name: str, layer: Any, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """Returns a linear layer's options and its compute dtype, as our ops take them; checks them."""
    check_quantization(name, layer.quantization, dtype)
    options = {"activation": layer.activation, "implementation": layer.implementation}
    return options | {"quantization": layer.quantization, "dtype": jnp.dtype(dtype).name}


LARGEST = float(np.finfo(np.float32).max)


def flag(op: str, argument: str, value: Any) -> bool:
    """Returns a bool; TypeError for anything else."""
    if not isinstance(value, bool | np.bool_):
        shown = type(value).__name__ if hasattr(value, "shape") else repr(value)
        raise TypeError(f"{op}: {argument} must be True or False, got {shown}")
    return bool(value)


def finite(
    op: str, argument: str, value: Any, *, least: float = -LARGEST, most: float = LARGEST
) -> float:
    """Returns `value` as a number from `least` to `most`; TypeError or ValueError otherwise.

    Ops compute with it in float32, where a number larger than `LARGEST` would be infinite.
    """
    try:
        boolean = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "bool"
        if boolean or isinstance(value, str) or getattr(value, "ndim", 0):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf  # an integer of hundreds of digits
    except (TypeError, ValueError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"{op}: {argument} must be a Python number known when the op is traced, got {value!r}"
        ) from None
    if not math.isfinite(number):
        raise ValueError(f"{op}: {argument} must be finite, got {number}")
    if number < least:
        raise ValueError(f"{op}: {argument} must be at least {least:g}, got {value}")
    if number > most:
        raise ValueError(f"{op}: {argument} must be at most {most:g}, got {value}")
    return number


def integer(op: str, argument: str, value: Any, least: int = -(2**63)) -> int:
    """Returns `value` as an integer of at least `least`; TypeError or ValueError otherwise."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {argument} must be an integer, got {value!r}") from None
    if least > number:
        raise ValueError(f"{op}: {argument} must be at least {least}, got {number}")
    return number


def checked_softcap(op: str, softcap: Any, most: float = LARGEST) -> float | None:
    """Returns the bound of logits or scores, if there is one; TypeError or ValueError otherwise."""
    if softcap is None:
        return None
    cap = finite(op, "softcap", softcap, most=most)
    if cap <= 0:
        raise ValueError(f"{op}: softcap must be positive, or None for no bound; got {softcap}")
    return finite(op, "softcap", cap, least=1 / most)


def dimensions(op: str, x: jax.Array, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Returns `axis` as increasing dimensions of x; TypeError or ValueError otherwise."""
    asked = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    try:
        axes = [operator.index(a) for a in asked]
    except TypeError:
        raise TypeError(f"{op}: axis must be an int or several, got {axis!r}") from None
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have an axis to normalise, got a scalar")
    if not axes:
        raise ValueError(f"{op}: axis must name at least one dimension, got {axis!r}")
    if any(not -x.ndim <= a < x.ndim for a in axes):
        raise ValueError(
            f"{op}: axis must be from {-x.ndim} to {x.ndim - 1} for x of shape {x.shape}, "
            f"got {axis}"
        )
    axes = sorted(a % x.ndim for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis names a dimension twice: {axis} for x of shape {x.shape}")
    return tuple(axes)


def dimensions_of(layer: str, x: jax.Array, axes: int | Iterable[int]) -> tuple[int, ...]:
    """Returns Flax's axes of x: increasing, each once; ValueError where x has no such axis."""
    each = (axes,) if isinstance(axes, int) else axes
    return tuple(sorted({dimensions(layer, x, axis)[0] for axis in each}))


def unserved(reasons: Mapping[str, bool], *dtypes: jax.typing.DTypeLike | None) -> str:
    """Returns the first of `reasons` that holds, or why the ops cannot take `dtypes`; or ""."""
    if reason := next((reason for reason, holds in reasons.items() if holds), ""):
        return reason
    others = {jnp.dtype(d).name for d in dtypes if d is not None} - set(FLOATING)
    return f"the dtype {', '.join(sorted(others))}" if others else ""


def unserved_of_flax(layer: Any, promote_dtype: Any, *dtypes: Any) -> str:
    """Returns the part of a linear layer, and its inputs, that only Flax serves, or ""."""
    products = {getattr(layer, name, None) for name in ("dot_general", "dot_general_cls")}
    reasons = {
        "a precision": layer.precision is not None,
        "a preferred_element_type": getattr(layer, "preferred_element_type", None) is not None,
        "a dot_general of its own": not products <= {None, jax.lax.dot_general},
        "a promote_dtype of its own": layer.promote_dtype is not promote_dtype,
    }
    return unserved(reasons, *dtypes, layer.dtype)


# ---------------------------------------------------------------- implementations


def requested(
    implementation: Implementation,
    *,
    argument: str = "implementation",
    known: Sequence[str] = NAMES,
) -> list[str]:
    """Returns the implementations to try, in order; empty for the best that can serve.

    `None` takes `NORMFUSE_IMPLEMENTATION` (names separated by commas) where it is set. `known` are
    the names there are.

    Raises:
      ValueError: for an unknown name.
      NotImplementedError: for a name that is not among `known`.
      TypeError: for anything but None, a string, or a sequence of strings.
    """
    if implementation is None:
        argument = "NORMFUSE_IMPLEMENTATION"
        if not os.environ.get(argument):
            return []
        implementation = [name.strip() for name in os.environ[argument].split(",")]
    names = [implementation] if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be None, one of {', '.join(map(repr, known))} or a sequence of them, "
            f"got {implementation!r}; None takes the best that can serve here"
        )
    if not names or not {*names} <= {*known}:
        elsewhere = names and {*names} <= {*NAMES, *known}  # other operations have it
        raise (NotImplementedError if elsewhere else ValueError)(
            f"{argument} must name one of {', '.join(map(repr, known))}, got {implementation!r}; "
            "None takes the best that can serve here"
        )
    return list(names)


def order_of(op: str, implementation: Implementation) -> Order | None:
    """Returns the kernels that `implementation` asks for, whose names are kernels' or "xla".

    None if it asks for plain HLO before any of them.
    """
    names = requested(implementation, argument=f"{op}: implementation")
    if not names:
        return BEST
    plain = names.index("xla") if "xla" in names else len(names)
    return Order(tuple(names[:plain]), strict=plain == len(names)) if plain else None


def choose(op: str, implementation: Implementation, serve: Mapping[str, Callable[[Order], T]]) -> T:
    """Calls the implementation asked for.

    `serve` has for each implementation that exists a function of the kernels to try: native ones
    alone, or the best there is where plain HLO may serve (if "xla" follows, or nothing was asked
    for).

    Raises:
      NotImplementedError: if the only implementation asked for cannot serve.
      ExceptionGroup: of the causes, if none of several can.
    """
    every = [name for name in ("native", "xla") if name in serve]
    names = requested(implementation, argument=f"{op}: implementation") or every
    if implementation is None:  # NORMFUSE_IMPLEMENTATION is a preference only
        names = [name for name in names if name in serve] or every
    errors, there = [], ", ".join(map(repr, serve))
    for i, name in enumerate(names):
        try:
            if name not in serve:
                raise NotImplementedError(f"{op} has no {name!r} implementation; it has {there}")
            return serve[name](BEST if "xla" in names[i + 1 :] else NATIVE)
        except NotImplementedError as error:
            errors.append(error)
    raise together(op, names, errors)
