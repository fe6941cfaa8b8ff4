"""The static parameters of a normalisation: all that is known of it when it is traced."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """All that is known of a normalisation, or of a derivative of it, when it is traced.

    Attributes:
      op: the function the user called.
      axes: the normalised dimensions of x; kernels see arrays as (outer, n, inner).
      heads: the dimensions of x that scale and bias have before `axes`. Heads are just before them,
        and kernels see arrays as (outer, heads, n); or they are x's first, examples, and kernels
        see (examples, tokens, n). x is transposed to one of these where they are elsewhere.
      per_example: whether it is the latter, for kernels.
      eps, scale_offset: as in the formula.
      out_dtype: of y.
      cast_before: whether x̂ is rounded to the dtype of what is normalised before it is multiplied.
      residual_dtype: of x + residual, which is rounded to it; what they promote to where empty.
      has_residual: whether x + residual is normalised; in a backward, whether the residual has a
        gradient of its own, to be added.
      has_scale, has_bias: whether there is a scale, a bias.
      centred: whether the mean is subtracted first, and rows have two statistics: mean and rstd.
      with_mean, with_rstd, with_dscale, with_dbias: whether these are results.
      moves: of x, scale and bias, which have a tangent.
      count: features of a whole row, where devices have parts of it.
    """

    op: str = "rms_norm"
    axes: tuple[int, ...] = (1,)
    heads: tuple[int, ...] = ()
    per_example: bool = False
    eps: float = 0.0
    scale_offset: float = 0.0
    out_dtype: str = ""
    cast_before: bool = False
    residual_dtype: str = ""
    has_residual: bool = False
    has_scale: bool = False
    has_bias: bool = False
    centred: bool = False
    with_mean: bool = False
    with_rstd: bool = False
    with_dscale: bool = False
    with_dbias: bool = False
    moves: tuple[bool, bool, bool] = (False, False, False)
    count: float = 0.0
