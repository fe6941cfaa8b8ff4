"""Gradients summed over microbatches, without rounding, in the GEMMs that compute them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..native import jax_private
from ..native.dtypes import NARROW
from ..native.jaxpr import JIT, REMAT, evaluate, held_by_rules, results_of
from .dense.matmul import kernel_p

_OP = "accumulate_gradients"


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Any,
    *,
    state: Any = None,
    has_aux: bool = False,
    replicas: str | None = None,
    specs: Any = None,
) -> tuple[Any, Any]:
    """The mean of a loss and of its gradient over microbatches, one after the other.

    The result is that of `jax.lax.scan` over `jax.value_and_grad`, except that the kernels of
    normfuse's dense layers have float32 main gradients whatever their own dtype: a bfloat16
    kernel's gradient is the float32 output of its GEMM, never rounded on its way to the sum. On
    GPUs XLA makes the sum part of that GEMM (beta = 1), which updates the main gradient in place,
    without another array of a parameter's size. This is Megatron's gradient accumulation fusion,
    by differentiation alone: tied weights, remat, scans over layers and any framework's modules
    work as under `jax.grad`. Where a kernel cannot be followed to its layer (through a `cond`, or
    where a `custom_vjp` closes over values of the loss) or `loss_fn` differentiates the layer
    itself, the ordinary gradient is added to the sum.

    Args:
      loss_fn: `(params, batch) -> loss`, a scalar, or `-> (loss, aux)` with `has_aux`; the mean of
        its batch, if the result is to be the mean of all. With `state`, `(params, batch, state) ->
        (loss, state)` or `-> (loss, aux, state)`.
      params: a pytree whose floating and complex arrays are differentiated: plain arrays, Linen's
        "params", an Equinox module, or an nnx model's `nnx.state(model, nnx.Param)`.
      batches: a pytree of arrays with a leading axis of microbatches.
      state: a pytree of arrays that each microbatch takes and returns, of the same shapes and
        dtypes: Linen's other collections ("batch_stats"), Equinox's `State`, an nnx model's other
        Variables, a key for dropout.
      has_aux: whether `loss_fn` returns auxiliary outputs too.
      replicas: a mesh axis (Auto) that splits the second axis of `batches`, the rows, and no
        parameter: data parallelism. Each replica sums its own gradients, and they are added up once
        at the end, in one reduction for each parameter, not one for each microbatch. `loss_fn` sees
        the rows of one replica, so its own sharding constraints must not name this axis.
      specs: for each parameter, the PartitionSpec its gradient has on the mesh in context, without
        `replicas`; XLA's choice where None.

    Returns:
      `(loss, gradients)`; instead of the loss `(loss, aux)`, `(loss, state)` or `(loss, aux,
      state)`, as `loss_fn` returns them. Gradients have the structure of `params`, None for leaves
      that are no such arrays: also for Python numbers, which are settings of Equinox's modules
      (`jnp.asarray` makes one a parameter). aux is stacked along a leading axis of microbatches,
      and a second one of replicas where there are several; state is that after the last microbatch.

    Raises:
      ValueError: for batches without a leading axis of one length, rows that the replicas do not
        divide, a loss that is not a scalar, an axis that the mesh does not have as Auto, specs
        without the structure of `params`, a state with `replicas`, or params that hold nnx
        Variables other than Params, such as running statistics: their updates would be lost.
      TypeError: for specs that are not PartitionSpecs, or a state whose structure, shapes or dtypes
        every microbatch changes, which is JAX's own.

    References:
      Shoeybi et al., Megatron-LM, arXiv:1909.08053 (`gradient_accumulation_fusion`).

    >>> import jax.numpy as jnp
    >>> from normfuse import accumulate_gradients, dense
    >>> loss = lambda kernel, x: dense(x, kernel).sum()
    >>> kernel, batches = jnp.ones((2, 1), jnp.bfloat16), jnp.ones((4, 3, 2), jnp.bfloat16)
    >>> value, gradient = accumulate_gradients(loss, kernel, batches)
    >>> float(value), gradient.dtype, gradient.ravel().tolist()
    (6.0, dtype('float32'), [3.0, 3.0])
    """
    if not callable(loss_fn):
        raise TypeError(f"{_OP}: loss_fn must be a function, got {type(loss_fn).__name__}")
    _check_variables(params)
    if state is not None and replicas is not None:
        raise ValueError(f"{_OP}: each replica would change state by itself: leave one of them out")
    count = _microbatches(batches)
    held = [] if state is None else [jax.tree.map(jnp.asarray, state)]
    parts = 1 if replicas is None else _replicas(replicas, batches)
    leaves, structure = jax.tree.flatten(params)
    is_inexact = lambda a: hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.inexact)
    chosen = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]

    def whole_loss(floating: Sequence[Array], given: Any) -> tuple[Array, Any]:
        differentiated = dict(zip(chosen, floating))
        whole = [differentiated.get(i, leaf) for i, leaf in enumerate(leaves)]
        try:
            result = loss_fn(jax.tree.unflatten(structure, whole), *given)
        except Exception as error:
            shapes = [jnp.shape(a) for a in jax.tree.leaves(given[0])]
            error.add_note(
                f"{_OP}: loss_fn was given one of {count} microbatches, of shapes {shapes}: the "
                "first axis of batches must be of microbatches"
            )
            raise
        return _loss_aux_state(result, has_aux, given[1:])

    gradient = _gradient(whole_loss, [leaves[i] for i in chosen])
    split: Any = None if parts == 1 else replicas
    if split is not None:
        rows = lambda a: jnp.reshape(a, (count, parts, a.shape[1] // parts, *a.shape[2:]))
        batches = jax.tree.map(lambda a: _placed(rows(a), None, None, split), batches)
        gradient = jax.vmap(gradient, spmd_axis_name=split)
    listed = [None] * len(leaves) if specs is None else _specs_of(specs, structure)
    lead = () if split is None else (split,)

    def batch_at(i: Any) -> Any:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), batches)

    def placed(sums: Sequence[Array]) -> list[Array]:
        return [_placed(s, listed[i], *lead) for s, i in zip(sums, chosen)]

    def add(carry: Any, i: Any) -> tuple[Any, Any]:
        sums, held = carry
        loss, (aux, held), new = gradient((batch_at(i), *held))
        return (placed([s + g for s, g in zip(sums, new)]), held), (loss, aux)

    # The first gradients are the first sums: zeros to begin with would be written and read, and XLA
    # would fill one array and copy it to all of its shape.
    loss, (aux, held), sums = gradient((batch_at(0), *held))
    sums, outputs = placed(sums), jax.tree.map(lambda a: a[None], (loss, aux))
    if count > 1:
        (sums, held), more = lax.scan(add, (sums, held), jnp.arange(1, count))
        outputs = jax.tree.map(lambda *a: jnp.concatenate(a), outputs, more)
    losses, aux = outputs
    sums = sums if split is None else [s.sum(0) for s in sums]
    # The sums are divided, not the loss: a custom_vjp need not be linear in its cotangent.
    means = dict(zip(chosen, [s / (count * parts) for s in sums]))
    gradients = jax.tree.unflatten(structure, [means.get(i) for i in range(len(leaves))])
    results = (jnp.mean(losses), *([aux] if has_aux else []), *held)
    return (results if len(results) > 1 else results[0]), gradients


def _gradient(
    loss: Callable[..., Any], floating: list[Array]
) -> Callable[[Any], tuple[Array, Any, list[Array]]]:
    """Returns `batch -> (loss, aux, main gradients)` of one microbatch."""
    is_narrow = [jnp.result_type(a).name in NARROW for a in floating]
    zeros = [jnp.zeros(a.shape, jnp.float32) if n else None for a, n in zip(floating, is_narrow)]

    def linked_loss(floating: list[Array], zeros: list[Any], batch: Any) -> tuple[Array, Any]:
        program, shape = jax.make_jaxpr(loss, return_shape=True)(floating, batch)
        if any(isinstance(x, Tracer) for x in held_by_rules(program).values()):
            return loss(floating, batch)  # these have died with the trace
        linked = [a if z is None else _Kernel(a, z) for a, z in zip(floating, zeros)]
        results = _plain(evaluate(program, [*linked, *jax.tree.leaves(batch)], _step))
        return jax.tree.unflatten(jax.tree.structure(shape), map(jnp.asarray, results))

    def gradient(batch: Any) -> tuple[Array, Any, list[Array]]:
        grad = jax.value_and_grad(linked_loss, (0, 1), has_aux=True)
        (value, aux), (own, mains) = grad(floating, zeros, batch)
        return value, aux, [g if m is None else g.astype(m.dtype) + m for g, m in zip(own, mains)]

    return gradient


def _specs_of(specs: Any, structure: Any) -> list[P | None]:
    try:
        listed = structure.flatten_up_to(specs)
    except ValueError as error:
        raise ValueError(f"{_OP}: specs must have the structure of params: {error}") from None
    if others := [spec for spec in listed if not isinstance(spec, P | None)]:
        raise TypeError(
            f"{_OP}: specs must be a PartitionSpec or None for each parameter, got {others[0]!r}"
        )
    return listed


def _loss_aux_state(result: Any, has_aux: bool, held: Sequence[Any]) -> tuple[Array, Any]:
    """Returns the loss, and (auxiliary outputs, state), from the result of a loss function.

    Args:
      held: nothing, or the state that the function was given.
    """
    described = lambda a: f"shape {a.shape}" if hasattr(a, "shape") else f"a {type(a).__name__}"
    wanted = ["loss", *["aux"] * has_aux, *["state"] * len(held)]
    if len(wanted) > 1 and (not isinstance(result, tuple) or len(result) != len(wanted)):
        given = " and ".join(["has_aux"] * has_aux + ["state"] * len(held))
        raise ValueError(
            f"{_OP}: with {given} loss_fn must return ({', '.join(wanted)}), "
            f"got {described(result)}"
        )
    loss: Any
    loss, *rest = result if len(wanted) > 1 else (result,)
    if not jax.tree_util.all_leaves([loss]) or jnp.shape(loss):
        raise ValueError(
            f"{_OP}: loss_fn must return a scalar loss, got {described(loss)}; with auxiliary "
            "outputs (loss, aux), and has_aux=True"
        )
    return loss, (rest[0] if has_aux else (), rest[has_aux:])


def _check_variables(params: Any) -> None:
    """Raises a ValueError for nnx Variables that are not parameters.

    As parameters they would start every microbatch as they are, and get a gradient.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda a: isinstance(a, nnx.Variable))
    for path, leaf in leaves:
        if isinstance(leaf, nnx.Variable) and not isinstance(leaf, nnx.Param):
            raise ValueError(
                f"{_OP}: params{jax.tree_util.keystr(path)} is a {type(leaf).__name__}, which is "
                "no parameter and would not be updated; nnx.split(model, nnx.Param, ...) the "
                "model, and give the rest as state="
            )


