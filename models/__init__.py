"""One decoder-only transformer in Flax nnx and in Equinox, with the same parameters and logits."""

from .config import PRESETS as PRESETS
from .config import RopeScaling as RopeScaling
from .config import TransformerConfig as TransformerConfig
from .config import flops_per_token as flops_per_token
from .config import num_parameters as num_parameters
