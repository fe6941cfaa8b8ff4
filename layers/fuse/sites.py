"""Sites: parts of a program that something else computes, why others stay, and the report."""

import collections
import dataclasses
import functools
import itertools
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Read = Callable[[int], Any]
"""Returns the array that a value is."""


class Left(Exception):
    """Why a site stays as it is."""


def at_ends(
    program: Any,
    chains: Mapping[int, Any],
    site_of: Callable[[int], Any],
    wanted: Container[int] = (),
) -> Iterator[Any]:
    """Yields a site for each value at the end of a chain, where something else reads it.

    Where the last value of a chain is left, those before it are tried. Yields the value and the
    reason where all are left.

    Args:
      program: theirs.
      chains: by value, in the program's order, what is the same for all values of its chain.
      site_of: raises Left, without a reason for a value that is never a site itself.
      wanted: what other sites read; a chain with such a value ends there.
    """
    results, done, chain = set(program.results), set(), chains.get
    before = lambda value: [v for v in program.maker[value].ins if chain(v) == chain(value)]
    for value in [*chains][::-1]:
        readers = program.readers.get(value, ())
        if value not in results and len(readers) == 1 and chain(readers[0].outs[0]) == chain(value):
            continue
        made = program.maker.get(value)
        if made is not None and made.name == "convert_element_type":
            # A cast of what ends a chain itself, to a type that holds it: no site of its own.
            given = made.ins[0]
            is_end = given in results or len(program.readers.get(given, ())) > 1
            dtypes = [program.avals[v].dtype for v in (given, value)]
            if is_end and chain(given) == chain(value) and jnp.promote_types(*dtypes) == dtypes[1]:
                continue
        above = [value]
        while above[-1] not in wanted and (ins := before(above[-1])):
            above.append(ins[0])
        value = above[-1] if above[-1] in wanted else value
        why, last = "", value
        while value not in done:
            done.add(value)
            try:
                yield site_of(value)
                break
            except Left as reason:
                if not why:
                    why, last = str(reason), value
            if not (ins := before(value)):
                yield last, why
                break
            value = ins[0]


def of_equations(program: Any, site_of: Callable[[Any, Any], Any], *names: str) -> Iterator[Any]:
    """Yields the sites that `site_of` finds in a program's equations of these names.

    It returns None for others, and raises Left: that yields the equation's result and the reason.
    """
    for equation in program.equations:
        if equation.name not in names or equation in program.shadowing:
            continue
        try:
            if (site := site_of(program, equation)) is not None:
                yield site
        except Left as reason:
            yield equation.outs[0], str(reason)
        except jax.errors.InconclusiveDimensionOperation:
            yield equation.outs[0], "its sizes are not known"


@dataclasses.dataclass(eq=False)
class Site:
    """A part of a program that something else computes.

    Attributes:
      outs: the values that are replaced.
      reads: the values that they are computed from.
      dead: values that nothing may read any more once `outs` are replaced.
      what: its domain and its sizes, for the report.
      served: what computes it.
      compute: returns the values of `outs`, given what reads a value.
      failed: why it could not be computed, or "".
      shares: the value whose gradient is added up in the products of all sites that share it.
    """

    outs: tuple[int, ...]
    reads: tuple[int, ...]
    what: str
    served: str
    dead: tuple[int, ...] = dataclasses.field(default=(), kw_only=True)
    compute: Callable[[Read], Sequence[Any]] = dataclasses.field(kw_only=True)
    shares: int | None = dataclasses.field(default=None, kw_only=True)
    failed: str = dataclasses.field(default="", init=False)


