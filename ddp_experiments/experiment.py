"""The composition root: build, agree, join, resume, train, test, close. It reads like a table of contents."""

import logging
import shlex
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_experiments import identity, optim, parallel, targets
from ddp_experiments.checkpoint import directories
from ddp_experiments.checkpoint.export import checkpoint_of, load_weights, weights_in
from ddp_experiments.checkpoint.names import model_tensors, optimizer_state, restore_optimizer
from ddp_experiments.checkpoint.tensors import copy_into
from ddp_experiments.config import Config, NonFinite, Precision
from ddp_experiments.data import Batches, Microbatch, Splits, evaluation_batches
from ddp_experiments.data.loader import in_memory
from ddp_experiments.data.order import smallest_share
from ddp_experiments.environment import Environment
from ddp_experiments.errors import Exit, Refused, Stopped
from ddp_experiments.health import Watch, stop_signals
from ddp_experiments.loop import Parts, Point, State, evaluate, train
from ddp_experiments.tasks import Task
from ddp_experiments.tracking import Tracker, log_lines, profiling
from ddp_experiments.world import Meeting, World, choose_device, join

logger = logging.getLogger("ddp_experiments")
STATUS_SECONDS = 10.0


def run(config: Config, saved: Mapping[str, Any], environment: Environment, job: Path | None) -> float | None:
    """Run an experiment as one of its ranks. Collective: all ranks must call.

    Args:
        saved: the settings as they are written down.
        job: the folder, where a sweep has made it.

    Returns:
        The best value of checkpoint.metric, for sweepers; None without evaluations.
    """
    what = build(config, environment)  # first: what is refused here leaves no folder and no group
    meeting = Meeting(environment, config.mode.init_timeout_seconds)
    horizon = targets.takes(config.scheduler, "scheduler", "total_steps")
    with (
        identity.claim(config, saved, meeting, rank=environment.rank, job=job, horizon=horizon) as folder,
        log_lines(folder, environment.rank),
        reported(folder) as progress,
        stop_signals() as request,
    ):
        checkpoint = find_checkpoint(folder, meeting)
        progress.state = read_state(checkpoint, len(what.splits.train))  # type: ignore[arg-type]
        with join(config.mode, environment, meeting) as world:
            place = Place(folder, progress, world, Watch(world, request))
            if config.eval_only:
                return evaluate_only(config, saved, what, place)
            return train_and_test(config, saved, what, place, checkpoint)


@dataclass(frozen=True)
class Place:
    """Where this start runs and writes."""

    folder: identity.Run
    progress: "Progress"
    world: World
    watch: Watch


def train_and_test(
    config: Config, saved: Mapping[str, Any], what: "What", place: Place, checkpoint: Path | None
) -> float | None:
    """Train from where the run stands, then evaluate the test part from the best weights.

    Nothing of it outlives the function: the group can't be closed while DDP holds it. Collective: all ranks must call.
    """
    folder, progress, world, state = place.folder, place.progress, place.world, place.progress.state
    batches = what.batches(config, world)
    total_steps = state.step + steps_left(config, batches, state)
    nothing_new = progress.was_done and total_steps == state.step
    with tracked(config, saved, place, total_steps) as tracker:
        parts = make_parts(config, what, world, total_steps)
        evaluators = what.evaluators(config, parts)
        if checkpoint is not None:
            restore(parts, checkpoint, state)
        parallel.settle(parts.model, parts.task, first_microbatches(batches, state), parts.autocast)
        recorder = Recorder(config, parts, tracker, place, length=batches.length)
        announce(config, place, parts, total_steps, checkpoint)
        with profiling(folder, world, config.log.profile_steps) as profiler:
            stop = train(
                parts,
                batches,
                state,
                config,
                total_steps=total_steps,
                watch=place.watch,
                evaluation=evaluators.get("eval"),
                recorder=recorder,
                profiler=profiler,
            )
        recorder.finish()
        if stop is not None:
            progress.stopped(stop)
        if "test" in evaluators and not nothing_new:
            copy_into(
                weights_in(checkpoint_of(folder.folder, "best")), model_tensors(parts.module), "the best step"
            )
            parts.ema = None  # the averages are in the weights now
            tracker.log_evaluation(state, evaluators["test"](), "test")
        progress.done(closing_lines(config, folder, state))
        return state.best_value


