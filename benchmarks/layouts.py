"""Times other layouts of the norms' kernels than the one the package would choose.

    python benchmarks/layouts.py                        # four shapes, forward and backward
    python benchmarks/layouts.py --n 5120 --kernel backward --residual
    python benchmarks/layouts.py --n 4096 --rows 8 64 512
    python benchmarks/layouts.py --norm layer_norm      # with scale and bias
    python benchmarks/layouts.py --n 64 128 --heads 32  # a scale of each head, bias: --bias

Compiles every candidate on all cores, then launches each through the CUDA driver, without XLA, and
prints the fastest. A fraction is the time in which the driver's own copy would move the same bytes
over the time taken; `*` marks the package's choice. Many launches are one CUDA graph, as XLA's
command buffers are, so that the host is not what is timed.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import unittest.mock
from collections.abc import Iterator

os.environ["JAX_PLATFORMS"] = "cpu"  # JAX only shapes the calls: the GPU's memory is ours

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from cuda_launches import Buffers, Gpu, copy_rate, copy_time  # noqa: E402

from normfuse.layers.norm import cuda  # noqa: E402
from normfuse.layers.norm.cuda import OneLaunch, RowLayout  # noqa: E402
from normfuse.layers.norm.spec import Norm  # noqa: E402
from normfuse.native import compiler  # noqa: E402
from normfuse.native.launch import Target  # noqa: E402

SHAPES = [(65536, 1024), (32768, 4096), (16384, 8192), (4096, 32768)]
ELEMENTS = 2**27  # elements of other shapes
FEW_ROWS = 1024  # with fewer, a block may have a multiprocessor for itself


# The function of `cuda` that chooses each kernel's layout.
CHOOSERS = {
    "forward": "forward_layout",
    "backward": "backward_layout",
    "at_once": "one_launch_layout",
}


EASES = ("eased_forward", "eased_backward")  # make a layout one for more registers
TIMED = ("timed_forward", "timed_backward")  # are asked before the choosers


@dataclasses.dataclass(frozen=True)
class Work:
    """A kernel on bfloat16 rows, with or without the residual."""

    kernel: str
    rows: int
    n: int
    residual: bool
    scale: str = "float32"
    norm: str = "rms_norm"
    bias: bool = False
    heads: int = 1
    persistent: bool = False

    @property
    def columns(self) -> int:
        """How many vectors of parameters a thread may hold of its columns."""
        return 1 + self.bias

    @property
    def arrays(self) -> int:
        """How many of the size of x it moves."""
        return 4 if self.residual else {"forward": 2}.get(self.kernel, 3)

    def launches(self, layout: RowLayout | OneLaunch | None, target: Target) -> list[dict]:
        """What it would launch with this layout, or with the package's."""
        found = []

        def launch(source, kernel, operands, results, **sizes):
            sizes |= {"source": source, "kernel": kernel}
            found.append(sizes | {"operands": operands, "results": results})
            return [jnp.zeros(r.shape, r.dtype) for r in results]

        several = (self.heads,) if self.heads > 1 else ()
        outer, inner = (self.rows // self.heads, *several), () if several else (1,)
        struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        large = struct((*outer, self.n, *inner), "bfloat16")
        scale = struct((*several, self.n), self.scale)
        one_a_row = struct((*outer, *inner), "float32")
        centred = self.norm == "layer_norm"
        more = [large] * self.residual
        norm = Norm(
            centred=centred,
            eps=1e-6,
            has_scale=True,
            has_residual=self.residual,
            has_bias=self.bias,
            heads=(1,) if several else (),
        )
        if self.kernel == "forward":
            call, operands = cuda.forward, [large, *more, scale, *[scale] * self.bias]
            changes = {"out_dtype": "bfloat16", "with_rstd": True, "with_mean": centred}
        else:
            call = cuda.backward
            operands = [large, large, scale, *[one_a_row] * (1 + centred), *more]
            changes = {"with_dscale": True, "with_dbias": self.bias, "has_bias": False}
        norm = dataclasses.replace(norm, **changes)
        with contextlib.ExitStack() as stack:
            replace = lambda *what: stack.enter_context(unittest.mock.patch.object(cuda, *what))
            replace("launch", launch)
            if layout is not None:  # run the given layout unchanged
                for ease in EASES:
                    replace(ease, lambda *arguments: arguments[-1])
                for name in TIMED:
                    replace(name, lambda *_: None)
            for kernel, name in CHOOSERS.items():
                if layout is not None and kernel == self.kernel:
                    replace(name, lambda *_, **__: layout)
                elif kernel == "at_once" != self.kernel:  # it is asked first
                    replace(name, lambda *_, **__: None)
            jax.eval_shape(lambda *arrays: call(target, norm, *arrays), *operands)
        return found

    def layouts(self) -> Iterator[RowLayout | OneLaunch]:
        """Candidates."""
        if self.kernel == "at_once":
            yield from self._at_once()
            return
        for slices, chunks in itertools.product((1, 2, 4, 8), range(1, 9)):
            threads = cuda.threads_for(-(-self.n // (8 * slices)), chunks)
            if threads > 1024 or (slices > 1 and threads < 128):
                continue
            if -(-self.n // (threads * chunks * 8)) != slices:
                continue
            rows = {max(1, size // threads) for size in (128, 256, 512, 1024)}
            if self.rows < FEW_ROWS:
                rows = {1}
            for block_rows in sorted(rows) if slices == 1 else [1]:
                if 64 <= block_rows * threads <= 1024:
                    sums = 2 if (self.norm, self.kernel) == ("layer_norm", "backward") else 1
                    layout = RowLayout(self.n, 8, chunks, threads, block_rows, slices, sums=sums)
                    yield from self._variants(layout)

    def _at_once(self) -> Iterator[OneLaunch]:
        for chunks, lanes, blocks in itertools.product((1, 2, 4), (4, 8, 16), (1, 2)):
            threads = cuda.threads_for(-(-self.n // 8), chunks)
            for fill in (128, 256, 512, 1024):
                rows = max(1, fill // threads)
                if rows * threads * blocks <= 1024 and (rows > 1 or fill == 128):
                    layout = RowLayout(self.n, 8, chunks, threads, rows, min_blocks=blocks)
                    yield OneLaunch(layout, lanes)

    def _variants(self, layout: RowLayout) -> Iterator[RowLayout]:
        if self.rows < FEW_ROWS:
            stages = (0,) if self.kernel == "forward" else (1, 2, 3)
            for blocks, hold, depth in itertools.product((1, 2), (False, True), stages):
                yield dataclasses.replace(layout, min_blocks=blocks, hold=hold, max_stages=depth)
            return
        for blocks in (1, 2, 3, 4, 6, 8, 12):
            threads = blocks * layout.threads
            changed = dataclasses.replace(layout, min_blocks=blocks)
            registers = 65536 // (-(-layout.threads // 128) * 128 * blocks)
            held = layout.chunks * 4 * (self.arrays - 1)
            if self.kernel == "forward":
                for hold, together in itertools.product((False, True), (1, 2, 4)):
                    needed = together * held + 16 + hold * 8 * layout.chunks * self.columns
                    if 512 <= threads <= 2048 and needed <= registers:
                        found = dataclasses.replace(changed, hold=hold, thread_rows=together)
                        yield found
                        if hold and self.persistent:
                            found = dataclasses.replace(found, persistent=True)
                            yield found
                            if self.norm == "layer_norm" and not self.residual:
                                yield dataclasses.replace(found, ahead=True)
                continue
            if not 256 <= threads <= 1024:
                continue
            shares = (False, True) if self.norm == "layer_norm" and layout.slices > 1 else (False,)
            for hold, stages, share in itertools.product((False, True), (2, 3), shares):
                held = 8 * (1 + self.columns - share) * layout.chunks
                if held + 20 + hold * layout.chunks * 4 * (self.arrays - 1) <= registers:
                    yield dataclasses.replace(changed, hold=hold, max_stages=stages, share=share)


def compile_one(source: str, macros: dict, arch: str, changes: tuple[tuple[str, str], ...]):
    """The image, or why there is none; `changes` are replacements in the sources."""
    file = compiler.kernel_source(source)
    texts = [file.text, *(text for _, text in file.headers)]
    for old, new in changes:
        texts = [text.replace(old, new) for text in texts]
    names = [name for name, _ in file.headers]
    file = compiler.Source(file.name, texts[0], tuple(zip(names, texts[1:], strict=True)))
    try:
        return compiler.compile_image(file, macros, arch).data
    except compiler.CompileError as error:
        return str(error)


def time_all(gpu, work: Work, rate: float, pool, changes=(), out=None, only=False) -> None:
    """Times every candidate, or the package's choice only, and prints the ten best."""
    target = gpu.target()
    chosen = work.launches(None, target)
    candidates = [(None, chosen)]
    for layout in () if only else dict.fromkeys(work.layouts()):
        launches = work.launches(layout, target)
        if all(launch.get("shared", 0) <= target.shared_memory for launch in launches):
            candidates.append((layout, launches))
    images = {}
    for _, launches in candidates:
        for launch in launches:
            key = launch["source"], tuple(launch["macros"].items())
            images.setdefault(key, None)
    futures = {
        key: pool.submit(compile_one, key[0], dict(key[1]), target.arch, changes) for key in images
    }
    images = {key: future.result() for key, future in futures.items()}

    buffers = Buffers(gpu, chosen, 100 if work.rows < FEW_ROWS else 10)
    found = []
    for layout, launches in candidates:
        compiled = [
            images[launch["source"], tuple(launch["macros"].items())] for launch in launches
        ]
        errors = [image for image in compiled if isinstance(image, str)]
        if errors:
            if layout is None:
                print(f"  the package's own layout does not compile: {errors[0]}")
            continue
        try:
            times = buffers.time(launches, compiled)
            found.append((times[0], layout, launches, times[1]))
        except RuntimeError as error:
            print(f"  {error}: {layout}")
            if "LAUNCH_FAILED" in str(error) or "ILLEGAL" in str(error):
                raise
    copied = copy_time(gpu, 2 * work.rows * work.n)
    buffers.free()
    floor = work.arrays * 2 * work.rows * work.n / rate
    more = " with residual" * work.residual + " and bias" * work.bias
    more += f" of {work.heads} heads" * (work.heads > 1)
    shape = f"{work.rows} x {work.n}"
    print(f"{work.norm} {work.kernel}{more}, {shape}: {len(found)} layouts {dict(changes)}")
    print(
        f"  a copy of one such array: {copied:.1f} us, {4 * work.rows * work.n / rate / copied:.3f}"
    )
    ranked = sorted(found, key=lambda one: one[0])
    for place, (time, layout, launches, last) in enumerate(ranked):
        if out is not None:
            sizes = {k: v for k, v in launches[0]["macros"].items() if k in SHOWN}
            record = dataclasses.asdict(work) | sizes | {"us": time, "fraction": floor / time}
            record |= {"sum_us": last, "ours": layout is None}
            record |= {"layout": None if layout is None else dataclasses.asdict(layout)}
            print(json.dumps(record), file=out)
        if place < 10 or layout is None:
            sizes = " ".join(f"{k} {v}" for k, v in launches[0]["macros"].items() if k in SHOWN)
            mark = "*" if layout is None else " "
            ending = f" (of it the sum {last:.1f})" if last else ""
            grid = launches[0]["grid"]
            print(f" {mark}{time:8.1f} us {floor / time:.3f}{ending} grid {grid} {sizes}")
    print(flush=True)


SHOWN = (
    "CHUNKS",
    "ROW_THREADS",
    "BLOCK_ROWS",
    "SLICES",
    "MIN_BLOCKS",
    "HOLD",
    "STAGES",
    "THREAD_ROWS",
    "SHARE_WEIGHT",
    "AHEAD",
    "LANES",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, nargs="+", help="lengths of the rows")
    parser.add_argument("--rows", type=int, nargs="+", help="how many, of each length")
    parser.add_argument("--kernel", nargs="+", default=["forward", "backward"], choices=CHOOSERS)
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--scale", default="float32", help="its dtype")
    parser.add_argument("--norm", choices=["rms_norm", "layer_norm"], default="rms_norm")
    parser.add_argument("--bias", action="store_true", help="LayerNorm has one always")
    parser.add_argument("--persistent", action="store_true", help="forward grids of that kind too")
    parser.add_argument("--heads", type=int, default=1, help="each with a scale of its own")
    parser.add_argument(
        "--change", nargs=2, action="append", default=[], metavar=("OLD", "NEW"),
        help="a replacement in the kernels' sources, to try another instruction",
    )  # fmt: skip
    parser.add_argument("--chosen", action="store_true", help="time the package's choice alone")
    parser.add_argument(
        "--out", type=argparse.FileType("w"), help="a file for all of them, as JSON"
    )
    arguments = parser.parse_args()
    gpu = Gpu()
    rate = copy_rate(gpu)
    print(f"copy {rate / 1e6:.3f} TB/s, {gpu.target()}")
    whole = lambda rows: rows // arguments.heads * arguments.heads
    shapes = [(whole(ELEMENTS // n), n) for n in arguments.n] if arguments.n else SHAPES
    if arguments.rows:
        shapes = [(rows, n) for _, n in shapes for rows in arguments.rows]
    changes = tuple(map(tuple, arguments.change))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(mp_context=context) as pool:
        for (rows, n), kernel in itertools.product(shapes, arguments.kernel):
            time_all(
                gpu,
                Work(
                    kernel,
                    rows,
                    n,
                    arguments.residual,
                    arguments.scale,
                    arguments.norm,
                    arguments.bias or arguments.norm == "layer_norm",
                    arguments.heads,
                    arguments.persistent,
                ),
                rate,
                pool,
                changes,
                arguments.out,
                arguments.chosen,
            )


if __name__ == "__main__":
    main()
