"""An operation on global arrays that behaves like JAX's own in every context.

Two tiers. The kernels of `normfuse.native` are one device's share. An `Op` is the whole: it owns
the types, batching and differentiation, and chooses when it is lowered how the devices share it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding

from ..native import fallback
from ..native.fallback import Order
from ..native.jax_private import needs_devices_during_lowering
from ..native.kernel import lower, result_types
from . import partition
from .partition import Loose, Split
from .specs import whole

Dims = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]


class Op:
    """An operation on global arrays.

    Args:
      name: the primitive is `normfuse_<name>`.
      definition: the operation in plain JAX, `(*operands, axes, **params) -> list of arrays`.
      dims: `(ndim, axes, **params) -> (operand dims, result dims)`: which dimensions of the
        leading operand, of `ndim` dimensions, each array has. Parameters' are `Loose`.
      body: `(split, *operands, axes, **params) -> list`: one device's share, on native kernels;
        None for an operation that is plain HLO everywhere (a tangent, say).
      unfused: the same values as `definition` by operations that batch well, for vmap where a
        parameter or its gradient has a batch dimension.
      lead: the index of the leading operand; its sharding decides.

    Every op has the parameters `axes` (dimensions of the leading operand it treats apart) and
    `strict` (an `Order`: which kernels serve, and whether plain HLO may where they cannot; a flag
    stands for native kernels).
    """

    def __init__(
        self,
        name: str,
        definition: Callable[..., Sequence[jax.Array]],
        dims: Callable[..., Dims],
        body: Callable[..., Sequence[jax.Array]] | None,
        unfused: Callable[..., Sequence[jax.Array]] | None = None,
        lead: int = 0,
    ):
        self.name, self.definition, self.dims = name, definition, dims
        self.body, self.unfused, self.lead = body, unfused or self.plain, lead
        self.primitive = Primitive(f"normfuse_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        compile_when_eager(self.primitive)
        needs_devices_during_lowering(self.primitive)
        mlir.register_lowering(self.primitive, self._lower)
        batching.primitive_batchers[self.primitive] = self._batch

    def __call__(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        return self.primitive.bind(*operands, **params)

    def plain(
        self, *operands: jax.Array, strict: bool | Order = False, **params: Any
    ) -> list[jax.Array]:
        """The definition, with the parameters that `__call__` takes."""
        del strict
        return list(self.definition(*operands, **params))

    def _abstract_eval(self, *operands, strict, **params):
        types = result_types(
            self.definition, tuple((a.shape, a.dtype) for a in operands), tuple(params.items())
        )
        lead = operands[self.lead]
        spec = whole(lead.sharding.spec, lead.ndim)
        _, outputs = self.dims(lead.ndim, strict=strict, **params)
        return [
            lead.update(
                shape=t.shape,
                dtype=t.dtype,
                weak_type=False,
                sharding=NamedSharding(lead.sharding.mesh, jax.P(*[spec[d] for d in dims])),
            )
            for t, dims in zip(types, outputs, strict=True)
        ]

    def _lower(self, ctx, *values, **params):
        lead = ctx.avals_in[self.lead]
        dims = self.dims(lead.ndim, **params)
        where = where_lowered(ctx, lead)
        if self.body is None or where.plain:
            if self.body is not None:
                order = Order.of(params["strict"])
                fallback.report(self.name, where.plain, strict=order.strict, names=order.names)
            fn = functools.partial(self.plain, **params)
        elif where.single:
            return lower(
                functools.partial(self.body, Split.none(lead.shape), **params), ctx, *values
            )
        elif where.explicit:
            fn = _split_by_types(functools.partial(self.body, **params), dims, lead, where.explicit)
        else:
            devices = devices_of(ctx)
            body = functools.partial(self.body, **params)
            fn = partition.partitioned(body, dims, self.lead, devices)
            results = mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
            # whatever the callback depends on: calls of one name share one callback
            where = [d.id for d in devices], ctx.module_context.platforms, jax.config.jax_enable_x64
            partition.name_callback(results, f"{self.name}{sorted(params.items())}{dims}{where}")
            return results
        return mlir.lower_fun(lambda *a: list(fn(*a)), multiple_results=True)(ctx, *values)

    def _batch(self, args, batched, **params):
        """A batch dimension is one more dimension of rows, kept where it stands in the lead."""
        size = next(a.shape[b] for a, b in zip(args, batched) if b is not None)
        ndim = args[self.lead].ndim - (batched[self.lead] is not None)
        inputs, outputs = self.dims(ndim, **params)
        loose = any(isinstance(d, Loose) and b is not None for d, b in zip(inputs, batched))
        if loose or any(isinstance(d, Loose) for d in outputs):
            fn = functools.partial(self.unfused, **params)
            return jax.vmap(lambda *a: list(fn(*a)), tuple(batched), axis_size=size)(*args), [
                0
            ] * len(outputs)
        at = 0 if batched[self.lead] is None else batched[self.lead]
        place = lambda dims: sum(d < at for d in dims)
        moved = [
            a if isinstance(d, Loose) else batch_at(a, b, place(d), size)
            for a, b, d in zip(args, batched, inputs)
        ]
        axes = tuple(a + (a >= at) for a in params["axes"])
        moved = [
            match(a, moved[self.lead], d)
            for a, d in zip(moved, self.dims(ndim + 1, **{**params, "axes": axes})[0])
        ]
        results = self(*moved, **{**params, "axes": axes})
        return results, [place(d) for d in outputs]


def compile_when_eager(primitive: Primitive) -> None:
    """Makes a call outside `jit` run a compiled program, which is kept; params must be hashable."""

    def run(*operands, **params):
        with jax.disable_jit(False):  # or this would call itself for ever under jax.disable_jit()
            return _jitted(primitive, tuple(params.items()))(*operands)

    primitive.def_impl(run)


@functools.lru_cache(maxsize=1024)
def _jitted(primitive, params):
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def batch_at(operand, batched, at, size):
    """`operand` with its batch dimension, `batched` or none, at `at`."""
    if batched is None:
        shape = (*operand.shape[:at], size, *operand.shape[at:])
        return jnp.broadcast_to(jnp.expand_dims(operand, at), shape)
    return jnp.moveaxis(operand, batched, at)


def vary(operand: jax.Array, axes: Set[str]) -> jax.Array:
    """`operand` typed as varying over manual `axes`; the transpose sums its gradient over them."""
    missing = axes - jax.typeof(operand).manual_axis_type.varying
    return jax.lax.pcast(operand, tuple(sorted(missing)), to="varying") if missing else operand


def match(operand: jax.Array, lead: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Gives `operand` the lead's sharding in its dimensions `dims`, and the lead's varying axes.

    Where shardings are part of the type (Explicit meshes, shard_map with check_vma) operands must
    agree; the transpose of what is added here sums or reshards their gradients.
    """
    typed, like = jax.typeof(operand), jax.typeof(lead)
    operand = vary(operand, like.manual_axis_type.varying)
    if like.sharding.mesh.explicit_axes:
        spec = whole(like.sharding.spec, like.ndim)
        wanted = jax.P(*[spec[d] for d in dims])
        have = whole(typed.sharding.spec, typed.ndim)
        if jax.P(*have) != wanted:
            operand = reshard_like(operand, lead, wanted)
    return operand


