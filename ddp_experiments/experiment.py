"""The composition root: build, agree, join, resume, train, test, close. It reads like a table of contents."""

import logging
from contextlib import closing
from pathlib import Path

from ddp_experiments import agreement, identity, targets
from ddp_experiments.build import Ingredients, build, first_microbatch, make_parts, steps_left
from ddp_experiments.checkpoint.export import checkpoint_of, weights_in
from ddp_experiments.checkpoint.names import load, model_tensors
from ddp_experiments.config import Config
from ddp_experiments.environment import Environment
from ddp_experiments.errors import Stopped
from ddp_experiments.health import StopRequest, Watch
from ddp_experiments.identity import Origin
from ddp_experiments.loop import train
from ddp_experiments.meeting import Meeting
from ddp_experiments.recorder import Place, Recorder, announce, closing_lines, reported, tracked
from ddp_experiments.resume import find_checkpoint, read_state, restore
from ddp_experiments.tracking import log_lines, profiling, was_tested
from ddp_experiments.world import join, set_threads

logger = logging.getLogger("ddp_experiments")


def run(
    config: Config, origin: Origin, environment: Environment, meeting: Meeting, request: StopRequest
) -> float | None:
    """Run an experiment as one of its ranks. Collective: all ranks must call.

    Returns:
        The best value of checkpoint.metric, for sweepers; None without evaluations.
    """
    set_threads(config.mode, environment)
    what = build(config, environment)  # what is refused here leaves no folder and no group
    odd = agreement.compare(config, origin, what, meeting)
    horizon = targets.has_horizon(config.scheduler)
    with (
        identity.claim(config, origin, meeting, rank=environment.rank, horizon=horizon) as claimed,
        log_lines(claimed, environment.rank),
        reported(claimed, environment.rank) as progress,
    ):
        for line in odd:
            logger.warning(line)
        meeting.leave_word("folder", str(claimed.folder))
        checkpoint = find_checkpoint(claimed.folder, meeting)
        progress.state = read_state(checkpoint, len(what.splits.train))  # type: ignore[arg-type]
        with join(config.mode, environment, meeting) as world:
            place = Place(claimed, progress, world, Watch(world, request, progress.state.step))
            if config.eval_only:
                return evaluate_only(config, origin, what, place)
            return train_and_test(config, origin, what, place, checkpoint)


def train_and_test(
    config: Config, origin: Origin, what: Ingredients, place: Place, checkpoint: Path | None
) -> float | None:
    """Train from where the run stands, then evaluate the test part from the best weights.

    Nothing of it outlives the function: the group can't be closed while DDP holds it.
    Collective: all ranks must call.
    """
    progress, world, state, folder = place.progress, place.world, place.progress.state, place.run.folder
    batches = what.batches(config, world)
    total_steps = state.step + steps_left(config, batches, state)
    tested = total_steps == state.step and was_tested(folder, total_steps)
    with tracked(config, origin, place, total_steps) as tracker:
        first = first_microbatch(batches, state) if world.world_size > 1 else None
        parts = make_parts(config, what, world, total_steps, first)
        evaluators = what.evaluators(config, parts)
        if checkpoint is not None:
            restore(parts, checkpoint, state)
        recorder = Recorder(config, parts, tracker, place, length=batches.length)
        announce(config, place, parts, total_steps, checkpoint)
        with (
            closing(recorder),
            place.watch.request.deferred(),
            profiling(place.run, world, config.log.profile_steps) as profiler,
        ):
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
            raise Stopped(stop)
        if "test" in evaluators and not tested:
            if world.is_rank0:
                load(parts.module, weights_in(checkpoint_of(folder, "best")), "the best step")
            world.copy_from_rank0(model_tensors(parts.module).values())
            parts.ema = None  # the averages are in the weights now
            tracker.log_evaluation(state, evaluators["test"](), "test")
        progress.done(closing_lines(config, place.run, state))
        return state.best_value


def evaluate_only(config: Config, origin: Origin, what: Ingredients, place: Place) -> float | None:
    """Evaluate the weights of a run or file on the validation and test parts.

    Collective: all ranks must call.
    """
    value = None
    with tracked(config, origin, place, 0) as tracker:
        parts = make_parts(config, what, place.world, 1, None)
        parts.ema = None
        for part, evaluation in what.evaluators(config, parts).items():
            metrics = evaluation()
            tracker.log_evaluation(place.progress.state, metrics, part)
            value = metrics[config.checkpoint.metric] if value is None else value
        place.progress.done([f"run {identity.shown(place.run.folder)}"])
    return value
