"""How far results and gradients in FP8 and in bfloat16 are from float64, layer by layer.

    python benchmarks/fp8_errors.py
    python benchmarks/fp8_errors.py --tokens 256 --features 64 --hidden 128

Errors are norms of differences over norms of the values. Operands are bfloat16, drawn as at the
start of a training, and for the loss also as later: labels are then likely. float64 computes with
the same operands. Codes on CPUs are bit for bit those of GPUs, whose products add up in another
order.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normfuse import dense, fuse, gated_dense, gated_product, linear_cross_entropy, rms_norm
from normfuse.layers.dense import gated


def of_norm(layer: Any) -> Any:
    """A layer of a norm, which in FP8 writes the codes that the layer reads."""

    def run(x, scale, *kernels, **options):
        return layer(rms_norm(x, scale), *kernels, **options)

    def fused(*args, quantization=None, **options):
        options["quantization"] = quantization
        return (fuse(run, quantization="fp8") if quantization else run)(*args, **options)

    return fused


def gated_mlp(x, gate, up, down, **options):
    """`GatedMLP`, whose FP8 keeps nothing wider than codes."""
    options = {"activation": "silu", "dtype": x.dtype, "implementation": None} | options
    return gated.mlp(x, {"gate": gate, "up": up, "down": down}, {}, **options)


def labels(tokens: int, vocabulary: int) -> np.ndarray:
    """The label of each token: few words are one."""
    return 7 * np.arange(tokens) % max(vocabulary // 16, 1)


def loss(x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
    """The mean loss of `labels`."""
    return linear_cross_entropy(x, kernel, labels(len(x), kernel.shape[1]), **options)


# By layer: its function, and what its operands are beside x.
LAYERS: dict[str, tuple[Any, list[str]]] = {
    "dense": (dense, ["kernel"]),
    "a norm, dense": (of_norm(dense), ["scale", "kernel"]),
    "gated_dense": (gated_dense, ["gate", "up"]),
    "a norm, gated_dense": (of_norm(gated_dense), ["scale", "gate", "up"]),
    "gated_product": (gated_product, ["up", "down"]),
    "GatedMLP": (gated_mlp, ["gate", "up", "down"]),
    "loss, at the start": (loss, ["kernel"]),
    "loss, trained": (loss, ["kernel"]),
}


def operands(layer: str, tokens: int, features: int, hidden: int) -> list[np.ndarray]:
    """The operands, and the gradient of the result."""
    rng = np.random.default_rng(0)
    function = LAYERS[layer][0]
    wide = layer == "gated_product"  # from hidden arrays back to features
    n, m = (hidden, features) if wide else (features, hidden)
    drawn = [rng.standard_normal((tokens, n))]
    for name in LAYERS[layer][1]:
        if name == "scale":
            drawn.append(1 + 0.1 * rng.standard_normal(n))
        elif wide and name == "up":
            drawn.append(rng.standard_normal((tokens, n)))
        else:
            shape = (m, n) if layer == "GatedMLP" and name == "down" else (n, m)
            drawn.append(rng.standard_normal(shape) / np.sqrt(shape[0]))
    if layer == "loss, trained":  # a label's logit is as large as the others' log-sum-exp
        x, kernel = drawn
        x *= 3
        x += (np.log(m) + 9 / 2) * kernel[:, labels(tokens, m)].T
    if function is loss:
        return [*drawn, np.ones(())]
    return [*drawn, rng.standard_normal((tokens, n if layer == "GatedMLP" else m))]


def both_ways(layer: Any, arrays: list[jax.Array]) -> list[np.ndarray]:
    """The result and all gradients, in float64; the last array is the gradient of the result."""

    @jax.jit
    def run(arrays):
        *args, dy = arrays
        y, pull = jax.vjp(layer, *args)
        return [y, *pull(dy)]

    return [np.asarray(a, np.float64) for a in run(arrays)]


def errors(layer: str, tokens: int, features: int, hidden: int) -> dict[str, list[float]]:
    """Of the result and each gradient, by type of the products."""
    function = LAYERS[layer][0]
    drawn = operands(layer, tokens, features, hidden)
    narrow = [jnp.asarray(a, jnp.bfloat16) for a in drawn]
    if function is loss:  # it is float32 itself
        narrow[-1] = jnp.ones(())
    found = {
        name: both_ways(functools.partial(function, quantization=quantization), narrow)
        for name, quantization in (("bfloat16", None), ("FP8", "fp8"))
    }
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in narrow]
        exact = both_ways(functools.partial(function, implementation="xla"), wide)
    distance = lambda a, b: float(np.linalg.norm(a - b) / np.linalg.norm(b))
    return {name: [distance(a, b) for a, b in zip(got, exact)] for name, got in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    sizes = vars(parser.parse_args())
    layers = sizes.pop("layers")
    print("| layer | | bfloat16 | FP8 |\n|---|---|---|---|")
    for layer in layers:
        names = LAYERS[layer][1]
        found = errors(layer, **sizes)
        first = "gate" if layer == "gated_product" else "x"
        for i, name in enumerate(["y", *(f"d{name}" for name in (first, *names))]):
            row = " | ".join(f"{of[i]:.1e}" for of in found.values())
            print(f"| {layer if not i else ''} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
