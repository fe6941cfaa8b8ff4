"""Whether a checkpoint continues under a configuration and a text."""

from .config import TrainConfig
from .errors import UsageError
from .settings import as_dict

# A run that goes on with another value of these would be another run.
_FIXED = ("framework", "model", "precision", "seed", "batch_size", "seq_len")
# Where and how fast a run computes, and what it writes: never worth a word.
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
_FORMAT = 2  # of the record and of the state beside it


def make_record(config: TrainConfig, text_identity: dict) -> dict:
    """Gives what a checkpoint keeps of its run."""
    return {"format": _FORMAT, "config": as_dict(config), "text": text_identity}


def check_record(record: dict, config: TrainConfig, text_identity: dict) -> list[str]:
    """Checks that a run can continue from a checkpoint.

    Returns: lines on what differs and may, for people.
    Raises:
      UsageError: with every setting that differs and may not, or another text.
    """
    if record.get("format") != _FORMAT:
        raise UsageError(
            f"the checkpoint in --out-dir is of format {record.get('format')}, this version writes "
            f"and reads {_FORMAT}. Continue it with the version that made it, or start anew in "
            "another --out-dir."
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
            + "\nGive the saved values to continue it, or another --out-dir to start anew."
        )
    was = record["text"]
    if was["tokenizer"] != text_identity["tokenizer"]:
        raise UsageError(
            "the checkpoint in --out-dir was trained on other tokens: --data.tokenizer was "
            f"{was['tokenizer']}, and is {text_identity['tokenizer']}. Give the same tokenizer to "
            "continue it, or another --out-dir to start anew."
        )
    if was["sha256"] != text_identity["sha256"]:
        raise UsageError(
            "the checkpoint in --out-dir was trained on another text:\n"
            f"  saved  {_describe(was)}\n  found  {_describe(text_identity)}\n"
            "Give the same text by --data.path to continue it, or another --out-dir to start anew."
        )
    return _table(different).splitlines()


def _flat(settings: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _table(different: dict) -> str:
    width = max((len(name) for name in different), default=0)
    return "\n".join(
        f"  {name:{width}}  saved {saved}, now {given}"
        for name, (saved, given) in different.items()
    )


def _describe(text: dict) -> str:
    return f"{text['name']}, {text['bytes']:,} bytes, sha256 {text['sha256'][:16]}…"
