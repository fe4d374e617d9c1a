"""The lock of a run folder: one writer at a time, also over machines. No torch."""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ddp_experiments.errors import Refused

BEAT_SECONDS = 5.0  # between two counts of the lock
FOREIGN_SECONDS = 30.0  # a lock of another machine whose counter stands still so long is dead
LOCK_BYTES = 512


def _start_time(pid: int) -> str:
    """When a process started, so that a new one with the same number isn't taken for it; empty if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _runs(pid: int, started: str) -> bool:
    """Tell whether a process of this machine still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    return _start_time(pid) == started


class Lock:
    """Keeps a second writer out of a run folder: {token, host, pid, start time, counter} in the file `lock`.

    The same token (workers that were started again) takes over at once; on the same host the process decides;
    from another host a counter that hasn't moved for 30 s of the reader's own clock.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.path, self.token = folder / "lock", token
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def _open(self) -> Iterator[IO[str]]:
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield file
            finally:  # a process forked meanwhile has the same open file: closing ours would not do
                fcntl.flock(file, fcntl.LOCK_UN)

    def _write(self, file: IO[str], counter: int) -> None:
        host, pid = socket.gethostname(), os.getpid()
        text = json.dumps(
            {"token": self.token, "host": host, "pid": pid, "started": _start_time(pid), "counter": counter}
        )
        file.seek(0)
        file.write(text.ljust(LOCK_BYTES))  # in place: a disk that got full must not take the lock away
        file.flush()
        file.truncate()

    @staticmethod
    def _read(file: IO[str]) -> dict[str, Any]:
        file.seek(0)
        try:
            found = json.loads(file.read() or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def acquire(self) -> None:
        """Take the lock and keep counting until `release`.

        Raises:
            Refused: another live process holds it.
        """
        with self._open() as file:
            holder = self._read(file)
            if holder and holder["token"] != self.token and self._lives(holder, file):
                raise Refused(
                    f"{self.path.parent} is being written by pid {holder['pid']} on {holder['host']}; "
                    "wait for it, stop it, or give another run_id=NAME"
                )
            self._write(file, 0)
        self._thread = threading.Thread(target=self._count, name="lock", daemon=True)
        self._thread.start()

    def _lives(self, holder: Mapping[str, Any], file: IO[str]) -> bool:
        if holder["host"] == socket.gethostname():
            return _runs(holder["pid"], holder["started"])
        fcntl.flock(file, fcntl.LOCK_UN)  # the holder must be able to count
        end, seen = time.monotonic() + FOREIGN_SECONDS, holder["counter"]
        while (now := self._read(file)) and time.monotonic() < end:
            if now["token"] != holder["token"] or now["counter"] != seen:
                return True
            time.sleep(min(1.0, FOREIGN_SECONDS / 10))
        fcntl.flock(file, fcntl.LOCK_EX)
        now = self._read(file)  # another start may have been quicker
        return bool(now) and (now["token"], now["counter"]) != (holder["token"], seen)

    def _count(self) -> None:
        counter = 0
        while not self._stop.wait(BEAT_SECONDS):
            counter += 1
            with (
                suppress(OSError),
                self._open() as file,
            ):  # on a full disk the process still shows that it lives
                if self._read(file).get("token") != self.token:
                    return
                self._write(file, counter)

    def is_mine(self) -> bool:
        """Tell whether this start still is the writer of the folder."""
        with self._open() as file:
            return self._read(file).get("token") == self.token

    def is_seen(self) -> bool:
        """Tell whether this start's lock is in the folder, as another rank of it sees it; changes nothing."""
        try:
            with os.scandir(self.path.parent.parent):  # a network file system looks again
                return bool(json.loads(self.path.read_text()).get("token") == self.token)
        except (OSError, ValueError, AttributeError):
            return False

    def release(self) -> None:
        """Give the lock back, if it was taken."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.set()
        thread.join()
        with self._open() as file:
            if self._read(file).get("token") == self.token:
                file.truncate(0)
