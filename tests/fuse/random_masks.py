"""Random expressions of integers, masks and casts: what `fuse` proves of each, beside XLA's values.

    python tests/fuse/random_masks.py --programs 2000 --seed 0

A program is some lines of text, one expression a line, made of iota, constants, casts between all
dtypes, arithmetic (with 0, negative numbers, numbers that wrap), comparisons, selects, slices,
reshapes and broadcasts; two arguments are not known. JAX evaluates each equation of it by itself,
and every answer of `Program.known`, `uniform`, `affine`, `region`, `decided` and `two_valued` is
compared with that value at every position. Its last mask and its last indices are used in an
attention, an update and a read, which `fuse` has to compute in float64 as they were. Some programs
are compiled as a whole too: exact constants have to be what comes out of that as well.
"""

import argparse
import collections
import functools
import pathlib
import sys
import warnings

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fuse_cases  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
from fuse.fuzz import Draws  # noqa: E402
from jax import lax  # noqa: E402

from normfuse.layers.fuse import indices  # noqa: E402
from normfuse.layers.fuse.program import Program  # noqa: E402

T, LONG = 5, 300
"""The sizes of dimensions: of nearly all; and of a few, which narrow dtypes cannot count."""

INTEGERS = "int32 int32 int32 int8 uint8 int16 uint16 uint32 int64 uint64".split()
FLOATS = "float32 float32 bfloat16 float16 float64".split()
OTHERS = "bool bool int4 uint4 float8_e4m3fn float8_e5m2".split()
NUMBERS = "0 1 -1 2 3 -3 4 5 7 100 127 128 255 300 -128".split()
REALS = "0.0 1.0 0.5 -0.5 0.1 -1.0 3.0 2.5 -1e9 1e30 1e-40 np.inf -np.inf np.nan".split()
COMPARISONS = "ge gt le lt eq ne".split()


class Writer(Draws):
    """Writes lines that JAX accepts; `types` has the type of each value."""

    def __init__(self, seed):
        super().__init__(seed, 57)
        self.seed, self.lines = seed, []
        self.space = dict(jax=jax, jnp=jnp, lax=lax, np=np, T=T, LONG=LONG)
        self.types = {"a": jax.ShapeDtypeStruct((T,), np.int32)}
        self.types["b"] = jax.ShapeDtypeStruct((T, T), np.bool_)

    def value(self, *kinds):
        """A value of some kinds ("b", "i", "f", "o" others), a recent one more often."""
        found = [n for n, t in self.types.items() if not kinds or kind(t.dtype) in kinds]
        if self.chance(0.92):
            found = [n for n in found if n not in "ab"] or found
        if not found:
            return None
        return found[-1 - min(int(self.rng.exponential(2.0)), len(found) - 1)]

    def dtype(self, *kinds):
        names = {"i": INTEGERS, "f": FLOATS, "o": OTHERS, "b": ["bool"]}
        return self.some(*names[self.some(*(kinds or "iiffob"))])

    def __call__(self, text):
        """Writes a line, if JAX takes it."""
        try:
            out = jax.eval_shape(lambda values: eval(text, self.space, values), dict(self.types))
        except Exception:
            return False
        if not hasattr(out, "dtype") or out.size == 0 or out.size > 3000:
            return False
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.types[name] = out
        return True

    def __str__(self):
        lines = "\n    ".join(self.lines)
        names = ", ".join(n for n in self.types if n not in "ab")
        return f"def f(a, b):\n    {lines}\n    return {names},\n"

    def function(self):
        space = dict(self.space)
        exec(str(self), space)
        return space["f"]

    @classmethod
    def of(cls, lines):
        """A program of given lines, the first of which is v0."""
        w = cls(0)
        for line in lines:
            assert w(line), line
        return w

    def arguments(self):
        rng = np.random.default_rng([self.seed, 58])
        keep = rng.random((T, T)) < 0.7
        return jnp.asarray(rng.integers(-2, T, T), np.int32), jnp.asarray(keep)


def kind(dtype):
    if dtype == np.bool_:
        return "b"
    if dtype.name in INTEGERS:
        return "i"
    return "f" if dtype.name in FLOATS else "o"


