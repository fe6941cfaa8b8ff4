"""Checkpoints: saved in the background, verified by checksums when they are read.

Each holds the parameters, the rest of the state, and a JSON record with the run's configuration,
the text's identity and a checksum of every array. Storage that returns bits other than those
written costs only the steps since the checkpoint before.

TensorStore's own crc32c, as Orbax uses it, misses two thirds of single flipped bits: 483 of 700 in
its zarr 2, 485 in its zarr 3. Our checksums catch all; and, as no codec can, data that is valid but
another step's (a lost or misdirected write), or changed between the computation and the write.
"""

import asyncio
import contextlib
import json
import logging
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array

from ..models.functional import Params
from . import RunError, distributed
from .arguments import reason
from .run_dir import is_step
from .step import State


class Damaged(Exception):
    """A checkpoint that does not hold the data written to it."""


class Checkpoints:
    """The checkpoints of one run, in a folder that is created if missing.

    `report` prints a line for the user. The `keep` newest stay; all, where that is None.
    """

    def __init__(
        self, folder: Path, *, report: Callable[[str], None], keep: int | None = None
    ) -> None:
        _settle_orbax()
        self.folder = folder.absolute()
        self._report = report
        self._closed = False
        self._saved = -1
        # In the background, threads would wait for a folder that cannot be created, and outlive the
        # run by five minutes.
        at_once = ocp.AsyncOptions(create_directories_asynchronously=False)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, async_options=at_once)
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            why = reason(error, self.folder)
            raise RunError(f"{self.folder} cannot hold checkpoints: {why}") from None

    def steps(self) -> list[int]:
        """Returns the steps that were saved completely, ascending."""
        return sorted(set(self._manager.all_steps()).intersection(self._numbered()))

    def record(self, step: int) -> dict[str, Any]:
        """Reads a checkpoint's record: configuration, text, checksums.

        Raises:
          Damaged: it cannot be read or does not hold the data written to it.
        """
        file = self.folder / str(step) / "record" / "metadata"
        restored = self._agreed(lambda: json.loads(file.read_bytes()))
        if not isinstance(restored, dict) or restored.pop("crc32", None) != _crc32(restored):
            raise Damaged("its record does not have the checksum it was saved with")
        if restored.get("step") != step:
            raise Damaged(f"its record is that of step {restored.get('step')}")
        return restored

    def newest_record(self) -> tuple[int, dict[str, Any]] | None:
        """Reads the newest readable record, and its step; None when nothing is saved."""
        for step in reversed(self.steps()):
            try:
                return step, self.record(step)
            except Damaged:
                continue
        return None

    def save(self, state: State, step: int, record: dict[str, Any]) -> None:
        """Starts saving; returns when `state` may be overwritten. Does nothing for a saved step.

        Raises a RunError if this save or the one before it failed.
        """
        if step == self._saved:
            return
        sums = {path: int(value) for path, value in checksums(_items(state)).items()}
        record = record | {"step": step, "checksums": sums}
        items = ocp.args.Composite(
            **{name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()},
            record=ocp.args.JsonSave(record | {"crc32": _crc32(record)}),
        )
        self._or_fail(self._manager.wait_until_finished, self._saved)  # the one before
        self._or_fail(lambda: self._manager.save(step, args=items, force=True), step)
        self._saved = step

    def check(self) -> None:
        """Raises a RunError if a save in the background has failed."""
        self._or_fail(self._manager.check_for_errors, self._saved)

    def close(self) -> None:
        """Waits until everything is written; raises a RunError if it cannot be."""
        if not self._closed:
            self._or_fail(self._manager.wait_until_finished, self._saved)
            self._manager.close()
            self._closed = True

    def restore(self, abstract: State) -> tuple[State, dict[str, Any]]:
        """Restores the newest undamaged checkpoint, onto the shardings of `abstract`.

        A damaged one is reported in one line and moved aside, and the one before it is tried.

        Returns: the state and its record.
        Raises:
          RunError: there is none.
        """

        def read(step: int) -> tuple[State, dict[str, Any]]:
            record = self.record(step)
            items = self._read(step, **_items(abstract))
            state = State(params=items["params"], **items["rest"])
            _verify(checksums(_items(state)), record)
            return state, record

        damaged, restored = self._newest_whole(read)
        self._move_aside(damaged)
        self._saved = restored[1]["step"]
        return restored

    def restore_params(self, abstract: Params) -> Params:
        """Restores only the parameters of the newest undamaged checkpoint; RunError for none."""

        def read(step: int) -> Params:
            params = self._read(step, params=abstract)["params"]
            _verify(checksums({"params": params}), self.record(step))
            return params

        return self._newest_whole(read)[1]

    def _newest_whole(self, read: Callable[[int], Any]) -> tuple[list[int], Any]:
        """Returns the damaged steps, and the result of `read` for the newest step that is whole."""
        damaged = []
        complete = self.steps()
        for step in sorted({*complete, *self._numbered()}, reverse=True):
            try:
                if step not in complete:
                    raise Damaged("it is not complete")
                return damaged, read(step)
            except Damaged as damage:
                self._report(f"checkpoint of step {step} is damaged and not used: {damage}")
                damaged.append(step)
        raise RunError(
            f"{self.folder} holds no undamaged checkpoint; damaged are steps {sorted(damaged)}. "
            "Start a new run in another --out-dir, or restore a copy."
        )

    def _numbered(self) -> list[int]:
        """Returns the steps that have a folder, including those that orbax does not count."""
        return [int(path.name) for path in self.folder.iterdir() if is_step(path.name)]

    def _read(self, step: int, **trees: Any) -> dict[str, Any]:
        return self._agreed(lambda: {name: self._item(step, name, x) for name, x in trees.items()})

    def _item(self, step: int, name: str, abstract: Any) -> Any:
        """Reads without orbax's barriers: a process that fails here would never reach them."""
        folder: Any = self.folder / str(step) / name
        with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
            return handler.restore(folder, args=ocp.args.StandardRestore(abstract))

    def _agreed(self, read: Callable[[], Any]) -> Any:
        """Calls `read`; raises Damaged, on all processes, if it fails on any."""
        trouble = value = None
        try:
            value = read()
        except Exception as error:  # damaged bytes make orbax and TensorStore raise anything
            trouble = _first_line(error)
        if distributed.anywhere(trouble is not None):
            raise Damaged(trouble or "another process could not read its part")
        return value

    def _move_aside(self, steps: list[int]) -> None:
        """Frees the steps' names: orbax does not save a step that exists."""
        for step in steps:
            if jax.process_index() == 0:
                target = self.folder.with_name("damaged") / str(step)
                shutil.rmtree(target, ignore_errors=True)
                target.parent.mkdir(exist_ok=True)
                shutil.move(self.folder / str(step), target)
                self._report(f"moved it to {target}")
        if steps:
            distributed.anywhere(False)  # the others wait until the first process has moved them
            self._manager.reload()

    def _or_fail(self, action: Callable[[], Any], step: int) -> None:
        try:
            action()
        except Exception as error:
            raise RunError(
                f"the checkpoint of step {step} could not be written to {self.folder}: "
                f"{_first_line(error)}"
            ) from error


