"""Public models at their real sizes, with the loss and the inputs of their own users.

Packages are in `foreign_models.txt`. What has no package is a checkout in a folder that is given by
`--folder`, under the name of its repository:

    git clone https://github.com/OWNER/NAME build/foreign_src/NAME    # and check out COMMIT

Modules that these import but that no training step needs, such as storage clients, loggers and
other frameworks, need not be installed: empty ones stand in for them.

A row runs as its project's configuration has it where `pip` installs what that asks for: its
attention, what it recomputes, its dropout, its packing. All multiply in bfloat16. Another setting
stands beside it under its name. Levanter's default on GPUs is its flash attention where
TransformerEngine is not installed, MaxText's "autoselected" is tokamax's in Triton.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import pathlib
import sys
import textwrap
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec

REPOSITORIES = {  # by the folder that is searched: owner, and the commit that was measured
    "EasyLM": ("young-geng", "fe5b2c354e25d697fce7cd225e23bbbe72570da3"),
    "t5x": ("google-research", "cc342d419ec3e3e9c4bf1df33c82330cafdc1e16"),
    "shortcut-models": ("kvfrans", "601004348667094e1b71f30942199759412d4432"),
    "big_vision": ("google-research", "0127fb6b337ee2a27bf4e54dea79cff176527356"),
    "levanter/src": ("stanford-crfm", "9263f81e8b453241332c2c0b2d2001bfb2d2241c"),
    "maxtext/src": ("AI-Hypercomputer", "e591f30cbbf217ed67ef71263ec0538239f9c3b8"),
    "openpi/src": ("Physical-Intelligence", "15a9616a00943ada6c20a0f158e3adb39df2ccac"),
}
NEEDLESS = {"aqt", "augmax", "cloudpickle", "gcsfs", "orbax", "pathwaysutils", "qwix", "tensorflow"}
NEEDLESS |= {"tensorboardX", "tensorstore", "tokamax", "torch", "wandb", "xprof"}
WITHOUT_INIT = "levanter", "t5x", "tunix"  # theirs imports trainers
# These are stubs even where they are installed: they ask for versions, or for needless packages.
EMPTY = ["transformers.dependency_versions_check", "levanter.compat.hf_checkpoints"]
EMPTY += ["openpi.models_pytorch", "openpi.models_pytorch.pi0_pytorch"]
EMPTY += ["openpi.shared.array_typing"]
EMPTY += ["maxtext.configs.pyconfig", "maxtext.configs.types"]
EMPTY += [f"maxtext.utils.{name}" for name in ("elastic_utils", "maxtext_utils")]
EMPTY += [f"maxtext.kernels.attention.{name}_attention" for name in ("jax_flash", "ragged", "usp")]
EMPTY += [f"maxtext.kernels.attention.{name}_attention" for name in ("tokamax_ring", "ulysses")]


# ---------------------------------------------------------------- folders


class Anything(type):
    """A class of which everything can be asked, called, derived and subscripted."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return Nothing

    def __getitem__(cls, _: Any) -> Any:
        return Nothing

    def __bool__(cls) -> bool:
        return False

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__


class Nothing(metaclass=Anything):
    """What a module that is not there has."""


class Empty(types.ModuleType):
    """A module that is not there."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves empty modules for packages that are not installed and that nothing here runs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in NEEDLESS or name in NEEDLESS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def imported(name: str) -> Any:
    return importlib.import_module(name)


def older(name: str) -> Any:
    """A module that calls `jnp.clip` as JAX had it once."""
    module = imported(name)
    clip = lambda x, a_min=None, a_max=None: jnp.clip(x, a_min, a_max)
    module.jnp = types.SimpleNamespace(**vars(jnp) | {"clip": clip})
    return module


def look_in(folders: list[pathlib.Path]) -> None:
    """Makes the models' sources importable."""
    checkouts = [folder / name for folder in folders for name in REPOSITORIES]
    folders = folders + [each for each in checkouts if each.is_dir()]
    sys.path[:0] = map(str, folders)
    for folder in folders:
        for name in WITHOUT_INIT:
            if (folder / name).is_dir():
                package: Any = types.ModuleType(name)
                package.__path__, sys.modules[name] = [str(folder / name)], package
    sys.meta_path.append(Finder())
    sys.modules.update({name: Empty(name) for name in EMPTY})
    typing: Any = sys.modules["openpi.shared.array_typing"]
    typing.typecheck, typing.disable_typechecking = (
        lambda function: function,
        contextlib.nullcontext,
    )


