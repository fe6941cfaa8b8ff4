"""Walking through jaxprs: an equation's operands, results and line, and the programs within it."""

import contextlib
import functools
import gc
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax
from jax.core import Trace

JIT = "jit", "pjit"
REMAT = "remat2", "checkpoint"
"""The names of an equation that calls a jitted function, and a rematerialised one."""


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """Returns a literal's own value, or that of a variable."""
    return atom.val if hasattr(atom, "val") else values[atom]


def results_of(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation on these operands, as a list even of one."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def evaluate(
    program: Any,
    operands: Sequence[Any],
    rule: Callable[[Any, list[Any]], Sequence[Any]],
    in_place: bool = False,
) -> list[Any]:
    """Evaluates a jaxpr, with constants (`jax.make_jaxpr`'s result, or a `jit`'s) or without.

    Args:
      operands: for its arguments: arrays, or whatever else `rule` takes.
      rule: `(equation, operands) -> results`; `results_of` evaluates it as it is.
      in_place: on the mesh of the caller, not on that where each equation was traced.
    """
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    for eqn in jaxpr.eqns:
        read = [value_of(v, values) for v in eqn.invars]
        with contextlib.nullcontext() if in_place else eqn.ctx.manager:
            values |= zip(eqn.outvars, rule(eqn, read), strict=True)
    return [value_of(v, values) for v in jaxpr.outvars]


KERNELS = "ffi_call", "pallas_call", "custom_partitioning"
"""Equations that call code compiled for their operands' dtypes."""


def bodies(eqn: Any) -> Iterator[tuple[str, int, Any]]:
    """Yields (parameter, place, program) of the programs among an equation's parameters.

    A program is a closed jaxpr where the parameter has its constants, else a jaxpr.
    """
    for key, value in eqn.params.items():
        for i, one in enumerate(value if isinstance(value, tuple | list) else (value,)):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield key, i, one


def inner(eqn: Any) -> Iterator[Any]:
    for _, _, body in bodies(eqn):
        yield getattr(body, "jaxpr", body)


def held_by_rules(program: Any) -> dict[int, Any]:
    """Returns what rules of derivatives in a program hold, by their ids.

    That is all that they close over, and of objects the attributes that the rules' code names: a
    module that a rule closes over for a number of its own holds many arrays that no rule reads.
    """
    stack, found = [*_rules(getattr(program, "jaxpr", program))], {}
    names, objects = set(), []
    named = lambda: [own[name] for own in objects for name in names & own.keys()]
    while stack := stack or [x for x in named() if id(x) not in found]:
        part = stack.pop()
        kind = type(part)
        if id(part) in found or kind is dict and not part.keys().isdisjoint(_OF_MODULES):
            continue
        found[id(part)] = part
        if kind is FunctionType:
            names |= names_in(part.__code__).keys()
        if issubclass(kind, Trace):
            stack += [x for x in gc.get_referents(part) if isinstance(x, Trace)]
        elif kind.__module__.startswith(_WITHOUT_NAMES) and not issubclass(kind, _APART):
            stack += filter(gc.is_tracked, gc.get_referents(part))
        elif kind is not ModuleType and type(own := getattr(part, "__dict__", None)) is dict:
            objects.append(own)
    return found


_OF_MODULES = "__builtins__", "__build_class__"
_WITHOUT_NAMES = "builtins", "functools", "jax"
"""Modules of containers and of functions: all that these hold is looked at."""
_APART = ModuleType, type


def names_in(code: CodeType) -> dict[str, None]:
    """Returns the names that a function reads, those within the functions that it makes too."""
    names = dict.fromkeys(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            names |= names_in(each)
    return names


def _rules(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            yield from (value for value in eqn.params.values() if not hasattr(value, "jaxpr"))
        for body in inner(eqn):
            yield from _rules(body)


def rebuilt(
    eqn: Any,
    operands: list[Any],
    runs: Mapping[tuple[str, int], Callable[[Sequence[Any]], list[Any]]],
) -> list[Any]:
    """Returns the results of an equation, some of whose bodies other functions compute.

    `runs` has these by parameter and place, as `bodies` names them.
    """
    if not runs:
        return results_of(eqn, operands)
    name, params = eqn.primitive.name, dict(eqn.params)
    if name == "shard_map":
        options = {key: params[key] for key in ("mesh", "check_vma")}
        options |= {key: tuple(params[key]) for key in ("in_specs", "out_specs")}
        options |= {"axis_names": set(params["newly_manual_axes"])}
        (run,) = runs.values()
        return list(jax.shard_map(lambda *args: tuple(run(args)), **options)(*operands))
    if name in REMAT and not params["differentiated"]:
        options = {key: params[key] for key in ("prevent_cse", "policy")}
        (run,) = runs.values()
        return jax.checkpoint(lambda *args: run(args), **options)(*operands)
    for key, i, body in bodies(eqn):
        if (key, i) not in runs:
            continue
        types = [v.aval for v in getattr(body, "jaxpr", body).invars]
        again = jax.make_jaxpr(lambda *args, run=runs[key, i]: run(args))(*types)
        again = again if hasattr(body, "consts") else again.jaxpr
        one = params[key]
        params[key] = (*one[:i], again, *one[i + 1 :]) if isinstance(one, tuple) else again
    return results_of(eqn.replace(params=params), operands)


def line_of(*eqns: Any) -> str:
    """Returns the innermost line that is neither JAX's, nor a framework's, nor normfuse's, of the
    first equation that has one."""
    hidden = hidden_folders()
    tracebacks = [getattr(eqn.source_info, "traceback", None) for eqn in eqns]
    for frame in (frame for t in tracebacks if t is not None for frame in t.frames):
        if not frame.file_name.startswith(hidden):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return "an unknown line"


def hidden_folders() -> tuple[str, ...]:
    """Returns the folders whose lines are no user's: JAX, the frameworks, and this package."""
    names = "jax", "flax", "equinox", "haliax", "haiku", "jaxtyping", "optax"
    return _folders(*[getattr(sys.modules.get(name), "__file__", None) for name in names])


@functools.cache
def _folders(*files: str | None) -> tuple[str, ...]:
    native = os.path.dirname(__file__)
    layers = os.path.join(os.path.dirname(native), "layers")
    folders = [os.path.dirname(file) for file in files if file]
    standard = sysconfig.get_path("stdlib")
    library = [os.path.join(standard, name) for name in ("functools.py", "contextlib.py")]
    return ("<frozen", layers, native, *folders, *library)
