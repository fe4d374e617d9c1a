"""Real torchruns that are left to run, so that a test can look at their workers and kill them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import LAUNCHER, ROOT

SECONDS = 60


def until(good: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    """Wait for something, looking often: what is to be hit may be short."""
    end = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rendezvous(kind: str) -> list[str]:
    """torchrun's options for one machine: its default, or a static address."""
    if kind == "c10d":
        return []
    return ["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]


def variables(pid: int) -> dict[str, str]:
    """The environment of a process; nothing if it is gone."""
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in found.split("\0") if "=" in entry)


@dataclass
class Torchrun:
    """A torchrun, and what it has said so far."""

    process: subprocess.Popen[bytes]
    cwd: Path

    @property
    def text(self) -> str:
        return (self.cwd / "console").read_text(errors="replace")

    def workers(self, attempt: int) -> dict[int, int]:
        """The pid of each rank that torchrun has started at this attempt."""
        pid = self.process.pid
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").glob("*/children")
            for child in task.read_text().split()
        ]
        seen = {child: variables(child) for child in children}
        return {
            int(v["RANK"]): child
            for child, v in seen.items()
            if v.get("TORCHELASTIC_RESTART_COUNT") == str(attempt)
        }

    def wait(self, seconds: float = SECONDS) -> int:
        return self.process.wait(seconds)


@contextmanager
def torchrun(
    cwd: Path, *words: str, options: list[str], env: dict[str, str] | None = None, ranks: int = 2
) -> Iterator[Torchrun]:
    """`train.py words` under torchrun, in `cwd`; ended with all its workers when the block is left."""
    cwd.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER} | (env or {})
    environment["TMPDIR"] = str(cwd)  # torchrun leaves its own folders there
    launcher = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc_per_node={ranks}"]
    with (cwd / "console").open("wb") as out:
        command = [*launcher, str(ROOT / "train.py"), *words]
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=out)
    try:
        yield Torchrun(process, cwd)
    finally:
        process.send_signal(signal.SIGTERM)  # it ends its workers
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            mine = [p for p in map(int, _numbers()) if variables(p).get("TMPDIR") == str(cwd)]
            for pid in mine:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def _numbers() -> Iterator[str]:
    return (p.name for p in Path("/proc").iterdir() if p.name.isdecimal())