def evaluate_only(config: Config, saved: Mapping[str, Any], what: "What", place: Place) -> float | None:
    """Evaluate the weights of a run or file on the validation and test parts. Collective: all ranks must call."""
    value = None
    with tracked(config, saved, place, 0) as tracker:
        parts = make_parts(config, what, place.world, 1)
        parts.ema = None
        for part, evaluation in what.evaluators(config, parts).items():
            metrics = evaluation()
            tracker.log_evaluation(place.progress.state, metrics, part)
            value = metrics[config.checkpoint.metric] if value is None else value
        place.progress.done([f"run {place.folder.folder}"])
    return value


# ---- what is trained


@dataclass
class What:
    """The experiment without a place: data, task, and the model on the CPU."""

    splits: Splits
    task: Task
    module: nn.Module

    def batches(self, config: Config, world: World) -> Batches:
        return Batches(
            self.splits.train,
            global_batch_size=config.train.global_batch_size,
            accumulation_steps=config.train.accumulation_steps,
            drop_last=config.train.drop_last,
            seed=config.seed,
            rank=world.rank,
            world_size=world.world_size,
            device=world.device,
            dtype=dtype_of(config),
            num_workers=config.train.num_workers,
            overfit_one_batch=config.train.overfit_one_batch,
        )

    def evaluators(self, config: Config, parts: Parts) -> dict[str, Callable[[], dict[str, float]]]:
        """A function for each part there is (eval, test) that evaluates it on all ranks."""
        chosen = {"eval": self.splits.validation, "test": self.splits.test if config.eval.test else None}
        return {name: _evaluator(config, parts, data) for name, data in chosen.items() if data is not None}


def build(config: Config, environment: Environment) -> What:
    """Make data, task and model from the config and the seed; touches no device.

    Raises:
        Refused: the data is empty, too small for the batch, or a part refuses its arguments.
    """
    try:
        torch.manual_seed(config.seed)
        splits = make_splits(config)
        torch.manual_seed(config.seed)  # the weights must not depend on what the data drew
        module = targets.build(config.model, "model")
        task = targets.build(config.task, "task")
    except ValueError as error:
        raise Refused(str(error)) from error
    what = What(splits, task, module.to(dtype_of(config)))
    length = len(splits.train)  # type: ignore[arg-type]
    if length == 0:
        raise Refused("the training part has no samples; check the settings of data")
    world_size, accumulation = environment.world_size, config.train.accumulation_steps
    try:
        cpu = World(0, 0, 1, 1, 0, torch.device("cpu"), None, 1)
        sizes = what.batches(config, cpu).sizes()
    except ValueError as error:
        raise Refused(str(error)) from None
    share = smallest_share(sizes, world_size=world_size, accumulation_steps=accumulation)
    parallel.check_batch_statistics(module, share)
    if config.eval_only:
        load_weights(module, Path(config.init_from or config.from_run or ""), config.eval.weights.value)
    elif config.init_from:
        load_weights(module, Path(config.init_from))
    return what


def make_splits(config: Config) -> Splits:
    """The parts of the data. A Dataset class with a `split` argument is made once for each part."""
    if not targets.makes_dataset(config.data):
        splits: Splits = targets.build(config.data, "data")
        return splits
    if not targets.takes(config.data, "data", "split") or "split" in config.data:
        return Splits(targets.build(config.data, "data"))
    return Splits(
        *(targets.build({**config.data, "split": s}, "data") for s in ("train", "validation", "test"))
    )


