"""The tasks: weights, sums and the metrics made of them."""

import math

import pytest
import torch
from torch import Tensor

from ddp_experiments.tasks import Classification, Regression, Task

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(9, 4, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(4, (9,), generator=GENERATOR)
CLASSES[2] = SCORES[2].argmax()  # of weight 0, and right
TARGETS = torch.randn(9, 4, generator=GENERATOR, dtype=torch.float64)
WEIGHT = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.float64)


def metrics(task: Task, outputs: Tensor, targets: Tensor, weight_B: Tensor | None = None) -> dict[str, float]:
    loss = task.loss_sum(outputs, targets, weight_B)
    sums = {"loss": loss, **task.sums(outputs, targets, weight_B)}
    count = len(outputs) if weight_B is None else weight_B.sum().item()
    return task.finish({k: v.item() for k, v in sums.items()}, count)


@pytest.mark.parametrize(("task", "targets"), [(Classification(), CLASSES), (Regression(), TARGETS)])
def test_a_sample_of_weight_0_does_not_count(task: Task, targets: Tensor) -> None:
    kept = WEIGHT.bool()
    weighted = metrics(task, SCORES, targets, WEIGHT)
    assert weighted == pytest.approx(metrics(task, SCORES[kept], targets[kept]), abs=1e-12)
    assert weighted != pytest.approx(metrics(task, SCORES, targets), abs=1e-3)


@pytest.mark.parametrize(("task", "targets"), [(Classification(), CLASSES), (Regression(), TARGETS)])
def test_the_loss_sum_is_the_sum_of_the_samples_losses(task: Task, targets: Tensor) -> None:
    loss_B = task.loss_B(SCORES, targets)
    assert loss_B.shape == (9,)
    assert task.loss_sum(SCORES, targets, None).item() == pytest.approx(loss_B.sum().item(), abs=1e-12)


def test_finish_returns_the_metrics_that_the_task_declares() -> None:
    for task, targets in ((Classification(), CLASSES), (Regression(), TARGETS)):
        assert tuple(metrics(task, SCORES, targets)) == task.metrics


def test_accuracy_is_the_share_of_right_classes() -> None:
    assert metrics(Classification(), SCORES, SCORES.argmax(1))["accuracy"] == 1
    half = torch.cat([SCORES.argmax(1)[:4], (SCORES.argmax(1)[4:] + 1) % 4])
    assert metrics(Classification(), SCORES, half)["accuracy"] == 4 / 9


def test_regression_measures_squared_and_absolute_error_and_explained_variance() -> None:
    found = metrics(Regression(), TARGETS[:, :1] + 0.5, TARGETS[:, :1])
    variance = TARGETS[:, 0].var(correction=0).item()
    assert found == pytest.approx({"loss": 0.25, "mae": 0.5, "r2": 1 - 0.25 / variance}, abs=1e-12)
    assert math.isnan(metrics(Regression(), SCORES[:, :1], torch.ones(9, 1))["r2"])


def test_outputs_and_targets_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"outputs \(9, 1\) and targets \(9,\) differ in shape"):
        Regression().loss_B(SCORES[:, :1], TARGETS[:, 0])
