"""Reads what a compiled program does from its text: our kernels, and every collective's bytes."""

import collections
import dataclasses
import math
import re

_CALL = re.compile(r'custom_call_target="normfuse_([a-z_]+)"')
_LAUNCHED = re.compile(r'kernel = "([a-z_]+)"')
_COLLECTIVE = re.compile(
    r"= (?P<type>\(.*?\)|\S+) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|"
    r"ragged-all-to-all|collective-permute|collective-broadcast)(?P<start>-start)?\("
)
_INTERPRETED = re.compile(r'op_name="[^"]*/pallas_(rms|layer)_norm')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+[a-z]*)?)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation, and the bytes of its result on each device."""

    kind: str
    bytes: int


def text(compiled) -> str:
    """The optimised HLO of a compiled function, or the text itself."""
    return compiled if isinstance(compiled, str) else compiled.as_text()


def calls(compiled, prefix: str = "(rms_|layer_)?norm_") -> dict[str, int]:
    """How often each of our kernels is called; names without `prefix`, a pattern.

    On a GPU every kernel is a launch that names it, and the sum over the blocks of a backward
    kernel, a launch of its own, counts as part of it.
    """
    found = collections.Counter(name for name, _ in _kernels(compiled))
    return {re.sub(f"^{prefix}", "", name): count for name, count in sorted(found.items())}


def served(compiled) -> str:
    """The implementation that a compiled program runs."""
    if calls(compiled):
        return "native"
    return "pallas" if _INTERPRETED.search(text(compiled)) else "plain HLO"


def runs(compiled, prefix: str) -> dict[tuple[str, str], int]:
    """How often a run of the program calls each of our kernels, by name and first result.

    Loops count as often as they go round; the name is without `prefix`.
    """
    bodies = _computations(compiled)

    def count(name: str) -> collections.Counter:
        found = collections.Counter()
        for line in bodies[name]:
            for kernel, type_ in _kernels(line):
                if kernel.startswith(prefix):
                    found[
                        kernel.removeprefix(prefix), "{}[{}]".format(*_ARRAY.search(type_).groups())
                    ] += 1
            times = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for called in re.findall(r"(?:body|to_apply|calls)=(%[\w.-]+)", line):
                for key, n in count(called).items():
                    found[key] += n * (int(times[1]) if times else 1)
            assert times or " while(" not in line, "a loop of unknown length"
        return found

    return dict(count("ENTRY"))


def _computations(compiled) -> dict[str, list[str]]:
    """The lines of each computation by its name; those of the main program are ENTRY's."""
    bodies, name, lines = {}, "", []
    for line in text(compiled).splitlines():
        if begun := re.match(r"(?:ENTRY )?(%\S+) .*\{$", line):
            name = begun[1]
            bodies["ENTRY" if line.startswith("ENTRY") else name] = lines = []
        elif name:
            lines.append(line)
    return bodies


def results(compiled) -> list[int]:
    """How many results each call of our kernels has, in order of the kernel's name."""
    return [len(_ARRAY.findall(type_)) for _, type_ in sorted(_kernels(compiled))]


def _kernels(compiled):
    """(name, result type) of each call of our kernels."""
    for line in text(compiled).splitlines():
        if call := _CALL.search(line):
            launched = _LAUNCHED.search(line)
            name = launched[1] if launched else call[1]
            if name != "column_sum":
                yield name, re.search(r"= (\(.*?\)|\S+) custom-call\(", line)[1]


def collectives(compiled) -> list[Collective]:
    """Every collective in the program, in order of kind and size."""
    found = []
    for match in _COLLECTIVE.finditer(text(compiled)):
        arrays = [_bytes(*array) for array in _results(match)]
        found.append(Collective(match["kind"], sum(arrays)))
    return sorted(found, key=lambda c: (c.kind, c.bytes))


def communicated(compiled) -> dict[tuple[str, str], int]:
    """How many elements all collectives of a kind and dtype have as results on each device.

    XLA combines small collectives, and flattens what it combines: this stays as it is.
    """
    found = collections.Counter()
    for match in _COLLECTIVE.finditer(text(compiled)):
        for dtype, shape in _results(match):
            found[match["kind"], dtype] += math.prod(map(int, filter(None, shape.split(","))))
    return dict(found)


