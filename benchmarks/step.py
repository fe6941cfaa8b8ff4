"""A training step of a preset: bfloat16, FP8, XLA's own operations and torch.compile, by turns.

    python benchmarks/step.py                         # 1b: 16384 tokens a step on one GPU
    python benchmarks/step.py --versions bf16 fp8 torch torchao
    python benchmarks/step.py --preset small --versions bf16 fp8
    python benchmarks/step.py --profile fp8           # and where a version spends its time
    python benchmarks/step.py --versions llama --batch 4 --seq 2048

Every version is forward to update: float32 parameters, products with bfloat16 or FP8 operands,
AdamW, clipping by the global norm, no rematerialisation, the same random tokens. "torch" is the
same transformer under torch.compile with autocast, `scaled_dot_product_attention` and fused AdamW,
"torchao" that with its linear layers in FP8 by torchao's default recipe: a scale for each array,
from its largest element. "llama" is Hugging Face's Llama of 1.1 billion parameters under
torch.compile with autocast and fused AdamW, the model that `foreign_steps.py` measures in Flax.

Times are the host's for several steps in a row, which end with the device idle; the versions take
turns, so that all see the same clocks. Prints the median of the turns, and how long the GPU is busy
in a step, and the pauses above 20 µs between its kernels.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

JAX_VERSIONS = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "bf16, xla": {"implementation": "xla"},
}
TORCH_VERSIONS = ("torch", "torchao", "llama")
VERSIONS = (*JAX_VERSIONS, *TORCH_VERSIONS)
Take = Callable[[int], float]  # runs so many steps and returns the seconds


# ---------------------------------------------------------------- JAX


def jax_versions(names: list[str], arguments: argparse.Namespace) -> tuple[dict[str, Take], dict]:
    """Returns a function that takes steps of each version, and the bytes that its program needs."""
    import jax

    from normfuse.train.config import preset_config

    config = preset_config(arguments.preset)
    shape = dataclasses.replace(config.transformer(), remat="none", dtype="bfloat16")
    makers = {name: dataclasses.replace(shape, **JAX_VERSIONS[name]) for name in names}
    size = arguments.batch or config.batch_size, arguments.seq or config.seq_len
    lowered = {name: whole_step(config, model, size) for name, model in makers.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(program.compile) for name, (program, _) in lowered.items()}
    state: Any = None
    takes, memory = {}, {}
    for name, (_, draw) in lowered.items():
        step = futures[name].result()
        used = step.memory_analysis()
        peak = used.argument_size_in_bytes + used.temp_size_in_bytes
        memory[name] = peak + used.output_size_in_bytes - used.alias_size_in_bytes
        state = draw() if state is None else state  # shared: one structure
        takes[name] = taker(jax, step, state)
    return takes, memory


def taker(jax: Any, step: Any, state: list) -> Take:
    """Returns a function that takes steps on `state`, a list of the shared state and batch."""

    def take(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            state[0], kept = step(*state)
        jax.block_until_ready((state[0], kept))
        return time.perf_counter() - began

    return take


def whole_step(config: Any, model: Any, size: tuple[int, int]) -> tuple[Any, Callable[[], list]]:
    """The trainer's own step."""
    import jax
    import jax.numpy as jnp

    from normfuse.models.functional import build
    from normfuse.train.mesh import AXES, batch_sharding
    from normfuse.train.step import Program, make_optimizer, schedule

    one = {"axis_types": (jax.sharding.AxisType.Auto,) * len(AXES), "devices": jax.devices()[:1]}
    mesh, settings = jax.make_mesh((1,) * len(AXES), AXES, **one), (config.optim, config.steps)
    program = Program(
        build(config.framework, model),
        make_optimizer(*settings),
        schedule(*settings),
        mesh,
        microbatches=1,
    )
    with jax.set_mesh(mesh):
        lowered = program.lower(*size)

    def draw() -> list:
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), program.abstract())
        state = jax.jit(zeros, out_shardings=program.shardings())()
        shape = size[0], size[1] + 1
        tokens = jax.random.randint(jax.random.key(0), shape, 0, model.vocab_size)
        tokens = jax.device_put(tokens, batch_sharding(mesh))
        return [state._replace(params=filled(program.abstract().params)), tokens]

    return lowered, draw


