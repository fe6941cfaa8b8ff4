"""Reads the signature of a C++ scalar function: enough of C++ to find it, and no more."""

import dataclasses
import re
from collections.abc import Iterator

from ...native.compiler import files_read
from ...native.dtypes import NARROW, VALUE_TYPES

SHAPE = "template <class T> T name(T x, T y, float scalar) { ... }"
_IGNORED = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE
)
_HEAD = re.compile(
    r"(?P<result>.+?)\b(?P<name>[A-Za-z_]\w*)\s*\((?P<parameters>.*)\)\s*(noexcept)?"
)
_PARAMETER = re.compile(r"(?P<type>.+?)(?P<reference>&?)\s*\b(?P<name>[A-Za-z_]\w*)")
_SPECIFIERS = re.compile(r"\b(static|inline|constexpr|const|__device__|__host__|__forceinline__)\b")
# They come with the compiler, whose version is part of a compiled function's key.
_SYSTEM_HEADER = re.compile(
    r"<(?:(?:assert|complex|float|inttypes|limits|math|stdbool|stddef|stdint|stdlib|string)\.h"
    r"|c(?:assert|float|inttypes|limits|math|stddef|stdint|stdlib|string)"
    r"|algorithm|array|complex|functional|limits|numeric|tuple|type_traits|utility|vector"
    r"|cuda_\w+\.h|cuda/std/\w+)>"
)
_NUMBERS = {
    type_.removeprefix("normfuse_user::"): dtype
    for dtype, type_ in VALUE_TYPES.items()
    if dtype not in NARROW
}
_NUMBERS |= {"unsigned int": "uint32", "long": "int64", "unsigned long": "uint64"}
_NUMBERS |= {f"{dtype}_t": dtype for dtype in VALUE_TYPES if "int" in dtype}
_REAL = {"complex64": "float32", "complex128": "float64"}
_COMPLEX = {"float64": "complex128"} | dict.fromkeys((*NARROW, "float32"), "complex64")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter: its type without `const` and `&`, its name, and whether it is written to."""

    type: str
    name: str
    output: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function or function template; `result` is "" for void.

    `head` is where its declaration begins in the source, after `template <…>`; `declared` is the
    text of its parameters.
    """

    name: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    result: str
    head: int = 0
    declared: str = ""

    def __str__(self) -> str:
        return f"{self.name}({', '.join(p.name for p in self.parameters)})"

    @property
    def operands(self) -> list[Parameter]:
        """The parameters that are read."""
        return [p for p in self.parameters if not p.output]

    @property
    def outputs(self) -> list[Parameter]:
        """The parameters that are written to."""
        return [p for p in self.parameters if p.output]

    @property
    def results(self) -> list[str]:
        """The types of what it returns or writes."""
        return [p.type for p in self.outputs] or [self.result]


def find(source: str, name: str | None = None) -> Signature:
    """Returns the signature of the function called `name`, or of the last in `source`.

    Raises TypeError if source is not text; ValueError if it reads other files, has no such
    function, or one with an incomplete signature.
    """
    if not isinstance(source, str):
        raise TypeError(f"elementwise: source must be C++ text, got {type(source).__name__}")
    check_self_contained("elementwise: source", source)
    found = {f.name: f for f in functions(source)}
    if not found:
        raise ValueError(
            f"elementwise: source defines no function; write `{SHAPE}`, got {source.strip()[:80]!r}"
        )
    name = list(found)[-1] if name is None else name
    if name not in found:
        raise ValueError(
            f"elementwise: source defines no function {name!r}; it defines {', '.join(found)}"
        )
    one = found[name]
    template = tuple(map(_type_parameter, one.template))
    parameters = tuple(_parameters(name, one.declared))
    one = dataclasses.replace(one, template=template, parameters=parameters)
    _check(one)
    return one


def check_self_contained(where: str, text: str) -> None:
    """Raises ValueError if a C++ text reads files: a change in them would not be noticed.

    The text is the key of the compiled function. It must not have half of a surrogate pair, which
    no file can hold.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = ascii(text[error.start])
        raise ValueError(f"{where} has {wrong} at {error.start}, which is no character") from None
    for file in files_read(text):
        if not _SYSTEM_HEADER.fullmatch(file):
            raise ValueError(
                f"{where} reads {file}, and a change there would not be noticed; put that file's "
                "text into the source"
            )


def functions(source: str) -> Iterator[Signature]:
    """Yields every function that `source` defines outside of classes and namespaces, in order.

    Their parameters are not read, nor their templates': a helper may take what it likes.
    """
    text = _IGNORED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), source)
    for head, opened in _blocks(text):
        template, at = _template(text, head)
        if declared := _HEAD.fullmatch(" ".join(text[at:opened].split())):
            result = _plain(declared["result"]).removesuffix("void")
            yield Signature(declared["name"], template, (), result, at, declared["parameters"])


def resolve(type_: str, bound: dict[str, str]) -> str | None:
    """Returns the dtype of a C++ type, where template parameters are `bound` to dtypes; or None."""
    wrapped = re.fullmatch(r"(real_t|complex)<(\w+)>", type_)
    if wrapped is None or wrapped[2] not in bound:
        return bound.get(type_) or _NUMBERS.get(type_)
    inner = bound[wrapped[2]]
    return _REAL.get(inner, inner) if wrapped[1] == "real_t" else _COMPLEX.get(inner)


def _check(function: Signature) -> None:
    where, outputs = f"elementwise: {function}", function.outputs
    if function.result and outputs:
        raise ValueError(
            f"{where} returns {function.result} and writes to {outputs[0].name}; return one "
            "result, or return void and write to several references"
        )
    if not function.result and not outputs:
        raise ValueError(f"{where} returns nothing and has no parameter `T& y` to write to")
    types = [*((p.name, p.type) for p in function.parameters), ("its result", function.result)]
    for name, type_ in types:
        if type_ and resolve(type_, dict.fromkeys(function.template, "float32")) is None:
            raise ValueError(
                f"{where}: {name} has type `{type_}`; use a template parameter T, real_t<T>, "
                "complex<T>, bool, float, double, complex<float>, complex<double> or an integer"
            )


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """Yields begin and end of the declaration before each {…} at the top level."""
    depth = head = opened = 0
    for i, character in enumerate(text):
        if character == "{":
            opened = opened if depth else i
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                yield head, opened
        if character in "};" and depth == 0:
            head = i + 1


def _template(text: str, at: int) -> tuple[tuple[str, ...], int]:
    """Returns the texts of a template's parameters, and the place after them."""
    match = re.compile(r"\s*template\s*<").match(text, at)
    if match is None:
        return (), at
    depth, end = 1, match.end()
    while depth and end < len(text):
        depth += {"<": 1, ">": -1}.get(text[end], 0)
        end += 1
    return tuple(_split(text[match.end() : end - 1])), end


def _type_parameter(parameter: str) -> str:
    """Returns the name of a template's parameter, which must be a type."""
    declared = re.fullmatch(r"(?:class|typename)\s+(\w+)", parameter)
    if declared is None:
        raise ValueError(
            f"elementwise: template parameter `{parameter}`; use `class T` for each type, and "
            "arguments or run-time scalars for values"
        )
    return declared[1]


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
        output = bool(match["reference"]) and not constant
        yield Parameter(_plain(match["type"]), match["name"], output)


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
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
    if len(words) > 1 and words[-1] == "int":
        words.pop()  # `long int`, `unsigned int`
    if "signed" in words and words != ["signed", "char"]:
        words.remove("signed")
    return " ".join(words)
