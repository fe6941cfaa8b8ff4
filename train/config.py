"""What a training run can be told: one frozen dataclass a group of flags.

Nothing here imports JAX, so that `--help` and a mistyped flag answer at once.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..models.config import AttentionImplementation, Remat, TransformerConfig

Preset = Literal["tiny", "small", "medium", "1b", "8b"]


def _arg(metavar: str):
    """Shows an optional flag by its own placeholder; its help says what leaving it out means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text. Its last 5 % is held out for validation."""

    path: Annotated[str | None, _arg("FILE|DIR|GLOB")] = None
    """A file, a directory or a glob; without it, the sources of Python's standard library."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="byte|bpe:N|FILE")] = "byte"
    """Bytes; a byte-pair encoding of N tokens, trained on the text; or a Hugging Face
    tokenizer.json."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; -1 takes all that are left."""

    data: int = -1
    """Replicas: each holds all parameters and its part of the batch."""
    fsdp: int = 1
    """Devices over which the parameters and the optimizer state are stored in pieces."""
    tensor: int = 1
    """Devices over which every layer's heads and hidden features are split."""
    sequence: bool = False
    """Sequence parallelism: the tokens between blocks are split over the tensor devices, too."""
    keep_gathered: bool = False
    """Where blocks are computed again (--model.remat), keep the kernels that fsdp devices gathered
    for the forward: half of the gathers less, for the memory of all blocks' kernels."""
    parts: int = 1
    """Parts of each microbatch that are computed side by side: GPUs multiply for one while they
    communicate for another. For tensor meshes, and enough tokens that a part fills the GPU; with
    --model.remat none they are half a layer apart, else XLA has both wait at the same time."""


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW under a linear warm-up and a cosine decay, after clipping by the global norm."""

    lr: float
    """Learning rate at the end of the warm-up."""
    warmup: Annotated[int | None, _arg("INT")] = None
    """Steps of warm-up; by default a twentieth of --steps."""
    final_lr: float = 0.1
    """Learning rate at the last step, as a fraction of --optim.lr."""
    weight_decay: float = 0.1
    """Decay of the matrices (norm scales and biases have none)."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation on the held-out text."""

    every: int = 100
    """Steps between validations; 0: only at the end."""
    tokens: int = 16_384
    """Tokens of a validation during training, spread evenly over the held-out text."""
    final_tokens: int = 65_536
    """Tokens of the validation at the end."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Saving, to OUT_DIR/checkpoints. A run saves at its end and when it is stopped, too."""

    every: int = 250
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """Newest checkpoints kept. With at least 2, a damaged one costs only the steps since."""


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The text generated at the end."""

    prompt: str = "def "
    """What it starts with."""
    tokens: int = 240
    """Its length; 0 generates none."""
    temperature: float = 0.7
    """0 always takes the likeliest token."""


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """Several processes; docs/guides/distributed.md has launch lines for Slurm and Kubernetes."""

    coordinator: Annotated[str | None, _arg("HOST:PORT")] = None
    """Address of process 0, the same on every process."""
    num_processes: Annotated[int | None, _arg("INT")] = None
    """Number of processes."""
    process_id: Annotated[int | None, _arg("INT")] = None
    """This process, from 0."""
    timeout: int = 300
    """Seconds to wait for the others at the start."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The transformer's shape. The preset's values are shown; each may be replaced."""

    vocab_size: int
    """Number of tokens; at least the tokenizer's. Bytes are 256."""
    dim: int
    """Width of the residual stream."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of one head."""
    mlp_dim: int
    """Hidden width of the SwiGLU."""
    max_seq_len: int
    """Longest sequence accepted."""
    rope_theta: float
    """Base of the rotary wavelengths."""
    norm_eps: float
    """Added to the mean square in every RMSNorm."""
    qk_norm: bool
    """Normalise each head of the queries and keys."""
    tie_embeddings: bool
    """The embedding is also the output projection."""
    remat: Remat
    """What the backward pass computes again: nothing, everything in a block, or all but GEMMs."""
    attention: AttentionImplementation
    """`auto` takes cuDNN's fused attention where it serves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Trains a decoder-only transformer, and resumes where a run was left.

    Without arguments: a tiny model, on Python's own library, in about two minutes on two CPU cores.
    """

    preset: Preset = "tiny"
    """Model, and the defaults shown here. tiny has 0.7 M parameters, small 124 M, medium 360 M."""
    framework: Literal["nnx", "eqx"] = "nnx"
    """Flax nnx or Equinox: the same parameters, the same losses."""
    config: Annotated[Path | None, _arg("FILE.yaml")] = None
    """Any of these settings as YAML; flags override it."""
    out_dir: Annotated[Path | None, _arg("DIR")] = None
    """Where everything is written; by default a new runs/PRESET-TIME."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: continue the run in --out-dir if there is one; must: fail if there is none;
    never: fail if there is one."""
    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences in one step, over all devices and microbatches."""
    seq_len: int
    """Tokens in a sequence."""
    microbatches: int = 1
    """Parts of a batch computed one after the other, their float32 gradients summed."""
    seed: int = 0
    """Of the initial parameters, the order of the text, and the sample."""
    precision: Literal["float32", "bfloat16"]
    """Compute dtype. Parameters, optimizer state, norms' sums and the loss are float32."""
    implementation: Literal["auto", "native", "pallas", "xla"] = "auto"
    """Of RMSNorm and Dense. auto: the best that can serve here (see `normfuse info`)."""
    guard: Annotated[str, tyro.conf.arg(metavar="stop|skip:N")] = "stop"
    """When a loss or gradient is not finite, or the loss a spike: stop before the update, or leave
    out up to N updates."""
    spike: float = 3.0
    """A loss above this many times the mean of the last steps' is a spike; 0: none is."""
    watchdog: int = 1800
    """Seconds without progress after which a run is ended with the stacks of its threads; 0: never.
    """
    profile: bool = False
    """Trace five steps with JAX's profiler, to OUT_DIR/profile."""
    tensorboard: bool = False
    """Write TensorBoard events too, to OUT_DIR/tensorboard."""
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    optim: OptimConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    model: ModelConfig
    distributed: DistributedConfig = DistributedConfig()

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def pieces(self) -> int:
        """Those that a batch is computed in: the parts of all microbatches."""
        return self.microbatches * self.mesh.parts

    def transformer(self) -> TransformerConfig:
        """Gives the model's configuration, precision and implementation included."""
        return TransformerConfig(
            **dataclasses.asdict(self.model),
            dtype=self.precision,
            implementation=None if self.implementation == "auto" else self.implementation,
        )
