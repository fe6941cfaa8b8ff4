"""Walking through jaxprs: an equation's operands and results, and the programs within it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """Returns a literal's own value, or that of a variable."""
    return atom.val if hasattr(atom, "val") else values[atom]


def results_of(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Returns the results of an equation on these operands, as a list also where it has one."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


KERNELS = "ffi_call", "pallas_call", "custom_partitioning"
"""Equations that call what was compiled for their operands' dtypes."""


def inner(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                yield one
