"""One norm and several products of it in FP8 (attention's q, k, v): values, transformations."""

import functools

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_recipe import (
    arithmetic,
    check_all,
    epilogue,
    norm_gradients,
    normalised,
    product,
    pulled,
    rows,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, rms_norm
from normfuse.layers.dense.norm_dense import apply

pytestmark = pytest.mark.optimized

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, DIM, WIDTHS = (8, 6), 32, (48, 16, 32)


def projections(x, residual, scale, *kernels, biases=(None,) * 3, **options):
    """`[*(norm(x + residual) · kernel for each), x + residual]`; without a residual no sum."""
    options = {"quantization": "fp8", "implementation": None, "eps": 1e-6} | options
    options |= {"dtype": x.dtype.name, "residual": residual}
    return apply(x, scale, kernels, biases, **options)


def both_ways(layer=projections):
    """(args, the gradients of all results) -> (the results, the gradients of args)."""

    def run(args, cotangents):
        results, pull = jax.vjp(layer, *args)
        return results, [g for g in pull(cotangents) if g is not None]

    return run


def operands(rng, dtype=f32, residual=True):
    """The operands, and a gradient of every result."""
    draw = lambda *shape, dtype=dtype: jnp.asarray(rng.standard_normal(shape), dtype)
    kernels = [draw(DIM, width, dtype=f32) / np.sqrt(DIM) for width in WIDTHS]
    args = [draw(*ROWS, DIM), draw(*ROWS, DIM) if residual else None]
    args += [1 + draw(DIM, dtype=f32) / 8, *kernels]
    widths = *WIDTHS, *[DIM] * residual
    return args, [draw(*ROWS, width) for width in widths]


def recipe(args, cotangents, biases=(None,) * 3):
    """(the results, the gradients): what several products read is quantized once."""
    x, residual, scale, *kernels = args
    h, (*dys, dh) = (x, [*cotangents, None]) if residual is None else (x + residual, cotangents)
    n = normalised(h, scale)[2]
    of_bias = lambda bias: None if bias is None else bias.astype(x.dtype)
    ys = [
        epilogue(product(n, kernel, x.dtype), of_bias(bias), None)[0].rounded(x.dtype)
        for kernel, bias in zip(kernels, biases, strict=True)
    ]
    parts = [pulled(n, kernel, rows(dy), x.dtype) for kernel, dy in zip(kernels, dys, strict=True)]
    dn = functools.reduce(lambda a, b: (a + b).rounded(x.dtype), [dn for dn, _ in parts])
    dx, dscale = norm_gradients(dn, h, scale, dh)
    more = residual is not None
    return [*ys, *[rows(h)] * more], [dx, *[dx] * more, dscale, *[dkernel for _, dkernel in parts]]


@pytest.mark.parametrize(
    ("dtype", "residual", "contract", "implementation"),
    [(f32, True, 0, None), (bf16, True, 1, None), (bf16, False, 0, None), (f32, True, 0, "xla")],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_recipe(
    dtype, residual, contract, implementation, rng
):
    args, cotangents = operands(rng, dtype, residual)
    turned = lambda kernels: [kernel.T if contract else kernel for kernel in kernels]
    biases = [jnp.asarray(rng.standard_normal(WIDTHS[0]), f32), None, None]
    options = {"contract": contract, "implementation": implementation, "biases": biases}
    run = jax.jit(both_ways(functools.partial(projections, **options)))
    given = [*args[:3], *turned(args[3:])]
    program = run.lower(given, cotangents).compile()
    ys, gradients = program(given, cotangents)
    assert [y.dtype for y in ys] == [dtype] * len(ys)
    assert [g.dtype for g in gradients[-3:]] == [f32] * 3
    gradients = [*gradients[:-3], *turned(gradients[-3:])]
    check_all([ys, gradients], recipe(args, cotangents, biases))
    if implementation is None:  # three kernels and three gradients have maxima; the norm has none
        norms = {"norm_forward": 1, "norm_backward": 1}
        assert hlo.calls(program, "quantize_") == {"amax": 6, "cast": 7} | norms


@pytest.mark.parametrize("unused", [(0,), (1, 3), (0, 1, 2)], ids=str)
def test_a_result_that_nothing_uses_has_a_gradient_of_zero(unused, rng):
    args, cotangents = operands(rng)
    zeros = [jnp.zeros_like(c) if i in unused else c for i, c in enumerate(cotangents)]
    used = lambda given: [a for i, a in enumerate(given) if i not in unused]
    got = jax.jit(both_ways(lambda *args: used(projections(*args))))(args, used(cotangents))
    want = jax.jit(both_ways())(args, zeros)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("moves", [(0,), (1, 2), (4,), (2, 3, 5), (0, 1, 2, 3, 4, 5)], ids=str)
def test_forward_and_reverse_mode_agree(moves, rng):
    """⟨dy, J t⟩ of both: the reverse differs by its own quantization of dy alone."""
    args, cotangents = operands(rng)
    given = lambda moving: dict(enumerate(args)) | dict(zip(moves, moving))
    f = lambda *moving: projections(*given(moving).values())
    primals = [args[i] for i in moves]
    t = [jnp.asarray(rng.standard_normal(a.shape), a.dtype) for a in primals]
    results, moved = jax.jit(lambda p, t: jax.jvp(f, p, t))(primals, t)
    gradients = jax.jit(lambda p, c: jax.vjp(f, *p)[1](c))(primals, cotangents)
    for a, b in zip(results, jax.jit(projections)(*args), strict=True):
        np.testing.assert_array_equal(a, b)
    if moves == (4,):  # the second kernel's own product, and no other
        assert [bool(jnp.any(d)) for d in moved] == [False, True, False, False]
    forward = sum(jnp.vdot(d, c) for d, c in zip(moved, cotangents, strict=True))
    reverse = sum(jnp.vdot(g, one) for g, one in zip(gradients, t, strict=True))
    size = sum(np.linalg.norm(g) * np.linalg.norm(one) for g, one in zip(gradients, t))
    assert abs(forward - reverse) < 0.02 * size


def test_the_backward_keeps_codes_alone(rng):
    """Of the normalised sum and of kernels; the sum itself, which others read; a float32 a row."""
    args, _ = operands(rng, bf16)
    kept = [(a.size, a.dtype.name) for a in jax.tree.leaves(jax.vjp(projections, *args)[1])]
    x, kernels = args[0].size, [(k.size, "uint8") for k in args[3:]]
    large = [(x, "uint8"), (x, "bfloat16"), *kernels, (DIM, "float32"), (x // DIM, "float32")]
    assert sorted(one for one in kept if one[0] > 1) == sorted(large)


def test_vmap_over_rows_is_one_call_and_over_kernels_a_loop(rng):
    args, cotangents = operands(rng)
    run = jax.jit(both_ways())
    want = run(args, cotangents)
    mapped = jax.jit(both_ways(jax.vmap(projections, (0, 0, *[None] * 4))))
    got = mapped(args, cotangents)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=arithmetic(8 * np.abs(b).max(), 48))
    calls = [hlo.calls(f.lower(args, cotangents).compile(), "quantize_") for f in (run, mapped)]
    assert calls[0] == calls[1]
    stacked = [jnp.stack([k, 3 * k]) for k in args[3:]]
    of_kernels = lambda *kernels: run([*args[:3], *kernels], cotangents)
    got = jax.jit(jax.vmap(of_kernels))(*stacked)
    for i in range(2):
        want = of_kernels(*[k[i] for k in stacked])
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # A sum in another order gives a few numbers the next code; those are 6 % apart.
            assert np.linalg.norm(a[i] - b) < 1e-3 * np.linalg.norm(b)


def test_remat_and_scan_change_nothing(rng):
    args, cotangents = operands(rng)
    want = jax.tree.leaves(jax.jit(both_ways())(args, cotangents))

    def scanned(*args):
        layer = lambda carry, kernels: (carry, projections(*args[:3], *kernels))
        return [y[0] for y in jax.lax.scan(layer, 0, tuple(k[None] for k in args[3:]))[1]]

    for layer in (jax.checkpoint(projections), scanned):
        got = jax.tree.leaves(jax.jit(both_ways(layer))(args, cotangents))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=arithmetic(8 * np.abs(b).max(), 48))


@pytest.mark.parametrize("residual", [True, False])
def test_a_kernel_that_does_not_fit_leaves_the_others_quantized(residual, rng):
    (x, other, scale, *kernels), _ = operands(rng, residual=residual)
    kernels[1] = kernels[1][:, :10]
    got = projections(x, other, scale, *kernels)
    n, *h = rms_norm(x, scale, residual=other) if residual else (rms_norm(x, scale),)
    want = [*(dense(n, kernel, quantization="fp8") for kernel in kernels), *h]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


SPLITS = {  # rows, kernels, the products' rows and columns
    "data": (P("data"), P(), P("data")),
    "fsdp": (P("data"), P("data"), P("data")),
    "tensor": (P("data"), P(None, "tensor"), P("data", None, "tensor")),
    "sequence": (P("data", "tensor"), P(None, "tensor"), P("data", None, "tensor")),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_mesh_gives_the_result_of_one_device(split, rng, eight_devices):
    del eight_devices
    (x, residual, scale, *kernels), (*dys, dh) = operands(rng)
    expected = recipe([x, residual, scale, *kernels], [*dys, dh])
    row, column, out = SPLITS[split]
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))

    def layer(*args):
        *ys, h = projections(*args)
        return [*(jax.lax.with_sharding_constraint(y, out) for y in ys), h]

    with jax.set_mesh(mesh):
        args = [place(x, row), place(residual, row), place(scale, P())]
        args += [place(kernel, column) for kernel in kernels]
        cotangents = [*(place(dy, out) for dy in dys), place(dh, row)]
        compiled = jax.jit(both_ways(layer)).lower(args, cotangents).compile()
        check_all(compiled(args, cotangents), expected)
    gathered = sum(n for (kind, _), n in hlo.communicated(compiled).items() if kind == "all-gather")
    # Codes of each kernel, or of the normalised sum, once for all products, forward and backward.
    assert gathered == {"fsdp": DIM * sum(WIDTHS), "sequence": x.size // 4}.get(split, 0)


def test_explicit_axes_give_the_result_of_one_device(rng, eight_devices):
    del eight_devices
    args, cotangents = operands(rng)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        given = [place(a, P("data") if i < 2 else P()) for i, a in enumerate(args)]
        found = jax.jit(both_ways())(given, [place(c, P("data")) for c in cotangents])
    check_all(found, recipe(args, cotangents))
