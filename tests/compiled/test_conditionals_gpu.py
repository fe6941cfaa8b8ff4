"""Steps that `fuse` has changed, compiled for an H200: none waits for the host.

XLA executes a conditional on GPUs by copying what it asks to the host, while the device waits.
"""

import functools
import os
import pathlib
import re

import gpu_compiler
import jax
import jax.numpy as jnp
import pytest
from fuse_cases import Fused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse.native.jax_private import described_cudnn

B, T, H, D, V = 2, 512, 2, 64, 1024
E = H * D
LEAST = jnp.finfo(jnp.bfloat16).min
CAUSAL = jnp.tril(jnp.ones((T, T), bool))
NEAR = CAUSAL & (jnp.arange(T)[:, None] - jnp.arange(T) < 128)


def shown(length):
    return (jnp.arange(T) < length[:, None])[:, None, None]


def rows(tokens):
    keep = (tokens > 0)[:, None]
    return keep[:, :, None] & keep[..., None]


def same(ids):
    return (ids[:, :, None] == ids[:, None])[:, None]


def dropped(p):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, p.shape), p / 0.9, 0)


def learned(table):
    return table[jnp.clip(jnp.arange(T)[:, None] - jnp.arange(T) + 16, 0, 31)].transpose(2, 0, 1)


def added(keep, least=LEAST):
    return jnp.where(keep, 0, least).astype(jnp.bfloat16)


MASKS = {  # functions of scores and of what is known at run time
    "causal": lambda s, x: jnp.where(CAUSAL, s, LEAST),
    "window": lambda s, x: jnp.where(NEAR, s, LEAST),
    "lengths": lambda s, x: jnp.where(shown(x["lengths"]), s, -1e9),
    "lengths, -inf": lambda s, x: jnp.where(shown(x["lengths"]), s, -jnp.inf),
    "padding": lambda s, x: jnp.where((x["tokens"] > 0)[:, None, None], s, LEAST),
    "padding of rows, too": lambda s, x: jnp.where(rows(x["tokens"]), s, LEAST),
    "padding, added": lambda s, x: s + added((x["tokens"] > 0)[:, None, None]),
    "1e9 added": lambda s, x: s + added(rows(x["tokens"]), -1e9),
    "causal and padding, added": lambda s, x: s + added(rows(x["tokens"]) & CAUSAL),
    "packed": lambda s, x: jnp.where(same(x["tokens"]) & CAUSAL, s, LEAST),
    "packed, added": lambda s, x: s + added(same(x["tokens"]) & CAUSAL),
    "a bias": lambda s, x: jnp.where(CAUSAL, s + x["bias"], LEAST),
    "a bias and padding, added": lambda s, x: (
        s + (learned(x["table"]) + added((x["tokens"] > 0)[:, None, None]))
    ),
    "a bias and -1e10": lambda s, x: s + learned(x["table"]) + added(rows(x["tokens"]), -1e10),
}
EACH = 7  # layers of a program


def layer(name, drops, x, given, w):
    with jax.named_scope(re.sub(r"\W+", "_", name)):
        q, k, v = (jnp.reshape(x @ each, (B, T, H, D)) for each in w[:3])
        s = jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5
        p = jax.nn.softmax(MASKS[name](s, given))
        y = jnp.einsum("bhts,bshd->bthd", dropped(p) if drops else p, v)
        return x + y.reshape(B, T, E) @ w[3]


def loss(names, drops, w, given):
    x = w["embed"][given["tokens"]]
    given = given | {"table": w["table"], "bias": w["bias"]}
    for name, own in zip(names, w["layers"], strict=True):
        x = layer(name, drops, x, given, own)
    z = jax.nn.log_softmax((x @ w["embed"].T).astype(jnp.float32))
    picked = jnp.take_along_axis(z, given["tokens"][..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(given["tokens"] > 0, picked, 0)) / jnp.sum(given["tokens"] > 0)


@functools.cache
def mesh():
    return gpu_compiler.mesh((1,), ("x",), axis_types=(AxisType.Auto,))


def conditionals(function, *args):
    """Lines of a step's conditionals, compiled for an H200; and the whole program."""
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh(), P()))
    with jax.set_mesh(mesh()), described_cudnn(91_000):
        step = jax.jit(jax.value_and_grad(function))
        text = gpu_compiler.compile(step, *jax.tree.map(place, args)).as_text()
    return [line for line in text.splitlines() if " conditional(" in line], text


@pytest.mark.parametrize("quantization, drops", [(None, False), ("fp8", True)])
@pytest.mark.parametrize("part", [0, 1])
def test_no_mask_makes_the_host_wait(part, quantization, drops):
    names = [*MASKS][part * EACH : (part + 1) * EACH]
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    w = {"layers": [[of(E, E)] * 4] * EACH, "embed": of(V, E), "table": of(32, H)}
    w["bias"] = of(H, T, T)
    given = {"lengths": of(B, dtype=jnp.int32), "tokens": of(B, T, dtype=jnp.int32)}
    fused = Fused(functools.partial(loss, names, drops), quantization=quantization)
    found, text = conditionals(fused, w, given)
    assert not found, found
    assert fused.served()["attention"] == EACH, str(fused)
    kernels = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    assert len(kernels) >= 2 * EACH


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # theirs
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_no_public_model_waits_for_the_host(quantization, monkeypatch):
    """Those of `benchmarks/foreign_steps.py` that are installed, of one layer."""
    folder = os.environ.get("NORMFUSE_FOREIGN_MODELS", "")
    if not pathlib.Path(folder, "dantinox").is_dir():
        pytest.skip("needs the models that .ci/test installs")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[2] / "benchmarks")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # else importing sets it
    import foreign_steps as steps

    sizes = {"dim": 128, "n_heads": 2, "head_size": 64, "kv_heads": 2}
    case = steps.MODELS["DantinoX decoder 1.2B (nnx)"]
    batch = case.batch(B, T, V)
    make = lambda: case.make(**sizes, **{case.layers: 1, case.vocabulary: V, case.length: T})
    try:
        built = steps.build(make, batch[0])
    except SyntaxError:
        pytest.skip("it is written in a newer Python")
    plain, _ = steps.loss_of(built, case, "theirs")
    fused = Fused(plain, quantization=quantization)
    found = [conditionals(f, built.abstract, batch, built.rest)[0] for f in (plain, fused)]
    assert len(found[1]) <= len(found[0]), found[1]
    assert fused.served().get("attention") == 1, str(fused)
