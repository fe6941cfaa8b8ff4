"""Device times of the FP8 quantizing kernels: other layouts, and XLA's best for the same.

    python benchmarks/quantization.py                    # both parts, about a minute
    python benchmarks/quantization.py --part layouts     # through the CUDA driver, without XLA
    python benchmarks/quantization.py --part xla         # as a jitted program, CUPTI's times

A fraction is the time in which the driver's own copy would move the same bytes over the time taken.
`cast` reads a matrix and writes codes in both layouts; `amax` reads it; `quantize` does both, so
reads it twice, and its bytes are counted twice. Every line of the tables is a JSON line too, for
other programs to read (`--json FILE`).
"""

import argparse
import concurrent.futures
import ctypes
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import time
import unittest.mock

ROWS, WIDTHS = (16384, 2048), (2048, 4096, 8192, 14336)
KERNELS = ((2048, 8192), (4096, 14336))  # parameters, float32
REGISTERS = 65536  # of a multiprocessor


def layouts():
    """Candidates for quantize_cast.cu; registers for each thread say how many blocks fit."""
    from normfuse.layers.quantization.kernels import CastLayout

    shapes = [(16, 8), (8, 16), (8, 8), (32, 8), (16, 16), (8, 32)]
    for (width, height), batch, registers in itertools.product(shapes, (4, 8, 16), (64, 80, 128)):
        if (batch == 16) != (registers == 128) and batch != 8:
            continue
        threads = width * height
        blocks = REGISTERS // (threads * registers)
        yield CastLayout(width, height, batch, max(1, blocks))


@dataclasses.dataclass(frozen=True)
class Work:
    """One matrix to be cast."""

    rows: int
    columns: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def launches(self, target, call: str, **chosen) -> list[dict]:
        """What `kernels.<call>` launches for this matrix, with the layouts given."""
        import jax
        import jax.numpy as jnp

        from normfuse.layers.quantization import kernels

        found = []

        def launch(source, kernel, operands, results, **sizes):
            found.append(
                sizes
                | {"source": source, "kernel": kernel, "operands": operands, "results": results}
            )
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        x = jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))
        flags = {"dtype": "float8_e4m3fn", "has_q": True, "has_qt": True}
        flags, operands = ({}, [x]) if call == "cuda_maxima" else (flags, [x])
        if call == "cuda_cast":
            operands.append(jax.ShapeDtypeStruct((1,), jnp.float32))
        with unittest.mock.patch.object(kernels, "launch", launch):
            patches = [
                unittest.mock.patch.object(kernels, name, lambda *_, _l=layout, **__: _l)
                for name, layout in chosen.items()
            ]
            for patch in patches:
                patch.start()
            try:
                run = getattr(kernels, call)
                jax.eval_shape(lambda *arrays: run(target, *arrays, **flags), *operands)
            finally:
                for patch in patches:
                    patch.stop()
        return found


def compile_one(job: tuple) -> tuple[tuple, bytes | str]:
    """(key, image), or what the compiler says."""
    from normfuse.native import compiler

    source, macros, arch = job
    try:
        return job, compiler.compile_image(compiler.kernel_source(source), dict(macros), arch).data
    except Exception as error:
        return job, str(error)[-300:]


def job_of(launch: dict, target) -> tuple:
    return launch["source"], tuple(sorted(launch["macros"].items())), target.arch


