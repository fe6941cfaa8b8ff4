"""A kernel: one device's share of an operation, as a JAX primitive with a lowering per platform."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from normfuse.native import fallback
from normfuse.native.fallback import Unsupported
from normfuse.native.jax_private import needs_devices_during_lowering

_NO_MESH = AbstractMesh((), ())
_ONE_LOOP = "XLA itself makes one loop of it"


class Kernel:
    """One device's share of an operation.

    Args:
      name: the primitive is `normfuse_<name>`.
      definition: the operation in plain JAX, `(*operands, **params) -> list of arrays`. It gives
        the result types, and is what runs on platforms without a kernel.
      cpu: `(*operands, **params) -> list of arrays` through `jax.ffi`; None where the definition
        is as fast, being one loop to XLA.
      cuda: `(target, *operands, **params) -> list of arrays`, or None; `target` describes the GPU.

    `cpu` and `cuda` raise `Unsupported` when they cannot serve. With `strict=True` that becomes a
    NotImplementedError, otherwise the definition serves and the reason is logged once.
    """

    def __init__(
        self,
        name: str,
        definition: Callable[..., Sequence[jax.Array]],
        *,
        cpu: Callable[..., Sequence[jax.Array]] | None = None,
        cuda: Callable[..., Sequence[jax.Array]] | None = None,
    ):
        self.name = name
        self.definition = definition
        self.primitive = Primitive(f"normfuse_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._impl)
        needs_devices_during_lowering(self.primitive)
        mlir.register_lowering(self.primitive, self._lower(None, "this platform has no kernel"))
        here = self._lower(cpu) if cpu else self._lower(None, _ONE_LOOP, by_design=True)
        mlir.register_lowering(self.primitive, here, platform="cpu")
        if cuda is not None:
            mlir.register_lowering(self.primitive, self._lower_cuda(cuda), platform="cuda")

    def __call__(
        self, *operands: jax.Array, strict: bool = False, **params: Any
    ) -> list[jax.Array]:
        return self.primitive.bind(*operands, strict=strict, **params)

    def _impl(self, *operands, **params):
        return jax.jit(functools.partial(self.primitive.bind, **params))(*operands)

    def _abstract_eval(self, *operands, strict, **params):
        del strict
        types = result_types(
            self.definition, tuple((a.shape, a.dtype) for a in operands), tuple(params.items())
        )
        like = operands[0]  # the mesh and the manual axes around a shard are those of its operands
        return [
            like.update(
                shape=t.shape,
                dtype=t.dtype,
                weak_type=False,
                sharding=NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(t.shape))),
            )
            for t in types
        ]

    def _lower(self, serve, reason: str = "", by_design: bool = False):
        def rule(ctx, *values, strict, **params):
            try:
                if serve is None:
                    raise Unsupported(reason)
                return lower(functools.partial(serve, **params), ctx, *values)
            except Unsupported as error:
                where = f"on {'/'.join(ctx.module_context.platforms)}, {error}"
                if strict or not by_design:
                    fallback.report(self.name, where, strict=strict)
                return lower(functools.partial(self.definition, **params), ctx, *values)

        return rule

    def _lower_cuda(self, cuda):
        def rule(ctx, *values, strict, **params):
            from normfuse.native import device  # only a CUDA lowering needs the CUDA engine

            def serve(*operands, **params):
                if not all(isinstance(n, int) for a in operands for n in a.shape):
                    raise Unsupported("a kernel is compiled for one shape, and this is symbolic")
                return cuda(device.target_for(ctx), *operands, **params)

            return self._lower(serve)(ctx, *values, strict=strict, **params)

        return rule


@functools.lru_cache(maxsize=4096)
def result_types(definition, operands, params) -> list[jax.ShapeDtypeStruct]:
    """The result types of `definition` on operands given as (shape, dtype) pairs."""
    with use_abstract_mesh(_NO_MESH):
        structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
        return list(jax.eval_shape(functools.partial(definition, **dict(params)), *structs))


def without_mesh(fn: Callable[..., Sequence[jax.Array]], x64: bool) -> Callable[..., list]:
    """Traces and lowers `fn` with no mesh in sight, and with 64-bit types as `x64` says.

    The arrays of a shard live on one device. From JAX 0.11 on an ambient Explicit mesh would
    annotate them, and XLA finds no implementation for a `Sharding` call in a per-device module.
    JAX 0.10 partitions in a thread of XLA's, which does not see `jax.enable_x64` of the caller's.
    """

    def shielded(*operands):
        with use_abstract_mesh(_NO_MESH), jax.enable_x64(x64):
            jaxpr = jax.make_jaxpr(fn)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands])
        return _shield.bind(*operands, jaxpr=jaxpr, x64=x64)

    return shielded


def lower(fn: Callable[..., Sequence[jax.Array]], ctx: mlir.LoweringRuleContext, *values):
    """Lowers `fn`, a function of one device's arrays, in the place of a primitive."""
    avals: Sequence[Any] = ctx.avals_in
    with use_abstract_mesh(_NO_MESH):
        jaxpr = jax.make_jaxpr(lambda *operands: list(fn(*operands)))(
            *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        )
    return _lower_shielded(ctx, *values, jaxpr=jaxpr, x64=jax.config.jax_enable_x64)


def _lower_shielded(ctx, *values, jaxpr, x64):
    with use_abstract_mesh(_NO_MESH), jax.enable_x64(x64):
        inner = ctx.replace(avals_in=list(jaxpr.in_avals), avals_out=list(jaxpr.out_avals))
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *values)


_shield = Primitive("normfuse_without_mesh")
_shield.multiple_results = True
_shield.def_abstract_eval(lambda *operands, jaxpr, x64: list(jaxpr.out_avals))
mlir.register_lowering(_shield, _lower_shielded)
needs_devices_during_lowering(_shield)
