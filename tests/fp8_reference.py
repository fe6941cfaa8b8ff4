"""The FP8 quantizer of docs/quantization.md in NumPy, by frexp and ml_dtypes' own rounding."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
LARGEST_SHIFT = 100


def amax(x: np.ndarray) -> np.float32:
    """The largest magnitude among finite elements; 0 without any."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = np.abs(np.asarray(x, np.float64))
    return np.float32(np.max(wide, where=np.isfinite(wide), initial=0))


def scale(bound: float, dtype: np.dtype) -> np.float32:
    """The smallest power of two s ≥ 2^-100 with bound / s ≤ the largest number; else NaN."""
    if not np.isfinite(bound):
        return np.float32(np.nan)
    if bound == 0:
        return np.float32(2.0**-LARGEST_SHIFT)
    _, exponent = np.frexp(np.float64(bound))  # bound < 2^exponent
    shift = int(np.frexp(LARGEST[dtype])[1] - exponent)
    if float(bound) * 2.0**shift > LARGEST[dtype]:
        shift -= 1
    return np.float32(2.0 ** -min(shift, LARGEST_SHIFT))


def quantize(
    x: np.ndarray, dtype: np.dtype = E4M3, bound: float | None = None
) -> tuple[np.ndarray, np.float32]:
    """(q, scale): x ≈ scale · q. A code that is not finite is 0x7f, NaN."""
    s = scale(amax(x) if bound is None else np.float32(bound), dtype)
    with np.errstate(all="ignore"):  # division by a power of two is exact, or far below any code
        quotient = np.asarray(x, np.float64) / np.float64(s)
        codes = quotient.astype(np.float32).astype(dtype)
    bits = codes.view(np.uint8).copy()
    bits[~np.isfinite(codes.astype(np.float32))] = 0x7F
    return bits.view(dtype), s


def product(
    a: np.ndarray, a_scale: float, b: np.ndarray, b_scale: float, dtype=np.float64
) -> np.ndarray:
    """a_scale · b_scale · a · bᵀ in float64, rounded once to `dtype`."""
    wide = np.asarray(a, np.float64) @ np.asarray(b, np.float64).T
    return (wide * np.float64(a_scale) * np.float64(b_scale)).astype(dtype)
