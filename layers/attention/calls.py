"""One call of cuDNN's attention through `jax.nn.dot_product_attention`, and its two kernels.

JAX differentiates its call with a forward and a backward kernel, and passes the log-sum-exps from
one to the other. Here each runs in an operation of its own, so the program of JAX's derivative is
cut between them: nothing is computed twice, and the log-sum-exps stay float32.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...native.implementation import Unsupported
from ...native.jaxpr import evaluate, results_of
from .spec import Dimensions, Spec, numbers, spread

# JAX replaces hidden scores by this number: cuDNN subtracts larger ones wrongly.
_HIDDEN = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}
Lengths = tuple[Array, Array]  # the queries' and the keys', `(batch,)`


class Call:
    """A call of `jax.nn.dot_product_attention`, with batch and heads in one dimension each.

    Its operands besides q, k and v are none, a mask, or a bias that includes the mask:
    `(batch or 1, heads or 1, length, key length)`. A mask alone has no gradient to compute.
    """

    def __init__(
        self,
        spec: Spec,
        q: Array,
        k: Array,
        extras: dict[str, Array],
        lengths: Lengths | None = None,
        wanted: Array | None = None,
        part: bool | None = None,
    ):
        """A call of all keys, or of those that dropout keeps or drops: where it is `part`.

        Args:
          lengths: what `lengths` and `key lengths` are in place of those of `extras`.
          wanted: a flag of calls that do nothing where it is not set.
        """
        self._spec, self._d, given = spec, numbers(q.ndim), extras
        self._sizes = dict(zip(self._d.q, q.shape)) | {self._d.keys: k.shape[-3]}
        if lengths is None and {"lengths", "key lengths"} & {*given}:
            lengths = self._given(given)
        self._lengths, self._wanted = lengths, wanted
        self.has_bias, seen = "bias" in given, []
        if "mask" in given:
            seen.append(self._whole(given["mask"], spec.dims["mask"]))
        if "segments" in given:
            names = "segments", "key segments"
            ids = [spread(given[name], spec.dims[name], self._d.scores) for name in names]
            dims = tuple(n for n in self._d.scores if any(n in spec.dims[name] for name in names))
            equal = (ids[0] == ids[1]).reshape([self._sizes[n] for n in dims])
            seen.append(self._whole(equal, dims))
        self.name = "a mask" if seen else "lengths" if self._lengths else ""
        self.parts: list[Call] = []
        if part is not None:
            seen.append(self._whole(given["dropout"], spec.dims["dropout"]) == part)
        elif "dropout" in given:
            self.parts = [Call(spec, q, k, given, lengths, wanted, is_) for is_ in (True, False)]
        self._window = spec.window
        if spec.window is not None and (seen or self.has_bias):
            # cuDNN has no windows beside what is added to scores.
            near = reached(spec, self._sizes[self._d.length], self._sizes[self._d.keys])
            seen.append(near[None, None])
            self._window = None
        mask = functools.reduce(jnp.logical_and, seen) if seen else None
        self.operands, self._seen = [] if mask is None else [mask], mask
        if self.has_bias:
            self.operands, self._seen = self._biased(given["bias"], mask)

    def _biased(self, bias: Array, mask: Array | None) -> tuple[list[Array], Array]:
        """Returns the bias that includes the mask, and the keys that both leave to see."""
        bias = self._whole(bias, self._spec.dims["bias"])
        # XLA would compute with constants while it compiles, for minutes, if it knew these.
        known = [jnp.asarray(n, bias.dtype) for n in (-jnp.inf, _HIDDEN[bias.dtype.name])]
        least, hidden = lax.optimization_barrier(known)
        finite = bias != least  # or NaN
        bias = jnp.maximum(bias, hidden)
        if mask is None:
            return [bias], finite
        return [jnp.where(mask, bias, hidden)], mask & finite

    def _given(self, extras: dict[str, Array]) -> Lengths:
        """Returns the lengths that the user gave, within the arrays, or else the arrays'."""
        d, sizes, found = self._d, self._sizes, []
        for name, n in ("lengths", d.length), ("key lengths", d.keys):
            each = jnp.full((), sizes[n], jnp.int32)
            if name in extras:
                each = jnp.clip(spread(extras[name], self._spec.dims[name], d.batch), 0, sizes[n])
            each = jnp.broadcast_to(each, [sizes[m] for m in d.batch])
            found.append(each.reshape(-1).astype(jnp.int32))
        return found[0], found[1]

    def kernel_lengths(self) -> Lengths | tuple[None, None]:
        """Returns the call's lengths: 1 for sequences that see nothing, 0 in a call not wanted.

        At 0 a kernel writes nothing, so that zeros would have to be put in its place.
        """
        if self._lengths is None and self._wanted is None:
            return None, None
        rows, keys = self._given({}) if self._lengths is None else self._lengths
        some = (rows > 0) & (keys > 0)
        least = 1 if self._wanted is None else self._wanted.astype(rows.dtype)
        each = [jnp.where(some, n, 1) * least for n in (rows, keys)]
        return each[0], each[1]

    def of_rows(self, lse: Array) -> Array:
        """Returns the log-sum-exps of all rows, `(batch, heads, length)`, from the kernel's."""
        return lse

    def of_kernel(self, lse: Array) -> Array:
        """Returns the backward kernel's operand for the log-sum-exps of all rows."""
        return lse

    def _whole(self, array: Array, dims: Dimensions) -> Array:
        d, sizes = self._d, self._sizes
        shape, joined = [], []
        for parts in (d.batch, (d.heads, d.group)):
            whole = [sizes[n] for n in parts] if set(parts) & set(dims) else [1] * len(parts)
            shape += whole
            joined.append(math.prod(whole))
        lengths = sizes[d.length], sizes[d.keys]
        return jnp.broadcast_to(spread(array, dims, d.scores), (*shape, *lengths)).reshape(
            *joined, *lengths
        )

    def whole_bias(self, dbias: Array) -> Array:
        """Returns the gradient of the bias as it was given, in float32."""
        dims = self._spec.dims["bias"]
        like = jnp.zeros([self._sizes[n] for n in dims], jnp.float32)
        whole, pull = jax.vjp(lambda a: self._whole(a, dims), like)
        dbias = dbias.astype(jnp.float32)
        # A mask in the bias may have differed along dimensions that the bias has not.
        more = [i for i, (m, n) in enumerate(zip(whole.shape, dbias.shape)) if m != n]
        return pull(jnp.sum(dbias, more, keepdims=True))[0]

    def flat(self, *arrays: Array) -> list[Array]:
        """Returns arrays like q as `(batch, length, heads, width)`, and k and v likewise."""
        n = len(self._d.batch)
        each = lambda a: a.reshape(math.prod(a.shape[:n]), a.shape[n], -1, a.shape[-1])
        return [each(a) for a in arrays]

    def only_seen(self, x: Array, fill: float) -> Array:
        """Returns x, `(batch, length, heads, width)`, with `fill` in rows that see nothing.

        cuDNN gives these rows the mean of all values.
        """
        some = self.rows_that_see
        return x if some is None else jnp.where(jnp.moveaxis(some, 1, 2)[..., None], x, fill)

    @functools.cached_property
    def rows_that_see(self) -> Array | None:
        """`(batch or 1, heads or 1, length)`; None where every row sees a key."""
        length, keys = self._sizes[self._d.length], self._sizes[self._d.keys]
        seen, some = self._seen, None
        if self._lengths is not None:
            rows, first = self._lengths
            if self._spec.window is not None:  # later rows see none of the first keys
                rows = jnp.minimum(rows, first + min(self._spec.window, keys) - 1)
            some = ((jnp.arange(length) < rows[:, None]) & (first > 0)[:, None])[:, None]
        if seen is None:
            return some
        if self._spec.causal:
            seen &= jnp.expand_dims(reached(self._spec, length, keys), range(seen.ndim - 2))
        if self._lengths is not None:
            seen &= (jnp.arange(keys) < self._lengths[1][:, None])[:, None, None]
        seen = jnp.any(seen, axis=-1)
        return seen if some is None else some & seen

    def attend(self, q: Array, k: Array, v: Array, *operands: Array) -> Array:
        window = self._window
        operand = next(iter(operands), None)
        rows, keys = self.kernel_lengths()
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            bias=operand if self.has_bias else None,
            mask=None if self.has_bias else operand,
            scale=self._spec.scale,
            is_causal=self._spec.causal,
            local_window_size=None if window is None else (window - 1, 0),
            query_seq_lengths=rows,
            key_value_seq_lengths=keys,
            implementation="cudnn",
        )


