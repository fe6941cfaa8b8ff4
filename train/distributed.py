"""Several processes as one run: joining, agreeing, stopping and failing together."""

import atexit
import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..native.jax_private import coordination_client
from . import RunError, UsageError
from .arguments import one_line, shown
from .config import DistributedConfig

_ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# Launchers' counts of tasks: a single task is not a cluster.
_TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

# Keys of JAX's coordination service.
_ENDED = "normfuse/ended"  # the process that ended, its exit code, and why
_HEARD = "normfuse/heard/"  # the processes that know
_GONE = "normfuse/gone/"  # the processes that have ended since
_MET = "normfuse/met/"  # the processes that have come to a point where all meet
_GRACE = 10  # seconds for a process to fail by itself, and then for all to hear of an end
_POLL = 0.5  # seconds between two looks at `_ENDED`


def initialize(config: DistributedConfig) -> None:
    """Joins the other processes, before any other use of JAX; does nothing for a single process.

    Flags come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then the
    cluster that JAX detects: Slurm, Open MPI, and an indexed Job of Kubernetes if the package
    `kubernetes` is installed.

    Raises:
      UsageError: an environment variable is not a number.
      RunError: the other processes cannot be reached.
    """
    _order_programs(config)
    order_kernels()
    if jax.distributed.is_initialized():
        return
    joined = _with_environment(config)
    if joined.coordinator is None and joined.num_processes is None and not _in_cluster():
        return
    where = joined.coordinator or "the coordinator of the cluster"
    with _deadline(config.timeout, where):
        try:
            jax.distributed.initialize(
                coordinator_address=joined.coordinator,
                num_processes=joined.num_processes,
                process_id=joined.process_id,
                initialization_timeout=config.timeout + 60,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise RunError(
                f"--distributed: could not join the other processes at {where}: {reason}"
            ) from None


@contextlib.contextmanager
def _deadline(seconds: int, where: str) -> Iterator[None]:
    """Ends the process, with exit code 1 and a message, unless left in time.

    At JAX's own deadline XLA aborts the process with a page of C++ frames.
    """

    def end() -> None:
        print(
            f"error: --distributed: the other processes did not meet at {where} within "
            f"--distributed.timeout {seconds} s. Is the address right, are all started, and can "
            "they reach it?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = _call_later(seconds, end)
    try:
        yield
    finally:
        timer.cancel()


def _order_programs(config: DistributedConfig) -> None:
    """Makes emulated CPU devices run one program after the other; must precede JAX's devices.

    Several programs in flight that communicate can take every thread of XLA's pool and wait for
    each other until XLA aborts the process.
    """
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    emulated = re.findall(flag, os.environ.get("XLA_FLAGS", "")) + [jax.config.jax_num_cpu_devices]
    several = config.coordinator is not None or any(int(count) > 1 for count in emulated)
    if several or "JAX_COORDINATOR_ADDRESS" in os.environ or _in_cluster():
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def order_kernels() -> None:
    """Makes GPUs start kernels in launch order, unless the user has set it; must precede devices.

    A collective is launched before the product that should overlap it. From a queue of its own it
    often starts after the product, which then occupies all multiprocessors, and waits for its end
    (docs/guides/parallelism.md).
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _with_environment(config: DistributedConfig) -> DistributedConfig:
    if config.coordinator is not None:
        return config
    found = {name: os.environ.get(variable) for name, variable in _ENVIRONMENT.items()}

    def number(name: str) -> int | None:
        text = found[name]
        if text is not None and not (text.isdecimal() and len(text) < 10):
            raise UsageError(f"{_ENVIRONMENT[name]}={shown(text)} must be a number.")
        return None if text is None else int(text)

    numbers = {name: number(name) for name in ("num_processes", "process_id")}
    return dataclasses.replace(config, coordinator=found["coordinator"], **numbers)


def _in_cluster() -> bool:
    counts = (os.environ.get(name, "") for name in _TASKS)
    if any(count.isdecimal() and int(count) > 1 for count in counts):
        return True
    job = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return job and importlib.util.find_spec("kubernetes") is not None


def is_first() -> bool:
    """Returns whether this process writes the files and prints."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """Returns process 0's `value` on every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def anywhere(flag: bool) -> bool:
    """Returns whether the flag is raised on any process. All must call it."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


def meet(where: str) -> None:
    """Returns once all processes have come to `where`, however late the last one is.

    Before a program that communicates: on CPUs its collectives give up on a process that comes half
    a minute late, as one that compiles on a busy host may. Signals are still handled meanwhile.
    """
    client = coordination_client()
    if client is None or jax.process_count() == 1:
        return
    client.key_value_set(f"{_MET}{where}/{jax.process_index()}", "")
    while len(client.key_value_dir_get(f"{_MET}{where}/")) < jax.process_count():
        time.sleep(0.02)


class SharedFlag:
    """Tells every process at the same step that one of them has raised a flag.

    A single process reads the flag directly. With several, each step's flags are combined on the
    devices, behind the step, and read at the next: nobody waits, and all read the same.
    """

    def __init__(self, mesh: Mesh, flag: Callable[[], bool]) -> None:
        self._flag = flag
        self._alone = jax.process_count() == 1
        self._posted = None
        everywhere = NamedSharding(mesh, P())
        self._split = NamedSharding(mesh, P(mesh.axis_names))
        self._any = jax.jit(jnp.max, out_shardings=everywhere)
        self._shape = (mesh.size,)

    def __call__(self) -> bool:
        """Returns the flags posted at the call before, and posts the present one."""
        if self._alone:
            return self._flag()
        raised = np.full(self._shape, self._flag(), np.int32)
        posted = self._any(
            jax.make_array_from_callback(self._shape, self._split, lambda index: raised[index])
        )
        known, self._posted = self._posted, posted
        return known is not None and bool(known)


class FailFast:
    """While entered, ends this process when another one fails or is ended by a second signal.

    JAX alone notices the end of a process only when its heartbeats are missing, two minutes later;
    and a process that fails would wait as long, in JAX's shutdown, for the others to join it there.

    Left with an exception, it tells the others, and the process will exit without waiting for them.
    In a run of one process it does nothing.
    """

    def __init__(self) -> None:
        self._left = threading.Event()
        self._client: Any = None

    def __enter__(self) -> "FailFast":
        client = coordination_client()  # without one, do not ask JAX for devices yet
        if client is not None and jax.process_count() > 1:
            self._client = client
            self._thread = threading.Thread(target=self._watch, daemon=True, name="fail-fast")
            self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._left.set()
        if self._client is None:
            return
        self._thread.join(_GRACE)
        if error is not None:
            code = 2 if isinstance(error, UsageError) else 1
            _call_later(4 * _GRACE, os._exit, code)  # should JAX's service not answer
            self._tell(code, f"failed: {one_line(error) or type(error).__name__}")
            atexit.register(self._exit, code)  # before JAX's own, which waits for the others
            # Python waits for orbax's threads before that, and those may wait for the others.
            _call_later(1, self._exit, code)

    def end(self, code: int) -> None:
        """Ends this process and the others at once, with an exit code."""
        if self._client is not None:
            _call_later(_GRACE, os._exit, code)  # should JAX's service not answer
            self._tell(code, "received a second signal and ended at once")
            self._exit(code)
        os._exit(code)

    def _tell(self, code: int, why: str) -> None:
        self._set(_ENDED, f"{jax.process_index()} {code} {why}")

    def _watch(self) -> None:
        while not self._left.wait(_POLL):
            try:
                ended = self._client.key_value_try_get(_ENDED)
            except jax.errors.JaxRuntimeError:
                continue  # no process has ended
            process, code, why = ended.split(" ", 2)
            if int(process) == jax.process_index():
                return
            if why.startswith("failed") and self._left.wait(_GRACE):
                return  # it has failed too, and prints that itself
            print(f"error: process {process} {why}", file=sys.stderr)
            _call_later(3 * _GRACE, os._exit, int(code))
            self._exit(int(code))

    def _exit(self, code: int) -> None:
        """Ends this process once all know of the end; the one with JAX's service ends last.

        Left alone in a collective operation, or without the service, a process may be aborted.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._set(f"{_HEARD}{jax.process_index()}", "")
        self._await(_HEARD, jax.process_count())
        if jax.process_index():
            self._set(f"{_GONE}{jax.process_index()}", "")
        else:
            self._await(_GONE, jax.process_count() - 1)
        os._exit(code)

    def _set(self, key: str, value: str) -> None:
        # Else it is set, or JAX's service is gone, and with it every process.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(key, value)

    def _await(self, folder: str, count: int) -> None:
        """Returns when `folder` holds `count` keys, at the latest after twice the grace."""
        deadline = time.monotonic() + 2 * _GRACE
        while time.monotonic() < deadline:
            try:
                if len(self._client.key_value_dir_get(folder)) >= count:
                    return
            except jax.errors.JaxRuntimeError:
                if jax.process_index():
                    return  # the service is gone; process 0 has it, and gets this for no keys
            time.sleep(0.005)


def _call_later(seconds: float, action: Callable[..., Any], *code: int) -> threading.Timer:
    """Calls `action(*code)` after a while, from a thread that nobody waits for."""
    timer = threading.Timer(seconds, action, code)
    timer.daemon = True
    timer.start()
    return timer
