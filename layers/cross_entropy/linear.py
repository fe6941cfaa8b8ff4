"""The fused linear layer and cross-entropy."""

import functools
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

from ...native.dtypes import NARROW, compute_dtype, holds
from ...native.implementation import BEST, Implementation, Order
from ..core.arguments import (
    Quantization,
    array_of,
    check_quantization,
    checked_softcap,
    choose,
    finite,
    flag,
    floating,
    floating_dtype,
    integer,
)
from ..core.op import Batching, Derivative, Op, match, reshard_like
from ..core.sharding import axes_of, whole, without
from ..dense.matmul import asked, equally_varying, with_main_gradient
from . import op as ops
from .op import Spec
from .softmax import IGNORED, UNSELECTED, Softmax, capped, of_rows

_OP = "linear_cross_entropy"
# softcap · tanh(z / softcap) loses logits of less than softcap · 1e-38, float32's least, and with a
# tiny softcap z / softcap is infinite; z_loss · lse² is infinite sooner than its factors.
_LARGE = 1e31
Reduction = Literal["mean", "sum", "none"]


def linear_cross_entropy(
    x: Array,
    kernel: Array,
    labels: Array,
    *,
    bias: Array | None = None,
    weights: Array | None = None,
    contract: int = 0,
    ignore: int | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    with_lse: bool = False,
    with_entropy: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    logits_dtype: jax.typing.DTypeLike | None = None,
    quantization: Quantization = None,
    chunk_rows: int | None = None,
    implementation: Implementation = None,
) -> Any:
    """The cross-entropy of a linear layer's logits, which are never in memory as a whole.

        z = x · kernel + bias    c = softcap · tanh(z / softcap)    lse = log Σ_j exp(c_j)
        loss = weight · (lse - Σ_j t_j · c_j + z_loss · lse²)
        t_j = (1 - label_smoothing) · [j = label] + label_smoothing / vocab

    Rows are computed in chunks. With `reduction="mean"` or `"sum"` a chunk's gradients are computed
    right after its loss, if the loss is differentiated: the logits are computed once, and the
    softmax's gradient replaces them. A later factor of the loss (its cotangent) other than 1 costs
    one pass over each gradient. With `"none"` the cotangents are known only in the backward, which
    computes each chunk's logits again.

    Gradients come in the operands' dtypes; the kernel's is summed over the chunks in float32, by
    the products that compute it. Rows may be split over any axes of a mesh, and the vocabulary over
    others: then a few numbers a row are exchanged, and no logits. A kernel that is stored in parts
    (FSDP) is gathered once, in `dtype`.

    Args:
      x: `(*rows, n)`; float64, float32, bfloat16 or float16, as the kernel.
      kernel: `(n, vocab)`, or with `contract=1` `(vocab, n)`, as a tied embedding.
      labels: `(*rows)` integers. One outside the vocabulary gives NaN, never another word's loss.
      bias: `(vocab,)`, added to the logits; None for none. A word whose bias is -inf, as that of a
        vocabulary's padding may be, has no share in the softmax and no gradient, unless a softcap
        bounds its logit; label smoothing makes every loss infinite then.
      weights: `(*rows)` numbers or booleans that multiply each row's loss; None for 1 everywhere.
        The loss is differentiable in them. They are plain factors: 0 times a loss that is infinite
        or NaN is NaN, as is its gradient. A row that may be anything is one to `ignore`.
      contract: the axis of the kernel that x's last is summed with.
      ignore: labels equal to it cost nothing and are not counted, whatever the rest of their row
        is: the loss is 0, and so are its gradients; None for none.
      softcap: bounds the logits; None for no bound.
      z_loss: the weight of lse², which keeps the logits from drifting.
      label_smoothing: from 0 to 1, how much of the label's target all words share.
      reduction: "mean", the sum of the losses divided by the sum of the weights of labels that are
        not ignored (0 if no row has a weight), "sum", or "none" for a loss a row.
      with_lse: also return `lse`, of every row; it is differentiable.
      with_entropy: also return every row's entropy, -Σ_j p_j · log p_j with p = exp(c - lse); it is
        differentiable. Gradients are computed in the backward then, as with `"none"`.
      dtype: the dtype of the products' operands; None: x's.
      logits_dtype: the dtype that the product rounds logits to, `dtype` or a wider one. None:
        `dtype`, but float32 for float16, in which logits beyond 65504 are infinite.
      quantization: "fp8" for products of FP8 codes in the gradient (docs/quantization.md), which is
        rounded at random, but alike each time. The loss and the log-sum-exps stay as they are, to
        the bit. Features that are no multiple of 16, and such a number of words that is below
        1024 or has a softcap or label smoothing, multiply in `dtype`.
      chunk_rows: rows of a chunk, on each device; None for as many as make 512 MiB of logits, in
        FP8 896 MiB of these and their gradient's codes.
      implementation: None, "native" (kernels for the softmax and its gradient) or "xla".

    Returns:
      The loss, float32 (float64 for float64): a scalar, or `(*rows)` for "none". With `with_lse` or
      `with_entropy` a tuple with these, `(*rows)`. A second derivative is that of plain JAX, with
      the logits in memory.

    Raises:
      TypeError: for operands that are not floating, labels that are not integers, weights that are
        neither real numbers nor booleans, options that are not numbers, or quantization of float64.
      ValueError: for shapes that do not fit, a bias of another length, labels on the host that are
        outside the vocabulary, an unknown reduction, implementation or quantization, a softcap that
        is not positive, a negative z_loss, a label_smoothing beyond 0 to 1, one of them that
        float32 cannot compute with, a logits_dtype that is narrower than dtype, or a chunk_rows
        that is not positive.
      NotImplementedError: if the `implementation` asked for cannot serve; an ExceptionGroup of
        them if it names several.

    References:
      Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, arXiv:2411.09009; Hsu et
      al., Liger Kernel, arXiv:2410.10989 (gradients in the forward pass); Chowdhery et al., PaLM,
      arXiv:2204.02311 (z-loss); Gemma Team, Gemma 2, arXiv:2408.00118 (softcap).

    >>> import jax, jax.numpy as jnp
    >>> from normfuse import linear_cross_entropy
    >>> x, kernel = jnp.ones((3, 2)), jnp.zeros((2, 4))
    >>> labels = jnp.array([1, 0, -100])
    >>> loss, dkernel = jax.value_and_grad(linear_cross_entropy, 1)(x, kernel, labels, ignore=-100)
    >>> round(float(loss), 4), dkernel[0].tolist()  # log 4
    (1.3863, [-0.25, -0.25, 0.25, 0.25])
    """
    x, kernel = floating(_OP, "x", x), floating(_OP, "kernel", kernel)
    if not isinstance(reduction, str) or reduction not in get_args(Reduction):
        listed = ", ".join(map(repr, get_args(Reduction)))
        raise ValueError(f"{_OP}: reduction must be one of {listed}, got {reduction!r}")
    _check_shapes(x, kernel, contract)
    labels, mask = _checked_labels(x, labels, kernel.shape[1 - contract], ignore)
    return loss_of_rows(
        x,
        kernel,
        labels,
        mask,
        bias=_checked_bias(bias, kernel.shape[1 - contract]),
        weights=_checked_weights(x, weights),
        contract=contract,
        ignores=ignore is not None,
        weighted=ignore is not None or weights is not None,
        softcap=softcap,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
        reduction=reduction,
        with_lse=flag(_OP, "with_lse", with_lse),
        with_entropy=flag(_OP, "with_entropy", with_entropy),
        dtype=dtype,
        logits_dtype=logits_dtype,
        quantization=quantization,
        chunk_rows=chunk_rows,
        implementation=implementation,
    )