def number_of(w, name):
    """A number that may be combined with a value."""
    if kind(w.types[name].dtype) == "f":
        return w.some(*REALS)
    return w.some(*NUMBERS[:9]) if w.chance(0.7) else w.some(*NUMBERS)


def leaf(w):
    d, axis, n = w.dtype("i", "i", "i", "f"), w.some(0, 1), w.some(T, T, LONG)
    shape = w.some("(T, T)", "(T, T)", "(T,)", "(1, T)", "(T, 1)", "()")
    return w.some(
        f'lax.broadcasted_iota("{d}", (T, T), {axis})',
        f'lax.broadcasted_iota("{d}", (T, T), {axis})',
        f'lax.iota("{d}", {n})',
        f'jnp.arange({n}, dtype="{d}"){w.some("", "[:, None]", "[None]")}',
        f'jnp.full({shape}, {w.some("0", "1", "-1", "3", "100", "0.5")}, "{w.dtype()}")',
        f'np.arange({w.some("T", "T, 0, -1", "-2, T - 2")}).astype("{d}"){w.some("", "[:, None]")}',
        f'np.tri(T, k={w.some(0, 0, -1, 1)}, dtype="{w.some("bool", "float32", "int8", "int32")}")',
        f'jnp.{w.some("tril", "triu")}(jnp.ones((T, T), "{w.some("bool", "int8", "float32")}"))',
        f'np.array({[int(w.some(0, 1, 2, -1, 9, 200)) for _ in range(T)]}).astype("{d}")',
    )


CUT = "[::-1] [1:2] [:1] [-1:] [2:3] [:, :1] [:, 1:2] [:, -1:] [1:4] [::2] [:, None] [None]"


def moved(w, x):
    shape = w.some("(T, T)", "(T, 1)", "(1, T)", "(T,)", "(1, T, 1)", "(T * T,)")
    return w.some(
        f"{x}{w.some(*CUT.split())}",
        f"{x}{w.some(*CUT.split())}",
        f"{x}.T",
        f"{x}.reshape({shape})",
        f"jnp.broadcast_to({x}, {w.some('(T, T)', '(T, T)', '(2, T, T)')})",
        f"jnp.squeeze({x})",
        f"jnp.concatenate([{x}[:2], {x}[2:]], 0)",
        f"jnp.concatenate([{x}[3:], {x}[:3]], 0)",
        f"lax.stop_gradient({x})",
        f"jnp.pad({x}, 1)",
    )


def one(w, x):
    """A function of one value, for its kind."""
    of = kind(w.types[x].dtype)
    if w.chance(0.4):
        return f'lax.convert_element_type({x}, "{w.dtype()}")'
    axis = w.some("0", "-1", "None")
    reduced = f"({x}, axis={axis}, keepdims={w.some('True', 'True', 'False')})"
    if of == "b":
        return w.some(
            f"~{x}",
            f"lax.bitwise_not({x})",
            f"jnp.any{reduced}",
            f"jnp.all{reduced}",
            f"jnp.tril({x})",
            f"jnp.triu({x}, {w.some(-1, 1)})",
            f'jnp.where({x}, {w.some(*REALS)}, {w.some(*REALS)}).astype("{w.dtype()}")',
            f"jnp.where({x}, {w.some(*NUMBERS)}, {w.some(*NUMBERS)})",
            f"lax.max({x}, {w.some('False', 'True')})",
        )
    unary = ["lax.neg({0})", "lax.abs({0})", "lax.sign({0})", "lax.square({0})"]
    unary += ["lax.integer_pow({0}, 2)", "lax.integer_pow({0}, 3)"]
    if of == "f":
        unary += "jnp.floor({0}) jnp.round({0}) jnp.exp({0}) jnp.sqrt({0}) jnp.log({0})".split()
        unary += ["lax.is_finite({0})", "lax.rsqrt({0})", "({0} ** 0.5)"]
    else:
        unary += ["lax.bitwise_not({0})", "({0} // 2)", "({0} % 3)", "({0} >> 1)", "({0} << 4)"]
    unary += [f"jnp.{f}{reduced}" for f in ("max", "min", "sum", "prod", "cumsum")[:4]]
    unary += [f"lax.cumsum({x}, 0)", f"jnp.sum({x}, 0, dtype={x}.dtype)"]
    return w.some(*unary).format(x)


