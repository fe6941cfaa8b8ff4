"""Several processes as one run: joining, agreeing, and stopping at the same step."""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.train.config import DistributedConfig
from normfuse.train.errors import RunError

_CLUSTERS = {
    # One task each, as these launchers count them: a single task is no cluster.
    "SLURM_NTASKS": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "JAX_NUM_PROCESSES": "JAX_NUM_PROCESSES",
}


def initialize(config: DistributedConfig):
    """Joins the other processes, before anything else of JAX is used; alone, does nothing.

    Flags come first, then JAX's environment variables, then what JAX detects of the cluster.

    Raises:
      RunError: the other processes cannot be reached.
    """
    if jax.distributed.is_initialized():
        return
    several = any(int(os.environ.get(name, "1") or 1) > 1 for name in _CLUSTERS)
    if config.coordinator is None and not several and "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    try:
        jax.distributed.initialize(
            coordinator_address=config.coordinator,
            num_processes=config.num_processes,
            process_id=config.process_id,
        )
    except (RuntimeError, ValueError) as error:
        where = config.coordinator or "the coordinator"
        raise RunError(
            f"--distributed: could not join the other processes at {where}: {error}"
        ) from None


def is_first() -> bool:
    """Tells whether this process writes files and speaks to people."""
    return jax.process_index() == 0


def agree(value: int) -> int:
    """Gives process 0's `value` on every process."""
    if jax.process_count() == 1:
        return value
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int64(value)))


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
