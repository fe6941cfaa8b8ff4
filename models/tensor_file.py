"""The safetensors file format: named arrays that are read in place, without loading the file.

A file is the header's length (8 bytes, little-endian), the header (JSON: dtype, shape and byte
range of each array) and the arrays' bytes, row-major. Reading gives memory maps, so that a device's
shard of a large array costs only the bytes it covers; that, and bfloat16 in numpy, is why this is
not the `safetensors` package.

References: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def read(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """Maps every array of a file into memory, read-only.

    Raises:
      ValueError: naming the file and what is wrong with it: truncated, not of this format, or an
        array of a dtype that is not floating.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is not a safetensors file, or is cut off: {size} bytes.")
        try:
            header = dict(json.loads(file.read(length)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error}.") from None
    header.pop("__metadata__", None)
    return {name: _map(path, size, 8 + length, name, entry) for name, entry in header.items()}


def _map(path: Path, size: int, start: int, name: str, entry: Mapping) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(
            f"{path} holds {name} as {entry['dtype']}; only {', '.join(_DTYPES)} can be read."
        )
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
        raise ValueError(f"{path} is cut off or damaged: {name} does not fit into {size} bytes.")
    if begin == end:
        return np.zeros(shape, dtype)  # nothing cannot be mapped
    return np.memmap(path, dtype, "r", start + begin, shape)


def write(path: str | os.PathLike, arrays: Mapping[str, np.ndarray]):
    """Writes arrays to a file, which appears complete or not at all.

    Raises:
      ValueError: for an array that is not floating.
    """
    path, offset = Path(path), 0
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}  # without it, readers refuse
    for name, array in arrays.items():
        if array.dtype not in _CODES:
            raise ValueError(f"{name} is {array.dtype}; only floating arrays can be written.")
        end = offset + array.nbytes
        code = _CODES[array.dtype]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # arrays start aligned
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            np.ascontiguousarray(array).tofile(file)
    os.replace(unfinished, path)
