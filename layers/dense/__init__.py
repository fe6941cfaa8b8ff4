"""Dense layers: a product, with a bias, an activation or a gate after it."""

from .dense import dense as dense
from .gated import gated_dense as gated_dense
from .gated import gated_product as gated_product