@functools.partial(jax.jit, static_argnames="spec", keep_unused=True, inline=True)
def reshard_like(operand, lead, spec):
    """`jax.sharding.reshard` on lead's devices, unknown to it outside jit and set_mesh."""
    return jax.sharding.reshard(operand, NamedSharding(jax.typeof(lead).sharding.mesh, spec))


@dataclasses.dataclass(frozen=True)
class _Where:
    """The context an op is lowered in: exactly one of these, or none: custom_partitioning."""

    single: bool = False  # the arrays are one device's already
    explicit: frozenset[str] = frozenset()  # the types say how they are split over these axes
    plain: str = ""  # why only plain HLO can serve


def where_lowered(ctx, lead) -> _Where:
    """The context that an operation on arrays like `lead` is lowered in."""
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


def devices_of(ctx):
    """What the program is compiled for, in order."""
    context = ctx.module_context.axis_context
    return context.mesh.devices.flat if hasattr(context, "mesh") else context.device_assignment


def _split_by_types(body, dims, lead, axes):
    """`body` under shard_map, split as the lead's type says."""
    mesh, (inputs, outputs) = lead.sharding.mesh, dims
    split = Split.from_spec(lead.sharding.spec, lead.shape, dict(mesh.shape))
    return jax.shard_map(
        lambda *operands: tuple(body(split, *operands)),
        mesh=mesh,
        in_specs=tuple(split.spec(d) for d in inputs),
        out_specs=tuple(split.spec(d) for d in outputs),
        axis_names=set(axes),
        check_vma=False,
    )
