"""Writes the loop around a user's scalar function, for NVRTC and for the system's C++ compiler."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...native.compiler import Source, kernel_source, kernel_text
from ...native.dtypes import CUDA_TYPES, HOST_TYPES, VALUE_TYPES
from ...native.launch import signature
from .signature import resolve

DTYPES = tuple(VALUE_TYPES)
THREADS = 256
_BUILT_IN = re.compile(r"<(?:c(?:math|stdio|stdlib|string)|(?:math|stdio|stdlib|string)\.h)>")
Pairs = tuple[tuple[str, str], ...]
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(<[\w./]+>)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Function:
    """A scalar function as text, of one type for each operand and result."""

    name: str  # for messages and profiles
    pieces: Pairs  # C++ text, in order, each under the file name for the compiler's messages
    operands: Pairs  # (C++ type, variable) of each
    results: Pairs
    template: tuple[str, ...]  # the type parameters
    body: str  # a statement that sets the results' variables from the operands'
    definition: Callable[..., Sequence[Any]] | None  # `(*operands) -> results`, in plain JAX
    key: str  # the same in every process for the same text

    def __repr__(self) -> str:
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The constants that a loop is compiled for; from `vector` on for CUDA alone."""

    bound: Pairs  # the dtype of each template parameter
    stored: tuple[str, ...]  # dtypes in memory of the operands, then of the results
    masks: tuple[int, ...]  # each operand's collapsed dimensions, bit 0 for the last
    dimensions: int  # number of collapsed dimensions
    vector: int = 1  # neighbouring elements that a thread moves at once
    wide: bool = True  # indices need 64 bits

    @property
    def every(self) -> int:
        """The mask of an operand as large as the result."""
        return (1 << self.dimensions) - 1

    @property
    def tile(self) -> int:
        """Elements of a block (CUDA)."""
        return THREADS * self.vector

    def __str__(self) -> str:
        """The CPU handler's attribute: "float32 bfloat16 -> float32; 3 1; 2"."""
        operands = len(self.masks)
        dtypes = signature(self.stored[:operands], self.stored[operands:])
        return f"{dtypes}; {' '.join(map(str, self.masks))}; {self.dimensions}"

    def value(self, type_: str) -> str:
        """Returns the C++ type that a value of the function's type `type_` is computed in."""
        return VALUE_TYPES[resolve(type_, dict(self.bound)) or ""]


