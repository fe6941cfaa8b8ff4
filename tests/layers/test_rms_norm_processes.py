"""Several processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
SECONDS = 120


def start(devices, *arguments, **environment):
    """A process of `rms_norm_worker.py` with so many CPU devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(HERE.parent),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        **environment,
    }
    command = [sys.executable, str(HERE / "rms_norm_worker.py"), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, **pipes)


def answers(*processes):
    """What the processes print last; all are ended, whatever happens to one."""
    try:
        outputs = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def test_two_processes(serve):
    """two processes (Gloo), Auto and Explicit axes"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    first, second = answers(*[start(4, "distributed", address, i) for i in range(2)])
    assert first == second
    split = {"backward_apply": 1, "row_dots": 1, "row_sums": 1}
    for kind in ("auto", "explicit"):
        rows, features = first[f"{kind} rows"], first[f"{kind} features"]
        assert rows == {"calls": {"backward": 1, "forward": 1}, "collectives": ["all-reduce"]}
        assert features["calls"] == split
        assert set(features["collectives"]) <= {"all-gather", "all-reduce"}
    serve.record("native")


@pytest.fixture
def cache(tmp_path):
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def test_persistent_compilation_cache(serve, cache, tmp_path):
    """the persistent compilation cache, hit from a new process, Auto and Explicit axes too"""
    entries = lambda: {p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")}
    (cold,) = answers(start(8, "cached", **cache))
    stored = entries()
    (warm,) = answers(start(8, "cached", **cache))
    assert list(cold) == list(warm) == ["one device", "auto", "explicit"]
    for name in cold:
        assert cold[name]["misses"] > 0 and cold[name]["hits"] == 0, (name, cold)
        assert warm[name] == {"hits": cold[name]["misses"], "misses": 0}, (name, warm)
    assert entries() == stored

    # what a partitioned program does is decided by our sources: another version must not reuse it
    (other,) = answers(start(8, "cached", "other", **cache))
    assert other["auto"]["misses"] == cold["auto"]["misses"]
    assert other["one device"]["misses"] == other["explicit"]["misses"] == 0
    serve.record("native")
