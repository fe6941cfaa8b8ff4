"""Values that reach a function: its arguments, and what it closes over.

A function's closure is read as its arguments are: a variable that holds a tree of arrays, such as a
model, may hold parameters as an argument may; an array that is a variable by itself is data.
"""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...native.jaxpr import hidden_folders, names_in

MOST = 1 << 16  # objects that are looked at in a closure, and containers of other things than words
DEEPEST = 6  # how far objects lie within each other there, but for trees


@dataclasses.dataclass(frozen=True)
class Origin:
    """An argument or a variable of a function, of which an array is a part.

    Attributes:
      name: the argument's place or keyword, or the variable's name.
      is_data: no array in it is a parameter.
      matrices: how many floating-point arrays with two dimensions or more it holds; a model holds
        more than a batch.
      closed_over: the function closes over it.
      alone: it is an array by itself.
      differentiated: a derivative by it is being taken, as far as tracers tell, and it is not the
        only matrix.
    """

    name: Any
    is_data: bool = False
    matrices: int = 0
    closed_over: bool = False
    alone: bool = False
    differentiated: bool = False

    @property
    def is_doubtful(self) -> bool:
        """Tells if it is no parameter beside constants."""
        return self.alone and not self.differentiated

    @property
    def as_data(self) -> str:
        """The reason why nothing in it is a kernel."""
        if not self.closed_over:
            return f"argument {self.name} is taken for data"
        return f"{self.name}, which the function closes over, is taken for data"


UNKNOWN = Origin("an array", is_data=True, matrices=1, closed_over=True)
"""The origin of what is in no variable that can be found, such as constants."""


def is_array(x: Any) -> bool:
    """Tells if JAX takes a value for an array; NumPy has more dtypes, and JAX more than NumPy."""
    if not isinstance(x, np.ndarray):
        return isinstance(x, jax.Array)
    with suppress(TypeError):
        return x.dtype.names is None and jax.typeof(x) is not None
    return False


def _is_floating(x: Any) -> bool:
    is_array_like = hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)
    return is_array_like and jnp.issubdtype(x.dtype, jnp.floating)  # no class of numbers is one


def origins_of(args: Any, kwargs: Any, closed_over: Sequence[Any] = ()) -> list[Origin]:
    """Returns for each leaf which argument it is a part of; integers are none's parameters.

    closed_over: the arrays that the function closes over.
    """
    found = []
    moved = [x for x in closed_over if _tangent(x) is not None]
    several = _matrices([*moved, *jax.tree.leaves((args, kwargs))]) > 1
    for name, part in [*enumerate(args), *sorted(kwargs.items())]:  # the order of a tree's leaves
        leaves = jax.tree.leaves(part)
        own = Origin(name, matrices=_matrices(leaves), alone=is_array(part))
        both = own, replace(own, differentiated=several)
        integers = Origin(name, is_data=True)
        found += [both[_tangent(x) is not None] if _is_floating(x) else integers for x in leaves]
    return found


def _tangent(x: Any) -> Any:
    """Returns the tangent that a tracer of a derivative holds beside the array; None of others."""
    while isinstance(inner := getattr(x, "val", None), Tracer):  # within vmap
        x = inner
    return getattr(x, "tangent", None) if isinstance(x, Tracer) else None


def _is_moved(x: Any) -> bool:
    """Tells if a derivative by an array itself, or by what it is cast from, is being taken."""
    if (tangent := _tangent(x)) is None or not _is_floating(x):
        return False
    while (made := getattr(tangent, "parent", None)) is not None:
        if made.primitive.name != "convert_element_type":
            return False  # it is computed from such an array
        (tangent,) = made.in_tracers
    return True


def _matrices(leaves: Sequence[Any]) -> int:
    return sum(_is_floating(leaf) and leaf.ndim > 1 for leaf in leaves)


# ---------------------------------------------------------------- closures


