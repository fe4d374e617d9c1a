"""Being one rank of a run: what every process does that trains, whoever has started it."""

import os
import sys
import time
import traceback
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import record

from ddp_experiments import experiment, process
from ddp_experiments.config import Config
from ddp_experiments.environment import Environment, read, say_once
from ddp_experiments.errors import Exit, NonFiniteError, NoUsableCheckpoint, PeerFailed, Refused, Stopped
from ddp_experiments.health import StopRequest, stop_signals
from ddp_experiments.identity import Origin
from ddp_experiments.meeting import Meeting, in_words

FIRST_SECONDS = 1.0  # by which the rank that failed first leaves before the others: launchers blame the first


def be_rank(config: Config, origin: Origin) -> float | None:
    """Run the experiment as one of its ranks; print what ended it, and leave with its exit code.

    Raises:
        Refused: what was asked for can't be done.
    """
    environment, meeting = read(), None
    with stop_signals() as request:
        try:
            meeting = Meeting(environment, config.mode)
            value = work(config, origin, environment, meeting, request)
            meeting.leave_word("end", {"value": value})
            return value
        except Stopped as stop:
            if not environment.launched:
                raise
            if meeting is not None:
                meeting.leave_word("end", {"stopped": int(stop.code)})
            raise SystemExit(Exit.DONE) from None  # torchrun would start any other code anew
        except Refused:
            raise
        except Exception as error:
            request.deferring = True  # nothing may come between now
            guilty = meeting is None or meeting.guilty()
            code = tell(error, environment, guilty=guilty)
            if not guilty:
                time.sleep(FIRST_SECONDS)
            sys.exit(code)
        finally:
            if meeting is not None:
                meeting.close()


def work(
    config: Config, origin: Origin, environment: Environment, meeting: Meeting, request: StopRequest
) -> float | None:
    """Run the experiment; whatever ends it early is told to the other ranks and to torchrun's summary.

    Collective: all ranks must call.
    """
    if environment.agent_store:  # torchrun that is killed leaves its workers behind
        process.die_with_parent(os.getppid())
    victims: list[PeerFailed] = []

    def attempt() -> float | None:
        try:
            return experiment.run(config, origin, environment, meeting, request)
        except BaseException as error:
            seen = error
            try:
                meeting.settle(error)
            except PeerFailed as other:
                seen = other
            if isinstance(seen, PeerFailed) and not meeting.guilty():  # the summary is for the one that is
                victims.append(seen)
                return None
            raise seen from seen.__cause__

    value: float | None = record(attempt)() if environment.launched else attempt()
    if victims:
        raise victims[0]
    return value


def work_in_step(
    config: Config, origin: Origin, environment: Environment, meeting: Meeting
) -> tuple[float | None, dict[str, Any] | None]:
    """(value, why it failed) of a job of a sweep that all ranks of a launcher run together.

    Collective: all ranks must call; the verdict is the same on all of them.

    Raises:
        Stopped, KeyboardInterrupt: the sweep is to end.
    """
    value, failure = None, None
    with stop_signals() as request:
        try:
            value = work(config, origin, environment, meeting, request)
        except Exception as error:
            request.deferring = True
            failure = error
            meeting.blame(error)
            tell(error, environment, guilty=meeting.guilty(), is_final=False)
        cause = meeting.verdict(failure, request.exit_code)
    if cause is not None:
        cause["text"] = in_words(cause)
    return value, cause


def tell(error: Exception, environment: Environment, *, guilty: bool, is_final: bool = True) -> Exit:
    """Print what ended this rank, unless another rank does; its exit code.

    Args:
        is_final: no restart would help, nor is there another job.
    """
    notes = getattr(error, "__notes__", [])  # the last line: cause, rank, host, step, what to type
    if isinstance(error, NoUsableCheckpoint):
        say_once(str(error), is_final=is_final)
        return Exit.NO_CHECKPOINT
    if isinstance(error, NonFiniteError | PeerFailed):
        speaks = environment.rank == 0 if isinstance(error, NonFiniteError) else guilty
        if speaks:
            print(*(notes or [error]), sep="\n", file=sys.stderr, flush=True)
    elif not isinstance(error, Refused):
        traceback.print_exception(error)
        sys.stderr.flush()
    return Exit.FAILED
