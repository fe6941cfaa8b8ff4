"""Values that reach a function: its arguments, what it closes over, and what a call changes there.

A function's closure is read as its arguments are: a variable that holds a tree of arrays, such as a
model, may hold parameters as an argument may; an array that is a variable by itself is data.
"""

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ...native import jax_private
from ...native.jaxpr import hidden_folders

MOST = 4096  # objects that are looked at in a closure
DEEPEST = 6  # how far objects lie within each other there


@dataclasses.dataclass(frozen=True)
class Origin:
    """An argument or a variable of a function, of which an array is a part.

    Attributes:
      name: the argument's place or keyword, or the variable's name.
      is_data: no array in it is a parameter.
      matrices: how many floating-point arrays with two dimensions or more it holds; a model holds
        more than a batch.
      closed_over: the function closes over it.
      is_doubtful: it is an array by itself, and no parameter beside constants: the only matrix
        among the arguments, or no derivative by it is being taken, as far as can be seen.
    """

    name: Any
    is_data: bool = False
    matrices: int = 0
    closed_over: bool = False
    is_doubtful: bool = False

    @property
    def as_data(self) -> str:
        """The reason why nothing in it is a kernel."""
        if not self.closed_over:
            return f"argument {self.name} is taken for data"
        return f"{self.name}, which the function closes over, is taken for data"


UNKNOWN = Origin("an array", is_data=True, matrices=1, closed_over=True)
"""The origin of what is in no variable that can be found, such as constants."""


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _is_floating(x: Any) -> bool:
    is_array_like = hasattr(x, "dtype") and isinstance(getattr(x, "shape", None), tuple)
    return is_array_like and jnp.issubdtype(x.dtype, jnp.floating)  # no class of numbers is one


def origins_of(args: Any, kwargs: Any) -> list[Origin]:
    """Returns for each leaf which argument it is a part of; integers are none's parameters."""
    found = []
    several = _matrices(jax.tree.leaves((args, kwargs))) > 1
    for name, part in [*enumerate(args), *sorted(kwargs.items())]:  # the order of a tree's leaves
        leaves = jax.tree.leaves(part)
        # JAX's tracers of derivatives hold the array and its tangent.
        differentiated = isinstance(part, Tracer) and hasattr(part, "tangent")
        doubtful = is_array(part) and not (differentiated and several)
        own = Origin(name, False, _matrices(leaves), False, doubtful)
        integers = Origin(name, is_data=True)
        found += [own if _is_floating(leaf) else integers for leaf in leaves]
    return found


def _matrices(leaves: Sequence[Any]) -> int:
    return sum(_is_floating(leaf) and leaf.ndim > 1 for leaf in leaves)


# ---------------------------------------------------------------- closures


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A place in a function's closure that holds an array, or a tree of arrays.

    Attributes:
      variable: its name; an object's attributes are variables, too.
      value: what is held there.
      alone: it is the whole variable.
      holder, key: the dictionary or the list that holds it, and where, or a cell; None where it
        cannot be replaced.
    """

    variable: str
    value: Any
    alone: bool
    holder: Any
    key: Any

    def put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value


class Closure:
    """The arrays that a function closes over, before it is called and after.

    A call may change it: Python objects that draw random numbers do. What it writes there while it
    is traced belongs to the trace. `take` returns these arrays, so that the trace has them among
    its results, and `put` writes the results' values in their places.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._before = _read(function)
        self._changed: list[tuple[Place, list[Any], Any]] = []

    def origins(self) -> Mapping[int, Origin]:
        """Returns what the arrays of the closure are parts of, by their ids."""
        variables: dict[str, list[Place]] = {}
        for place in self._before:
            variables.setdefault(place.variable, []).append(place)
        found: dict[int, Origin] = {}
        for name, held in variables.items():
            leaves = [x for place in held for x in jax.tree.leaves(place.value) if is_array(x)]
            alone = Origin(name, True, _matrices(leaves), True)
            tree = Origin(name, False, _matrices(leaves), True)
            within = [x for p in held if not p.alone for x in jax.tree.leaves(p.value)]
            found |= {id(x): alone for x in leaves if id(x) not in found}
            found |= {id(x): tree for x in within if _is_floating(x)}
        return found

    def take(self) -> list[Any]:
        """Returns the arrays of the present trace that the call has left in the closure."""
        before = {(id(p.holder), p.key): p.value for p in self._before}
        arrays: list[Any] = []
        for place in _read(self._function):
            old = before.get((id(place.holder), place.key))
            if place.holder is None or place.value is old:
                continue
            leaves, tree = jax.tree.flatten(place.value)
            mine = [*map(jax_private.is_of_this_trace, leaves)]
            if any(mine):
                arrays += [x for x, is_mine in zip(leaves, mine) if is_mine]
                rest = [None if is_mine else (x,) for x, is_mine in zip(leaves, mine)]
                self._changed.append((dataclasses.replace(place, value=None), rest, tree))
                place.put(old)
        return arrays

    def put(self, values: Sequence[Any]) -> None:
        """Writes the values of these arrays in their places."""
        given = iter(values)
        for place, rest, tree in self._changed:
            place.put(jax.tree.unflatten(tree, [x[0] if x else next(given) for x in rest]))