def _placed(array: Array, spec: P | None, *lead: str | None) -> Array:
    """Returns the array with `lead` and `spec` for a sharding; the rest is XLA's choice if None."""
    if spec is None and not lead:
        return array
    rest = [P.UNCONSTRAINED] * (array.ndim - len(lead)) if spec is None else spec
    return lax.with_sharding_constraint(array, P(*lead, *rest))


def _microbatches(batches: Any) -> int:
    shapes = [jnp.shape(a) for a in jax.tree.leaves(batches)]
    lengths = {shape[0] if shape else -1 for shape in shapes}
    if lengths == {0}:
        raise ValueError(f"{_OP}: batches must hold a microbatch or more, got shapes {shapes}")
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError(
            f"{_OP}: batches must be arrays with one leading axis of microbatches, got shapes "
            f"{shapes}; reshape (batch, ...) to (microbatches, batch // microbatches, ...)"
        )
    return lengths.pop()


def _replicas(axis: str, batches: Any) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    if kinds.get(axis) != AxisType.Auto:
        raise ValueError(
            f"{_OP}: replicas must be an Auto axis of the mesh in context, got {axis!r} and "
            f"axes {tuple(kinds)}; call it under jax.set_mesh(mesh)"
        )
    parts = mesh.shape[axis]
    for array in jax.tree.leaves(batches):
        if array.ndim < 2 or array.shape[1] % parts:
            raise ValueError(
                f"{_OP}: the {parts} replicas must divide the rows, the second axis of batches; "
                f"got shape {array.shape}"
            )
    return parts


