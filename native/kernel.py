"""A kernel: one device's share of an operation, as a JAX primitive with a body per backend."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from .implementation import BEST, PLAIN, Order, Unsupported, report
from .jax_private import needs_devices

Backend = Literal["cpu", "cuda", "pallas"]
Arrays = Sequence[jax.Array]
Body = Callable[..., Arrays]
_NO_MESH = AbstractMesh((), ())


class Kernel:
    """One device's share of an operation.

    Operands may be None, for those that a call does not have, and so may results. Functions of an
    operation take them by their names; the primitive binds those that are there, with their `tree`.

    Args:
      name: the primitive is `normfuse_<name>`.
      definition: the operation in plain JAX, `(spec, *operands) -> list of arrays`. It gives the
        result types, and runs where no kernel serves. `spec` is the operation's frozen dataclass of
        static parameters; its `op` is the operation the user called, for errors.
      bodies: the kernels that exist: "cpu", `(spec, *operands)`, by C++ handlers; "cuda",
        `(target, spec, *operands)`, where `target` describes the GPU; "pallas", `(platform, spec,
        *operands)`. A kernel with "cuda" and without "cpu" is one that XLA fuses into one loop on
        a CPU.
      plain_on_cuda: `(spec, *operand types) -> bool`: True if the definition was measured to be the
        fastest on a GPU, and serves by default; None for never.
      types: `(spec, *operand types) -> result types`, those of the definition, where it is slow.

    A body raises `Unsupported` when it cannot serve. The `Order` of a call says which bodies to
    try. If none serves, the definition does and the reason is logged once; a strict order raises
    NotImplementedError instead.
    """

    def __init__(
        self,
        name: str,
        definition: Body,
        bodies: Mapping[Backend, Body],
        *,
        plain_on_cuda: Callable[..., bool] | None = None,
        types: Callable[..., Sequence[jax.ShapeDtypeStruct]] | None = None,
    ):
        self._types = types
        self.name, self.definition, self.bodies = name, definition, dict(bodies)
        self._plain_on_cuda = plain_on_cuda
        self.primitive = Primitive(f"normfuse_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._impl)
        needs_devices.add(self.primitive)  # custom_partitioning in a lowering requires it
        for platform in (None, "cpu", "cuda", "rocm", "tpu"):  # None: any other
            rule = functools.partial(self._lower, platform)
            mlir.register_lowering(self.primitive, rule, platform=platform)

    def __call__(self, spec: Any, *operands: jax.Array | None, order: Order = BEST) -> list[Any]:
        """Runs the kernel that `order` says."""
        if order is PLAIN:  # one that a user asks for is an equation, as all are
            return list(self.definition(spec, *operands))
        flat, tree = jax.tree.flatten(operands)
        results = self.primitive.bind(*flat, spec=spec, order=order, tree=tree)
        return jax.tree.structure(self._types_of(spec, operands)).unflatten(results)

    def _types_of(self, spec: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if self._types:
            return self._types(spec, *operands)
        shapes = tuple([None if a is None else (a.shape, a.dtype) for a in operands])
        return result_types(self.definition, spec, shapes)

    def _impl(self, *operands: jax.Array, **params: Any) -> list[jax.Array]:
        return jax.jit(functools.partial(self.primitive.bind, **params))(*operands)

    def _abstract_eval(self, *operands: Any, spec: Any, order: Order, tree: Any) -> list[Any]:
        del order
        types = jax.tree.leaves(self._types_of(spec, tree.unflatten(operands)))
        like = operands[0]  # the mesh and the manual axes around a shard are those of its operands
        specs = [PartitionSpec(*[None] * len(t.shape)) for t in types]
        places = [NamedSharding(like.sharding.mesh, spec) for spec in specs]
        return [
            like.update(shape=t.shape, dtype=t.dtype, weak_type=False, sharding=place)
            for t, place in zip(types, places)
        ]

    def _lower(
        self, platform: str | None, ctx: Any, *values: Any, spec: Any, order: Order, tree: Any
    ) -> Any:
        plain = bound(self.definition, spec, tree=tree)
        measured = platform == "cuda" and not order.names and _has_static_shapes(ctx)
        operands = tree.unflatten(ctx.avals_in)
        if measured and self._plain_on_cuda and self._plain_on_cuda(spec, *operands):
            return lower(plain, ctx, *values)
        # On CPUs Pallas is interpreted, and serves on request alone.
        best = "pallas" if platform == "tpu" and "pallas" in self.bodies else "native"
        where, reasons = "/".join(ctx.module_context.platforms), {}
        for name in order.names or (best,):
            try:
                if name == "pallas":
                    results = self._lower_pallas(platform, ctx, values, spec, tree)
                else:
                    body = bound(self.native(platform, ctx), spec, tree=tree)
                    results = lower(body, ctx, *values)
            except Unsupported as error:
                reasons[name] = f"on {where}, {error}"
                continue
            if reasons:
                report(spec.op, reasons, by=name)
            return results
        if order.strict or "pallas" in order.names or not self.fused_by_xla(platform):
            report(spec.op, reasons, strict=order.strict)
        return lower(plain, ctx, *values)

    def fused_by_xla(self, platform: str | None) -> bool:
        """Returns whether the definition is meant to serve: XLA fuses it into one loop on CPUs."""
        return platform == "cpu" and "cpu" not in self.bodies and "cuda" in self.bodies

    def native(self, platform: str | None, ctx: Any) -> Body:
        """Returns the native body for a lowering, as a function of `(spec, *operands)`."""
        if platform == "cuda" and "cuda" in self.bodies:
            from .launch import target_for

            _require_static_shapes(ctx)
            return functools.partial(self.bodies["cuda"], target_for(ctx))
        if platform == "cpu" and "cpu" in self.bodies:
            return self.bodies["cpu"]
        if self.fused_by_xla(platform):
            raise Unsupported("XLA already fuses this into one loop")
        somewhere = {"cpu", "cuda"} & set(self.bodies)
        raise Unsupported(f"{'this platform has no' if somewhere else 'no platform has a'} kernel")

    def _lower_pallas(
        self, platform: str | None, ctx: Any, values: Any, spec: Any, tree: Any
    ) -> Any:
        if "pallas" not in self.bodies:
            raise Unsupported("there is no Pallas kernel for this")
        if platform not in ("cpu", "tpu"):
            raise Unsupported("there are no Pallas kernels: they are for TPUs, interpreted on CPUs")
        _require_static_shapes(ctx)
        try:
            body = bound(self.bodies["pallas"], platform, spec, tree=tree)
            return lower(body, ctx, *values)
        except (NotImplementedError, ImportError) as error:
            raise Unsupported(f"Pallas cannot lower this: {error}") from error


def bound(function: Body, *first: Any, tree: Any) -> Body:
    """Returns a function of `(*first, *operands)` as one of the operands and results there are."""
    return lambda *flat: jax.tree.leaves(function(*first, *tree.unflatten(flat)))


def _has_static_shapes(ctx: Any) -> bool:
    return all([isinstance(n, int) for a in ctx.avals_in for n in a.shape])


def _require_static_shapes(ctx: Any) -> None:
    if not _has_static_shapes(ctx):
        raise Unsupported("a kernel is compiled for one shape, and this is symbolic")


@functools.lru_cache(maxsize=4096)
def result_types(definition: Body, spec: Any, operands: tuple) -> list[jax.ShapeDtypeStruct]:
    """Returns the result types of `definition` on operands given as (shape, dtype) or None."""
    with use_abstract_mesh(_NO_MESH):
        structs = [like and jax.ShapeDtypeStruct(*like) for like in operands]
        return list(jax.eval_shape(functools.partial(definition, spec), *structs))


def without_mesh(fn: Body, x64: bool) -> Callable[..., list]:
    """Traces and lowers `fn` with no mesh in sight, and with 64-bit types as `x64` says.

    The arrays of a shard live on one device. From JAX 0.11 on an ambient Explicit mesh would
    annotate them, and XLA finds no implementation for a `Sharding` call in a per-device module.
    JAX 0.10 partitions in a thread of XLA's, which does not see the caller's `jax.enable_x64`.
    """

    def shielded(*operands: Any) -> list[Any]:
        with jax.enable_x64(x64):
            jaxpr = _traced(fn, operands)
        return _shield.bind(*operands, jaxpr=jaxpr, x64=x64)

    return shielded


def lower(fn: Body, ctx: Any, *values: Any) -> Any:
    """Lowers `fn`, a function of one device's arrays, as the lowering of a primitive."""
    jaxpr = _traced(fn, ctx.avals_in)
    return _lower_shielded(ctx, *values, jaxpr=jaxpr, x64=jax.config.jax_enable_x64)


def _traced(fn: Body, operands: Sequence[Any]) -> Any:
    with use_abstract_mesh(_NO_MESH):
        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        return jax.make_jaxpr(fn)(*structs)


def _lower_shielded(ctx: Any, *values: Any, jaxpr: Any, x64: bool) -> Any:
    with use_abstract_mesh(_NO_MESH), jax.enable_x64(x64):
        inner = ctx.replace(avals_in=list(jaxpr.in_avals), avals_out=list(jaxpr.out_avals))
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *values)


_shield = Primitive("normfuse_without_mesh")
_shield.multiple_results = True
_shield.def_abstract_eval(lambda *operands, jaxpr, x64: list(jaxpr.out_avals))
mlir.register_lowering(_shield, _lower_shielded)
needs_devices.add(_shield)