def overlapped(compiled) -> list[tuple[str, int]]:
    """(kind, GEMMs scheduled between its start and its end) of each asynchronous collective.

    In order of their ends; for GPUs, whose programs are scheduled and whose GEMMs are cuBLAS's.
    """
    started, found, gemms = {}, [], 0
    for line in text(compiled).splitlines():
        gemms += "__cublas$" in line and " custom-call(" in line
        if begun := re.match(r"\s*%(\S+) = .*? (\S+)-start\(", line):
            started[begun[1]] = begun[2], gemms
        elif (ended := re.search(r"-done\(%?([\w.-]+)\)", line)) and ended[1] in started:
            kind, before = started.pop(ended[1])
            found.append((kind, gemms - before))
    return found


def _results(match):
    """(dtype, shape) of each result of a collective."""
    arrays = _ARRAY.findall(match["type"])
    # A start has (operands, results); an older all-reduce's only results.
    paired = match["kind"] != "all-reduce" or match["type"].startswith("((")
    return arrays[len(arrays) // 2 :] if match["start"] and paired else arrays


def count(compiled, operation: str) -> int:
    """How often a plain HLO operation occurs, in fusions too."""
    return len(re.findall(rf"= (?:\(.*?\)|\S+) {re.escape(operation)}\(", text(compiled)))


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A call of cuBLAS: its result, and the beta of its addition."""

    result: str  # such as "bf16[16,8]"
    beta: int
    in_place: bool  # the result takes the place of what is added


def gemms(compiled) -> list[Gemm]:
    """Every product that a GPU program leaves to cuBLAS, in loops and fusions too."""
    found = []
    for line in text(compiled).splitlines():
        if 'custom_call_target="__cublas$' in line:
            result = re.search(r"= \(?(\w+\[[\d,]*\])", line)[1]
            beta = int(float(re.search(r'"beta":([\d.]+)', line)[1]))
            found.append(Gemm(result, beta, "output_to_operand_aliasing" in line))
    return found


def additions(compiled) -> list[str]:
    """The result, as "bf16[16,8]", of every kernel of the main program that only adds arrays."""
    bodies, found = _computations(compiled), []
    for line in bodies["ENTRY"]:
        match = re.match(r"\s+(?:ROOT )?%\S+ = (\w+\[[\d,]*\])\S* (add|fusion)\(", line)
        if not match:
            continue
        result, operation = match.groups()
        called = re.search(r"calls=(%[\w.-]+)", line)
        body = "\n".join(bodies[called[1]]) if called else ""
        operations = set(re.findall(r" = \S+ ([a-z-]+)\(", body))
        if operation == "add" or operations - {"parameter", "convert", "bitcast"} == {"add"}:
            found.append(result)
    return found


def passes(compiled) -> list[tuple[str, int]]:
    """(name, bytes of operands and results) of every kernel of the main program that is no GEMM.

    The name is that of our kernel, or of XLA's operation. An operand of which a part is read counts
    whole.
    """
    program = text(compiled)
    program = program[program.index("\nENTRY") :]
    sizes, found = {}, []
    for line in program.splitlines():
        match = re.match(r"\s+(?:ROOT )?(%\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)", line)
        if not match:
            continue
        name, type_, operation, operands = match.groups()
        size = sum(_bytes(*array) for array in _ARRAY.findall(type_))
        sizes[name] = size
        free = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")
        if operation in free or "__cublas$" in line or '"AllocateBuffer"' in line:
            continue
        kernel = _LAUNCHED.search(line)
        moved = size + sum(sizes[o] for o in re.findall(r"%[\w.-]+", operands))
        found.append((kernel[1] if kernel else operation, moved))
    return found


def _bytes(dtype, shape):
    bits = 8 if dtype == "pred" else int(re.search(r"\d+", dtype)[0])
    return math.prod(map(int, filter(None, shape.split(",")))) * bits // 8
