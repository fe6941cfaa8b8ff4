"""The kernel cache: on disk and in memory, damaged, shared, forbidden, full."""

import os
import stat
import subprocess
import sys
import threading
import time
import warnings

import pytest

from normfuse.native import cache, compiler
from normfuse.native.compiler import Source

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

SOURCE = Source(
    "scale.cu",
    'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= FACTOR; }',
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A cache of this test's own, with nothing in memory and no warning given yet."""
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_memory", {})
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "kernels"


def get(factor=2, arch="sm_90", source=SOURCE):
    """An image, and how many compilations that took."""
    before = compiler.compilations()
    return cache.get(source, {"FACTOR": factor}, arch), compiler.compilations() - before


def forget():
    cache._memory.clear()


def test_cache_compiles_once_and_reads_from_disk(folder):
    image, compiled = get()
    assert compiled == 1 and image.data.startswith(b"\x7fELF")
    assert get() == (image, 0)
    forget()
    assert get() == (image, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()] == [0o600]


def test_cache_key_has_everything_that_matters(monkeypatch):
    one = get()[0]
    header = Source(SOURCE.name, SOURCE.text, (("other.cuh", "// a comment"),))
    renamed = Source("other.cu", SOURCE.text)
    for change in ({"factor": 3}, {"arch": "sm_80"}, {"source": header}, {"source": renamed}):
        assert get(**change)[1] == 1, change
    monkeypatch.setattr(compiler, "version", lambda: (99, 0))
    assert get()[1] == 1
    monkeypatch.undo()
    assert one.data != get(factor=3)[0].data


@pytest.mark.parametrize("damage", [b"", b"garbage", "cut", "flip", "head", "key"])
def test_cache_damaged_entry_is_compiled_again(folder, damage):
    image = get()[0]
    (path,) = folder.iterdir()
    raw = path.read_bytes()
    changed = {
        "cut": raw[:-1],
        "flip": raw[:-1] + bytes([raw[-1] ^ 1]),
        "head": raw.replace(b'"format": 1', b'"format": 0'),
        "key": raw.replace(b'"sha256"', b'"sha257"'),
    }
    path.write_bytes(changed.get(damage, damage) if isinstance(damage, str) else damage)
    forget()
    assert get() == (image, 1)
    forget()
    assert get() == (image, 0)


def test_cache_threads_compile_once():
    barrier, found = threading.Barrier(2), []
    before = compiler.compilations()

    def work():
        barrier.wait()
        found.append(cache.get(SOURCE, {"FACTOR": 5}, "sm_90"))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] and compiler.compilations() == before + 1


TWELVE = """
import sys
from normfuse.native import cache
from normfuse.native.compiler import Source
source = Source("scale.cu", sys.argv[1])
print([cache.get(source, {"FACTOR": i}, "sm_90").digest for i in range(12)])
"""


def test_cache_two_processes_at_once(folder):
    command = [sys.executable, "-W", "error", "-c", TWELVE, SOURCE.text]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert outputs[0] == outputs[1] and outputs[0].strip()
    assert len(list(folder.iterdir())) == 12  # and no temporary file is left
    assert all(get(i)[1] == 0 for i in range(12))


def refused(match):
    """Warns once, works from memory."""
    with pytest.warns(RuntimeWarning, match=match) as caught:
        first = get()
    assert len(caught) == 1 and first[1] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get()[1] == 0
        assert get(factor=7)[1] == 1
    with pytest.raises(cache.Refused, match=match):
        cache.check(cache.directory())


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_cache_refuses_folder_that_others_can_write_to(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    refused("chmod 700")
    assert not list(folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_cache_refuses_folder_of_another_user(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, -1)
    refused("owned by user 65534")


def test_cache_refuses_a_file_in_its_place(folder):
    folder.write_text("")
    refused("File exists")


def test_cache_missing_home_works_from_memory(monkeypatch):
    monkeypatch.delenv("NORMFUSE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")  # where not even root can make a folder
    assert str(cache.directory()) == "/proc/nobody/.cache/normfuse"
    refused("No such file or directory")


def test_cache_full_disk_warns_once(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left") as caught:
        get()
    get(factor=7)
    assert len(caught) == 1 and not list(folder.iterdir())


def test_cache_evicts_what_was_used_longest_ago(folder, monkeypatch):
    now = time.time()
    for age in (30, 20, 10):  # factor 30 is the oldest
        get(factor=age)
        newest = max(folder.iterdir(), key=lambda p: p.stat().st_mtime)
        os.utime(newest, (now - age * 100, now - age * 100))
    forget()
    get(factor=30)  # read from disk: now the newest
    size = sum(p.stat().st_size for p in folder.iterdir())
    monkeypatch.setattr(cache, "MAX_BYTES", size)
    stale = folder / "left-behind.tmp"
    stale.write_text("")
    os.utime(stale, (now - 7200, now - 7200))
    get(factor=40)
    forget()
    assert not stale.exists() and len(list(folder.iterdir())) == 3
    assert get(factor=30)[1] == get(factor=10)[1] == 0
    assert get(factor=20)[1] == 1


def test_cache_entries_and_clear(folder):
    get(factor=2)
    get(factor=3, arch="compute_80")
    (folder / "not-an-entry.image").write_text("?")
    entries = cache.entries()
    assert {(e.source, e.arch, e.macros["FACTOR"]) for e in entries} == {
        ("scale.cu", "sm_90", "2"),
        ("scale.cu", "compute_80", "3"),
    }
    assert all(e.bytes > 100 and e.compiler for e in entries)
    assert cache.clear() == 3
    assert cache.entries() == [] and cache.clear() == 0
    assert get()[1] == 1


def test_cache_clear_leaves_a_strangers_folder_alone(folder):
    get()
    folder.chmod(0o777)
    with pytest.raises(cache.Refused):
        cache.clear()
    assert len(list(folder.iterdir())) == 1
