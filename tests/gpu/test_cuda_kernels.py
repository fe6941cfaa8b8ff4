"""The CUDA kernels as XLA runs them, on an NVIDIA GPU."""

import collections
import functools
import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from norm_kernels import EPS, KERNELS, Case, check, many_rows, mixes

from normfuse.layers.norm.kernels import backward_kernel, forward_kernel
from normfuse.layers.norm.spec import Norm
from normfuse.native import launch
from normfuse.native.compiler import Source
from normfuse.native.implementation import NATIVE

pytestmark = pytest.mark.gpu

FORWARD = Norm(eps=EPS, out_dtype="bfloat16", with_rstd=True)
BACKWARD = Norm(with_dscale=True)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def run(kernel, norm, operands):
    """The kernel of that name, through XLA; no other implementation may serve."""
    call = functools.partial(KERNELS[kernel], norm, order=NATIVE)
    return jax.jit(call)(*jax.tree.map(jnp.asarray, list(operands)))


WHOLE = "forward", "backward"


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    "n", [1, 2, 7, 8, 64, 100, 1024, 4104, 5120, 7168, 8192, 12288, 16384, 32768]
)
def test_cuda_forward_and_backward_match_the_definition(n, centred, monkeypatch):
    case = Case((301, n), centred=centred, bias=centred)  # more rows than blocks
    check(run, case, WHOLE)
    many_rows(monkeypatch)
    check(run, case, ["backward"])


@pytest.mark.parametrize("n", [65536, 65544, 1048573, 1048576])
def test_cuda_long_rows_match_the_definition(n):
    check(run, Case((3, n), residual=n == 65544), WHOLE)


@pytest.mark.parametrize(("x", "scale", "out"), mixes())
def test_cuda_dtype_mixes_match_the_definition(x, scale, out, monkeypatch):
    case = Case((33, 264), x, scale, out, other=scale, residual=True, offset=0.5)
    check(run, case, WHOLE)
    many_rows(monkeypatch)
    check(run, case, ["backward"])


def test_cuda_no_scale_and_no_rows_and_scales_of_examples():
    for case in (Case((33, 264), scale=None), Case((0, 264)), Case((3, 33, 264), bias=True)):
        check(run, case)


def arrays(rows, n, key=0, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(key), 3)
    x, dy = (jax.random.normal(k, (rows, n), dtype) for k in keys[:2])
    return x, dy, 1 + 0.1 * jax.random.normal(keys[2], (n,), jnp.float32)


def norm(x, dy, scale):
    """(y, rstd, dx, dscale)."""
    y, *_, rstd = forward_kernel(FORWARD, x, None, scale, order=NATIVE)
    return y, rstd, *backward_kernel(BACKWARD, dy, x, scale, None, rstd, order=NATIVE)[:2]


