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
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...native import fingerprint, jax_private
from ...native.implementation import BEST, Order, report
from ...native.kernel import Body, lower, result_types, without_mesh
from .sharding import axes_of, mesh_and_spec, on_one_mesh, whole

Results = list[Array]
Leads = tuple[int, ...]
Dimensions = tuple[int, ...]
Dims = tuple[Sequence[Dimensions], Sequence[Dimensions]]


class Loose(tuple):
    """Dimensions of a parameter, such as scale: its stored sharding neither follows the rows nor
    drives them. It is gathered (FSDP) or sliced to what a device needs."""


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
        """Returns the PartitionSpec of an array with the operation's dimensions `dims`."""
        return P(*[(self.axes[d] or None) for d in dims])


@dataclasses.dataclass(eq=False)
class Op:
    """An operation on global arrays, in functions of its `spec`.

    That is a frozen dataclass of all that is known when the operation is traced; its `op` is the
    function the user called, for errors.

    Attributes:
      name: the primitive is `normfuse_<name>`.
      definition: the operation in plain JAX, `(spec, *operands) -> list of arrays`.
      dims: `(spec, *ndims) -> (operands' dimensions, results' dimensions)`, for leading operands of
        `ndims` dimensions. An operation's dimensions are numbered: first those of its first leading
        operand, then what a second one adds. Parameters' are `Loose`. None for an operation whose
        body serves on one device alone; elsewhere its definition is split, part by part.
      body: `(spec, split, *operands, order) -> list`: one device's share, on kernels; None for an
        operation that is plain HLO everywhere (a tangent, say).
      leads: the leading operands, one or two; their shardings decide. The first has all rows.
      undivided: `(spec, *ndims) -> dimensions` that no device has a part of: what is stored so is
        gathered.
      unfused: `(spec, *operands, order) -> list`, the values of `definition` by operations that
        batch well, for vmap where a parameter or its gradient has a batch dimension.
      batched: `(spec, at) -> spec` for a first operand with one more dimension of rows, at `at`.
      batch: a batching rule in place of the general one, `(op, operands, batched, spec, order)`.
      share: how devices share an operation that is plain HLO, on Auto axes, instead of XLA's own
        partitioning: `(spec, sizes of mesh axes, operands' shapes, PartitionSpecs of operands and
        results) -> (these specs as they must be, one device's function)`.
      before: `(ctx, spec, order) -> order`, when it is lowered.
      jvp: `(primals, tangents, spec, order) -> (results, tangents)`; None for the definition's own.
      transpose: `(cotangents, *operands, spec, order)`, where it is linear; None for the
        definition's own.
      types: `spec -> the results' types`, if that knows them.
      backward: the first-order gradient, for readers and for listings; see `derivative`.
      without_last: `spec -> spec` of the same operation without its last result, for a program that
        does not use it; None where that result is not computed anyway.
    """

    name: str
    definition: Body
    _: dataclasses.KW_ONLY
    dims: Callable[..., Dims] | None = None
    body: Body | None = None
    leads: Leads | Callable[[Any], Leads] = (0,)
    undivided: Callable[..., Dimensions] | None = None
    unfused: Body | None = None
    batched: Callable[[Any, int], Any] = lambda spec, at: spec
    batch: Callable[..., Any] | None = None
    share: Callable[..., tuple[list[P], Callable[..., Results]]] | None = None
    before: Callable[[Any, Any, Order], Order] | None = None
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    types: Callable[[Any], Sequence[Any]] | None = None
    backward: "Op | None" = None
    without_last: Callable[[Any], Any] | None = None

    def __post_init__(self):
        self.primitive = p = Primitive(f"normfuse_{self.name}")
        p.multiple_results = True
        p.def_abstract_eval(self._abstract_eval)
        _compile_when_eager(p)
        jax_private.needs_devices_during_lowering(p)
        mlir.register_lowering(p, self._lower)
        batch = functools.partial(self.batch, self) if self.batch else self._batch
        batching.primitive_batchers[p] = batch
        ad.primitive_jvps[p] = self.jvp or self._plain_jvp
        ad.primitive_transposes[p] = self.transpose or self._plain_transpose
        if self.without_last:
            jax_private.on_unused_results(p, functools.partial(_drop_last, self.without_last))

    def __call__(self, spec: Any, *operands: Array, order: Order = BEST) -> Results:
        return self.primitive.bind(*operands, spec=spec, order=order)

    def plain(self, spec: Any, *operands: Array) -> Results:
        """Returns the definition's results."""
        return list(self.definition(spec, *operands))

    def _leads(self, spec: Any) -> Leads:
        return self.leads(spec) if callable(self.leads) else self.leads

    def _dims(self, spec: Any, operands: Sequence[Any]) -> Dims:
        if self.dims is None:
            return [tuple(range(a.ndim)) for a in operands], []
        return self.dims(spec, *[operands[lead].ndim for lead in self._leads(spec)])

    def _abstract_eval(self, *operands: Any, spec: Any, order: Order) -> list[Any]:
        del order
        if self.types is not None and (known := self.types(spec)):
            return list(known)
        if self.dims is None or self.share is not None:
            return jax.make_jaxpr(functools.partial(self.plain, spec))(*operands).out_avals
        types = result_types(self.definition, spec, tuple((a.shape, a.dtype) for a in operands))
        inputs, outputs = self._dims(spec, operands)
        leads, entries = self._leads(spec), {}
        for lead in reversed(leads):  # the first decides
            entries |= zip(inputs[lead], operands[lead].sharding.spec)
        like = operands[leads[0]]
        specs = [P(*[entries[d] for d in dims]) for dims in outputs]
        shardings = [NamedSharding(like.sharding.mesh, spec) for spec in specs]
        return [
            like.update(shape=t.shape, dtype=t.dtype, weak_type=False, sharding=sharding)
            for t, sharding in zip(types, shardings, strict=True)
        ]

    def _lower(self, ctx: Any, *values: Any, spec: Any, order: Order) -> Any:
        if self.before is not None:
            order = self.before(ctx, spec, order)
        avals, leads = ctx.avals_in, self._leads(spec)
        where = where_lowered(ctx, avals[leads[0]])
        lower_as = lambda fn: mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
        plain = functools.partial(self.plain, spec)
        mixed = avals[leads[0]].sharding.mesh.explicit_axes  # and Auto ones
        if self.share is not None and where == _Where() and not mixed:
            devices = devices_of(ctx)
            share = functools.partial(self.share, spec)
            rule = shardy_rule(*self._dims(spec, avals))
            results = lower_as(_shared(plain, share, rule, devices))
            self._name(ctx, results, devices, spec, order)
            return results
        if self.body is None:
            return lower_as(plain)
        if where.plain:
            report(spec.op, where.plain, strict=order.strict, names=order.names)
            return lower_as(plain)
        body = functools.partial(self.body, spec, order=order)
        dims = self._dims(spec, avals)
        if where.single:
            return lower(_on(body, _split(dims[0], leads, avals)), ctx, *values)
        if self.dims is None:
            if order.names == ("pallas",):
                reason = "its operands are split over a mesh; call it in shard_map over every axis"
                report(spec.op, reason, strict=order.strict, names=order.names)
            return lower_as(plain)
        undivided: Dimensions = ()
        if self.undivided is not None:
            undivided = self.undivided(spec, *[avals[lead].ndim for lead in leads])
        if where.explicit:
            mesh, (inputs, outputs) = avals[leads[0]].sharding.mesh, dims
            specs = [avals[lead].sharding.spec for lead in leads]
            split = _split(inputs, leads, avals, specs, dict(mesh.shape), undivided)
            mapped = jax.shard_map(
                _on(body, split),
                mesh=mesh,
                in_specs=tuple(split.spec(d) for d in inputs),
                out_specs=[split.spec(d) for d in outputs],
                axis_names=set(where.explicit),
                check_vma=False,
            )
            return lower_as(mapped)
        devices = devices_of(ctx)
        results = lower_as(_partitioned(body, dims, leads, undivided, devices))
        self._name(ctx, results, devices, spec, order, dims)
        return results

    def _name(self, ctx: Any, results: Any, devices: Sequence[jax.Device], *about: Any) -> None:
        """Names a callback by everything that it depends on: calls of one name share it."""
        context = [d.id for d in devices], ctx.module_context.platforms, jax.config.jax_enable_x64
        shapes = [a.str_short() for a in ctx.avals_in]
        _name_callback(results, f"{self.name}{about}{shapes}{context}")

    def _batch(
        self, args: Sequence[Array], batched: Sequence[int | None], *, spec: Any, order: Order
    ) -> tuple[Results, list[int]]:
        """A batch dimension becomes a dimension of rows, at its place in the lead."""
        size = next(a.shape[b] for a, b in zip(args, batched) if b is not None)
        if self.dims is not None:
            leads = self._leads(spec)
            ndims = [args[i].ndim - (batched[i] is not None) for i in leads]
            inputs, outputs = self.dims(spec, *ndims)
            rows = lambda dims: set(dims) <= set(inputs[leads[0]])
            is_rows = [not isinstance(d, Loose) and rows(d) for d in inputs]
            separate = any(b is not None and not row for b, row in zip(batched, is_rows))
            if not separate and not any(isinstance(d, Loose) for d in outputs):
                at = batched[leads[0]] or 0
                place = lambda dims: sum(d < at for d in dims)
                moved = [
                    batch_at(a, b, place(d), size) if row else a
                    for a, b, d, row in zip(args, batched, inputs, is_rows)
                ]
                spec = self.batched(spec, at)
                inputs, _ = self._dims(spec, moved)
                lead = moved[leads[0]]
                moved = [match(a, lead, d) if rows(d) else a for a, d in zip(moved, inputs)]
                return self(spec, *moved, order=order), [place(d) for d in outputs]
        one = functools.partial(self.plain, spec)
        if self.unfused is not None:
            one = functools.partial(self.unfused, spec, order=order)
        results = jax.vmap(one, tuple(batched), axis_size=size)(*args)
        return list(results), [0] * len(results)

    def _plain_jvp(self, primals: Any, tangents: Any, *, spec: Any, order: Order) -> Any:
        _, dresults = jvp_along(functools.partial(self.plain, spec), primals, tangents)
        return self(spec, *primals, order=order), dresults

    def _plain_transpose(self, cts: Any, *operands: Any, spec: Any, order: Order) -> list[Any]:
        del order
        linear = {i: a.aval for i, a in enumerate(operands) if ad.is_undefined_primal(a)}

        def plain(*moving: Array) -> Results:
            given = dict(zip(linear, moving))
            return self.plain(spec, *[given.get(i, a) for i, a in enumerate(operands)])

        zeros = [ad.instantiate_zeros(ad.Zero(a)) for a in linear.values()]
        pulled = jax.vjp(plain, *zeros)[1]([ad.instantiate_zeros(ct) for ct in cts])
        found = dict(zip(linear, pulled))
        return [found.get(i) for i in range(len(operands))]


