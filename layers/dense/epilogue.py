"""The epilogue of a dense layer's product: bias, activation and gate, with derivatives.

    y = activation(z + bias) · up

`up` is the second product of a gated layer; it has all dimensions of z, the bias its last ones. On
CUDA the forward is one pass, and so are all gradients together; on CPUs and elsewhere both are
plain JAX, which XLA fuses into one loop itself. Forward mode and higher orders are plain HLO.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
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
    has_up: bool = False
    has_bias: bool = False
    out_dtype: str = ""  # y's dtype
    with_dbias: bool = False  # a backward also returns the bias's gradient,
    with_value: bool = False  # and y once more


# ---------------------------------------------------------------- definitions, in plain JAX


def _inputs(spec: Epilogue, operands: Any, dtype: jnp.dtype) -> list[Array]:
    """`[z + bias]` or `[z + bias, up]`, in `dtype`."""
    z, *rest = [a.astype(dtype) for a in operands]
    bias = jnp.zeros((), dtype)
    if spec.has_bias:
        bias = jnp.expand_dims(rest[-1], _rows(spec, z.ndim))
    return [z + bias, *rest[: spec.has_up]]


def _value(spec: Epilogue) -> Callable[..., Array]:
    """Returns y of `_inputs`."""
    function = spec.function
    return (lambda x, up: function(x) * up) if spec.has_up else function


def _rows(spec: Epilogue, ndim: int) -> list[int]:
    return [d for d in range(ndim) if d not in spec.axes]


def define_forward(spec: Epilogue, *operands: Array) -> list[Array]:
    """`(z[, up][, bias]) -> (y,)`."""
    dtype = compute_dtype(*(a.dtype for a in operands), spec.out_dtype)
    return [_value(spec)(*_inputs(spec, operands, dtype)).astype(spec.out_dtype)]


def define_backward(spec: Epilogue, dy: Array, *operands: Array) -> list[Array]:
    """`(dy, z[, up][, bias]) -> (dz[, dup][, dbias][, value])`; value is y, in dy's dtype."""
    dtype = compute_dtype(dy.dtype, *(a.dtype for a in operands))
    y, pull = jax.vjp(_value(spec), *_inputs(spec, operands, dtype))
    gradients = pull(dy.astype(dtype))
    results = [d.astype(a.dtype) for d, a in zip(gradients, operands)]
    if spec.with_dbias:
        results.append(jnp.sum(gradients[0], _rows(spec, dy.ndim)))
    if spec.with_value:
        results.append(y.astype(dy.dtype))
    return results


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
        """Blocks along the columns."""
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


_PLACES = {"Y": "Z", "DZ": "Z", "DUP": "UP", "VALUE": "DY"}  # what each result is as large as


def _on_cuda(kernel: str, target: Target, spec: Epilogue, *arrays: Any) -> list[Array]:
    """Launches the "forward" or the "backward", of the definition's operands and results."""
    is_backward = kernel == "backward"
    names = [*["DY"] * is_backward, "Z", *["UP"] * spec.has_up, *["BIAS"] * spec.has_bias]
    operands = dict(zip(names, arrays, strict=True))
    of_bias = ["PARTIAL"] * spec.with_dbias
    gradients = ["DZ", *["DUP"] * spec.has_up, *of_bias, *["VALUE"] * spec.with_value]
    results: dict[str, Any] = dict.fromkeys(gradients if is_backward else ["Y"])
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
            names.index(_PLACES[name]): i
            for i, (name, result) in enumerate(results.items())
            if name not in ("Y", "PARTIAL") and result.dtype == operands[_PLACES[name]].dtype
        },
    )
    named = dict(zip(results, done, strict=True))
    if "PARTIAL" in named:
        named["PARTIAL"] = column_sum(launch, target, named["PARTIAL"])
    return list(named.values())


forward_on_cuda = functools.partial(_on_cuda, "forward")
backward_on_cuda = functools.partial(_on_cuda, "backward")
forward_kernel = Kernel("epilogue_forward", define_forward, {"cuda": forward_on_cuda})
backward_kernel = Kernel("epilogue_backward", define_backward, {"cuda": backward_on_cuda})


