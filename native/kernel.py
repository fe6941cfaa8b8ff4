"""A kernel: one device's share of an operation, as a JAX primitive with a lowering per platform."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from . import fallback
from .fallback import Order, Unsupported
from .jax_private import needs_devices_during_lowering

_NO_MESH = AbstractMesh((), ())
_ONE_LOOP = "XLA itself makes one loop of it"
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
# What serves where nothing was asked for. Pallas would be interpreted on a CPU: never unasked.
_BEST = {"cpu": ("native",), "cuda": ("native", "pallas"), "rocm": ("pallas",), "tpu": ("pallas",)}


class Kernel:
    """One device's share of an operation.

    Args:
      name: the primitive is `normfuse_<name>`.
      definition: the operation in plain JAX, `(*operands, **params) -> list of arrays`. It gives
        the result types, and is what runs on platforms without a kernel.
      cpu: `(*operands, **params) -> list of arrays` through `jax.ffi`; None where the definition
        is as fast, being one loop to XLA.
      cuda: `(target, *operands, **params) -> list of arrays`, or None; `target` describes the GPU.
      pallas: `(target, *operands, **params) -> list of arrays`, or None; `target` describes the
        platform, which may be any.
      plain_on_cuda: `(*operand types, **params) -> bool`: whether the definition was measured to be
        the best on a GPU, and serves where nothing was asked for; None for never.
      pallas_on_cuda: `(target, *operand types, **params) -> bool`: the same of the Pallas kernel.

    Each raises `Unsupported` when it cannot serve. The `Order` that a call is given says which are
    tried; when none serves the definition does and the reason is logged once, or, if the order is
    strict, that is a NotImplementedError.
    """

    def __init__(
        self,
        name: str,
        definition: Callable[..., Sequence[jax.Array]],
        *,
        cpu: Callable[..., Sequence[jax.Array]] | None = None,
        cuda: Callable[..., Sequence[jax.Array]] | None = None,
        pallas: Callable[..., Sequence[jax.Array]] | None = None,
        plain_on_cuda: Callable[..., bool] | None = None,
        pallas_on_cuda: Callable[..., bool] | None = None,
    ):
        self.name = name
        self.definition = definition
        self._plain_on_cuda, self._pallas_on_cuda = plain_on_cuda, pallas_on_cuda
        self._cpu, self._cuda, self._pallas = cpu, cuda, pallas
        self.primitive = Primitive(f"normfuse_{name}")
        self.primitive.multiple_results = True
        self.primitive.def_abstract_eval(self._abstract_eval)
        self.primitive.def_impl(self._impl)
        needs_devices_during_lowering(self.primitive)
        mlir.register_lowering(self.primitive, functools.partial(self._lower, None))
        for platform in _PLATFORMS:
            rule = functools.partial(self._lower, platform)
            mlir.register_lowering(self.primitive, rule, platform=platform)

    def __call__(
        self, *operands: jax.Array, strict: bool | Order = False, **params: Any
    ) -> list[jax.Array]:
        """Calls what the order `strict` says; a flag stands for native kernels alone."""
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

    def _lower(self, platform, ctx, *values, strict, **params):
        order = Order.of(strict)
        if not order.names and self._is_plain_best(platform, ctx, params):
            return lower(functools.partial(self.definition, **params), ctx, *values)
        where, reasons = "/".join(ctx.module_context.platforms), {}
        for name in order.names or self._best(platform, ctx, params):
            try:
                results = getattr(self, f"_lower_{name}")(platform, ctx, *values, **params)
            except Unsupported as error:
                reasons[name] = f"on {where}, {error}"
                continue
            except Exception as error:  # of Pallas, whose interfaces change from version to version
                if order.names or (platform, name) != ("cuda", "pallas"):
                    raise
                reasons[name] = f"on {where}, Pallas failed with {error!r}"
                continue
            if reasons:
                fallback.report(self.name, reasons, by=name)
            return results
        if order.strict or "pallas" in order.names or not self._is_one_loop(platform):
            fallback.report(self.name, reasons, strict=order.strict)
        return lower(functools.partial(self.definition, **params), ctx, *values)

    def _is_one_loop(self, platform):
        """Whether the definition is what is meant to serve, and not in a kernel's place."""
        return platform == "cpu" and self._cpu is None and self._cuda is not None

    def _is_plain_best(self, platform, ctx, params):
        return (
            platform == "cuda"
            and self._plain_on_cuda is not None
            and _has_static_shapes(ctx)
            and self._plain_on_cuda(*ctx.avals_in, **params)
        )

    def _best(self, platform, ctx, params):
        """What is tried where nothing was asked for."""
        best = _BEST.get(platform, ("native",)) if self._pallas else ("native",)
        if ctx.module_context.lowering_parameters.for_export and platform != "tpu":
            best = ("native",)  # JAX gives no guarantee for a Triton kernel in an export
        elif platform == "cuda" and self._is_pallas_best(ctx, params):
            best = ("pallas", "native")
        return best

    def _is_pallas_best(self, ctx, params):
        if self._pallas_on_cuda is None or not _has_static_shapes(ctx):
            return False
        from . import device

        try:
            return self._pallas_on_cuda(device.target_for(ctx), *ctx.avals_in, **params)
        except Unsupported:  # no GPU that kernels of ours are for
            return False

    def _native(self, platform: str | None, ctx: Any) -> Callable[..., Sequence[jax.Array]]:
        """The native kernel for a lowering."""
        if platform == "cuda" and self._cuda is not None:
            from . import device  # only a CUDA lowering needs the CUDA engine

            _require_static_shapes(ctx)
            return functools.partial(self._cuda, device.target_for(ctx))
        if platform == "cpu" and self._cpu is not None:
            return self._cpu
        if self._is_one_loop(platform):
            raise Unsupported(_ONE_LOOP)
        nowhere = self._cpu is None and self._cuda is None
        raise Unsupported(f"{'no platform has a' if nowhere else 'this platform has no'} kernel")

    def _lower_native(self, platform, ctx, *values, **params):
        serve = self._native(platform, ctx)
        return lower(functools.partial(serve, **params), ctx, *values)

    def _lower_pallas(self, platform, ctx, *values, **params):
        if self._pallas is None:
            raise Unsupported("there is no Pallas kernel for this")
        from .pallas import lowering  # Pallas is imported when it is first used

        _require_static_shapes(ctx)
        target = lowering.target_for(platform, ctx)
        with lowering.translated(target):
            serve = functools.partial(self._pallas, target, **params)
            return lower(serve, ctx, *values, mesh=lowering.mesh(target))


