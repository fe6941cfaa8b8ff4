"""The fused linear layer and cross-entropy."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from ..core.op import Batching, Derivative, Op, jvp_along, match, moves, reshard_like
from ..core.sharding import axes_of, whole, without
from ..dense.matmul import asked, equally_varying, with_main_gradient
from . import op as ops
from .op import Spec, Total
from .softmax import IGNORED, Softmax, of_rows

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
    vocabulary = kernel.shape[1 - contract]
    labels, mask = _checked_labels(x, labels, vocabulary, ignore)
    bias = _checked_bias(bias, vocabulary)
    spec = Options(
        contract=contract,
        ignores=ignore is not None,
        softcap=softcap,
        label_smoothing=label_smoothing,
        with_entropy=flag(_OP, "with_entropy", with_entropy),
        dtype=dtype,
        logits_dtype=logits_dtype,
        quantization=quantization,
        chunk_rows=chunk_rows,
    ).spec(x, kernel, bias)
    each = Weighted(finite(_OP, "z_loss", z_loss, least=0.0, most=_LARGE))
    weights, scale = _weights_of_rows(spec, mask, _checked_weights(x, weights), reduction)
    with_lse = flag(_OP, "with_lse", with_lse)
    rows = functools.partial(loss_of_rows, x, kernel, bias, labels, implementation=implementation)
    if reduction == "none" or with_entropy:
        lse, cost, *entropy = rows(spec=spec)
        found = each(lse, cost, *[match(a, lse, range(a.ndim)) for a in (labels, weights)])
        loss = found if reduction == "none" else jnp.sum(found) * scale
        results = [loss, *[lse] * with_lse, *entropy]
    else:
        spec = replace(spec, total=Total(each, 1, linear=not z_loss))
        loss, *more = rows(weights, scale=scale, spec=spec, with_rows=with_lse)
        results = [loss, *more[:1]]
    return tuple(results) if len(results) > 1 else results[0]


@dataclass(frozen=True)
class Weighted:
    """A row's loss times its weight, as `linear_cross_entropy` has it."""

    z_loss: float = 0.0

    def __call__(self, lse: Array, cost: Array, labels: Array, weights: Array) -> Array:
        # Operands are replaced, not the result: 0 times NaN would be NaN in the derivative.
        lse, cost = (jnp.where(labels <= IGNORED, 0, value) for value in (lse, cost))
        return weights * (cost + self.z_loss * jnp.square(lse) if self.z_loss else cost)


def _weights_of_rows(
    spec: Spec, mask: Array, weights: Array | None, reduction: str
) -> tuple[Array, Array]:
    """Returns what multiplies each row's loss, NaN where its label is wrong, and then their sum."""
    sums = compute_dtype(spec.softmax.dtype, spec.logits)
    mask = mask.astype(sums)
    counted = None if weights is None else jnp.where(mask == 0, 0, weights.astype(sums))
    scale = jnp.ones((), sums)
    if reduction == "mean":
        if counted is not None:
            scale = 1 / _sum_of_weights(counted)
        else:
            # Without ignored labels the devices need not count them.
            count = jnp.sum(mask != 0) if spec.ignores else mask.size
            scale = 1 / jnp.maximum(count, 1).astype(sums)
    return mask if counted is None else counted * mask, scale


def _sum_of_weights(weights: Array) -> Array:
    """Returns the sum of the weights; 1 where all are 0, so that their mean is 0."""
    # Weights of both signs may add up to 0, and their mean is then infinite or NaN.
    total, size = jnp.sum(jnp.stack((weights, jnp.abs(weights))), range(1, weights.ndim + 1))
    return jnp.where(size == 0, 1, total)


