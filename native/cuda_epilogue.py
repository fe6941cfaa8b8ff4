"""The kernels of `normfuse.native.epilogue` on CUDA: choosing a layout and launching.

Each function takes a `Target`, then the operands and params of the kernel of the same name; arrays
are (rows, columns), or of any shape where there is no bias. The activation's text becomes part of
the kernel's.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from .compiler import Source, kernel_source
from .cuda_common import TYPES, column_sum, compute_dtype, type_macros
from .device import Target
from .fallback import Unsupported
from .launch import launch
from .scalar import Scalar

_MAX_GRID_Y = 65535


@dataclasses.dataclass(frozen=True)
class Layout:
    """How threads share an array, seen as (rows, columns).

    Attributes:
      rows, columns: of the array.
      vector: elements that move together; divides `columns`.
      width, height: threads of a block along columns (each with a vector) and rows.
      grid_y: blocks along the rows, which they go through with a stride.
      unroll: rows of a thread that are on their way together.
      min_blocks: blocks that a multiprocessor's registers must be enough for.
    """

    rows: int
    columns: int
    vector: int
    width: int
    height: int
    grid_y: int
    unroll: int
    min_blocks: int

    @property
    def tiles(self) -> int:
        """Blocks along the columns."""
        return -(-self.columns // (self.width * self.vector))


def flat_layout(size: int, itemsize: int, kernel: str, arrays: int) -> Layout:
    """Without a bias an array has no columns: it is a row, or several that a thread takes together.

    How many, and how many threads to a multiprocessor, is from measurements on an H200.

    Args:
      itemsize: bytes of the widest element.
      kernel: "forward" or "backward".
      arrays: how many are read and written.
    """
    vector = math.gcd(size, 16 // itemsize)
    chosen = {("forward", 2): (2, 8), ("forward", 3): (1, 8)}
    chosen |= {("backward", 3): (4, 4), ("backward", 5): (2, 4)}
    unroll, blocks = chosen.get((kernel, arrays), (1, 4))
    if size % (unroll * vector):
        unroll = 1
    return Layout(unroll, size // unroll, vector, 256, 1, 1, unroll, blocks)


def column_layout(rows: int, columns: int, itemsize: int, target: Target) -> Layout:
    """With a bias a thread keeps its columns, and blocks go through the rows."""
    vector = math.gcd(columns, 16 // itemsize)
    width = min(32, 1 << (columns // vector - 1).bit_length())
    layout = Layout(rows, columns, vector, width, 256 // width, 1, 1, 2)
    blocks = -(-8 * target.multiprocessors // layout.tiles)
    grid_y = min(-(-rows // layout.height), blocks, _MAX_GRID_Y)
    return dataclasses.replace(layout, grid_y=grid_y)


def forward(
    target: Target, z, *rest, function: Scalar, has_up: bool, has_bias: bool, out_dtype
) -> Any:
    """`(z[, up][, bias]) -> (y,)`."""
    operands = dict(zip(["Z"] + ["UP"] * has_up + ["BIAS"] * has_bias, (z, *rest), strict=True))
    results = {"Y": jax.ShapeDtypeStruct(z.shape, jnp.dtype(out_dtype))}
    return _run(target, "forward", function, operands, results)


def backward(
    target: Target,
    dy,
    z,
    *rest,
    function: Scalar,
    has_up: bool,
    has_bias: bool,
    with_dbias: bool,
    with_value: bool,
) -> Any:
    """`(dy, z[, up][, bias]) -> (dz[, dup][, dbias][, value])`; value is y, in dy's dtype."""
    if not function.derivative:
        raise Unsupported(f"the activation {function.name} has no derivative in C++")
    names = ["DY", "Z"] + ["UP"] * has_up + ["BIAS"] * has_bias
    operands = dict(zip(names, (dy, z, *rest), strict=True))
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    results: dict[str, Any] = {"DZ": like(z)}
    if has_up:
        results["DUP"] = like(operands["UP"])
    if with_dbias:
        results["PARTIAL"] = None
    if with_value:
        results["VALUE"] = like(dy)
    return _run(target, "backward", function, operands, results)


def _run(target: Target, kernel: str, function: Scalar, operands, results) -> list[jax.Array]:
    dtypes = [a.dtype for a in (*operands.values(), *filter(None, results.values()))]
    compute = compute_dtype(dtypes)
    itemsize = max(d.itemsize for d in dtypes)
    if "BIAS" in operands:  # (rows, columns)
        rows, columns = operands["Z"].shape
        layout = column_layout(rows, columns, itemsize, target)
    else:
        layout = flat_layout(operands["Z"].size, itemsize, kernel, len(dtypes))
    if "PARTIAL" in results:
        results["PARTIAL"] = jax.ShapeDtypeStruct((layout.grid_y, layout.columns), compute)
    macros = type_macros(operands) | type_macros(results)
    macros |= {
        "KERNEL": f"epilogue_{kernel}",
        "COMPUTE_TYPE": TYPES[compute.name],
        "APPROXIMATE": int(itemsize == 2),
        "GRADIENT": int(kernel == "backward"),
        "HAS_UP": int("UP" in operands),
        "HAS_BIAS": int("BIAS" in operands),
        "WITH_DBIAS": int("PARTIAL" in results),
        "WITH_VALUE": int("VALUE" in results),
        "VECTOR": layout.vector,
        "BLOCK_X": layout.width,
        "BLOCK_Y": layout.height,
        "UNROLL": layout.unroll,
        "MIN_BLOCKS": layout.min_blocks,
    }
    done = launch(
        _source(function),
        f"epilogue_{kernel}",
        list(operands.values()),
        list(results.values()),
        target=target,
        grid=(layout.tiles, layout.grid_y),
        block=layout.width * layout.height,
        macros=macros,
        shared=_shared(layout, compute) if "PARTIAL" in results else 0,
        ints=(layout.rows, layout.columns),
        aliases=_in_place(operands, results),
    )
    named = dict(zip(results, done, strict=True))
    if "PARTIAL" in named:
        named["PARTIAL"] = column_sum(launch, target, named["PARTIAL"])
    return list(named.values())


def _shared(layout: Layout, compute) -> int:
    """Bytes in which the rows of a block add their bias gradients."""
    return layout.width * layout.height * layout.vector * compute.itemsize


def _in_place(operands, results) -> dict[int, int]:
    """Gradients take the place of what they are the gradients of, which is read no more."""
    places = {"DZ": "Z", "DUP": "UP", "VALUE": "DY"}
    return {
        list(operands).index(places[name]): i
        for i, (name, result) in enumerate(results.items())
        if name in places and result.dtype == operands[places[name]].dtype
    }


def _source(function: Scalar) -> Source:
    file = kernel_source("epilogue.cu")
    text = f'#include "scalar.cuh"\n{function.code()}#line 1 "{file.name}"\n{file.text}'
    return dataclasses.replace(file, text=text)
