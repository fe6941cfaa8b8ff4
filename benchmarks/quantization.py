"""Layers in FP8, in bfloat16 and in Flax's FP8, forward and backward, on one GPU.

    python benchmarks/quantization.py
    python benchmarks/quantization.py --rows mlp gelu
    python benchmarks/quantization.py --size tiny    # to try it on a CPU

A row is a layer at a size: MLPs and a dense layer behind a norm. Its versions are of the same
bfloat16 x and parameters (float32, but for the row of few tokens), whose casts and codes are made
in each call, and take turns. All programs are compiled first, beside one another. Every product of
"FP8, normfuse" must be one of FP8 codes in its compiled program; a version without what it is named
for is not measured. Nor is one whose results are far from bfloat16's: codes of too small a gradient
are all zero, and a GPU multiplies zeros faster than numbers. Every line of the table is a JSON line
too, for other programs to read.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# The blocks take most of the memory; JAX reads this when it first looks for a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
from dense_layers import both_ways, kernel_shapes
from device_time import GEMM, by_turns, emit
from flax.linen import fp8_ops
from programs import fp8_products, other_products, our_kernels

import normfuse
from normfuse.layers.dense import gated as gated_layers
from normfuse.train.step import GPU_OPTIONS

f32, bf16 = jnp.float32, jnp.bfloat16
OURS, PLAIN, FP8 = "bf16, normfuse", "bf16, jnp", "FP8, normfuse"
FLAX = "FP8, Flax's fp8_ops"
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
      program: its compiled step.
      problem: why it is not measured.
      error: of the result or gradient that is furthest from bfloat16's by plain JAX, relative.
    """

    name: str
    run: Callable
    extra: Callable[[], Any] = tuple
    products: int | None = 0
    ours: bool = False
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


def jnp_products(x: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    return [x @ kernel.astype(x.dtype) for kernel in kernels]


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
        wide = x.astype(f32)
        rstd = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-6)
        y = (wide * rstd * scale).astype(x.dtype)
        if not ups:
            return multiply(y, [down])[0]
        a, *up = (each.astype(f32) for each in multiply(y, ups))
        h = (jax.nn.silu(a) * up[0] if up else jax.nn.gelu(a)).astype(x.dtype)
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


# ---------------------------------------------------------------- the table

LAYERS: dict[str, tuple] = {  # the layer, tokens, features, hidden features, the kernels' dtype
    "mlp": ("norm + SwiGLU MLP", 16384, 4096, 14336, f32),
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
        found.append(layer_row(name, layer, *sizes, dtype))
    return found


# ---------------------------------------------------------------- measuring


def compile_all(found: Sequence[Row], threads: int) -> None:
    """Compiles all versions in parallel."""
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None

    def compiled(version: Version, operands: Any) -> None:
        try:
            traced = jax.jit(version.run).trace(operands, jax.eval_shape(version.extra))
            version.program = traced.lower().compile(options)
        except Exception as error:  # the others can be measured
            version.problem = said(error)
        else:
            version.read(version.program.as_text(), jax.default_backend() == "gpu")

    every = {version: row.operands for row in found for version in row.versions}
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        list(pool.map(compiled, every, every.values()))


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def measure_row(row: Row, turns: int) -> None:
    """Emits a line for each version of a row, and prints a table."""
    operands = row.draw()
    calls = {v: (v.program, (operands, v.extra())) for v in row.versions if not v.problem}
    expected: list[jax.Array] = []
    for version in sorted(calls, key=lambda version: version.name != PLAIN):
        program, args = calls[version]
        try:
            found = arrays(program(*args))
        except jax.errors.JaxRuntimeError as error:
            version.problem = said(error)
            continue
        expected = expected or found
        errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
        version.error = float(jnp.max(jnp.stack(errors)))  # NaN if one is
        if not version.error <= FAR:
            version.problem = f"its results are {version.error:.2g} from bfloat16's"
    named = {version.name: call for version, call in calls.items() if not version.problem}
    samples = by_turns(named, turns, 1.5 if jax.default_backend() == "gpu" else 0)
    times = {
        name: [sum(us for _, us in call) / 1e3 for call in its] for name, its in samples.items()
    }
    base = statistics.median(times[OURS]) if OURS in times else math.nan
    for version in row.versions:
        line = {"row": row.name, "title": row.title, "version": version.name}
        begin = f"{row.name:16}{version.name:28}"
        if version.problem:
            emit(**line, not_measured=version.problem)
            print(f"{begin}not measured: {version.problem}")
            continue
        ms = statistics.median(times[version.name])
        multiplied = statistics.median(
            sum(us for kernel, us in call if GEMM.search(kernel)) for call in samples[version.name]
        )
        emit(
            **line,
            ms=round(ms, 3),
            ratio=round(base / ms, 3),
            products_ms=round(multiplied / 1e3, 3),
            error=round(version.error, 4),
            fp8=version.fp8,
            turns=[round(ms, 3) for ms in times[version.name]],
            kernels=version.kernels,
        )
        print(f"{begin}{ms:9.3f} ms {base / ms:6.3f} x  {version.fp8:3} FP8 products")


def arrays(results: Any) -> list[jax.Array]:
    """A layer's result and the gradients of x and of kernels, as far as all versions have them."""
    return [leaf for leaf in jax.tree.leaves(results) if leaf.ndim >= 2]


@jax.jit
def relative_error(found: jax.Array, expected: jax.Array) -> jax.Array:
    """‖found - expected‖ / ‖expected‖, and 0 where both are zero; NaN is kept."""
    size = lambda x: jnp.sqrt(jnp.sum(jnp.square(x.astype(f32))))
    far, full = size(found.astype(f32) - expected.astype(f32)), size(expected)
    return jnp.where(far == 0, 0.0, far / full)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--turns", type=int, default=9, help="of each version of a row")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="that compile")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    given = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    found = rows(given.rows, tiny=given.size == "tiny")
    compile_all(found, given.threads)
    for op, reason in normfuse.fallbacks():
        print(f"plain XLA serves {op}: {reason}")
    for row in found:
        measure_row(row, given.turns)


if __name__ == "__main__":
    main()
