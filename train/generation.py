"""Text from a trained model: a run's sample, and `normfuse generate`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..models.config import TransformerConfig
from ..models.functional import Functional, Params, build
from ..models.generate import generate
from . import RunError, UsageError
from .checkpoint import Checkpoints
from .compilation import keep_compiled_programs
from .run_dir import RunDir
from .tokenizer import Bytes, Tokenizer, read_tokenizer


def sample(
    model: Functional,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    *,
    fit: bool = False,
    samples: int = 1,
    stop: str | None = None,
    **options: Any,
) -> list[str]:
    """Continues all prompts at once; returns each prompt with its continuation.

    Args:
      model: the transformer.
      params: its parameters.
      tokenizer: the model's.
      prompts: each at least one token.
      tokens: the largest number of tokens to add.
      fit: add fewer if the model's context has no room for more.
      samples: continuations of each prompt; they follow each other in the result.
      stop: one token; a continuation ends before it.
      **options: of `normfuse.models.generate.generate`.

    Raises:
      ValueError: `stop` is not one token, or as `generate`.
    """
    ends: list[int] = [] if stop is None else tokenizer.encode(stop.encode())[0].tolist()
    if stop is not None and len(ends) != 1:
        raise ValueError(f"stop={stop!r} must be one token of the tokenizer; it is {len(ends)}.")
    encoded = [tokenizer.encode(prompt.encode())[0].astype(np.int32) for prompt in prompts]
    rows = [row for row in encoded for _ in range(samples)]
    if fit:  # of a prompt that leaves no room, `generate` raises the error
        room = model.config.max_seq_len - max(map(len, rows))
        tokens = max(min(tokens, room), 1)
    texts = []
    continued = generate(model, params, rows, tokens, stop_tokens=ends, **options).tolist()
    for start, drawn in zip(rows, continued, strict=True):
        added = drawn[: drawn.index(ends[0])] if ends and ends[0] in drawn else drawn
        texts.append(tokenizer.decode([*start.tolist(), *added]))
    return texts


def continue_prompts(
    folder: Path, prompts: Sequence[str], tokens: int, *, samples: int, **options: Any
) -> list[str]:
    """Continues prompts with a run's newest checkpoint or with a Hugging Face model.

    Args:
      folder: of the run or the model.
      prompts: texts of at least one character.
      tokens, samples, **options: of `sample`.

    Raises:
      UsageError: the folder holds neither, or an argument is out of range.
      RunError: every checkpoint is damaged.
    """
    if not all(prompts):
        raise UsageError("--prompt '' must hold at least one character.")
    if samples < 1:
        raise UsageError(f"--samples {samples} must be at least 1.")
    out = RunDir(folder)
    if out.has_checkpoints():
        model, params, tokenizer = _load_run(out)
    elif (folder / "config.json").is_file():
        model, params, tokenizer = _load_huggingface(folder)
    else:
        raise UsageError(
            f"RUN {folder} holds neither a checkpoint nor a config.json: give the folder of a "
            "training run or of a Hugging Face model."
        )
    try:
        return sample(model, params, tokenizer, prompts, tokens, samples=samples, **options)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _load_run(out: RunDir) -> tuple[Functional, Params, Tokenizer]:
    """Restores a run's model, parameters and tokenizer, on the first device."""
    keep_compiled_programs()
    checkpoints = Checkpoints(out.checkpoints, report=lambda text: print(text, file=sys.stderr))
    newest = checkpoints.newest_record()
    if newest is None:
        raise RunError(f"every checkpoint in {out.checkpoints} is damaged.")
    saved = newest[1]["config"]
    model = build(saved["framework"], TransformerConfig(**saved["model"], dtype=saved["precision"]))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
    params = checkpoints.restore_params(jax.tree.map(place, model.abstract))
    is_bytes = newest[1]["text"].get("tokenizer") == Bytes.name
    return model, params, Bytes() if is_bytes else read_tokenizer(out.tokenizer)


def _load_huggingface(folder: Path) -> tuple[Functional, Params, Tokenizer]:
    from ..models.huggingface import load

    keep_compiled_programs()
    tokenizer = read_tokenizer(folder)
    try:
        model, params = load(folder, "nnx")
    except (OSError, ValueError) as error:
        raise UsageError(f"RUN {folder} cannot be read: {error}") from None
    return model, params, tokenizer
