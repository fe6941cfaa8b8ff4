"""FP8 products and layers made of them, and bfloat16: device times, kernels' names, errors.

    python benchmarks/fp8_products.py                      # about a minute
    python benchmarks/fp8_products.py --part mlp --kernels # every kernel of each layer
    python benchmarks/fp8_products.py --part full          # full accumulation: may compile for long

Times are CUPTI's, of all kernels of a call. `product` is each way in which JAX can write an FP8
product with its scales; it must be one FP8 kernel. `mlp` is a norm and a SwiGLU MLP, forward and
backward, of bfloat16 x and float32 kernels whose quantizing is counted: in FP8 as three Linears
that know nothing of each other, and with one quantized x, whose scale comes from the norm's bound.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time

from parts import emit, run_parts

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

SHAPES = [(16384, 4096, 14336), (2048, 4096, 14336), (16384, 2048, 8192)]
GEMM = ("nvjet", "gemm", "cutlass", "xmma", "cublas")


def measured(run, sets, runs: int = 7) -> tuple[float, float, list]:
    """Median microseconds of all kernels of a call and of its products, and the last call's."""
    from device_time import kernels

    calls = kernels(run, sets, runs)[2:]
    is_product = lambda name: any(part in name for part in GEMM)
    whole = statistics.median(sum(us for _, us in call) for call in calls)
    products = statistics.median(sum(us for name, us in call if is_product(name)) for call in calls)
    return whole, products, calls[-1]


def products(seconds: float, full: bool) -> None:
    """Ways to write a product, and bfloat16; or, `full`, fast and full accumulation."""
    import jax
    import jax.numpy as jnp
    from fp8_layers import product, wide_product

    began = time.perf_counter()
    e4m3, e5m2, bf16, f32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
    size = 2.0**-4  # both scales; as operands, since constants would be folded into the call

    def raw(a, b, dtype, precision=None):
        dims = (((1,), (1,)), ((), ()))
        return jax.lax.dot_general(
            a, b, dims, precision=precision, preferred_element_type=jnp.dtype(dtype)
        )

    highest = functools.partial(raw, precision=jax.lax.Precision.HIGHEST)
    ways = {
        "bf16": (bf16, bf16, lambda a, b, c, s: raw(a, b, bf16)),
        "bf16 to f32": (bf16, bf16, lambda a, b, c, s: raw(a, b, f32)),
        "raw, to bf16": (e4m3, e4m3, lambda a, b, c, s: raw(a, b, bf16)),
        "raw, to f32": (e4m3, e4m3, lambda a, b, c, s: raw(a, b, f32)),
        "raw e5m2, to bf16": (e5m2, e4m3, lambda a, b, c, s: raw(a, b, bf16)),
        "scales after, to bf16": (e4m3, e4m3, lambda a, b, c, s: product(a, s, b, s, bf16)),
        "scales after, to f32": (e4m3, e4m3, lambda a, b, c, s: product(a, s, b, s, f32)),
        "scales before, to bf16": (e4m3, e4m3, lambda a, b, c, s: wide_product(a, s, b, s, bf16)),
        "scales before, to f32": (e4m3, e4m3, lambda a, b, c, s: wide_product(a, s, b, s, f32)),
        "added to f32, bf16 operands": (bf16, bf16, lambda a, b, c, s: c + raw(a, b, f32)),
        "added to f32, scales after": (
            e4m3,
            e4m3,
            lambda a, b, c, s: product(a, s, b, s, f32, add_to=c),
        ),
        "added to f32, scales before": (
            e4m3,
            e4m3,
            lambda a, b, c, s: wide_product(a, s, b, s, f32, add_to=c),
        ),
    }
    if full:
        ways = {
            "fast accumulation, to bf16": ways["raw, to bf16"],
            "fast accumulation, to f32": ways["raw, to f32"],
            "full accumulation, to bf16": (e4m3, e4m3, lambda a, b, c, s: highest(a, b, bf16)),
            "full accumulation, to f32": (e4m3, e4m3, lambda a, b, c, s: highest(a, b, f32)),
        }
    cases = [(16384, 14336, 4096), (16384, 4096, 14336), (4096, 14336, 16384), (2048, 14336, 4096)]
    for m, n, k in cases:
        keys = jax.random.split(jax.random.key(0), 3)
        a, b = (jax.random.normal(s, (r, k), bf16) for s, r in zip(keys, (m, n)))
        c = jnp.zeros((m, n), f32)
        exact = None
        for name, (left, right, run) in ways.items():
            if time.perf_counter() - began > seconds:
                emit(part="product", out_of_time=True)
                return
            if name.startswith("added") and m != 4096:  # the shape of a kernel's gradient
                continue
            operands = (a * 8).astype(left), (b * 8).astype(right), c, jnp.float32(size)
            try:
                whole, multiplied, calls = measured(run, [operands], 6)
                result = jax.jit(run)(*operands)
                error = None
                if left == e4m3 and m * n <= 1 << 28:
                    exact = (
                        exact
                        if exact is not None
                        else raw(operands[0].astype(f32), operands[1].astype(f32), f32, "highest")
                    )
                    factor = size**2 if "scales" in name else 1
                    gap = result.astype(f32) / factor - exact
                    error = float(jnp.linalg.norm(gap) / jnp.linalg.norm(exact))
            except Exception as failure:
                emit(part="product", m=m, n=n, k=k, way=name, error=repr(failure)[:300])
                continue
            emit(
                part="product",
                m=m,
                n=n,
                k=k,
                way=name,
                us=round(whole, 1),
                tflops=round(2 * m * n * k / multiplied / 1e6 if multiplied else 0),
                relative_error=error,
                kernels={x[:60]: round(us, 1) for x, us in calls},
            )


