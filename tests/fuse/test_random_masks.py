"""Expressions of integers, masks and casts: what is proved of them is what XLA computes.

Random programs (`random_masks.py`), programs that were wrong once, and what is proved at all.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fuse import random_masks
from jax import lax

from normfuse.layers.fuse import constants, indices
from normfuse.layers.fuse.program import Program

EACH = 8  # programs, of a dozen expressions each


@pytest.mark.parametrize("first", [0, EACH, 2 * EACH])
def test_random_expressions(first):
    failed, counts = random_masks.run(range(first, first + EACH), uses=6)
    assert not failed
    assert counts["expressions"] > 8 * EACH
    assert counts["constants"] > 3 * EACH and counts["affine"] > EACH and counts["regions"] > 2


BEHIND = "jnp.arange(T)[:, None] >= jnp.arange(T)[None]"
FAULTS = {  # lines of a program; the last mask, indices and floats are used, too
    "a half, cast to an integer": [
        BEHIND,
        'jnp.where(v0, 0.5, 0.0).astype("int32")',
        'v1.astype("bool")',
        "v1 > 0",
    ],
    "a negative number, cast to unsigned": [
        BEHIND,
        'jnp.where(v0, 1.0, -1.0).astype("float32")',
        'v1.astype("uint8")',
        'jnp.full((T, T), -1.5, "float32").astype("uint32")',
        "v2 > 0",
        "v3 > 0",
    ],
    "a float out of an integer's range": [
        'np.array([1e9, 300.0, -300.0, np.nan, np.inf]).astype("float32")',
        'v0.astype("int8")',
        'jnp.full((T, T), np.inf, "float32").astype("int32")',
        "v2 > 0",
    ],
    "integers divided by zero": [
        "lax.div(jnp.full((T,), 7), jnp.full((T,), 0))",
        "lax.div(jnp.arange(T), np.arange(T))",
        "lax.div(jnp.arange(T), jnp.zeros_like(v0))",
        "v1[:, None] >= v2",
    ],
    "integers that wrap": [
        'jnp.arange(T, dtype="int8") + np.int8(125)',
        "v0 - np.int8(3)",
        'jnp.arange(T, dtype="uint8") - np.uint8(1)',
        "lax.neg(v2) * v2",
        "v0[:, None] >= v1",
        "v2 >= v3[:, None]",
    ],
    "divided by what is 0 on some devices": [
        'jnp.arange(T, dtype="float32") / np.float32(1e-40)',
        'jnp.full((T,), 1e-40, "float32") * np.float32(1e38)',
        "v1 > 0",
        'jnp.log(jnp.full((T,), 1e-40, "float32"))',
        'jnp.full((T,), 1e-40, "float32").astype("float64") * 1e30',
    ],
    "integers that float64 has not": [
        "jnp.full((T,), 2**53 + 1)",
        "v0 + 1 - 2**53",
        'np.full(T, 2**63 + 5, "uint64")',
        "v2 >= v2[0]",
        "jnp.arange(T) * (2**62 + 1)",
    ],
    "the complement of an integer": [
        f"({BEHIND}).astype('int32')",
        "lax.bitwise_not(v0)",
        'v1.astype("bool")',
        "(v1 & 1) == 0",
    ],
    "signed and unsigned": [
        'jnp.arange(T, dtype="uint32")',
        'v0 - v0.astype("int8").astype("uint32") - np.uint32(1)',
        "v1[:, None] >= v0",
        'v1.astype("int32") >= 0',
    ],
    "positions from the first": [
        "jnp.arange(T)[None]",
        "v0 - v0[:, :1]",
        "v0[:, -1:] - v0",
        "jnp.arange(T) + jnp.arange(T)[1:2] - 1",
        "v1.reshape(T)[:, None] >= v1",
        "jnp.arange(T)[:, None] >= jnp.arange(T)[2:3]",
    ],
    "a number that a cast overflows": [
        'jnp.where(b, 0.0, -1e9).astype("float16")',
        "v0 == -np.inf",
        "v0 < -60000",
    ],
    "numbers that are no bit": [
        "jnp.where(b, np.array(5).astype('int32'), np.array(2).astype('int32'))",
        'v0.astype("bool")',
        "(v0 & 1).astype('bool')",
        "lax.sign(v0) > 0",
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name):
    with jax.enable_x64(True), np.errstate(all="ignore"):
        w, counts = random_masks.Writer.of(FAULTS[name]), collections.Counter()
        # JAX 0.10's compiler divides constants by zero itself, and ends the process.
        whole = name != "integers divided by zero"
        assert not random_masks.check(w, counts, whole=whole)
        assert not random_masks.check_uses(w, counts)
    assert counts["values"] >= len(FAULTS[name])


EXACT, NEAR, UNKNOWN = "exact", "near", "unknown"
ONES = np.ones((2, 3), np.float32)
CONSTANTS = {  # a function of nothing, and what is known of its result
    "iota": (lambda: lax.iota(np.int8, 128), EXACT),
    "iota that wraps": (lambda: lax.iota(np.int8, 129), UNKNOWN),
    "iota, rounded": (lambda: lax.iota(jnp.bfloat16, 258), UNKNOWN),
    "integers by 0": (lambda: lax.div(lax.iota(np.int32, 3), lax.iota(np.int32, 3)), UNKNOWN),
    "the least by -1": (lambda: lax.div(*np.array([[-128], [-1]], np.int8)), UNKNOWN),
    "the least of abs": (lambda: lax.abs(np.full(2, -128, np.int8)), UNKNOWN),
    "a float by 0": (lambda: lax.div(ONES, np.zeros_like(ONES)), UNKNOWN),
    "a comparison of what is near": (lambda: lax.gt(lax.exp(ONES), ONES), UNKNOWN),
    "a comparison of what is subnormal": (lambda: lax.gt(ONES * 1e-40, 0 * ONES), UNKNOWN),
    "the greater of NaN": (lambda: lax.max(ONES, np.full_like(ONES, np.nan)), UNKNOWN),
    "an integer of a half": (lambda: lax.convert_element_type(ONES * 0.5, np.int32), EXACT),
    "an integer of what is too large": (
        lambda: lax.convert_element_type(lax.mul(ONES, 128 * ONES), np.int8),
        UNKNOWN,
    ),
    "a bfloat16 of 257": (
        lambda: lax.convert_element_type(lax.iota(np.int32, 258), jnp.bfloat16),
        NEAR,
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant(name):
    function, want = CONSTANTS[name]
    with np.errstate(all="ignore"):
        closed = jax.make_jaxpr(function)()
        program = Program(closed)
    (v,) = program.results
    found = program.known(v)
    assert want == (UNKNOWN if found is None else EXACT if found.exact else NEAR)
    if found is not None:
        value = np.asarray(jax.jit(function)())
        assert random_masks.near(found.x, found.exact, value)
        if (number := program.uniform(v)) is not None:
            assert random_masks.near(np.broadcast_to(number.x, value.shape), found.exact, value)


def test_zeros_of_two_signs_are_no_number():
    x = np.array([0.0, -0.0, 0.0], np.float32)
    assert constants.known(x).uniform is None
    assert constants.known(x[:1]).uniform.x == 0 and constants.known(x[:1] * 0).uniform.exact


def test_an_update_of_zeros_of_two_signs():
    """It is no pad of a number, which would lose the signs."""
    base = np.array([0.0, -0.0, -0.0, 0.0], np.float32)
    function = lambda u: jnp.asarray(base).at[::2].set(u)
    u = jnp.ones(2)
    fused = random_masks.fuse_cases.Fused(function, serves=False)
    np.testing.assert_array_equal(np.signbit(fused(u)), np.signbit(function(u)))


def test_proofs_are_linear_in_a_program():
    """Each value is asked about once, though 40 sums of a value with itself have 2**40 paths."""
    visited = collections.Counter()

    def function(x, m):
        for _ in range(40):
            m = m & (x >= x.T)
            x = lax.select(m, x + x, x + x) - x
        return m

    closed = jax.make_jaxpr(function)(jnp.zeros((4, 4), jnp.int32), jnp.ones((4, 4), bool))
    program, read = Program(closed), indices._affine_of

    def spy(program, made, *more):
        visited[made.index] += 1
        return read(program, made, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indices, "_affine_of", spy)
        for equation in program.equations:
            indices.affine(program, equation.outs[0])
            indices.decided(program, equation.outs[0])
    assert visited and max(visited.values()) == 1


def test_no_exception_of_a_rule_escapes(monkeypatch):
    """A rule that fails leaves its constant unknown, and the program is read."""

    def fails(*_):
        raise OverflowError

    monkeypatch.setattr(constants, "RULES", dict.fromkeys(constants.RULES, fails))
    program = Program(jax.make_jaxpr(lambda: jnp.tril(jnp.ones((3, 3))) * 2)())
    assert program.const(program.results[0]) is None
