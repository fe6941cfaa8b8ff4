"""One decoder-only transformer in Flax nnx and in Equinox, with the same parameters and logits."""

from normfuse.models.config import PRESETS as PRESETS
from normfuse.models.config import RopeScaling as RopeScaling
from normfuse.models.config import TransformerConfig as TransformerConfig
from normfuse.models.config import flops_per_token as flops_per_token
from normfuse.models.config import num_parameters as num_parameters
