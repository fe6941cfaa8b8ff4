"""A training run from its configuration to its last line."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import io
import json
import math
import shlex
import time
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ..models import huggingface
from ..models.config import num_parameters
from ..models.functional import Params
from ..native.cache import compilations
from ..native.implementation import fallbacks
from . import RunError, UsageError, distributed, run_dir
from .arguments import expanded, named
from .checkpoint import Checkpoints
from .checks import check, check_resume, make_record
from .compilation import explained, keep_compiled_programs, lower
from .config import TrainConfig, absolute, dump
from .data import batches
from .display import Display, short
from .evaluate import Evaluator, Validation
from .files import write
from .lock import locked
from .loop import BadStep, Loop
from .mesh import batch_sharding, check_model, make_mesh, on_devices
from .metrics import MetricsLog
from .report import plot_loss
from .run_dir import RunDir
from .shutdown import StopRequest
from .step import State, make_program
from .text import Text, load
from .tokenizer import Bpe

_LAST_STEPS = 20  # the run prints their mean loss at the end


def train(config: TrainConfig) -> None:
    """Trains a model, or continues the run in the configured folder.

    Raises:
      UsageError: the request cannot be carried out; nothing was compiled or written.
      RunError: the run failed.
    """
    if config.out_dir is not None:
        config = dataclasses.replace(config, out_dir=expanded(config.out_dir, "--out-dir"))
    if config.init_from is not None:
        config = dataclasses.replace(config, init_from=expanded(config.init_from, "--init-from"))
    check(config)
    sizes: dict[str, Any] = {"seq_len": config.seq_len, "vocab_size": config.model.vocab_size}
    text = load(**vars(config.data) | sizes, special=config.init_from is not None)
    distributed.initialize(config.distributed)
    with ExitStack() as stack:
        stack.enter_context(distributed.ending_alone())
        # After JAX has installed its own handler of SIGTERM.
        stop = stack.enter_context(StopRequest())
        keep_compiled_programs()
        mesh = make_mesh(config.mesh)
        check_model(config, mesh)
        out = run_dir.choose(config, distributed.agree(int(time.time())))
        display = Display(config.steps, quiet=not distributed.is_first())
        stop.tell = lambda name: display.note(
            f"{name}: stopping after this step, then saving; a second signal stops at once"
        )
        stack.enter_context(jax.set_mesh(mesh))
        Run(config, text, out, display, stop, mesh).go(stack)


@dataclasses.dataclass
class Run:
    """The parts of one run, and its course."""

    config: TrainConfig
    text: Text
    out: RunDir
    display: Display
    stop: StopRequest
    mesh: Mesh

    def __post_init__(self) -> None:
        config, text, mesh = self.config, self.text, self.mesh
        self.first = distributed.is_first()
        self.program = make_program(config, config.transformer(), mesh)
        self.record = make_record(config, text.identity())
        self.evaluator = Evaluator(
            self.program.model,
            mesh,
            text.held_out,
            seq_len=config.seq_len,
            batch_size=config.batch_size // config.microbatches,
            tokens_per_byte=text.tokens_per_byte,
        )
        self.batches = functools.partial(
            batches,
            text.train,
            seq_len=config.seq_len,
            batch_size=config.batch_size,
            seed=config.seed,
        )

    def go(self, stack: ExitStack) -> None:
        """Trains to the last step or until asked to stop, then validates and plots.

        `stack` closes everything that is opened, however the run ends.
        """
        self.introduce()
        began, known = time.perf_counter(), compilations()
        lowered = lower(self.program, self.config.batch_size, self.config.seq_len)
        seconds, kernels = time.perf_counter() - began, compilations() - known
        with_kernels = f", {kernels} kernels compiled" if kernels else ""
        self.display.fact("program", f"traced in {seconds:.1f} s{with_kernels}; XLA compiles it")
        if self.first:
            self.out.make(new=self.config.out_dir is None)
        stack.enter_context(locked(self.out.lock, self.display.note))
        resuming = self.first and run_dir.resumes(self.config, self.out)
        resuming = bool(distributed.agree(resuming))
        self.display.fact("folder", str(self.out.path))
        if not resuming:
            self._write_settings()  # before the folder of checkpoints: without them it is no run
        self.checkpoints = Checkpoints(
            self.out.checkpoints, keep=self.config.checkpoint.keep, report=self.display.note
        )
        stack.callback(self._end_saving)
        if resuming:
            self._check_resume()
            self._write_settings()
        began = time.perf_counter()
        with explained():
            step = lowered.compile()
            self.display.fact("program", f"compiled in {time.perf_counter() - began:.1f} s")
            distributed.meet("compiled")
            for op, reason in () if self.config.implementation == "xla" else fallbacks():
                self.display.fact("plain XLA", f"{op}: {reason}")
            state, done = self._restored() if resuming else (self._initial(), 0)
            # All processes but the first write nothing.
            self.log = MetricsLog(
                self.out.metrics if self.first else None,
                from_step=done if resuming else None,
                final=self.config.steps,
            )
            stack.callback(self.log.close)
            state, done = self._loop(step, state, done)
            finished = done == self.config.steps and self._finish(state)
        if not finished:
            self.checkpoints.close()
            where = f"saved to {self.out.checkpoints / str(done)}" if done else "nothing to save"
            who = self.stop.signal.name if self.stop.signal else "another process"
            steps = self.config.steps
            self.display.note(f"stopped by {who} after step {done} of {steps}, {where}")
            command = f"normfuse train --config {shlex.quote(str(self.out.config))}"
            self.display.note(f"continue with: {command}")

    def introduce(self) -> None:
        config, text, mesh, fact = self.config, self.text, self.mesh, self.display.fact
        parameters = short(num_parameters(config.transformer()))
        version = importlib.metadata.version("normfuse")
        model = f"{config.preset}, {parameters} parameters, {config.framework}"
        fact("model", f"{model}, {config.precision} (normfuse {version})")
        many = f", {text.documents:,} documents" if text.documents != text.files else ""
        if config.init_from is not None:
            fact("weights", str(config.init_from))
        fact("text", f"{text.name}, {text.files} files{many}, {text.size:,} bytes")
        fact("sha256", text.sha256)
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        fact("mesh", f"{axes}, of {mesh.size} {mesh.devices.flat[0].device_kind} devices")

    def _end_saving(self) -> None:
        """Waits for a save in the background when the run fails: it ends before the lock does."""
        if jax.process_count() == 1:  # several processes end each other
            with contextlib.suppress(RunError):
                self.checkpoints.close()

    def _write_settings(self) -> None:
        if self.first:
            lasting = dataclasses.replace(
                self.config,
                resume="auto",
                init_from=self.config.init_from and self.config.init_from.absolute(),
                out_dir=self.out.path.absolute(),
                data=absolute(self.config.data),
            )
            write(self.out.config, dump(lasting))
            # The text's identity, and the number that converts its losses.
            info = self.text.identity() | {"tokens_per_byte": self.text.tokens_per_byte}
            write(self.out.text, json.dumps(info, indent=2) + "\n")
            if isinstance(self.text.tokenizer, Bpe):
                write(self.out.tokenizer, self.text.tokenizer.content)

    def _check_resume(self) -> None:
        newest = self.checkpoints.newest_record()
        if newest is None:
            return  # restoring will report each one's damage
        step, record = newest
        if step > self.config.steps:
            raise UsageError(
                f"--steps {self.config.steps}: the checkpoint in {self.out.path} has already taken "
                f"{step} steps. Give more, or another --out-dir."
            )
        different = check_resume(record, self.config, self.text.identity())
        if different:
            listed = "\n".join(different)
            self.display.note(f"continuing with other settings:\n{listed}")

    def _initial(self) -> State:
        folder, model, params = self.config.init_from, self.program.model, None
        if folder is not None:
            options = {"mesh": self.mesh, "sharding": model.sharding} | vars(model.config)
            with named("--init-from", folder):
                _, params = huggingface.load(folder, model.framework, **options)
        return self.program.init(self.config.seed, params)

    def _restored(self) -> tuple[State, int]:
        state, record = self.checkpoints.restore(self.program.abstract())
        check_resume(record, self.config, self.text.identity())  # may be older than the newest
        self.display.note(f"continuing after step {record['step']}")
        return state, record["step"]

    def _loop(self, step: jax.stages.Compiled, state: State, done: int) -> tuple[State, int]:
        config = self.config
        rows = batch_sharding(self.mesh)

        def stopping() -> bool:
            self.checkpoints.check()  # reports a failed save before the next one is due
            return bool(self.stop)

        loop = Loop(
            config,
            step,
            (on_devices(batch, rows) for batch in self.batches(first=done, steps=config.steps)),
            self._evaluate,
            self._save,
            self.log.write,
            self.display,
            distributed.SharedFlag(self.mesh, stopping),
            self.text.tokens_per_byte,
        )
        try:
            return loop.run(state, done)
        except BadStep as bad:
            raise self._stopped_at(bad) from None

    def _evaluate(self, params: Params, tokens: int) -> Validation | None:
        # Several processes must compute the same batches, so a signal may interrupt only one alone.
        alone = jax.process_count() == 1

        return self.evaluator(params, tokens, lambda: alone and bool(self.stop))

    def _save(self, state: State, step: int) -> None:
        self.log.sync()  # before the checkpoint: the file must hold every step that it has taken
        self.checkpoints.save(state, step, self.record)

    def _stopped_at(self, bad: BadStep) -> RunError:
        """Saves the state before a bad step, and its batch; returns the error to raise."""
        path, good = self.out.bad_batch(bad.step), bad.step - 1
        if good and bad.state is not None:
            self._save(bad.state._replace(halted=bad.state.halted & False), good)
        self.checkpoints.close()
        if self.first:
            np.save(batch := io.BytesIO(), next(self.batches(first=good, steps=bad.step)))
            write(path, batch.getvalue())
        distributed.agree(good)  # all have saved: from here the first that fails may end the others
        saved = self.checkpoints.steps()
        last = self.out.checkpoints / str(saved[-1]) if saved else "none yet"
        return RunError(
            f"{bad}. The update was not made. The batch is in {path}, the last good checkpoint "
            f"is {last}. Lower --optim.lr."
        )

    def _finish(self, state: State) -> bool:
        """Validates and plots; returns False if asked to stop before that was done."""
        validation = self._evaluate(state.params, self.config.eval.final_tokens)
        if validation is None:
            return False
        self.log.write(validation.entry(self.config.steps))
        self.checkpoints.close()  # raises if the last save failed: the run has not succeeded then
        if self.first:
            self._plot(validation)
        return True

    def _plot(self, validation: Validation) -> None:
        """Draws loss.png, and prints the results."""
        results = self.out.results(f"{self.config.preset}, {self.config.framework}")
        plot_loss(self.out.plot, [results])
        for path in self.out.metrics, self.out.plot:
            self.display.fact("wrote", str(path))
        losses = [line["loss"] for line in results.steps("step")[-_LAST_STEPS:]]
        mean = math.fsum(losses) / max(len(losses), 1)
        self.display.fact(
            "loss",
            f"{mean:.4f} nats/token, {results.bits_per_byte(mean):.3f} bits/byte (mean of the "
            f"last {len(losses)} steps)",
        )
        self.display.fact("validation", str(validation))
