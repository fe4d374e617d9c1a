"""Run folders: one a run, locked while it lives, with its origin, and what a continuation may change."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed import TCPStore

from ddp_experiments import environment, identity
from ddp_experiments.config import Config, Mode, ModeName
from ddp_experiments.data import Splits
from ddp_experiments.data.digits import digits
from ddp_experiments.errors import Refused
from ddp_experiments.identity import changes
from ddp_experiments.lock import Lock, _start_time
from ddp_experiments.meeting import Meeting
from ddp_experiments.models.mlp import MLP as Model
from ddp_experiments.tasks import Classification
from tests import compare
from tests.ranks import ROOT, launcher_variables

MLP = ["experiment=digits_mlp", "train.max_epochs=null", "mode.threads=1", "log.every_steps=1"]
CONSTANT = [*MLP, "scheduler=constant"]


class Other(Model):
    """A model with a remark."""

    def __init__(
        self,
        in_features: int,
        hidden: list[int],
        out_features: int,
        dropout: float,
        output: str,
        note: Any = None,
    ) -> None:
        super().__init__(in_features, hidden, out_features, dropout, output)


def noted_digits(
    validation_fraction: float,
    test_fraction: float,
    split: str,
    split_seed: int,
    augment: bool,
    max_shift: int,
    noise: float,
    note: str = "",
) -> Splits:
    """Digits with a remark."""
    return digits(validation_fraction, test_fraction, split, split_seed)


class Robbed(Classification):
    """Another start takes the lock of the run while it trains."""

    def loss_sum(self, outputs: Tensor, targets: Tensor, weight_B: Tensor | None) -> Tensor:
        Path(os.environ["TEST_LOCK"]).write_text(json.dumps({"token": "theirs"}))
        return super().loss_sum(outputs, targets, weight_B)


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


# ---- the folder


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_leaves_these_files_and_no_others(train, ranks):
    mode = ["mode=multigpu"] if ranks else []
    folder = train(*MLP, *mode, "train.max_steps=2", ranks=ranks).ok().folder
    found = {re.sub(r"(tfevents)\..*", r"\1", p.name) for p in folder.iterdir()} - {"git.1.patch"}
    files = {
        "config.yaml",
        "provenance.json",
        "status.json",
        "metrics.jsonl",
        "train.log",
        "checkpoints",
        "lock",
    }
    assert found == files | {"events.out.tfevents"} | ({"rank1.log"} if ranks else set())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?", folder.name)
    assert (status(folder)["state"], status(folder)["step"], status(folder)["exit_code"]) == ("done", 2, 0)
    assert (folder / "lock").read_text() == ""


NEW = """
import json, sys
from pathlib import Path
from ddp_experiments.identity import new_folder
sys.stdin.read(1)
print(json.dumps([new_folder(Path(sys.argv[1])).name for _ in range(20)]))
"""


def test_starts_of_the_same_second_get_a_folder_each(tmp_path):
    command = [sys.executable, "-c", NEW, str(tmp_path / "outputs")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go")
        process.stdin.flush()
    found = [name for p in processes for name in json.loads(p.communicate(timeout=30)[0])]
    assert len(found) == 80
    assert len(set(found)) == 80
    assert sorted(found) == sorted(p.name for p in (tmp_path / "outputs").iterdir())


def test_a_folder_that_holds_no_run_is_not_taken(train, tmp_path):
    other = tmp_path / "outputs/digits_mlp/mine"
    other.mkdir(parents=True)
    (other / "thesis.txt").write_text("all of it")
    result = train(*MLP, "train.max_steps=1", "run_id=mine")
    assert result.exit_codes == [2]
    assert "outputs/digits_mlp/mine exists and is no run (no config.yaml)" in result.text
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("option", ["--from-run", "--continue"])
def test_a_folder_without_settings_is_refused_by_name(train, tmp_path, option):
    result = train(option, str(tmp_path / "nowhere"))
    assert result.exit_codes == [2]
    assert f"{tmp_path / 'nowhere/config.yaml'}: No such file or directory" in result.text


def test_empty_settings_are_no_run(train, tmp_path):
    (tmp_path / "config.yaml").write_text("")
    result = train("--from-run", str(tmp_path))
    assert result.exit_codes == [2]
    assert f"{tmp_path / 'config.yaml'} holds no settings" in result.text


def test_a_damaged_status_does_not_hinder_a_continuation(train):
    folder = train(*CONSTANT, "train.max_steps=1", "run_id=a").ok().folder
    (folder / "status.json").write_text("")
    train(*CONSTANT, "train.max_steps=2", "run_id=a").ok()
    assert status(folder)["state"] == "done"
    assert status(folder)["step"] == 2


# ---- the lock

HOLD = """
import sys, threading
from pathlib import Path
from ddp_experiments.lock import Lock
Lock(Path(sys.argv[1]), "theirs").acquire()
print("held", flush=True)
threading.Event().wait()
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock of a folder until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def written(folder: Path, **changed: Any) -> None:
    """A lock as another start would have left it."""
    body = {"token": "theirs", "host": socket.gethostname(), "pid": os.getpid(), "counter": 3}
    body["started"] = _start_time(os.getpid())
    (folder / "lock").write_text(json.dumps(body | changed))


