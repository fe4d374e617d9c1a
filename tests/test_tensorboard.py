"""A real TensorBoard on loopback, asked over HTTP: runs, scalars and hyperparameters."""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_experiments.events import read_scalars
from ddp_experiments.tracking import read_metrics
from tests.ranks import Pool

MLP = [
    "experiment=digits_mlp",
    "train.max_epochs=null",
    "mode.threads=1",
    "log.every_steps=1",
    "train.max_steps=3",
]
RATES = [0.001, 0.01, 0.1]
SECONDS = 60


@dataclass
class Board:
    """TensorBoard over a folder of runs, and what is in the folder."""

    address: str
    outputs: Path
    sweep: list[Path]
    single: Path
    continued: Path

    def ask(self, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.address}/data/{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())

    def name(self, folder: Path) -> str:
        return str(folder.relative_to(self.outputs))

    @property
    def runs(self) -> list[Path]:
        return [*self.sweep, self.single, self.continued]


def wait_for(answer: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    """Ask until the answer is good."""
    end = time.monotonic() + SECONDS
    while not good(found := answer()):
        assert time.monotonic() < end, f"still {found}"
        time.sleep(0.2)
    return found


def serve(logdir: str, cwd: Path) -> tuple[subprocess.Popen[str], str]:
    """Start what `tensorboard --logdir outputs` starts; its process and its address."""
    words = ["-m", "tensorboard.main", "--logdir", logdir, "--port", "0", "--host", "127.0.0.1"]
    process = subprocess.Popen([sys.executable, *words], cwd=cwd, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            timer.cancel()
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return process, found[0]
    raise AssertionError("TensorBoard ended, or said no address in time")


@pytest.fixture(scope="module")
def board(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Board]:
    """A sweep, a run of two ranks, and a run that was continued with other steps."""
    cwd = tmp_path_factory.mktemp("board")
    sweep = pool.train(cwd, *MLP, "-m", f"optimizer.lr={','.join(map(str, RATES))}", ranks=1).ok().folders
    single = pool.train(cwd, *MLP, "mode=multigpu", "run_id=two", ranks=2).ok().folder
    words = [*MLP, "scheduler._target_=tests.probes.FaultyCosine", "run_id=again", "checkpoint.every_steps=1"]
    continued = pool.train(cwd, *words, env={"TEST_FAULT": "SIGTERM@2"}).folder
    pool.train(cwd, *words).ok()
    process, address = serve("outputs", cwd)
    try:
        found = Board(address, cwd / "outputs", sweep, single, continued)
        wait_for(lambda: found.ask("runs"), lambda runs: len(runs) >= 5)
        yield found
    finally:
        process.kill()
        process.wait()


def test_the_runs_are_the_run_folders_and_no_others(board):
    assert len(board.sweep) == 3
    assert sorted(board.ask("runs")) == sorted(board.name(folder) for folder in board.runs)
    assert [folder.name for folder in board.sweep] == ["00_lr=0.001", "01_lr=0.01", "02_lr=0.1"]


def test_every_scalar_is_served_with_each_step_once(board):
    names = [board.name(folder) for folder in board.runs]
    wait_for(
        lambda: board.ask("plugin/scalars/tags"), lambda tags: all("test/loss" in tags[run] for run in names)
    )
    for folder in board.runs:
        want, run = read_scalars(folder), board.name(folder).replace("=", "%3D")
        assert "train/loss" in want
        for tag in ("train/loss", "eval/accuracy", "test/accuracy", "optim/lr"):
            points = board.ask(f"plugin/scalars/scalars?run={run}&tag={tag}")
            assert [(step, value) for _, step, value in points] == sorted(want[tag].items())


def test_the_sweep_is_a_table_of_learning_rates_and_final_values(board):
    experiment = wait_for(
        lambda: board.ask("plugin/hparams/experiment", {"experimentName": ""}), lambda e: e["hparamInfos"]
    )
    rate = next(info for info in experiment["hparamInfos"] if info["name"] == "optimizer.lr")
    assert rate["type"] == "DATA_TYPE_FLOAT64"
    metrics = {(m["name"]["group"], m["name"]["tag"]) for m in experiment["metricInfos"]}
    assert {("", "eval/accuracy"), ("", "best/accuracy"), ("", "test/accuracy")} <= metrics
    asked = {
        "experimentName": "",
        "allowedStatuses": ["STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING", "STATUS_UNKNOWN"],
        "colParams": [
            {"hparam": "optimizer.lr"},
            {"metric": {"group": "", "tag": "test/accuracy"}, "order": "ORDER_UNSPECIFIED"},
        ],
        "startIndex": 0,
        "sliceSize": 100,
    }
    groups = board.ask("plugin/hparams/session_groups", asked)["sessionGroups"]
    sessions = {s["name"]: (group, s) for group in groups for s in group["sessions"]}
    assert sessions.keys() == {board.name(folder) for folder in board.runs}
    for folder, lr in zip(board.sweep, RATES, strict=True):
        group, session = sessions[board.name(folder)]
        assert group["hparams"]["optimizer.lr"] == lr
        assert session["status"] == "STATUS_SUCCESS"
        final = read_metrics(folder)[-1]["test/accuracy"]
        (value,) = (m["value"] for m in session["metricValues"] if m["name"]["tag"] == "test/accuracy")
        assert value == pytest.approx(final, rel=1e-6)
    assert sessions[board.name(board.continued)][1]["status"] == "STATUS_SUCCESS"


def test_texts_and_the_chart_of_both_losses_are_served(board):
    tags = board.ask("plugin/text/tags")
    for folder in board.runs:
        assert {"config", "command", "environment"} <= {
            t.removesuffix("/text_summary") for t in tags[board.name(folder)]
        }
    layout = board.ask("plugin/custom_scalars/layout")
    assert layout["category"][0]["chart"][0]["multiline"]["tag"] == ["train/loss", "eval/loss"]


def test_a_failed_job_of_a_sweep_is_a_failed_session(pool, tmp_path):
    words = [*MLP, "scheduler._target_=tests.probes.FaultyCosine", "-m", "optimizer.lr=1e-3"]
    result = pool.train(tmp_path, *words, "name=broken", ranks=1, env={"TEST_FAULT": "raise@2"})
    assert result.exit_codes != [0]
    process, address = serve("outputs", tmp_path)
    try:
        own = Board(address, tmp_path / "outputs", [], result.folder, result.folder)
        asked = {"experimentName": "", "allowedStatuses": ["STATUS_FAILURE"], "startIndex": 0, "sliceSize": 9}
        asked["colParams"] = [{"hparam": "optimizer.lr"}]
        groups = wait_for(
            lambda: own.ask("plugin/hparams/session_groups", asked)["sessionGroups"], lambda found: found
        )
        assert [s["status"] for g in groups for s in g["sessions"]] == ["STATUS_FAILURE"]
    finally:
        process.kill()
        process.wait()
