"""The norms' kernels by name, each held to its definition in float64.

A runner is `run(kernel, norm, operands) -> results`, with None where there is none: in C++, on an
emulator, through the CUDA driver, or through XLA. 64-bit types are on while it runs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import reference
from reference import Expected, assert_close, wide

from normfuse.layers.norm import cuda, kernels
from normfuse.layers.norm.spec import OPERANDS, PARAMETERS, RESULTS, STATISTICS, Norm
from normfuse.native.kernel import Kernel

KERNELS = {
    found.name.removeprefix("norm_"): found
    for found in vars(kernels).values()
    if type(found) is Kernel
}
CUDA = {name: kernel.bodies["cuda"] for name, kernel in KERNELS.items()}
assert CUDA["forward"] is cuda.forward

EPS = 1e-6
DTYPES = ("bfloat16", "float32", "float16", "float64")
HALVES = "row_statistics", "apply", "row_dots", "backward_apply"

Run = Callable[[str, Norm, Sequence], Sequence]


def norm_of(params: dict) -> Norm:
    """The static parameters; `out_dtype` may be a dtype."""
    if "out_dtype" in params:
        params = params | {"out_dtype": jnp.dtype(params["out_dtype"]).name}
    return Norm(**params)


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays of `shape`, (rows, n) or (examples, tokens, n), and the flags of one call.

    `x` and `out` are the dtypes of x and y (and of dy); `other` that of the residual and of dh;
    `scale` None for no scale; `mean` is added to x.
    """

    shape: tuple[int, ...]
    x: str = "bfloat16"
    scale: str | None = "float32"
    out: str = "bfloat16"
    other: str = "bfloat16"
    residual: bool = False
    offset: float = 0.0
    centred: bool = False
    bias: bool = False
    mean: float = 0.0

    def __str__(self):
        flags = f"{'+' + self.other if self.residual else ''}{'@' + str(self.offset)}"
        flags += "-centred" * self.centred + "-bias" * self.bias
        return f"{'x'.join(map(str, self.shape))}-{self.x}-{self.scale}-{self.out}{flags}"

    @property
    def compute(self) -> str:
        """The compute type."""
        used = [self.x, self.scale, self.out] + [self.other] * self.residual
        return "float64" if "float64" in used else "float32"

    @property
    def norm(self) -> Norm:
        """The norm of all results that there are."""
        examples = len(self.shape) == 3
        return Norm(
            op="layer_norm" if self.centred else "rms_norm",
            axes=(2,) if examples else (1,),
            heads=(0,) if examples else (),
            eps=EPS,
            scale_offset=self.offset,
            out_dtype=self.out,
            centred=self.centred,
            with_mean=self.centred,
            with_rstd=True,
            with_dscale=self.scale is not None,
            with_dbias=self.bias,
            compute=self.compute,
            count=float(self.shape[-1]),
        )

    @property
    def absent(self) -> set[str]:
        """The operands that its calls lack."""
        has = {"RESIDUAL": self.residual, "DH": self.residual, "SCALE": self.scale is not None}
        has |= {"BIAS": self.bias, "MEAN": self.centred, "SUMS": self.centred}
        return {name for name, there in has.items() if not there}

    def types(self, kernel: str, norm: Norm) -> list[jax.ShapeDtypeStruct | None]:
        """The operands' types."""
        parameter = tuple(self.shape[i] for i in (*norm.heads, *norm.axes))
        dtypes = {"X": self.x, "DY": self.out, "RESIDUAL": self.other, "DH": self.other}
        of = dict.fromkeys(STATISTICS, (self.shape[:-1], self.compute))
        of |= dict.fromkeys(PARAMETERS, (parameter, self.scale or "float32"))
        of |= {name: (self.shape, dtype) for name, dtype in dtypes.items()}
        types = {k: jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for k, (s, dtype) in of.items()}
        return [None if name in self.absent else types[name] for name in OPERANDS[kernel]]

    def operands(self) -> dict[str, np.ndarray]:
        """Standard normal arrays, parameters near 1, and statistics and sums of these rows."""
        norm, rng = self.norm, np.random.default_rng([*self.shape, self.residual])
        dtypes = {"X": self.x, "DY": self.out, "RESIDUAL": self.other, "DH": self.other}
        draw = lambda shape, dtype: rng.standard_normal(shape).astype(jnp.dtype(dtype))
        arrays = {name: draw(self.shape, dtype) for name, dtype in dtypes.items()}
        arrays["X"] = (wide(arrays["X"]) + self.mean).astype(arrays["X"].dtype)
        parameter = [self.shape[i] for i in (*norm.heads, *norm.axes)]
        for name in ("SCALE", "BIAS"):
            value = (name == "SCALE") + 0.25 * rng.standard_normal(parameter)
            arrays[name] = value.astype(jnp.dtype(self.scale or "float32"))
        arrays = {name: a for name, a in arrays.items() if name not in self.absent}
        known = with_rstd(arrays, norm)
        known |= defined("row_dots", norm, known)
        small = [name for name in known if name in STATISTICS]
        return known | {name: known[name].astype(self.compute) for name in small}


