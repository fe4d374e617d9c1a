"""`python train.py mode=multigpu`: the program starts its ranks by itself, and none outlives it."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import pytest

from ddp_experiments import workers as workers_room
from tests import compare
from tests.conftest import heed_signals
from tests.ranks import LAUNCHER, ROOT, Result
from tests.torchruns import free_port

MLP = ("experiment=digits_mlp", "train.max_epochs=null", "train.max_steps=8", "log.every_steps=1")
TWO = ("mode=multigpu", "mode.nproc_per_node=2")
FAULTY = (*MLP, *TWO, "scheduler._target_=tests.probes.FaultyCosine", "checkpoint.every_steps=2")
LONG = [w for w in FAULTY if "max_steps" not in w and "every_steps" not in w] + ["train.max_steps=1000000"]
Start = Callable[..., subprocess.CompletedProcess[str]]
Train = Callable[..., Result]
Background = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


def workers(of: Path) -> list[int]:
    """Processes that still work in a folder, or were started from it: ranks and loaders alike."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            at = (entry / "cwd").readlink()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if at == of and b"ddp_experiments.worker" in command:
            found.append(int(entry.name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Five seconds after any test here no process of it runs."""
    yield
    end = time.monotonic() + 5
    while workers(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    left = workers(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


# ---- the same experiment


def test_own_workers_torchrun_and_one_process_show_the_same_curve(
    start: Start, train: Train, tmp_path: Path
) -> None:
    words = (*MLP, "train.precision=fp64")
    folders = []
    for ranks, mode in ((0, TWO), (2, ("mode=multigpu",))):
        done = start("train.py", *words, *mode, f"run_id=by{ranks}", torchrun=ranks)
        assert done.returncode == 0, done.stderr
        folders.append(tmp_path / f"outputs/digits_mlp/by{ranks}")
    own, torchrun = folders
    compare.assert_bitwise_equal(own, torchrun)  # threads are ours to set, whoever starts the ranks
    alone = train(*words, "mode=single").ok().folder
    assert compare.losses(own) == pytest.approx(compare.losses(alone), rel=1e-9)
    assert compare.largest_difference(compare.weights(own), compare.weights(alone)) < 1e-9
    assert sorted(p.name for p in own.glob("*.log")) == ["rank1.log", "train.log"]


@pytest.mark.slow
def test_without_an_accelerator_it_is_two_processes_and_said(train: Train) -> None:
    result = train(*MLP, "mode=multigpu", "mode.device=cpu").ok()
    assert "no accelerator here: 2 CPU processes (mode.nproc_per_node=auto)" in result.text
    start = json.loads((result.folder / "provenance.json").read_text())[0]
    assert start["world_size"] == 2
    assert start["overrides"][-1] == "mode.device=cpu" and "train.py" in start["command"]


@pytest.mark.slow
def test_workers_see_the_environment_not_what_it_was_written_down_as(train: Train) -> None:
    result = train(*MLP, *TWO, "name='n${oc.env:TEST_NAME}'", env={"TEST_NAME": "secret"}).ok()
    assert result.folder.parent.name == "nsecret"
    assert "name: n${oc.env:TEST_NAME}" in (result.folder / "config.yaml").read_text()


# ---- failing


def test_a_rank_that_fails_is_told_once_with_the_line_to_go_on(train: Train) -> None:
    result = train(*FAULTY, env={"TEST_FAULT": "raise@5:1"})
    assert result.exit_codes == [1]
    assert result.text.count("Traceback (most recent call last)") == 1
    last = result.text.strip().splitlines()[-1]
    assert last.startswith(
        f"RuntimeError on rank 1, {socket.gethostname()}, step 4: injected; last checkpoint "
    )
    assert "go on with: python train.py --continue outputs/digits_mlp/" in last
    log = (result.folder / "rank1.log").read_text()
    assert "RuntimeError: injected" in log
    assert json.loads((result.folder / "status.json").read_text())["state"] == "failed"


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_signal(train: Train) -> None:
    result = train(*FAULTY, env={"TEST_FAULT": "SIGKILL@8:1"})
    assert result.exit_codes == [1]
    last = result.text.strip().splitlines()[-1]
    assert last.startswith(
        f"rank 1 on {socket.gethostname()} was ended by SIGKILL, often for want of memory; "
    )
    assert "last checkpoint outputs/" in last and "go on with: python train.py --continue outputs/" in last
    assert "Traceback" not in result.text


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("die@0:1", "ended with exit code 5"),
        pytest.param("SIGKILL@0:1", "was ended by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_before_the_group_exists_is_named(fault: str, said: str, train: Train) -> None:
    result = train(*FAULTY, "data._target_=tests.probes.sound", env={"TEST_FAULT": fault})
    assert result.exit_codes == [1]
    assert f"rank 1 on {socket.gethostname()} {said}" in result.text.strip().splitlines()[-1]


def test_an_error_that_speaks_of_time_is_not_taken_for_the_networks(train: Train) -> None:
    result = train(
        *MLP,
        "mode=multigpu",
        "scheduler._target_=tests.probes.FaultyCosine",
        ranks=2,
        env={"TEST_FAULT": "timeout@5:1"},
    )
    assert result.exit_codes == [1, 1]
    assert "TimeoutError on rank 1" in result.texts[1] and "a store of objects" in result.texts[1]
    assert "did not come" not in result.text


@pytest.mark.slow
def test_sys_exit_in_a_run_is_a_failure(train: Train) -> None:
    result = train(*FAULTY, env={"TEST_FAULT": "exit@5:1"})
    assert result.exit_codes == [1]
    assert "something called sys.exit(7) in the run" in result.text.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_with_phase_and_step(start: Start) -> None:
    before = time.monotonic()
    done = start(
        "train.py",
        *FAULTY,
        "mode.timeout_seconds=4",
        env={"TEST_FAULT": "sleep60@5:1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 1
    (line,) = [text for text in done.stderr.splitlines() if "did not come or is gone" in text]
    assert re.search(r"rank 0, \S+, step 5: rank 1 did not come or is gone; rank 0 waited in train", line)
    assert "[rank 1] this rank did not come; it was here:" in done.stderr
    assert "time.sleep(float(kind[5:]))" in done.stderr
    assert time.monotonic() - before < 50


@pytest.mark.slow
def test_exit_codes_of_the_workers_are_those_of_the_program(train: Train) -> None:
    run = train(*FAULTY, "run_id=x").ok().folder
    other = train(*FAULTY, "run_id=x", "seed=7")
    assert other.exit_codes == [2] and other.text.count("Refused before anything was started") == 1
    assert "seed: outputs/digits_mlp/x has 0, now 7" in other.text
    for file in run.glob("checkpoints/step-*/model*.safetensors"):
        file.write_bytes(b"damaged")
    damaged = train(*FAULTY, "run_id=x", "log.tensorboard=false")
    assert damaged.exit_codes == [3], damaged.text


@pytest.mark.slow
def test_a_failed_worker_is_started_again_if_asked_and_continues(train: Train, tmp_path: Path) -> None:
    env = {"TEST_FAULT": "SIGKILL@6:1", "TEST_FAULT_ONCE": str(tmp_path / "once")}
    result = train(*FAULTY, "mode.max_restarts=1", env=env).ok()
    assert (tmp_path / "once").exists()
    assert re.search(r"continuing after step [24]", result.text)
    undisturbed = train(*FAULTY).ok().folder
    assert compare.largest_difference(compare.weights(result.folder), compare.weights(undisturbed)) == 0


@pytest.mark.slow
def test_a_refusal_is_not_started_again(train: Train) -> None:
    train(*FAULTY, "run_id=x").ok()
    other = train(*FAULTY, "run_id=x", "seed=7", "mode.max_restarts=3")
    assert other.exit_codes == [2] and other.text.count("Refused before anything was started") == 1


# ---- signals


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [
        (signal.SIGTERM, 143, "preempted"),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 143, "preempted", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 143, "preempted", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_ends_all_with_its_exit_code(
    number: signal.Signals,
    code: int,
    state: str,
    background: Background,
    wait_for: Callable[..., None],
    tmp_path: Path,
) -> None:
    with background(*LONG, "train.num_workers=1", "run_id=x") as process:
        folder = tmp_path / "outputs/digits_mlp/x"
        wait_for(lambda: compare.trains(folder))
        process.send_signal(number)
        assert process.wait(timeout=30) == code
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == state
    assert (folder / f"checkpoints/step-{status['step']}").exists()
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"ddp_experiments-*/{process.pid}"))


@pytest.mark.slow
def test_a_second_sigterm_does_not_hinder_the_save(
    background: Background, wait_for: Callable[..., None], tmp_path: Path
) -> None:
    with background(*LONG, "run_id=x") as process:
        folder = tmp_path / "outputs/digits_mlp/x"
        wait_for(lambda: compare.trains(folder))
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        assert process.wait(timeout=30) == 143
    assert json.loads((folder / "status.json").read_text())["state"] == "preempted"


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with workers_room._forwarded_signals(str(tmp_path)):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_outlives_a_parent_that_is_killed(
    background: Background, wait_for: Callable[..., None], tmp_path: Path
) -> None:
    noisy = ("data._target_=tests.probes.indexed", "data.noisy=true", "task._target_=tests.probes.Recording")
    words = ("experiment=none", *noisy, "model=mlp", "model.out_features=1", "train.num_workers=2", *LONG[1:])
    with background(*words, "run_id=x", "checkpoint.metric=loss") as process:
        wait_for(lambda: list(tmp_path.glob("outputs/*/x/metrics.jsonl")) and len(workers(tmp_path)) >= 4)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        end = time.monotonic() + 5
        while workers(tmp_path):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize("presses", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_in_a_terminal(presses: int, tmp_path: Path) -> None:
    """A real terminal sends the signal to its foreground process group only, which the workers aren't in."""
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER} | {"PYTHONPATH": str(ROOT)}
    pid, terminal = pty.fork()
    if pid == 0:
        heed_signals()
        os.chdir(tmp_path)
        os.execve(
            sys.executable,
            [sys.executable, str(ROOT / "train.py"), *LONG, "run_id=x", "log.progress=false"],
            environment,
        )
    shown, pressed, status, end = b"", 0, 0, time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if select.select([terminal], [], [], 0.05)[0]:
                with suppress(OSError):  # the other side is closed
                    shown += os.read(terminal, 4096)
            if pressed < presses and b"step 20/" in shown:
                os.write(terminal, b"\x03")
                pressed += 1
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
        assert os.waitstatus_to_exitcode(status) == 130, shown.decode()
    finally:
        os.close(terminal)
    assert b"Traceback" not in shown
    saved = json.loads((tmp_path / "outputs/digits_mlp/x/status.json").read_text())
    assert presses == 2 or saved["state"] == "interrupted"


# ---- the network


def listening(pids: list[int]) -> set[str]:
    """Addresses on which these processes listen, in the kernel's hexadecimal form."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith("socket:"):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                found.add(parts[1].partition(":")[0])
    return found


def test_on_one_machine_no_socket_listens_beyond_loopback(
    background: Background, wait_for: Callable[..., None], tmp_path: Path
) -> None:
    with background(*LONG, "run_id=x") as process:
        folder = tmp_path / "outputs/digits_mlp/x"
        wait_for(lambda: compare.trains(folder))
        found = listening([process.pid, *workers(tmp_path)])
    assert found and found <= {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}, found


# ---- several machines


def share(port: int, node_rank: int) -> list[str]:
    place = [f"mode.node_rank={node_rank}", f"mode.rdzv_endpoint=127.0.0.1:{port}"]
    return ["mode=multinode", "mode.nnodes=2", "mode.nproc_per_node=1", *place]


@pytest.mark.slow
def test_machines_start_their_shares_of_one_run_and_of_a_sweep(
    start: Start, background: Background, tmp_path: Path
) -> None:
    port = free_port()
    for more in ((), ("-m", "optimizer.lr=1e-3,1e-2", "run_id=s")):
        with background(*MLP, *share(port, 1), *more) as other:
            done = start("train.py", *MLP, *share(port, 0), *more)
            assert done.returncode == 0, done.stderr
            assert other.wait(timeout=30) == 0
    folders = [p.parent for p in tmp_path.glob("outputs/**/config.yaml")]
    assert len(folders) == 3
    assert all((f / "rank1.log").exists() and len(list(f.glob("events.*"))) == 1 for f in folders)
    assert len(list(tmp_path.glob("outputs/*/s/sweep.csv"))) == 1


@pytest.mark.slow
def test_machines_end_together_and_know_why(
    background: Background, wait_for: Callable[..., None], tmp_path: Path
) -> None:
    port, folder = free_port(), tmp_path / "outputs/digits_mlp/x"
    alone = [w for w in LONG if not w.startswith("mode")]
    with (
        background(*alone, *share(port, 1), "run_id=x") as other,
        background(*alone, *share(port, 0), "run_id=x") as first,
    ):
        wait_for(lambda: compare.trains(folder))
        first.send_signal(signal.SIGTERM)
        assert (first.wait(timeout=40), other.wait(timeout=40)) == (143, 143)
    assert json.loads((folder / "status.json").read_text())["state"] == "preempted"


@pytest.mark.slow
def test_a_sweep_over_machines_is_started_again_with_other_jobs(
    start: Start, background: Background, tmp_path: Path
) -> None:
    port = free_port()
    for seeds, runs in (("0", 1), ("5,0,6", 3)):
        more = ("-m", f"seed={seeds}", "run_id=s")
        with background(*MLP, *share(port, 1), *more) as other:
            time.sleep(2)  # the other one is earlier
            done = start("train.py", *MLP, *share(port, 0), *more)
            assert done.returncode == 0, done.stderr
            assert other.wait(timeout=30) == 0
        assert len(list(tmp_path.glob("outputs/*/s/*/config.yaml"))) == runs


@pytest.mark.parametrize("node_rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_missing_machine_is_told_in_time(node_rank: int, train: Train, tmp_path: Path) -> None:
    result = train(*MLP, *share(free_port(), node_rank), "mode.init_timeout_seconds=1")
    assert result.exit_codes == [1]
    assert "1 of 2 nodes came to 127.0.0.1:" in result.text
    assert f"within 1 s; missing: node_rank {1 - node_rank}. Start the same command there" in result.text
    assert list(tmp_path.glob("outputs/*")) == []


def test_a_taken_port_and_a_foreign_address_are_refused(train: Train) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = train(*MLP, *share(port, 0))
        assert result.exit_codes == [2] and f"port {port} of this machine is taken" in result.text
    words = [w.replace("127.0.0.1", "192.0.2.1") for w in share(1, 0)]
    result = train(*MLP, *words)
    assert result.exit_codes == [2] and "is no address of this machine" in result.text
