"""Dense layers: a product, with a norm before it and a bias, activation or gate after it."""

from .dense import dense as dense
from .epilogue import clamped_swiglu as clamped_swiglu
from .gated import gated_dense as gated_dense
from .gated import gated_product as gated_product
from .norm_dense import norm_dense as norm_dense
from .norm_dense import norm_gated_dense as norm_gated_dense
