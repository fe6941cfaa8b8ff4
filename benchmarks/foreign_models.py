"""`swap` on public models of other people: the modules it serves, and how much their results move.

    pip install --no-deps --target build/foreign -r benchmarks/foreign_models.txt
    git clone https://github.com/jax-ml/bonsai build/bonsai    # at BONSAI
    python benchmarks/foreign_models.py --folder build/foreign --folder build/bonsai

`--report` also prints what became of each module, `--only WORD` runs some of the models. Each is
built small, and the user's one line is `swap(model)`. Outputs, and the gradients of a loss, are
computed before and after it, with parameters in float32 and in bfloat16; errors are the largest
difference to float64, relative to an array's largest value. (In float64 every `jnp.float32` in the
model's code is `jnp.float64`.) Paths of the parameters, and the model after `unswap`, must be those
of the model as it was. The swapped model must compute the same under jit, scan, vmap, remat, after
it was split and merged, and from the file of the parameters of the model as it was.

`--quantized` swaps with `quantization="fp8"` instead and fuses norms with the layers after them by
`fuse_norms`. Errors are then the distance of outputs and gradients to those of the model as it was,
relative to their norm, in bfloat16: of the swapped model, and of the fused one.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import io
import pathlib
import re
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import normfuse
import normfuse.layers.eqx
import normfuse.layers.linen
import normfuse.layers.nnx

BONSAI = "36284254cf738d99c1c5d1e3a292d27656a0a365"
TOKENS = jnp.arange(16).reshape(2, 8) % 13
IMAGES = jax.random.normal(jax.random.key(0), (2, 32, 32, 3))
SIZES = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4}
SIZES |= {"head_dim": 16, "num_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 10_000}
Forward = Callable[[Any, Any], Any]


# ---------------------------------------------------------------- the models


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its call, and, where one is checked, an input of two examples."""

    model: Any
    forward: Forward
    inputs: Any = None