def filled(tree: Any) -> Any:
    """Random arrays in the place of abstract ones, for power depends on values; vectors are 1."""
    import jax
    import jax.numpy as jnp

    @functools.cache
    def draw(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
        if len(shape) < 2:
            return jax.jit(lambda key: jnp.ones(shape, dtype), out_shardings=sharding)
        make = lambda key: (0.02 * jax.random.normal(key, shape)).astype(dtype)
        return jax.jit(make, out_shardings=sharding)

    keys = (jax.random.key(i) for i in itertools.count())
    return jax.tree.map(lambda x: draw(x.shape, x.dtype, x.sharding)(next(keys)), tree)


def breakdown(name: str, found: list, steps: int = 3) -> str:
    """Where the time of a version's steps goes, by kernels: (name, began, ended)."""
    times = collections.Counter()  # milliseconds of a step
    for kernel, began, ended in found:
        times[kernel.split(".")[0][:60]] += (ended - began) * 1e-6 / steps
    rows = (f"{spent:9.3f} ms  {operation}\n" for operation, spent in times.most_common(40))
    return f"{name}:\n{''.join(rows)}"


# ---------------------------------------------------------------- PyTorch


def torch_version(name: str, arguments: argparse.Namespace) -> tuple[Take, Callable[[], int]]:
    """A function that takes steps of the same transformer in PyTorch, and its peak of bytes."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from normfuse.models.config import PRESETS
    from normfuse.train.config import preset_config

    config, c = preset_config(arguments.preset), PRESETS[arguments.preset]
    batch, seq = arguments.batch or config.batch_size, arguments.seq or config.seq_len
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    def linear(n: int, m: int) -> nn.Linear:
        layer = nn.Linear(n, m, bias=False)
        nn.init.normal_(layer.weight, std=0.02)
        return layer

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            self.attention_norm = nn.Parameter(torch.ones(c.dim))
            self.mlp_norm = nn.Parameter(torch.ones(c.dim))
            self.q, self.k, self.v = (linear(c.dim, m) for m in (heads, kv_heads, kv_heads))
            self.o = linear(heads, c.dim)
            self.gate, self.up = linear(c.dim, c.mlp_dim), linear(c.dim, c.mlp_dim)
            self.down = linear(c.mlp_dim, c.dim)

        def forward(self, x, cos, sin):
            norm = lambda x, scale: F.rms_norm(x, (c.dim,), scale.to(x.dtype), c.norm_eps)
            h = norm(x, self.attention_norm)
            heads = lambda y: y.view(*x.shape[:2], -1, c.head_dim).transpose(1, 2)
            q, k, v = heads(self.q(h)), heads(self.k(h)), heads(self.v(h))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            grouped = c.num_heads != c.num_kv_heads
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            x = x + self.o(a.transpose(1, 2).reshape(*x.shape[:2], -1))
            h = norm(x, self.mlp_norm)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(c.vocab_size, c.dim)
            nn.init.normal_(self.embed.weight, std=0.02)
            self.blocks = nn.ModuleList(Block() for _ in range(c.num_layers))
            self.norm = nn.Parameter(torch.ones(c.dim))

        def forward(self, tokens, targets, cos, sin):
            x = self.embed(tokens).to(torch.bfloat16)
            for block in self.blocks:
                x = block(x, cos, sin)
            x = F.rms_norm(x, (c.dim,), self.norm.to(x.dtype), c.norm_eps)
            logits = F.linear(x, self.embed.weight)
            return F.cross_entropy(logits.view(-1, c.vocab_size), targets.reshape(-1))

    def llama() -> nn.Module:
        from foreign_zoo import TINY_LLAMA
        from transformers import LlamaConfig, LlamaForCausalLM

        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, attn_implementation="sdpa"))

    model = llama() if name == "llama" else Transformer().to(device)
    if name == "torchao":
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear

        convert_to_float8_training(model)
        assert sum(isinstance(m, Float8Linear) for m in model.modules()) == 7 * c.num_layers
    frequencies = c.rope_theta ** -(torch.arange(0, c.head_dim, 2, device=device) / c.head_dim)
    angles = torch.arange(seq, device=device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    words = 32000 if name == "llama" else c.vocab_size
    tokens = torch.randint(words, (batch, seq + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    o = config.optim
    options = {"lr": o.lr, "betas": (o.b1, o.b2), "eps": o.eps, "weight_decay": o.weight_decay}
    optimizer = torch.optim.AdamW(groups, **options, fused=device == "cuda")
    compiled = torch.compile(model)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            if name == "llama":
                loss = compiled(input_ids=inputs, labels=inputs, use_cache=False).loss
            else:
                loss = compiled(inputs, targets, cos, sin)
        loss.backward()
        if o.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    settle = torch.cuda.synchronize if device == "cuda" else lambda: None

    def take(steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        settle()
        return time.perf_counter() - began

    return take, lambda: torch.cuda.max_memory_allocated() if device == "cuda" else 0


def torch_profiled(take: Take) -> list:
    """The kernels of three steps, from PyTorch's profiler: (name, began, ended)."""
    from torch.autograd import DeviceType
    from torch.profiler import profile

    take(2)
    with profile() as profiler:
        take(3)
    kernels = (event for event in profiler.events() if event.device_type == DeviceType.CUDA)
    span = lambda event: (1e3 * event.time_range.start, 1e3 * event.time_range.end)
    return [(event.name, *span(event)) for event in kernels]


# ---------------------------------------------------------------- a process that takes steps


def work(names: list[str], arguments: argparse.Namespace) -> None:
    """Answers each line `version steps` of the standard input with seconds, as one line of JSON."""
    from device_time import busy, profiled

    if names[0] in TORCH_VERSIONS:
        (name,) = names
        take, peak = torch_version(name, arguments)
        take(1)
        takes, memory, profiled = {name: take}, {name: peak}, torch_profiled
    else:
        takes, found = jax_versions(names, arguments)
        memory = {name: lambda bytes=found[name]: bytes for name in names}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, count = json.loads(line)
        if count:
            print(json.dumps([takes[name](count), memory[name]()]), flush=True)
        else:
            found = profiled(takes[name])
            print(json.dumps([breakdown(name, found), busy(found)]), flush=True)


class Worker:
    """A process that takes steps of some versions when it is asked to."""

    def __init__(self, names: list[str], arguments: list[str]):
        # Both frameworks' memory is on one GPU.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
        command = [sys.executable, __file__, *arguments, "--work", *names]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)

    def wait(self) -> None:
        """Returns when its programs are compiled."""
        began = time.perf_counter()
        assert self._answer() == "ready"
        print(f"ready, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    def take(self, name: str, steps: int) -> list:
        """Seconds for so many steps and the version's bytes; for 0 a profile, and `busy` of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, steps]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("[", '"')):
                return json.loads(line)
            print(line, end="", file=sys.stderr)
        raise SystemExit(f"step.py: a process ended with {self._process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--versions", nargs="+", choices=VERSIONS, default=["bf16", "fp8"])
    parser.add_argument("--batch", type=int, help="sequences of a step; the preset's")
    parser.add_argument("--seq", type=int, help="tokens of a sequence; the preset's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of a turn")
    parser.add_argument("--profile", nargs="*", default=[], choices=VERSIONS)
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments)
        return
    given = sys.argv[1:]
    ours = [name for name in arguments.versions if name in JAX_VERSIONS]
    workers = {}
    if ours:
        workers |= dict.fromkeys(ours, Worker(ours, given))
    for name in arguments.versions:
        if name in TORCH_VERSIONS:
            workers[name] = Worker([name], given)
    seconds: dict[str, list[float]] = {name: [] for name in arguments.versions}
    memory = {}
    for worker in dict.fromkeys(workers.values()):
        worker.wait()
    for name in arguments.versions:
        workers[name].take(name, 2)
    for _, name in itertools.product(range(arguments.rounds), arguments.versions):
        took, memory[name] = workers[name].take(name, arguments.steps)
        seconds[name].append(took / arguments.steps)
        print(f"{name}: {1e3 * seconds[name][-1]:.2f} ms", file=sys.stderr, flush=True)
    from normfuse.train.config import preset_config

    config = preset_config(arguments.preset)
    tokens = (arguments.batch or config.batch_size) * (arguments.seq or config.seq_len)
    first = statistics.median(seconds[arguments.versions[0]])
    print(f"{tokens} tokens a step\n{'':12}    ms a step   tokens/s   ratio   GiB    busy    gaps")
    profiles = {name: workers[name].take(name, 0) for name in seconds}
    for name, found in seconds.items():
        median = statistics.median(found)
        rate, spread = tokens / median, (max(found) - min(found)) / median
        print(
            f"{name:12} {1e3 * median:9.2f} ±{100 * spread / 2:3.1f}% {rate:9.0f}  "
            f"{first / median:6.3f}  {memory[name] / math.exp2(30):5.1f}"
            f"  {profiles[name][1].get('busy', 0):6.2f}  {profiles[name][1].get('gaps', 0):6.2f}"
        )
    for name in arguments.profile:
        print(profiles[name][0])


if __name__ == "__main__":
    main()
