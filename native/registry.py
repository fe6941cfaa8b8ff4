"""The compiled handlers, made known to XLA."""

import importlib.util
import os
import re

from . import _ext


def register() -> None:
    """Registers every compiled FFI type and target with JAX.

    Raises:
      ImportError: if the installed jaxlib is older than the headers the kernels were compiled with.
        XLA refuses such handlers only when the backend starts, and then nothing runs at all.
    """
    import jax

    check_version(compiled_version(), installed_version())
    for platform, entries in _ext.registrations().items():
        for name, kind in entries["types"].items():  # types go before their handlers
            jax.ffi.register_ffi_type(name, kind, platform=platform)
        for name, handler in entries["targets"].items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)


def check_version(compiled: tuple[int, int], installed: tuple[int, int]) -> None:
    """Raises ImportError unless handlers of FFI `compiled` load in a jaxlib of FFI `installed`."""
    if compiled[0] == installed[0] and compiled <= installed:
        return
    raise ImportError(
        "normfuse was compiled for XLA's FFI {}.{}, and the installed jaxlib has FFI {}.{}. "
        "Install a jax and jaxlib of the same age or newer, or build normfuse against this jaxlib: "
        "in a checkout, `pip install --no-build-isolation .`.".format(*compiled, *installed)
    )


def compiled_version() -> tuple[int, int]:
    return _ext.ffi_api_version


def installed_version() -> tuple[int, int]:
    """Returns the FFI version (major, minor) of the installed jaxlib, read from its headers."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("normfuse needs jaxlib, and it is not installed: `pip install jax`.")
    header = os.path.join(spec.submodule_search_locations[0], "include/xla/ffi/api/c_api.h")
    with open(header) as file:
        numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", file.read()))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])
