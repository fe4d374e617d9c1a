"""What this process has to be: a rank, the parent of ranks, or refused; and its last word."""

import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from ddp_experiments import identity, sweep
from ddp_experiments.config import OPEN_GROUPS, Config, Mode, ModeName
from ddp_experiments.environment import Environment, read, say_once
from ddp_experiments.errors import Exit, PeerFailed, Refused, Stopped, WorkersFailed
from ddp_experiments.identity import Origin
from ddp_experiments.targets import has_horizon

if TYPE_CHECKING:
    from ddp_experiments.meeting import Meeting


def typed_words() -> list[str]:
    """What stands behind `train.py` on the command line, as it was typed."""
    script, words = Path(sys.argv[0]).name, sys.orig_argv
    at = [i for i, w in enumerate(words) if Path(w).name == script]
    return words[at[0] + 1 :] if at else sys.argv[1:]


def command(mode: Mode, words: Sequence[str]) -> str:
    """The torchrun line that starts what the user typed."""
    processes = mode.nproc_per_node if isinstance(mode.nproc_per_node, int) else 2
    nodes = ""
    if mode.name is ModeName.multinode:
        count = mode.nnodes if isinstance(mode.nnodes, int) else 2
        nodes = f"--nnodes={count} --node_rank=0 --master_addr=HOST --master_port=29500 "
    return f"torchrun {nodes}--nproc_per_node={processes} train.py {shlex.join(words)}".rstrip()


def sweep_faults(
    config: Config, environment: Environment, swept: Sequence[str], sweeper: str
) -> Iterator[str]:
    """Yield why a sweep can't be.

    Args:
        swept: the settings that vary.
        sweeper: the class of Hydra's that chooses the jobs.
    """
    for key in sorted({"name", "run_id", "from_run", "resume.run", "sweep.fail_fast"} & set(swept)):
        yield f"{key} is the sweep's own and can't vary in it; give one value, or none"
    if config.resume.run:
        yield "--continue names one run, but -m starts several; leave out one of the two"
    if environment.launched and not sweeper.endswith(sweep.BASIC[0]):
        start = f"python train.py mode=multigpu mode.nproc_per_node={environment.local_world_size}"
        rest = [w for w in typed_words() if not w.startswith(("mode=", "mode.nproc_per_node="))]
        yield (
            f"{sweeper.rpartition('.')[2]} draws its values anew on every rank; let one process draw, and "
            f"start the ranks of each job: {start} {shlex.join(rest)}"
        )
    if not environment.launched and config.mode.name is ModeName.multinode and not config.run_id:
        yield "the machines of a sweep need one name for its folder: add run_id=NAME, the same on each"


def faults(config: Config, environment: Environment, words: Sequence[str]) -> Iterator[str]:
    """Yield why the mode doesn't fit the launcher, each with the line to type."""
    mode, ranks = config.mode, environment.world_size
    if not environment.launched:
        yield from _own_start_faults(mode, words)
        return
    if mode.name is ModeName.single and ranks > 1:
        yield (
            f"the launcher started {ranks} processes, but mode=single is one; "
            f"add mode=multigpu, or type: python train.py {shlex.join(words)}".rstrip()
        )
    if mode.name is ModeName.multigpu and environment.nnodes > 1:
        yield f"the launcher spans {environment.nnodes} machines; mode=multigpu is one; try mode=multinode"
    counts = {"nproc_per_node": environment.local_world_size, "nnodes": environment.nnodes}
    for key, started in counts.items():
        wanted = getattr(mode, key)
        if mode.name is not ModeName.single and wanted not in ("auto", started):
            yield (
                f"mode.{key}={wanted}, but the launcher started {started}; "
                f"leave it out, or start torchrun --{key}={wanted}"
            )
    own = {"node_rank": None, "rdzv_endpoint": None, "max_restarts": 0}
    for key, default in own.items():
        if (value := getattr(mode, key)) != default:
            yield f"mode.{key}={value} is for starting without torchrun; leave it out, torchrun has --{key}"
    if environment.forgetful and not (config.run_id or config.resume.run):
        yield (
            "torchrun keeps its store to itself (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or etcd): workers "
            "that are started again would not find their run; add run_id=NAME"
        )


