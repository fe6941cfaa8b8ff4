"""Reads C++ text as far as braces go: comments, literals, directives, and what each brace opens."""

# Only the compilers know which branches of a preprocessor's conditions they take. Two ways through
# a text are read: where all that it does not define itself is undefined, and where it is defined.
# A way with a brace too many or too few cannot compile, and says nothing.

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_LONGEST = 1 << 20  # letters of a text whose macros are written out
_LITERALS = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    | (?P<word>\.?\d(?:'?[\w.]|(?<=[eEpP])[+-])*)
    | (?:u8|[uUL])?R"(?P<mark>[^()\\\s"]{0,16})\(.*?\)(?P=mark)"
    | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" | (?:u8|[uUL])?'(?:\\.|[^'\\\n])+'
    | (?P<name>[A-Za-z_]\w*)""",
    re.DOTALL | re.VERBOSE,
)
_CONTINUED = re.compile(r"(?:[^\n]*\\[ \t]*\n)+[^\n]*\n?")
_DIGRAPHS = {"<%": "{", "%>": "}", "%:": "#"}
_DIRECTIVE = re.compile(r"\s*#\s*(\w*)\s*(.*?)\s*", re.DOTALL)
_MACRO = re.compile(r"(\w+)(\([^)]*\))?\s*(.*)", re.DOTALL)
_ARGUMENTS = r"(\s*\(((?:[^()]|\([^()]*\))*)\))?"
_NAME = re.compile(r"[A-Za-z_]\w*")
_ATTRIBUTES = re.compile(r"\[\[.*?\]\]|\b__attribute__\s*\(\(.*?\)\)|\balignas\s*\([^()]*\)")
_SPECIFIERS = re.compile(
    r'\b(?:static|inline|constexpr|const|extern(?: "")?|__(?:device|host|forceinline)__)(?!\w)'
)
_LAMBDA = re.compile(
    r"\]\s*(?:\((?:[^()]|\([^()]*\))*\))?[\s\w:&>*-]*"
    r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
)


def normal(text: str) -> str:
    """Returns C++ text without a byte order mark, and with plain ends of lines."""
    return re.sub(r"\r\n?", "\n", text.removeprefix("\ufeff"))


def _masked(text: str) -> str:
    """Returns C++ text without comments and what literals hold. Lines keep their numbers: those
    that are continued are one, whose empty ones follow, or end in form feeds."""

    def joined(match: re.Match[str]) -> str:
        one, count = re.subn(r"\\[ \t]*\n", "", match[0])
        return one.rstrip("\n") + "\n" * (count + match[0].endswith("\n"))

    def plain(match: re.Match[str]) -> str:
        if match["word"] or match["name"]:
            return match[0].replace("'", "")
        return (" " if match["comment"] else '""') + "\f" * match[0].count("\n")

    code = _LITERALS.sub(plain, _CONTINUED.sub(joined, text.replace("\f", " ")))
    return re.sub("<%|%>|%:", lambda match: _DIGRAPHS[match[0]], code)


def plain(text: str) -> str:
    """Returns a type without specifiers, its spaces in one way."""
    return " ".join(_SPECIFIERS.sub(" ", text).split())


def returns(text: str) -> bool:
    """True for C++ text with a return statement outside of lambdas, comments and literals."""
    code, before = _masked(text), ""
    while code != before:
        before, code = code, _LAMBDA.sub("()", code)
    return re.search(r"\breturn\b", code) is not None


def last_heads(
    where: str, text: str, wanted: Callable[[str], bool] = lambda head: False
) -> set[str]:
    """Returns the last {…} outside of classes and namespaces, by what stands before it.

    One for each way through `normal` text that balances, of those that are `wanted`, or "".

    Raises ValueError where no way balances, and for literals without an end, with the line.
    """
    lines, ends, wrong = _masked(text).split("\n"), set(), ""
    for met in (False, True):
        try:
            ends.add(_last("".join(_chosen(lines, met)), wanted))
        except ValueError as error:
            wrong = wrong or f"{where}: {error}"
    if not ends:
        raise ValueError(wrong)
    return ends


def _last(code: str, wanted: Callable[[str], bool]) -> str:
    depth, opened, declared, last, number = 0, 0, "", "", 1
    for piece in re.split(r"([{};\n\f])", code):
        if end := re.search(r"['\"]|/\*", piece.replace('""', "")):
            raise ValueError(f"line {number} has a {end[0]} without its end")
        if piece == "{" and not depth:
            opened, head = number, " ".join(_ATTRIBUTES.sub(" ", declared).split())
            last = head if wanted(head) else last
        number += piece in ("\n", "\f")
        depth += {"{": 1, "}": -1}.get(piece, 0)
        if depth < 0:
            raise ValueError(f"line {number} has a }} without its {{")
        declared = "" if depth or piece in ("{", "}", ";") else declared + piece
    if depth:
        raise ValueError(f"line {opened} has a {{ without its }}")
    return last


def _chosen(lines: Sequence[str], met: bool) -> Iterator[str]:
    """Yields the lines of the branches that are taken, without macros; empty ones for others."""
    macros: dict[str, Any] = {}  # parameters and text; None where it is undefined
    conditions: list[tuple[bool, bool]] = []  # a branch is taken; one before it was
    chunk = ""
    for line, following in zip(lines, [*lines[1:], ""]):
        live = all(taken for taken, _ in conditions)
        if (directive := _DIRECTIVE.fullmatch(line)) is None:
            chunk += (line if live else "\f" * line.count("\f")) + "\n"
            continue
        yield _expanded(chunk, macros)
        kind, text = directive.groups()
        chunk = "\f" * line.count("\f") + "\n"
        if kind in ("if", "ifdef", "ifndef"):
            conditions.append((_is_met(kind, text, following, macros, met), False))
        elif kind in ("elif", "elifdef", "elifndef", "else", "endif"):
            if not conditions:
                raise ValueError(f"an #{kind} has no #if")
            taken = any(conditions.pop())
            if kind != "endif":
                is_met = kind == "else" or _is_met(kind[2:], text, following, macros, met)
                conditions.append((is_met and not taken, taken))
        elif live and kind in ("define", "undef") and (macro := _MACRO.match(text)):
            macros[macro[1]] = macro.groups()[1:] if kind == "define" else None
    if conditions:
        raise ValueError("an #if has no #endif")
    yield _expanded(chunk, macros)


def _is_met(kind: str, text: str, following: str, macros: Any, met: bool) -> bool:
    """True for a branch that is taken, where all names the text lacks are defined if `met`."""
    if match := re.fullmatch(r"(!?)\s*defined\s*\(?\s*(\w+)\s*\)?", text):
        kind, text = "ifndef" if match[1] else "ifdef", match[2]
    if kind == "if":
        text = _expanded(text, macros).strip()
        return bool(int(text)) if text.isdecimal() else met
    is_guard = re.match(rf"\s*#\s*define\s+{re.escape(text)}\b", following)
    known = macros.get(text) is not None if text in macros else met and not is_guard
    return known == (kind == "ifdef")


def _expanded(code: str, macros: Any) -> str:
    """Returns code with the text of macros in their place."""

    def replaced(use: re.Match[str]) -> str:
        parameters, body = macros.get(use[1]) or (None, None)
        if body is None or parameters and use[2] is None:
            return use[0]
        names = [name.strip() for name in (parameters or "()")[1:-1].split(",")]
        arguments = dict(zip(names, (use[3] or "").split(",")))
        body = re.sub(r"\s*##\s*", "", _NAME.sub(lambda m: arguments.get(m[0], m[0]).strip(), body))
        return body + ("\n" * use[0].count("\n") if parameters else use[2] or "")

    use = re.compile(rf"\b({'|'.join(macros)})\b{_ARGUMENTS}")
    for _ in range(16 * bool(macros)):  # macros of macros
        before, code = code, use.sub(replaced, code)
        if code == before or len(code) > _LONGEST:
            break
    return code
