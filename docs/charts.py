"""Tables, sentences and charts of public models' training steps, from one file of results.

python docs/charts.py                                 writes times.svg and memory.svg, and the
                                                      tables and numbers of the documents; prints
                                                      what is busy for less than .97 of the time
python docs/charts.py --record FILE.jsonl REPORT      first takes in lines that
                                                      benchmarks/foreign_steps.py has printed

`benchmarks/results/models.csv` has a line for each version of each model, and names the report. A
model that is measured again takes the place of what was recorded. tests/docs/test_documents.py
compares the documents with what this makes.
"""

import csv
import functools
import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.csv"
COLUMNS = ["report", "model", "version", "device", "tokens", "ms", "busy_ms", "gaps_ms"]
COLUMNS += ["profiled_ms", "gib", "loss_then", "xla_flags"]
VERSIONS = "theirs", "fuse", "fuse, fp8"
# A row whose name has one of these is no default of its project, or a model's second: it stands
# beside the range.
BESIDE = (
    "own step",
    "nothing recomputed",
    "plain attention",
    "no dropout",
    "one text a row",
    "without the flag",
)
COLOURS = {"fuse": "#3b73b9", "fuse, fp8": "#e08a2e"}
WAITS = 0.97  # of the wall that a GPU should be busy


def recorded() -> dict[str, dict[str, dict[str, str]]]:
    """Rows of the file by model and version."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    with open(RESULTS, newline="") as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["model"], {})[row["version"]] = row
    return found


def record(file: str, report: str) -> None:
    """Takes the lines of JSON in `file` into the results."""
    known = recorded() if RESULTS.exists() else {}
    new: dict[str, dict[str, dict[str, str]]] = {}
    for line in pathlib.Path(file).read_text().splitlines():
        found = json.loads(line)
        if "model" not in found or "cpu" in found["device"]:
            continue
        name = found["model"].removesuffix(")").replace(" (Linen", "").replace(" (nnx", "")
        name = name.replace(" (Equinox", "") + ("" if found["xla_flags"] else ", without the flag")
        busy = found["busy_ms"] or {"busy": "", "gaps": "", "profiled": ""}
        row = {"report": report, "model": name, "version": found["version"]}
        row |= {"device": re.sub(r"NVIDIA | 80GB.*", "", found["device"])}
        row |= {"tokens": found["tokens"], "ms": f"{found['ms']:.2f}", "gib": f"{found['gib']:.1f}"}
        row |= {"busy_ms": busy["busy"], "gaps_ms": busy["gaps"]}
        row |= {"profiled_ms": busy["profiled"]}
        row |= {"loss_then": f"{found['loss_then']:.1e}", "xla_flags": found["xla_flags"]}
        new.setdefault(name, {})[found["version"]] = row
    with open(RESULTS, "w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for versions in (known | new).values():
            writer.writerows(versions.values())


class Row:
    """A model's step: milliseconds, GiB and the part of the wall that the GPU is busy."""

    def __init__(self, name: str, versions: dict[str, dict[str, str]]):
        self.name, self.versions = name, versions
        self.device, self.tokens = (versions["theirs"][name] for name in ("device", "tokens"))

    @property
    def is_default(self) -> bool:
        return not any(word in self.name for word in BESIDE)

    def number(self, version: str, column: str) -> float | None:
        text = self.versions.get(version, {}).get(column, "")
        return float(text) if text else None

    def ratio(self, version: str) -> float | None:
        ms, theirs = self.number(version, "ms"), self.number("theirs", "ms")
        return theirs / ms if ms and theirs else None

    def busy(self, version: str) -> float | None:
        """The part of the profiled steps in which a kernel ran.

        These have their own wall time: a GPU at its power limit slows down in longer runs.
        """
        wall, busy = self.number(version, "profiled_ms"), self.number(version, "busy_ms")
        return busy / wall if wall and busy else None

    def cell(self, version: str) -> str:
        ms = self.number(version, "ms")
        if ms is None:
            return "not measured"
        ratio = "" if version == "theirs" else f", **{self.ratio(version):.2f}×**"
        busy = (
            ""
            if self.busy(version) is None
            else f", busy {self.busy(version):.2f}".replace("0.", ".")
        )
        return f"{ms:.1f} ms{ratio}, {self.number(version, 'gib'):.1f} GiB{busy}"


@functools.cache
def rows() -> list[Row]:
    """The models, those that gain most first."""
    found = [Row(name, versions) for name, versions in recorded().items()]
    return sorted(found, key=lambda row: -(row.ratio("fuse") or 0))


def table(everything: bool = False) -> str:
    """The table of the README, or with every setting beside the projects' defaults."""
    chosen = [row for row in rows() if everything or row.is_default or "own step" in row.name]
    head = ["one training step", "tokens", "GPU", "theirs", "`fuse(loss)`"]
    head.append('`fuse(loss, quantization="fp8")`')
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in chosen:
        lines.append(
            f"| {row.name} | {row.tokens} | {row.device} | {' | '.join(map(row.cell, VERSIONS))} |"
        )
    return "\n".join(lines)


def spread(version: str) -> tuple[float, float, float]:
    """The least, the middle and the largest ratio of the projects' defaults."""
    ratios = [row.ratio(version) for row in rows() if row.is_default]
    known = [ratio for ratio in ratios if ratio]
    return min(known), statistics.median(known), max(known)


