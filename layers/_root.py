"""Native RMSNorm and fused Dense layers for JAX, in Flax and Equinox.

The names below are imported when they are first used: importing normfuse loads no framework,
touches no GPU and starts no JAX backend.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "${version}"

if TYPE_CHECKING:
    from normfuse.layers.dense import dense as dense
    from normfuse.layers.elementwise import elementwise as elementwise
    from normfuse.layers.rms_norm import add_rms_norm as add_rms_norm
    from normfuse.layers.rms_norm import rms_norm as rms_norm
    from normfuse.layers.rms_norm import rms_norm_with_rstd as rms_norm_with_rstd
    from normfuse.native.compiler import CompileError as CompileError
    from normfuse.native.fallback import fallbacks as fallbacks

_HOME = {
    "CompileError": "normfuse.native.compiler",
    "add_rms_norm": "normfuse.layers.rms_norm",
    "dense": "normfuse.layers.dense",
    "elementwise": "normfuse.layers.elementwise",
    "fallbacks": "normfuse.native.fallback",
    "rms_norm": "normfuse.layers.rms_norm",
    "rms_norm_with_rstd": "normfuse.layers.rms_norm",
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in ("native", "layers", "models", "train"):
        return importlib.import_module(f"normfuse.{name}")
    raise AttributeError(f"module 'normfuse' has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME])