# ---------------------------------------------------------------- following kernels
# `kernel_p` stands in a program wherever a dense layer takes a narrow kernel. Such a kernel is
# followed there from a parameter: through transposes, reshapes and slices, and into functions that
# are jitted, rematerialised or scanned. It arrives with zeros, and the layer's product, which takes
# both, then has its derivative along the zeros alone (`matmul.asked`). The kernel's value stays as
# it is, so that whatever else the program computes with it (the products of a derivative that
# `loss_fn` took, say) adds to the kernel's own gradient, and so does a product whose kernel could
# not be followed: in a loop that carries it, a conditional, a function with its own derivative.

_FOLLOWED = (  # these only move elements of the first operand, whatever their dtype
    "copy",
    "dynamic_slice",
    "reshape",
    "reshard",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
)


class _Kernel(NamedTuple):
    """A parameter, or a part of one, on its way to `kernel_p`."""

    value: Array
    zeros: Array  # of its shape; their gradient is the kernel's main gradient


def _plain(operands: Sequence[Any]) -> list[Any]:
    return [a.value if isinstance(a, _Kernel) else a for a in operands]


def _step(eqn: Any, given: Sequence[Any]) -> list[Any]:
    """Returns the results of one operation."""
    if _Kernel not in map(type, given):
        return results_of(eqn, given)
    name = eqn.primitive.name
    if name in JIT:
        return evaluate(eqn.params["jaxpr"], given, _step)
    if name in REMAT and not (params := eqn.params)["differentiated"]:
        body = lambda given: _plain(evaluate(params["jaxpr"], given, _step))
        apart = params["prevent_cse"]  # for each operand, or all
        apart = any(apart) if isinstance(apart, tuple) else apart
        return jax.checkpoint(body, prevent_cse=apart, policy=params["policy"])(given)
    if name == "scan":
        return _scan(eqn, given)
    if isinstance(given[0], _Kernel):
        kernel, *others = given
        if eqn.primitive is kernel_p:
            return [*kernel]
        if name in _FOLLOWED:
            (value,), (zeros,) = (results_of(eqn, [array, *others]) for array in kernel)
            return [_Kernel(value, zeros)]
        if name == "name":  # remat keeps named values, and need not keep the zeros
            (value,) = results_of(eqn, [kernel.value])
            return [_Kernel(value, kernel.zeros)]
    return results_of(eqn, _plain(given))


def _scan(eqn: Any, given: Sequence[Any]) -> list[Array]:
    """Kernels among constants and slices are followed, those that are carried are not."""
    params = eqn.params
    first, carries = jax_private.scan_counts(params, len(given))
    constants, sliced = given[:first], given[first + carries :]

    def step(carry: list[Array], slices: Sequence[Any]) -> tuple[list[Array], list[Array]]:
        results = _plain(evaluate(params["jaxpr"], [*constants, *carry, *slices], _step))
        return results[:carries], results[carries:]

    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(step, _plain(given[first : first + carries]), sliced, **options)
    return [*carry, *stacked]
