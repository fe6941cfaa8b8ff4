"""An operation on global arrays that behaves like JAX's own in every context.

Two tiers. A `Kernel` of `normfuse.native` is one device's share. An `Op` is the whole: it owns the
types, batching and differentiation, and chooses how the devices share it where it is lowered:

- one device, or shard_map over every axis: the body, on the arrays as they are;
- Explicit axes: shard_map, split as the types say;
- Auto axes: custom_partitioning, split as XLA's partitioner decides;
- a mesh that is partly manual, or an export for several devices: the definition.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ...native import jax_private
from ...native.implementation import BEST, PLAIN, Order, report
from ...native.kernel import Body, bound, lower, result_types
from .sharding import Dimensions, Dims, Loose, axes_of, name_callback, shared_by, whole

Results = list[Array]
Leads = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Split:
    """How an operation is split over a mesh: for each of its dimensions the mesh axes, and the
    global size."""

    axes: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]

    def over(self, dims: Sequence[int]) -> tuple[str, ...]:
        """Returns the mesh axes that split `dims`."""
        return tuple(name for d in dims for name in self.axes[d])

    def psum(self, value: Array, dims: Sequence[int]) -> Array:
        """Returns the sum over the devices that split `dims`; no collective if none do."""
        names = self.over(dims)
        return jax.lax.psum(value, names) if names else value

    def pmax(self, value: Array, dims: Sequence[int]) -> Array:
        """Returns the maximum over the devices that split `dims`; no collective if none do."""
        names = self.over(dims)
        return jax.lax.pmax(value, names) if names else value

    def count(self, dims: Sequence[int]) -> int:
        """Returns how many elements `dims` have over all devices."""
        return math.prod(self.shape[d] for d in dims)

    def spec(self, dims: Sequence[int]) -> P:
        return P(*[(self.axes[d] if d < len(self.axes) else ()) or None for d in dims])


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the devices of a mesh share an operation."""

    # `(spec, *ndims) -> (operands' dimensions, results' dimensions)`, for operands of `ndims`
    # dimensions, None for one that is not there. A result that is not there has None. Dimensions
    # are numbered: first those of the first leading operand, then what a second one adds.
    # Parameters' are `Loose`.
    dims: Callable[..., Dims]
    # `(spec, split, *operands, order) -> list`: one device's share, on kernels, of a first lead
    # that is not empty; None for an operation that is plain HLO everywhere, as a tangent.
    body: Body | None = None
    # The leading operands, one or two; their shardings decide. The first has all rows.
    leads: Leads | Callable[[Any], Leads] = (0,)
    # `(spec, *ndims) -> dimensions` that no device has a part of: what is stored so is gathered.
    undivided: Callable[..., Dimensions] | None = None
    # How devices share an operation that is plain HLO, on Auto axes, instead of XLA's own
    # partitioning: `(spec, sizes of mesh axes, operands' and results' shapes, PartitionSpecs) ->
    # (these specs as they must be, one device's function)`.
    share: Callable[..., tuple[list[P], Callable[..., Results]]] | None = None

    def __post_init__(self):
        object.__setattr__(self, "dims", functools.lru_cache(maxsize=1024)(self.dims))

    def leads_of(self, spec: Any) -> Leads:
        return self.leads(spec) if callable(self.leads) else self.leads

    def dims_of(self, spec: Any, operands: Sequence[Any]) -> Dims:
        return self.dims(spec, *[None if a is None else a.ndim for a in operands])


@dataclasses.dataclass(frozen=True)
class Batching:
    """How vmap batches an operation: by one more dimension of rows, if its placement has rows."""

    # `(spec, at) -> spec` for a first operand with one more dimension of rows, at `at`.
    spec: Callable[[Any, int], Any] = lambda spec, at: spec
    # A rule in place of the general one, `(op, operands, batched, spec, order)`.
    rule: Callable[..., Any] | None = None
    # `(spec, *operands, order) -> list`, the values of the definition by operations that batch
    # well, for a parameter or a gradient of one that has a batch dimension.
    unfused: Body | None = None


