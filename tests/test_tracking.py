"""What a person sees of a run: tags, tabs, hyperparameters, metrics.jsonl, console lines, log files."""

import fcntl
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import metadata as hparams
from torch import Tensor

from ddp_experiments import identity
from ddp_experiments.events import read_scalars
from ddp_experiments.lock import Lock
from ddp_experiments.tasks import Classification
from ddp_experiments.tracking import read_metrics
from tests import compare
from tests.disk import fill, free, mounted, root_only
from tests.ranks import LAUNCHER, ROOT

MLP = ["experiment=digits_mlp", "train.max_epochs=null", "mode.threads=1", "log.every_steps=1"]
FAULTY = [*MLP, "scheduler._target_=tests.probes.FaultyCosine", "train.max_steps=9"]
PERF = {"perf/step_seconds", "perf/samples_per_second", "perf/data_wait_share", "perf/memory_mib"}
TRAIN = {"train/loss", "train/accuracy", "optim/lr", "optim/grad_norm"} | PERF
EVAL = {"eval/loss", "eval/accuracy", "best/accuracy"}
TEST = {"test/loss", "test/accuracy"}


class Filling(Classification):
    """The disk of the run gets full in the 4th step, and has room again in the 12th."""

    calls = 0

    def loss_sum(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> Tensor:
        self.calls += 1
        if self.calls in (6, 14):  # two more before the first step
            (fill if self.calls == 6 else free)(Path(os.environ["TEST_DISK"]))
        return super().loss_sum(outputs, targets, weight_B)


class Slow(Classification):
    """A step takes 20 ms at least."""

    def loss_sum(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> Tensor:
        time.sleep(0.02)
        return super().loss_sum(outputs, targets, weight_B)


def event_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.parent.rglob("events.out.tfevents.*"))


def accumulated(folder: Path) -> EventAccumulator:
    """TensorBoard's own reader, without leaving out points."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def tags(folder: Path) -> dict[str, set[int]]:
    return {tag: set(points) for tag, points in read_scalars(folder).items()}


def assert_events_equal_lines(folder: Path) -> None:
    """TensorBoard's reader, ours and metrics.jsonl tell the same; the events as float32."""
    told: dict[str, dict[int, float]] = {}
    for line in read_metrics(folder):
        for tag in line.keys() - {"step", "epoch"}:
            assert line["step"] not in told.setdefault(tag, {}), f"{tag} twice at step {line['step']}"
            told[tag][line["step"]] = float(np.float32(line[tag]))
    theirs = accumulated(folder)
    assert read_scalars(folder) == told
    assert {tag: [(e.step, e.value) for e in theirs.Scalars(tag)] for tag in theirs.Tags()["scalars"]} == {
        tag: sorted(points.items()) for tag, points in told.items()
    }


# ---- scalars


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_writes_these_tags_into_one_event_file(train, ranks):
    mode = ["mode=multigpu"] if ranks else []
    folder = train(*MLP, *mode, "train.max_steps=5", "eval.every_steps=2", ranks=ranks).ok().folder
    want = (
        {tag: {1, 2, 3, 4, 5} for tag in TRAIN}
        | {tag: {2, 4, 5} for tag in EVAL}
        | {tag: {5} for tag in TEST}
    )
    assert tags(folder) == want
    assert len(event_files(folder)) == 1
    assert_events_equal_lines(folder)


def test_log_every_steps_thins_out_the_training_only(train):
    folder = train(*MLP[:-1], "log.every_steps=3", "train.max_steps=8", "eval.every_steps=4").ok().folder
    assert tags(folder)["train/loss"] == {3, 6}
    assert tags(folder)["eval/loss"] == {4, 8}


def test_the_values_are_what_their_names_say(train):
    folder = train(*MLP, "train.max_steps=4", "eval.every_steps=1", "scheduler=constant").ok().folder
    lines = [line for line in read_metrics(folder) if "train/loss" in line]
    for line in lines:
        assert line["optim/lr"] == 0.003
        assert line["optim/grad_norm"] > 0
        assert line["perf/samples_per_second"] * line["perf/step_seconds"] == pytest.approx(64)
        assert 0 <= line["perf/data_wait_share"] <= 1
        assert 50 < line["perf/memory_mib"] < 50_000
    evaluations = [line for line in read_metrics(folder) if "eval/accuracy" in line]
    best = [max(e["eval/accuracy"] for e in evaluations[: i + 1]) for i in range(len(evaluations))]
    assert [line["best/accuracy"] for line in evaluations] == best


def test_the_time_of_a_step_does_not_depend_on_when_the_clock_was_started(train):
    words = [*MLP[:-1], "log.every_steps=5", "task._target_=tests.test_tracking.Slow", "eval.every_steps=4"]
    words += ["run_id=a", "resume.allow=[train.max_steps]", "eval.test=false"]
    folder = train(*words, "train.max_steps=8").ok().folder
    train(*words, "train.max_steps=10").ok()
    seconds = read_scalars(folder)["perf/step_seconds"]
    assert seconds.keys() == {5, 10}  # 1 step after an evaluation, 2 after a continuation
    assert min(seconds.values()) >= 0.02


def test_without_validation_there_are_no_such_tags(train):
    folder = train(*MLP, "train.max_steps=2", "data.validation_fraction=0", "eval.test=false").ok().folder
    assert tags(folder) == {tag: {1, 2} for tag in TRAIN}


def test_log_tensorboard_false_writes_no_event_file(train):
    folder = train(*MLP, "train.max_steps=2", "log.tensorboard=false").ok().folder
    assert event_files(folder) == []
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 2, 2]


