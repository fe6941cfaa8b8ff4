"""Checkpoints that are checked: saved in the background, verified when they are read.

Each holds the parameters, the rest of the state, and a JSON record with the run's configuration,
the text's identity and a checksum of every array. Storage that returns other bits than were
written, which orbax alone does not notice, costs only the steps since the checkpoint before.
"""

import contextlib
import gc
import json
import re
import shutil
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax import Array

from ..models.functional import Params
from . import distributed
from .checksum import checksums
from .debris import failed_saves, keep_quiet
from .errors import RunError, UsageError
from .step import State


class Damaged(Exception):
    """A checkpoint that is not what was written."""


class Checkpoints:
    """The checkpoints of one run, in a folder.

    Args:
      folder: made if it is not there.
      report: called with a line for people.
      keep: how many of the newest stay; None keeps all.
    """

    def __init__(self, folder: Path, *, report: Callable[[str], None], keep: int | None = None):
        keep_quiet()
        self.folder = folder.absolute()
        self._report = report
        self._saved = -1
        self._failed_before = len(failed_saves)
        # Made in the background, a folder that cannot be made would be waited for by threads that
        # outlive the run by five minutes.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, async_options=at_once)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def steps(self) -> list[int]:
        """Lists the steps that were saved completely, ascending."""
        return sorted(self._manager.all_steps())

    def record(self, step: int) -> dict:
        """Reads a checkpoint's record: configuration, text, checksums.

        Raises:
          Damaged: it cannot be read or is not what was written.
        """
        restored = self._read(step, record=ocp.args.JsonRestore())["record"]
        if not isinstance(restored, dict) or restored.pop("crc32", None) != _crc32(restored):
            raise Damaged("its record is not what was written")
        return restored

    def newest_record(self) -> tuple[int, dict] | None:
        """Reads the newest readable record, and its step; None when nothing is saved."""
        for step in reversed(self.steps()):
            try:
                return step, self.record(step)
            except Damaged:
                continue
        return None

    def save(self, state: State, step: int, record: dict):
        """Starts saving; returns when `state` may be overwritten. Does nothing for a saved step.

        Raises:
          RunError: this save or the one before it failed.
        """
        if step == self._saved:
            return
        sums = {path: int(value) for path, value in _sums(state).items()}
        record = record | {"step": step, "checksums": sums, "arrays": _described(state)}
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params),
            rest=ocp.args.StandardSave(_rest(state)),
            record=ocp.args.JsonSave(record | {"crc32": _crc32(record)}),
        )
        self._or_fail(self._finish, self._saved)  # the one before
        self._or_fail(lambda: self._manager.save(step, args=items, force=True), step)
        self._saved = step

    def check(self):
        """Raises a RunError if a save in the background has failed."""
        self._or_fail(self._check, self._saved)

    def close(self):
        """Waits until everything is written; a RunError if it cannot be."""
        self._or_fail(self._finish, self._saved)
        self._manager.close()

    def restore(self, abstract: State) -> tuple[State, dict]:
        """Restores the newest checkpoint that is whole, onto the shardings of `abstract`.

        A damaged one is reported in one line, moved aside, and the one before it taken.

        Returns: the state and its record.
        Raises:
          RunError: there is none.
          UsageError: it holds other arrays than `abstract`.
        """
        return self._newest_whole(lambda step: self._restore(step, abstract))

    def restore_params(self, abstract: Params) -> Params:
        """Restores only the parameters of the newest checkpoint that is whole.

        Raises:
          RunError: there is none.
        """

        def one(step):
            params = self._read(step, params=ocp.args.StandardRestore(abstract))["params"]
            _verify(_named("params", params), self.record(step))
            return params

        return self._newest_whole(one, move=False)

    def _newest_whole(self, read: Callable[[int], Any], move: bool = True):
        damaged = []
        complete = self.steps()
        for step in sorted({*complete, *self._numbered()}, reverse=True):
            try:
                if step not in complete:
                    raise Damaged("it is not complete")
                found = read(step)
            except Damaged as reason:
                self._report(f"checkpoint of step {step} is damaged, not used: {reason}")
                damaged.append(step)
                continue
            if move:
                self._move_aside(damaged)
                self._saved = step
            return found
        raise RunError(
            f"{self.folder} holds no checkpoint that is whole; damaged are steps "
            f"{sorted(damaged)}. Start anew in another --out-dir, or bring back a copy."
        )

    def _numbered(self) -> list[int]:
        """Lists the steps that have a folder, among them those that orbax does not count."""
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]

    def _restore(self, step: int, abstract: State) -> tuple[State, dict]:
        record = self.record(step)
        _match(record["arrays"], _described(abstract))
        items = self._read(
            step,
            params=ocp.args.StandardRestore(abstract.params),
            rest=ocp.args.StandardRestore(_rest(abstract)),
        )
        rest = items["rest"]
        state = State(params=items["params"], **rest)
        _verify(_sums(state), record)
        return state, record

    def _read(self, step: int, **items):
        reason, found = None, {}
        with _without_debris():
            try:
                found = {name: self._item(step, name, what) for name, what in items.items()}
            except Exception as error:  # orbax and TensorStore raise whatever the bytes led them to
                reason = _first_line(error)
            if reason is not None:
                gc.collect()
        if distributed.anywhere(reason is not None):
            raise Damaged(reason or "another process could not read its part")
        return found

    def _item(self, step: int, name: str, what: Any) -> Any:
        """Reads without orbax's barriers: a process that fails here would never come to them."""
        if isinstance(what, ocp.args.JsonRestore):
            handler: Any = ocp.JsonCheckpointHandler()
        else:
            handler = ocp.StandardCheckpointHandler()
        with contextlib.closing(handler):
            return handler.restore(self.folder / str(step) / name, args=what)

    def _move_aside(self, steps: list[int]):
        """Frees the steps' names: orbax does not save a step that exists."""
        for step in steps:
            if jax.process_index() == 0:
                target = self.folder.with_name("damaged") / str(step)
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                shutil.move(self.folder / str(step), target)
                self._report(f"moved it to {target}")
        if steps:
            distributed.anywhere(False)  # nobody looks before the first process has moved them
            self._manager.reload()

    def _finish(self):
        """Waits for the save in the background; not for others that wait for one that failed."""
        while jax.process_count() > 1 and self._manager.is_saving_in_progress():
            self._check()
            time.sleep(0.01)
        self._manager.wait_until_finished()

    def _check(self):
        self._manager.check_for_errors()
        if jax.process_count() > 1 and len(failed_saves) > self._failed_before:
            raise failed_saves[-1]

    def _or_fail(self, action: Callable[[], Any], step: int):
        try:
            action()
        except Exception as error:
            raise RunError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{_first_line(error)}"
            ) from error