def two(w, x):
    """A function of a value and a number or another value of its dtype."""
    d = w.types[x].dtype
    same = [n for n, t in w.types.items() if t.dtype == d]
    y = w.some(*same) if w.chance(0.6) else None
    if y is None or w.chance(0.1):
        y = f'np.array({number_of(w, x)}).astype("{d.name}")'
    if w.chance(0.2):
        x, y = y, x
    if kind(d) == "b":
        return w.some(f"{x} & {y}", f"{x} & {y}", f"{x} | {y}", f"{x} ^ {y}", f"{x} == {y}")
    if w.chance(0.35):
        return f"jnp.{dict(zip(COMPARISONS, NAMES))[w.some(*COMPARISONS)]}({x}, {y})"
    functions = "add sub mul add sub mul div max min rem".split()
    if kind(d) == "i":
        functions += "bitwise_and bitwise_or bitwise_xor shift_left".split()
    f = w.some(*functions)
    if f in ("div", "rem") and kind(d) == "i":  # the least by -1 stops the process on some CPUs
        y = f"lax.abs({y})" if d.kind == "i" else y
    infix = dict(add="+", sub="-", mul="*").get(f)
    if infix and w.chance(0.8):
        return f"{x} {infix} {y}"  # dimensions of size 1 meet others
    return f"lax.{f}(*jnp.broadcast_arrays({x}, {y}))"


NAMES = "greater_equal greater less_equal less equal not_equal".split()


def chosen(w, x):
    m = w.value("b")
    if m is None:
        return leaf(w)
    d = w.types[x].dtype
    same = [n for n, t in w.types.items() if t.dtype == d]
    other = w.some(*same) if w.chance(0.4) else f'np.array({number_of(w, x)}).astype("{d.name}")'
    low, high = (f'np.array({number_of(w, x)}).astype("{d.name}")' for _ in range(2))
    return w.some(
        f"jnp.where({m}, {x}, {other})",
        f"jnp.where({m}, {other}, {x})",
        f"lax.clamp({low}, {x}, {high})",
    )


def idiom(w):
    """Draws what people write: positions, windows, segments, padding."""
    d = w.dtype("i", "i", "f")
    i, j = f'jnp.arange(T, dtype="{d}")[:, None]', f'jnp.arange(T, dtype="{d}")[None]'
    p = w.value("i") or "a"
    offset = w.some(-2, -1, 0, 1, 2)
    return w.some(
        f"({i} >= {j})",
        f"({i} - {j} < {w.some(1, 2, 3)})",
        f"({i} + {offset} >= {j})",
        f"(({i} >= {j}) & ({i} - {j} < 3))",
        f"{p} - {p}[:1]",
        f"{p} - {p}[..., :1]",
        f"{p}[..., -1:] - {p}",
        f"({p} >= {p}[2:3])",
        f"{p} + {p}[1:2]",
        f"({i} // 2 == {j} // 2)",
        f"jnp.where({i} >= {j}, 0.0, {w.some('-1e9', '-np.inf', '-1e30')})",
        f"(1.0 - np.tri(T, dtype='float32')) * {w.some('-1e9', '-np.inf')}",
        "a[:, None] == a[None]",
        "(a >= 0) & b",
        *places(w),
    )


def places(w):
    """Draws indices of a dimension of T, most of them within bounds."""
    d, n, step, first = w.dtype("i"), w.some(2, 3, T), w.some(1, 1, 2, -1), w.some(0, 0, 1, T - 1)
    return (
        f'jnp.arange({n}, dtype="{d}") * np.array({step}).astype("{d}") + {first}',
        f"(jnp.arange(T) + jnp.arange(T)[{first}:][:1])[:{n}] - {w.some(0, 1, 2)}",
        f"(jnp.arange({n}, dtype='int32') - {w.some(0, 1, T)}).astype('{d}')",
    )


