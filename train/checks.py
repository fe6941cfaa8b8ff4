"""Checks of a configuration before anything is compiled or written: alone, and for a resume."""

import os
import re
import struct
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from ..models.config import TransformerConfig
from . import UsageError
from .arguments import is_text, named, shown
from .config import ModelConfig, MuDtype, OptimConfig, TrainConfig, as_dict, flat

# A resumed run must have the same values of these ...
_FIXED = ("framework", "model", "precision", "seed", "batch_size", "seq_len", "optim.mu_dtype")
# ... but of a model's settings those that only say how it is computed may change ...
COMPUTED = ("attention", "implementation", "quantization", "remat")
# ... and may change these without a word: where and how fast a run computes, and what it writes.
_FREE = (
    "distributed",
    "eval",
    "lock_timeout",
    "out_dir",
    "preset",
    "profile",
    "resume",
    "sample",
    "tensorboard",
    "watchdog",
)
_FROM_ONE = "steps batch_size seq_len microbatches mesh.parts checkpoint.keep".split()
_FROM_ONE += "eval.tokens eval.final_tokens".split()
_FROM_ZERO = "seed eval.every checkpoint.every sample.tokens watchdog lock_timeout".split()
_FORMAT = 2  # version of a checkpoint's record and state
LAYERS = 10_000  # each is traced on its own, for some milliseconds
_LEAST, _LARGEST = 1.1754944e-38, 3.4028234e38  # normal numbers of float32


def check(config: TrainConfig) -> None:
    """Checks everything that is known without devices and without the text.

    Raises:
      UsageError: naming the flag, its value, the rule and a fix.
    """
    _check_representable(config)
    _check_sizes(config)
    _check_optimizer(config)
    _check_mesh_sizes(config)
    _check_distributed(config)
    _check_out_dir(config.out_dir)
    guard_limit(config.guard)
    try:
        config.transformer()
    except ValueError as error:
        raise UsageError(with_flags(str(error))) from None


def with_flags(message: str) -> str:
    """Returns a message of `TransformerConfig` with its fields as flags: `--model.num-heads=4`."""
    names = "|".join(f.name for f in fields(ModelConfig))
    flag = lambda match: f"--model.{match[1].replace('_', '-')}="
    return re.sub(rf"\b({names})=(?=\S)", flag, message)


def guard_limit(guard: str) -> int:
    """Returns how many updates may be skipped: 0 for `stop`, N for `skip:N`."""
    if guard == "stop":
        return 0
    match = re.fullmatch(r"skip:([1-9][0-9]{0,8})", guard)
    if not match:
        raise UsageError(
            f"--guard {guard!r} must be `stop` or `skip:N` with N of at least 1 and below 10**9."
        )
    return int(match[1])


def near(value: int, unit: int) -> str:
    """Returns the multiples of `unit` on both sides of `value`, for a message."""
    below, above = value // unit * unit, -(-value // unit) * unit
    return f"{below} or {above}" if below else str(above)


