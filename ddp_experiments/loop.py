"""The loop: train, train_step, evaluate. Plain functions; no Hydra, no paths, no environment.

for each global batch:
    forward and backward of every microbatch    (one reduction of the gradients, in the last backward)
    clip, check, optimizer step, scheduler step
    at log points and paced points: one packed reduction of sums and flags (the only host sync)
    at evaluations: metrics over all ranks, best step, patience
    at saves: a checkpoint
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from ddp_experiments.config import Checkpoint, Config, MetricMode
from ddp_experiments.data import Batch, Batches, Microbatch, mix
from ddp_experiments.errors import Exit, NonFiniteError
from ddp_experiments.health import Verdict, Watch
from ddp_experiments.metrics import Sums
from ddp_experiments.optim import Ema, FiniteGuard, gradient_norm
from ddp_experiments.parallel import reduces_gradients
from ddp_experiments.tasks import Task
from ddp_experiments.world import World

logger = logging.getLogger("ddp_experiments")
CURES = "lower optimizer.lr, set train.clip_norm, or leave such steps out by train.nonfinite=skip"


@dataclass
class State:
    """Where a run is. With the weights and the optimizer's state it is all that continuing needs."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    samples: int = 0  # of this epoch consumed
    best_step: int | None = None
    best_value: float | None = None
    evaluations_without_gain: int = 0
    skipped_steps: int = 0

    def advance(self, batch: Batch) -> None:
        self.step += 1
        self.epoch, self.samples = (batch.epoch + 1, 0) if batch.ends_epoch else (batch.epoch, batch.samples)


@dataclass
class Parts:
    """What is trained, on this rank."""

    model: nn.Module  # as the ranks train it
    module: nn.Module  # the bare model inside
    task: Task
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    guard: FiniteGuard
    autocast: AbstractContextManager[object]
    scaler: torch.amp.GradScaler | None
    ema: Ema | None
    world: World
    seed: int
    dtype: torch.dtype
    parameters: list[nn.Parameter]
    shared_buffers: list[Tensor]  # that every step begins with as rank 0 has them; most models have none
    generators: list[torch.Generator] = field(default_factory=list)
    _scales: dict[int, Tensor] = field(default_factory=dict)

    def seed_step(self, step: int) -> None:
        """Random numbers of a step follow from (seed, step, rank), so there is no random state to save."""
        number = mix(self.seed, step, self.world.rank, 6)
        for generator in self.generators:
            generator.manual_seed(number)

    def loss_scale(self, count: int) -> Tensor:
        """Factor of a loss sum's gradient: DDP averages over ranks, the loss is a mean over `count`."""
        if count not in self._scales:
            scale = self.world.world_size / count
            self._scales[count] = torch.tensor(scale, device=self.world.device, dtype=self.dtype)
        return self._scales[count]


def train_step(parts: Parts, batch: Batch, clip_norm: float | None, sums: Sums | None) -> Tensor | None:
    """One optimizer step on a global batch. Collective: all ranks must call.

    Args:
        sums: takes the sums of this rank's share; None where nothing is logged.

    Returns:
        The norm of the gradient before clipping, where it was needed.
    """
    for parameter in parts.parameters:  # zero_grad(set_to_none=True) in half the time; here, not after the
        parameter.grad = None  # step, so that the allocator reuses the memory: 13 % of a step of a large MLP
    parts.world.copy_from_rank0(parts.shared_buffers)
    task, scaler, loss = parts.task, parts.scaler, None
    last = len(batch.microbatches) - 1
    for i, (inputs, targets, weight_B) in enumerate(batch.microbatches):
        with reduces_gradients(parts.model, i == last):
            with parts.autocast:
                outputs = task.forward(parts.model, inputs)
                loss_sum = task.loss_sum(outputs, targets, weight_B)
            scaled = loss_sum if scaler is None else scaler.scale(loss_sum)
            scaled.backward(parts.loss_scale(batch.count))  # type: ignore[no-untyped-call]
        loss_sum = loss_sum.detach()
        loss = loss_sum if loss is None else loss + loss_sum
        if sums is not None:
            with torch.no_grad():
                sums.add({"loss": loss_sum, **task.sums(outputs, targets, weight_B)})
    assert loss is not None
    if scaler is not None:
        scaler.unscale_(parts.optimizer)
    norm = None
    if clip_norm is not None:
        norm = nn.utils.clip_grad_norm_(parts.parameters, clip_norm)
    elif sums is not None:
        norm = gradient_norm(parts.parameters)
    parts.guard.step(loss, scaler)
    return norm


