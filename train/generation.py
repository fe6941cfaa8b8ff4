"""Text from a trained model: a run's sample, `normfuse generate` and `normfuse export`."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..models.config import TransformerConfig
from ..models.functional import Functional, Params, build
from ..models.generate import generate
from . import RunError, UsageError
from .arguments import expanded, is_text, named, printable, shown
from .checkpoint import Checkpoints
from .checks import check_float, check_format, require
from .compilation import keep_compiled_programs
from .mesh import memory
from .run_dir import RunDir
from .tokenizer import Bpe, Bytes, Tokenizer, read_tokenizer

# Parameters of `sample` and `generate` to the flags of `normfuse generate`.
_FLAGS = {name: name for name in ("samples", "stop", "temperature")}
_FLAGS |= {"num_tokens": "tokens", "top_k": "top-k", "top_p": "top-p"}


def sample(
    model: Functional,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    *,
    opening: Sequence[int] = (),
    fit: bool = False,
    samples: int = 1,
    stop: str | None = None,
    **options: Any,
) -> list[str]:
    """Continues all prompts at once; returns each prompt with its continuation.

    Args:
      prompts: each at least one token.
      opening: tokens before each prompt, not returned.
      tokens: the largest number to add; with `fit` fewer if the model's context has no room.
      samples: continuations of each prompt; they follow each other in the result.
      stop: one token; a continuation ends before it.
      **options: of `normfuse.models.generate.generate`.

    Raises:
      ValueError: `stop` is not one token, the keys and values do not fit the machine, or as
        `generate`.
    """
    ends: list[int] = [] if stop is None else tokenizer.encode(stop.encode())[0].tolist()
    if stop is not None and len(ends) != 1:
        raise ValueError(f"stop={stop!r} must be one token of the tokenizer; it is {len(ends)}.")
    encode = lambda prompt: tokenizer.encode(prompt.encode())[0].astype(np.int32)
    encoded = [np.array([*opening, *encode(prompt)], np.int32) for prompt in prompts]
    _check_memory(model.config, samples, encoded, tokens)
    rows = [row for row in encoded for _ in range(samples)]
    if fit:  # `generate` raises the error if a prompt leaves no room
        room = model.config.max_seq_len - max(map(len, rows))
        tokens = max(min(tokens, room), 1)
    texts = []
    continued = generate(model, params, rows, tokens, stop_tokens=ends, **options).tolist()
    for start, drawn in zip(rows, continued, strict=True):
        added = drawn[: drawn.index(ends[0])] if ends and ends[0] in drawn else drawn
        texts.append(tokenizer.decode([*start[len(opening) :].tolist(), *added]))
    return texts


def continue_prompts(
    folder: Path, prompts: Sequence[str], tokens: int, *, samples: int, **options: Any
) -> list[str]:
    """Continues prompts with the newest checkpoint or the Hugging Face model in a folder.

    Raises:
      UsageError: the folder holds neither, or an argument is out of range.
      RunError: every checkpoint is damaged.
    """
    _check(prompts, tokens, samples, options)
    folder = expanded(folder, "RUN")
    with named("RUN", folder):
        out = RunDir(folder)
        is_run = out.has_checkpoints()
        is_model = (folder / "config.json").is_file()
    if not is_run and not is_model:
        raise UsageError(
            f"RUN {folder} holds neither a checkpoint nor a config.json: give the folder of a "
            "training run or of a Hugging Face model."
        )
    if is_run:
        model, params, tokenizer = _load_run(out)
    else:
        model, params, tokenizer = _load_huggingface(folder)
        options["opening"] = tokenizer.opening()
    try:
        return sample(model, params, tokenizer, prompts, tokens, samples=samples, **options)
    except ValueError as error:
        flag = lambda match: f"--{_FLAGS[match[1]]} "
        raise UsageError(re.sub(rf"\b({'|'.join(_FLAGS)})=", flag, str(error))) from None


def export(run: Path, folder: Path, dtype: str | None) -> None:
    """Writes the newest checkpoint of a run as a Hugging Face model, with its tokenizer.

    Raises:
      UsageError: RUN holds no run, or FOLDER anything; or no family of theirs is such a model.
      RunError: every checkpoint is damaged.
    """
    from ..models.huggingface import save

    run, folder = expanded(run, "RUN"), expanded(folder, "FOLDER")
    with named("RUN", run):
        if not (out := RunDir(run)).has_checkpoints():
            raise UsageError(f"RUN {run} holds no checkpoint: give the folder of a training run.")
    model, params, tokenizer = _load_run(out)
    tokenizer = tokenizer if isinstance(tokenizer, Bpe) else Bpe.of_bytes()
    # Else `transformers` takes the tokenizer and the end of a text that are the family's.
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    kind |= {"model_max_length": model.config.max_seq_len, "clean_up_tokenization_spaces": False}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    files = {"tokenizer_config.json": json.dumps(kind), "generation_config.json": json.dumps(ends)}
    files |= {"tokenizer.json": tokenizer.content}
    with named("FOLDER", folder, "be written"):
        save(folder, model, params, dtype=dtype, files=files)


def _check(prompts: Sequence[str], tokens: int, samples: int, options: Mapping[str, Any]) -> None:
    """Checks the flags of `normfuse generate` as far as possible without the model."""
    for text in prompts:
        require(text != "", "prompt", "''", "must hold at least one character.")
    for flag, texts in ("prompt", prompts), ("stop", [options["stop"] or ""]):
        for text in texts:
            require(is_text(text), flag, shown(text), "must be UTF-8 text without zero bytes.")
    for flag, count in ("tokens", tokens), ("samples", samples), ("top-k", options["top_k"]):
        rule = "must be at least 1 and below 2**31."
        require(count is None or 1 <= count < 2**31, flag, shown(count), rule)
    seed, top_p = options["seed"], options["top_p"]
    require(-(2**63) <= seed < 2**63, "seed", shown(seed), "must be an integer of 64 bits.")
    check_float("temperature", options["temperature"], zero=True)
    if top_p is not None:
        check_float("top-p", top_p, zero=False)
        require(top_p <= 1, "top-p", top_p, "must be at most 1.")


def _check_memory(
    config: TransformerConfig, samples: int, prompts: Sequence[np.ndarray], tokens: int
) -> None:
    """Checks that a cache of all keys and values can fit one device."""
    longest = min(max(map(len, prompts)) + tokens, config.max_seq_len)
    wide = config.num_layers * config.num_kv_heads * config.head_dim
    needed = 2 * samples * len(prompts) * longest * wide * np.dtype(config.dtype).itemsize
    if needed > (here := memory(jax.devices()[0])):
        raise ValueError(
            f"samples={samples} of {len(prompts)} prompts need at least {needed / 1e9:,.1f} GB for "
            f"their keys and values; a device has {here / 1e9:,.1f}."
        )


def _load_run(out: RunDir) -> tuple[Functional, Params, Tokenizer]:
    """Restores a run's model, parameters and tokenizer, on the first device."""
    keep_compiled_programs()
    report = lambda text: print(printable(text), file=sys.stderr)
    checkpoints = Checkpoints(out.checkpoints, report=report)
    newest = checkpoints.newest_record()
    if newest is None:
        raise RunError(f"every checkpoint in {out.checkpoints} is damaged.")
    check_format(newest[1])
    saved = newest[1]["config"]
    try:
        config = TransformerConfig(**saved["model"], dtype=saved["precision"])
    except TypeError as error:  # a later version's setting
        raise UsageError(f"RUN {out.path} is of another version of normfuse: {error}") from None
    model = build(saved["framework"], config)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    params = checkpoints.restore_params(jax.tree.map(place, model.abstract))
    is_bytes = newest[1]["text"].get("tokenizer") == Bytes.name
    return model, params, Bytes() if is_bytes else read_tokenizer(out.tokenizer, "RUN")


def _load_huggingface(folder: Path) -> tuple[Functional, Params, Bpe]:
    from ..models.huggingface import load

    keep_compiled_programs()
    tokenizer = read_tokenizer(folder, "RUN")
    try:
        model, params = load(folder, "nnx")
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN {folder} cannot be read: {error}") from None
    return model, params, tokenizer
