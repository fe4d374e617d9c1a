"""Where the machines of a start meet, when the program starts its workers by itself.

One store, on the machine with node_rank 0: the ranks use it as they use torchrun's. On one machine it listens
on loopback only; torch's own rendezvous listen on all interfaces, and one of them unpickles what it is sent.
"""

import errno
import json
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.utils.store import barrier

from ddp_experiments.errors import Exit, Refused, WorkersFailed

BACKEND = "ddp_experiments"
FINAL = {"refused": Exit.REFUSED, "unusable": Exit.NO_CHECKPOINT}  # ways to fail that a restart doesn't cure
LOOPBACK = "127.0.0.1"
PART_SECONDS = 10.0  # so long machines wait for one another when it is over


class Machines(RendezvousHandler):
    """The rendezvous of torch elastic's agents, for a fixed number of machines.

    Raises:
        Refused: the port is taken, or the endpoint is no address of the machine with node_rank 0.
        WorkersFailed: machines are missing after the timeout.
    """

    def __init__(self, name: str, node_rank: int, nnodes: int, endpoint: str, timeout: float) -> None:
        self.name, self.node_rank, self.nnodes, self.timeout = name, node_rank, nnodes, timeout
        host, _, port = endpoint.rpartition(":")
        self.host, self.port = host.strip("[]") or LOOPBACK, int(port or 0)
        self.endpoint = endpoint
        self.attempt = 0
        self.store: Store | None = None
        self.agents: Store | None = None  # as the agents see it

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines, at the first start and at every restart of the workers."""
        end = time.monotonic() + self.timeout
        cause = self.word("cause")
        if self.attempt and cause is not None and cause["kind"] in FINAL:
            raise WorkersFailed(cause["text"], FINAL[cause["kind"]], told=True)
        self.attempt += 1
        if self.store is None:
            self.store = self._host() if self.node_rank == 0 else self._find(end)
        self.store.set(self._present(self.node_rank), "")
        while missing := [r for r in range(self.nnodes) if not self.store.check([self._present(r)])]:
            if time.monotonic() > end:
                raise self._missing(missing)
            time.sleep(0.05)
        self.agents = store = PrefixStore(f"agents/{self.name}/{self.attempt}", self.store)
        return RendezvousInfo(store, self.node_rank, self.nnodes, RendezvousStoreInfo(self.host, self.port))

    def _present(self, node_rank: int, ahead: int = 0) -> str:
        return f"machine/{self.name}/{self.attempt + ahead}/{node_rank}"

    def _missing(self, missing: list[int], why: str = "") -> WorkersFailed:
        who = ", ".join(map(str, missing))
        return WorkersFailed(
            f"{self.nnodes - len(missing)} of {self.nnodes} nodes came to {self.endpoint} within "
            f"{self.timeout:.0f} s; missing: node_rank {who}. Start the same command there with "
            f"mode.node_rank={missing[0]}, or raise mode.init_timeout_seconds{why}",
            Exit.FAILED,
            told=False,
        )

    def _host(self) -> Store:
        """The store, on this machine, listening on the endpoint's address alone."""
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError as error:
            raise Refused(self._cannot_host(error)) from None
        self.port = int(listener.getsockname()[1])
        return TCPStore(
            self.host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self.timeout),
            master_listen_fd=listener.detach(),
        )

    def _cannot_host(self, error: OSError) -> str:
        what = f"mode.rdzv_endpoint={self.endpoint}"
        if error.errno == errno.EADDRINUSE:
            return f"{what}: port {self.port} of this machine is taken; give another port, on all machines"
        if error.errno == errno.EADDRNOTAVAIL:
            return (
                f"{what} is no address of this machine; mode.node_rank=0 belongs to the machine that has it"
            )
        return f"{what}: {error.strerror or error}; give an address of the machine with mode.node_rank=0"

    def _find(self, end: float) -> Store:
        """The store on the machine with node_rank 0, as soon as it is there."""
        why = ""
        while time.monotonic() < end:
            try:
                with socket.create_connection((self.host, self.port), timeout=2):
                    pass
                store = TCPStore(
                    self.host,
                    self.port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=max(1.0, end - time.monotonic())),
                )
                # a store of the job before may still be closing: this one must know ours
                store.wait([self._present(0)], timedelta(seconds=max(1.0, end - time.monotonic())))
                return store
            except (OSError, dist.DistError) as error:
                why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
                time.sleep(0.2)
        raise self._missing([0], f" ({why})")

    def word(self, key: str) -> Any:
        """What the ranks have left in the store for whoever has started them; None if nothing."""
        with suppress(dist.DistError, RuntimeError):  # it is on another machine, and gone
            if self.store is not None and self.store.check([f"ddpx/{key}"]):
                return json.loads(self.store.get(f"ddpx/{key}"))
        return None

    def end_wait_of_others(self) -> None:
        """Be counted where the agents of machines whose workers ended well wait for this one."""
        if self.nnodes > 1 and self.agents is not None:
            with suppress(dist.DistError, RuntimeError):
                barrier(self.agents, self.nnodes, _TERMINAL_STATE_SYNC_ID, PART_SECONDS)

    def part(self) -> None:
        """Keep the store until the other machines have heard how it ended."""
        if self.store is None or self.nnodes == 1:
            return
        with suppress(dist.DistError, RuntimeError):
            parted = f"parted/{self.name}"
            self.store.add(parted, 1)
            end = time.monotonic() + PART_SECONDS
            while self.node_rank == 0 and self.store.add(parted, 0) < self.nnodes and time.monotonic() < end:
                time.sleep(0.05)

    # ---- what torch elastic asks

    def num_nodes_waiting(self) -> int:
        """Machines that have gone on to a restart: this one's workers must start again with theirs."""
        ahead = [self._present(r, ahead=1) for r in range(self.nnodes) if r != self.node_rank]
        with suppress(dist.DistError, RuntimeError):  # node_rank 0 is gone; the workers will see it
            return sum(self.store.check([key]) for key in ahead) if self.store is not None else 0
        return 0

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def get_run_id(self) -> str:
        return self.name

    def shutdown(self) -> bool:
        return True


_prepared: list[Machines] = []


def _take(parameters: RendezvousParameters) -> RendezvousHandler:
    return _prepared.pop()


def offer(machines: Machines) -> None:
    """Let the next start of torch elastic with the backend `BACKEND` use this rendezvous."""
    _prepared[:] = [machines]
    rendezvous_handler_registry.register(BACKEND, _take)
