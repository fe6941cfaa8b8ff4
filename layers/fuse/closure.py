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
from typing import Any, NamedTuple

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
    return isinstance(x, jax.Array) or isinstance(x, np.ndarray) and x.dtype.kind not in "OSTUMm"


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


class Place(NamedTuple):
    """A place in a function's closure that holds an array, or a tree of arrays.

    Attributes:
      value: what is held there.
      variable: its name; an object's attributes are variables, too.
      alone: it is the whole variable.
      holder, key: the dictionary or the list that holds it, and where, or a cell; None where it
        cannot be replaced.
    """

    value: Any
    variable: str
    alone: bool = True
    holder: Any = None
    key: Any = None

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
                self._changed.append((place._replace(value=None), rest, tree))
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


def _places(function: Any) -> Iterator[Place]:
    """Yields where the closure of a function holds arrays."""
    seen: set[int] = set()
    stack = [(Place(type(function).__call__, "self"), 0), (Place(function, "self"), 0)]
    while stack:
        place, depth = stack.pop()
        value = place.value
        if is_array(value):
            yield place
            continue
        if isinstance(value, _WITHOUT_ARRAYS) or id(value) in seen:
            continue
        if depth > DEEPEST or len(seen) > MOST:
            continue
        seen.add(id(value))
        if (parts := _parts(value, place.variable)) is None:
            yield place._replace(alone=False)
        else:
            stack += [(part, depth + 1) for part in reversed(parts)]


def _parts(value: Any, variable: str) -> list[Place] | None:
    """Returns what an object holds; None of a tree of arrays."""
    if isinstance(value, functools.partial):
        bound = [*enumerate(value.args), *value.keywords.items(), (variable, value.func)]
        return [Place(x, str(name)) for name, x in bound]
    if isinstance(value, types.MethodType):
        return [Place(value.__self__, "self"), Place(value.__func__, "self")]
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [Place(x, variable, False, value, key) for key, x in items]
    if not jax.tree_util.all_leaves([value]):
        return None
    wrapped, own = getattr(value, "__wrapped__", None), getattr(value, "__dict__", None)
    parts = [Place(wrapped, variable)] if callable(wrapped) else []
    if isinstance(value, types.FunctionType):
        parts += _variables(value)
    elif isinstance(own, MutableMapping):
        parts += [Place(x, f"{variable}.{name}", True, own, name) for name, x in own.items()]
    return parts


def _variables(function: types.FunctionType) -> Iterator[Place]:
    """Yields what a function in Python reads from outside: cells, globals and defaults."""
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # nothing has been assigned to it yet
            yield Place(cell.cell_contents, name, True, cell)
    library = code.co_filename.startswith(hidden_folders())  # its globals are no user's
    own = function.__globals__
    for name in () if library else _names(code):
        if name in own:
            yield Place(own[name], name, True, own, name)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Place(value, "a default")


def _names(code: types.CodeType) -> dict[str, None]:
    """Returns the names that a function reads, those within the functions that it makes too."""
    names = dict.fromkeys(code.co_names)
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            names |= _names(each)
    return names


_WITHOUT_ARRAYS = (
    *(str, bytes, int, float, complex, type, types.NoneType),
    *(types.ModuleType, types.BuiltinFunctionType),
)


def runs_later(result: Any) -> bool:
    """Tells if a result computes its values only when it is asked for them."""
    return inspect.isgenerator(result) or inspect.isawaitable(result) or inspect.isasyncgen(result)
