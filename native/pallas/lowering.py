"""Describes the targets of Pallas kernels, and tells JAX what it needs to lower them."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractMesh

from .. import launch
from ..dtypes import FLOATING
from ..implementation import Unsupported
from ..jax_private import AbstractDevice

# JAX asks for the name of a GPU when a kernel is lowered, also without one. Kernels are for Hopper.
_NAME = "NVIDIA H100"


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform, and the GPU where it is one."""

    platform: str  # "cpu" (interpreted), "cuda" or "tpu"
    cores: int = 1  # multiprocessors of a GPU
    capability: int = 0  # compute capability times ten of a GPU, 0 for others

    @property
    def gpu(self) -> bool:
        return self.platform == "cuda"

    @property
    def interpret(self) -> bool:
        return self.platform == "cpu"


def target_for(platform: str | None, ctx: Any) -> Target:
    """Returns the target of a lowering: `ctx` is JAX's LoweringRuleContext.

    Raises Unsupported for platforms without Pallas, and GPUs too old for it.
    """
    if platform == "cuda":
        found = launch.target_for(ctx)
        return Target(platform, found.multiprocessors, found.capability)
    if platform not in ("cpu", "tpu"):
        raise Unsupported("there are no Pallas kernels for this platform")
    return Target(platform)


def mesh(target: Target) -> AbstractMesh:
    """Returns a mesh without axes that says which device the program is for."""
    if not target.gpu:
        return AbstractMesh((), ())
    named = AbstractDevice(device_kind=_NAME, num_cores=target.cores, platform=target.platform)
    return AbstractMesh((), (), abstract_device=named)


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns Pallas's ways to say that it cannot lower a kernel into `Unsupported`."""
    try:
        yield
    except Exception as error:
        known = isinstance(error, (NotImplementedError, ImportError))
        known |= type(error).__name__ in ("LoweringException", "LoweringError")
        if not known and "Cannot lower pallas_call" not in str(error):  # without a back end
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
        raise Unsupported(f"Pallas cannot lower this: {first}") from error


def require_dtypes(target: Target, *dtypes: jax.typing.DTypeLike) -> None:
    """Raises Unsupported for dtypes that the platform's kernels do not take."""
    names = {jax.numpy.dtype(dtype).name for dtype in dtypes}
    taken = set(FLOATING if target.platform != "tpu" else ("float32", "bfloat16"))
    if names - taken:
        raise Unsupported(
            f"Pallas kernels take {', '.join(sorted(taken))} on {target.platform}, not "
            f"{', '.join(sorted(names - taken))}"
        )
