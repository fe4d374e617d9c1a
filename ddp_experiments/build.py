"""From the config to what is trained: data, task and model first, then the parts that change the model."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from ddp_experiments import optim, parallel, targets
from ddp_experiments.checkpoint.export import load_weights
from ddp_experiments.checkpoint.names import model_tensors
from ddp_experiments.config import Config, NonFinite, Precision
from ddp_experiments.data import Batches, EvaluationBatches, Microbatch, Splits
from ddp_experiments.data.loader import said_by, to_device
from ddp_experiments.data.order import seed_host, smallest_share
from ddp_experiments.environment import Environment
from ddp_experiments.errors import Refused
from ddp_experiments.identity import names_a_run
from ddp_experiments.loop import Parts, State, evaluate, evaluating
from ddp_experiments.tasks import Task
from ddp_experiments.world import World, choose_device


@dataclass
class Ingredients:
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
        found = evaluated(config, self.splits)
        return {name: _evaluator(config, parts, data) for name, data in found.items() if data is not None}


def build(config: Config, environment: Environment) -> Ingredients:
    """Make data, task and model from the config and the seed; touches no device.

    Raises:
        Refused: the data is empty, too small for the batch, or a part refuses its arguments.
    """
    try:
        seed_everything(config.seed)
        splits = make_splits(config)
        seed_everything(config.seed)  # the weights must not depend on what the data drew
        module = targets.build(config.model, "model")
        task = targets.build(config.task, "task")
        model_tensors(module)  # all of its state can be saved
    except ValueError as error:
        raise Refused(str(error)) from error
    what = Ingredients(splits, task, module.to(dtype_of(config)))
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
    if not config.eval_only:
        if not any(p.requires_grad for p in module.parameters()):
            raise Refused(f"{type(module).__name__} has no parameter to train; check the settings of model")
        parallel.check_batch_statistics(module, share, skips=config.train.nonfinite is NonFinite.skip)
    elif not any(evaluated(config, splits).values()):
        raise Refused("eval_only=true, but data has neither a validation nor a test part")
    if choose_device(config.mode, environment).type == "cpu":  # a model may need an accelerator
        check_fit(what, dtype_of(config))
    if config.eval_only:
        load_weights(module, Path(config.from_run or config.init_from or ""), config.eval.weights.value)
    elif config.init_from and not names_a_run(config):
        load_weights(module, Path(config.init_from))
    return what


def seed_everything(seed: int) -> None:
    """Seed every generator that data and models may draw from while they are made."""
    torch.manual_seed(seed)  # the devices' as well
    seed_host(seed)


def evaluated(config: Config, splits: Splits) -> dict[str, Dataset[Any] | None]:
    """The parts of the data that are evaluated, eval and test; None where there is no sample."""
    chosen = {"eval": splits.validation, "test": splits.test if config.eval.test else None}
    return {k: v if v is not None and len(v) else None for k, v in chosen.items()}  # type: ignore[arg-type]


def check_fit(what: Ingredients, dtype: torch.dtype) -> None:
    """Find out whether model, data and task fit one another, by the shapes of one sample.

    Raises:
        Refused: they don't.
    """
    data = what.splits.train
    items = data.__getitems__([0]) if hasattr(data, "__getitems__") else [data[0]]
    sample = said_by(data, "collate", default_collate)(items)
    if not (isinstance(sample, list | tuple) and len(sample) == 2):
        raise Refused("an item of the data must be (input, target); see docs/own.md")
    inputs, targets_ = to_device(sample, torch.device("cpu"), dtype)
    try:
        with torch.no_grad(), evaluating(what.module):
            what.task.loss_B(what.task.forward(what.module, inputs), targets_)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        shapes = [str(tuple(t.shape)) for t in (inputs, targets_) if isinstance(t, torch.Tensor)]
        parts = f"{type(what.module).__name__} and {type(what.task).__name__}"
        reason = str(error).partition("\n")[0]
        raise Refused(
            f"{parts} don't take this data, input and target {' and '.join(shapes)}: {reason}; "
            "choose model, data and task that fit, or their settings"
        ) from error


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


def make_parts(
    config: Config, what: Ingredients, world: World, total_steps: int, first: Microbatch | None
) -> Parts:
    """The model on its device and laid over the ranks, and everything that changes it.

    Collective: all ranks must call.

    Args:
        first: a microbatch of this rank; None on one rank, or where nothing is trained.
    """
    train_config, device = config.train, world.device
    if device.type == "cuda":
        torch.backends.cudnn.deterministic = train_config.deterministic
        torch.backends.cudnn.benchmark = not train_config.deterministic
    module = what.module.to(device)
    if train_config.compile:
        module.compile()
    low = {Precision.bf16: torch.bfloat16, Precision.fp16: torch.float16}.get(train_config.precision)
    autocast: AbstractContextManager[object] = (
        nullcontext() if low is None else torch.autocast(device.type, dtype=low)
    )
    model, shared = module, list[torch.Tensor]()
    if first is not None:
        model, shared = parallel.lay_out(module, world, what.task, first, autocast)
    groups = optim.parameter_groups(module, config.optimizer, train_config.no_weight_decay)
    optimizer = targets.build(config.optimizer, "optimizer", params=groups)
    # A schedule is walked to its step when a run is continued, and goes on when a step is left out.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    scheduler = targets.build(config.scheduler, "scheduler", optimizer=optimizer, total_steps=total_steps)
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
        autocast=autocast,
        scaler=scaler,
        ema=None if train_config.ema_decay is None else optim.Ema(module, train_config.ema_decay),
        world=world,
        seed=config.seed,
        dtype=dtype_of(config),
        parameters=parameters,
        shared_buffers=shared,
        generators=generators,
    )


def _evaluator(config: Config, parts: Parts, data: Dataset[Any]) -> Callable[[], dict[str, float]]:
    world = parts.world
    microbatches = EvaluationBatches(
        data,
        microbatch_size=config.eval.microbatch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.world_size,
        device=world.device,
        dtype=parts.dtype,
        num_workers=config.train.num_workers,
    )

    def evaluation() -> dict[str, float]:
        world.copy_from_rank0(parts.module.buffers())  # rank 0's are the run's
        with parts.ema.in_place() if parts.ema is not None else nullcontext():
            metrics, count = evaluate(
                parts.module, parts.task, microbatches, world=world, autocast=parts.autocast
            )
        assert count == len(data), f"evaluated {count} of {len(data)} samples"  # type: ignore[arg-type]
        return metrics

    return evaluation


def steps_left(config: Config, batches: Batches, state: State) -> int:
    """Optimizer steps from here to the end: by steps or by epochs, whichever comes first."""
    patience = config.train.early_stop_patience
    if patience is not None and state.evaluations_without_gain >= patience:
        return 0  # it has ended early
    left = []
    if config.train.max_steps is not None:
        left.append(config.train.max_steps - state.step)
    if config.train.max_epochs is not None:
        epochs = config.train.max_epochs - state.epoch
        left.append((epochs - 1) * batches.steps_per_epoch + batches.steps_from(state.samples))
    return max(0, min(left))


def first_microbatch(batches: Batches, state: State) -> Microbatch:
    """The next microbatch of this rank."""
    return next(batches.starting_at(state.epoch, state.samples)).microbatches[0]
