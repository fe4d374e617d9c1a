"""Processes that belong together: none outlives the one that started it."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOOK_SECONDS = 1.0


def die_with_parent(parent: int) -> None:
    """End this process when `parent`, which has started it, is gone, however that ends.

    Call it first, in the main thread. Linux does it at once; elsewhere a thread looks every second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os._exit(1)


@contextmanager
def signals_at_once() -> Iterator[None]:
    """Let signals end this process while the block runs, as if nobody handled them."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