def _rest(state: State) -> dict:
    return {name: value for name, value in state._asdict().items() if name != "params"}


def _sums(state: State) -> dict[str, Array]:
    return _named("params", state.params) | _named("rest", _rest(state))


def _named(item: str, tree: Any) -> dict[str, Array]:
    return {item + path: value for path, value in checksums(tree).items()}


def _described(state: State) -> dict[str, str]:
    """Gives dtype and shape of every array under its path."""
    items = {"params": state.params, "rest": _rest(state)}
    return {
        item + jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
        for item, tree in items.items()
        for path, x in jax.tree.leaves_with_path(tree)
    }


def _match(saved: dict[str, str], wanted: dict[str, str]):
    different = [path for path in {**saved, **wanted} if saved.get(path) != wanted.get(path)]
    if different:
        path = different[0]
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        raise UsageError(
            f"the checkpoint in --out-dir holds {path} as {saved.get(path, 'nothing')}, this run "
            f"needs {wanted.get(path, 'nothing')}{more}: it is another model's, or was made by "
            "another version of this program."
        )


def _verify(found: dict[str, Array], record: dict):
    for path, value in found.items():
        if int(value) != record["checksums"].get(path):
            raise Damaged(f"{path} does not have the checksum it was saved with")


def _crc32(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    # TensorStore appends what it knows: [os_error_code='27'], or a whole [tensorstore_spec='…'].
    line = re.split(r"\. See full TensorStore| \[\w+='", lines[0])[0]
    line = line if len(line) <= 200 else f"{line[:80]} … {line[-120:]}"  # the cause stands last
    return f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def _without_debris():
    """Keeps quiet what orbax 0.12 leaves of a failed restore: reads whose errors nobody awaits."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            yield
    finally:
        sys.unraisablehook = hook
