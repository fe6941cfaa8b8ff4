"""RMSNorm into a dense layer: the normalised input is computed again, not kept."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding

from ...native.implementation import Implementation, choose, native_or_best
from ..core.arguments import Quantization, check_quantization, finite, floating, floating_dtype
from ..core.op import match, vary, varying_axes
from ..norm import rms_norm
from . import fp8_norm
from .dense import check_shapes
from .epilogue import Activation, finish, finish_natively, resolve, scalar_of
from .fp8 import multiply
from .gated import gate_and_up
from .matmul import shared
from .remat import Normalised, products


def norm_dense(
    x: Array,
    scale: Array | None,
    kernel: Array,
    bias: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    activation: Activation = None,
    dtype: jax.typing.DTypeLike | None = None,
    recompute: bool = True,
    quantization: Quantization = None,
    implementation: Implementation = None,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """`dense` of `rms_norm(x, scale)`, which need not be kept for the backward.

        y = activation(rms_norm(x, scale) · kernel + bias)

    The backward computes the normalised x again from x and the reciprocal root mean squares, one
    float32 a row: an array of x's size less for every layer of a model. Values, gradients, dtypes
    and shardings are those of the two ops.

    Args:
      x: `(*rows, in)`; float64, float32, bfloat16 or float16, as all operands.
      scale: `(in,)`, or None.
      kernel: `(in, *out)`.
      bias: `(*out,)`.
      eps, scale_offset: as for `rms_norm`.
      activation, out_sharding: as for `dense`.
      dtype: of the normalised x, the product and the result; x's where None.
      recompute: False keeps the normalised x instead: one pass over x less in the backward.
      quantization: as for `dense`; with "fp8" the codes of the normalised x are kept.
      implementation: None, "native" (the norm and what follows the product on kernels of ours,
        never plain HLO) or "xla".

    Returns:
      `(*rows, *out)` in `dtype`.

    Raises:
      TypeError: for integer or complex operands, and for float64 in FP8.
      ValueError: for shapes that do not fit, an unknown activation, quantization or implementation,
        a bad eps, or an `out_sharding` that cannot place the result.
      NotImplementedError: if `implementation` asks for what cannot serve; an ExceptionGroup of
        them where it names several.

    References:
      Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467; Chen et al.,
      "Training Deep Nets with Sublinear Memory Cost" (recomputation), arXiv:1604.06174.

    >>> import jax.numpy as jnp
    >>> from normfuse import norm_dense
    >>> y = norm_dense(jnp.array([[3.0, 4.0]]), jnp.ones(2), jnp.eye(2), activation="relu")
    >>> [round(value, 3) for value in y[0].tolist()]
    [0.849, 1.131]
    """
    op, kernels = "norm_dense", (floating("norm_dense", "kernel", kernel),)
    x, scale, dtype, options = _check(op, x, scale, eps, scale_offset, dtype)
    bias = None if bias is None else floating(op, "bias", bias)
    check_shapes(op, x, kernels[0], bias, out_sharding=out_sharding)
    resolve(activation, op)
    check_quantization(op, quantization, dtype)
    options |= {"out_sharding": out_sharding, "recompute": recompute}
    options["quantization"] = quantization
    options |= {"activation": activation, "implementation": implementation}
    return apply(x, scale, kernels, [bias], dtype=dtype, **options)[0]


def apply(
    x: Array,
    scale: Array | None,
    kernels: Sequence[Array],
    biases: Sequence[Array | None],
    *,
    activation: Activation = None,
    dtype: str,
    implementation: Implementation,
    **options: Any,
) -> list[Array]:
    """`norm_dense` with each kernel, for operands known to fit.

    They are stored `(out, in)` with `contract=1`. With a `residual` the sum x + residual is what is
    normalised, and the last result.
    """
    op = "norm_dense"
    # With an activation the backward has larger arrays to hide the normalised x behind.
    project = functools.partial(
        _project, op, x, scale, tuple(kernels), dtype, apart=activation is None, **options
    )

    def each(end, zs):
        return [*map(end, zs, biases), *zs[len(biases) :]]

    def native(strict):
        end = lambda z, bias: finish(z, bias, activation, dtype)  # nothing to do, or plain JAX
        if scalar_of(activation) is not None or (strict and activation is not None):
            end = lambda z, bias: finish_natively(
                op, z, None, bias, activation, dtype, strict=strict
            )
        return each(end, project(strict=strict))

    def xla(strict):
        del strict
        return each(lambda z, bias: finish(z, bias, activation, dtype), project(norm="xla"))

    return choose(op, implementation, {"native": native, "xla": xla})


def norm_gated_dense(
    x: Array,
    scale: Array | None,
    kernel_gate: Array,
    kernel_up: Array | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    activation: Activation = "silu",
    dtype: jax.typing.DTypeLike | None = None,
    recompute: bool = True,
    quantization: Quantization = None,
    implementation: Implementation = None,
    out_sharding: NamedSharding | jax.P | None = None,
) -> Array:
    """`gated_dense` of `rms_norm(x, scale)`, which is not kept for the backward.

        n = rms_norm(x, scale)        y = activation(n · kernel_gate) · (n · kernel_up)

    Takes what `norm_dense` does but a bias, and kernels and an `activation` as `gated_dense`: two
    kernels `(in, *out)`, or one `(in, 2, *out)`. Raises what both do.

    Returns:
      `(*rows, *out)` in `dtype`.

    >>> import jax.numpy as jnp
    >>> from normfuse import norm_gated_dense
    >>> x, kernel = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4))
    >>> norm_gated_dense(x, jnp.ones(3), kernel, kernel, activation="silu").shape
    (2, 4)
    """
    op = "norm_gated_dense"
    x, scale, dtype, options = _check(op, x, scale, eps, scale_offset, dtype)
    kernels = tuple(gate_and_up(op, x, kernel_gate, kernel_up, activation, out_sharding))
    check_quantization(op, quantization, dtype)
    options |= {"out_sharding": out_sharding, "recompute": recompute}
    options["quantization"] = quantization
    project = functools.partial(_project, op, x, scale, kernels, dtype, **options)
    stack = None if len(kernels) > 1 else x.ndim - 1

    def native(strict):
        z, *up = project(strict=strict)
        if scalar_of(activation) is None and not strict:
            return finish(z, None, activation, dtype, *up, stack=stack)
        options = {"strict": strict, "stack": stack}
        return finish_natively(op, z, up[0] if up else None, None, activation, dtype, **options)

    def xla(strict):
        del strict
        z, *up = project(norm="xla")
        return finish(z, None, activation, dtype, *up, stack=stack)

    return choose(op, implementation, {"native": native, "xla": xla})


def _check(op, x, scale, eps, scale_offset, dtype):
    """x, scale and the dtype, and what rms_norm is given."""
    x = floating(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must be (*rows, in), got a scalar; reshape it to (1,)")
    if scale is not None:
        scale = floating(op, "scale", scale)
        if scale.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: scale must have the shape of x's last axis, {x.shape[-1:]}; got "
                f"{scale.shape}"
            )
    options: dict[str, Any] = {
        "eps": finite(op, "eps", eps, least=0),
        "scale_offset": finite(op, "scale_offset", scale_offset),
    }
    return x, scale, floating_dtype(op, dtype, x.dtype), options


def _project(
    op: str,
    x: Array,
    scale: Array | None,
    kernels: tuple[Array, ...],
    dtype: str,
    *,
    residual: Array | None = None,
    eps: float,
    scale_offset: float = 0.0,
    recompute: bool = True,
    apart: bool = False,
    quantization: Quantization = None,
    strict: bool = False,
    norm: str | None = None,
    contract: int = 0,
    out_sharding: Any = None,
) -> tuple[Array, ...]:
    """The products of the normalised x with each kernel; `norm` is rms_norm's implementation.

    With a residual those of x + residual, and the sum.
    """
    common: dict[str, Any] = {"contract": contract, "out_sharding": out_sharding}
    options: dict[str, Any] = {"eps": eps, "scale_offset": scale_offset}
    if quantization and fp8_norm.serves(kernels, contract, x, residual, scale):
        of = fp8_norm.norm_of(op, x, scale, dtype, residual=residual is not None, **options)
        common |= {"order": native_or_best(strict), "plain": norm == "xla", "residual": residual}
        return fp8_norm.multiply_normalised(of, x, scale, kernels, **common)
    if norm or not recompute or quantization or residual is not None:
        options |= {"implementation": "native" if strict else norm, "dtype": dtype}
        if residual is None:
            n, *h = (rms_norm(x, scale, **options),)
        else:
            n, *h = rms_norm(x, scale, residual=residual, **options)
        common |= {"quantization": quantization, "order": native_or_best(strict)}
        pairs = zip([n] * len(kernels) if norm else shared(n, len(kernels)), kernels)
        return *(multiply(op, n, kernel, dtype=dtype, **common) for n, kernel in pairs), *h
    producer = Normalised(op, eps, scale_offset, dtype, native_or_best(strict), apart)
    if scale is None:
        return products(producer, (x,), kernels, **common)
    x = vary(x, varying_axes(scale))
    return products(producer, (x, match(scale, x, [x.ndim - 1])), kernels, **common)
