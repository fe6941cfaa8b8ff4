"""RMSNorm and LayerNorm: alone, after an addition, gated or adaptive."""

from .functions import adaptive_layer_norm as adaptive_layer_norm
from .functions import adaptive_rms_norm as adaptive_rms_norm
from .functions import add_layer_norm as add_layer_norm
from .functions import add_rms_norm as add_rms_norm
from .functions import layer_norm as layer_norm
from .functions import rms_norm as rms_norm
from .functions import rms_norm_with_rstd as rms_norm_with_rstd
from .gated import gated_rms_norm as gated_rms_norm
