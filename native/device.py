"""Which GPU a kernel is compiled for."""

import dataclasses
import os
import re
from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from .fallback import Unsupported

OLDEST = 80  # compute capability 8.0: bfloat16 arithmetic and asynchronous copies
PORTABLE = f"compute_{OLDEST}"

# Shared memory one block may use, in KiB (CUDA C++ Programming Guide, compute capabilities).
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99}
# Multiprocessors assumed when no device says: of A100, H100 and B200, or the middle of the range.
_MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}
_SOME_MULTIPROCESSORS = 128


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU architecture, and what launches are shaped by.

    Attributes:
      arch: what NVRTC is asked for: `sm_90` and the like give machine code for that architecture
        alone, `compute_80` gives PTX that runs on it and on every later one.
      multiprocessors: how many there are, or are assumed.
      name: what its driver calls it; empty if no device is attached.
    """

    arch: str
    multiprocessors: int
    name: str = ""

    @property
    def capability(self) -> int:
        """Compute capability times ten: the least the image runs on."""
        return int(re.sub(r"\D", "", self.arch))

    @property
    def portable(self) -> bool:
        """Whether the image is PTX, which the driver finishes for the device it finds."""
        return self.arch.startswith("compute_")

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a block may use on every device the image runs on."""
        known = _SHARED_KIB.get(self.capability)
        return (min(_SHARED_KIB.values()) if self.portable or known is None else known) << 10

    @property
    def clusters(self) -> bool:
        """Whether blocks can form clusters and read each other's shared memory."""
        return self.capability >= 90


def target_for(ctx: Any) -> Target:
    """The target of a lowering: `ctx` is JAX's LoweringRuleContext.

    The attached device being lowered for; else `NORMFUSE_CUDA_ARCH`; else (export, text checks, no
    GPU) PTX for compute capability 8.0.

    Raises:
      Unsupported: for a GPU of compute capability below 8.0.
      ValueError: if `NORMFUSE_CUDA_ARCH` names no architecture.
    """
    module = ctx.module_context
    if not module.lowering_parameters.for_export:
        for device in _devices(module):
            capability = compute_capability(device)
            if capability is not None:
                return attached_target(device, capability)
    named = os.environ.get("NORMFUSE_CUDA_ARCH")
    return named_target(named) if named else named_target(PORTABLE)


def named_target(name: str) -> Target:
    """The target called `sm_90`, `90`, `9.0`, `sm_90a` or, for PTX, `compute_90`.

    Raises:
      ValueError: if `name` is none of these.
      Unsupported: for compute capability below 8.0.
    """
    match = re.fullmatch(r"(sm_|compute_|)(\d+)(\.(?=\d))?(\d)([af]?)", name.strip())
    if match is None:
        raise ValueError(
            f"NORMFUSE_CUDA_ARCH={name!r} names no architecture: use sm_90 (or 9.0) for machine "
            "code, compute_90 for PTX"
        )
    kind, major, _, minor, variant = match.groups()
    capability = int(major) * 10 + int(minor)
    _require(capability, f"architecture {name}")
    return Target(
        arch=f"{kind or 'sm_'}{capability}{variant}",
        multiprocessors=_MULTIPROCESSORS.get(capability, _SOME_MULTIPROCESSORS),
    )


def compute_capability(device: Any) -> int | None:
    """Compute capability times ten of a JAX device; None if it is no NVIDIA GPU."""
    found = re.fullmatch(r"(\d+)\.(\d)", str(getattr(device, "compute_capability", "")))
    return int(found[1]) * 10 + int(found[2]) if found and device.platform == "gpu" else None


def attached_target(device: Any, capability: int) -> Target:
    """The target of a JAX device that has this compute capability, times ten.

    Raises:
      Unsupported: for compute capability below 8.0.
    """
    _require(capability, f"{device.device_kind} ({device})")
    return Target(
        arch=f"sm_{capability}",
        multiprocessors=int(getattr(device, "core_count", 0))
        or _MULTIPROCESSORS.get(capability, _SOME_MULTIPROCESSORS),
        name=device.device_kind,
    )


def _require(capability: int, whose: str) -> None:
    if capability < OLDEST:
        raise Unsupported(
            f"{whose} has compute capability {capability / 10}, and the CUDA kernels need "
            f"{OLDEST / 10} or newer"
        )


def _devices(module: Any) -> Iterable[Any]:
    """The devices that `module`, JAX's ModuleContext, is lowered for, as far as it says."""
    axes = module.axis_context
    yield from getattr(axes, "device_assignment", None) or ()
    mesh: Any = getattr(axes, "mesh", None)
    if isinstance(mesh, Mesh):  # an AbstractMesh, as of an Explicit mesh, has no devices
        yield from mesh.devices.flat
    if module.backend is not None:
        yield from module.backend.local_devices()
        yield from module.backend.devices()  # of a topology that is only described, none is local
