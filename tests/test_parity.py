"""The number of ranks does not change what is trained: one process against 2, 3 and 4."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests import compare
from tests.probes import EVALUATED
from tests.ranks import ROOT, Pool, Result

CONFIG = f"--config-dir={ROOT}/tests/conf"
COMMON = (CONFIG, "train.max_steps=60", "train.max_epochs=null", "log.every_steps=1", "mode.threads=1")
CNN = (*COMMON, "experiment=digits_cnn", "eval.test=false", "log.tensorboard=false")
MLP = (*COMMON, "experiment=digits_mlp", "eval.test=false", "log.tensorboard=false")
RAGGED = (*COMMON, "experiment=recorded", "data.samples=101", "train.global_batch_size=50")
FP64 = ("train.precision=fp64",)
ALL = ("train.clip_norm=1.0", "train.ema_decay=0.9", "optimizer.weight_decay=0.1")
CASES = {
    "mlp": (*MLP, *FP64),
    "small cnn": (*CNN, *FP64, "model.channels=[8,16]"),
    "cnn": (*CNN, *FP64),
    "ragged batches in two microbatches": (*RAGGED, *FP64, "train.accumulation_steps=2"),
    "clipping, averages and weight decay": (*RAGGED, *FP64, *ALL),
    "cnn, sgd, three microbatches": (
        *(*CNN, *FP64, "optimizer=sgd", "optimizer.lr=0.1"),
        *("train.accumulation_steps=3", "train.ema_decay=0.9", "model.channels=[8,16]"),
    ),
}
SLOW = ("cnn", "cnn, sgd, three microbatches")


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run of one process, made once for each command."""

    @cache
    def run(*words: str) -> Path:
        return pool.train(tmp_path_factory.mktemp("alone"), *words).ok().folder

    return run


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CASES])
def test_fp64_losses_and_weights_agree_to_1e_9_after_60_steps(
    train: Callable[..., Result], alone: Callable[..., Path], case: str, ranks: int
) -> None:
    one = alone(*CASES[case])
    many = train(*CASES[case], "mode=multigpu", ranks=ranks).ok().folder
    left, right = compare.losses(one), compare.losses(many)
    assert len(left) == len(right) == 60
    assert max(abs(a - b) for a, b in zip(left, right, strict=True)) < 1e-9
    assert compare.largest_difference(compare.weights(one), compare.weights(many)) < 1e-9
    for a, b in zip(compare.points(one), compare.points(many), strict=True):
        assert a == pytest.approx(b, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "words",
    [MLP, (*CNN, "model.channels=[8,16]"), pytest.param(CNN, marks=pytest.mark.slow)],
    ids=["mlp", "small cnn", "cnn"],
)
def test_fp32_first_step_agrees_to_1e_5_and_losses_to_1e_3_after_60_steps(
    train: Callable[..., Result], alone: Callable[..., Path], words: tuple[str, ...], ranks: int
) -> None:
    one = compare.points(alone(*words))
    many = compare.points(train(*words, "mode=multigpu", ranks=ranks).ok().folder)
    for key in ("train/loss", "optim/grad_norm"):
        assert many[0][key] == pytest.approx(one[0][key], rel=1e-5)
    for a, b in zip(one, many, strict=True):
        if "train/loss" in a:
            assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-3)


@pytest.mark.parametrize(
    ("validation", "ranks"), [(2, 4), (4, 3), (5, 2), (6, 4), (7, 3), (101, 2), (101, 3), (101, 4)]
)  # with 2 samples for 4 ranks, two have no share
def test_an_evaluation_counts_each_sample_once(
    train: Callable[..., Result], alone: Callable[..., Path], tmp_path: Path, validation: int, ranks: int
) -> None:
    words = (CONFIG, "experiment=recorded", "debug=tiny", *FP64, f"data.validation={validation}")
    words = (*words, "eval.microbatch_size=8")
    many = train(*words, "mode=multigpu", env={"TEST_RECORD": str(tmp_path)}, ranks=ranks).ok().folder
    seen = [int(n) - EVALUATED for f in tmp_path.glob("eval.*") for n in f.read_text().split()]
    assert sorted(seen) == list(range(validation))
    found = [p for run in (alone(*words), many) for p in compare.points(run) if "eval/loss" in p]
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_parameters_without_gradient_train_alike_on_one_rank_and_two(train: Callable[..., Result]) -> None:
    words = (
        "experiment=digits_mlp",
        "model=linear",
        "model._target_=tests.probes.HalfIdle",
        "train.precision=fp64",
        "train.accumulation_steps=2",
        "train.max_epochs=null",
        "train.max_steps=20",
        "log.every_steps=1",
        "mode.threads=1",
    )
    one = train(*words).ok().folder
    result = train(*words, "mode=multigpu", ranks=2).ok()
    assert "no gradient in a first pass: idle.weight, idle.bias" in result.text
    two = result.folder
    assert compare.losses(two) == pytest.approx(compare.losses(one), rel=1e-9)
    assert compare.largest_difference(compare.weights(one), compare.weights(two)) < 1e-9
