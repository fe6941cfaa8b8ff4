"""Root mean square normalisation, alone, after an addition, gated or adaptive."""

from .gated import gated_rms_norm as gated_rms_norm
from .op import adaptive_rms_norm as adaptive_rms_norm
from .op import add_rms_norm as add_rms_norm
from .op import rms_norm as rms_norm
from .op import rms_norm_with_rstd as rms_norm_with_rstd
