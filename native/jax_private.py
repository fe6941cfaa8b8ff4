"""The few private names of JAX that normfuse uses, each with the consequence of its absence."""

import contextlib
import gc
import pkgutil
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.core import Tracer


def _private(name: str, absent: Any = None) -> Any:
    try:
        return pkgutil.resolve_name(f"jax._src.{name}")
    except (ImportError, AttributeError):
        return absent


# Without it custom_partitioning in a lowering rule fails with JAX's own assertion.
needs_devices = _private("dispatch:prim_requires_devices_during_lowering", set())
# Without it an unused rstd is computed and thrown away.
dce_rules = _private("interpreters.partial_eval:dce_rules", {})
# Without it JAX's persistent compilation cache misses in every new process.
sharding_callbacks = _private("custom_partitioning:_sharding_callbacks")
# Without it a process learns of another's end from JAX alone, after minutes.
_distributed = _private("distributed:global_state")
# Without it JAX asks the installed cuDNN, where there may be none.
_cudnn = _private("cudnn.fused_attention_stablehlo")
# Without it equations evaluated again have our lines, and no named scopes.
_source_info = _private("source_info_util")
# Without it what a function under `fuse` writes into its closure is a dead tracer.
_trace_ctx = _private("core:trace_ctx")


def present_trace() -> Callable[[], Any]:
    """Returns a weak reference to the trace that is going on now."""
    return (lambda: None) if _trace_ctx is None else weakref.ref(_trace_ctx.trace)


def is_of(trace: Any, x: Any) -> bool:
    """True for a tracer of this trace; for any tracer, where traces are not known."""
    return isinstance(x, Tracer) and trace in (None, getattr(x, "_trace", trace))


def tracers_of(trace: Any) -> list[Any]:
    """Returns the tracers of a trace that has ended which are alive.

    They let go of what they were computed from: only what others hold stays.
    """
    alive = lambda: [x for x in gc.get_referrers(trace) if isinstance(x, Tracer)]
    [setattr(x, "parent", None) for x in alive() if hasattr(x, "parent")]
    return alive()


@contextlib.contextmanager
def checking_leaks(on: bool) -> Iterator[bool]:
    """Sets `jax.checking_leaks()` in this context; yields what it was."""
    was = bool(getattr(jax.config, "jax_check_tracer_leaks", False))
    with jax.checking_leaks.func(on):
        yield was


def derivative_of(eqn: Any) -> Any:
    """Returns the function that a `custom_jvp_call`'s user gave as its derivative; None if unknown:
    the call is then traced to see, which takes milliseconds."""
    function = getattr(eqn.params.get("jvp_jaxpr_fun"), "f", None)
    for _ in range(2):  # within a memoized function, within the thunk that traces it
        cells = [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
        wrapped = [c for c in cells if type(c).__name__ == "WrappedFun"]
        if wrapped:
            return getattr(wrapped[0], "f", None)
        function = next((c for c in cells if getattr(c, "__closure__", None)), None)
    return None


@contextlib.contextmanager
def source(traceback: Any, scope: Any) -> Iterator[None]:
    """In this context traced equations have these lines, and these scopes within the present."""
    if _source_info is None:
        yield
        return
    stack = _source_info.current_name_stack()
    stack = stack if scope is None else stack + scope
    with _source_info.user_context(traceback, name_stack=stack):
        yield


def scan_counts(params: Any, operands: int) -> tuple[int, int]:
    """Returns how many of a scan's operands are constants of its body, and how many it carries."""
    if "num_consts" in params:  # until JAX 0.11
        return params["num_consts"], params["num_carry"]
    parts = params["ft_in"].update(range(operands)).unpack()
    return len(parts[0].vals), len(parts[1].vals)


def coordination_client() -> Any:
    """Returns this process's client of JAX's coordination service, None where there is none."""
    return getattr(_distributed, "client", None)


def packed_attention(
    q: Any, k: Any, v: Any, lengths: Any, starts: Any, *, scale: float, causal: bool
) -> Any:
    """Returns attention within segments, by cuDNN: `jax.nn` has no argument for them.

    q, k, v are `(batch, length, heads, width)`, `lengths` and `starts` `(batch, limit)` and
    `(batch, limit + 1)` of the segments of each sequence, filled up with -1.

    Raises:
      NotImplementedError, TypeError: if JAX, cuDNN or the GPU has no packed layout.
    """
    if _cudnn is None:
        raise NotImplementedError("this JAX has its call of cuDNN elsewhere")
    kinds = _cudnn.MaskType
    return _cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=starts,
        kv_offsets=starts,
        scale=scale,
        mask_type=kinds.PADDING_CAUSAL if causal else kinds.PADDING,
    )


@contextlib.contextmanager
def described_cudnn(version: int) -> Iterator[None]:
    """In this context attention is traced for this cuDNN and a Hopper GPU, whatever is here."""
    names = "check_cudnn_version", "check_compute_capability"
    if _cudnn is None or not all(hasattr(_cudnn, name) for name in names):
        yield
        return
    installed = [getattr(_cudnn, name) for name in names]
    _cudnn.check_cudnn_version = lambda: version
    _cudnn.check_compute_capability = lambda capability: float(capability) <= 9
    try:
        yield
    finally:
        _cudnn.check_cudnn_version, _cudnn.check_compute_capability = installed
