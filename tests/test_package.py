"""The installed package: its contents, the cost of an import, and who imports whom."""

import ast
import importlib
import importlib.metadata
import pathlib
import re
import shutil
import struct
import subprocess
import sys

import pytest

import normfuse

LAYERS = ("native", "layers", "models", "train")  # each imports only from those before it


def sources(package: str) -> list[pathlib.Path]:
    return sorted(pathlib.Path(getattr(normfuse, package).__file__).parent.rglob("*.py"))


ROOT = pathlib.Path(normfuse.__file__).parent


def imported(path: pathlib.Path):
    """Every module that a file of the package imports, at any depth of the file."""
    package = ("normfuse", *path.parent.relative_to(ROOT).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] * (node.module is not None)
            yield from (".".join([*base, alias.name]) for alias in node.names)


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package):
    allowed = LAYERS[: LAYERS.index(package) + 1]
    files = sources(package)
    assert files
    for path in files:
        assert not re.search(r"^\s*(from|import) normfuse", path.read_text(), re.MULTILINE), (
            f"{package}/{path.name}: imports within the package are relative, so that tools follow "
            "them in a checkout"
        )
        for name in imported(path):
            first, _, rest = name.partition(".")
            assert first not in LAYERS, f"{path.name} imports {name}"
            if first == "normfuse":
                inner = rest.partition(".")[0]
                assert inner in allowed, f"{package}/{path.name} imports {name}"


def test_only_native_names_compiled_code():
    for package in LAYERS[1:]:
        for path in sources(package):
            text = path.read_text()
            assert not re.search(r"\bffi_call\b|\b_ext\b", text), f"{package}/{path.name}"


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


def test_importing_a_bare_checkout_says_how_to_install(tmp_path):
    # The root of the repository is the package: what its parent folder on the path would import.
    checkout = tmp_path / "normfuse"
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for package in ("native", "layers"):
        shutil.copytree(ROOT / package, checkout / package, ignore=ignore)
    shutil.copy(ROOT / "__init__.py", checkout)
    program = "import normfuse"
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {checkout}") and "pip install" in last


def test_pytest_collects_the_tests_of_a_checkout(tmp_path):
    # Its root has an __init__.py, which pytest must not import as a package of tests.
    tests = pathlib.Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
        + [str(tests / "docs"), str(tests / "test_package.py")],
        capture_output=True,
        text=True,
        cwd=tests.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_pytest_collects" in done.stdout


def test_import_loads_what_registers_the_handlers():
    """Registering takes milliseconds; everything else is loaded by the first use of a name."""
    program = """
import sys, jax
before = set(sys.modules)
import normfuse
print(sorted(set(sys.modules) - before))
"""
    registering = [f"normfuse.native.{name}" for name in ("_ext", "registry")]
    assert run(program) == str(["normfuse", "normfuse.native", *registering])


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


# A finder of modules that finds none of the trainer's packages, as where they are not installed.
_BLOCKED = """
import sys

class Blocked:
    names = set({names!r}.split())

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""
_TRAINER = "grain matplotlib orbax rich safetensors tokenizers tyro yaml"
_FRAMEWORKS = "equinox flax optax treescope"


def test_the_core_needs_only_jax_numpy_and_what_the_kernel_cache_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path))
    program = """
import importlib, pkgutil
import jax, jax.numpy as jnp
import normfuse, normfuse.layers

for name in normfuse.__all__:
    getattr(normfuse, name)
modules = [m.name for m in pkgutil.walk_packages(normfuse.layers.__path__, "normfuse.layers.")]
frameworks = "eqx", "fuse_nnx", "linen", "nnx"
modules = [m for m in modules if m.rpartition(".")[2] not in frameworks]
for module in modules:
    importlib.import_module(module)
x, kernel = jnp.arange(32.0).reshape(4, 8), jnp.ones((8, 16))
loss = lambda x: normfuse.dense(normfuse.rms_norm(x, jnp.ones(8)), kernel, activation="silu").sum()
loss = normfuse.fuse(lambda x, f=loss: f(x) + jax.nn.logsumexp(x), report=[].append)
assert jax.grad(loss)(x).shape == x.shape
from normfuse.layers import info
assert "cpu" in info.info() and "kernel cache" in info.cached()[0]
print(len(modules))
"""
    blocked = _BLOCKED.format(names=f"{_TRAINER} {_FRAMEWORKS}")
    assert int(run(blocked + program)) > 40


@pytest.mark.parametrize("framework", ["nnx", "linen", "eqx"])
def test_the_layers_need_nothing_of_the_trainer(framework):
    # Flax itself imports rich, and nnx orbax and PyYAML by way of Linen
    names = _TRAINER if framework == "eqx" else "grain matplotlib safetensors tokenizers tyro"
    run(f"{_BLOCKED.format(names=names)}\nimport normfuse.layers.{framework}")


@pytest.mark.parametrize(
    "framework, extra", [("nnx", "flax"), ("linen", "flax"), ("eqx", "equinox")]
)
def test_the_layers_say_what_to_install(framework, extra):
    program = f"""
try:
    import normfuse.layers.{framework}
except ModuleNotFoundError as error:
    print(error.__notes__)
"""
    install = f"pip install 'normfuse[{extra}]'"
    assert run(_BLOCKED.format(names=_FRAMEWORKS) + program) == str([install])


def test_the_command_says_what_to_install():
    program = """
from normfuse.train.__main__ import entry
entry(["info"])
"""
    program = _BLOCKED.format(names=_TRAINER) + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "error: the package tyro is missing: pip install 'normfuse[train]"
    )


def test_public_names_resolve_and_carry_types():
    for name in normfuse.__all__:
        assert getattr(normfuse, name) is not None
    assert normfuse.__version__ == importlib.metadata.version("normfuse")
    # The same names for type checkers, which do not run __getattr__.
    tree = ast.parse(pathlib.Path(normfuse.__file__).read_text())
    typed = {a.asname for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    assert set(normfuse.__all__) - {"__version__"} <= typed


@pytest.mark.parametrize("name", ["swap", "RMSNorm", "Linear", "Dense"])
def test_a_name_that_is_elsewhere_says_where(name):
    """In `from normfuse import name` too, where Python writes a message of its own."""
    with pytest.raises(ImportError, match="is in the module of your") as caught:
        exec(f"from normfuse import {name}")
    with pytest.raises(AttributeError) as plain:
        getattr(normfuse, name)
    assert str(caught.value) == str(plain.value) and not hasattr(normfuse, name)
    homes = re.findall(r"normfuse\.layers\.\w+", str(caught.value))
    assert homes and all(hasattr(importlib.import_module(home), name) for home in homes)
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from normfuse import neither")


def test_wheel_holds_kernels_and_no_build_inputs():
    files = [str(f) for f in importlib.metadata.files("normfuse") or ()]
    if any("_editable" in f for f in files):
        pytest.skip("an editable install has no copies of its own")
    inside = [f for f in files if f.startswith("normfuse/")]
    assert "normfuse/__init__.py" in inside and "normfuse/py.typed" in inside
    assert sum(f.endswith(".cu") for f in inside) >= 4
    assert any(f.startswith("normfuse/native/_ext.") and f.endswith(".so") for f in inside)
    wrong = (".cc", ".h", ".map", "CMakeLists.txt", ".o")
    assert not [f for f in inside if f.endswith(wrong)]
    roots = {f.split("/")[0] for f in files if not f.startswith("..")}
    assert all(r == "normfuse" or r.startswith("normfuse-") for r in roots), roots
