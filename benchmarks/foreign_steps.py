"""A training step of public models of a billion parameters and more, before and after `fuse`.

    pip install --no-deps --target build/foreign -r benchmarks/foreign_models.txt
    python benchmarks/foreign_steps.py --folder build/foreign                # on one GPU
    python benchmarks/foreign_steps.py --folder build/foreign --trace-only   # what becomes of them
    python benchmarks/foreign_steps.py --folder build/foreign --layers 1 --tokens 64 --seq 32 \
        --vocabulary 256                                                     # to try it on a CPU

Models without a package are checkouts in a further `--folder`: `foreign_zoo.py` says which.

Programs of so many layers compile for minutes on a GPU, where XLA times ways to compute each
product. Without Triton's ways among them, by `XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`, they
compile in less than half a minute.

Every version is the same step but for the user's one line: float32 parameters, a forward in
bfloat16 (by the model's own settings where it has them, else of parameters that were cast), the
loss of the model's own users on random inputs, words by Zipf's law, gradients, AdamW on donated
state. "fuse" wraps that loss in `normfuse.fuse`, "fuse, fp8" in `fuse(quantization="fp8")`. A row
"own step" is the step of that project's trainer, read from its source.

Times are the host's for several steps in a row, which end with the device idle; the versions take
turns, so that all see the same clocks, and the medians of the turns are printed. "Busy" is the
union of the intervals of the GPU's kernels in a profile of further steps, "gaps" the sum of the
pauses above 20 µs between them: what waits for the host. GiB are what the
compiled program takes: arguments, temporaries, and results that have no argument's place. The loss
is compared after so many steps from the same state, relative to theirs.

Compiled programs are searched for our kernels, and for products of FP8 codes: a version without
what it is named for is not measured, and the benchmark fails.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import fcntl
import functools
import gc
import itertools
import math
import os
import pathlib
import statistics
import sys
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
from device_time import busy, emit, profiled
from flax import nnx
from foreign_zoo import MODELS, Batch, Case, Model, look_in
from programs import fp8_products, our_kernels
from step import breakdown, taker

import normfuse

VERSIONS = {"theirs": None, "fuse": {}, "fuse, fp8": {"quantization": "fp8"}}  # arguments of `fuse`
COMPARED = 10  # steps from the same state, after which losses are compared
STACKED = 32  # so many layers at most, whose vectors may be one array
Leaves = list[jax.Array]
State = tuple[Leaves, Any]  # parameters, and the optimizer's moments


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (0.02 * jax.random.normal(key, shape)).astype(dtype)


def is_matrix(x: Any) -> bool:
    """Returns True for a parameter that is drawn: no vector, nor a vector of each layer."""
    return x.ndim > 2 or (x.ndim == 2 and x.shape[0] >= STACKED)


@dataclasses.dataclass
class Built:
    """A model at its real size, without its matrices: these are drawn, and not before it runs."""

    run: Callable[[Any, Any, Any], Any]  # of (parameters, `rest`, inputs)
    abstract: list[jax.ShapeDtypeStruct]  # its parameters
    tree: Any  # the structure that `run` takes them in
    vectors: Leaves  # the parameters that are no matrices, such as the scales of norms
    rest: Any  # arrays of the model that are no parameters

    def draw(self) -> Leaves:
        """Returns its parameters, the same again and again.

        Matrices are random, for some initialisers make zeros, vectors as the model's code has them.
        """
        keys, kept = jax.random.split(jax.random.key(1), len(self.abstract)), iter(self.vectors)
        one = lambda key, x: normal(key, x.shape, x.dtype) if is_matrix(x) else next(kept) + 0
        return [one(key, x) for key, x in zip(keys, self.abstract)]


def drops(inputs: Any) -> dict[str, jax.Array]:
    """Returns a key for dropout that no compiler takes for a constant."""
    return {"dropout": jax.random.key(jax.tree.leaves(inputs)[-1].reshape(-1)[0].astype(int))}


def build(make: Callable[[], Model], inputs: Any) -> Built:
    """Makes a model within a program that computes only the parts to keep."""
    found: dict[str, Any] = {}

    def init(inputs: Any) -> tuple[Leaves, Any]:
        given = make()
        forward, model = given.forward, given.model
        if isinstance(model, nnx.Module):
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            run = lambda params, rest, x: forward(nnx.merge(graph, params, rest), x)
        elif isinstance(model, nn.Module):
            call = lambda m, x: forward(m, x)
            keys = dict.fromkeys(("params", "dropout"), jax.random.key(0))
            params = {"params": nn.init(call, model)(keys, inputs)["params"]}
            run, rest = lambda params, _, x: nn.apply(call, model)(params, x, rngs=drops(x)), None
        else:
            params, rest = eqx.partition(model, eqx.is_inexact_array)
            rest, static = eqx.partition(rest, eqx.is_array)
            run = lambda params, rest, x: forward(eqx.combine(params, rest, static), x)
        leaves, tree = jax.tree.flatten(params)
        abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        found.update(run=run, tree=tree, abstract=abstract)
        return [leaf for leaf in leaves if not is_matrix(leaf)], rest

    vectors, rest = jax.jit(init)(inputs)
    return Built(**found, vectors=vectors, rest=rest)


# ---------------------------------------------------------------- the step


@dataclasses.dataclass
class Version:
    """A version's step, and its outcome."""

    name: str
    rest: Any  # no parameters of the model
    init: Callable[[Leaves], Any]  # makes the moments of parameters
    lowered: Any
    report: Any = None
    step: Any = None
    # Our kernels in the compiled program, how often it calls each, and its products of FP8 codes.
    found: dict[str, int] = dataclasses.field(default_factory=dict)
    products: int = 0
    problem: str = ""  # why it is not measured
    gib: float = 0.0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    busy: dict[str, float] = dataclasses.field(default_factory=dict)

    def take(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
        return self.step(state, batch, self.rest)

    def replaced(self) -> dict[str, int]:
        """The number of sites by the operation that serves them."""
        rows = self.report.rows if self.report is not None else ()
        return dict(collections.Counter(row.served for row in rows if row.served))

    def compiled(self, step: Any) -> str:
        """Takes the compiled step; returns the parts that it lacks of the version's promise."""
        self.step, text, used = step, step.as_text(), step.memory_analysis()
        size = used.argument_size_in_bytes + used.temp_size_in_bytes
        size += used.output_size_in_bytes - used.alias_size_in_bytes
        self.gib = size / math.exp2(30)
        self.found, self.products = our_kernels(text), fp8_products(text)
        if self.name == "theirs" and self.found:
            return f"its program calls {[*self.found]} of ours"
        if self.name != "theirs" and not self.replaced():
            return "nothing was replaced"
        if (self.products > 0) != ("fp8" in self.name):
            return f"its program has {self.products} products of FP8 codes"
        return ""


def loss_of(built: Built, case: Case, name: str) -> tuple[Callable[..., jax.Array], list[Any]]:
    """A version's `(parameters, batch, rest of the model) -> loss`, and the list of its reports."""

    def loss(leaves: Leaves, batch: Batch, rest: Any) -> jax.Array:
        if case.cast:
            leaves = [leaf.astype(jnp.bfloat16) for leaf in leaves]
        inputs, wanted = batch
        return case.loss(built.run(jax.tree.unflatten(built.tree, leaves), rest, inputs), wanted)

    reports: list[Any] = []
    options = VERSIONS[name]
    return loss if options is None else normfuse.fuse(
        loss, report=reports.append, **options
    ), reports


Parts = tuple[Callable[[Leaves], Any], Callable[..., tuple[State, jax.Array]], list[Any]]


def own_step(built: Built, made: Callable[..., Any], name: str, sizes: dict[str, int]) -> Parts:
    """Returns the parts of a version of the trainer's own step."""
    reports: list[Any] = []
    changed = jax.value_and_grad
    if (options := VERSIONS[name]) is not None:
        fuse = functools.partial(normfuse.fuse, report=reports.append, **options)
        changed = lambda loss, **others: jax.value_and_grad(fuse(loss), **others)
    init, theirs = made(changed, **sizes)
    whole = lambda leaves: jax.tree.unflatten(built.tree, leaves)

    def step(state: State, batch: Batch, _: Any) -> tuple[State, jax.Array]:
        params, moments, value = theirs(whole(state[0]), state[1], *batch)
        return (jax.tree.leaves(params), moments), value

    return lambda leaves: init(whole(leaves)), step, reports


def step_of(built: Built, case: Case, name: str, sizes: dict[str, int]) -> Parts:
    """Returns a function that makes moments, one from `((parameters, moments), batch, rest of the
    model)` to `((parameters, moments), loss)`, and the list of its reports.
    """
    if case.own:
        return own_step(built, case.own, name, sizes)
    loss, reports = loss_of(built, case, name)
    optimizer = optax.adamw(1e-6, b2=0.95, weight_decay=0.1)

    def step(state: State, batch: Batch, rest: Any) -> tuple[State, jax.Array]:
        leaves, moments = state
        value, gradients = jax.value_and_grad(loss)(leaves, batch, rest)
        updates, moments = optimizer.update(gradients, moments, leaves)
        leaves = [leaf + update for leaf, update in zip(leaves, updates)]
        return (leaves, moments), value

    return optimizer.init, step, reports


def traced(built: Built, parts: Parts, name: str, batch: Batch) -> Version:
    """Returns a version whose step is not compiled yet."""
    init, step, reports = parts
    state = built.abstract, jax.eval_shape(init, built.abstract)
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch, built.rest)
    return Version(name, built.rest, init, lowered, report=reports[-1] if reports else None)