def tunix_call(model: Any, tokens: jax.Array) -> jax.Array:
    """Logits of a model of Tunix."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return model(tokens, positions, None, mask)[0]


def tunix(name: str, cls: str, **sizes: Any) -> Model:
    """A model of Tunix."""
    module = importlib.import_module(f"tunix.models.{name}.model")
    known = {field.name for field in dataclasses.fields(module.ModelConfig)}
    config = module.ModelConfig(**{k: v for k, v in (SIZES | sizes).items() if k in known})
    return Model(getattr(module, cls)(config, rngs=nnx.Rngs(0)), tunix_call, TOKENS)


def tunix_gemma() -> Model:
    """Gemma 2: a norm before and after each part, with 1 + scale."""
    kinds = importlib.import_module("tunix.models.gemma.model").AttentionType
    sizes = {"num_embed": 64, "use_post_attn_norm": True, "use_post_ffw_norm": True}
    sizes |= {"final_logit_softcap": 30.0, "sliding_window_size": 4}
    sizes["attention_types"] = (kinds.GLOBAL, kinds.LOCAL_SLIDING)
    return tunix("gemma", "Gemma", **sizes)


def bonsai_mamba2() -> Model:
    """Mamba 2: a norm with an optional gate."""
    module = importlib.import_module("bonsai.models.mamba2.modeling")
    config = module.ModelConfig(
        vocab_size=64, hidden_size=32, state_size=16, head_dim=16, chunk_size=8, num_hidden_layers=2
    )
    model = module.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    return Model(model, lambda m, tokens: m(tokens)["logits"], TOKENS)


def bonsai_umt5() -> Model:
    """UMT5's encoder: T5's norm."""
    module = importlib.import_module("bonsai.models.umt5.modeling")
    config = module.ModelConfig(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2
    )
    model = module.UMT5EncoderModel(config, rngs=nnx.Rngs(0))
    model.eval()
    return Model(model, lambda m, tokens: m(tokens, jnp.ones_like(tokens)), TOKENS)


def dantinox(**sizes: Any) -> Model:
    """A decoder with rotary attention and SwiGLU."""
    config = importlib.import_module("dantinox.core.config")
    module = importlib.import_module("dantinox.core.model")
    small = {"dim": 32, "n_heads": 2, "num_blocks": 2, "vocab_size": 64, "max_context": 16}
    model = module.Transformer(config.ModelConfig(**small | sizes), rngs=nnx.Rngs(0))
    return Model(model, lambda m, tokens: m(tokens, deterministic=True).logits, TOKENS)


def eqx_zoo(architecture: str, **sizes: Any) -> Model:
    """A decoder whose layers take one sequence."""
    module = importlib.import_module("eqx_zoo.models.causal_lm.model")
    config = importlib.import_module("eqx_zoo.models.causal_lm.config").Config.from_hf(
        {"architectures": [architecture], "vocab_size": 64, "hidden_size": 32}
        | {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
        | {"tie_word_embeddings": False, "max_position_embeddings": 16}
        | sizes
    )
    model = module.CausalLM(config, key=jax.random.key(0))
    return Model(model, lambda m, tokens: jax.vmap(lambda t: m(t)[0])(tokens), TOKENS)


def equimo_vit() -> Model:
    """A vision transformer with SwiGLU and RMSNorms, one image at a time."""
    module = importlib.import_module("equimo.vision.models.vit")
    options = {"num_heads": 2, "depths": [2], "num_classes": 10, "reg_tokens": 0}
    options |= {"norm_layer": "rmsnorm", "ffn_layer": "swiglu", "key": jax.random.key(0)}
    model = module.VisionTransformer(32, 3, 32, 8, **options)

    def forward(model, images):
        images = images.astype(model.head.weight.dtype).transpose(0, 3, 1, 2)
        return jax.vmap(lambda image: model(image, inference=True))(images)

    return Model(model, forward, IMAGES)


def gemma_linen(**sizes: Any) -> Model:
    """Gemma 1 in Linen."""
    module = importlib.import_module("gemma.transformer")
    small = {"num_layers": 2, "num_embed": 64, "embed_dim": 32, "hidden_dim": 64}
    small |= {"num_heads": 2, "head_dim": 16, "num_kv_heads": 1}
    config = module.TransformerConfig(**small | sizes)

    def forward(model, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.tril(jnp.ones((len(tokens), tokens.shape[1], tokens.shape[1]), bool))
        return model(tokens, positions, None, mask)[0]

    return Model(module.Transformer(config), forward, TOKENS)


def vit_linen() -> Model:
    """A vision transformer under nn.scan: QK-norm, a gated MLP of one wide Dense."""
    module = importlib.import_module("image_classification_jax.models.ViT")
    model = module.Transformer(n_layers=2, enc_dim=32, n_heads=2, output_dim=10)
    return Model(model, lambda m, images: m(images, is_training=False), IMAGES)


MODELS: dict[str, Callable[[], Model]] = {
    "Tunix Qwen3 (nnx)": lambda: tunix("qwen3", "Qwen3"),
    "Tunix Llama3 (nnx)": lambda: tunix("llama3", "Llama3"),
    "Tunix Gemma 2 (nnx)": tunix_gemma,
    "Bonsai Mamba 2 (nnx)": bonsai_mamba2,
    "Bonsai UMT5 encoder (nnx)": bonsai_umt5,
    "DantinoX decoder (nnx)": dantinox,
    "eqx-zoo Qwen3 (Equinox)": lambda: eqx_zoo("Qwen3ForCausalLM"),
    "eqx-zoo Llama (Equinox)": lambda: eqx_zoo("LlamaForCausalLM"),
    "Equimo ViT (Equinox)": equimo_vit,
    "gemma-llm Gemma (Linen)": gemma_linen,
    "image-classification-jax ViT (Linen)": vit_linen,
}


# ---------------------------------------------------------------- the frameworks


@dataclasses.dataclass
class View:
    """A model as a function of its parameters.

    Attributes:
      params: the parameters, by path.
      run: computes the model for (parameters, inputs).
      home: the module with the framework's `swap`.
      structure: what `unswap` must bring back.
      again: returns the model split and merged.
    """

    params: Any
    run: Callable[[Any, jax.Array], jax.Array]
    home: Any
    structure: Any
    again: Callable[[], "View"]


def view(given: Model, model: Any, variables: Any = None) -> View:
    """Returns a model, or what it has become, as a function."""
    if isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        run = lambda params, x: given.forward(nnx.merge(graph, params, rest), x)
        again = lambda: view(given, nnx.merge(*nnx.split(model)))
        return View(params, run, normfuse.layers.nnx, graph, again)
    if isinstance(model, nn.Module):
        params = variables if variables is not None else linen_variables(given)
        run = lambda params, x: nn.apply(lambda m, x: given.forward(m, x), model)(params, x)
        again = lambda: view(given, model.clone(), params)
        return View(params, run, normfuse.layers.linen, model, again)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    run = lambda params, x: given.forward(eqx.combine(params, static), x)
    again = lambda: view(given, eqx.combine(*eqx.partition(model, eqx.is_array)))
    return View(params, run, normfuse.layers.eqx, jax.tree.structure(model), again)


def linen_variables(given: Model) -> Any:
    """Returns initial values, drawn: zeros would hide what is multiplied by them."""
    init = nn.init(lambda m, x: given.forward(m, x), given.model)
    shapes = jax.eval_shape(init, jax.random.key(0), given.inputs)
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    draw = lambda key, leaf: jax.random.normal(key, leaf.shape, jnp.float32) * 0.2
    return jax.tree.unflatten(tree, map(draw, keys, leaves))


def paths(params: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def loaded(before: View, after: View) -> Any:
    """Returns the parameters of the model as it was, saved, and loaded into what it has become."""
    if after.home is normfuse.layers.eqx:
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, before.params)
        file.seek(0)
        return eqx.tree_deserialise_leaves(file, after.params)
    pure = nnx.to_pure_dict if after.home is normfuse.layers.nnx else lambda params: params
    data = flax.serialization.to_bytes(flax.serialization.to_state_dict(pure(before.params)))
    state = flax.serialization.from_bytes(pure(after.params), data)
    return jax.tree.unflatten(jax.tree.structure(after.params), jax.tree.leaves(state))


# ---------------------------------------------------------------- the checks


def results(seen: View, inputs: jax.Array, dtype: Any, remat: bool = False) -> list[np.ndarray]:
    """Outputs of a model with its parameters in `dtype`, and gradients of a loss on them."""
    params = jax.tree.map(lambda p: p.astype(dtype), seen.params)
    run = jax.checkpoint(seen.run) if remat else seen.run

    def loss(params):
        y = run(params, inputs)
        return jnp.mean(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32)))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return [np.asarray(a, np.float64) for a in jax.tree.leaves((y, grads))]


def exact(seen: View, inputs: jax.Array) -> list[np.ndarray]:
    """Results in float64."""
    single = jnp.float32
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64
    try:
        return results(seen, inputs, jnp.float64)
    finally:
        jnp.float32 = single
        jax.config.update("jax_enable_x64", False)


def error(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """The largest difference of arrays, each relative to its largest value."""
    each = [np.max(np.abs(a - b)) / (np.max(np.abs(b)) + 1e-30) for a, b in zip(got, want)]
    assert len(got) == len(want)
    return float(max(each))


def check_transformations(
    seen: View, given: Model, before: View, theirs: list[np.ndarray], ours: list[np.ndarray]
) -> None:
    """Asserts that a swapped model computes the same under JAX's transformations.

    Args:
      seen, before: the swapped model, and the model as it was.
      theirs, ours: their results in float32, under jit.
    """
    x = given.inputs
    two = jnp.stack([x, x[::-1]])
    again, file = seen.again().run, loaded(before, seen)

    @jax.jit
    def each(params, file, x, two):
        body = lambda carry, x: (carry, seen.run(params, x))
        scanned, mapped = jax.lax.scan(body, 0, two)[1], jax.vmap(seen.run, (None, 0))(params, two)
        return scanned[0], mapped[0], again(params, x), seen.run(file, x)

    for got, want in zip(each(seen.params, file, x, two), [ours[0]] * 3 + [theirs[0]]):
        assert error([np.asarray(got, np.float64)], [want]) < 1e-4
    assert error(results(seen, x, jnp.float32, remat=True), ours) < 1e-4


def measure(name: str, given: Model) -> tuple[str, Any]:
    """Returns a row of the table, and the report."""
    before = view(given, given.model)
    dtypes, reports = (jnp.float32, jnp.bfloat16), []
    want = exact(before, given.inputs)
    theirs = [results(before, given.inputs, dtype) for dtype in dtypes]
    began = time.perf_counter()
    model = before.home.swap(given.model, report=reports.append)
    took = time.perf_counter() - began
    linen = isinstance(model, nn.Module)
    after = view(given, model, before.params if linen else None)
    ours = [results(after, given.inputs, dtype) for dtype in dtypes]
    assert paths(after.params) == paths(before.params)
    check_transformations(after, given, before, theirs[0], ours[0])
    back = view(given, before.home.unswap(model), before.params if linen else None)
    assert back.structure == before.structure
    report = reports[0]
    count = lambda *names: sum(row.served.startswith(names) for row in report.rows)
    norms = count("rms_norm", "normfuse RMSNorm", "normfuse LayerNorm")
    mlps = count("gated_product")
    others = len(report.swapped) - norms - mlps
    errors = [f"{error(a, want):.1e}, {error(b, want):.1e}" for a, b in zip(theirs, ours)]
    swapping = "when called" if linen else f"{1e3 * took:.0f} ms"
    cells = name, norms, mlps, others, len(report.left), swapping, *errors
    return f"| {' | '.join(map(str, cells))} |", report


def distance(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """The norm of the difference of arrays, relative to theirs."""
    a, b = (np.concatenate([array.ravel() for array in each]) for each in (got, want))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure_fp8(name: str, given: Model) -> tuple[str, Any]:
    """Returns a row of the table for FP8, and the report of `fuse_norms`."""
    before = view(given, given.model)
    model = before.home.swap(given.model, quantization="fp8")
    linen, reports = isinstance(model, nn.Module), []
    after = view(given, model, before.params if linen else None)
    fused = dataclasses.replace(after, run=normfuse.fuse_norms(after.run, report=reports.append))
    want, *ours = (results(seen, given.inputs, jnp.bfloat16) for seen in (before, after, fused))
    report = reports[0]
    layers = [int(n) for row in report.fused for n in re.findall(r"(\d+) ×", row.served)]
    norms = sum(row.is_norm for row in report.rows)
    others = len(report.rows) - norms
    errors = [f"{distance(each, want):.3f}" for each in ours]
    cells = name, f"{len(report.fused)} of {norms}", sum(layers), others, ", ".join(errors)
    return f"| {' | '.join(map(str, cells))} |", report


def look_in(folders: list[pathlib.Path]) -> None:
    """Makes the models' sources importable."""
    sys.path[:0] = map(str, folders)
    for folder in folders:
        for name in (
            "bonsai",
            "levanter",
            "t5x",
            "tunix",
        ):  # without __init__, which imports trainers
            if (folder / name).is_dir():
                package: Any = types.ModuleType(name)
                package.__path__, sys.modules[name] = [str(folder / name)], package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, action="append", default=[])
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    look_in(options.folder)
    if options.quantized:
        print("| model | norms that write codes | for layers | other FP8 layers | error |")
        print("|---|---|---|---|---|")
    else:
        print("| model | norms | gated MLPs | products | left | swap | float32 | bfloat16 |")
        print("|---|---|---|---|---|---|---|---|")
    for name, make in MODELS.items():
        if options.only not in name:
            continue
        try:
            given = make()
        except ModuleNotFoundError as missing:
            print(f"| {name} | not run: {missing} |")
            continue
        row, report = (measure_fp8 if options.quantized else measure)(name, given)
        print(row, flush=True)
        if options.report:
            print(f"\n{report}\n")


if __name__ == "__main__":
    main()
