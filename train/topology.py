"""XLA's compiler for NVIDIA GPUs that are only described: a step's program, without a GPU.

JAX's CUDA plugin compiles ahead of time for a topology of devices. Memory and collectives of the
program are then XLA's own; only its time needs a GPU.
"""

import functools
import re
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.stages import Compiled

from ..models.config import TransformerConfig
from ..native.jax_private import described_cudnn
from .config import TrainConfig
from .step import State, make_program

# No GPU is there to time products on, and without a time XLA would guess Triton where cuBLAS wins.
# Nobody reads what LLVM makes of the kernels: they are compiled without its optimizations.
OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_gpu_ptx_compiler_extra_flags": "-O0",
}
# Bytes of memory, and of it that a second moves. In all else an H100 is described as an H200 is.
MEMORY = {
    "H200": (150_000_000_000, 4_814_400_000_000),
    "H100": (85_000_000_000, 3_352_320_000_000),
}
_CUDNN = 91_000  # cuDNN's version in the description of the devices


@functools.cache
def devices(kind: str, hosts: int, each: int) -> list[jax.Device]:
    """Returns the GPUs of `hosts` hosts with `each`, "H100" or "H200", as the compiler knows them.

    Raises:
      RuntimeError: JAX's CUDA plugin is not installed.
    """
    text = Path(__file__).with_name("h200.txtpb").read_text().replace("H200", kind)
    for name, value in zip(("device_memory_size", "memory_bandwidth"), MEMORY[kind], strict=True):
        text, count = re.subn(rf"{name}: \d+", f"{name}: {value}", text)
        assert count == 1, name
    shape = f"1x{hosts}x{each}"
    name = kind.lower()
    return topologies.get_topology_desc(name, "cuda", target_config=text, topology=shape).devices


def step_on(mesh: Mesh, config: TrainConfig, model: TransformerConfig) -> tuple[Compiled, State]:
    """Compiles the step for a mesh of described GPUs; returns its abstract state too."""
    program = make_program(config, model, mesh)
    with jax.set_mesh(mesh), described_cudnn(_CUDNN):
        lowered = program.lower(config.batch_size, config.seq_len)
        return lowered.compile(compiler_options=OPTIONS), program.abstract()
