"""Fixtures for all tests of `fuse`."""

import pytest

from normfuse.layers.fuse import losses


@pytest.fixture(autouse=True)
def small_vocabularies(monkeypatch):
    """Serves losses of a few classes, which users' functions keep as they are."""
    monkeypatch.setattr(losses, "SMALLEST", 8)
