"""Writes the loop around a user's scalar function, for NVRTC and for the system's C++ compiler."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ...native.compiler import Source, kernel_source, kernel_text
from ...native.dtypes import CUDA_TYPES, HOST_TYPES, VALUE_TYPES
from .signature import resolve

DTYPES = tuple(VALUE_TYPES)
THREADS = 256
PACKS = 1


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Function:
    """A scalar function as text, of one type for each operand and result.

    Attributes:
      name: for messages and profiles.
      pieces: C++ text, in order, each under the file name that the compiler's messages give it.
      operands, results: (C++ type, variable) of each.
      template: the type parameters.
      body: a statement that sets the results' variables from the operands'.
      definition: the same on arrays in plain JAX, `(*operands) -> sequence of results`; or None.
      key: the same in every process for the same text.
    """

    name: str
    pieces: tuple[tuple[str, str], ...]
    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    template: tuple[str, ...]
    body: str
    definition: Callable[..., Sequence[Any]] | None
    key: str

    def __repr__(self) -> str:
        return self.key


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a loop is compiled for.

    Attributes:
      bound: the dtype of each template parameter.
      stored: dtypes in memory of the operands, then of the results.
      masks: for each operand the collapsed dimensions it has, bit 0 for the last.
      dimensions: how many collapsed dimensions there are.
      vector: how many neighbouring elements a thread moves at once (CUDA).
      packs: how many times a thread does that (CUDA).
      wide: whether indices need 64 bits (CUDA).
    """

    bound: tuple[tuple[str, str], ...]
    stored: tuple[str, ...]
    masks: tuple[int, ...]
    dimensions: int
    vector: int = 1
    packs: int = 1
    wide: bool = True

    @property
    def every(self) -> int:
        """The mask of an operand as large as the result."""
        return (1 << self.dimensions) - 1

    @property
    def tile(self) -> int:
        """How many elements a block does (CUDA)."""
        return THREADS * self.vector * self.packs


