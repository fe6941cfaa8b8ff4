"""A training step of public models of a billion parameters and more, before and after `swap`.

    pip install --no-deps --target build/foreign -r benchmarks/foreign_models.txt
    python benchmarks/foreign_steps.py --folder build/foreign                # on one GPU
    python benchmarks/foreign_steps.py --folder build/foreign --layers 1 --tokens 64 --seq 32 \
        --vocabulary 256                                                     # to try it on a CPU

Four programs of so many layers compile for minutes on a GPU, where XLA times ways to compute each
product. Where a run may not take that long, compile first, a process a model, beside each other;
runs then take the programs from JAX's cache, and say which of them were not there. (XLA's timings
disturb one another then. One process after another chooses best.) Without Triton's ways among them,
by `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`, four programs compile in less than half a minute.

    export JAX_COMPILATION_CACHE_DIR=build/programs
    python benchmarks/foreign_steps.py --folder build/foreign --only Llama --compile-only &
    python benchmarks/foreign_steps.py --folder build/foreign --only DantinoX --compile-only &
    wait
    python benchmarks/foreign_steps.py --folder build/foreign --only Llama
    python benchmarks/foreign_steps.py --folder build/foreign --only DantinoX

Every version is the same step but for the user's one line: float32 parameters, a forward in
bfloat16 (by the model's own settings where it has them, else of parameters that were cast), the
cross-entropy of random tokens, gradients, AdamW on donated state. No rematerialisation, and their
own attention. "swap" is `swap(model)`, "swap, fp8" `swap(model, quantization="fp8")`, and "fp8,
fused norms" wraps its forward in `fuse_norms`.

Times are the host's for several steps in a row, which end with the device idle; the versions take
turns, so that all see the same clocks, and the medians of the turns are printed. GiB are what the
compiled program takes: arguments, temporaries, and results that have no argument's place. The loss
is compared after so many steps from the same state, relative to theirs.

Compiled programs are searched for our kernels, and for products of FP8 codes: a version without
what it is named for is not measured, and the benchmark fails.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import gc
import importlib
import itertools
import math
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# A step takes most of the memory; JAX reads this when it first looks for a device.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from foreign_models import (
    TOKENS,
    Forward,
    Model,
    dantinox,
    eqx_zoo,
    gemma_linen,
    look_in,
    tunix_call,
)
from parts import emit
from programs import fp8_products, our_kernels
from step import taker

import normfuse
import normfuse.layers.eqx
import normfuse.layers.linen
import normfuse.layers.nnx

VERSIONS = ("theirs", "swap", "swap, fp8", "fp8, fused norms")
COMPARED = 10  # steps from the same state, after which losses are compared
Leaves = list[jax.Array]
State = tuple[Leaves, Any]  # parameters, and the optimizer's moments


# ---------------------------------------------------------------- the models


def tunix_qwen3(**sizes: Any) -> Model:
    """Qwen3 1.7B in Tunix, with the mixed precision of its configuration."""
    module = importlib.import_module("tunix.models.qwen3.model")
    config = dataclasses.replace(module.ModelConfig.qwen3_1p7b(), dtype=jnp.bfloat16, **sizes)
    return Model(module.Qwen3(config, rngs=nnx.Rngs(0)), tunix_call, TOKENS)


def bfloat16_dantinox(**sizes: Any) -> Model:
    """A decoder of DantinoX that multiplies in bfloat16.

    Casting its parameters, as its trainer does, leaves its embedding in float32: `nnx.Embed` keeps
    the dtype that it was made with. All products after it are in float32 then.
    """
    made = dantinox(**DANTINOX | sizes)
    made.model.embed.dtype = jnp.bfloat16
    return made


LLAMA = {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
LLAMA |= {"vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
LLAMA |= {"tie_word_embeddings": True, "max_position_embeddings": 131072}
DANTINOX = {"num_blocks": 16, "dim": 2048, "n_heads": 16, "vocab_size": 50304}
GEMMA = {"num_layers": 18, "num_embed": 256128, "embed_dim": 2048, "hidden_dim": 16384}
GEMMA |= {"num_heads": 8, "head_dim": 256, "num_kv_heads": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model whose step is measured.

    Attributes:
      make: makes it, given sizes that replace its own.
      layers, vocabulary, length: what that calls its number of layers, of tokens, and the longest
        sequence.
      cast: parameters are cast to bfloat16 before the forward.
      quantized: there are products of the framework's own classes, which FP8 serves.
    """

    make: Callable[..., Model]
    layers: str
    vocabulary: str
    length: str = ""
    cast: bool = True
    quantized: bool = True

    def versions(self) -> tuple[str, ...]:
        return VERSIONS if self.quantized else VERSIONS[:2]


