"""Between gradients and weights: parameter groups, the finite check, moving averages, a schedule."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR


def parameter_groups(
    model: nn.Module, optimizer: Mapping[str, Any], without: Sequence[str]
) -> list[dict[str, Any]]:
    """Group the trainable parameters: those that match a pattern get no weight decay.

    Args:
        optimizer: the config node. With `weight_decay` 0 there is one group; without it there are two,
            since the optimizer's own default may be another.
        without: patterns as of fnmatch, tried on `path.of.parameter` and on `ClassOfModule.parameter`.
    """
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    seen: set[Tensor] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue  # tied weights are one parameter
            seen.add(parameter)
            names = (f"{path}.{name}".lstrip("."), f"{type(module).__name__}.{name}")
            matches = any(fnmatchcase(n, pattern) for n in names for pattern in without)
            (plain if matches else decayed).append(parameter)
    if optimizer.get("weight_decay") == 0:
        return [{"params": decayed + plain}]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


class FiniteGuard:
    """Keeps a step with infinite or NaN gradients from reaching the weights.

    The check sees the reduced gradients, so all ranks find the same. On the CPU the answer is known at once;
    on an accelerator a fused optimizer reads it on the device (`found_inf`), without a synchronisation.
    With `sticky`, no later step is taken either: the weights stay those of the last good step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        sticky: bool,
        scaled: bool,
    ) -> None:
        self.parameters, self.optimizer, self.sticky = parameters, optimizer, sticky
        self.found = torch.zeros((), device=device)
        self.one = torch.ones((), device=device)
        self.bad_steps = torch.zeros((), device=device, dtype=torch.int64)
        self.loss = torch.zeros((), device=device)
        self.on_device = device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False)
        if self.on_device and not scaled:  # a GradScaler brings its own
            optimizer.found_inf = self.found  # type: ignore[attr-defined]

    def step(self, loss_sum: Tensor, scaler: torch.amp.GradScaler | None) -> None:
        """Take the optimizer step if the gradients are finite.

        Args:
            loss_sum: this rank's loss, by which it knows whether the fault is its own.
            scaler: of fp16, already unscaled. It leaves out overflowing steps itself, as a matter of course;
                then only a loss that is not finite counts as a fault.
        """
        if scaler is not None:
            self.loss.add_(loss_sum)  # infinite and NaN stay so in a sum
            scaler.step(self.optimizer)
            scaler.update()
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, self.one)
        if self.on_device:
            self.loss.add_(loss_sum)
            self.bad_steps.add_(self.found.to(torch.int64))
            self.optimizer.step()
            if not self.sticky:
                self.found.zero_()
        elif not self.found.item():  # host sync, free on the CPU
            self.optimizer.step()
        else:
            self.loss.add_(loss_sum)
            self.bad_steps += 1
            if not self.sticky:
                self.found.zero_()

    def read(self) -> tuple[int, bool]:
        """(steps left out since the last read, whether this rank's own loss was not finite). Host sync."""
        bad, own = int(self.bad_steps.item()), not math.isfinite(self.loss.item())
        if bad and not self.sticky:
            self.bad_steps.zero_()
        if not self.sticky:
            self.loss.zero_()
        return bad, own


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The 2-norm of the whole gradient. A scalar on the device."""
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


class Ema:
    """An exponential moving average of the trainable parameters, used in their place by evaluations.

    Polyak and Juditsky, SIAM J. Control Optim. 30 (1992); the exponential form: Tarvainen and Valpola, 2017.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        named = model.named_parameters(remove_duplicate=False)  # tied weights have both names in a checkpoint
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the model until the block ends."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        self._put(self.average)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])


class WarmupCosine(LambdaLR):
    """Linear warm-up, then half a cosine from the full learning rate down to `min_factor` of it.

    Loshchilov and Hutter, SGDR, ICLR 2017, without restarts.

    Args:
        total_steps: optimizer steps of the run; filled in by the program.
        warmup_steps: optimizer steps of the warm-up; a run that is shorter sees nothing else.
        min_factor: last learning rate as a fraction of the full one.

    Raises:
        ValueError: warmup_steps is negative.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        min_factor: float = 0.0,
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"scheduler.warmup_steps={warmup_steps} must be at least 0")

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
            return min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * done))

        super().__init__(optimizer, factor)
