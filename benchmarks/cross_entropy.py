"""The loss of a linear layer and both gradients on one GPU, with plain jnp and other libraries.

    python benchmarks/cross_entropy.py               # the tables, about two minutes
    python benchmarks/cross_entropy.py --sweep       # rows of a chunk, layouts of the kernels
    python benchmarks/cross_entropy.py --kernels     # every kernel of each version

Times are of the device (CUPTI), the median of the calls; all versions of a shape are timed by turns
in one process, torch's in one of their own. bfloat16 operands. The bare products are the three that
any version needs, from operands in memory; the kernel's gradient is in the kernel's dtype.
Temporaries are what the compiled program needs beyond its inputs and results.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

SHAPES = ((16384, 2048, 128256), (4096, 4096, 128256), (16384, 4096, 32000))
COPY_RATE = 4.17e6  # bytes a microsecond, one H200's copy within the device


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


def emit(**line) -> None:
    print(json.dumps(line), flush=True)


def table(shapes, iterations: int, show: bool) -> None:
    """Prints each version's times and temporaries."""
    import jax
    import jax.numpy as jnp
    from dense import show_kernels
    from device_time import GEMM, by_turns

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
            if show:
                show_kernels(samples, True)
        del g, programs, runs


def accuracy(tokens: int, n: int, vocabulary: int) -> None:
    """Distances from float64, relative, of the loss and of both gradients."""
    import jax
    import jax.numpy as jnp

    x, kernel, labels = operands(tokens, n, vocabulary)
    x, kernel = x * 2, kernel * 2  # logits of up to twenty
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in (x, kernel)]
        exact = jax.tree.leaves(compiled(plain(jnp.float64), *wide, labels)(*wide, labels))
        exact = [jax.device_get(e) for e in exact]
        print(f"\ndistance from float64, {tokens} x {n} -> {vocabulary}: loss, dx, dkernel")
    for name, loss in versions().items():
        try:
            found = jax.tree.leaves(compiled(loss, x, kernel, labels)(x, kernel, labels))
        except Exception as error:
            print(f"  {name}: {type(error).__name__}", flush=True)
            continue
        errors = []
        for e, f in zip(exact, jax.device_get(found), strict=True):
            difference = (f.astype("f8") - e).ravel()
            errors.append(float((difference @ difference) ** 0.5 / (e.ravel() @ e.ravel()) ** 0.5))
        print(f"  {name:32} " + " ".join(f"{e:.2e}" for e in errors), flush=True)


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
                emit(shape=[tokens, n, vocabulary], version=name, ms=ms)
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


# ---------------------------------------------------------------- chunks and layouts


def sweep_chunks(shapes, iterations: int) -> None:
    """Times of the whole for other rows of a chunk."""
    import jax
    from device_time import GEMM, by_turns

    from normfuse import linear_cross_entropy as ours

    for tokens, n, vocabulary in shapes:
        arrays = operands(tokens, n, vocabulary)
        programs = {}
        for rows in (512, 1024, 1536, 2048, 3072, 4096, 8192, 16384):
            if rows > tokens:
                continue
            loss = functools.partial(ours, chunk_rows=rows)
            programs[str(rows)] = compiled(loss, *arrays), arrays
        runs = by_turns(programs, iterations, warm=0.5)
        print(f"\n{tokens} x {n} -> {vocabulary}: rows of a chunk", flush=True)
        for rows, samples in runs.items():
            total = statistics.median(sum(us for _, us in sample) for sample in samples) / 1e3
            other = statistics.median(
                sum(us for kernel, us in sample if not GEMM.search(kernel)) for sample in samples
            )
            temporary = programs[rows][0].memory_analysis().temp_size_in_bytes / 2**20
            print(
                f"  {rows:>6} {total:8.3f} ms, not GEMM {other / 1e3:7.3f}, "
                f"temporaries {temporary:6.0f} MiB",
                flush=True,
            )
        jax.clear_caches()