@dataclasses.dataclass(frozen=True)
class Derivative:
    """An operation's derivative, where it is not its definition's by JAX."""

    # `(primals, tangents, spec, order) -> (results, tangents)`.
    jvp: Callable[..., Any] | None = None
    # `(cotangents, *operands, spec, order)`, of an operation that is linear.
    transpose: Callable[..., Any] | None = None
    # The definition's own transpose serves, for an operation that is linear in what is transposed,
    # as a backward is in its cotangents.
    linear: bool = False
    # The differentiable results in plain JAX, if tangents are not of the definition.
    formula: Body | None = None
    # `(spec, operands, tangents, order) -> tangents` of the results, if not of a formula.
    tangent: Callable[..., Results] | None = None


@dataclasses.dataclass(eq=False)
class Op:
    """An operation on global arrays, in functions of its `spec`.

    Its functions take operands by their names, None for those that a call does not have, and return
    None for results that are not there; the primitive binds those that are there. `spec` is
    hashable, and all that is known when the operation is traced; that of an operation with
    a body or `before` has the function the user called, for errors, as its `op`.

    Attributes:
      name: the primitive is `normfuse_<name>`.
      definition: the operation in plain JAX, `(spec, *operands) -> list of arrays`; None for the
        body's, of whole arrays, with definitions in place of its kernels.
      placement: how devices share it; None where XLA partitions its definition.
      batching: its rules under `vmap`.
      derivative: its rules for tangents and for what is linear in an operand.
      types: `(spec, *operands' types) -> the results' types`, or None where the definition has to
        say; only an optimization.
      before: `(ctx, spec, order) -> order`, when it is lowered.
      without_last: `spec -> spec` of the same operation without its last result, for a program that
        does not use it; None where that result is not computed anyway.
    """

    name: str
    definition: Body | None
    placement: Placement | None = None
    batching: Batching = Batching()
    derivative: Derivative = Derivative()
    _: dataclasses.KW_ONLY
    types: Callable[..., Sequence[Any] | None] | None = None
    before: Callable[[Any, Any, Order], Order] | None = None
    without_last: Callable[[Any], Any] | None = None

    def __post_init__(self):
        self.primitive = p = Primitive(f"normfuse_{self.name}")
        p.multiple_results = True
        p.def_abstract_eval(self._abstract_eval)
        _compile_when_eager(p)
        jax_private.needs_devices.add(p)
        mlir.register_lowering(p, self._lower)
        batching.primitive_batchers[p] = self._batch
        ad.primitive_jvps[p] = self._jvp
        if self.derivative.transpose or self.derivative.linear:
            ad.primitive_transposes[p] = self._transpose
        if self.without_last:
            on_unused_results(p, functools.partial(_drop_last, self.without_last))

    def __call__(self, spec: Any, *operands: Array | None, order: Order = BEST) -> list[Any]:
        flat, tree = jax.tree.flatten(operands)
        results = self.primitive.bind(*flat, spec=spec, order=order, tree=tree)
        return self._filled(spec, operands, results)

    def _filled(self, spec: Any, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns results in their places, None in those that are empty."""
        if self.placement is None:
            return list(results)
        outputs = self.placement.dims_of(spec, operands)[1]
        return in_places(results, [dims is not None for dims in outputs])

    def plain(self, spec: Any, *operands: Array | None) -> list[Any]:
        """Returns the definition's results."""
        if self.definition is None:
            assert self.placement is not None and self.placement.body is not None
            inputs, leads = self.placement.dims_of(spec, operands)[0], self.placement.leads_of(spec)
            split = _split(inputs, leads, operands)
            return list(self.placement.body(spec, split, *operands, order=PLAIN))
        return list(self.definition(spec, *operands))

    def _abstract_eval(self, *flat: Any, spec: Any, order: Order, tree: Any) -> list[Any]:
        del order
        operands, at = tree.unflatten(flat), self.placement
        types = self.types(spec, *operands) if self.types else None
        if types and at is None:
            return list(types)
        if at is None or at.share is not None and types is None:
            return jax.make_jaxpr(bound(self.plain, spec, tree=tree))(*flat).out_avals
        if types is None:
            of = tuple([None if a is None else (a.shape, a.dtype) for a in operands])
            types = result_types(self.plain, spec, of)
        inputs, outputs = at.dims_of(spec, operands)
        leads, entries = at.leads_of(spec), {}
        for lead in reversed(leads):  # the first decides
            entries |= zip(inputs[lead], operands[lead].sharding.spec)
        like = operands[leads[0]]
        mesh, avals = like.sharding.mesh, []
        for type_, dims in zip(types, outputs, strict=True):
            if type_ is not None:
                spec = P(*[entries.get(d) for d in dims])
                of = {"shape": type_.shape, "dtype": type_.dtype, "weak_type": False}
                avals.append(like.update(**of, sharding=NamedSharding(mesh, spec)))
        return avals

    def _lower(self, ctx: Any, *values: Any, spec: Any, order: Order, tree: Any) -> Any:
        avals, at = tree.unflatten(ctx.avals_in), self.placement
        leads = (0,) if at is None else at.leads_of(spec)
        first, where = avals[leads[0]], where_lowered(ctx, avals[leads[0]])
        if self.before is not None:
            order = self.before(ctx, spec, order)
        plain = bound(self.definition or self.plain, spec, tree=tree)
        lower_as = lambda fn: mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
        by_partitioner = functools.partial(self._by_partitioner, ctx, values, spec, order, avals)
        mixed = first.sharding.mesh.explicit_axes  # and Auto ones
        if at is not None and at.share is not None and where == _Where() and not mixed:
            share = functools.partial(at.share, spec)
            every = range(len(values) + len(ctx.avals_out))
            return by_partitioner(plain, share, every, at.dims_of(spec, avals))
        if at is None or at.body is None:
            return lower_as(plain)
        if where.plain:
            report(spec.op, where.plain, strict=order.strict, names=order.names)
            return lower_as(plain)
        body = functools.partial(at.body, order=order)
        # The last dimension of two leads is summed: results without it are not empty.
        is_empty = 0 in first.shape[: first.ndim - (len(leads) > 1)]
        on = lambda split: plain if is_empty else bound(body, spec, split, tree=tree)
        inputs, outputs = at.dims_of(spec, avals)
        unsplit = _split(inputs, leads, avals)
        if where.single:
            return lower(on(unsplit), ctx, *values)
        undivided: Dimensions = ()
        if at.undivided is not None:
            undivided = at.undivided(spec, *[avals[lead].ndim for lead in leads])
        split_as = functools.partial(_split, inputs, leads, avals, undivided=undivided)
        dims = _there(inputs, avals), _there(outputs, outputs)
        if where.explicit:
            mesh, specs = first.sharding.mesh, [avals[lead].sharding.spec for lead in leads]
            split = split_as(specs, dict(mesh.shape))
            return lower_as(_mapped(on(split), mesh, split, dims, where.explicit))

        def share(sizes: Any, shapes: Any, specs: Sequence[P]) -> Any:
            del shapes
            split = split_as(specs, sizes)
            return [split.spec(d) for d in (*dims[0], *dims[1])], on(split)

        flat = [len(_there(avals[:lead], avals)) for lead in leads]
        return by_partitioner(on(unsplit), share, flat, dims)

    def _by_partitioner(
        self,
        ctx: Any,
        values: Sequence[Any],
        spec: Any,
        order: Order,
        avals: Sequence[Any],
        whole: Any,
        share: Any,
        deciding: Sequence[int],
        dims: Dims,
    ) -> Any:
        """Lowers a call that XLA's partitioner splits as `share` says; see `shared_by`."""
        context = ctx.module_context.axis_context
        is_mesh = hasattr(context, "mesh")
        devices = context.mesh.devices.flat if is_mesh else context.device_assignment
        shared = shared_by(whole, share, deciding, dims, devices)
        results = mlir.lower_fun(shared, multiple_results=True)(ctx, *values)
        # Calls of one name share a callback: it has everything that this depends on.
        machine = [d.id for d in devices], ctx.module_context.platforms, jax.config.jax_enable_x64
        shapes = [a and a.str_short() for a in avals]
        name_callback(results, f"{self.name}{(spec, order, dims)}{shapes}{machine}")
        return results

    def _batch(
        self, flat: Any, batched: Any, *, spec: Any, order: Order, tree: Any
    ) -> tuple[Results, list[Any]]:
        args, dims = tree.unflatten(flat), tree.unflatten(batched)
        rule = functools.partial(self.batching.rule, self) if self.batching.rule else self._by_rows
        results, dims = rule(args, dims, spec=spec, order=order)
        pairs = [pair for pair in zip(results, dims) if pair[0] is not None]
        return [r for r, _ in pairs], [d for _, d in pairs]

    def _by_rows(
        self, args: Sequence[Any], batched: Sequence[int | None], *, spec: Any, order: Order
    ) -> tuple[list[Any], list[Any]]:
        """A batch dimension becomes a dimension of rows, at its place in the lead."""
        size = next(a.shape[b] for a, b in zip(args, batched) if b is not None)
        if self.placement and (joined := self._joined(self.placement, args, batched, spec, size)):
            spec, moved, dims = joined
            return self(spec, *moved, order=order), dims
        one = functools.partial(self.plain, spec)
        if self.batching.unfused is not None:
            one = functools.partial(self.batching.unfused, spec, order=order)
        results = jax.vmap(one, tuple(batched), axis_size=size)(*args)
        return list(results), [0] * len(results)

    def _joined(
        self,
        placement: Placement,
        args: Sequence[Any],
        batched: Sequence[int | None],
        spec: Any,
        size: int,
    ) -> tuple[Any, list[Any], list[int]] | None:
        """Returns the call with a batch dimension among its rows: its spec, operands, and the place
        of that dimension in each result; None where an operand that is not of rows has it."""
        ndims = [None if a is None else a.ndim - (b is not None) for a, b in zip(args, batched)]
        inputs, outputs = placement.dims(spec, *ndims)
        first = placement.leads_of(spec)[0]
        rows = lambda dims: set(dims) <= set(inputs[first])
        is_rows = [d is not None and not isinstance(d, Loose) and rows(d) for d in inputs]
        separate = any(b is not None and not row for b, row in zip(batched, is_rows))
        if separate or any(isinstance(d, Loose) for d in outputs):
            return None
        at = batched[first] or 0
        place = lambda dims: sum(d < at for d in dims or ())
        moved = [
            batch_at(a, b, place(d), size) if row and a is not None else a
            for a, b, d, row in zip(args, batched, inputs, is_rows)
        ]
        spec = self.batching.spec(spec, at)
        inputs, _ = placement.dims_of(spec, moved)
        lead: Any = moved[first]
        moved = [
            match(a, lead, d) if a is not None and rows(d) else a for a, d in zip(moved, inputs)
        ]
        return spec, moved, [place(d) for d in outputs]

    def _jvp(
        self, primals: Any, tangents: Any, *, spec: Any, order: Order, tree: Any
    ) -> tuple[Results, list[Any]]:
        primals, tangents = tree.unflatten(primals), tree.unflatten(tangents)
        rule = self.derivative.jvp or self._plain_jvp
        pairs = zip(*rule(primals, tangents, spec=spec, order=order), strict=True)
        results, dresults = zip(*[pair for pair in pairs if pair[0] is not None])
        return list(results), list(dresults)

    def _plain_jvp(self, primals: Any, tangents: Any, *, spec: Any, order: Order) -> Any:
        _, dresults = jvp_along(functools.partial(self.plain, spec), primals, tangents)
        return self(spec, *primals, order=order), dresults

    def _transpose(self, cts: Any, *flat: Any, spec: Any, order: Order, tree: Any) -> list[Any]:
        rule, operands = self.derivative.transpose or self._plain_transpose, tree.unflatten(flat)
        avals = [a.aval if ad.is_undefined_primal(a) else a for a in operands]
        cts = self._filled(spec, avals, cts)
        gradients = rule(cts, *operands, spec=spec, order=order)
        return [g for g, a in zip(gradients, operands) if a is not None]

    def _plain_transpose(self, cts: Any, *operands: Any, spec: Any, order: Order) -> list[Any]:
        del order
        linear = {i: a.aval for i, a in enumerate(operands) if ad.is_undefined_primal(a)}

        def plain(*moving: Array) -> Results:
            replaced: dict[int, Any] = dict(zip(linear, moving))
            return self.plain(spec, *[replaced.get(i, a) for i, a in enumerate(operands)])

        zeros = [ad.instantiate_zeros(ad.Zero(a)) for a in linear.values()]
        pull = jax.vjp(plain, *zeros)[1]
        pulled = pull([None if ct is None else ad.instantiate_zeros(ct) for ct in cts])
        gradients = dict(zip(linear, pulled))
        return [gradients.get(i) for i in range(len(operands))]


def moves(tangent: Any) -> bool:
    """Returns whether there is a tangent, in a rule with symbolic zeros."""
    return tangent is not None and not isinstance(tangent, SymbolicZero | ad.Zero)


def jvp_along(
    function: Callable[..., Results], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Results, Results]:
    """Returns a function's results and their tangents, by JAX, along those that there are."""
    along = {i: t for i, t in enumerate(tangents) if moves(t)}

    def moved(*moving: Array) -> Results:
        replaced = dict(zip(along, moving))
        return function(*[replaced.get(i, a) for i, a in enumerate(primals)])

    return jax.jvp(moved, [primals[i] for i in along], [*along.values()])


def in_places(values: Sequence[Any], there: Sequence[bool]) -> list[Any]:
    """Returns values in their places, None in those that are empty."""
    left = iter(values)
    return [next(left) if each else None for each in there]


def all_there(operands: Sequence[Any]) -> Any:
    """Returns the tree of operands none of which is missing."""
    return jax.tree.structure((0,) * len(operands))


def on_unused_results(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Sets `rule(used results, equation) -> (used operands, equation)`, where some are used."""

    def remove(used: list[bool], *live_and_eqn: Any) -> Any:  # JAX 0.12 passes live operands, too
        eqn = live_and_eqn[-1]
        return rule(used, eqn) if any(used) else ([False] * len(eqn.invars), None)

    jax_private.dce_rules[primitive] = remove


def _drop_last(without_last: Callable[[Any], Any], used: list[bool], eqn: Any) -> Any:
    """Dead code: the last results are not computed when nobody uses them."""
    while not used[-1] and (spec := without_last(eqn.params["spec"])) is not None:
        used = used[:-1]
        eqn = eqn.replace(outvars=eqn.outvars[:-1], params={**eqn.params, "spec": spec})
    return [True] * len(eqn.invars), eqn


def _compile_when_eager(primitive: Primitive) -> None:
    """Makes a call outside `jit` run a compiled program, which is kept; params must be hashable."""

    @functools.lru_cache(maxsize=1024)
    def jitted(**params):
        return jax.jit(functools.partial(primitive.bind, **params))

    def run(*operands, **params):
        with jax.disable_jit(False):  # or this would call itself for ever under jax.disable_jit()
            return jitted(**params)(*operands)

    primitive.def_impl(run)


# ---------------------------------------------------------------- a body on several devices


def _there(dims: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Returns the dimensions of those arrays, or types of them, that are there."""
    return [d for d, a in zip(dims, arrays) if a is not None]


def _mapped(body: Body, mesh: Any, split: Split, dims: Dims, axes: Set[str]) -> Body:
    """Returns one device's function as one of global arrays, split over Explicit axes."""
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(split.spec(d) for d in dims[0]),
        out_specs=[split.spec(d) for d in dims[1]],
        axis_names=set(axes),
        check_vma=False,
    )


def _split(
    inputs: Sequence[Dimensions],
    leads: Leads,
    operands: Sequence[Any],
    specs: Sequence[P] = (),
    sizes: Mapping[str, int] | None = None,
    undivided: Dimensions = (),
) -> Split:
    """Returns the split of an operation whose leading operands have these `specs`, or are whole.

    A dimension that its axes do not divide is kept whole: XLA would pad it, and the padding would
    be summed into the parameters' gradients. So is one of the second operand's own whose axes the
    first uses, and one that is `undivided`.
    """
    if not specs:
        lengths = {d: n for lead in leads for d, n in zip(inputs[lead], operands[lead].shape)}
        return Split(((),) * len(lengths), tuple([lengths[d] for d in range(len(lengths))]))
    axes: dict[int, tuple[str, ...]] = {}
    shape: dict[int, int] = {}
    for lead, spec in zip(leads, specs):
        taken = {name for names in axes.values() for name in names}
        entries = whole(spec, len(operands[lead].shape))
        for d, entry, n in zip(inputs[lead], entries, operands[lead].shape):
            names = axes_of(entry)
            fits = n % math.prod((sizes or {})[a] for a in names) == 0 and not taken & set(names)
            if d not in axes:
                axes[d], shape[d] = names if fits and d not in undivided else (), n
    order = range(len(axes))
    return Split(tuple(axes[d] for d in order), tuple(shape[d] for d in order))


# ---------------------------------------------------------------- operands that go together


def batch_at(operand: Array, batched: int | None, at: int, size: int) -> Array:
    """Returns `operand` with its batch dimension, `batched` or none, at `at`."""
    if batched is None:
        shape = (*operand.shape[:at], size, *operand.shape[at:])
        return jnp.broadcast_to(jnp.expand_dims(operand, at), shape)
    return jnp.moveaxis(operand, batched, at)


def varying_axes(*operands: Array | None) -> frozenset[str]:
    """Returns the manual axes over which any of `operands` varies."""
    axes = [jax.typeof(a).manual_axis_type.varying for a in operands if a is not None]
    return frozenset().union(*axes)


def vary(operand: Array, axes: Set[str]) -> Array:
    """Returns `operand` typed as varying over manual `axes`.

    The transpose sums its gradient over the axes added.
    """
    missing = axes - varying_axes(operand)
    return jax.lax.pcast(operand, tuple(sorted(missing)), to="varying") if missing else operand


def equally_varying(*arrays: Array | None) -> list[Any]:
    """Returns the arrays varying over the same manual axes.

    Under shard_map with check_vma the transpose of what is added here sums the gradients.
    """
    axes = varying_axes(*arrays)
    return [None if a is None else vary(a, axes) for a in arrays]


def match(operand: Array, lead: Array, dims: Sequence[int]) -> Array:
    """Returns `operand` with the lead's sharding in its dimensions `dims`, and its varying axes.

    It is whole along those that the lead does not have. Where shardings are part of the type
    (Explicit meshes, shard_map with check_vma) operands must agree; the transpose of what is added
    here sums or reshards their gradients.
    """
    typed, like = jax.typeof(operand), jax.typeof(lead)
    operand = vary(operand, like.manual_axis_type.varying)
    if like.sharding.mesh.explicit_axes:
        entries = dict(enumerate(like.sharding.spec))
        wanted = P(*[entries.get(d) for d in dims])
        if P(*typed.sharding.spec) != wanted:
            operand = reshard_like(operand, lead, wanted)
    return operand


@functools.partial(jax.jit, static_argnames="spec", keep_unused=True, inline=True)
def reshard_like(operand: Array, lead: Array, spec: P) -> Array:
    """`jax.sharding.reshard` on lead's devices, unknown to it outside jit and set_mesh."""
    return jax.sharding.reshard(operand, NamedSharding(jax.typeof(lead).sharding.mesh, spec))


def placed(array: Array, sharding: P | None) -> Array:
    """Returns the array with `sharding` on the mesh in context; as it is if None."""
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)


