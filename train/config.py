"""The configuration of a training run: its fields, the presets, and its YAML form.

Each group of flags is one frozen dataclass. A preset's values are overridden by those of a YAML
file, and these by flags. Nothing here imports JAX, so that `--help` and a mistyped flag answer at
once.
"""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_type_hints

import tyro

from ..models.config import PRESETS, RopeScaling, TransformerConfig
from . import UsageError
from .arguments import expanded, named, one_line
from .tokenizer import make_tokenizer

Preset = Literal["tiny", "small", "medium", "1b", "8b"]
MuDtype = Literal["float32", "bfloat16"]


def _arg(metavar: str) -> Any:
    """Shows an optional flag with this placeholder; its help explains the default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text. Its last 5 % is held out for validation."""

    path: Annotated[str | None, _arg("FILE|DIR|GLOB")] = None
    """A file, a directory, a glob, or a dataset that `datasets` saved; without it, the sources of
    Python's standard library."""
    field: str = "text"
    """Has the text in each line of .jsonl files, and in each row of a dataset."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="byte|FILE")] = "byte"
    """Bytes, or a Hugging Face tokenizer.json, whose template's tokens (as <bos>) are put around
    each document, but not into a single file of text. Unless --model.vocab-size is given, the
    model has its tokens, rounded up to a multiple of 128."""


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; -1 takes all that are left."""

    data: int = -1
    """Replicas: each holds all parameters and a share of the batch."""
    fsdp: int = 1
    """Devices that share the storage of the parameters and the optimizer state."""
    tensor: int = 1
    """Devices that split every layer's heads and hidden features."""
    sequence: bool = False
    """Sequence parallelism: also split the tokens between blocks over the tensor devices."""


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW under a linear warm-up and a cosine decay, after clipping by the global norm."""

    lr: float
    """Peak learning rate, reached at the end of the warm-up."""
    warmup: Annotated[int | None, _arg("INT")] = None
    """Steps of warm-up; by default a twentieth of --steps."""
    final_lr: float = 0.1
    """Learning rate at the last step, as a fraction of --optim.lr."""
    weight_decay: float = 0.1
    """Decay of the matrices; norm scales and biases have none."""
    b1: float = 0.9
    """Decay rate of the first moment."""
    b2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    mu_dtype: MuDtype = "float32"
    """Dtype in which the first moment is stored: in bfloat16 the parameters with their moments take
    10 bytes each instead of 12."""
    clip: float = 1.0
    """Largest global norm of the gradient; 0 disables clipping."""


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Validation on the held-out text."""

    every: int = 100
    """Steps between validations; 0: only at the end."""
    tokens: int = 16_384
    """Tokens per validation during training, spread evenly over the held-out text."""
    final_tokens: int = 65_536
    """Tokens of the final validation."""


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in OUT_DIR/checkpoints. A run also saves at its end and when it is stopped."""

    every: int = 250
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 3
    """How many of the newest checkpoints to keep. With 2 or more, a damaged one costs only the
    steps since the one before."""


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


# Fields of the transformer's configuration that a run sets itself, and no flag. The other fields
# are flags, with that class's help.
_NO_FLAGS = {"dtype", "implementation", "param_dtype"}
if TYPE_CHECKING:
    ModelConfig = TransformerConfig
else:
    hints = get_type_hints(TransformerConfig) | {"rope_scaling": RopeScaling}  # factor 1: None
    ModelConfig = dataclasses.make_dataclass(
        "ModelConfig",
        [x for x in hints.items() if x[0] not in _NO_FLAGS],
        frozen=True,
        namespace={"__doc__": TransformerConfig.__doc__},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a decoder-only transformer, or resume a run.

    Without arguments: a tiny model, on Python's own library, in about a minute on two CPU cores.
    """

    preset: Preset = "tiny"
    """Model, and the defaults shown here. Parameters: tiny 0.7 M, small 124 M, medium 360 M, 1b
    1.2 B, 8b 8.0 B."""
    framework: Literal["nnx", "eqx"] = "nnx"
    """Flax nnx or Equinox: the same parameters, the same losses."""
    config: Annotated[Path | None, _arg("FILE.yaml")] = None
    """YAML file with any of these settings; flags override it."""
    init_from: Annotated[Path | None, _arg("DIR")] = None
    """Hugging Face folder of Llama, Mistral, Qwen2 or Qwen3 to fine-tune: the model and, unless
    given, the tokenizer are its own, and --optim.lr is 2e-5."""
    out_dir: Annotated[Path | None, _arg("DIR")] = None
    """Folder for everything the run writes; by default a new runs/PRESET-TIME."""
    resume: Literal["auto", "must", "never"] = "auto"
    """auto: continue the run in --out-dir if there is one; must: fail if there is none;
    never: fail if there is one."""
    steps: int
    """Optimizer steps."""
    batch_size: int
    """Sequences per step, over all devices and microbatches."""
    seq_len: int
    """Tokens per sequence."""
    microbatches: int = 1
    """Parts of a batch that are computed one after the other, their float32 gradients summed."""
    seed: int = 0
    """Seed of the initial parameters and of the order of the text."""
    precision: Literal["float32", "bfloat16"]
    """Compute dtype. Parameters, moments (but for --optim.mu-dtype), norms' sums and the loss are
    float32."""
    implementation: Literal["auto", "native", "xla"] = "auto"
    """Implementation of every op of normfuse in the model: norms, linear layers, gated MLPs. auto:
    the best available here (see `normfuse info`). A name alone must serve every op, or the run
    does not start."""
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    optim: OptimConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    model: ModelConfig
    distributed: DistributedConfig = DistributedConfig()

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def transformer(self) -> TransformerConfig:
        """Returns the model's configuration, with this run's precision and implementation."""
        return transformer(
            dataclasses.asdict(self.model),
            dtype=self.precision,
            implementation=None if self.implementation == "auto" else self.implementation,
        )


