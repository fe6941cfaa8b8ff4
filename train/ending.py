"""What a finished run leaves: a validation loss, a sample, a picture, and where they are."""

from collections.abc import Sequence

import numpy as np
from rich.panel import Panel
from rich.text import Text as RichText

from ..models.functional import Functional, Params
from ..models.generate import generate
from . import history
from .config import TrainConfig
from .data import Text
from .display import Display
from .evaluate import Validation
from .invocation import again
from .outdir import OutDir
from .plot import plot_breakdown, plot_loss
from .references import references
from .tokenizer import Tokenizer


def write_sample(
    config: TrainConfig, model: Functional, params: Params, tokenizer: Tokenizer, out: OutDir
) -> str:
    """Generates the run's sample and writes it, prompt included, to sample.txt."""
    room = room_after(model, tokenizer, [config.sample.prompt])
    (drawn,) = sample(
        model,
        params,
        tokenizer,
        [config.sample.prompt],
        min(config.sample.tokens, room),
        temperature=config.sample.temperature,
        seed=config.seed,
    )
    out.sample.write_text(drawn)
    return drawn


def room_after(model: Functional, tokenizer: Tokenizer, prompts: Sequence[str]) -> int:
    """Gives how many tokens the model can add to the longest of the prompts."""
    longest = max(len(tokenizer.encode(prompt.encode())[0]) for prompt in prompts)
    return model.config.max_seq_len - longest


def sample(
    model: Functional,
    params: Params,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    tokens: int,
    *,
    samples: int = 1,
    stop: str | None = None,
    **options,
) -> list[str]:
    """Continues prompts, all at once, and gives each with its continuations.

    Args:
      model: the transformer.
      params: its parameters.
      tokenizer: of the model.
      prompts: each at least one token.
      tokens: how many to add at most.
      samples: how many continuations of each prompt; they follow each other.
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
    texts = []
    continued = generate(model, params, rows, tokens, stop_tokens=ends, **options).tolist()
    for start, drawn in zip(rows, continued, strict=True):
        added = drawn[: drawn.index(ends[0])] if ends and ends[0] in drawn else drawn
        texts.append(tokenizer.decode([*start.tolist(), *added]))
    return texts


def write_plot(config: TrainConfig, text: Text, out: OutDir) -> dict[str, float]:
    """Draws the run's loss to loss.png and its profile beside it; gives the reference lines."""
    lines = references(text)
    history.write_text(out, text, lines)
    run = history.read(out, f"{config.preset}, {config.framework}")
    plot_loss(out.plot, [run])
    if run.breakdown:
        plot_breakdown(out.profile / "breakdown.png", [run])
    return lines


def summarise(
    display: Display,
    out: OutDir,
    step: int,
    found: Validation,
    lines: dict[str, float],
    drawn: str | None,
):
    """Prints the last lines of a run."""
    others = ", ".join(f"{name} {bits:.2f}" for name, bits in lines.items())
    display.fact(
        "validation",
        f"loss {found.loss:.4f} nats/token, {found.bits_per_byte:.3f} bits/byte "
        f"({others} bits/byte)",
    )
    if drawn is not None:
        panel = Panel(RichText(drawn), title="sample", title_align="left", border_style="dim")
        display.show(panel, f"sample:\n{drawn}")
    written = {
        "checkpoint": out.checkpoints / str(step),
        "metrics": out.metrics,
        "plot": out.plot,
        "sample": out.sample,
        "profile": out.profile / "table.txt",
    }
    for name, path in written.items():
        if path.exists():
            display.fact(name, str(path))
    display.fact("more text", f"{again('generate')} {out.path} --prompt 'class '")
