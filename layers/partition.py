"""How one operation is split over a mesh, and how JAX is told so in each of its contexts."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..native import fingerprint
from ..native.jax_private import sharding_callbacks
from ..native.kernel import without_mesh
from .specs import axes_of, whole
from .tiling import mesh_and_spec


class Loose(tuple):
    """Dimensions of a parameter, such as scale: its stored sharding neither follows the rows nor
    drives them. It is gathered (FSDP) or sliced to what a device needs."""


@dataclasses.dataclass(frozen=True)
class Split:
    """How the leading operand is split: mesh axes per dimension, and its global shape."""

    axes: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]

    def over(self, dims: Sequence[int]) -> tuple[str, ...]:
        """The mesh axes that split `dims`."""
        return tuple(name for d in dims for name in self.axes[d])

    def psum(self, value: jax.Array, dims: Sequence[int]) -> jax.Array:
        """The sum over the devices that `dims` are split among; no collective if they are not."""
        names = self.over(dims)
        return jax.lax.psum(value, names) if names else value

    def count(self, dims: Sequence[int]) -> int:
        """How many elements `dims` have over all devices."""
        return math.prod(self.shape[d] for d in dims)

    def spec(self, dims: Sequence[int]) -> P:
        """The PartitionSpec of an array with the leading operand's dimensions `dims`."""
        return P(*[(self.axes[d] or None) for d in dims])

    @staticmethod
    def none(shape: tuple[int, ...]) -> "Split":
        return Split(((),) * len(shape), tuple(shape))

    @staticmethod
    def from_spec(spec: P, shape: tuple[int, ...], sizes: Mapping[str, int]) -> "Split":
        """Reads `spec`. A dimension that its axes do not divide is kept whole: XLA would pad it,
        and the padding would be summed into the parameters' gradients."""
        axes = [axes_of(entry) for entry in whole(spec, len(shape))]
        fits = [n % math.prod(sizes[a] for a in names) == 0 for names, n in zip(axes, shape)]
        return Split(tuple(a if ok else () for a, ok in zip(axes, fits)), tuple(shape))


def shardy_rule(inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]) -> str:
    """The propagation rule of an operation, in custom_partitioning's notation.

    A dimension has one factor wherever it occurs, but for parameters (`Loose`), which have their
    own: an FSDP-sharded scale must not drag the activations onto its axes.
    """

    def mapping(dims):
        kind = "s" if isinstance(dims, Loose) else "d"
        return " ".join(f"{kind}{d}" for d in dims)

    return f"{', '.join(map(mapping, inputs))} -> {', '.join(map(mapping, outputs))}"


def partitioned(
    body: Callable[..., Sequence[jax.Array]],
    dims: tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]],
    lead: int,
    devices: Sequence[jax.Device],
) -> Callable[..., Sequence[jax.Array]]:
    """`body(split, *operands)` as a function of global arrays on a mesh of Auto axes.

    Args:
      body: one device's share; `split` says how the leading operand is split.
      dims: for each operand and each result, which of the leading operand's dimensions it has.
      lead: the index of the leading operand, whose sharding decides.
      devices: what the program is compiled for, in order.
    """
    inputs, outputs = dims
    x64 = jax.config.jax_enable_x64

    @custom_partitioning
    def call(*operands):  # JAX 0.10 takes only the types from this, and an Explicit axis is in them
        whole = functools.partial(body, Split.none(operands[lead].shape))
        return tuple(without_mesh(whole, x64)(*operands))

    def split_of(operands):
        shape = operands[lead].shape
        mesh, spec = mesh_and_spec(operands[lead].sharding, len(shape), devices)
        return mesh, Split.from_spec(spec, shape, mesh.shape)

    def shardings(mesh, split, all_dims):
        return tuple(NamedSharding(mesh, split.spec(d)) for d in all_dims)

    def partition(_, operands, results):
        del results
        mesh, split = split_of(operands)
        local = without_mesh(functools.partial(body, split), x64)
        fn = lambda *values: tuple(local(*values))
        return mesh, fn, shardings(mesh, split, outputs), shardings(mesh, split, inputs)

    def infer(_, operands, results):  # only with Shardy off; JAX 0.10 aborts without it
        del results
        return shardings(*split_of(operands), outputs)

    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        sharding_rule=shardy_rule(inputs, outputs),
        decode_shardings=False,  # mesh_and_spec does: JAX fails where a reshape split a mesh axis
    )
    return call


_callbacks: dict[str, Any] = {}  # the callbacks behind our keys, kept alive for JAX's weak table


def name_callback(results: Sequence[Any], name: str) -> None:
    """Gives a custom_partitioning call the same key in every process: `name`, and our version.

    JAX names the callback by its address, so that the persistent compilation cache misses in every
    new process (jax-ml/jax#21159). Where JAX's table is not as expected its own key stays.
    """
    try:
        op = results[0].owner
        op = getattr(op, "operation", op)
        info = sharding_callbacks[op.attributes["backend_config"].value.encode()]
        key = f"normfuse:{fingerprint()}:{name}"
        _callbacks[key] = sharding_callbacks[key.encode()] = info
        with op.context:
            op.attributes["backend_config"] = mlir.ir.StringAttr.get(key)
    except (AttributeError, IndexError, KeyError, TypeError):
        return
