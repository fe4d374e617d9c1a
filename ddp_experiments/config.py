"""The closed settings: names, types, defaults, help, and what a continuation may do with each.

No torch, no files, no environment. A setting's help, unit and resume rule stand beside its type:

- free   may differ when a run is continued
- ask    may differ when `resume.allow=[key]` names it
- fixed  may not differ: it would be another experiment
"""

import re
import types
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf


class ModeName(Enum):
    single = "single"
    multigpu = "multigpu"
    multinode = "multinode"


class Backend(Enum):
    auto = "auto"
    nccl = "nccl"
    gloo = "gloo"


class Precision(Enum):
    fp32 = "fp32"
    fp64 = "fp64"
    bf16 = "bf16"
    fp16 = "fp16"


NonFinite = Enum("NonFinite", {"raise": "raise", "skip": "skip"})  # `raise` can't be written as an attribute


class MetricMode(Enum):
    min = "min"
    max = "max"


class Weights(Enum):
    best = "best"
    last = "last"


def setting(default: Any, resume: str, help: str) -> Any:
    """Declare a setting with its resume rule (free, ask or fixed) and its help."""
    how = "default_factory" if isinstance(default, type) else "default"
    metadata = {"resume": resume, "help": help}
    return field(**{how: default}, metadata=metadata)


@dataclass
class Mode:
    """Where the experiment runs. Nothing here changes what is trained."""

    name: ModeName = setting(MISSING, "free", "set by the group: single, multigpu or multinode")
    nnodes: int | str = setting(MISSING, "free", "machines, or auto = what the launcher says")
    nproc_per_node: int | str = setting(
        MISSING, "free", "processes a machine; auto = what torchrun says, or one for each accelerator"
    )
    device: str = setting(
        "auto", "free", "auto, cpu, cuda, cuda:N or mps; auto takes an accelerator if there is one"
    )
    backend: Backend = setting(
        Backend.auto, "free", "of the process group; auto: nccl on CUDA, gloo elsewhere"
    )
    threads: int | str = setting(
        "auto", "free", "CPU threads a process, or auto = cores / processes of this machine"
    )
    timeout_seconds: int = setting(300, "free", "deadline of a collective, in seconds")
    init_timeout_seconds: int = setting(120, "free", "deadline for all ranks to meet, in seconds")
    max_restarts: int = setting(
        0, "free", "times that failed processes are started again, without torchrun; they continue the run"
    )
    node_rank: int | None = setting(
        None, "free", "number of this machine, from 0: to start its share without torchrun"
    )
    rdzv_endpoint: str | None = setting(
        None, "free", "HOST:PORT on the machine with node_rank 0, where the machines meet without torchrun"
    )


@dataclass
class Strategy:
    """How the model is laid over the ranks: degrees of one device mesh."""

    name: str = setting(MISSING, "free", "set by the group")
    replicate: int | str = setting(MISSING, "free", "data-parallel copies, or auto = all ranks")


@dataclass
class Train:
    """The optimizer steps."""

    global_batch_size: int = setting(
        64, "ask", "samples of one optimizer step, over all ranks and microbatches"
    )
    accumulation_steps: int = setting(1, "free", "microbatches a step on each rank; the global batch stays")
    max_epochs: int | None = setting(None, "free", "end after so many epochs; null = no such limit")
    max_steps: int | None = setting(None, "free", "end after so many optimizer steps; null = no such limit")
    drop_last: bool = setting(False, "fixed", "leave out the last, smaller batch of an epoch")
    clip_norm: float | None = setting(None, "ask", "largest 2-norm of the gradient; null = no clipping")
    precision: Precision = setting(Precision.fp32, "ask", "fp32, fp64, or bf16 and fp16 by autocast")
    nonfinite: NonFinite = setting(
        NonFinite["raise"], "free", "a step with inf or NaN gradients: raise ends the run, skip leaves it out"
    )
    no_weight_decay: list[str] = field(
        default_factory=lambda: ["*bias", "*norm*", "*Norm*"],
        metadata={
            "resume": "ask",
            "help": "patterns of parameters without weight decay, on model.path.name and on Class.name",
        },
    )
    ema_decay: float | None = setting(
        None, "ask", "moving average of the weights, used by evaluations; null = off"
    )
    early_stop_patience: int | None = setting(
        None, "ask", "end after so many evaluations in a row without a better checkpoint.metric; null = off"
    )
    compile: bool = setting(False, "free", "torch.compile the model: pays after about a thousand steps")
    deterministic: bool = setting(
        True, "free", "on CUDA only cuDNN kernels that repeat bit for bit; false may be faster"
    )
    num_workers: int = setting(0, "free", "loader processes a rank; data in memory needs none")
    overfit_one_batch: bool = setting(False, "fixed", "train on the first global batch again and again")


