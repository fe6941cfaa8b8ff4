"""A transformer written a second time, in float64 numpy, and small models to compare with it."""

import functools

import jax
import jax.extend
import numpy as np
import pytest

from normfuse.models import parameters
from normfuse.models.config import RopeScaling, TransformerConfig


@pytest.fixture(scope="session")
def small():
    """Grouped heads, a head wider than dim / heads, and no two sizes the same."""
    return TransformerConfig(
        vocab_size=48,
        dim=24,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=40,
        max_seq_len=64,
    )


@pytest.fixture(scope="session")
def scaling():
    # Of the four wavelengths of an 8-wide head, one is kept, one stretched and two interpolated.
    return RopeScaling(
        factor=4.0, low_freq_factor=0.03, high_freq_factor=2.0, original_max_seq_len=16
    )


@pytest.fixture(scope="session")
def equations():
    """Lists a jaxpr's equations, those of inner jaxprs among them."""
    return lambda jaxpr: list(_equations(jaxpr))


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


@pytest.fixture(scope="session")
def jit():
    """`jax.jit` for what runs once: compiled in half the time without LLVM's optimisations."""
    return functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="session")
def noisy():
    """Draws parameters with none at its neutral value: a forgotten scale or bias would show."""
    return _noisy


def _noisy(config, rng):
    shapes = parameters.shapes(config)
    return {
        name: (rng.standard_normal(shape) * 0.3 + name.endswith("scale")).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def reference():
    return _logits


def _logits(config: TransformerConfig, values: dict, tokens: np.ndarray) -> np.ndarray:
    """`(seq,)` tokens to `(seq, vocab)` logits, position by position and head by head."""
    weights = {name: np.asarray(value, np.float64) for name, value in values.items()}
    x = np.stack([weights["embed.embedding"][token] for token in tokens])
    for layer in range(config.num_layers):
        scope = f"layers.{layer}"
        h = _normalised(x, weights[f"{scope}.attention_norm.scale"], config.norm_eps)
        x = x + _attention(config, weights, f"{scope}.attention", h)
        h = _normalised(x, weights[f"{scope}.mlp_norm.scale"], config.norm_eps)
        gate = h @ weights[f"{scope}.mlp.gate.kernel"]
        up = h @ weights[f"{scope}.mlp.up.kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{scope}.mlp.down.kernel"]
    x = _normalised(x, weights["norm.scale"], config.norm_eps)
    tied = weights["embed.embedding"].T
    return x @ (tied if config.tie_embeddings else weights["head.kernel"])


def _normalised(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def _attention(config, weights, scope, x):
    def heads(name):
        projected = x @ weights[f"{scope}.{name}.kernel"] + weights.get(f"{scope}.{name}.bias", 0.0)
        split = np.split(projected, projected.shape[1] // config.head_dim, axis=1)
        if config.qk_norm and name != "v":
            scale = weights[f"{scope}.{name}_norm.scale"]
            split = [_normalised(head, scale, config.norm_eps) for head in split]
        return split

    keys = [_rotated(config, head) for head in heads("k")]
    queries, values, out = heads("q"), heads("v"), []
    for i, query in enumerate(queries):
        group = i // (config.num_heads // config.num_kv_heads)
        rows = []
        for position, row in enumerate(_rotated(config, query)):
            scores = keys[group][: position + 1] @ row / np.sqrt(config.head_dim)
            shares = np.exp(scores - scores.max())
            rows.append(shares / shares.sum() @ values[group][: position + 1])
        out.append(np.stack(rows))
    return np.concatenate(out, axis=1) @ weights[f"{scope}.o.kernel"]


def _rotated(config, head):
    """Turns `(x[i], x[i + width/2])`, as one complex number, by its angle at each position."""
    half = config.head_dim // 2
    wavelengths = 2 * np.pi * config.rope_theta ** (np.arange(half) / half)
    if config.rope_scaling is not None:
        wavelengths = np.array([_stretched(config.rope_scaling, w) for w in wavelengths])
    turns = np.exp(2j * np.pi * np.arange(len(head))[:, None] / wavelengths)
    turned = (head[:, :half] + 1j * head[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=1)


def _stretched(scaling, wavelength):
    longest = scaling.original_max_seq_len / scaling.low_freq_factor
    shortest = scaling.original_max_seq_len / scaling.high_freq_factor
    if wavelength > longest:
        return wavelength * scaling.factor
    if wavelength < shortest:
        return wavelength
    periods = scaling.original_max_seq_len / wavelength
    share = (periods - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return 1 / (share / wavelength + (1 - share) / (scaling.factor * wavelength))
