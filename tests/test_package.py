"""The package as installed: what it contains, what importing it costs, and who imports whom."""

import ast
import importlib.metadata
import pathlib
import statistics
import struct
import subprocess
import sys

import pytest

import normfuse

LAYERS = ("native", "layers", "models", "train")  # each imports only from those before it


def sources(package: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(getattr(normfuse, package).__file__).parent.rglob("*.py"))


def imported(path: pathlib.Path):
    """Every module that a file imports, at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package):
    allowed = LAYERS[: LAYERS.index(package) + 1]
    files = sources(package)
    assert files
    for path in files:
        for name in imported(path):
            first, _, rest = name.partition(".")
            assert first not in LAYERS, f"{path.name} imports {name}: write normfuse.{name}"
            if first == "normfuse":
                inner = rest.partition(".")[0]
                assert inner in allowed, f"{package}/{path.name} imports {name}"


def test_only_native_names_compiled_code():
    for package in LAYERS[1:]:
        for path in sources(package):
            text = path.read_text()
            assert "ffi_call" not in text and "_ext" not in text, f"{package}/{path.name}"


def exported(library: pathlib.Path) -> set[str]:
    """The dynamic symbols that a 64-bit little-endian ELF file defines."""
    data = library.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    (symbols,) = (s for s in sections if s[1] == 11)  # SHT_DYNSYM
    start, length, strings = symbols[4], symbols[5], sections[symbols[6]][4]
    names = set()
    for at in range(start, start + length, 24):
        name, _, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, at)
        if name and section:  # section 0: what others define
            names.add(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names


def test_extension_exports_nothing_but_its_initialiser():
    # Symbols of the C++ library among them would bind to another extension's copy, or its to ours.
    from normfuse.native import _ext

    assert exported(pathlib.Path(_ext.__file__)) == {"PyInit__ext"}


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_takes_at_most_50_ms_beyond_jax():
    program = """
import time, jax
began = time.perf_counter()
import normfuse
print(time.perf_counter() - began)
"""
    # The median: one run in a busy machine says nothing.
    assert statistics.median(float(run(program)) for _ in range(5)) < 0.050


@pytest.mark.parametrize("statement", ["import normfuse", "from normfuse import rms_norm, dense"])
def test_import_starts_no_backend_and_loads_no_framework(statement):
    program = f"""
import sys
{statement}
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
heavy = "flax", "equinox", "optax", "orbax", "cuda", "jax.experimental.pallas"
print(sorted(set(heavy) & set(sys.modules)))
"""
    assert run(program) == "[]"


def test_public_names_resolve_and_carry_types():
    for name in normfuse.__all__:
        assert getattr(normfuse, name) is not None
    assert normfuse.__version__ == importlib.metadata.version("normfuse")
    # The same names for type checkers, which do not run __getattr__.
    tree = ast.parse(pathlib.Path(normfuse.__file__).read_text())
    typed = {a.asname for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(normfuse.__all__) - {"__version__"} <= typed


def test_wheel_holds_kernels_and_no_build_inputs():
    files = [str(f) for f in importlib.metadata.files("normfuse") or ()]
    if any("_editable" in f for f in files):
        pytest.skip("an editable install has no copies of its own")
    inside = [f for f in files if f.startswith("normfuse/")]
    assert "normfuse/__init__.py" in inside and "normfuse/py.typed" in inside
    assert sum(f.endswith(".cu") for f in inside) >= 4
    assert any(f.startswith("normfuse/native/_ext.") and f.endswith(".so") for f in inside)
    wrong = (".cc", ".h", ".map", "_root.py", "CMakeLists.txt", ".o")
    assert not [f for f in inside if f.endswith(wrong)]
    roots = {f.split("/")[0] for f in files if not f.startswith("..")}
    assert all(r == "normfuse" or r.startswith("normfuse-") for r in roots), roots
