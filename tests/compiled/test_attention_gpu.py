"""Programs of H200s for attention whose mask is known at run time only."""

import functools
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


def step(mask, dout, *qkv):
    out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, mask=mask), *qkv)
    return out, *pull(dout)


@pytest.fixture(scope="module", params=["an operand", "a constant"])
def computations(request):
    """The instructions of each computation of the program, the entry's under "ENTRY"."""
    mesh = gpu_compiler.mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    of = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
    q, k = (of(jnp.bfloat16, 4, LENGTH, heads, 64) for heads in (32, 8))
    function, masks = step, [of(bool, LENGTH, LENGTH)]
    if request.param == "a constant":  # XLA would take minutes to look at it
        function, masks = functools.partial(step, jnp.tril(jnp.ones((LENGTH, LENGTH), bool))), []
    with described_cudnn(91_000):
        text = gpu_compiler.compile(jax.jit(function), *masks, q, q, k, k).as_text()
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.endswith("{") and (name := re.match(r"(ENTRY )?%?([\w.\-]+) ", line)):
            lines = found.setdefault("ENTRY" if name[1] else name[2], [])
        elif line.startswith(" "):
            lines.append(line)
    return found


def kernels(lines):
    return re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', "\n".join(lines))


def test_a_mask_that_is_causal_costs_one_look_at_it(computations):
    """Forward and backward choose by the same number, and no kernel but the last has the mask."""
    entry = computations["ENTRY"]
    choices = [line for line in entry if " conditional(" in line]
    flags = {re.search(r" conditional\(([^,]+),", line)[1] for line in choices}
    assert len(choices) == 2 and len(flags) == 1
    assert not kernels(entry) and not [
        line for line in entry if re.search(r" copy(-start)?\(", line)
    ]
    squares = [line for line in entry if re.search(rf"= \(?\w+\[[\d,]*{LENGTH},{LENGTH}\]", line)]
    made = [
        line for line in squares if not re.search(r" (constant|parameter|bitcast|tuple)\(", line)
    ]
    assert not made, made  # nothing of its size is kept
    for line, kernel in zip(choices, ("Softmax", "SoftmaxBackward"), strict=True):
        *without, whole = (
            computations[name]
            for name in re.findall(r"%([\w.\-]+)", line[line.index("branch_computations") :])
            if name in computations
        )
        assert kernels(whole) == [f"ScaleBias{kernel}"]
        for lines in without:  # causal, and all keys, without padding and with it
            assert kernels(lines) == [kernel]
            assert not re.search(rf"{LENGTH},{LENGTH}\]", "\n".join(lines))
        assert len(without) == 4


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
