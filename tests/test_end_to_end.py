"""Whole runs as people type them: new processes, real torchrun, the commands of the README."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_experiments.identity import load_config
from tests import compare
from tests.ranks import LAUNCHER, ROOT, Result, launcher_variables
from tests.torchruns import free_port

SHORT = ("train.max_epochs=null", "train.max_steps=2", "log.every_steps=1", "mode.threads=1")
PRESETS = sorted(p.stem for p in (ROOT / "conf/experiment").glob("*.yaml"))

# name: words, ranks of torchrun (0: plain python), run folders, event files in each
STARTS = {
    "plain python": ((*SHORT,), 0, 1),
    "the card's torchrun line": (("mode=multinode", *SHORT), 1, 1),
    "two ranks of one machine": (("mode=multigpu", *SHORT), 2, 1),
    "the card's sweep": (("-m", "optimizer.lr=1e-3,1e-2", *SHORT), 0, 2),
}


@pytest.mark.parametrize("name", STARTS)
def test_a_start_as_typed_trains_into_the_right_number_of_folders(
    name: str, start: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    words, ranks, runs = STARTS[name]
    done = start("train.py", *words, torchrun=ranks)
    assert done.returncode == 0, done.stderr
    folders = [p.parent for p in tmp_path.glob("outputs/**/config.yaml")]
    assert len(folders) == runs
    for folder in folders:
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1
        assert json.loads((folder / "status.json").read_text())["state"] == "done"
        assert [p["step"] for p in compare.points(folder) if "train/loss" in p] == [1, 2]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_experiment_preset_trains(preset: str, train: Callable[..., Result]) -> None:
    result = train(f"experiment={preset}", *SHORT).ok()
    assert len(compare.losses(result.folder)) == 2


def test_tiny_is_two_steps_in_under_ten_seconds(
    start: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    before = os.times()
    done = start("train.py", "debug=tiny")
    after = os.times()
    assert done.returncode == 0, done.stderr
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    assert cpu < 10  # CPU time: these tests run beside others


def test_overfit_drives_the_loss_of_one_batch_to_zero(train: Callable[..., Result]) -> None:
    result = train("debug=overfit", "mode.threads=1").ok()
    assert compare.losses(result.folder)[-1] < 0.05


def test_profile_writes_a_trace(train: Callable[..., Result]) -> None:
    result = train("debug=profile", "mode.threads=1").ok()
    trace = json.loads((result.folder / "trace-rank0.json").read_text())
    assert any(e.get("name", "").startswith("aten::") for e in trace["traceEvents"])


def test_digits_cnn_is_over_98_percent_right_on_the_test_part(train: Callable[..., Result]) -> None:
    result = train("experiment=digits_cnn").ok()
    tested = [p for p in compare.points(result.folder) if "test/accuracy" in p]
    assert len(tested) == 1
    assert tested[0]["test/accuracy"] > 0.98


def test_losses_are_those_of_the_golden_file(train: Callable[..., Result]) -> None:
    """A refactoring must not change them; after a change that should, TEST_GOLDEN=write writes them."""
    path = ROOT / "tests/golden/digits_cnn_fp64.json"
    result = train(
        "experiment=digits_cnn",
        "train.precision=fp64",
        "train.max_epochs=1",
        "train.global_batch_size=101",
        "train.accumulation_steps=3",
        "train.clip_norm=1.0",
        "train.ema_decay=0.9",
        "log.every_steps=1",
        "mode.threads=1",
    ).ok()
    points = compare.points(result.folder)
    found = [[p["train/loss"], p["optim/lr"], p["optim/grad_norm"]] for p in points if "train/loss" in p]
    found.append([p["eval/loss"] for p in points if "eval/loss" in p])
    if os.environ.get("TEST_GOLDEN") == "write":
        path.write_text(json.dumps(found, indent=1) + "\n")
    expected = json.loads(path.read_text())
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
def test_two_torchruns_as_two_nodes_are_one_run(
    start: Callable[..., subprocess.CompletedProcess[str]], train: Callable[..., Result], tmp_path: Path
) -> None:
    """Ranks started 1.5 s apart: one folder, one writer of checkpoints, the same result as one process."""
    words = ("experiment=digits_mlp", "train.max_epochs=null", "train.max_steps=20", "log.every_steps=1")
    precise = (*words, "train.precision=fp64", "mode.threads=1")
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}

    def node(rank: int) -> subprocess.Popen[str]:
        place = ["--nnodes=2", f"--node_rank={rank}", "--master_addr=127.0.0.1", f"--master_port={port}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *place]
        command = [*torchrun, str(ROOT / "train.py"), "mode=multinode", *precise]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)

    nodes = [node(0)]
    time.sleep(1.5)
    nodes.append(node(1))
    texts = [n.communicate(timeout=100)[1] for n in nodes]
    assert [n.returncode for n in nodes] == [0, 0], texts
    (folder,) = {p.parent for p in tmp_path.glob("outputs/**/config.yaml")}
    assert (folder / "train.log").exists()
    assert (folder / "rank1.log").exists()
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    alone = train(*precise).ok().folder
    assert compare.losses(folder) == pytest.approx(compare.losses(alone), rel=1e-9)
    assert compare.largest_difference(compare.weights(folder), compare.weights(alone)) < 1e-9


@pytest.mark.slow
def test_ranks_started_by_hand_with_torchruns_variables_are_one_run(tmp_path: Path) -> None:
    port = free_port()
    processes = []
    for rank in range(2):
        variables = launcher_variables(rank, 2, port)
        del variables["TORCHELASTIC_USE_AGENT_STORE"], variables["TORCHELASTIC_RESTART_COUNT"]
        command = [sys.executable, str(ROOT / "train.py"), "mode=multigpu", *SHORT]
        environment = {**os.environ, **variables}
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        )
    texts = [p.communicate(timeout=100)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], texts
    assert len(list(tmp_path.glob("outputs/**/config.yaml"))) == 1


def test_the_same_again_from_a_saved_run(train: Callable[..., Result]) -> None:
    first = train("experiment=digits_mlp", "seed=5", *SHORT).ok().folder
    again = train("--from-run", str(first)).ok().folder
    assert again != first
    assert compare.points(again) == compare.points(first)
    assert load_config(again)["seed"] == 5


def test_the_program_says_nothing_on_stderr_but_its_own_lines(
    start: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = start("train.py", "mode=multigpu", *SHORT, torchrun=2)
    assert done.returncode == 0
    noise = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith(("run ", "step ", "best ", "see ", "2 rank"))
    ]
    assert [line for line in noise if "OMP_NUM_THREADS" not in line and line.strip("*")] == []


def test_a_failed_run_ends_with_one_sentence_and_exit_code_1(train: Callable[..., Result]) -> None:
    result = train(
        "scheduler._target_=tests.probes.FaultyCosine",
        "checkpoint.every_steps=1",
        *SHORT,
        env={"TEST_FAULT": "raise@2"},
    )
    assert result.exit_codes == [1]
    last = result.texts[0].strip().splitlines()[-1]
    assert "RuntimeError" in last
    assert "injected" in last
    assert "step-1" in last
    assert "--continue" in last
    assert math.isfinite(json.loads((result.folder / "status.json").read_text())["step"])
