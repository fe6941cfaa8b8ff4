"""Checks of a configuration before anything is compiled or written: alone, and for a resume."""

import re
from dataclasses import fields
from typing import Any

from . import UsageError
from .arguments import shown
from .config import DistributedConfig, ModelConfig, TrainConfig, as_dict, flat, preset_config

# A resumed run must have the same values of these ...
_FIXED = ("framework", "model", "precision", "seed", "batch_size", "seq_len", "optim.mu_dtype")
# ... but of a model's settings those that only say how it is computed may change ...
_COMPUTED = ("attention", "implementation", "quantization", "remat")
# ... and may change these without a word: where and how fast a run computes, and what it writes.
_FREE = "data distributed eval out_dir preset resume".split()
_FORMAT = 3  # version of a checkpoint's record and state

_COUNT = 2**31 - 1
_LEAST, _LARGEST = 1.1754944e-38, 3.4028234e38  # normal numbers of float32
_BELOW_ONE = 1 - 2**-24  # in float32
# Settings, and the smallest and the largest value of each.
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys("steps batch_size seq_len microbatches".split(), (1, _COUNT)),
    **dict.fromkeys("checkpoint.keep eval.tokens eval.final_tokens".split(), (1, _COUNT)),
    **dict.fromkeys("eval.every checkpoint.every".split(), (0, _COUNT)),
    "distributed.timeout": (1, _COUNT),
    "seed": (0, 2**32 - 1),
    "model.num_layers": (1, 10_000),  # each is traced on its own, for some milliseconds
    **dict.fromkeys("optim.lr optim.eps".split(), (_LEAST, _LARGEST)),
    **dict.fromkeys("optim.weight_decay optim.clip".split(), (0, _LARGEST)),
    "optim.final_lr": (0, 1),
    "optim.b1": (0, _BELOW_ONE),
    "optim.b2": (0, _BELOW_ONE),
}


def check(config: TrainConfig) -> None:
    """Checks everything that is known without devices and without the text.

    Raises:
      UsageError: naming the flag, its value, the rule and a fix.
    """
    settings = flat(as_dict(config))
    for name, (least, largest) in _RANGES.items():
        check_range(name.replace("_", "-"), settings[name], least, largest)
    longest = config.model.max_seq_len
    rule = f"is longer than --model.max-seq-len {longest}: lower the one or raise the other."
    require(config.seq_len <= longest, "seq-len", config.seq_len, rule)
    rule = f"must be from 0 to --steps {config.steps}: warm up for less, or train for longer."
    warmup = config.optim.warmup or 0
    require(0 <= warmup <= config.steps, "optim.warmup", warmup, rule)
    batch, unit = config.batch_size, config.microbatches
    rule = f"cannot be split into --microbatches {unit}: take {near(batch, unit)}."
    require(batch % unit == 0, "batch-size", batch, rule)
    _check_mesh_sizes(config)
    _check_distributed(config.distributed)
    try:
        config.transformer()
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from None


def check_pretrained(config: TrainConfig, theirs: TrainConfig) -> None:
    """Raises a UsageError that names what differs, unless the model is that of --init-from."""
    chosen, before = {*_COMPUTED, "max_seq_len"}, flat(as_dict(theirs)["model"])
    different = [
        f"--model.{name.replace('_', '-')} is {value}, there {before[name]}"
        for name, value in flat(as_dict(config)["model"]).items()
        if name not in chosen and value != before[name]
    ]
    if different:
        rule = f"has another model: {'; '.join(different)}. Leave these flags out."
        raise UsageError(f"--init-from {config.init_from} {rule}")


def require(valid: bool, flag: str, value: object, rule: str) -> None:
    """Raises a UsageError that names the flag, its value and the rule, unless `valid`."""
    if not valid:
        raise UsageError(f"--{flag} {shown(value)} {rule}")


