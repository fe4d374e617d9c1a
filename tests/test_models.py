"""The models: shapes, and that a sample's output is its own."""

import pytest
import torch
from torch import nn

from ddp_experiments.models.cnn import CNN
from ddp_experiments.models.linear import Linear
from ddp_experiments.models.mlp import MLP

IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def cnn(**changes: object) -> CNN:
    torch.manual_seed(0)
    return CNN(1, [8, 16], 10, **changes).double()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model", [cnn(), cnn(norm="batch"), cnn(dropout=0.3), MLP(64, [16, 8], 10, dropout=0.1), Linear(64, 10)]
)
def test_images_become_a_row_of_class_scores_each(model: nn.Module) -> None:
    assert model.double()(IMAGES.double()).shape == (6, 10)


def test_group_norm_lets_a_sample_alone_and_batch_norm_does_not() -> None:
    for norm, own in (("group", True), ("batch", False)):
        model = cnn(norm=norm)
        together, apart = model(IMAGES.double()), model(IMAGES[:3].double())
        assert torch.allclose(together[:3], apart, atol=1e-12) is own


def test_no_parameter_of_the_cnn_has_a_gradient_that_is_zero_by_construction() -> None:
    model = cnn()
    model(IMAGES.double()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 1e-6 for p in model.parameters())


def test_channels_that_the_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model.channels=\[8, 12\] must be multiples of model.groups=8"):
        CNN(1, [8, 12], 10)
    CNN(1, [8, 12], 10, norm="batch")


def test_a_sigmoid_output_lies_between_0_and_1() -> None:
    scores = MLP(64, [8], 10, output="sigmoid")(100 * IMAGES)
    assert scores.min() >= 0
    assert scores.max() <= 1
    assert MLP(64, [8], 10)(100 * IMAGES).abs().max() > 1


def test_dropout_acts_in_training_only() -> None:
    for model in (cnn(dropout=0.5), MLP(64, [16], 10, dropout=0.5).double()):
        assert not torch.equal(model(IMAGES.double()), model(IMAGES.double()))
        model.eval()
        assert torch.equal(model(IMAGES.double()), model(IMAGES.double()))
