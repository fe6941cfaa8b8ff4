"""Gradients summed over microbatches, without rounding, in the GEMMs that compute them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..native.dtypes import NARROW
from ..native.jaxpr import inner, results_of, value_of
from .dense.matmul import kernel_p

_OP = "accumulate_gradients"
_MAIN = ("float32", "bfloat16", "float16")
Link = Array | None


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Any,
    *,
    main_grad_dtype: jax.typing.DTypeLike = jnp.float32,
    has_aux: bool = False,
    replicas: str | None = None,
    specs: Any = None,
) -> tuple[Any, Any]:
    """The mean of a loss and of its gradient over microbatches, one after the other.

    What `jax.lax.scan` over `jax.value_and_grad` computes, but that the kernels of normfuse's dense
    layers keep float32 main gradients whatever their own dtype: a bfloat16 kernel's gradient is the
    float32 output of its GEMM, and is never rounded on its way to the sum. On GPUs XLA makes the
    sum part of that GEMM (beta = 1), which then updates the main gradient in place; so nothing of a
    parameter's size is written and read between. Megatron's gradient accumulation fusion, by
    differentiation alone: tied weights, remat, scans over layers and any framework's modules work
    as they do under `jax.grad`, and where a kernel cannot be followed to its layer (through a
    `cond`, say) its gradient is the ordinary one.

    Args:
      loss_fn: `(params, batch) -> loss`, a scalar, or `-> (loss, aux)` with `has_aux`; the mean of
        its batch, if the result is to be the mean of all.
      params: a pytree whose floating leaves are differentiated: of plain arrays, of Flax's (`nnx`:
        `nnx.state(model, nnx.Param)`, merged in `loss_fn`), or an Equinox module.
      batches: a pytree of arrays with a leading axis of microbatches.
      main_grad_dtype: of the gradients: float32, bfloat16 or float16; a wider parameter's stay in
        its own dtype. The sums run in it.
      has_aux: whether `loss_fn` returns auxiliary outputs too.
      replicas: a mesh axis (Auto) that splits the second axis of `batches`, the rows, and no
        parameter: data parallelism. Each replica sums its own gradients, and they are added up once
        at the end, in one reduction for each parameter, not one for each microbatch. `loss_fn` sees
        the rows of one replica, so its own sharding constraints must not name this axis.
      specs: for each parameter, the PartitionSpec its gradient has on the mesh in context, without
        `replicas`; XLA's choice where None.

    Returns:
      `(loss, gradients)`, or `((loss, aux), gradients)`. Gradients have the structure of `params`,
      None for leaves that are not floating. aux is stacked along a leading axis of microbatches,
      and a second one of replicas where there are several.

    Raises:
      ValueError: for batches without a leading axis of one length, rows that the replicas do not
        divide, a loss that is not a scalar, or an axis that the mesh does not have as Auto.
      TypeError: for another main_grad_dtype.

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
    main = jnp.dtype(main_grad_dtype)
    if main.name not in _MAIN:
        main_dtypes = ", ".join(_MAIN)
        raise TypeError(f"{_OP}: main_grad_dtype must be one of {main_dtypes}, got {main.name}")
    count = _microbatches(batches)
    parts = 1 if replicas is None else _replicas(replicas, batches)
    leaves, structure = jax.tree.flatten(params)
    chosen = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
    of_all = count * parts
    # Halving is exact, so the loss may be divided instead of what is as large as the parameters;
    # but not in float16, where gradients are small enough to lose bits.
    halves = of_all & (of_all - 1) == 0
    divided: set[int] = set()  # what the loss was divided by, once it has been traced

    def share(program: Any) -> int:
        divisor = of_all if halves and not uses(program, jnp.float16) else 1
        divided.add(divisor)
        return divisor

    def whole_loss(floating: Sequence[Array], batch: Any) -> tuple[Array, Any]:
        given = dict(zip(chosen, floating))
        whole = [given.get(i, leaf) for i, leaf in enumerate(leaves)]
        return _loss_and_aux(loss_fn(jax.tree.unflatten(structure, whole), batch), has_aux)

    gradient = _gradient(whole_loss, [leaves[i] for i in chosen], main, share)
    split: Any = None if parts == 1 else replicas
    if split is not None:
        rows = lambda a: jnp.reshape(a, (count, parts, a.shape[1] // parts, *a.shape[2:]))
        batches = jax.tree.map(lambda a: _placed(rows(a), None, None, split), batches)
        gradient = jax.vmap(gradient, spmd_axis_name=split)
    listed = [None] * len(leaves) if specs is None else structure.flatten_up_to(specs)
    lead = () if split is None else (split,)

    def microbatch(i: Any) -> tuple[Array, Any, list[Array]]:
        take = lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False)
        return gradient(jax.tree.map(take, batches))

    def placed(sums: Sequence[Array]) -> list[Array]:
        return [_placed(s, listed[i], *lead) for s, i in zip(sums, chosen)]

    def add(sums: list[Array], i: Any) -> tuple[list[Array], Any]:
        *outputs, new = microbatch(i)
        return placed([s + g for s, g in zip(sums, new)]), outputs

    # The first gradients are the first sums: zeros to begin with would be written and read, and XLA
    # would fill one array and copy it to all of its shape.
    *outputs, sums = microbatch(0)
    sums, outputs = placed(sums), jax.tree.map(lambda a: a[None], outputs)
    if count > 1:
        sums, more = lax.scan(add, sums, jnp.arange(1, count))
        outputs = jax.tree.map(lambda *a: jnp.concatenate(a), outputs, more)
    losses, aux = outputs
    (divisor,) = divided
    sums = sums if split is None else [s.sum(0) for s in sums]
    means = dict(zip(chosen, sums if divisor == of_all else [s / of_all for s in sums]))
    gradients = jax.tree.unflatten(structure, [means.get(i) for i in range(len(leaves))])
    loss = jnp.mean(losses)
    return ((loss, aux) if has_aux else loss), gradients


def _gradient(
    loss: Callable[..., Any], floating: list[Array], main: jnp.dtype, share: Callable[[Any], int]
) -> Callable[[Any], tuple[Array, Any, list[Array]]]:
    """Returns `batch -> (loss, aux, main gradients)` of one microbatch.

    `share` says of the traced loss what the gradients are divided by.
    """
    is_narrow = [jnp.result_type(a).name in NARROW for a in floating]
    zeros = [jnp.zeros(a.shape, jnp.float32) if n else None for a, n in zip(floating, is_narrow)]
    # wider parameters keep their own dtype
    narrowed = lambda gradient: gradient if gradient.dtype == jnp.float64 else gradient.astype(main)

    def linked_loss(floating: list[Array], zeros: list[Link], batch: Any) -> tuple[Array, Any]:
        program, shape = jax.make_jaxpr(loss, return_shape=True)(floating, batch)
        operands = jax.tree.leaves((floating, batch))
        links = [*zeros, *[None] * (len(operands) - len(zeros))]
        results, _ = run_linked(program, operands, links)
        value, aux = jax.tree.unflatten(jax.tree.structure(shape), map(jnp.asarray, results))
        return value * jnp.asarray(1 / share(program.jaxpr), value.dtype), (value, aux)

    def gradient(batch: Any) -> tuple[Array, Any, list[Array]]:
        grad = jax.value_and_grad(linked_loss, (0, 1), has_aux=True)
        (_, (value, aux)), (own, mains) = grad(floating, zeros, batch)
        pairs = [(narrowed(g), m) for g, m in zip(own, mains)]
        return value, aux, [g if m is None else g + narrowed(m) for g, m in pairs]

    return gradient


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Array, Any]:
    """Returns the loss and the auxiliary outputs of what a loss function returned."""
    described = lambda a: f"shape {a.shape}" if hasattr(a, "shape") else f"a {type(a).__name__}"
    if has_aux and (not isinstance(result, tuple) or len(result) != 2):
        raise ValueError(
            f"{_OP}: with has_aux loss_fn must return (loss, aux), got {described(result)}"
        )
    loss: Any
    loss, aux = result if has_aux else (result, ())
    if not jax.tree_util.all_leaves([loss]) or jnp.shape(loss):
        raise ValueError(
            f"{_OP}: loss_fn must return a scalar loss, got {described(loss)}; with auxiliary "
            "outputs (loss, aux), and has_aux=True"
        )
    return loss, aux


