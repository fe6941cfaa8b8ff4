"""RMSNorm and LayerNorm: alone, after an addition, or gated."""

from .functions import layer_norm as layer_norm
from .functions import rms_norm as rms_norm
from .functions import rms_norm_with_rstd as rms_norm_with_rstd
from .gated import gated_rms_norm as gated_rms_norm
