"""How the model is laid over the ranks."""

import logging
from contextlib import AbstractContextManager, nullcontext
from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ddp_experiments.data import Microbatch
from ddp_experiments.errors import Refused
from ddp_experiments.tasks import Task
from ddp_experiments.world import World

logger = logging.getLogger("ddp_experiments")

# The argument's name since torch 2.13, and before.
BUFFERS = next(
    n
    for n in ("forward_sync_buffers", "broadcast_buffers")
    if n in signature(DistributedDataParallel).parameters
)


def check_batch_statistics(model: nn.Module, smallest_share: int, *, skips: bool) -> None:
    """Refuse batch norm where a rank's microbatch could be empty or one sample, or steps are skipped.

    Raises:
        Refused: it could.
    """
    norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if norms and skips:
        raise Refused(
            f"train.nonfinite=skip can't take a bad batch out of the running statistics of {norms[0]}; "
            "leave train.nonfinite=raise, or take another norm, e.g. model.norm=group"
        )
    if norms and smallest_share < 2:
        raise Refused(
            f"{norms[0]} takes statistics over a microbatch, but some rank would have one of "
            f"{smallest_share} sample(s): set train.drop_last=true, a larger train.global_batch_size, "
            "or model.norm=group"
        )


def lay_out(
    module: nn.Module, world: World, task: Task, first: Microbatch, autocast: AbstractContextManager[object]
) -> tuple[nn.Module, list[Tensor]]:
    """The model in DistributedDataParallel, and the buffers that a step must begin with as rank 0 has them.

    Parameters and buffers are afterwards as they were. Collective: all ranks must call.

    Args:
        first: a microbatch of this rank, for passes whose gradients are thrown away.
    """
    buffers = [b.clone() for b in module.buffers()]
    idle = idle_parameters(module, world, task, first, autocast)
    if idle:
        logger.info("no gradient in a first pass: %s; DDP looks for such parameters in every step", idle)
    model = DistributedDataParallel(
        module,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=bool(idle),
        # Rank 0's buffers are the run's; the others copy them before an evaluation, or in a step (`shared`).
        **{BUFFERS: False},  # type: ignore[arg-type]
    )
    # DDP rebuilds its buckets at its second forward, which reorders sums from three ranks on: fresh and
    # continued runs both leave that behind them here, and so stay bitwise equal.
    for _ in range(2):
        throw_away_pass(model, task, first, autocast)
    # Batch norm reads its statistics in evaluations only; what other modules change, their forward may read.
    norms = {id(b) for m in module.modules() if isinstance(m, _BatchNorm) for b in m.buffers(recurse=False)}
    pairs = list(zip(module.buffers(), buffers, strict=True))
    changed = torch.tensor([float(not torch.equal(b, before)) for b, before in pairs], device=world.device)
    world.all_reduce_sum(changed)  # a rank may see a change that another doesn't
    shared = [b for (b, _), n in zip(pairs, changed.tolist(), strict=True) if n and id(b) not in norms]
    with torch.no_grad():
        for buffer, before in pairs:
            buffer.copy_(before)
    return model, shared


def idle_parameters(
    module: nn.Module, world: World, task: Task, first: Microbatch, autocast: AbstractContextManager[object]
) -> str:
    """Names of trainable parameters that get no gradient on some rank; empty if there are none.

    On one rank such parameters are simply left alone, so they must not be an error on several.
    Collective: all ranks must call.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    used = throw_away_pass(module, task, first, autocast)
    count = torch.tensor([float(name in used) for name in trained], device=world.device)
    world.all_reduce_sum(count)
    names = [n for n, ranks in zip(trained, count.tolist(), strict=True) if ranks < world.world_size]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def throw_away_pass(
    model: nn.Module, task: Task, first: Microbatch, autocast: AbstractContextManager[object]
) -> set[str]:
    """Forward and backward without consequences; returns the names of the parameters that got a gradient."""
    with autocast:
        loss_sum = task.loss_sum(task.forward(model, first.inputs), first.targets, first.weight_B)
    loss_sum.backward()  # type: ignore[no-untyped-call]
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return used


def reduces_gradients(model: nn.Module, now: bool) -> AbstractContextManager[object]:
    """Around forward and backward of a microbatch: only the last one of a step talks to the other ranks."""
    return nullcontext() if now or not isinstance(model, DistributedDataParallel) else model.no_sync()