def loss_of_rows(
    x: Array,
    kernel: Array,
    labels: Array,
    mask: Array,
    *,
    bias: Array | None = None,
    weights: Array | None = None,
    contract: int = 0,
    ignores: bool = False,
    weighted: bool = False,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    with_lse: bool = False,
    with_entropy: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    logits_dtype: jax.typing.DTypeLike | None = None,
    quantization: Quantization = None,
    chunk_rows: int | None = None,
    implementation: Implementation = None,
) -> Any:
    """`linear_cross_entropy`, with operands that are checked.

    Args:
      labels: `(*rows)` int32; those below 0 are no words (`softmax.UNSELECTED`, `softmax.IGNORED`).
      mask: `(*rows)` what multiplies each row's loss beside its weight: 0 for a row that does not
        count, NaN for a wrong label, else 1.
      ignores: there may be labels that are `IGNORED`.
      weighted: a row's weight or mask may be 0.
    """
    smoothing = finite(_OP, "label_smoothing", label_smoothing, least=0.0, most=1.0)
    dtype = floating_dtype(_OP, dtype, x.dtype)
    check_quantization(_OP, quantization, dtype)
    spec = Spec(
        softmax=Softmax(
            softcap=checked_softcap(_OP, softcap, _LARGE),
            z_loss=finite(_OP, "z_loss", z_loss, least=0.0, most=_LARGE),
            dtype=dtype,
            smoothing=smoothing,
            share=smoothing / kernel.shape[1 - contract] if smoothing else 0.0,
            entropy=with_entropy,
        ),
        contract=contract,
        logits=_logits_dtype(logits_dtype, dtype),
        precision=jax.config.jax_default_matmul_precision,
        chunk=None if chunk_rows is None else integer(_OP, "chunk_rows", chunk_rows, 1),
        bias=None if bias is None else False,
        ignores=ignores,
        weighted=weighted,
        quantized=quantization is not None,
    )

    sums = compute_dtype(dtype, spec.logits)
    weights = None if weights is None else weights.astype(sums)

    def serve(spec: Spec, order: Order) -> Any:
        operands = _operands(x.astype(dtype), kernel, labels, mask.astype(sums), weights, bias)
        return _reduced(spec, order, reduction, with_lse, *operands)

    return choose(
        _OP,
        implementation,
        {
            "native": lambda order: serve(spec, order),
            "xla": lambda order: serve(replace(spec, plain=True), BEST),
        },
    )