@dataclass
class Point:
    """What is known at a log point, about the global batch of that step alone."""

    state: State
    epoch: int
    metrics: dict[str, float]
    lr: float
    grad_norm: float
    step_seconds: float  # mean since the last log point, as is what follows
    samples_per_second: float
    data_wait_share: float


class Recorder(Protocol):
    """Where results go. Every rank calls it; effects happen on rank 0 only."""

    def log(self, point: Point) -> None: ...
    def log_evaluation(self, state: State, metrics: Mapping[str, float]) -> None: ...
    def save(self, state: State) -> None: ...
    def save_failed(self) -> bool: ...
    def finish(self) -> None: ...


def train(
    parts: Parts,
    batches: Batches,
    state: State,
    config: Config,
    *,
    total_steps: int,
    watch: Watch,
    evaluation: Callable[[], dict[str, float]] | None,
    recorder: Recorder,
    profiler: torch.profiler.profile | None = None,
) -> Exit | None:
    """Run optimizer steps until `total_steps`. Collective: all ranks must call.

    Returns:
        None at the end, or how a signal ended it.

    Raises:
        NonFiniteError: a step had infinite or NaN gradients and train.nonfinite=raise.
        RuntimeError: a rank could not write its part of a checkpoint.
    """
    stream = batches.starting_at(state.epoch, state.samples)
    log_every, save_every = config.log.every_steps, config.checkpoint.every_steps
    clock, stop, stopped_early = Clock(state.step), None, False
    while state.step < total_steps and stop is None and not stopped_early:
        batch = clock.wait_for(stream)
        step = state.step + 1
        logs = step % log_every == 0
        evaluates = evaluation is not None and evaluates_at(step, batch, total_steps, config)
        saves = step == total_steps or (save_every is not None and step % save_every == 0)
        pauses = logs or evaluates or saves or watch.due(step)
        sums = Sums(parts.world.device) if pauses else None

        parts.seed_step(step)
        norm = train_step(parts, batch, config.train.clip_norm, sums if logs else None)
        lr = parts.optimizer.param_groups[0]["lr"]
        parts.scheduler.step()
        if parts.ema is not None:
            parts.ema.update()
        state.advance(batch)
        if profiler is not None:
            profiler.step()
        if sums is None:
            continue

        bad_steps, own_fault = parts.guard.read()  # host sync
        watch.tell(sums, step, failed=recorder.save_failed(), nonfinite=own_fault)
        reduced = sums.reduce(parts.world)  # host sync
        verdict = watch.read(reduced, step)
        if logs:
            recorder.log(point_of(state, batch, reduced, parts.task, lr, norm, clock))
            clock.restart(step)
        if verdict.failed_ranks:
            recorder.finish()  # raises what hindered it
        heed(verdict, bad_steps, state, parts.world, sticky=parts.guard.sticky)
        stop = verdict.stop
        if evaluates and evaluation is not None:
            metrics = evaluation()
            saves |= improves(state, metrics[config.checkpoint.metric], config.checkpoint)
            recorder.log_evaluation(state, metrics)
            patience = config.train.early_stop_patience
            stopped_early = patience is not None and state.evaluations_without_gain >= patience
            clock.restart(step)
        if saves or stopped_early or stop is not None:
            recorder.save(state)
    return stop


class Clock:
    """How long steps take, and how much of it is waiting for data."""

    def __init__(self, step: int) -> None:
        self.restart(step)

    def restart(self, step: int) -> None:
        """Measure from here on, after step `step`."""
        self.step, self.started, self.waited = step, time.perf_counter(), 0.0

    def wait_for(self, stream: Iterator[Batch]) -> Batch:
        before = time.perf_counter()
        batch = next(stream)
        self.waited += time.perf_counter() - before
        return batch

    def read(self, step: int) -> tuple[float, float]:
        """(seconds a step, share of them spent waiting for data) since the last restart."""
        seconds = time.perf_counter() - self.started
        return seconds / (step - self.step), self.waited / seconds


