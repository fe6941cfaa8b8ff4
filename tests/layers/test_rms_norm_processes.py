"""Several processes."""

import functools
import pathlib
import socket

import processes
import pytest
from processes import answers

start = functools.partial(processes.start, pathlib.Path(__file__).with_name("rms_norm_worker.py"))


def test_two_processes(serve):
    """two processes (Gloo), Auto and Explicit axes"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    first, second = answers(*[start(4, "distributed", address, i) for i in range(2)])
    assert first == second
    split = {"backward_apply": 1, "row_dots": 1, "row_statistics": 1}
    for kind in ("auto", "explicit"):
        rows, features = first[f"{kind} rows"], first[f"{kind} features"]
        assert rows == {"calls": {"backward": 1, "forward": 1}, "collectives": ["all-reduce"]}
        assert features["calls"] == split
        assert set(features["collectives"]) <= {"all-gather", "all-reduce"}
    serve.record("native")


@pytest.fixture
def cache(tmp_path):
    return processes.compilation_cache(tmp_path)


@pytest.mark.newest
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

    # Our sources decide what a partitioned program does: another version must not reuse it.
    (other,) = answers(start(8, "cached", "other", **cache))
    assert other["auto"]["misses"] == cold["auto"]["misses"]
    assert other["one device"]["misses"] == other["explicit"]["misses"] == 0
    serve.record("native")
