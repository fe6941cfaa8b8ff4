"""The loss of a linear layer and both gradients on one GPU, with plain jnp and other libraries.

    python benchmarks/cross_entropy.py               # the tables, about two minutes

Times are of the device (CUPTI), the median of the calls; all versions of a shape are timed by turns
in one process, torch's in one of their own. bfloat16 operands. The bare products are the three that
any version needs, from operands in memory; the kernel's gradient is in the kernel's dtype.
Temporaries are what the compiled program needs beyond its inputs and results.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys

SHAPES = ((16384, 2048, 128256), (4096, 4096, 128256), (16384, 4096, 32000))


def operands(tokens: int, n: int, vocabulary: int, kernel_dtype="bfloat16"):
    """x, kernel and labels; logits are about normal."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, n), jnp.bfloat16)
    kernel = (jax.random.normal(keys[1], (n, vocabulary)) / n**0.5).astype(kernel_dtype)
    return x, kernel, jax.random.randint(keys[2], (tokens,), 0, vocabulary)


def plain(logits_dtype):
    """The loss as it is written in plain jnp, its logits in memory."""
    import jax
    import jax.numpy as jnp

    def loss(x, kernel, labels):
        z = jnp.einsum("rn,nv->rv", x, kernel.astype(x.dtype), preferred_element_type=logits_dtype)
        picked = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
        lse = jax.nn.logsumexp(z.astype(jnp.float32), axis=-1)
        return jnp.mean(lse - picked.astype(jnp.float32))

    return loss


def bare(x, kernel, g):
    """The three products."""
    import jax.numpy as jnp

    w = kernel.astype(x.dtype)
    dkernel = jnp.einsum("rn,rv->nv", x, g, preferred_element_type=kernel.dtype)
    return jnp.einsum("rn,nv->rv", x, w), jnp.einsum("rv,nv->rn", g, w), dkernel


def tokamax_losses() -> dict:
    """Those that can be compiled here are timed."""
    try:
        import tokamax
    except ImportError as error:
        print(f"without tokamax: {error}", flush=True)
        return {}
    entry = tokamax.linear_softmax_cross_entropy_loss
    of = lambda name: (
        lambda x, k, labels: entry(x, labels, k, reduction="mean", implementation=name)
    )
    return {f"tokamax, {name}": of(name) for name in ("chunked_xla", "triton", "mosaic_gpu")}


def versions() -> dict:
    """Losses of (x, kernel, labels)."""
    import jax.numpy as jnp

    from normfuse import linear_cross_entropy as ours

    rows = lambda x, k, labels: jnp.mean(ours(x, k, labels, reduction="none"))
    return {
        "jnp, bf16 logits": plain(jnp.bfloat16),
        "jnp, f32 logits": plain(jnp.float32),
        "normfuse": ours,
        "normfuse, fp8 gradient": functools.partial(ours, quantization="fp8"),
        "normfuse, f32 logits": functools.partial(ours, logits_dtype=jnp.float32),
        "normfuse, implementation='xla'": functools.partial(ours, implementation="xla"),
        "normfuse, reduction='none'": rows,
    } | tokamax_losses()


def compiled(loss, x, kernel, labels):
    """The loss and both gradients."""
    import jax

    return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(x, kernel, labels).compile()


def main_gradient(x, kernel, labels):
    """The loss, and the kernel's gradient in float32 as `accumulate_gradients` takes it."""
    from normfuse import accumulate_gradients, linear_cross_entropy

    loss = lambda operands, labels: linear_cross_entropy(*operands, labels)
    return accumulate_gradients(loss, (x, kernel), labels[None])


