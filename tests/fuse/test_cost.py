"""The cost of `fuse` where a function is traced: by calls, not by a clock."""

import collections
import cProfile
import importlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from normfuse import fuse
from normfuse.layers.core.op import Op
from normfuse.layers.fuse.closure import origins_of

fusing = importlib.import_module("normfuse.layers.fuse.fuse")  # its function hides the module

DIM, LAYERS = 80, 3  # a width that no other test has, so that JAX knows none of its programs


def rms(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale).astype(x.dtype)


def loss(layers, x):
    for p in layers:
        y = rms(x, p["norm"])
        q, k, v = (y @ p[name] for name in "qkv")
        scores = (q @ k.mT).astype(jnp.float32) * DIM**-0.5
        x = x + jax.nn.softmax(scores, -1).astype(x.dtype) @ v + p["bias"]
        y = rms(x, p["mlp norm"])
        x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]
    return jnp.mean(x.astype(jnp.float32) ** 2)


def arguments(layers, rows):
    array = jax.ShapeDtypeStruct
    one = {name: array((DIM, DIM), jnp.bfloat16) for name in ("q", "k", "v", "gate", "up", "down")}
    one |= {name: array((DIM,), jnp.float32) for name in ("norm", "mlp norm")}
    one |= {"bias": array((DIM,), jnp.bfloat16)}
    return [one] * layers, array((rows, 16, DIM), jnp.bfloat16)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_equal_layers_are_traced_once(quantization, monkeypatch):
    """JAX traces the definition of each operation once, however many layers have it."""
    counts, plain = collections.Counter(), Op.plain

    def spy(self, spec, *operands):
        counts[self.name] += 1
        return plain(self, spec, *operands)

    monkeypatch.setattr(Op, "plain", spy)

    def definitions(layers, rows):  # other rows: other programs
        reports = []
        fused = fuse(loss, quantization=quantization, report=reports.append)
        counts.clear()
        jax.make_jaxpr(jax.grad(fused))(*arguments(layers, rows))
        served = collections.Counter(row.domain for row in reports[0].fused)
        assert (served["norm"], served["mlp"]) == (2 * layers, layers)
        assert served["codes"] == (2 * layers if quantization else 0)
        del counts["shared"]  # copies of an input, one for each product that reads it
        return dict(counts)

    many = definitions(LAYERS + 2, rows=5)
    assert many == definitions(LAYERS, rows=7)
    assert many or quantization is None  # types are known without definitions


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_reading_and_matching_call_few_functions_for_an_equation(quantization):
    """About 190, in FP8 220, however many layers there are."""

    def calls(layers):
        closed = jax.make_jaxpr(loss)(*arguments(layers, 2))
        origins = origins_of(arguments(layers, 2), {})
        with cProfile.Profile() as profile:
            program = fusing.Program(closed, origins=origins)
            fusing.plan(program, quantization, ())
        return sum(each.callcount for each in profile.getstats()) / len(program.equations)

    few, many = calls(LAYERS), calls(8 * LAYERS)
    assert many <= 1.02 * few
    assert many <= 230
