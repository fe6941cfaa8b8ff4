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

pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")

SOURCE = compiler.Source(
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
    before = cache.compilations()
    return compiler.image_of(source, {"FACTOR": factor}, arch), cache.compilations() - before


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
    header = compiler.Source(SOURCE.name, SOURCE.text, (("other.cuh", "// a comment"),))
    renamed = compiler.Source("other.cu", SOURCE.text)
    for change in ({"factor": 3}, {"arch": "sm_80"}, {"source": header}, {"source": renamed}):
        assert get(**change)[1] == 1, change
    monkeypatch.setattr(compiler, "version", lambda: (99, 0))
    assert get()[1] == 1
    monkeypatch.undo()
    assert one.data != get(factor=3)[0].data


@pytest.mark.parametrize("damage", [b"", b"garbage", "cut", "flip", "head"])
def test_cache_damaged_entry_is_compiled_again(folder, damage):
    image = get()[0]
    (path,) = folder.iterdir()
    raw = path.read_bytes()
    changed = {
        "cut": raw[:-1],
        "flip": raw[:-1] + bytes([raw[-1] ^ 1]),
        "head": b"0" + raw[1:],
    }
    path.write_bytes(changed.get(damage, damage) if isinstance(damage, str) else damage)
    forget()
    assert get() == (image, 1)
    forget()
    assert get() == (image, 0)


def test_cache_threads_compile_once():
    barrier, found = threading.Barrier(2), []
    before = cache.compilations()

    def work():
        barrier.wait()
        found.append(compiler.image_of(SOURCE, {"FACTOR": 5}, "sm_90"))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] and cache.compilations() == before + 1


TWELVE = """
import sys
from normfuse.native import compiler
source = compiler.Source("scale.cu", sys.argv[1])
print([compiler.image_of(source, {"FACTOR": i}, "sm_90").digest for i in range(12)])
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


def test_cache_refuses_folder_that_others_can_replace(folder):
    folder.parent.chmod(0o777)
    refused("lets others replace it")
    forget()
    cache._warned.clear()
    if os.geteuid() == 0:  # only root can give a folder away
        folder.parent.chmod(0o755)
        os.chown(folder.parent, 65534, -1)
        refused("lets others replace it")
        os.chown(folder.parent, 0, -1)
    folder.parent.chmod(0o1777)  # sticky, as /tmp: only the owner can
    cache.check(folder)


def test_cache_refuses_what_a_link_to_a_folder_of_others_leads_to(folder, tmp_path):
    target = tmp_path / "open" / "kernels"
    target.mkdir(parents=True)
    target.parent.chmod(0o777)
    folder.symlink_to(target)
    refused("lets others replace it")


def test_cache_of_root_that_nobody_can_write_to_is_used(folder, monkeypatch):
    """The image of a container has it so: owned by another user, who is root, and read-only."""
    image = get()[0]
    folder.chmod(0o555)
    (path,) = folder.iterdir()
    path.chmod(0o444)
    monkeypatch.setattr(cache.tempfile, "mkstemp", read_only)
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get() == (image, 0)
    with pytest.warns(RuntimeWarning, match="Permission denied") as caught:
        get(factor=11)
        get(factor=12)
    assert len(caught) == 1


def test_folders_in_the_cache_follow_its_rule(folder, tmp_path):
    """JAX loads programs there, and looks at neither the folder nor the files."""
    assert cache.usable("xla") == folder / "xla"
    assert stat.S_IMODE((folder / "xla").stat().st_mode) == 0o700
    program = folder / "xla" / "inner" / "program"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o666)
    assert cache.usable("xla")  # nobody can reach it
    (folder / "xla").chmod(0o755)
    with pytest.warns(RuntimeWarning, match="program .* can be written to by others"):
        assert cache.usable("xla") is None
    program.chmod(0o644)
    assert cache.usable("xla")
    (folder / "xla").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="xla: mode 0777"):
        assert cache.usable("xla") is None
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="kernels: mode 0777") as caught:
        assert cache.usable("xla") is cache.usable() is None
        get()
    assert len(caught) == 1


def read_only(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_cache_missing_home_works_from_memory(monkeypatch):
    monkeypatch.delenv("NORMFUSE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nobody")  # not even root can make a folder there
    assert str(cache.directory()) == "/proc/nobody/.cache/normfuse"
    refused("No such file or directory")


def test_cache_that_cannot_be_used_is_no_error_where_warnings_are(folder, monkeypatch, caplog):
    """With `-W error` the image is there all the same, and the log says why it is not kept."""
    folder.write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get()[1] == 1
        assert get()[1] == 0 and get(factor=5)[1] == 1
        folder.unlink()
        monkeypatch.setattr(os, "replace", read_only)
        assert get(factor=7)[1] == 1
    messages = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [m.split(": ")[1].split(".")[0] for m in messages] == [
        "File exists",
        "Permission denied",
    ]


def test_cache_entry_under_another_name_is_not_loaded(folder):
    image, other = get()[0], get(factor=3)[0]
    paths = {path.read_bytes().partition(b"\n")[2]: path for path in folder.iterdir()}
    paths[image.data].write_bytes(paths[other.data].read_bytes())
    forget()
    assert get() == (image, 1)
    forget()
    assert get() == (image, 0) and get(factor=3) == (other, 0)


def directory(path):
    path.mkdir()
    (path / "file").write_text("")


def elsewhere(path):
    """A link to an entry that is as it should be."""
    kept = path.parent.parent / "kept"
    kept.write_bytes(elsewhere.entry)
    path.symlink_to(kept)


def writable(path):
    path.write_bytes(elsewhere.entry)
    path.chmod(0o666)


def others(path):
    path.write_bytes(elsewhere.entry)
    os.chown(path, 65534, -1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, directory, elsewhere, writable, others],
    ids=lambda make: make.__name__,
)
def test_cache_entry_that_is_none_is_passed_over(folder, make):
    if make is others and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    image = get()[0]
    (path,) = folder.iterdir()
    elsewhere.entry = path.read_bytes()
    path.unlink()
    make(path)
    forget()
    if make is directory:  # it cannot be replaced
        with pytest.warns(RuntimeWarning, match="Is a directory"):
            assert get() == (image, 1)
        assert cache.clear() == 0
        return
    assert get() == (image, 1)
    forget()
    assert get() == (image, 0) and stat.S_ISREG(path.lstat().st_mode)
    path.unlink()
    make(path)
    assert cache.clear() == 1 and not list(folder.iterdir())


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


def test_cache_sizes_and_clear(folder):
    get(factor=2)
    get(factor=3, arch="compute_80")
    (folder / "not-an-entry.image").write_text("?")
    assert len(cache.sizes()) == 3 and sum(cache.sizes()) > 1000
    assert cache.clear() == 3
    assert cache.sizes() == [] and cache.clear() == 0
    assert get()[1] == 1


def test_cache_clear_leaves_a_strangers_folder_alone(folder):
    get()
    folder.chmod(0o777)
    with pytest.raises(cache.Refused):
        cache.clear()
    assert len(list(folder.iterdir())) == 1
