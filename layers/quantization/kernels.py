"""The quantizer's kernels: C++ on CPUs, CUDA on NVIDIA GPUs, the definition elsewhere."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...native import registry
from ...native.dtypes import CUDA_TYPES
from ...native.kernel import Kernel
from ...native.launch import Target, call_host, launch
from .definition import define_amax, define_cast, define_quantize

_ROWS, COLUMNS = 16, 8  # a thread's part of a tile
AMAX_THREADS = 512
_LARGE = 7 << 25  # bytes: more tiles than the multiprocessors take in a few rounds


@dataclasses.dataclass(frozen=True)
class Codes:
    """The static description of a quantized matrix."""

    dtype: str = "float8_e4m3fn"  # the format's name
    # has_q, has_qt: whether the codes as they lie and their transpose are results.
    has_q: bool = True
    has_qt: bool = True
    op: str = "quantize"  # the function the user called

    @property
    def flags(self) -> dict[str, Any]:
        """Keywords of casts."""
        return {"dtype": self.dtype, "has_q": self.has_q, "has_qt": self.has_qt}


@dataclasses.dataclass(frozen=True)
class CastLayout:
    """How the threads of quantize_cast.cu share a matrix."""

    # width, height: threads of a block along columns (8 each) and rows (16 each).
    width: int = 16
    height: int = 8
    batch: int = 8  # rows of a thread that are loaded together
    min_blocks: int = 6  # registers must suffice for so many blocks of a multiprocessor
    group: int = 8  # rows of tiles that are taken together
    backwards: bool = False  # start with the last tile

    def blocks(self, rows: int, columns: int) -> int:
        """The number of tiles of a matrix."""
        return -(-rows // (_ROWS * self.height)) * -(-columns // (COLUMNS * self.width))

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a tile takes to be transposed."""
        return self.held(1)

    def held(self, itemsize: int) -> int:
        """Bytes of shared memory that a tile takes as it is stored, at least those of its codes."""
        return self.width * self.height * _ROWS * COLUMNS * itemsize


