"""Loss curves of a preset in bfloat16 and FP8 over several seeds, and if they agree.

    python benchmarks/loss_curves.py                             # small, 30 million tokens, 3 seeds
    python benchmarks/loss_curves.py --preset tiny --tokens 100000 --seeds 2    # to try it on a CPU
    python benchmarks/loss_curves.py --runs 1:fp8 --out build/curves             # one run

Each run is `normfuse train` in a process of its own, under a learning rate that decays over just
these tokens; it goes on where it was ended. All other flags are the trainer's, such as
`--data.path` and `--model.num-layers`. A seed decides the initial values and the order of the text,
the same for both versions. With several GPUs each run can have one of them, by
CUDA_VISIBLE_DEVICES and --runs.

The criterion: the mean over seeds of the gap, FP8's last loss less bfloat16's, is at most the range
of bfloat16's last losses over the seeds, for the loss in training (the mean of the last thirtieth
of the steps) and for that on the held-out text. The exit status is 1 if it does not hold, or if a
run failed.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Sequence

VERSIONS = {"bf16": [], "fp8": ["--model.quantization", "fp8"]}  # flags of the trainer


@dataclasses.dataclass(frozen=True)
class Last:
    """The losses at the end of a run, and its median step."""

    loss: float
    val_loss: float
    ms: float


def steps_of(preset: str, tokens: float, flags: Sequence[str]) -> int:
    """Returns the steps that read so many tokens, the last one whole."""
    from normfuse.train.cli import parse
    from normfuse.train.config import TrainConfig

    config = parse(["train", "--preset", preset, *flags])
    assert isinstance(config, TrainConfig)
    return math.ceil(tokens / config.tokens_per_step)


def train(folder: pathlib.Path, seed: int, name: str, steps: int, given: Sequence[str]) -> bool:
    """Trains a run, or the rest of it, in a process; returns whether it ended well."""
    flags = ["--precision", "bfloat16", "--seed", seed, "--steps", steps, "--out-dir", folder]
    flags += ["--checkpoint.every", max(1, steps // 10), "--eval.every", 0]
    command = [sys.executable, "-m", "normfuse.train", *flags, *given, *VERSIONS[name]]
    return subprocess.run([str(word) for word in command]).returncode == 0


def last(folder: pathlib.Path, steps: int) -> Last | None:
    """Returns the end of a run of so many steps, or None if it is not complete."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    losses = {line["step"]: line for line in lines if "loss" in line}
    held_out = [
        line["val_loss"] for line in lines if line.get("val_loss") and line["step"] == steps
    ]
    if steps not in losses or not held_out:
        return None
    end = [losses[step]["loss"] for step in range(steps - steps // 30, steps + 1)]
    ms = statistics.median(1e3 * line["step_time_s"] for line in losses.values())
    return Last(math.fsum(end) / len(end), held_out[-1], ms)


def report(ends: dict[tuple[int, str], Last]) -> bool:
    """Prints the table and the criterion; returns whether it holds."""
    seeds = sorted({seed for seed, _ in ends if all((seed, name) in ends for name in VERSIONS)})
    print("| seed | training, bf16 | fp8 | gap | held-out, bf16 | fp8 | gap | ms, bf16 | fp8 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for seed in seeds:
        plain, fp8 = ends[seed, "bf16"], ends[seed, "fp8"]
        pairs = (plain.loss, fp8.loss), (plain.val_loss, fp8.val_loss)
        cells = [f"{a:.4f} | {b:.4f} | {b - a:+.4f}" for a, b in pairs]
        print(f"| {seed} | {' | '.join(cells)} | {plain.ms:.2f} | {fp8.ms:.2f} |")
    every = True
    for what, field in {"training": "loss", "held-out": "val_loss"}.items():
        plain, fp8 = ([getattr(ends[s, name], field) for s in seeds] for name in VERSIONS)
        gaps = [b - a for a, b in zip(plain, fp8)]
        gap = math.fsum(gaps) / len(gaps) if gaps else math.nan
        spread = max(plain) - min(plain) if plain else math.nan
        holds = abs(gap) <= spread  # NaN does not
        every &= holds
        said = "holds" if holds else "DOES NOT HOLD"
        print(
            f"{what}: mean gap {gap:+.4f}, range of bf16's {len(seeds)} seeds {spread:.4f}: {said}"
        )
    return every


def run(text: str) -> tuple[int, str]:
    """Reads SEED:VERSION."""
    seed, _, name = text.partition(":")
    if name not in VERSIONS or not seed.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be SEED:VERSION, such as 1:fp8")
    return int(seed), name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=float, default=30e6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=run, nargs="+", help="SEED:VERSION: only these are trained")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/curves"))
    given, flags = parser.parse_known_args(arguments)
    steps = steps_of(given.preset, given.tokens, flags)
    flags = ["--preset", given.preset, *flags]
    every = [*itertools.product(range(given.seeds), VERSIONS)]
    folders = {(seed, name): given.out / f"{seed}-{name}" for seed, name in every}
    failed = []
    for seed, name in given.runs or every:
        folder = given.out / f"{seed}-{name}"
        if last(folder, steps) is None and not train(folder, seed, name, steps, flags):
            failed.append(f"{seed}:{name}")
    ends = {key: end for key, folder in folders.items() if (end := last(folder, steps))}
    holds = report(ends)
    if failed:
        print(f"failed: {', '.join(failed)}")
    if left := len(every) - len(ends):
        print(f"{left} runs are not complete")
    return 0 if not failed and (left or holds) else 1


if __name__ == "__main__":
    sys.exit(main())
