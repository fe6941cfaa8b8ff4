"""What a finished run leaves: a validation loss, a sample, a picture, and where they are."""

import jax.numpy as jnp
from rich.panel import Panel
from rich.text import Text as RichText

from normfuse.models.functional import Functional, Params
from normfuse.models.generate import generate
from normfuse.train import metrics
from normfuse.train.config import TrainConfig
from normfuse.train.data import Text
from normfuse.train.display import Display
from normfuse.train.metrics import NATS_PER_BIT
from normfuse.train.outdir import OutDir
from normfuse.train.plot import plot_loss
from normfuse.train.references import references


def write_sample(config: TrainConfig, model: Functional, params: Params, out: OutDir) -> str:
    """Generates the run's sample and writes it, prompt included, to sample.txt."""
    room = config.model.max_seq_len - len(config.sample.prompt.encode())
    drawn = sample(
        model,
        params,
        config.sample.prompt,
        min(config.sample.tokens, room),
        temperature=config.sample.temperature,
        seed=config.seed,
    )
    out.sample.write_text(drawn)
    return drawn


def sample(model: Functional, params: Params, prompt: str, tokens: int, **options) -> str:
    """Continues a prompt by some tokens, and gives both as text.

    Args:
      model: the transformer.
      params: its parameters.
      prompt: at least one character.
      tokens: how many to add.
      **options: of `normfuse.models.generate.generate`.
    """
    row = jnp.array([list(prompt.encode())])
    drawn = generate(model, params, row, tokens, **options)
    # A vocabulary beyond the bytes has tokens that no text teaches; they stand for nothing.
    added = bytes(token for token in drawn[0].tolist() if token < 256)
    return (prompt.encode() + added).decode(errors="replace")


def write_plot(config: TrainConfig, text: Text, out: OutDir) -> dict[str, float]:
    """Draws the run's loss to loss.png, and gives the reference lines in it."""
    lines = references(text)
    plot_loss(out.plot, {f"{config.preset}, {config.framework}": metrics.read(out.metrics)}, lines)
    return lines


def summarise(
    display: Display,
    out: OutDir,
    step: int,
    loss: float,
    lines: dict[str, float],
    drawn: str | None,
):
    """Prints the last lines of a run."""
    others = ", ".join(f"{name} {bits:.2f}" for name, bits in lines.items())
    display.fact(
        "validation",
        f"loss {loss:.4f} nats/byte, {loss / NATS_PER_BIT:.3f} bits/byte ({others} bits/byte)",
    )
    if drawn is not None:
        panel = Panel(RichText(drawn), title="sample", title_align="left", border_style="dim")
        display.show(panel, drawn)
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
    display.fact("more text", f"normfuse generate {out.path} --prompt 'class '")