def test_a_loss_that_is_not_finite_is_written_as_such(train):
    words = [
        *MLP,
        "task._target_=tests.probes.FaultyClassification",
        "train.nonfinite=skip",
        "train.max_steps=4",
    ]
    folder = train(*words, env={"TEST_FAULT": "nan@4"}).ok().folder
    losses = compare.losses(folder)
    assert [math.isfinite(float(loss)) for loss in losses].count(False) == 1
    assert "NaN" not in (folder / "metrics.jsonl").read_text()  # JSON has no such number
    assert [math.isnan(v) for v in read_scalars(folder)["train/loss"].values()].count(True) == 1


# ---- starts that end early, and what continues them


@pytest.mark.parametrize(("fault", "code"), [("raise@6", 1), ("SIGKILL@6", -9)])
def test_all_points_before_a_crash_are_on_disk(train, fault, code):
    result = train(*FAULTY, "run_id=a", env={"TEST_FAULT": fault})
    assert result.exit_codes == [code]
    assert [line["step"] for line in read_metrics(result.folder)] == [1, 2, 3, 4, 5]
    assert tags(result.folder) == {tag: {1, 2, 3, 4, 5} for tag in TRAIN}
    assert_events_equal_lines(result.folder)


def test_a_continued_run_shows_each_step_once(train):
    words = [*FAULTY, "run_id=a", "checkpoint.every_steps=3"]
    folder = train(*words, env={"TEST_FAULT": "raise@6"}).folder
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train/lo')  # as a kill may leave it
    train(*words, "mode=multigpu", ranks=2).ok()
    assert len(event_files(folder)) == 2
    assert [line["step"] for line in read_metrics(folder)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]
    seconds = [
        line["perf/step_seconds"]
        for text in (folder / "metrics.jsonl").read_text().splitlines()
        if '"step": 4,' in text and (line := json.loads(text))
    ]
    assert len(seconds) == 2
    assert read_scalars(folder)["perf/step_seconds"][4] == float(np.float32(seconds[1]))
    assert_events_equal_lines(folder)


def test_a_run_that_was_done_gets_no_points_when_it_is_continued(train):
    words = [*MLP, "train.max_steps=3", "run_id=a"]
    folder = train(*words).ok().folder
    before = compare.points(folder)
    result = train(*words).ok()
    assert "nothing left to train" in result.text
    assert compare.points(folder) == before
    assert_events_equal_lines(folder)


# ---- tabs, charts and hyperparameters


def tab(folder: Path, name: str) -> str:
    (event,) = accumulated(folder).Tensors(f"{name}/text_summary")
    text: str = event.tensor_proto.string_val[0].decode()
    return text


def test_the_tabs_tell_config_command_and_environment(train):
    folder = train(*MLP, "train.max_steps=1", "optimizer.lr=0.0125").ok().folder
    assert "lr: 0.0125" in tab(folder, "config")
    assert "_target_: ddp_experiments.models.mlp.MLP" in tab(folder, "config")
    assert "train.py experiment=digits_mlp" in tab(folder, "command")
    assert "optimizer.lr=0.0125" in tab(folder, "command")
    for word in ("torch:", "git_commit:", "host:", "world_size: 1", "device: cpu", "python:"):
        assert word in tab(folder, "environment")


