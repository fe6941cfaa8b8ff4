"""`fuse` and `compare` of functions of Flax nnx models, with all that a call changes in them."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
from flax import nnx

from .compare import Comparison, compared
from .core.arguments import Quantization
from .fuse import fuse as fuse_arrays
from .fuse.fuse import check, marked, options_of

F = TypeVar("F", bound=Callable[..., Any])
_FUSING = "normfuse.fuse"  # Flax's context, in which modules find their way back


def fuse(
    function: F,
    *,
    quantization: Quantization = None,
    skip: Any = (),
    report: Callable[[Any], Any] | None = None,
    require: str | Iterable[str] = (),
) -> F:
    """`normfuse.fuse` of a function of nnx models, which may change them as in `nnx.jit`.

    Modules in arguments are split and merged, as `nnx.jit` does; those that the function closes
    over must not change.

    Args:
      function: a function of modules, and of pytrees of arrays and modules.
      quantization, skip, report, require: as for `normfuse.fuse`.

    Returns:
      A function of the same arguments, for `nnx.jit`, `nnx.grad` and the like.

    Raises: what `normfuse.fuse` does.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import fuse
    >>> model = nnx.RMSNorm(16, rngs=nnx.Rngs(0))
    >>> served = lambda report: print([row.served for row in report.fused])
    >>> apply = nnx.jit(fuse(lambda model, x: model(x), report=served))
    >>> apply(model, jnp.ones((2, 16))).shape
    ['rms_norm']
    (2, 16)
    """
    options = options_of("fuse", function, quantization, skip, report, require)._asdict()
    if isinstance(function, functools.partial):  # Flax treats it as what it is
        inner: Any = fuse(function.func, **options)
        return functools.partial(inner, *function.args, **function.keywords)  # pyright: ignore
    return _of_states(function, functools.partial(fuse_arrays, **options))


def compare(
    loss: Callable[..., Any], *arguments: Any, quantization: Quantization = None, skip: Any = ()
) -> Comparison:
    """`normfuse.compare` of a loss of nnx models, which it may change as in `nnx.jit`.

    The models themselves stay as they are: each trace gets copies.

    Args:
      loss, arguments, quantization, skip: as for `normfuse.compare`; the gradients are by all
        floating-point arrays in the arguments, running statistics among them.

    Returns:
      A `normfuse.Comparison`; `print` shows the table.

    Raises: what `normfuse.compare` does.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from normfuse.layers.nnx import compare
    >>> model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: jnp.mean(jnp.square(model(x) - x))
    >>> found = compare(loss, model, jnp.arange(32.0).reshape(4, 8))
    >>> [row.name for row in found.rows][:3], bool(model.mean[...].any())
    (['value', "d model['bias']", "d model['mean']"], False)
    """
    check("compare", loss, quantization, None)
    graph, state = nnx.split(arguments)

    def of_states(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loss)
        def call(*states: Any) -> Any:
            parts = {i: part for i, part in enumerate(states) if part is not None}
            return function(*nnx.merge(graph, type(state)(parts)))

        return call

    states = [state[i] if i in state else None for i in range(len(arguments))]
    fused = lambda _, **options: of_states(fuse(loss, **options))
    comparison = compared(of_states(loss), states, fused, quantization, skip)
    rename = lambda row: dataclasses.replace(row, name=row.name.removesuffix(".value"))
    return dataclasses.replace(comparison, rows=tuple(map(rename, comparison.rows)))


def _of_states(function: F, transform: Callable[[Any], Any]) -> F:
    """Applies a transformation of functions of arrays to one of nnx models."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with nnx.update_context(_FUSING):
            with nnx.split_context(_FUSING) as context:
                graph, state = context.split((args, kwargs))
            paths, tree = jax.tree.flatten_with_path(state)
            if any(hasattr(getattr(x, "aval", None), "inner_aval") for _, x in paths):  # Refs
                return transform(functools.partial(function, *args, **kwargs))()
            # The graph of arguments and results, after a call that changes or returns modules;
            # that of the results alone, where these are all new.
            graphs: list[Any] = []
            parts: dict[str, list[Any]] = {}  # the arrays of each argument
            order = []
            for path, leaf in paths:
                name = jax.tree_util.keystr(path[1:2])
                part = parts.setdefault(name, [])
                order.append((name, len(part)))
                part.append(leaf)

            @functools.wraps(function)
            def call(**parts: list[Any]) -> Any:
                leaves = [parts[part][i] for part, i in order]
                with nnx.merge_context(_FUSING, inner=True) as context:
                    args, kwargs = context.merge(graph, jax.tree.unflatten(tree, leaves))
                before = _held((args, kwargs))
                results = function(*args, **kwargs)
                (graph_after, leaves), nodes = _held((args, kwargs)), _nodes(results)
                same = before[0] == graph_after and all(map(operator.is_, before[1], leaves))
                if same and not nodes & _nodes((args, kwargs)):
                    with nnx.split_context(_FUSING) as context:  # it lets go of the modules
                        context.split(())
                    if not nodes:
                        return results
                    after, state = nnx.split(results)
                    graphs[:] = [after, "results"]
                    return state
                with nnx.split_context(_FUSING) as context:
                    after, state = context.split((args, kwargs, results))
                graphs[:] = [after]
                return state

            after = transform(call)(**parts)
            if not graphs:  # and nothing is written into modules, which may be another trace's
                return after
            if len(graphs) > 1:
                return nnx.merge(graphs[0], after)
            for _, node in nnx.iter_graph((args, kwargs)):  # an error within merge breaks modules
                if isinstance(node, nnx.Variable):
                    node.set_raw_value(node.get_raw_value())
            with nnx.merge_context(_FUSING, inner=False) as context:
                return context.merge(graphs[0], after)[2]

    return marked(run)  # pyright: ignore[reportReturnType]


def _held(modules: Any) -> tuple[Any, list[Any]]:
    """Returns the graph of modules and the arrays that they hold now."""
    graph, state = nnx.split(modules)
    return graph, jax.tree.leaves(state)


def _nodes(tree: Any) -> set[int]:
    """Returns the ids of the modules and Variables in a tree."""
    return {id(x) for _, x in nnx.iter_graph(tree) if isinstance(x, nnx.Pytree | nnx.Variable)}
