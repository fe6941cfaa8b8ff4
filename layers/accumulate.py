"""Gradients summed over microbatches, without rounding, in the GEMMs that compute them."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ..native import jax_private
from ..native.dtypes import NARROW
from ..native.jaxpr import JIT, REMAT, inner, name_of, params_of, results_of, value_of
from .dense.matmul import kernel_p
from .quantization.quantize import kernel_codes_saveable

_OP = "accumulate_gradients"
_MAIN = ("float32", "bfloat16", "float16")
Link = Array | None
Codes = dict[tuple[int, ...], list[Array]]  # by the places of their equations, the outermost first


def accumulate_gradients(
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Any,
    *,
    main_grad_dtype: jax.typing.DTypeLike = jnp.float32,
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
    work as under `jax.grad`. A kernel that cannot be followed to its layer (through a `cond`, say)
    gets its ordinary gradient.

    With `quantization="fp8"` kernels are quantized once, before the first microbatch, except those
    within a `cond`, a `while_loop` or a `shard_map` of `loss_fn`: these in each microbatch.

    Args:
      loss_fn: `(params, batch) -> loss`, a scalar, or `-> (loss, aux)` with `has_aux`; the mean of
        its batch, if the result is to be the mean of all. With `state`, `(params, batch, state) ->
        (loss, state)` or `-> (loss, aux, state)`.
      params: a pytree whose floating arrays are differentiated: plain arrays, Linen's "params", or
        an Equinox module. nnx models have `normfuse.layers.nnx.accumulate_gradients`.
      batches: a pytree of arrays with a leading axis of microbatches.
      state: a pytree of arrays that each microbatch takes and returns, of the same shapes and
        dtypes: Linen's other collections ("batch_stats"), Equinox's `State`, a key for dropout.
      main_grad_dtype: the dtype of gradients and their sums: float32, bfloat16 or float16; a wider
        parameter's gradient keeps that parameter's dtype.
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
      that are not floating arrays: also for Python numbers, which are settings of Equinox's modules
      (`jnp.asarray` makes one a parameter). aux is stacked along a leading axis of microbatches,
      and a second one of replicas where there are several; state is that after the last microbatch.

    Raises:
      ValueError: for batches without a leading axis of one length, rows that the replicas do not
        divide, a loss that is not a scalar, an axis that the mesh does not have as Auto, specs
        without the structure of `params`, a state that `loss_fn` returns with another structure,
        shape or dtype, a state with `replicas`, or params that hold nnx Variables other than
        Params, such as running statistics: their updates would be lost.
      TypeError: for another main_grad_dtype, or specs that are not PartitionSpecs.

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
    main = _main_dtype(main_grad_dtype)
    count = _microbatches(batches)
    held = [] if state is None else [jax.tree.map(jnp.asarray, state)]
    parts = 1 if replicas is None else _replicas(replicas, batches)
    leaves, structure = jax.tree.flatten(params)
    is_floating = lambda a: hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jnp.floating)
    chosen = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]
    of_all = count * parts
    # Halving is exact, so the loss is divided rather than gradients as large as the parameters; but
    # not in float16, where gradients are small enough to lose bits.
    halves = of_all & (of_all - 1) == 0
    divided: set[int] = set()  # the loss's divisors, filled in by its trace

    def share(program: Any) -> int:
        divisor = of_all if halves and not uses(program, jnp.float16) else 1
        divided.add(divisor)
        return divisor

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
        return loss_aux_state(result, has_aux, given[1:])

    gradient = _gradient(whole_loss, [leaves[i] for i in chosen], main, share)
    split: Any = None if parts == 1 else replicas
    if split is not None:
        rows = lambda a: jnp.reshape(a, (count, parts, a.shape[1] // parts, *a.shape[2:]))
        batches = jax.tree.map(lambda a: _placed(rows(a), None, None, split), batches)
        gradient = jax.vmap(gradient, spmd_axis_name=split)
    listed = [None] * len(leaves) if specs is None else specs_of(specs, structure)
    lead = () if split is None else (split,)

    def batch_at(i: Any) -> Any:
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), batches)

    first = (batch_at(0), *held)
    gradient = _with_codes_once(gradient, first)

    def placed(sums: Sequence[Array]) -> list[Array]:
        return [_placed(s, listed[i], *lead) for s, i in zip(sums, chosen)]

    def add(carry: Any, i: Any) -> tuple[Any, Any]:
        sums, held = carry
        loss, (aux, held), new = gradient((batch_at(i), *held))
        return (placed([s + g for s, g in zip(sums, new)]), held), (loss, aux)

    # The first gradients are the first sums: zeros to begin with would be written and read, and XLA
    # would fill one array and copy it to all of its shape.
    loss, (aux, held), sums = gradient(first)
    sums, outputs = placed(sums), jax.tree.map(lambda a: a[None], (loss, aux))
    if count > 1:
        (sums, held), more = lax.scan(add, (sums, held), jnp.arange(1, count))
        outputs = jax.tree.map(lambda *a: jnp.concatenate(a), outputs, more)
    losses, aux = outputs
    (divisor,) = divided
    sums = sums if split is None else [s.sum(0) for s in sums]
    means = dict(zip(chosen, sums if divisor == of_all else [s / of_all for s in sums]))
    gradients = jax.tree.unflatten(structure, [means.get(i) for i in range(len(leaves))])
    results = (jnp.mean(losses), *([aux] if has_aux else []), *held)
    return (results if len(results) > 1 else results[0]), gradients


def _gradient(
    loss: Callable[..., Any], floating: list[Array], main: jnp.dtype, share: Callable[[Any], int]
) -> Callable[[Any], tuple[Array, Any, list[Array]]]:
    """Returns `batch -> (loss, aux, main gradients)` of one microbatch.

    `share` returns the divisor of the gradients for a traced loss.
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