MODELS = {
    "Tunix Qwen3 1.7B (nnx)": Case(tunix_qwen3, "num_layers", "vocab_size", cast=False),
    "eqx-zoo Llama 3.2 1B (Equinox)": Case(
        lambda **sizes: eqx_zoo("LlamaForCausalLM", **LLAMA | sizes),
        "num_hidden_layers",
        "vocab_size",
    ),
    "DantinoX decoder 1.2B (nnx)": Case(
        bfloat16_dantinox, "num_blocks", "vocab_size", "max_context"
    ),
    "gemma-llm Gemma 2B (Linen)": Case(
        lambda **sizes: gemma_linen(**GEMMA | sizes), "num_layers", "num_embed", quantized=False
    ),
}


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (0.02 * jax.random.normal(key, shape)).astype(dtype)


@dataclasses.dataclass
class Built:
    """A model at its real size, without its matrices: these are drawn, and not before it runs.

    Attributes:
      forward: its call.
      abstract: shapes and dtypes of its parameters.
      vectors: values of those that are no matrices, such as the scales of norms.
      model: the model of shapes, with values of what is no parameter.
      variables: the shapes of Linen's parameters.
    """

    forward: Forward
    abstract: list[jax.ShapeDtypeStruct]
    vectors: Leaves
    model: Any
    variables: Any

    def draw(self) -> Leaves:
        """Returns its parameters, the same again and again.

        Matrices are random, for some initialisers make zeros, vectors as the model's code has them.
        """
        keys, kept = jax.random.split(jax.random.key(1), len(self.abstract)), iter(self.vectors)
        one = lambda key, x: normal(key, x.shape, x.dtype) if x.ndim > 1 else jnp.copy(next(kept))
        return [one(key, x) for key, x in zip(keys, self.abstract)]


def is_inexact(x: Any) -> bool:
    """Whether a leaf is a parameter of an Equinox module, or the shape of one."""
    shape = isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.inexact)
    return shape or eqx.is_inexact_array(x)


def build(given: Model) -> Built:
    if isinstance(given.model, nnx.Module):
        graph, params, rest = nnx.split(given.model, nnx.Param, ...)
        merge = lambda params: (nnx.merge(graph, params, rest), None)
    elif isinstance(given.model, nn.Module):
        init = nn.init(lambda m, x: given.forward(m, x), given.model)
        params, merge = init(jax.random.key(0), given.inputs), lambda params: (given.model, params)
    else:
        params, rest = eqx.partition(given.model, eqx.is_inexact_array)
        merge = lambda params: (eqx.combine(params, rest), None)
    leaves, tree = jax.tree.flatten(params)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    vectors = [leaf for leaf in leaves if leaf.ndim < 2]
    return Built(given.forward, abstract, vectors, *merge(jax.tree.unflatten(tree, abstract)))


def home(model: Any) -> Any:
    """The module with the `swap` of a model's framework."""
    if isinstance(model, nnx.Module):
        return normfuse.layers.nnx
    return normfuse.layers.linen if isinstance(model, nn.Module) else normfuse.layers.eqx


# ---------------------------------------------------------------- the step


@dataclasses.dataclass
class Version:
    """A version's step, and what became of the model.

    Attributes:
      rest: what of the model is no parameter.
      found: names of our kernels in the compiled program, and how often they are called.
      products: in it, that multiply FP8 codes.
      norms: how many norms write codes.
      problem: why it is not measured.
    """

    name: str
    rest: Any
    lowered: Any
    norms: int = 0
    step: Any = None
    found: dict[str, int] = dataclasses.field(default_factory=dict)
    products: int = 0
    problem: str = ""
    gib: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def take(self, state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        return self.step(state, tokens, self.rest)

    def compiled(self, step: Any) -> str:
        """Takes the compiled step; returns what it lacks of what the version is named for."""
        self.step, text, used = step, step.as_text(), step.memory_analysis()
        size = used.argument_size_in_bytes + used.temp_size_in_bytes
        size += used.output_size_in_bytes - used.alias_size_in_bytes
        self.gib = size / math.exp2(30)
        self.found, self.products = our_kernels(text), fp8_products(text)
        norms = [name for name in self.found if "norm" in name]
        if bool(norms) != (self.name != "theirs"):
            return f"its program calls {norms or 'no norm'} of ours"
        if (self.products > 0) != ("fp8" in self.name):
            return f"its program has {self.products} products of FP8 codes"
        return "no norm writes codes" if self.name == VERSIONS[-1] and not self.norms else ""


def step_of(run: Callable[[Any, Any, jax.Array], jax.Array], tree: Any, cast: bool, optimizer: Any):
    """`((parameters, moments), tokens, rest of the model) -> ((parameters, moments), loss)`."""

    def loss(leaves: Leaves, tokens: jax.Array, rest: Any) -> jax.Array:
        if cast:
            leaves = [leaf.astype(jnp.bfloat16) for leaf in leaves]
        logits = run(jax.tree.unflatten(tree, leaves), rest, tokens[:, :-1])
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                logits.astype(jnp.float32), tokens[:, 1:]
            )
        )

    def step(state: State, tokens: jax.Array, rest: Any) -> tuple[State, jax.Array]:
        leaves, moments = state
        value, gradients = jax.value_and_grad(loss)(leaves, tokens, rest)
        updates, moments = optimizer.update(gradients, moments, leaves)
        leaves = [leaf + update for leaf, update in zip(leaves, updates)]
        return (leaves, moments), value

    return jax.jit(step, donate_argnums=0)


