"""What the left operand of a dense layer's product can be made of: see `recomputed.py`."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..native.fallback import Order
from ..native.scalar import Scalar
from . import epilogue_op, rms_norm_op


class Producer(Protocol):
    """A value made of `args`, and how it is made again, pushed forward and pulled back.

    `kept` is what else the backward needs, of one value a row at most. Tangents and gradients that
    are zero, or not asked for, are None.
    """

    def forward(self, *args: jax.Array) -> Sequence[jax.Array]:
        """`(value, *kept)`."""
        ...

    def again(self, args, kept) -> jax.Array:
        """The value."""
        ...

    def tangent(self, args, kept, dargs) -> jax.Array:
        """The value's tangent; not all of `dargs` are None."""
        ...

    def backward(
        self, dvalue, args, kept, wanted: tuple[bool, ...], with_value: bool
    ) -> tuple[list[Any], Any]:
        """The gradients of `args`, and the value if `with_value`."""
        ...

    def value_type(self, args) -> Any:
        """The value's type."""
        ...

    def rows(self, count: int) -> list[bool]:
        """For each of `count` args, whether it has rows; the others are parameters."""
        ...

    def batched(self) -> "Producer":
        """The same for args with one more dimension of rows before the others."""
        ...


def placed(array: jax.Array, sharding: jax.P | None) -> jax.Array:
    """The array, where `sharding` says on the mesh in context; anywhere if None."""
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)


@dataclasses.dataclass(frozen=True)
class Normalised:
    """`rms_norm(x[, scale])` over the last axis, in `dtype`.

    The backward makes the value again in the pass that computes the gradients. With `apart` it is a
    pass of its own, which reads x once more; but then x's gradient has the place of the value's,
    and the backward needs nothing of x's size beside it.
    """

    eps: float
    scale_offset: float
    dtype: str
    strict: Order
    apart: bool = False

    def _params(self, args) -> dict[str, Any]:
        return {
            "axes": (args[0].ndim - 1,),
            "scale_offset": self.scale_offset,
            "has_scale": len(args) > 1,
            "strict": self.strict,
        }

    def forward(self, *args):
        flags = {"has_residual": False, "with_rstd": True}
        params = self._params(args) | flags
        return rms_norm_op.forward(*args, eps=self.eps, out_dtype=self.dtype, **params)

    def again(self, args, kept):
        return rms_norm_op.apply(*args, *kept, out_dtype=self.dtype, **self._params(args))[0]

    def tangent(self, args, kept, dargs):
        moves = tuple(d is not None for d in dargs) + (False,) * (2 - len(dargs))
        params = self._params(args) | {"has_residual": False, "moves": moves}
        moving = [d for d in dargs if d is not None]
        return rms_norm_op.tangent(*args, *kept, *moving, out_dtype=self.dtype, **params)[0]

    def backward(self, dvalue, args, kept, wanted, with_value):
        together = with_value and not self.apart
        flags = {"with_dscale": wanted[1:] == (True,), "with_value": together}
        found = rms_norm_op.pullback(dvalue, *args, *kept, **self._params(args), **flags)
        value = found.pop() if together else None
        if with_value and self.apart:
            value = self.again(args, kept)
        gradients = [g.astype(a.dtype) if w else None for g, a, w in zip(found, args, wanted)]
        return gradients + [None] * (len(args) - len(gradients)), value

    def value_type(self, args):
        return jax.typeof(args[0]).update(dtype=jnp.dtype(self.dtype), weak_type=False)

    def rows(self, count):
        return [True, False][:count]

    def batched(self):
        return self


@dataclasses.dataclass(frozen=True)
class Activated:
    """`function(z + bias) · up`, with or without each, in `dtype`, placed as `sharding` says."""

    function: Scalar
    has_up: bool
    has_bias: bool
    dtype: str
    strict: Order
    sharding: jax.P | None = None

    def _params(self, args) -> dict[str, Any]:
        first = args[0].ndim - args[-1].ndim
        return {
            "axes": tuple(range(first, args[0].ndim)) if self.has_bias else (),
            "function": self.function,
            "has_up": self.has_up,
            "has_bias": self.has_bias,
            "strict": self.strict,
        }

    def forward(self, *args):
        (value,) = epilogue_op.forward(*args, out_dtype=self.dtype, **self._params(args))
        return [placed(value, self.sharding)]

    def again(self, args, kept):
        del kept
        return self.forward(*args)[0]

    def tangent(self, args, kept, dargs):
        del kept
        given = list(dargs)
        dup = given.pop(1) if self.has_up else None
        dbias = given[1] if self.has_bias else None
        named = (given[0], dup, dbias)
        moves = tuple(d is not None for d in named)
        moving = [d for d in named if d is not None]
        params = self._params(args) | {"moves": moves, "out_dtype": self.dtype}
        return epilogue_op.tangent(*args, *moving, **params)[0]

    def backward(self, dvalue, args, kept, wanted, with_value):
        del kept
        dvalue = placed(dvalue, self.sharding)  # and not as the gradient of the layer's output
        flags = {"with_dbias": self.has_bias and wanted[-1], "with_value": with_value}
        found = epilogue_op.backward(dvalue, *args, **self._params(args), **flags)
        value = found.pop() if with_value else None
        found += [None] * (len(args) - len(found))
        of_wanted = zip(found, args, wanted)
        return [g.astype(a.dtype) if g is not None and w else None for g, a, w in of_wanted], value

    def value_type(self, args):
        return jax.typeof(args[0]).update(dtype=jnp.dtype(self.dtype), weak_type=False)

    def rows(self, count):
        return [True] * (count - self.has_bias) + [False] * self.has_bias

    def batched(self):
        if self.sharding is None:
            return self
        sharding = jax.P(jax.P.UNCONSTRAINED, *self.sharding)
        return dataclasses.replace(self, sharding=sharding)
