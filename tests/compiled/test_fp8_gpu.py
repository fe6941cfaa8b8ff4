"""Programs compiled for an H200 that multiply in FP8."""

import collections
import functools
import re

import foreign_blocks
import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, fuse, rms_norm
from normfuse.layers.dense import gated
from normfuse.layers.quantization import kernel_codes_saveable
from normfuse.native.jax_private import described_cudnn

e4m3 = jnp.float8_e4m3fn
f32, bf16 = jnp.float32, jnp.bfloat16
M, N, K = 2048, 1024, 512
in_fp8 = functools.partial(fuse, quantization="fp8")


def struct(*shape, dtype=e4m3):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P()))


@functools.cache
def mesh():
    return gpu_compiler.mesh((1,), ("a",), axis_types=(AxisType.Auto,))


def compiled(run, *args, donate=()):
    with jax.set_mesh(mesh()):
        return gpu_compiler.compile(jax.jit(run, donate_argnums=donate), *args)


def calls(program) -> list[tuple[str, int, bool]]:
    """(result, beta, in place) of each product, all of which must be FP8."""
    targets = re.findall(r'custom_call_target="(__cublas[^"]*)"', program.as_text())
    assert set(targets) == {"__cublas$lt$matmul$f8"}, targets
    return [(g.result, g.beta, g.in_place) for g in hlo.gemms(program)]


# ---------------------------------------------------------------- a whole MLP

TOKENS, DIM, HIDDEN = 16384, 4096, 14336


def gated_mlp(x, scale, gate, up, down):
    """The same norm and MLP by `GatedMLP`."""
    kernels = {"gate": gate, "up": up, "down": down}
    options = {"dtype": x.dtype, "implementation": None, "activation": "silu"}
    return gated.mlp(rms_norm(x, scale), kernels, {}, quantization="fp8", **options)


def test_main_gradients_of_a_scan_are_added_in_the_products():
    dim, hidden = 2048, 8192

    def loss(params, x):
        return jnp.sum(gated_mlp(x, *params).astype(f32) ** 2)

    def run(params, xs):
        def add(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, x)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)[0]

    shapes = (dim,), (dim, hidden), (dim, hidden), (hidden, dim)
    params = tuple(struct(*shape, dtype=f32) for shape in shapes)
    program = compiled(run, params, struct(4, TOKENS, dim, dtype=bf16))
    kernels = [call for call in calls(program) if call[0].startswith("f32")]
    up, down = f"f32[{dim},{hidden}]", f"f32[{hidden},{dim}]"
    assert sorted(kernels) == [(up, 1, True), (up, 1, True), (down, 1, True)]


# ---------------------------------------------------------------- dense(quantization="fp8")

SMALL = 2**23  # bytes of all that is a row or a column


def apart(layer, **options):
    """(args, dy) -> the result and all gradients: dy is not known before the result is."""

    def run(args, dy):
        y, pull = jax.vjp(functools.partial(layer, quantization="fp8", **options), *args)
        y, dy = jax.lax.optimization_barrier((y, dy))
        return y, pull(dy)

    return run


def quantized(dtype=f32, **options):
    """The program of a dense layer of bfloat16 arrays, forward and backward."""
    args = [struct(TOKENS, DIM, dtype=bf16), struct(DIM, HIDDEN, dtype=dtype)]
    args += [struct(HIDDEN, dtype=dtype)] * options.pop("has_bias", False)
    return compiled(apart(dense, **options), tuple(args), struct(TOKENS, HIDDEN, dtype=bf16))


NORMS = ["quantize_norm", "rms_norm_backward"]


def check_quantized(program, others, *operands, normalised=0):
    """Each of `operands`, (elements, bytes of one), is read twice and written once in two layouts.

    With `normalised` bytes one pass normalises and writes codes.

    No product widens its codes, and nothing but our kernels passes over memory, of which those that
    are not the quantizer's have the names `others`.
    """
    text = program.as_text()
    assert not re.search(r" (dot|convolution)\(", text)
    found = hlo.passes(program)
    large = [(name, moved) for name, moved in found if moved > SMALL]
    assert {name for name, _ in large} == {"quantize_amax", "quantize_cast", *others}, large
    quantizer = [moved for name, moved in large if name.startswith("quantize_")]
    expected = [size * width for size, width in operands]
    expected += [size * (width + 2) for size, width in operands] + [normalised] * bool(normalised)
    for moved, must in zip(sorted(quantizer), sorted(expected), strict=True):
        assert must <= moved <= must + SMALL // 64
    assert not re.search(r"= f8\w+\[\d+,\d+\]\S* (transpose|copy|fusion|convert)\(", text)


H_STRUCT = functools.partial(struct, TOKENS, HIDDEN, dtype=bf16)
X, H, KERNEL = TOKENS * DIM, TOKENS * HIDDEN, DIM * HIDDEN