@dataclass(frozen=True)
class Options:
    """How `linear_cross_entropy` computes a row's numbers, by its arguments' names.

    Attributes:
      ignores: there may be labels that are `IGNORED`.
    """

    contract: int = 0
    ignores: bool = False
    softcap: float | None = None
    label_smoothing: float = 0.0
    with_entropy: bool = False
    dtype: Any = None
    logits_dtype: Any = None
    quantization: Quantization = None
    chunk_rows: int | None = None

    def spec(self, x: Array, kernel: Array, bias: Array | None) -> Spec:
        """Returns the checked description of the operation."""
        smoothing = finite(_OP, "label_smoothing", self.label_smoothing, least=0.0, most=1.0)
        dtype = floating_dtype(_OP, self.dtype, x.dtype)
        check_quantization(_OP, self.quantization, dtype)
        rows = self.chunk_rows
        return Spec(
            softmax=Softmax(
                softcap=checked_softcap(_OP, self.softcap, _LARGE),
                dtype=dtype,
                smoothing=smoothing,
                share=smoothing / kernel.shape[1 - self.contract] if smoothing else 0.0,
                entropy=self.with_entropy,
            ),
            contract=self.contract,
            logits=_logits_dtype(self.logits_dtype, dtype),
            precision=jax.config.jax_default_matmul_precision,
            chunk=None if rows is None else integer(_OP, "chunk_rows", rows, 1),
            bias=None if bias is None else False,
            ignores=self.ignores,
            quantized=self.quantization is not None,
        )


def loss_of_rows(
    x: Array,
    kernel: Array,
    bias: Array | None,
    labels: Array,
    *data: Array,
    scale: Any = 1.0,
    spec: Spec,
    with_rows: bool = False,
    implementation: Implementation = None,
) -> list[Array]:
    """Returns each row's log-sum-exp, its cost, lse - Σ t · c, and the entropy if the spec asks.

    Of a spec with a total it returns that times the scale, whose gradients are computed with it,
    and `with_rows` log-sum-exps and costs; no entropies.

    Args:
      labels: `(*rows)` int32; those below 0 are no words, `softmax.IGNORED` without any gradient.
      data: `(*rows)` what the total reads.
    """

    def serve(spec: Spec, order: Order) -> list[Array]:
        cast, loss = x.astype(spec.softmax.dtype), Loss(spec, order, with_rows)
        if not spec.total:
            return statistics(loss, *_operands(cast, kernel, bias, labels))
        factor = jnp.asarray(scale, compute_dtype(cast.dtype, spec.logits))
        return reduced(loss, *_operands(cast, kernel, bias, labels, factor, *data))

    plain = lambda order: serve(replace(spec, plain=True), BEST)
    return choose(_OP, implementation, {"native": functools.partial(serve, spec), "xla": plain})


def best_words(x: Array, kernel: Array, bias: Array | None, *, spec: Spec) -> Array:
    """Returns argmax_j c_j of each row, `(*rows)` int32, with c as in `linear_cross_entropy`.

    It has no gradient, and computes the logits in chunks by a product of its own.
    """
    x, kernel, bias = jax.lax.stop_gradient((x, kernel, bias))
    x, *parameters = _operands(x, kernel, bias)
    w, more = _as_read(spec, x, *parameters)
    return ops.argmax(spec, x, w, *more)[0]


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


def _operands(x: Array, kernel: Array, bias: Array | None, *of_rows: Array) -> list[Any]:
    """Returns x, arrays of its rows, and the parameters, in matching shardings and varying axes.

    The last are the kernel; if it is of 16 bits, the zeros whose gradient is its main gradient
    (`dense.matmul`); and the bias, if there is one.
    """
    parameters = *with_main_gradient(kernel), bias
    varying = equally_varying(x, *of_rows, *parameters)
    x, *rows = varying[: 1 + len(of_rows)]
    meshes = [jax.typeof(a).sharding.mesh for a in (x, kernel)]
    if any(mesh.explicit_axes for mesh in meshes):
        if not meshes[0].explicit_axes:
            x = reshard_like(x, kernel, P(*[None] * x.ndim))
        of_x = whole(jax.typeof(x).sharding.spec, x.ndim)[:-1]
        x = match_spec(x, x, P(*of_x, None))
    matched = [match(a, x, range(a.ndim)) for a in rows]
    return [x, *matched, *[a for a in varying[1 + len(rows) :] if a is not None]]


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
    with_rows: bool = False  # return log-sum-exps and costs with a total

    def split(self, more: Sequence[Any]) -> tuple[Total, Sequence[Any], Sequence[Any]]:
        """Returns the total, and of its operands after the labels its data and the parameters."""
        assert self.spec.total is not None
        return self.spec.total, more[: self.spec.total.data], more[self.spec.total.data :]


def define_statistics(loss: Loss, x: Array, labels: Array, *parameters: Array) -> list[Array]:
    """`(x, labels, kernel[, main][, bias]) -> (lse, lse - picked[, entropy])`."""
    w, bias = _as_read(loss.spec, x, *parameters)
    return of_rows(*ops.statistics(loss.spec, x, w, labels, *bias, order=loss.order))


