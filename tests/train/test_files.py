"""The files of a run: whole at every moment, on a full disk too."""

import os
import resource
import sys

import pytest

from normfuse.train import run_dir
from normfuse.train.config import preset_config
from normfuse.train.files import PART, write


@pytest.mark.parametrize("limit", [0, 1, 4096, 9999])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, limit):
    """No file may grow beyond some bytes, as under a quota."""
    file = tmp_path / "tokenizer.json"
    file.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            write(file, "x" * 10_000)
        assert raised.value.filename == str(file)
        write(file, "old")  # takes no space
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["tokenizer.json"]
    write(file, "x" * 10_000)
    assert file.read_text() == "x" * 10_000 and os.listdir(tmp_path) == ["tokenizer.json"]


def test_equal_content_is_not_written_and_links_are_not_followed(tmp_path):
    file, elsewhere = tmp_path / "config.yaml", tmp_path / "elsewhere"
    write(file, "same")
    before = file.stat()
    write(file, b"same")
    assert file.stat() == before
    elsewhere.write_text("kept")
    (tmp_path / f"config.yaml{PART}").symlink_to(elsewhere)
    write(file, "other")
    assert (file.read_text(), elsewhere.read_text()) == ("other", "kept")


def test_every_file_of_a_run_is_written_beside_its_place(train, tmp_path, text_file):
    """And is none before it is complete: a new run's, and those that a resume changes."""
    run, opened, on = tmp_path / "run", [], True

    def audit(event, arguments):
        if event == "open" and on and str(arguments[0]).startswith(str(run)):
            path, mode, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR) and "/checkpoints/" not in str(path):
                opened.append((os.path.basename(path), mode))

    sys.addaudithook(audit)
    assert train(steps=2)[0] == 0
    (tmp_path / "other.txt").write_text(text_file.read_text())
    (run / "text.json").write_text("{}")
    first = len(opened)
    assert train(steps=3, **{"data.path": tmp_path / "other.txt"})[0] == 0
    on = False
    whole = {("metrics.jsonl", "a"), (".lock", None), ("text.json", "w")}
    parts = {f"{name}{PART}" for name in ("config.yaml", "text.json", "metrics.jsonl", "loss.png")}
    assert {name for name, _ in set(opened[:first]) - whole} == parts
    assert {name for name, _ in set(opened[first:]) - whole} <= parts
    assert not list(run.glob(f"*{PART}"))


def test_a_run_killed_at_its_first_file_starts_again(tmp_path):
    config = preset_config("tiny")
    (tmp_path / ".lock").touch()
    (tmp_path / f"config.yaml{PART}").write_text("st")
    assert not run_dir.resumes(config, run_dir.RunDir(tmp_path))
