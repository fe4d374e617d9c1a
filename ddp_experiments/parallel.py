"""How the model is laid over the ranks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ddp_experiments.data import Microbatch
from ddp_experiments.errors import Refused
from ddp_experiments.tasks import Task
from ddp_experiments.world import World

# The argument's name since torch 2.13, and before.
BUFFERS = next(
    n
    for n in ("forward_sync_buffers", "broadcast_buffers")
    if n in signature(DistributedDataParallel).parameters
)


def check_batch_statistics(model: nn.Module, smallest_share: int) -> None:
    """Refuse batch norm where a rank's microbatch could be empty or one sample.

    Raises:
        Refused: it could.
    """
    norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if norms and smallest_share < 2:
        raise Refused(
            f"{norms[0]} takes statistics over a microbatch, but some rank would have one of "
            f"{smallest_share} sample(s): set train.drop_last=true, a larger train.global_batch_size, "
            "or model.norm=group"
        )


def lay_out(module: nn.Module, world: World) -> nn.Module:
    """The model as the ranks train it: itself on one rank, else in DistributedDataParallel.

    Collective: all ranks must call.
    """
    if world.world_size == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # Rank 0's buffers are the run's; the others copy them before an evaluation.
        **{BUFFERS: False},  # type: ignore[arg-type]
    )


def settle(
    model: nn.Module, task: Task, microbatches: Iterable[Microbatch], autocast: AbstractContextManager[object]
) -> None:
    """Do two throw-away passes: DDP rebuilds its buckets at its second forward, which reorders sums.

    Fresh and continued runs both do them, so that from three ranks on they stay bitwise equal. Parameters,
    gradients and buffers are afterwards as they were. Collective: all ranks must call.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    buffers = [b.clone() for b in model.module.buffers()]
    first = next(iter(microbatches))
    for _ in range(2):
        with autocast:
            loss_sum = task.loss_sum(task.forward(model, first.inputs), first.targets, first.weight_B)
        loss_sum.backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.module.buffers(), buffers, strict=True):
            buffer.copy_(before)


def reduces_gradients(model: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Around forward and backward of a microbatch: only the last one of a step talks to the other ranks."""
    return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()
