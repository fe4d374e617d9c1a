"""A thread on every rank that sees that another rank has failed, and lets this one end, or ends it."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ddp_experiments.environment import Environment
from ddp_experiments.errors import Exit

LOOK_SECONDS = 0.5  # between two looks
LEAVE_SECONDS = 15.0  # so long a rank may take to end after another one has failed
CLOSE_SECONDS = 20.0  # so long its connection may take, where names are looked up slowly
LATE_SECONDS = 1.0  # so long the ranks whose collective failed wait for one another's word


class Round(Protocol):
    """What it needs of `meeting.Meeting`."""

    environment: Environment
    round: str
    abort: Callable[[], None] | None

    def client(self) -> Store: ...


class Lookout:
    """A thread that sees that another rank has failed, even while this rank waits or computes for long."""

    def __init__(self, meeting: Round) -> None:
        self.meeting, self.ended = meeting, threading.Event()
        self.thread = threading.Thread(target=self._look, name="lookout", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        with suppress(dist.DistError, RuntimeError):  # the launcher is gone; it takes the workers along
            # a connection of its own: the main thread's may be waiting in a call
            store = PrefixStore(f"ddpx/{self.meeting.round}", self.meeting.client())
            while not self.ended.wait(LOOK_SECONDS):
                if store.check(["cause"]):
                    self._leave(json.loads(store.get("cause")))
                    break

    def _leave(self, cause: dict[str, Any]) -> None:
        """Let this rank end, or end it."""
        if self.meeting.abort is not None:
            self.meeting.abort()
        me = self.meeting.environment.rank
        is_late = me in cause.get("silent", ())
        if not self.ended.wait(LATE_SECONDS if is_late else LEAVE_SECONDS):
            frames = "".join(traceback.format_stack(_main_frame())[-6:])
            why = "did not come" if is_late else f"goes on though rank {cause['rank']} has failed"
            os.write(2, f"[rank {me}] this rank {why}; it was here:\n{frames}".encode())
            os._exit(Exit.FAILED)

    def close(self) -> None:
        """Wait for the thread: one that is in a call of the store aborts the process as it exits."""
        self.ended.set()
        self.thread.join(CLOSE_SECONDS)


def _main_frame() -> Any:
    return sys._current_frames().get(threading.main_thread().ident or 0)