def best_words(x: Array, kernel: Array, **options: Any) -> Array:
    """Returns argmax_j c_j of each row, `(*rows)` int32, with c as in `linear_cross_entropy`.

    It has no gradient, and computes the logits in chunks by a product of its own.
    """
    spec, operands = _of_logits(*jax.lax.stop_gradient((x, kernel)), **options)
    return ops.argmax(spec, *operands)[0]


def all_logits(x: Array, kernel: Array, **options: Any) -> Array:
    """Returns c as in `linear_cross_entropy`, `(*rows, vocab)`, for few words."""
    spec, operands = _of_logits(x, kernel, **options)
    return capped(spec.softmax, ops.logits(spec, *operands))


def _of_logits(
    x: Array,
    kernel: Array,
    *,
    bias: Array | None = None,
    contract: int = 0,
    softcap: float | None = None,
    logits_dtype: Any = None,
) -> tuple[Spec, list[Array]]:
    """Returns the spec and the operands of logits alone."""
    dtype = x.dtype.name
    spec = Spec(
        softmax=Softmax(softcap=checked_softcap(_OP, softcap, _LARGE), dtype=dtype),
        contract=contract,
        logits=_logits_dtype(logits_dtype, dtype),
        precision=jax.config.jax_default_matmul_precision,
        bias=None if bias is None else False,
    )
    rows = jnp.zeros(x.shape[:-1], jnp.int32)
    bias = None if bias is None else jax.lax.stop_gradient(bias)
    x, _, _, _, *parameters = _operands(x, kernel, rows, rows, None, bias)
    w, more = _as_read(spec, x, *parameters)
    return spec, [x, w, *more]


# ---------------------------------------------------------------- arguments


def _check_shapes(x: Array, kernel: Array, contract: Any) -> None:
    if np.ndim(contract) or not hasattr(contract, "__index__") or contract not in (0, 1):
        raise ValueError(
            f"{_OP}: contract must be 0, for a kernel of (n, vocab), or 1, for (vocab, n); got "
            f"{contract!r}"
        )
    if x.ndim < 1:
        raise ValueError(f"{_OP}: x must be (*rows, n), got a scalar; reshape it to (1,)")
    forms = "(n, vocab)", "(vocab, n)"
    stored = forms[contract]
    if kernel.ndim != 2:
        raise ValueError(f"{_OP}: kernel must be {stored}, got shape {kernel.shape}")
    if kernel.shape[contract] != x.shape[-1]:
        hint = ""
        if kernel.shape[1 - contract] == x.shape[-1]:
            hint = f"; pass contract={1 - contract} if it is stored {forms[1 - contract]}"
        raise ValueError(
            f"{_OP}: kernel, {stored}, must have x's last axis of {x.shape[-1]} for n; got kernel "
            f"of shape {kernel.shape} and x of shape {x.shape}{hint}"
        )
    if kernel.shape[1 - contract] == 0:
        raise ValueError(f"{_OP}: kernel has no words, its shape is {kernel.shape}")