def collapse(
    shape: Sequence[int], dims: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, masks): neighbouring dimensions that the same operands have are one dimension.

    `dims` has for each operand the dimensions of `shape` that it has; it is constant along others.
    """
    sizes: list[int] = []
    present: list[tuple[bool, ...]] = []
    for d, n in enumerate(shape):
        having = tuple(d in operand for operand in dims)
        if n == 1:
            continue
        if present and present[-1] == having:
            sizes[-1] *= n
        else:
            sizes.append(n)
            present.append(having)
    if not sizes:
        whole = tuple(len(operand) == len(shape) for operand in dims)
        sizes, present = [1], [whole]
    masks = [
        sum(having[k] << bit for bit, having in enumerate(reversed(present)))
        for k in range(len(dims))
    ]
    return tuple(sizes), tuple(masks)


def cuda_source(function: Function, layout: Layout) -> Source:
    """The kernel `elementwise_<name>(operands, results, sizes)`."""
    stored = [CUDA_TYPES[name] for name in layout.stored]
    variables = [f"a{k}" for k in range(len(layout.masks))]
    results = [f"r{k}" for k in range(len(function.results))]
    count = len(variables)
    parameters = [f"const {t}* __restrict__ {v}" for t, v in zip(stored, variables)]
    parameters += [f"{t}* __restrict__ {v}" for t, v in zip(stored[count:], results)]
    parameters += ["long long count"] + [f"long long n{d}" for d in range(layout.dimensions)]
    index = "long long" if layout.wide else "unsigned"
    sizes = ", ".join(f"({index})n{d}" for d in range(layout.dimensions))
    large = [v for v, mask in zip(variables, layout.masks) if mask & 1] + results
    wides = [
        f"normfuse_loop::widen<{_value(type_, layout)}>"
        for type_, _ in (*function.operands, *function.results)
    ]

    def values(place: Callable[[int, str], str]) -> str:
        return ", ".join(place(k, f"{wides[k]}({{}})") for k in range(count))

    def single(k, widen):
        mask = layout.masks[k]
        if mask == layout.every:
            return widen.format(f"a{k}[at]")
        if mask == 0:
            return f"s{k}"
        return widen.format(f"a{k}[place<{mask}u>(at, sizes)]")

    def packed(k, widen):
        return f"s{k}" if layout.masks[k] == 0 else widen.format(f"p{k}[i].at(k)")

    def loaded(k):
        mask = layout.masks[k]
        if mask == layout.every:
            return f"p{k}[i] = load<{layout.vector}>(a{k} + at);"
        what = "load" if mask & 1 else "repeat"
        return f"p{k}[i] = {what}<{layout.vector}>(a{k} + place<{mask}u>(at, sizes));"

    scalars = [
        f"const auto s{k} = {wides[k]}(*a{k});" for k in range(count) if layout.masks[k] == 0
    ]
    outs = [(_value(t, layout), stored[count + j]) for j, (t, _) in enumerate(function.results)]
    declare = " ".join(f"{value} y{j};" for j, (value, _) in enumerate(outs))
    call = ", ".join(f"y{j}" for j in range(len(outs)))
    vector = layout.vector
    moved = [k for k in range(count) if layout.masks[k]]
    lines = [
        *_prelude(function, layout, "__device__ inline"),
        "using namespace normfuse_loop;",
        f"using Index = {index};",
        f'extern "C" __global__ void __launch_bounds__({THREADS})',
        f"elementwise_{function.name}({', '.join(parameters)}) {{",
        f"  const Sizes<Index, {layout.dimensions}> sizes = {{{{{sizes}}}}};",
        f"  constexpr int kTile = {layout.tile};",
        "  const long long begin = static_cast<long long>(blockIdx.x) * kTile;",
        *(f"  {line}" for line in scalars),
        f"  if (begin + kTile <= count && aligned_16({', '.join(large)})) {{",
        f"    const Index mine = static_cast<Index>(begin) + threadIdx.x * {vector};",
        *(f"    Pack<{stored[k]}, {vector}> p{k}[{layout.packs}];" for k in moved),
        "#pragma unroll",
        f"    for (int i = 0; i < {layout.packs}; ++i) {{",  # all loads are on their way at once
        f"      const Index at = mine + i * {THREADS * vector};",
        *(f"      {loaded(k)}" for k in moved),
        "    }",
        "#pragma unroll",
        f"    for (int i = 0; i < {layout.packs}; ++i) {{",
        *(f"      Pack<{t}, {vector}> o{j};" for j, (_, t) in enumerate(outs)),
        "#pragma unroll",
        f"      for (int k = 0; k < {vector}; ++k) {{",
        f"        {declare}",
        f"        normfuse_user::apply({values(packed)}, {call});",
        *(f"        o{j}.set(k, Narrow<{t}>::from(y{j}));" for j, (_, t) in enumerate(outs)),
        "      }",
        *(f"      store(r{j} + mine + i * {THREADS * vector}, o{j});" for j in range(len(outs))),
        "    }",
        "    return;",
        "  }",
        f"  for (int i = threadIdx.x; i < kTile && begin + i < count; i += {THREADS}) {{",
        "    const Index at = static_cast<Index>(begin) + i;",
        f"    {declare}",
        f"    normfuse_user::apply({values(single)}, {call});",
        *(f"    r{j}[at] = Narrow<{t}>::from(y{j});" for j, (_, t) in enumerate(outs)),
        "  }",
        "}",
        "",
    ]
    name = f"elementwise_{function.name}"
    headers = tuple(
        (header, kernel_source(header).text) for header in ("elementwise.cuh", "machine.cuh")
    )
    text = '#include "elementwise.cuh"\n' + "\n".join(lines)
    if uses_complex(layout):
        text = "#define USES_COMPLEX\n" + text
    options = ("--device-as-default-execution-space", "--disable-warnings")
    return Source(name, text, headers, options)


def host_source(function: Function, layout: Layout) -> str:
    """`normfuse_elementwise(arrays, sizes, begin, end)`, for the system's compiler."""
    stored = [HOST_TYPES[name] for name in layout.stored]
    count = len(layout.masks)
    types = [_value(t, layout) for t, _ in (*function.operands, *function.results)]
    lines = []
    for k, mask in enumerate(layout.masks):
        lines.append(f"  const auto* a{k} = static_cast<const {stored[k]}*>(arrays[{k}]);")
        if mask == 0:
            lines.append(f"  const auto s{k} = widen<{types[k]}>(*a{k});")
    results = range(len(function.results))
    for j in results:
        lines.append(
            f"  auto* __restrict__ r{j} = static_cast<{stored[count + j]}*>(arrays[{count + j}]);"
        )

    def value(k):
        mask = layout.masks[k]
        if mask == 0:
            return f"s{k}"
        at = "at + i" if mask == layout.every else f"b{k} + i" if mask & 1 else f"b{k}"
        return f"widen<{types[k]}>(a{k}[{at}])"

    partial = [k for k, mask in enumerate(layout.masks) if mask not in (0, layout.every)]
    arguments = [*(value(k) for k in range(count)), *(f"y{j}" for j in results)]
    length = "end - at"
    if partial:  # a row of the innermost dimension at a time
        lines.append(f"  const int64_t inner = sizes[{layout.dimensions - 1}];")
        length = "inner - at % inner < end - at ? inner - at % inner : end - at"
    lines += [
        "  for (int64_t at = begin, length; at < end; at += length) {",
        f"    length = {length};",
        *(
            f"    const int64_t b{k} = place<{layout.masks[k]}u, {layout.dimensions}>(at, sizes);"
            for k in partial
        ),
        "#pragma GCC ivdep",
        "    for (int64_t i = 0; i < length; ++i) {",
        *(f"      {types[count + j]} y{j};" for j in results),
        f"      normfuse_user::apply({', '.join(arguments)});",
        *(f"      r{j}[at + i] = Narrow<{stored[count + j]}>::from(y{j});" for j in results),
        "    }",
        "  }",
        "}",
        "",
    ]
    defined = ["#define USES_COMPLEX"] * uses_complex(layout)
    return "\n".join(
        [
            *defined,
            kernel_text("elementwise_host.hpp"),
            *_prelude(function, layout, "inline __attribute__((always_inline))"),
            "using namespace normfuse_loop;",
            'extern "C" void normfuse_elementwise(void* const* arrays, const int64_t* sizes,',
            "                                     int64_t begin, int64_t end) {",
            *lines,
        ]
    )


def _prelude(function: Function, layout: Layout, specifiers: str) -> list[str]:
    """The user's text, and `apply` on values of the types at hand."""
    bound = dict(layout.bound)
    lines = ["namespace normfuse_user {"]
    for file, text in function.pieces:
        lines += [f'#line 1 "{file}"', text.rstrip("\n")]
    lines += ['#line 1 "<normfuse>"']
    parameters = [f"const {_value(t, layout)} {v}" for t, v in function.operands]
    parameters += [f"{_value(t, layout)}& {v}" for t, v in function.results]
    lines += [f"{specifiers} void apply({', '.join(parameters)}) {{"]
    lines += [f"  using {name} = {VALUE_TYPES[bound[name]]};" for name in function.template]
    return [*lines, f"  {function.body}", "}", "}  // namespace normfuse_user"]


def _value(type_: str, layout: Layout) -> str:
    return VALUE_TYPES[resolve(type_, dict(layout.bound)) or ""]


def uses_complex(layout: Layout) -> bool:
    """Whether a complex number is anywhere in the function."""
    return any("complex" in dtype for dtype in (*layout.stored, *dict(layout.bound).values()))
