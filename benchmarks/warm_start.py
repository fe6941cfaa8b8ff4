"""Shows that a new process compiles nothing that an earlier one has compiled.

Runs a gradient of `rms_norm` in two processes that share JAX's persistent compilation cache and the
kernel cache, and prints what each compiled.

    python benchmarks/warm_start.py
"""

import os
import subprocess
import sys
import tempfile
import time


def child() -> None:
    import jax
    import jax.numpy as jnp

    from normfuse import rms_norm
    from normfuse.native import compiler

    hits = []
    jax.monitoring.register_event_listener(
        lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None
    )
    x, scale = jnp.ones((4096, 4096), jnp.bfloat16), jnp.ones((4096,))
    loss = lambda x, scale: rms_norm(x, scale, implementation="native").astype(jnp.float32).sum()
    before, began = len(hits), time.perf_counter()
    gradient = jax.jit(jax.grad(loss, (0, 1)))
    value = jax.block_until_ready(gradient(x, scale))
    seconds = time.perf_counter() - began
    print(
        f"hits={len(hits) - before} kernels={compiler.compilations()} first call {seconds:.2f} s "
        f"on {jax.devices()[0].device_kind}, dscale[0]={float(value[1][0]):.1f}"
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "NORMFUSE_CACHE_DIR": f"{folder}/kernels",
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        lines = []
        for name in ("cold", "warm"):
            command = [sys.executable, __file__, "child"]
            lines.append(subprocess.check_output(command, env=environment, text=True).strip())
            print(f"{name}: {lines[-1]}", flush=True)
    if "hits=0" not in lines[0] or "hits=0" in lines[1] or "kernels=0" not in lines[1]:
        raise SystemExit("the second process compiled again")


if __name__ == "__main__":
    child() if sys.argv[1:] == ["child"] else main()
