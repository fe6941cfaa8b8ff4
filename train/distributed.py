"""Several processes as one run: joining, agreeing, stopping and failing together."""

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
from .arguments import shown
from .config import DistributedConfig

# Launchers' counts of tasks: a single task is not a cluster.
_TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")

_MET = "normfuse/met/"  # keys of the processes that have come to a point where all meet


def initialize(config: DistributedConfig) -> None:
    """Joins the other processes, before any other use of JAX; does nothing for a single process.

    Flags come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then the
    cluster that JAX detects: Slurm, Open MPI, and an indexed Job of Kubernetes if the package
    `kubernetes` is installed.

    Raises:
      UsageError: an environment variable is not a number.
      RunError: the other processes cannot be reached.
    """
    # GPUs start kernels in launch order. A collective is launched before the product that should
    # overlap it; from a queue of its own it often starts after the product, which then occupies all
    # multiprocessors, and waits for its end (docs/guides/parallelism.md).
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if config.coordinator is None and (address := os.environ.get("JAX_COORDINATOR_ADDRESS")):
        count, index = map(_number, ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        config = dataclasses.replace(
            config, coordinator=address, num_processes=count, process_id=index
        )
    several = config.coordinator is not None or _in_cluster()
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    emulated = re.findall(flag, os.environ.get("XLA_FLAGS", "")) + [jax.config.jax_num_cpu_devices]
    if several or any(int(count) > 1 for count in emulated):
        # Several programs in flight that communicate can take every thread of XLA's CPU pool and
        # wait for each other until XLA aborts the process.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if not several or jax.distributed.is_initialized():
        return
    where = config.coordinator or "the coordinator of the cluster"
    # At JAX's own deadline XLA aborts the process with a page of C++ frames.
    message = (
        f"--distributed: the other processes did not meet at {where} within --distributed.timeout "
        f"{config.timeout} s. Is the address right, are all started, and can they reach it?"
    )
    timer = _call_later(config.timeout, _end, 1, f"error: {message}")
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
            initialization_timeout=config.timeout + 60,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"--distributed: could not join the other processes at {where}: {reason}"
        ) from None
    finally:
        timer.cancel()


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise UsageError(f"{variable}={shown(text)} must be a number.")
    return None if text is None else int(text)


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


@contextlib.contextmanager
def ending_alone() -> Iterator[None]:
    """Ends a process that fails soon after: JAX and orbax would wait for the others at its exit.

    JAX ends the others: at once without process 0, which has its service, else when the heartbeats
    of this process have been missing.
    """
    try:
        yield
    except BaseException as error:
        if jax.distributed.is_initialized():
            # All may fail alike, and print it; process 0 ends last.
            code = 2 if isinstance(error, UsageError) else 1
            _call_later(1 if jax.process_index() else 3, _end, code)
        raise


def _end(code: int, message: str = "") -> None:
    sys.stdout.flush()
    print(message, end="\n" * bool(message), file=sys.stderr, flush=True)
    os._exit(code)


def _call_later(seconds: float, action: Callable[..., Any], *arguments: Any) -> threading.Timer:
    """Calls `action(*arguments)` after a while, from a thread that nobody waits for."""
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
    timer.start()
    return timer
