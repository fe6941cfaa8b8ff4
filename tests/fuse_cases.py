"""Shared by the tests of `fuse`: tables of cases, both functions' results, and tolerances."""

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpy_interpreter
from numpy_interpreter import evaluated

import normfuse

DOMAINS = "attention", "loss", "norm", "mlp", "product", "indexing", "lookup", "codes"


@dataclasses.dataclass(frozen=True)
class Case:
    """A function with its arguments, and how many sites of some domains `fuse` must serve.

    `make` returns the function and its arguments.
    """

    name: str
    make: Callable
    expected: dict
    low: bool = False  # compare in bfloat16, too
    options: dict = dataclasses.field(default_factory=dict)

    def check(self):
        function, args = self.make()
        found, fused = compare(function, args, low=self.low, jit=False, **self.options)
        counts = {domain: found.get(domain, 0) for domain in self.expected}
        assert counts == self.expected, fused
        if self.low:
            wanted = {domain for domain, count in self.expected.items() if count}
            assert wanted <= {*fused.served()}, f"not served in bfloat16\n{fused}"


class Cases(list):
    """A table of cases.

    Args:
      sizes: of dimensions, by the letters that stand for them.
    """

    def __init__(self, **sizes):
        self.sizes = sizes

    def __call__(
        self,
        name,
        shapes=None,
        function=None,
        *more,
        low=False,
        scale=1.0,
        options=None,
        **expected,
    ):
        """Adds the case of a function; without one, decorates what makes it and its arguments.

        Args:
          shapes: those of random arguments, a word of letters each; "-" is a number.
          more: other arguments, after these.
        """

        def add(make):
            self.append(Case(name, make, expected, low, options or {}))
            return make

        if function is None:
            return add
        words = [word.strip("-") for word in shapes.split()]
        arrays = [tuple(self.sizes[letter] for letter in word) for word in words]
        return add(lambda: (function, [*draws(*arrays, scale=scale), *more]))

    def parameters(self):
        names = [case.name for case in self]
        assert len({*names}) == len(names), [n for n, count in Counter(names).items() if count > 1]
        return {"argvalues": self, "ids": names}


def draw(i: int, *shape, scale=1.0):
    """Random numbers that bfloat16 holds exactly, so that every dtype has the same arguments."""
    x = np.random.default_rng(i).standard_normal(shape) * scale
    # JAX compiles a program for each shape that it casts, or whose dtype is not named.
    return jnp.asarray(x.astype(jnp.bfloat16).astype(np.float32), jnp.float32)


def draws(*shapes, scale=1.0):
    return [draw(i, *shape, scale=scale) for i, shape in enumerate(shapes)]


def rms(x, scale):
    """An RMSNorm, as people write it."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def attend(
    change=lambda s: s,
    weights=jax.nn.softmax,
    scores="...td,...sd->...ts",
    values="...ts,...sd->...td",
    scale=0.35,
):
    """Attention by two einsums; `change` masks the scores."""

    def attention(q, k, v):
        return jnp.einsum(values, weights(change(jnp.einsum(scores, q, k) * scale)), v)

    return attention


def picked(rows, words):
    """Spellings of a loss of integer labels: functions of logits (len(rows), words) and labels."""
    log_softmax, logsumexp = jax.nn.log_softmax, jax.nn.logsumexp
    take = lambda a, y: jnp.take_along_axis(a, y[:, None], 1)[:, 0]
    one_hot = lambda y: jax.nn.one_hot(y, words)
    return {
        "p[rows, y]": lambda z, y: -log_softmax(z)[rows, y],
        "lse - z[rows, y]": lambda z, y: logsumexp(z, -1) - z[rows, y],
        "take p": lambda z, y: -take(log_softmax(z), y),
        "lse - take z": lambda z, y: logsumexp(z, -1) - take(z, y),
        "clipped": lambda z, y: -log_softmax(z).at[rows, y].get(mode="clip"),
        "one-hot p": lambda z, y: -jnp.sum(log_softmax(z) * one_hot(y), -1),
        "lse - one-hot z": lambda z, y: logsumexp(z, -1) - jnp.sum(z * one_hot(y), -1),
        "comparison": lambda z, y: (
            -jnp.where(jnp.arange(words) == y[:, None], log_softmax(z), 0).sum(-1)
        ),
    }


@contextlib.contextmanager
def quiet():
    """Silences the warning that nothing was served, which another test checks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"normfuse|fuse_cases")
        warnings.filterwarnings("ignore", message=r"(?s).*normfuse")
        warnings.filterwarnings("ignore", message=r"(?s).*fuse")
        yield


