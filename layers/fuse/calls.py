"""Calls that have derivatives of their own: what the equations within them say of their results."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..dense import epilogue
from ..dense.matmul import product_p

CALLS = "custom_jvp_call", "custom_vjp_call", epilogue.forward.primitive.name


def inside_of(eqn: Any) -> tuple[Any, str]:
    """Returns the program within a call that has its own derivative, or None, and what it says.

    "product": one of ours, whose last equation is a `dot_general`. That is added as another maker
    of the call's own result, so that whatever reads products takes it for any other.
    "same": a function of JAX, or an activation of ours, whose derivative is the equations'.
    "border": a user's, whose derivative is its own. Nothing is replaced in it, but what reads its
    operands within, such as the softmax of logits, is known.
    """
    name, params = eqn.primitive.name, eqn.params
    ours = name == epilogue.forward.primitive.name
    avals = tuple(v.aval for v in eqn.invars)
    closed = _defined(params["spec"], avals) if ours else params.get("call_jaxpr")
    if eqn.effects or closed is None or len(closed.jaxpr.invars) != len(avals):
        return None, ""
    eqns = closed.jaxpr.eqns
    if ours:
        return closed, "same"
    names = {inner.primitive.name for inner in eqns}
    if product_p.name in names and eqns[-1].primitive.name == "dot_general":
        return closed, "product"
    if any(name.startswith("normfuse_") for name in names):
        return None, ""
    own = name == "custom_jvp_call" and is_jaxs_own(eqn)
    return closed, "same" if own else "border"


@functools.lru_cache(maxsize=256)
def _defined(spec: Any, avals: tuple[Any, ...]) -> Any:
    """Returns the definition of an activation of ours; None on Explicit axes."""
    if any(aval.sharding.mesh.explicit_axes for aval in avals):
        return None
    return jax.make_jaxpr(functools.partial(epilogue.define_forward, spec))(*avals)


def is_jaxs_own(eqn: Any) -> bool:
    """Tells if a function with a derivative of its own is one that JAX has, such as `softmax`.

    Names prove nothing: its program and that of its derivative have to be equal to JAX's. Then its
    equations say what it is, and their derivative is its derivative but for rounding.
    """
    avals = [v.aval for v in eqn.invars]
    if len(eqn.outvars) != 1 or not avals or not jnp.issubdtype(avals[0].dtype, jnp.floating):
        return False
    bind = lambda *xs: eqn.primitive.bind(*xs, **eqn.primitive.get_bind_params(eqn.params))

    def text(function: Any) -> str:
        x = jax.ShapeDtypeStruct(avals[0].shape, avals[0].dtype)
        others = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals[1:]]
        both = lambda x, dx, *more: jax.jvp(lambda x: function(x, *more), (x,), (dx,))
        try:
            return str(jax.make_jaxpr(both)(x, x, *others))
        except Exception:  # it takes other operands
            return ""

    candidates = [jax.nn.relu] if len(avals) == 1 else []
    body = eqn.params["call_jaxpr"].jaxpr
    axes = [e.params["axes"] for e in body.eqns if "axes" in e.params]
    if axes:
        axis = tuple(map(int, axes[0]))
        candidates += [lambda x, *more: jax.nn.softmax(x, axis, *more)]
        candidates += [lambda x, *more: jax.nn.softmax(x, axis[0], *more)]
    theirs = text(bind)
    return bool(theirs) and theirs in map(text, candidates)