def mlps(seconds: float, every: bool, chosen: list[str]) -> None:
    """Norm and SwiGLU MLP, forward and backward."""
    import jax
    import jax.numpy as jnp
    from fp8_layers import both_ways, mlp, plain_mlp, wide_product

    from normfuse import dense, gated_product, rms_norm
    from normfuse.layers.dense import gated

    def whole(x, scale, gate, up, down, **options):
        """A norm and a GatedMLP."""
        kernels = {"gate": gate, "up": up, "down": down}
        options |= {"activation": "silu", "dtype": x.dtype, "implementation": None}
        return gated.mlp(rms_norm(x, scale), kernels, {}, **options)

    def layers(x, scale, gate, up, down, **options):
        """A foreign model's: Linears and an activation between."""
        y = rms_norm(x, scale)
        a, b = (dense(y, kernel, **options) for kernel in (gate, up))
        return gated_product(a, b, down, **options)

    began = time.perf_counter()
    f32, bf16 = jnp.float32, jnp.bfloat16
    versions = {
        "bf16, jnp": both_ways(plain_mlp),
        "bf16, native norm": both_ways(plain_mlp, norm=rms_norm),
        "bf16, normfuse": both_ways(layers),
        "FP8, GatedMLP": both_ways(whole, quantization="fp8"),
        "FP8, normfuse": both_ways(layers, quantization="fp8"),
        "FP8 Linears": both_ways(mlp, together=False),
        "FP8, x quantized once with its bound": both_ways(mlp, norm=rms_norm),
        "x quantized once, gradients e5m2": both_ways(
            mlp, norm=rms_norm, gradients=jnp.float8_e5m2
        ),
        "x quantized once, scales before": both_ways(mlp, norm=rms_norm, product=wide_product),
    }
    versions = {name: run for name, run in versions.items() if not chosen or name in chosen}
    for tokens, dim, hidden in SHAPES:
        keys = jax.random.split(jax.random.key(0), 5)
        normal = lambda key, shape, dtype, size=1.0: (
            jax.random.normal(key, shape, dtype) * jnp.asarray(size, dtype)
        )
        kernels = [normal(k, (dim, hidden), f32, dim**-0.5) for k in keys[:2]]
        kernels.append(normal(keys[2], (hidden, dim), f32, hidden**-0.5))
        operands = (normal(keys[3], (tokens, dim), bf16), jnp.ones(dim, f32), *kernels)
        dy, expected = normal(keys[4], (tokens, dim), bf16), None
        for name, run in versions.items():
            if time.perf_counter() - began > seconds:
                emit(part="mlp", out_of_time=True)
                return
            try:
                whole, multiplied, calls = measured(run, [(operands, dy)], 6)
                results = jax.tree.leaves(jax.jit(run)(operands, dy))
            except Exception as failure:
                emit(
                    part="mlp", shape=[tokens, dim, hidden], version=name, error=repr(failure)[:300]
                )
                continue
            expected = results if expected is None else expected
            far = lambda a, b: float(
                jnp.linalg.norm(a.astype(f32) - b.astype(f32)) / jnp.linalg.norm(b.astype(f32))
            )
            names = ("y", "dx", "dscale", "dgate", "dup", "ddown")
            errors = {n: round(far(a, b), 4) for n, a, b in zip(names, results, expected)}
            rest: dict[str, list] = {}
            for kernel, us in calls:
                if every or not any(part in kernel for part in GEMM):
                    entry = rest.setdefault(kernel[:60], [0, 0.0])
                    entry[0] += 1
                    entry[1] = round(entry[1] + us, 1)
            top = sorted(rest.items(), key=lambda one: -one[1][1])[: 40 if every else 12]
            emit(
                part="mlp",
                shape=[tokens, dim, hidden],
                version=name,
                ms=round(whole / 1e3, 3),
                products_ms=round(multiplied / 1e3, 3),
                rest_ms=round((whole - multiplied) / 1e3, 3),
                tflops=round(18 * tokens * dim * hidden / multiplied / 1e6 if multiplied else 0),
                launches=len(calls),
                against_bf16=errors,
                rest=dict(top),
            )
        del results, expected, operands, kernels, dy


def table(lines: list[dict]) -> None:
    for line in lines:
        if "way" in line and "us" in line:
            shape = f"{line['m']} x {line['n']} x {line['k']}"
            fp8 = {name[:40] for name in line["kernels"]}
            error = line["relative_error"]
            print(
                f"{shape:22} {line['way']:28} {line['us']:9.1f} us {line['tflops']:5} TFLOP/s"
                f"  {'' if error is None else f'{error:.1e}'}  {len(line['kernels'])}: {fp8}"
            )
        elif "ms" in line:
            shape = " x ".join(map(str, line["shape"]))
            print(
                f"{shape:22} {line['version']:45} {line['ms']:8.3f} ms, products "
                f"{line['products_ms']:.3f} ({line['tflops']} TFLOP/s), rest {line['rest_ms']:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40, help="for each part")
    parser.add_argument("--versions", nargs="*", default=[], help="of the MLP, by name; all")
    parser.add_argument("--kernels", action="store_true", help="list products' kernels too")
    parts = {
        "product": lambda arguments: products(arguments.seconds, full=False),
        "mlp": lambda arguments: mlps(arguments.seconds, arguments.kernels, arguments.versions),
        "full": lambda arguments: products(arguments.seconds, full=True),
    }
    run_parts(parser, parts, ["mlp", "product"], table)


if __name__ == "__main__":
    main()
