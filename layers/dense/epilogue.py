"""The epilogue of a dense layer's product: bias, activation and gate, with derivatives.

    y = activation(z + bias) · up

`up` is the second product of a gated layer; it has all dimensions of z, the bias its last ones. On
CUDA the forward is one pass, and so are all gradients together; on CPUs and elsewhere both are
plain JAX, which XLA fuses into one loop itself. Forward mode and higher orders are plain HLO.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ...native.dtypes import CUDA_TYPES, compute_dtype, rounded
from ...native.implementation import Implementation, Order
from ...native.kernel import Kernel
from ...native.launch import Target, column_sum, cuda_compute_dtype, launch, type_macros
from ..core.activations import Activation, Scalar, resolve, scalar_of, with_activation
from ..core.arguments import choose
from ..core.derivative import tangents_of
from ..core.op import (
    Batching,
    Derivative,
    Dims,
    Loose,
    Op,
    Placement,
    Split,
    equally_varying,
    match,
    vary,
    varying_axes,
)

# ---------------------------------------------------------------- the epilogue


@dataclasses.dataclass(frozen=True, kw_only=True)
class Epilogue:
    """The static description of an epilogue, or of a derivative of it."""

    op: str = "dense"  # the function the user called
    function: Scalar  # the activation
    axes: tuple[int, ...] = (1,)  # the bias's dimensions of z; kernels see (rows, columns)
    out_dtype: str = ""  # y's dtype
    with_dbias: bool = False  # a backward also returns the bias's gradient,
    with_value: bool = False  # and y once more


# ---------------------------------------------------------------- definitions, in plain JAX


def _inputs(spec: Epilogue, z: Array, up: Any, bias: Any, dtype: jnp.dtype) -> list[Array]:
    """`[z + bias]` or `[z + bias, up]`, in `dtype`."""
    added = jnp.zeros((), dtype)
    if bias is not None:
        added = jnp.expand_dims(bias.astype(dtype), _rows(spec, z.ndim))
    return [z.astype(dtype) + added, *([] if up is None else [up.astype(dtype)])]


def _value(spec: Epilogue, z: Array, *up: Array) -> Array:
    return spec.function(z) * up[0] if up else spec.function(z)


def _rows(spec: Epilogue, ndim: int) -> list[int]:
    return [d for d in range(ndim) if d not in spec.axes]


def define_forward(spec: Epilogue, z: Array, up: Any = None, bias: Any = None) -> list[Array]:
    dtype = compute_dtype(*(a.dtype for a in (z, up, bias) if a is not None), spec.out_dtype)
    return [_value(spec, *_inputs(spec, z, up, bias, dtype)).astype(spec.out_dtype)]


def define_backward(
    spec: Epilogue, dy: Array, z: Array, up: Any = None, bias: Any = None
) -> list[Any]:
    """Returns dz, dup, dbias and value, which is y in dy's dtype."""
    dtype = compute_dtype(*(a.dtype for a in (dy, z, up, bias) if a is not None))
    function = functools.partial(_value, spec)
    y, pull = jax.vjp(function, *_inputs(spec, z, up, bias, dtype))
    dz, *dup = pull(dy.astype(dtype))
    dbias = jnp.sum(dz, _rows(spec, dy.ndim)) if spec.with_dbias else None
    value = y.astype(dy.dtype) if spec.with_value else None
    return [dz.astype(z.dtype), None if up is None else dup[0].astype(up.dtype), dbias, value]


# ---------------------------------------------------------------- kernels, on (rows, columns)
# or on arrays of any shape where there is no bias. The activation's text becomes part of the
# kernel's.


_MAX_GRID_Y = 65535


