"""The CPU handlers on XLA's thread pool: the same bits every time and on any number of threads."""

import os
import subprocess
import sys

# Prints a digest of every result; `NPROC` sets the size of XLA's pool.
PROGRAM = """
import concurrent.futures, functools, hashlib
import jax
import numpy as np
import normfuse

def call(kernel, operands, results, **attributes):
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in results]
    fn = jax.ffi.ffi_call(f"normfuse_norm_{kernel}", types)
    return jax.jit(functools.partial(fn, **attributes))(*operands)

def digest(shape):
    rng = np.random.default_rng(0)
    outer, n, inner = shape
    # Half the rows are subnormal: XLA takes those for zero on its pool's threads and its callers'.
    # A thread that did not would show.
    x, dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    x[1::2] *= np.float32(1e-39)
    dy[1::2] *= np.float32(1e-39)
    scale = rng.standard_normal(n, dtype=np.float32)
    scaled = dict(centred=False, scale_offset=np.float64(1), has_scale=True, has_residual=False)
    y, rstd = call("forward", [x, scale], [shape, (outer, inner)], **scaled, cast_before=False,
                   has_bias=False, eps=np.float64(1e-6), with_mean=False, with_rstd=True)
    dx, dscale = call("backward", [dy, x, scale, rstd], [shape, (n,)], **scaled, with_dscale=True,
                      with_dbias=False)
    results = hashlib.sha256()
    for result in (y, rstd, dx, dscale):
        results.update(np.asarray(result).tobytes())
    return results.hexdigest()

shapes = [(3000, 96, 1), (700, 1024, 1), (2, 200000, 1), (64, 300, 9), (1, 5000, 40)]
for shape in shapes:
    print(*shape, digest(shape))
# Several callers at once, each inside the pool's own threads and waiting for its help.
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    again = list(pool.map(digest, shapes * 4))
assert again == [digest(shape) for shape in shapes] * 4
"""


def run(threads: int) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment | {"NPROC": str(threads), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_number_of_threads_does_not_change_a_bit():
    on_one_thread = run(1)
    assert on_one_thread.count("\n") == 5
    assert run(7) == on_one_thread
