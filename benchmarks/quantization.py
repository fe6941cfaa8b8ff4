"""Layers in FP8, in bfloat16 and in other FP8, forward and backward, on one GPU.

    python benchmarks/quantization.py
    python benchmarks/quantization.py --rows mlp gelu --seconds 300 --json lines.jsonl
    python benchmarks/quantization.py --size tiny    # to try it on a CPU

A row is a layer at a size: MLPs and a dense layer behind a norm, and a foreign model's Linears in
`fuse`. Its versions are of the same bfloat16 x and parameters (float32, but for the row of few
tokens), whose casts and codes are made in each call, and take turns. All programs are compiled
first, beside one another. Every product of "FP8, normfuse" must be one of FP8 codes in its compiled
program; a version without what it is named for is not measured. Nor is one whose results are far
from bfloat16's: codes of too small a gradient are all zero, and a GPU multiplies zeros faster than
numbers. Every line of the table is a JSON line too, for other programs to read.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# The blocks take most of the memory; JAX reads this when it first looks for a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import foreign_blocks
import jax
import jax.numpy as jnp
from dense_layers import both_ways, kernel_shapes
from device_time import GEMM, by_turns, emit
from flax import nnx
from flax.linen import fp8_ops
from fp8_layers import gated, linears, rms_norm
from programs import fp8_products, other_products, our_kernels

import normfuse
from normfuse.layers.dense import gated as gated_layers
from normfuse.layers.quantization.quantize import Quantized
from normfuse.train.step import GPU_OPTIONS

f32, bf16 = jnp.float32, jnp.bfloat16
OURS, PLAIN, FP8 = "bf16, normfuse", "bf16, jnp", "FP8, normfuse"
XLA, FLAX = "FP8, XLA's best", "FP8, Flax's fp8_ops"
Multiply = Callable[[jax.Array, Sequence[jax.Array]], list[jax.Array]]
FAR = 0.5  # relative error: FP8's are .07 to .3, that of a gradient of zeros is 1


@dataclasses.dataclass(eq=False)
class Version:
    """A program that computes a row.

    Attributes:
      run: of the row's operands and of `extra()`.
      extra: makes what it needs beside them.
      products: how many FP8 products its program must have; 0 for bfloat16, and None where as many
        as XLA makes of it will do.
      ours: whether it must call kernels of ours; others must not.
      norms: how many norms write codes, where `fuse` says so.
      program: its compiled step.
      problem: why it is not measured.
      error: of the result or gradient that is furthest from bfloat16's by plain JAX, relative.
    """

    name: str
    run: Callable
    extra: Callable[[], Any] = tuple
    products: int | None = 0
    ours: bool = False
    norms: Callable[[], int] = lambda: 1
    program: Any = None
    problem: str = ""
    error: float = math.nan
    fp8: int = 0
    others: int = 0
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)

    def read(self, text: str, exact: bool) -> None:
        """Reads the program's text; notes the parts that it lacks of its name's promise.

        Products are counted where `exact`: programs for CPUs only have codes.
        """
        self.fp8, self.others = fp8_products(text), other_products(text)
        self.kernels = our_kernels(text)
        quantizes = any(name.startswith("quantize") for name in self.kernels)
        if bool(self.kernels) != self.ours:
            self.problem = f"its program calls {sorted(self.kernels) or 'no kernel'} of ours"
        elif self.products != 0 and self.ours and not quantizes:
            self.problem = "its program calls no quantizer of ours"
        elif bool(self.fp8) != (self.products != 0):
            self.problem = f"its program has {self.fp8 or 'no'} products of FP8 codes"
        elif exact and self.products and (self.fp8, self.others) != (self.products, 0):
            self.problem = (
                f"its program has {self.fp8} products of FP8 codes and {self.others} others, "
                f"must have {self.products} and none"
            )
        elif not self.norms():
            self.problem = "no norm writes codes"


@dataclasses.dataclass
class Row:
    """A layer at a size.

    Attributes:
      operands: shapes and dtypes of what all versions take: parameters, and what these meet.
    """

    name: str
    title: str
    operands: Any
    versions: list[Version]

    def draw(self) -> Any:
        """Random operands; products of theirs are about 1."""

        @functools.partial(jax.jit, static_argnums=(1, 2))
        def draw(key: jax.Array, x: Any, is_parameter: bool) -> jax.Array:
            if x.ndim < 2:
                return jnp.ones(x.shape, x.dtype)
            size = x.shape[0] ** -0.5 if is_parameter else 1
            return jax.random.normal(key, x.shape, x.dtype) * jnp.asarray(size, x.dtype)

        leaves, tree = jax.tree.flatten(self.operands)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        parameters = len(jax.tree.leaves(self.operands[0]))
        found = [draw(key, x, i < parameters) for i, (key, x) in enumerate(zip(keys, leaves))]
        return jax.tree.unflatten(tree, found)


# ---------------------------------------------------------------- products of others


def xla_quantize(x: jax.Array, dtype: Any = None, *, bound: Any = None) -> Quantized:
    """Codes in both layouts by XLA alone, their scale given: with delayed scaling it is a state."""
    del bound
    dtype, scale = jnp.dtype(dtype or jnp.float8_e4m3fn), 2.0**-4
    largest = float(jnp.finfo(dtype).max)
    q = (x.astype(f32) / scale).clip(-largest, largest).astype(dtype)
    q = jax.lax.optimization_barrier(q)  # or codes are made twice, and what is transposed is x
    return Quantized(q, q.T, f32(scale))


def jnp_products(x: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    return [x @ kernel.astype(x.dtype) for kernel in kernels]


def xla_products(x: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    """Codes of x are made once for all."""
    return linears(x, kernels, quantize=xla_quantize)


FLAX_STATE = "_overwrite_with_gradient"


def flax_products(states: Iterator[Any]) -> Multiply:
    """Those of Flax's layers with its FP8 products, each with the next of the `states`."""

    def multiply(x: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
        op, dims = fp8_ops.Fp8DirectDotGeneralOp(), (((1,), (0,)), ((), ()))

        def one(kernel: jax.Array) -> Any:
            return op.apply({FLAX_STATE: next(states)}, x, kernel.astype(x.dtype), dims)

        return [one(kernel) for kernel in kernels]

    return multiply


def flax_states(count: int) -> list[Any]:
    small = jnp.ones((16, 16), bf16)
    init = fp8_ops.Fp8DirectDotGeneralOp().init
    state = lambda: init(jax.random.key(0), small, small, (((1,), (0,)), ((), ())))[FLAX_STATE]
    return [state() for _ in range(count)]


# ---------------------------------------------------------------- an MLP, or a dense layer


def plain_layer(multiply: Multiply) -> Callable:
    """A layer of x, the norm's scale and kernels, in plain JAX but for the products."""

    def run(x: jax.Array, scale: jax.Array, *kernels: jax.Array) -> jax.Array:
        *ups, down = kernels
        y = rms_norm(x, scale)
        if not ups:
            return multiply(y, [down])[0]
        a, *up = multiply(y, ups)
        h = gated(a, *up) if up else jax.nn.gelu(a.astype(f32)).astype(a.dtype)
        return multiply(h, [down])[0]

    return run


def our_layer(quantization: str | None, fused: bool = True) -> Callable:
    """The same of ours, as in the transformer: in FP8, if `fused`, the norm writes codes."""

    def run(x: jax.Array, scale: jax.Array, *kernels: jax.Array) -> jax.Array:
        y = normfuse.rms_norm(x, scale)
        if len(kernels) == 1:
            return normfuse.dense(y, *kernels, quantization=quantization)
        names = ("gate", "up", "down")[-len(kernels) :]
        named: dict[str, jax.Array] = dict(zip(names, kernels))
        options: dict[str, Any] = {"dtype": x.dtype, "implementation": None}
        options |= {"activation": "silu" if "gate" in named else "gelu_tanh"}
        return gated_layers.mlp(y, named, {}, quantization=quantization, **options)

    if not fused or quantization is None:
        return run
    return normfuse.fuse(run, quantization=quantization, report=lambda _: None)


def on_operands(layer: Callable) -> Callable:
    """`(((scale, *kernels), (x, dy)), ()) -> (y, gradients of x, scale and kernels)`."""
    run = both_ways(layer)

    def on(operands: Any, _: Any) -> Any:
        params, (x, dy) = operands
        return run((x, *params), dy)

    return on


@functools.cache
def layer_operands(layer: str, tokens: int, dim: int, hidden: int, dtype: Any = f32) -> Any:
    struct = jax.ShapeDtypeStruct
    kernels = [struct(shape, dtype) for shape in kernel_shapes(layer, dim, hidden)]
    out = kernels[-1].shape[1]
    x, dy = struct((tokens, dim), bf16), struct((tokens, out), bf16)
    return (struct((dim,), f32), *kernels), (x, dy)


@functools.cache  # rows of the same operands share them, and their programs
def rivals(layer: str, operands: Any) -> list[Version]:
    count = len(kernel_shapes(layer, 1, 1))
    del operands

    def with_flax(operands: Any, states: Any) -> Any:
        params, (x, dy) = operands
        run = lambda states, *args: plain_layer(flax_products(iter(states)))(*args)
        return both_ways(run)((states, x, *params), dy)

    return [
        Version(PLAIN, on_operands(plain_layer(jnp_products))),
        Version(XLA, on_operands(plain_layer(xla_products)), products=None),
        Version(FLAX, with_flax, functools.partial(flax_states, count), None),
    ]


def layer_row(
    name: str,
    layer: str,
    tokens: int,
    dim: int,
    hidden: int,
    kernels: Any,
) -> Row:
    """A row of functions of ours; `kernels` is their dtype."""
    operands = layer_operands(layer, tokens, dim, hidden, kernels)
    products = 3 * len(kernel_shapes(layer, dim, hidden))
    of_fp8 = {"products": products, "ours": True}
    versions = [
        Version(OURS, on_operands(our_layer(None)), ours=True),
        Version(FP8, on_operands(our_layer("fp8")), **of_fp8),
    ]
    if "SwiGLU" in layer:
        apart = on_operands(our_layer("fp8", fused=False))
        versions.append(Version(f"{FP8}, norm apart", apart, **of_fp8))
    versions += rivals(layer, operands)
    title = f"{layer} {dim} -> {hidden}, {tokens} tokens"
    title += "" if kernels == f32 else f", {jnp.dtype(kernels)} kernels"
    return Row(name, title, operands, versions)


# ---------------------------------------------------------------- a foreign model's Linears


def linears_row(name: str, tokens: int, dim: int, hidden: int) -> Row:
    """A row of `fuse`: a foreign module's norm and Linears, its activation between."""
    layer = "norm + SwiGLU MLP"
    operands = layer_operands(layer, tokens, dim, hidden)

    def fused(quantization: Any) -> tuple[Callable, list[int]]:
        make = lambda: foreign_blocks.Mlp(dim, hidden, rngs=nnx.Rngs(0))
        graph, _ = nnx.split(nnx.eval_shape(make))
        norms: list[int] = []

        def run(x: jax.Array, scale: jax.Array, *kernels: jax.Array) -> jax.Array:
            params: dict[str, Any] = {"norm": {"w": scale}}
            params |= {k: {"kernel": w} for k, w in zip(("gate", "up", "down"), kernels)}
            y = nnx.merge(graph, params)(x)
            return jax.lax.optimization_barrier(y)  # a product that is a result may be logits

        def report(report: Any) -> None:
            norms.append(sum(row.domain == "codes" for row in report.fused))

        options = {"quantization": quantization, "report": report}
        return on_operands(normfuse.fuse(run, **options)), norms

    in_fp8, norms = fused("fp8")
    versions = [
        Version(OURS, fused(None)[0], ours=True),
        Version(FP8, in_fp8, products=9, ours=True, norms=lambda: sum(norms)),
        *rivals(layer, operands),
    ]
    title = f"the same from Linears, {dim} -> {hidden}, {tokens} tokens"
    return Row(name, title, operands, versions)


# ---------------------------------------------------------------- the table

LAYERS: dict[str, tuple] = {  # the layer, tokens, features, hidden features, the kernels' dtype
    "mlp": ("norm + SwiGLU MLP", 16384, 4096, 14336, f32),
    "linears": ("", 16384, 4096, 14336, f32),
    "gelu": ("norm + gelu MLP", 16384, 4096, 14336, f32),
    "dense": ("norm + dense", 16384, 4096, 14336, f32),
    "mlp-2048-tokens": ("norm + SwiGLU MLP", 2048, 4096, 14336, bf16),
    "mlp-2048": ("norm + SwiGLU MLP", 16384, 2048, 8192, f32),
}


def rows(chosen: Sequence[str], *, tiny: bool = False) -> list[Row]:
    """The chosen rows, in their order; `tiny` for trying this on a CPU."""
    found = []
    for name in chosen:
        layer, *sizes, dtype = LAYERS[name]
        sizes = [size // (64 if tiny else 1) for size in sizes]
        found.append(layer_row(name, layer, *sizes, dtype) if layer else linears_row(name, *sizes))
    return found


# ---------------------------------------------------------------- measuring


def compile_all(found: Sequence[Row], threads: int, until: float) -> list[str]:
    """Compiles all versions in parallel; returns those not compiled at `until`.

    Flax's come last: XLA has been seen to take minutes for products that accumulate in full.
    """
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    futures: dict[Version, concurrent.futures.Future] = {}
    names = {}
    every = [(row, version) for row in found for version in row.versions]
    for row, version in sorted(every, key=lambda pair: pair[1].name == FLAX):
        if version in futures:
            continue
        names[version] = f"{row.name}: {version.name}"
        try:
            traced = jax.jit(version.run).trace(row.operands, jax.eval_shape(version.extra))
        except Exception as error:
            version.problem = f"tracing: {said(error)}"
            continue
        futures[version] = pool.submit(lambda traced=traced: traced.lower().compile(options))
    concurrent.futures.wait(futures.values(), max(0, until - time.perf_counter()))
    pool.shutdown(wait=False, cancel_futures=True)
    for version, future in futures.items():
        if not future.done() or future.cancelled():
            version.problem = "was not compiled in time"
        elif error := future.exception():
            version.problem = f"compiling: {said(error)}"
        else:
            version.program = future.result()
            version.read(version.program.as_text(), jax.default_backend() == "gpu")
    return [names[version] for version, future in futures.items() if not future.done()]


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def measure(
    chosen: Sequence[str], *, seconds: float, turns: int, threads: int, tiny: bool
) -> list[dict]:
    """Emits and returns a line for each version of each row, in the time that there is."""
    began = time.perf_counter()
    until = began + seconds
    device = jax.devices()[0].device_kind
    found = rows(chosen, tiny=tiny)
    compiling = compile_all(found, threads, began + 0.6 * seconds)
    took = round(time.perf_counter() - began, 1)
    lines = [emit(device=device, jax=jax.__version__, compiled_s=took, compiling=compiling)]
    for op, reason in normfuse.fallbacks():
        lines.append(emit(plain_xla_serves=op, reason=reason))
    for row in found:
        try:
            lines += measure_row(row, turns, until)
        except Exception as error:  # the other rows can be measured
            lines.append(emit(row=row.name, not_measured=said(error)))
    return lines


def measure_row(row: Row, turns: int, until: float) -> list[dict]:
    """Emits and returns the lines of a row."""
    if time.perf_counter() < until:
        operands = row.draw()
        calls = {v: (v.program, (operands, v.extra())) for v in row.versions if not v.problem}
        found: list[jax.Array] = []
        expected = found
        for version in sorted(calls, key=lambda version: version.name != PLAIN):
            program, args = calls[version]
            try:
                found = arrays(program(*args))
            except jax.errors.JaxRuntimeError as error:
                version.problem = said(error)
            else:
                expected = expected or found
                errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
                version.error = float(jnp.max(jnp.stack(errors)))  # NaN if one is
                if not version.error <= FAR:
                    version.problem = f"its results are {version.error:.2g} from bfloat16's"
        found = expected = []
        calls = {version: call for version, call in calls.items() if not version.problem}
        named = {version.name: call for version, call in calls.items()}
        warm = 1.5 if jax.default_backend() == "gpu" else 0
        samples = by_turns(named, turns, warm, until)
    else:
        samples = {}
    times = {
        name: [sum(us for _, us in call) / 1e3 for call in found]
        for name, found in samples.items()
        if found
    }
    base = statistics.median(times[OURS]) if OURS in times else math.nan
    lines = []
    for version in row.versions:
        line: dict[str, Any] = {"row": row.name, "title": row.title}
        line["version"] = version.name
        if version.name not in times:
            lines.append(emit(**line, not_measured=version.problem or "out of time"))
            continue
        ms = statistics.median(times[version.name])
        line |= {"ms": round(ms, 3), "ratio": None if math.isnan(base) else round(base / ms, 3)}
        multiplied = [
            sum(us for kernel, us in call if GEMM.search(kernel)) / 1e3
            for call in samples[version.name]
        ]
        line |= {
            "products_ms": round(statistics.median(multiplied), 3),
            "error": round(version.error, 4),
            "fp8": version.fp8,
            "other_products": version.others,
            "turns": [round(ms, 3) for ms in times[version.name]],
            "kernels": version.kernels,
            "rest": rest(samples[version.name][-1]),
        }
        lines.append(emit(**line))
    return lines


def arrays(results: Any) -> list[jax.Array]:
    """A layer's result and the gradients of x and of kernels, as far as all versions have them."""
    return [leaf for leaf in jax.tree.leaves(results) if leaf.ndim >= 2]


@jax.jit
def relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
    """‖found - expected‖ / ‖expected‖, and 0 where both are zero; NaN is kept."""
    size = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(f32))))
    far, full = size(found.astype(f32) - expected.astype(f32)), size(expected)
    return jnp.where(far == 0, 0.0, far / full)