class Fused:
    """`fuse(function)`, which keeps its reports, and is loud where `fuse` falls back.

    A call fails where a part of the program could not be read or replaced, and where nothing is
    served, because the function's own results would be compared with themselves.

    Args:
      serves: False where the test says itself what is served, or that nothing is.
      reads: False where the test breaks something and looks at the row that says so.
    """

    def __init__(self, function, serves=True, reads=True, **options):
        self.reports, self.serves, self.reads = [], serves, reads
        self.function = normfuse.fuse(function, report=self.reports.append, **options)

    def __call__(self, *args, **kwargs):
        with quiet():
            results = self.function(*args, **kwargs)
        failed = [row for row in self.rows if "could not be" in row.reason]
        assert not failed or not self.reads, failed
        assert self.reports[-1].fused or not self.serves, f"nothing is served\n{self}"
        return results

    @property
    def rows(self):
        assert self.reports, "the function was not traced"
        return [*self.reports[-1].rows]

    def served(self) -> dict:
        """How many sites of each domain are served, in the last trace."""
        assert self.reports, "the function was not traced"
        return served(self.reports[-1])

    def __str__(self):
        return str(self.reports[-1]) if self.reports else "not traced"


def served(report) -> dict:
    """How many sites of each domain are served; each row says by what, or why not."""
    for row in report.rows:
        assert isinstance(row.served, str) and isinstance(row.reason, str), row
        assert bool(row.served) != bool(row.reason), row
    return dict(Counter(domain(row) for row in report.rows if row.served))


def domain(row) -> str:
    found = row.what.split()[0].rstrip(":,").lower()
    assert found in DOMAINS, row
    return found


def is_float(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def cast(tree, dtype):
    """The tree with floats in another dtype; NumPy casts them, as JAX would compile a program."""
    as_dtype = lambda x: jnp.asarray(np.asarray(x).astype(dtype), dtype)
    return jax.tree.map(lambda x: as_dtype(x) if is_float(x) else x, tree)


def both_ways(function, args):
    """Results, and the gradients of a fixed sum over them by every floating-point argument."""
    leaves, tree = jax.tree.flatten(args)
    variable = [is_float(x) for x in leaves]

    def of_variables(given):
        given = iter(given)
        every = [next(given) if v else x for v, x in zip(variable, leaves)]
        results = jax.tree.leaves(function(*jax.tree.unflatten(tree, every)))
        assert results
        return [y for y in results if is_float(y)], [y for y in results if not is_float(y)]

    floats, pull, others = jax.vjp(
        of_variables, [x for v, x in zip(variable, leaves) if v], has_aux=True
    )
    weights = [
        jnp.cos(0.7 + 1.3 * np.arange(y.size, dtype=np.float32)).reshape(y.shape).astype(y.dtype)
        for y in floats
    ]
    return floats, pull(weights)[0], others


def run(*functions, args, low=False, jit=True):
    """Both ways through each function: {"float32": [...], "bfloat16": [...]}.

    NumPy evaluates the first, with which the others are compared, because XLA would take long to
    compile it. These are compiled whole, but without `jit` only the operations that are normfuse's.
    """

    def ways(function, args):
        if not jit or function is functions[0]:
            return evaluated(both_ways)(function, args)
        of_arrays, arrays = numpy_interpreter.of_arrays(both_ways, function, args)
        return jax.jit(of_arrays)(arrays)

    found = {"float32": [ways(f, args) for f in functions]}
    if low:
        found["bfloat16"] = [ways(f, cast(args, jnp.bfloat16)) for f in functions]
    return found


def wide(function, args):
    """Both ways through a function of float64, or None where it insists on other dtypes."""
    with jax.enable_x64(True):
        try:
            return evaluated(both_ways)(function, cast(args, jnp.float64))
        except Exception:  # a carry, say, that the function casts to float32
            return None


def errors(got, want, floor=0.0):
    """The largest difference of each array, as a part of the largest of `want`; NaN, Inf equal."""
    found = []
    for a, b in zip(got, want, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b), "NaN in other places")
        inf = np.isinf(b)
        np.testing.assert_array_equal(np.where(np.isinf(a), a, 0), np.where(inf, b, 0))
        finite = np.isfinite(b)
        difference = np.max(np.abs(np.where(finite, a, 0) - np.where(finite, b, 0)), initial=0)
        scale = np.max(np.abs(b), where=finite, initial=0)
        found.append(difference / max(scale, floor) if difference else 0.0)
    return found