def memory() -> tuple[float, float]:
    """The least and largest part of theirs that `fuse` takes of the memory."""
    parts = [
        row.number("fuse", "gib") / row.number("theirs", "gib")
        for row in rows()
        if row.is_default and row.number("fuse", "gib")
    ]
    return min(parts), max(parts)


def short(number: float) -> str:
    return f"{number:.2f}".removeprefix("0")


def gain(name: str) -> str:
    """The ratio of one row in bfloat16."""
    (ratio,) = [row.ratio("fuse") for row in rows() if row.name == name]
    assert ratio is not None
    return short(ratio)


def drift() -> str:
    """The largest difference, in per cent, of a loss in FP8 after ten steps."""
    found = [abs(row.number("fuse, fp8", "loss_then") or 0) for row in rows()]
    return f"{100 * max(found):.1f}"


def sentences() -> dict[str, list[str]]:
    """What documents say of the table, by document."""
    low, middle, high = map(short, spread("fuse"))
    low8, middle8, high8 = map(short, spread("fuse, fp8"))
    least, most = map(short, memory())
    count = sum(row.is_default for row in rows())
    packed = "MaxText's layers, Llama .94B, packed"
    span, span8 = f"{low} to {high} times", f"{low8} to {high8} times"
    first = (
        f"the training steps of {count} public models, as their projects run them, {span} as fast "
        f"in bfloat16 (the median is {middle}), and {span8} in FP8 (the median is {middle8})"
    )
    return {
        "README.md": [first],
        "docs/index.md": [first],
        "benchmarks/results/steps.md": [],
        "docs/guides/expect.md": [
            f"{low} to {high} × in bfloat16, {low8} to {high8} × in FP8, {least} to {most} of the "
            f"memory ([{count} public models]"
        ],
        "docs/performance.md": [
            "| training steps of other people's models with `fuse` | theirs in bfloat16 | "
            f"{low} to {high}×, and {least} to {most} of the memory |",
            f"| the same in FP8 | theirs in bfloat16 | {low8} to {high8}× |",
            f"attention, whose loop `fuse` does not recognise ({gain('Levanter Llama .94B')}×; "
            "asked for its plain attention, it gains "
            f"{gain('Levanter Llama .94B, its plain attention, nothing recomputed')}×), "
            f"and MaxText's in Triton ({gain(packed)}×)",
            f"attention and the loss are small**: {gain('gemma-llm Gemma 2B')}× in Gemma 2B.",
        ],
        "docs/guides/fuse.md": [
            f"T5 v1.1 large is {gain('Hugging Face T5 v1.1 large .78B, its dropout')} times as fast"
        ],
        "docs/guides/fp8_safe.md": [f"for their first ten steps, within {drift()} %"],
        "benchmarks/results/README.md": [f"Training steps of {count} public models"],
    }


def waits() -> list[str]:
    """Versions of ours whose GPU waits: `model, version`."""
    found = [(row, version) for row in rows() for version in VERSIONS[1:]]
    return [f"{row.name}, {version}" for row, version in found if (row.busy(version) or 1) < WAITS]


def draw(column: str, title: str, path: pathlib.Path) -> None:
    """Draws bars of a column for the projects' defaults, each beside theirs."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "normfuse", "svg.fonttype": "none"}  # the same bytes
    import matplotlib.pyplot as plt

    chosen = [row for row in rows() if row.is_default][::-1]
    figure, axes = plt.subplots(figsize=(6.4, 0.36 * len(chosen) + 0.9))
    for place, (version, colour) in enumerate(COLOURS.items()):
        for at, row in enumerate(chosen):
            theirs, its = row.number("theirs", column), row.number(version, column)
            if its is not None:
                axes.barh(at + 0.2 - 0.4 * place, its / theirs, 0.38, color=colour)
                text = f"{its:.0f} of {theirs:.0f}"
                axes.text(its / theirs + 0.01, at + 0.2 - 0.4 * place, text, va="center", size=6)
    axes.axvline(1, color="#808080", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(chosen)), [row.name for row in chosen], fontsize=8)
    axes.set_xlim(0, 1.25)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    axes.legend(
        handles, COLOURS, frameon=False, loc="lower left", bbox_to_anchor=(1, 0), fontsize=8
    )
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def written(name: str, text: str) -> str:
    """A document with the table and the numbers of its sentences as they are recorded."""
    old = re.search(r"^\| one training step \|.*?\n(?=\n)", text, re.MULTILINE | re.DOTALL)
    if old is not None:
        text = text.replace(old[0], table(everything=name != "README.md") + "\n", 1)
    for sentence in sentences()[name]:
        parts = re.split(r"[\d.]*\d", sentence)
        pattern = r"[\d.]*\d".join(map(re.escape, parts))
        assert re.search(pattern, text), f"{name} does not say: {sentence}"
        text = re.sub(pattern, lambda _, sentence=sentence: sentence, text)
    return text


def main(arguments: list[str]) -> None:
    if arguments:
        flag, file, report = arguments
        assert flag == "--record", __doc__
        record(file, report)
    for name in sentences():
        path = ROOT / name
        path.write_text(written(name, path.read_text()))
    images = ROOT / "docs" / "images"
    draw("ms", "Time of a training step, theirs = 1 (ms)", images / "times.svg")
    draw("gib", "Memory of a training step, theirs = 1 (GiB)", images / "memory.svg")
    print(*waits(), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
