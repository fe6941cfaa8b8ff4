"""Runs commands side by side, one on each GPU of a machine, the first of a list first.

    python benchmarks/launch.py JOBS --out FOLDER --seconds 540

A line of JOBS is how many seconds a command may take, and the command, for bash; lines that begin
with # are none. A command sees one GPU. None begins that has less than three fifths of its seconds,
and all end when time is up.

A GPU that `--gpus` names twice has two commands at a time: let them wait for their turn with it
(`foreign_steps.py --turn /tmp/turn$CUDA_VISIBLE_DEVICES`, or `flock` before others).

FOLDER gets `results.jsonl`, the lines of JSON that they print, and `log.txt`, everything else.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import threading
import time


def devices() -> list[str]:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(i) for i, line in enumerate(filter(None, listed.splitlines()))]


class Queue:
    """Commands that wait, and the files that take what they print."""

    def __init__(self, jobs: list[tuple[float, str]], out: pathlib.Path, until: float):
        self._jobs, self._until, self._lock = jobs, until, threading.Lock()
        self._results, self._log = (open(out / name, "a") for name in ("results.jsonl", "log.txt"))

    def work(self, gpu: str) -> None:
        """Runs commands on one GPU while there are any and time is left."""
        while True:
            with self._lock:
                if not self._jobs:
                    return
                seconds, command = self._jobs.pop(0)
            left = self._until - time.monotonic()
            if left < 0.6 * seconds:
                self._say(gpu, f"not begun, {left:.0f} s are left: {command}\n")
                continue
            self._run(gpu, min(seconds, left), command)

    def _run(self, gpu: str, seconds: float, command: str) -> None:
        began = time.monotonic()
        process = subprocess.Popen(
            ["bash", "-c", command],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        timer = threading.Timer(seconds, self._end, (process,))
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            self._say(gpu, line)
        state = process.wait()
        timer.cancel()
        took = time.monotonic() - began
        self._say(gpu, f"== exit status {state}, {took:.0f} of {seconds:.0f} s: {command}\n")
        print(f"{gpu}: exit status {state} after {took:.0f} s: {command[-90:]}", flush=True)

    @staticmethod
    def _end(process: subprocess.Popen) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _say(self, gpu: str, line: str) -> None:
        with self._lock:
            target = self._results if line.startswith("{") else self._log
            target.write(line if target is self._results else f"{gpu}: {line}")
            target.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("jobs", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=540, help="for all of them")
    parser.add_argument("--gpus", nargs="+", default=None, help="those of the machine")
    options = parser.parse_args()
    lines = (line for line in options.jobs.read_text().splitlines() if line and line[0] != "#")
    jobs = [(float(seconds), command) for seconds, _, command in (x.partition(" ") for x in lines)]
    options.out.mkdir(parents=True, exist_ok=True)
    queue = Queue(jobs, options.out, time.monotonic() + options.seconds)
    workers = [
        threading.Thread(target=queue.work, args=(gpu,)) for gpu in options.gpus or devices()
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