def _checked_labels(x: Array, labels: Any, vocabulary: int, ignore: Any) -> tuple[Array, Array]:
    """Returns the labels as int32, and for each row 1 if it counts, 0 if not, NaN if it is wrong.

    A wrong label is one outside the vocabulary, and becomes -1; one that is ignored `IGNORED`.
    """
    on_host = all(isinstance(a, np.ndarray | np.generic | int) for a in jax.tree.leaves(labels))
    given = array_of(_OP, "labels", labels)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(
            f"{_OP}: labels must be integers, got {given.dtype.name}; for probabilities use the "
            "logits of normfuse.dense"
        )
    if given.shape != x.shape[:-1]:
        raise ValueError(
            f"{_OP}: labels must have the shape of x's rows, {x.shape[:-1]}; got {given.shape}"
        )
    info = jnp.iinfo(given.dtype)
    ignore = None if ignore is None else integer(_OP, "ignore", ignore)
    is_label = ignore is not None and info.min <= ignore <= info.max
    ignored = given == ignore if is_label else jnp.zeros(given.shape, bool)
    sized = isinstance(vocabulary, int)  # or symbolic
    known = (given >= 0) & (given <= (min(vocabulary - 1, info.max) if sized else vocabulary - 1))
    if on_host and sized:
        host = np.asarray(labels)
        wrong = host[((host < 0) | (host >= vocabulary)) & (host != ignore)]
        if wrong.size:
            raise ValueError(
                f"{_OP}: labels must be from 0 to {vocabulary - 1}, the kernel's vocabulary"
                f"{'' if ignore is None else f', or ignore={ignore}'}; got {wrong[0]}"
            )
        ignored = jnp.asarray(host == ignore)  # also one of 64 bits, of which JAX may drop half
    # 0 / 0 where it is wrong: under jax.debug_nans the constant itself would be an error.
    mask = jnp.true_divide(known & ~ignored, known | ignored)
    found = jnp.where(known, given, -1).astype(jnp.int32)
    return jnp.where(ignored, jnp.int32(IGNORED), found), mask


def _checked_weights(x: Array, weights: Any) -> Array | None:
    if weights is None:
        return None
    given = array_of(_OP, "weights", weights)
    if jnp.issubdtype(given.dtype, jnp.complexfloating):
        raise TypeError(f"{_OP}: weights must be real numbers or booleans, got {given.dtype.name}")
    if given.shape != x.shape[:-1]:
        raise ValueError(
            f"{_OP}: weights must have the shape of x's rows, {x.shape[:-1]}; got {given.shape}"
        )
    return given


def _checked_bias(bias: Any, vocabulary: int) -> Array | None:
    if bias is None:
        return None
    bias = floating(_OP, "bias", bias)
    if bias.shape != (vocabulary,):
        raise ValueError(
            f"{_OP}: bias must have the shape ({vocabulary},), a number for each of the kernel's "
            f"words; got {bias.shape}"
        )
    return bias


def _logits_dtype(logits_dtype: Any, dtype: str) -> str:
    default = "float32" if dtype == "float16" else dtype
    name = floating_dtype(_OP, logits_dtype, default, "logits_dtype")
    if not holds(name, dtype):
        raise ValueError(f"{_OP}: logits_dtype must hold the values of dtype, {dtype}; got {name}")
    return name


# ---------------------------------------------------------------- operands that go together


def _operands(
    x: Array, kernel: Array, labels: Array, mask: Array, weights: Array | None, bias: Array | None
) -> list[Any]:
    """Returns x, labels, mask, weights, and the parameters, in matching shardings and varying axes.

    The last are the kernel; if it is of 16 bits, the zeros whose gradient is its main gradient
    (`dense.matmul`); and the bias, if there is one.
    """
    parameters = *with_main_gradient(kernel), bias
    x, labels, mask, weights, kernel, *more = equally_varying(x, labels, mask, weights, *parameters)
    meshes = [jax.typeof(a).sharding.mesh for a in (x, kernel)]
    if any(mesh.explicit_axes for mesh in meshes):
        if not meshes[0].explicit_axes:
            x = reshard_like(x, kernel, P(*[None] * x.ndim))
        rows = whole(jax.typeof(x).sharding.spec, x.ndim)[:-1]
        x = match_spec(x, x, P(*rows, None))
    rows = range(labels.ndim)
    of_rows = [None if a is None else match(a, x, rows) for a in (labels, mask, weights)]
    return [x, *of_rows, kernel, *[a for a in more if a is not None]]


def match_spec(array: Array, lead: Array, spec: P) -> Array:
    """Returns the array with this sharding on lead's mesh of Explicit axes."""
    return array if jax.typeof(array).sharding.spec == spec else reshard_like(array, lead, spec)


