"""Sweeps: which jobs, which folders, what becomes of each, and starting a sweep again."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ddp_experiments import sweep
from ddp_experiments.errors import Refused
from tests import compare
from tests.ranks import LAUNCHER, ROOT, Result

MLP = ("experiment=digits_mlp", "train.max_epochs=null", "train.max_steps=8", "mode.threads=1")
FAULTY = (
    *MLP,
    "scheduler._target_=tests.probes.FaultyCosine",
    "log.every_steps=1",
    "checkpoint.every_steps=2",
)
Start = Callable[..., subprocess.CompletedProcess[str]]
Train = Callable[..., Result]
Background = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def statuses(folder: Path) -> dict[str, str]:
    return {Path(row["folder"]).name: row["status"] for row in table(folder)}


def the_sweep(cwd: Path) -> Path:
    (plan,) = cwd.glob("outputs/*/*/jobs.json")
    return plan.parent


# ---- names and identity


@pytest.mark.parametrize(
    ("number", "width", "swept", "name"),
    [
        (0, 2, ["optimizer.lr=1e-3"], "00_lr=0.001"),
        (7, 3, ["optimizer.lr=0.30000000000000004", "model=mlp"], "007_lr=0.3,model=mlp"),
        (1, 2, ["+a.lr=1", "b.lr=2"], "01_a.lr=1,b.lr=2"),
        (0, 2, ["model.channels=[8, 16]"], "00_channels=8,16"),
        (0, 2, ["name='a/b c'"], "00_name=a-b-c"),
    ],
)
def test_a_job_is_named_by_what_varies(number: int, width: int, swept: list[str], name: str) -> None:
    assert sweep.job_name(number, width, swept) == name


def test_a_job_name_is_120_bytes_at_most_and_keeps_its_number() -> None:
    swept = [f"section.a_setting_with_a_long_name_{i}=value_{i}" for i in range(20)]
    name = sweep.job_name(3, 2, swept)
    assert len(name.encode()) <= 120
    assert name.startswith("03_a_setting_with_a_long_name_0=value_0,")


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("seed=1,2 optimizer.lr=1e-3,0.10", ["00_seed=1,lr=0.001", "01_seed=1,lr=0.1"]),
        ("data.noise=0.1 log.every_steps=1,2", ["00_every_steps=1", "01_every_steps=2"]),
        ("log.every_steps=1,2 eval.every_steps=3,4", ["00_log.every_steps=1,eval.every_steps=3"]),
        ("model.channels=[8,8],[16]", ["00_channels=8,8", "01_channels=16"]),
        ("model=mlp,cnn", ["00_model=mlp", "01_model=cnn"]),
        ("++optimizer.lr=1e-3,1e-2", ["00_lr=0.001", "01_lr=0.01"]),
        ("seed=range(11)", ["00_seed=0", "10_seed=10"]),
        ("init_from='a/b: \u00fc',c", ["00_init_from=a-b", "01_init_from=c"]),
    ],
)
def test_the_jobs_are_all_combinations_named_by_what_varies(words: str, names: list[str]) -> None:
    given = OverridesParser.create().parse_overrides(words.split(" ") if "'" not in words else [words])
    swept = {o.key_or_group for o in given if o.is_sweep_override()}
    jobs = enumerate(sweep.combinations(given))
    found = [sweep.job_name(i, 2, [o for o in job if sweep.split(o)[0] in swept]) for i, job in jobs]
    assert set(names) <= set(found), found


SETTINGS: dict[str, Any] = {
    "name": "n",
    "run_id": None,
    "seed": 0,
    "mode": {"name": "single", "threads": "auto"},
    "train": {"max_epochs": 3, "num_workers": 0},
    "optimizer": {"lr": 0.1},
}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"name": "other"}, True),
        ({"run_id": "x"}, True),
        ({"mode": {"name": "multigpu", "threads": 1}}, True),
        ({"train": {"max_epochs": 3, "num_workers": 4}}, True),
        ({"seed": 1}, False),
        ({"optimizer": {"lr": 0.2}}, False),
    ],
)
def test_a_job_is_known_by_what_it_trains(change: dict[str, Any], same: bool) -> None:
    key = sweep.key_of(SETTINGS, ["seed=0"], False)
    assert (sweep.key_of(SETTINGS | change, ["seed=0"], False) == key) is same


def test_the_length_of_a_run_makes_another_job_only_if_the_learning_rate_follows_from_it() -> None:
    longer = SETTINGS | {"train": {"max_epochs": 9, "num_workers": 0}}
    assert sweep.key_of(SETTINGS, [], False) == sweep.key_of(longer, [], False)
    assert sweep.key_of(SETTINGS, [], True) != sweep.key_of(longer, [], True)


def test_a_free_setting_that_is_swept_makes_different_jobs() -> None:
    other = SETTINGS | {"train": {"max_epochs": 3, "num_workers": 2}}
    swept = ["train.num_workers=0"], ["train.num_workers=2"]
    assert sweep.key_of(SETTINGS, swept[0], False) != sweep.key_of(other, swept[1], False)
    assert sweep.key_of(SETTINGS, ["debug=a"], False) != sweep.key_of(SETTINGS, ["debug=b"], False)


def test_an_evaluation_is_known_by_what_it_evaluates() -> None:
    of = SETTINGS | {"eval_only": True, "from_run": "a", "eval": {"weights": "best"}}
    others = [{"from_run": "b"}, {"eval": {"weights": "last"}}]
    assert len({sweep.key_of(of | other, [], False) for other in ({}, *others)}) == 3


def test_a_value_is_the_same_however_it_is_written() -> None:
    assert sweep.key_of(SETTINGS, ["optimizer.lr=1e-1"], False) == sweep.key_of(
        SETTINGS, ["optimizer.lr=0.1"], False
    )


def test_jobs_of_a_sweep_that_grows_keep_their_folders() -> None:
    first, second = sweep.Plan(), sweep.Plan()
    for key, value in (("a", "1"), ("b", "2")):
        first.add(key, [f"x.lr={value}"], 2)
    for key, value in (("c", "3"), ("b", "2"), ("a", "1")):
        second.add(key, [f"x.lr={value}"], 2)
    second.continue_from(first)
    assert {k: j.folder for k, j in second.jobs.items()} == {"a": "00_lr=1", "b": "01_lr=2", "c": "02_lr=3"}


# ---- what is refused before job 0

WRONG = [
    ("-m seed=1,2,1", "job 2, seed=1: trains the same as job 0"),
    ("-m optimizer.lr=1e-3,abc", "job 1, optimizer.lr=abc: "),
    ("-m optimizer.lr=1e-3,abc,def seed=1,2", "job 2, optimizer.lr=abc seed=1 (and 1 more): "),
    ("-m name=a,b", "name is the sweep's own and can't vary in it"),
    ("-m run_id=a,b", "run_id is the sweep's own and can't vary in it"),
    ("-m sweep.fail_fast=true,false", "sweep.fail_fast is the sweep's own"),
    ("-m seed=1,-1", "job 1, seed=-1: seed=-1 must be at least 0"),
    ("-m model=cnn,nothing", "job 1, model=nothing: model=nothing: no such option"),
    (
        "-m mode=multinode mode.nnodes=2 mode.node_rank=0 mode.rdzv_endpoint=h:1 seed=1,2",
        "the machines of a sweep need one name for its folder: add run_id=NAME",
    ),
]


@pytest.mark.parametrize(("line", "part"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_sweep_is_refused_before_its_first_job(
    line: str, part: str, train: Train, tmp_path: Path
) -> None:
    result = train(*line.split(), "mode.threads=1")
    assert result.exit_codes == [2], result.text
    assert part in result.text
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_does_not_continue_a_run(train: Train) -> None:
    run = train(*MLP).ok().folder
    result = train("-m", "--continue", str(run), "log.every_steps=1,2")
    assert result.exit_codes == [2]
    assert "--continue names one run, but -m starts several" in result.text


def test_a_sweep_is_not_mixed_with_a_run_of_its_name(train: Train) -> None:
    train(*MLP, "run_id=x").ok()
    result = train(*MLP, "-m", "run_id=x", "seed=1,2")
    assert result.exit_codes == [2]
    assert "exists and is no sweep" in result.text
    assert result.folders == []


def test_sweepers_that_draw_are_refused_on_ranks_that_exist_already(train: Train, tmp_path: Path) -> None:
    result = train(
        *MLP, "-m", "mode=multigpu", "seed=1,2", "hydra.sweeper._target_=some.RandomSweeper", ranks=2
    )
    assert result.exit_codes == [2, 2], result.text
    assert "RandomSweeper draws its values anew on every rank" in result.text
    assert "python train.py mode=multigpu mode.nproc_per_node=2 " in result.text
    assert list(tmp_path.glob("outputs/*")) == []


# ---- one parent, workers of its own for each job


def test_every_job_is_bitwise_the_lone_run(train: Train, tmp_path: Path) -> None:
    words = (*MLP, "mode=multigpu")
    result = train(*words, "-m", "optimizer.lr=1e-3,1e-2,1e-1").ok()
    folder = the_sweep(tmp_path)
    assert [f.name for f in result.folders] == ["00_lr=0.001", "01_lr=0.01", "02_lr=0.1"]
    assert statuses(folder) == {f.name: "done" for f in result.folders}
    alone = train(*words, "optimizer.lr=1e-2", ranks=2).ok().folder
    compare.assert_bitwise_equal(result.folders[1], alone)
    best = max(table(folder), key=lambda row: float(row["value"]))
    assert f"best accuracy {float(best['value']):.4g}: {best['folder']}" in result.text
    assert len(list(folder.glob("*/events.out.tfevents.*"))) == 3


def test_a_failed_job_leaves_the_others_alone_and_is_tried_anew(train: Train, tmp_path: Path) -> None:
    words = (*FAULTY, "mode=multigpu", "-m", "optimizer.lr=1e-3,1e-2", "run_id=s")
    first = train(*words, env={"TEST_FAULT": "raise@5:1", "TEST_FAULT_ONCE": str(tmp_path / "once")})
    assert first.exit_codes == [1], first.text
    folder = the_sweep(tmp_path)
    failed, fine = table(folder)
    assert (failed["status"], fine["status"]) == ("failed", "done")
    assert "rank 1 on " in failed["error"] and "RuntimeError: injected" in failed["error"]
    log = (folder / "00_lr=0.001" / "train.log").read_text()
    assert "Traceback (most recent call last)" in log and "RuntimeError: injected" in log
    assert first.text.count("Traceback (most recent call last)") == 1
    assert "to run what is not done: the same command with run_id=s" in first.text
    again = train(*words).ok()
    assert "continuing after step 4" in again.text and again.text.count("2 rank(s) on cpu") == 1
    assert statuses(folder) == {"00_lr=0.001": "done", "01_lr=0.01": "done"}
    lone = train(*FAULTY, "mode=multigpu", "optimizer.lr=1e-3", ranks=2).ok().folder
    assert compare.largest_difference(compare.weights(folder / "00_lr=0.001"), compare.weights(lone)) == 0


@pytest.mark.slow
def test_a_killed_worker_is_one_failed_job_and_fail_fast_ends_the_sweep(train: Train, tmp_path: Path) -> None:
    result = train(
        *FAULTY,
        "sweep.fail_fast=true",
        "-m",
        "seed=1,2",
        env={"TEST_FAULT": "SIGKILL@8"},
    )
    assert result.exit_codes == [1], result.text
    failed, left = table(the_sweep(tmp_path))
    assert failed["status"] == "failed" and "rank 0 on " in failed["error"] and "SIGKILL" in failed["error"]
    assert left["status"] == "not run"
    assert re.search(r"checkpoints/step-\d; go on with: python train.py --continue outputs/", result.text)


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_where_it_was(
    background: Background, wait_for: Callable[..., None], train: Train, tmp_path: Path
) -> None:
    """SIGKILL of the parent in the second job: the first is skipped, the second continues, the third runs."""
    words = (*FAULTY, "-m", "seed=1,2,3", "run_id=s")
    once = tmp_path / "once"
    once.touch()  # as long as it is there, there is no fault
    with background(*words, env={"TEST_FAULT": "sleep60@5", "TEST_FAULT_ONCE": str(once)}) as process:
        sweep_folder = tmp_path / "outputs/digits_mlp/s"
        wait_for(lambda: sweep.read_job(sweep_folder / "00_seed=1").get("status") == "done")
        once.unlink()
        wait_for(lambda: (sweep_folder / "01_seed=2/checkpoints/step-4").exists() and once.exists())
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
    again = train(*words).ok()
    assert again.text.count("1 rank(s) on cpu") == 2
    assert "continuing after step 4" in again.text
    assert set(statuses(the_sweep(tmp_path)).values()) == {"done"}
    once_more = train(*words).ok()
    assert "1 rank(s) on cpu" not in once_more.text


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_with_130_and_the_table(
    background: Background, wait_for: Callable[..., None], tmp_path: Path
) -> None:
    words = [w for w in FAULTY if "max_steps" not in w]
    with background(*words, "train.max_steps=1000000", "-m", "seed=1,2", "run_id=s") as process:
        wait_for(lambda: (tmp_path / "outputs/digits_mlp/s/00_seed=1/checkpoints").exists())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 130
    assert "to run what is not done: the same command with run_id=s" in (tmp_path / ".console").read_text()
    assert statuses(the_sweep(tmp_path)) == {"00_seed=1": "interrupted", "01_seed=2": "not run"}


def test_the_same_sweep_is_not_started_twice(
    background: Background, wait_for: Callable[..., None], train: Train, tmp_path: Path
) -> None:
    words = (*FAULTY, "-m", "seed=1,2", "run_id=s")
    with background(*words, env={"TEST_FAULT": "sleep60@2"}) as process:
        wait_for(lambda: (tmp_path / "outputs/digits_mlp/s/00_seed=1/config.yaml").exists())
        second = train(*words)
        assert second.exit_codes == [2], second.text
        assert f"is being written by pid {process.pid} on {os.uname().nodename}" in second.text


# ---- on ranks that a launcher has started

KINDS = {
    "before the group": ("data._target_=tests.probes.sound", "data@0"),
    "in training": ("scheduler._target_=tests.probes.FaultyCosine", "raise@3"),
    "in the backward pass": ("model._target_=tests.probes.FaultyBackward", "raise@3"),
    "after training": ("scheduler._target_=tests.probes.FaultyCosine", "raise@8"),
    "by SystemExit": ("scheduler._target_=tests.probes.FaultyCosine", "exit@3"),
}


ALL = [(kind, rank) for kind in KINDS for rank in (0, 1)]


@pytest.mark.parametrize(
    ("kind", "rank"),
    [*ALL[::3], *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in ALL[::3])],
)
def test_a_job_that_fails_on_one_rank_ends_on_all_and_the_next_is_clean(
    kind: str, rank: int, train: Train, tmp_path: Path
) -> None:
    part, fault = KINDS[kind]
    words = (*MLP, "mode=multigpu", part)
    env = {"TEST_FAULT": f"{fault}:{rank}", "TEST_FAULT_ONCE": str(tmp_path / "once")}
    before = time.monotonic()
    result = train(*words, "-m", "optimizer.lr=1e-3,1e-2", ranks=2, env=env)
    assert time.monotonic() - before < 30
    assert result.exit_codes == [1, 1], result.text
    failed, fine = table(the_sweep(tmp_path))
    assert (failed["status"], fine["status"]) == ("failed", "done"), result.text
    assert f"rank {rank} on " in failed["error"], failed
    assert ("sys.exit(7)" if "exit" in fault else "injected") in failed["error"]
    assert result.text.count("Traceback (most recent call last)\n") <= 2  # SystemExit has a cause
    alone = train(*words, "optimizer.lr=1e-2", ranks=2).ok().folder
    job = next(f for f in result.folders if f.name == "01_lr=0.01")
    compare.assert_bitwise_equal(job, alone)


@pytest.mark.slow
def test_ranks_of_a_launcher_sweep_in_step_although_one_is_slow(train: Train, tmp_path: Path) -> None:
    words = (*MLP, "mode=multigpu", "data._target_=tests.probes.sound")
    result = train(
        *words, "-m", "optimizer.lr=1e-3,1e-2,1e-1", ranks=2, per_rank={1: {"TEST_FAULT": "sleep1.5@0"}}
    ).ok()
    assert len(result.folders) == 3
    assert len(list(tmp_path.glob("outputs/*/*/sweep.csv"))) == 1
    assert result.texts[1].strip() == ""


def test_a_sweep_on_ranks_of_a_launcher_can_be_started_again(train: Train, tmp_path: Path) -> None:
    words = (*FAULTY, "mode=multigpu", "-m", "seed=1,2", "run_id=s")
    env = {"TEST_FAULT": "raise@5:0", "TEST_FAULT_ONCE": str(tmp_path / "once")}
    assert train(*words, ranks=2, env=env).exit_codes == [1, 1]
    again = train(*words, ranks=2).ok()
    assert "continuing after step 4" in again.text and again.text.count("2 rank(s) on cpu") == 1


def test_globs_choose_options(train: Train) -> None:
    result = train(*MLP, "mode=multigpu", "-m", "scheduler=glob(co*,exclude=cos*)", "seed=1", ranks=1).ok()
    assert [f.name for f in result.folders] == ["00_scheduler=constant"]


@pytest.mark.slow
def test_a_sweep_by_torchrun_keeps_its_folder_over_restarts(start: Start, tmp_path: Path) -> None:
    env = {"TEST_FAULT": "SIGKILL@5:1", "TEST_FAULT_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(ROOT)}
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1")
    done = start(*launcher, "train.py", *FAULTY, "mode=multigpu", "-m", "seed=1,2", env=env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "once").exists()
    assert statuses(the_sweep(tmp_path)) == {"00_seed=1": "done", "01_seed=2": "done"}


@pytest.mark.slow
def test_a_signal_ends_a_sweep_by_torchrun_on_all_ranks(
    tmp_path: Path, wait_for: Callable[..., None]
) -> None:
    words = (*FAULTY, "mode=multigpu", "-m", "seed=1,2,3", "run_id=s")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(ROOT / "train.py")]
    env = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    env |= {"PYTHONPATH": str(ROOT), "TEST_PAUSE": "0.3"}
    with (tmp_path / ".console").open("w") as console:
        process = subprocess.Popen([*command, *words], cwd=tmp_path, env=env, stderr=console)
        job = tmp_path / "outputs/digits_mlp/s/00_seed=1"
        wait_for(lambda: compare.trains(job))
        process.terminate()
        assert process.wait(timeout=25) == 1
    assert statuses(the_sweep(tmp_path)) == {
        "00_seed=1": "interrupted",
        "01_seed=2": "not run",
        "02_seed=3": "not run",
    }


def test_a_sweep_by_torchrun_ends_with_exit_code_1_if_a_job_failed(start: Start, tmp_path: Path) -> None:
    """The one by real torchrun; the others above play its part."""
    env = {"TEST_FAULT": "raise@3:1", "TEST_FAULT_ONCE": str(tmp_path / "once"), "PYTHONPATH": str(ROOT)}
    done = start("train.py", *FAULTY, "mode=multigpu", "-m", "seed=1,2", torchrun=2, env=env)
    assert done.returncode == 1, done.stderr
    assert list(statuses(the_sweep(tmp_path)).values()) == ["failed", "done"], done.stderr


# ---- what a job's folder says


def a_job(folder: Path, *, key: str = "a", length: int = 3) -> sweep.Job:
    return sweep.Job(0, folder, key, ["seed=0"], [None, length], "accuracy", "max", writes=True)


def test_a_job_that_is_done_is_not_begun_again_unless_it_is_to_be_longer(tmp_path: Path) -> None:
    first = a_job(tmp_path / "00_x")
    assert not first.begin()["done"]
    assert not a_job(tmp_path / "00_x").begin()["done"]  # it was interrupted
    first.note("done", value=0.5)
    assert a_job(tmp_path / "00_x").begin() == {"folder": str(tmp_path / "00_x"), "done": True, "value": 0.5}
    with pytest.raises(
        Refused, match=r"is done with train\.max_steps=None train\.max_epochs=3, longer than now"
    ):
        a_job(tmp_path / "00_x", length=2).begin()
    assert not a_job(tmp_path / "00_x", length=4).begin()["done"]


def test_another_job_of_the_same_name_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    a_job(tmp_path / "000_lr=0.1", key="0.1").begin()
    other = a_job(tmp_path / "000_lr=0.1", key="0.1000001").begin()
    assert other["folder"] == str(tmp_path / "000_lr=0.1_2")


def test_a_traceback_is_once_in_the_log_of_a_job(tmp_path: Path) -> None:
    job = a_job(tmp_path / "00_x")
    job.begin()
    trace = "Traceback (most recent call last):\n  File x\n    frame()\nValueError: no\n"
    log = tmp_path / "00_x/train.log"
    log.write_text("12:00 ERROR the run failed\n" + trace.replace("File x", "File w, in more\n  File x"))
    for _ in range(2):
        job.log(trace, "rank 0 on h: ValueError: no")
    assert log.read_text().count("Traceback") == 1
    (tmp_path / "00_x/train.log").unlink()
    job.log(trace, "rank 1 on h: ValueError: no")
    assert log.read_text() == trace + "rank 1 on h: ValueError: no\n"


# ---- as a person reads it


def test_the_table_names_every_job_and_the_best(tmp_path: Path) -> None:
    plan = sweep.Plan(jobs={})
    for i, value in enumerate((0.5, 0.9, None)):
        plan.add(str(i), [f"seed={i}"], 2)
        folder = tmp_path / f"0{i}_seed={i}"
        folder.mkdir()
        job = sweep.Job(i, folder, str(i), [f"seed={i}"], [None, 3], "accuracy", "max", writes=True)
        job.note(
            "failed" if value is None else "done", value=value, error="" if value else "rank 1 on h: E: x"
        )
    (tmp_path / "jobs.json").write_text(json.dumps(asdict(plan)))
    found = sweep.rows(tmp_path)
    lines = sweep.table(tmp_path, found).splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["0", "seed=0", "done"],
        ["1", "seed=1", "done"],
        ["2", "seed=2", "failed"],
    ]
    assert "rank 1 on h: E: x" in lines[3]
    assert lines[4].startswith("best accuracy 0.9: ") and lines[4].endswith("01_seed=1")


# ---- sweepers and launchers of others

DRAWS = """
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Draws(Sweeper):
    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        rate = 0.001
        for number in range(2):
            (job,) = self.launcher.launch([[*arguments, f"optimizer.lr={rate}"]], initial_job_idx=number)
            print("drawn", rate, "value", job.return_value)
            rate *= 1 + job.return_value  # the next value follows from the last one's result


@dataclass
class Config:
    _target_: str = "hydra_plugins.draws.Draws"


ConfigStore.instance().store(group="hydra/sweeper", name="draws", node=Config)
"""


@pytest.mark.slow
def test_a_sweeper_that_draws_gets_the_value_of_each_job(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins/draws.py").write_text(DRAWS)
    words = (*MLP, "-m", "hydra/sweeper=draws", "mode.threads=1")
    words = tuple(dict.fromkeys(words))
    done = start("train.py", *words, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    drawn = re.findall(r"drawn (\S+) value (\S+)", done.stdout)
    rows = table(the_sweep(tmp_path))
    assert [float(row["value"]) for row in rows] == [float(value) for _, value in drawn]
    assert Path(rows[0]["folder"]).name == "000_lr=0.001"
    assert len(rows) == 2 and {row["status"] for row in rows} == {"done"}