def taken(folder: Path, token: str = "mine") -> bool:
    lock = Lock(folder, token)
    lock.acquire()
    assert lock.is_mine()
    lock.release()
    return True


def test_a_live_run_is_refused_with_pid_and_host(train):
    folder = train(*MLP, "train.max_steps=1", "run_id=a").ok().folder
    before = status(folder)
    holder = hold(folder)
    try:
        result = train(*MLP, "train.max_steps=1", "run_id=a")
        assert result.exit_codes == [2]
        assert f"is being written by pid {holder.pid} on {socket.gethostname()}" in result.text
        assert "run_id=NAME" in result.text
        assert status(folder) == before
    finally:
        end(holder)
    train(*MLP, "train.max_steps=1", "run_id=a").ok()


def test_all_ranks_are_refused_by_a_live_run(train):
    folder = train(*MLP, "train.max_steps=1", "run_id=a").ok().folder
    holder = hold(folder)
    try:
        words = [*MLP, "train.max_steps=1", "run_id=a", "mode=multigpu"]
        assert train(*words, ranks=2).exit_codes == [2, 2]
    finally:
        end(holder)


def test_a_dead_process_loses_the_lock(tmp_path):
    end(hold(tmp_path))
    assert json.loads((tmp_path / "lock").read_text())["token"] == "theirs"
    assert taken(tmp_path)


def test_a_new_process_with_the_number_of_a_dead_one_does_not_hold_its_lock(tmp_path):
    written(tmp_path)
    with pytest.raises(Refused, match="is being written"):
        Lock(tmp_path, "mine").acquire()
    written(tmp_path, started="1")
    assert taken(tmp_path)


def test_the_same_start_takes_its_lock_over_from_a_live_process(tmp_path):
    holder = hold(tmp_path)
    try:
        assert taken(tmp_path, "theirs")
    finally:
        end(holder)


def test_a_lock_of_another_host_that_stands_still_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_experiments.lock.FOREIGN_SECONDS", 0.5)
    written(tmp_path, host="elsewhere", pid=1)
    began = time.monotonic()
    assert taken(tmp_path)
    assert time.monotonic() - began >= 0.5


def test_a_lock_of_another_host_that_counts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_experiments.lock.FOREIGN_SECONDS", 20.0)
    written(tmp_path, host="elsewhere", pid=17)
    threading.Timer(0.3, lambda: written(tmp_path, host="elsewhere", pid=17, counter=4)).start()
    began = time.monotonic()
    with pytest.raises(Refused, match="is being written by pid 17 on elsewhere"):
        Lock(tmp_path, "mine").acquire()
    assert time.monotonic() - began < 10
    assert json.loads((tmp_path / "lock").read_text())["token"] == "theirs"