def _gathered(spec: Spec, x: Array, kernel: Array) -> Array:
    """Returns the kernel, on an Explicit mesh gathered over the axes that split x."""
    sharding = jax.typeof(kernel).sharding
    if not jax.typeof(x).sharding.mesh.explicit_axes:
        return kernel
    taken = {a for entry in jax.typeof(x).sharding.spec for a in axes_of(entry)}
    words = without(whole(sharding.spec, 2)[1 - spec.contract], taken)
    return match_spec(kernel, x, P(words, None) if spec.contract else P(None, words))


def _as_read(spec: Spec, x: Array, kernel: Array, *more: Array) -> tuple[Array, list[Array]]:
    """Returns the kernel and the bias, if there is one, as the products read them."""
    w = _gathered(spec, x, kernel.astype(x.dtype))
    if spec.bias is None:
        return w, []
    return w, [_along_words(spec, x, w, more[-1].astype(spec.logits))]


def _along_words(spec: Spec, x: Array, w: Array, bias: Array) -> Array:
    """Returns the bias, or its tangent, on an Explicit mesh split as the kernel's words are."""
    if not jax.typeof(x).sharding.mesh.explicit_axes:
        return bias
    return match_spec(bias, x, P(whole(jax.typeof(w).sharding.spec, 2)[1 - spec.contract]))


def _moving(spec: Spec, x: Array, w: Array, dx: Any, parameters: Any) -> tuple[Spec, list[Any]]:
    """Returns the spec of the tangents that there are, and those of x, the kernel and the bias.

    None stands for one that is not there. Parameters' are in float32 or wider.
    """
    sums, moves = compute_dtype(x.dtype), lambda d: d is not None and type(d) is not ad.Zero
    kernels = parameters if spec.bias is None else parameters[:-1]
    parts = [d.astype(sums) for d in asked(*kernels) if moves(d)]
    found = [dx if moves(dx) else None, None]
    if parts:
        found[1] = _gathered(spec, x, functools.reduce(jnp.add, parts))
    if spec.bias is not None:
        spec = replace(spec, bias=moves(dbias := parameters[-1]))
        found.append(_along_words(spec, x, w, dbias.astype(sums)) if spec.bias else None)
    return replace(spec, wanted=(found[0] is not None, bool(parts))), found


# ---------------------------------------------------------------- the loss, and its derivative
# These operations are composed of those of `op`. They differentiate a reduction as a whole, and
# vmap changes how.


class Loss(NamedTuple):
    """The static description of the loss."""

    spec: Spec
    order: Order  # kernels to try
    with_lse: bool = False  # return the log-sum-exps with a reduction


def _reduced(
    spec: Spec,
    order: Order,
    reduction: str,
    with_lse: bool,
    x: Array,
    labels: Array,
    mask: Array,
    weights: Array | None,
    *parameters: Array,
) -> Any:
    counted = None if weights is None else jnp.where(mask == 0, 0, weights)
    factors = mask if counted is None else counted * mask  # NaN where the label is wrong
    scale = jnp.ones((), mask.dtype)
    if reduction == "mean":
        if counted is not None:
            scale = 1 / _sum_of_weights(counted)
        else:
            # Without ignored labels the devices need not count them.
            count = jnp.sum(mask != 0) if spec.ignores else mask.size
            scale = 1 / jnp.maximum(count, 1).astype(mask.dtype)
    if reduction == "none" or spec.softmax.entropy:
        lse, cost, *entropy = statistics(Loss(spec, order), x, labels, *parameters)
        each = factors * _loss(spec, lse, cost, labels)
        loss = each if reduction == "none" else jnp.sum(each) * scale
        results = [loss, *[lse] * with_lse, *entropy]
    else:
        results = reduced(Loss(spec, order, with_lse), x, labels, factors, scale, *parameters)
    return tuple(results) if len(results) > 1 else results[0]


def _sum_of_weights(weights: Array) -> Array:
    """Returns the sum of the weights; 1 where all are 0, so that their mean is 0."""
    # Weights of both signs may add up to 0, and their mean is then infinite or NaN.
    total, size = jnp.sum(jnp.stack((weights, jnp.abs(weights))), range(1, weights.ndim + 1))
    return jnp.where(size == 0, 1, total)


def _loss(spec: Spec, lse: Array, cost: Array, labels: Array) -> Array:
    """Returns each row's loss, before its factor; 0 where it is not selected."""
    # Its operands are replaced, not its result: 0 times NaN would be NaN in the derivative.
    lse, cost = (jnp.where(labels <= UNSELECTED, 0, value) for value in (lse, cost))
    return cost + spec.softmax.z_loss * jnp.square(lse) if spec.softmax.z_loss else cost