def _main_dtype(given: jax.typing.DTypeLike) -> jnp.dtype:
    try:
        main = jnp.dtype(given)
    except TypeError:
        main = given
    if not isinstance(main, jnp.dtype) or main.name not in _MAIN:
        raise TypeError(f"{_OP}: main_grad_dtype must be one of {', '.join(_MAIN)}, got {main}")
    return main


def specs_of(specs: Any, structure: Any) -> list[P | None]:
    try:
        listed = structure.flatten_up_to(specs)
    except ValueError as error:
        raise ValueError(f"{_OP}: specs must have the structure of params: {error}") from None
    if others := [spec for spec in listed if not isinstance(spec, P | None)]:
        raise TypeError(
            f"{_OP}: specs must be a PartitionSpec or None for each parameter, got {others[0]!r}"
        )
    return listed


def loss_aux_state(result: Any, has_aux: bool, held: Sequence[Any] = ()) -> tuple[Array, Any]:
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
    state = rest[has_aux:]
    was, now = _kinds(held), _kinds(state)
    changes = [
        f"{path} from {was.get(path, 'nothing')} to {now.get(path, 'nothing')}"
        for path in was | now
        if was.get(path) != now.get(path)
    ]
    if changes or jax.tree.structure(state) != jax.tree.structure(list(held)):
        raise ValueError(
            f"{_OP}: loss_fn must return state with the structure, shapes and dtypes it was given, "
            f"but changes {(changes or ['its containers'])[0]}"
        )
    return loss, (rest[0] if has_aux else (), state)


def _kinds(held: Sequence[Any]) -> dict[str, str]:
    """Returns the dtype and shape of each array in a state, by its path."""
    kind = lambda a: f"{jnp.result_type(a)}{list(jnp.shape(a))}"
    keys = jax.tree_util.keystr
    return {keys(path[1:]): kind(a) for path, a in jax.tree.leaves_with_path(held)}


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
                "no parameter and would not be updated; the function for nnx models carries it "
                "from one microbatch to the next: "
                "normfuse.layers.nnx.accumulate_gradients(loss_fn, model, batches)"
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
# `kernel_p` stands in a program wherever a dense layer multiplies with a narrow kernel. Such a
# kernel is followed from a parameter to its products: through transposes, reshapes and slices, and
# into functions that are jitted, rematerialised or scanned. Where it cannot be followed (loops that
# carry it, conditionals, functions with derivatives of their own) the product runs as it is, and
# the gradient is the kernel's own, rounded.

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


def uses(jaxpr: Any, dtype: jax.typing.DTypeLike) -> bool:
    """Whether a program, or a part of it, takes or computes an array of this dtype."""
    has = lambda var: getattr(var.aval, "dtype", None) == dtype
    return any(map(has, jaxpr.invars)) or any(
        any(map(has, eqn.outvars)) or any(uses(program, dtype) for program in inner(eqn))
        for eqn in jaxpr.eqns
    )


