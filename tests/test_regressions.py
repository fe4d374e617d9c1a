"""Faults that were found by breaking whole runs, each as its own test."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_experiments.checkpoint import directories
from ddp_experiments.checkpoint.export import checkpoint_of, weights_in
from ddp_experiments.events import read_scalars
from ddp_experiments.tracking import read_metrics
from tests import compare
from tests.ranks import LAUNCHER, ROOT, Result

MLP = (
    "experiment=digits_mlp",
    "train.max_epochs=null",
    "train.max_steps=12",
    "log.every_steps=1",
    "eval.every_steps=4",
    "checkpoint.every_steps=4",
    "mode.threads=1",
)
FAULTY = ("scheduler._target_=tests.probes.FaultyCosine",)


def model(name: str) -> tuple[str, ...]:
    return (f"model._target_=tests.probes.{name}",)


def test_averages_of_tied_weights_are_the_same_under_both_names(train: Callable[..., Result]) -> None:
    folder = train(*MLP, *model("Tied"), "train.ema_decay=0.9").ok().folder
    best = weights_in(checkpoint_of(folder, "best"))
    raw = directories.tensors(checkpoint_of(folder, "best"), "model")
    assert torch.equal(best["inner.weight"], best["outer.weight"])
    assert not torch.equal(best["inner.weight"], raw["inner.weight"])


@pytest.mark.parametrize("ranks", [2, 3])
def test_buffers_that_the_forward_reads_continue_bit_for_bit(
    train: Callable[..., Result], ranks: int
) -> None:
    words = (*MLP, *model("RunningCentre"), *FAULTY, "mode=multigpu")
    whole = train(*words, "run_id=whole", ranks=ranks).ok().folder
    cut = train(*words, "run_id=cut", ranks=ranks, env={"TEST_FAULT": "SIGTERM@6:0"}).ok().folder
    train(*words, "run_id=cut", ranks=ranks).ok()
    compare.assert_bitwise_equal(whole, cut)


def test_parts_that_a_model_keeps_frozen_stay_so(train: Callable[..., Result]) -> None:
    folder = train(*MLP, *model("KeepsNormFrozen")).ok().folder
    saved = directories.tensors(compare.last(folder), "model")
    assert saved["norm.num_batches_tracked"].item() == 0


def test_ranks_get_the_same_data_from_numpys_generator(train: Callable[..., Result]) -> None:
    words = (*MLP, "data._target_=tests.probes.drawn_by_numpy", "train.precision=fp64")
    one = train(*words).ok().folder
    two = train(*words, "mode=multigpu", ranks=2).ok().folder
    assert compare.losses(two) == pytest.approx(compare.losses(one), rel=1e-9)


def test_a_data_set_class_is_made_once_for_each_split(train: Callable[..., Result]) -> None:
    folder = train(*MLP, "data._target_=tests.probes.BySplit", "data.size=40").ok().folder
    (tested,) = [p for p in compare.points(folder) if "test/loss" in p]
    assert tested["step"] == 12


@pytest.mark.parametrize("kill", ["best.json", "status.json"])
def test_a_kill_between_the_last_files_of_a_run_loses_and_doubles_nothing(
    train: Callable[..., Result], kill: str
) -> None:
    whole = train(*MLP, "run_id=whole").ok().folder
    cut = train(*MLP, "run_id=cut").ok().folder
    if kill == "best.json":  # as if killed before it was written for the last save, and before the test
        old = {**directories.read_json(cut / "checkpoints/best.json"), "step": 8}
        (cut / "checkpoints/best.json").write_text(json.dumps(old))
        lines = (cut / "metrics.jsonl").read_text().splitlines()
        (cut / "metrics.jsonl").write_text("\n".join(line for line in lines if "test/" not in line) + "\n")
    status = json.loads((cut / "status.json").read_text())
    (cut / "status.json").write_text(json.dumps({**status, "state": "running"}))
    train(*MLP, "run_id=cut").ok()
    assert compare.points(cut) == compare.points(whole)
    assert (
        directories.best(cut / "checkpoints")
        == cut / "checkpoints" / directories.best(whole / "checkpoints").name
    )  # type: ignore[union-attr]


def test_a_run_killed_before_its_first_checkpoint_shows_each_step_once(
    start: Callable[..., subprocess.CompletedProcess[str]], train: Callable[..., Result], tmp_path: Path
) -> None:
    words = (*MLP[:4], *FAULTY, "mode.threads=1", "run_id=early")  # saves and evaluates at the end only
    killed = start("train.py", *words, env={"TEST_FAULT": "SIGKILL@5"})
    assert killed.returncode == -signal.SIGKILL
    folder = train(*words).ok().cwd / "outputs/digits_mlp/early"
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2
    assert sorted(read_scalars(folder)["train/loss"]) == list(range(1, 13))
    accumulated = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulated.Reload()
    assert [e.step for e in accumulated.Scalars("train/loss")] == list(range(1, 13))


def test_a_half_written_first_config_does_not_block_the_run(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    folder = tmp_path / "outputs/digits_mlp/half"
    folder.mkdir(parents=True)
    (folder / ".config.yaml.tmp").write_text("name: dig")
    train(*MLP, "run_id=half").ok()


def test_precision_may_change_on_the_way_where_it_is_allowed(train: Callable[..., Result]) -> None:
    words = (*MLP, *FAULTY, "run_id=p", "train.ema_decay=0.9")
    train(*words, env={"TEST_FAULT": "SIGTERM@6"})
    result = train(*words, "train.precision=fp64", "resume.allow=[train.precision]").ok()
    folder = result.cwd / "outputs/digits_mlp/p"
    assert {t.dtype for t in compare.weights(folder, "model").values()} == {torch.float64}
    assert [p["step"] for p in read_metrics(folder) if "train/loss" in p] == list(range(1, 13))


def test_a_run_that_started_from_weights_continues_without_them(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    source = train(*MLP, "run_id=source").ok().folder
    weights = tmp_path / "w.safetensors"
    from ddp_experiments.checkpoint.export import export

    export(source, weights)
    words = (*MLP, *FAULTY, f"init_from={weights}", "run_id=tuned")
    train(*words, env={"TEST_FAULT": "SIGTERM@6"})
    weights.unlink()
    train(*words).ok()


REFUSED = {
    "no parameter to train": (model("AllFrozen"), "no parameter to train"),
    "state that is no tensor": (model("KeepsText"), "is no tensor"),
    "skip with batch norm": (
        ("model=cnn", "model.norm=batch", "train.nonfinite=skip"),
        "train.nonfinite=skip can't take a bad batch out",
    ),
    "shapes that don't fit": (("model=linear", "model.in_features=3"), "don't take this data"),
    "a schedule that needs a metric": (
        ("scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",),
        "its step() needs metrics",
    ),
    "an optimizer that needs a closure": (
        ("optimizer._target_=torch.optim.LBFGS",),
        "its step() needs closure",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_trained_is_refused_without_a_folder(
    name: str, train: Callable[..., Result], tmp_path: Path
) -> None:
    words, said = REFUSED[name]
    result = train("experiment=none", *words, "train.max_epochs=1")
    assert result.exit_codes == [2]
    assert said in result.text
    assert "Traceback" not in result.text
    assert list(tmp_path.iterdir()) == []


def test_every_failed_job_of_a_sweep_is_told(train: Callable[..., Result]) -> None:
    words = ("-m", *MLP, *FAULTY, "optimizer.lr=1e-3,1e-2", "name=s")
    result = train(*words, env={"TEST_FAULT": "raise@3"}, ranks=1)
    assert result.exit_codes == [1]
    for job in (0, 1):
        assert re.search(rf"job {job} failed: rank 0 on \S+: RuntimeError: injected", result.text)


def test_a_signal_during_an_evaluation_of_a_run_ends_it_at_once(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    words = [*MLP, "data._target_=tests.probes.SlowToEvaluate", "eval_only=true", "init_from=w.safetensors"]
    from ddp_experiments.checkpoint.tensors import save
    from ddp_experiments.models.mlp import MLP as Network

    save(Network(64, [64, 64], 10).state_dict(), tmp_path / "w.safetensors")
    command = [sys.executable, str(ROOT / "train.py"), *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("outputs/*/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == 143, text
    (status,) = tmp_path.glob("outputs/*/*/status.json")
    assert json.loads(status.read_text())["state"] == "preempted"


def test_closed_standard_streams_do_not_end_a_run(tmp_path: Path) -> None:
    line = f"exec {sys.executable} {ROOT / 'train.py'} debug=tiny mode.threads=1 >&- 2>&-"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, check=False, timeout=100)
    assert done.returncode == 0


def test_an_unknown_saved_setting_is_refused_and_not_waited_for(train: Callable[..., Result]) -> None:
    folder = train(*MLP, "run_id=old").ok().folder
    with (folder / "config.yaml").open("a") as file:
        file.write("gone_setting: 1\n")
    result = train(*MLP, "run_id=old")
    assert result.exit_codes == [2]
    assert "gone_setting" in result.text


def test_steps_left_after_a_change_of_the_batch_within_an_epoch(train: Callable[..., Result]) -> None:
    words = ("experiment=none", "data._target_=tests.probes.indexed", "data.samples=100", "model=linear")
    shape = (
        "model.in_features=64",
        "model.out_features=1",
        "task._target_=tests.probes.Recording",
        "run_id=b",
    )
    rest = (
        *FAULTY,
        "train.max_epochs=1",
        "log.every_steps=1",
        "mode.threads=1",
        "train.global_batch_size=20",
    )
    train(*words, *shape, *rest, env={"TEST_FAULT": "SIGTERM@2"})
    rest = (*rest[:-1], "train.global_batch_size=30", "resume.allow=[train.global_batch_size]")
    result = train(*words, *shape, *rest).ok()
    assert [p["step"] for p in read_metrics(result.cwd / "outputs/digits/b") if "train/loss" in p] == [
        1,
        2,
        3,
        4,
    ]