@dataclass
class Eval:
    """The validation part, each sample once, on all ranks."""

    every_steps: int | None = setting(
        None, "ask", "evaluate every so many optimizer steps; null = not by steps"
    )
    every_epochs: int | None = setting(1, "ask", "evaluate every so many epochs; null = not by epochs")
    microbatch_size: int = setting(256, "free", "samples of one forward pass on one device")
    weights: Weights = setting(
        Weights.best, "free", "eval_only=true takes the best or the last weights of the run"
    )
    test: bool = setting(True, "free", "evaluate the test part once at the end, from the best weights")


@dataclass
class Checkpoint:
    """When a step is saved, and what is kept."""

    every_steps: int | None = setting(
        None, "free", "save every so many steps; null = with best and at the end only"
    )
    keep_last: int = setting(2, "free", "newest checkpoints kept; the best one is always kept")
    metric: str = setting(
        "loss", "fixed", "what makes a checkpoint the best: a metric of the validation part"
    )
    metric_mode: MetricMode = setting(
        MetricMode.min, "fixed", "min: smaller is better; max: larger is better"
    )


@dataclass
class Log:
    """What is written while training."""

    every_steps: int = setting(10, "free", "optimizer steps between two log points")
    tensorboard: bool = setting(True, "free", "write TensorBoard events into the run folder")
    progress: bool = setting(True, "free", "one progress bar on rank 0 of a terminal; else plain lines")
    profile_steps: int = setting(0, "free", "trace so many steps with torch.profiler into the run folder")


@dataclass
class Resume:
    """Continuing a run. Set by `--continue DIR`, or by naming an existing run with run_id=NAME."""

    run: str | None = setting(None, "free", "folder of the run to continue; set by --continue DIR")
    allow: list[str] = setting(
        list, "free", "settings with the rule 'ask' that may differ from the saved run"
    )


@dataclass
class Sweep:
    """Sweeps, `-m`."""

    fail_fast: bool = setting(False, "free", "a failed job ends the sweep; else the others still run")


@dataclass
class Config:
    """An experiment. Open groups (model, data, task, optimizer, scheduler) are `_target_` plus arguments."""

    name: str = setting(MISSING, "free", "first folder below outputs/")
    run_id: str | None = setting(None, "free", "folder below the name; null = the time of the start")
    seed: int = setting(0, "fixed", "all randomness follows from it; 0 is a seed like any other")
    eval_only: bool = setting(
        False, "fixed", "no training: evaluate weights (with --from-run DIR or init_from=PATH)"
    )
    from_run: str | None = setting(None, "free", "the run whose settings were taken; set by --from-run DIR")
    init_from: str | None = setting(
        None, "fixed", "start from the weights of a run folder, checkpoint or file"
    )
    mode: Mode = setting(Mode, "free", "where it runs")
    strategy: Strategy = setting(Strategy, "free", "how the model is laid over ranks")
    train: Train = setting(Train, "free", "the optimizer steps")
    eval: Eval = setting(Eval, "free", "the evaluations")
    checkpoint: Checkpoint = setting(Checkpoint, "free", "saving")
    log: Log = setting(Log, "free", "logging")
    resume: Resume = setting(Resume, "free", "continuing")
    sweep: Sweep = setting(Sweep, "free", "sweeps")
    model: Any = setting(MISSING, "fixed", "open group")
    data: Any = setting(MISSING, "fixed", "open group")
    task: Any = setting(MISSING, "fixed", "open group")
    optimizer: Any = setting(MISSING, "ask", "open group")
    scheduler: Any = setting(MISSING, "ask", "open group")