def run_linked(
    program: Any, operands: Sequence[Array], links: Sequence[Link]
) -> tuple[list[Array], list[Link]]:
    """Evaluates a jaxpr, with constants (`jax.make_jaxpr`'s result, or a `jit`'s) or without.

    Args:
      operands: for its arguments.
      links: for each, zeros of its shape that get its main gradient, or None.
    Returns: its results, and the zeros of those that are still parameters.
    """
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
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
    name = name_of(eqn)
    unlinked: list[Link] = [None] * len(eqn.outvars)
    if all(z is None for z in zeros):
        return results_of(eqn, given), unlinked
    if eqn.primitive is kernel_p:
        return [lax.stop_gradient(given[0]), zeros[0]], unlinked
    if name in _FOLLOWED and zeros[0] is not None:
        return results_of(eqn, given), results_of(eqn, [zeros[0], *given[1:]])
    if name == "name":  # remat keeps named values, and need not keep the zeros
        return results_of(eqn, given), zeros
    if name in JIT:
        return run_linked(eqn.params["jaxpr"], given, zeros)
    if name in REMAT:
        body = lambda given, zeros: run_linked(params_of(eqn)["jaxpr"], given, zeros)[0]
        return jax.checkpoint(body, **_options_of_remat(eqn))(given, zeros), unlinked
    if name == "scan":
        return _scan(eqn, given, zeros), unlinked
    return results_of(eqn, given), unlinked


def _options_of_remat(eqn: Any) -> dict[str, Any]:
    params = params_of(eqn)
    apart = params["prevent_cse"]  # for each operand, or all
    apart = any(apart) if isinstance(apart, tuple) else apart
    return {"prevent_cse": apart, "policy": params["policy"]}


def _scan(eqn: Any, given: list[Array], zeros: list[Link]) -> list[Array]:
    """Constants and slices stay linked; the carry does not."""
    body = eqn.params["jaxpr"]
    first, sliced = _operands_of_scan(eqn)
    carries = sliced - first

    def step(carry, slices):
        operands = [*given[:first], *carry, *slices[0]]
        links = [*zeros[:first], *[None] * carries, *slices[1]]
        results, _ = run_linked(body, operands, links)
        return results[:carries], results[carries:]

    slices = (given[sliced:], zeros[sliced:])
    carry, stacked = lax.scan(step, given[first:sliced], slices, **_options_of_scan(eqn))
    return [*carry, *stacked]


def _operands_of_scan(eqn: Any) -> tuple[int, int]:
    """Returns the places where a scan's carried operands begin, and its sliced ones."""
    first, carries = jax_private.scan_counts(eqn.params, len(eqn.invars))
    return first, first + carries


def _options_of_scan(eqn: Any) -> dict[str, Any]:
    return {key: eqn.params[key] for key in ("length", "reverse", "unroll")}


# ---------------------------------------------------------------- codes of kernels, once a step
# The equations that quantize kernels in the program of one microbatch are evaluated before the loop
# if they depend on parameters alone; the program then takes these codes. The same holds within
# functions that are jitted, rematerialised (which would quantize once more) or scanned (a scan of
# their own makes their codes, stacked as the kernels are).

_CALLS = (*JIT, "custom_jvp_call")  # evaluated as if they were part of the program


