"""A call of a user's function: its trace, its results, and what it leaves in Python objects."""

import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...native import jax_private
from .closure import Closure, Origin, attributes, is_array, origins_of
from .leaks import Leaks


class Call:
    """A call that has been traced, and of which nothing has run.

    Attributes:
      arrays: those among the arguments.
      program: the traced program of these arrays.
      is_lost: a rule of a derivative keeps a value of the program, so that it cannot run later.

    Raises: what the function raises.
      ValueError: for a change of an object that would be lost.
    """

    def __init__(self, function: Any, args: Any, kwargs: Any):
        self._call = function, args, kwargs
        self._leaves, self._tree = jax.tree.flatten((args, kwargs))
        self._are_arrays = [*map(is_array, self._leaves)]
        self.arrays = [leaf for leaf, is_a in zip(self._leaves, self._are_arrays) if is_a]
        self._trace: Any = None
        raised: list[BaseException] = []

        def call(tracers: list[Any]) -> list[Any]:
            try:
                with jax_private.checking_leaks(checked):
                    return self._traced(tracers)
            except BaseException as error:
                raised.append(error)
                return []

        with jax_private.checking_leaks(False) as checked:
            closed = jax.make_jaxpr(call)(self.arrays)
        self._leaks = Leaks(closed, self._trace)
        self.program = self._leaks.program
        self.is_lost = self._leaks.in_rules and not raised
        if self._leaks.refused and not raised and not self.is_lost:
            error = (
                f"fuse: {self._leaks.refused} keeps an array that the function has computed. fuse "
                "traces the function, and cannot put the numbers there later: return them, or keep "
                "them in a variable, a list, a dictionary or an attribute"
            )
            self.leave()
            raise ValueError(error)
        if raised:
            self.leave(effects=True)
            raise raised.pop()

    def _traced(self, tracers: Sequence[Any]) -> list[Any]:
        """Calls the function; returns the results that its program computes.

        Others are objects that it was given or had, and are returned as they are.
        """
        self._trace = jax_private.present_trace()
        own = dict(zip(map(id, tracers), self.arrays, strict=True))
        given = iter(tracers)
        whole = [next(given) if is_a else x for x, is_a in zip(self._leaves, self._are_arrays)]
        args, kwargs = jax.tree.unflatten(self._tree, whole)
        objects = _objects((args, kwargs))
        results = self._call[0](*args, **kwargs)
        later = inspect.isgenerator, inspect.isawaitable, inspect.isasyncgen
        if any(is_one(results) for is_one in later):
            getattr(results, "close", int)()
            raise TypeError(
                "fuse: function must compute its results while it is called, got one that "
                f"returns {results!r}"
            )
        results, structure = jax.tree.flatten(results)
        _check_kept(objects, results)
        computed = [id(x) not in own and jax_private.is_of(self._trace(), x) for x in results]
        # The results that the program does not compute, in a tuple each; and the tree of all.
        static = [None if one else (own.get(id(x), x),) for x, one in zip(results, computed)]
        self._results = static, structure
        return [x for x, one in zip(results, computed) if one]

    def origins(self) -> tuple[list[Origin], Closure]:
        """Returns the origins of the arrays, and those of what the function closes over."""
        (function, args, kwargs), consts = self._call, self.program.consts
        of_leaves = zip(origins_of(args, kwargs, consts), self._are_arrays)
        return [origin for origin, is_a in of_leaves if is_a], Closure(function, consts)

    def whole(self, values: Sequence[Any]) -> Any:
        """Returns the function's results, given the program's; objects get what they keep."""
        values = [*map(_array, values, self.program.out_avals)]
        count = len(values) - len(self._leaks)
        self._leaks.put(values[count:])
        computed, (static, structure) = iter(values[:count]), self._results
        return jax.tree.unflatten(structure, [x[0] if x else next(computed) for x in static])

    def leave(self, effects: bool = False) -> None:
        """Lets objects have what they keep after an error, where it can be computed."""
        with contextlib.suppress(Exception):
            self._leaks.put_alone(self.arrays, effects)


def _array(y: Any, aval: Any) -> Any:
    """Returns a result that is a number in the program as an array."""
    if isinstance(y, jax.Array):
        return y
    return jnp.asarray(np.asarray(y).item()) if aval.weak_type else jnp.asarray(y, aval.dtype)


_Objects = list[tuple[Any, list[Any]]]


def _objects(args: Any) -> _Objects:
    """Returns the objects in arguments that are no mere containers, and what they hold."""
    is_object = lambda node: not isinstance(node, dict | list | tuple)
    objects = jax.tree.leaves(args, is_leaf=is_object)
    return [(o, held) for o in objects if (held := _held(o)) and held[0] is not o]


def _held(one: Any) -> list[Any]:
    """Returns the leaves of an object; its attributes, where each flattening makes new leaves."""
    leaves = jax.tree.leaves(one)
    if all(a is b for a, b in zip(leaves, jax.tree.leaves(one))):
        return leaves
    return [value for _, value, _ in attributes(one)]


def _check_kept(objects: _Objects, results: Sequence[Any]) -> None:
    """Raises an error where a call has changed objects, and does not return the changes."""
    returned = {id(x) for x in results}
    for one, before in objects:
        held = {id(x) for x in before} | returned
        after = _held(one)
        if len(after) < len(before) or any(is_array(x) and id(x) not in held for x in after):
            raise ValueError(
                f"fuse: the function changes arrays in a {type(one).__name__} in its arguments, "
                "and the changes would be lost; return them, or use normfuse.layers.nnx.fuse for "
                "nnx models"
            )
