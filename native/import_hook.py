"""Registers the FFI targets when JAX is imported, so that `import normfuse` need not import it.

An entry point of the group `jax_plugins` would be shorter: JAX calls it, from 0.10.2 on, when it
looks for backends. But it does so in every program where normfuse is installed, and the targets run
machine code that exported programs carry (docs/security.md). Importing normfuse allows that.
"""

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def register_with_jax() -> None:
    """Registers the FFI targets, so that exported programs run; not before JAX is imported.

    Raises:
      ImportError: as `registry.register`. Where JAX is imported later, that is a warning: its own
        import must not fail.
    """
    if "jax" not in sys.modules:
        sys.meta_path.insert(0, _RegisterAfterJax())
        return
    from . import registry

    registry.register()


class _RegisterAfterJax:
    """Finds `jax` where it is, and registers the FFI targets once it has been imported."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "jax" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: "ModuleType") -> None:
            execute(module)
            try:
                register_with_jax()
            except ImportError as error:
                from .implementation import warn

                warn(str(error))

        spec.loader.exec_module = execute_and_register
        return spec
