"""Random programs for `fuse`: spellings that it knows, put together and changed at random.

    python tests/fuse/fuzz.py --programs 20000 --seed 0

All dimensions have one size, so that every wrong axis and every wrong operand fits. A program is a
few lines of text; changes replace operands, axes, constants, letters of an einsum, or insert a
line: a cast, a `stop_gradient`, a transposition, another reader. Each program is compared with
`fuse` of it, values and gradients, by `fuse_cases.check`: in float64, where an ill-conditioned
program has digits to lose, and with an MLP, which is not served in float64, in float32. Program
number n is the same in each run: `--only n` runs it again. What fails is printed as text.
"""

import argparse
import collections
import contextlib
import dataclasses
import pathlib
import re
import sys
import time
import traceback
import warnings

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fuse_cases  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

from normfuse.layers.fuse import losses  # noqa: E402

N = 4


@dataclasses.dataclass
class Program:
    """Lines of a function, its arguments (name: kind and rank) and results, and its wrapper.

    Attributes:
      wide: it computes in float64.
    """

    seed: int
    lines: list
    args: dict
    results: list
    wide: bool
    wrapper: str = ""

    def __str__(self):
        names = ", ".join(self.args)
        lines = [f"def f({names}):", *self.lines, f"return {', '.join(self.results)},"]
        text = "\n    ".join(lines)
        return f"# {self.args}\n{text}\n{self.wrapper}".rstrip() + "\n"

    @property
    def dtype(self):
        return jnp.float64 if self.wide else jnp.float32

    @property
    def rounding(self):
        """The tolerance: a part of an array, or of a tenth of the largest one.

        Gradients of attention are differences that cancel, and its probabilities, computed again
        from a log-sum-exp, have the rounding of large scores: 2^12 eps of what is computed in. In
        float64, -1e9 that is added to a whole row rounds its scores to 2^-23.
        """
        if not self.wide or "np.float32" in str(self):
            return 2.0**12 * float(jnp.finfo(jnp.float32).eps)
        added = "* -1e9" in str(self) or "0.0, -1e9)" in str(self)
        return 2.0**-23 if added else 2.0**12 * float(jnp.finfo(jnp.float64).eps)

    def function(self):
        space = dict(jax=jax, jnp=jnp, lax=lax, np=np, N=N, F=self.dtype)
        exec(str(self), space)
        return space["f"]

    def arguments(self):
        """Arguments of the program; a wrapper that maps over them gets one more dimension."""
        rng = np.random.default_rng([self.seed, 1])
        more = 1 if "vmap" in self.wrapper or "scan" in self.wrapper else 0
        outside, scale = rng.random() < 0.3, rng.choice([0.3, 0.7, 1.0])
        found = []
        for kind, rank in self.args.values():
            shape = (N,) * (rank + more)
            if kind == "float":
                x = jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)
                found.append(x.astype(self.dtype))
            elif kind == "mask":
                keep = rng.random(shape) < rng.choice([0.5, 0.8])
                keep = keep | (rng.random() < 0.5) & np.eye(N, dtype=bool)
                keep[..., rng.integers(N), :] &= rng.random() < 0.8  # a row that sees nothing
                found.append(jnp.asarray(keep))
            elif kind == "ids":
                found.append(jnp.asarray(np.sort(rng.integers(0, 3, shape), -1)))
            else:
                y = rng.integers(0, N, shape)
                if outside:
                    wrong = rng.choice([-1, -2, -N, -N - 1, -100, N, N + 3], shape)
                    y = np.where(rng.random(shape) < 0.3, wrong, y)
                found.append(jnp.asarray(y, jnp.int32))
        return found