def called(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    """Calls an operation of ours by a jitted function, which JAX traces once for all layers."""
    named = {k: v for k, v in options.items() if isinstance(v, jax.Array)}
    static = tuple(sorted((k, v) for k, v in options.items() if k not in named))
    jitted = _jitted(function, static, os.environ.get("NORMFUSE_IMPLEMENTATION"))
    return jitted(*arrays, **named)


@functools.lru_cache(maxsize=256)
def _jitted(function: Callable[..., Any], static: Any, implementation: str | None) -> Any:
    del implementation  # tracing depends on it
    return jax.jit(functools.partial(function, **dict(static)))


class SiteFailed(Exception):
    """The error that a site's `compute` raised."""


class Theirs(Exception):
    """The error that the user's own code raised."""


def plain_type(aval: Any) -> Any:
    """Returns a type without its sharding."""
    return aval.shape, aval.dtype, aval.weak_type


def fitted(y: Any, aval: Any) -> Any:
    """Returns what a site has computed, if it has the type of what it stands for.

    Values that sites alone pass on have none.
    """
    if aval is None:
        return y
    y = jnp.asarray(y)
    made = jax.typeof(y)
    if plain_type(made) != plain_type(aval):
        raise Left(f"what replaces it is {made.str_short()}, not {aval.str_short()}")
    if aval.sharding.mesh.explicit_axes and made.sharding.spec != aval.sharding.spec:
        return jax.sharding.reshard(y, aval.sharding)
    return y


def said(parts: Mapping[str, Any]) -> str:
    """Returns the names of what is true, for the report."""
    return ", ".join(name for name, is_so in parts.items() if is_so)


def explained(error: Exception) -> str:
    """Returns the reason that a row gives for an error."""
    error = error.args[0] if isinstance(error, SiteFailed) else error
    first, *_ = str(error).strip().splitlines() or [""]
    is_said = isinstance(error, Left) and first
    return first[:200] if is_said else f"{type(error).__name__}: {first[:160]}"


# ---------------------------------------------------------------- the report


@dataclasses.dataclass(frozen=True)
class Row:
    """The fate of one part of a function's program.

    Attributes:
      where: its named scopes, and the line of the user's code that made it.
      what: its domain ("attention", "loss", "norm", "mlp", "product", "indexing", "lookup", "codes"
        of norms for FP8 products) and sizes.
      served: what computes it; "" where it stays as it was.
      reason: why it stays; else "".
    """

    where: str
    what: str
    served: str = ""
    reason: str = ""

    @property
    def domain(self) -> str:
        """The kind of site: attention, norm, mlp and so on."""
        return self.what.split()[0].rstrip(",")


@dataclasses.dataclass(frozen=True)
class Report:
    """All that `fuse` did with a function; its printed form is a table, equal sites in one row.

    Attributes:
      rows: one for each site.
    """

    rows: tuple[Row, ...]

    @property
    def fused(self) -> tuple[Row, ...]:
        """The sites that something else computes now."""
        return tuple(row for row in self.rows if row.served)

    @property
    def left(self) -> tuple[Row, ...]:
        """The sites that stay as they were."""
        return tuple(row for row in self.rows if not row.served)

    def __str__(self) -> str:
        layers = re.compile(r"\d+(?=/)|(?<=_)\d+(?=/| )")  # numbers in scopes, not of lines
        merged = collections.Counter(
            dataclasses.replace(row, where=layers.sub("*", row.where)) for row in self.rows
        )
        table = [("where", "what", "served by, or why not")]
        for row, count in merged.items():
            where = f"{row.where} ({count})" if count > 1 else row.where
            table.append((where, row.what, row.served or f"not: {row.reason}"))
        found = collections.Counter(row.domain for row in self.fused)
        total = collections.Counter(row.domain for row in self.rows)
        counts = [f"{found[d]} of {n} {d}" for d, n in total.items()]
        return "\n".join([*aligned(table), ", ".join(counts) or "nothing was found"])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose columns begin one below the other.

    They fit the terminal, if there is one: the widest columns are wrapped.
    """
    room = shutil.get_terminal_size((1000, 24)).columns - 2 * len(table[0]) + 2
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    while sum(widths) > room and max(widths) > 12:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in table:
        cells = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        lines += itertools.zip_longest(*cells, fillvalue="")
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
