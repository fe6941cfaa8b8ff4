"""The compiled step: what it says of its implementation, and where its program is kept."""

import math
import os
import re

import jax
import pytest

from normfuse.train import compilation


def test_a_run_says_how_long_it_compiles(finished):
    seconds = r"in \d+\.\d s"
    said = rf"^program +traced {seconds}.*; XLA compiles it$.*^program +compiled {seconds}$"
    assert re.search(said, finished[1], re.M | re.S)


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """A kernel cache of this test's own, and no folder of JAX's."""
    kept = "jax_persistent_cache_"
    names = ["jax_compilation_cache_dir", f"{kept}min_compile_time_secs"]
    before = {name: getattr(jax.config, name) for name in [*names, f"{kept}enable_xla_caches"]}
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_programs_of_others_are_not_loaded(mode, unset):
    (unset / "xla").mkdir(0o700)
    unset.chmod(mode)
    with pytest.warns(RuntimeWarning, match="lets others write code") as caught:
        compilation.keep_compiled_programs()
        compilation.keep_compiled_programs()
    assert len(caught) == 1
    assert jax.config.jax_compilation_cache_dir is None


def test_programs_are_kept_without_being_asked(unset, monkeypatch):
    compilation.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset / "xla")
    jax.config.update("jax_compilation_cache_dir", "elsewhere")
    compilation.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == "elsewhere"  # the user's own choice stays
    # If none can be written, they are read; JAX would warn for each.
    monkeypatch.setattr(os, "access", lambda *_: False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation.keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir == str(unset / "xla")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == math.inf