def with_rstd(arrays: dict[str, np.ndarray], norm: Norm) -> dict[str, np.ndarray]:
    """The arrays with the statistics of x in float64."""
    known = defined("row_statistics", norm, arrays)
    squares = known.pop("SQUARES")
    return arrays | known | {"RSTD": 1 / np.sqrt(squares / arrays["X"].shape[-1] + EPS)}


def placed(kernel: str, arrays: dict[str, np.ndarray]) -> list:
    """The operands of a kernel, None for those that are not there."""
    return [arrays.get(name) for name in OPERANDS[kernel]]


def named(kernel: str, results: Sequence) -> dict[str, np.ndarray]:
    """The results of a kernel that there are, by name."""
    pairs = zip(RESULTS[kernel], results, strict=True)
    return {name: np.asarray(a) for name, a in pairs if a is not None}


def defined(kernel: str, norm: Norm, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The definition's results in float64, but for the rounding of sums."""
    wider = replace(norm, out_dtype="float64", compute="float64", cast_before=False)
    with jax.enable_x64(True):
        operands = [None if a is None else jnp.asarray(wide(a)) for a in placed(kernel, arrays)]
        return named(kernel, _definition(kernel, wider, *operands))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _definition(kernel, norm, *operands):
    return KERNELS[kernel].definition(norm, *operands)


def magnitudes(kernel: str, norm: Norm, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The sums of magnitudes that each result is made of: differences become sums."""
    sign = {"MEAN": -1, "SUMS": -1, "DOTS": -1}
    with_mean = arrays | {"MEAN": np.abs(wide(arrays["X"])).mean(norm.axes)}
    large = {name: sign.get(name, 1) * np.abs(wide(a)) for name, a in with_mean.items()}
    sized = replace(norm, scale_offset=abs(norm.scale_offset))
    if kernel == "forward":
        statistics = {"MEAN": np.abs(large["MEAN"]), "RSTD": large["RSTD"]}
        return defined("apply", sized, large) | statistics
    if kernel == "row_statistics":
        mean = np.abs(large["MEAN"]) * norm.centred
        squares = ((large["X"] + np.expand_dims(mean, norm.axes)) ** 2).sum(norm.axes)
        return {"MEAN": mean, "SQUARES": squares}
    if kernel == "backward":
        large |= {name: -a for name, a in defined("row_dots", sized, large).items()}
        kernel = "backward_apply"
    return defined(kernel, sized, large)


def check(run: Run, case: Case, kernels: Sequence[str] = tuple(KERNELS), **changes) -> None:
    """Each of the kernels gives what its definition does, within rounding."""
    norm, arrays = replace(case.norm, **changes), case.operands()
    x, n = arrays["X"], case.shape[-1]
    for kernel in kernels:
        got, known = named(kernel, run(kernel, norm, placed(kernel, arrays))), arrays
        if kernel == "forward" and case.residual:
            h, exact = got.pop("H"), reference.add(x, arrays["RESIDUAL"])
            assert h.dtype == exact.dtype
            assert_close(h, Expected(wide(exact), np.abs(wide(exact))), case.compute)
            others = {name: a for name, a in arrays.items() if name != "RESIDUAL"}
            known = with_rstd(others | {"X": h}, norm)
        values, sizes = defined(kernel, norm, known), magnitudes(kernel, norm, known)
        assert got.keys() == values.keys() and sizes.keys() >= got.keys()
        for name, array in got.items():
            value, size = values[name], sizes[name]
            dtype = {"Y": case.out, "DX": case.x}.get(name, array.dtype)
            assert array.dtype == dtype and (name not in STATISTICS or array.dtype.itemsize > 2)
            length = n + (x.size // n if name in PARAMETERS else 0)
            slack = 2 if norm.centred and name == "RSTD" else 1  # of differences, with the mean's
            assert_close(array, Expected(value, size, length), case.compute, slack)


def check_cast_before(run: Run, case: Case) -> None:
    """`forward` and `apply` round to the input's dtype before they multiply."""
    norm, arrays = replace(case.norm, cast_before=True), case.operands()
    call = lambda name, norm: named(name, run(name, norm, placed(name, arrays)))
    found = call("forward", norm)
    y = found["Y"]
    arrays |= {"X": found.get("H", arrays["X"]), "RSTD": found["RSTD"]}
    options = {"eps": EPS, "axes": 1, "out": case.out}
    want, known = reference.round_before_weight(arrays["X"], arrays["SCALE"], **options)
    assert known.mean() > 0.98 and y.dtype == case.out
    assert y[known].tobytes() == want[known].tobytes()
    assert call("apply", norm)["Y"].tobytes() == y.tobytes()


def many_rows(monkeypatch) -> None:
    """From here on the backward is that of many rows."""
    monkeypatch.setattr(cuda, "one_launch_layout", lambda rows: None)


def mixes() -> list[tuple[str, str | None, str]]:
    """(x, scale, out) such that each pair of dtypes of any two of them is met."""
    pairs = itertools.product(range(4), range(4))
    return [(DTYPES[i], DTYPES[j], DTYPES[(i + j) % 4]) for i, j in pairs]