@pytest.mark.parametrize("dtype", [f32, bf16], ids=["float32", "bfloat16"])
def test_a_dense_layer_is_three_fp8_products(dtype):
    program, name = quantized(dtype), {f32: "f32", bf16: "bf16"}[dtype]
    results = [f"bf16[{TOKENS},{HIDDEN}]", f"bf16[{TOKENS},{DIM}]", f"{name}[{DIM},{HIDDEN}]"]
    assert sorted(calls(program)) == sorted((result, 0, False) for result in results)
    check_quantized(program, [], (X, 2), (KERNEL, dtype(0).itemsize), (H, 2))
    assert min(moved for _, moved in hlo.passes(program)) > 1000  # nothing multiplies scales


def test_kernels_with_a_scale_each_are_one_fp8_product():
    """The scales of vmapped kernels multiply its result, since cuBLASLt takes one."""
    x, kernels = struct(4, M, K, dtype=bf16), struct(4, K, N, dtype=f32)
    program = compiled(jax.vmap(functools.partial(dense, quantization="fp8")), x, kernels)
    assert calls(program) == [(f"bf16[4,{M},{N}]", 0, False)]


def test_what_follows_an_fp8_product_is_one_pass_each_way():
    program = quantized(has_bias=True, activation="silu")
    assert len(calls(program)) == 3
    check_quantized(program, ["epilogue_forward", "epilogue_backward"], (X, 2), (KERNEL, 4), (H, 2))


