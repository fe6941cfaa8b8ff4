"""Commands, files, public names and recorded numbers in the documents are the repository's."""

import ast
import importlib
import importlib.util
import inspect
import pathlib
import re
import runpy
import shlex
import tomllib

import pytest

import normfuse
from normfuse.train.cli import main, parse

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]  # users and developers follow these
DOCUMENTS = [*GUIDE, *(ROOT / "benchmarks" / "results").glob("*.md")]
FOLDERS = ("native", "layers", "models", "train", "tests", "docs", "benchmarks")
CODE = [*ROOT.glob("*.py"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))]

pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results").is_dir(), reason="an sdist leaves the reports out"
)


def found(pattern: str, documents: list[pathlib.Path]) -> set[str]:
    """Returns the matches of a pattern's first group in the documents."""
    return {match for path in documents for match in re.findall(pattern, path.read_text())}


def test_every_train_command_is_understood():
    commands = found(r"normfuse train ((?:… )?--[^`\n]*)", GUIDE) - {"--help"}
    assert len(commands) >= 6
    for command in commands:
        words = shlex.split(command, comments=True)
        parse(["train", *(word for word in words if word != "…")])


def test_every_command_of_normfuse_exists(capsys):
    named = found(r"(?:bin/|`|^)normfuse ([a-z]+)", GUIDE)
    assert {"train", "info", "report", "generate", "cache"} <= named
    try:
        main(["--help"])
    except SystemExit as done:
        assert not done.code
    listed = set(re.findall(r"[a-z]+", capsys.readouterr().out))
    assert named <= listed


def test_every_script_takes_the_flags_that_are_given():
    scripts = found(r"((?:python -m benchmarks\.|python benchmarks/)[^`\n]*)", DOCUMENTS)
    assert len(scripts) >= 8
    for command in scripts:
        words = command.removeprefix("python ").removeprefix("-m ").split()
        name = words[0].removeprefix("benchmarks.").removeprefix("benchmarks/").split(".py")[0]
        text = (ROOT / "benchmarks" / f"{name.rstrip('.,;:)')}.py").read_text()
        for flag in re.findall(r"(?<![\w-])--[a-z-]+", command):
            assert f'"{flag}"' in text, f"{command}: {name} has no {flag}"


def test_every_extra_that_is_named_exists():
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    named = found(r"'\.\[([a-z0-9,]+)\]'", DOCUMENTS)
    assert {"train", "cuda13"} <= {one for several in named for one in several.split(",")} <= extras


def test_every_document_that_is_named_exists():
    """Sphinx checks the links between documents; this checks names in comments and commands."""
    named = r"(?<![\w/.])((?:docs|benchmarks/results)/[\w./-]*\w\.(?:md|py|png|csv|css))\b"
    missing = {
        (str(path.relative_to(ROOT)), name)
        for path in [*DOCUMENTS, *CODE]
        for name in found(named, [path])
        if not (ROOT / name).exists() and not (path.parent / name).exists()
    }
    assert not missing


def test_the_handlers_for_an_allow_list_are_those_of_the_extension():
    table = found(r"`(normfuse_\w+)`", [ROOT / "docs" / "security.md"])
    assert table == found(r'"(normfuse_\w+)"', [ROOT / "native" / "bindings.cc"])


def test_the_reference_has_every_public_name():
    reference = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    names = [f"normfuse.{name}" for name in normfuse.__all__ if name != "__version__"]
    for framework in ("nnx", "linen", "eqx"):
        module = importlib.import_module(f"normfuse.layers.{framework}")
        own = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
            if inspect.isclass(value) or inspect.isfunction(value)
        ]
        names += [f"{module.__name__}.{name}" for name in {*own, "GatedMLP", "swap"}]
    assert {"normfuse.rms_norm", "normfuse.layers.nnx.swap"} <= set(names)
    assert not [name for name in names if not re.search(rf":: {re.escape(name)}$", reference, re.M)]


