"""Reads the signature of a C++ scalar function: enough of C++ to find it, and no more."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...native.compiler import files_read
from ...native.dtypes import NARROW, VALUE_TYPES
from .lexer import last_heads, normal, plain

SHAPE = "template <class T> T name(T x, T y, float scalar) { ... }"
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_ANGLES = rf"(?:[^<>()]|{_PARENTHESES}|<(?:[^<>]|<[^<>]*>)*>)"
_HEAD = re.compile(
    rf"(?P<result>.+?)\b(?P<name>[A-Za-z_]\w*)\s*(?P<parameters>{_PARENTHESES})"
    r"(?:\s*noexcept(?:\s*\([^()]*\))?)?(?:\s*->\s*(?P<trailing>.+))?"
)
# Declarations with braces that are no function, and functions that no name calls.
_OTHER = re.compile(
    r'=|\b(?:struct|class|union|enum|namespace|operator)\b|::\s*~?\w+\s*\(|^(?:"")?$'
)
_PARAMETER = re.compile(r"(?P<type>.+?)(?P<reference>&?)\s*\b(?P<name>[A-Za-z_]\w*)")
# They come with the compiler, whose version is part of a compiled function's key.
_SYSTEM_HEADER = re.compile(
    r"<(?:(?:assert|ctype|errno|float|inttypes|limits|math|stdbool|stddef|stdint|stdio|stdlib|string)\.h"
    r"|c(?:assert|ctype|errno|float|inttypes|limits|math|stddef|stdint|stdio|stdlib|string)"
    r"|algorithm|array|bitset|complex|functional|initializer_list|iterator|limits|map|memory|numeric"
    r"|optional|random|ratio|set|string|tuple|type_traits|utility|valarray|variant|vector"
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
    heads: dict[str, tuple[list[str], re.Match[str] | None]] = {}

    def is_wanted(head: str) -> bool:
        template, rest = _template(head)
        outside = re.sub(_PARENTHESES, "()", rest)
        if re.match(r"template\s*<\s*>", head) or _OTHER.search(outside):
            return False
        heads[head] = template, (match := _HEAD.fullmatch(rest))
        return name is None or match is not None and match["name"] == name

    last = last_heads("elementwise: source", normal(source), is_wanted) - {""}
    names = list(dict.fromkeys(match["name"] for _, match in heads.values() if match))
    if not last:
        hint = f"; write `{SHAPE}`, got {source.strip()[:80]!r}"
        hint = f" {name!r}; it defines {', '.join(names)}" if name and names else hint
        raise ValueError(f"elementwise: source defines no function{hint}")
    if unread := [head for head in last if heads[head][1] is None]:
        raise ValueError(
            f"elementwise: cannot read the last function, `{unread[0]}`; write it without macros, "
            "or pass name="
        )
    every = {str(one): one for one in (_signature(*heads[head]) for head in sorted(last))}
    one, *others = every.values()
    if any(dataclasses.astuple(one) != dataclasses.astuple(other) for other in others):
        raise ValueError(
            "elementwise: which function is the last one depends on conditions of the "
            f"preprocessor: {' or '.join(every)}; pass name=, of one with the same parameters in "
            "all branches"
        )
    where = f"elementwise: {one}"
    if one.result == "void":
        raise ValueError(f"{where} returns nothing; return its one result")
    for what, type_ in (*one.parameters.items(), ("its result", one.result)):
        if resolve(type_, dict.fromkeys(one.template, "float32")) is None:
            raise ValueError(
                f"{where}: {what} has type `{type_}`; use a template parameter T, bool, float, "
                "double or an integer"
            )
    return one


def _signature(template: Sequence[str], head: Any) -> Signature:
    parameters = dict(_parameters(head["name"], head["parameters"][1:-1]))
    result = plain(head["trailing"] or head["result"])
    return Signature(head["name"], tuple(map(_type_parameter, template)), parameters, result)


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


def _template(declared: str) -> tuple[list[str], str]:
    match = re.fullmatch(rf"template\s*<({_ANGLES}*)>\s*(.*)", declared)
    return (_split(match[1]), match[2]) if match else ([], declared)


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
        yield match["name"], plain(match["type"])


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    parts = re.findall(rf"(?:[^,<>()]|<{_ANGLES}*>|{_PARENTHESES})+", text)
    return [part.strip() for part in parts if part.strip()]
