"""Device times of LayerNorm, a copy and every library at hand, in one run.

python -m benchmarks.layer_norm                  # with the flags of benchmarks.rms_norm
"""

import importlib.util
from typing import Any

import jax

from benchmarks.norms import EPS, Contestant
from benchmarks.rms_norm import main
from normfuse import layer_norm
from normfuse.layers.norm.kernels import backward_kernel
from normfuse.layers.norm.spec import Norm, define_backward
from normfuse.native.implementation import Order


def contestants(residual: bool) -> dict[str, Contestant]:
    """Ours first; then XLA, then the installed libraries."""
    found = {"normfuse": _ours(residual, "native"), "XLA": _xla(residual)}
    if importlib.util.find_spec("tokamax") is not None:
        found["tokamax"] = _theirs(_tokamax, residual)
    return found


def _tokamax(x, w, b):
    import tokamax

    return (tokamax.layer_norm(x, w, b, epsilon=EPS),)


def _ours(residual: bool, implementation: str) -> Contestant:
    options: dict[str, Any] = {"eps": EPS, "implementation": implementation}
    order = Order((implementation,), strict=True)

    def norm(x, w, b, *r):
        if residual:
            return layer_norm(x, w, b, residual=r[0], **options)
        return (layer_norm(x, w, b, **options),)

    def backward(x, r, w, dy, dh, rstd):
        operands = [dy, x, w, 0 * rstd[:, 0], rstd[:, 0], dh if residual else None]
        return backward_kernel(GRADIENT, *operands, order=order)

    return _modes(norm, backward, residual)


GRADIENT = Norm(op="layer_norm", centred=True, with_dscale=True, with_dbias=True)


def _xla(residual: bool) -> Contestant:
    """The formulas written out, with the statistics saved for the backward."""
    norm = lambda x, w, b: (layer_norm(x, w, b, eps=EPS, implementation="xla"),)

    def backward(x, r, w, dy, dh, rstd):
        rows = [a[:, 0] for a in (0 * rstd, rstd)]
        return define_backward(GRADIENT, dy, x, w, *rows, dh if residual else None)

    return _modes(_added(norm, residual), backward, residual)


def _theirs(norm, residual: bool) -> Contestant:
    """A library whose backward is its derivative: it computes the statistics again."""

    def backward(x, r, w, dy, dh, rstd):  # x is h here, as the forward saved it
        dx, *more = jax.vjp(norm, x, w, 0.5 * w)[1]((dy,))
        return (dx + dh if residual else dx), *more

    return _modes(_added(norm, residual), backward, residual)


def _added(norm, residual: bool):
    def call(x, w, b, *r):
        h = x + r[0] if residual else x
        return (*norm(h, w, b), *[h] * residual)

    return call


def _modes(norm, backward, residual: bool) -> Contestant:
    """The modes of a function of (x, scale, bias[, residual]) and its backward."""
    forward = lambda x, r, w, *_: norm(x, w, 0.5 * w, *[r] * residual)
    return {"forward": forward, "backward": backward}


if __name__ == "__main__":
    main("layer_norm", contestants)
