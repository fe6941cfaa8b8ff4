"""RMSNorm and LayerNorm: alone, or after an addition."""

from .op import layer_norm as layer_norm
from .op import rms_norm as rms_norm
from .op import rms_norm_with_rstd as rms_norm_with_rstd
