"""FP8 in an nnx model, in an Equinox model, and in the trainer.

Run it: `python docs/guides/fp8.py`. It needs the extra `train`. CI checks every statement below, on
a CPU: it quantizes to the same FP8 numbers as a GPU does, and multiplies them in the compute dtype.
FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell).
"""

import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import normfuse
from normfuse.layers import nnx as ours_nnx
from normfuse.layers.quantization import kernel_codes_saveable
from normfuse.train.cli import main

x = jax.random.normal(jax.random.key(0), (32, 64))
y = jnp.sin(3 * x)
distance = lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


# 1. A model of yours: `fuse` the function that you differentiate. Every product with a parameter
#    multiplies in FP8, forward and backward, except those that should not: logits, routers,
#    products of few rows. Parameters, optimizer and checkpoints are the model's own: scales follow
#    from the arrays of each step, so there is no state to carry.
class Block(nnx.Module):
    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.up = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


model = Block(64, rngs=nnx.Rngs(0))
reports = []
objective = lambda model, x, y: jnp.mean((model(x) - y) ** 2)
fused = ours_nnx.fuse(objective, quantization="fp8", report=reports.append)
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
    loss, gradient = nnx.value_and_grad(fused)(model, x, y)
    optimizer.update(model, gradient)
    return loss


losses = [float(step(model, optimizer)) for _ in range(30)]
assert losses[-1] < 0.7 * losses[0]

#    The report says which products are FP8, and which norms write the codes that these read.
#    fp8.py:39  norm 32 x 64, float32               rms_norm
#    fp8.py:39  product 32 x 64 -> 256, float32     dense, fp8
#    fp8.py:39  mlp 32 x 256 -> 64, silu, float32   gated_product, fp8
#    fp8.py:39  codes of rms_norm float32[32,64]    1 × dense
print(reports[0])
assert {"norm", "mlp", "codes"} <= {row.domain for row in reports[0].fused}

# 2. A layer whose kernel has a dimension that is not a multiple of 16 multiplies in the compute
#    dtype, and so does a layer without `quantization`. Logits are best left so.
odd = ours_nnx.Linear(64, 20, quantization="fp8", rngs=nnx.Rngs(1))
plain = ours_nnx.Linear(64, 20, rngs=nnx.Rngs(1))
np.testing.assert_array_equal(odd(x), plain(x))

# 3. An Equinox model. Examples that are vmapped over one model are one product, and share a scale.
mlp = eqx.nn.MLP(64, 64, width_size=128, depth=1, key=jax.random.key(1))
loss = lambda model, x, y: jnp.mean((jax.vmap(model)(x) - y) ** 2)
run = lambda loss: eqx.filter_jit(eqx.filter_value_and_grad(loss))(mlp, x, y)
(value, gradient), (exact, exact_gradient) = map(
    run, (normfuse.fuse(loss, quantization="fp8"), loss)
)
assert value != exact and abs(value - exact) < 0.05 * exact
errors = map(distance, jax.tree.leaves(gradient), jax.tree.leaves(exact_gradient))
assert max(errors) < 0.15  # an e4m3 number is within 1/16 of its original

# 4. The functions take it too. `accumulate_gradients` has float32 gradients of bfloat16 kernels;
#    under `jax.checkpoint` this policy keeps the codes of kernels.
kernel = jax.random.normal(jax.random.key(2), (64, 64), jnp.bfloat16) / 8


def layer(x, kernel):
    return normfuse.dense(x, kernel, activation="silu", quantization="fp8")


kept = jax.checkpoint(layer, policy=kernel_codes_saveable)
of_kernel = lambda kernel, x: jnp.mean(kept(x, kernel).astype(jnp.float32) ** 2)
microbatches = x.astype(jnp.bfloat16).reshape(2, 16, 64)
run = jax.jit(lambda kernel: normfuse.accumulate_gradients(of_kernel, kernel, microbatches))
_, main_gradient = run(kernel)
assert main_gradient.dtype == jnp.float32 and jnp.any(main_gradient != 0)

# 5. The trainer: one flag. The norms before attention and MLP add the residual and write FP8 codes
#    in one pass; q, k and v (gate and up) read the same codes, and the backward keeps them. Its
#    checkpoints are those of unquantized runs; `normfuse generate` computes in the compute dtype,
#    so that a token's logits do not depend on later tokens.
with tempfile.TemporaryDirectory() as folder:
    text = pathlib.Path(folder, "text.txt")
    text.write_text("to be, or not to be, that is the question. " * 100)
    flags = f"""--data.path {text} --out-dir {folder}/run --steps 2 --batch-size 8 --seq-len 16
        --model.dim 32 --model.num-layers 1 --model.num-heads 2 --model.num-kv-heads 2
        --model.head-dim 16 --model.mlp-dim 64 --model.quantization fp8
        --eval.tokens 64 --eval.final-tokens 64""".split()
    assert main(["train", *flags]) == 0
    assert pathlib.Path(folder, "run", "metrics.jsonl").stat().st_size
