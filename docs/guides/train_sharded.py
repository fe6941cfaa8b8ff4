"""Train on a mesh.

First a step of your own with normfuse's operations in it, then the trainer that comes with it.

Run it: `python docs/guides/train_sharded.py`. It needs the extra `train`, and
emulates eight devices; on eight GPUs the same code runs unchanged. CI checks every statement below.
"""

import os
import tempfile
from pathlib import Path

# Set before JAX is imported. On a machine with eight devices leave this out.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from normfuse import dense, rms_norm
from normfuse.train.cli import main

# 1. Your own step. The operations partition themselves, as jnp's do: rows of x over "data", the
#    kernel's columns over "tensor", and x stays where it is.
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
x = put(jax.random.normal(jax.random.key(0), (32, 64)), "data")
parameters = {
    "scale": put(jnp.ones(64)),
    "kernel": put(jax.random.normal(jax.random.key(1), (64, 256)) / 8, None, "tensor"),
}


def loss(parameters, x):
    hidden = rms_norm(x, parameters["scale"], implementation="native")
    return jnp.mean(dense(hidden, parameters["kernel"], activation="silu") ** 2)


step = jax.jit(jax.value_and_grad(loss)).lower(parameters, x).compile()
value, gradient = step(parameters, x)
assert gradient["kernel"].sharding.spec == P(None, "tensor")
assert "all-gather" not in step.as_text() and "all-reduce" in step.as_text()

# 2. The trainer, `normfuse train …` in a shell, has a flag for each axis of the mesh. "data" holds
#    copies, "fsdp" stores parameters and optimizer state in pieces, "tensor" splits heads and
#    hidden features. On every mesh the losses are those of one device within 1e-5.
with tempfile.TemporaryDirectory() as folder:
    text = Path(folder) / "text.txt"
    text.write_text("the scale of the norm and the norm of the row\n" * 500)
    flags = f"""--data.path {text} --out-dir {folder}/run --steps 4 --seq-len 32
        --mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --checkpoint.every 2
        --model.dim 32 --model.num-layers 1 --model.head-dim 8 --model.mlp-dim 64
        --eval.tokens 64 --eval.final-tokens 64""".split()
    assert main(["train", *flags]) == 0

    # 3. Stop it whenever you like (a signal saves a checkpoint). The same command continues, also
    #    on another mesh or with another number of devices or processes, because the text that a
    #    step reads depends on seed and step alone. Here: four more steps, no tensor parallelism.
    flags = " ".join(flags).replace("--steps 4", "--steps 8").replace("tensor 2", "tensor 1")
    flags = flags.replace("--mesh.data 2", "--mesh.data 4").split()
    assert main(["train", *flags]) == 0

# 4. For several hosts, see docs/guides/distributed.md.
