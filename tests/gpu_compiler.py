"""XLA's compiler for NVIDIA GPUs, on a machine that has none.

JAX's CUDA plugin compiles ahead of time for a topology of devices that are only described. So
tests can read what a GPU would run (collectives, copies, memory, launches), though not run it.
"""

import functools
import importlib
import math
import os
import sys
from pathlib import Path

import jax
import pytest
from jax._src import xla_bridge
from jax.sharding import Mesh

from normfuse.train.topology import OPTIONS, devices

# `.ci/test` puts the plugin here, outside the environment, where JAX would try to start it.
_FOLDER = os.environ.get("NORMFUSE_GPU_COMPILER", "")

if jax.__version_info__ >= (0, 12):
    # Without a GPU to time kernels on, XLA would compile each in several ways and guess the best.
    OPTIONS["xla_gpu_autotune_level"] = 0

# XLA's choice where users leave it to the autotuner, which finds cuBLAS faster than Triton. Older
# versions cannot be told so, and then it is Triton for each product that Triton can compute.
AUTOTUNED = OPTIONS | {"xla_gpu_enable_triton_gemm": True}
if jax.__version_info__ >= (0, 12):
    AUTOTUNED |= {
        "xla_gpu_autotune_level": 4,
        "xla_gpu_experimental_enable_fusion_autotuner": False,  # for products alone
        "xla_force_config": "backend: CUBLASLT_FISSION backend_config { gemm { algorithm: 0 } }",
    }


def mesh(shape: tuple[int, ...], names: tuple[str, ...], **keywords) -> Mesh:
    """A mesh of H200s on one host; skips the test without a compiler for them."""
    _register()
    found = devices("H200", 1, math.prod(shape))
    return jax.make_mesh(shape, names, devices=found, **keywords)


def compile(function, *arguments, options=OPTIONS, **keywords):
    """Compiles a jitted function for the devices of its arguments' shardings."""
    return function.lower(*arguments, **keywords).compile(compiler_options=options)


@functools.cache
def _register():
    """Makes the plugin known, after the devices that are here: it is asked for no device."""
    jax.devices()
    if _FOLDER and _FOLDER not in sys.path:
        sys.path.append(_FOLDER)
    # Pallas's compiler looks here for its runtime if it was imported before.
    runtime = Path(_FOLDER, "jax_cuda13_plugin", "libmosaic_gpu_runtime.so")
    os.environ.setdefault("MOSAIC_GPU_RUNTIME_LIB_PATH", str(runtime))
    try:
        plugin = importlib.import_module("jax_plugins.xla_cuda13")
    except ImportError:
        pytest.skip("needs the compiler of jax-cuda13-plugin: .ci/test installs it")
    if jax.default_backend() != "gpu":  # else it is registered
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
            plugin.initialize()
        # JAX calls these for plugins that it finds itself; custom_partitioning needs them.
        for callback in xla_bridge._plugin_callbacks:
            callback(c_api=xla_bridge._backend_factories["cuda"].c_api)
