"""`swap`: a model whose own call `fuse` serves, in any framework."""

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from .core.arguments import Quantization
from .fuse.fuse import Options, fuse, options_of

M = TypeVar("M")
# The frameworks' packages, and the method of a module that is its call.
_FRAMEWORKS = {"flax.nnx": "__call__", "flax.linen": "apply", "equinox": "__call__"}


class Call(NamedTuple):
    """The method that serves a model of a framework, and the options of `fuse`."""

    method: str
    fuse: Callable[..., Any]
    options: Options


def swap(
    model: M,
    *,
    quantization: Quantization = None,
    skip: Any = (),
    report: Callable[[Any], Any] | None = None,
    require: str | Iterable[str] = (),
) -> M:
    """Returns `model` as a module whose own call `normfuse.fuse` serves; in Linen, its `apply`.

    Its class is a subclass of the model's, and it holds the same parts: parameters, paths, tied
    layers, static fields and checkpoints are the model's, and `model` itself stays as it was.
    `swapped(x)` is `fuse(lambda model, x: model(x))(model, x)`; other methods, and Linen's
    initialisation, are its own. Optax compares the structures of Equinox's models: swap them before
    `optim.init`. In training fuse the loss instead: `fuse` then finds its softmax too.

    Args:
      model: a module of nnx or Equinox with a `__call__`, or one of Linen that is not bound.
      quantization, skip, report, require: as for `normfuse.fuse`; `report` is called whenever a
        call is traced.

    Returns:
      A new module. Equal options make equal classes, so that `jit` traces once.

    Raises:
      TypeError: for a class, or anything but such a module.
      ValueError: for a bound module, or an unknown quantization.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import swap
    >>> model = nnx.RMSNorm(16, rngs=nnx.Rngs(0))
    >>> swapped = swap(model, report=lambda report: print(report.fused[0].served))
    >>> nnx.jit(swapped)(jnp.ones((2, 16))).shape
    rms_norm
    (2, 16)
    >>> swapped.scale is model.scale
    True
    """
    if isinstance(model, type):
        raise TypeError(f"swap: model must be a module, got the class {model.__name__}; call it")
    homes = [f"{cls.__module__}." for cls in type(model).__mro__ if cls.__name__ == "Module"]
    within = lambda name: any(home.startswith(f"{name}.") for home in homes)
    framework = next(filter(within, _FRAMEWORKS), "")
    method = _FRAMEWORKS.get(framework, "__call__")
    if not framework or not hasattr(model, method):
        raise TypeError(
            f"swap: model must be a module with a {method} method, got {type(model).__name__}; "
            "normfuse.fuse takes any function"
        )
    if framework == "flax.linen" and getattr(model, "scope", None) is not None:
        raise ValueError(
            f"swap: {type(model).__name__} is bound to variables; swap it before init or bind"
        )
    options = options_of("swap", fuse, quantization, skip, report, require)
    of_framework = fuse
    if framework == "flax.nnx":
        from .fuse_nnx import fuse as of_framework  # imports Flax

    return _swapped(model, Call(method, of_framework, options))


def _swapped(model: Any, call: Call) -> Any:
    """Returns `model` as an object of its `_swapped_class`: all that it holds is the same."""
    new = object.__new__(_swapped_class(type(model), call))
    vars(new).update(vars(model))
    return new


def _swapped_class(base: type, call: Call) -> type:
    """Returns the subclass of a model's class that `call` serves, one for equal options."""
    if base in _CLASSES.values():
        base = base.__mro__[1]  # the options of the last swap are its own
    with _making:
        if (base, call) not in _CLASSES:
            _CLASSES[base, call] = _subclass(base, call)
        return _CLASSES[base, call]


_CLASSES: dict[tuple[type, Call], type] = {}
_making = threading.RLock()


def _subclass(base: type, call: Call) -> type:
    own = getattr(base, call.method)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call.fuse(own, **call.options._asdict())(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        plain = object.__new__(base)
        vars(plain).update(vars(self))
        return _swapped, (plain, call)

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
    pytree = getattr(base, "_pytree__is_pytree", None)  # Flax nnx's
    options = {} if pytree is None else {"pytree": pytree}
    return type(base)(base.__name__, (base,), body, **options)
