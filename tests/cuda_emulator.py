"""Runs CUDA kernels on the CPU, thread by thread, compiled as C++ by the system's compiler.

`emulator/machine.cuh` takes the place of the one kernel header that talks to the machine. Results
stand between guards and begin as NaN: a kernel that writes elsewhere or leaves something out fails.
Operands end where memory ends: a kernel that reads on ends the process.
"""

import ctypes
import hashlib
import mmap
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np

from normfuse.native import compiler

_FLAGS = ("-std=c++17", "-Og", "-w", "-fPIC", "-fno-exceptions", "-fno-rtti")
_GUARD = 256
_MAIN = """#include "machine.cuh"
#include "{source}"
extern "C" void emulate(const unsigned* sizes, int shared_bytes, void** parameters) {{
  emulator::Launch({kernel}, sizes, shared_bytes, parameters);
}}
"""


class Emulator:
    """Stands in for `normfuse.native.launch.launch`; results are NumPy arrays.

    Args:
      folder: for what is compiled.
      shift: elements by which every array is off a 16-byte boundary.
    """

    def __init__(self, folder: pathlib.Path, shift: int = 0):
        self.folder, self.shift = folder, shift
        self.launches: list[dict] = []
        headers = compiler.include_directory()
        self._flags = [*_FLAGS, f"-I{folder}", "-isystem", headers, "-isystem", f"{headers}/cccl"]
        if not (folder / "machine.cuh").exists():
            kernels = pathlib.Path(compiler.__file__).parent / "kernels"
            for path in kernels.iterdir():
                shutil.copy(path, folder)
            shutil.copy(pathlib.Path(__file__).parent / "emulator" / "machine.cuh", folder)
            self._compile("-x", "c++-header", folder / "machine.cuh")  # slow, so only once

    def launch(
        self,
        source: str | compiler.Source,
        kernel: str,
        operands: Sequence,
        results: Sequence,
        *,
        target,
        grid,
        block,
        macros=None,
        cluster=1,
        shared=0,
        ints=(),
        floats=(),
        doubles=(),
        aliases=None,
    ) -> list[np.ndarray]:
        """Does what `normfuse.native.launch.launch` does, at once."""
        done = {"kernel": kernel, "macros": macros, "grid": _three(grid)}
        self.launches.append(done | {"aliases": dict(aliases or {})})
        run = self._build(source, kernel, macros or {})
        arrays: list = [_Operand(np.asarray(a), self.shift) for a in operands]
        outputs = [_Guarded(_nan(r), self.shift) for r in results]
        in_place = dict(aliases or {})
        for operand, result in in_place.items():
            arrays[operand] = outputs[result] = _Guarded(np.asarray(operands[operand]), self.shift)
        parameters = [np.array([a.address], np.uint64) for a in arrays + outputs]
        for values, dtype in ((ints, np.int64), (floats, np.float32), (doubles, np.float64)):
            parameters += [np.array([value], dtype) for value in values]
        addresses = (ctypes.c_void_p * len(parameters))(*(p.ctypes.data for p in parameters))
        sizes = (ctypes.c_uint * 9)(*_three(grid), *_three(block), *_three(cluster))
        run(sizes, int(shared), addresses)
        for i, (array, given) in enumerate(zip(arrays, operands, strict=True)):
            if i in in_place:
                continue
            assert array.read().tobytes() == np.asarray(given).tobytes(), "an operand was changed"
        return [output.read() for output in outputs]

    def _build(self, source: str | compiler.Source, kernel: str, macros: dict):
        if isinstance(source, compiler.Source):  # written for this call
            name = hashlib.sha256(source.text.encode()).hexdigest()[:16] + source.name
            (self.folder / name).write_text(source.text)
            source = name
        key = hashlib.sha256(repr((source, kernel, sorted(macros.items()))).encode()).hexdigest()
        library = self.folder / f"{key[:16]}.so"
        if not library.exists():
            main = library.with_suffix(".cc")
            main.write_text(_MAIN.format(source=source, kernel=kernel))
            defined = [f"-D{name}={value}" for name, value in macros.items()]
            self._compile("-shared", *defined, main, "-o", library)
        return ctypes.CDLL(str(library)).emulate

    def _compile(self, *arguments) -> None:
        command = ["g++", *self._flags, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]


class _Operand:
    """An array before a page that nobody may read, `shift` elements off a 16-byte boundary."""

    def __init__(self, array: np.ndarray, shift: int):
        self.like = array
        end = -(-(array.nbytes + 16) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.bytes = np.frombuffer(mmap.mmap(-1, end + mmap.PAGESIZE), np.uint8)
        start = self.bytes.ctypes.data
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0) == 0
        begin = end - array.nbytes
        begin -= (begin - shift * array.dtype.itemsize) % 16  # a page begins on such a boundary
        self.inside = self.bytes[begin : begin + array.nbytes]
        self.inside[:] = np.frombuffer(array.tobytes(), np.uint8)
        self.address = start + begin

    def read(self) -> np.ndarray:
        return np.frombuffer(self.inside.tobytes(), self.like.dtype).reshape(self.like.shape)


class _Guarded:
    """An array between guards, `shift` elements off a 16-byte boundary."""

    def __init__(self, array: np.ndarray, shift: int):
        self.like = array
        offset = _GUARD + shift * array.dtype.itemsize
        self.bytes = np.full(array.nbytes + offset + _GUARD + 16, 0xA5, np.uint8)
        self.begin = offset + -self.bytes.ctypes.data % 16
        self.inside[:] = np.frombuffer(array.tobytes(), np.uint8)

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data + self.begin

    @property
    def inside(self) -> np.ndarray:
        return self.bytes[self.begin : self.begin + self.like.nbytes]

    def read(self) -> np.ndarray:
        outside = [self.bytes[: self.begin], self.bytes[self.begin + self.like.nbytes :]]
        assert all(np.all(part == 0xA5) for part in outside), "written out of bounds"
        return np.frombuffer(self.inside.tobytes(), self.like.dtype).reshape(self.like.shape)


def _nan(result) -> np.ndarray:
    return np.frombuffer(
        b"\xff" * (int(np.prod(result.shape)) * result.dtype.itemsize), result.dtype
    ).reshape(result.shape)


def _three(sizes) -> tuple[int, ...]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return sizes + (1,) * (3 - len(sizes))