def evaluates_at(step: int, batch: Batch, total_steps: int, config: Config) -> bool:
    """Tell whether an evaluation follows this step: by steps, at an epoch's end, at the very end."""
    by_steps, by_epochs = config.eval.every_steps, config.eval.every_epochs
    if by_steps is not None and step % by_steps == 0:
        return True
    if by_epochs is not None and batch.ends_epoch and (batch.epoch + 1) % by_epochs == 0:
        return True
    return step == total_steps


def point_of(
    state: State,
    batch: Batch,
    reduced: Mapping[str, float],
    task: Task,
    lr: float,
    norm: Tensor | None,
    clock: Clock,
) -> Point:
    """The log point of a step, from the reduced sums."""
    step_seconds, wait_share = clock.read(state.step)
    return Point(
        state=state,
        epoch=batch.epoch,
        metrics=task.finish({k: v for k, v in reduced.items() if not k.startswith("flag/")}, batch.count),
        lr=lr,
        grad_norm=float("nan") if norm is None else norm.item(),  # host sync
        step_seconds=step_seconds,
        samples_per_second=batch.count / step_seconds,
        data_wait_share=wait_share,
    )


def heed(verdict: Verdict, bad_steps: int, state: State, world: World, *, sticky: bool) -> None:
    """Do what all ranks have to do alike about faults.

    Raises:
        NonFiniteError: steps were not finite, and that ends the run.
    """
    ranks = ", ".join(map(str, verdict.nonfinite_ranks))
    whose = f"the loss of rank {ranks} was not finite" if ranks else "the losses were finite"
    if sticky and bad_steps:
        first = state.step - bad_steps + 1
        raise NonFiniteError(
            f"step {first}: infinite or NaN gradients ({whose}); "
            f"the weights are those of step {first - 1}; {CURES}"
        )
    if sticky and ranks:  # under fp16, whose scaler leaves out the steps itself
        raise NonFiniteError(f"at or before step {state.step} {whose}; {CURES}")
    state.skipped_steps += bad_steps
    if bad_steps and world.is_rank0:
        text = "%d step(s) up to step %d left out: infinite or NaN gradients (%s)"
        logger.warning(text, bad_steps, state.step, whose)


def improves(state: State, value: float, config: Checkpoint) -> bool:
    """Note an evaluation; tell whether it is the best so far. NaN and infinity never are."""
    best = state.best_value
    better = math.isfinite(value)
    if better and best is not None:
        better = value < best if config.metric_mode is MetricMode.min else value > best
    if better:
        state.best_value, state.best_step, state.evaluations_without_gain = value, state.step, 0
    else:
        state.evaluations_without_gain += 1
    return better


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every part back into its own: a model may keep some frozen."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


@torch.no_grad()
def evaluate(
    module: nn.Module,
    task: Task,
    microbatches: Iterable[Microbatch],
    *,
    world: World,
    autocast: AbstractContextManager[object],
) -> tuple[dict[str, float], int]:
    """Metrics of a part of the data, each sample counted once, and their number.

    On the bare module, so that a rank may have more microbatches than another.
    Collective: all ranks must call.
    """
    sums = Sums(world.device)
    with evaluating(module):
        for inputs, targets, weight_B in microbatches:
            with autocast:
                outputs = task.forward(module, inputs)
                loss_B = task.loss_B(outputs, targets).to(sums.dtype)
            loss_sum = loss_B.sum() if weight_B is None else (loss_B * weight_B).sum()
            count = len(loss_B) if weight_B is None else int(weight_B.sum())  # host sync, only for padding
            sums.add({**task.sums(outputs, targets, weight_B), "loss": loss_sum, "flag/count": float(count)})
    reduced = sums.reduce(world)  # host sync
    total = round(reduced.pop("flag/count"))
    return task.finish(reduced, total), total
