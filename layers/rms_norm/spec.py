"""The static parameters of a normalisation: all that is known of it when it is traced."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """All that is known of a normalisation, or of a derivative of it, when it is traced.

    Attributes:
      op: the function the user called.
      axes: the normalised dimensions of x; kernels see arrays as (outer, n, inner).
      eps, scale_offset: as in the formula.
      out_dtype: of y.
      has_residual: whether x + residual is normalised; in a backward, whether the residual has a
        gradient of its own, to be added.
      has_scale: whether there is a scale.
      with_rstd, with_dscale: whether these are results.
      with_value: whether a backward also returns y, normalised again.
      moves: of x and scale, which have a tangent.
      count: features of a whole row, where devices have parts of it.
    """

    op: str = "rms_norm"
    axes: tuple[int, ...] = (1,)
    eps: float = 0.0
    scale_offset: float = 0.0
    out_dtype: str = ""
    has_residual: bool = False
    has_scale: bool = False
    with_rstd: bool = False
    with_dscale: bool = False
    with_value: bool = False
    moves: tuple[bool, bool] = (False, False)
    count: float = 0.0