def _read(function: Callable[..., Any]) -> list[Place]:
    """Returns the places in a closure, as far as it can be read."""
    found = []
    with contextlib.suppress(Exception):  # objects whose attributes fail, say
        for place in _places(function):
            found.append(place)
    return found


class _Search:
    """The objects that have been seen on a walk through a closure."""

    def __init__(self):
        self.seen: set[int] = set()

    def enters(self, x: Any, depth: int) -> bool:
        if id(x) in self.seen or depth > DEEPEST or len(self.seen) > MOST:
            return False
        self.seen.add(id(x))
        return True


def _places(function: Any) -> Iterator[Place]:
    """Yields where the closure of a function holds arrays."""
    yield from _of_function(function, "", _Search(), 0)


def _of_function(function: Any, name: str, search: _Search, depth: int) -> Iterator[Place]:
    """Yields the places in a function's cells, globals, defaults and bound arguments."""
    if not search.enters(function, depth):
        return
    if callable(wrapped := getattr(function, "__wrapped__", None)):
        yield from _of_function(wrapped, name, search, depth)
    if isinstance(function, functools.partial):
        bound = [*enumerate(function.args), *function.keywords.items()]
        variables = [(str(key), value, None, None) for key, value in bound]
        inner = function.func
    elif isinstance(function, types.MethodType):
        variables, inner = [("self", function.__self__, None, None)], function.__func__
    elif isinstance(function, types.FunctionType):
        variables, inner = [*_variables(function)], None
    else:  # an object that can be called
        variables, inner = [(name or "self", function, None, None)], type(function).__call__
        search.seen.discard(id(function))
    for variable, value, holder, key in variables:
        yield from _of_value(value, variable, True, holder, key, search, depth + 1)
    if inner is not None:
        yield from _of_function(inner, name, search, depth + 1)


def _variables(function: types.FunctionType) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields (name, value, holder, key) of what a function in Python reads from outside."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents, cell, None
        except ValueError:  # nothing has been assigned to it yet
            continue
    library = code.co_filename.startswith(hidden_folders())  # its globals are no user's
    for name in () if library else _names(code):
        if name in function.__globals__:
            yield name, function.__globals__[name], function.__globals__, name
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield "a default", value, None, None


def _names(code: types.CodeType) -> dict[str, None]:
    """Returns the names that a function reads, those within the functions that it makes too."""
    names = dict.fromkeys(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names |= _names(each)
    return names


def _of_value(
    value: Any, variable: str, alone: bool, holder: Any, key: Any, search: _Search, depth: int
) -> Iterator[Place]:
    if is_array(value):
        yield Place(variable, value, alone, holder, key)
        return
    if isinstance(value, _WITHOUT_ARRAYS) or value is None:
        return
    if isinstance(value, _FUNCTIONS) or hasattr(value, "__wrapped__"):
        yield from _of_function(value, variable, search, depth)
    elif isinstance(value, dict | list):
        if search.enters(value, depth):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for each, x in list(items):
                yield from _of_value(x, variable, False, value, each, search, depth + 1)
    elif not jax.tree_util.all_leaves([value]):
        if search.enters(value, depth):
            yield Place(variable, value, False, holder, key)
    elif isinstance(own := getattr(value, "__dict__", None), MutableMapping):
        if search.enters(value, depth):
            for name, x in list(own.items()):
                yield from _of_value(x, f"{variable}.{name}", True, own, name, search, depth + 1)


_FUNCTIONS = types.FunctionType, types.MethodType, functools.partial
_WITHOUT_ARRAYS = str, bytes, int, float, complex, type, types.ModuleType, types.BuiltinFunctionType


# ---------------------------------------------------------------- functions that cannot be traced


def kind_of(function: Any) -> str:
    """Returns what a function is that runs only after its call, or ""."""
    while isinstance(function, functools.partial):
        function = function.func
    for each in (function, inspect.getattr_static(type(function), "__call__", None)):
        for name, test in _LATE.items():
            if test(each):
                return name
    return ""


_LATE: dict[str, Callable[[Any], bool]] = {
    "an async generator": inspect.isasyncgenfunction,
    "an async function": inspect.iscoroutinefunction,
    "a generator": inspect.isgeneratorfunction,
}


def runs_later(result: Any) -> bool:
    """Tells if a result computes its values only when it is asked for them."""
    return inspect.isgenerator(result) or inspect.isawaitable(result) or inspect.isasyncgen(result)