def make_record(config: TrainConfig, text_identity: dict[str, Any]) -> dict[str, Any]:
    """Returns what a checkpoint stores about its run, for `check_resume`."""
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
    # Settings that the version that saved did not have, it ran at their default.
    model = (f for f in fields(TransformerConfig) if f.name in vars(config.model))
    newer = {f"model.{f.name}": f.default for f in model}
    newer |= {f"optim.{f.name}": f.default for f in fields(OptimConfig)}
    older = {name: default for name, default in newer.items() if default is not MISSING}
    saved, given = older | flat(record["config"]), flat(as_dict(config))
    different = {
        name: (saved.get(name), given.get(name))
        for name in sorted({*saved, *given})
        if saved.get(name) != given.get(name) and name.split(".")[0] not in (*_FREE, "data")
    }
    refused = [name for name in different if _is_fixed(name)]
    if refused:
        listed = "; ".join(
            f"{name} saved {different[name][0]}, now {different[name][1]}" for name in refused
        )
        raise UsageError(
            f"the checkpoint in --out-dir was made with other settings: {listed}. Give the saved "
            "values to continue it, or another --out-dir to start a new run."
        )
    was = record["text"]
    if was["tokenizer"] != text_identity["tokenizer"]:
        raise UsageError(
            "the checkpoint in --out-dir was trained on other tokens: --data.tokenizer was "
            f"{was['tokenizer']}, and is {text_identity['tokenizer']}. Give the same tokenizer to "
            "continue it, or another --out-dir to start a new run."
        )
    if ("documents" in was) != ("documents" in text_identity):
        saved_with, now = ("", "no-") if "documents" in was else ("no-", "")
        raise UsageError(
            f"the checkpoint in --out-dir was trained with --data.{saved_with}documents, now it is "
            f"--data.{now}documents: give the same to continue it, or another --out-dir to start a "
            "new run."
        )
    if was["sha256"] != text_identity["sha256"]:
        raise UsageError(
            "the checkpoint in --out-dir was trained on another text: saved "
            f"{_describe(was)}; found {_describe(text_identity)}. Give the same text by "
            "--data.path to continue it, or another --out-dir to start a new run."
        )
    width = max(map(len, different), default=0)
    return [f"  {name:{width}}  saved {a}, now {b}" for name, (a, b) in different.items()]


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
    return not {group, name}.isdisjoint(_FIXED) and not (group == "model" and field in COMPUTED)


def require(valid: bool, flag: str, value: object, rule: str) -> None:
    """Raises a UsageError that names the flag, its value and the rule, unless `valid`."""
    if not valid:
        raise UsageError(f"--{flag} {value} {rule}")


def _check_representable(config: TrainConfig) -> None:
    """Checks that texts are UTF-8, and that numbers are ones that devices hold."""
    for name, value in flat(as_dict(config)).items():
        flag = name.replace("_", "-")
        if isinstance(value, str):
            rule = "must be UTF-8 text without zero bytes."
            require(is_text(value), flag, shown(value), rule)
        elif isinstance(value, int) and name != "seed":
            require(-(2**31) <= value < 2**31, flag, shown(value), "must be below 2**31.")


def check_float(flag: str, value: float, *, zero: bool) -> None:
    """Checks that float32 holds a number as such, not as zero or infinity."""
    rule = "must be finite and not negative" if zero else "must be finite and above 0"
    rule += f": in float32 from {_LEAST:.0e} to {_LARGEST:.0e}{', or 0' if zero else ''}."
    require(_LEAST <= value <= _LARGEST or (zero and value == 0), flag, value, rule)


def _in_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def _check_sizes(config: TrainConfig) -> None:
    for name, value in flat(as_dict(config)).items():
        if name in _FROM_ONE or name in _FROM_ZERO:
            least = int(name in _FROM_ONE)
            require(value >= least, name.replace("_", "-"), value, f"must be at least {least}.")
    require(config.seed < 2**32, "seed", config.seed, "must be below 2**32.")
    longest = config.model.max_seq_len
    rule = f"is longer than --model.max-seq-len {longest}: lower the one or raise the other."
    require(config.seq_len <= longest, "seq-len", config.seq_len, rule)
    batch, unit = config.batch_size, config.pieces
    into = f"--microbatches {config.microbatches}"
    if config.mesh.parts > 1:
        into += f" of --mesh.parts {config.mesh.parts}"
    rule = f"cannot be split into {into}: take {near(batch, unit)}."
    require(batch % unit == 0, "batch-size", batch, rule)
    rule = f"times --batch-size {batch} are more sequences than int64 counts."
    require(config.steps * batch < 2**63, "steps", config.steps, rule)
    layers, rule = config.model.num_layers, f"must be at most {LAYERS}."
    require(layers <= LAYERS, "model.num-layers", layers, rule)
    spike, rule = config.spike, "must be finite and above 1, or 0 for no limit."
    require(spike == 0 or 1 < spike <= _LARGEST, "spike", spike, rule)
    check_float("sample.temperature", config.sample.temperature, zero=True)
    prompt = "a" if config.sample.prompt is None else config.sample.prompt
    require(prompt != "", "sample.prompt", repr(prompt), "must hold at least one character.")
    rule = f"must be shorter than --model.max-seq-len {longest}."
    require(len(prompt.encode()) < longest, "sample.prompt", shown(prompt), rule)