def check_range(flag: str, value: float, least: float, largest: float) -> None:
    """Checks that a flag's number is in a range, which NaN never is."""
    number = lambda x: f"{x:.3g}" if isinstance(x, float) else str(x)
    rule = f"must be from {number(least)} to {number(largest)}."
    require(least <= value <= largest, flag, value, rule)


def with_flags(message: str) -> str:
    """Returns a message of `TransformerConfig` with its fields as flags: `--model.num-heads=4`."""
    names = "|".join(f.name for f in fields(ModelConfig))
    flag = lambda match: f"--model.{match[1].replace('_', '-')}="
    return re.sub(rf"\b({names})=(?=\S)", flag, message)


def near(value: int, unit: int) -> str:
    """Returns the multiples of `unit` on both sides of `value`, for a message."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def make_record(config: TrainConfig, text_identity: dict[str, Any]) -> dict[str, Any]:
    """The record that a checkpoint stores about its run, for `check_resume`."""
    return {"format": _FORMAT, "config": as_dict(config), "text": text_identity}


def check_resume(
    record: dict[str, Any], config: TrainConfig, text_identity: dict[str, Any]
) -> list[str]:
    """Checks that a run can continue from a checkpoint.

    Returns: a line for each setting that may differ and does.
    Raises:
      UsageError: a setting that must not differ does, or the text is another.
    """
    check_format(record)
    text = lambda identity: {f"text.{name}": x for name, x in identity.items() if name != "name"}
    usual = flat(as_dict(preset_config("tiny")))  # of settings that are newer than the record
    saved = usual | flat(record["config"]) | text(record["text"])
    now = flat(as_dict(config)) | text(text_identity)
    different = {
        name: f"saved {saved.get(name)}, now {now.get(name)}"
        for name in sorted({*saved, *now})
        if saved.get(name) != now.get(name) and name.split(".")[0] not in _FREE
    }
    if "steps" in different:
        different["steps"] += ": from here the learning rate follows another curve"
    refused = [f"{name} {values}" for name, values in different.items() if _is_fixed(name)]
    if refused:
        raise UsageError(
            f"the checkpoint in --out-dir was made with other settings: {'; '.join(refused)}. Give "
            "the saved values, and the same text by the flags --data, to continue it, or another "
            "--out-dir to start a new run."
        )
    width = max(map(len, different), default=0)
    return [f"  {name:{width}}  {values}" for name, values in different.items()]


def check_format(record: dict[str, Any]) -> None:
    """Raises a UsageError unless this version reads checkpoints of a record's format."""
    if record.get("format") != _FORMAT:
        raise UsageError(
            f"the checkpoint in --out-dir is of format {record.get('format')}; this version reads "
            f"and writes {_FORMAT}. Continue it with the version that wrote it, or start a new run "
            "in another --out-dir."
        )


def _is_fixed(name: str) -> bool:
    group, _, field = name.partition(".")
    fixed = group == "text" or not {group, name}.isdisjoint(_FIXED)
    return fixed and not (group == "model" and field in _COMPUTED)


def _check_mesh_sizes(config: TrainConfig) -> None:
    sizes = {f"mesh.{name}": getattr(config.mesh, name) for name in ("data", "fsdp", "tensor")}
    for flag, size in sizes.items():
        rule = "must be a number of devices, or -1 for all that are left."
        require(size == -1 or size >= 1, flag, size, rule)


def _check_distributed(config: DistributedConfig) -> None:
    settings = (config.coordinator, config.num_processes, config.process_id)
    if None in settings and settings != (None,) * 3:
        raise UsageError(
            "--distributed.coordinator HOST:PORT, the address of process 0, --distributed."
            "num-processes and --distributed.process-id go together: give all three, or none."
        )
    if config.coordinator is None or config.num_processes is None or config.process_id is None:
        return
    check_range("distributed.num-processes", config.num_processes, 1, _COUNT)
    check_range("distributed.process-id", config.process_id, 0, config.num_processes - 1)
