"""`accumulate_gradients` of Flax nnx models, with everything that a call changes in them."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from . import accumulate

_OP = "nnx.accumulate_gradients"
_ACCUMULATING = "normfuse_accumulate"  # Flax's name for the transformation
_PARAMETER = "a parameter: leave it out of wrt"
_REPLICAS = "which each replica would change by itself: leave replicas out"
Path = tuple[Any, ...]


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    model: Any,
    batches: Any,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    replicas: str | None = None,
    specs: Any = None,
) -> tuple[Any, Any]:
    """`normfuse.accumulate_gradients` of an nnx model: `nnx.value_and_grad` over microbatches.

    It computes the same as a Python loop over microbatches with `nnx.value_and_grad`, as one scan
    with float32 sums. Each microbatch starts from the state that the one before left: dropout draws
    another mask for each, and BatchNorm's statistics move with each. The model has the last state
    afterwards. `loss_fn` returns as aux what it sows (`nnx.pop`).

    Args:
      loss_fn: `(model, batch) -> loss`, or `-> (loss, aux)` with `has_aux`; it may change the model
        as under `nnx.value_and_grad`, except for the parameters.
      model: a module, or a pytree of modules.
      batches: a pytree of arrays with a leading axis of microbatches.
      wrt: a filter: the Variables that are differentiated.
      has_aux, replicas, specs: as for `normfuse.accumulate_gradients`; specs with
        the structure of `nnx.state(model, wrt)`. With `replicas` nothing else in the model may
        change, since each replica would change it by itself.

    Returns:
      `(loss, gradients)`, or `((loss, aux), gradients)`; gradients are an `nnx.State`, which
      `nnx.Optimizer.update` takes.

    Raises:
      TypeError, ValueError: those of `normfuse.accumulate_gradients`.
      ValueError: where `loss_fn` changes a parameter; where it changes a Variable's shape or dtype,
        or adds one; where it changes any Variable with `replicas`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import accumulate_gradients
    >>> model = nnx.BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    >>> loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
    >>> loss, gradients = accumulate_gradients(loss_fn, model, jnp.ones((3, 4, 2)))
    >>> model.mean[...].tolist(), gradients["scale"][...].dtype
    ([0.875, 0.875], dtype('float32'))
    """
    if not callable(loss_fn):
        raise TypeError(f"{_OP}: loss_fn must be a function, got {type(loss_fn).__name__}")
    with nnx.update_context(_ACCUMULATING):
        with nnx.split_context(_ACCUMULATING) as context:
            graph, params, rest = context.split(model, wrt, ...)
        leaves, structure = jax.tree.flatten(params)
        others = dict(nnx.to_flat_state(rest))
        given = _values(others)
        after: list[Any] = []  # the model's graph and Variables after a microbatch, once traced

        def loss_of_arrays(leaves: list[Array], batch: Any, *held: list[Any]) -> tuple[Any, ...]:
            own = jax.tree.unflatten(structure, leaves)
            before = dict(zip(given, held[0])) if held else given
            with nnx.merge_context(_ACCUMULATING, inner=True) as context:
                copy = context.merge(graph, own, _state(others, before))
            loss, (aux, _) = accumulate.loss_aux_state(loss_fn(copy, batch), has_aux)
            with nnx.split_context(_ACCUMULATING) as context:
                graph_after, own_after, rest = context.split(copy, wrt, ...)
            _check_unchanged(own, own_after, _PARAMETER)
            if not held:
                _check_unchanged(_state(others, before), rest, _REPLICAS)
            variables = dict(nnx.to_flat_state(rest))
            values = _values(variables)
            after[:] = [graph_after, variables]
            for path, value in values.items():
                _check_kind(path, before.get(path), value)
            state = [values.get(path, value) for path, value in before.items()]
            return loss, aux, *([state] if held else [])

        (loss, aux, *held), gradients = accumulate.accumulate_gradients(
            loss_of_arrays,
            leaves,
            batches,
            state=None if replicas else [*given.values()],
            has_aux=True,
            replicas=replicas,
            specs=None if specs is None else accumulate.specs_of(specs, structure),
        )
        values = dict(zip(given, held[0])) if held else dict(given)
        with nnx.merge_context(_ACCUMULATING, inner=False) as context:
            context.merge(after[0], params, _state(after[1], values))
    return ((loss, aux) if has_aux else loss), jax.tree.unflatten(structure, gradients)


def _values(variables: Mapping[Path, nnx.Variable]) -> dict[Path, Any]:
    return {path: variable.get_raw_value() for path, variable in variables.items()}


def _state(variables: Mapping[Path, nnx.Variable], values: Mapping[Path, Any]) -> nnx.State:
    """Returns the Variables with other values."""
    return nnx.from_flat_state([(path, v.replace(values[path])) for path, v in variables.items()])


def _check_unchanged(before: nnx.State, after: nnx.State, why: str) -> None:
    """Raises a ValueError if a trace replaces a Variable or its value."""
    old, new = (_values(dict(nnx.to_flat_state(state))) for state in (before, after))
    for path in old | new:
        pairs = [jax.tree.leaves(values.get(path)) for values in (old, new)]
        if list(map(id, pairs[0])) != list(map(id, pairs[1])):
            raise ValueError(f"{_OP}: loss_fn changes {_name(path)}, {why}")


def _check_kind(path: Path, before: Any, after: Any) -> None:
    """Raises a ValueError if a carried value has another structure, shape or dtype, or is new."""
    kind = lambda value: jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), value)
    if before is None or kind(after) != kind(before):
        was = "new" if before is None else f"{jax.tree.map(jnp.shape, before)} before"
        raise ValueError(
            f"{_OP}: loss_fn must leave every Variable's shape and dtype; {_name(path)} is {was}, "
            f"{jax.tree.map(jnp.shape, after)} after: create it before, or take it out in loss_fn "
            "(nnx.pop) and return it as aux"
        )


def _name(path: Path) -> str:
    return ".".join(map(str, path))
