"""Reads the signature of a C++ scalar function: enough of C++ to find it, and no more."""

import dataclasses
import re
from collections.abc import Iterator

SHAPE = "template <class T> T name(T x, T y, float scalar) { ... }"
_IGNORED = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE
)
_HEAD = re.compile(
    r"(?P<result>.+?)\b(?P<name>[A-Za-z_]\w*)\s*\((?P<parameters>.*)\)\s*(noexcept)?"
)
_PARAMETER = re.compile(r"(?P<type>.+?)(?P<reference>&?)\s*\b(?P<name>[A-Za-z_]\w*)")
_SPECIFIERS = re.compile(r"\b(static|inline|constexpr|const|__device__|__host__|__forceinline__)\b")
_NUMBERS = {
    "bool": "bool",
    "signed char": "int8",
    "int8_t": "int8",
    "unsigned char": "uint8",
    "uint8_t": "uint8",
    "short": "int16",
    "int16_t": "int16",
    "unsigned short": "uint16",
    "uint16_t": "uint16",
    "int": "int32",
    "int32_t": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "uint32_t": "uint32",
    "long": "int64",
    "long long": "int64",
    "int64_t": "int64",
    "unsigned long": "uint64",
    "unsigned long long": "uint64",
    "uint64_t": "uint64",
    "float": "float32",
    "double": "float64",
    "complex<float>": "complex64",
    "complex<double>": "complex128",
}
_REAL = {"complex64": "float32", "complex128": "float64"}
_COMPLEX = {"float64": "complex128", "float16": "complex64", "bfloat16": "complex64"}
_COMPLEX |= {"float32": "complex64"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter: its type without `const` and `&`, its name, and whether it is written to."""

    type: str
    name: str
    output: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function or function template; `result` is "" for void.

    `start` and `stop` bound its text; `head` is where its declaration begins, after `template <…>`;
    `declared` is the text of its parameters.
    """

    name: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    result: str
    start: int
    head: int
    stop: int
    declared: str = ""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(p.name for p in self.parameters)})"


def find(source: str, name: str | None = None) -> Signature:
    """The signature of the function called `name`, or of the last in `source`.

    Raises:
      TypeError: if source is no text.
      ValueError: if there is no such function, or one whose signature does not say what is needed.
    """
    if not isinstance(source, str):
        raise TypeError(f"elementwise: source must be C++ text, got {type(source).__name__}")
    found = {f.name: f for f in functions(source)}
    if not found:
        raise ValueError(
            f"elementwise: source defines no function; write `{SHAPE}`, got {source.strip()[:80]!r}"
        )
    if name is None:
        name = list(found)[-1]
    if name not in found:
        raise ValueError(
            f"elementwise: source defines no function {name!r}; it defines {', '.join(found)}"
        )
    one = found[name]
    one = dataclasses.replace(one, parameters=tuple(_parameters(name, one.declared)))
    _check(one)
    return one


def functions(source: str) -> Iterator[Signature]:
    """Every function that `source` defines outside of classes and namespaces, in order.

    Their parameters are not read: a helper may take what it likes.
    """
    text = _IGNORED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
    for (opened, closed), head in _blocks(text):
        template, at = _template(text, head)
        declared = _HEAD.fullmatch(" ".join(text[at:opened].split()))
        if declared:
            yield Signature(
                declared["name"],
                template,
                (),
                _plain(declared["result"]).removesuffix("void"),
                head,
                at,
                closed,
                declared["parameters"],
            )


def resolve(type_: str, bound: dict[str, str]) -> str | None:
    """The dtype that a C++ type is, where template parameters are `bound` to dtypes; or None."""
    if type_ in bound:
        return bound[type_]
    if type_ in _NUMBERS:
        return _NUMBERS[type_]
    wrapped = re.fullmatch(r"(real_t|complex)<(\w+)>", type_)
    if wrapped is None or wrapped[2] not in bound:
        return None
    inner = bound[wrapped[2]]
    return _REAL.get(inner, inner) if wrapped[1] == "real_t" else _COMPLEX.get(inner)


def known(type_: str, template: tuple[str, ...]) -> bool:
    """Whether `resolve` will know the type, for some dtypes of the template's parameters."""
    return resolve(type_, dict.fromkeys(template, "float32")) is not None


def _check(function: Signature) -> None:
    where = f"elementwise: {function}"
    outputs = [p for p in function.parameters if p.output]
    if function.result and outputs:
        raise ValueError(
            f"{where} returns {function.result} and writes to {outputs[0].name}; return one "
            "result, or return void and write to several references"
        )
    if not function.result and not outputs:
        raise ValueError(f"{where} returns nothing and has no parameter `T& y` to write to")
    types = [*((p.name, p.type) for p in function.parameters), ("its result", function.result)]
    for name, type_ in types:
        if type_ and not known(type_, function.template):
            raise ValueError(
                f"{where}: {name} has type `{type_}`; use a template parameter T, real_t<T>, "
                "complex<T>, bool, float, double, complex<float>, complex<double> or an integer"
            )


def _blocks(text: str) -> Iterator[tuple[tuple[int, int], int]]:
    """For each {…} at the top level: (where it is, where the declaration before it begins)."""
    depth = head = opened = 0
    for i, character in enumerate(text):
        if character == "{":
            if depth == 0:
                opened = i
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield (opened, i + 1), head
                head = i + 1
        elif character == ";" and depth == 0:
            head = i + 1


def _template(text: str, at: int) -> tuple[tuple[str, ...], int]:
    """The names of a template's parameters, and where what follows them begins."""
    match = re.compile(r"\s*template\s*<").match(text, at)
    if match is None:
        return (), at
    depth, end = 1, match.end()
    while depth and end < len(text):
        depth += {"<": 1, ">": -1}.get(text[end], 0)
        end += 1
    names = []
    for parameter in _split(text[match.end() : end - 1]):
        declared = re.fullmatch(r"(?:class|typename)\s+(\w+)", parameter)
        if declared is None:
            raise ValueError(
                f"elementwise: template parameter `{parameter}`; use `class T` for each type, and "
                "arguments or run-time scalars for values"
            )
        names.append(declared[1])
    return tuple(names), end


def _parameters(function: str, text: str) -> Iterator[Parameter]:
    for one in _split(text):
        match = _PARAMETER.fullmatch(one)
        if match is None or "*" in one or "=" in one:
            hint = " (defaults are keywords of elementwise)" if "=" in one else ""
            raise ValueError(
                f"elementwise: cannot read parameter `{one}` of {function}; write a type and a name"
                + hint
            )
        constant = re.search(r"\bconst\b", match["type"])
        yield Parameter(
            _plain(match["type"]), match["name"], bool(match["reference"]) and not constant
        )


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _plain(type_: str) -> str:
    """A type without specifiers and namespaces, its spaces in one way."""
    bare = _SPECIFIERS.sub(" ", type_).replace("std::", "").replace("cuda::", "")
    bare = re.sub(r"\s*([<>,])\s*", r"\1", bare)
    words = bare.split()
    if len(words) > 1 and "int" in words and words[-1] == "int":
        words.pop()  # `long int`, `unsigned int`
    if "signed" in words and words != ["signed", "char"]:
        words.remove("signed")
    return " ".join(words)
