"""A gated MLP as one function in FP8: the recipe, transformations, meshes."""

import functools

import fp8_reference
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_recipe import (
    Near,
    arithmetic,
    check_all,
    epilogue,
    exact,
    norm_gradients,
    normalised,
    product,
    rows,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import fuse, rms_norm
from normfuse.layers.dense import gated
from normfuse.layers.quantization.gated import SLOPES

f32, bf16 = jnp.float32, jnp.bfloat16
ROWS, DIM, HIDDEN = (8, 6), 32, 48


def named(kernels):
    """Those of gate, up and down; two are of an MLP without a gate."""
    return dict(zip(("gate", "up", "down")[-len(kernels) :], kernels))


def mlp(x, *kernels, contract=0, implementation=None, activation="silu", **options):
    kernels = named(kernels)
    options |= {"dtype": x.dtype, "implementation": implementation, "activation": activation}
    return gated.mlp(x, kernels, {}, quantization="fp8", contract=contract, **options)


def both_ways(layer=mlp):
    def run(args, dy):
        y, pull = jax.vjp(layer, *args)
        return y, list(pull(dy))

    return run


def operands(rng, dtype=f32, kernel_dtype=f32):
    draw = lambda *shape, over=1.0: jnp.asarray(rng.standard_normal(shape) / over)
    kernels = [draw(*s, over=np.sqrt(s[0])) for s in [(DIM, HIDDEN)] * 2 + [(HIDDEN, DIM)]]
    x, dy = draw(*ROWS, DIM).astype(dtype), draw(*ROWS, DIM).astype(dtype)
    return [x, *(kernel.astype(kernel_dtype) for kernel in kernels)], dy


def largest(near: Near) -> Near:
    """The maximum of |near|, which is one of those that may be the largest."""
    at = np.unravel_index(np.argmax(np.abs(near.value)), near.value.shape)
    return Near(np.abs(near.value[at]), near.slack[at])


def limit(near: Near, of: Near, steepest=1.0) -> Near:
    """A bound of |near|, computed of what the codes of `of` say: these are off by 16 scales."""
    scale = fp8_reference.scale(largest(of).value, fp8_reference.E4M3)
    return largest(near) + exact(np.float32(16 * steepest) * scale)


def recipe(args, dy, x=None, biases=()):
    """(y, gradients): nothing between the products is rounded before it is quantized.

    The gradients are those at what the codes of a and b say.
    `x` is what is read, if not the first of args; the gradients of biases are the last ones.
    """
    given, *kernels, down = args
    dtype, x = given.dtype, rows(given) if x is None else x
    arrays = [product(x, kernel, dtype) for kernel in kernels]
    added = [(a + exact(bias.astype(dtype))).rounded(dtype) for a, bias in zip(arrays, biases)]
    a, *up = added or arrays
    b = up[0] if up else exact(np.float32(1))
    value, slope = epilogue(a, None, "silu")
    h = value * b if up else value
    y = (h.quantized() @ exact(down).quantized()).rounded(dtype)
    g = rows(dy).quantized()
    dh = (g @ exact(down).quantized().T).rounded(dtype)
    steepest = np.float32(SLOPES["silu"])
    bounds = [
        largest(dh) * (limit(b, b) if up else b) * exact(steepest),
        largest(dh) * limit(value, a, steepest),
    ]
    kept, first = a.quantized(), largest(h)
    b = b.quantized() if up else b
    value, slope = epilogue(kept, None, "silu")
    h = value * b if up else value
    most = 448 * fp8_reference.scale(first.value, fp8_reference.E4M3)
    h = Near(np.clip(h.value, -most, most), h.slack).quantized(first)
    ddown = (h.T @ g).rounded(down.dtype)
    dx, gradients, sums = [], [], []
    for d, kernel, bound in zip((dh * b * slope, dh * value), kernels, bounds):
        codes = d.quantized(bound)
        dx.append((codes @ exact(kernel).quantized().T).rounded(dtype))
        gradients.append((x.quantized().T @ codes).rounded(kernel.dtype))
        sums.append(codes.sum(0).rounded(kernel.dtype))
    dx = (dx[0] + dx[1]).rounded(dtype) if up else dx[0]
    return y, [dx, *gradients, ddown, *sums[: len(biases)]]


@pytest.mark.parametrize(
    "dtypes, contract", [((f32, f32), 1), ((bf16, f32), 0), ((bf16, bf16), 1)], ids=str
)
def test_values_and_gradients_are_those_of_the_recipe(dtypes, contract, rng):
    args, dy = operands(rng, *dtypes)
    expected = recipe(args, dy)
    given = [args[0], *(k.T if contract else k for k in args[1:])]
    run = jax.jit(both_ways(functools.partial(mlp, contract=contract)))
    y, (dx, *kernels) = run(given, dy)
    assert [k.dtype for k in kernels] == [dtypes[1]] * 3 and dx.dtype == y.dtype == dtypes[0]
    check_all([y, [dx, *(k.T if contract else k for k in kernels)]], expected)


def test_an_mlp_without_a_gate_follows_the_recipe(rng):
    (x, _, *kernels), dy = operands(rng, bf16)
    given = [x, *(k.T for k in kernels)]
    run = jax.jit(both_ways(functools.partial(mlp, contract=1)))
    compiled = run.lower(given, dy).compile()
    y, (dx, *found) = compiled(given, dy)
    found = [dx, *(k.T for k in found)]
    check_all([y, found], recipe([x, *kernels], dy))
    # For x, two kernels, a, the hidden array, dy and its gradient; none reads what another wrote.
    assert hlo.calls(compiled, "quantize_")["amax"] == 7
    assert not any("epilogue" in name for name in hlo.calls(compiled, ""))


def biased(x, *operands, activation="silu", **options):
    """The MLP of two or three kernels, and as many biases less one."""
    count = len(operands) // 2 + 1
    kernels, biases = named(operands[:count]), dict(zip(("gate", "up"), operands[count:]))
    if count == 2:
        biases = {"up": operands[2]}
    options |= {"dtype": x.dtype, "implementation": None, "activation": activation}
    return gated.mlp(x, kernels, biases, quantization="fp8", **options)


def with_biases(rng, count, dtype=f32):
    """x, `count` kernels and their biases; dy."""
    (x, *kernels), dy = operands(rng, dtype)
    biases = [jnp.asarray(rng.standard_normal(HIDDEN), f32) for _ in range(count - 1)]
    return [x, *kernels[-count:], *biases], dy


@pytest.mark.parametrize("count, dtype", [(2, f32), (3, bf16)], ids=str)
def test_biases_follow_the_recipe(count, dtype, rng):
    """Added before anything is rounded to codes; their gradients are sums of codes."""
    args, dy = with_biases(rng, count, dtype)
    expected = recipe(args[: count + 1], dy, biases=args[count + 1 :])
    compiled = jax.jit(both_ways(biased)).lower(args, dy).compile()
    check_all(compiled(args, dy), expected)
    assert hlo.calls(compiled, "quantize_")["amax"] == (7 if count == 2 else 10)


@functools.partial(fuse, quantization="fp8")
def norm_mlp(x, residual, scale, *kernels):
    """The MLP of a norm, and what is normalised."""
    if residual is None:
        return mlp(rms_norm(x, scale), *kernels), x
    n, h = rms_norm(x, scale, residual=residual)
    return mlp(n, *kernels), h


def norm_recipe(args, dy, dh):
    """((y, h), gradients) for the gradients dy of y and dh of h = x + residual."""
    x, residual, scale, *kernels = args
    h = x if residual is None else x + residual
    y, (dn, *found) = recipe([h, *kernels], dy, normalised(h, scale)[2])
    dx, dscale = norm_gradients(dn, h, scale, dh)
    dresidual = [] if residual is None else [dx]
    return (y, rows(h)), [dx, *dresidual, dscale, *found]


@pytest.mark.parametrize("dtype, has_residual", [(f32, False), (bf16, True)])
def test_a_norm_before_it_writes_codes(dtype, has_residual, rng):
    """One pass adds, normalises and quantizes by the norm's bound; the sum is there for others."""
    (x, *kernels), dy = operands(rng, dtype)
    scale = jnp.asarray(1 + rng.standard_normal(DIM) / 8, f32)
    residual = operands(rng, dtype)[1] if has_residual else None
    dh = operands(rng, dtype)[1]
    args = [x, residual, scale, *kernels]

    def run(args, cotangents):
        results, pull = jax.vjp(norm_mlp, *args)
        return results, [g for g in pull(cotangents) if g is not None]

    compiled = jax.jit(run).lower(args, (dy, dh)).compile()
    check_all(compiled(args, (dy, dh)), norm_recipe(args, dy, dh))
    # Three kernels, h, a, b, f(a), dy and dh have maxima; the norm has none.
    assert hlo.calls(compiled, "quantize_")["amax"] == 3 + 4 + 2
    assert "apply" not in hlo.calls(compiled)
    y, _ = jax.jit(norm_mlp)(*args)
    np.testing.assert_array_equal(y, compiled(args, (dy, dh))[0][0])


@pytest.mark.parametrize("activation", ["gelu_tanh", "tanh", "squared_relu"])
def test_any_activation_is_near_its_unquantized_self(activation, rng):
    """That one whose slope has no bound is computed layer by layer."""
    args, dy = operands(rng)
    options = {"dtype": f32, "implementation": None, "activation": activation}
    plain = lambda x, *kernels: gated.mlp(x, named(kernels), {}, **options)
    layers = functools.partial(mlp, activation=activation), plain
    found, wanted = (jax.tree.leaves(jax.jit(both_ways(layer))(args, dy)) for layer in layers)
    for got, want in zip(found, wanted, strict=True):
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert 0.01 < error < 0.15


def test_vmap_over_rows_is_one_call(rng):
    args, dy = operands(rng)
    whole = jax.jit(both_ways()).lower(args, dy).compile()
    want = jax.tree.leaves(whole(args, dy))

    def mapped(x, *kernels):
        return jax.vmap(lambda x: mlp(x, *kernels), 1, 1)(x)

    compiled = jax.jit(both_ways(mapped)).lower(args, dy).compile()
    for a, b in zip(jax.tree.leaves(compiled(args, dy)), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=arithmetic(8 * np.abs(b).max(), 48))
    assert hlo.calls(compiled, "quantize_") == hlo.calls(whole, "quantize_")


def test_frozen_kernels_and_inputs_cost_nothing(rng):
    """Nothing is kept or computed that no gradient needs."""
    args, dy = operands(rng)
    lowered = lambda f: jax.jit(f).lower(dy).as_text().count("dot_general")
    of_x = lambda dy: jax.vjp(lambda x: mlp(x, *args[1:]), args[0])[1](dy)
    of_down = lambda dy: jax.vjp(lambda d: mlp(*args[:3], d), args[3])[1](dy)
    assert lowered(of_x) == 2 + 3  # a and b; dh and both parts of dx
    assert lowered(of_down) == 2 + 1


def test_not_finite_and_zero_inputs(rng):
    args, _ = operands(rng)
    assert not np.any(mlp(jnp.zeros_like(args[0]), *args[1:]))
    y = np.array(mlp(args[0].at[1, 2, 3].set(jnp.inf), *args[1:]))
    assert np.isnan(y[1, 2]).all()
    y[1, 2] = 0
    assert np.isfinite(y).all()


SPLITS = {
    "data": (P("data"), P(), P()),
    "fsdp": (P("data"), P("data"), P(None, "data")),
    "tensor": (P("data"), P(None, "tensor"), P("tensor")),
    "sequence": (P("data", "tensor"), P(None, "tensor"), P("tensor")),
}


@pytest.mark.parametrize("split", SPLITS)
def test_a_mesh_gives_the_result_of_one_device(split, rng, eight_devices):
    del eight_devices
    (x, gate, up, down), dy = operands(rng)
    row, column, second = SPLITS[split]
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    hidden = P("data") if split in ("data", "fsdp") else P("data", None, "tensor")
    layer = functools.partial(mlp, hidden_sharding=hidden)
    with jax.set_mesh(mesh):
        args = [place(x, row), place(gate, column), place(up, column), place(down, second)]
        compiled = jax.jit(both_ways(layer)).lower(args, place(dy, row)).compile()
        found = compiled(args, place(dy, row))
    check_all(found, recipe([x, gate, up, down], dy))
    gathered = sum(n for (kind, _), n in hlo.communicated(compiled).items() if kind == "all-gather")
    # Codes of each kernel, or of x and dy, once for forward and backward.
    assert gathered == {"fsdp": 3 * DIM * HIDDEN, "sequence": 2 * x.size // 4}.get(split, 0)