def jvp_along(
    function: Callable[..., Results], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Results, Results]:
    """Returns a function's results and their tangents, by JAX, along those that there are."""
    still = lambda t: t is None or isinstance(t, ad.Zero | SymbolicZero)
    along = {i: t for i, t in enumerate(tangents) if not still(t)}

    def moved(*moving: Array) -> Results:
        given = dict(zip(along, moving))
        return function(*[given.get(i, a) for i, a in enumerate(primals)])

    return jax.jvp(moved, [primals[i] for i in along], [*along.values()])


def _drop_last(without_last: Callable[[Any], Any], used: list[bool], *live_and_eqn: Any) -> Any:
    """Dead code: the last results are not computed when nobody uses them."""
    eqn = live_and_eqn[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
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


def _on(body: Body, split: Split) -> Callable[..., Results]:
    return lambda *operands: list(body(split, *operands))


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
        return Split(((),) * len(lengths), tuple(lengths[d] for d in range(len(lengths))))
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


def _partitioned(
    body: Body, dims: Dims, leads: Leads, undivided: Dimensions, devices: Sequence[jax.Device]
) -> Callable[..., Results]:
    """Returns `body` as a function of global arrays on a mesh of `devices`, with Auto axes."""
    (inputs, outputs), x64 = dims, jax.config.jax_enable_x64

    @custom_partitioning
    def call(*operands):  # JAX 0.10 takes only the types from this, with an Explicit axis
        split = _split(inputs, leads, operands)
        return tuple(without_mesh(_on(body, split), x64)(*operands))

    def split_of(operands: Sequence[Any]) -> tuple[Mesh, Split]:
        lie = [operands[lead] for lead in leads]
        found = [mesh_and_spec(a.sharding, len(a.shape), devices) for a in lie]
        mesh, specs = on_one_mesh(found)
        return mesh, _split(inputs, leads, operands, specs, mesh.shape, undivided)

    def shardings(mesh, split, all_dims):
        return tuple(NamedSharding(mesh, split.spec(d)) for d in all_dims)

    def partition(_mesh, operands, _results):
        mesh, split = split_of(operands)
        local = without_mesh(_on(body, split), x64)
        fn = lambda *values: tuple(local(*values))
        return mesh, fn, shardings(mesh, split, outputs), shardings(mesh, split, inputs)

    def infer(_mesh, operands, _results):  # for GSPMD alone; JAX 0.10 aborts without it
        return shardings(*split_of(operands), outputs)

    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=shardy_rule(inputs, outputs),
        decode_shardings=False,  # mesh_and_spec does: JAX fails where a reshape split an axis
    )
    return lambda *operands: list(call(*operands))


