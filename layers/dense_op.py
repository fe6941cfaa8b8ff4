"""A dense layer in one kernel, as a primitive on global arrays, partitioned as `jnp.matmul` is.

(x (*rows, k), kernel (k, *outs)[, bias (*outs)]) -> y[, z], both (*rows, *outs)
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..native import dense as native
from ..native import fallback
from ..native.jax_private import needs_devices_during_lowering
from ..native.kernel import lower, without_mesh
from .op import compile_when_eager, devices_of, reshard_like, where_lowered
from .partition import name_callback
from .rounding import wide
from .specs import axes_of, whole
from .tiling import mesh_and_spec

dense_p = Primitive("normfuse_dense_layer")
dense_p.multiple_results = True


def _plain(x, kernel, *bias, order=None, **flags):
    """The same in plain JAX."""
    del order
    return _on_matrices(native.definition, x, kernel, *bias, **flags)


def _on_matrices(fn, x, kernel, *bias, **flags):
    """`fn`, a function of matrices, on one device's arrays of any rank."""
    rows, outs = x.shape[:-1], kernel.shape[1:]
    flat = [x.reshape(math.prod(rows), x.shape[-1]), kernel.reshape(x.shape[-1], math.prod(outs))]
    results = fn(*flat, *[b.reshape(-1) for b in bias], **flags)
    return [r.reshape(*rows, *outs) for r in results]


def _body(split_in, x, kernel, *bias, order, function, precision, keep):
    """One device's share: `split_in` are the mesh axes over which it has a part of every sum."""
    if 0 in x.shape or 0 in kernel.shape:
        flags = {"function": function, "precision": precision, "keep": keep}
        z = jax.lax.psum(_plain(x, kernel, **{**flags, "function": None, "keep": False}), split_in)
        return _finish(z[0], *bias, function=function, keep=keep)
    run = functools.partial(_on_matrices, native.forward, precision=precision, strict=order)
    if not split_in:
        return run(x, kernel, *bias, function=function, keep=keep)
    (part,) = run(x, kernel, function=None, keep=False)
    return _finish(jax.lax.psum(part, split_in), *bias, function=function, keep=keep)


def _finish(z, *bias, function, keep):
    """Bias and activation of a product that is a sum over devices."""
    sums = z.astype(wide(z.dtype))
    for b in bias:
        sums = sums + b
    y = sums if function is None else function(sums)
    return [y.astype(z.dtype), *[sums.astype(z.dtype)] * keep]


def _abstract_eval(x, kernel, *bias, keep, **_):
    del bias
    spec = (*whole(x.sharding.spec, x.ndim)[:-1], *whole(kernel.sharding.spec, kernel.ndim)[1:])
    y = x.update(
        shape=(*x.shape[:-1], *kernel.shape[1:]),
        weak_type=False,
        sharding=NamedSharding(x.sharding.mesh, P(*spec)),
    )
    return [y] * (1 + keep)


def _lower(ctx, *values, **params):
    x, kernel, *bias = ctx.avals_in
    where = where_lowered(ctx, x)
    if where.plain:
        fallback.report("dense", where.plain, strict=params["order"].strict, names=["pallas"])
        fn = functools.partial(_plain, **params)
    elif where.single:
        return lower(functools.partial(_body, (), **params), ctx, *values)
    elif where.explicit:
        specs = [whole(a.sharding.spec, a.ndim) for a in ctx.avals_in]
        fn = jax.shard_map(
            functools.partial(_body, axes_of(specs[0][-1]), **params),
            mesh=x.sharding.mesh,
            in_specs=tuple(P(*s) for s in specs),
            out_specs=P(*specs[0][:-1], *specs[1][1:]),
            axis_names=set(where.explicit),
            check_vma=False,
        )
    else:
        devices = devices_of(ctx)
        fn = _partitioned(devices, x.ndim, kernel.ndim, len(bias), params)
        results = mlir.lower_fun(fn, multiple_results=True)(ctx, *values)
        about = [d.id for d in devices], ctx.module_context.platforms, jax.config.jax_enable_x64
        name_callback(results, f"dense{sorted(params.items(), key=str)}{ctx.avals_in}{about}")
        return results
    return mlir.lower_fun(lambda *a: list(fn(*a)), multiple_results=True)(ctx, *values)