def _has_static_shapes(ctx):
    return all(isinstance(n, int) for a in ctx.avals_in for n in a.shape)


def _require_static_shapes(ctx):
    if not _has_static_shapes(ctx):
        raise Unsupported("a kernel is compiled for one shape, and this is symbolic")


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


def lower(
    fn: Callable[..., Sequence[jax.Array]],
    ctx: mlir.LoweringRuleContext,
    *values,
    mesh: AbstractMesh = _NO_MESH,
):
    """Lowers `fn`, a function of one device's arrays, in the place of a primitive.

    `mesh` has no axes; it can say which device the program is for.
    """
    avals: Sequence[Any] = ctx.avals_in
    with use_abstract_mesh(mesh):
        jaxpr = jax.make_jaxpr(lambda *operands: list(fn(*operands)))(
            *[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        )
    return _lower_shielded(ctx, *values, jaxpr=jaxpr, x64=jax.config.jax_enable_x64, mesh=mesh)


def _lower_shielded(ctx, *values, jaxpr, x64, mesh=_NO_MESH):
    with use_abstract_mesh(mesh), jax.enable_x64(x64):
        inner = ctx.replace(avals_in=list(jaxpr.in_avals), avals_out=list(jaxpr.out_avals))
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(inner, *values)


_shield = Primitive("normfuse_without_mesh")
_shield.multiple_results = True
_shield.def_abstract_eval(lambda *operands, jaxpr, x64: list(jaxpr.out_avals))
mlir.register_lowering(_shield, _lower_shielded)
needs_devices_during_lowering(_shield)
