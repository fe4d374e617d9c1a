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


class Stopped(SystemExit):
    """A signal ended the run. A SystemExit, since Hydra takes exceptions for failed jobs."""

    code: Exit