def define_reduced(loss: Loss, x: Array, labels: Array, scale: Array, *more: Array) -> list[Array]:
    """`(x, labels, scale, *data (*rows), kernel[, main][, bias]) -> (total[, lse, cost])`."""
    total, data, parameters = loss.split(more)
    rows = define_statistics(loss, x, labels, *parameters)
    return [jnp.sum(total.each(*rows, labels, *data)) * scale, *rows * loss.with_rows]


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
    x, labels, scale, *more = primals
    total, data, parameters = spec.split(more)
    of_data, of_parameters = spec.split(tangents[3:])[1:]
    w, bias = _as_read(spec.spec, x, *parameters)
    moved, moving = _moving(spec.spec, x, w, tangents[0], of_parameters)
    operands, gradients = (x, w, labels, *bias), []
    # A mean's divisor is part of the gradients, except in float16: they would be too small.
    folded = x.dtype != jnp.float16
    every_row = lambda number: match(jnp.broadcast_to(number, labels.shape), x, range(labels.ndim))
    if any(t is not None for t in moving):
        # The product rounds the gradient if its operands have the kernel's dtype and no main
        # gradient is asked for.
        kernels = [d for d, p in zip(of_parameters, parameters) if p.ndim == 2]
        of_kernel, dtype = [*map(moves, kernels)], parameters[0].dtype
        rounds = of_kernel[0] and not any(of_kernel[1:]) and dtype == x.dtype
        alone = replace(moved, dkernel=dtype.name if rounds and dtype.name in NARROW else None)
        ct = every_row(scale if folded else jnp.ones_like(scale))
        found = ops.loss_gradients(alone, x, w, labels, ct, *data, *bias, order=spec.order)
        found, gradients = found[:3], found[3:]
    else:
        found = ops.statistics(spec.spec, *operands, order=spec.order)
    rows = of_rows(*found)
    each = lambda *data: [total.each(*rows, labels, *data)]
    (values,), parts = each(*data), []
    along = [t for t in moving if t is not None]
    wide = lambda a: a.astype(rows[0].dtype)
    dot = lambda g, t, axis=None: jnp.sum(wide(g) * wide(t), axis)
    if total.selects and along:
        # Rows without a part in the total, and all if none has one, have their gradients, 0 or NaN,
        # whatever comes back: NaN times 0 would be NaN.
        nan = every_row(jnp.full_like(scale, jnp.nan))
        of_lse, of_cost = total.slopes(rows, labels, nan, *data)
        has_part = (of_lse != 0) | (of_cost != 0)
        # Counted with the total: devices add up once.
        both = jnp.stack((values, has_part.astype(values.dtype)))
        both = jnp.sum(both, range(1, 1 + values.ndim))
        value, any_has = both[0].astype(values.dtype), both[1] > 0
        if moving[0] is not None:
            parts.append(jnp.sum(jnp.where(has_part, dot(gradients.pop(0), along.pop(0), -1), 0)))
        parts += [jnp.where(any_has, dot(g, t), 0) for g, t in zip(gradients, along)]
    else:
        value = jnp.sum(values)
        parts += map(dot, gradients, along)
    parts = parts if folded else [part * scale for part in parts]
    if any(map(moves, of_data)):
        parts += [jnp.sum(t) * scale for t in jvp_along(each, data, of_data)[1]]
    if moves(tangents[2]):
        parts.append(tangents[2] * value)
    zero = ad.Zero(jax.typeof(value).to_tangent_aval())
    tangent = functools.reduce(jnp.add, parts).astype(value.dtype) if parts else zero
    if not spec.with_rows:
        return [value * scale], [tangent]
    of_both = ops.lse_tangents(moved, operands, found, moving, spec.order)
    return [value * scale, *rows], [tangent, *of_both]


statistics = Op(
    "linear_cross_entropy_statistics",
    define_statistics,
    batching=Batching(rule=functools.partial(ops.batch_rows, rows=(0, 1))),
    derivative=Derivative(jvp=_statistics_jvp),
)
# The gradients of a batch of losses are computed in the backward, by the definition's operations:
# in the forward each would have a gradient of the kernel's size.
reduced = Op("linear_cross_entropy", define_reduced, derivative=Derivative(jvp=_reduced_jvp))