class Device:
    """Arrays on the device, and the times of launches on them."""

    def __init__(self, gpu, work: Work):
        import numpy as np
        from device_time import sets_for

        self.gpu, self.functions = gpu, {}
        bits = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
        if work.itemsize == 2:
            bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
        self.sets = []
        for _ in range(min(16, sets_for(work.elements * (work.itemsize + 2)))):
            x = gpu.array(work.elements * work.itemsize)
            size = min(bits.nbytes, work.elements * work.itemsize)
            for offset in range(0, work.elements * work.itemsize, size):
                count = min(size, work.elements * work.itemsize - offset)
                gpu("cuMemcpyHtoD", x + offset, bits.ctypes.data, count)
            self.sets.append([x, gpu.array(work.elements), gpu.array(work.elements)])
        one = np.array([4.0], np.float32)
        self.maxima = gpu.array(1 << 20, one)
        self.scale = gpu.array(256)

    def free(self) -> None:
        for pointer in [*itertools.chain(*self.sets), self.maxima, self.scale]:
            self.gpu("cuMemFree", pointer)

    def microseconds(self, launches: list[dict], images: list[bytes]) -> float:
        from cuda_launches import launch_config

        calls, libraries = [], []
        for launch, image in zip(launches, images, strict=True):
            library, function = self.gpu.function(image, launch["kernel"], launch.get("shared", 0))
            libraries.append(library)
            config = launch_config(
                self.gpu.cu,
                launch["grid"],
                launch["block"],
                1,
                launch.get("shared", 0),
                self.gpu.stream,
            )
            calls.append((config, function, launch))

        def run(turn: int) -> None:
            x, q, qt = self.sets[turn % len(self.sets)]
            for config, function, launch in calls:
                amax = launch["kernel"] == "quantize_amax"
                pointers = (x, self.maxima) if amax else (x, self.maxima, q, qt, self.scale)
                ints = launch["ints"]
                types = [ctypes.c_void_p] * len(pointers) + [ctypes.c_longlong] * len(ints)
                parameters = (*pointers, *ints), tuple(types)
                self.gpu("cuLaunchKernelEx", config, function, parameters, 0)

        us = self.gpu.microseconds(run, max(10, len(self.sets)))
        for library in libraries:
            self.gpu("cuLibraryUnload", library)
        return us