def collapse(
    shape: Sequence[int], dims: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (sizes, masks) of fewer dimensions: joins neighbours that the same operands have.

    `dims` has for each operand the dimensions of `shape` that it has; it is constant along others.
    """
    sizes: list[int] = []
    masks = [0] * len(dims)
    last = None
    for d, n in enumerate(shape):
        having = [d in operand for operand in dims]
        if n == 1:
            continue
        if having == last:
            sizes[-1] *= n
        else:
            sizes.append(n)
            masks = [mask << 1 | has for mask, has in zip(masks, having)]
            last = having
    if not sizes:
        return (1,), tuple(int(len(operand) == len(shape)) for operand in dims)
    return tuple(sizes), tuple(masks)


def cuda_source(function: Function, layout: Layout) -> Source:
    """The kernel `elementwise_<name>(operands, results, sizes)`."""
    stored, values, masks = _arrays(function, layout, CUDA_TYPES)
    inputs, outputs = range(len(layout.masks)), range(len(layout.masks), len(stored))
    moved = [k for k in inputs if masks[k]]
    vector, dimensions = layout.vector, range(layout.dimensions)
    index = "long long" if layout.wide else "unsigned"
    arrays = [f"{'const ' * (k in inputs)}{t}* __restrict__ a{k}" for k, t in enumerate(stored)]
    parameters = ", ".join([*arrays, "long long count", *(f"long long n{d}" for d in dimensions)])
    sizes = ", ".join(f"({index})n{d}" for d in dimensions)
    large = ", ".join(f"a{k}" for k, mask in enumerate(masks) if mask & 1)

    def place(k: int) -> str:
        return "at" if masks[k] == layout.every else f"place<{masks[k]}u>(at, sizes)"

    def load(k: int) -> str:
        how = "load" if masks[k] & 1 else "repeat"
        return f"const auto p{k} = {how}<{vector}>(a{k} + {place(k)});"

    packed = [f"widen<{values[k]}>(p{k}.at(k))" if masks[k] else f"s{k}" for k in inputs]
    single = [f"widen<{values[k]}>(a{k}[{place(k)}])" if masks[k] else f"s{k}" for k in inputs]
    name = f"elementwise_{function.name}"
    text = f"""#include "elementwise.cuh"
{_prelude(function, layout, "__device__ inline")}
using namespace normfuse_loop;
using Index = {index};
extern "C" __global__ void __launch_bounds__({THREADS})
{name}({parameters}) {{
  const Sizes<Index, {layout.dimensions}> sizes = {{{{{sizes}}}}};
  constexpr int kTile = {layout.tile};
  const long long begin = static_cast<long long>(blockIdx.x) * kTile;
  {_scalars(values, layout)}
  if (begin + kTile <= count && aligned_16({large})) {{
    const Index at = static_cast<Index>(begin) + threadIdx.x * {vector};
    {_each(moved, load)}
    {_each(outputs, lambda k: f"Pack<{stored[k]}, {vector}> o{k};")}
#pragma unroll
    for (int k = 0; k < {vector}; ++k) {{
      {_apply(stored, values, packed, "o{k}.set(k, {y});")}
    }}
    {_each(outputs, lambda k: f"store(a{k} + at, o{k});")}
    return;
  }}
  for (int i = threadIdx.x; i < kTile && begin + i < count; i += {THREADS}) {{
    const Index at = static_cast<Index>(begin) + i;
    {_apply(stored, values, single, "a{k}[at] = {y};")}
  }}
}}
"""
    headers = tuple((h, kernel_source(h).text) for h in ("elementwise.cuh", "machine.cuh"))
    # NVRTC has their functions, and no such files.
    headers += tuple((h[1:-1], "") for h in _included(function) if _BUILT_IN.fullmatch(h))
    options = ("--device-as-default-execution-space", "--disable-warnings")
    return Source(name, text, headers, options)


def host_source(function: Function, layout: Layout) -> str:
    """`normfuse_elementwise(arrays, sizes, begin, end)`, for the system's compiler.

    The handler compares `normfuse_layout` with the arrays of a call.
    """
    stored, values, masks = _arrays(function, layout, HOST_TYPES)
    inputs = range(len(layout.masks))
    partial = [k for k in inputs if masks[k] not in (0, layout.every)]
    length = "end - at"
    if partial:  # a row of the innermost dimension at a time
        length = "inner - at % inner < end - at ? inner - at % inner : end - at"

    def pointer(k: int) -> str:
        kind = "const auto*" if k in inputs else "auto* __restrict__"
        return f"{kind} a{k} = static_cast<{'const ' * (k in inputs)}{stored[k]}*>(arrays[{k}]);"

    def value(k: int) -> str:
        at = "at + i" if masks[k] == layout.every else f"b{k} + i" if masks[k] & 1 else f"b{k}"
        return f"widen<{values[k]}>(a{k}[{at}])" if masks[k] else f"s{k}"

    place = lambda k: f"place<{masks[k]}u, {layout.dimensions}>(at, sizes)"
    # The user's text lies in a namespace, where headers must not be read.
    included = _each(_included(function), lambda h: f"#if __has_include({h})\n#include {h}\n#endif")
    return f"""{kernel_text("elementwise_host.hpp")}
{included}
{_prelude(function, layout, "inline __attribute__((always_inline))")}
using namespace normfuse_loop;
extern "C" const char normfuse_layout[] = "{layout}";
extern "C" void normfuse_elementwise(void* const* arrays, const int64_t* sizes,
                                     int64_t begin, int64_t end) {{
  {_each(range(len(stored)), pointer)}
  {_scalars(values, layout)}
  const int64_t inner = sizes[{layout.dimensions - 1}];
  for (int64_t at = begin, length; at < end; at += length) {{
    length = {length};
    {_each(partial, lambda k: f"const int64_t b{k} = {place(k)};")}
#pragma GCC ivdep
    for (int64_t i = 0; i < length; ++i) {{
      {_apply(stored, values, [value(k) for k in inputs], "a{k}[at + i] = {y};")}
    }}
  }}
}}
"""


def _arrays(
    function: Function, layout: Layout, types: Mapping[str, str]
) -> tuple[list[str], list[str], list[int]]:
    """Types in memory and of values, and masks: of the operands, then of the results.

    In the text array k is `a{k}`, a number for the whole loop `s{k}`, and a result's value `y{k}`.
    """
    values = [layout.value(t) for t, _ in (*function.operands, *function.results)]
    masks = [*layout.masks, *[layout.every] * len(function.results)]
    return [types[dtype] for dtype in layout.stored], values, masks


def _included(function: Function) -> dict[str, None]:
    return dict.fromkeys(h for _, piece in function.pieces for h in _INCLUDE.findall(piece))


def _each(each: Iterable[Any], line: Callable[[Any], str]) -> str:
    return "\n".join(map(line, each))


def _scalars(values: Sequence[str], layout: Layout) -> str:
    """Reads operands that are one number, before the loop."""
    numbers = [k for k, mask in enumerate(layout.masks) if not mask]
    return _each(numbers, lambda k: f"const auto s{k} = widen<{values[k]}>(*a{k});")


def _apply(stored: Sequence[str], values: Sequence[str], operands: Sequence[str], to: str) -> str:
    """Applies the function to one element's operands, and puts its results where `to` says."""
    outputs = range(len(operands), len(stored))
    arguments = ", ".join([*operands, *(f"y{k}" for k in outputs)])
    declared = _each(outputs, lambda k: f"{values[k]} y{k};")
    assigned = _each(outputs, lambda k: to.format(k=k, y=f"Narrow<{stored[k]}>::from(y{k})"))
    return f"{declared}\nnormfuse_user::apply({arguments});\n{assigned}"


def _prelude(function: Function, layout: Layout, specifiers: str) -> str:
    """The user's text, and `apply` on values of the types at hand."""
    # An empty line each, for a backslash at the end to continue.
    pieces = [f'#line 1 "{file}"\n{text}\n' for file, text in function.pieces]
    parameters = [f"const {layout.value(t)} {v}" for t, v in function.operands]
    parameters += [f"{layout.value(t)}& {v}" for t, v in function.results]
    pieces.append('#line 1 "<normfuse>"')
    pieces.append(f"{specifiers} void apply({', '.join(parameters)}) {{")
    pieces += [f"using {name} = {layout.value(name)};" for name in function.template]
    text = "\n".join([*pieces, function.body])
    return f"namespace normfuse_user {{\n{text}\n}}\n}}  // namespace normfuse_user"