def transformer(model: dict[str, Any], **run: Any) -> TransformerConfig:
    """Returns the model's configuration from its flags' values, and those of a run."""
    scaling = RopeScaling(**model.get("rope_scaling", {"factor": 1.0}))
    fields: dict[str, Any] = model | {"rope_scaling": None if scaling.factor == 1 else scaling}
    return TransformerConfig(**fields, **run)


def model_flags(config: TransformerConfig) -> ModelConfig:
    """Returns the values of the model's flags: the inverse of `transformer`."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}
    values["rope_scaling"] = config.rope_scaling or RopeScaling(factor=1.0)
    return ModelConfig(**values)


def _large(lr: float, **settings: Any) -> dict[str, Any]:
    return settings | dict(
        precision="bfloat16",
        optim=OptimConfig(lr),
        eval=EvalConfig(every=250, tokens=262_144, final_tokens=524_288),
        checkpoint=CheckpointConfig(every=500),
    )


# How the presets are trained; their shapes are models.config.PRESETS.
#
# tiny: in the few hundred thousand tokens that two CPU cores read in a minute and a half, many
# small steps learn more than a few large ones.
#
# The others: learning rates are GPT-3's for these sizes (arXiv:2005.14165, table 2.1). Batches are
# the largest that one 80 GB GPU takes without microbatches (8b: eight GPUs), and divide over eight.
# Nothing is rematerialised where it fits: compiled for an H200, the step of 1b takes 32 GiB (medium
# 26) and with remat "dots", which repeats no GEMM, 27 (21); in FP8 27, and 24. That is with cuDNN's
# attention: XLA's keeps its scores, 102 GiB for 1b, and needs "dots", 36.
_TRAINING: dict[str, dict[str, Any]] = {
    "tiny": dict(batch_size=8, seq_len=128, steps=700, remat="none", precision="float32")
    | dict(optim=OptimConfig(lr=3e-3, final_lr=0.05)),
    "small": _large(6e-4, batch_size=32, seq_len=1024, steps=2_000, remat="none"),
    "medium": _large(3e-4, batch_size=32, seq_len=1024, steps=4_000, remat="none"),
    "1b": _large(2e-4, batch_size=8, seq_len=2048, steps=10_000, remat="none"),
    "8b": _large(1.2e-4, batch_size=16, seq_len=2048, steps=20_000, remat="block"),
}


def preset_config(preset: Preset) -> TrainConfig:
    """Returns the complete configuration of a preset."""
    settings = dict(_TRAINING[preset])
    model = dataclasses.replace(PRESETS[preset], remat=settings.pop("remat"))
    return TrainConfig(preset=preset, model=model_flags(model), **settings)


def defaults(flags: list[str], preset: Preset = "tiny") -> tuple[TrainConfig, list[str]]:
    """Returns the configuration that flags change, and them after those of the file of `--config`.

    The file's keys are the flags' names, nested (`mesh: {data: 2}`) or dotted (`mesh.data: 2`). The
    file that a run keeps in its folder means the run in that folder, wherever it has been moved to.

    Args:
      flags: the words of a command line.
      preset: the preset unless a flag or the file names one.

    Raises:
      UsageError: the file, the tokenizer or the folder to fine-tune cannot be read.
    """
    if path := flag_value(flags, "--config"):
        flags = [*_file_flags(expanded(path, "--config")), *flags]
    preset = cast(Preset, flag_value(flags, "--preset") or preset)
    # tyro reports an unknown one
    config = preset_config(preset if preset in get_args(Preset) else "tiny")
    folder, tokenizer = flag_value(flags, "--init-from"), flag_value(flags, "--data.tokenizer")
    # A file's null is "None"; that of a run says all that the folder does, which may be gone.
    if folder not in (None, "None") and not (path and _is_runs(expanded(path, "--config"))):
        return _fine_tuned(config, expanded(folder, "--init-from"), tokenizer), flags
    tokenizer = tokenizer or "byte"
    if tokenizer != "byte" and flag_value(flags, "--model.vocab-size") is None:
        size = make_tokenizer(tokenizer).vocab_size
        model = dataclasses.replace(config.model, vocab_size=-(-size // 128) * 128)
        config = dataclasses.replace(config, model=model)
    return config, flags


def _fine_tuned(config: TrainConfig, folder: Path, tokenizer: str | None) -> TrainConfig:
    """Returns a preset's configuration for the model in a Hugging Face folder."""
    from ..models.huggingface import opened

    with named("--init-from", folder):
        theirs, _ = opened(folder)
    if tokenizer is None and not (folder / "tokenizer.json").is_file():
        text = "holds no tokenizer.json: give --data.tokenizer FILE, or byte"
        raise UsageError(f"--init-from {folder} {text}.")
    return dataclasses.replace(
        config,
        init_from=folder,
        seq_len=min(config.seq_len, theirs.max_seq_len),
        optim=dataclasses.replace(config.optim, lr=2e-5),
        data=dataclasses.replace(config.data, tokenizer=tokenizer or str(folder)),
        model=model_flags(dataclasses.replace(theirs, remat=config.model.remat)),
    )


