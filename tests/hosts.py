"""Two machines, as Linux namespaces with processes, addresses and a name of their own, joined by a cable.

Many such pairs can be there at once, as they know nothing of one another. All of it ends with the process
that made it, even if that is killed.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ranks import LAUNCHER, ROOT

TOOLS = ("ip", "unshare", "nsenter", "hostname", "mount")
UNSHARE = ("unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
VETH = ("type", "veth", "peer", "name")
# cat ends when the process that holds its input does; it is process 1, so that all others there end with it
KEEPER = 'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo ready && exec cat'


def _possible() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        return False
    words = [*UNSHARE, "ip", "link", "add", "vA", *VETH, "vB"]  # a container's root may not
    return subprocess.run(words, capture_output=True, timeout=20).returncode == 0


needs_hosts = pytest.mark.skipif(
    not _possible(), reason=f"two machines in namespaces need root on Linux, and {', '.join(TOOLS)}"
)


@dataclass
class Host:
    """One of the two machines."""

    name: str
    address: str
    interface: str
    keeper: subprocess.Popen[bytes]
    first: int  # its process 1, as it is called outside
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def enter(self, *kinds: str) -> list[str]:
        """The words before a command that is to run there."""
        return ["nsenter", "-t", str(self.first), *(f"--{kind}" for kind in kinds)]

    def ip(self, *words: str) -> None:
        subprocess.run([*self.enter("net"), "ip", *words], check=True)

    def start(
        self, words: Sequence[str], cwd: Path, log: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process on this machine; what it prints goes to the log."""
        enter = self.enter("net", "uts", "mount", "pid")
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
        unset = (*LAUNCHER, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        environment = {k: v for k, v in os.environ.items() if k not in unset} | dict(env or {})
        with log.open("ab") as file:
            process = subprocess.Popen([*enter, *there, *words], stdout=file, stderr=file, env=environment)
        self.started.append(process)
        return process

    def torchrun(
        self,
        options: Sequence[str],
        words: Sequence[str],
        cwd: Path,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """train.py under torchrun on this machine."""
        launcher = [sys.executable, "-m", "torch.distributed.run", *options]
        return self.start([*launcher, str(ROOT / "train.py"), *words], cwd, log, env)

    def python(self, words: Sequence[str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
        """train.py by itself on this machine."""
        return self.start([sys.executable, str(ROOT / "train.py"), *words], cwd, log)

    def own_disk(self, folder: Path) -> Path:
        """Put an empty disk of this machine alone at the folder; the way to it from outside."""
        subprocess.run([*self.enter("mount"), "mount", "-t", "tmpfs", "tmpfs", str(folder)], check=True)
        return Path(f"/proc/{self.first}/root") / folder.relative_to("/")

    def unplug(self) -> None:
        """Pull the cable: nothing comes through, and nobody is told."""
        self.ip("link", "set", self.interface, "down")

    def kill(self) -> None:
        """The machine fails: all its processes are gone at once."""
        while pids := self._pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _pids(self) -> list[int]:
        """The processes of this machine but the first, and those that ended."""
        mine, keepers = _namespace(self.first), (self.first, self.keeper.pid)
        found = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
        return [p for p in found if p not in keepers and _namespace(p) == mine and _command(p)]


def _namespace(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}/ns/net").stat().st_ino
    except OSError:
        return None


def _command(pid: int) -> bytes:
    """What it was called with; nothing for a process that ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextmanager
def _host(letter: str, number: int, hosts: Path) -> Iterator[Host]:
    name = f"host{letter}"
    words = [*UNSHARE, "sh", "-c", KEEPER, "keeper", name, str(hosts)]
    keeper = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert keeper.stdout is not None and keeper.stdout.readline() == b"ready\n"
        first = int(Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text())
        host = Host(name, f"10.77.0.{number}", f"v{letter}", keeper, first)
        yield host
    finally:
        keeper.communicate(timeout=10)
    for process in host.started:
        process.wait(10)


@contextmanager
def two_hosts(
    folder: Path, a_hosts: str = "127.0.0.1 hostA", b_hosts: str = "127.0.0.1 hostB"
) -> Iterator[tuple[Host, Host]]:
    """hostA, 10.77.0.1 on vA, and hostB, 10.77.0.2 on vB; each with lines of its own in its hosts file."""
    files = [folder / "hosts.A", folder / "hosts.B"]
    for file, lines in zip(files, (a_hosts, b_hosts), strict=True):
        file.write_text(f"127.0.0.1 localhost\n{lines}\n")
    with _host("A", 1, files[0]) as a, _host("B", 2, files[1]) as b:
        ends = [["netns", str(host.first)] for host in (a, b)]
        cable = ["ip", "link", "add", a.interface, *ends[0], *VETH, b.interface, *ends[1]]
        subprocess.run(cable, check=True)
        for host in (a, b):
            host.ip("addr", "add", f"{host.address}/24", "dev", host.interface)
            host.ip("link", "set", host.interface, "up")
        yield a, b