def test_a_lock_counts_and_tells_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("ddp_experiments.lock.BEAT_SECONDS", 0.02)
    lock = Lock(tmp_path, "mine")
    lock.acquire()
    deadline = time.monotonic() + 10
    while json.loads((tmp_path / "lock").read_text() or "{}").get("counter", 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lock.is_mine()
    written(tmp_path)
    assert not lock.is_mine()
    lock.release()
    assert json.loads((tmp_path / "lock").read_text())["token"] == "theirs"  # left as it is


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_lock_is_taken(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    assert taken(tmp_path)


def test_a_run_that_was_taken_over_saves_nothing_more(train, tmp_path):
    words = [
        *MLP,
        "task._target_=tests.test_identity.Robbed",
        "train.max_steps=2",
        "checkpoint.every_steps=1",
    ]
    result = train(*words, "run_id=a", env={"TEST_LOCK": str(tmp_path / "outputs/digits_mlp/a/lock")})
    assert result.exit_codes == [1]
    assert "has been taken over by another start of the same run" in result.text.strip().splitlines()[-1]
    assert list((result.folder / "checkpoints").iterdir()) == []


# ---- continuing with other settings


def test_settings_that_are_free_change_without_a_word(train):
    folder = train(*CONSTANT, "train.max_steps=2", "run_id=a").ok().folder
    words = ["train.max_steps=4", "run_id=a", "train.accumulation_steps=2", "checkpoint.keep_last=1"]
    train(*CONSTANT, *words).ok()
    assert len(compare.losses(folder)) == 4
    assert "keep_last: 2" in (folder / "config.1.yaml").read_text()
    assert "keep_last: 1" in (folder / "config.yaml").read_text()


def test_a_setting_that_asks_needs_its_name_in_resume_allow(train):
    folder = train(*CONSTANT, "train.max_steps=2", "run_id=a").ok().folder
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    words = [*CONSTANT, "train.max_steps=4", "run_id=a", "optimizer.lr=0.125"]
    refused = train(*words)
    assert refused.exit_codes == [2]
    assert (
        "optimizer.lr: outputs/digits_mlp/a has 0.003, now 0.125; add 'resume.allow=[optimizer.lr]'"
        in refused.text
    )
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    train(*words, "resume.allow=[optimizer.lr]").ok()
    rates = [line["optim/lr"] for line in compare.points(folder) if "optim/lr" in line]
    assert rates == [0.003, 0.003, 0.125, 0.125]


def test_the_length_of_a_run_asks_where_the_schedule_depends_on_it(train):
    train(*MLP, "train.max_steps=2", "run_id=a").ok()
    refused = train(*MLP, "train.max_steps=3", "run_id=a")
    assert refused.exit_codes == [2]
    assert "add 'resume.allow=[train.max_steps]'" in refused.text
    train(*MLP, "train.max_steps=3", "run_id=a", "resume.allow=[train]").ok()


FIXED = {
    "seed": ["seed=1"],
    "model.hidden": ["model.hidden=[32]"],
    "model._target_": ["model=mlp", "model._target_=tests.test_identity.Other"],
    "optimizer._target_": ["optimizer._target_=torch.optim.Adam"],
    "data.test_fraction": ["data.test_fraction=0.2"],
    "train.drop_last": ["train.drop_last=true"],
}


@pytest.mark.parametrize("key", FIXED)
def test_a_setting_that_is_fixed_stays(train, key):
    train(*CONSTANT, "train.max_steps=1", "run_id=a").ok()
    refused = train(*CONSTANT, "train.max_steps=2", "run_id=a", f"resume.allow=[{key}]", *FIXED[key])
    assert refused.exit_codes == [2]
    assert f"{key}: outputs/digits_mlp/a has " in refused.text
    assert "it is fixed for a run: leave it, or start a new run" in refused.text


def test_every_difference_is_listed(train):
    train(*CONSTANT, "train.max_steps=1", "run_id=a").ok()
    refused = train(
        *CONSTANT, "train.max_steps=2", "run_id=a", "seed=1", "optimizer.lr=1", "model.dropout=0.5"
    )
    lines = [line for line in refused.text.splitlines() if line.startswith("  - ")]
    assert [line[4:].partition(":")[0] for line in lines] == ["seed", "model.dropout", "optimizer.lr"]


def test_what_was_added_or_left_out_is_a_change():
    found = changes({"model": {"a": 1, "b": None}}, {"model": {"a": 1, "c": [2]}}, False)
    assert found == [("model.c", None, [2], "fixed")]


def test_settings_are_read_back_as_they_were_written(tmp_path):
    saved = {
        "name": "1e3",
        "lr": 1e-8,
        "word": "null",
        "yes": "on",
        "list": [1, "2"],
        "none": None,
        "big": 10**20,
    }
    identity._write_config(tmp_path, saved, keep=False)
    assert identity.load_config(tmp_path) == saved


# ---- where it came from


def test_every_start_is_written_down(train):
    words = [*CONSTANT, "run_id=a", "mode=multigpu"]
    folder = train(*words, "train.max_steps=1", ranks=2).ok().folder
    train(*CONSTANT, "run_id=a", "train.max_steps=2").ok()
    first, second = json.loads((folder / "provenance.json").read_text())
    assert (first["world_size"], second["world_size"]) == (2, 1)
    assert first["overrides"] == [*words, "train.max_steps=1"]
    assert first["command"].endswith("train.max_steps=1")
    assert {"torch", "hydra-core", "numpy", "tensorboard"} <= first["versions"].keys()
    assert first["host"] == socket.gethostname()
    assert first["device"] == "cpu"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", first["python"])


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """The package as if it lay in a repository of its own."""

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "code.py").write_text("one = 1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "code.py"))
    return tmp_path


def start_of(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    run = identity.Run(folder, writer=True, continued=False, lock=None)
    return identity.record_start(run, identity.Origin({}), {})


def test_uncommitted_changes_are_kept_as_a_patch_a_start(repository):
    clean = start_of(repository / "run")
    assert re.fullmatch(r"[0-9a-f]{40}", clean["git_commit"])
    assert not clean["git_dirty"]
    (repository / "code.py").write_text("one = 2\n")
    assert start_of(repository / "run")["git_dirty"]
    assert [p.name for p in sorted((repository / "run").glob("git*"))] == ["git.2.patch"]
    assert "-one = 1\n+one = 2\n" in (repository / "run/git.2.patch").read_text()


def test_a_large_patch_is_cut_and_says_so(repository):
    (repository / "code.py").write_text("x = 1\n" * 400_000)
    start_of(repository / "run")
    patch = (repository / "run/git.1.patch").read_bytes()
    assert len(patch) < identity.PATCH_BYTES + 100
    assert re.search(rb"\n# cut: the patch has \d+ bytes\n$", patch)


@pytest.mark.parametrize("lack", ["git", "repository"])
def test_without_git_a_run_is_recorded_all_the_same(tmp_path, monkeypatch, lack):
    if lack == "git":
        monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(identity, "__file__", str(tmp_path / "code.py"))
    start = start_of(tmp_path / "run")
    assert (start["git_commit"], start["git_dirty"]) == (None, False)
    assert list((tmp_path / "run").glob("*.patch")) == []


SECRET = "hunter2-0123456789"
PLACES = {
    "an argument": ["+model.note=${oc.env:TEST_SECRET}"],
    "in a text": ["+model.note=sftp://me:${oc.env:TEST_SECRET}@host"],
    "in a list": ["+model.note=[a,'${oc.env:TEST_SECRET}']"],
    "by another setting": ["+data.note=${oc.env:TEST_SECRET}", "+model.note=${data.note}"],
}


@pytest.mark.parametrize("place", PLACES)
def test_values_of_the_environment_are_in_no_file_of_a_run(train, tmp_path, place):
    words = [
        *MLP,
        "model=mlp",
        "model._target_=tests.test_identity.Other",
        "data=digits",
        "data._target_=tests.test_identity.noted_digits",
    ]
    result = train(*words, "train.max_steps=1", *PLACES[place], env={"TEST_SECRET": SECRET}).ok()
    assert result.folder.is_dir()
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 8
    assert [p.name for p in files if SECRET.encode() in p.read_bytes()] == []
    assert "oc.env:TEST_SECRET" in (result.folder / "config.yaml").read_text()


# ---- storage that not all machines see


@pytest.mark.parametrize("continued", [False, True])
def test_folder_that_one_rank_does_not_see_is_refused_on_all_and_left_as_it_was(
    tmp_path, monkeypatch, continued
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(identity, "SHARED_SECONDS", 0.5)
    folder = tmp_path / "outputs" / "x" / "y"
    if continued:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("name: x\n")
    before = sorted(tmp_path.rglob("*"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    mode = Mode(
        name=ModeName.multigpu, nnodes=1, nproc_per_node="auto", init_timeout_seconds=20, timeout_seconds=5
    )
    refusals = {}

    def rank_0(meeting):
        config = Config(name="x", run_id="y")
        with identity.claim(config, identity.Origin({"name": "x"}), meeting, rank=0, horizon=False):
            pass

    def rank_1(meeting):
        meeting.once("token", str)
        meeting.rank0_decides("run", dict)
        run = identity.Run(folder, False, continued, None)
        identity._check_shared(run, "what the lock on its own disk doesn't say", meeting, 1)

    def start(rank, work):
        variables = launcher_variables(rank, 2, store.port)
        try:
            work(Meeting(environment.read(variables), mode))
        except Refused as refusal:
            refusals[rank] = refusal.faults

    threads = [threading.Thread(target=start, args=(r, w)) for r, w in enumerate((rank_0, rank_1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fault = (
        f"rank 1 on {socket.gethostname()}: {folder} of rank 0 isn't there; start all ranks where outputs/ "
        "is on storage that all machines share, at the same path"
    )
    assert refusals == {0: (fault,), 1: (fault,)}
    assert [p for p in sorted(tmp_path.rglob("*")) if p.name != "lock"] == before
