"""Starting this machine's ranks by torch elastic, as commands; waiting for them; what became of them."""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ddp_experiments.config import Config
from ddp_experiments.environment import Environment, interface_variables, variables
from ddp_experiments.errors import Exit, Stopped, WorkersFailed
from ddp_experiments.identity import Origin
from ddp_experiments.meeting import in_words
from ddp_experiments.rendezvous import BACKEND, FINAL, Machines, offer

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def start(config: Config, origin: Origin, planned: Environment) -> float | None:
    """Run the experiment on workers of this machine's own, and be there until the last has ended.

    Args:
        planned: the ranks to be.

    Returns:
        Rank 0's value.

    Raises:
        WorkersFailed: they failed.
        Stopped: a signal ended them; they have saved.
        Refused: the machines can't meet.
    """
    mode, folder = config.mode, tempfile.mkdtemp(prefix="ddp_experiments-")
    machines = Machines(
        name=Path(origin.folder or "run").name,
        node_rank=planned.node_rank,
        nnodes=planned.nnodes,
        endpoint=mode.rdzv_endpoint or "",
        timeout=mode.init_timeout_seconds,
    )
    launch = LaunchConfig(
        min_nodes=planned.nnodes,
        max_nodes=planned.nnodes,
        nproc_per_node=planned.local_world_size,
        run_id=uuid.uuid4().hex[:8],
        rdzv_backend=BACKEND,
        max_restarts=mode.max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/errors"),
        signals_to_handle="SIGQUIT",  # the others are ours
        shutdown_timeout=mode.timeout_seconds,
    )
    file = Path(folder, "start.json")
    file.write_text(json.dumps(asdict(origin)))
    offer(machines)
    try:
        with _forwarded_signals(folder), variables(_workers_variables(planned)), _without_agents_words():
            command = ("-P", "-u", "-m", "ddp_experiments.worker", str(file), str(os.getpid()))
            elastic_launch(launch, sys.executable)(*command)
        return _value(machines)
    except SignalException as stop:
        machines.end_wait_of_others()
        raise _stopped(stop.sigval, machines) from None
    except ChildFailedError as error:
        raise _why(error.failures, machines) from None
    finally:
        machines.part()
        shutil.rmtree(folder, ignore_errors=True)


def _value(machines: Machines) -> float | None:
    """What rank 0 says in the end."""
    said = machines.word("end")
    if said is None:
        raise WorkersFailed("rank 0 ended early and without a word", Exit.FAILED, told=False)
    if "stopped" in said:  # the workers got a signal, this process didn't
        raise Stopped(Exit(said["stopped"]))
    value: float | None = said["value"]
    return value


def _stopped(number: signal.Signals, machines: Machines) -> Stopped | WorkersFailed:
    """What a signal has led to: the workers have saved, unless they failed at it."""
    cause, folder = machines.word("cause"), machines.word("folder")
    if cause is not None and cause["kind"] != "stopped":
        text = in_words(cause)
        return WorkersFailed(text, Exit.FAILED, told=True, traceback=cause["traceback"], folder=folder)
    if folder is not None and machines.word("end") is None:
        name = signal.Signals(number).name
        return WorkersFailed(f"after {name} the workers did not save", Exit.FAILED, told=False, folder=folder)
    return Stopped(_exit_code(number))


def _why(failures: dict[int, ProcessFailure], machines: Machines) -> WorkersFailed:
    """What ended the workers: the first rank that told, or one that was killed and couldn't."""
    cause, folder, here = machines.word("cause"), machines.word("folder"), socket.gethostname()
    killed = {r: f for r, f in failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM}
    if cause is not None and cause["kind"] == "stopped":  # by the agent, since another one failed
        cause = None
    if cause is not None:
        killed = {r: f for r, f in killed.items() if r in cause.get("silent", ())}
    if killed:
        rank, failure = _first(killed)
        often = ", often for want of memory" if failure.exitcode == -signal.SIGKILL else ""
        text = f"rank {rank} on {here} was ended by {signal.Signals(-failure.exitcode).name}{often}"
        return WorkersFailed(text, Exit.FAILED, told=False, folder=folder)
    if cause is not None:
        text = in_words(cause)
        code = FINAL.get(cause["kind"], Exit.FAILED)
        return WorkersFailed(text, code, told=True, traceback=cause["traceback"], folder=folder)
    rank, failure = _first(failures)
    text = f"rank {rank} on {here} ended with exit code {failure.exitcode}"
    if failure.exitcode in FINAL.values():
        return WorkersFailed(text, Exit(failure.exitcode), told=True, folder=folder)
    return WorkersFailed(text, Exit.FAILED, told=False, folder=folder)


def _first(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    return min(failures.items(), key=lambda item: item[1].timestamp)


def _exit_code(number: signal.Signals) -> Exit:
    return Exit.INTERRUPTED if number == signal.SIGINT else Exit.PREEMPTED


@contextmanager
def _forwarded_signals(folder: str) -> Iterator[None]:
    """The first signal goes to the workers, which save and leave; a second Ctrl-C ends all at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        if seen.count(signal.SIGINT) > 1:  # the workers die with this process
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(_exit_code(signal.Signals(seen[0])))
        if len(seen) > 1:
            return  # they are about it
        sent = signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number)
        raise SignalException(f"got {sent.name}", sigval=sent)

    before = {number: signal.getsignal(number) for number in (*FORWARDED, signal.SIGQUIT)}
    for number in FORWARDED:
        if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup ignores it
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _workers_variables(planned: Environment) -> dict[str, str]:
    """What the workers inherit: the modules that are found here, and loopback where one machine is enough."""
    found = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if planned.nnodes == 1 and loopback:
        found |= interface_variables(loopback[0])
    return found


@contextmanager
def _without_agents_words() -> Iterator[None]:
    """Keep torch elastic's own log lines off the console: what matters is said once, by us."""
    loggers = [logging.getLogger(f"torch.distributed.{part}") for part in ("elastic", "launcher")]
    silent = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silent)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(silent)
            logger.propagate = True
