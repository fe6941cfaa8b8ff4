"""A training run from its configuration to its last line."""

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from ..models.functional import Params, build
from ..models.sharding import Sharding
from . import distributed, ending, history, outdir
from .batches import batches, on_devices
from .checkpoint import Checkpoints
from .checks import check, guard_limit
from .compilation import explained, keep_compiled_programs, lower
from .config import TrainConfig
from .data import Text, read
from .display import Display
from .errors import RunError, UsageError
from .evaluate import Evaluator, Validation
from .introduction import introduce, say_what_serves
from .invocation import again
from .loop import Loop
from .mesh import batch_sharding, check_model, make_mesh, make_sharding
from .metrics import MetricsLog, Sinks
from .optimizer import make_optimizer, schedule
from .outdir import OutDir
from .peak import peak_flops
from .profiling import Profiler
from .reporter import BadStep, Reporter, validation_line
from .resume import check_record, make_record
from .settings import dump
from .signals import StopRequest
from .step import Program, State
from .together import Together
from .tokenizer import Bpe
from .watchdog import Watchdog


def train(config: TrainConfig, console: Console | None = None):
    """Trains, and continues what is in the run's folder.

    Args:
      config: the run's.
      console: where to show progress; standard output when None.

    Raises:
      UsageError: what is asked for cannot be done; nothing was compiled or written.
      RunError: the run failed.
    """
    check(config)
    text = read(config)
    distributed.initialize(config.distributed)
    with ExitStack() as stack:
        together = stack.enter_context(Together())
        # After JAX has put its own handler of SIGTERM.
        stop = stack.enter_context(StopRequest(together.end))
        keep_compiled_programs()
        mesh = make_mesh(config.mesh)
        sharding = make_sharding(config.mesh, mesh, config.batch_size // config.pieces)
        check_model(config, mesh, sharding)
        out = outdir.choose(config, distributed.agree(int(time.time())))
        config = dataclasses.replace(config, config=None, out_dir=out.path)
        display = Display(console or Console(), config.steps, quiet=not distributed.is_first())
        stack.callback(display.stop)
        stop.tell = lambda name: display.note(
            f"{name}: stops after this step and saves; another stops at once", "yellow"
        )
        watchdog = stack.enter_context(Watchdog(config.watchdog, out.stacks))
        stack.enter_context(jax.set_mesh(mesh))
        Run(config, text, out, display, stop, watchdog, mesh, sharding).go(stack)


class Run:
    """One run's parts, and its course."""

    def __init__(
        self,
        config: TrainConfig,
        text: Text,
        out: OutDir,
        display: Display,
        stop: StopRequest,
        watchdog: Watchdog,
        mesh: Mesh,
        sharding: Sharding,
    ):
        self.config, self.text, self.out, self.display = config, text, out, display
        self.stop, self.watchdog, self.mesh = stop, watchdog, mesh
        self.first = distributed.is_first()
        self.model = build(config.framework, config.transformer(), sharding)
        self.program = Program(
            self.model,
            make_optimizer(config.optim, config.steps),
            schedule(config.optim, config.steps),
            mesh,
            config.microbatches,
            guard_limit(config.guard),
            config.spike,
            config.mesh.parts,
        )
        self.record = make_record(config, text.identity())
        self.evaluator = Evaluator(
            self.model,
            mesh,
            text.held_out,
            text.widths,
            seq_len=config.seq_len,
            batch_size=config.batch_size // config.microbatches,
        )

    def go(self, stack: ExitStack):
        """Trains to the last step or until asked to stop, then validates, samples and plots.

        Args:
          stack: closes what is opened, however the run ends.
        """
        introduce(self.config, self.text, self.mesh, self.display)
        resuming = self.out.has_checkpoints()
        lowered = lower(self.program, self.config.batch_size, self.config.seq_len)
        if not resuming:
            self._make_folder()
        self.checkpoints = Checkpoints(
            self.out.checkpoints, keep=self.config.checkpoint.keep, report=self.display.note
        )
        if resuming:
            self._check_resume()
            self._make_folder()
        self.display.start()
        self.watchdog.beat("compiling")
        with explained():
            step = lowered.compile()
        say_what_serves(step, self.display)
        with explained(step):
            state, done = self._restored() if resuming else (self.program.init(self.config.seed), 0)
            self.log = self._open_log(done if resuming else None)
            stack.callback(self.log.close)
            state, done = self._loop(step, state, done)
            finished = done == self.config.steps and self._finish(state)
        if not finished:
            self.checkpoints.close()
            self._say_how_to_resume(done)

    def _make_folder(self):
        if self.first:
            outdir.make(self.out)
            self.out.config.write_text(dump(dataclasses.replace(self.config, resume="auto")))
            history.write_text(self.out, self.text)
            if isinstance(self.text.tokenizer, Bpe):
                self.out.tokenizer.write_text(self.text.tokenizer.content)

    def _phase(self, name: str):
        self.display.phase(name)
        self.watchdog.beat(name)

    def _check_resume(self):
        found = self.checkpoints.newest_record()
        if found is None:
            return  # restoring says what is wrong with each
        step, record = found
        if step > self.config.steps:
            raise UsageError(
                f"--steps {self.config.steps}: the checkpoint in {self.out.path} has taken {step} "
                "steps already. Give more, or another --out-dir."
            )
        different = check_record(record, self.config, self.text.identity())
        if different:
            self.display.note("continuing with other settings:\n" + "\n".join(different), "yellow")

    def _restored(self) -> tuple[State, int]:
        self._phase("restoring")
        state, record = self.checkpoints.restore(self.program.abstract())
        self.display.note(f"continuing after step {record['step']}")
        return state, record["step"]

    def _open_log(self, from_step: int | None) -> Sinks:
        """Opens metrics.jsonl, and TensorBoard's events; processes but the first write nothing."""
        if not self.first:
            return Sinks([])
        log = MetricsLog(self.out.metrics, from_step=from_step, final=self.config.steps)
        if not self.config.tensorboard:
            return Sinks([log])
        from .tensorboard import TensorBoard

        return Sinks([log, TensorBoard(self.out.tensorboard, from_step)])

    def _loop(self, step, state: State, done: int) -> tuple[State, int]:
        config = self.config
        peak = peak_flops(self.mesh.devices.flat[0].device_kind, config.precision)
        reporter = Reporter(
            config,
            self.log.write,
            self.display,
            peak * self.mesh.size if peak else None,
            self.program.skip_limit,
            self.text.tokens_per_byte,
            skipped=int(state.skipped),
        )
        rows = batch_sharding(self.mesh)
        profiler = Profiler(self.out.profile) if config.profile else None

        def on_step(step: int, settle: Callable[[], None]):
            self.watchdog.beat(f"taking step {step}")
            self.checkpoints.check()  # a save that failed since: not only the next one tells
            if profiler:
                profiler.before(step, settle)

        loop = Loop(
            config,
            step,
            (on_devices(batch, rows) for batch in self._read(done, config.steps)),
            self._evaluate,
            self._save,
            reporter,
            distributed.SharedFlag(self.mesh, lambda: bool(self.stop)),
            on_step,
        )
        try:
            return loop.run(state, done)
        except BadStep as bad:
            raise self._stopped_by_guard(bad) from None
        finally:
            if profiler:
                profiler.stop()

    def _read(self, done: int, last: int) -> Iterator[np.ndarray]:
        """Yields the batches of steps `done + 1` to `last`."""
        return batches(
            self.text.train,
            seq_len=self.config.seq_len,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            first=done,
            steps=last,
        )

    def _evaluate(self, params: Params, tokens: int) -> Validation | None:
        # Several processes must compute the same batches: only alone may a signal cut them short.
        alone = jax.process_count() == 1

        def stopping() -> bool:
            self.watchdog.beat("validating")
            return alone and bool(self.stop)

        return self.evaluator(params, tokens, stopping)

    def _save(self, state: State, step: int):
        self._phase("saving")
        self.log.sync()  # before the checkpoint: the file must hold every step that it has taken
        self.checkpoints.save(state, step, self.record)

    def _stopped_by_guard(self, bad: BadStep) -> RunError:
        """Saves the state before a bad step, and its batch."""
        path, good = self.out.bad_batch(bad.step), bad.step - 1
        if self.first:
            np.save(path, next(self._read(good, bad.step)))
        if good and bad.state is not None:
            limit = jnp.minimum(bad.state.skipped, self.program.skip_limit)
            self._save(bad.state._replace(skipped=limit), good)
        self.checkpoints.close()
        distributed.agree(good)  # all have saved: from here the first that fails may end the others
        saved = self.checkpoints.steps()
        last = self.out.checkpoints / str(saved[-1]) if saved else "none yet"
        return RunError(
            f"{bad}. The update was not made. The batch is in {path}, the last good checkpoint "
            f"is {last}. Lower --optim.lr, or leave such updates out by --guard skip:N."
        )

    def _finish(self, state: State) -> bool:
        """Validates, samples and plots; gives False if asked to stop before that was done."""
        self._phase("validating")
        found = self._evaluate(state.params, self.config.eval.final_tokens)
        if found is None:
            return False
        self.log.write(validation_line(self.config.steps, found))
        drawn = None
        if jax.process_count() == 1 and self.config.sample.tokens:
            self._phase("sampling")
            drawn = ending.write_sample(
                self.config, self.model, state.params, self.text.tokenizer, self.out
            )
        self._phase("plotting")
        lines = ending.write_plot(self.config, self.text, self.out) if self.first else {}
        self.checkpoints.close()  # raises if the last save failed: that is no good end
        self.display.stop()
        ending.summarise(self.display, self.out, self.config.steps, found, lines, drawn)
        return True

    def _say_how_to_resume(self, done: int):
        self.display.stop()
        name = self.stop.signal.name if self.stop.signal else "another process"
        where = f"saved to {self.out.checkpoints / str(done)}" if done else "nothing to save yet"
        self.display.note(f"stopped by {name} after step {done} of {self.config.steps}, {where}")
        command = f"{again('train')} --config {shlex.quote(str(self.out.config))}"
        self.display.note(f"continue with: {command}")
