"""RMSNorm and LayerNorm: alone, after an addition, or gated."""

from .gated import gated_rms_norm as gated_rms_norm
from .op import layer_norm as layer_norm
from .op import rms_norm as rms_norm
from .op import rms_norm_with_rstd as rms_norm_with_rstd
