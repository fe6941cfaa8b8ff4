"""The norms' kernels, on (rows, n) arrays, or (examples, tokens, n) with scales of examples.

`forward` and `backward` do the whole work where a device holds whole rows. Where rows are split
over devices, `row_statistics` then `apply`, and `row_dots` then `backward_apply`, do it around one
exchange.
"""

import math
from typing import Any

import jax
import numpy as np
from jax import Array

from ...native.kernel import Kernel, result_types
from ...native.launch import call_host
from . import cuda, spec
from .spec import PARAMETERS, RESULTS, STATISTICS, Norm, operands_of

_WEIGHT = ("centred", "scale_offset", "has_scale")
_GRADIENT = (*_WEIGHT, "has_residual", "with_dscale", "with_dbias")
_KNOWN = ("has_residual", "with_mean", "with_rstd")
_ATTRIBUTES = {  # the C++ handlers take these
    "forward": ("eps", *_WEIGHT, "cast_before", "has_bias", *_KNOWN),
    "row_statistics": ("centred",),
    "apply": (*_WEIGHT, "cast_before", "has_bias"),
    "backward": _GRADIENT,
    "row_dots": _WEIGHT,
    "backward_apply": ("count", *_GRADIENT),
}


def _kernel(name: str, **options: Any) -> Kernel:
    definition = getattr(spec, f"define_{name}")

    def host(norm: Norm, *operands: Array | None) -> list[Any]:
        arrays = operands_of(name, operands)
        shapes = tuple([None if a is None else (a.shape, a.dtype) for a in operands])
        types = dict(zip(RESULTS[name], result_types(definition, norm, shapes), strict=True))
        flags = {f"has_{word}": word.upper() in arrays for word in ("scale", "bias")}
        flags["has_residual"] = not {"RESIDUAL", "DH"}.isdisjoint(arrays)
        values: Any = {k: flags[k] if k in flags else getattr(norm, k) for k in _ATTRIBUTES[name]}
        values = {k: np.float64(v) if isinstance(v, float) else v for k, v in values.items()}
        types = {k: t for k, t in types.items() if t is not None}
        structs = [jax.ShapeDtypeStruct(_host_shape(norm, k, t), t.dtype) for k, t in types.items()]
        flat = [_to_host(norm, *pair) for pair in arrays.items()]
        results = call_host(f"normfuse_norm_{name}", flat, structs, **values)
        restored = {k: _from_host(norm, k, a, t) for (k, t), a in zip(types.items(), results)}
        return [restored.get(k) for k in RESULTS[name]]

    def pallas(platform: str, norm: Norm, *operands: Array | None) -> list[Any]:
        from . import pallas  # imported when it is first used

        return pallas.run(name, platform, norm, *operands)

    bodies: Any = {"cpu": host, "cuda": getattr(cuda, name)}
    if name in ("forward", "backward"):  # of whole rows
        bodies["pallas"] = pallas
    return Kernel(f"norm_{name}", definition, bodies, **options)


# C++ takes (rows, n, 1), (rows, 1) and parameters as they are; row i has the scale of example
# i % count.


def _host_shape(norm: Norm, name: str, array: Any) -> tuple[int, ...]:
    if name in PARAMETERS:
        return array.shape
    rows = math.prod(array.shape[: 1 + bool(norm.heads)])
    return (rows, 1) if name in STATISTICS else (rows, array.shape[-1], 1)


def _to_host(norm: Norm, name: str, array: Array) -> Array:
    moves = norm.heads and name not in PARAMETERS
    swapped = array.swapaxes(0, 1) if moves else array
    return swapped.reshape(_host_shape(norm, name, array))


def _from_host(norm: Norm, name: str, array: Array, type_: Any) -> Array:
    if name in PARAMETERS or not norm.heads:
        return array.reshape(type_.shape)
    examples, tokens, *n = type_.shape
    return array.reshape(tokens, examples, *n).swapaxes(0, 1)


forward_kernel = _kernel("forward", plain_on_cuda=cuda.is_plain_faster)
row_statistics_kernel = _kernel("row_statistics")
apply_kernel = _kernel("apply")
backward_kernel = _kernel("backward")
row_dots_kernel = _kernel("row_dots")
backward_apply_kernel = _kernel("backward_apply")