def _check_optimizer(config: TrainConfig) -> None:
    o = config.optim
    for name, zero in ("lr", False), ("eps", False), ("weight_decay", True), ("clip", True):
        check_float(f"optim.{name.replace('_', '-')}", getattr(o, name), zero=zero)
    rule = "is a fraction of --optim.lr, from 0 to 1."
    require(0 <= o.final_lr <= 1, "optim.final-lr", o.final_lr, rule)
    rule = "must be at least 0 and below 1, in float32."
    require(0 <= o.b1 <= 1 and _in_float32(o.b1) < 1, "optim.b1", o.b1, rule)
    require(0 <= o.b2 <= 1 and _in_float32(o.b2) < 1, "optim.b2", o.b2, rule)
    rule = f"must be {' or '.join(get_args(MuDtype))}."
    require(o.mu_dtype in get_args(MuDtype), "optim.mu-dtype", shown(o.mu_dtype), rule)
    rule = f"must be from 0 to --steps {config.steps}: warm up for less, or train for longer."
    if o.warmup is not None:
        require(0 <= o.warmup <= config.steps, "optim.warmup", o.warmup, rule)


def _check_mesh_sizes(config: TrainConfig) -> None:
    sizes = {name: getattr(config.mesh, name) for name in ("data", "fsdp", "tensor")}
    for name, size in sizes.items():
        rule = "must be a number of devices, or -1 for all that are left."
        require(size == -1 or size >= 1, f"mesh.{name}", size, rule)
    filled = [f"--mesh.{name}" for name, size in sizes.items() if size == -1]
    if len(filled) > 1:
        raise UsageError(
            f"{' and '.join(filled)} are both -1; only one axis can take the devices that are "
            "left. --mesh.data is -1 unless it is given."
        )
    if config.mesh.keep_gathered and config.model.quantization is not None:
        raise UsageError(
            f"--mesh.keep-gathered does not go with --model.quantization "
            f"{config.model.quantization}, whose gathered codes are not kept: leave one out."
        )


def _check_distributed(config: TrainConfig) -> None:
    given = config.distributed
    require(given.timeout >= 1, "distributed.timeout", given.timeout, "must be at least 1 second.")
    one = given.num_processes is not None or given.process_id is not None
    if one and given.coordinator is None:
        raise UsageError(
            "--distributed.num-processes and --distributed.process-id need "
            "--distributed.coordinator HOST:PORT, the address of process 0."
        )
    if given.coordinator is None:
        return
    rule = "must be HOST:PORT, with a port from 1 to 65535."
    found = re.fullmatch(r".+:([0-9]{1,5})", given.coordinator)
    valid = found is not None and 1 <= int(found[1]) <= 65535
    require(valid, "distributed.coordinator", repr(given.coordinator), rule)
    count, index = given.num_processes, given.process_id
    if count is None or index is None:
        raise UsageError(
            "--distributed.coordinator needs --distributed.num-processes and "
            "--distributed.process-id as well."
        )
    require(count >= 1, "distributed.num-processes", count, "must be at least 1.")
    rule = f"must be from 0 to {count - 1}, below --distributed.num-processes {count}."
    require(0 <= index < count, "distributed.process-id", index, rule)


def _check_out_dir(path: Path | None) -> None:
    """Checks that the folder exists or can be made, without making it."""
    path = path or Path("runs")
    with named("--out-dir", path):
        parent = path.absolute()
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir():
            raise UsageError(f"--out-dir {path}: {parent} is not a folder; choose another path.")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise UsageError(f"--out-dir {path}: {parent} is not writable; choose another path.")


def _describe(text: dict[str, Any]) -> str:
    documents = f"{text['documents']:,} documents, " if "documents" in text else ""
    return f"{text['name']}, {documents}{text['bytes']:,} bytes, sha256 {text['sha256'][:16]}…"
