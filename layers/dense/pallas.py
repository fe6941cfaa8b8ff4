"""A dense layer in one Pallas kernel (`implementation="pallas"`): product, bias and activation.

    y = activation(x · kernel + bias)

It serves arrays of one device, by pipelined blocks on TPUs and, interpreted, on CPUs. Its backward
is that of ordinary operations: XLA's products, and the activation's gradient from z = x · kernel +
bias, which the kernel also writes where something is differentiated.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...native.dtypes import compute_dtype
from ...native.implementation import BEST, Order, report
from ...native.kernel import Kernel
from ...native.pallas import lowering
from ...native.pallas.lowering import Target
from ...native.pallas.tiles import before, cdiv, clear, result_type
from ..core.activations import SCALARS, Activation, Scalar, scalar_of
from ..core.op import Op, Split, equally_varying, match, tangents_of
from . import epilogue
from .epilogue import Epilogue, finish
from .matmul import matmul

# ---------------------------------------------------------------- activations within a kernel

# erf(x) = x P(x²) / Q(x²) for |x| < 3.75, highest power first; it is 1 in float32 beyond.
_ERF_P = (2.2905065e-4, 3.4082910e-3, 5.0955695e-2, 1.8520832e-1, 1.1283791)
_ERF_Q = (-1.1791603e-7, 2.3547966e-5, 1.0179625e-3, 1.4070470e-2, 1.1098505e-1, 4.9746925e-1, 1.0)
_ERF_ONE = 3.7439211


def _polynomial(x: Array, coefficients: Sequence[float]) -> Any:
    return functools.reduce(lambda sum, c: sum * x + c, coefficients[1:], coefficients[0])


def _erf(x: Array) -> Array:
    x = jnp.clip(x, -_ERF_ONE, _ERF_ONE)
    square = x * x
    return x * (_polynomial(square, _ERF_P) / _polynomial(square, _ERF_Q))


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: Array) -> Array:
    u = jnp.exp(-jnp.abs(x))
    v = 1.0 + u  # log(1 + u) is log(v) · u / (v − 1): the rounding of v cancels (Kahan)
    log = jnp.where(v == 1.0, u, jnp.log(v) * u / jnp.where(v == 1.0, 1.0, v - 1.0))
    return jnp.maximum(x, 0.0) + log


def _expm1(x: Array) -> Array:
    """e^x − 1 for x up to 0."""
    t = jnp.tanh(0.5 * x)
    return 2.0 * t / (1.0 - t)


# The activations whose functions in plain JAX have operations that some Pallas back end misses.
_WITHIN: dict[str, Callable[[Array], Array]] = {
    "elu": lambda x: jnp.where(x > 0, x, _expm1(jnp.minimum(x, 0.0))),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x * math.sqrt(0.5))),
    "mish": lambda x: x * jnp.tanh(_softplus(x)),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: jnp.maximum(x, 0.0),
    "sigmoid": lambda x: _sigmoid(x),
    "silu": lambda x: x * _sigmoid(x),
    "softplus": lambda x: _softplus(x),
    "squared_relu": lambda x: jnp.maximum(x, 0.0) * jnp.maximum(x, 0.0),
    "gelu_tanh": lambda x: (
        0.5 * x * (1.0 + jnp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    ),
}


def activation_within(function: Scalar) -> Callable[[Array], Array]:
    """Returns an activation by operations that Pallas's back ends have, for float32."""
    return _WITHIN.get(function.name, function)


# ---------------------------------------------------------------- the kernel, on matrices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """The static description of the layer."""

    op: str = "dense"  # the function the user called
    function: Scalar | None = None  # the activation
    contract: int = 0  # the kernel's summed axis
    has_bias: bool = False
    keep: bool = False  # return z too
    precision: str | None = None  # the product's precision


