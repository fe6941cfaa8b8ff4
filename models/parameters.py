"""Parameters by name: the same names for both frameworks.

A parameter's canonical name is its path in the Flax model: `layers.0.attention.q.kernel`. Equinox
calls every parameter a `weight`: it is `layers[0].attention.q.weight` there, and kernels are
transposed. Weights move between frameworks, configurations and Hugging Face as a dictionary from
canonical names to arrays in Flax's layout.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from .config import TransformerConfig, shapes

_STD = 0.02


def initial_parameters(config: TransformerConfig, key: Array) -> dict[str, Array]:
    """Draws the parameters a new model starts from: the same in both frameworks.

    Norm scales are one, and biases zero. Matrices are uniform with a standard
    deviation of 0.02; those that write into the residual stream (`o`, `down`) of
    `0.02 / sqrt(2 * num_layers)`, so that its variance does not grow with depth. They are uniform
    because scaled random bits are the same on every mesh; a normal draw takes a logarithm, which
    XLA rounds differently where it vectorises it. Every parameter has its own key, made from its
    name, so that its value does not depend on the rest of the configuration.

    Args:
      config: the model.
      key: a key of `jax.random`.
    Returns: canonical name to array of `config.param_dtype`. Under `jax.jit` with `out_shardings`,
      each device draws its own shard only.

    References: Radford et al., Language Models are Unsupervised Multitask Learners (GPT-2), 2019.
    """
    return {name: _initial(name, shape, config, key) for name, shape in shapes(config).items()}


def _initial(name: str, shape: tuple[int, ...], config: TransformerConfig, key: Array) -> Array:
    kind = name.split(".")[-2:]
    if kind[1] == "scale":
        return jnp.ones(shape, config.param_dtype)
    if kind[1] == "bias":
        return jnp.zeros(shape, config.param_dtype)
    std = _STD / math.sqrt(2 * config.num_layers) if kind[0] in ("o", "down") else _STD
    own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    bound = math.sqrt(3) * std
    # Drawn in float32 whatever the storage, so that a model's precision does not choose its values.
    draw = jax.random.uniform(own_key, shape, jnp.float32, -bound, bound)
    return draw.astype(config.param_dtype)


def name_of(path: tuple) -> tuple[str, bool]:
    """Turns a leaf's path in either framework's tree into its canonical name.

    Returns: the name, and whether the leaf is the transpose of the array under that name.
    """
    parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    if parts[-1] != "weight":
        return ".".join(parts), False
    module = parts[-2]
    is_kernel = not module.endswith("norm") and module != "embed"
    parts[-1] = "kernel" if is_kernel else "embedding" if module == "embed" else "scale"
    return ".".join(parts), is_kernel


def to_dict(tree: Any) -> dict[str, Array]:
    """Collects a model's parameters under their canonical names, in Flax's layout."""
    values = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name, transposed = name_of(path)
        values[name] = leaf.T if transposed else leaf
    return values


def from_dict(tree: Any, values: Mapping[str, Array]) -> Any:
    """Returns `tree` with its parameters replaced by `values`; the inverse of `to_dict`.

    Args:
      tree: a model's parameters, or only their shapes and dtypes (`jax.ShapeDtypeStruct`).
      values: canonical name to array in Flax's layout; dtypes are taken as they are.

    Raises:
      ValueError: naming the parameters that are missing, left over, or of another shape.
    """
    expected = [name_of(path)[0] for path, _ in jax.tree.leaves_with_path(tree)]
    missing = [name for name in expected if name not in values]
    left_over = sorted(set(values) - set(expected))
    if missing or left_over:
        raise ValueError(
            f"values must hold exactly the model's parameters: missing {listed(missing)}, "
            f"left over {listed(left_over)}. Do the configurations agree?"
        )

    def place(path: tuple, leaf: Any) -> Array:
        name, transposed = name_of(path)
        value = values[name].T if transposed else values[name]
        if value.shape != leaf.shape:
            shape = leaf.shape[::-1] if transposed else leaf.shape
            raise ValueError(f"{name} must have shape {shape}, got {values[name].shape}.")
        return value

    return jax.tree.map_with_path(place, tree)


def listed(names: list[str]) -> str:
    """Returns the first three names, and how many more there are, for an error."""
    shown = ", ".join(names[:3]) or "none"
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
