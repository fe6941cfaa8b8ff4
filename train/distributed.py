"""Several processes as one run: joining, agreeing, and stopping at the same step."""

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .config import DistributedConfig
from .errors import RunError, UsageError

_ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# Tasks as launchers count them: a single one is no cluster.
_TASKS = ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")


def initialize(config: DistributedConfig):
    """Joins the other processes, before anything else of JAX is used; alone, does nothing.

    Flags come first, then JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, then what
    JAX detects of the cluster: Slurm, Open MPI, and an indexed Job of Kubernetes if the package
    `kubernetes` is there to ask it.

    Raises:
      UsageError: an environment variable is no number.
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
def _deadline(seconds: int, where: str):
    """Ends the process, with exit code 1 and a message, unless left in time.

    At JAX's own deadline XLA aborts the process with a page of C++ frames.
    """

    def end():
        print(
            f"error: --distributed: the other processes did not meet at {where} within "
            f"--distributed.timeout {seconds} s. Is the address right, are all started, and can "
            "they reach it?",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _order_programs(config: DistributedConfig):
    """Makes emulated CPU devices run one program after the other; too late once there are some.

    Programs that communicate, several in flight, can take every thread of XLA's pool and wait for
    each other until XLA aborts the process.
    """
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    emulated = re.findall(flag, os.environ.get("XLA_FLAGS", "")) + [jax.config.jax_num_cpu_devices]
    several = config.coordinator is not None or any(int(count) > 1 for count in emulated)
    if several or "JAX_COORDINATOR_ADDRESS" in os.environ or _in_cluster():
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def order_kernels() -> None:
    """Makes GPUs begin kernels in the order of their launches; too late once there are some.

    A collective is launched before the product that it is to run beside. From a queue of its own it
    often begins after the product, which then has all multiprocessors, and waits for its end
    (docs/guides/parallelism.md). What the user has set stays.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _with_environment(config: DistributedConfig) -> DistributedConfig:
    if config.coordinator is not None:
        return config
    found = {name: os.environ.get(variable) for name, variable in _ENVIRONMENT.items()}

    def number(name: str) -> int | None:
        text = found[name]
        if text is not None and not text.isdecimal():
            raise UsageError(f"{_ENVIRONMENT[name]}={text!r} must be a number.")
        return None if text is None else int(text)

    return DistributedConfig(
        coordinator=found["coordinator"],
        num_processes=number("num_processes"),
        process_id=number("process_id"),
        timeout=config.timeout,
    )


def _in_cluster() -> bool:
    if any(int(os.environ.get(name) or 1) > 1 for name in _TASKS):
        return True
    job = "KUBERNETES_SERVICE_HOST" in os.environ and "JOB_COMPLETION_INDEX" in os.environ
    return job and importlib.util.find_spec("kubernetes") is not None


def is_first() -> bool:
    """Tells whether this process writes files and speaks to people."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """Gives process 0's `value` on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


def anywhere(flag: bool) -> bool:
    """Tells whether the flag is raised on any process. All must call it."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


class SharedFlag:
    """Lets every process learn at the same step that one of them has a flag raised.

    Alone, the flag is looked at directly. With others, each step's flags are combined on the
    devices, behind the step, and read at the next: nobody waits, and all read the same.
    """

    def __init__(self, mesh: Mesh, flag: Callable[[], bool]):
        self._flag = flag
        self._alone = jax.process_count() == 1
        self._posted = None
        everywhere = NamedSharding(mesh, P())
        self._split = NamedSharding(mesh, P(mesh.axis_names))
        self._any = jax.jit(jnp.max, out_shardings=everywhere)
        self._shape = (mesh.size,)

    def __call__(self) -> bool:
        """Gives the flags posted at the call before, and posts the present one."""
        if self._alone:
            return self._flag()
        raised = np.full(self._shape, self._flag(), np.int32)
        posted = self._any(
            jax.make_array_from_callback(self._shape, self._split, lambda index: raised[index])
        )
        known, self._posted = self._posted, posted
        return known is not None and bool(known)