def define(spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """`(x (m, k), w (k, n)[, bias (n,)]) -> y[, z]`: z = x · w + bias, y = activation(z).

    x and w have one dtype, which y and z are rounded to; the rest is float32 (or float64).
    """
    compute = compute_dtype(x.dtype)
    z = lax.dot(x, w, precision=spec.precision, preferred_element_type=compute)
    for b in bias:
        z = z + b.astype(compute)
    y = z if spec.function is None else spec.function(z)
    return [y.astype(x.dtype), *[z.astype(x.dtype)] * spec.keep]


_M, _N, _K = 512, 512, 512  # float32: 1 MiB each of x, w, the sums and y, most of them twice


def run(target: Target, spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """`define` by the platform's kernel, on blocks.

    Raises:
      Unsupported: for GPUs and dtypes that no kernel takes.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    lowering.require_dtypes(target, x.dtype)
    function = spec.function
    if function is not None and not target.interpret:
        function = activation_within(function)

    def epilogue(sums: Array, *bias: Array) -> list[Array]:
        z = sums + bias[0] if bias else sums
        y = z if function is None else function(z)
        return [y, z] if spec.keep else [y]

    biases = [b[None].astype(compute_dtype(x.dtype)) for b in bias]
    (m, k), n, compute = x.shape, w.shape[1], compute_dtype(x.dtype)
    tm, tn, tk = (min(size, tile) for size, tile in zip((m, n, k), (_M, _N, _K)))
    steps = cdiv(k, tk)

    def on_tiles(x_ref, w_ref, *refs):
        sums = refs[-1]
        step = pl.program_id(2)
        pl.when(step == 0)(lambda: clear(sums))
        x, w = x_ref[...], w_ref[...]
        if k % tk:  # beyond the end lies anything, even infinities: set both sides to zero
            x, w = before(x, k - step * tk, 1), before(w, k - step * tk, 0)
        sums[...] += lax.dot(x, w, precision=spec.precision, preferred_element_type=compute)

        @pl.when(step == steps - 1)
        def _():
            values = epilogue(sums[...], *[ref[...] for ref in refs[: len(biases)]])
            for ref, value in zip(refs[len(biases) : -1], values):
                ref[...] = value.astype(ref.dtype)

    out = pl.BlockSpec((tm, tn), lambda i, j, s: (i, j))
    return pl.pallas_call(
        on_tiles,
        grid=(cdiv(m, tm), cdiv(n, tn), steps),
        in_specs=[
            pl.BlockSpec((tm, tk), lambda i, j, s: (i, s)),
            pl.BlockSpec((tk, tn), lambda i, j, s: (s, j)),
            *[pl.BlockSpec((1, tn), lambda i, j, s: (0, j))] * len(biases),
        ],
        out_specs=[out] * (1 + spec.keep),
        out_shape=[result_type((m, n), x.dtype)] * (1 + spec.keep),
        scratch_shapes=[pltpu.VMEM((tm, tn), compute)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=target.interpret,
        name="pallas_dense",
    )(x, w, *biases)


kernel = Kernel("dense", define, {"pallas": run})


# ---------------------------------------------------------------- the operation
# x (*rows, k), kernel of any rank[, bias] -> y[, z], both (*rows, *outs)


def define_on_arrays(spec: Dense, x: Array, w: Array, *bias: Array) -> list[Array]:
    """The layer as XLA's product and what follows it, which are split over a mesh."""
    z = matmul(x, w, dtype=x.dtype, contract=spec.contract)
    z = finish(z, bias[0] if bias else None, None, x.dtype)
    function = spec.function and spec.function.function
    return [finish(z, None, function, x.dtype), *[z] * spec.keep]


def _body(spec: Dense, split: Split, x: Array, w: Array, *bias: Array, order: Order) -> list[Array]:
    """One device's arrays as matrices."""
    del split
    w = jnp.moveaxis(w.astype(x.dtype), spec.contract, 0)
    rows, outs = x.shape[:-1], w.shape[1:]
    flat = [x.reshape(math.prod(rows), x.shape[-1]), w.reshape(w.shape[0], math.prod(outs))]
    flat += [b.reshape(-1) for b in bias]
    empty = 0 in x.shape or 0 in w.shape
    results = define(spec, *flat) if empty else kernel(spec, *flat, order=order)
    return [r.reshape(*rows, *outs) for r in results]


def _batch(
    op: Op, args: Any, dims: Any, *, spec: Dense, order: Order
) -> tuple[list[Array], list[int]]:
    """A batch of x is one more dimension of rows, the first: x's last is the summed one."""
    x_dim, *others = dims
    if all(dim is None for dim in others):
        results = op(spec, jnp.moveaxis(args[0], x_dim, 0), *args[1:], order=order)
    else:
        reason = "vmap over kernels is a batched product, which XLA computes"
        report(spec.op, reason, strict=order.strict, names=order.names)
        results = jax.vmap(functools.partial(op.plain, spec), tuple(dims))(*args)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, *, spec: Dense, order: Order) -> Any:
    kept = replace(spec, keep=spec.keep or spec.function is not None)
    results = layer(kept, *primals, order=order)
    moved = tangents_of(
        layer, _gradients, kept, primals, tangents, results, results[1:], order=order
    )
    return results[: 1 + spec.keep], moved[: 1 + spec.keep]


def _gradients(
    spec: Dense, cts: Any, operands: Any, z: Any, wanted: Sequence[bool], *, order: Order
) -> list[Any]:
    """Returns those of x, the kernel and the bias: two products, and one pass before them."""
    del order
    (x, kernel, *bias), (dy, *dz) = operands, cts
    if dy is None or any(d is not None for d in dz):  # in a second derivative
        results, pull = jax.vjp(functools.partial(layer.plain, spec), *operands)
        return list(pull([jnp.zeros_like(r) if ct is None else ct for r, ct in zip(results, cts)]))
    found: list[Any] = [dy]
    if spec.function is not None:
        ndim = x.ndim + kernel.ndim - 2
        axes = tuple(range(x.ndim - 1, ndim)) if bias else ()
        after = Epilogue(
            op=spec.op,
            function=spec.function,
            axes=axes,
            has_bias=bool(bias),
            out_dtype=x.dtype.name,
        )
        shift = [match(jnp.zeros_like(b), z[0], axes) for b in bias]  # z has the bias already
        here = [True, *wanted[2:]]
        found = epilogue.gradients(after, [dy], [*z, *shift], (), here, order=BEST)
    elif bias:
        add = lambda y, shift: finish(y, shift, None, x.dtype)
        found = [*jax.vjp(add, dy, jnp.zeros_like(bias[0]))[1](dy)]
    product = functools.partial(matmul, dtype=x.dtype, contract=spec.contract)
    of_x = jax.vjp(lambda x: product(x, kernel), x)[1] if wanted[0] else None
    of_kernel = jax.vjp(lambda kernel: product(x, kernel), kernel)[1] if wanted[1] else None
    pulled = [pull(found[0])[0] if pull else None for pull in (of_x, of_kernel)]
    return [*pulled, *found[1:]]


layer = Op("dense_layer", define_on_arrays, body=_body, batch=_batch, jvp=_jvp)


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None,
    *,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    contract: int = 0,
    order: Order,
) -> Array:
    """Returns `activation(x · kernel + bias)` for x `(*rows, n)`, rounded once to `dtype`.

    The kernel has any rank; its axis `contract` has n elements, and the others, which are the
    bias's, follow x's rows in the result. `order` says which kernels to try.

    Raises:
      NotImplementedError: if no kernel of a strict `order` can serve, or for an activation that is
        not one of `SCALARS`.
    """
    function = scalar_of(activation)
    if activation is not None and function not in SCALARS.values():
        raise NotImplementedError(
            "dense: implementation='pallas' has kernels for the activations with names alone, got "
            f"{activation!r}; use 'xla'"
        )
    precision = jax.config.jax_default_matmul_precision
    has_bias = bias is not None
    spec = Dense(function=function, contract=contract, has_bias=has_bias, precision=precision)
    biases = [] if bias is None else [bias.astype(compute_dtype(dtype))]
    return layer(spec, *equally_varying(x.astype(dtype), kernel, *biases), order=order)[0]