def traced(built: Built, case: Case, name: str, optimizer: Any, tokens: Any) -> Version:
    """Returns a version whose step is not compiled yet."""
    model, variables, forward = built.model, built.variables, built.forward
    if name != "theirs":  # nnx's swap works in place: it takes the version before again
        model = home(model).swap(model, quantization="fp8" if "fp8" in name else None)
    if isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        run = lambda params, rest, x: forward(nnx.merge(graph, params, rest), x)
    elif isinstance(model, nn.Module):
        params, rest = variables, None
        run = lambda params, _, x: nn.apply(lambda m, x: forward(m, x), model)(params, x)
    else:
        params, rest = eqx.partition(model, is_inexact)
        rest, static = eqx.partition(rest, eqx.is_array)
        run = lambda params, rest, x: forward(eqx.combine(params, rest, static), x)
    flat, tree = jax.tree.flatten(params)
    assert [leaf.shape for leaf in flat] == [leaf.shape for leaf in built.abstract]
    reports: list[Any] = []
    if name == VERSIONS[-1]:
        run = normfuse.fuse_norms(run, report=reports.append)
    step = step_of(run, tree, case.cast, optimizer)
    state = built.abstract, jax.eval_shape(optimizer.init, built.abstract)
    lowered = step.lower(state, tokens, rest)
    return Version(name, rest, lowered, norms=len(reports[0].fused) if reports else 0)


_hits: collections.Counter[int] = collections.Counter()  # programs found in JAX's cache, by thread


def count_hit(event: str, **_: Any) -> None:
    _hits[threading.get_ident()] += event == "/jax/compilation_cache/cache_hits"


def compiled(lowered: Any, after: list[concurrent.futures.Future]) -> tuple[Any, bool]:
    """Returns the program, compiled after others, and whether it was in JAX's cache."""
    concurrent.futures.wait(after)
    before = _hits[threading.get_ident()]
    program = lowered.compile()
    return program, _hits[threading.get_ident()] > before


