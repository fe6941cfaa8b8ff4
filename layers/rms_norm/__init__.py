"""Root mean square normalisation, with or without a residual addition before it."""

from .op import add_rms_norm as add_rms_norm
from .op import rms_norm as rms_norm
from .op import rms_norm_with_rstd as rms_norm_with_rstd
