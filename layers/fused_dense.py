"""A dense layer in one kernel: product, bias and activation; the gradients' products are XLA's.

The forward is a primitive of its own, partitioned as `jnp.matmul` would be. Its derivative is made
of ordinary operations: `layers.matmul`'s, whose kernel gradient is the output of one GEMM, and the
activation's, recomputed from z = x · kernel + bias, which the forward kernel also writes when there
is something to differentiate.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.layers import matmul
from normfuse.layers.activations import finish
from normfuse.layers.op import devices_of, reshard_like, vary, where_lowered
from normfuse.layers.partition import name_callback
from normfuse.layers.rounding import wide
from normfuse.layers.tiling import mesh_and_spec
from normfuse.native import dense as native
from normfuse.native import fallback
from normfuse.native.fallback import Order, Unsupported
from normfuse.native.jax_private import needs_devices_during_lowering
from normfuse.native.kernel import lower, without_mesh
from normfuse.native.pallas import activation


@dataclasses.dataclass(frozen=True)
class Options:
    """What a fused dense layer is, beside its operands.

    Attributes:
      function: the activation, or None.
      dtype: of the product and of y.
      contract: the kernel's summed axis.
      keep: whether z is a result.
      precision: of the product.
      order: which kernels are to serve.
    """

    function: Callable[[jax.Array], jax.Array] | None
    dtype: jnp.dtype
    contract: int
    keep: bool
    precision: str | None
    order: Order


def fused_dense(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    function: Callable[[jax.Array], jax.Array] | None,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    order: Order,
) -> jax.Array:
    """`function(x · kernel + bias)`, rounded once to `dtype`.

    Args:
      x: `(*rows, n)`.
      kernel: any rank; its axis `contract` has n elements, the others follow x's rows in y.
      bias: of the kernel's other axes.
      function: element-wise, given float32 (float64 for float64).
      dtype: of the operands of the product, and of y.
      contract: see kernel.
      order: which kernels are to serve.

    Raises:
      NotImplementedError: for what no kernel of `order` can serve, if it is strict; and for an
        activation that is no function of numbers alone.
    """
    if function is not None:
        try:
            activation.check(function, wide(dtype))
        except Unsupported as error:
            fallback.report("dense", str(error), strict=True, names=["pallas"])
    options = Options(
        function, jnp.dtype(dtype), contract, False, jax.config.jax_default_matmul_precision, order
    )
    arrays = [x.astype(dtype), kernel, *[bias] * (bias is not None)]
    varying = frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays))
    return _fused(options, *[vary(a, varying) for a in arrays])[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(options: Options, x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> list[jax.Array]:
    """y, and z if kept."""
    kernel = jnp.moveaxis(kernel.astype(options.dtype), options.contract, 0)
    operands = _fitting(x, kernel, *[b.astype(wide(options.dtype)) for b in bias])
    flags = {"function": options.function, "precision": options.precision, "keep": options.keep}
    return dense_p.bind(*operands, order=options.order, **flags)


@functools.partial(_fused.defjvp, symbolic_zeros=True)
def _(options, primals, tangents):
    (x, kernel, *bias), (dx, dkernel, *dbias) = primals, tangents
    kept = dataclasses.replace(options, keep=options.keep or options.function is not None)
    y, *z = _fused(kept, x, kernel, *bias)
    product = functools.partial(matmul.matmul, dtype=options.dtype, contract=options.contract)
    terms = [jnp.zeros_like(y)]
    if not isinstance(dx, SymbolicZero):
        terms.append(jax.jvp(lambda x: product(x, kernel), (x,), (dx,))[1])
    if not isinstance(dkernel, SymbolicZero):
        terms.append(jax.jvp(lambda kernel: product(x, kernel), (kernel,), (dkernel,))[1])
    dproduct = functools.reduce(jnp.add, terms[1:] or terms)

    def rest(activation):
        """The tangent of what follows the product: bias and activation in one pass each way."""
        shift = [jnp.zeros_like(b) for b in bias]  # z has the bias already
        if not bias or isinstance(dbias[0], SymbolicZero):
            after = lambda z: finish(z, None, activation, options.dtype)
            return jax.jvp(after, (z[0] if z else y,), (dproduct,))[1]
        after = lambda z, b: finish(z, b, activation, options.dtype)
        return jax.jvp(after, (z[0] if z else y, *shift), (dproduct, *dbias))[1]

    dy = rest(options.function)
    return ([y, z[0]], [dy, rest(None)]) if options.keep else ([y], [dy])


# ---------------------------------------------------------------- the primitive
# (x (*rows, k), kernel (k, *outs)[, bias (*outs)]) -> y[, z], both (*rows, *outs)

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
    spec = (*_whole(x.sharding.spec, x.ndim)[:-1], *_whole(kernel.sharding.spec, kernel.ndim)[1:])
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
        specs = [_whole(a.sharding.spec, a.ndim) for a in ctx.avals_in]
        fn = jax.shard_map(
            functools.partial(_body, _axes(specs[0][-1]), **params),
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


def _impl(*operands, **params):
    with jax.disable_jit(False):
        return _jitted(tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=256)
def _jitted(params):
    return jax.jit(functools.partial(dense_p.bind, **dict(params)))


dense_p.def_impl(_impl)
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
        x_spec, kernel_spec = _whole(x_spec, x_ndim), _whole(kernel_spec, kernel_ndim)
        if not any(x_spec):
            mesh = other
        elif mesh.shape != other.shape:  # no spec says both: the kernel is gathered
            kernel_spec = (None,) * kernel_ndim
        divides = lambda entry, n: n % math.prod(mesh.shape[a] for a in _axes(entry)) == 0
        keep = lambda spec, a: [e if divides(e, n) else None for e, n in zip(spec, a.shape)]
        x_spec, kernel_spec = keep(x_spec, operands[0]), keep(kernel_spec, operands[1])
        summed, taken = x_spec[-1], {a for entry in x_spec for a in _axes(entry)}
        if not divides(summed, operands[1].shape[0]):
            summed = None
        out = [None if taken & set(_axes(entry)) else entry for entry in kernel_spec[1:]]
        specs = [P(*x_spec[:-1], summed), P(summed, *out), *[P(*out)] * biases]
        y = P(*x_spec[:-1], *out)
        place = lambda spec: NamedSharding(mesh, spec)
        results = (place(y),) * (1 + params["keep"])
        return mesh, _axes(summed), results, tuple(place(s) for s in specs)

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


def _fitting(x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> list[jax.Array]:
    """The operands with shardings that go together, where shardings are part of the type.

    x keeps its own; the kernel is gathered over mesh axes that x's dimensions use, and split over
    what x's last dimension is split over.
    """
    meshes = [jax.typeof(a).sharding.mesh for a in (x, kernel)]
    if not any(mesh.explicit_axes for mesh in meshes):
        return [x, kernel, *bias]
    if not meshes[0].explicit_axes:
        x = reshard_like(x, kernel, P(*[None] * x.ndim))
    x_spec = _whole(jax.typeof(x).sharding.spec, x.ndim)
    stored = _whole(jax.typeof(kernel).sharding.spec, kernel.ndim)
    taken = {a for entry in x_spec for a in _axes(entry)}
    out = tuple(None if taken & set(_axes(entry)) else entry for entry in stored[1:])
    kernel = reshard_like(kernel, x, P(x_spec[-1], *out))
    return [x, kernel, *[reshard_like(b, x, P(*out)) for b in bias]]


def _whole(spec, ndim):
    return (*spec, *[None] * (ndim - len(spec)))


def _axes(entry):
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)