class Draws:
    """Random choices, all of one generator."""

    def __init__(self, *seed):
        self.rng = np.random.default_rng([*seed])

    def some(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def chance(self, p):
        return self.rng.random() < p


class Writer(Draws):
    """Writes lines; `narrow` once one of them is an MLP's."""

    def __init__(self, seed):
        super().__init__(seed)
        self.lines, self.args, self.made, self.narrow = [], {}, [], False

    def number(self, *choices):
        return repr(float(self.some(*choices)))

    def arg(self, kind, rank, new=0.7):
        """An argument, sometimes one that is read already."""
        same = [name for name, of in self.args.items() if of == (kind, rank)]
        if same and not self.chance(new):
            return self.some(*same)
        name = f"{dict(float='x', mask='m', ids='i', labels='y')[kind]}{len(self.args)}"
        self.args[name] = kind, rank
        return name

    def value(self, rank, new=0.3):
        """Something of floats: an earlier result of this rank, or an argument."""
        same = [name for name, of in self.made if of == rank]
        if same and not self.chance(new):
            return same[-1] if self.chance(0.7) else self.some(*same)
        return self.arg("float", rank)

    def __call__(self, expression):
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def keep(self, name, rank):
        self.made.append((name, rank))
        return name

    def shuffled(self, letters, p=0.5):
        return "".join(self.rng.permutation([*letters])) if self.chance(p) else letters


# ---------------------------------------------------------------- parts of programs


def softmax(w, s, axis, late=False):
    """Lines of a softmax of s: its weights; if `late`, or its exponentials and their sum."""
    keep = f"axis={axis}, keepdims=True"
    which = w.rng.integers(8)
    if which <= 2:
        return w(f"jax.nn.softmax({s}, axis={axis})")
    if which == 3:
        return w(f"jnp.exp(jax.nn.log_softmax({s}, axis={axis}))")
    if which == 4:
        return w(f"jnp.exp({s} - jax.nn.logsumexp({s}, {keep}))")
    top = w(f"jnp.max({s}, {keep})")
    other = top
    if which != 5:
        top = w(f"lax.stop_gradient({top})")
    e = f = w(f"jnp.exp({s} - {top})")
    if w.chance(0.1):  # one of two maxima stopped
        f = w(f"jnp.exp({s} - {other})")
    if w.chance(0.2):
        keep_of = w(f"jnp.broadcast_to({mask(w)}, {e}.shape)")
        e = f = w(w.some("{1} * {0}", "jnp.where({0}, {1}, 0.0)").format(keep_of, e))
    total = w(f"jnp.sum({f}, {keep})")
    return (e, total) if late and w.chance(0.5) else w(f"{e} / {total}")


def mask(w):
    """An expression of a (queries, keys) mask."""
    behind = "(jnp.arange(N)[:, None] - jnp.arange(N))"
    return w.some(
        *["jnp.tril(jnp.ones((N, N), bool))"] * 4,
        f"jnp.tril(jnp.ones((N, N), bool), {w.some(-1, 1)})",
        f"({behind} >= 0)",
        f"(({behind} >= 0) & ({behind} < 2))",
        f"({behind} < {w.some(1, 2)})",
        f"jnp.asarray(np.random.default_rng({w.rng.integers(9)}).random((N, N)) < 0.7)",
        "(lax.broadcasted_iota(np.int32, (N, N), 0) >= lax.broadcasted_iota(np.int32, (N, N), 1))",
        "jnp.eye(N, dtype=bool)",
        f"({behind} >= {w.some(1, 2)})",  # rows that see nothing
        w.arg("mask", 2) if w.chance(0.6) else "jnp.ones((N, N), bool)",
        "({0}[:, None] == {0}) & ({1} >= 0)".format(w.arg("ids", 1), behind),
    )


FILLS = "-1e9", "-1e9", "-1e30", "-jnp.inf", "-1e4", "-2e4", "jnp.finfo(F).min", "-30.0"


def masked(w, s, term):
    """Scores with a mask, in the order of their letters."""
    t, k = term.index("t"), term.index("s")
    others = tuple(i for i in range(len(term)) if i not in (t, k))
    for _ in range(1 + w.chance(0.15)):
        keep = w(mask(w))
        keep = w(f"{keep}.T") if t > k else keep
        keep = w(f"jnp.expand_dims({keep}, {others})") if others else keep
        fill = w.some(*FILLS)
        which = w.rng.integers(5)
        if which <= 2:
            s = w(f"jnp.where({keep}, {s}, {fill})")
        elif which == 3:
            s = w(f"{s} + jnp.where({keep}, 0.0, {fill})")
        else:
            fill = fill if fill.startswith("-1e") else "-1e9"
            s = w(f"{s} + (1.0 - {keep}.astype(F)) * {fill}")
        if w.chance(0.05):
            s = w(f"{s} / 0.5")  # the least number becomes -inf
    return s


def attention(w):
    rank = w.some(2, 3, 3, 4, 4)
    q, k, v, scores, out = {
        2: ("td", "sd", "se", "ts", "te"),
        3: ("btd", "bsd", "bse", "bts", "bte"),
        4: ("bthd", "bshd", "bshe", "bhts", "bthe"),
    }[rank]
    if rank == 4 and w.chance(0.25):  # one head of keys
        k, v = "bsd", "bse"
    if rank == 4 and w.chance(0.2):
        k, v = "shd", "she"  # keys without examples
    q, k, v, scores, out = (w.shuffled(term, 0.35) for term in (q, k, v, scores, out))
    a, b, c = (w.value(len(term)) for term in (q, k, v))
    if w.chance(0.3):
        a = w(f"{a} * {w.number(0.5, 0.7, 2)}")
    s = w(f'jnp.einsum("{q},{k}->{scores}", {a}, {b})')
    if w.chance(0.5):
        s = w(f"{s} {w.some('*', '/')} {w.number(0.5, 0.3, 2, 1.5)}")
    if w.chance(0.12):
        s = w(f"3.0 * jnp.tanh({s} / 3.0)")
    if w.chance(0.12):
        bias = w.arg("float", w.some(2, rank, 1))
        if w.chance(0.2):  # one of -inf, in a whole row at times
            row = w.some(f"jnp.arange(N) == {w.some(0, 2)}", mask(w))
            bias = w(f"jnp.where({row}, -jnp.inf, {bias}.T).T")
        s = w(f"{s} + {bias}")
    if w.chance(0.7):
        s = masked(w, s, scores)
    axis = scores.index("s") - (len(scores) if w.chance(0.5) else 0)
    if w.chance(0.08):
        p = w(f"jax.nn.softmax({s}, axis={axis}, where={mask(w)})")
    else:
        p = softmax(w, s, axis, late=scores[:-1] == out[:-1] and scores[-1] == "s")
    p, total = p if isinstance(p, tuple) else (p, "")
    y = w(f'jnp.einsum("{scores},{v}->{out}", {p}, {c})')
    w.keep(w(f"{y} / {total}") if total else y, rank)


def loss(w):
    rank = w.some(2, 2, 3)
    rows = "btr"[: rank - 1]
    x, kernel, order = w.value(rank), w.arg("float", 2), w.some("dv", "vd")
    z = w(f'jnp.einsum("{rows}d,{order}->{rows}v", {x}, {kernel})')
    if w.chance(0.2):
        z = w(f"{z} * {w.number(0.5, 2, 1.5)}")
    if w.chance(0.15):
        z = w(f"2.0 * jnp.tanh({z} / 2.0)")
    if w.chance(0.08):
        z = w(f"{z} + {w.arg('float', 1)}")
    if w.chance(0.2):  # a masked vocabulary
        z = w(f"jnp.where(jnp.arange(N) {w.some('<', '!=')} 3, {z}, {w.some('-1e9', '-jnp.inf')})")
    y = w.arg("labels", rank - 1)
    which = w.rng.integers(8)
    if which <= 1:
        lse = w(f"jax.nn.logsumexp({z}, axis=-1)")
        pick = w(f"jnp.take_along_axis({z}, {y}[..., None], axis=-1)[..., 0]")
        l = w(f"{lse} - {pick}")
        if w.chance(0.3):
            l = w(f"{l} + 0.1 * {lse} * {lse}")
    elif which <= 5:
        p = w(f"jax.nn.log_softmax({z}, axis=-1)")
        if which == 2:
            l = w(f"-jnp.take_along_axis({p}, {y}[..., None], axis=-1)[..., 0]")
        elif which == 3:
            l = w(f"-jnp.sum({p} * jax.nn.one_hot({y}, N), axis=-1)")
        elif which == 4:
            l = w(f"-jnp.sum(jnp.where(jnp.arange(N) == {y}[..., None], {p}, 0.0), axis=-1)")
        else:
            hot = w(f"jax.nn.one_hot({y}, N) * 0.9 + 0.1 / N")
            l = w(f"-jnp.sum({p} * {hot}, axis=-1)")
    else:
        top = other = w(f"lax.stop_gradient(jnp.max({z}, axis=-1, keepdims=True))")
        if w.chance(0.2):  # one of two maxima stopped
            other = w(f"jnp.max({z}, axis=-1, keepdims=True)")
        lse = w(f"jnp.log(jnp.sum(jnp.exp({z} - {top}), axis=-1)) + {other}[..., 0]")
        pick = w(f"jnp.sum({z} * jax.nn.one_hot({y}, N), axis=-1)")
        l = w(f"{lse} - {pick}")
    if w.chance(0.3):
        weight = w.some(
            w.arg("float", rank - 1), f"({y} >= 0)", f"({y} != 1)", f"{y}.astype(F)", f"{l}"
        )
        l = w.some(lambda: w(f"{l} * {weight}"), lambda: w(f"jnp.where({y} >= 0, {l}, 0.0)"))()
    which = w.rng.integers(4)
    if which == 0:
        w.keep(l, rank - 1)
    elif which == 1 and rank == 3:
        w.keep(w(f"jnp.sum({l}, axis={w.some(0, 1, -1)})"), 1)
    else:
        w.keep(w(f"{l}.{w.some('mean', 'sum')}()"), 0)


def lookup(w):
    table, rank = w.arg("float", 2), w.some(1, 2)
    ids = w.arg("labels", rank)
    form = w.some(
        f"{table}[{ids}]",
        f"jnp.take({table}, {ids}, axis=0, mode='clip')",
        f"{table}.at[{ids}].get(mode='fill', fill_value=0.5)",
        f"{table}[jnp.broadcast_to(jnp.arange(N), {ids}.shape)]",
    )
    y = w.keep(w(form), rank + 1)
    if w.chance(0.4):  # tied
        w.keep(w(f"jnp.tanh({y}) @ {table}.T"), rank + 1)


def norm(w):
    rank = w.some(2, 3, 3, 4)
    x = w.value(rank)
    if w.chance(0.3):
        x = w.keep(w(f"{x} + {w.value(rank)}"), rank)
    centred = w.chance(0.45)
    keep, eps = "axis=-1, keepdims=True", w.some("1e-6", "1e-5", "0.01", "0.0")
    h = mean = x
    if centred:
        mean = w(f"jnp.mean({x}, {keep})")
        h = w(f"{x} - {mean}")
    which = w.rng.integers(6)
    if which == 0 and centred:
        var = w(f"jnp.var({x}, {keep})")
    elif which == 1 and centred:
        var = w(f"jnp.mean({x} * {x}, {keep}) - {mean} * {mean}")
    elif which == 2:
        var = w(f"jnp.sum({h} * {h}, {keep}) / {w.some('N', '4.0', 'N', '3.0')}")
    elif which == 3:
        var = w(f"jnp.mean({h} ** 2, {keep})")
    else:
        var = w(f"jnp.mean(jnp.square({h}), {keep})")
    root = w.some(
        lambda: w(f"{h} * lax.rsqrt({var} + {eps})"),
        lambda: w(f"{h} / jnp.sqrt({var} + {eps})"),
        lambda: w(f"{h} * ({var} + {eps}) ** -0.5"),
        lambda: w(f"{h} * (1.0 / jnp.sqrt({var} + {eps}))"),
    )
    y = root()
    which = w.rng.integers(8)
    if which <= 2:
        y = w(f"{y} * {w.arg('float', 1)}")
    elif which == 3:
        y = w(f"{y} * (1.0 + {w.arg('float', 1)})")
    elif which == 4 and rank > 2:
        y = w(f"{y} * (1.0 + {w.arg('float', 2)}[:, None])")
    elif which == 5:
        y = w(f"{y} * {w.arg('float', w.some(1, 2, rank))}")
    if w.chance(0.3):
        y = w(f"{y} + {w.arg('float', w.some(1, 1, 1, 2, rank))}")
    if w.chance(0.1):
        y = w(f"{y} * jax.nn.silu({w.value(rank)})")
    w.keep(y, rank)


ACTIVATIONS = (
    "jax.nn.silu({0})",
    "jax.nn.silu({0})",
    "jax.nn.gelu({0})",
    "jax.nn.gelu({0}, approximate=False)",
    "jax.nn.relu({0})",
    "({0} * jax.nn.sigmoid({0}))",
    "({0} / (1.0 + jnp.exp(-{0})))",
    "jnp.square(jax.nn.relu({0}))",
    "(0.5 * {0} * (1.0 + jnp.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} ** 3))))",
    "jnp.tanh({0})",
    "jnp.maximum({0}, 0.0)",
)


def product(w, x, kernel=None):
    kernel = kernel or w.arg("float", 2)
    return w(f"{x} @ {kernel}" if w.chance(0.7) else f"{x} @ {kernel}.T")


def mlp(w):
    rank, w.narrow = w.some(2, 3, 3), True
    x = w.value(rank)
    if w.chance(0.2):
        norm(w)
        x = w.value(rank)
    g = product(w, x)
    if w.chance(0.3):
        g = w(f"{g} + {w.arg('float', 1)}")
    h = w(w.some(*ACTIVATIONS).format(g))
    if w.chance(0.65):
        u = product(w, x)
        h = w(f"{h} * {u}" if w.chance(0.5) else f"{u} * {h}")
    y = product(w, h)
    if w.chance(0.3):
        y = w(f"{y} + {w.some(x, w.arg('float', 1))}")
    w.keep(y, rank)


INDICES = "::2", "1::2", "::-2", "1:3", "2:", "np.array([0, 2])", "np.array([3, 1])"
WRONG = "np.array([1, 1])", "np.array([-1, 0])", "np.array([2, 5])", "np.array([-6, 0])"


def indexing(w):
    rank = w.some(1, 2, 2, 3)
    x = w.value(rank)
    for _ in range(w.some(1, 1, 2)):
        index = w.some(*INDICES, *WRONG) if w.chance(0.3) else w.some("::2", "1::2")
        at = w.some(f"..., {index}", index, f"..., {index}")
        part = w.value(rank)
        part = w(f"{part}[{at.replace(index, w.some(index, ':2', '::2'))}]")
        if w.chance(0.2):
            part = w.number(0, 1.5)
        call = w.some(*["set"] * 5, "add", "add", "min", "max")
        x = w(f"{x}.at[{at}].{call}({part})")
    if w.chance(0.2):
        x = w(f"{x} + {x}[..., np.array([{w.some('3, 2, 1, 0', '0, 1, 2, 3', '1, 1, 0, 9')}])]")
    w.keep(x, rank)


def residual(w):
    rank = w.some(2, 3, 3)
    w.keep(w(f"{w.value(rank)} + {product(w, w.value(rank))}"), rank)


PARTS = (
    *(attention, attention, attention, loss, loss, loss, norm, norm, mlp, mlp),
    *(lookup, indexing, residual),
)

# ---------------------------------------------------------------- changes

INSERTED = (
    "lax.stop_gradient({0})",
    "lax.stop_gradient({0})",
    "{0}.astype(np.float32).astype(F)",
    "jnp.swapaxes({0}, 0, -1)",
    "jnp.swapaxes({0}, -1, -2)",
    "jnp.roll({0}, 1, axis=-1)",
    "{0}[..., ::-1]",
    "{0} * 0.5",
    "{0} * -1.0",
    "{0} + 1.0",
    "{0} * 1e-4",
    "jnp.tanh({0})",
    "jnp.abs({0})",
    "jnp.clip({0}, -0.5, 0.5)",
    "{0} * jnp.arange(N)",
    "{0} * jnp.arange(N)[:, None]",
    "{0} * jnp.tril(jnp.ones((N, N)))",
    "jnp.where(jnp.tril(jnp.ones((N, N), bool)), {0}, 0.0)",
    "{0} - jnp.mean({0}, axis=-1, keepdims=True)",
    "{0} / jnp.sum({0}, axis=-1, keepdims=True)",
    "jnp.flip({0}, 0)",
    "jax.jit(lambda x: x * 2.0)({0})",
    "0.5 * {0} + 0.5 * lax.stop_gradient({0})",
    "{0} * np.float64(0.7)",
    "{0} + {1}",
    "{0} * {1}",
)


def change(w, program):
    """Changes a program in one place."""
    rng, lines = w.rng, program.lines
    i = int(rng.integers(len(lines)))
    name, expression = lines[i].split(" = ", 1)
    before = [*program.args, *(line.split(" = ")[0] for line in lines[:i])]
    reads = [m for m in re.finditer(r"\b[a-z]\d+\b", expression)]
    which = rng.integers(10)
    if which <= 2:
        one = w.some(*INSERTED).format(name, w.some(*before))
        lines.insert(i + 1, f"{name} = {one}")
    elif which == 3 and reads:  # replace one operand by a function of it
        m = w.some(*reads)
        one = w.some(*INSERTED).format(m[0], w.some(*before))
        lines[i] = f"{name} = {expression[: m.start()]}({one}){expression[m.end() :]}"
    elif which == 4 and reads:  # another operand
        m = w.some(*reads)
        lines[i] = f"{name} = {expression[: m.start()]}{w.some(*before)}{expression[m.end() :]}"
    elif which == 5:
        axes = [j for j, line in enumerate(lines) if "axis=" in line]
        if axes:
            j = w.some(*axes)
            lines[j] = re.sub(r"axis=-?\d", f"axis={w.some(-2, 0, 1, -1)}", lines[j])
    elif which == 6:
        found = [
            (j, m)
            for j, line in enumerate(lines)
            for m in re.finditer(r"(?<![\w.])\d+\.\d+(?![\w.])|-1e\d+|-2e4|\b1e-\d", line)
        ]
        if found:
            j, m = w.some(*found)
            by = w.some("0.0", "1.0", "-1.0", "0.3", "3.0", "-1e4", "1e-3", "-2e4")
            lines[j] = lines[j][: m.start()] + by + lines[j][m.end() :]
    elif which == 7:
        found = [
            (j, m) for j, line in enumerate(lines) if (m := re.search(r'"([\w,]+->\w+)"', line))
        ]
        if found:
            j, m = w.some(*found)
            letters = [*m[1]]
            places = [k for k, letter in enumerate(letters) if letter.isalpha()]
            a, b = w.some(*places), w.some(*places)
            letters[a], letters[b] = letters[b], letters[a]
            lines[j] = lines[j].replace(m[1], "".join(letters))
    elif which == 8:
        program.results.append(name)
    elif reads:
        lines[i] = f"{name} = {w.some(*reads)[0]}"


WRAPPERS = {
    "": 70,
    "f = jax.jit(f)": 6,
    "f = jax.checkpoint(f)": 6,
    "f = jax.vmap(f)": 8,
    "g = f; f = lambda *x: lax.cond(x[0].sum() < 9, g, lambda *x: g(*x), *x)": 2,
    "g = f; f = lambda *x: lax.scan(lambda c, x: (c, g(*x)), 0.0, x)[1]": 2,
}


def write(seed) -> Program:
    """The program of a number."""
    w = Writer(seed)
    for _ in range(w.some(1, 1, 1, 2, 2, 3)):
        w.some(*PARTS)(w)
    results = [w.made[-1][0], *(name for name, _ in w.made[:-1] if w.chance(0.3))]
    program = Program(seed, w.lines, w.args, results, not w.narrow)
    for _ in range(w.some(0, 0, 1, 1, 1, 2, 2, 3)):
        change(w, program)
    chances = np.array([*WRAPPERS.values()]) / sum(WRAPPERS.values())
    program.wrapper = str(w.rng.choice([*WRAPPERS], p=chances))
    return program


# ---------------------------------------------------------------- comparing


class Invalid(Exception):
    """A program that JAX refuses, or without a finite result."""


def run(program):
    """Compares a program with `fuse` of it; returns the served sites.

    Gradients of results with NaN or Inf are not compared.

    Raises:
      Invalid: if the program itself fails.
      AssertionError: if it is served wrong.
    """
    with jax.enable_x64(program.wide):
        args = program.arguments()
        both_ways = fuse_cases.evaluated(fuse_cases.both_ways)
        if "jit" in program.wrapper:
            # In one program XLA makes a select of a product with a mask, which hides NaN.
            both_ways = lambda f, args: fuse_cases.both_ways(jax.jit(f), args)
        try:
            function = program.function()
            want = both_ways(function, args)
        except Exception as error:
            raise Invalid(str(error)) from error
        fused = fuse_cases.Fused(function, serves=False)
        got = both_ways(fused, args)
        try:
            fuse_cases.check(got, want, function, args, program.rounding, strict=False)
        except AssertionError as error:
            error.add_note(str(fused))
            raise
    return fused.served()


def run_many(seeds, show=print):
    """Runs programs; returns those that fail, and counts."""
    counts, failed = collections.Counter(), []
    with small_vocabularies(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = write(seed)
            try:
                served = run(program)
                counts["programs"] += 1
                counts["programs with a site"] += bool(served)
                counts.update(served)
            except Invalid:
                counts["invalid"] += 1
            except Exception as error:
                failed.append(seed)
                notes = "\n".join(getattr(error, "__notes__", ()))
                where = "" if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
                said = f"{type(error).__name__}: {str(error)[:1500]}"
                show(f"\nFAILED: seed {seed}\n{program}{said}\n{notes}\n{where}")
    return failed, counts


@contextlib.contextmanager
def small_vocabularies():
    """Serves losses of a few classes, which users' functions keep as they are."""
    smallest, losses.SMALLEST = losses.SMALLEST, 2
    try:
        yield
    finally:
        losses.SMALLEST = smallest


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first program")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of programs to run")
    given = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    begun, total, bad = time.perf_counter(), collections.Counter(), []
    every = given.only or range(given.seed, given.seed + given.programs)
    for first in range(0, len(every), 100):
        failed, counts = run_many(every[first : first + 100])
        jax.clear_caches()
        total += counts
        bad += failed
        spent = time.perf_counter() - begun
        print(f"{spent:6.0f} s, {len(bad)} wrong, {dict(total)}", flush=True)
    print("wrong:", sorted(bad) or "none")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