@jax.jit
def checksum(x: Array) -> Array:
    """Returns the sum, modulo 2^32, of a hash of every element's bits and its position.

    Integer addition has no order: any mesh and any number of hosts give the same number, computed
    where the array lies. The hash is one to one in the element, so one changed element is always
    detected, and several escape with a probability of 2^-32. x is boolean or real, the sum uint32.
    """
    if x.dtype == jnp.bool_:
        words = x.astype(jnp.uint32)
    elif x.dtype.itemsize == 8:
        words = jax.lax.bitcast_convert_type(x, jnp.uint32)  # (..., 2)
    else:
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    position = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += index * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(_mix(words ^ _mix(position)), dtype=jnp.uint32)


def checksums(items: dict[str, Any]) -> dict[str, Array]:
    """Returns the checksum of every leaf under its path, without waiting for them on accelerators.

    On the CPU's emulated devices it waits for each: several programs in flight that communicate can
    take every thread of XLA's pool and wait for each other until XLA aborts the process.
    """
    settle = jax.block_until_ready if jax.default_backend() == "cpu" else lambda x: x
    settle(items)
    return {path: settle(checksum(x)) for path, x in _leaves(items).items()}


def _mix(x: Array) -> Array:
    """Mixes 32 bits one to one: MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _items(state: State) -> dict[str, Any]:
    """Returns the parts of a state that are saved on their own: parameters can be read alone."""
    rest = {name: value for name, value in state._asdict().items() if name != "params"}
    return {"params": state.params, "rest": rest}


def _leaves(items: dict[str, Any]) -> dict[str, Any]:
    return {
        item + jax.tree_util.keystr(path): x
        for item, tree in items.items()
        for path, x in jax.tree.leaves_with_path(tree)
    }


def _verify(sums: dict[str, Array], record: dict[str, Any]) -> None:
    for path, value in sums.items():
        if int(value) != record["checksums"].get(path):
            raise Damaged(f"{path} does not have the checksum it was saved with")


def _crc32(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    # TensorStore appends details: [os_error_code='27'], or a whole [tensorstore_spec='…'].
    line = re.split(r"\. See full TensorStore| \[\w+='", lines[0])[0]
    line = line if len(line) <= 200 else f"{line[:80]} … {line[-120:]}"  # the cause stands last
    return f"{type(error).__name__}: {line}"


def _settle_orbax() -> None:
    """Leaves it to this module to say in one line that something failed.

    Orbax logs each failure of its threads with a page of frames, and raises it here too.
    """
    asyncio.new_event_loop = _FinishingLoop
    for name in "absl", "asyncio":
        logging.getLogger(name).setLevel(logging.CRITICAL)


class _FinishingLoop(asyncio.SelectorEventLoop):
    """An event loop that finishes its tasks before it closes.

    At its first error orbax 0.12 closes the event loop that it has made, while TensorStore still
    reads or writes other arrays. The threads of that would later call into Python for tasks that
    nobody awaits: to print errors after the run's own, and even while the interpreter exits.
    """

    def close(self) -> None:
        tasks = set() if self.is_closed() else asyncio.all_tasks(self)
        if tasks:
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()