def _shared(
    plain: Callable[..., Results],
    share: Callable[..., Any],
    rule: str,
    devices: Sequence[jax.Device],
) -> Callable[..., Results]:
    """Returns `plain` as a function of global arrays on Auto axes, shared as `share` says."""
    x64 = jax.config.jax_enable_x64

    @custom_partitioning
    def call(*operands):
        return tuple(without_mesh(plain, x64)(*operands))

    def parts(operands: Sequence[Any], results: Sequence[Any]) -> Any:
        found = [mesh_and_spec(a.sharding, len(a.shape), devices) for a in (*operands, *results)]
        mesh, specs = on_one_mesh(found)
        specs, function = share(dict(mesh.shape), [a.shape for a in operands], specs)
        return mesh, [NamedSharding(mesh, spec) for spec in specs], function

    def partition(_mesh, operands, results):
        mesh, shardings, function = parts(operands, results)
        local = without_mesh(function, x64)
        count = len(operands)
        fn = lambda *values: tuple(local(*values))
        return mesh, fn, tuple(shardings[count:]), tuple(shardings[:count])

    def infer(_mesh, operands, results):  # for GSPMD alone; JAX 0.10 aborts without it
        return tuple(parts(operands, results)[1][len(operands) :])

    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=rule,
        decode_shardings=False,
    )
    return lambda *operands: list(call(*operands))


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

    Where shardings are part of the type (Explicit meshes, shard_map with check_vma) operands must
    agree; the transpose of what is added here sums or reshards their gradients.
    """
    typed, like = jax.typeof(operand), jax.typeof(lead)
    operand = vary(operand, like.manual_axis_type.varying)
    if like.sharding.mesh.explicit_axes:
        wanted = P(*[like.sharding.spec[d] for d in dims])
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


def devices_of(ctx: Any) -> Sequence[jax.Device]:
    """Returns the devices that the program is compiled for, in order."""
    context = ctx.module_context.axis_context
    return context.mesh.devices.flat if hasattr(context, "mesh") else context.device_assignment


def shardy_rule(inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> str:
    """Returns the propagation rule of an operation, in custom_partitioning's notation.

    A dimension has one factor wherever it occurs, except in parameters (`Loose`), which have their
    own: an FSDP-sharded scale must not drag the activations onto its axes.
    """

    def mapping(dims):
        kind = "s" if isinstance(dims, Loose) else "d"
        return " ".join(f"{kind}{d}" for d in dims)

    return f"{', '.join(map(mapping, inputs))} -> {', '.join(map(mapping, outputs))}"


_callbacks: dict[str, Any] = {}  # the callbacks behind our keys, kept alive for JAX's weak table


def _name_callback(results: Sequence[Any], name: str) -> None:
    """Gives a custom_partitioning call the same key in every process: `name`, and our version.

    JAX names the callback by its address, so that the persistent compilation cache misses in every
    new process (jax-ml/jax#21159). Where JAX's table is not as expected its own key stays.
    """
    try:
        op = results[0].owner
        op = getattr(op, "operation", op)
        callbacks = jax_private.sharding_callbacks
        info = callbacks[op.attributes["backend_config"].value.encode()]
        key = f"normfuse:{fingerprint()}:{name}"
        _callbacks[key] = callbacks[key.encode()] = info
        with op.context:
            op.attributes["backend_config"] = mlir.ir.StringAttr.get(key)
    except (AttributeError, IndexError, KeyError, TypeError):
        return
