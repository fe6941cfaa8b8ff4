"""Shared by the tests of programs for described GPUs."""

import pathlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """XLA compiles their programs as it does for users."""
    for item in items:
        if item.path.is_relative_to(pathlib.Path(__file__).parent):
            item.add_marker("optimized")


@pytest.fixture(autouse=True, scope="package")
def no_cache():
    """XLA cannot load programs that it compiled for a GPU that is only described.

    Tests of the trainer turn JAX's persistent cache on in the process that runs them.
    """
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()
