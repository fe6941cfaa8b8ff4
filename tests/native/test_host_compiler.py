"""The system's C++ compiler, and what its failures say."""

import re

import pytest

from normfuse.native import cache, host_compiler
from normfuse.native.compiler import CompileError, CompilerMissing

_TEXT = 'extern "C" int one() { return 1; }'


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Replaces the compiler by one that fails with a message."""

    def fail(message: str):
        path = tmp_path / "c++"
        path.write_text(f"#!/bin/sh\n[ $1 = --version ] && echo 1.0 && exit\n{message}\nexit 1\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        monkeypatch.setattr(cache, "fetch", lambda described, make: make())

    return fail


def test_text_with_a_mistake_does_not_compile(compiler):
    compiler('echo "<stdin>:1:5: error: expected initializer" >&2')
    with pytest.raises(CompileError, match=r"(?s)<mine> does not compile.*expected initializer"):
        host_compiler.library("<mine>", "int", host_compiler.PORTABLE)


@pytest.mark.parametrize("given", ["no-such-compiler", "/tmp", "''"])
def test_a_variable_that_names_no_compiler_is_named(given, monkeypatch):
    monkeypatch.setenv("CXX", given)
    with pytest.raises(CompilerMissing, match=f"CXX is {re.escape(repr(given))}, .*unset it"):
        host_compiler.find()
    monkeypatch.setenv("CXX", "env c++")
    assert host_compiler.find()[0].endswith("env c++")
