"""What this process has to be: a worker of a launcher, the only process, or refused; and its last word."""

import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ddp_experiments.config import OPEN_GROUPS, Config, Mode, ModeName
from ddp_experiments.environment import Environment, first_on_machine, read
from ddp_experiments.errors import Exit, NonFiniteError, NoUsableCheckpoint, Refused, Stopped


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


def sweep_faults(environment: Environment, job: Sequence[str]) -> Iterator[str]:
    """Yield why a sweep can't be; `job` is the overrides of one of its jobs."""
    if environment.world_size > 1:
        yield (
            "-m sweeps in one process, since ranks of one launcher could end up in different jobs; start "
            f"each job by itself: torchrun --nproc_per_node={environment.local_world_size} train.py "
            f"{shlex.join(job)}"
        )
    given = {o.lstrip("+").split("=")[0] for o in job}
    for key in sorted(given & {"run_id", "resume.run"}):
        yield f"{key} names one run, but -m starts several; leave out one of the two"


def faults(config: Config, environment: Environment, words: Sequence[str]) -> Iterator[str]:
    """Yield why the mode doesn't fit the launcher, or the batch the ranks; each with the line to type."""
    mode, ranks = config.mode, environment.world_size
    if not environment.launched and mode.name is not ModeName.single:
        where = "on each machine, with its own node_rank" if mode.name is ModeName.multinode else "instead"
        line = command(mode, words)
        yield f"mode={mode.name.value} needs several processes, but this is one; type {where}: {line}"
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

    environment = environment or read()
    said = list(world.device_faults(config.mode, environment))
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
    if first_on_machine():
        lines = ["Refused before anything was started:", *(f"  - {s}" for s in dict.fromkeys(said))]
        print("\n".join(lines), file=sys.stderr, flush=True)
    sys.exit(Exit.REFUSED)


def run(config: Config, saved: Mapping[str, Any], job: Path | None) -> float | None:
    """Run the experiment as this process's rank; print what ended it, and leave with its exit code.

    A job of a sweep raises instead, since Hydra counts it as failed and goes on.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    from ddp_experiments import experiment

    environment = read()
    work = record(experiment.run) if environment.launched else experiment.run  # for torchrun's summary
    try:
        value: float | None = work(config, saved, environment, job)
        return value
    except Stopped:
        if environment.launched:  # torchrun would start any other code anew; status.json tells
            raise SystemExit(Exit.DONE) from None
        raise
    except Exception as error:
        if job is not None:  # Hydra would tell the first failure only, and at the end
            reasons = getattr(error, "__notes__", None) or [f"{type(error).__name__}: {error}"]
            print(f"job {job.name} failed:", *reasons, file=sys.stderr, flush=True)
            raise
        if isinstance(error, Refused):
            refuse(error.faults)
        if isinstance(error, NoUsableCheckpoint):
            print(error, file=sys.stderr, flush=True)
            sys.exit(Exit.NO_CHECKPOINT)
        if not isinstance(error, NonFiniteError):
            traceback.print_exc()  # its note is the last line: cause, rank, host, step, what to type
        elif environment.rank == 0:  # all ranks have agreed on it
            print(*error.__notes__, sep="\n", file=sys.stderr, flush=True)
        sys.exit(Exit.FAILED)