def rest(call: list[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    """The calls and microseconds of each kernel that is not a product: the largest."""
    found: dict[str, tuple[int, float]] = {}
    for kernel, us in call:
        if not GEMM.search(kernel):
            count, total = found.get(kernel[:60], (0, 0.0))
            found[kernel[:60]] = count + 1, round(total + us, 1)
    return dict(sorted(found.items(), key=lambda entry: -entry[1][1])[:12])


def show(line: dict[str, Any]) -> None:
    """Prints a version of a row."""
    begin = f"{line['row']:16}{line.get('version', ''):28}"
    if "not_measured" in line:
        print(f"{begin}not measured: {line['not_measured']}")
        return
    ratio = "-" if line["ratio"] is None else f"{line['ratio']:.3f}"
    print(f"{begin}{line['ms']:9.3f} ms {ratio:>6} x  {line['fp8']:3} FP8 products")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--turns", type=int, default=9, help="of each version of a row")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--json", type=pathlib.Path, help="also write all lines there")
    given = parser.parse_args()
    sizes = {"turns": given.turns, "threads": given.threads, "tiny": given.size == "tiny"}
    lines = measure(given.rows, seconds=given.seconds, **sizes)
    for line in lines:
        if "row" in line:
            show(line)
    if given.json:
        given.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if lines[0]["compiling"]:  # threads that compile cannot be stopped
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