def test_a_norm_and_a_gated_mlp_are_codes_between_their_products():
    """One pass reads x and the residual, whose sum it writes, and nothing else makes codes of it.

    Between nine products one pass over a and b finds maxima, and two write codes. In the backward
    one pass makes dx of what was normalised; of the normalised x there are codes.
    """

    def layer(*args, **options):
        x, branch, scale, gate, up, down = args
        kernels = {"gate": gate, "up": up, "down": down}
        options |= {"dtype": "bfloat16", "implementation": None, "activation": "silu"}
        n, h = rms_norm(x, scale, residual=branch)
        return gated.mlp(n, kernels, {}, contract=1, **options), h

    x, scale = struct(TOKENS, DIM, dtype=bf16), struct(DIM, dtype=f32)
    kernels = [struct(*s, dtype=f32) for s in [(HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN)]]
    program = compiled(apart(in_fp8(layer)), (x, x, scale, *kernels), (x, x))
    found = calls(program)
    rows, wide = f"bf16[{TOKENS},{DIM}]", f"bf16[{TOKENS},{HIDDEN}]"
    gradients = [f"f32[{k.shape[0]},{k.shape[1]}]" for k in kernels]
    assert sorted(r for r, _, _ in found) == sorted([rows] * 3 + [wide] * 3 + gradients)
    assert [call for call in found if call[1]] == [(rows, 1, True)]  # both parts of dx
    passes = [(name, moved) for name, moved in hlo.passes(program) if moved > SMALL]
    moved = {name: sorted(m // 2**20 for n, m in passes if n == name) for name, _ in passes}
    size = lambda elements, width: elements * width // 2**20
    assert moved.pop("quantize_norm") == [size(X, 8)]
    (backward,) = moved.pop("rms_norm_backward")  # dn, what was normalised, dx; dh
    assert 0 <= backward - size(X, 8) <= SMALL // 2**20
    assert moved.pop("copy") == [size(X, 4)]  # x and the residual have one gradient
    assert moved == {
        "quantize_amax": sorted([size(X, 2)] + [size(KERNEL, 4)] * 3 + [size(H, 2)]),
        "quantize_cast": sorted([size(X, 4)] + [size(KERNEL, 6)] * 3),
        "quantize_gated_amax": [size(H, 4)],
        "quantize_gated": [size(H, 4 + 3), size(H, 4 + 5)],
    }


def test_codes_that_remat_keeps_are_not_copied():
    """They are bytes between the passes, and FP8 again in the products, without a pass."""

    def layer(x, kernel, **options):
        run = functools.partial(dense, activation="silu", **options)
        return jax.checkpoint(run, policy=kernel_codes_saveable)(x, kernel)

    program = compiled(
        apart(layer), (struct(TOKENS, DIM, dtype=bf16), struct(DIM, HIDDEN, dtype=f32)), H_STRUCT()
    )
    assert len(calls(program)) == 4  # the forward once more
    large = [(name, moved) for name, moved in hlo.passes(program) if moved > SMALL]
    ours = {"quantize_amax", "quantize_cast", "epilogue_forward", "epilogue_backward"}
    assert {name for name, _ in large} == ours
    kernels = [m for name, m in large if name == "quantize_cast" and m // KERNEL == 6]
    assert len(kernels) == 1


@pytest.mark.parametrize(
    "kind, split", [(AxisType.Auto, P(None, "data")), (AxisType.Explicit, P("data"))], ids=str
)
def test_a_kernel_split_over_the_devices_of_rows_is_gathered_as_codes(split, kind):
    """FSDP: a byte an element for both ways, and a maximum of one number for each operand."""
    devices = gpu_compiler.mesh((8,), ("data",), axis_types=(kind,))
    rows = P("data")
    of = lambda *shape, dtype=bf16, spec=rows: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(devices, spec)
    )
    args = (of(TOKENS, DIM), of(DIM, HIDDEN, dtype=f32, spec=split)), of(TOKENS, HIDDEN)
    with jax.set_mesh(devices):
        out = (args[1].sharding, tuple(a.sharding for a in args[0]))
        program = gpu_compiler.compile(jax.jit(apart(dense), out_shardings=out), *args)
    assert len(calls(program)) == 3
    moved = hlo.communicated(program)
    gathered = {key: count for key, count in moved.items() if key[0] == "all-gather"}
    assert sum(gathered.values()) == KERNEL
    assert all(dtype in ("f8e4m3fn", "u8", "s8") for _, dtype in gathered), gathered
    assert moved["reduce-scatter", "f32"] == KERNEL // 8
    # The maximum of the kernel is reduced as an integer, so that it waits for no other.
    assert (moved["all-reduce", "f32"], moved["all-reduce", "s32"]) == (2, 1)


def foreign(cls, *sizes):
    """The programs of a fused model: forward, and forward and backward."""
    graph, state = nnx.split(nnx.eval_shape(lambda: cls(*sizes, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(state)
    state = jax.tree.unflatten(tree, [struct(*leaf.shape, dtype=leaf.dtype) for leaf in leaves])
    # A product that is a result is not multiplied in FP8: it may be logits.
    model = lambda state, x: jax.lax.optimization_barrier(nnx.merge(graph, state)(x))
    apply = fuse(model, quantization="fp8")

    def run(state, x, dys):
        y, pull = jax.vjp(apply, state, x)
        y, dys = jax.lax.optimization_barrier((y, dys))
        return y, pull(dys)

    x = struct(TOKENS, DIM, dtype=bf16)
    dys = jax.tree.map(lambda a: struct(*a.shape, dtype=a.dtype), jax.eval_shape(apply, state, x))
    return compiled(apply, state, x), compiled(run, state, x, dys)


def test_fused_norms_of_a_foreign_model_write_the_codes_of_its_linears():
    """No amax and no cast of the norm's output: 4 bytes an element forward, for 12 (with a
    gradient 4 + 2, for 14), and one backward of the norm."""
    forward, program = foreign(foreign_blocks.Projections, DIM)
    assert hlo.calls(forward, "") == {
        "quantize_amax": 3,
        "quantize_cast": 3,
        "quantize_norm": 1,
    }
    (moved,) = [moved for name, moved in hlo.passes(forward) if name == "quantize_norm"]
    assert 3 * X <= moved <= 3 * X + SMALL // 64  # x and q: no qt without a gradient
    found = calls(program)
    assert len(found) == 9
    # The three gradients of its result are added up in the products.
    assert [call for call in found if call[1]] == [(f"bf16[{TOKENS},{DIM}]", 1, True)] * 2
    check_quantized(program, NORMS, *[(X, 2)] * 3, *[(DIM * DIM, 4)] * 3, normalised=4 * X)


ROWS, WIDTH = (64, 196), 1024


@pytest.mark.parametrize("adaptive", [False, True], ids=["ViT", "DiT"])
def test_a_fused_block_of_a_vision_transformer_is_codes_between_products(adaptive):
    """Norms, and the MLP's passes over 4 · WIDTH features, write what the products read."""
    model = foreign_blocks.VitBlock(16)
    x = struct(*ROWS, WIDTH, dtype=bf16) if not adaptive else struct(64, 256, WIDTH, dtype=bf16)
    given = x, *[struct(64, WIDTH, dtype=bf16)] * adaptive
    like = lambda a: struct(*a.shape, dtype=a.dtype)
    params = jax.tree.map(like, jax.eval_shape(model.init, jax.random.key(0), *given))
    block = lambda *args: jax.lax.optimization_barrier(model.apply(*args))
    with described_cudnn(91_000):
        program = compiled(
            apart(lambda *args, quantization: fuse(block, quantization=quantization)(*args)),
            (params, *given),
            x,
        )
    assert sum("$f8" in line for line in program.as_text().splitlines() if "__cublas" in line) == 18
    found = hlo.calls(program, "")
    assert (found["quantize_norm"], found["layer_norm_backward"]) == (2, 2)
    # Six kernels, dy of six products but that of the activation, and what attention gives.
    assert (found["quantize_cast"], found["quantize_gated"]) == (6 + 5 + 1, 2)
    large = x.size
    passes = [(name, moved) for name, moved in hlo.passes(program) if moved >= 6 * large]
    others = collections.Counter(name for name, _ in passes)
    assert others.pop("quantize_gated") == 2 and others.pop("quantize_gated_amax") == 1
    hidden = sorted(moved // large for name, moved in passes if name == "quantize_gated")
    assert hidden == [4 * (2 + 2), 4 * (3 + 3)]
    # XLA's own: the first residual addition, the two of the backward and attention's kernels.
    assert others["fusion"] <= 5 and not others["wrapped_add"]