def test_cuda_results_are_the_same_every_time():
    operands = arrays(5000, 1024)
    first, *others = [jax.device_get(jax.jit(norm)(*operands)) for _ in range(4)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()


def test_cuda_more_than_two_to_the_31_elements(monkeypatch):
    many_rows(monkeypatch)  # the last part is of few, whose kernel rounds elsewhere
    rows, n, step = 2**21 + 3, 1024, 2**16
    x, dy, scale = arrays(rows, n)
    y, _, dx, dscale = jax.jit(norm)(x, dy, scale)

    @functools.partial(jax.jit, static_argnums=0)
    def part(size, begin, *arrays):  # few enough rows that 32-bit offsets would do
        x, dy, y, dx = [jax.lax.dynamic_slice_in_dim(a, begin, size) for a in arrays]
        want = norm(x, dy, scale)
        return jnp.all(y == want[0]) & jnp.all(dx == want[2]), want[3]

    total = np.zeros(n)
    for begin in range(0, rows, step):
        same, share = part(min(step, rows - begin), begin, x, dy, y, dx)
        assert same, f"rows from {begin} on differ"
        total += np.asarray(share, np.float64)
    # Sums of 2^21 terms in another order: a random walk of roundings of a value that is one itself.
    np.testing.assert_allclose(dscale, total, atol=64 * np.finfo(np.float32).eps * np.sqrt(rows))


def driver_calls(folder) -> collections.Counter:
    """How often the host called each function of the CUDA driver, from a profile."""
    (path,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    names = [event.name.split()[0] for event in events if event.name.startswith("cu")]
    return collections.Counter(names)  # a graph's launch also names the graph


def test_cuda_graphs_record_the_kernel(tmp_path):
    x, _, scale = arrays(64, 1024)
    w = jnp.ones((1024, 1024), jnp.bfloat16)

    def chain(x):
        for _ in range(8):
            x = forward_kernel(FORWARD, x, None, scale, order=NATIVE)[0]
            x = (x @ w) / 32
        return x

    compiled = jax.jit(chain).lower(x).compile()
    first = jax.device_get(compiled(x))
    for _ in range(3):  # the first runs record, later ones replay
        np.testing.assert_array_equal(jax.device_get(compiled(x)), first)

    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(compiled(x))
    called = driver_calls(tmp_path)
    assert called["cuGraphLaunch"] >= 1, called
    alone = sum(count for name, count in called.items() if name.startswith("cuLaunchKernel"))
    assert alone < 8, called  # fewer than the norms: they are in the graph


def test_cuda_threads_at_once():
    errors = []

    def work(n):
        try:
            with jax.enable_x64(True):
                check(run, Case((33, n), out="float32"), ["forward"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (520, 528, 536, 520, 528, 536)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_cuda_every_device_in_one_process():
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    want = jax.device_get(jax.jit(norm)(*arrays(300, 8192)))
    for one in jax.devices():
        got = jax.device_get(jax.jit(norm)(*jax.device_put(arrays(300, 8192), one)))
        for a, b in zip(want, got, strict=True):
            assert a.tobytes() == b.tobytes()


def test_cuda_donated_operand():
    x, _, scale = arrays(300, 4096)
    forward = lambda x, scale: forward_kernel(FORWARD, x, None, scale, order=NATIVE)[0]
    want = jax.device_get(jax.jit(forward)(x, scale))
    got = jax.device_get(jax.jit(forward, donate_argnums=0)(x, scale))
    np.testing.assert_array_equal(want, got)


TWICE = Source(
    "twice.cu",
    'extern "C" __global__ void twice(const float* x, float* y) '
    "{ y[threadIdx.x] = 2 * x[threadIdx.x]; }",
)


def _twice(kernel="twice", block=32, **sizes):
    capability = launch.compute_capability(jax.devices()[0])
    target = launch.Target(f"sm_{capability}", 1)
    result = jax.ShapeDtypeStruct((32,), jnp.float32)
    call = lambda x: launch.launch(
        TWICE, kernel, [x], [result], target=target, grid=1, block=block, **sizes
    )[0]
    return jax.jit(call)(jnp.arange(32, dtype=jnp.float32))


def test_cuda_own_source_launches():
    np.testing.assert_array_equal(_twice(), 2 * np.arange(32))


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"block": 2048}, "CUDA_ERROR_INVALID_VALUE"),
        ({"kernel": "thrice"}, "CUDA_ERROR_NOT_FOUND"),
        ({"shared": 1 << 20}, "bytes of dynamic shared memory"),
    ],
)
def test_cuda_launch_failure_names_kernel_and_cause(sizes, text):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(_twice(**sizes))
    assert sizes.get("kernel", "twice") in str(caught.value)
    assert text in str(caught.value)


RELOAD = """
import jax, jax.numpy as jnp
from normfuse.layers.norm.kernels import forward_kernel
from normfuse.layers.norm.spec import Norm
from normfuse.native import cache
from normfuse.native.implementation import NATIVE
x = jnp.ones((64, 3072), jnp.bfloat16)
norm = Norm(eps=1e-6, out_dtype="bfloat16")
f = jax.jit(lambda x: forward_kernel(norm, x, order=NATIVE)[0])
print(float(f(x).sum()), cache.compilations())
"""


def test_cuda_executable_comes_back_from_the_persistent_cache(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "NORMFUSE_CACHE_DIR": str(tmp_path / "kernels"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": "",
    }
    outputs, entries = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", RELOAD],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(done.stdout.split())
        entries.append(sorted(p.name for p in (tmp_path / "jax").glob("jit*-cache")))
    assert outputs[0] == [str(64.0 * 3072), "1"]
    assert outputs[1] == [str(64.0 * 3072), "0"]  # from the kernels on disk
    assert entries[0] == entries[1], "the second process compiled again"