def dtype_of(config: Config) -> torch.dtype:
    return torch.float64 if config.train.precision is Precision.fp64 else torch.float32


def make_parts(config: Config, what: What, world: World, total_steps: int) -> Parts:
    """The model on its device and laid over the ranks, and everything that changes it.

    Collective: all ranks must call.
    """
    train_config, device = config.train, world.device
    module = what.module.to(device)
    if train_config.compile:
        module.compile()
    model = parallel.lay_out(module, world)
    groups = optim.parameter_groups(module, config.optimizer, train_config.no_weight_decay)
    optimizer = targets.build(config.optimizer, "optimizer", params=groups)
    scheduler = targets.build(config.scheduler, "scheduler", optimizer=optimizer, total_steps=total_steps)
    low = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(train_config.precision)
    scaler = torch.amp.GradScaler(device.type) if train_config.precision is Precision.fp16 else None
    parameters = [p for p in module.parameters() if p.requires_grad]
    sticky = train_config.nonfinite is NonFinite["raise"]
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    elif device.type == "mps":
        generators.append(torch.mps._get_default_mps_generator())
    return Parts(
        model=model,
        module=module,
        task=what.task,
        optimizer=optimizer,
        scheduler=scheduler,
        guard=optim.FiniteGuard(parameters, optimizer, device, sticky=sticky, scaled=scaler is not None),
        autocast=nullcontext() if low is None else torch.autocast(device.type, dtype=low),
        scaler=scaler,
        ema=None if train_config.ema_decay is None else optim.Ema(module, train_config.ema_decay),
        world=world,
        seed=config.seed,
        dtype=dtype_of(config),
        parameters=parameters,
        generators=generators,
    )


def _evaluator(config: Config, parts: Parts, data: Dataset[Any]) -> Callable[[], dict[str, float]]:
    world = parts.world
    data = in_memory(data, world.device, parts.dtype)

    def evaluation() -> dict[str, float]:
        world.copy_from_rank0(parts.module.buffers())  # rank 0's are the run's
        microbatches = evaluation_batches(
            data,
            microbatch_size=config.eval.microbatch_size,
            seed=config.seed,
            rank=world.rank,
            world_size=world.world_size,
            device=world.device,
            dtype=parts.dtype,
            num_workers=config.train.num_workers,
        )
        with parts.ema.in_place() if parts.ema is not None else nullcontext():
            metrics, count = evaluate(
                parts.module, parts.task, microbatches, world=world, autocast=parts.autocast
            )
        assert count == len(data), f"evaluated {count} of {len(data)} samples"  # type: ignore[arg-type]
        return metrics

    return evaluation


def steps_left(config: Config, batches: Batches, state: State) -> int:
    """Optimizer steps from here to the end: by steps or by epochs, whichever comes first."""
    left = []
    if config.train.max_steps is not None:
        left.append(config.train.max_steps - state.step)
    if config.train.max_epochs is not None:
        epochs = config.train.max_epochs - state.epoch
        left.append(epochs * batches.steps_per_epoch - batches.steps_before(state.samples))
    return max(0, min(left))


def first_microbatches(batches: Batches, state: State) -> Iterator[Microbatch]:
    yield from next(batches.starting_at(state.epoch, state.samples)).microbatches


# ---- continuing


def find_checkpoint(folder: identity.Run, meeting: Meeting) -> Path | None:
    """The checkpoint to go on from; None for a fresh start. All ranks must call.

    Raises:
        NoUsableCheckpoint: the run has checkpoints, but none is sound.
    """

    def newest() -> str | None:
        found = directories.newest(folder.folder / "checkpoints")
        return str(found) if found else None

    found = meeting.rank0_decides("checkpoint", newest)
    return Path(found) if found else None


