"""Programs of H200s for attention whose mask is known at run time only."""

import re

import gpu_compiler
import hlo
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import attention
from normfuse.native.jax_private import described_cudnn

LENGTH = 2048


SCORES = 4, 1, LENGTH, LENGTH
MASKS = {  # shapes of extras, other options, and the forward's kernels
    "mask": ({"mask": (LENGTH, LENGTH)}, {}, (2, 1)),  # of `causal`, or with lengths, or itself
    "padding": ({"mask": (4, 1, 1, LENGTH)}, {}, (1, 1)),
    "padding, causal": ({"mask": (4, 1, 1, LENGTH)}, {"causal": True}, (1, 1)),
    "padding, window": ({"mask": (4, 1, 1, LENGTH)}, {"causal": True, "window": 99}, (1, 1)),
    "mask of heads": ({"mask": (32, LENGTH, LENGTH)}, {}, (2, 1)),
    "bias, padding": ({"mask": SCORES, "bias": (LENGTH, LENGTH)}, {}, (0, 3)),
    "lengths": ({"lengths": (4,)}, {"causal": True}, (1, 0)),
    "segments": ({"segment_ids": (4, LENGTH)}, {"causal": True}, (1, 1)),
    "dropout, padding": ({"mask": SCORES, "dropout_mask": (LENGTH, LENGTH)}, {}, (2, 4)),
}


def compiled(name, constant=False):
    """The text of the program of a forward and backward, the bias's gradient included."""
    mesh = gpu_compiler.mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
    shapes, options, _ = MASKS[name]
    dtypes = {"bias": jnp.bfloat16, "segment_ids": jnp.int32, "lengths": jnp.int32}
    extras = {n: of(dtypes.get(n, bool), *shape) for n, shape in shapes.items()}
    if constant:  # XLA would take minutes to look at it
        options, extras = {"mask": jnp.tril(jnp.ones((LENGTH, LENGTH), bool))}, {}
    q, k = (of(jnp.bfloat16, 4, LENGTH, heads, 64) for heads in (32, 8))
    moving = {n: extras.pop(n) for n in ("bias",) if n in extras}

    def step(extras, moving, dout, *qkv):
        call = lambda qkv, moving: attention(*qkv, **moving, **extras, **options)
        out, pull = jax.vjp(call, qkv, moving)
        return out, pull(dout)

    with described_cudnn(91_000):
        return gpu_compiler.compile(jax.jit(step), extras, moving, q, q, k, k).as_text()


def kernels(lines):
    return re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', "\n".join(lines))


@pytest.mark.parametrize("name", MASKS)
def test_no_choice_makes_the_host_wait(name):
    """No kernel is behind a condition, and no loop's end is read from the device."""
    lines = compiled(name).splitlines()
    assert not [line for line in lines if " conditional(" in line]
    assert all("known_trip_count" in line for line in lines if " while(" in line)
    found = kernels(lines)
    assert (found.count("Softmax"), found.count("ScaleBiasSoftmax")) == MASKS[name][2]


@pytest.mark.parametrize("constant", [False, True], ids=["an operand", "a constant"])
def test_a_mask_costs_one_look_at_it(constant):
    """Forward and backward choose by the same flags, and all that is kept of its size is it."""
    lines = compiled("mask", constant).splitlines()
    assert len(squares(lines)) == 1  # a kernel's operand, each way
    assert not [line for line in lines if re.search(r" copy(-start)?\(", line)]


def squares(lines):
    """Arrays of 16 bits that the program makes of all scores."""
    made = [line.split(" fusion(")[0] for line in lines if " fusion(" in line]
    return re.findall(rf"bf16\[[\d,]*{LENGTH},{LENGTH}\]", "\n".join(made))


def test_the_backward_makes_the_masks_of_dropout_again():
    """A layer keeps some arrays like q, and none of 16 bits of all scores."""
    batch, length, heads = 16, 1024, 4
    mesh = gpu_compiler.mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def memory(layers):
        def loss(x, kept, mask):
            for i in range(layers):
                options = {"mask": mask, "dropout_mask": kept[i], "dropout_rate": 0.1}
                x = x + attention(x * 2, x * 3, jnp.sin(x), **options)
            return jnp.sum(x.astype(jnp.float32) ** 2)

        x = of(jnp.bfloat16, batch, length, heads, 64)
        masks = of(bool, layers, length, length), of(bool, batch, 1, 1, length)
        with described_cudnn(91_000):
            program = gpu_compiler.compile(jax.jit(jax.grad(loss)), x, *masks)
        return program.memory_analysis().temp_size_in_bytes

    like_q, scores = 2 * batch * length * heads * 64, 2 * batch * length * length
    assert memory(4) - memory(2) < 2 * (5 * like_q + scores / 2)


@pytest.mark.parametrize(
    "name, kind",
    [("causal", AxisType.Auto), ("mask", AxisType.Explicit), ("segments", AxisType.Auto)],
    ids=str,
)
def test_four_gpus_compute_their_shares_alone(name, kind):
    """Batch and heads are split, and keys and the mask with them; nothing is communicated."""
    mesh = gpu_compiler.mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)

    def of(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    split = P("x", None, "y")
    q, k = (of(jnp.bfloat16, split, 4, LENGTH, heads, 64) for heads in (8, 4))
    extras = {
        "causal": [],
        "mask": [of(bool, P("x"), 4, 1, LENGTH, LENGTH)],
        "segments": [of(jnp.int32, P("x"), 4, LENGTH)],
    }[name]

    def step(q, k, v, dout, *extras):
        options = {"causal": name != "mask"}
        if extras:
            options["mask" if name == "mask" else "segment_ids"] = extras[0]
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return out, *pull(dout)

    places = [a.sharding for a in (q, q, k, k)]
    with jax.set_mesh(mesh), described_cudnn(91_000):
        program = gpu_compiler.compile(
            jax.jit(step, out_shardings=tuple(places)), q, k, k, q, *extras
        )
    text = program.as_text()
    assert kernels(text.splitlines()) and f"bf16[2,{LENGTH},4,64]" in text
    assert not hlo.communicated(program)  # each device chooses its own kernel
