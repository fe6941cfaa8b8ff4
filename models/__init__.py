"""One decoder-only transformer in Flax nnx and in Equinox, with the same parameters and logits."""

from .config import PRESETS as PRESETS
from .config import RopeScaling as RopeScaling
from .config import TransformerConfig as TransformerConfig
from .config import num_parameters as num_parameters


def __getattr__(name: str) -> object:
    instead = ": count `6 * num_parameters(config)` for each token" * (name == "flops_per_token")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