@pytest.fixture(scope="module")
def signatures():
    """docs/signatures.py, which reads the reference's pages and the package."""
    spec = importlib.util.spec_from_file_location("signatures", ROOT / "docs" / "signatures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_signatures_has_every_documented_function(signatures):
    rows = dict(re.findall(r"<([\w.]+)>` \| `\((.*)\)` \| \S.* \|$", signatures.tables(), re.M))
    names = [name for page in signatures.documented().values() for name in page]
    exceptions = {"normfuse.CompileError", "normfuse.native.implementation.Unsupported"}
    assert len(names) > 40 and rows.keys() == set(names) - exceptions
    for name, row in rows.items():
        (made,) = ast.parse(f"def f({row}): pass").body  # defaults are Python, too
        given = {node.arg for node in ast.walk(made) if isinstance(node, ast.arg)}
        value = signatures.named(name)
        known = inspect.signature(value.__init__ if inspect.isclass(value) else value).parameters
        linen = {"parent", "name"} if "parent" in known else set()
        assert given == known.keys() - {"self"} - linen, name


def _undocumented(name: str, value) -> list[str]:
    """The public parts of a function or a class that no docstring tells of."""
    missing = [] if inspect.getdoc(value) else [name]
    if not inspect.isclass(value):
        return missing
    own = [c for c in value.__mro__ if c.__module__.startswith("normfuse.")]
    text = "\n".join(inspect.getdoc(c) or "" for c in own)
    told = {*re.findall(r"\w+", " ".join(re.findall(r"`[^`]*`", text)))}
    told |= {
        n for line in re.findall(r"^ +(\w+(?:, \w+)*): ", text, re.M) for n in line.split(", ")
    }
    for owner in own:
        fields = {n for n in vars(owner).get("__annotations__", ()) if not n.startswith("_")}
        linen = {"parent", "name"} if "parent" in fields else set()
        missing += [f"{name}.{field}" for field in fields - linen - told]
        for attribute in vars(owner).keys() - fields:
            of_ours = inspect.isfunction(inspect.unwrap(getattr(owner, attribute)))
            of_ours |= isinstance(vars(owner)[attribute], property)
            if (
                not attribute.startswith("_")
                and of_ours
                and not inspect.getdoc(getattr(owner, attribute))
            ):
                missing.append(f"{name}.{attribute}")
    return missing


def test_every_public_attribute_has_a_docstring(signatures):
    """Functions, classes, their methods, properties and fields, of all that the reference names."""
    names = [name for page in signatures.documented().values() for name in page]
    assert [m for name in names for m in _undocumented(name, signatures.named(name))] == []


def test_messages_that_are_explained_exist():
    """Each heading quotes a message, as far as it is the same in every call."""
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
    headings = "\n".join(re.findall(r"^## (.*)$", page, re.M))
    quoted = [part for text in re.findall(r"`([^`]+)`", headings) for part in text.split("…")]
    parts = [part.strip(" :,") for part in quoted if len(part.strip(" :,")) > 9]
    assert len(parts) > 10
    joined = lambda text: re.sub(r'"\s*\n\s*f?"', "", text)  # strings over several lines
    source = "".join(joined(path.read_text()) for path in CODE)
    for part in parts:
        assert part in source, part


def test_the_tables_are_the_recorded_numbers():
    headline = runpy.run_path(str(ROOT / "benchmarks" / "headline.py"))
    assert headline["table"]() in (ROOT / "README.md").read_text()
    performance = (ROOT / "docs" / "performance.md").read_text()
    for table in headline["tables"]():
        assert table in performance


@pytest.fixture(scope="module")
def charts():
    return runpy.run_path(str(ROOT / "docs" / "charts.py"))


def test_tables_and_ranges_of_public_models_are_those_of_the_results(charts):
    for name in charts["sentences"]():
        text = (ROOT / name).read_text()
        assert charts["written"](name, text) == text, f"python docs/charts.py writes {name}"
    assert len(charts["rows"]()) >= 12


def test_a_document_with_another_range_or_row_is_said(charts):
    text = (ROOT / "README.md").read_text()
    (first,) = charts["sentences"]()["README.md"]
    for old in (re.findall(r"[\d.]*\d", first)[1], charts["table"]().splitlines()[2]):
        changed = text.replace(old, "9.99" if old in first else "| x | y |", 1)
        assert changed != text and charts["written"]("README.md", changed) == text
    with pytest.raises(AssertionError, match="README.md does not say: the training steps"):
        charts["written"]("README.md", text.replace("as their projects run them", ""))


def test_a_ratio_is_theirs_over_ours_and_defaults_alone_make_the_range(charts):
    made = lambda ms, gib: {
        "ms": str(ms),
        "gib": str(gib),
        "device": "H100",
        "busy_ms": "40",
        "profiled_ms": "50",
        "tokens": "8",
    }
    versions = {"theirs": made(100, 20), "fuse": made(50, 10)}
    row = charts["Row"]("Model", versions)
    assert (row.ratio("fuse"), row.ratio("fuse, fp8"), row.busy("fuse")) == (2, None, 0.8)
    assert row.cell("fuse") == "50.0 ms, **2.00×**, 10.0 GiB, busy .80"
    assert row.is_default and not charts["Row"]("Model, no dropout", versions).is_default


def test_charts_show_the_numbers_of_the_results(charts):
    for name, column in (("times", "ms"), ("memory", "gib")):
        image = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        shown = re.findall(r">([\d.]+ of [\d.]+)</text>", image)
        numbers = [
            f"{row.number(version, column):.0f} of {row.number('theirs', column):.0f}"
            for row in charts["rows"]()
            for version in ("fuse", "fuse, fp8")
            if row.is_default and row.number(version, column)
        ]
        assert sorted(shown) == sorted(numbers)


def test_why_a_gpu_waits_is_explained(charts):
    """Where it is busy for less than .97 of a step of ours."""
    page = (ROOT / "docs" / "performance.md").read_text()
    (section,) = re.findall(r"^### Where the GPU waits\n(.*?)^##", page, re.M | re.S)
    assert not [name for name in charts["waits"]() if name.rpartition(", fuse")[0] not in section]


def test_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_report_is_listed_with_its_device():
    reports = ROOT / "benchmarks" / "results"
    listed = (reports / "README.md").read_text()
    assert not [page.name for page in reports.glob("[a-z]*.md") if page.name not in listed]
