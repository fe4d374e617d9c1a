"""Signals end a run in order, and all ranks alike."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_experiments.errors import Exit
from ddp_experiments.health import LONGEST_PACE, StopRequest, Watch
from ddp_experiments.metrics import Sums
from ddp_experiments.world import World
from tests import compare
from tests.ranks import LAUNCHER, ROOT, Result

LONG = (
    "experiment=digits_mlp",
    "train.max_epochs=null",
    "train.max_steps=1000000",
    "eval.every_epochs=null",
    "scheduler=constant",
    "log.every_steps=100",
    "mode.threads=1",
    "run_id=long",
)


def begin(folder: Path, *words: str, torchrun: int = 0) -> subprocess.Popen[str]:
    """Start train.py and wait until it trains."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={torchrun}"] if torchrun else []
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *words]
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = folder / "outputs/digits_mlp/long/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def status(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "outputs/digits_mlp/long/status.json").read_text())
    return found


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [
        (signal.SIGTERM, Exit.PREEMPTED, "preempted"),
        (signal.SIGUSR1, Exit.PREEMPTED, "preempted"),
        (signal.SIGINT, Exit.INTERRUPTED, "interrupted"),
    ],
)
def test_a_signal_saves_and_leaves_with_its_code(number: int, code: int, state: str, tmp_path: Path) -> None:
    process = begin(tmp_path, *LONG)
    process.send_signal(number)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == code, text
    found = status(tmp_path)
    assert (found["state"], found["exit_code"]) == (state, code)
    assert compare.last(tmp_path / "outputs/digits_mlp/long").name == f"step-{found['step']}"
    assert "go on with: python train.py --continue outputs/digits_mlp/long" in text


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    process = begin(tmp_path, *LONG)
    process.send_signal(signal.SIGSTOP)  # both signals wait for it
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    text = process.communicate(timeout=30)[1]
    assert process.returncode == Exit.INTERRUPTED, text
    assert "Traceback" not in text


def test_a_signal_to_one_rank_stops_all_at_the_same_step(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    words = (
        "train.max_epochs=null",
        "train.max_steps=30",
        "log.every_steps=1",
        "run_id=cut",
        "mode=multigpu",
    )
    faulty = ("experiment=digits_mlp", "scheduler._target_=tests.probes.FaultyCosine", "mode.threads=1")
    records = {"TEST_FAULT": "SIGTERM@7:2", "TEST_RECORD": str(tmp_path)}
    result = train(*words, *faulty, ranks=3, env=records).ok()
    assert {len((tmp_path / f"lr.{rank}").read_text().split()) for rank in range(3)} == {8}  # and the first
    assert compare.last(result.folder).name == "step-7"
    assert json.loads((result.folder / "status.json").read_text())["state"] == "preempted"


def test_a_signal_to_torchrun_saves_on_all_ranks(tmp_path: Path) -> None:
    process = begin(tmp_path, *LONG, "mode=multigpu", torchrun=2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    found = status(tmp_path)
    assert found["state"] == "preempted"
    assert compare.last(tmp_path / "outputs/digits_mlp/long").name == f"step-{found['step']}"


def test_paced_points_are_about_two_seconds_apart() -> None:
    import torch

    world = World(0, 0, 1, 1, 0, torch.device("cpu"), None, 1)
    for seconds, steps in ((0.5, 4), (0.1, 20), (10.0, 1), (1e-6, LONGEST_PACE)):
        watch = Watch(world, StopRequest())
        assert watch.due(0)
        sums = Sums(world.device)
        watch.tell(sums, 10, failed=False, nonfinite=False)
        watch.read({**sums.reduce(world), "flag/seconds": seconds}, 10)
        assert not watch.due(10 + steps - 1) or steps == 1
        assert watch.due(10 + steps)