# ---------------------------------------------------------------- one device's share


def _flattened(spec: Epilogue, large: Sequence[Array], rest: Sequence[Array]) -> list[Any]:
    """Returns the spec and operands of a kernel: (rows, columns), the columns being `axes`.

    Without a bias arrays stay as they are.
    """
    large, bias = [*large, *rest[: spec.has_up]], rest[spec.has_up :]
    if not spec.axes:
        return [spec, *large]
    last = range(large[0].ndim - len(spec.axes), large[0].ndim)
    moved = [jnp.moveaxis(a, spec.axes, last) for a in large]
    flat = [a.reshape(math.prod(a.shape[: last.start]), -1) for a in moved]
    return [replace(spec, axes=(1,)), *flat, *[b.reshape(-1) for b in bias]]


def _restored(spec: Epilogue, array: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `_flattened`, for an array as large as z."""
    if not spec.axes:
        return array
    others = [n for d, n in enumerate(shape) if d not in spec.axes]
    array = array.reshape(*others, *[shape[d] for d in spec.axes])
    return jnp.moveaxis(array, range(len(others), len(shape)), spec.axes)


def _forward_body(
    spec: Epilogue, split: Split, z: Array, *rest: Array, order: Order
) -> list[Array]:
    del split
    (y,) = forward_kernel(*_flattened(spec, [z], rest), order=order)
    return [_restored(spec, y, z.shape)]


def _backward_body(
    spec: Epilogue, split: Split, dy: Array, z: Array, *rest: Array, order: Order
) -> list[Array]:
    results = backward_kernel(*_flattened(spec, [dy, z], rest), order=order)
    shape = [z.shape[d] for d in spec.axes]
    results = [
        r.reshape(shape) if r.ndim == 1 and spec.axes else _restored(spec, r, z.shape)
        for r in results
    ]
    if spec.with_dbias:  # over exactly the mesh axes that the rows use
        at = 1 + spec.has_up
        results[at] = split.psum(results[at], _rows(spec, len(split.shape)))
    return results


# ---------------------------------------------------------------- sharding


def _operands(spec: Epilogue, ndim: int) -> tuple[tuple[int, ...], ...]:
    z = tuple(range(ndim))
    return (z, *[z] * spec.has_up, *[Loose(spec.axes)] * spec.has_bias)


def _backward_dims(spec: Epilogue, ndim: int) -> Dims:
    z = tuple(range(ndim))
    more = [*[z] * spec.has_up, *[Loose(spec.axes)] * spec.with_dbias, *[z] * spec.with_value]
    return (z, *_operands(spec, ndim)), (z, *more)


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
    """Returns the gradients of `(z[, up][, bias])`, all from one pass."""
    with_dbias = spec.has_bias and wanted[-1]
    results = backward(replace(spec, with_dbias=with_dbias), *cts, *operands, order=order)
    return results + [None] * (len(operands) - len(results))


def _jvp(primals: Any, tangents: Any, *, spec: Epilogue, order: Order) -> Any:
    y = forward(spec, *primals, order=order)
    return y, tangents_of(forward, gradients, spec, primals, tangents, y, order=order)


forward = Op(
    "epilogue",
    define_forward,
    Placement(lambda spec, ndim: (_operands(spec, ndim), (tuple(range(ndim)),)), _forward_body),
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
    spec = Epilogue(
        op=op,
        function=function,
        axes=(),
        has_up=up is not None,
        has_bias=bias is not None,
        out_dtype=jnp.dtype(dtype).name,
    )
    operands = [z] if up is None else _alike(z, up)
    if bias is not None:
        operands[0] = z = vary(z, varying_axes(bias))
        dims = tuple(range(z.ndim - bias.ndim, z.ndim))
        operands.append(rounded(match(bias, z, dims), z.dtype))
        spec = replace(spec, axes=dims)
    return forward(spec, *operands, order=order)[0]


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
