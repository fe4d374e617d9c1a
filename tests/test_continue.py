"""A run that was stopped after any step and continued is bit for bit the undisturbed run."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from ddp_experiments.checkpoint import directories
from tests import compare
from tests.ranks import LAUNCHER, ROOT, Pool, Result

RECORDED = (f"--config-dir={ROOT}/tests/conf", "experiment=recorded", "run_id=same")  # 4 steps an epoch
RICH = (  # everything that has a state or draws random numbers
    *RECORDED,
    *("data.noisy=true", "model.dropout=0.2", "train.ema_decay=0.9", "train.clip_norm=1.0"),
    *("scheduler._target_=tests.probes.FaultyCosine", "scheduler.warmup_steps=3", "eval.every_steps=5"),
)
EPOCH_END = 8
QUICK = {
    *((1, 0, stop) for stop in (0, 5, 7, EPOCH_END)),
    *((2, 0, 7), (3, 2, 7), (1, 2, 7)),
}


def records(folder: Path) -> dict[str, list[str]]:
    """Which samples each rank saw, by kind (train, eval) and rank."""
    found = {f.name: f.read_text().split("\n") for f in folder.iterdir()}
    return {name: lines for name, lines in found.items() if name.startswith(("train", "eval"))}


def joined(*parts: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: [*parts[0].get(name, [""])[:-1], *parts[1][name]] for name in parts[1]}


def launch(ranks: int) -> dict[str, int]:
    return {} if ranks == 1 else {"ranks": ranks}


def mode(ranks: int) -> tuple[str, ...]:
    return () if ranks == 1 else ("mode=multigpu",)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """The undisturbed run of a command, and its records."""

    @cache
    def run(ranks: int, *words: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("whole")
        seen = folder / "seen"
        seen.mkdir()
        result = pool.train(
            folder, *words, *mode(ranks), env={"TEST_RECORD": str(seen)}, ranks=launch(ranks).get("ranks", 0)
        )
        return result.ok().folder, seen

    return run


@pytest.fixture
def cut(train: Callable[..., Result], tmp_path: Path) -> Callable[..., tuple[Path, dict[str, list[str]]]]:
    """Run a command that is stopped after a step, and the same command again; the records of both."""

    def run(ranks: int, stop: int, *words: str) -> tuple[Path, dict[str, list[str]]]:
        seen = [tmp_path / "seen0", tmp_path / "seen1"]
        for folder in seen:
            folder.mkdir()
        fault = f"SIGTERM@{stop}:0" if stop else "raise@1"  # nothing is saved yet
        words = (*words, *mode(ranks))
        first = train(*words, env={"TEST_RECORD": str(seen[0]), "TEST_FAULT": fault}, **launch(ranks))
        assert first.exit_codes[0] == (1 if stop == 0 else 143 if ranks == 1 else 0), first.text
        found = directories.newest(first.folder / "checkpoints")
        assert (found.name if found else None) == (f"step-{stop}" if stop else None), first.text
        again = train(*words, env={"TEST_RECORD": str(seen[1])}, **launch(ranks)).ok()
        assert again.folders == []
        return first.folder, joined(records(seen[0]) if stop else {}, records(seen[1]))

    return run


@pytest.mark.parametrize(
    ("ranks", "workers", "stop"),
    [
        pytest.param(*c, marks=[] if c in QUICK else [pytest.mark.slow])
        for c in product((1, 2, 3, 4), (0, 2), (0, 5, 7, EPOCH_END))
    ],
)
def test_continuing_after_a_stop_is_bitwise_the_undisturbed_run(
    whole: Callable[..., tuple[Path, Path]],
    cut: Callable[..., tuple[Path, dict[str, list[str]]]],
    ranks: int,
    workers: int,
    stop: int,
) -> None:
    undisturbed, seen = whole(ranks, *RICH)
    folder, found = cut(ranks, stop, *RICH, f"train.num_workers={workers}")
    assert found == records(seen)
    compare.assert_bitwise_equal(undisturbed, folder)


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_continuing_with_two_microbatches_is_bitwise_the_undisturbed_run(
    whole: Callable[..., tuple[Path, Path]],
    cut: Callable[..., tuple[Path, dict[str, list[str]]]],
    ranks: int,
) -> None:
    words = (*RICH, "train.accumulation_steps=2")
    undisturbed, seen = whole(ranks, *words)
    folder, found = cut(ranks, 6, *words)
    assert found == records(seen)
    compare.assert_bitwise_equal(undisturbed, folder)


@pytest.mark.parametrize(
    "schedule",
    [
        ("scheduler._target_=tests.probes.FaultyCosine", "scheduler.warmup_steps=2"),
        ("scheduler=step", "scheduler._target_=tests.probes.FaultyStep", "scheduler.step_size=3"),
        ("scheduler=one_cycle", "scheduler._target_=tests.probes.FaultyOneCycle"),
        ("scheduler=constant", "scheduler._target_=tests.probes.FaultyConstant"),
    ],
    ids=["cosine", "step", "one cycle", "constant"],
)
def test_learning_rates_go_on_exactly(
    whole: Callable[..., tuple[Path, Path]],
    cut: Callable[..., tuple[Path, dict[str, list[str]]]],
    schedule: tuple[str, ...],
) -> None:
    undisturbed, _ = whole(1, *RECORDED, *schedule)
    folder, _ = cut(1, 7, *RECORDED, *schedule)
    rates = [p["optim/lr"] for p in compare.points(undisturbed) if "optim/lr" in p]
    assert len(rates) == 12
    assert (len(set(rates)) > 1) is ("scheduler=constant" not in schedule)
    assert [p["optim/lr"] for p in compare.points(folder) if "optim/lr" in p] == rates
    compare.assert_bitwise_equal(undisturbed, folder)


def test_continuing_after_a_kill_is_bitwise_the_undisturbed_run(
    whole: Callable[..., tuple[Path, Path]], train: Callable[..., Result], tmp_path: Path
) -> None:
    words = (*RICH, "checkpoint.every_steps=2")
    undisturbed, seen = whole(1, *words)
    here = tmp_path / "seen"
    here.mkdir()
    outside = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    killed = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=tmp_path,
        env=outside | {"TEST_FAULT": "SIGKILL@7", "TEST_RECORD": str(here)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "outputs" / "recorded" / "same"
    found = directories.newest(folder / "checkpoints")
    done = int(found.name.removeprefix("step-")) if found else 0
    assert 4 <= done <= 6  # the last save may have been under way
    before = records(here)["train.0"][:done]
    for file in here.iterdir():
        file.unlink()
    train(*words, env={"TEST_RECORD": str(here)}).ok()
    assert before + records(here)["train.0"] == records(seen)["train.0"]
    compare.assert_bitwise_equal(undisturbed, folder)


def test_patience_goes_on_counting_and_a_run_that_ended_by_it_stays_ended(
    whole: Callable[..., tuple[Path, Path]],
    cut: Callable[..., tuple[Path, dict[str, list[str]]]],
    train: Callable[..., Result],
) -> None:
    words = (*RICH, "train.max_epochs=9", "eval.every_epochs=null", "checkpoint.metric_mode=max")
    words = (*words, "train.early_stop_patience=2")
    undisturbed, seen = whole(2, *words)
    assert (
        compare.last(undisturbed).name == "step-15"
    )  # evaluations after 5 (the best: the loss falls), 10, 15
    folder, found = cut(2, 11, *words)
    assert found == records(seen)
    compare.assert_bitwise_equal(undisturbed, folder)
    train(*words, "mode=multigpu", ranks=2).ok()
    assert compare.last(folder).name == "step-15"
    compare.assert_bitwise_equal(undisturbed, folder)


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))], ids=lambda n: f"{n} ranks"
)
def test_continuing_the_cnn_on_augmented_digits_is_bitwise_the_undisturbed_run(
    whole: Callable[..., tuple[Path, Path]],
    cut: Callable[..., tuple[Path, dict[str, list[str]]]],
    ranks: int,
) -> None:
    words = (
        *(
            "experiment=digits_cnn",
            "run_id=same",
            "mode.threads=1",
            "log.every_steps=1",
            "eval.every_steps=5",
        ),
        *("data.augment=true", "model.dropout=0.2", "train.ema_decay=0.9", "train.max_steps=9"),
        "model.channels=[8,8]",
        "scheduler._target_=tests.probes.FaultyCosine",
    )
    undisturbed, _ = whole(ranks, *words)
    folder, _ = cut(ranks, 7, *words)
    compare.assert_bitwise_equal(undisturbed, folder)