# ---------------------------------------------------------------- lowering


@dataclasses.dataclass(frozen=True)
class _Where:
    """The context an op is lowered in: exactly one of these, or none: custom_partitioning."""

    single: bool = False  # the arrays are one device's already
    explicit: frozenset[str] = frozenset()  # the types say how they are split over these axes
    plain: str = ""  # why only plain HLO can serve


def where_lowered(ctx: Any, lead: Any) -> _Where:
    """Returns the context that an operation on arrays like `lead` is lowered in."""
    context, mesh = ctx.module_context.axis_context, lead.sharding.mesh
    sizes = dict(context.mesh.shape) if hasattr(context, "mesh") else dict(mesh.shape)
    manual = set(getattr(context, "manual_axes", ())) | set(mesh.manual_axes)
    explicit = set(mesh.explicit_axes) - manual
    auto = {a for a, size in sizes.items() if size > 1} - manual - explicit
    one_device = not manual and getattr(context, "num_devices", 1) == 1
    if one_device or (sizes and not auto and not explicit):
        return _Where(single=True)
    if explicit and not auto:
        return _Where(explicit=frozenset(explicit))
    if manual:
        return _Where(
            plain=f"shard_map is manual over {sorted(manual)} but not over {sorted(auto)}; "
            "make it manual over every axis, or call the op outside it"
        )
    if ctx.module_context.lowering_parameters.for_export:
        return _Where(
            plain="an export for several devices cannot carry the partitioning callback of Auto "
            "axes; export with Explicit axes or under shard_map"
        )
    return _Where()
