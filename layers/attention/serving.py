"""Names what would compute an attention, before anything is compiled."""

import functools
import os
from typing import Any

import jax

from ...native.implementation import Unsupported
from ...native.jax_private import described_cudnn
from ...native.launch import compute_capability, named_target
from . import cudnn, op
from .attention import attention

_KEPT = 2**27  # bytes of probabilities that a layer may keep
_ARRAYS = "bias", "mask", "segment_ids", "lengths", "dropout_mask"


def served_by(q: Any, k: Any, v: Any, **options: Any) -> str:
    """Returns what computes `attention(q, k, v, **options)` here, forward and backward.

    "cuDNN", "cuDNN, with lengths", "cuDNN, twice: dropout", "blocks: heads of 60" and the like.
    Without an NVIDIA GPU it is blocks, and what a GPU would take is added in brackets: that of
    `NORMFUSE_CUDA_ARCH`, or a Hopper GPU.

    Args:
      q, k, v, options: attention's; arrays may be `jax.ShapeDtypeStruct`s or tracers.
    """
    given = {n: options.pop(n) for n in _ARRAYS if options.get(n) is not None}
    of = lambda a: jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))
    types = jax.tree.map(of, ((q, k, v), given))
    run = lambda qkv, given: attention(*qkv, **given, **options)
    program = jax.make_jaxpr(run)(*types)
    (eqn,) = (e for e in program.eqns if e.primitive is op.attention.primitive)
    spec, order = eqn.params["spec"], eqn.params["order"]
    if order.names == op.BLOCKS.names:
        return "blocks: asked for"
    avals, here = [x.aval for x in eqn.invars], _capability()
    if here is not None:
        return _on_gpu(here, spec, avals)
    target = named_target(os.environ.get("NORMFUSE_CUDA_ARCH") or "sm_90")
    with described_cudnn(91_000):
        there = _on_gpu(target.capability, spec, avals)
    return f"blocks: on {jax.default_backend()} (on GPUs {there})"


def blocks_pay(q: Any, k: Any) -> bool:
    """Tells if blocks are worth it here beside all scores in memory, for `attention`'s q and k.

    On a CPU they are faster. On a GPU they take as long or longer, and compute scores again, so
    they pay where memory is saved: a layer would keep its probabilities for the backward.
    """
    batch, length, heads, _ = q.shape
    return _capability() is None or 2 * batch * heads * length * k.shape[1] >= _KEPT


def _on_gpu(capability: int, spec: Any, avals: Any) -> str:
    try:
        return cudnn.kind(capability, spec, avals)
    except Unsupported as error:
        return f"blocks: {str(error).split(': ')[0]}"


@functools.cache
def _capability() -> int | None:
    found = map(compute_capability, jax.local_devices())
    return next((c for c in found if c is not None), None)