def write(seed) -> Writer:
    """The program of a number: about a dozen lines."""
    w = Writer(seed)
    count, tries = int(w.rng.integers(8, 16)), 0
    while len(w.lines) < count and tries < 60:
        tries += 1
        if len(w.lines) < 2 or w.chance(0.12):
            w(leaf(w) if w.chance(0.7) else idiom(w))
            continue
        x = w.value(*w.some("i", "f", "b", "if", "")) or w.value()
        w(w.some(moved, one, one, two, two, two, chosen)(w, x) if w.chance(0.9) else idiom(w))
    return w


# ---------------------------------------------------------------- comparing


def wide(x):
    """Numbers that are compared: integers as Python's, floats as float64."""
    x = np.asarray(x)
    if x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return x.astype(np.int8)
    return x if x.dtype.kind in "biu" else x.astype(np.float64)


def near(x, exact, value):
    """Tells if a constant is the value: its bits, or a few ulps where it was rounded."""
    if x.dtype != value.dtype or x.shape != value.shape:
        return False
    a, b = wide(x), wide(value)
    if exact or a.dtype.kind in "biu":
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    with np.errstate(all="ignore"):
        eps = float(ml_dtypes.finfo(x.dtype).eps)
        tiny = float(ml_dtypes.finfo(x.dtype).smallest_normal)
        close = np.abs(a - b) <= 32 * eps * np.abs(b) + tiny
    # One order of operations may round up to infinity, and another not.
    huge = np.isinf(a) & (np.abs(b) > float(ml_dtypes.finfo(x.dtype).max) / 2)
    return bool((close | (a == b) | huge | np.isnan(a) & np.isnan(b)).all())


def at_positions(one, shape):
    """An affine function at every position, as Python's integers."""
    y = np.full(shape, one.constant, object)
    for d, (c, n) in enumerate(zip(one.coefficients, shape)):
        y = y + (c * np.arange(n).astype(object)).reshape(
            [-1 if e == d else 1 for e in range(len(shape))]
        )
    return y


def faults(program, values, counts):
    """Yields (value, what is said of it, which is wrong)."""
    for v, value in values.items():
        counts["values"] += 1
        if (known := program.known(v)) is not None:
            counts["constants"] += 1
            if not near(known.x, known.exact, value):
                yield v, f"known: {known.x!r}, exact: {known.exact}"
        if (number := program.uniform(v)) is not None:
            counts["numbers"] += 1
            x = np.broadcast_to(number.x, value.shape)
            if not near(x, number.exact, value):
                yield v, f"uniform: {number.x!r}, exact: {number.exact}"
        if (line := indices.affine(program, v)) is not None:
            counts["affine"] += 1
            if not (at_positions(line, value.shape) == wide(value).astype(object)).all():
                yield v, f"affine: {line}"
        if value.dtype != np.bool_:
            continue
        if (region := indices.region(program, v)) is not None:
            counts["regions"] += 1
            inside = np.ones(value.shape, bool)
            for each in region:
                inside &= (at_positions(each, value.shape) >= 0).astype(bool)
            if (inside != value).any():
                yield v, f"region: {region}"
        if (everywhere := indices.decided(program, v)) is not None:
            counts["decided"] += 1
            if (value != everywhere).any():
                yield v, f"decided: {everywhere}"
    for v, value in values.items():
        if (found := indices.two_valued(program, v)) is None:
            continue
        counts["of two numbers"] += found.mask != v
        mask = values.get(found.mask)
        if mask is None:
            mask = np.asarray(program.const(found.mask))
        x = np.where(mask, found.yes.x, found.no.x)
        if not near(x.astype(value.dtype), found.no.exact and found.yes.exact, value):
            yield v, f"two numbers: {found}"


