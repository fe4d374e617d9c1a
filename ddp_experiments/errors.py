"""The ways a run can end other than well, and their exit codes.

0 done, 1 failed, 2 refused before the start, 3 no usable checkpoint, 130 interrupted, 143 preempted after
saving.
"""

from enum import IntEnum


class Exit(IntEnum):
    DONE = 0
    FAILED = 1
    REFUSED = 2
    NO_CHECKPOINT = 3
    INTERRUPTED = 130
    PREEMPTED = 143


class Refused(ValueError):
    """Something that can't be done was asked for; found before anything was started. One line a fault."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class NoUsableCheckpoint(RuntimeError):
    """A run is to be continued or evaluated, but none of its checkpoints can be read."""


class NonFiniteError(ArithmeticError):
    """A step had infinite or NaN gradients and train.nonfinite=raise."""


class PeerFailed(RuntimeError):
    """Another rank failed first; this one has only seen the consequence."""


class WorkersFailed(RuntimeError):
    """The ranks that this process has started failed.

    Attributes:
        told: one of them has said why.
        traceback: of the one that failed first, if it could tell.
        folder: of the run, if it came so far.
    """

    def __init__(
        self, text: str, exit_code: Exit, *, told: bool, traceback: str = "", folder: str | None = None
    ) -> None:
        super().__init__(text)
        self.exit_code, self.told, self.traceback, self.folder = exit_code, told, traceback, folder


class Stopped(SystemExit):
    """A signal ended the run. A SystemExit, since Hydra takes exceptions for failed jobs."""

    code: Exit