def sweep(seconds: float) -> None:
    """Times the layouts of both kernels, for as long as there is time."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX only shapes the calls: the GPU's memory is ours
    from cuda_launches import Gpu, copy_rate

    from normfuse.layers.quantization.kernels import AmaxLayout, cast_layout

    began = time.perf_counter()
    gpu = Gpu()
    target, rate = gpu.target(), copy_rate(gpu)
    emit(part="layouts", device=target.name, copy_tb_s=round(rate / 1e6, 3))
    works = [Work(r, w, "bfloat16") for r in ROWS for w in WIDTHS]
    works += [Work(r, w, "float32") for r, w in KERNELS]
    casts, maxima = list(layouts()), [AmaxLayout(b, u) for b in (2, 4) for u in (2, 4, 8)]
    jobs = set()
    for work in (works[0], works[-1]):  # what is compiled does not depend on the shape
        for layout in casts:
            jobs |= {
                job_of(n, target) for n in work.launches(target, "cuda_cast", cast_layout=layout)
            }
        for layout in maxima:
            for one in work.launches(target, "cuda_maxima", amax_layout=layout):
                jobs.add(job_of(one, target))
    images: dict = {}

    def make(jobs) -> None:
        jobs = [job for job in jobs if job not in images]
        with concurrent.futures.ProcessPoolExecutor(
            os.cpu_count(), multiprocessing.get_context("spawn")
        ) as pool:
            images.update(pool.map(compile_one, jobs))

    make(jobs)
    emit(part="layouts", compiled=len(images), seconds=round(time.perf_counter() - began, 1))
    for work in works:
        if time.perf_counter() - began > seconds:
            emit(part="layouts", out_of_time=True)
            break
        try:
            device = Device(gpu, work)
        except Exception as error:
            emit(part="layouts", work=dataclasses.asdict(work), error=repr(error))
            continue
        floor = work.elements * (work.itemsize + 2) / rate

        def timed(launches, device=device) -> float | None:
            missing = [job_of(n, target) for n in launches if job_of(n, target) not in images]
            if missing:
                images.update(map(compile_one, missing))
            found = [images[job_of(n, target)] for n in launches]
            if any(isinstance(image, str) for image in found):
                return None
            try:
                return device.microseconds(launches, found)
            except Exception as error:
                emit(part="layouts", error=repr(error)[:200])
                return None

        results = []
        ours = cast_layout(work.rows, work.columns, work.itemsize, target, after_amax=False)
        us = timed(work.launches(target, "cuda_cast"))
        line = {"part": "layouts", "rows": work.rows, "columns": work.columns, "x": work.dtype}
        if us:
            emit(
                **line,
                kernel="cast",
                layout="package",
                us=round(us, 1),
                of_copy=round(floor / us, 3),
            )
        for layout in casts:
            us = timed(work.launches(target, "cuda_cast", cast_layout=layout))
            if us:
                results.append((us, layout))
        results.sort(key=lambda one: one[0])
        if results:
            best = results[0][1]
            for group in (1, 2, 4, 16, 32):
                layout = dataclasses.replace(best, group=group)
                us = timed(work.launches(target, "cuda_cast", cast_layout=layout))
                if us:
                    results.append((us, layout))
            results.sort(key=lambda one: one[0])
        for us, layout in results[:5]:
            short = f"{layout.width}x{layout.height} batch {layout.batch}"
            short += f" blocks {layout.min_blocks} group {layout.group}"
            emit(**line, kernel="cast", layout=short, us=round(us, 1), of_copy=round(floor / us, 3))
        read = work.elements * work.itemsize / rate
        best = []
        for layout in maxima:
            us = timed(work.launches(target, "cuda_maxima", amax_layout=layout))
            if us:
                best.append((us, layout))
        for us, layout in sorted(best, key=lambda one: one[0])[:2]:
            short = f"{layout.blocks_each} blocks each, unroll {layout.unroll}"
            emit(**line, kernel="amax", layout=short, us=round(us, 1), of_copy=round(read / us, 3))
        layouts_ = {"package": ours}
        if results:
            layouts_["best"] = results[0][1]
        for name, layout in layouts_.items():
            for backwards in (True, False):
                chosen = dataclasses.replace(layout, backwards=backwards)
                us = timed(work.launches(target, "cuda_quantize", cast_layout=chosen))
                if us:
                    emit(
                        **line,
                        kernel="quantize",
                        layout=f"{name}, {'back' if backwards else 'for'}wards",
                        us=round(us, 1),
                        of_copy=round((floor + read) / us, 3),
                    )
        device.free()


def check() -> dict[str, int]:
    """How many bytes of the kernels' results differ from those of the plain definition: none."""
    import jax
    import jax.numpy as jnp

    from normfuse.layers.quantization import quantize
    from normfuse.layers.quantization.definition import define_quantize

    found = {}
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for x in ("float32", "bfloat16", "float16"):
            for shape in ((272, 4112), (131, 77)):
                array = jax.random.normal(jax.random.key(0), shape, jnp.dtype(x))
                array = array.at[3, 5].set(jnp.nan).at[7, 6].set(jnp.inf).at[:, 2].mul(1e3)
                array = array.at[9, 9].set(-0.0).at[8].mul(1e-5)
                ours = quantize(array, dtype, strict=True)
                define = jax.jit(lambda a, d=dtype: define_quantize(a, dtype=d, has_q=1, has_qt=1))
                bits = lambda a: jax.lax.bitcast_convert_type(a.reshape(-1), jnp.uint8)
                pairs = zip(ours, define(array), strict=True)
                differ = sum(int(jnp.sum(bits(a) != bits(b))) for a, b in pairs)
                found[f"{x} {shape} {dtype}"] = differ
    return found