def floor_of(arrays, part=0.1):
    """Returns what counts as nothing beside rounding: a part of the largest of all arrays together.

    A gradient that is zero in exact arithmetic is what rounding leaves of numbers of that size.
    """
    sizes = [np.max(np.abs(a), where=np.isfinite(a), initial=0) for a in map(_wide, arrays)]
    return part * float(max(sizes, default=0.0)) or 1e-30


def _wide(x):
    return np.asarray(x, np.float64)


def tolerance(length, dtype=jnp.float32) -> float:
    """Rounding of two sums of `length` terms in a row, whose errors add up as a random walk.

    Each sum's error is about eps / 2 · √length of the sum of magnitudes, which is taken to be at
    most eight times the largest result; exponentials and roots add a few roundings.
    """
    return 8 * float(jnp.finfo(dtype).eps) * (2 + length**0.5)


def check(got, want, function, args, rounding, strict=True):
    """Float32: as exact beside float64 as the function itself, up to rounding. Values first.

    Without `strict`, gradients of values that are not finite may be anything.
    """
    for name, a, b in zip(("values", "gradients"), got[:2], want[:2]):
        if name == "gradients" and not strict and not all(np.isfinite(y).all() for y in want[0]):
            break
        floor = floor_of(b)
        difference = errors(a, b, floor)
        if max(difference, default=0) <= rounding:
            continue
        reference = wide(function, args)
        assert reference is not None, f"{name} differ by {difference}"
        exact = reference[name == "gradients"]
        mine, theirs = errors(a, exact, floor), errors(b, exact, floor)
        assert all(x <= 4 * y + rounding for x, y in zip(mine, theirs)), (
            f"{name} are wrong by {mine}, the function's own by {theirs}"
        )
    for a, b in zip(got[2], want[2], strict=True):
        np.testing.assert_array_equal(a, b)
    check_types(got, want)


def check_types(got, want):
    """Shapes and dtypes are equal; of results, not of gradients, weak types, too."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    for a, b in zip(got[0] + got[2], want[0] + want[2]):
        assert jax.typeof(a).weak_type == jax.typeof(b).weak_type


def check_low(got, want, exact):
    """Bfloat16: at most twice as far from float32 as the function itself, and one rounding."""
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    for name, a, b, c in zip(("values", "gradients"), got[:2], want[:2], exact[:2]):
        floor = floor_of(c)
        mine, theirs = errors(a, c, floor), errors(b, c, floor)
        assert all(x <= 2 * y + eps for x, y in zip(mine, theirs)), (
            f"{name} are wrong by {mine} in bfloat16, the function's own by {theirs}"
        )
    check_types(got, want)


def compare(function, args, *, low=False, jit=True, rounding=None, strict=True, **options):
    """Compares `fuse(function)` with the function; returns the sites served in float32."""
    fused = Fused(function, serves=False, **options)  # callers look at what is returned
    found = run(function, fused, args=args, low=low, jit=jit)
    sites = [*map(served, fused.reports)]
    try:
        want, got = found["float32"]
        check(got, want, function, args, rounding or tolerance(64), strict)
        if low:
            check_low(found["bfloat16"][1], found["bfloat16"][0], want)
    except AssertionError as error:
        error.add_note(str(fused))
        raise
    return sites[0] if sites else {}, fused
