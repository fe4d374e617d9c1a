"""The loop: faults that are not finite, accumulation, collectives, precision, and when training ends."""

import json
import math
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ddp_experiments.checkpoint import directories
from ddp_experiments.data import Microbatch
from ddp_experiments.data.order import permutation
from ddp_experiments.data.synthetic import teacher_weights
from ddp_experiments.loop import evaluate
from ddp_experiments.models import mlp
from ddp_experiments.tasks import Regression
from ddp_experiments.world import World
from tests import compare
from tests.probes import indexed
from tests.ranks import ROOT, Result

RECORDED = (f"--config-dir={ROOT}/tests/conf", "experiment=recorded")
QUIET = ("log.tensorboard=false", "eval.test=false", "mode.threads=1")
MLP = (*QUIET, "experiment=digits_mlp", "train.max_epochs=null")
EACH = ("log.every_steps=1",)
CNN = (*QUIET, "experiment=digits_cnn", "train.max_epochs=null")
BATCH_NORM = (*CNN, "model.norm=batch", "model.channels=[8,8]", "mode=multigpu")
FAULTY = (
    *MLP,
    "task._target_=tests.probes.FaultyClassification",
    "train.max_steps=6",
    "train.precision=fp64",
)
SETTLING = 3  # passes of several ranks before the first step


def state(folder: Path) -> dict[str, object]:
    found: dict[str, object] = directories.read_json(compare.last(folder) / "state.json")["state"]
    return found


def parameters(folder: Path) -> list[list[str]]:
    """The parameters' checksums after each step, by rank."""
    return [f.read_text().split() for f in sorted(folder.glob("parameters.*"))]


# ---- gradients that are not finite


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("optimizer.fused=false",),
        ("train.clip_norm=0.5",),
        ("train.accumulation_steps=2", "train.ema_decay=0.9"),
    ],
    ids=["fused", "not fused", "clipping", "accumulation and averages"],
)
def test_skip_leaves_out_a_bad_step_on_all_ranks(
    train: Callable[..., Result], tmp_path: Path, more: tuple[str, ...]
) -> None:
    words = (*FAULTY, *EACH, *more, "train.nonfinite=skip", "scheduler._target_=tests.probes.FaultyCosine")
    microbatches = 2 if "train.accumulation_steps=2" in more else 1
    call = 2 * microbatches + 1  # the first microbatch of step 3
    one = train(*words, env={"TEST_FAULT": f"nan@{call}"}).ok()
    two = train(
        *words,
        "mode=multigpu",
        env={"TEST_FAULT": f"nan@{call + SETTLING}:1", "TEST_RECORD": str(tmp_path)},
        ranks=2,
    ).ok()
    left, right = parameters(tmp_path)
    assert left == right
    assert left[-5] == left[-4]  # of the six steps the third changed nothing
    assert len(set(left[-6:])) == 5
    assert compare.largest_difference(compare.weights(one.folder), compare.weights(two.folder)) < 1e-9
    assert state(one.folder)["skipped_steps"] == state(two.folder)["skipped_steps"] == 1
    finite = [math.isfinite(float(loss)) for loss in compare.losses(two.folder)]
    assert finite == [True, True, False, True, True, True]
    assert "up to step 3 left out: infinite or NaN gradients (the loss of rank 1 was not finite)" in two.text


@pytest.mark.parametrize("fused", ["true", "false"])
@pytest.mark.parametrize(
    "paces",
    [(*EACH, "checkpoint.every_steps=1"), ("log.every_steps=100", "checkpoint.every_steps=2")],
    ids=["noticed at once", "noticed later"],
)
def test_raise_names_step_and_rank_and_saves_nothing_from_there_on(
    train: Callable[..., Result], paces: tuple[str, ...], fused: str
) -> None:
    words = (*FAULTY, *paces, f"optimizer.fused={fused}", "mode=multigpu")
    result = train(*words, env={"TEST_FAULT": f"nan@{3 + SETTLING}:1"}, ranks=2)
    assert result.exit_codes == [1, 1]
    assert "step 3: infinite or NaN gradients (the loss of rank 1 was not finite)" in result.text
    assert "the weights are those of step 2" in result.text
    assert compare.last(result.folder).name == "step-2"
    assert max(step for step, _ in directories.steps(result.folder / "checkpoints")) == 2
    assert all(t.isfinite().all() for t in compare.weights(result.folder).values())
    assert directories.read_json(result.folder / "status.json")["state"] == "failed"


