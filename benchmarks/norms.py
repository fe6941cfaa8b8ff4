"""RMSNorm as each library computes it: functions of the same operands, to be timed side by side.

Every contestant is `mode -> function of (x, residual, scale, dy, dh, rstd)`. With a residual,
h = x + residual is normalised and returned too, and the gradient takes dh, that of h.

  forward   y, or (y, h)
  backward  (dx, dscale), from rstd as the forward saved it where the library lets one
"""

import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp

from normfuse import rms_norm
from normfuse.layers.norm.kernels import backward_kernel
from normfuse.layers.norm.spec import Norm
from normfuse.native.implementation import Order

EPS = 1e-6
Contestant = dict[str, Callable]


def contestants(residual: bool) -> dict[str, Contestant]:
    """Ours first; then XLA, then the installed libraries."""
    found = {"normfuse": _normfuse(residual), "XLA": _xla(residual)}
    found["nnx"] = _differentiated(_nnx, residual)
    found["Equinox"] = _differentiated(_equinox, residual)
    if importlib.util.find_spec("tokamax") is not None:
        try:
            import tokamax  # noqa: F401
        except ImportError as error:
            print(f"tokamax: {error}")
        else:
            found["tokamax"] = _differentiated(_tokamax, residual)
    return found


def _normfuse(residual: bool) -> Contestant:
    order = Order(("native",), strict=True)

    def forward(x, r, w, *_):
        r = r if residual else None
        return rms_norm(x, w, residual=r, eps=EPS, implementation="native")

    def backward(x, r, w, dy, dh, rstd):
        operands = [dy, x, w, None, rstd[:, 0], dh if residual else None]
        return backward_kernel(Norm(with_dscale=True), *operands, order=order)[:2]

    return {"forward": forward, "backward": backward}


def _plain(x, w):
    wide = x.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)
    return (wide * rstd * w).astype(x.dtype)


def _xla(residual: bool) -> Contestant:
    """The form that XLA fuses best: the formulas written out, with rstd saved for the backward."""

    def forward(x, r, w, *_):
        if not residual:
            return _plain(x, w)
        h = x + r
        return _plain(h, w), h

    def backward(x, r, w, dy, dh, rstd):
        wide_x, wide_dy = x.astype(jnp.float32), dy.astype(jnp.float32)
        normal, g = wide_x * rstd, wide_dy * w
        dx = rstd * (g - normal * jnp.mean(g * normal, -1, keepdims=True))
        if residual:
            dx = dx + dh.astype(jnp.float32)
        dx = dx.astype(x.dtype)
        return dx, jnp.sum(wide_dy * normal, 0)

    return {"forward": forward, "backward": backward}


def _nnx(x, w):
    from flax import nnx

    norm = nnx.RMSNorm(x.shape[-1], epsilon=EPS, dtype=x.dtype, rngs=nnx.Rngs(0))
    norm.scale = nnx.Param(w)
    return norm(x)


def _equinox(x, w):
    import equinox as eqx

    norm = eqx.nn.RMSNorm(x.shape[-1], eps=EPS, use_bias=False)
    return jax.vmap(eqx.tree_at(lambda norm: norm.weight, norm, w))(x)


def _tokamax(x, w):
    import tokamax

    return tokamax.layer_norm(x, w, None, epsilon=EPS, subtract_mean=False)


def _differentiated(norm: Callable, residual: bool) -> Contestant:
    """A library whose backward is its derivative: it computes rstd again."""

    def forward(x, r, w, *_):
        if not residual:
            return norm(x, w)
        h = x + r
        return norm(h, w), h

    def backward(x, r, w, dy, dh, rstd):
        # x is h here, as the forward saved it
        dx, dscale = jax.vjp(norm, x, w)[1](dy)
        return (dx + dh if residual else dx), dscale

    return {"forward": forward, "backward": backward}


def moved(mode: str, residual: bool) -> int:
    """Arrays as large as x that must be read or written, each once."""
    forward, backward = (4, 4) if residual else (2, 3)
    return {"forward": forward, "backward": backward}[mode]