def read_state(checkpoint: Path | None, length: int) -> State:
    """Where the run stands.

    Raises:
        Refused: the data has another length than when the checkpoint was written.
    """
    if checkpoint is None:
        return State()
    saved = directories.read_json(checkpoint / "state.json")
    if saved["data_length"] != length:
        raise Refused(
            f"{checkpoint} was trained on {saved['data_length']} samples, but data has {length}; start a new run"
        )
    state = State(**saved["state"])
    state.best_value = None if state.best_value is None else float(state.best_value)
    return state


def restore(parts: Parts, checkpoint: Path, state: State) -> None:
    """Give the parts what they had learnt. The schedule is not read but walked: it follows from config and step."""
    saved = directories.read_json(checkpoint / "state.json")
    copy_into(directories.tensors(checkpoint, "model"), model_tensors(parts.module), str(checkpoint))
    restore_optimizer(
        parts.module, parts.optimizer, directories.tensors(checkpoint, "optimizer"), saved["optimizer"]
    )
    if parts.ema is not None:
        averages = directories.tensors(checkpoint, "ema")
        copy_into(
            averages or {k: p.detach() for k, p in parts.ema.parameters.items()},
            parts.ema.average,
            str(checkpoint),
        )
    if parts.scaler is not None and saved["scaler"] is not None:
        parts.scaler.load_state_dict(saved["scaler"])
    elif parts.scaler is not None:
        logger.warning("%s has no loss scale of fp16; starting from the first one", checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Detected call of `lr_scheduler.step"
        )  # we walk it on purpose
        for _ in range(state.step):
            parts.scheduler.step()
    here = {"world_size": parts.world.world_size, "threads": parts.world.threads}
    for key, now in here.items():
        if saved[key] != now and parts.world.is_rank0:
            logger.warning(
                "%s was %s, now %s: the same experiment, but no longer bit for bit", key, saved[key], now
            )


# ---- recording


class Recorder:
    """Takes points, evaluations and states from the loop. Every rank calls it; effects happen on rank 0 only."""

    def __init__(self, config: Config, parts: Parts, tracker: Tracker, place: Place, *, length: int) -> None:
        self.config, self.parts, self.tracker, self.length = config, parts, tracker, length
        self.progress, lock = place.progress, place.folder.lock
        self.writer = directories.Writer(
            place.folder.folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            is_writer=place.world.is_rank0,
            is_mine=lock.is_mine if lock else lambda: False,
        )

    def log(self, point: Point) -> None:
        self.tracker.log(point)
        self.progress.running()

    def log_evaluation(self, state: State, metrics: Mapping[str, float]) -> None:
        self.tracker.log_evaluation(state, metrics)

    def save(self, state: State) -> None:
        parts = self.parts
        tensors, plain = optimizer_state(parts.module, parts.optimizer)
        kinds: dict[str, Mapping[str, Tensor]] = {"model": model_tensors(parts.module), "optimizer": tensors}
        if parts.ema is not None:
            kinds["ema"] = parts.ema.average
        best = None
        if state.best_step is not None:
            best = {
                "step": state.best_step,
                "metric": self.config.checkpoint.metric,
                "value": state.best_value,
            }
        self.writer.save(
            state.step,
            kinds,
            {
                "state": asdict(state),
                "data_length": self.length,
                "world_size": parts.world.world_size,
                "threads": parts.world.threads,
                "optimizer": plain,
                "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
            },
            best,
        )
        self.progress.running()

    def save_failed(self) -> bool:
        return self.writer.error is not None

    def finish(self) -> None:
        """Wait for the last save; raise on all ranks if it failed. Collective: all ranks must call."""
        self.writer.wait()
        failed = torch.tensor(float(self.save_failed()), device=self.parts.world.device)
        self.parts.world.all_reduce_sum(failed)
        if self.writer.error is not None:
            raise self.writer.error
        if failed.item():  # host sync
            raise RuntimeError("another rank could not write the last checkpoint")


class Progress:
    """Keeps status.json true, and says the last word."""

    def __init__(self, folder: identity.Run) -> None:
        self.folder, self.state, self.written = folder, State(), 0.0
        status = folder.folder / "status.json"
        self.was_done = status.exists() and directories.read_json(status).get("state") == "done"

    def running(self) -> None:
        if time.monotonic() - self.written > STATUS_SECONDS:
            self.folder.status("running", step=self.state.step)
            self.written = time.monotonic()

    def done(self, lines: Iterable[str]) -> None:
        self.folder.status("done", step=self.state.step, exit_code=Exit.DONE)
        for line in lines:
            logger.info(line)

    def stopped(self, code: Exit) -> None:
        """Leave after a save.

        Raises:
            Stopped: always.
        """
        state = "interrupted" if code is Exit.INTERRUPTED else "preempted"
        self.folder.status(state, step=self.state.step, exit_code=code)
        logger.info("%s after step %d, saved; go on with: %s", state, self.state.step, self.go_on())
        raise Stopped(code)

    def go_on(self) -> str:
        return f"python train.py --continue {shlex.quote(str(self.folder.folder))}"

    def failed(self, error: BaseException) -> None:
        self.folder.status(
            "failed", step=self.state.step, reason=f"{type(error).__name__}: {error}", exit_code=Exit.FAILED
        )
        saved = directories.steps(self.folder.folder / "checkpoints")
        last = f"last checkpoint {saved[-1][1]}, go on with: {self.go_on()}" if saved else "no checkpoint yet"
        where = f"{socket.gethostname()}, step {self.state.step}"
        error.add_note(
            f"{type(error).__name__} on {where}: {str(error).splitlines()[0] if str(error) else ''}; {last}"
        )


@contextmanager
def reported(folder: identity.Run) -> Iterator[Progress]:
    """Write status.json from the start of the block to its end, however it ends."""
    progress = Progress(folder)
    progress.running()
    try:
        yield progress
    except Stopped:
        raise
    except KeyboardInterrupt:
        folder.status("interrupted", step=progress.state.step, reason="at once", exit_code=Exit.INTERRUPTED)
        raise
    except BaseException as error:
        progress.failed(error)
        raise


@contextmanager
def tracked(config: Config, saved: Mapping[str, Any], place: Place, total_steps: int) -> Iterator[Tracker]:
    """The tracker of this start, closed with the session marked as succeeded or failed."""
    world = place.world
    tracker = Tracker(place.folder, config, world, step=place.progress.state.step, total_steps=total_steps)
    succeeded = False
    try:
        if world.is_rank0:
            where = {"world_size": world.world_size, "device": str(world.device), "threads": world.threads}
            tracker.describe(
                saved, identity.record_start(place.folder, overrides=saved_overrides(), world=where)
            )
        yield tracker
        succeeded = True
    finally:
        tracker.close(succeeded=succeeded)


def saved_overrides() -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    return [str(o) for o in HydraConfig.get().overrides.task] if HydraConfig.initialized() else []


def announce(config: Config, place: Place, parts: Parts, total: int, checkpoint: Path | None) -> None:
    """Say what starts, on rank 0."""
    world, step = place.world, place.progress.state.step
    if not world.is_rank0:
        return
    logger.info("run %s", place.folder.folder)
    ranks = f"{world.world_size} rank{'s' if world.world_size > 1 else ''} on {world.device.type}, {world.threads} thread(s) each"
    parameters = f"{sum(p.numel() for p in parts.parameters):,} parameters"
    logger.info("%s; %s; %d steps of %d samples", ranks, parameters, total, config.train.global_batch_size)
    if checkpoint is not None:
        rest = "" if total > step else ": nothing left to train"
        logger.info("continuing after step %d (%s)%s", step, checkpoint.name, rest)


def closing_lines(config: Config, folder: identity.Run, state: State) -> Iterator[str]:
    if state.best_value is not None:
        yield f"best {config.checkpoint.metric} {state.best_value:.4g} at step {state.best_step}"
    yield f"run {folder.folder}"
    yield "see it with: tensorboard --logdir outputs"