def test_both_losses_have_a_chart_together(train):
    folder = train(*MLP, "train.max_steps=1").ok().folder
    (event,) = accumulated(folder).Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    assert [list(c.multiline.tag) for g in layout.category for c in g.chart] == [["train/loss", "eval/loss"]]


def session(folder: Path) -> tuple[dict[str, Any], str]:
    """What TensorBoard's own reader finds: hyperparameters, and how the session ended."""
    found = accumulated(folder)
    content = {t: found.SummaryMetadata(t).plugin_data.content for t in found.PluginTagToContent("hparams")}
    start = hparams.parse_session_start_info_plugin_data(content[hparams.SESSION_START_INFO_TAG])
    values = {k: getattr(v, v.WhichOneof("kind")) for k, v in start.hparams.items()}
    if hparams.SESSION_END_INFO_TAG not in content:
        return values, "open"
    over = hparams.parse_session_end_info_plugin_data(content[hparams.SESSION_END_INFO_TAG])
    assert over.end_time_secs >= start.start_time_secs > 1e9
    return values, api_pb2.Status.Name(over.status)


def test_the_session_has_what_is_trained_and_its_success(train):
    values, status = session(train(*MLP, "train.max_steps=1", "optimizer.lr=0.0125").ok().folder)
    assert status == "STATUS_SUCCESS"
    assert values["optimizer.lr"] == 0.0125
    assert values["optimizer.fused"] is True
    assert values["model"] == "ddp_experiments.models.mlp.MLP"
    assert values["model.hidden"] == "[64, 64]"
    assert values["train.precision"] == "fp32"
    assert values["seed"] == 0.0
    assert "train.clip_norm" not in values  # null
    assert not [k for k in values if k.partition(".")[0] in ("mode", "log", "checkpoint", "run_id", "name")]


def test_the_session_of_a_failed_run_says_so(train):
    folder = train(*FAULTY, env={"TEST_FAULT": "raise@2"}).folder
    assert session(folder)[1] == "STATUS_FAILURE"


def test_the_session_of_a_preempted_run_is_ended_by_the_start_that_finishes_it(train):
    folder = train(*FAULTY, "run_id=a", env={"TEST_FAULT": "SIGTERM@2"}).folder
    assert session(folder)[1] == "open"
    train(*FAULTY, "run_id=a").ok()
    assert session(folder)[1] == "STATUS_SUCCESS"


# ---- console and log files


def test_without_a_terminal_there_are_plain_lines_and_no_bar(train):
    text = train(*MLP[:-1], "log.every_steps=2", "train.max_steps=4", "eval.every_steps=4").ok().text
    assert re.findall(r"^step (\d+)/4  epoch 1  train: loss \d", text, re.M) == ["2", "4"]
    assert "\r" not in text
    assert "%|" not in text


def test_the_last_lines_are_metric_folder_and_next_command(train):
    result = train(*MLP, "train.max_steps=4", "eval.every_steps=2").ok()
    best, where, command = result.text.strip().splitlines()[-3:]
    noted = json.loads((result.folder / "checkpoints/best.json").read_text())
    assert best == f"best accuracy {noted['value']:.4g} at step {noted['step']}"
    assert where == f"run {result.folder.relative_to(result.cwd)}"
    assert command == "see it with: tensorboard --logdir outputs"


def test_info_is_said_once_and_warnings_by_every_rank_with_its_number(train):
    words = [
        *MLP,
        "scheduler._target_=tests.probes.FaultyCosine",
        "train.max_steps=6",
    ]
    result = train(*words, "mode=multigpu", ranks=2, env={"TEST_FAULT": "warn@4:1"}).ok()
    first, second = result.texts
    assert "step 1/6" in first
    assert "[rank" not in first
    assert second == "[rank 1] injected\n"
    assert "step 1/6" in (result.folder / "train.log").read_text()
    assert "WARNING" in (result.folder / "rank1.log").read_text()
    assert "step 1/6" not in (result.folder / "rank1.log").read_text()


