"""Reads the signature of a C++ scalar function: enough of C++ to find it, and no more."""

import dataclasses
import re
from collections.abc import Iterator, Mapping

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
    r"<(?:(?:assert|float|inttypes|limits|math|stdbool|stddef|stdint|stdlib|string)\.h"
    r"|c(?:assert|float|inttypes|limits|math|stddef|stdint|stdlib|string)"
    r"|algorithm|array|functional|limits|numeric|tuple|type_traits|utility|vector"
    r"|cuda_\w+\.h|cuda/std/\w+)>"
)
_NUMBERS = {type_: dtype for dtype, type_ in VALUE_TYPES.items() if dtype not in NARROW}
_NUMBERS |= {"unsigned int": "uint32", "long": "int64", "unsigned long": "uint64"}
_NUMBERS |= {f"{dtype}_t": dtype for dtype in VALUE_TYPES if "int" in dtype}


@dataclasses.dataclass(frozen=True)
class Signature:
    """A function or function template."""

    name: str
    template: tuple[str, ...]
    parameters: Mapping[str, str]  # name -> type, without `const` and `&`
    result: str

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.parameters)})"


def find(source: str, name: str | None = None) -> Signature:
    """Returns the signature of the function called `name`, or of the last in `source`.

    Raises TypeError if source is not text; ValueError if it reads other files, has no such
    function, or one with an incomplete signature.
    """
    if not isinstance(source, str):
        raise TypeError(f"elementwise: source must be C++ text, got {type(source).__name__}")
    check_self_contained("elementwise: source", source)
    found = {}
    for declared in _declarations(_IGNORED.sub(" ", source)):
        template, rest = _template(declared)
        if head := _HEAD.fullmatch(rest):
            found[head["name"]] = template, head
    if not found:
        raise ValueError(
            f"elementwise: source defines no function; write `{SHAPE}`, got {source.strip()[:80]!r}"
        )
    name = list(found)[-1] if name is None else name
    if name not in found:
        raise ValueError(
            f"elementwise: source defines no function {name!r}; it defines {', '.join(found)}"
        )
    template, head = found[name]
    types = tuple(map(_type_parameter, template))
    parameters = dict(_parameters(name, head["parameters"]))
    one = Signature(name, types, parameters, _plain(head["result"]))
    where = f"elementwise: {one}"
    if one.result == "void":
        raise ValueError(f"{where} returns nothing; return its one result")
    for what, type_ in (*parameters.items(), ("its result", one.result)):
        if resolve(type_, dict.fromkeys(types, "float32")) is None:
            raise ValueError(
                f"{where}: {what} has type `{type_}`; use a template parameter T, bool, float, "
                "double or an integer"
            )
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


def resolve(type_: str, bound: Mapping[str, str]) -> str | None:
    """Returns the dtype of a C++ type, where template parameters are `bound` to dtypes; or None."""
    return bound.get(type_) or _NUMBERS.get(type_)


def _declarations(text: str) -> Iterator[str]:
    """Yields what stands before each {…} outside of classes and namespaces."""
    depth, declared = 0, ""
    for character in text:
        if depth == 0 and character == "{":
            yield " ".join(declared.split())
        if depth == 0:
            declared = "" if character in "{;" else declared + character
        depth += {"{": 1, "}": -1}.get(character, 0)


def _template(declared: str) -> tuple[list[str], str]:
    """Returns the texts of a template's parameters, and the declaration after them."""
    match = re.match(r"template\s*<", declared)
    if match is None:
        return [], declared
    depth, end = 1, match.end()
    while depth and end < len(declared):
        depth += {"<": 1, ">": -1}.get(declared[end], 0)
        end += 1
    return _split(declared[match.end() : end - 1]), declared[end:].strip()


def _type_parameter(parameter: str) -> str:
    """Returns the name of a template's parameter, which must be a type."""
    declared = re.fullmatch(r"(?:class|typename)\s+(\w+)", parameter)
    if declared is None:
        raise ValueError(
            f"elementwise: template parameter `{parameter}`; use `class T` for each type, and "
            "arguments or run-time scalars for values"
        )
    return declared[1]


def _parameters(function: str, text: str) -> Iterator[tuple[str, str]]:
    for one in _split(text):
        match = _PARAMETER.fullmatch(one)
        if match is None or "*" in one or "=" in one:
            hint = " (defaults are keywords of elementwise)" if "=" in one else ""
            raise ValueError(
                f"elementwise: cannot read parameter `{one}` of {function}; write a type and a name"
                + hint
            )
        if match["reference"] and not re.search(r"\bconst\b", match["type"]):
            raise ValueError(
                f"elementwise: {function} writes to its parameter `{one}`; return its one result"
            )
        yield match["name"], _plain(match["type"])


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
    """A type without specifiers, its spaces in one way."""
    return " ".join(_SPECIFIERS.sub(" ", type_).split())