def compiled(lowered: Any, after: list[concurrent.futures.Future]) -> Any:
    """Returns the program, compiled after others."""
    concurrent.futures.wait(after)
    return lowered.compile()


def say(began: float, what: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {what}", file=sys.stderr, flush=True)


def trace(built: Built, case: Case, batch: Batch, sizes: dict, versions: list[str]) -> None:
    """Prints the report of `fuse`, and the time to trace each version's step."""
    theirs = 0.0
    for name in ("theirs", *versions):  # the first time for what JAX keeps from then on
        init, step, reports = step_of(built, case, name, sizes)
        state = built.abstract, jax.eval_shape(init, built.abstract)
        began = time.perf_counter()
        jax.jit(step).trace(state, batch, built.rest)
        took = time.perf_counter() - began
        if name != "theirs":
            print(f"\n{reports[-1]}\n" if reports else f"\n{name}: no report\n")
            print(f"{name}: the step is traced in {took:.2f} s, {took / theirs:.2f} x theirs")
        elif theirs:
            print(f"{name}: the step is traced in {took:.2f} s", flush=True)
        theirs = took if name == "theirs" else theirs


def measure(name: str, case: Case, options: argparse.Namespace) -> list[str]:
    """Prints the table and the lines of a model; returns the failures."""
    began = time.perf_counter()
    sizes = {case.layers: options.layers, case.vocabulary: options.vocabulary}
    sizes = {key: size for key, size in sizes.items() if size}
    seq = options.seq or case.seq
    rows = max(options.tokens // seq, 1) if options.tokens else case.rows
    if case.length:
        sizes[case.length] = seq
    batch = case.batch(rows, seq, options.vocabulary or case.classes)
    keep = jnp.arange(seq) < seq * (1 - options.padding)
    hides = lambda x: x.ndim == 2 and x.dtype == jnp.int32 and x.shape[1] == seq
    batch = jax.tree.map(lambda x: jnp.where(keep, x, 0) if hides(x) else x, batch)
    built = build(lambda: case.make(**sizes), batch[0])
    size = sum(math.prod(leaf.shape) for leaf in built.abstract)
    say(began, f"{name}: {size / 1e9:.2f}e9 parameters, {rows} x {seq} tokens")
    if options.trace_only:
        trace(built, case, batch, sizes, options.versions)
        return []
    plain = len(normfuse.fallbacks())
    parts = [(each, step_of(built, case, each, sizes)) for each in options.versions]
    versions = [traced(built, each, name, batch) for name, each in parts]
    say(began, "traced")
    if options.turn:  # one process at a time has the GPU; others begin and trace meanwhile
        fcntl.flock(options.turn, fcntl.LOCK_EX)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = []
        for version in versions:
            # Compilers time ways to compute products. Ours take those chosen for theirs where they
            # have the same products, which is quicker and fair.
            after = [] if options.at_once else futures[:1]
            futures.append(pool.submit(compiled, version.lowered, after))
        for version, future in zip(versions, futures):
            version.problem = version.compiled(future.result())
            say(began, f"{version.name}: compiled, {version.gib:.1f} GiB. {version.problem}")
    for op, reason in normfuse.fallbacks()[plain:]:
        print(f"plain XLA serves {op}: {reason}", flush=True)
    problems = [f"{name}, {v.name}: not measured: {v.problem}" for v in versions if v.problem]
    versions = [version for version in versions if not version.problem]
    state: list[Any] = []
    gc.collect()  # models may refer to themselves
    for version in versions:  # from the same state
        state.clear()  # before there is another
        params = built.draw()
        state[:] = [(params, jax.jit(version.init)(params)), batch]
        del params
        for _ in range(COMPARED):
            state[0], loss = version.take(*state)
            version.losses.append(float(loss))
        say(began, f"{version.name}: loss {version.losses[0]:.6f}, then {version.losses[-1]:.6f}")
    takes = {version.name: taker(jax, version.take, state) for version in versions}
    for version in versions:  # the first turns are slower
        takes[version.name](options.steps)
    for _, version in itertools.product(range(options.rounds), versions):
        version.seconds.append(takes[version.name](options.steps) / options.steps)
        say(began, f"{version.name}: {1e3 * version.seconds[-1]:.2f} ms")
    profiles = {version.name: profiled(takes[version.name]) for version in versions}
    for version in versions:
        version.busy = busy(profiles[version.name])
    show(name, size, rows * seq, versions, options.kernels)
    for version in versions if options.profile else ():
        print(breakdown(version.name, profiles[version.name]), flush=True)
    return problems


def show(name: str, size: int, tokens: int, versions: list[Version], kernels: bool) -> None:
    device = jax.devices()[0].device_kind
    print(f"\n{name}, {size / 1e9:.2f}e9 parameters, {tokens} tokens a step, {device}\n")
    fp8 = "products" if jax.default_backend() == "gpu" else "arrays"
    print(f"| version | ms a step | ratio | busy | gaps | GiB | loss, first | then | FP8 {fp8} |")
    print("|---|---|---|---|---|---|---|---|---|")
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
            f"| {version.name} | {ms:.2f} ±{100 * spread:.1f}% | {ratio:.3f} "
            f"| {version.busy.get('busy', 0):.2f} | {version.busy.get('gaps', 0):.2f} "
            f"| {version.gib:.1f} | {first:+.1e} | {last:+.1e} | {version.products} |"
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
                "busy_ms": version.busy,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                "ratio": round(ratio, 4),
                "gib": round(version.gib, 6),
                "losses": version.losses,
                "loss_first": first,
                "loss_then": last,
                "replaced": version.replaced(),
                "fp8": version.products,
                "kernels": version.found,
            }
        )
    for version in versions[1:]:
        print(f"\n{version.name}: {version.replaced()}")
        if kernels:
            print(f"kernels: {version.found}\n{version.report}")
    print()
    for line in lines:
        emit(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, action="append", default=[])
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=[*VERSIONS])
    parser.add_argument("--tokens", type=int, help="of a step")
    parser.add_argument("--seq", type=int, help="tokens of a sequence, or of an image")
    parser.add_argument("--padding", type=float, default=0.0, help="of each row, in zeros")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--turn", type=argparse.FileType("w"), help="a file of those on this GPU")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--vocabulary", type=int, help="only so many tokens, or classes")
    parser.add_argument("--profile", action="store_true", help="print what steps' time goes to")
    parser.add_argument("--trace-only", action="store_true", help="what `fuse` does, and its time")
    parser.add_argument("--at-once", action="store_true", help="compile versions beside each other")
    parser.add_argument("--kernels", action="store_true", help="print kernels and reports")
    options = parser.parse_args()
    options.versions = list(dict.fromkeys(["theirs", *options.versions]))  # all are beside it
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
