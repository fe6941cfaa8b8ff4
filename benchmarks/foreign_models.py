"""`swap` on public models of other people: the modules it serves, and how much their results move.

    python benchmarks/foreign_models.py             clones the pinned commits into build/foreign
    python benchmarks/foreign_models.py --folder F  uses clones there, as they are
    python benchmarks/foreign_models.py --report    also prints the reports

Each model is built small, and called before and after `swap(model)`, in float32 and with bfloat16
parameters. The errors are the largest of logits and of gradients, relative to the largest value.
Paths of the state and the graph definition after `unswap` must be those of the model as it was.
"""

import argparse
import dataclasses
import importlib
import pathlib
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from normfuse.layers.nnx import swap, unswap

SOURCES = {  # folder: (repository, commit)
    "bonsai": ("https://github.com/jax-ml/bonsai", "36284254cf738d99c1c5d1e3a292d27656a0a365"),
    "tunix": ("https://github.com/google/tunix", "c7d8950f12a9c55a976bf2e1a0d8b447d71c20b3"),
}
TOKENS = jnp.arange(16).reshape(2, 8) % 13
SIZES = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4}
SIZES |= {"head_dim": 16, "num_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 10_000}
Forward = Callable[[Any], jax.Array]


def tunix_arguments() -> tuple[Any, ...]:
    """Tokens, positions, no cache and a causal mask."""
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((8, 8), bool)), (2, 8, 8))
    return TOKENS, positions, None, mask


def tunix(name: str, cls: str, **sizes: Any) -> tuple[Any, Forward]:
    """A model of Tunix."""
    module = importlib.import_module(f"tunix.models.{name}.model")
    known = {field.name for field in dataclasses.fields(module.ModelConfig)}
    config = module.ModelConfig(**{k: v for k, v in (SIZES | sizes).items() if k in known})
    return getattr(module, cls)(config, rngs=nnx.Rngs(0)), lambda m: m(*tunix_arguments())[0]


def tunix_gemma() -> tuple[Any, Forward]:
    """Gemma 2: a norm before and after each part, with 1 + scale."""
    kinds = importlib.import_module("tunix.models.gemma.model").AttentionType
    sizes = {"num_embed": 64, "use_post_attn_norm": True, "use_post_ffw_norm": True}
    sizes |= {"final_logit_softcap": 30.0, "sliding_window_size": 4}
    sizes["attention_types"] = (kinds.GLOBAL, kinds.LOCAL_SLIDING)
    return tunix("gemma", "Gemma", **sizes)


def bonsai_mamba2() -> tuple[Any, Forward]:
    """Mamba 2: a norm with an optional gate."""
    module = importlib.import_module("bonsai.models.mamba2.modeling")
    config = module.ModelConfig(
        vocab_size=64, hidden_size=32, state_size=16, head_dim=16, chunk_size=8, num_hidden_layers=2
    )
    return module.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), lambda m: m(TOKENS)["logits"]


def bonsai_umt5() -> tuple[Any, Forward]:
    """UMT5's encoder: T5's norm."""
    module = importlib.import_module("bonsai.models.umt5.modeling")
    config = module.ModelConfig(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    )
    model = module.UMT5EncoderModel(config, rngs=nnx.Rngs(0))
    model.eval()
    return model, lambda m: m(TOKENS, jnp.ones_like(TOKENS))


MODELS: dict[str, Callable[[], tuple[Any, Forward]]] = {
    "Tunix Qwen3": lambda: tunix("qwen3", "Qwen3"),
    "Tunix Llama3": lambda: tunix("llama3", "Llama3"),
    "Tunix Gemma 2": tunix_gemma,
    "Bonsai Mamba 2": bonsai_mamba2,
    "Bonsai UMT5 encoder": bonsai_umt5,
}


def results(model: Any, forward: Forward, dtype: Any) -> list[jax.Array]:
    """Outputs of a model with its parameters in `dtype`, and gradients of a loss on them."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda p: p.astype(dtype), params)

    def loss(params):
        y = forward(nnx.merge(graph, params, rest)).astype(jnp.float32)
        return jnp.mean(jnp.sin(y)), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return [y, *jax.tree.leaves(grads)]


def error(got: list[jax.Array], want: list[jax.Array]) -> float:
    """The largest difference of arrays, each relative to its largest value."""
    wide = lambda a: a.astype(jnp.float32)
    each = [
        jnp.max(jnp.abs(wide(a) - wide(b))) / (jnp.max(jnp.abs(wide(b))) + 1e-30)
        for a, b in zip(got, want, strict=True)
    ]
    return float(max(each))


def clone(folder: pathlib.Path) -> None:
    """Clones what is not in the folder, at its commit."""
    for name, (repository, commit) in SOURCES.items():
        if not (folder / name).exists():
            run = lambda *words: subprocess.run(["git", *words], check=True)
            run("clone", "--quiet", "--filter=blob:none", repository, str(folder / name))
            run("-C", str(folder / name), "checkout", "--quiet", commit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/foreign"))
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    clone(options.folder)
    for name in SOURCES:  # without their __init__, which imports trainers and what those need
        package: Any = types.ModuleType(name)
        package.__path__, sys.modules[name] = [str(options.folder / name / name)], package
    print("| model | norms | other modules served | left | swap | float32 | bfloat16 |")
    print("|---|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        model, forward = make()
        graph, paths = nnx.graphdef(model), [p for p, _ in nnx.to_flat_state(nnx.state(model))]
        dtypes = (jnp.float32, jnp.bfloat16)
        before, reports = [results(model, forward, dtype) for dtype in dtypes], []
        began = time.perf_counter()
        swap(model, report=reports.append)
        took = time.perf_counter() - began
        after = [results(model, forward, dtype) for dtype in dtypes]
        assert [p for p, _ in nnx.to_flat_state(nnx.state(model))] == paths
        assert nnx.graphdef(unswap(model)) == graph
        norms = sum(row.served in ("rms_norm", "normfuse RMSNorm") for row in reports[0].rows)
        served, left = len(reports[0].swapped), len(reports[0].left)
        errors = " | ".join(f"{error(a, b):.1e}" for a, b in zip(after, before))
        print(f"| {name} | {norms} | {served - norms} | {left} | {1e3 * took:.0f} ms | {errors} |")
        if options.report:
            print(f"\n{reports[0]}\n")


if __name__ == "__main__":
    main()