OPEN_GROUPS = ("model", "data", "task", "optimizer", "scheduler")
GROUPS = ("mode", "strategy", *OPEN_GROUPS)
HORIZON = ("train.max_steps", "train.max_epochs")
SAVED = "saved_run"  # the name under which --from-run gives a saved config to Hydra
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.=-]{0,63}"
ENDPOINT_PATTERN = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):\d{1,5}"
DEVICE_PATTERN = r"auto|cpu|mps|cuda(:\d+)?"


def walk(schema: type = Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield (dotted key, field) of every setting, sections included."""
    for f in fields(schema):
        yield prefix + f.name, f
        if f.default_factory is not NO_DEFAULT and hasattr(f.default_factory, "__dataclass_fields__"):
            yield from walk(f.default_factory, f"{prefix}{f.name}.")  # type: ignore[arg-type]


def wanted(hint: Any) -> str:
    """What may be written for a setting of this type."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a word",
        type(None): "null",
    }
    if isinstance(hint, types.UnionType):
        return " or ".join("auto" if a is str and int in hint.__args__ else wanted(a) for a in hint.__args__)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"one of {', '.join(hint.__members__)}"
    return words.get(hint, "a list, [a,b]" if hint == list[str] else "a section")


def resume_rule(key: str, schedule_has_horizon: bool) -> str:
    """Return free, ask or fixed for a dotted key. The deepest declared part decides; a class change is fixed.

    The length of the run is free unless the learning rate follows from it.
    """
    if key.endswith("._target_"):
        return "fixed"
    if key in HORIZON and schedule_has_horizon:
        return "ask"
    rules = {k: f.metadata["resume"] for k, f in walk()}
    while key and key not in rules:
        key = key.rpartition(".")[0]
    return str(rules.get(key, "fixed"))


def conflicts(config: Config) -> Iterator[str]:
    """Yield what is wrong with values taken together or out of range; every line says what to write."""
    for key in ("name", "run_id"):
        value = getattr(config, key)
        if value is not None and (not re.fullmatch(NAME_PATTERN, value) or value.endswith(".tmp")):
            yield (
                f"{key}={value!r} becomes a folder: letters, digits, _ . = - only, 64 at most, "
                "first a letter or digit"
            )
    if config.seed < 0:
        yield f"seed={config.seed} must be at least 0"
    yield from _mode_conflicts(config.mode, config.strategy)
    yield from _train_conflicts(config.train)
    for section, least in ((config.eval, 1), (config.checkpoint, 1), (config.log, 1)):
        name = type(section).__name__.lower()
        for key in ("every_steps", "every_epochs", "microbatch_size", "keep_last"):
            value = getattr(section, key, None)
            if value is not None and value < least:
                off = "; null switches it off" if key.startswith("every") and name != "log" else ""
                yield f"{name}.{key}={value} must be at least {least}{off}"
    if config.log.profile_steps < 0:
        yield f"log.profile_steps={config.log.profile_steps} must be at least 0"
    if config.eval_only and not (config.from_run or config.init_from):
        yield "eval_only=true needs weights: add --from-run DIR or init_from=PATH"
    if config.eval_only and config.from_run and config.init_from:
        yield "eval_only=true takes one: --from-run DIR, or init_from=PATH (init_from=null leaves it out)"
    if config.eval_only and config.resume.run:
        yield "eval_only=true doesn't continue a run; type --from-run DIR instead of --continue DIR"