def test_an_exception_on_another_rank_is_in_its_log_with_traceback(train):
    words = [*FAULTY, "mode=multigpu", "mode.timeout_seconds=20"]
    result = train(*words, ranks=2, env={"TEST_FAULT": "raise@3:1"})
    assert result.exit_codes == [1, 1]
    log = (result.folder / "rank1.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert "RuntimeError: injected" in log
    assert "RuntimeError: injected" in result.texts[1]


def test_a_failed_run_says_last_in_one_sentence_what_to_do(train):
    result = train(*FAULTY, "checkpoint.every_steps=2", env={"TEST_FAULT": "raise@4"})
    last = result.text.strip().splitlines()[-1]
    where = f"{identity.socket.gethostname()}, step "
    for part in ("RuntimeError on ", where, "injected", "last checkpoint ", "/checkpoints/step-2, "):
        assert part in last
    assert last.endswith(f"go on with: python train.py --continue {result.folder.relative_to(result.cwd)}")
    assert result.text.count("Traceback") == 1


def read_terminal(words: list[str], cwd: Path, seconds: float = 60) -> tuple[int, str]:
    """Run a command on a terminal of its own; its exit code and what the terminal got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 120, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    process = subprocess.Popen(words, cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    found, deadline = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < deadline and select.select([ours], [], [], seconds)[0]:
            try:
                found += os.read(ours, 1 << 16)
            except OSError:  # the other side is closed
                break
        return process.wait(timeout=10), found.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end, where \\r starts a line over."""
    shown = []
    for line in text.split("\n"):
        now = ""
        for part in line.split("\r"):
            now = part + now[len(part) :]
        shown.append(now.rstrip())
    return [line for line in shown if line]


def test_a_terminal_shows_one_progress_bar(tmp_path):
    words = [*MLP, "train.max_steps=60", "eval.every_steps=30"]
    code, text = read_terminal([sys.executable, str(ROOT / "train.py"), *words], tmp_path)
    assert code == 0, text
    bars = [part for part in re.split(r"[\r\n]", text) if re.search(r"\d+%\|", part)]
    assert bars
    assert all(re.search(r"\d+/60 \[", bar) for bar in bars)
    assert "\x1b[A" not in text  # a second bar would be drawn a line below
    assert not re.search(r"step \d+/60  epoch", text)  # no plain lines beside the bar
    assert re.search(r"step 30/60  eval: ", text)
    left = screen(text)
    assert left[-1] == "see it with: tensorboard --logdir outputs"
    assert not [line for line in left if "%|" in line]  # the bar is gone


# ---- full disks


@root_only
def test_training_goes_on_over_a_disk_that_is_full_for_a_while(train, tmp_path):
    with mounted(tmp_path / "outputs", "size=8m") as disk:
        words = [
            *MLP,
            "task._target_=tests.test_tracking.Filling",
            "train.max_steps=16",
            "data.validation_fraction=0",
        ]
        result = train(*words, "eval.test=false", env={"TEST_DISK": str(disk)}).ok()
        assert [line["step"] for line in read_metrics(result.folder)] == list(range(1, 17))
        assert_events_equal_lines(result.folder)
        assert (
            len(re.findall(r"^can't write to .*No space left on device; training goes on", result.text, re.M))
            == 1
        )
        assert result.text.count("No space left") <= 2  # and perhaps once for train.log
        assert re.findall(r" step (\d+)/16 ", (result.folder / "train.log").read_text()) == [
            str(i) for i in range(1, 17)
        ]


@root_only
def test_a_full_disk_takes_neither_status_nor_lock_from_a_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("ddp_experiments.lock.BEAT_SECONDS", 0.02)
    with mounted(tmp_path / "disk", "size=64k") as disk:
        lock = Lock(disk, "mine")
        lock.acquire()
        run = identity.Run(disk, writer=True, continued=False, lock=lock)
        run.status("running", step=1)
        fill(disk)
        time.sleep(0.2)  # some beats
        assert lock.is_mine()
        caplog.set_level("WARNING", "ddp_experiments")
        run.status("failed", step=2, reason="x" * 5000)
        assert "status.json not written" in caplog.text
        assert json.loads((disk / "status.json").read_text())["state"] == "running"
        assert sorted(p.name for p in disk.iterdir()) == ["filler", "lock", "status.json"]
        free(disk)
        run.status("done", step=3)
        assert json.loads((disk / "status.json").read_text())["state"] == "done"
        lock.release()