def beside_xla(seconds: float) -> None:
    """Ours and what XLA makes of the same, as jitted programs."""
    import jax
    import jax.numpy as jnp
    from device_time import Copies, kernels, sets_for

    from normfuse.layers.quantization import quantize

    began, rate = time.perf_counter(), Copies().rate
    e4m3, f32 = jnp.float8_e4m3fn, jnp.float32
    device = jax.devices()[0].device_kind
    emit(part="xla", device=device, jax=jax.__version__, copy_tb_s=round(rate / 1e6, 3))

    def plain(x, multiplier, barrier):
        q = (x.astype(f32) * multiplier).clip(-448, 448).astype(e4m3)
        if barrier:  # a transpose of codes, not of what they are made of
            q = jax.lax.optimization_barrier(q)
        return q, q.T

    def with_amax(x, barrier):
        largest = jnp.max(jnp.abs(x)).astype(f32)
        multiplier = jnp.exp2(jnp.floor(jnp.log2(448 / largest)))
        return *plain(x, multiplier, barrier), 1 / multiplier

    emit(part="xla", check=check())
    bound = jnp.float32(8)
    versions = {
        "cast": {
            "normfuse": lambda x: quantize(x, bound=bound, strict=True),
            "XLA": lambda x: plain(x, jnp.float32(32), False),
            "XLA, codes transposed": lambda x: plain(x, jnp.float32(32), True),
        },
        "quantize": {
            "normfuse": lambda x: quantize(x, strict=True),
            "XLA": lambda x: with_amax(x, False),
            "XLA, codes transposed": lambda x: with_amax(x, True),
        },
    }
    works = [Work(r, w, "bfloat16") for r in ROWS for w in WIDTHS]
    works += [Work(r, w, "float32") for r, w in KERNELS]
    for work in works:
        keys = jax.random.split(jax.random.key(0), min(4, sets_for(4 * work.elements)))
        shape = work.rows, work.columns
        xs = [(jax.random.normal(key, shape, jnp.dtype(work.dtype)),) for key in keys]
        for kernel, ways in versions.items():
            passes = work.itemsize + 2 + work.itemsize * (kernel == "quantize")
            floor = work.elements * passes / rate
            for name, run in ways.items():
                if time.perf_counter() - began > seconds:
                    emit(part="xla", out_of_time=True)
                    return
                try:
                    runs = kernels(run, xs, 7)[2:]
                    us = statistics.median(sum(t for _, t in run) for run in runs)
                except Exception as error:
                    emit(part="xla", kernel=kernel, version=name, error=repr(error)[:300])
                    continue
                emit(
                    part="xla",
                    rows=work.rows,
                    columns=work.columns,
                    x=work.dtype,
                    kernel=kernel,
                    version=name,
                    us=round(us, 1),
                    of_copy=round(floor / us, 3),
                    kernels={n[:40]: round(t, 1) for n, t in runs[-1]},
                )


def emit(**line) -> None:
    print(json.dumps(line), flush=True)


def table(lines: list[dict]) -> None:
    for line in lines:
        if "us" in line:
            what = line.get("version") or line.get("layout")
            print(
                f"{line['rows']:6} x {line['columns']:5} {line['x']:9} {line['kernel']:9}"
                f"{line['us']:9.1f} us {line['of_copy']:6.3f} of copy  {what}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("layouts", "xla"), help="only this part")
    parser.add_argument("--seconds", type=float, default=28, help="for each part")
    parser.add_argument("--json", type=pathlib.Path, help="also write all lines there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        sys.path.insert(0, str(pathlib.Path(__file__).parent))
        return {"layouts": sweep, "xla": beside_xla}[arguments.part](arguments.seconds)
    lines = []
    for part in [arguments.part] if arguments.part else ["layouts", "xla"]:
        # In a process of its own: JAX takes the GPU's memory, and a failure ends one part only.
        command = [sys.executable, __file__, "--inside", "--part", part]
        command += ["--seconds", str(arguments.seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for text in process.stdout or ():
                print(text, end="", flush=True)
                if text.startswith("{"):
                    lines.append(json.loads(text))
        if process.returncode:
            print(f"{part}: ended with {process.returncode}")
    table(lines)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
