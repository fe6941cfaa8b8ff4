"""One equation of a jaxpr, for what walks through them: its operands' values, and its results."""

from collections.abc import Mapping, Sequence
from typing import Any


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """A literal's own value, or that of a variable."""
    return atom.val if hasattr(atom, "val") else values[atom]


def results_of(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """What an equation gives of these operands, as a list also where it is one result."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]
