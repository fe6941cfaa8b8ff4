"""Loss curves of a preset in bfloat16, FP8 and others, over several seeds, and if they agree.

    python benchmarks/loss_curves.py                             # small, 30 million tokens, 3 seeds
    python benchmarks/loss_curves.py --seconds 500 --out build/curves     # in several calls
    python benchmarks/loss_curves.py --preset tiny --tokens 100k --seeds 2    # to try it on a CPU
    python benchmarks/loss_curves.py --report --out build/curves             # trains nothing

More versions are named by `--also`, with flags of the trainer: `--also 'block=--model.quantization
fp8 --model.remat block'`. With several GPUs each run can have one of them, in a process and a
folder of its own; `--report` takes the runs of the folders in --out into its own file:

    CUDA_VISIBLE_DEVICES=3 python benchmarks/loss_curves.py --runs 1:fp8 --out build/curves/1-fp8

Runs are the trainer's: its step, optimizer, text, batches and validation, under a learning rate
that decays over exactly these tokens. All other flags are those of `normfuse train`, such as
`--data.path` and `--model.num-layers`. A seed decides the initial values and the order of the text,
the same for all versions. One process trains all of them, and compiles each program once. The
settings in each row say how often the text is read: a part of once repeats nothing.

The criterion: the mean over seeds of the gap, FP8's last loss less bfloat16's, is at most the range
of bfloat16's last losses over the seeds, for the loss in training and for that on the held-out
text. The exit status is 1 if it does not hold. A run that diverges has the loss NaN, and it fails.
So that a gap has a size, the report also says how many times the tokens the worse of the two needs:
the better one had the other's last loss earlier, between two points of the mean of its seeds.

An FP8 program without FP8 products, or with an op that something else serves, is an error.

Writes loss_curves.csv and loss_curves.png to --out. Rows are added as they are measured, seed by
seed. A call that --seconds ends saves the state of its run beside them; the next call goes on from
there, or, where there is no saved state, from the start of that run.
"""

import argparse
import dataclasses
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import math
import pathlib
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loss_curves_table import BASE, Curves, Point, Run, compare, last_losses, plot, report
from programs import fp8_products

VERSIONS = {BASE: [], "fp8": ["--model.quantization", "fp8"]}  # flags of the trainer
PER_BLOCK = 3 * 7  # products of a block's kernels: each once forward and twice backward
OF_LOSS = 2  # products of the gradient of a loss
NOT_TAKEN = ("--steps", "--seed", "--out-dir")
OF_VERSIONS = ("--precision", "--model.quantization")  # flags that versions alone may have
SHARED = ("data", "batch_size", "seq_len", "mesh", "eval")  # settings of all versions


