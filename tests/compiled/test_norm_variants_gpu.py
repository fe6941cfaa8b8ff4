"""Norms with a bias or with parameters of examples, compiled for an H200: one pass each way."""

import functools
import re

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import layer_norm, rms_norm

BATCH, TOKENS, FEATURES = 16, 1024, 4096


def struct(shape, dtype):
    mesh = gpu_compiler.mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, P()))


X = functools.partial(struct, (BATCH, TOKENS, FEATURES), "bfloat16")


def forward_and_gradients(fn):
    def run(*operands_and_dy):
        *operands, dy = operands_and_dy
        y, pull = jax.vjp(fn, *operands)
        return y, pull(dy)

    return run


def large_arrays(program) -> list[int]:
    """How many arrays as large as x each operation of the program reads and writes."""
    large = rf"\w+\[{BATCH},{TOKENS},{FEATURES}\]|\w+\[{BATCH * TOKENS},{FEATURES}\]"
    entry = hlo.text(program).split("ENTRY", 1)[1]
    shapes, found = {}, []
    for line in entry.splitlines():
        if not (match := re.match(r"\s*(?:ROOT )?(%\S+) = (.*?) ([\w-]+)\((.*?)\)(?:,|$)", line)):
            continue
        name, type_, kind, operands = match.groups()
        shapes[name] = bool(re.search(large, type_))
        if kind in ("bitcast", "get-tuple-element", "parameter", "tuple"):
            continue
        read = sum(shapes[operand] for operand in re.findall(r"%[\w.-]+", operands))
        if count := read + len(re.findall(large, type_)):
            found.append(count)
    return found


def test_a_bias_costs_no_pass():
    w = struct((FEATURES,), "float32")
    program = gpu_compiler.compile(jax.jit(forward_and_gradients(rms_norm)), X(), w, w, X())
    assert hlo.calls(program) == {"backward": 1, "forward": 1}
    assert large_arrays(program) == [2, 3]


@pytest.mark.parametrize("fn", [rms_norm, layer_norm])
def test_parameters_of_each_example_cost_no_pass(fn):
    own = struct((BATCH, 1, FEATURES), "float32")
    program = gpu_compiler.compile(jax.jit(forward_and_gradients(fn)), X(), own, own, X())
    assert hlo.calls(program, f"{fn.__name__}_") == {"backward": 1, "forward": 1}
    assert large_arrays(program) == [2, 3]
