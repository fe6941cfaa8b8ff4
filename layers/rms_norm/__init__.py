"""Root mean square normalisation, alone, after a residual addition, or with a gate."""

from .gated import gated_rms_norm as gated_rms_norm
from .op import add_rms_norm as add_rms_norm
from .op import rms_norm as rms_norm
from .op import rms_norm_with_rstd as rms_norm_with_rstd
