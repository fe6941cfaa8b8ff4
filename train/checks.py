"""Checks of a configuration before anything is compiled or written: alone, and for a resume."""

import math
import os
import re
from pathlib import Path
from typing import Any

from . import UsageError
from .config import TrainConfig, as_dict

# A resumed run must have the same values of these ...
_FIXED = ("framework", "model", "precision", "seed", "batch_size", "seq_len")
# ... and may change these without a word: where and how fast a run computes, and what it writes.
_FREE = (
    "distributed",
    "eval",
    "out_dir",
    "preset",
    "profile",
    "resume",
    "sample",
    "tensorboard",
    "watchdog",
)
_FORMAT = 2  # of the record and of the state in a checkpoint


def check(config: TrainConfig) -> None:
    """Checks everything that is known without devices and without the text.

    Raises:
      UsageError: naming the flag, its value, the rule and a fix.
    """
    _check_sizes(config)
    _check_optimizer(config)
    _check_mesh_sizes(config)
    _check_distributed(config)
    _check_out_dir(config.out_dir)
    guard_limit(config.guard)
    try:
        config.transformer()
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        raise UsageError(f"--model.{field.replace('_', '-')}={rest}") from None


def guard_limit(guard: str) -> int:
    """Returns how many updates may be skipped: 0 for `stop`, N for `skip:N`."""
    if guard == "stop":
        return 0
    match = re.fullmatch(r"skip:([1-9][0-9]*)", guard)
    if not match:
        raise UsageError(f"--guard {guard!r} must be `stop` or `skip:N` with N of at least 1.")
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
    if record.get("format") != _FORMAT:
        raise UsageError(
            f"the checkpoint in --out-dir is of format {record.get('format')}; this version reads "
            f"and writes {_FORMAT}. Continue it with the version that wrote it, or start a new run "
            "in another --out-dir."
        )
    saved, given = _flat(record["config"]), _flat(as_dict(config))
    different = {
        name: (saved.get(name), given.get(name))
        for name in sorted({*saved, *given})
        if saved.get(name) != given.get(name) and name.split(".")[0] not in (*_FREE, "data")
    }
    refused = {name: both for name, both in different.items() if name.split(".")[0] in _FIXED}
    if refused:
        raise UsageError(
            "the checkpoint in --out-dir was made with other settings:\n"
            + _table(refused)
            + "\nGive the saved values to continue it, or another --out-dir to start a new run."
        )
    was = record["text"]
    if was["tokenizer"] != text_identity["tokenizer"]:
        raise UsageError(
            "the checkpoint in --out-dir was trained on other tokens: --data.tokenizer was "
            f"{was['tokenizer']}, and is {text_identity['tokenizer']}. Give the same tokenizer to "
            "continue it, or another --out-dir to start a new run."
        )
    if was["sha256"] != text_identity["sha256"]:
        raise UsageError(
            "the checkpoint in --out-dir was trained on another text:\n"
            f"  saved  {_describe(was)}\n  found  {_describe(text_identity)}\n"
            "Give the same text by --data.path to continue it, or another --out-dir to start a new "
            "run."
        )
    return _table(different).splitlines()


def _require(valid: bool, flag: str, value: object, rule: str) -> None:
    """Raises a UsageError that names the flag, its value and the rule, unless `valid`."""
    if not valid:
        raise UsageError(f"--{flag} {value} {rule}")


def _check_sizes(config: TrainConfig) -> None:
    at_least = [
        (1, "steps", config.steps),
        (1, "batch-size", config.batch_size),
        (1, "seq-len", config.seq_len),
        (1, "microbatches", config.microbatches),
        (1, "mesh.parts", config.mesh.parts),
        (0, "seed", config.seed),
        (0, "eval.every", config.eval.every),
        (1, "eval.tokens", config.eval.tokens),
        (1, "eval.final-tokens", config.eval.final_tokens),
        (0, "checkpoint.every", config.checkpoint.every),
        (1, "checkpoint.keep", config.checkpoint.keep),
        (0, "sample.tokens", config.sample.tokens),
        (0, "watchdog", config.watchdog),
    ]
    for least, flag, value in at_least:
        _require(value >= least, flag, value, f"must be at least {least}.")
    _require(config.seed < 2**32, "seed", config.seed, "must be below 2**32.")
    longest = config.model.max_seq_len
    rule = f"is longer than --model.max-seq-len {longest}: lower the one or raise the other."
    _require(config.seq_len <= longest, "seq-len", config.seq_len, rule)
    batch, unit = config.batch_size, config.pieces
    into = f"--microbatches {config.microbatches}"
    if config.mesh.parts > 1:
        into += f" of --mesh.parts {config.mesh.parts}"
    rule = f"cannot be split into {into}: take {near(batch, unit)}."
    _require(batch % unit == 0, "batch-size", batch, rule)
    spike, rule = config.spike, "must be finite and above 1, or 0 for no limit."
    _require(spike == 0 or (math.isfinite(spike) and spike > 1), "spike", spike, rule)
    heat = config.sample.temperature
    rule = "must be finite and not negative."
    _require(math.isfinite(heat) and heat >= 0, "sample.temperature", heat, rule)
    prompt = config.sample.prompt
    _require(prompt != "", "sample.prompt", repr(prompt), "must hold at least one character.")
    _require(_is_text(prompt), "sample.prompt", repr(prompt), "must be UTF-8 text.")
    rule = f"must be shorter than --model.max-seq-len {longest}."
    _require(len(prompt.encode()) < longest, "sample.prompt", repr(prompt), rule)