def table(shapes, iterations: int) -> None:
    """Prints each version's times and temporaries."""
    import jax
    import jax.numpy as jnp
    from device_time import GEMM, by_turns, emit

    for tokens, n, vocabulary in shapes:
        x, kernel, labels = operands(tokens, n, vocabulary)
        g = jax.random.normal(jax.random.key(1), (tokens, vocabulary), jnp.bfloat16)
        programs = {"bare products": (jax.jit(bare).lower(x, kernel, g).compile(), (x, kernel, g))}
        for name, loss in versions().items():
            try:
                programs[name] = compiled(loss, x, kernel, labels), (x, kernel, labels)
                jax.block_until_ready(programs[name][0](x, kernel, labels))
            except Exception as error:
                programs.pop(name, None)
                print(f"{name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if tokens * vocabulary == max(t * v for t, _, v in shapes):
            arrays = x, kernel.astype(jnp.float32), labels
            programs["normfuse, f32 kernel"] = compiled(versions()["normfuse"], *arrays), arrays
            arrays = x, kernel, labels
            programs["normfuse, main gradient"] = (
                jax.jit(main_gradient).lower(*arrays).compile(),
                arrays,
            )
        runs = by_turns(programs, iterations, warm=0.5)
        print(f"\n{tokens} x {n} -> {vocabulary}", flush=True)
        base = None
        for name, samples in runs.items():
            total = statistics.median(sum(us for _, us in sample) for sample in samples) / 1e3
            gemms = statistics.median(
                sum(us for kernel, us in sample if GEMM.search(kernel)) for sample in samples
            )
            base = base or total
            temporary = programs[name][0].memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"  {name:32} {total:8.3f} ms  {total / base:.3f} x bare  GEMMs {gemms / 1e3:8.3f}"
                f"  temporaries {temporary:7.0f} MiB",
                flush=True,
            )
            emit(shape=[tokens, n, vocabulary], version=name, ms=total, temporary_mib=temporary)
        del g, programs, runs


# ---------------------------------------------------------------- torch and Liger


def torch_step(loss, x, kernel, labels) -> None:
    """The loss and both gradients."""
    x.grad = kernel.grad = None
    loss(x, kernel, labels).backward()


def torch_table(shapes, iterations: int) -> None:
    """The same in torch, where it is installed: compiled, and Liger's."""
    try:
        import torch
    except ImportError as error:
        print(f"without torch: {error}", flush=True)
        return
    functional = torch.nn.functional

    def eager(x, kernel, labels):
        return functional.cross_entropy((x @ kernel.T).float(), labels)

    losses = {"torch.compile": torch.compile(eager)}
    own = getattr(functional, "linear_cross_entropy", None)
    if own is not None:
        losses["torch, linear_cross_entropy"] = own
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        losses["Liger"] = lambda x, kernel, labels: LigerFusedLinearCrossEntropyFunction.apply(
            x, kernel, labels
        )[0]
    except ImportError as error:
        print(f"without Liger: {error}", flush=True)
    for tokens, n, vocabulary in shapes:
        draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        x, kernel = draw(tokens, n).requires_grad_(), (draw(vocabulary, n) / n**0.5).detach()
        kernel.requires_grad_()
        labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
        print(f"\n{tokens} x {n} -> {vocabulary}, torch {torch.__version__}", flush=True)
        for name, loss in losses.items():
            try:
                step = functools.partial(torch_step, loss, x, kernel, labels)
                step()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before, times = torch.cuda.memory_allocated(), []
                for _ in range(iterations):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    step()
                    end.record()
                    torch.cuda.synchronize()
                    times.append(begin.elapsed_time(end))
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                ms = statistics.median(times)
                print(f"  {name:32} {ms:8.3f} ms  peak {peak:7.0f} MiB more", flush=True)
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=3, action="append", help="tokens, n, vocabulary")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = [tuple(shape) for shape in arguments.shape or SHAPES]
    if arguments.torch:
        torch_table(shapes, arguments.iterations)
        return
    # In a process of its own: JAX takes the GPU's memory.
    command = [sys.executable, __file__, "--torch", "--iterations", str(arguments.iterations)]
    for shape in arguments.shape or ():
        command += ["--shape", *map(str, shape)]
    subprocess.run(command, check=False, env=os.environ, timeout=240)
    import jax

    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    table(shapes, arguments.iterations)


if __name__ == "__main__":
    main()