@dataclasses.dataclass(frozen=True)
class Layout:
    """How threads share an array, seen as (rows, columns)."""

    rows: int
    columns: int
    vector: int  # elements that move together; divides `columns`
    width: int  # threads of a block along columns, each with a vector,
    height: int  # and along rows
    grid_y: int  # blocks along the rows, which they go through with a stride
    unroll: int  # rows of a thread whose loads overlap
    min_blocks: int  # blocks that a multiprocessor's registers must be enough for

    @property
    def tiles(self) -> int:
        return -(-self.columns // (self.width * self.vector))


def flat_layout(size: int, itemsize: int, kernel: str, arrays: int) -> Layout:
    """Without a bias an array has no columns: it is a row, or several that a thread takes together.

    Their number, and that of threads to a multiprocessor, are from measurements on an H200.
    `itemsize` is the widest element's; the "forward" or "backward" reads and writes `arrays`.
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


_OPERANDS = {"forward": ("Z", "UP", "BIAS"), "backward": ("DY", "Z", "UP", "BIAS")}
_RESULTS = {"forward": ("Y",), "backward": ("DZ", "DUP", "PARTIAL", "VALUE")}
_PLACES = {"Y": "Z", "DZ": "Z", "DUP": "UP", "VALUE": "DY"}  # operands as large as each result


def _on_cuda(kernel: str, target: Target, spec: Epilogue, *arrays: Any) -> list[Any]:
    """Launches the "forward" or the "backward", of the definition's operands and results."""
    is_backward = kernel == "backward"
    pairs = zip(_OPERANDS[kernel], [*arrays, None, None])
    operands = {name: a for name, a in pairs if a is not None}
    asked = {"DUP": "UP" in operands, "PARTIAL": spec.with_dbias, "VALUE": spec.with_value}
    results: dict[str, Any] = {k: None for k in _RESULTS[kernel] if asked.get(k, True)}
    for name in results.keys() & _PLACES.keys():
        like = operands[_PLACES[name]]
        dtype = like.dtype if is_backward else jnp.dtype(spec.out_dtype)
        results[name] = jax.ShapeDtypeStruct(like.shape, dtype)
    dtypes = [a.dtype for a in (*operands.values(), *filter(None, results.values()))]
    compute = cuda_compute_dtype(dtypes)
    itemsize = max(d.itemsize for d in dtypes)
    if "BIAS" in operands:
        rows, columns = operands["Z"].shape
        layout = column_layout(rows, columns, itemsize, target)
    else:
        layout = flat_layout(operands["Z"].size, itemsize, kernel, len(dtypes))
    if "PARTIAL" in results:
        results["PARTIAL"] = jax.ShapeDtypeStruct((layout.grid_y, layout.columns), compute)
    macros = type_macros(operands) | type_macros(results)
    macros |= {
        "KERNEL": f"epilogue_{kernel}",
        "COMPUTE_TYPE": CUDA_TYPES[compute.name],
        "APPROXIMATE": int(itemsize == 2),
        "GRADIENT": int(is_backward),
        "HAS_UP": int("UP_TYPE" in macros),
        "HAS_BIAS": int("BIAS" in operands),
        "WITH_DBIAS": int("PARTIAL" in results),
        "WITH_VALUE": int("VALUE" in results),
        "VECTOR": layout.vector,
        "BLOCK_X": layout.width,
        "BLOCK_Y": layout.height,
        "UNROLL": layout.unroll,
        "MIN_BLOCKS": layout.min_blocks,
    }
    # The rows of a block add their bias gradients in shared memory.
    shared = layout.width * layout.height * layout.vector * compute.itemsize
    done = launch(
        with_activation("epilogue.cu", spec.function),
        f"epilogue_{kernel}",
        list(operands.values()),
        list(results.values()),
        target=target,
        grid=(layout.tiles, layout.grid_y),
        block=layout.width * layout.height,
        macros=macros,
        shared=shared if "PARTIAL" in results else 0,
        ints=(layout.rows, layout.columns),
        aliases={  # each gradient overwrites its array, which is no longer read
            [*operands].index(_PLACES[name]): i
            for i, (name, result) in enumerate(results.items())
            if name not in ("Y", "PARTIAL") and result.dtype == operands[_PLACES[name]].dtype
        },
    )
    named = dict(zip(results, done, strict=True))
    if "PARTIAL" in named:
        named["PARTIAL"] = column_sum(launch, target, named["PARTIAL"])
    return [named.get(name) for name in _RESULTS[kernel]]


forward_on_cuda = functools.partial(_on_cuda, "forward")
backward_on_cuda = functools.partial(_on_cuda, "backward")
forward_kernel = Kernel("epilogue_forward", define_forward, {"cuda": forward_on_cuda})
backward_kernel = Kernel("epilogue_backward", define_backward, {"cuda": backward_on_cuda})


# ---------------------------------------------------------------- one device's share


def _flat(spec: Epilogue, array: Array | None) -> Any:
    """Returns an array as large as z as (rows, columns), the columns being `axes`.

    Without a bias arrays stay as they are.
    """
    if array is None or not spec.axes:
        return array
    last = range(array.ndim - len(spec.axes), array.ndim)
    moved = jnp.moveaxis(array, spec.axes, last)
    return moved.reshape(math.prod(moved.shape[: last.start]), -1)


def _restored(spec: Epilogue, array: Array | None, shape: tuple[int, ...]) -> Any:
    """The inverse of `_flat`."""
    if array is None or not spec.axes:
        return array
    others = [n for d, n in enumerate(shape) if d not in spec.axes]
    array = array.reshape(*others, *[shape[d] for d in spec.axes])
    return jnp.moveaxis(array, range(len(others), len(shape)), spec.axes)


def _seen(spec: Epilogue) -> Epilogue:
    return replace(spec, axes=(1,)) if spec.axes else spec


def _forward_body(
    spec: Epilogue, split: Split, z: Array, up: Any, bias: Any, *, order: Order
) -> list[Array]:
    del split
    bias = None if bias is None else bias.reshape(-1)
    flat = _flat(spec, z), _flat(spec, up), bias
    (y,) = forward_kernel(_seen(spec), *flat, order=order)
    return [_restored(spec, y, z.shape)]


def _backward_body(
    spec: Epilogue, split: Split, dy: Array, z: Array, up: Any, bias: Any, *, order: Order
) -> list[Any]:
    bias = None if bias is None else bias.reshape(-1)
    flat = *[_flat(spec, a) for a in (dy, z, up)], bias
    dz, dup, dbias, value = backward_kernel(_seen(spec), *flat, order=order)
    if dbias is not None:  # over exactly the mesh axes that the rows use
        dbias = dbias.reshape([z.shape[d] for d in spec.axes])
        dbias = split.psum(dbias, _rows(spec, len(split.shape)))
    dz, dup, value = (_restored(spec, a, z.shape) for a in (dz, dup, value))
    return [dz, dup, dbias, value]


# ---------------------------------------------------------------- sharding


def _forward_dims(spec: Epilogue, *ndims: int | None) -> Dims:
    every = tuple(range(ndims[0] or 0))
    return (every, every, Loose(spec.axes)), (every,)


def _backward_dims(spec: Epilogue, *ndims: int | None) -> Dims:
    operands, (every,) = _forward_dims(spec, *ndims)
    dup = None if ndims[2] is None else every
    dbias, value = Loose(spec.axes) if spec.with_dbias else None, every if spec.with_value else None
    return (every, *operands), (every, dup, dbias, value)


def _batched(spec: Epilogue, at: int) -> Epilogue:
    return replace(spec, axes=tuple(a + (a >= at) for a in spec.axes))


# ---------------------------------------------------------------- operations

backward = Op(
    "epilogue_gradient",
    define_backward,
    Placement(_backward_dims, _backward_body, leads=(1,)),
    Batching(_batched),
    Derivative(linear=True),
)


def gradients(
    spec: Epilogue, cts: Any, operands: Any, _: Any, wanted: Sequence[bool], *, order: Order
) -> list[Any]:
    asked = replace(spec, with_dbias=operands[2] is not None and wanted[2])
    return backward(asked, *cts, *operands, order=order)[:3]


def _jvp(primals: Any, tangents: Any, *, spec: Epilogue, order: Order) -> Any:
    y = forward(spec, *primals, order=order)
    return y, tangents_of(forward, gradients, spec, primals, tangents, y, order=order)


forward = Op(
    "epilogue",
    define_forward,
    Placement(_forward_dims, _forward_body),
    Batching(_batched),
    Derivative(jvp=_jvp),
)


# ---------------------------------------------------------------- functions for layers


def finish_gated(
    gate: Array,
    up: Array | None,
    op: str,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    implementation: Implementation,
) -> Array:
    """`activation(gate) · up`, in one pass in each direction, by the implementation asked for."""
    serve = {"xla": lambda order: finish(gate, None, activation, dtype, up)}
    if scalar_of(activation) is not None:
        native = functools.partial(finish_natively, op, gate, up, None, activation, dtype)
        serve["native"] = native
    return choose(op, implementation, serve)


def finish_natively(
    op: str,
    z: Array,
    up: Array | None,
    bias: Array | None,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    order: Order,
) -> Array:
    """`activation(z + bias) · up` on kernels, in one pass in each direction.

    Raises:
      NotImplementedError: if there is nothing to do or no kernel knows the activation.
    """
    function = scalar_of(activation)
    if function is None:
        what = "no activation" if activation is None else "an activation that is plain JAX"
        raise NotImplementedError(f"{op}: implementation='native' has no kernel for {what}")
    spec = Epilogue(op=op, function=function, axes=(), out_dtype=jnp.dtype(dtype).name)
    if up is not None:
        z, up = _alike(z, up)
    if bias is not None:
        z = vary(z, varying_axes(bias))
        dims = tuple(range(z.ndim - bias.ndim, z.ndim))
        bias = rounded(match(bias, z, dims), z.dtype)
        spec = replace(spec, axes=dims)
    return forward(spec, z, up, bias, order=order)[0]


def _alike(z: Array, up: Array) -> list[Array]:
    """Returns both with one type: they may vary, or be split, over different axes of a mesh."""
    z, up = equally_varying(z, up)
    is_split = lambda a: any(jax.typeof(a).sharding.spec)
    dims = range(z.ndim)
    return [match(z, up, dims), up] if is_split(up) and not is_split(z) else [z, match(up, z, dims)]


def finish(
    y: Array,
    bias: Array | None,
    activation: Activation,
    dtype: jax.typing.DTypeLike,
    up: Array | None = None,
) -> Array:
    """`activation(y + bias) · up`: one pass in float32 (or wider), rounded once, to `dtype`.

    The activation's derivative is recomputed from y: nothing of y's size is kept in float32.
    """
    function = None if activation is None else resolve(activation)
    if bias is None and function is None and up is None:
        return y.astype(dtype)
    compute = dtype if jnp.issubdtype(dtype, jnp.complexfloating) else compute_dtype(dtype)

    def epilogue(y, bias, up):
        z = y.astype(compute)
        if bias is not None:
            z = z + bias.astype(compute)
        result = z if function is None else function(z)
        if jnp.shape(result) != z.shape:
            raise ValueError(
                f"activation must keep the shape of its input, {z.shape}; {activation!r} returned "
                f"{jnp.shape(result)}"
            )
        if up is not None:
            result = result.astype(compute) * up.astype(compute)
        return result.astype(dtype)

    if function is not None or up is not None:
        epilogue = jax.checkpoint(epilogue, prevent_cse=False)
    if bias is not None:
        rows = y.ndim - bias.ndim
        bias = rounded(match(bias, y, range(rows, y.ndim)), y.dtype)
        bias = jnp.expand_dims(bias, range(rows))
    return epilogue(y, bias, up)
