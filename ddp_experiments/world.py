"""The ranks of a run: joining and leaving the process group, and the collectives the project uses.

The only room that opens or closes a group.
"""

import functools
import gc
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before the first group: its defaults would hold that one for ever
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ddp_experiments import network
from ddp_experiments.config import Backend, Mode, ModeName
from ddp_experiments.environment import Environment, available_cores
from ddp_experiments.meeting import Meeting
from ddp_experiments.process import signals_at_once


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


# ---- devices


def accelerators(mode: Mode) -> int:
    """How many processes of this machine can have an accelerator of their own."""
    if mode.device == "cpu":
        return 0
    if mode.device == "mps" or ":" in mode.device:
        return 1
    return torch.cuda.device_count() or int(torch.backends.mps.is_available())


def planned(mode: Mode, environment: Environment) -> Environment:
    """What the launcher says; without one, what the ranks will be that this program starts by itself."""
    if environment.launched or mode.name is ModeName.single:
        return environment
    local = mode.nproc_per_node if isinstance(mode.nproc_per_node, int) else accelerators(mode) or 2
    nnodes = mode.nnodes if isinstance(mode.nnodes, int) else 1
    return replace(
        environment,
        world_size=local * nnodes,
        local_world_size=local,
        nnodes=nnodes,
        node_rank=mode.node_rank or 0,
    )


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
    if device.type == "cuda":  # before the first CUDA call, or rank 0's device gets a context of every rank
        torch.cuda.set_device(device)
    failed = False
    try:
        backend = _open_group(mode, environment, meeting, device) if environment.world_size > 1 else None
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
        yield world
        world.barrier()  # nobody leaves while another still talks
    except BaseException as error:  # no collective here: the others may not come
        failed = True
        traceback.clear_frames(error.__traceback__)
        meeting.settle(error)  # before the group is closed, which the others see as an error of theirs
        raise
    finally:
        if dist.is_initialized():
            gc.collect()  # frees DDP; were it the last to hold the group, gloo would wait for ever
            if failed and meeting.abort is not None:
                meeting.abort()
            else:
                dist.destroy_process_group()
        meeting.abort = None


def _open_group(mode: Mode, environment: Environment, meeting: Meeting, device: torch.device) -> str:
    """Open the process group; returns its backend."""
    automatic = "nccl" if device.type == "cuda" else "gloo"
    backend = automatic if mode.backend is Backend.auto else mode.backend.value
    assert meeting.store is not None
    network.use_interface(environment, meeting.all_say)
    with signals_at_once():  # it waits in C++, where handlers aren't called
        dist.init_process_group(
            backend,
            store=PrefixStore("group", meeting.store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=timedelta(seconds=mode.timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    if backend == "nccl":  # a kernel that waits for another rank ends only by an abort on its own rank
        meeting.abort = functools.cache(dist.distributed_c10d._abort_process_group)
    return backend
