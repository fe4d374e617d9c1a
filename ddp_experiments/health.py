"""Signals, and the decisions that all ranks must take alike, agreed at paced points."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from ddp_experiments.errors import Exit, Stopped
from ddp_experiments.metrics import Sums
from ddp_experiments.world import World

STOP_SIGNALS = {
    signal.SIGINT: Exit.INTERRUPTED,
    signal.SIGTERM: Exit.PREEMPTED,
    signal.SIGUSR1: Exit.PREEMPTED,
}
PACE_SECONDS = 2.0
LONGEST_PACE = 1000  # steps


class StopRequest:
    """What a signal asked for. Outside the loop it ends the process at once: there is nothing new to save."""

    def __init__(self) -> None:
        self.exit_code: Exit | None = None
        self.deferring = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note signals while the block runs; the loop looks. A second Ctrl-C still ends the process.

        After an error in the block as well: why a rank fails is told before it ends.
        """
        self.deferring = True
        yield
        self.deferring = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        code = STOP_SIGNALS[signal.Signals(number)]
        if number == signal.SIGINT and (self.exit_code is not None or not self.deferring):
            raise KeyboardInterrupt
        if not self.deferring:
            raise Stopped(code)
        self.exit_code = code


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM and SIGUSR1 into a request to leave in order, until the block ends."""
    request = StopRequest()
    before = {number: signal.signal(number, request._on_signal) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Verdict:
    """What all ranks know after a paced point."""

    stop: Exit | None = None
    failed_ranks: tuple[int, ...] = ()  # ranks on which a checkpoint could not be written
    nonfinite_ranks: tuple[int, ...] = ()  # ranks whose own loss was infinite or NaN


class Watch:
    """Says at which steps the ranks agree, and packs what they have to tell into the sums of that point."""

    def __init__(self, world: World, request: StopRequest, step: int = 0) -> None:
        self.world, self.request = world, request
        self.next_step, self.last_step, self.last_time = step, step, time.monotonic()

    def due(self, step: int) -> bool:
        """Tell whether `step` is a paced point. Equal on all ranks."""
        return step >= self.next_step or (self.world.world_size == 1 and self.request.exit_code is not None)

    def tell(self, sums: Sums, step: int, *, failed: bool, nonfinite: bool) -> None:
        """Add this rank's flags to the sums that are about to be reduced."""
        seconds = (time.monotonic() - self.last_time) / max(1, step - self.last_step)
        stop = self.request.exit_code
        flags = {"interrupted": stop is Exit.INTERRUPTED, "stop": stop is not None}
        for rank in range(self.world.world_size):
            here = rank == self.world.rank
            flags |= {f"failed/{rank}": failed and here, f"nonfinite/{rank}": nonfinite and here}
        sums.add({f"flag/{name}": float(flag) for name, flag in flags.items()})
        sums.add({"flag/seconds": seconds / self.world.world_size})

    def read(self, reduced: Mapping[str, float], step: int) -> Verdict:
        """The common verdict, and the next paced point, from the reduced sums."""
        steps = PACE_SECONDS / max(reduced["flag/seconds"], 1e-9)
        self.next_step = step + max(1, min(LONGEST_PACE, int(steps)))
        self.last_step, self.last_time = step, time.monotonic()
        stop = None
        if reduced["flag/stop"]:
            stop = Exit.INTERRUPTED if reduced["flag/interrupted"] else Exit.PREEMPTED
        ranks = range(self.world.world_size)
        return Verdict(
            stop=stop,
            failed_ranks=tuple(r for r in ranks if reduced[f"flag/failed/{r}"]),
            nonfinite_ranks=tuple(r for r in ranks if reduced[f"flag/nonfinite/{r}"]),
        )
