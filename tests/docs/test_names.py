"""Files and names in backticks exist: in the documents, in docstrings and in comments."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = "native", "layers", "models", "train", "tests", "docs", "benchmarks"
PAGES = [*ROOT.glob("*.md"), *(p for f in ("docs", "benchmarks") for p in (ROOT / f).rglob("*.md"))]
FILE = re.compile(r"[\w./-]+\.(?:py|md|cc|cuh?|h|csv|png|ipynb)\b")
NAME = re.compile(r"[A-Za-z_][\w.]*(?:\(\))?")

# Names of others' projects, tools and systems.
OTHERS = {
    *("cuda/std/__type_traits/type_list.h", "limits.h", "math.h", "my.h", "model.py"),
    *("run_clm_flax.py", "run_mlm_flax.py", "run_t5_mlm_flax.py"),
    *("Args", "Raises", "Returns", "ShardingTypeError", "auto_axes", "AutoTokenizer"),
    *("JaxRNG", "cutejax", "gradient_accumulation_fusion", "main_grad_dtype", "jiterator"),
    *("_CCCL_META_UNROLL_LIMIT", "cudaMemcpy", "cs", "ncu", "nt", "runtime_version"),
    *(
        "gate_bias",
        "up_bias",
        "down_bias",
        "localflock",
        "lockd",
        "nolock",
        "srun",
        "manylinux_2_35_x86_64",
    ),
}
# Gone, as the changelog says; pages of results have what was measured then.
GONE = {
    *("losses.png", "layer_pattern", "residual_dtype", "fuse_norms", "unswap", "NormDense"),
    *(
        "adaptive_rms_norm",
        "adaptive_layer_norm",
        "add_rms_norm",
        "add_layer_norm",
        "gated_rms_norm",
    ),
    *("norm_dense", "norm_gated_dense", "clamped_swiglu", "LinearGeneral", "Einsum", "bpe"),
}
RECORDS = {"CHANGELOG.md", *(p.name for p in (ROOT / "benchmarks" / "results").glob("*.md"))}

pytestmark = pytest.mark.skipif(
    not (ROOT / "benchmarks" / "results").is_dir(), reason="an sdist leaves the reports out"
)


def read() -> tuple[set[str], list[tuple[str, str]]]:
    """Returns the words of the sources' code, and (place, text) of comments and documents."""
    names: set[str] = set()
    texts = [(path.name, path.read_text()) for path in PAGES]
    below = lambda suffix: [p for f in FOLDERS for p in (ROOT / f).rglob(f"*.{suffix}")]
    for path in [*ROOT.glob("*.py"), *below("py")]:
        source = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                texts.append((f"{path.name}:{token.start[0]}", token.string))
            elif token.type == tokenize.NAME or '"""' not in token.string:
                names.update(re.findall(r"\w+", token.string))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                texts.append((path.name, ast.get_docstring(node) or ""))
    for path in [
        p for suffix in ("cc", "h", "cu", "cuh", "hpp", "txt", "map") for p in below(suffix)
    ]:
        lines = [line.partition("//") for line in path.read_text().splitlines()]
        names.update(word for code, *_ in lines for word in re.findall(r"\w+", code))
        texts += [(path.name, comment) for *_, comment in lines if comment]
    for path in (*ROOT.glob("*.toml"), *(ROOT / ".ci").glob("*"), *ROOT.glob(".*.yaml")):
        names.update(re.findall(r"[\w-]+", path.read_text()))
    return names, texts


def test_what_is_in_backticks_exists():
    names, texts = read()
    files = [
        str(path.relative_to(ROOT)) for f in (*FOLDERS, ".ci") for path in (ROOT / f).rglob("*")
    ]
    files += [path.name for path in ROOT.iterdir()]
    assert len(names) > 5000 and len(texts) > 2000
    missing = set()
    for place, text in texts:
        known = OTHERS | GONE if place in RECORDS else OTHERS
        for quoted in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text):
            named = [f for f in FILE.findall(quoted) if f not in known]
            missing.update(
                (place, f) for f in named if not any(f"/{path}".endswith(f"/{f}") for path in files)
            )
            last = quoted.removesuffix("()").split(".")[-1]
            if NAME.fullmatch(quoted) and not FILE.fullmatch(quoted) and last not in names | known:
                missing.add((place, quoted))
    assert not missing, sorted(missing)
