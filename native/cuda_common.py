"""What the modules that launch CUDA kernels share: the names of types, and sums over blocks."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .device import Target
from .fallback import Unsupported

TYPES = {
    "float64": "double",
    "float32": "float",
    "bfloat16": "__nv_bfloat16",
    "float16": "__half",
}


def compute_dtype(dtypes: Iterable[jnp.dtype]) -> jnp.dtype:
    """float64 if one operand or result is float64, else float32.

    Raises:
      Unsupported: for a dtype that no kernel takes.
    """
    dtypes = list(dtypes)
    for dtype in dtypes:
        if dtype.name not in TYPES:
            raise Unsupported(f"no CUDA kernel takes {dtype.name} (only {', '.join(TYPES)})")
    return jnp.dtype(jnp.float64 if jnp.float64 in dtypes else jnp.float32)


def type_macros(arrays: dict[str, Any]) -> dict[str, str]:
    """The macro `<NAME>_TYPE` of each array."""
    return {f"{name}_TYPE": TYPES[array.dtype.name] for name, array in arrays.items()}


def column_sum(launch: Callable, target: Target, partial: jax.Array) -> jax.Array:
    """The sums over the blocks' rows of `partial`, in order, by the caller's `launch`."""
    count, columns = partial.shape
    (sums,) = launch(
        "column_sum.cu",
        "column_sum",
        [partial],
        [jax.ShapeDtypeStruct((columns,), partial.dtype)],
        target=target,
        macros={"COMPUTE_TYPE": TYPES[partial.dtype.name]},
        grid=-(-columns // 32),
        block=1024,
        ints=(count, columns),
    )
    return sums
