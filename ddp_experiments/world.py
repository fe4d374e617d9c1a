"""The ranks of a run: joining and leaving the process group, and the collectives the project uses.

The only room that opens or closes a group. The launcher's store is used before there is a group, always under
a prefix that all ranks agree on anew: the keys of an earlier round of workers can't be read by a later one.
"""

import gc
import json
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the first group: its defaults would hold that one for ever
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_experiments.config import Backend, Mode
from ddp_experiments.environment import Environment, available_cores
from ddp_experiments.errors import NoUsableCheckpoint, Refused

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """Which rank this process is, of how many, and on which device."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    device: torch.device
    backend: str | None  # None = no process group
    threads: int

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place. Collective: all ranks must call."""
        if self.backend is not None:
            dist.all_reduce(tensor)

    def copy_from_rank0(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by rank 0's. Collective: all ranks must call, with tensors of the same shapes."""
        if self.backend is not None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """Wait for all ranks. Collective: all ranks must call."""
        everyone = torch.zeros(1, device=self.device)
        self.all_reduce_sum(everyone)
        everyone.item()  # host sync: on NCCL the reduction itself doesn't wait


# ---- before there is a group


class Meeting:
    """The ranks of one start, meeting at the launcher's store; without a launcher one rank, and no store."""

    def __init__(self, environment: Environment, mode: Mode) -> None:
        self.environment, self.timeout = environment, timedelta(seconds=mode.init_timeout_seconds)
        self.launcher_store: Store | None = None
        self.store: Store | None = None
        if environment.launched and environment.master_port:
            hosts = not environment.agent_store and environment.rank == 0
            self.launcher_store = TCPStore(
                environment.master_addr,
                environment.master_port,
                is_master=hosts,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=self.timeout,
            )
            self.store = PrefixStore(f"ddpx/{self._round()}", self.launcher_store)
            # All are here now; what rank 0 decides may take longer, such as checking a large checkpoint.
            self.store.set_timeout(max(self.timeout, timedelta(seconds=mode.timeout_seconds)))

    def _round(self) -> str:
        """A name for this round of workers, agreed by all ranks, however often the store was used before.

        Every rank posts a request under a name that nobody used before, so no answer can be an old one.
        The restart count of torchrun won't do: it is counted by each machine for itself.
        """
        store, me = self.launcher_store, uuid.uuid4().hex
        rank, world_size = self.environment.rank, self.environment.world_size
        assert store is not None
        if rank > 0:
            store.queue_push("ddpx/round", f"request {rank} {me}")
            try:
                agreed = store.get(f"ddpx/round/{me}").decode()
            except dist.DistError as error:
                raise self._late("rank 0") from error
            store.queue_push("ddpx/round", f"agreed {rank} {agreed}")
            return agreed
        met: set[str] = set()
        while len(met) < world_size - 1:
            try:
                kind, who, name = store.queue_pop("ddpx/round").decode().split()
            except dist.DistError as error:
                missing = sorted(set(range(1, world_size)) - {int(r) for r in met})
                raise self._late(f"rank {', '.join(map(str, missing))}") from error
            if kind == "request":
                store.set(f"ddpx/round/{name}", me)
            elif name == me:
                met.add(who)
        return me

    def _late(self, who: str) -> RuntimeError:
        me, world_size = self.environment.rank, self.environment.world_size
        return RuntimeError(
            f"rank {me} waited {self.timeout.seconds} s for {who} of {world_size}: start all of them, "
            "or raise mode.init_timeout_seconds"
        )

    def once(self, key: str, make: Callable[[], str]) -> str:
        """A value that rank 0 makes at the first start; it stays over restarts of the workers."""
        if self.launcher_store is None:
            return make()
        if self.environment.rank == 0 and not self.launcher_store.check([f"ddpx/{key}"]):
            self.launcher_store.set(f"ddpx/{key}", make())
        return self.launcher_store.get(f"ddpx/{key}").decode()

    def rank0_decides(self, key: str, decide: Callable[[], T]) -> T:
        """Rank 0's decision, as JSON, for all ranks; its refusal is raised on all of them.

        Raises:
            Refused, NoUsableCheckpoint: rank 0 raised it.
        """
        if self.store is None:
            return decide()
        if self.environment.rank == 0:
            try:
                answer: dict[str, Any] = {"value": decide()}
            except Refused as refusal:
                answer = {"refused": refusal.faults}
            except NoUsableCheckpoint as error:
                answer = {"unusable": str(error)}
            except BaseException as error:
                self.store.set(key, json.dumps({"failed": f"{type(error).__name__}: {error}"}))
                raise
            self.store.set(key, json.dumps(answer))
        answer = json.loads(self.store.get(key))
        if "refused" in answer:
            raise Refused(*answer["refused"])
        if "unusable" in answer:
            raise NoUsableCheckpoint(answer["unusable"])
        if "failed" in answer:
            raise RuntimeError(f"rank 0 failed: {answer['failed']}")
        value: T = answer["value"]
        return value


# ---- devices


def device_faults(mode: Mode, environment: Environment) -> Iterator[str]:
    """Yield what is wrong with the devices asked for; looks at the machine, starts nothing."""
    local, kind = environment.local_world_size, mode.device.partition(":")[0]
    count = torch.cuda.device_count()
    if kind == "cuda" and count == 0:
        yield f"mode.device={mode.device}, but this machine has no CUDA device; try mode.device=auto"
    elif kind == "mps" and not torch.backends.mps.is_available():
        yield "mode.device=mps, but this machine has none; try mode.device=auto"
    elif kind == "mps" and environment.world_size > 1:
        ranks = environment.world_size
        yield f"mode.device=mps is one process, but the launcher started {ranks}; try mode.device=cpu"
    elif ":" in mode.device and local > 1:
        yield f"{local} processes can't share mode.device={mode.device}; try mode.device=cuda"
    elif ":" in mode.device and int(mode.device.partition(":")[2]) >= count:
        yield f"mode.device={mode.device}, but this machine has {count} CUDA devices, numbered from 0"
    elif _kind(mode, environment) == "cuda" and local > count:
        yield (
            f"{local} processes on this machine, but {count} CUDA device(s): start --nproc_per_node={count}, "
            "or try mode.device=cpu"
        )
    if mode.backend is Backend.nccl and _kind(mode, environment) != "cuda":
        where = f"mode.device={mode.device} is no CUDA device here"
        yield f"mode.backend=nccl needs CUDA, but {where}; try mode.backend=gloo"


def _kind(mode: Mode, environment: Environment) -> str:
    """cpu, cuda or mps."""
    if mode.device != "auto":
        return mode.device.partition(":")[0]
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() and environment.world_size == 1 else "cpu"


def choose_device(mode: Mode, environment: Environment) -> torch.device:
    """The device of this rank."""
    kind = _kind(mode, environment)
    if kind != "cuda":
        return torch.device(kind)
    index = mode.device.partition(":")[2]
    return torch.device("cuda", int(index) if index else environment.local_rank)


def choose_threads(mode: Mode, environment: Environment) -> int:
    """CPU threads of this rank: ours to set, since launchers have other defaults and the count moves bits."""
    if isinstance(mode.threads, int):
        return mode.threads
    return max(1, available_cores() // environment.local_world_size)


def set_threads(mode: Mode, environment: Environment) -> None:
    """Take the CPU threads of this rank, before anything is computed."""
    torch.set_num_threads(choose_threads(mode, environment))


# ---- joining and leaving


@contextmanager
def join(mode: Mode, environment: Environment, meeting: Meeting) -> Iterator[World]:
    """Be a rank of the world until the block ends. Collective: all ranks must call."""
    device = choose_device(mode, environment)
    if device.type == "cuda":
        torch.cuda.set_device(
            device
        )  # before the first CUDA call, or rank 0's device gets a context of every rank
    backend = None
    if environment.world_size > 1:
        automatic = "nccl" if device.type == "cuda" else "gloo"
        backend = automatic if mode.backend is Backend.auto else mode.backend.value
        assert meeting.store is not None
        dist.init_process_group(
            backend,
            store=PrefixStore("group", meeting.store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=mode.timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    world = World(
        rank=environment.rank,
        local_rank=environment.local_rank,
        world_size=environment.world_size,
        local_world_size=environment.local_world_size,
        node_rank=environment.node_rank,
        device=device,
        backend=backend,
        threads=torch.get_num_threads(),
    )
    try:
        yield world
        world.barrier()  # nobody leaves while another still talks
    except BaseException as error:  # no collective here: the others may not come
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        if backend is not None:
            gc.collect()  # frees DDP; were it the last to hold the group, gloo would wait for ever
            dist.destroy_process_group()
