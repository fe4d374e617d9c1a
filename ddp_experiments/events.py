"""TensorBoard event files: a writer that survives a full disk, and a reader that shows every step once.

The format is TensorBoard's own (records with checksums around protocol buffers). The records go into a file
that stays open, one event with all scalars of a step, without a thread of its own.
"""

import io
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

PENDING = 10_000  # records kept while the disk is full; then the oldest are dropped


class Appender:
    """Appends whole records to a file, each handed to the system at once; a failing write is tried again.

    Args:
        on_error: told of the first failure of a series.
    """

    def __init__(self, path: Path, on_error: Callable[[OSError], None]) -> None:
        self.path, self.on_error = path, on_error
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.pending: list[bytes] = []
        self.failing = False

    def write(self, record: bytes) -> None:
        self.pending = [*self.pending[-PENDING:], record]
        self._write_pending()

    def _write_pending(self) -> None:
        try:
            while self.pending:
                self._append(self.pending[0])
                del self.pending[0]
            self.failing = False
        except OSError as error:
            if not self.failing:
                self.failing = True
                self.on_error(error)

    def finish_line(self) -> None:
        """End the half line that a killed start may have left, so that the next record stands by itself."""
        content = self.path.read_bytes()[-1:]
        if content not in (b"", b"\n"):
            self.write(b"\n")

    def _append(self, record: bytes) -> None:
        start = os.fstat(self.handle).st_size
        try:
            written = 0
            while written < len(record):
                written += os.write(self.handle, record[written:])
        except OSError:
            os.ftruncate(self.handle, start)  # no half record stays
            raise

    def close(self) -> None:
        self._write_pending()
        os.close(self.handle)


class EventWriter:
    """One event file of a run. A continued run says from which step on its points replace older ones."""

    def __init__(self, folder: Path, on_error: Callable[[OSError], None], *, first_step: int | None) -> None:
        self.file = Appender(folder / _name(folder), on_error)
        self._event(event_pb2.Event(file_version="brain.Event:2"))
        if first_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._event(event_pb2.Event(step=first_step, session_log=start))

    def _event(self, event: event_pb2.Event) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self.file.write(record.getvalue())

    def summary(self, summary: summary_pb2.Summary, step: int = 0) -> None:
        self._event(event_pb2.Event(step=step, summary=summary))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """All scalars of a step as one event."""
        items = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.summary(summary_pb2.Summary(value=items), step)

    def close(self) -> None:
        self.file.close()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("events.out.tfevents.*"))


def _name(folder: Path) -> str:
    """A name that sorts behind the files there are, even when the clock was set back."""
    numbers = [int(m[1]) for p in _files(folder) if (m := re.match(r"events\.out\.tfevents\.(\d+)", p.name))]
    number = max([int(time.time()), *(n + 1 for n in numbers)])
    return f"events.out.tfevents.{number:010d}.{socket.gethostname()}.{os.getpid()}"


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """{tag: {step: value}} of a run: a file replaces what older ones say from its first step on."""
    found: dict[str, dict[int, float]] = {}
    for path in _files(folder):
        for event in _events(path):
            if event.HasField("session_log") and event.session_log.status == event_pb2.SessionLog.START:
                for points in found.values():
                    for step in [s for s in points if s >= event.step]:
                        del points[step]
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                if kind in ("", "scalars") and value.HasField("tensor"):
                    found.setdefault(value.tag, {})[event.step] = float(
                        tensor_util.make_ndarray(value.tensor).item()
                    )
    return found


def _events(path: Path) -> Iterator[event_pb2.Event]:
    yield from EventFileLoader(str(path)).Load()
