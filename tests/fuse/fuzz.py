"""Random programs for `fuse`: spellings that it knows, put together and changed at random.

    python tests/fuse/fuzz.py --programs 20000 --seed 0
    python tests/fuse/fuzz.py --programs 2000 --mode bfloat16
    python tests/fuse/fuzz.py --programs 2000 --mode fp8

All dimensions have one size, so that every wrong axis and every wrong operand fits. A program is a
few lines of text; changes replace operands, axes, constants, letters of an einsum, or insert a
line: a cast, a `stop_gradient`, a transposition, another reader. Each program is compared with
`fuse` of it, values and gradients, by `fuse_cases.check`. Program number n is the same in each
run: `--only n` runs it again. What fails is printed as text.

A random program may be ill-conditioned: a sum of deviations from a mean, say, is its own rounding,
and a quotient by it any number. Results that differ are compared once more with what rounding of
the operands of products does to the program itself (see `Judge`); those counted as ill-conditioned
differ by no more, and the lines of progress say how many there are.
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
from normfuse.native.jaxpr import evaluate, results_of  # noqa: E402

N = 4  # 16 in FP8, whose products have multiples of it
EXACT = 5e-4
"""The tolerance: a part of an array, or of a tenth of the largest one.

Gradients of attention are differences that cancel, and its probabilities, computed again from a
log-sum-exp, have the rounding of large scores.
"""
ROUNDED = 2.0**-5  # twice the change by a cast to bfloat16 on the way


def hides(seed):
    """Tells if a program may have a row that sees nothing, or one maximum of two stopped.

    The others are what they were before there were such, since tests name some by their numbers.
    """
    return seed % 5 in (2, 4)


@dataclasses.dataclass
class Program:
    """Lines of a function, its arguments (name: kind and rank) and results, and its wrapper."""

    seed: int
    lines: list
    args: dict
    results: list
    wrapper: str = ""

    def __str__(self):
        names = ", ".join(self.args)
        lines = [f"def f({names}):", *self.lines, f"return {', '.join(self.results)},"]
        text = "\n    ".join(lines)
        return f"# {self.args}\n{text}\n{self.wrapper}".rstrip() + "\n"

    def function(self):
        space = dict(jax=jax, jnp=jnp, lax=lax, np=np, N=N, f32=jnp.float32)
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
                found.append(x.astype(jnp.float32))
            elif kind == "mask":
                keep = rng.random(shape) < rng.choice([0.5, 0.8])
                keep = keep | (rng.random() < 0.5) & np.eye(N, dtype=bool)
                if hides(self.seed):
                    keep[..., rng.integers(N), :] &= rng.random() < 0.7
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


class Writer:
    """Writes lines; every random choice is of one generator."""

    def __init__(self, seed):
        self.rng, self.hides = np.random.default_rng(seed), hides(seed)
        self.lines, self.args, self.made, self.results = [], {}, [], []

    def some(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def chance(self, p):
        return self.rng.random() < p

    def rarely(self, p):
        """A chance in programs that may hide rows alone."""
        return self.hides and self.chance(p)

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
    if w.rarely(0.1):  # one of two maxima stopped
        f = w(f"jnp.exp({s} - {other})")
    if w.rarely(0.2):
        keep_of = w(f"jnp.broadcast_to({mask(w)}, {e}.shape)")
        e = f = w(w.some("{1} * {0}", "jnp.where({0}, {1}, 0.0)").format(keep_of, e))
    total = w(f"jnp.sum({f}, {keep})")
    return (e, total) if late and w.rarely(0.5) else w(f"{e} / {total}")


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
        *([f"({behind} >= {w.some(1, 2)})"] if w.hides else []),  # rows that see nothing
        w.arg("mask", 2) if w.chance(0.6) else "jnp.ones((N, N), bool)",
        "({0}[:, None] == {0}) & ({1} >= 0)".format(w.arg("ids", 1), behind),
    )


FILLS = "-1e9", "-1e9", "-1e30", "-jnp.inf", "-1e4", "-2e4", "jnp.finfo(f32).min", "-30.0"


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
            s = w(f"{s} + (1.0 - {keep}.astype(f32)) * {fill}")
        if w.rarely(0.05):
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
        if w.rarely(0.2):  # one of -inf, in a whole row at times
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
    if w.rarely(0.2):  # a masked vocabulary
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
        if w.rarely(0.2):  # one of two maxima stopped
            other = w(f"jnp.max({z}, axis=-1, keepdims=True)")
        lse = w(f"jnp.log(jnp.sum(jnp.exp({z} - {top}), axis=-1)) + {other}[..., 0]")
        pick = w(f"jnp.sum({z} * jax.nn.one_hot({y}, N), axis=-1)")
        l = w(f"{lse} - {pick}")
    if w.chance(0.3):
        weight = w.some(
            w.arg("float", rank - 1), f"({y} >= 0)", f"({y} != 1)", f"{y}.astype(f32)", f"{l}"
        )
        l = w.some(
            lambda: w(f"{l} * {weight}"),
            lambda: w(f"jnp.where({y} >= 0, {l}, 0.0)"),
        )()
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
    rank = w.some(2, 3, 3)
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


PARTS = (attention, attention, attention, loss, loss, norm, norm, mlp, mlp, indexing, residual)

# ---------------------------------------------------------------- changes

INSERTED = (
    "lax.stop_gradient({0})",
    "lax.stop_gradient({0})",
    "{0}.astype(jnp.bfloat16).astype(f32)",
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
        (lookup if w.rarely(0.15) else w.some(*PARTS))(w)
    results = [w.made[-1][0], *(name for name, _ in w.made[:-1] if w.chance(0.3))]
    program = Program(seed, w.lines, w.args, results)
    for _ in range(w.some(0, 0, 1, 1, 1, 2, 2, 3)):
        change(w, program)
    chances = np.array([*WRAPPERS.values()]) / sum(WRAPPERS.values())
    program.wrapper = str(w.rng.choice([*WRAPPERS], p=chances))
    return program


# ---------------------------------------------------------------- comparing


class Invalid(Exception):
    """A program that JAX refuses, or without a finite result."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """The dtype and tolerances by which a program is compared.

    Attributes:
      dtype: of the arguments.
      noise: the relative rounding of what is multiplied.
      rounding: what results may differ by without another look.
    """

    dtype: object = jnp.float32
    noise: float = 2.0**-23
    rounding: float = EXACT
    size: int = 4
    options: dict = dataclasses.field(default_factory=dict)


MODES = {
    "float32": Mode(),
    "bfloat16": Mode(jnp.bfloat16, 2.0**-8, 2.0**-6),
    "fp8": Mode(jnp.float32, 2.0**-4, 2.0**-4, 16, {"quantization": "fp8"}),
}


@jax.custom_jvp
def sloped(x, slope):
    """x, with its derivative times a slope."""
    del slope
    return x


sloped.defjvp(lambda primals, tangents: (primals[0], tangents[0] * primals[1]))


def noisy(function, size, seed, sizes=None, slopes=0.0):
    """The function with noise on its arguments and on the operands of its products.

    `sizes` gets the largest number that each product gives. With `slopes` the derivative of each
    operation has noise of this size, too.
    """

    def call(*args):
        rng = np.random.default_rng([seed, 2])

        def moved(x):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return x * jnp.asarray(1 + size * rng.uniform(-1, 1, x.shape), x.dtype)

        def rough(x):
            if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            return sloped(x, jnp.asarray(1 + slopes * rng.uniform(-1, 1, x.shape), x.dtype))

        def rule(eqn, given):
            given = [*map(rough, given)] if slopes else given
            if eqn.primitive.name in ("jit", "pjit"):
                return evaluate(eqn.params["jaxpr"], given, rule)
            product = eqn.primitive.name == "dot_general"
            results = results_of(eqn, [*map(moved, given)] if product and size else given)
            if product and sizes is not None:
                sizes.append(float(jnp.max(jnp.abs(results[0]), initial=0)))
            return results

        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        found = evaluate(closed, [moved(x) for x in args] if size else args, rule)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return call


class Judge:
    """Decides about results that differ from those of a program: wrong, or ill-conditioned.

    The reference is the program in float64, in float32 where it computes in less. Three times
    its arguments and the operands of its products get random errors of the size that rounding has.
    What that changes, four times, is allowed; where it makes NaN of a number, everything is.

    A gradient of attention is a difference of products that cancel: p · (g - Σ p · g), which is 0
    where one p is 1. Errors of the operands leave it 0, while each sum has its own rounding, which
    a large scale of the scores then multiplies: hence errors of each operation's derivative. Its
    probabilities are computed again: of scores s they have errors of eps · |s|, which that does
    not show.

    In bfloat16 XLA keeps float32 between the operations that it compiles as one program, and where
    they run one by one each result is rounded. `fuse` inlines a jit: the program has both errors.
    """

    def __init__(self, program, mode, args):
        self.function, self.mode, self.args = program.function(), mode, args
        self.seed = program.seed

    def is_right(self, got, want, attends):
        mode, args = self.mode, self.args
        wide = mode.dtype == jnp.float32 and not mode.options
        dtype = jnp.float64 if wide else jnp.float32
        run = lambda f: fuse_cases.both_ways(f, fuse_cases.cast(args, dtype))
        with jax.enable_x64(True) if wide else contextlib.nullcontext():
            try:
                exact = run(fuse_cases.traced(self.function))
            except Exception:  # a carry, say, that the function casts to float32
                exact, dtype = want, jnp.float32
            eps = min(mode.noise, float(jnp.finfo(mode.dtype).eps))
            moved = [
                run(noisy(self.function, mode.noise, self.seed + i, slopes=eps)) for i in range(3)
            ]
        own = [want]
        if mode.dtype == jnp.bfloat16:
            single = noisy(self.function, 0, 0)  # one operation at a time
            own += [fuse_cases.both_ways(f, args) for f in (single, jax.jit(self.function))]
        sizes = []
        noisy(self.function, 0, 0, sizes)(*args)
        for k in (0, 1):
            floor = fuse_cases.floor_of(exact[k])
            error = lambda a, k=k, floor=floor: fuse_cases.errors(a, exact[k], floor)
            try:
                change = np.max([error(m[k]) for m in moved], axis=0)
                theirs = np.max([error(one[k]) for one in own], axis=0)
            except AssertionError:
                return True  # NaN or not: rounding decides
            recomputed = mode.noise * max(sizes, default=0) if k and attends else 0
            allowed = 4 * (np.asarray(theirs) + change + recomputed) + mode.rounding
            try:
                if not (np.asarray(error(got[k])) <= allowed).all():
                    return False
            except AssertionError:
                return False
        return all(map(np.array_equal, got[2], want[2]))


def run(program, strict=False, mode="float32", counts=None):
    """Compares a program with `fuse` of it; returns the served sites.

    Unless it is `strict`, gradients of results with NaN or Inf are not compared.

    Raises:
      Invalid: if the program itself fails.
      AssertionError: if it is served wrong.
    """
    mode = MODES[mode]
    args = fuse_cases.cast(program.arguments(), mode.dtype)
    try:
        function = program.function()
        want = fuse_cases.both_ways(fuse_cases.traced(function), args)
    except Exception as error:
        raise Invalid(str(error)) from error
    fused = fuse_cases.Fused(function, **mode.options)
    got = fuse_cases.both_ways(fused, args)
    fuse_cases.check_types(got, want)
    rounding = max(ROUNDED if "bfloat16" in str(program) else 0, mode.rounding)
    try:
        for name, a, b in zip(("values", "gradients"), got[:2], want[:2]):
            finite = all(np.isfinite(y).all() for y in want[0])
            if name == "values" or finite or strict:
                found = fuse_cases.errors(a, b, fuse_cases.floor_of(b))
                assert max(found, default=0) <= rounding, f"{name} differ by {found}"
        for a, b in zip(got[2], want[2], strict=True):
            np.testing.assert_array_equal(a, b)
    except AssertionError as error:
        attends = "attention" in fused.served()
        if Judge(program, mode, args).is_right(got, want, attends):
            if counts is not None:
                counts["ill-conditioned"] += 1
        else:
            error.add_note(str(fused))
            raise
    return fused.served()


def run_many(seeds, show=print, **options):
    """Runs programs; returns those that fail, and counts."""
    counts, failed = collections.Counter(), []
    with small_vocabularies(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = write(seed)
            try:
                served = run(program, counts=counts, **options)
                counts["programs"] += 1
                counts["programs with a site"] += bool(served)
                counts.update(served)
            except Invalid:
                counts["invalid"] += 1
            except Exception as error:
                failed.append((seed, error))
                notes = "\n".join(getattr(error, "__notes__", ()))
                where = "" if isinstance(error, AssertionError) else traceback.format_exc(limit=-3)
                said = str(error)[:1500]
                kind = type(error).__name__
                show(f"\nFAILED: seed {seed}\n{program}{kind}: {said}\n{notes}\n{where}")
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
    parser.add_argument("--mode", choices=MODES, default="float32")
    parser.add_argument("--show", action="store_true", help="print the programs, too")
    parser.add_argument("--strict", action="store_true", help="compare gradients of NaN and Inf")
    given = parser.parse_args()
    global N
    N = MODES[given.mode].size
    jax.config.update("jax_disable_most_optimizations", True)
    begun, total, bad = time.perf_counter(), collections.Counter(), []
    every = given.only or range(given.seed, given.seed + given.programs)
    for first in range(0, len(every), 100):
        if given.show:
            print(*map(write, every[first : first + 100]), sep="\n")
        failed, counts = run_many(every[first : first + 100], strict=given.strict, mode=given.mode)
        jax.clear_caches()
        total += counts
        bad += [seed for seed, _ in failed]
        spent = time.perf_counter() - begun
        print(f"{spent:6.0f} s, {len(bad)} wrong, {dict(total)}", flush=True)
    print("wrong:", sorted(bad) or "none")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
