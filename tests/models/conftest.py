"""A transformer written a second time, in float64 numpy, and small models to compare with it."""

import functools
import math

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
    # An 8-wide head has four wavelengths: one is kept, one stretched and two interpolated.
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
    """`jax.jit` for single runs: compiled in half the time, without LLVM's optimisations."""
    return functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="session")
def noisy():
    """Draws parameters with none at its neutral value: a forgotten scale or bias would show."""
    return _noisy


def _noisy(config, rng):
    shapes, neutral = parameters.shapes(config), 1 - config.norm_offset
    return {
        name: (rng.standard_normal(shape) * 0.3 + neutral * name.endswith("scale")).astype("f4")
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="session")
def reference():
    return _logits


def _logits(config: TransformerConfig, values: dict, tokens: np.ndarray) -> np.ndarray:
    """`(seq,)` tokens to `(seq, vocab)` logits, position by position and head by head."""
    weights = {name: np.asarray(value, np.float64) for name, value in values.items()}
    x = np.stack([weights["embed.embedding"][token] for token in tokens])
    x = x * np.sqrt(config.dim) if config.scale_embeddings else x
    norm = lambda name, x: _normalised(x, weights[f"{name}.scale"], config) if name else x
    for layer in range(config.num_layers):
        name = lambda part, exists, layer=layer: f"layers.{layer}.{part}" * exists
        before, after = config.norms in ("pre", "both"), config.norms in ("post", "both")
        h = norm(name("attention_norm", before), x)
        h = _attention(config, weights, f"layers.{layer}.attention", h, config.is_local(layer))
        x = x + norm(name("attention_post_norm", after), h)
        h = _mlp(config, weights, f"layers.{layer}.mlp", norm(name("mlp_norm", before), x))
        x = x + norm(name("mlp_post_norm", after), h)
    x = norm("norm", x)
    logits = x @ (weights["embed.embedding"].T if config.tie_embeddings else weights["head.kernel"])
    return _bounded(logits, config.logits_softcap)


def _normalised(x, scale, config):
    rms = np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config.norm_eps)
    return x / rms * (scale + config.norm_offset)


def _bounded(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def _mlp(config, weights, scope, x):
    products = {
        name: x @ weights[f"{scope}.{name}.kernel"] for name in ("gate", "up")[not config.gated :]
    }
    activated = _ACTIVATIONS[config.activation](products["gate" if config.gated else "up"])
    hidden = activated * products["up"] if config.gated else activated
    return hidden @ weights[f"{scope}.down.kernel"]


def _attention(config, weights, scope, x, local):
    def heads(name):
        projected = x @ weights[f"{scope}.{name}.kernel"] + weights.get(f"{scope}.{name}.bias", 0.0)
        scale = weights.get(f"{scope}.{name}_norm.scale")
        if scale is not None and config.qk_norm_over == "projection":
            projected = _normalised(projected, scale, config)
        split = np.split(projected, projected.shape[1] // config.head_dim, axis=1)
        if scale is not None and config.qk_norm_over == "head":
            split = [_normalised(head, scale, config) for head in split]
        return split

    keys = [_rotated(config, head, local) for head in heads("k")]
    queries, values, out = heads("q"), heads("v"), []
    for i, query in enumerate(queries):
        group = i // (config.num_heads // config.num_kv_heads)
        rows = []
        for position, row in enumerate(_rotated(config, query, local)):
            first = max(position + 1 - config.sliding_window, 0) if local else 0
            scores = keys[group][first : position + 1] @ row
            scores = scores / np.sqrt(config.query_scale_dim or config.head_dim)
            scores = _bounded(scores, config.attention_softcap)
            shares = np.exp(scores - scores.max())
            rows.append(shares / shares.sum() @ values[group][first : position + 1])
        out.append(np.stack(rows))
    return np.concatenate(out, axis=1) @ weights[f"{scope}.o.kernel"]


def _rotated(config, head, local):
    """Turns `(x[i], x[i + width/2])`, as one complex number, by its angle at each position."""
    half = config.head_dim // 2
    own = local and config.local_rope_theta is not None
    theta = config.local_rope_theta if own else config.rope_theta
    wavelengths = 2 * np.pi * theta ** (np.arange(half) / half)
    if config.rope_scaling is not None and not own:
        wavelengths = np.array([_stretched(config.rope_scaling, w) for w in wavelengths])
    turns = np.exp(2j * np.pi * np.arange(len(head))[:, None] / wavelengths)
    turned = (head[:, :half] + 1j * head[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=1)


def _stretched(scaling, wavelength):
    if scaling.kind == "linear":
        return wavelength * scaling.factor
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
