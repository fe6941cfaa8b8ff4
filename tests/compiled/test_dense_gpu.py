"""Programs of dense layers compiled for an H200: memory and passes."""

import functools
import re

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from dense_layers import LAYERS, MOVED, both_ways, kernel_shapes, project
from hlo import Gemm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import accumulate_gradients, gated_product

f32, bf16 = jnp.float32, jnp.bfloat16
TOKENS, DIM, HIDDEN = 16384, 4096, 14336
WIDE, LARGE = 2 * TOKENS * DIM, 2 * TOKENS * HIDDEN  # bytes of x, and of the hidden layer
SMALL = 2**23  # of all that is a row or a column, and of cuBLAS's workspace


def struct(sharding, *shape, dtype=bf16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@functools.cache
def compiled(layer, version):
    """The layer forward and backward."""
    mesh = gpu_compiler.mesh((1,), ("a",), axis_types=(AxisType.Auto,))
    of = functools.partial(struct, NamedSharding(mesh, P()))
    kernels = [of(*shape) for shape in kernel_shapes(layer, DIM, HIDDEN)]
    with jax.set_mesh(mesh):
        args = (of(TOKENS, DIM), of(DIM, dtype=f32), *kernels)
        run = jax.jit(both_ways(LAYERS[layer][version]))
        return gpu_compiler.compile(run, args, of(TOKENS, kernels[-1].shape[1]))


def temporaries(program):
    return program.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "layer, version, floor",
    [
        ("norm + dense", "normfuse", WIDE),  # the normalised x
        ("norm + gelu MLP", "native", 2 * LARGE),  # the product and its activation, or gradients
        ("norm + SwiGLU MLP", "native", 3 * LARGE),  # gate, up, and what is made of them
        ("norm + SwiGLU MLP", "native, hidden kept", 3 * LARGE),
    ],
)
def test_temporaries_are_what_must_be_there_together(layer, version, floor):
    assert temporaries(compiled(layer, version)) <= floor + SMALL


@pytest.mark.parametrize("layer, version", MOVED)
def test_nothing_but_our_kernels_passes_over_memory(layer, version):
    passes = hlo.passes(compiled(layer, version))
    ours = ("rms_norm_", "epilogue_", "column_sum")
    assert all(kernel.startswith(ours) for kernel, _ in passes), passes
    wide, large = MOVED[layer, version]
    must = wide * WIDE + large * LARGE
    assert must <= sum(moved for _, moved in passes) <= must + 2 * SMALL


def test_products_of_one_input_add_their_gradients_in_the_gemm():
    gemms = hlo.gemms(compiled("norm + SwiGLU MLP", "native"))
    assert len(gemms) == 9
    assert [g for g in gemms if g.beta] == [Gemm(f"bf16[{TOKENS},{DIM}]", 1, in_place=True)]


@pytest.mark.parametrize("layer", LAYERS)
def test_gemms_are_those_of_plain_jax(layer):
    version = "native" if "MLP" in layer else "normfuse"
    ours, plain = (map(str, hlo.gemms(compiled(layer, v))) for v in (version, "jnp"))
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


def main_gradients(program):
    """The GEMMs that write a kernel's gradient."""
    shapes = (f"[{DIM},{HIDDEN}]", f"[{HIDDEN},{DIM}]")
    return sorted(
        (g for g in hlo.gemms(program) if g.result.endswith(shapes)),
        key=lambda g: -int(g.result.startswith(f"f32[{HIDDEN}")),
    )


def test_float32_kernels_in_a_scan_add_in_the_gemm():
    program = accumulated(scanned, f32)
    down, *ups = main_gradients(program)
    assert down == Gemm(f"f32[{HIDDEN},{DIM}]", 1, in_place=True)
    assert ups == [Gemm(f"f32[{DIM},{HIDDEN}]", 1, in_place=True)] * 2
    shapes = rf"\[({DIM},{HIDDEN}|{HIDDEN},{DIM})\]"
    assert not re.search(rf"= \w+{shapes}\S* add\(", program.as_text())  # in no pass of its own


@pytest.mark.parametrize("devices", [1, 8])
def test_main_gradients_are_added_in_the_gemm_and_reduced_once(devices):
    replicas = "data" if devices > 1 else None

    def run(params, xs):
        return accumulate_gradients(loss, params, xs, replicas=replicas)[1]

    program = accumulated(run, bf16, devices)
    found = main_gradients(program)
    assert {g.result.split("[")[0] for g in found} == {"f32"}
    # The first microbatch's, and those that the loop adds to them.
    assert sorted((g.beta, g.in_place) for g in found) == [(0, False)] * 3 + [(1, True)] * 3, found
    text = program.as_text()
    shapes = rf"f32\[(\d+,)?({DIM},{HIDDEN}|{HIDDEN},{DIM})\]"
    passes = re.findall(rf"= {shapes}\S* (copy|broadcast|add|multiply)\(", text)
    # The mean alone, in one pass for each kernel; a step's optimizer makes it a part of its own.
    assert sorted(kind for *_, kind in passes) == ["broadcast"] * 3 + ["multiply"] * 3
    after = hlo.collectives(text[text.index("\nENTRY") :])
    assert hlo.collectives(program) == after  # none in the loop over microbatches
    assert {c.kind for c in after} == ({"all-reduce"} if devices > 1 else set())
    assert sum(c.bytes for c in after) == (4 * (DIM + 3 * DIM * HIDDEN) if devices > 1 else 0)
    # Three hidden arrays, x and its like, and cuBLAS's workspace; and one kernel's sum beside its
    # mean, which this program returns.
    bytes = (6 * HIDDEN + 12 * DIM) * ROWS + 2**25 + SMALL
    assert temporaries(program) <= bytes + 4 * DIM * HIDDEN
