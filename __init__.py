"""Native RMSNorm and fused Dense layers for JAX, in Flax and Equinox.

The names below are imported when they are first used: importing normfuse loads no framework and not
JAX, touches no GPU and starts no JAX backend. A program that runs exported functions with
normfuse's kernels needs only this import, before or after that of JAX.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .layers.accumulate import accumulate_gradients as accumulate_gradients
    from .layers.attention import attention as attention
    from .layers.compare import compare as compare
    from .layers.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from .layers.dense import dense as dense
    from .layers.dense import gated_dense as gated_dense
    from .layers.dense import gated_product as gated_product
    from .layers.elementwise import elementwise as elementwise
    from .layers.fuse import fuse as fuse
    from .layers.norm import layer_norm as layer_norm
    from .layers.norm import rms_norm as rms_norm
    from .layers.norm import rms_norm_with_rstd as rms_norm_with_rstd
    from .native.compiler import CompileError as CompileError
    from .native.implementation import fallbacks as fallbacks

    __version__: str

if importlib.util.find_spec(f"{__name__}.native._ext") is None:
    raise ImportError(
        f"{__path__[0]} is normfuse's source, and its C++ extension has not been built: run "
        "`pip install .` there, then import normfuse from another folder."
    )

# JAX could call an entry point of the group `jax_plugins` instead, but would in every program where
# normfuse is installed, and the handlers run machine code that exported programs carry
# (docs/security.md). Importing normfuse allows that.
from .native import registry as _registry


class _WithJax:
    """Finds JAX where others do, and registers the handlers as soon as it is imported.

    JAX takes a second to import: a command line reads its flags, and sets its signals, before.
    """

    def find_spec(self, name, path=None, target=None):
        if name != "jax":
            return None
        sys.meta_path.remove(self)  # pyright: ignore[reportArgumentType]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            run = lambda module: (execute(module), _registry.register())
            spec.loader.exec_module = run  # pyright: ignore[reportAttributeAccessIssue]
        return spec


if "jax" in sys.modules:
    _registry.register()
else:
    _registry.check_version(_registry.compiled_version(), _registry.installed_version())
    sys.meta_path.insert(0, _WithJax())  # pyright: ignore[reportArgumentType]

_HOME = {  # public name -> the module that defines it
    "CompileError": ".native.compiler",
    "accumulate_gradients": ".layers.accumulate",
    "attention": ".layers.attention",
    "compare": ".layers.compare",
    "dense": ".layers.dense",
    "elementwise": ".layers.elementwise",
    "fallbacks": ".native.implementation",
    "fuse": ".layers.fuse",
    "gated_dense": ".layers.dense",
    "gated_product": ".layers.dense",
    "layer_norm": ".layers.norm",
    "linear_cross_entropy": ".layers.cross_entropy",
    "rms_norm": ".layers.norm",
    "rms_norm_with_rstd": ".layers.norm",
}

_MODULES = {  # name -> the modules of `layers` that have it, each for a framework
    **dict.fromkeys(("swap", "GatedMLP", "LayerNorm", "RMSNorm"), ("nnx", "linen", "eqx")),
    "Dense": ("linen",),
    "Linear": ("nnx", "eqx"),
}

__all__ = ["__version__", *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _HOME:
        found = getattr(importlib.import_module(_HOME[name], __name__), name)
        return globals().setdefault(name, found)  # the next time nobody asks
    if name in ("native", "layers", "models", "train"):
        return importlib.import_module(f".{name}", __name__)
    if name == "__version__":
        from importlib.metadata import version

        return version("normfuse")
    message = f"module {__name__!r} has no attribute {name!r}"
    if name in _MODULES:
        homes = ", ".join(f"{__name__}.layers.{home}" for home in _MODULES[name])
        message = f"{name} is in the module of your framework: {homes}"
    # `from normfuse import name` drops the message of an AttributeError and writes its own.
    imported = name in _MODULES and sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if imported else AttributeError)(message)


def __dir__():
    return sorted([*globals(), *__all__])