def say(began: float, what: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {what}", file=sys.stderr, flush=True)


def measure(name: str, case: Case, options: argparse.Namespace) -> list[str]:
    """Prints the table and the lines of a model; returns what failed."""
    began = time.perf_counter()
    sizes = {case.layers: options.layers, case.vocabulary: options.vocabulary}
    sizes = {key: size for key, size in sizes.items() if size}
    if case.length:
        sizes[case.length] = options.seq
    built = build(case.make(**sizes))
    size = sum(math.prod(leaf.shape) for leaf in built.abstract)
    optimizer = optax.adamw(1e-6, b2=0.95, weight_decay=0.1)
    rows = max(options.tokens // options.seq, 1)
    vocabulary = options.vocabulary or max(leaf.shape[0] for leaf in built.abstract)
    tokens = jax.random.randint(jax.random.key(2), (rows, options.seq + 1), 0, vocabulary)
    say(began, f"{name}: {size / 1e9:.2f}e9 parameters, {rows} x {options.seq} tokens")
    versions = []
    plain = len(normfuse.fallbacks())
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = []
        for each in case.versions():
            versions.append(traced(built, case, each, optimizer, tokens))
            # Compilers time ways to compute products. Ours take those chosen for theirs where they
            # have the same products, which is quicker and fair.
            futures.append(pool.submit(compiled, versions[-1].lowered, futures[:1]))
            say(began, f"{each}: traced")
        for version, future in zip(versions, futures):
            program, found = future.result()
            version.problem = version.compiled(program)
            how = "found in the cache" if found else "compiled"
            say(began, f"{version.name}: {how}, {version.gib:.1f} GiB. {version.problem}")
            if not found and jax.config.jax_compilation_cache_dir and not options.compile_only:
                print(f"{name}, {version.name}: was not in the cache, so compiled here", flush=True)
            if options.kernels:
                say(began, f"{version.products} FP8 products, kernels {version.found}")
    for op, reason in normfuse.fallbacks()[plain:]:
        print(f"plain XLA serves {op}: {reason}", flush=True)
    problems = [f"{name}, {v.name}: not measured: {v.problem}" for v in versions if v.problem]
    if options.compile_only:
        return problems
    versions = [version for version in versions if not version.problem]
    state: list[Any] = []
    gc.collect()  # models may refer to themselves
    for version in versions:  # from the same state
        state.clear()  # before there is another
        params = built.draw()
        state[:] = [(params, jax.jit(optimizer.init)(params)), tokens]
        del params
        for _ in range(COMPARED):
            state[0], loss = version.take(*state)
            version.losses.append(float(loss))
        say(began, f"{version.name}: loss {version.losses[0]:.6f}, then {version.losses[-1]:.6f}")
    takes = {version.name: taker(jax, version.take, state) for version in versions}
    for _, version in itertools.product(range(options.rounds), versions):
        version.seconds.append(takes[version.name](options.steps) / options.steps)
        say(began, f"{version.name}: {1e3 * version.seconds[-1]:.2f} ms")
    show(name, size, tokens.size - rows, versions, options.kernels)
    return problems


def show(name: str, size: int, tokens: int, versions: list[Version], kernels: bool) -> None:
    device = jax.devices()[0].device_kind
    print(f"\n{name}, {size / 1e9:.2f}e9 parameters, {tokens} tokens a step, {device}\n")
    fp8 = "products" if jax.default_backend() == "gpu" else "arrays"
    print(f"| version | ms a step | tokens/s | ratio | GiB | loss, first | then | FP8 {fp8} |")
    print("|---|---|---|---|---|---|---|---|")
    theirs, lines = versions[0], []
    for version in versions:
        ms = 1e3 * statistics.median(version.seconds)
        spread = 1e3 * (max(version.seconds) - min(version.seconds)) / ms / 2
        ratio = statistics.median(theirs.seconds) / statistics.median(version.seconds)
        first, last = (
            version.losses[i] / theirs.losses[i] - 1 if version is not theirs else 0.0
            for i in (0, -1)
        )
        print(
            f"| {version.name} | {ms:.2f} ±{100 * spread:.1f}% | {1e3 * tokens / ms:.0f} "
            f"| {ratio:.3f} | {version.gib:.1f} | {first:+.1e} | {last:+.1e} | {version.products} |"
        )
        lines.append(
            {
                "model": name,
                "version": version.name,
                "device": device,
                "parameters": size,
                "tokens": tokens,
                "ms": round(ms, 3),
                "all_ms": [round(1e3 * seconds, 3) for seconds in version.seconds],
                "tokens_per_s": round(1e3 * tokens / ms),
                "ratio": round(ratio, 4),
                "gib": round(version.gib, 6),
                "losses": version.losses,
                "loss_first": first,
                "loss_then": last,
                "norms_with_codes": version.norms,
                "fp8": version.products,
                "kernels": version.found,
            }
        )
    if kernels:
        for version in versions:
            print(f"\n{version.name}: {version.found}")
    print()
    for line in lines:
        emit(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, action="append", default=[])
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--vocabulary", type=int, help="only so many tokens")
    parser.add_argument("--compile-only", action="store_true", help="into JAX's cache")
    parser.add_argument("--kernels", action="store_true", help="names of the kernels of a program")
    options = parser.parse_args()
    if options.compile_only:
        if not jax.config.jax_compilation_cache_dir:
            parser.error("--compile-only is for runs after it: set JAX_COMPILATION_CACHE_DIR")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others compile beside it
    jax.monitoring.register_event_listener(count_hit)
    look_in(options.folder)
    chosen = {name: case for name, case in MODELS.items() if options.only in name}
    if not chosen:
        parser.error(f"no model has {options.only!r} in its name: {', '.join(MODELS)}")
    failed = []
    for name, case in chosen.items():
        try:
            failed += measure(name, case, options)
        except (ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:  # such as out of memory
            failed.append(f"{name}: not measured: {str(error).splitlines()[0]}")
            print(failed[-1], flush=True)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
