"""Text from a trained model, `normfuse generate`, and `normfuse export`."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..models.functional import Functional, Params, build
from ..models.generate import generate
from . import RunError, UsageError
from .arguments import expanded, named, printable
from .checkpoint import Checkpoints
from .checks import check_format, check_range
from .compilation import explained, keep_compiled_programs
from .config import transformer
from .run_dir import RunDir
from .tokenizer import Bpe, Bytes, Tokenizer, read_tokenizer

_TOKENS = 240  # tokens that `generate` adds by default


@explained("Give fewer --samples or --tokens, or a smaller model.")
def continue_prompts(
    run: Path, prompt: Sequence[str], tokens: int | None, samples: int, **options: Any
) -> list[str]:
    """Continues prompts with the newest checkpoint or the Hugging Face model in the folder `run`.

    The arguments are the flags of `normfuse generate`. Returns each prompt with its continuations,
    one after the other.

    Raises:
      UsageError: the folder holds neither, or an argument is out of range.
      RunError: every checkpoint is damaged.
    """
    check_range("samples", samples, 1, 2**31 - 1)
    check_range("seed", options["seed"], -(2**63), 2**63 - 1)
    folder = expanded(run, "RUN")
    with named("RUN", folder):
        out = RunDir(folder)
        is_run = out.has_checkpoints()
    if is_run:
        model, params, tokenizer = _load_run(out)
    elif (folder / "config.json").is_file():
        model, params, tokenizer = _load_huggingface(folder)
    else:
        raise UsageError(
            f"RUN {folder} holds neither a checkpoint nor a config.json: give the folder of a "
            "training run or of a Hugging Face model."
        )
    opening = tokenizer.opening()
    encoded = [tokenizer.encode(text.encode()) for text in prompt or ("def ",)]
    rows = [np.array([*opening, *row], np.int32) for row in encoded for _ in range(samples)]
    if tokens is None:  # as many as fit; `generate` raises the error if a prompt leaves no room
        tokens = max(min(_TOKENS, model.config.max_seq_len - max(map(len, rows))), 1)
    try:
        continued = generate(model, params, rows, tokens, **options).tolist()
    except ValueError as error:  # names an argument, of the flag's name
        flag = lambda match: f"--{match[1].replace('num_', '').replace('_', '-')} "
        names = "temperature|num_tokens|top_k|top_p"
        raise UsageError(re.sub(rf"\b({names})=", flag, str(error))) from None
    prompts = (row[len(opening) :].tolist() for row in rows)
    return [tokenizer.decode([*row, *drawn]) for row, drawn in zip(prompts, continued, strict=True)]


@explained("The model and a copy in --dtype must fit.")
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
    files |= {"tokenizer.json": tokenizer.for_prompts()}
    with named("FOLDER", folder, "be written"):
        save(folder, model, params, dtype=dtype, files=files)


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
    config = transformer(saved["model"], dtype=saved["precision"])
    model = build(saved["framework"], config)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    params = checkpoints.restore_params(jax.tree.map(place, model.abstract))
    text = newest[1]["text"]
    if text.get("tokenizer") == Bytes.name:
        return model, params, Bytes()
    tokenizer = read_tokenizer(out.tokenizer, "RUN")
    tokenizer.special = text.get("tokenizer") == tokenizer.identity()
    return model, params, tokenizer


def _load_huggingface(folder: Path) -> tuple[Functional, Params, Bpe]:
    from ..models.huggingface import load

    keep_compiled_programs()
    tokenizer = read_tokenizer(folder, "RUN")
    try:
        model, params = load(folder, "nnx")
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN {folder} cannot be read: {error}") from None
    return model, params, tokenizer