def evenly(steps: int, points: int) -> list[int]:
    """Returns the steps after which a run is evaluated; the last is among them."""
    return sorted({-(-steps * i // points) for i in range(1, points + 1)})


def check_products(name: str, least: int, hlo: str, platform: str) -> None:
    """Checks that a compiled step has the FP8 products that it is named for, or has none.

    Args:
      name: the version's.
      least: the FP8 products that it must have; 0: it may have none.
      hlo: the compiled program's text.
      platform: of its devices. GPUs have FP8 products, others products of widened codes.
    """
    gpu = platform == "gpu"
    found = fp8_products(hlo)
    if found < least or (found and not least):
        raise SystemExit(
            f"loss_curves.py: the step in {name} has {found} "
            f"{'products' if gpu else 'arrays'} of FP8 codes, and should have "
            f"{f'at least {least}' if least else 'none'}."
        )


class Trainer:
    """The trainer's programs of each version, and the runs of any seed with them."""

    def __init__(
        self,
        configs: dict[str, Any],
        text: Any,
        mesh: Any,
        points: Sequence[int],
        names: Sequence[str],
    ) -> None:
        """Compiles the steps of the versions named; `points` are the steps to evaluate after."""
        import jax

        from normfuse.models.functional import build
        from normfuse.native.implementation import fallbacks
        from normfuse.train.compilation import keep_compiled_programs, lower
        from normfuse.train.evaluate import Evaluator
        from normfuse.train.mesh import check_model, make_sharding
        from normfuse.train.step import Program, make_optimizer, schedule

        config = configs[BASE]
        self._config, self._text, self._mesh, self._points = config, text, mesh, points
        sharding = make_sharding(config.mesh, mesh, config.batch_size // config.pieces)
        keep_compiled_programs()
        programs, lowered = {}, {}
        self._evaluators = {}
        for name in dict.fromkeys([BASE, *names]):
            config = configs[name]
            check_model(config, mesh, sharding)
            model = build(config.framework, config.transformer(), sharding)
            programs[name] = Program(
                model,
                make_optimizer(config.optim, config.steps),
                schedule(config.optim, config.steps),
                mesh,
                config.microbatches,
                skip_limit=0,
                spike=config.spike,
                parts=config.mesh.parts,
            )
            self._evaluators[name] = Evaluator(
                model,
                mesh,
                text.held_out,
                text.widths,
                seq_len=config.seq_len,
                batch_size=config.batch_size // config.microbatches,
            )
            known = fallbacks()  # bfloat16 is traced first
            lowered[name] = lower(programs[name], config.batch_size, config.seq_len)
            served = [": ".join(one) for one in fallbacks() if one not in known]
            if config.model.quantization and served:
                raise SystemExit(f"loss_curves.py: not all of it is FP8: {'; '.join(served)}.")
        began = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            compiled = {name: pool.submit(lowered[name].compile) for name in names}
        self._steps = {name: future.result() for name, future in compiled.items()}
        say(f"compiled {', '.join(names)} in {time.perf_counter() - began:.0f} s")
        platform = mesh.devices.flat[0].platform
        for name, step in self._steps.items():
            model = configs[name].model
            least = PER_BLOCK * model.num_layers + OF_LOSS if model.quantization else 0
            check_products(name, least, step.as_text() or "", platform)
        self.abstract = {name: program.abstract() for name, program in programs.items()}
        inits = {  # quantization changes neither the state nor its first values
            str(self.abstract[name]): jax.jit(program.init, out_shardings=program.shardings())
            for name, program in programs.items()
        }
        self._init = lambda run: inits[str(self.abstract[run[1]])](run[0])

    def curve(self, run: Run, start: tuple[Any, int] | None) -> Iterator[tuple[Point, Any]]:
        """Yields the points of a run, each with the state there, which the next step overwrites.

        `start` is a state and how many steps it has taken; None for the seed's initial values.
        """
        from normfuse.train.data import batches
        from normfuse.train.mesh import batch_sharding, on_devices

        (seed, name), config, rows = run, self._config, batch_sharding(self._mesh)
        state, done = start or (self._init(run), 0)
        size = {"seq_len": config.seq_len, "batch_size": config.batch_size}
        part = {"seed": seed, "first": done, "steps": config.steps}
        given = (on_devices(batch, rows) for batch in batches(self._text.train, **size, **part))
        for point in (point for point in self._points if point > done):
            began, metrics = time.perf_counter(), []
            for _ in range(point - done):
                state, one = self._steps[name](state, next(given))
                metrics.append(one)
            losses = [float(one.loss) for one in metrics]  # waits for the steps
            ms = 1e3 * (time.perf_counter() - began) / (point - done)
            if any(int(one.skipped) for one in metrics):
                bad = next(i for i, one in enumerate(metrics) if int(one.skipped))
                say(f"step {done + bad + 1} diverged: loss {losses[bad]:.4f}, or its gradient")
                loss, val_loss, point = math.nan, math.nan, config.steps
            else:
                loss = math.fsum(losses) / len(losses)
                val_loss = self._evaluators[name](state.params, config.eval.tokens).loss
            values = round(loss, 6), round(val_loss, 6), round(ms, 3)
            tokens = point * config.tokens_per_step
            yield Point(seed, name, point, config.steps, tokens, *values), state
            if point == config.steps:
                return
            done = point


class Unfinished:
    """The saved state of the run that --seconds ended."""

    def __init__(self, folder: pathlib.Path, settings: str) -> None:
        self._folder, self._settings = folder, settings

    def save(self, state: Any, run: Run, step: int) -> None:
        from normfuse.train.checkpoint import Checkpoints

        self.remove()
        checkpoints = Checkpoints(self._folder, report=say)
        checkpoints.save(state, step, {"settings": self._settings, "run": list(run)})
        checkpoints.close()

    def restore(self, abstract: Any, run: Run) -> tuple[Any, int] | None:
        """Returns this run's state and how many steps it has taken; None if it was not saved."""
        from normfuse.train.checkpoint import Checkpoints

        if not self._folder.exists():
            return None
        checkpoints = Checkpoints(self._folder, report=say)
        _, record = checkpoints.newest_record() or (0, {})
        if (record.get("settings"), record.get("run")) != (self._settings, list(run)):
            checkpoints.close()
            return None
        state, record = checkpoints.restore(abstract)
        checkpoints.close()
        return state, record["step"]

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def settings_of(config: Any, points: int, text: Any) -> str:
    """Returns the settings that decide the curves, in words and, for all flags, as a digest."""
    from normfuse.train.config import as_dict

    flags = hashlib.sha256(json.dumps(as_dict(config), sort_keys=True).encode()).hexdigest()
    passes = config.steps * config.batch_size / len(text.windows(config.seq_len))
    return (
        f"{config.preset}; {config.steps} steps of {config.batch_size} x {config.seq_len} tokens; "
        f"{points} points; text {text.sha256[:8]} read {passes:.3f} times; flags {flags[:8]}"
    )


def configured(
    arguments: argparse.Namespace, flags: Sequence[str], versions: dict[str, list[str]]
) -> dict[str, Any]:
    """Returns the trainer's configuration of each version, by the flags of all and its own.

    The steps are those of so many tokens, the last one whole.

    Raises:
      UsageError: a number that is too small, or a flag that cannot be given there.
    """
    from normfuse.train import UsageError
    from normfuse.train.checks import require
    from normfuse.train.cli import parse

    tokens, rule = arguments.tokens, "must be a number above 0, such as 30M, 100k or 3e7."
    require(0 < tokens < math.inf, "tokens", tokens, rule)
    for name in "seeds", "points":
        value = getattr(arguments, name)
        require(value >= 1, name, value, "must be at least 1.")
    refused = [(flags, NOT_TAKEN + OF_VERSIONS), *((own, NOT_TAKEN) for own in versions.values())]
    for some, names in refused:
        for flag in some:
            if flag.split("=")[0].replace("_", "-") in names:
                raise UsageError(f"{flag} is set for each run here: leave it out.")
    configs = {}
    for name, more in versions.items():
        given = ["train", "--preset", arguments.preset, "--precision", "bfloat16", *flags]
        config = parse([*given, *more])
        steps = math.ceil(tokens / config.tokens_per_step)
        configs[name] = config = dataclasses.replace(config, steps=steps)
        for field in SHARED:
            if getattr(config, field) != getattr(configs[BASE], field):
                raise UsageError(
                    f"--also {name}: {field} must be that of all versions: give its flag once, "
                    "outside --also."
                )
    return configs


def train(configs: dict[str, Any], arguments: argparse.Namespace, deadline: float) -> int:
    """Trains, until the deadline, the runs that are not complete; returns how many are left."""
    import jax

    from normfuse.train import data
    from normfuse.train.checks import check
    from normfuse.train.mesh import make_mesh

    for config in configs.values():
        check(config)
    config = configs[BASE]
    text = data.read(config)
    settings = settings_of(config, arguments.points, text)
    common = {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "normfuse": importlib.metadata.version("normfuse"),
        "settings": settings,
    }
    curves = Curves(arguments.out / "loss_curves.csv", common)
    unfinished = Unfinished(arguments.out / "loss_curves.state", settings)
    complete = last_losses(curves.points)
    wanted = arguments.runs or itertools.product(range(arguments.seeds), configs)
    left = [run for run in wanted if run not in complete]
    if not left:
        return 0
    say(", ".join(common.values()))
    names = [name for name in configs if any(name == run[1] for run in left)]
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        trainer = Trainer(configs, text, mesh, evenly(config.steps, arguments.points), names)
        for i, run in enumerate(left):
            if (i and time.monotonic() >= deadline) or not follow(
                trainer, run, curves, unfinished, deadline
            ):
                return len(left) - i
    return 0


def follow(
    trainer: Trainer, run: Run, curves: Curves, unfinished: Unfinished, deadline: float
) -> bool:
    """Trains a run, or the rest of it; returns False if the deadline ended it, its state saved."""
    start = unfinished.restore(trainer.abstract[run[1]], run)
    if start and not any((p.run, p.step) == (run, start[1]) for p in curves.points):
        start = None  # the saved state belongs to another file
    done = start[1] if start else 0
    curves.drop(lambda point: point.run == run and point.step > done)
    before = time.monotonic()
    for point, state in trainer.curve(run, start):
        curves.add(point)
        say(
            f"seed {point.seed}, {point.version}, step {point.step} of {point.steps}: "
            f"loss {point.loss:.4f}, held-out {point.val_loss:.4f}, {point.ms:.2f} ms a step"
        )
        now = time.monotonic()
        if point.step < point.steps and now + (now - before) > deadline:
            unfinished.save(state, run, point.step)
            return False
        before = now
    unfinished.remove()
    return True


def number(text: str) -> float:
    """Reads a number such as 30M, 100k or 3e7."""
    scale = {"k": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:])
    return float(text[:-1]) * scale if scale else float(text)


def named_run(text: str) -> Run:
    """Reads a seed and a version, such as 1:fp8."""
    seed, _, name = text.partition(":")
    return int(seed), name


def version(text: str) -> tuple[str, list[str]]:
    """Reads a name and flags, such as `block=--model.remat block`."""
    name, _, flags = text.partition("=")
    if not name or name in VERSIONS:
        rule = f"must be NAME=FLAGS with another name than {' or '.join(VERSIONS)}"
        raise argparse.ArgumentTypeError(f"{text!r} {rule}")
    try:
        return name, shlex.split(flags)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from None


def say(line: str) -> None:
    print(line, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=str(__doc__).splitlines()[0],
        epilog="All other flags are those of `normfuse train`.",
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=number, default=30e6, help="of each run: 30M, 100k, 3e7")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    also = {"metavar": "NAME=FLAGS", "help": "more versions"}
    parser.add_argument("--also", type=version, nargs="*", default=[], **also)
    parser.add_argument("--runs", type=named_run, nargs="*", metavar="SEED:NAME", help="only these")
    parser.add_argument("--points", type=int, default=30, help="evaluations of each run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of this call, about")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("."), help="folder")
    parser.add_argument("--report", action="store_true", help="train nothing: read the CSV file")
    arguments, flags = parser.parse_known_args(argv)
    left = 0
    if arguments.report and flags:
        parser.error(f"--report takes no {flags[0]}")
    if not arguments.report:
        from normfuse.train import RunError, UsageError, distributed

        distributed.order_kernels()  # before JAX looks for devices, as the trainer does
        versions = VERSIONS | dict(arguments.also)
        if unknown := {name for _, name in arguments.runs or ()} - {*versions}:
            parser.error(f"--runs: {', '.join(unknown)} is none of {', '.join(versions)}")
        try:
            configs = configured(arguments, flags, versions)
            left = train(configs, arguments, began + arguments.seconds)
        except UsageError as error:
            parser.error(str(error))
        except RunError as error:
            raise SystemExit(f"loss_curves.py: {error}") from None
    curves = Curves(arguments.out / "loss_curves.csv")
    for path in sorted(arguments.out.glob("*/loss_curves.csv")) if arguments.report else ():
        curves.take(Curves(path))
    points, common = curves.points, curves.common
    if not points:
        raise SystemExit(f"loss_curves.py: {arguments.out / 'loss_curves.csv'} has no curve yet.")
    preset, steps = common["settings"].split("; ")[:2]
    plot(arguments.out / "loss_curves.png", points, f"{preset}, {steps}")
    say(f"\n{report(points)}")
    if left:
        say(f"{left} runs are not complete: the same command goes on")
    return int(any(not found.holds for found in compare(points).values()))


if __name__ == "__main__":
    sys.exit(main())