def define_statistics(loss: Loss, x: Array, labels: Array, *parameters: Array) -> list[Array]:
    """`(x, labels, kernel[, main][, bias]) -> (lse, lse - picked[, entropy])`."""
    w, bias = _as_read(loss.spec, x, *parameters)
    return of_rows(*ops.statistics(loss.spec, x, w, labels, *bias, order=loss.order))


def define_reduced(
    loss: Loss, x: Array, labels: Array, factors: Array, scale: Array, *parameters: Array
) -> list[Array]:
    """`(x, labels, factors, scale, kernel[, main][, bias]) -> (loss[, lse])`, of factors a row.

    A factor is the row's weight, 0 if it is ignored, or NaN if its label is wrong.
    """
    lse, cost = define_statistics(loss, x, labels, *parameters)
    total = jnp.sum(factors * _loss(loss.spec, lse, cost, labels))
    return [total * scale, *[lse] * loss.with_lse]


def _statistics_jvp(primals: Any, tangents: Any, *, spec: Loss, order: Order) -> Any:
    del order
    x, labels, *parameters = primals
    w, bias = _as_read(spec.spec, x, *parameters)  # once for both ways
    operands = x, w, labels, *bias
    found = ops.statistics(spec.spec, *operands, order=spec.order)
    moved, moving = _moving(spec.spec, x, w, tangents[0], tangents[2:])
    return of_rows(*found), ops.lse_tangents(moved, operands, found, moving, spec.order)


def _reduced_jvp(primals: Any, tangents: Any, *, spec: Loss, order: Order) -> Any:
    """The gradients come with the loss; its tangent is linear in those of the operands."""
    del order
    x, labels, factors, scale, *parameters = primals
    w, bias = _as_read(spec.spec, x, *parameters)
    moved, moving = _moving(spec.spec, x, w, tangents[0], tangents[4:])
    operands = x, w, labels, *bias
    parts = []  # addends of the tangent
    if along := [t for t in moving if t is not None]:
        # The mean's divisor is part of the gradients, except in float16: they would be too small.
        folded = x.dtype != jnp.float16
        weights = factors * scale if folded else factors
        # The product rounds the gradient if its operands have the kernel's dtype and no main
        # gradient is asked for.
        kernels = [d for d, p in zip(tangents[4:], parameters) if p.ndim == 2]
        of_kernel = [type(d) is not ad.Zero for d in kernels]
        dtype = parameters[0].dtype
        rounds = of_kernel[0] and not any(of_kernel[1:]) and dtype == x.dtype
        alone = replace(moved, dkernel=dtype.name if rounds and dtype.name in NARROW else None)
        found = ops.loss_gradients(alone, x, w, labels, weights, *bias, order=spec.order)
        found, gradients = found[:3], found[3:]
        dot = lambda g, t: jnp.sum(g.astype(factors.dtype) * t.astype(factors.dtype))
        tangent = functools.reduce(jnp.add, map(dot, gradients, along))
        parts.append(tangent if folded else tangent * scale)
    else:
        found = ops.statistics(spec.spec, *operands, order=spec.order)
    lse, cost = of_rows(*found)
    each = _loss(spec.spec, lse, cost, labels)
    total = jnp.sum(factors * each)
    results, (_, _, dfactors, dscale, *_) = [total * scale], tangents
    if type(dfactors) is not ad.Zero:
        parts.append(jnp.sum(dfactors * each) * scale)
    if type(dscale) is not ad.Zero:
        parts.append(dscale * total)
    zero = lambda r: ad.Zero(jax.typeof(r).to_tangent_aval())
    moves = [functools.reduce(jnp.add, parts) if parts else zero(results[0])]
    if spec.with_lse:
        results.append(lse)
        moves.append(ops.lse_tangents(moved, operands, found, moving, spec.order)[0])
    return results, moves


statistics = Op(
    "linear_cross_entropy_statistics",
    define_statistics,
    batching=Batching(rule=functools.partial(ops.batch_rows, rows=(0, 1))),
    derivative=Derivative(jvp=_statistics_jvp),
)
# The gradients of a batch of losses are computed in the backward, by the definition's operations:
# in the forward each would have a gradient of the kernel's size.
reduced = Op("linear_cross_entropy", define_reduced, derivative=Derivative(jvp=_reduced_jvp))
