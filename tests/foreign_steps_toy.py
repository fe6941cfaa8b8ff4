"""A toy in the place of the models of `benchmarks/foreign_steps.py`."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def toy(steps, served=True):
    """A case of the benchmark `steps`: an embedding, logits, and served sites between them."""

    def make(layers, vocabulary):
        rngs = nnx.Rngs(0)
        parts = [nnx.Embed(vocabulary, 32, rngs=rngs)]
        for _ in range(layers if served else 0):
            parts += [nnx.RMSNorm(32, rngs=rngs), nnx.Linear(32, 32, use_bias=False, rngs=rngs)]
        model = nnx.Sequential(*parts, nnx.Linear(32, vocabulary, use_bias=False, rngs=rngs))
        return steps.Model(model, lambda model, tokens: model(tokens))

    options = {} if served else {"loss": one_hot_cross_entropy}
    return steps.Case(make, "layers", "vocabulary", cast=True, **options)


def one_hot_cross_entropy(logits, labels):
    hot = jax.nn.one_hot(labels, logits.shape[-1])
    return jnp.mean(optax.softmax_cross_entropy(logits.astype(jnp.float32), hot))
