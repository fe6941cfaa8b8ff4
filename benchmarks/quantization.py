"""Device times of the FP8 quantizing kernels: other layouts, and XLA's best for the same.

    python benchmarks/quantization.py                    # the first two parts, about a minute
    python benchmarks/quantization.py --part layouts     # through the CUDA driver, without XLA
    python benchmarks/quantization.py --part xla         # as a jitted program, CUPTI's times
    python benchmarks/quantization.py --part layers      # layers, beside Flax's and XLA's FP8
    python benchmarks/quantization.py --part layers --rows mlp blocks --seconds 300
    python benchmarks/quantization.py --part layers --size tiny    # to try it on a CPU

A fraction is the time in which the driver's own copy would move the same bytes over the time taken.
`cast` reads a matrix and writes codes in both layouts; `amax` reads it; `quantize` does both, so
reads it twice, and its bytes are counted twice. `norm` reads rows and writes codes of their
RMSNorm; `add norm` adds a residual before, and writes the sum too. Every line of the tables is a
JSON line too, for other programs to read (`--json FILE`).

`layers` has a row for each layer and size (`fp8_rows.py`): SwiGLU and gelu MLPs and a dense layer
behind a norm, a foreign model's Linears after `swap`, and eight layers of the `8b` preset. All
programs are compiled first, beside one another and without Triton's products; then the versions of
one row after another take turns, until `--seconds` are over. What was not measured is said, and
why: a version without the FP8 products or the kernels of ours that it is named for is not.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
import unittest.mock

from parts import emit, run_parts

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

ROWS, WIDTHS = (16384, 2048), (2048, 4096, 8192, 14336)
KERNELS = ((2048, 8192), (4096, 14336))  # parameters, float32
MAIN = (16384 * 4096, 16384 * 14336, 2048 * 14336)
REGISTERS = 65536  # registers of a multiprocessor


def layouts() -> list:
    """Candidates for fp8_tile.cuh; registers for each thread say how many blocks fit."""
    from normfuse.layers.quantization.quantize import CastLayout

    found = []
    registers = {2: (48, 64), 4: (64, 80), 8: (80, 128), 16: (128,)}
    for (width, height), batch in itertools.product([(16, 8), (8, 16), (32, 8)], registers):
        for each in registers[batch]:
            blocks = REGISTERS // (width * height * each)
            found.append(CastLayout(width, height, batch, max(1, blocks)))
    return found


def gated_layouts() -> list:
    """Candidates for the kernels that read two or three arrays."""
    from normfuse.layers.quantization.quantize import CastLayout

    found = []
    for (width, height), batch in itertools.product([(16, 8), (8, 16), (8, 8), (32, 8)], (2, 4, 8)):
        for registers in (72, 80, 96, 128):
            blocks = REGISTERS // (width * height * registers)
            found.append(CastLayout(width, height, batch, max(1, blocks)))
    return found


def norm_layouts(columns: int) -> list:
    """Candidates for the norm, whose blocks side by side have whole rows: at most eight."""
    from normfuse.layers.quantization import norm
    from normfuse.layers.quantization.quantize import CastLayout
    from normfuse.native.launch import named_target

    found = []
    for width, height, batch in itertools.product(
        (32, 64, 96, 128, 192, 224, 256, 448), (1, 2, 4, 8), (2, 4)
    ):
        blocks, threads = -(-columns // (8 * width)), width * height
        if blocks in (1, 2, 4, 8) and 64 <= threads <= 512:
            for registers in (64, 72, 80, 128):
                layout = CastLayout(width, height, batch, group=1)
                room = named_target("sm_90").blocks_with(norm.shared_bytes(layout, blocks, 2))
                fit = min(REGISTERS // registers // threads, room)
                found.append(dataclasses.replace(layout, min_blocks=max(1, fit)))
    return list(dict.fromkeys(found))


@dataclasses.dataclass(frozen=True)
class Work:
    """One matrix to be cast, or the two of a gated activation."""

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
        """What a function of `quantization.quantize`, or `gated`, launches, with layouts given."""
        import jax
        import jax.numpy as jnp

        from normfuse.layers.dense.epilogue import SCALARS
        from normfuse.layers.norm.spec import Norm
        from normfuse.layers.quantization import gated, norm, quantize
        from normfuse.layers.quantization.norm import NormCodes

        found = []

        def launch(source, kernel, operands, results, **sizes):
            sizes |= {"source": source, "kernel": kernel}
            found.append(sizes | {"operands": list(operands), "results": list(results)})
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        small = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        x, q = (
            jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(of))
            for of in (self.dtype, "uint8")
        )
        flags = {"dtype": "float8_e4m3fn", "has_q": True, "has_qt": True}
        silu = {"function": SCALARS["silu"]}
        row, base = small(self.columns), Norm(eps=1e-6, has_scale=True, with_rstd=True)

        def normalised(target, *arrays, has_residual):
            spec = NormCodes(dataclasses.replace(base, has_residual=has_residual))
            return norm.cuda_codes(target, spec, *arrays)

        run, operands, flags = {
            "norm": (normalised, [x, row, small(1)], {"has_residual": False}),
            "add norm": (normalised, [x, x, row, small(1)], {"has_residual": True}),
            "amax": (quantize.cuda_maxima, [x], {}),
            "cast": (quantize.cuda_cast, [x, small(1)], flags),
            "quantize": (quantize.cuda_quantize, [x], flags),
            "gated amax": (gated.cuda_amax, [x, x], silu),
            "gated": (gated.cuda_forward, [x, x, small(3)], silu),
            "gated gradient": (gated.cuda_gradient, [x, q, q, small(2), small(3)], silu),
        }[call]
        with contextlib.ExitStack() as stack:
            replace = lambda *what: stack.enter_context(unittest.mock.patch.object(*what))
            replace(quantize, "launch", launch)
            replace(gated, "launch", launch)
            replace(norm, "launch", launch)
            for name, layout in chosen.items():
                modules = {"layout": norm if call.endswith("norm") else gated}
                module = modules.get(name, quantize)
                replace(module, name, lambda *_, _layout=layout, **__: _layout)
            jax.eval_shape(lambda *arrays: run(target, *arrays, **flags), *operands)
        return found

    def bytes(self, call: str) -> int:
        """That a kernel must move: arrays as wide as x, and codes."""
        of = {"amax": (1, 0), "cast": (1, 2), "quantize": (2, 2), "gated amax": (2, 0)}
        of |= {"norm": (1, 2), "add norm": (3, 2)}  # the sum is as large as x
        wide, codes = (of | {"gated": (2, 3), "gated gradient": (1, 7)})[call]
        return self.elements * (wide * self.itemsize + codes)


def compile_one(job: tuple) -> tuple[tuple, bytes | str]:
    """(job, image), or (job, the compiler's message)."""
    from normfuse.native import compiler

    source, macros, arch = job
    source = compiler.kernel_source(source) if isinstance(source, str) else source
    try:
        return job, compiler.compile_image(source, dict(macros), arch).data
    except Exception as error:
        return job, str(error)[-300:]


def job_of(launch: dict, target) -> tuple:
    return launch["source"], tuple(sorted(launch["macros"].items())), target.arch


class Device:
    """Arrays on the device, and the times of launches on them."""

    def __init__(self, gpu, work: Work):
        import numpy as np
        from device_time import sets_for

        self.gpu = gpu
        self.count = min(12, sets_for(work.elements * (work.itemsize + 2)))
        bits = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
        if work.itemsize == 2:
            bits = (bits.view(np.uint32) >> 16).astype(np.uint16)
        # Codes of about a quarter: with the scale below, 4, no gradient exceeds its bound.
        codes = np.random.default_rng(0).integers(0x10, 0x2C, 1 << 21, dtype=np.uint8)
        self.fill, self.large = {work.itemsize: bits, 1: codes}, {}
        self.small = gpu.array(1 << 16, np.full(1 << 14, 4, np.float32))  # maxima, scales, bounds
        self.sink = gpu.array(1 << 16)  # small results

    def free(self) -> None:
        for pointer in [*self.large.values(), self.small, self.sink]:
            self.gpu("cuMemFree", pointer)

    def pointer(self, turn: int, index: int, array, is_result: bool) -> int:
        size = array.size * array.dtype.itemsize
        if size <= 1 << 16:
            return self.sink if is_result else self.small
        key = turn, index, is_result
        if key not in self.large:
            self.large[key] = to = self.gpu.array(size)
            fill = self.fill.get(array.dtype.itemsize, self.fill[1])
            for offset in range(0, 0 if is_result else size, fill.nbytes):
                count = min(fill.nbytes, size - offset)
                self.gpu("cuMemcpyHtoD", to + offset, fill.ctypes.data, count)
        return self.large[key]

    def microseconds(self, launches: list[dict], images: list[bytes]) -> float:
        from cuda_launches import launch_config

        calls, libraries = [], []
        for launch, image in zip(launches, images, strict=True):
            shared = launch.get("shared", 0)
            library, function = self.gpu.function(image, launch["kernel"], shared)
            libraries.append(library)
            grid, block, stream = launch["grid"], launch["block"], self.gpu.stream
            cluster = launch.get("cluster", 1)
            config = launch_config(self.gpu.cu, grid, block, cluster, shared, stream)
            turns = [self._parameters(launch, turn) for turn in range(self.count)]
            calls.append((config, function, turns))

        def run(turn: int) -> None:
            for config, function, turns in calls:
                self.gpu("cuLaunchKernelEx", config, function, turns[turn % self.count], 0)

        us = self.gpu.microseconds(run, max(10, self.count))
        for library in libraries:
            self.gpu("cuLibraryUnload", library)
        return us

    def _parameters(self, launch: dict, turn: int) -> tuple[tuple, tuple]:
        pointers = [self.pointer(turn, i, a, False) for i, a in enumerate(launch["operands"])]
        pointers += [self.pointer(turn, i, r, True) for i, r in enumerate(launch["results"])]
        ints = [int(n) for n in launch["ints"]]
        floats = [float(n) for n in launch.get("floats", ())]
        types = [ctypes.c_void_p] * len(pointers) + [ctypes.c_longlong] * len(ints)
        return (*pointers, *ints, *floats), (*types, *[ctypes.c_float] * len(floats))


def short(layout) -> str:
    if hasattr(layout, "unroll"):
        return f"{layout.blocks_each} blocks each, unroll {layout.unroll}"
    text = f"{layout.width}x{layout.height} batch {layout.batch} blocks {layout.min_blocks}"
    return f"{text} group {layout.group}"


def sweep(seconds: float, only: list[str], widths: list[int], chosen: bool = False) -> None:
    """Times the layouts of all kernels, or of some, for as long as there is time.

    With `chosen` those only that the package takes.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # JAX only shapes the calls: the GPU's memory is ours
    from cuda_launches import Gpu, copy_rate

    from normfuse.layers.quantization.quantize import AmaxLayout

    began = time.perf_counter()
    gpu = Gpu()
    target, rate = gpu.target(), copy_rate(gpu)
    emit(part="layouts", device=target.name, copy_tb_s=round(rate / 1e6, 3))
    works = [Work(r, w, "bfloat16") for r in ROWS for w in WIDTHS]
    works += [Work(r, w, "float32") for r, w in KERNELS]
    works = [work for work in works if work.columns in (widths or WIDTHS)]
    works.sort(key=lambda work: work.rows * work.columns not in MAIN)  # the main ones first
    casts = {"cast_layout": layouts()}
    maxima = {"amax_layout": [AmaxLayout(b, u) for b in (2, 4) for u in (2, 4, 8)]}
    gates = {"layout": gated_layouts()}
    searched = {
        "cast": casts,
        "amax": maxima,
        "gated": gates,
        "gated gradient": gates,
    }
    searched = {} if chosen else searched
    of_norm = lambda work: [] if chosen else norm_layouts(work.columns)
    wanted = lambda call: not only or call in only
    images: dict = {}
    jobs = set()
    for work, (call, options) in itertools.product((works[0], works[-1]), searched.items()):
        if work.itemsize == 4 and call.startswith("gated") or not wanted(call):
            continue
        for name, candidates in options.items():  # these programs do not depend on the shape
            for layout in candidates:
                jobs |= {job_of(n, target) for n in work.launches(target, call, **{name: layout})}
    for work, call in itertools.product(works, filter(wanted, ("norm", "add norm"))):
        for layout in of_norm(work) if work.itemsize == 2 else ():  # these do
            jobs |= {job_of(n, target) for n in work.launches(target, call, layout=layout)}
    with concurrent.futures.ProcessPoolExecutor(
        os.cpu_count(), multiprocessing.get_context("spawn")
    ) as pool:
        images.update(pool.map(compile_one, jobs))
    emit(part="layouts", compiled=len(images), seconds=round(time.perf_counter() - began, 1))

    def timed(device, work, call, **chosen) -> float | None:
        try:
            launches = work.launches(target, call, **chosen)
            jobs = [job_of(launch, target) for launch in launches]
            images.update(compile_one(job) for job in jobs if job not in images)
            found = [images[job] for job in jobs]
            failed = [image for image in found if isinstance(image, str)]
            if failed:
                raise RuntimeError(failed[0])
            return device.microseconds(launches, found)
        except Exception as error:
            emit(part="layouts", call=call, error=repr(error)[:300])
            return None

    for work in works:
        line = {"part": "layouts", "rows": work.rows, "columns": work.columns, "x": work.dtype}
        try:
            device = Device(gpu, work)
        except Exception as error:
            emit(**line, error=repr(error)[:300])
            continue

        def say(call, layout, us, work=work, line=line) -> None:
            of_copy = round(work.bytes(call) / rate / us, 3)
            emit(**line, kernel=call, layout=layout, us=round(us, 1), of_copy=of_copy)

        calls = ["norm", "add norm", "cast", "amax", "quantize"]
        calls += ["gated amax", "gated", "gated gradient"]
        best_cast = None
        for call in filter(wanted, calls):
            if time.perf_counter() - began > seconds:
                emit(part="layouts", out_of_time=True)
                return
            if call.startswith("gated") and (work.itemsize == 4 or work.columns < 8192):
                continue
            if call.endswith("norm") and work.itemsize == 4:
                continue
            if us := timed(device, work, call):
                say(call, "package's choice", us)
            if call == "quantize" and best_cast is not None:
                if us := timed(device, work, call, cast_layout=best_cast):
                    say(call, short(best_cast), us)
            results = []
            options = searched.get(call, {})
            if call.endswith("norm"):
                options = {"layout": of_norm(work)}
            for name, candidates in options.items():
                for layout in candidates:
                    if us := timed(device, work, call, **{name: layout}):
                        results.append((us, layout))
                results.sort(key=lambda one: one[0])
                if results and hasattr(results[0][1], "group") and not call.endswith("norm"):
                    for group in (1, 2, 4, 16, 32):
                        layout = dataclasses.replace(results[0][1], group=group)
                        if us := timed(device, work, call, **{name: layout}):
                            results.append((us, layout))
                    results.sort(key=lambda one: one[0])
            for us, layout in results[:4]:
                say(call, short(layout), us)
            if call == "cast" and results:
                best_cast = results[0][1]
        device.free()


def check() -> dict[str, int]:
    """How many bytes of the kernels' results differ from those of the plain definition: none."""
    import jax
    import jax.numpy as jnp
    from fp8_layers import quantize

    from normfuse.layers.quantization.quantize import define_quantize
    from normfuse.native.implementation import NATIVE

    found = {}
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for x in ("float32", "bfloat16", "float16"):
            for shape in ((272, 4112), (131, 77)):
                array = jax.random.normal(jax.random.key(0), shape, jnp.dtype(x))
                array = array.at[3, 5].set(jnp.nan).at[7, 6].set(jnp.inf).at[:, 2].mul(1e3)
                array = array.at[9, 9].set(-0.0).at[8].mul(1e-5)
                ours = quantize(array, dtype, order=NATIVE)
                define = jax.jit(lambda a, d=dtype: define_quantize(a, dtype=d, has_q=1, has_qt=1))
                bits = lambda a: jax.lax.bitcast_convert_type(a.reshape(-1), jnp.uint8)
                pairs = zip(ours, define(array), strict=True)
                differ = sum(int(jnp.sum(bits(a) != bits(b))) for a, b in pairs)
                found[f"{x} {shape} {dtype}"] = differ
    return found


def beside_xla(seconds: float) -> None:
    """Our programs and XLA's, jitted."""
    import jax
    import jax.numpy as jnp
    from device_time import Copies, kernels, sets_for
    from fp8_layers import quantize

    from normfuse import rms_norm
    from normfuse.layers.dense.epilogue import SCALARS
    from normfuse.layers.norm.spec import Norm
    from normfuse.layers.quantization import gated
    from normfuse.layers.quantization import norm as norms
    from normfuse.layers.quantization.norm import NormCodes
    from normfuse.native.implementation import NATIVE

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
            "normfuse": lambda x: quantize(x, bound=bound, order=NATIVE),
            "XLA": lambda x: plain(x, jnp.float32(32), False),
            "XLA, codes transposed": lambda x: plain(x, jnp.float32(32), True),
        },
        "quantize": {
            "normfuse": lambda x: quantize(x, order=NATIVE),
            "XLA": lambda x: with_amax(x, False),
            "XLA, codes transposed": lambda x: with_amax(x, True),
        },
    }
    silu = gated.Gated(SCALARS["silu"])
    bounds = jnp.full(3, bound)
    codes = lambda x: x.astype(e4m3)

    def activation(a, b):
        a, b = a.astype(f32), b.astype(f32)
        return [plain(r, jnp.float32(8), True)[0] for r in (jax.nn.silu(a) * b, a, b)]

    def gradients(dh, a, b):
        h = lambda a, b: jax.nn.silu(a) * b
        h, pull = jax.vjp(h, a.astype(f32) * 0.5, b.astype(f32) * 0.5)
        da, db = pull(dh.astype(f32))
        return [plain(r, jnp.float32(8), True) for r in (da, db)], plain(h, jnp.float32(8), True)[1]

    def own_gradients(dh, a, b):
        a, b = (jax.lax.bitcast_convert_type(q, jnp.uint8) for q in (a, b))
        return gated.gradient_kernel(silu, dh, a, b, jnp.full(2, 0.5), bounds, order=NATIVE)

    weight = lambda x: jnp.ones(x.shape[1], f32)

    def norm(x, *residual):
        h = functools.reduce(jnp.add, residual, x)
        wide = h.astype(f32)
        rstd = jax.lax.rsqrt(jnp.mean(wide * wide, 1, keepdims=True) + 1e-6)
        multiplier = jnp.float32(448 // x.shape[1] ** 0.5)
        return plain(wide * rstd * weight(x), multiplier, True), h, rstd

    def apart(x, *residual):  # our norm, then our quantizer with the norm's bound
        run = functools.partial(rms_norm, implementation="native")
        y, h = run(x, weight(x), residual=residual[0]) if residual else (run(x, weight(x)), x)
        return quantize(y, bound=jnp.float32(x.shape[1] ** 0.5), order=NATIVE), h

    def quantized_norm(x, *residual):
        of = Norm(axes=(1,), eps=1e-6, has_scale=True, with_rstd=True, has_residual=bool(residual))
        return norms.quantize(NormCodes(of), x, *residual, weight(x), order=NATIVE)

    norm_versions = {"normfuse": quantized_norm, "normfuse, norm and cast": apart, "XLA": norm}
    gated_versions = {
        "gated amax": {"normfuse": lambda a, b: gated.amax_kernel(silu, a, b, order=NATIVE)},
        "gated": {
            "normfuse": lambda a, b: gated.forward_kernel(silu, a, b, bounds, order=NATIVE),
            "XLA": activation,
        },
        "gated gradient": {
            "normfuse": own_gradients,
            "XLA": gradients,
        },
    }
    works = [Work(r, w, "bfloat16") for r in ROWS for w in WIDTHS]
    works += [Work(r, w, "float32") for r, w in KERNELS]
    works.sort(key=lambda work: work.rows * work.columns not in MAIN)
    for work in works:
        keys = jax.random.split(jax.random.key(0), max(3, min(4, sets_for(4 * work.elements))))
        shape = work.rows, work.columns
        make = lambda key, shape=shape, work=work: jax.random.normal(key, shape, work.dtype)
        xs = [make(key) for key in keys]
        with_gated = work.itemsize == 2 and work.columns >= 8192
        of_norms = {"norm": norm_versions, "add norm": norm_versions} if work.itemsize == 2 else {}
        every = of_norms | versions | (gated_versions if with_gated else {})
        for kernel, ways in every.items():
            floor = work.bytes(kernel) / rate
            needs = {"gated amax": 2, "gated": 2, "gated gradient": 3, "add norm": 2}
            needs = needs.get(kernel, 1)
            sets = [tuple(xs[(i + n) % len(xs)] for n in range(needs)) for i in range(len(xs))]
            if kernel == "gated gradient":
                sets = [(dh, codes(a), codes(b)) for dh, a, b in sets]
            for name, run in ways.items():
                if time.perf_counter() - began > seconds:
                    emit(part="xla", out_of_time=True)
                    return
                try:
                    runs = kernels(run, sets, 7)[2:]
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


def table(lines: list[dict]) -> None:
    for line in lines:
        if line.get("compiling"):
            print(f"compiling went on beside all rows, of {', '.join(line['compiling'])}")
        if "row" in line:
            print(layer_line(line))
        if "us" in line:
            what = line.get("version") or line.get("layout")
            print(
                f"{line['rows']:6} x {line['columns']:5} {line['x']:9} {line['kernel']:9}"
                f"{line['us']:9.1f} us {line['of_copy']:6.3f} of copy  {what}"
            )


def layer_line(line: dict) -> str:
    """A version of a row of layers, with our bfloat16 and our goal in FP8."""
    begin = f"{line['row']:16}{line.get('version', ''):28}"
    if "not_measured" in line:
        return f"{begin}not measured: {line['not_measured']}"
    ratio = "-" if line["ratio"] is None else f"{line['ratio']:.3f}"
    text = f"{begin}{line['ms']:9.3f} ms {ratio:>6} x  {line['fp8']:3} FP8 products"
    if "must" not in line:
        return text
    unit, is_ratio = ("x", True) if line["relative"] else ("ms", False)
    reached = (line["ratio"] or 0) >= line["must"] if is_ratio else line["ms"] <= line["must"]
    wanted = f"must {line['must']} {unit}, aim {line['aim']} {unit}"
    return f"{text}  {wanted}: {'reached' if reached else 'not reached'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="for each part: 28, for layers 540")
    parser.add_argument("--kernels", nargs="+", default=[], help="whose layouts: all")
    parser.add_argument("--widths", nargs="+", type=int, default=[], help="of their rows: all")
    parser.add_argument("--chosen", action="store_true", help="time the package's choices alone")
    parser.add_argument("--rows", nargs="+", default=[], help="of layers, by name: all")
    parser.add_argument("--turns", type=int, default=9, help="of each version of a row")
    parser.add_argument("--threads", type=int, help="that compile layers: as many as CPU cores")
    parser.add_argument("--size", choices=["full", "tiny"], default="full", help="of layers")
    parts = {
        "layouts": lambda given: sweep(
            given.seconds or 28, given.kernels, given.widths, given.chosen
        ),
        "xla": lambda given: beside_xla(given.seconds or 28),
        "layers": layers,
    }
    run_parts(parser, parts, ["layouts", "xla"], table)


def layers(given: argparse.Namespace) -> None:
    """Whole layers, forward and backward, ours and other FP8."""
    import fp8_rows

    fp8_rows.measure(
        given.rows or fp8_rows.NAMES,
        seconds=given.seconds or 540,
        turns=given.turns,
        threads=given.threads or os.cpu_count() or 1,
        tiny=given.size == "tiny",
    )


if __name__ == "__main__":
    main()