def _own_start_faults(mode: Mode, words: Sequence[str]) -> Iterator[str]:
    """Yield why this program can't start the workers by itself."""
    if mode.name is ModeName.single and mode.max_restarts:
        yield f"mode.max_restarts={mode.max_restarts} needs processes that are started: try mode=multigpu"
    if mode.name is not ModeName.multinode:
        return
    missing = [k for k in ("node_rank", "rdzv_endpoint") if getattr(mode, k) is None]
    if mode.nnodes == "auto":
        missing.insert(0, "nnodes")
    if missing:
        examples = {"nnodes": "2", "node_rank": "0", "rdzv_endpoint": "HOST:29500"}
        more = " ".join(f"mode.{k}={examples[k]}" for k in missing)
        yield (
            "mode=multinode is one process here, and nothing says which of several machines this is; on each "
            f"machine, with its own node_rank, type: python train.py {shlex.join(words)} {more}; "
            f"or: {command(mode, words)}"
        )


def rank_faults(config: Config, ranks: int) -> Iterator[str]:
    """Yield why the batch or the strategy doesn't fit so many ranks."""
    batch, steps = config.train.global_batch_size, config.train.accumulation_steps
    if ranks > 1 and batch >= steps and batch < ranks * steps:
        yield (
            f"train.global_batch_size={batch} is smaller than {ranks} ranks × "
            f"train.accumulation_steps={steps} = {ranks * steps}: some would have no sample; "
            f"try train.global_batch_size={ranks * steps}"
        )
    degree = config.strategy.replicate
    if isinstance(degree, int) and degree != ranks:
        yield (
            f"strategy.replicate={degree}, but the number of ranks is {ranks}; try strategy.replicate=auto"
        )


def target_faults(config: Config, environment: Environment | None = None) -> list[str]:
    """What is wrong with the open groups, devices and metric; imports torch, which the run needs anyway."""
    from ddp_experiments import targets, world
    from ddp_experiments.config import Precision

    environment = world.planned(config.mode, environment or read())
    said = [*rank_faults(config, environment.world_size), *world.device_faults(config.mode, environment)]
    for group in OPEN_GROUPS:
        try:
            targets.check(getattr(config, group), group)
        except ValueError as error:
            said.append(str(error))
    if said:
        return said
    if (
        config.train.precision is Precision.fp16
        and world.choose_device(config.mode, environment).type == "cpu"
    ):
        said.append("train.precision=fp16 is 10 times slower than fp32 on a CPU; try train.precision=bf16")
    metrics = targets.of_kind(config.task["_target_"], "task").metrics
    if config.checkpoint.metric not in metrics:
        best = (get_close_matches(config.checkpoint.metric, metrics, 1) or metrics)[0]
        said.append(
            f"checkpoint.metric={config.checkpoint.metric}: this task has {', '.join(metrics)}; "
            f"try checkpoint.metric={best}"
        )
    return said


def refuse(said: Iterable[str]) -> NoReturn:
    """Print every fault once on each machine, and leave with exit code 2."""
    say_once("\n".join(["Refused before anything was started:", *(f"  - {s}" for s in dict.fromkeys(said))]))
    sys.exit(Exit.REFUSED)


# ---- running


