"""Parameter groups, the finite check, moving averages, the schedule, and the loss scale of fp16."""

import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from ddp_experiments.models.cnn import CNN
from ddp_experiments.optim import Ema, FiniteGuard, WarmupCosine, gradient_norm, parameter_groups

CPU = torch.device("cpu")
DEFAULT = ["*bias", "*norm*", "*Norm*"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.scale = nn.LayerNorm(4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def names(model: nn.Module, group: dict[str, Any]) -> list[str]:
    return [n for p in group["params"] for n, q in model.named_parameters() if p is q]


# ---- weight decay


@pytest.mark.parametrize(
    ("without", "plain"),
    [
        (DEFAULT, ["inner.bias", "outer.bias", "scale.weight", "scale.bias"]),
        (["*bias"], ["inner.bias", "outer.bias", "scale.bias"]),
        (["LayerNorm.*"], ["scale.weight", "scale.bias"]),
        (["scale.weight"], ["scale.weight"]),
        (["norm*"], []),
    ],
)
def test_patterns_on_paths_and_classes_choose_what_has_no_weight_decay(
    without: list[str], plain: list[str]
) -> None:
    model = Tied()
    groups = parameter_groups(model, {"weight_decay": 0.1}, without)
    found = {g.get("weight_decay", 0.1): names(model, g) for g in groups}
    assert found.get(0.0, []) == plain
    assert sorted(found[0.1] + plain) == sorted(n for n, p in model.named_parameters() if p.requires_grad)


def test_norms_of_the_cnn_have_no_weight_decay() -> None:
    for norm in ("group", "batch"):
        model = CNN(1, [8, 8], 10, norm=norm)  # type: ignore[arg-type]
        _, plain = parameter_groups(model, {"weight_decay": 0.1}, DEFAULT)
        assert {n.rpartition(".")[0].rpartition(".")[2] for n in names(model, plain)} == {"norm", "head"}


def test_an_optimizer_with_a_weight_decay_by_default_spares_norms_and_biases_too() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(parameter_groups(model, {"lr": 1e-3}, DEFAULT))
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.0]


def test_without_weight_decay_there_is_one_group() -> None:
    (group,) = parameter_groups(Tied(), {"weight_decay": 0.0}, DEFAULT)
    assert len(group["params"]) == 5


# ---- the finite check


def guarded(sticky: bool, dtype: torch.dtype, **settings: Any) -> tuple[nn.Parameter, FiniteGuard]:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.5, **settings)
    return parameter, FiniteGuard([parameter], optimizer, CPU, sticky=sticky, scaled=False)


def take(parameter: nn.Parameter, guard: FiniteGuard, gradient: float, loss: float = 1.0) -> None:
    parameter.grad = torch.full_like(parameter, 1.0)
    parameter.grad[1] = gradient
    guard.step(torch.tensor(loss, dtype=parameter.dtype), None)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_step_is_left_out_and_the_next_one_taken(bad: float, dtype: torch.dtype, fused: bool) -> None:
    parameter, guard = guarded(False, dtype, fused=fused)
    take(parameter, guard, bad, loss=math.nan)
    assert parameter.tolist() == [1.0] * 3
    assert guard.read() == (1, True)
    take(parameter, guard, 1.0)
    assert parameter.tolist() == [0.5] * 3
    assert guard.read() == (0, False)


@pytest.mark.parametrize("fused", [True, False])
def test_after_a_bad_step_no_later_one_is_taken_if_that_ends_the_run(fused: bool) -> None:
    parameter, guard = guarded(True, torch.float64, fused=fused)
    take(parameter, guard, 1.0)
    take(parameter, guard, math.nan)
    take(parameter, guard, 1.0)
    assert parameter.tolist() == [0.5] * 3
    assert guard.read() == (2, False)  # the loss of this rank was finite: another one's was not


def test_a_gradient_of_the_largest_number_is_finite() -> None:
    parameter, guard = guarded(False, torch.float64)
    take(parameter, guard, 1e300)
    assert guard.read() == (0, False)
    assert parameter[1].item() == 1 - 0.5e300


def test_the_gradient_norm_is_that_of_all_parameters_together() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(9))]
    parameters[0].grad, parameters[1].grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0])
    assert gradient_norm(parameters).item() == 7.0


# ---- moving averages


def test_averages_follow_the_weights_and_lend_themselves_bit_for_bit() -> None:
    model = nn.Linear(3, 1)
    ema = Ema(model, 0.9)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    ema.update()
    now = {n: p.detach().clone() for n, p in model.named_parameters()}
    for n in now:
        assert torch.allclose(ema.average[n], 0.9 * start[n] + 0.1 * now[n], atol=1e-6)
    with pytest.raises(RuntimeError, match="inside"), ema.in_place():
        assert all(torch.equal(p, ema.average[n]) for n, p in model.named_parameters())
        raise RuntimeError("inside")
    assert all(torch.equal(p, now[n]) for n, p in model.named_parameters())


# ---- the schedule


def rates(total_steps: int, steps: int, **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler, found = WarmupCosine(optimizer, total_steps, **settings), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_warm_up_rises_evenly_and_half_a_cosine_falls_to_the_least() -> None:
    found = rates(13, 14, warmup_steps=3, min_factor=0.1)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[8] == pytest.approx(2.0 * 0.55)
    assert found[3:] == sorted(found[3:], reverse=True)
    assert found[13] == pytest.approx(0.2)


@pytest.mark.parametrize("total_steps", [1, 5, 6])
def test_a_run_may_be_no_longer_than_its_warm_up(total_steps: int) -> None:
    assert rates(total_steps, total_steps, warmup_steps=5)[:5] == pytest.approx(
        [2 * (i + 1) / 6 for i in range(min(total_steps, 5))]
    )


def test_a_negative_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler.warmup_steps=-1 must be at least 0"):
        rates(5, 1, warmup_steps=-1)


# ---- the loss scale


def test_the_loss_scale_goes_on_after_a_round_trip_through_json() -> None:
    def run(scaler: torch.amp.GradScaler, losses: list[float]) -> list[tuple[float, int]]:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        guard = FiniteGuard([parameter], optimizer, CPU, sticky=False, scaled=True)
        seen = []
        for loss in losses:
            before = parameter.detach().clone()
            scaler.scale(parameter.sum() * loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            guard.step(torch.tensor(loss), scaler)
            assert torch.equal(before, parameter) is not math.isfinite(loss)
            optimizer.zero_grad()
            seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
        return seen

    def fresh() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8, growth_interval=3)

    losses = [1.0, 1.0, math.inf, 1.0, 1.0, 1.0, 1.0]
    whole, cut, rest = fresh(), fresh(), fresh()
    wanted = run(whole, losses)
    assert [scale for scale, _ in wanted] == [8, 8, 4, 4, 4, 8, 8]
    first = run(cut, losses[:5])
    rest.load_state_dict(json.loads(json.dumps(cut.state_dict())))
    assert first + run(rest, losses[5:]) == wanted