def _placed(array: Array, spec: P | None, *lead: str | None) -> Array:
    """Returns the array with `lead` and `spec` for a sharding; the rest is XLA's choice if None."""
    if spec is None and not lead:
        return array
    rest = [P.UNCONSTRAINED] * (array.ndim - len(lead)) if spec is None else spec
    return lax.with_sharding_constraint(array, P(*lead, *rest))


def _microbatches(batches: Any) -> int:
    shapes = [jnp.shape(a) for a in jax.tree.leaves(batches)]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) != 1 or 0 in lengths:
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


def _is_floating(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


# ---------------------------------------------------------------- following kernels
# `kernel_p` stands in a program wherever a dense layer multiplies with a narrow kernel. Such a
# kernel is followed from a parameter to its products: through transposes, reshapes and slices, and
# into functions that are jitted, rematerialised or scanned. Where it cannot be followed (loops that
# carry it, conditionals, functions with derivatives of their own) the product runs as it is, and
# the gradient is the kernel's own, rounded.

_FOLLOWED = (  # of the first operand's elements, whatever their dtype
    "copy",
    "dynamic_slice",
    "reshape",
    "reshard",
    "sharding_constraint",
    "slice",
    "squeeze",
    "transpose",
)


def uses(jaxpr: Any, dtype: jax.typing.DTypeLike) -> bool:
    """Whether anything that a program takes or computes, or a part of it does, has this dtype."""
    has = lambda var: getattr(var.aval, "dtype", None) == dtype
    return any(map(has, jaxpr.invars)) or any(
        any(map(has, eqn.outvars)) or any(uses(program, dtype) for program in inner(eqn))
        for eqn in jaxpr.eqns
    )


def run_linked(
    jaxpr: Any, operands: Sequence[Array], links: Sequence[Link]
) -> tuple[list[Array], list[Link]]:
    """Evaluates a jaxpr with constants (`jax.make_jaxpr`'s result, or a `jit`'s).

    Args:
      operands: for its arguments.
      links: for each, zeros of its shape that are to have its main gradient, or None.
    Returns: its results, and the zeros that belong to them where they are parameters still.
    """
    return _run(jaxpr.jaxpr, jaxpr.consts, operands, links)


def _run(
    jaxpr: Any, consts: Sequence[Any], operands: Sequence[Array], links: Sequence[Link]
) -> tuple[list[Array], list[Link]]:
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    linked: dict[Any, Link] = dict(zip(jaxpr.invars, links, strict=True))
    values |= zip(jaxpr.invars, operands, strict=True)
    link_of = lambda atom: None if hasattr(atom, "val") else linked.get(atom)
    for eqn in jaxpr.eqns:
        given = [value_of(v, values) for v in eqn.invars]
        with eqn.ctx.manager:
            results, more = _step(eqn, given, [link_of(v) for v in eqn.invars])
        values |= zip(eqn.outvars, results, strict=True)
        linked |= zip(eqn.outvars, more, strict=True)
    return [value_of(v, values) for v in jaxpr.outvars], [link_of(v) for v in jaxpr.outvars]


def _step(eqn: Any, given: list[Array], zeros: list[Link]) -> tuple[list[Any], list[Link]]:
    """Returns the results of one operation, and their links."""
    name = eqn.primitive.name
    unlinked: list[Link] = [None] * len(eqn.outvars)
    if all(z is None for z in zeros):
        return results_of(eqn, given), unlinked
    if eqn.primitive is kernel_p:
        return [lax.stop_gradient(given[0]), zeros[0]], unlinked
    if name in _FOLLOWED and zeros[0] is not None:
        return results_of(eqn, given), results_of(eqn, [zeros[0], *given[1:]])
    if name == "name":  # of what remat keeps: not the zeros
        return results_of(eqn, given), zeros
    if name in ("jit", "pjit"):
        return run_linked(eqn.params["jaxpr"], given, zeros)
    if name in ("remat2", "checkpoint"):
        return _checkpoint(eqn, given, zeros), unlinked
    if name == "scan":
        return _scan(eqn, given, zeros), unlinked
    return results_of(eqn, given), unlinked


def _checkpoint(eqn: Any, given: list[Array], zeros: list[Link]) -> list[Array]:
    jaxpr = eqn.params["jaxpr"]
    body = lambda given, zeros: _run(jaxpr, getattr(jaxpr, "consts", ()), given, zeros)[0]
    options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **options)(given, zeros)


def _scan(eqn: Any, given: list[Array], zeros: list[Link]) -> list[Array]:
    """Constants and slices stay linked; what is carried is not."""
    body = eqn.params["jaxpr"]
    within = body.jaxpr
    ndim = lambda atom: len(atom.aval.shape)
    is_sliced = [ndim(v) > ndim(w) for v, w in zip(eqn.invars, within.invars, strict=True)]
    carries = sum(ndim(v) == ndim(w) for v, w in zip(eqn.outvars, within.outvars, strict=True))
    sliced = len(is_sliced) - sum(is_sliced)  # where they begin
    first = sliced - carries

    def step(carry, slices):
        operands = [*given[:first], *carry, *slices[0]]
        links = [*zeros[:first], *[None] * carries, *slices[1]]
        results, _ = run_linked(body, operands, links)
        return results[:carries], results[carries:]

    options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
    slices = (given[sliced:], zeros[sliced:])
    carry, stacked = lax.scan(step, given[first:sliced], slices, **options)
    return [*carry, *stacked]