def run(config: Config, settings: Mapping[str, Any]) -> float | None:
    """Do what was typed: be the run or a rank of it, or start its ranks.

    Args:
        settings: as they are written down.

    Returns:
        The best value of checkpoint.metric, for sweepers.
    """
    environment = read()
    origin = Origin(
        settings, overrides(HydraConfig.get()), shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])
    )
    if (job := sweep.hydras_job()) is not None:
        return run_job(*job, config, origin)
    try:
        if environment.launched or config.mode.name is ModeName.single:
            from ddp_experiments import rank

            return rank.be_rank(config, origin)
        return start_workers(config, origin, environment)
    except Refused as refusal:
        refuse(refusal.faults)
    except WorkersFailed as error:
        if not error.told:
            print(identity.last_word(error.folder, str(error)), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def overrides(hydra: Any) -> list[str]:
    """The settings as they were typed, from Hydra's own node."""
    found = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # they may hold ${...}
    assert isinstance(found, list)
    return [str(o) for o in found]


def start_workers(config: Config, origin: Origin, environment: Environment) -> float | None:
    """Run the experiment on workers that this process starts.

    Raises:
        WorkersFailed, Stopped, Refused: as in `workers.start`.
    """
    from ddp_experiments import workers, world

    planned, mode = world.planned(config.mode, environment), config.mode
    if mode.nproc_per_node == "auto" and not world.accelerators(mode) and origin.folder is None:
        count = planned.local_world_size
        print(f"no accelerator here: {count} CPU processes (mode.nproc_per_node=auto)", file=sys.stderr)
    return workers.start(config, origin, planned)


# ---- a job of a sweep


class JobFailed(RuntimeError):
    """A job of a sweep failed. Hydra takes it as the job's result."""


def run_sweep(folder: Path, jobs: Iterable[tuple[Config, Origin]]) -> Exit:
    """Run every job of a sweep, one after the other, whatever becomes of each; the exit code.

    Collective under a launcher: all ranks must call.
    """
    code = Exit.DONE
    for number, (config, origin) in enumerate(jobs):
        try:
            run_job(folder, number, config, origin)
        except JobFailed:
            code = Exit.FAILED
            if config.sweep.fail_fast:
                break
        except Stopped:
            if not read().launched:
                raise
            break  # torchrun would start any other code than 0 anew
    return code


def run_job(folder: Path, number: int, config: Config, origin: Origin) -> float | None:
    """Run one job of a sweep on workers of its own, or on the ranks that a launcher has started.

    Collective under a launcher: all ranks must call.

    Raises:
        JobFailed: it failed; the same on all ranks.
        Stopped, KeyboardInterrupt: the sweep is to end.
    """
    from ddp_experiments.meeting import Meeting

    environment, jobs = read(), list[sweep.Job]()
    meeting = Meeting(environment, config.mode)

    def begin() -> dict[str, Any]:
        overrides, horizon, writes = (
            origin.overrides,
            has_horizon(config.scheduler),
            not config.mode.node_rank,
        )
        jobs.append(sweep.job_of(folder, number, overrides, config, origin.settings, horizon, writes=writes))
        return jobs[0].begin()

    try:
        begun = meeting.rank0_decides("job", begin)
        if begun["done"]:
            value: float | None = begun["value"]
            return value
        return _finish(jobs, config, replace(origin, folder=begun["folder"]), environment, meeting)
    except (OSError, PeerFailed, Refused) as error:  # its folder can't be had
        if environment.rank == 0:
            print(f"job {number} failed: {error}", file=sys.stderr, flush=True)
        raise JobFailed(f"job {number} failed: {error}") from error
    finally:
        meeting.close()


def _finish(
    jobs: Sequence[sweep.Job], config: Config, origin: Origin, environment: Environment, meeting: "Meeting"
) -> float | None:
    """Run a job that isn't done, and write down what has become of it.

    Args:
        jobs: the job, where this process writes it down.
    """
    value, cause = None, None
    try:
        if environment.launched:
            from ddp_experiments import rank

            value, cause = rank.work_in_step(config, origin, environment, meeting)
        else:
            value = start_workers(config, origin, environment)
    except (Stopped, KeyboardInterrupt):
        for job in jobs:
            job.note("interrupted")
        raise
    except WorkersFailed as error:
        cause = {"text": str(error), "traceback": error.traceback}
    except Exception as error:  # the machines can't meet, say
        cause = {"text": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    if cause is None:
        for job in jobs:
            job.note(sweep.DONE, value=value)
        return value
    for job in jobs:
        job.note("failed", error=cause["text"])
        job.log(cause["traceback"], cause["text"])
        said = identity.last_word(origin.folder, cause["text"])
        print(f"job {job.number} failed: {said}", file=sys.stderr, flush=True)
    if "stays" in cause:
        sys.exit(Exit.FAILED)  # ranks that aren't all there can't go on to the next job
    raise JobFailed(f"{origin.folder}: {cause['text']}")
