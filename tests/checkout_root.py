"""A pytest plugin: the checkout's root is a folder to pytest, though it has an `__init__.py`.

The root is the package that is installed as normfuse. pytest would import it, as the package that
the tests are in, and a bare checkout cannot be imported.
"""

import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def pytest_collect_directory(path, parent):
    return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None
