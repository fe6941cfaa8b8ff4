"""What an H200 would run for dense layers, from programs compiled for it: memory and passes."""

import functools
import re

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from hlo import Gemm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients, dense, gated_product, norm_dense, norm_gated_dense
from normfuse.layers.implementation import order_of
from normfuse.layers.producers import Normalised
from normfuse.layers.recomputed import products

f32, bf16 = jnp.float32, jnp.bfloat16
TOKENS, DIM, HIDDEN = 16384, 4096, 14336
WIDE, LARGE = 2 * TOKENS * DIM, 2 * TOKENS * HIDDEN  # bytes of x, and of the hidden layer
SMALL = 2**23  # of all that is a row or a column, and of cuBLAS's workspace


def rms(x, scale):
    wide = x.astype(f32)
    rstd = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * rstd * scale).astype(x.dtype)


def project(x, scale, *kernels):
    """The products of the normalised x, which is not kept."""
    return products(Normalised(1e-6, 0.0, "bfloat16", order_of(True)), (x, scale), kernels)


OURS = {
    "dense": norm_dense,
    "gelu": lambda x, s, w, d: gated_product(norm_dense(x, s, w), None, d, activation="gelu_tanh"),
    "gelu, hidden kept": lambda x, s, w, d: dense(norm_dense(x, s, w, activation="gelu_tanh"), d),
    "SwiGLU": lambda x, s, w, u, d: gated_product(*project(x, s, w, u), d),
    "SwiGLU, hidden kept": lambda x, s, w, u, d: dense(norm_gated_dense(x, s, w, u), d),
}
PLAIN = {
    "dense": lambda x, s, w: rms(x, s) @ w,
    "gelu": lambda x, s, w, d: jax.nn.gelu(rms(x, s) @ w) @ d,
    "SwiGLU": lambda x, s, w, u, d: (jax.nn.silu((n := rms(x, s)) @ w) * (n @ u)) @ d,
}


def struct(sharding, *shape, dtype=bf16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@functools.cache
def both_ways(name, plain=False):
    """The result, and then every gradient: as in training, dy is not known before y is."""
    kind = name.split(",")[0]
    layer = PLAIN[kind] if plain else OURS[name]

    def run(args, dy):
        y, pull = jax.vjp(layer, *args)
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, pull(dy)

    mesh = gpu_compiler.mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    of = functools.partial(struct, NamedSharding(mesh, P()))
    kernels = [of(DIM, HIDDEN)] * (1 + (kind == "SwiGLU"))
    out = HIDDEN if kind == "dense" else DIM
    kernels += [of(HIDDEN, DIM)] * (kind != "dense")
    with jax.set_mesh(mesh):
        args = (of(TOKENS, DIM), of(DIM, dtype=f32), *kernels)
        return gpu_compiler.compile(jax.jit(run), args, of(TOKENS, out))


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "name, floor",
    [
        ("dense", WIDE),  # the gradient of the normalised x, or the normalised x again
        ("gelu", 2 * LARGE),  # the product and its activation, or the gradients of both
        ("gelu, hidden kept", 2 * LARGE),
        ("SwiGLU", 3 * LARGE),  # gate, up, and what is made of them
        ("SwiGLU, hidden kept", 3 * LARGE),
    ],
)
def test_temporaries_are_what_must_be_there_together(name, floor):
    assert temporaries(both_ways(name)) <= floor + SMALL


@pytest.mark.parametrize("name", ["gelu", "SwiGLU"])
def test_an_mlp_needs_three_quarters_of_the_memory_of_plain_jax(name):
    assert temporaries(both_ways(name)) <= 0.75 * temporaries(both_ways(name, plain=True))


@pytest.mark.parametrize(
    "name, wide, large",
    [
        ("dense", 7, 0),
        ("gelu", 7, 6),
        ("gelu, hidden kept", 7, 5),
        ("SwiGLU", 7, 9),
        ("SwiGLU, hidden kept", 7, 8),
    ],
)
def test_nothing_but_our_kernels_passes_over_memory(name, wide, large):
    """The norm reads and writes x twice, once again for the backward, which reads two and writes
    one; after the product each array is read and written once each way."""
    passes = hlo.passes(both_ways(name))
    ours = ("rms_norm_", "epilogue_", "column_sum")
    assert all(kernel.startswith(ours) for kernel, _ in passes), passes
    must = wide * WIDE + large * LARGE
    assert must <= sum(moved for _, moved in passes) <= must + 2 * SMALL