def _with_codes_once(gradient: Callable[[Any], Any], batch: Any) -> Callable[[Any], Any]:
    """Returns the same function of batches like `batch`, all of which share codes of kernels."""
    program, shapes = jax.make_jaxpr(gradient, return_shape=True)(batch)
    codes = {}
    if _quantizes(program.jaxpr):
        codes = _codes(program.jaxpr, dict(zip(program.jaxpr.constvars, program.consts)))

    def run(batch: Any) -> Any:
        results = _run_with(program.jaxpr, program.consts, jax.tree.leaves(batch), codes)
        like = jax.tree.leaves(shapes)
        results = [jnp.asarray(r, s.dtype) for r, s in zip(results, like, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _makes_codes(eqn: Any) -> bool:
    return kernel_codes_saveable(eqn.primitive, **eqn.params)


def _quantizes(jaxpr: Any) -> bool:
    """Whether kernels are quantized in a program, or in a part of it."""
    return any(_makes_codes(eqn) or any(map(_quantizes, inner(eqn))) for eqn in jaxpr.eqns)


def _body(eqn: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the program of a call, and its constants."""
    params = params_of(eqn)
    body = params["call_jaxpr" if "call_jaxpr" in params else "jaxpr"]
    return getattr(body, "jaxpr", body), getattr(body, "consts", ())


def _codes(jaxpr: Any, values: dict[Any, Any]) -> Codes:
    """Evaluates the equations that depend on `values` alone; returns the codes of kernels."""
    found: Codes = {}
    for i, eqn in enumerate(jaxpr.eqns):
        known = [hasattr(v, "val") or v in values for v in eqn.invars]
        given = [value_of(v, values) if k else None for v, k in zip(eqn.invars, known)]
        if eqn.primitive.name == "optimization_barrier":  # around what JAX_REMAT3 computes again
            values |= {v: g for v, g, k in zip(eqn.outvars, given, known, strict=True) if k}
            continue
        with eqn.ctx.manager:
            within = _codes_within(eqn, given, known)
            found |= {(i, *path): codes for path, codes in within.items()}
            if all(known) and not eqn.effects:
                results = within[()] if _makes_codes(eqn) else results_of(eqn, given)
                values |= zip(eqn.outvars, results, strict=True)
    return found


def _codes_within(eqn: Any, given: list[Any], known: list[bool]) -> Codes:
    """Returns the codes that one operation makes, those of a scan behind 0 (of all) or 1 (each)."""
    if _makes_codes(eqn):
        return {(): results_of(eqn, given)} if all(known) else {}
    name = name_of(eqn)
    if name not in (*_CALLS, *REMAT, "scan") or not any(map(_quantizes, inner(eqn))):
        return {}
    body, consts = _body(eqn)
    values = dict(zip(body.constvars, consts, strict=True))
    operands = [(v, g) for v, g, k in zip(body.invars, given, known, strict=True) if k]
    if name != "scan":
        return _codes(body, values | dict(operands))
    first, sliced = _operands_of_scan(eqn)
    values |= {v: g for v, g in operands if v in body.invars[:first]}
    slices = [(v, g) for v, g in operands if v in body.invars[sliced:]]
    of_all = _codes(body, dict(values))

    def step(_: None, slices: Sequence[Array]) -> tuple[None, Codes]:
        each = _codes(body, values | dict(zip(names, slices)))
        return None, {path: codes for path, codes in each.items() if path not in of_all}

    names = [v for v, _ in slices]
    _, each = lax.scan(step, None, [g for _, g in slices], length=eqn.params["length"])
    return {(0, *p): codes for p, codes in of_all.items()} | {(1, *p): c for p, c in each.items()}


def _run_with(
    jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any], codes: Codes
) -> list[Any]:
    """Evaluates a jaxpr without the equations that made these codes."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= zip(jaxpr.invars, operands, strict=True)
    for i, eqn in enumerate(jaxpr.eqns):
        given = [value_of(v, values) for v in eqn.invars]
        with eqn.ctx.manager:
            values |= zip(eqn.outvars, _step_with(eqn, given, _behind(codes, i)), strict=True)
    return [value_of(v, values) for v in jaxpr.outvars]


def _behind(codes: Codes, place: int) -> Codes:
    return {path[1:]: found for path, found in codes.items() if path[0] == place}


def _step_with(eqn: Any, given: list[Any], codes: Codes) -> list[Any]:
    if not codes:
        return results_of(eqn, given)
    if () in codes:
        return codes[()]
    if eqn.primitive.name == "scan":
        return _scan_with(eqn, given, codes)
    body, consts = _body(eqn)
    if name_of(eqn) in _CALLS:
        return _run_with(body, consts, given, codes)
    run = lambda *operands: _run_with(body, operands[0], *operands[1:])
    operands = consts, given, codes
    if not params_of(eqn)["differentiated"]:
        return jax.checkpoint(run, **_options_of_remat(eqn))(*operands)
    # Not `jax.checkpoint`, because this one has been differentiated.
    again = jax.make_jaxpr(run)(*operands)
    params = {**eqn.params, "jaxpr": again.jaxpr if body is eqn.params["jaxpr"] else again}
    return eqn.primitive.bind(*jax.tree.leaves(operands), **params)


def _scan_with(eqn: Any, given: list[Any], codes: Codes) -> list[Any]:
    """Stacked codes are sliced like kernels, and not stacked again where they are results."""
    body, consts = _body(eqn)
    first, sliced = _operands_of_scan(eqn)
    carries = sliced - first
    of_all, stacked = _behind(codes, 0), _behind(codes, 1)
    kept: dict[int, Array] = {}  # results that are codes

    def step(carry: list[Any], slices: Any) -> tuple[list[Any], list[Any]]:
        each: Codes = slices[1]
        operands = [*given[:first], *carry, *slices[0]]
        results = _run_with(body, consts, operands, of_all | each)
        places = {id(code): (path, i) for path in each for i, code in enumerate(each[path])}
        kept.clear()
        for i, result in enumerate(results[carries:]):
            if id(result) in places:
                path, j = places[id(result)]
                kept[i] = stacked[path][j]
        others = [r for i, r in enumerate(results[carries:]) if i not in kept]
        return results[:carries], others

    slices = (given[sliced:], stacked)
    carry, more = lax.scan(step, given[first:sliced], slices, **_options_of_scan(eqn))
    others = iter(more)
    count = len(eqn.outvars) - carries
    return [*carry, *(kept[i] if i in kept else next(others) for i in range(count))]
