"""FP8: codes of a matrix with a power-of-two scale.

The recipe, as formulas: docs/quantization.md.
"""

from .quantize import fits as fits
from .quantize import kernel_codes_saveable as kernel_codes_saveable