@pytest.mark.parametrize("name", ["dense", "gelu, hidden kept", "SwiGLU, hidden kept"])
def test_less_passes_over_memory_than_in_plain_jax(name):
    moved = lambda program: sum(moved for _, moved in hlo.passes(program))
    assert moved(both_ways(name)) < moved(both_ways(name, plain=True))


def test_products_of_one_input_add_their_gradients_in_the_gemm():
    gemms = hlo.gemms(both_ways("SwiGLU"))
    assert len(gemms) == 9
    assert [g for g in gemms if g.beta] == [Gemm(f"bf16[{TOKENS},{DIM}]", 1, in_place=True)]


@pytest.mark.parametrize("name", ["dense", "gelu", "SwiGLU"])
def test_gemms_are_those_of_plain_jax(name):
    ours, plain = (map(str, hlo.gemms(both_ways(name, plain))) for plain in (False, True))
    assert sorted(ours) == sorted(plain)


# ---------------------------------------------------------------- accumulation

COUNT, ROWS = 8, 1024


def loss(params, x):
    scale, gate, up, down = params
    return jnp.sum((x + gated_product(*project(x, scale, gate, up), down)).astype(f32) ** 2)


def scanned(params, xs):
    """The way users write it."""

    def add(sums, x):
        return jax.tree.map(lambda s, g: s + g.astype(f32), sums, jax.grad(loss)(params, x)), None

    return jax.lax.scan(add, jax.tree.map(lambda p: jnp.zeros(p.shape, f32), params), xs)[0]


def accumulated(fn, dtype, devices=1):
    mesh = gpu_compiler.mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
    of = functools.partial(struct, NamedSharding(mesh, P()), dtype=dtype)
    params = of(DIM, dtype=f32), of(DIM, HIDDEN), of(DIM, HIDDEN), of(HIDDEN, DIM)
    xs = struct(NamedSharding(mesh, P(None, "data")), COUNT, devices * ROWS, DIM)
    with jax.set_mesh(mesh):
        return gpu_compiler.compile(jax.jit(fn), params, xs)


def main_gradients(compiled):
    """The GEMMs that write a kernel's gradient."""
    shapes = (f"[{DIM},{HIDDEN}]", f"[{HIDDEN},{DIM}]")
    return sorted(
        (g for g in hlo.gemms(compiled) if g.result.endswith(shapes)),
        key=lambda g: -int(g.result.startswith(f"f32[{HIDDEN}")),
    )


def test_float32_kernels_in_a_scan_add_in_the_gemm():
    compiled = accumulated(scanned, f32)
    down, *ups = main_gradients(compiled)
    assert down == Gemm(f"f32[{HIDDEN},{DIM}]", 1, in_place=True)
    assert ups == [Gemm(f"f32[{DIM},{HIDDEN}]", 1, in_place=True)] * 2
    shapes = rf"\[({DIM},{HIDDEN}|{HIDDEN},{DIM})\]"
    assert not re.search(rf"= \w+{shapes}\S* add\(", compiled.as_text())  # in no pass of its own


@pytest.mark.parametrize("devices", [1, 8])
def test_main_gradients_are_added_in_the_gemm_and_reduced_once(devices):
    replicas = "data" if devices > 1 else None

    def run(params, xs):
        return accumulate_gradients(loss, params, xs, replicas=replicas)[1]

    compiled = accumulated(run, bf16, devices)
    found = main_gradients(compiled)
    assert [(g.beta, g.in_place) for g in found] == [(1, True)] * 3, found
    program = compiled.as_text()
    after = hlo.collectives(program[program.index("\nENTRY") :])
    assert hlo.collectives(compiled) == after  # none in the loop over microbatches
    assert {c.kind for c in after} == ({"all-reduce"} if devices > 1 else set())
    assert sum(c.bytes for c in after) == (4 * (DIM + 3 * DIM * HIDDEN) if devices > 1 else 0)
    # Three hidden arrays, x and its like, and cuBLAS's workspace: nothing of a kernel's size.
    assert temporaries(compiled) <= (6 * HIDDEN + 12 * DIM) * ROWS + 2**25 + SMALL