def check(w, counts, whole=False):
    """Returns the faults of a program, as text."""
    function, args = w.function(), w.arguments()
    try:
        closed = jax.make_jaxpr(function)(*args)
    except Exception:
        return []  # JAX refuses it
    counts["programs"] += 1
    counts["expressions"] += len(w.lines)
    try:
        program = Program(closed)
    except Exception as error:
        return [f"reading it raises {type(error).__name__}: {error}"]
    env = program.given | dict(zip(program.inputs, args, strict=True))
    every = [v for equation in program.equations for v in equation.outs]
    program.evaluate(env, [*every, *program.results], {})
    values = {v: np.asarray(env[v]) for v in dict.fromkeys((*every, *program.inputs))}
    said = []
    try:
        for v, what in faults(program, values, counts):
            made = program.maker[v]
            said.append(f"{made.eqn}\n  is {values[v]!r}\n  {what}")
    except Exception as error:
        said.append(f"proving raises {type(error).__name__}: {error}")
    if whole:
        counts["compiled as a whole"] += 1
        for v, value in zip(program.results, jax.jit(function)(*args), strict=True):
            known = program.known(v)
            if known is not None and known.exact and not near(known.x, True, np.asarray(value)):
                made = program.maker.get(v)
                said.append(f"compiled, {made and made.eqn} is {value!r}, not {known.x!r}")
    return said


def used(w):
    """Functions that use its last mask, its last indices and its last float as a mask."""
    function, names = w.function(), [n for n in w.types if n not in "ab"]
    shapes = {n: w.types[n].shape for n in names}
    at = lambda want: next((i for i in reversed(range(len(names))) if want(names[i])), None)
    mask = at(lambda n: w.types[n].dtype == bool and shapes[n] == (T, T))
    index = at(lambda n: kind(w.types[n].dtype) == "i" and shapes[n] in ((T,), (2,), (3,)))
    cast = at(lambda n: kind(w.types[n].dtype) in "if" and shapes[n] == (T, T))

    def attention(which, number, q, k, v, a, b):
        keep = function(a, b)[which].astype(bool)
        return jax.nn.softmax(jnp.where(keep, q @ k.mT, number), -1) @ v

    def write(x, _, u, a, b):
        at = function(a, b)[index]
        return x.at[:, at].set(u[:, : at.shape[0]]), x[:, at]

    for name, which, number in (("attention", mask, -np.inf), ("a cast", cast, -1e30)):
        if which is not None:
            yield name, functools.partial(attention, which, number)
    if index is not None:
        yield "indexing", write


def check_uses(w, counts):
    """Returns what `fuse` gets wrong of the uses of a program's values."""
    rng, given = np.random.default_rng(w.seed), w.arguments()
    q, k, v = (jnp.asarray(rng.standard_normal((2, T, T))) for _ in range(3))
    said = []
    for name, function in used(w):
        q, k, v = (q, k, v) if name != "indexing" else (q[0], k[0], v[0])
        theirs = fuse_cases.evaluated(function)(q, k, v, *given)
        fused = fuse_cases.Fused(function, serves=False)
        mine = fuse_cases.evaluated(fused)(q, k, v, *given)
        counts[f"{name}: served"] += bool(fused.served())
        counts[name] += 1
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            # Sums of five in float64, after exponentials: a few ulps of numbers near 1.
            if not np.allclose(a, b, rtol=0, atol=1e-12, equal_nan=True):
                said.append(f"{name} is wrong by {np.max(np.abs(a - b))}\n{fused}")
                break
    return said


def run(seeds, uses=4, whole=0, show=print):
    """Returns the numbers of programs that are wrong, and counts of what was compared.

    Every so many are used in functions (`uses`), and compiled as a `whole`.
    """
    counts, failed = collections.Counter(), []
    for seed in seeds:
        wide = seed % 5 > 0  # some of 32 bits
        with jax.enable_x64(wide), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            w = write(seed)
            said = check(w, counts, bool(whole) and seed % whole == 0)
            if wide and uses and seed % uses == uses - 1:
                said += check_uses(w, counts)
        if said:
            failed.append(seed)
            show(f"# program {seed}\n{w}" + "\n".join(said) + "\n")
    counts["wrong"] = len(failed)
    return failed, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first program")
    options = parser.parse_args()
    total = collections.Counter()
    for first in range(options.seed, options.seed + options.programs, 100):
        total += run(range(first, first + 100), whole=20)[1]
        print(dict(total), flush=True)
    sys.exit(bool(total["wrong"]))


if __name__ == "__main__":
    main()
