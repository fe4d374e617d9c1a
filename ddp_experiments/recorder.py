"""What is known about a start while it runs: status.json, points, evaluations, checkpoints, the last word."""

import logging
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_experiments import identity
from ddp_experiments.checkpoint import directories
from ddp_experiments.config import Config
from ddp_experiments.errors import Exit, NoUsableCheckpoint, PeerFailed, Refused, Stopped
from ddp_experiments.health import Watch
from ddp_experiments.loop import Parts, Point, State
from ddp_experiments.resume import saved_form
from ddp_experiments.tracking import Tracker
from ddp_experiments.world import World

logger = logging.getLogger("ddp_experiments")
STATUS_SECONDS = 10.0


@dataclass(frozen=True)
class Place:
    """Where this start runs and writes."""

    run: identity.Run
    progress: "Progress"
    world: World
    watch: Watch


class Recorder:
    """Takes points, evaluations and states from the loop; every rank calls, rank 0 writes."""

    def __init__(self, config: Config, parts: Parts, tracker: Tracker, place: Place, *, length: int) -> None:
        self.config, self.parts, self.tracker, self.length = config, parts, tracker, length
        self.progress, lock = place.progress, place.run.lock
        self.writer = directories.Writer(
            place.run.folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            is_writer=place.world.is_rank0,
            is_mine=lock.is_mine if lock else lambda: False,
        )
        best = self._best(place.progress.state)
        if best is not None and place.world.is_rank0:
            self.writer.point_to(best)  # a kill may have come between checkpoint and pointer

    def log(self, point: Point) -> None:
        self.tracker.log(point)
        self.progress.running()

    def log_evaluation(self, state: State, metrics: Mapping[str, float]) -> None:
        self.tracker.log_evaluation(state, metrics)

    def save(self, state: State) -> None:
        self.writer.save(state.step, *saved_form(self.parts, state, self.length), self._best(state))
        self.progress.running()

    def _best(self, state: State) -> dict[str, Any] | None:
        if state.best_step is None:
            return None
        return {"step": state.best_step, "metric": self.config.checkpoint.metric, "value": state.best_value}

    def save_failed(self) -> bool:
        return self.writer.error is not None

    def close(self) -> None:
        """Let a save that is under way end, however the run ends."""
        self.writer.wait()

    def finish(self) -> None:
        """Wait for the last save; raise on all ranks if it failed. Collective: all ranks must call."""
        self.writer.wait()
        failed = torch.tensor(float(self.save_failed()), device=self.parts.world.device)
        self.parts.world.all_reduce_sum(failed)
        if self.writer.error is not None:
            raise self.writer.error
        if failed.item():  # host sync
            raise PeerFailed("another rank could not write the last checkpoint")


class Progress:
    """Keeps status.json true, and says the last word."""

    def __init__(self, run: identity.Run, rank: int) -> None:
        self.run, self.rank, self.state, self.written = run, rank, State(), 0.0
        self.started = False

    def running(self) -> None:
        self.started = True
        if time.monotonic() - self.written > STATUS_SECONDS:
            self.run.status("running", step=self.state.step)
            self.written = time.monotonic()

    def done(self, lines: Iterable[str]) -> None:
        self.run.status("done", step=self.state.step, exit_code=Exit.DONE)
        for line in lines:
            logger.info(line)

    def stopped(self, code: Exit, reason: str = "") -> None:
        """A signal ended this start."""
        state = "interrupted" if code is Exit.INTERRUPTED else "preempted"
        self.run.status(state, step=self.state.step, reason=reason, exit_code=code)
        logger.info("%s after step %d; go on with: %s", state, self.state.step, self.go_on())

    def go_on(self) -> str:
        return identity.go_on(self.run.folder)

    def failed(self, error: BaseException) -> None:
        code = Exit.NO_CHECKPOINT if isinstance(error, NoUsableCheckpoint) else Exit.FAILED
        reason = f"{type(error).__name__}: {error}"
        self.run.status("failed", step=self.state.step, reason=reason, exit_code=code)
        saved = [identity.shown(path) for _, path in directories.steps(self.run.folder / "checkpoints")]
        last = f"last checkpoint {saved[-1]}, go on with: {self.go_on()}" if saved else "no checkpoint yet"
        where = f"rank {self.rank}, {socket.gethostname()}, step {self.state.step}"
        name = "" if isinstance(error, PeerFailed) else f"{type(error).__name__} on "
        error.add_note(f"{name}{where}: {str(error).partition(chr(10))[0]}; {last}")


@contextmanager
def reported(run: identity.Run, rank: int) -> Iterator[Progress]:
    """Keep status.json true, however the block ends. A start that is refused leaves the run as it was."""
    progress = Progress(run, rank)
    try:
        yield progress
    except Stopped as stop:
        progress.stopped(stop.code)
        raise
    except KeyboardInterrupt:
        progress.stopped(Exit.INTERRUPTED, reason="at once")
        raise
    except BaseException as error:
        if progress.started or not isinstance(error, Refused | NoUsableCheckpoint):
            progress.failed(error)
        raise


@contextmanager
def tracked(config: Config, origin: identity.Origin, place: Place, total_steps: int) -> Iterator[Tracker]:
    """The tracker of this start, closed with the session marked as succeeded or failed."""
    world = place.world
    tracker = Tracker(place.run, config, world, step=place.progress.state.step, total_steps=total_steps)
    succeeded: bool | None = False
    place.progress.running()
    try:
        if world.is_rank0:
            where = {"world_size": world.world_size, "device": str(world.device), "threads": world.threads}
            tracker.describe(origin.settings, identity.record_start(place.run, origin, where))
        yield tracker
        succeeded = True
    except (Stopped, KeyboardInterrupt):
        succeeded = None  # not over: the start that continues it closes the session
        raise
    finally:
        tracker.close(succeeded=succeeded)


def announce(config: Config, place: Place, parts: Parts, total: int, checkpoint: Path | None) -> None:
    """Say what starts, on rank 0."""
    world, step = place.world, place.progress.state.step
    if not world.is_rank0:
        return
    logger.info("run %s", identity.shown(place.run.folder))
    ranks = f"{world.world_size} rank(s) on {world.device.type}, {world.threads} thread(s) each"
    parameters = f"{sum(p.numel() for p in parts.parameters):,} parameters"
    logger.info("%s; %s; %d steps of %d samples", ranks, parameters, total, config.train.global_batch_size)
    if checkpoint is not None:
        rest = "" if total > step else ": nothing left to train"
        logger.info("continuing after step %d (%s)%s", step, checkpoint.name, rest)


def closing_lines(config: Config, run: identity.Run, state: State) -> Iterator[str]:
    if state.best_value is not None:
        yield f"best {config.checkpoint.metric} {state.best_value:.4g} at step {state.best_step}"
    yield f"run {identity.shown(run.folder)}"
    yield "see it with: tensorboard --logdir outputs"
