"""FP8: codes of a matrix with a power-of-two scale.

The recipe, as formulas: docs/quantization.md.
"""

from .kernels import fits as fits
from .op import kernel_codes_saveable as kernel_codes_saveable
