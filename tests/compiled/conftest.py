"""What tests of programs for described GPUs share."""

import pathlib

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """XLA compiles their programs as it does for users."""
    for item in items:
        if item.path.is_relative_to(pathlib.Path(__file__).parent):
            item.add_marker("optimized")
