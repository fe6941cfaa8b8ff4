"""`swap`: a model whose own call `fuse` serves. The frameworks differ in the method they call."""

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

from .fuse import check, skip_of

_HOMES = {"flax.nnx": "nnx", "flax.linen": "linen", "equinox": "eqx"}


@dataclasses.dataclass(frozen=True)
class Call:
    """The method that serves a model of a framework, and the options of `fuse`."""

    method: str
    fuse: Callable[..., Any]
    quantization: Any
    skip: Any
    report: Any

    def of(self, base: type) -> Callable[..., Any]:
        """Returns the method of `base`, fused."""
        options = {"quantization": self.quantization, "skip": self.skip, "report": self.report}
        return self.fuse(getattr(base, self.method), **options)


def call_of(
    home: str, method: str, fuse: Callable[..., Any], quantization: Any, skip: Any, report: Any
) -> Call:
    """Returns the options of a `swap`.

    Raises:
      TypeError: if the report cannot be called.
      ValueError: for an unknown quantization.
    """
    check(f"{home}.swap", fuse, quantization, report)
    return Call(method, fuse, quantization, skip_of(f"{home}.swap", skip), report)


def swapped_class(model: Any, home: str, call: Call) -> type:
    """Returns the subclass of a model's class that `call` serves, one for equal options.

    Raises:
      TypeError: for a class, for a module of another framework, and for what has no such method.
    """
    op = f"{home}.swap"
    if isinstance(model, type):
        raise TypeError(f"{op}: model must be a module, got the class {model.__name__}; call it")
    within = lambda cls, name: f"{cls.__module__}.".startswith(f"{name}.")
    homes = [_HOMES[name] for name in _HOMES for cls in type(model).__mro__ if within(cls, name)]
    if homes and home not in homes:  # Flax's bridges are of both
        raise TypeError(
            f"{op}: model is a {type(model).__name__}; use normfuse.layers.{homes[0]}.swap"
        )
    base = type(model)
    if base in _CLASSES.values():
        base = base.__mro__[1]  # the options of the last swap are its own
    if not homes or not hasattr(base, call.method):
        raise TypeError(
            f"{op}: model must be a module with a {call.method} method, got "
            f"{type(model).__name__}; normfuse.fuse takes any function"
        )
    with _making:
        if (base, call) not in _CLASSES:
            _CLASSES[base, call] = _subclass(base, home, call)
        return _CLASSES[base, call]


_CLASSES: dict[tuple[type, Call], type] = {}
_making = threading.RLock()


def _subclass(base: type, home: str, call: Call) -> type:
    own = getattr(base, call.method)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call.of(base)(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        plain = object.__new__(base)
        vars(plain).update(vars(self))
        return swapped, (plain, home, call)

    functools.update_wrapper(method, own)
    of_linen = {"nowrap": True}  # its word for methods that have no scope of their own
    vars(method).update(of_linen, __signature__=inspect.signature(own))
    vars(reduce).update(of_linen)
    body = {
        call.method: method,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": f"{base.__qualname__}[normfuse]",
        "__doc__": base.__doc__,
    }
    options = {"pytree": base._pytree__is_pytree} if home == "nnx" else {}
    return type(base)(base.__name__, (base,), body, **options)


def swapped(model: Any, home: str, call: Call) -> Any:
    """Returns `model` as an object of its `swapped_class`: all that it holds is the same."""
    new = object.__new__(swapped_class(model, home, call))
    vars(new).update(vars(model))
    return new


_GONE = {  # since version 0.1: what to use in place of a name
    "DenseGeneral": "Flax's, in a function that fuse fuses",
    "Einsum": "Flax's, in a function that fuse fuses",
    "LinearGeneral": "Flax's, in a function that fuse fuses",
    "NormDense": "RMSNorm, then Linear or Dense, in a function that fuse fuses",
    "fuse_norms": "fuse(function, quantization='fp8')",
    "unswap": "the model that was given to swap, which stays as it was",
}


def missing(module: str, name: str) -> AttributeError:
    """Returns the error for a name that a framework's module lacks."""
    if name in _GONE:
        return AttributeError(f"{module}.{name} is gone: use {_GONE[name]}")
    return AttributeError(f"module {module!r} has no attribute {name!r}")