# ---- accumulation and collectives


def test_a_run_is_what_a_plain_loop_does(train: Callable[..., Result]) -> None:
    words = (
        "optimizer=sgd",
        "optimizer.lr=0.1",
        "scheduler=constant",
        "train.max_epochs=2",
        "train.clip_norm=0.5",
    )
    sizes = ("data.samples=101", "train.global_batch_size=50", "train.accumulation_steps=2")
    run = train(*RECORDED, *words, *sizes, "train.precision=fp64").ok()

    torch.manual_seed(0)
    model = mlp.MLP(64, [16, 8], 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data, losses = indexed(101).train, []
    for epoch in range(2):
        for index in permutation(101, seed=0, epoch=epoch).split(50):  # 50, 50 and 1
            inputs, targets = data.inputs[index].double(), data.targets[index].double()  # type: ignore[attr-defined]
            loss = torch.nn.functional.mse_loss(model(inputs), targets / 100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert compare.losses(run.folder) == pytest.approx(losses, rel=1e-12)
    wanted = {f"model/{name}": p.detach() for name, p in model.named_parameters()}
    assert compare.largest_difference(compare.weights(run.folder, "model"), wanted) < 1e-12


@pytest.mark.parametrize("accumulation_steps", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_same_parameters_after_every_step(
    train: Callable[..., Result], tmp_path: Path, ranks: int, accumulation_steps: int
) -> None:
    train(
        *(*RECORDED, "mode=multigpu", "scheduler._target_=tests.probes.FaultyCosine"),
        *("data.samples=37", f"train.accumulation_steps={accumulation_steps}", "train.ema_decay=0.9"),
        env={"TEST_RECORD": str(tmp_path)},
        ranks=ranks,
    ).ok()
    found = parameters(tmp_path)
    assert len(found) == ranks
    assert len(set(found[0])) >= 12  # three epochs of 37 samples by 12, the last one a single sample
    assert all(f == found[0] for f in found)


@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_step_costs_one_reduction_and_nothing_else_is_exchanged(
    train: Callable[..., Result], accumulation_steps: int
) -> None:
    steps = 40
    run = train(
        *(*CNN, "mode=multigpu", f"train.accumulation_steps={accumulation_steps}"),
        *(
            "train.max_steps=60",
            "eval.every_epochs=null",
            "log.every_steps=1000",
            f"log.profile_steps={steps}",
        ),
        *("train.clip_norm=1.0", "train.ema_decay=0.9"),
        ranks=2,
    ).ok()
    for rank in range(2):
        events = json.loads((run.folder / f"trace-rank{rank}.json").read_text())["traceEvents"]
        names = Counter(e["name"] for e in events if e.get("cat") in ("user_annotation", "cpu_op"))
        traced = sum(n for name, n in names.items() if name.startswith("ProfilerStep#"))
        assert traced == steps
        exchanged = {name: n for name, n in names.items() if name.startswith(("gloo:", "nccl:"))}
        assert exchanged.keys() == {"gloo:all_reduce"}
        paced = exchanged["gloo:all_reduce"] - steps  # the ranks agree on a stop every two seconds or so
        assert 0 <= paced <= 4


# ---- precision and compilation


def test_bf16_trains(train: Callable[..., Result]) -> None:
    losses = compare.losses(train(*MLP, *EACH, "train.max_steps=60", "train.precision=bf16").ok().folder)
    exact = compare.losses(train(*MLP, *EACH, "train.max_steps=60").ok().folder)
    assert losses != exact
    assert losses[0] == pytest.approx(exact[0], rel=0.02)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_compiled_training_stays_with_the_plain_one(train: Callable[..., Result], ranks: int) -> None:
    words = (*MLP, *EACH, "train.max_steps=20", *(["mode=multigpu"] if ranks else []))
    plain = compare.losses(train(*words, ranks=ranks).ok().folder)
    compiled = compare.losses(train(*words, "train.compile=true", ranks=ranks).ok().folder)
    assert compiled == pytest.approx(plain, rel=1e-3)


# ---- evaluation


def test_an_evaluation_leaves_frozen_parts_of_the_model_frozen() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 1))
    model[0].eval()
    part = Microbatch(torch.ones(3, 2), torch.ones(3, 1), None)
    alone = World(0, 0, 1, 1, 0, torch.device("cpu"), None, 1)
    _, count = evaluate(model, Regression(), [part, part], world=alone, autocast=nullcontext())
    assert count == 6
    assert [m.training for m in model.modules()] == [True, False, True]


# ---- when training ends


@pytest.mark.parametrize(
    ("epochs", "steps", "last"), [("2", "5", 5), ("1", "6", 4), ("2", "null", 8), ("null", "6", 6)]
)
def test_training_ends_at_the_epochs_or_the_steps_whichever_come_first(
    train: Callable[..., Result], epochs: str, steps: str, last: int
) -> None:
    run = train(*RECORDED, f"train.max_epochs={epochs}", f"train.max_steps={steps}").ok()
    assert compare.last(run.folder).name == f"step-{last}"


def test_drop_last_makes_an_epoch_of_full_batches(train: Callable[..., Result]) -> None:
    run = train(*RECORDED, "train.drop_last=true", "train.max_epochs=2").ok()
    assert compare.last(run.folder).name == "step-6"
    assert (state(run.folder)["epoch"], state(run.folder)["samples"]) == (2, 0)


def test_overfitting_one_batch_brings_the_loss_to_nothing(train: Callable[..., Result]) -> None:
    losses = compare.losses(train(*QUIET, "experiment=digits_mlp", "debug=overfit").ok().folder)
    assert losses[-1] < 0.01 < 0.3 < losses[0]


def test_training_stops_early_without_a_better_metric(train: Callable[..., Result]) -> None:
    words = (*RECORDED, "train.max_epochs=9", "checkpoint.metric_mode=max", "train.early_stop_patience=2")
    run = train(*words).ok()
    assert state(run.folder)["best_step"] == 4
    assert compare.last(run.folder).name == "step-12"


def test_the_teachers_weights_are_found_and_the_loss_goes_to_the_noise(train: Callable[..., Result]) -> None:
    run = train(*QUIET, "experiment=teacher").ok()
    weight, bias = teacher_weights(10, 1, 0)
    found = compare.weights(run.folder, "model")
    assert (found["model/head.weight"] - weight).abs().max() < 0.01
    assert (found["model/head.bias"] - bias).abs().max() < 0.01
    last = [p["eval/loss"] for p in compare.points(run.folder) if "eval/loss" in p][-1]
    assert last == pytest.approx(0.1**2, rel=0.15)


def test_an_empty_part_is_taken_for_a_missing_one(train: Callable[..., Result]) -> None:
    words = (
        *QUIET,
        "experiment=teacher",
        "data._target_=tests.probes.without_validation",
        "train.max_epochs=1",
    )
    run = train(*words).ok()
    assert not [key for point in compare.points(run.folder) for key in point if key.startswith("eval/")]


# ---- batch statistics


def test_batch_norm_is_refused_where_a_share_would_be_a_single_sample(train: Callable[..., Result]) -> None:
    words = (*BATCH_NORM, "train.max_steps=2", "train.global_batch_size=300")
    result = train(*words, "train.accumulation_steps=38", ranks=2)  # 1257 samples: a last batch of 57
    assert result.exit_codes == [2, 2]
    (line,) = [text for text in result.text.splitlines() if "batch" in text]
    assert "takes statistics over a microbatch, but some rank would have one of 0 sample(s)" in line
    assert "set train.drop_last=true, a larger train.global_batch_size, or model.norm=group" in line
    assert result.folders == []


def test_evaluations_use_the_batch_statistics_of_rank_0(train: Callable[..., Result]) -> None:
    words = (*BATCH_NORM, "train.precision=fp64", "train.max_steps=8")
    run = train(*words, ranks=2).ok()
    (trained,) = [p for p in compare.points(run.folder) if "eval/loss" in p]
    alone = ("mode.name=single", "mode.nproc_per_node=1", "eval_only=true", "eval.weights=last")
    again = train("--from-run", str(run.folder), *alone).ok()
    (evaluated,) = [p for p in compare.points(again.folder) if "eval/loss" in p]
    assert evaluated["eval/loss"] == pytest.approx(trained["eval/loss"], rel=1e-12)
    buffers = {k: t for k, t in compare.weights(run.folder, "model").items() if "running_mean" in k}
    assert buffers
    assert all(torch.count_nonzero(t) for t in buffers.values())