def _batch(args, dims, **params):
    """Examples are rows; where they have kernels of their own they take turns."""
    x, *rest = args
    if all(d is None for d in dims[1:]):
        results = dense_p.bind(jnp.moveaxis(x, dims[0], 0), *rest, **params)
    else:
        mapped = [jnp.moveaxis(a, d, 0) for a, d in zip(args, dims) if d is not None]

        def one(own):
            own = iter(own)
            operands = [a if d is None else next(own) for a, d in zip(args, dims)]
            return dense_p.bind(*operands, **params)

        results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


compile_when_eager(dense_p)
dense_p.def_abstract_eval(_abstract_eval)
needs_devices_during_lowering(dense_p)
mlir.register_lowering(dense_p, _lower)
batching.primitive_batchers[dense_p] = _batch


# ---------------------------------------------------------------- sharding


def _partitioned(devices, x_ndim, kernel_ndim, biases, params):
    """The layer as a function of global arrays on a mesh of Auto axes."""
    rows, outs = x_ndim - 1, kernel_ndim - 1
    x64 = jax.config.jax_enable_x64

    @custom_partitioning
    def call(*operands):
        return tuple(without_mesh(functools.partial(_body, (), **params), x64)(*operands))

    def layout(operands):
        """The mesh, the axes that sums run over, and the operands' and results' shardings."""
        found = [mesh_and_spec(a.sharding, a.ndim, devices) for a in operands[:2]]
        (mesh, x_spec), (other, kernel_spec) = found
        x_spec, kernel_spec = whole(x_spec, x_ndim), whole(kernel_spec, kernel_ndim)
        if not any(x_spec):
            mesh = other
        elif mesh.shape != other.shape:  # no spec says both: the kernel is gathered
            kernel_spec = (None,) * kernel_ndim
        divides = lambda entry, n: n % math.prod(mesh.shape[a] for a in axes_of(entry)) == 0
        keep = lambda spec, a: [e if divides(e, n) else None for e, n in zip(spec, a.shape)]
        x_spec, kernel_spec = keep(x_spec, operands[0]), keep(kernel_spec, operands[1])
        summed, taken = x_spec[-1], {a for entry in x_spec for a in axes_of(entry)}
        if not divides(summed, operands[1].shape[0]):
            summed = None
        out = [None if taken & set(axes_of(entry)) else entry for entry in kernel_spec[1:]]
        specs = [P(*x_spec[:-1], summed), P(summed, *out), *[P(*out)] * biases]
        y = P(*x_spec[:-1], *out)
        place = lambda spec: NamedSharding(mesh, spec)
        results = (place(y),) * (1 + params["keep"])
        return mesh, axes_of(summed), results, tuple(place(s) for s in specs)

    def partition(_, operands, results):
        del results
        mesh, summed, results, inputs = layout(operands)
        local = without_mesh(functools.partial(_body, summed, **params), x64)
        return mesh, lambda *values: tuple(local(*values)), results, inputs

    def infer(_, operands, results):
        del results
        return layout(operands)[2]

    r, o = (
        " ".join(f"{letter}{i}" for i in range(many)) for letter, many in (("r", rows), ("o", outs))
    )
    inputs = [f"{r} k", f"k {o}", *[o] * biases]
    rule = f"{', '.join(inputs)} -> {', '.join([f'{r} {o}'] * (1 + params['keep']))}"
    call.def_partition(
        partition, infer_sharding_from_operands=infer, sharding_rule=rule, decode_shardings=False
    )
    return lambda *operands: list(call(*operands))


def fitting(x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> list[jax.Array]:
    """The operands with shardings that go together, where shardings are part of the type.

    x keeps its own; the kernel is gathered over mesh axes that x's dimensions use, and split over
    what x's last dimension is split over.
    """
    meshes = [jax.typeof(a).sharding.mesh for a in (x, kernel)]
    if not any(mesh.explicit_axes for mesh in meshes):
        return [x, kernel, *bias]
    if not meshes[0].explicit_axes:
        x = reshard_like(x, kernel, P(*[None] * x.ndim))
    x_spec = whole(jax.typeof(x).sharding.spec, x.ndim)
    stored = whole(jax.typeof(kernel).sharding.spec, kernel.ndim)
    taken = {a for entry in x_spec for a in axes_of(entry)}
    out = tuple(None if taken & set(axes_of(entry)) else entry for entry in stored[1:])
    kernel = reshard_like(kernel, x, P(x_spec[-1], *out))
    return [x, kernel, *[reshard_like(b, x, P(*out)) for b in bias]]
