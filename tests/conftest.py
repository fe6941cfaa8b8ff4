"""Eight emulated CPU devices, a random generator per test, and switches for slow and GPU tests."""

import collections
import gc
import os

# pytest-xdist hands its workers a terminal's width, and they have none: tables are not wrapped.
os.environ.pop("COLUMNS", None)
# Before JAX is imported: the emulated devices stand in for a mesh on machines without accelerators.
_flag = "--xla_force_host_platform_device_count"
if _flag not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}=8".strip()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

pytest_plugins = ["checkout_root", "support_table"]

# Programs that communicate, several in flight at once, can take every thread of XLA's CPU pool and
# wait for each other until XLA aborts the process.
jax.config.update("jax_cpu_enable_async_dispatch", False)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:  # tests count kernels at sizes where XLA's norm would serve
        from normfuse.layers.norm import cuda

        cuda.PLAIN_ELEMENTS = 0
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    # A process forgets its programs where one kind of test follows the other: once, in this order.
    items.sort(key=lambda item: "optimized" in item.keywords)


def pytest_collection_finish():
    """Keeps modules and tests out of garbage collections, a tenth of the time otherwise."""
    gc.collect()
    gc.freeze()
    if jax.default_backend() != "gpu":  # where arrays in cycles would keep its memory
        gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup(item):
    """On CPUs, LLVM optimizes the programs of tests marked `optimized` alone: others run once.

    It changes how values are rounded, so the tests of values are marked; it knows nothing of the
    transformation or the mesh that a program comes from, and leaves what serves it as it is.
    """
    if jax.default_backend() == "cpu":
        hasty = item.get_closest_marker("optimized") is None
        name = "jax_disable_most_optimizations"
        os.environ[name.upper()] = str(int(hasty))  # in processes that the test starts
        if jax.config.values[name] != hasty:
            jax.config.update(name, hasty)
            jax.clear_caches()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name: reproducible, and different for every test."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture
def eight_devices():
    """The first eight devices of the default backend; skips where there are fewer."""
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices")
    return jax.devices()[:8]


@pytest.fixture
def arch(monkeypatch):
    """Sets the architecture of CUDA programs, which JAX's keys do not contain."""

    def set_arch(name):
        monkeypatch.setenv("NORMFUSE_CUDA_ARCH", name)
        jax.clear_caches()

    yield set_arch
    jax.clear_caches()


@pytest.fixture
def compilations():
    """Counts programs that XLA compiles, or finds in its cache, by the function's name."""
    counts = collections.Counter()

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            counts[details["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield counts
    jax.monitoring.unregister_event_duration_listener(listen)