def _mode_conflicts(mode: Mode, strategy: Strategy) -> Iterator[str]:
    if not re.fullmatch(DEVICE_PATTERN, mode.device):
        yield f"mode.device={mode.device}: allowed are auto, cpu, cuda, cuda:N, mps; try mode.device=auto"
    elif mode.backend is Backend.nccl and mode.device in ("cpu", "mps"):
        yield f"mode.backend=nccl needs CUDA, but mode.device={mode.device}; try mode.backend=gloo"
    numbers = {
        "mode.nnodes": mode.nnodes,
        "mode.nproc_per_node": mode.nproc_per_node,
        "mode.threads": mode.threads,
        "strategy.replicate": strategy.replicate,
    }
    odd = {k for k, v in numbers.items() if v != "auto" and not (isinstance(v, int) and v >= 1)}
    yield from (f"{key}={numbers[key]} must be auto or at least 1; try {key}=auto" for key in sorted(odd))
    for key, least in (("timeout_seconds", 1), ("init_timeout_seconds", 1), ("max_restarts", 0)):
        if getattr(mode, key) < least:
            yield f"mode.{key}={getattr(mode, key)} must be at least {least}"
    for key in ("node_rank", "rdzv_endpoint"):
        if getattr(mode, key) is not None and mode.name is not ModeName.multinode:
            yield f"mode.{key}={getattr(mode, key)} needs mode=multinode"
    if mode.rdzv_endpoint is not None and not re.fullmatch(ENDPOINT_PATTERN, mode.rdzv_endpoint):
        example = "mode.rdzv_endpoint=10.0.0.1:29500"
        yield f"mode.rdzv_endpoint={mode.rdzv_endpoint}: want HOST:PORT, e.g. {example}"
    if mode.node_rank is not None:
        last = mode.nnodes - 1 if isinstance(mode.nnodes, int) else mode.node_rank
        if not 0 <= mode.node_rank <= last:
            yield f"mode.node_rank={mode.node_rank}: {mode.nnodes} machines are numbered from 0 to {last}"
    if mode.name is not ModeName.multinode and mode.nnodes != 1 and "mode.nnodes" not in odd:
        yield f"mode.nnodes={mode.nnodes} needs mode=multinode"
    if mode.name is ModeName.single and mode.nproc_per_node != 1 and "mode.nproc_per_node" not in odd:
        yield f"mode=single is one process, but mode.nproc_per_node={mode.nproc_per_node}; try mode=multigpu"


def _train_conflicts(train: Train) -> Iterator[str]:
    if train.max_epochs is None and train.max_steps is None:
        yield "train.max_epochs and train.max_steps are both null: give one, e.g. train.max_epochs=10"
    for key in ("global_batch_size", "accumulation_steps", "max_epochs", "max_steps", "early_stop_patience"):
        value = getattr(train, key)
        if value is not None and value < 1:
            yield f"train.{key}={value} must be at least 1"
    if train.num_workers < 0:
        yield f"train.num_workers={train.num_workers} must be at least 0"
    if train.clip_norm is not None and not 0 < train.clip_norm < float("inf"):
        yield f"train.clip_norm={train.clip_norm} must be above 0; null switches clipping off"
    if train.ema_decay is not None and not 0 <= train.ema_decay < 1:
        yield f"train.ema_decay={train.ema_decay} must be at least 0 and below 1; null switches it off"
    if 1 <= train.global_batch_size < train.accumulation_steps:
        yield (
            f"train.global_batch_size={train.global_batch_size} is smaller than "
            f"train.accumulation_steps={train.accumulation_steps}: a microbatch would be empty; "
            f"try train.accumulation_steps={max(1, train.global_batch_size)}"
        )


def typed(cfg: DictConfig) -> Config:
    """The typed config; DictConfig ends here."""
    config = OmegaConf.to_object(cfg)
    assert isinstance(config, Config)
    return config


def register() -> None:
    """Make the schema known to Hydra, under the name that conf/config.yaml lists first."""
    ConfigStore.instance().store("schema", Config)


def reference() -> str:
    """The page of all settings, docs/settings.md: python -m ddp_experiments.config > docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Written by `python -m ddp_experiments.config`. When a run is continued, a setting is *free* to "
        "change, to be",
        "asked for by `resume.allow=[key]` (*ask*), or *fixed*. Open groups (model, data, task, "
        "optimizer, scheduler)",
        "have the arguments of their `_target_`; the options are the files of `conf/<group>/`.",
        "",
        "| setting | default | when continued | |",
        "|---|---|---|---|",
    ]
    for key, f in walk():
        if f.default_factory is not NO_DEFAULT:
            made = f.default_factory()
            default = "" if hasattr(made, "__dataclass_fields__") else f"`{made}`"
        else:
            value = f.default.name if isinstance(f.default, Enum) else f.default
            shown = {None: "null", True: "true", False: "false", MISSING: "set by the group"}
            number = isinstance(value, int) and not isinstance(value, bool)  # 1 == True finds true
            default = f"`{value if number else shown.get(value, value)}`"
        lines.append(f"| `{key}` | {default} | {f.metadata['resume']} | {f.metadata['help']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
