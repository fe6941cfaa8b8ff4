"""Layer normalisation, with or without a residual addition before it."""

from .op import adaptive_layer_norm as adaptive_layer_norm
from .op import add_layer_norm as add_layer_norm
from .op import layer_norm as layer_norm