class Closure:
    """The origins of the arrays that a function closes over, read when the first is asked for.

    arrays: those that its program reads. Where a derivative is being taken by some of them, these
    are one model, however the function holds them.
    """

    def __init__(self, function: Callable[..., Any], arrays: Sequence[Any] = ()):
        self._function = function
        moved = [x for x in arrays if _is_moved(x)]
        self._moved = {key_of(x) for x in moved}
        self._model = Origin("closed over", matrices=_matrices(moved), differentiated=True)

    def get(self, key: int, default: Origin) -> Origin:
        """Returns the origin of the array with this key."""
        found = self._origins.get(key, default)
        return self._model if found.is_data and key in self._moved else found

    @functools.cached_property
    def _origins(self) -> dict[int, Origin]:
        variables: dict[str, list[tuple[Any, bool]]] = {}
        for value, variable, alone in _held(self._function):
            variables.setdefault(variable, []).append((value, alone))
        found: dict[int, Origin] = {}
        for name, held in variables.items():
            leaves = [x for value, _ in held for x in jax.tree.leaves(value) if is_array(x)]
            alone = Origin(name, True, _matrices(leaves), True)
            tree = Origin(name, False, _matrices(leaves), True)
            within = [x for value, alone in held if not alone for x in jax.tree.leaves(value)]
            found |= {key_of(x): alone for x in leaves if key_of(x) not in found}
            found |= {key_of(x): tree for x in within if _is_floating(x)}
        return found


Held = tuple[Any, str, bool]
"""An array, a tree of arrays or any object, its variable, and whether it is all of that."""


def _held(function: Any) -> Iterator[Held]:
    """Yields the arrays, and the trees of arrays, in the closure of a function."""
    seen: dict[int, Any] = {}
    stack: list[tuple[Held, int]] = []
    stack += [((each, "self", True), 0) for each in (type(function).__call__, function)]
    while stack:
        (value, variable, alone), depth = stack.pop()
        with suppress(Exception):  # objects whose attributes fail, say
            if is_array(value):
                yield value, variable, alone
            elif depth <= DEEPEST and len(seen) <= MOST and id(value) not in seen:
                seen[id(value)] = value
                if isinstance(value, dict | list | tuple):  # a tree, of any depth
                    items = value.values() if isinstance(value, dict) else value
                    items = () if _is_plain(value) else [x for x in items if not _is_plain(x)]
                    stack += [((x, variable, False), depth) for x in reversed(items)]
                elif not jax.tree_util.all_leaves([value]):
                    yield value, variable, False
                elif not isinstance(value, _WITHOUT_ARRAYS):
                    stack += [(part, depth + 1) for part in reversed([*_parts(value, variable)])]


def _is_plain(x: Any) -> bool:
    """Tells if a value is a word or a number, or holds these alone: there may be millions."""
    if isinstance(x, dict | list | tuple):
        return _PLAIN.issuperset(map(type, x.values() if isinstance(x, dict) else x))
    return type(x) in _PLAIN


def _parts(value: Any, variable: str) -> Iterator[Held]:
    """Yields what an object holds that is no tree."""
    if isinstance(value, functools.partial):
        bound = [*enumerate(value.args), *value.keywords.items(), (variable, value.func)]
        yield from [(x, str(name), True) for name, x in bound]
    elif isinstance(value, types.MethodType):
        yield from [(value.__self__, "self", True), (value.__func__, "self", True)]
    else:
        with suppress(Exception):  # of the object's own
            if callable(wrapped := getattr(value, "__wrapped__", None)):
                yield wrapped, variable, True
        is_function = isinstance(value, types.FunctionType)
        yield from _variables(value) if is_function else ()
        own = vars(value).items() if is_function else attributes(value)
        yield from [(x, f"{variable}.{name}", True) for name, x, *_ in own]


def attributes(
    x: Any, kinds: Any = types.MemberDescriptorType
) -> Iterator[tuple[str, Any, Callable[[Any], Any]]]:
    """Yields the attributes of an object, also those in slots of `kinds`, and what writes each."""
    with suppress(AttributeError):
        own = object.__getattribute__(x, "__dict__")
        for name, value in [*own.items()] if isinstance(own, dict) else ():
            yield name, value, functools.partial(own.__setitem__, name)
    for name, slot in [item for cls in type(x).__mro__ for item in vars(cls).items()]:
        if isinstance(slot, kinds):
            with suppress(Exception):  # nothing has been assigned to it yet, say
                yield name, slot.__get__(x), functools.partial(slot.__set__, x)


def _variables(function: types.FunctionType) -> Iterator[Held]:
    """Yields what a function in Python reads from outside: cells, globals and defaults."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # nothing has been assigned to it yet
            yield cell.cell_contents, name, True
    library = code.co_filename.startswith(hidden_folders())  # its globals are no user's
    own = function.__globals__
    for name in () if library else names_in(code):
        if name in own:
            yield own[name], name, True
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield value, "a default", True


_PLAIN = frozenset([str, bytes, bool, int, float, complex, types.NoneType])
_WITHOUT_ARRAYS = type, types.ModuleType, types.BuiltinFunctionType
# Tells arrays apart: a constant of a program is a view of the NumPy array that it was.
key_of = lambda x: x.ctypes.data if isinstance(x, np.ndarray) else id(x)