def _file_flags(path: Path) -> list[str]:
    """Reads a YAML file of settings as flags."""
    flags = []
    usual = flat(as_dict(preset_config("tiny")))
    for name, (value, line) in _read(path).items():
        if isinstance(usual.get(name.replace("-", "_")), bool) and not isinstance(value, bool):
            text = f"line {line}: {name} is {value!r}, not true or false"
            raise UsageError(f"--config {path} cannot be read: {text}.")
        group, dot, last = name.rpartition(".")
        switch = f"{'' if value else 'no-'}{last}" if isinstance(value, bool) else f"{last}={value}"
        flags.append(f"--{group}{dot}{switch}")
    if _is_runs(path):
        own = path.parent.absolute()
        flags.append(f"--out-dir={own}")
        if (own / "tokenizer.json").is_file() and "--data.tokenizer=byte" not in flags:
            flags.append(f"--data.tokenizer={own / 'tokenizer.json'}")
    return flags


def _is_runs(path: Path) -> bool:
    return path.name == "config.yaml" and (path.parent / "text.json").is_file()


def _read(path: Path) -> dict[str, tuple[Any, int]]:
    """Reads a YAML file of settings: their values and lines, by the flags' names."""
    import yaml

    with named("--config", path):
        content = path.read_bytes()
    settings: dict[str, tuple[Any, int]] = {}

    def add(node: Any, prefix: str = "") -> None:
        for key, value in node.value:
            line, key = key.start_mark.line + 1, key.value if isinstance(key.value, str) else "?"
            name = f"{prefix}{key}".replace("_", "-")
            wrong = (
                (len(settings) > 1000 and "is one of too many")  # aliases of aliases
                or (name in settings and f"is in line {settings[name][1]} too")
                or (isinstance(value, yaml.SequenceNode) and "must be one value, not a list")
                or (name in ("config", "help", "h") and "is no setting of a run")
            )
            if wrong:
                raise ValueError(f"line {line}: {name} {wrong}.")
            group = isinstance(value, yaml.MappingNode)
            settings[name] = None if group else loader.construct_object(value), line
            if group:
                groups.add(name)
                add(value, f"{name}.")

    groups: set[str] = set()
    try:
        loader = yaml.SafeLoader(content)
        if isinstance(node := loader.get_single_node(), yaml.MappingNode):
            add(node)
        elif node is not None:
            raise ValueError("it must hold `name: value` lines at its top level")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path} cannot be read: {one_line(error)}") from None
    return {name: setting for name, setting in settings.items() if name not in groups}


def absolute(data: DataConfig) -> DataConfig:
    """Returns the settings of a text with absolute paths: the same from any folder."""
    lasting = lambda path: os.path.abspath(os.path.expanduser(path))
    tokenizer = data.tokenizer if data.tokenizer == "byte" else lasting(data.tokenizer)
    return dataclasses.replace(data, path=data.path and lasting(data.path), tokenizer=tokenizer)


def as_dict(config: TrainConfig) -> dict[str, Any]:
    """Returns a configuration as nested dictionaries of plain values, without `config` itself."""
    settings = dataclasses.asdict(config)
    del settings["config"]
    paths = {"out_dir": config.out_dir, "init_from": config.init_from}
    return settings | {name: path and str(path) for name, path in paths.items()}


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings by dotted names."""
    by_name = {}
    for name, value in settings.items():
        nested = isinstance(value, dict)
        by_name |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return by_name


def dump(config: TrainConfig) -> str:
    """Returns a configuration as YAML that `defaults` reads back to the same configuration."""
    import yaml

    return yaml.safe_dump(as_dict(config), sort_keys=False)


def flag_value(words: list[str], name: str) -> str | None:
    """Returns the last value that words of a command line give a flag; None for none."""
    value = None
    for word, after in zip(words, [*words[1:], None]):
        flag, equals, of_flag = word.partition("=")
        if flag.replace("_", "-") == name:
            value = of_flag if equals else after
    return value