def reached(spec: Spec, length: int, keys: int) -> Array:
    """Returns the keys that `causal` and `window` leave to each query."""
    behind = jnp.arange(length)[:, None] - jnp.arange(keys)[None]
    return behind >= 0 if spec.window is None else (behind >= 0) & (behind < spec.window)


# ---------------------------------------------------------------- the two kernels


def run_forward(call: Call, qkv: Sequence[Array]) -> list[Array]:
    """Returns out, `(batch, length, heads, width)`, and its lse, `(batch, heads, length)`."""
    found: list[Array] = []

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if found:  # the rest is of the backward
            return [None] * len(eqn.outvars)
        results = results_of(eqn, operands)
        if _is_forward_kernel(eqn):
            found.extend(results)
        return results

    _evaluate(call, qkv, qkv[0], rule)
    return found


def run_backward(
    call: Call, qkv: Sequence[Array], out: Array, lse: Array, dout: Array
) -> list[Array]:
    """Returns the gradients of q, k, v and the bias."""
    known = lambda eqn, operands: (
        [out, lse] if _is_forward_kernel(eqn) else results_of(eqn, operands)
    )
    return _evaluate(call, qkv, dout, known)


def _evaluate(call: Call, qkv: Sequence[Array], dout: Array, rule: Any) -> list[Array]:
    """Returns the gradients by JAX's derivative of a call, evaluated by `rule`."""
    count = len(qkv) + call.has_bias

    def derivative(dout: Array, *operands: Array) -> Sequence[Array]:
        fixed = operands[count:]
        return jax.vjp(lambda *moving: call.attend(*moving, *fixed), *operands[:count])[1](dout)

    operands = [dout, *qkv, *call.operands]
    program = jax.make_jaxpr(derivative)(*operands)
    if not any(map(_is_forward_kernel, program.jaxpr.eqns)):
        raise Unsupported("this version of JAX has another program for cuDNN's attention")
    return evaluate(program, operands, rule)


def _is_forward_kernel(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("dot_product_attention_fwd") and len(eqn.outvars) == 2
