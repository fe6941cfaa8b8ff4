"""Eight emulated CPU devices, a random generator per test, and switches for slow and GPU tests."""

import collections
import os
import pathlib
import zlib

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
    parser.addoption("--thin", type=int, default=1, help="run one of so many cases of each test")
    parser.addoption("--passed-to", metavar="FILE", help="write what passed to this file")
    parser.addoption(
        "--passed-in",
        metavar="FILE",
        help="of tests with four cases or more, not those in the file",
    )


@pytest.hookimpl(trylast=True)  # after pytest has selected by marks
def pytest_collection_modifyitems(config, items):
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:  # tests count kernels at sizes where XLA's norm would serve
        from normfuse.layers.norm import op as rms_norm

        rms_norm.PLAIN_ELEMENTS = 0
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
    if config.getoption("--thin") > 1:
        _drop(config, items, _thinned(items, config.getoption("--thin")))
    if config.getoption("--passed-in"):
        passed = set(pathlib.Path(config.getoption("--passed-in")).read_text().splitlines())
        _drop(config, items, _passed(items, passed))


def _drop(config, items, dropped):
    dropped = set(dropped)
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def _cases(items, *but):
    """The cases of each test, without those that are marked so."""
    cases = collections.defaultdict(list)
    for item in items:
        if not any(map(item.get_closest_marker, ("skip", "every_case", *but))):
            cases[item.nodeid.partition("[")[0]].append(item)
    return cases.values()


def _thinned(items, n):
    """All cases of each test but one of `n`, and one at least.

    The order is that of a checksum of their names, so that every parameter loses some values only.
    """
    for found in _cases(items):
        found.sort(key=lambda item: zlib.crc32(item.name.encode()))
        yield from found[-(-len(found) // n) :]


def _passed(items, passed):
    """Cases that passed elsewhere, of tests with others, whose values LLVM does not round."""
    for found in _cases(items, "optimized"):
        again = [item for item in found if item.nodeid in passed]
        if len(found) >= 4 and len(again) < len(found):
            yield from again


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--passed-to"):
        passed = [report.nodeid for report in terminalreporter.getreports("passed")]
        pathlib.Path(config.getoption("--passed-to")).write_text("\n".join(passed))


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
