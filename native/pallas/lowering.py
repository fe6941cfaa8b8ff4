"""Describes the targets of Pallas kernels, and tells JAX what it needs to lower them."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from ..dtypes import FLOATING
from ..implementation import Unsupported


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform."""

    platform: str  # "cpu" (interpreted) or "tpu"

    @property
    def interpret(self) -> bool:
        return self.platform == "cpu"


def target_for(platform: str | None) -> Target:
    """Returns the target of a lowering; raises Unsupported for platforms without Pallas kernels."""
    if platform not in ("cpu", "tpu"):
        raise Unsupported("there are no Pallas kernels: they are for TPUs, interpreted on CPUs")
    return Target(platform)


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
    taken = set(FLOATING if target.interpret else ("float32", "bfloat16"))
    if names - taken:
        raise Unsupported(
            f"Pallas kernels take {', '.join(sorted(taken))} on {target.platform}, not "
            f"{', '.join(sorted(names - taken))}"
        )
