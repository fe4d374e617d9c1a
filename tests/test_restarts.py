"""torchrun starts killed workers anew, again and again; many starts at once don't disturb one another."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_experiments.checkpoint import directories
from tests import compare
from tests.ranks import LAUNCHER, ROOT, Result
from tests.torchruns import Torchrun, rendezvous, torchrun, until

PAUSE = 0.03
SAVE_EVERY = 5


def words(steps: int) -> tuple[str, ...]:
    """Training with everything that has a state or draws random numbers."""
    return (
        *(f"--config-dir={ROOT}/tests/conf", "experiment=recorded", "mode=multigpu", "log.tensorboard=true"),
        *("data.noisy=true", "model.dropout=0.2", "train.ema_decay=0.9", "train.clip_norm=1.0"),
        *(
            "scheduler._target_=tests.probes.FaultyCosine",
            "train.max_epochs=null",
            f"train.max_steps={steps}",
        ),
        *(f"checkpoint.every_steps={SAVE_EVERY}", "eval.every_epochs=4"),
    )


@dataclass
class Kill:
    """What a kill hit: the start-up of an attempt (step is None), or this step of the run."""

    rank: int
    step: int | None
    redone: int = 0
    seconds: float = 0.0  # until torchrun had ended the other rank and started both anew


class Killer:
    """Kills a random rank at a random point of each attempt, and writes down what it hit."""

    def __init__(self, run: Torchrun, records: Path, chance: random.Random, most_steps: int) -> None:
        self.run, self.records, self.chance, self.most_steps = run, records, chance, most_steps
        self.startup_seconds, self.last = 0.0, 0.0
        self.kills: list[Kill] = []

    def lines(self, kind: str) -> int:
        """What rank 0 has recorded in all attempts: steps (train), schedules made and stepped (lr)."""
        file = self.records / f"{kind}.0"
        return file.read_text().count("\n") if file.exists() else 0

    def saved(self) -> int:
        """The step that the next attempt goes on from."""
        found = [c for f in self.run.cwd.glob("outputs/*/*/checkpoints") if (c := directories.newest(f))]
        return int(found[0].name.removeprefix("step-")) if found else 0

    def over(self) -> bool:
        return self.run.process.poll() is not None

    def attempt(self, number: int) -> dict[int, int]:
        """The workers of an attempt, once they are there; what the last kill cost is known then."""
        until(lambda: len(self.run.workers(number)) == 2 or self.over(), f"attempt {number}")
        assert not self.over(), f"torchrun ended before kill {number}: {self.kills}\n{self.run.text}"
        if self.kills:
            kill = self.kills[-1]
            kill.seconds = round(time.monotonic() - self.last, 1)
            kill.redone = 0 if kill.step is None else kill.step - self.saved()
        return self.run.workers(number)

    def kill(self, number: int, in_startup: bool) -> None:
        """Kill one rank of an attempt, while it starts or once it trains."""
        workers, began = self.attempt(number), time.monotonic()
        trained, made, saved = self.lines("train"), self.lines("lr"), self.saved()
        if in_startup:
            earliest = self.chance.choice((0.0, 0.7))  # half of them late, when the ranks meet
            due = began + self.chance.uniform(earliest, 1.0) * self.startup_seconds
            until(lambda: time.monotonic() > due or self.lines("lr") > made, "the time to kill")
        else:
            until(lambda: self.lines("lr") > made or self.over(), f"the schedule of attempt {number}")
            self.startup_seconds = time.monotonic() - began
            wanted = trained + self.chance.randint(1, self.most_steps)
            until(lambda: self.lines("train") >= wanted or self.over(), f"steps of attempt {number}")
            time.sleep(self.chance.uniform(0, PAUSE))
        rank = self.chance.choice(sorted(workers))
        os.kill(workers[rank], signal.SIGKILL)
        self.last, done = time.monotonic(), self.lines("train") - trained
        self.kills.append(Kill(rank, saved + done if done else None))


def check(folder: Path, undisturbed: Path, steps: int) -> None:
    """Bit for bit the undisturbed run, each step once wherever it is told."""
    compare.assert_bitwise_equal(undisturbed, folder)
    assert json.loads((folder / "status.json").read_text())["state"] == "done"
    logged = [p["step"] for p in compare.points(folder) if "train/loss" in p]
    assert logged == list(range(1, steps + 1))
    shown = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert [e.step for e in shown.Scalars("train/loss")] == logged


KILLS = [2, pytest.param(int(os.environ.get("TEST_KILLS", "10")), marks=pytest.mark.slow)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", KILLS, ids=lambda n: f"{n} kills")
@pytest.mark.parametrize("kind", ["c10d", "static"])
def test_killed_ranks_come_up_again_and_the_run_is_bitwise_the_undisturbed_one(
    kind: str, kills: int, train: Callable[..., Result], tmp_path: Path
) -> None:
    most_steps = 2 * SAVE_EVERY
    steps = (kills + 1) * most_steps
    seed = random.randrange(10**6)
    print("seed", seed)
    chance, seen, cwd = random.Random(seed), tmp_path / "seen", tmp_path / "killed"
    seen.mkdir()
    environment = {"TEST_RECORD": str(seen), "TEST_PAUSE": str(PAUSE)}
    options = [*rendezvous(kind), f"--max-restarts={kills}"]
    with torchrun(cwd, *words(steps), options=options, env=environment) as run:
        killer = Killer(run, seen, chance, most_steps)
        for number in range(kills):
            killer.kill(number, in_startup=bool(number % 2))
        killer.attempt(kills)
        assert run.wait() == 0, run.text
    print(*killer.kills, sep="\n")
    assert run.text.count("exitcode: -9") == kills, run.text
    redone = [k.redone for k in killer.kills if k.step is not None]
    assert 0 < len(redone) < kills, killer.kills  # some hit training, others start-up
    assert killer.lines("train") == steps + sum(redone) > steps, killer.kills
    (folder,) = {p.parent for p in cwd.glob("outputs/**/config.yaml")}
    undisturbed = train(*words(steps), ranks=2).ok().folder
    check(folder, undisturbed, steps)


@pytest.mark.slow
def test_rank_that_dies_before_there_is_a_group_is_started_again_at_once(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    line = words(2 * SAVE_EVERY)
    cut = train(*line, "run_id=a", ranks=2, env={"TEST_FAULT": f"SIGTERM@{SAVE_EVERY}:0"}).ok().folder
    manifest, kept = compare.last(cut) / "manifest.json", tmp_path / "kept"
    manifest.rename(kept)
    os.mkfifo(manifest)  # reading it lasts until we write: rank 0 checks a checkpoint, rank 1 waits for it
    with torchrun(tmp_path, *line, "run_id=a", options=["--max-restarts=1"]) as run:
        handle = -1

        def opened() -> bool:
            nonlocal handle
            with suppress(OSError):  # nobody reads
                handle = os.open(manifest, os.O_WRONLY | os.O_NONBLOCK)
            return handle >= 0

        until(opened, "rank 0 to read the manifest")
        time.sleep(0.3)  # for rank 1 to wait
        os.kill(run.workers(0)[0], signal.SIGKILL)
        os.close(handle)
        kept.rename(manifest)
        until(lambda: len(run.workers(1)) == 2, "the next attempt", seconds=20)
        assert run.wait() == 0, run.text
    check(cut, train(*line, "run_id=b", ranks=2).ok().folder, 2 * SAVE_EVERY)


# ---- many starts at once


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("starts", [4, 10])
def test_starts_of_the_same_moment_are_as_many_whole_runs(starts: int, tmp_path: Path) -> None:
    go, line = tmp_path / "go", [w for w in words(4) if w != "mode=multigpu"]
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    environment |= {"TEST_RECORD": str(tmp_path), "TEST_GO": str(go)}
    command = [sys.executable, str(ROOT / "train.py"), *line]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
            )
            for _ in range(starts)
        ]
        for process in processes:
            stack.callback(process.kill)
        ready = tmp_path / "ready.0"
        until(lambda: ready.exists() and ready.read_text().count("\n") == starts, f"{starts} starts", 180)
        go.touch()
        said = [process.communicate(timeout=60)[1].decode() for process in processes]
        assert [p.returncode for p in processes] == [0] * starts, said
    folders = sorted((tmp_path / "outputs/recorded").iterdir())
    assert len(folders) == starts
    assert any(re.search(r"_\d+-\d\d-\d\d_\d+$", f.name) for f in folders), folders  # same second
    for folder in folders:
        check(folder, folders[0], 4)


@pytest.mark.slow
def test_the_same_run_started_again_is_refused_and_the_first_goes_on_unharmed(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    line, environment = (*words(40), "run_id=a"), {"TEST_RECORD": str(tmp_path), "TEST_PAUSE": "0.1"}
    with torchrun(tmp_path, *line, options=[], env=environment) as run:
        until(lambda: (tmp_path / "train.0").exists(), "the first step")
        pid = run.workers(0)[0]
        second = train(*line, ranks=2)
        trained = (tmp_path / "train.0").read_text().count("\n")
        assert run.wait() == 0, run.text
    assert second.exit_codes == [2, 2]
    assert trained < 40  # else the first was over
    assert f"is being written by pid {pid} on {socket.gethostname()}" in second.text
    check(tmp_path / "outputs/recorded/a", train(*words(40), "run_id=b", ranks=2).ok().folder, 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["c10d", "static"])
def test_two_torchruns_of_one_machine_train_side_by_side(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = [
            stack.enter_context(torchrun(tmp_path / name, *words(4), options=rendezvous(kind)))
            for name in ("one", "two")
        ]
        assert [run.wait() for run in runs] == [0, 0], "\n".join(run.text for run in runs)
    one, two = (next(tmp_path.glob(f"{name}/outputs/recorded/*")) for name in ("one", "two"))
    check(one, two, 4)