def layouts(vocabulary: int, itemsize: int):
    """Candidates for softmax.cu: those that hold a row, and some that read it twice."""
    from normfuse.layers.cross_entropy.softmax import Layout

    vector = 16 // itemsize
    for slices, threads, batch in itertools.product(
        (1, 2, 4, 8), (128, 192, 256, 320, 384, 512, 640, 768, 1024), (2, 4, 8, 16)
    ):
        for blocks in {1024 // threads, 1536 // threads, 2048 // threads} - {0}:
            chosen = Layout(vector, threads, batch, slices, blocks)
            tile = threads * vector * chosen.chunks(vocabulary)
            held = chosen.chunks(vocabulary) == batch
            registers = 65536 // (threads * blocks)
            if registers < 16 + batch * 4 or not (slices - 1) * tile < vocabulary <= slices * tile:
                continue
            if slices * tile > 1.3 * vocabulary or (not held and (slices > 1 or batch != 8)):
                continue
            yield chosen


def sweep_layouts(seconds: float) -> None:
    """Times of the kernels alone, the best first."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.mosaic.gpu import profiler

    from normfuse.layers.cross_entropy import softmax
    from normfuse.native.implementation import NATIVE

    original = softmax.layout
    each = seconds / 6
    for rows, vocabulary, dtype in (
        (2048, 128256, "bfloat16"),
        (8192, 32000, "bfloat16"),
        (1024, 128256, "float32"),
    ):
        z = jax.random.normal(jax.random.key(0), (rows, vocabulary), jnp.dtype(dtype))
        labels, weights = jnp.arange(rows, dtype=jnp.int32), jnp.full((rows,), 1e-4)
        spec = softmax.Softmax(dtype="bfloat16")
        cases = {
            "both": (softmax.both, (z, labels, weights), z.nbytes + 2 * z.size),
            "statistics": (softmax.statistics, (z, labels), z.nbytes),
        }
        for name, (kernel, arrays, moved) in cases.items():
            found, began = [], time.perf_counter()
            for chosen in [None, *layouts(vocabulary, z.dtype.itemsize)]:
                if time.perf_counter() - began > each:
                    print("  out of time", flush=True)
                    break
                softmax.layout = original
                if chosen is not None:
                    softmax.layout = lambda *_, chosen=chosen, **__: chosen
                jax.clear_caches()
                try:
                    run = jax.jit(functools.partial(kernel, spec, order=NATIVE))
                    _, runs = profiler.measure(run, aggregate=False, iterations=5)(*arrays)
                except Exception as error:
                    print(f"  {chosen}: {str(error)[:120]}", flush=True)
                    continue
                mine = lambda run: sum(ms for kernel, ms in run if "softmax" in kernel)
                us = 1e3 * statistics.median(map(mine, runs))
                found.append(
                    (
                        us,
                        chosen or f"package's: {original(vocabulary, z.dtype.itemsize, _target())}",
                    )
                )
            print(f"\n{name}, {rows} x {vocabulary} {dtype}", flush=True)
            for us, chosen in [found[0], *sorted(found[1:], key=lambda one: one[0])[:8]]:
                print(f"  {us:8.1f} us, {moved / COPY_RATE / us:.3f} of copying: {chosen}")
    softmax.layout = original


def _target():
    import jax

    from normfuse.native.launch import attached_target, compute_capability

    device = jax.devices()[0]
    return attached_target(device, compute_capability(device) or 90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="rows of a chunk and layouts")
    parser.add_argument("--seconds", type=float, default=150, help="of the sweep of layouts")
    parser.add_argument("--kernels", action="store_true", help="name every kernel")
    parser.add_argument("--shape", type=int, nargs=3, action="append", help="tokens, n, vocabulary")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    shapes = [tuple(shape) for shape in arguments.shape or SHAPES]
    if arguments.torch:
        torch_table(shapes, arguments.iterations)
        return
    if not arguments.sweep:  # in a process of its own: JAX takes the GPU's memory
        command = [sys.executable, __file__, "--torch", "--iterations", str(arguments.iterations)]
        for shape in arguments.shape or ():
            command += ["--shape", *map(str, shape)]
        subprocess.run(command, check=False, env=os.environ, timeout=240)
    import jax

    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    if arguments.sweep:
        sweep_layouts(arguments.seconds)
        sweep_chunks(shapes, arguments.iterations)
        return
    table(shapes, arguments.iterations, arguments.kernels)
    accuracy(2048, 2048, 32000)


if __name__ == "__main__":
    main()
