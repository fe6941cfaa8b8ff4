"""The report of `fuse`: a row for each site, printed as a table."""

import collections
import dataclasses
import re
from collections.abc import Sequence


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
    """Returns the lines of a table whose columns begin one below the other."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