def _is_text(argument: str) -> bool:
    """Whether a command-line argument was UTF-8; Python keeps other bytes as surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_optimizer(config: TrainConfig) -> None:
    o, finite = config.optim, math.isfinite
    rule = "must be finite and above 0."
    _require(finite(o.lr) and o.lr > 0, "optim.lr", o.lr, rule)
    _require(finite(o.eps) and o.eps > 0, "optim.eps", o.eps, rule)
    rule = "must be finite and not negative."
    decay = o.weight_decay
    _require(finite(decay) and decay >= 0, "optim.weight-decay", decay, rule)
    _require(finite(o.clip) and o.clip >= 0, "optim.clip", o.clip, rule + " 0 disables clipping.")
    rule = "is a fraction of --optim.lr, from 0 to 1."
    _require(0 <= o.final_lr <= 1, "optim.final-lr", o.final_lr, rule)
    rule = "must be at least 0 and below 1."
    _require(0 <= o.b1 < 1, "optim.b1", o.b1, rule)
    _require(0 <= o.b2 < 1, "optim.b2", o.b2, rule)
    rule = f"must be from 0 to --steps {config.steps}: warm up for less, or train for longer."
    if o.warmup is not None:
        _require(0 <= o.warmup <= config.steps, "optim.warmup", o.warmup, rule)


def _check_mesh_sizes(config: TrainConfig) -> None:
    sizes = {name: getattr(config.mesh, name) for name in ("data", "fsdp", "tensor")}
    for name, size in sizes.items():
        rule = "must be a number of devices, or -1 for all that are left."
        _require(size == -1 or size >= 1, f"mesh.{name}", size, rule)
    filled = [f"--mesh.{name}" for name, size in sizes.items() if size == -1]
    if len(filled) > 1:
        raise UsageError(
            f"{' and '.join(filled)} are both -1; only one axis can take the devices that are "
            "left. --mesh.data is -1 unless it is given."
        )
    if config.mesh.keep_gathered and (config.mesh.fsdp == 1 or config.model.remat == "none"):
        raise UsageError(
            f"--mesh.keep-gathered with --mesh.fsdp {config.mesh.fsdp} and --model.remat "
            f"{config.model.remat} has nothing to keep: kernels are gathered twice only with more "
            "than one fsdp device and recomputed blocks (--model.remat dots or block)."
        )


def _check_distributed(config: TrainConfig) -> None:
    given = config.distributed
    _require(given.timeout >= 1, "distributed.timeout", given.timeout, "must be at least 1 second.")
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
    _require(valid, "distributed.coordinator", repr(given.coordinator), rule)
    count, index = given.num_processes, given.process_id
    if count is None or index is None:
        raise UsageError(
            "--distributed.coordinator needs --distributed.num-processes and "
            "--distributed.process-id as well."
        )
    _require(count >= 1, "distributed.num-processes", count, "must be at least 1.")
    rule = f"must be from 0 to {count - 1}, below --distributed.num-processes {count}."
    _require(0 <= index < count, "distributed.process-id", index, rule)


def _check_out_dir(path: Path | None) -> None:
    """Checks that the folder exists or can be made, without making it."""
    path = path or Path("runs")
    _require(_is_text(str(path)), "out-dir", repr(str(path)), "must be UTF-8 text.")
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise UsageError(f"--out-dir {path}: {parent} is not a folder; choose another path.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"--out-dir {path}: {parent} is not writable; choose another path.")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _table(different: dict[str, Any]) -> str:
    width = max((len(name) for name in different), default=0)
    return "\n".join(
        f"  {name:{width}}  saved {saved}, now {given}"
        for name, (saved, given) in different.items()
    )


def _describe(text: dict[str, Any]) -> str:
    return f"{text['name']}, {text['bytes']:,} bytes, sha256 {text['sha256'][:16]}…"