# ---------------------------------------------------------------- inputs and losses


Batch = tuple[Any, Any]  # inputs of the model, and what it should predict
Own = tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any, jax.Array]]]


def words(rows: int, length: int, vocabulary: int) -> Batch:
    """Tokens as frequent as a text's words, by Zipf's law, and the one after each."""
    share = 1 / jnp.arange(1, vocabulary + 1)
    tokens = jax.random.choice(
        jax.random.key(2), vocabulary, (rows, length + 1), p=share / share.sum()
    )
    return tokens[:, :-1], tokens[:, 1:]


def words_from_one(rows: int, length: int, vocabulary: int) -> Batch:
    """Words of a text without 0, which T5X takes for padding and hides."""
    tokens, labels = words(rows, length, vocabulary - 1)
    return tokens + 1, labels + 1


def masked_words(rows: int, length: int, vocabulary: int) -> Batch:
    """Tokens of texts of some length, 0 after it, and those of one place in seven to predict."""
    tokens = 1 + words(rows, length, vocabulary - 1)[0]
    lengths = jax.random.randint(jax.random.key(3), (rows, 1), length // 4, length + 1)
    tokens = jnp.where(jnp.arange(length) < lengths, tokens, 0)
    return tokens, jnp.where(jnp.arange(length) % 7 == 3, tokens, 0)


def text_pairs(rows: int, length: int, vocabulary: int) -> Batch:
    """Padded texts with others of a quarter of the length, and the tokens of these."""
    other, labels = words(rows, length // 4, vocabulary)
    return (masked_words(rows, length, vocabulary)[0], other), labels


def spoken(rows: int, length: int, vocabulary: int) -> Batch:
    """Two frames of a spectrogram for each token of the encoder, and the words of a text."""
    tokens, labels = words(rows, 448, vocabulary)
    return (jax.random.normal(jax.random.key(3), (rows, 80, 2 * length)), tokens), labels


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean over tokens, by optax, in float32."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(losses)


def masked_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """That of Hugging Face's `run_mlm_flax.py` and `run_t5_mlm_flax.py`, of labels above 0."""
    hot = jax.nn.one_hot(labels, logits.shape[-1])
    losses = optax.softmax_cross_entropy(logits.astype(jnp.float32), hot) * (labels > 0)
    return losses.sum() / (labels > 0).sum()


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and its call for (model, inputs)."""

    model: Any
    forward: Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose step is measured."""

    # Makes it, given sizes that replace its own.
    make: Callable[..., Model]
    # Its words for its number of layers, of tokens or classes, and for the longest sequence.
    layers: str
    vocabulary: str
    length: str = ""
    classes: int = 0
    rows: int = 4
    seq: int = 2048
    # Parameters are cast to bfloat16 before the forward.
    cast: bool = False
    # Makes inputs and what should be predicted, for (rows, tokens of each, classes).
    batch: Callable[[int, int, int], Batch] = words
    # For what the model computes, and what it should.
    loss: Callable[[Any, Any], jax.Array] = cross_entropy
    # Its trainer's step in the place of ours, for (what it calls as `jax.value_and_grad`, sizes):
    # what makes the moments of parameters, and the step for (parameters, moments, inputs, what it
    # should predict).
    own: Callable[..., Own] | None = None


# ---------------------------------------------------------------- language models


def positions(tokens: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def masked_call(model: Any, tokens: jax.Array) -> jax.Array:
    """Logits of a model of Tunix or gemma-llm, which takes a mask of each sequence."""
    rows, length = tokens.shape
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (rows, length, length))
    return model(tokens, positions(tokens), None, mask)[0]


def tunix_qwen3(**sizes: Any) -> Model:
    """Qwen3 1.7B in Tunix, with the mixed precision of its configuration."""
    module = imported("tunix.models.qwen3.model")
    config = dataclasses.replace(module.ModelConfig.qwen3_1p7b(), dtype=jnp.bfloat16, **sizes)
    return Model(module.Qwen3(config, rngs=nnx.Rngs(0)), masked_call)


def at_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes arrays even where a program is traced."""
    return functools.wraps(function)(jax.ensure_compile_time_eval()(function))


def dantinox(**sizes: Any) -> Model:
    """A decoder with rotary attention and SwiGLU."""
    config = imported("dantinox.core.config")
    module = imported("dantinox.core.model")
    small = {"dim": 32, "n_heads": 2, "num_blocks": 2, "vocab_size": 64, "max_context": 16}
    model = module.Transformer(config.ModelConfig(**small | sizes), rngs=nnx.Rngs(0))
    return Model(model, lambda m, tokens: m(tokens, deterministic=True).logits)


def bfloat16_dantinox(**sizes: Any) -> Model:
    """A decoder of DantinoX that multiplies in bfloat16.

    Casting its parameters, as its trainer does, leaves its embedding in float32: `nnx.Embed` keeps
    the dtype that it was made with. All products after it are in float32 then. Its tables of angles
    are no part of its state, so they are computed at once.
    """
    attention = imported("dantinox.core.attention").BaseAttention
    attention._compute_angle = at_once(attention._compute_angle)
    made = dantinox(**DANTINOX | sizes)
    made.model.embed.dtype = jnp.bfloat16
    return made


def eqx_zoo(**sizes: Any) -> Model:
    """A decoder whose layers take one sequence."""
    module = imported("eqx_zoo.models.causal_lm.model")
    made = imported("eqx_zoo.models.causal_lm.config").Config.from_hf(sizes)
    model = module.CausalLM(made, key=jax.random.key(0))
    return Model(model, lambda m, tokens: jax.vmap(lambda t: m(t)[0])(tokens))


def gemma_linen(**sizes: Any) -> Model:
    """Gemma 1 in Linen."""
    module = imported("gemma.transformer")
    config = module.TransformerConfig(**GEMMA | sizes)
    return Model(module.Transformer(config), masked_call)


def easylm_llama(**sizes: Any) -> Model:
    """EasyLM's Llama 1B, of 16 layers; it recomputes them."""
    module = older("EasyLM.models.llama.llama_model")
    updates = {"base_model": "llama_1b", "num_hidden_layers": 16} | sizes
    default = module.LLaMAConfigurator.get_default_config()
    for name, size in updates.items():
        default[name] = size
    config = module.LLaMAConfigurator.finalize_config(default)
    model = module.FlaxLLaMAForCausalLMModule(config, dtype=jnp.bfloat16)
    return Model(model, lambda m, x: m(x, jnp.ones_like(x), positions(x)).logits)


def easylm_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """That of its trainer."""
    module = imported("EasyLM.jax_utils")
    return module.cross_entropy_loss_and_accuracy(logits, labels)[0]


def nested(module: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function that a trainer defines within another, as it is written, but for its decorators.

    `names` are what it finds outside itself.
    """
    file = importlib.util.find_spec(module).origin
    text = pathlib.Path(file).read_text()
    every = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    node = next(node for node in every if node.name == name)
    lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
    exec(compile(textwrap.dedent("\n".join(lines)), file, "exec"), names)
    return names[name]


def jax_with(value_and_grad: Callable[..., Any]) -> Any:
    """JAX as a trainer sees it whose one changed line is around what it differentiates."""
    return types.SimpleNamespace(**vars(jax) | {"value_and_grad": value_and_grad})


def easylm_own(value_and_grad: Callable[..., Any], **sizes: Any) -> Own:
    """EasyLM's `train_step`: the batch closed over, its accuracy, its AdamW that clips."""
    optimizers, utils = map(imported, ("EasyLM.optimizers", "EasyLM.jax_utils"))
    configurator = imported("EasyLM.models.llama.llama_model").LLaMAConfigurator
    optimizer, known = optimizers.OptimizerFactory.get_optimizer(
        optimizers.OptimizerFactory.get_default_config()
    )
    names = vars(utils) | {"jax": jax_with(value_and_grad), "model": easylm_llama(**sizes).model}
    names |= {"LLaMAConfigurator": configurator, "optimizer_info": known, "PS": PartitionSpec}
    names["with_sharding_constraint"] = lambda x, _: x  # one device
    theirs = nested("EasyLM.models.llama.llama_train", "train_step", names)

    def step(params: Any, kept: Any, inputs: Any, wanted: Any) -> tuple[Any, Any, jax.Array]:
        count, moments = kept
        batch = {"input_tokens": inputs, "target_tokens": wanted}
        batch["loss_masks"] = jnp.ones(inputs.shape)
        state = TrainState(count, None, params, optimizer, moments)
        state, _, metrics = theirs(state, jax.random.key(0), batch)
        return state.params, (state.step, state.opt_state), metrics["loss"]

    return lambda params: (jnp.zeros((), int), optimizer.init(params)), step


def hugging_face(kind: str, head: str, call: Callable[..., Any], **sizes: Any) -> Model:
    module = older(f"transformers.models.{kind.lower()}.modeling_flax_{kind.lower()}")
    config = getattr(imported("transformers"), f"{kind}Config")(**sizes)
    model = getattr(module, f"Flax{kind}{head}Module")(config, dtype=jnp.bfloat16)
    return Model(model, lambda m, x: call(m, x).logits)


def gpt2_call(model: Any, x: jax.Array, **options: Any) -> Any:
    return model(x, jnp.ones_like(x), positions(x), **options)


def roberta_call(model: Any, x: jax.Array, **options: Any) -> Any:
    return model(x, x > 0, jnp.zeros_like(x), positions(x) + 2, None, **options)  # 0, 1: padding


def bart_call(model: Any, inputs: Any, **options: Any) -> Any:
    x, y = inputs
    return model(x, x > 0, y, jnp.ones_like(y), positions(x), positions(y), **options)


def bert_call(model: Any, x: jax.Array, **options: Any) -> Any:
    return model(x, x > 0, jnp.zeros_like(x), positions(x), None, **options)


def t5_call(model: Any, inputs: Any, **options: Any) -> Any:
    x, y = inputs
    return model(x, x > 0, y, jnp.ones_like(y), **options)


def whisper_call(model: Any, inputs: Any) -> Any:
    x, y = inputs
    return model(x, y, jnp.ones_like(y), positions(y))


def one_hot_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """That of Hugging Face's `run_clm_flax.py`."""
    hot = jax.nn.one_hot(labels, logits.shape[-1])
    return jnp.mean(optax.softmax_cross_entropy(logits.astype(jnp.float32), hot))


def soft_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """That of images with one-hot classes."""
    return jnp.mean(optax.softmax_cross_entropy(logits.astype(jnp.float32), labels))


def t5x_decoder(**sizes: Any) -> Model:
    """T5X's decoder: DenseGeneral, gated gelu, and a learned bias of relative positions."""
    module = imported("t5x.examples.decoder_only.network")
    model = module.DecoderWrapper(module.TransformerConfig(**T5X | sizes))
    call = lambda m, x: m(x[0], *x, enable_dropout=False)
    return Model(model, lambda m, x: call(m, x if isinstance(x, tuple) else (x,)))


def levanter_llama(backend: str | None = None, **sizes: Any) -> Model:
    """Levanter's Llama, which computes its loss itself."""
    haliax, lm = map(imported, ("haliax", "levanter.models.lm_model"))
    attention = imported("levanter.layers.attention")
    heavy: Any = sys.modules["levanter.compat.hf_checkpoints"]
    heavy.HFCompatConfig = lm.LmConfig  # without what reads and writes checkpoints
    module = imported("levanter.models.llama")
    if not hasattr(
        imported("jax").core, "is_constant_dim"
    ):  # haliax's copy of this function asks JAX for it
        imported("haliax._src.dot")._jittable_dg_einsum = jnp.einsum
    sizes = LEVANTER | sizes
    vocabulary = haliax.Axis("vocab", sizes.pop("vocab_size"))
    backend = backend and attention.AttentionBackend[backend]
    config = module.LlamaConfig(**sizes, attn_backend=backend)
    model = module.LlamaLMHeadModel.init(vocabulary, config, key=jax.random.key(0))

    def forward(model, tokens):
        named = haliax.named(tokens, (haliax.Axis("batch", len(tokens)), config.Pos))
        last = lm.LmExample.causal_loss_mask(config.Pos)
        example = lm.LmExample(named, last, attention.AttentionMask.causal())
        mean = lambda losses, where, axis: haliax.mean(losses, axis, where=where > 0)
        return lm.compute_next_token_loss(model, example, reduction=mean).scalar()

    return Model(model, forward)


def levanter_case(**sizes: Any) -> Case:
    make = functools.partial(levanter_llama, **sizes)
    names = "num_layers", "vocab_size", "seq_len"
    return Case(make, *names, classes=32000, cast=True, loss=computed)


class MaxText(nnx.Module):
    """A decoder of MaxText's layers; its trainer makes the rest from settings."""

    def __init__(self, **sizes: Any):
        parts = "embeddings", "linears", "normalizations"
        embeddings, linears, norms = (imported(f"maxtext.layers.{name}") for name in parts)
        common, llama = map(imported, ("maxtext.common.common_types", "maxtext.models.llama2"))
        file = pathlib.Path(llama.__file__).parents[1] / "configs" / "base.yml"
        sizes = yaml.safe_load(file.read_text()) | MAXTEXT | sizes
        block = common.DecoderBlockType.LLAMA2
        config = types.SimpleNamespace(
            **sizes | {"shard_mode": common.ShardMode.AUTO, "decoder_block": block}
        )
        axes = tuple(config.mesh_axes)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)
        rngs = nnx.Rngs(0)
        self.mode = common.MODEL_MODE_TRAIN
        options = {"config": config, "mesh": mesh, "dtype": config.dtype, "rngs": rngs}
        self.embed = embeddings.Embed(config.vocab_size, config.emb_dim, **options)
        self.layers = nnx.List(
            llama.LlamaDecoderLayer(config, self.mode, mesh, rngs)
            for _ in range(config.num_decoder_layers)
        )
        options = {"dtype": config.dtype, "weight_dtype": config.weight_dtype, "rngs": rngs}
        epsilon = config.normalization_layer_epsilon
        self.norm = norms.RMSNorm(config.emb_dim, epsilon=epsilon, **options)
        self.head = linears.DenseGeneral(config.emb_dim, config.vocab_size, **options)

    def __call__(self, tokens: jax.Array, segments: jax.Array, places: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x, segments, places, True, self.mode)
        return self.head(self.norm(x))


def packed(rows: int, length: int, vocabulary: int) -> Batch:
    """Words of several texts a row, the text of each, from 1 on, and its place there."""
    tokens, labels = words_from_one(rows, length, vocabulary)
    ends = jax.random.uniform(jax.random.key(3), tokens.shape) < 4 / length  # five a row
    texts = jnp.cumsum(ends, axis=1) - ends + 1
    places = positions(tokens)
    begins = jnp.where(texts != jnp.pad(texts, ((0, 0), (1, 0)))[:, :-1], places, 0)
    return (tokens, texts, places - jax.lax.cummax(begins, axis=1)), labels


def computed(loss: jax.Array, _: Any) -> jax.Array:
    """That of a model which computes it."""
    return loss


# ---------------------------------------------------------------- images


def dit(**sizes: Any) -> Model:
    """DiT-XL/2 on latents of 4 channels."""
    module = imported("model")
    module.core = types.SimpleNamespace(as_named_shape=lambda shape: shape)  # older JAX had it
    return Model(module.DiT(**DIT | sizes), lambda m, inputs: m(*inputs, train=True))


def latents(rows: int, length: int, classes: int) -> Batch:
    """Latents with noise, times, steps, and classes; and the velocities to predict."""
    keys, side = jax.random.split(jax.random.key(2), 4), 2 * math.isqrt(length)
    clean, noise = jax.random.normal(keys[0], (2, rows, side, side, 4))
    time = jax.random.randint(keys[1], (rows,), 0, 128) / 128
    t = time[:, None, None, None]
    mixed = (1 - (1 - 1e-5) * t) * noise + t * clean
    labels = jax.random.randint(keys[2], (rows,), 0, classes)
    return (mixed, time, jnp.full(rows, 7.0), labels), clean - (1 - 1e-5) * noise


def squared_error(predicted: jax.Array, wanted: jax.Array) -> jax.Array:
    return jnp.mean(jnp.mean((predicted - wanted) ** 2, axis=(1, 2, 3)))


def vit(**sizes: Any) -> Model:
    """ViT-L/16 of big_vision, as its configuration for ImageNet-21k has it."""
    module = imported("big_vision.models.vit")
    options = {"num_classes": 21843, "pool_type": "gap", "posemb": "learn", "dtype_mm": "bfloat16"}
    model = module.Model(variant="L/16", **options | sizes)
    return Model(model, lambda m, images: m(images, train=True)[0])


def big_vision_own(value_and_grad: Callable[..., Any], **sizes: Any) -> Own:
    """big_vision's `update_fn` for ImageNet-21k: its mixup, its clipping Adam, its measurements."""
    module, rates = map(imported, ("big_vision.optax", "big_vision.configs.vit_i21k"))
    config = rates.get_config("variant=L/16")
    inner = vit(**sizes).model
    names = {"jax": jax_with(value_and_grad), "jnp": jnp, "optax": optax, "config": config}
    names |= {"model": inner, "bv_optax": module, "u": imported("big_vision.utils")}
    names |= {"P": PartitionSpec, "shard_map": jax.shard_map, "devices_flat": jax.devices()[:1]}
    made: dict[str, Any] = {}

    def init(params: Any) -> Any:
        sizes = {"total_steps": 100_000, "batch_size": 64, "data_size": 64000}
        made["tx"], _ = module.make(config, params["params"], sched_kw=sizes)
        return made["tx"].init(params["params"])

    def step(params: Any, kept: Any, inputs: Any, wanted: Any) -> tuple[Any, Any, jax.Array]:
        theirs = nested("big_vision.train", "update_fn", names | made)
        state, batch = {"opt": kept, **params}, {"image": inputs, "labels": wanted}
        state, measured = theirs(state, jax.random.key(0), batch)
        return {"params": state["params"]}, state["opt"], measured["training_loss"]

    return init, step


def images(rows: int, length: int, classes: int) -> Batch:
    keys, side = jax.random.split(jax.random.key(2)), 16 * math.isqrt(length)
    labels = jax.random.randint(keys[1], (rows,), 0, classes)
    pixels = jax.random.uniform(keys[0], (rows, side, side, 3), minval=-1, maxval=1)
    return pixels, jax.nn.one_hot(labels, classes)


def sigmoid_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return imported("big_vision.utils").sigmoid_xent(logits=logits, labels=labels)


def pi0(layers: int = 0, vocabulary: int = 0) -> Model:
    """openpi's π0: PaliGemma, and an expert for actions that shares its attention."""
    gemma, siglip = (imported(f"openpi.models.{name}") for name in ("gemma", "siglip"))
    if layers:
        whole, variant = gemma.get_config, siglip.decode_variant
        gemma.get_config = lambda name: dataclasses.replace(whole(name), depth=layers)
        siglip.decode_variant = lambda name: variant(name) | {"depth": layers}
    if vocabulary:
        gemma.PALIGEMMA_VOCAB_SIZE = vocabulary
    config = imported("openpi.models.pi0_config").Pi0Config()
    model = imported("openpi.models.pi0").Pi0(config, rngs=nnx.Rngs(0))
    return Model(model, lambda m, inputs: jnp.mean(m.compute_loss(*inputs)))


def observations(rows: int, _: int, vocabulary: int) -> Batch:
    """A key, observations of three cameras and a prompt, and actions."""
    module = imported("openpi.models.model")
    keys, seen = jax.random.split(jax.random.key(2), 4), jnp.ones(rows, bool)
    pixels = jax.random.uniform(keys[0], (3, rows, 224, 224, 3), minval=-1, maxval=1)
    observation = module.Observation(
        images=dict(zip(module.IMAGE_KEYS, pixels)),
        image_masks=dict.fromkeys(module.IMAGE_KEYS, seen),
        state=jax.random.normal(keys[1], (rows, 32)),
        tokenized_prompt=jax.random.randint(keys[2], (rows, 48), 0, vocabulary),
        tokenized_prompt_mask=jnp.ones((rows, 48), bool),
    )
    return (keys[3], observation, jax.random.normal(keys[3], (rows, 50, 32))), None


# ---------------------------------------------------------------- all of them


LLAMA = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
LLAMA |= {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
LLAMA |= {"tie_word_embeddings": True, "max_position_embeddings": 131072}
LLAMA |= {"architectures": ["LlamaForCausalLM"]}
DANTINOX = {"num_blocks": 16, "dim": 2048, "n_heads": 16, "vocab_size": 50304}
GEMMA = {"num_layers": 18, "num_embed": 256128, "embed_dim": 2048, "hidden_dim": 16384}
GEMMA |= {"num_heads": 8, "head_dim": 256, "num_kv_heads": 1}
GPT2 = {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024, "use_cache": False}
UNDROPPED = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
BERT |= {"intermediate_size": 4096, "vocab_size": 30522}
T5 = {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16}
T5 |= {"vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
TINY_LLAMA = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
TINY_LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}
OPT = {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32}
OPT |= {"word_embed_proj_dim": 2048, "vocab_size": 50272}
GPTJ = {"n_embd": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 50400, "use_cache": False}
BART = {"vocab_size": 50265}  # the rest is the configuration's default
ROBERTA = BERT | {"vocab_size": 50265, "max_position_embeddings": 514}
VIT = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
VIT |= {"intermediate_size": 4096, "num_labels": 1000}
WHISPER = {"d_model": 1024, "encoder_layers": 24, "decoder_layers": 24, "vocab_size": 51865}
WHISPER |= {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
WHISPER |= {"encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096}

T5X = {"vocab_size": 32000, "dtype": jnp.bfloat16, "emb_dim": 2048, "num_heads": 16}
T5X |= {"num_layers": 16, "head_dim": 128, "mlp_dim": 5504, "dropout_rate": 0.0}
T5X |= {"mlp_activations": ("gelu", "linear")}
LEVANTER = {"hidden_dim": 2048, "intermediate_dim": 5504, "num_layers": 16, "num_heads": 16}
LEVANTER |= {"num_kv_heads": 16, "vocab_size": 32000}
MAXTEXT = {"emb_dim": 2048, "mlp_dim": 5504, "num_query_heads": 16, "num_kv_heads": 16}
MAXTEXT |= {"head_dim": 128, "num_decoder_layers": 16, "vocab_size": 32000, "scan_layers": False}
MAXTEXT |= {"dtype": jnp.bfloat16, "weight_dtype": jnp.float32}
MAXTEXT |= {"micro_batch_size_to_train_on": 4, "using_pipeline_parallelism": False}
DIT = {"patch_size": 2, "hidden_size": 1152, "depth": 28, "num_heads": 16, "mlp_ratio": 4}
DIT |= {"out_channels": 4, "class_dropout_prob": 0.1, "num_classes": 1000}


WHOLE = {"gradient_checkpointing": False}
dropping = functools.partial(functools.partial, deterministic=False)  # of a call


def maxtext_case(**sizes: Any) -> Case:
    make = lambda **others: Model(MaxText(**sizes | others), lambda m, inputs: m(*inputs))
    names = "num_decoder_layers", "vocab_size", "max_target_length"
    return Case(make, *names, classes=32000, batch=packed)


def easylm_case(**sizes: Any) -> Case:
    make, own = (functools.partial(each, **sizes) for each in (easylm_llama, easylm_own))
    return Case(make, "num_hidden_layers", "vocab_size", "", 32000, loss=easylm_loss, own=own)


def ours(case: Case) -> Case:
    return dataclasses.replace(case, own=None)


def vit_case(**sizes: Any) -> Case:
    make, own = (functools.partial(each, **sizes) for each in (vit, big_vision_own))
    names = "depth", "num_classes", ""
    return Case(make, *names, 21843, 64, 196, batch=images, loss=sigmoid_loss, own=own)


MODELS = {
    "eqx-zoo Llama 3.2 1B (Equinox)": Case(
        functools.partial(eqx_zoo, **LLAMA),
        *("num_hidden_layers", "vocab_size", "", 128256),
        cast=True,
    ),
    "Tunix Qwen3 1.7B (nnx)": Case(tunix_qwen3, "num_layers", "vocab_size", "", 151936),
    "DantinoX decoder 1.2B (nnx)": Case(
        bfloat16_dantinox, "num_blocks", "vocab_size", "max_context", 50304, cast=True
    ),
    "gemma-llm Gemma 2B (Linen)": Case(
        gemma_linen, "num_layers", "num_embed", "", 256128, 2, cast=True
    ),
    "EasyLM Llama .94B (Linen)": ours(easylm_case()),
    "EasyLM Llama .94B, nothing recomputed (Linen)": ours(easylm_case(remat_policy="")),
    "EasyLM's own step, Llama .94B (Linen)": easylm_case(),
    "EasyLM's own step, Llama .94B, nothing recomputed (Linen)": easylm_case(remat_policy=""),
    "T5X decoder .94B, packed (Linen)": Case(
        t5x_decoder, "num_layers", "vocab_size", "", 32000, batch=packed
    ),
    "T5X decoder .94B, one text a row (Linen)": Case(
        t5x_decoder, "num_layers", "vocab_size", "", 32000, batch=words_from_one
    ),
    "Levanter Llama .94B (Equinox)": levanter_case(),
    "Levanter Llama .94B, nothing recomputed (Equinox)": levanter_case(**WHOLE),
    "Levanter Llama .94B, its plain attention, nothing recomputed (Equinox)": levanter_case(
        backend="VANILLA", **WHOLE
    ),
    "MaxText's layers, Llama .94B, packed (nnx)": maxtext_case(),
    "MaxText's layers, Llama .94B, its plain attention, packed (nnx)": maxtext_case(
        attention="dot_product"
    ),
    "DiT-XL/2 .68B (Linen)": Case(
        dit, "depth", "num_classes", "", 1000, 32, 256, batch=latents, loss=squared_error
    ),
    "big_vision ViT-L/16 .32B (Linen)": ours(vit_case()),
    "big_vision's own step, ViT-L/16 .32B, class token, dropout (Linen)": vit_case(
        pool_type="tok", dropout=0.1
    ),
    "openpi PaliGemma, π0 3.2B (nnx)": Case(
        pi0, "layers", "vocabulary", "", 257152, 8, 867, batch=observations, loss=computed
    ),
}

CAUSAL = words, one_hot_cross_entropy
LM = "GPT2", "LMHead", "n_layer", *CAUSAL
LLAMA_LM = "Llama", "ForCausalLM", "num_hidden_layers", *CAUSAL
OPT_LM = "OPT", "ForCausalLM", "num_hidden_layers", *CAUSAL
GPTJ_LM = "GPTJ", "ForCausalLM", "n_layer", *CAUSAL
MASKED = "num_hidden_layers", masked_words, masked_cross_entropy
BERT_LM = "Bert", "ForMaskedLM", *MASKED
ROBERTA_LM = "Roberta", "ForMaskedLM", *MASKED
T5_LM = "T5", "ForConditionalGeneration", "num_layers", text_pairs, masked_cross_entropy
BART_LM = "Bart", "ForConditionalGeneration", "encoder_layers", text_pairs, masked_cross_entropy
WHISPER_LM = "Whisper", "ForConditionalGeneration", "encoder_layers", spoken, one_hot_cross_entropy
VIT_LM = "ViT", "ForImageClassification", "num_hidden_layers", images, soft_cross_entropy
for name, (kind, head, layers, batch, loss), call, sizes, classes, rows, seq in (
    ("Llama 1.1B", LLAMA_LM, gpt2_call, TINY_LLAMA, 32000, 4, 2048),
    ("OPT 1.3B, its dropout", OPT_LM, dropping(gpt2_call), OPT, 50272, 4, 1024),
    ("GPT-J 1.3B", GPTJ_LM, gpt2_call, GPTJ, 50400, 4, 2048),
    ("BART-large .41B, its dropout", BART_LM, dropping(bart_call), BART, 50265, 16, 1024),
    ("BART-large .41B, no dropout", BART_LM, bart_call, BART, 50265, 16, 1024),
    (
        "RoBERTa-large .36B, its dropout",
        ROBERTA_LM,
        dropping(roberta_call),
        ROBERTA,
        50265,
        32,
        512,
    ),
    ("GPT-2 .77B, its dropout", LM, dropping(gpt2_call), GPT2, 50257, 8, 1024),
    ("GPT-2 .77B, no dropout", LM, gpt2_call, GPT2 | UNDROPPED, 50257, 8, 1024),
    ("BERT-large .34B, its dropout", BERT_LM, dropping(bert_call), BERT, 30522, 32, 512),
    ("BERT-large .34B, no dropout", BERT_LM, bert_call, BERT, 30522, 32, 512),
    ("T5 v1.1 large .78B, its dropout", T5_LM, dropping(t5_call), T5, 32128, 16, 512),
    ("Whisper medium .76B", WHISPER_LM, whisper_call, WHISPER, 51865, 8, 1500),
    ("ViT-L/16 .30B", VIT_LM, lambda m, x: m(x), VIT, 1000, 64, 196),
):
    make = functools.partial(hugging_face, kind, head, call, **sizes)
    classified = "num_labels" if kind == "ViT" else "vocab_size"
    case = Case(make, layers, classified, "", classes, rows, seq, batch=batch, loss=loss)
    MODELS[f"Hugging Face {name} (Linen)"] = case
