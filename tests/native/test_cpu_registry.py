"""Handlers are compared with the installed jaxlib before XLA sees one."""

import importlib.machinery
import importlib.util

import jax
import pytest

from normfuse.native import _ext, registry


@pytest.fixture
def older_jaxlib(monkeypatch, tmp_path):
    """A jaxlib whose headers are one FFI version behind those compiled in."""
    major, minor = _ext.ffi_api_version
    header = tmp_path / "include/xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor - 1}\n")
    spec = importlib.machinery.ModuleSpec("jaxlib", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return major, minor - 1


def test_older_jaxlib_is_refused_before_anything_is_registered(older_jaxlib, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("registered")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", forbidden)
    monkeypatch.setattr(jax.ffi, "register_ffi_type", forbidden)
    assert registry.installed_version() == older_jaxlib
    with pytest.raises(ImportError, match=r"the installed jaxlib has FFI 0\.\d+\. Install a jax"):
        registry.register()


@pytest.mark.parametrize(
    ("compiled", "installed", "loads"),
    [
        ((0, 3), (0, 3), True),
        ((0, 3), (0, 4), True),
        ((0, 3), (0, 12), True),
        ((0, 4), (0, 3), False),
        ((0, 3), (1, 0), False),
        ((1, 0), (0, 9), False),
    ],
)
def test_versions_that_load(compiled, installed, loads):
    if loads:
        registry.check_version(compiled, installed)
    else:
        with pytest.raises(ImportError, match="build normfuse against this jaxlib"):
            registry.check_version(compiled, installed)


def test_installed_version_is_read_from_the_headers(monkeypatch, tmp_path):
    assert registry.installed_version() >= _ext.ffi_api_version
    header = tmp_path / "include/xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 7\n\n#define XLA_FFI_API_MINOR 31\n")
    spec = importlib.machinery.ModuleSpec("jaxlib", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", {"jaxlib": spec}.__getitem__)
    assert registry.installed_version() == (7, 31)


def test_every_target_is_registered_under_its_name():
    platforms = _ext.registrations()
    for entries in platforms.values():
        assert all(name.startswith("normfuse_") for name in entries["targets"])
    assert {f"normfuse_norm_{k}" for k in ("forward", "backward")} <= set(
        platforms["cpu"]["targets"]
    )