@dataclasses.dataclass(frozen=True)
class AmaxLayout:
    """How the threads of quantize_amax.cu share an array."""

    blocks_each: int = 4  # blocks for each multiprocessor
    unroll: int = 4  # vectors of 16 bytes that a thread loads together

    def blocks(self, size: int, itemsize: int, target: Target) -> int:
        """The number of blocks: at least one, which writes 0 for an empty array."""
        vectors = -(-size * itemsize // 16)
        wanted = -(-vectors // (AMAX_THREADS * self.unroll))
        return max(1, min(wanted, self.blocks_each * target.multiprocessors))


def amax_layout(size: int, itemsize: int, target: Target) -> AmaxLayout:
    """The layout that was measured to be best; so far the same for all."""
    del size, itemsize, target
    return AmaxLayout()


def cast_layout(
    rows: int, columns: int, itemsize: int, target: Target, *, after_amax: bool
) -> CastLayout:
    """The layout that was measured to be best on an H200 (benchmarks/results).

    After a pass for the maximum the last elements are in the cache: they are taken first.
    """
    if target.capability == 90 and rows * columns * itemsize >= _LARGE:
        return CastLayout(width=32, batch=8, min_blocks=2, group=2, backwards=after_amax)
    batch = 8 if itemsize == 2 else 4
    # Without an instruction that rounds to FP8 a thread needs more registers.
    blocks = 6 if target.capability >= 90 and itemsize == 2 else 4
    return CastLayout(batch=batch, min_blocks=blocks, backwards=after_amax)


def tile_macros(
    layout: CastLayout, rows: int, columns: int, *, dtype: str, has_q: bool, has_qt: bool
) -> dict[str, int]:
    """The macros of fp8_tile.cuh."""
    return {
        "E5M2": int(dtype == "float8_e5m2"),
        "HAS_Q": int(has_q),
        "HAS_QT": int(has_qt),
        "BLOCK_X": layout.width,
        "BLOCK_Y": layout.height,
        "BATCH": layout.batch,
        "MIN_BLOCKS": layout.min_blocks,
        "VECTORS": int(rows % 16 == 0 and columns % 16 == 0),
    }


def cuda_maxima(target: Target, x: jax.Array) -> jax.Array:
    """The largest magnitude that each block finds; the largest of them is that of x."""
    layout = amax_layout(x.size, x.dtype.itemsize, target)
    blocks = layout.blocks(x.size, x.dtype.itemsize, target)
    (maxima,) = launch(
        "quantize_amax.cu",
        "quantize_amax",
        [x],
        [jax.ShapeDtypeStruct((blocks,), jnp.float32)],
        target=target,
        macros={
            "X_TYPE": CUDA_TYPES[x.dtype.name],
            "THREADS": AMAX_THREADS,
            "UNROLL": layout.unroll,
        },
        grid=blocks,
        block=AMAX_THREADS,
        ints=(x.size,),
    )
    return maxima


def cuda_amax(target: Target, x: jax.Array) -> list[jax.Array]:
    maxima = cuda_maxima(target, x)
    return [maxima if maxima.size == 1 else jnp.max(maxima, keepdims=True)]


def cuda_cast(
    target: Target,
    x: jax.Array,
    maxima: jax.Array,
    *,
    dtype: str,
    has_q: bool,
    has_qt: bool,
    after_amax: bool = False,
) -> list[jax.Array]:
    if x.size == 0:  # there is nothing to launch, but a scale
        return define_cast(x, maxima, dtype=dtype, has_q=has_q, has_qt=has_qt)
    rows, columns = x.shape
    layout = cast_layout(rows, columns, x.dtype.itemsize, target, after_amax=after_amax)
    types = code_types(rows, columns, dtype, has_q, has_qt)
    macros = tile_macros(layout, rows, columns, dtype=dtype, has_q=has_q, has_qt=has_qt)
    return launch(
        "quantize_cast.cu",
        "quantize_cast",
        [x, maxima],
        types,
        target=target,
        macros={"X_TYPE": CUDA_TYPES[x.dtype.name]} | macros,
        grid=layout.blocks(rows, columns),
        block=layout.width * layout.height,
        shared=layout.shared if has_qt else 0,
        ints=(rows, columns, maxima.size, layout.group, layout.backwards),
    )


def cuda_quantize(target: Target, x: jax.Array, **flags) -> list[jax.Array]:
    """Two launches: every block of the second takes the maximum of the first one's maxima."""
    return cuda_cast(target, x, cuda_maxima(target, x), after_amax=True, **flags)


def cpu_amax(x: jax.Array) -> list[jax.Array]:
    return call_host("normfuse_quantize_amax", [x], [jax.ShapeDtypeStruct((1,), jnp.float32)])


def cpu_cast(
    x: jax.Array, maxima: jax.Array, *, dtype: str, has_q: bool, has_qt: bool
) -> list[jax.Array]:
    types = code_types(x.shape[0], x.shape[1], dtype, has_q, has_qt)
    return call_host("normfuse_quantize_cast", [x, maxima], types, has_q=has_q, has_qt=has_qt)


def _cpu_quantize(x: jax.Array, **flags) -> list[jax.Array]:
    return cpu_cast(x, *cpu_amax(x), **flags)


def code_types(
    rows: int, columns: int, dtype: str, has_q: bool, has_qt: bool
) -> list[jax.ShapeDtypeStruct]:
    """The results of a cast: [q,] [qt,] scale."""
    of = jnp.dtype(dtype)
    codes = [jax.ShapeDtypeStruct((rows, columns), of)] * has_q
    codes += [jax.ShapeDtypeStruct((columns, rows), of)] * has_qt
    return [*codes, jax.ShapeDtypeStruct((1,), jnp.float32)]


INPUTS = ("float32", "bfloat16", "float16")


MULTIPLE = 16  # cuBLASLt's FP8 products need multiples of it in every dimension


def fits(*dimensions: int) -> bool:
    """Returns whether the product of matrices with these dimensions can run in FP8."""
    return all(size > 0 and size % MULTIPLE == 0 for size in dimensions)


def no_second_derivative(primals: Any, tangents: Any, *, spec: Any, order: Any) -> Any:
    """The tangent rule of operations that have none: a TypeError that says what to do."""
    del primals, tangents, order
    raise TypeError(  # `choose` reads NotImplementedError as "try another implementation"
        f"{spec.op}: quantization='fp8' has first derivatives only; take second ones of the layer "
        "with quantization=None"
    )


def by_flags(
    name: str, define: Callable[..., Any], cpu: Callable[..., Any], cuda: Callable[..., Any]
) -> Kernel:
    """Returns a kernel of functions that take the flags of a `spec`, not the spec."""
    return Kernel(
        name,
        lambda spec, *operands: define(*operands, **spec.flags),
        {
            "cpu": lambda spec, *operands: cpu(*operands, **spec.flags),
            "cuda": lambda target, spec, *operands: cuda(target, *operands, **spec.flags),
        },
    )


registry.register()
amax = Kernel(
    "quantize_amax",
    lambda spec, x: define_amax(x),
    {
        "cpu": lambda spec, x: cpu_amax(x),
        "cuda": lambda target, spec, x: cuda_amax(target, x),
    },
)
cast = by_flags("quantize_cast", define_cast, cpu_cast, cuda_cast)
quantize = by_flags("quantize", define_quantize, _cpu_quantize, cuda_quantize)
"""`(x,) -> ([q,] [qt,] scale (1,))` with the maximum of x as its bound."""


def row_counts(n: int) -> tuple[int, ...]:
    """Returns numbers of rows of `n` for every layout: few and many, multiples of 16 or not."""
    many = _LARGE // 2 // n // 16 * 16 + 16
    return 5, 16, many, many + 5


def examples(
    n: int, dtype: str, *, rows: int
) -> Iterator[tuple[Kernel, Codes, list[jax.ShapeDtypeStruct]]]:
    """Yields the kernels as layers call them, of rows of `n`: (kernel, codes, operand types)."""
    x, maxima = (
        jax.ShapeDtypeStruct(shape, of) for shape, of in (((rows, n), dtype), ((1,), "float32"))
    )
    yield amax, Codes(), [x]
    for has_q, has_qt in ((True, False), (False, True), (True, True)):
        codes = Codes(has_q=has_q, has_qt=has_qt)
        yield cast, codes, [x, maxima]
        yield quantize, codes, [x]
