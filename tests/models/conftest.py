"""Small models, and parameters for them."""

import functools

import jax
import jax.extend
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
    return {
        name: (rng.standard_normal(shape) * 0.3 + name.endswith("scale")).astype("f4")
        for name, shape in parameters.shapes(config).items()
    }
