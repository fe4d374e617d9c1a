"""Ranks meet, agree, and leave."""

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed as dist

from ddp_experiments.config import Backend, Mode, ModeName
from ddp_experiments.environment import Environment
from ddp_experiments.errors import NoUsableCheckpoint, PeerFailed, Refused
from ddp_experiments.meeting import Meeting
from ddp_experiments.world import choose_device, choose_threads, device_faults, join
from tests import compare
from tests.ranks import Result, loopback_store


def mode(**changes: object) -> Mode:
    return Mode(**{"name": ModeName.single, "nnodes": 1, "nproc_per_node": 1, **changes})  # type: ignore[arg-type]


@pytest.fixture
def store() -> dist.Store:
    return loopback_store()


def environment(rank: int, world_size: int, port: int) -> Environment:
    return Environment(
        launched=True,
        rank=rank,
        local_rank=rank,
        world_size=world_size,
        local_world_size=world_size,
        master_addr="127.0.0.1",
        master_port=port,
        agent_store=True,
    )


def meet(store: dist.Store, world_size: int, seconds: int = 20) -> list[Meeting]:
    """All ranks of a start, each in a thread."""
    found: list[Meeting | None] = [None] * world_size

    def one(rank: int) -> None:
        found[rank] = Meeting(environment(rank, world_size, store.port), mode(init_timeout_seconds=seconds))

    threads = [threading.Thread(target=one, args=(r,)) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for meeting in filter(None, found):
        meeting.close()  # no thread that looks out for failures outlives a test
    return [m for m in found if m is not None]


def all_ranks(meetings: list[Meeting], ask: Callable[[Meeting], object]) -> list[object]:
    """What each rank gets or raises."""
    answers: list[object] = [None] * len(meetings)

    def one(i: int) -> None:
        try:
            answers[i] = ask(meetings[i])
        except Exception as error:
            answers[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(meetings))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_a_decision_of_an_earlier_start_is_not_read_by_a_later_one(store: dist.Store) -> None:
    for answer in ("first", "second", "third"):
        meetings = meet(store, 3)
        assert all_ranks(meetings, lambda m, a=answer: m.rank0_decides("run", lambda: a)) == [answer] * 3


def test_what_is_made_once_stays_over_restarts_of_the_workers(store: dist.Store) -> None:
    found = {
        str(value)
        for name in ("first", "second")
        for value in all_ranks(meet(store, 2), lambda m, n=name: m.once("token", lambda: n))
    }
    assert found == {"first"}


@pytest.mark.parametrize("error", [Refused("no", "never"), NoUsableCheckpoint("all damaged")])
def test_a_refusal_of_rank_0_is_raised_on_all_ranks(store: dist.Store, error: Exception) -> None:
    def decide() -> None:
        raise error

    answers = all_ranks(meet(store, 3), lambda m: m.rank0_decides("run", decide))
    assert [type(a) for a in answers] == [type(error)] * 3
    assert {str(a) for a in answers} == {str(error)}


def test_every_rank_hears_what_all_say(store: dist.Store) -> None:
    for start in range(3):  # no start hears an earlier one
        meetings = meet(store, 3)
        answers = all_ranks(
            meetings, lambda m, s=start: m.all_say("who", {"rank": m.environment.rank, "start": s})
        )
        assert answers == [[{"rank": rank, "start": start} for rank in range(3)]] * 3
        assert all_ranks(meetings, lambda m: m.all_say("nothing", None)) == [[None] * 3] * 3
    assert Meeting(Environment(), mode()).all_say("first", 1) == [1]


def test_ranks_that_say_nothing_are_named(store: dist.Store) -> None:
    meetings = meet(store, 4)
    for meeting in meetings:
        meeting.timeout = timedelta(seconds=1 if meeting.environment.rank == 0 else 20)
    silent = (1, 3)

    def say(meeting: Meeting) -> object:
        try:
            return meeting.environment.rank in silent or meeting.all_say("key", 0)
        except RuntimeError as error:
            meeting.settle(error)
            raise

    answers = all_ranks(meetings, say)
    line = "rank 0 waited 1 s for rank 1, 3 of 4: start all"
    assert str(answers[0]).startswith(line), answers
    assert isinstance(answers[2], PeerFailed) and line in str(answers[2]), answers


def test_a_missing_rank_is_named_within_the_deadline(store: dist.Store) -> None:
    with pytest.raises(RuntimeError, match=r"waited 1 s for rank 1 of 2.*mode\.init_timeout_seconds"):
        Meeting(environment(0, 2, store.port), mode(init_timeout_seconds=1))


def test_a_missing_rank_0_is_named_by_the_others(store: dist.Store) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 waited 1 s for rank 0 of 2"):
        Meeting(environment(1, 2, store.port), mode(init_timeout_seconds=1))


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        here = replace(environment(0, 2, port), agent_store=False)  # no torchrun: rank 0 hosts the store
        with pytest.raises(
            Refused, match=f"port {port}, MASTER_PORT, is taken by another program; set another"
        ):
            Meeting(here, mode(init_timeout_seconds=5))


def test_a_launcher_that_does_not_answer_is_named_with_what_to_try() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RuntimeError) as error:
        Meeting(environment(1, 2, port), mode(init_timeout_seconds=1))
    said = str(error.value)
    assert said.startswith(
        f"rank 1 on {socket.gethostname()} can't reach the launcher's store at MASTER_ADDR="
    )
    assert f"127.0.0.1, port {port}: 127.0.0.1 doesn't answer (" in said and "--local-addr" in said, said
    assert "\n" not in said


def test_one_process_joins_without_a_group() -> None:
    with join(mode(threads=1), Environment(), Meeting(Environment(), mode())) as world:
        assert (world.rank, world.world_size, world.backend) == (0, 1, None)
        assert not dist.is_initialized()
        value = torch.ones(2)
        world.all_reduce_sum(value)
        assert value.tolist() == [1, 1]


def test_threads_are_the_cores_shared_among_local_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_experiments.world.available_cores", lambda: 8)
    assert [choose_threads(mode(), Environment(local_world_size=n)) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert choose_threads(mode(threads=5), Environment(local_world_size=2)) == 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA says")
@pytest.mark.parametrize(
    ("changes", "ranks", "fault"),
    [
        ({}, 4, None),
        ({"device": "cpu"}, 4, None),
        ({"device": "cuda"}, 1, "no CUDA device"),
        ({"device": "cuda:1"}, 1, "no CUDA device"),
        ({"device": "mps"}, 1, "has none"),
        ({"backend": Backend.nccl}, 2, "nccl needs CUDA"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    changes: dict[str, object], ranks: int, fault: str | None
) -> None:
    found = list(device_faults(mode(**changes), Environment(world_size=ranks, local_world_size=ranks)))
    assert (found == []) if fault is None else (fault in found[0])


def test_more_local_ranks_than_devices_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (fault,) = device_faults(mode(device="cuda"), Environment(world_size=4, local_world_size=4))
    assert "4 processes" in fault
    assert "2 CUDA" in fault
    assert list(device_faults(mode(device="cpu"), Environment(world_size=4, local_world_size=4))) == []
    assert choose_device(mode(device="cuda"), Environment(local_rank=1)).index == 1
    assert choose_device(mode(device="cuda:1"), Environment()).index == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_cuda_continues_bit_for_bit(train: Callable[..., Result]) -> None:
    words = ("experiment=digits_cnn", "model.dropout=0.1", "train.max_epochs=null", "train.max_steps=8")
    faulty = "scheduler._target_=tests.probes.FaultyCosine"
    whole = train(*words, faulty, "run_id=whole", "log.every_steps=1").ok().folder
    cut = train(*words, faulty, "run_id=cut", "log.every_steps=1", env={"TEST_FAULT": "SIGTERM@4"}).folder
    train(*words, faulty, "run_id=cut", "log.every_steps=1").ok()
    compare.assert_bitwise_equal(whole, cut)


@pytest.mark.slow
def test_workers_that_torchrun_starts_again_go_on_in_the_same_folder(
    start: Callable[..., CompletedProcess[str]], train: Callable[..., Result], tmp_path: Path
) -> None:
    words = (
        "mode=multigpu",
        "experiment=digits_mlp",
        "train.max_epochs=null",
        "train.max_steps=12",
        "checkpoint.every_steps=2",
        "log.every_steps=1",
        "mode.threads=1",
        "scheduler._target_=tests.probes.FaultyCosine",
    )
    environment = {"TEST_FAULT": "SIGKILL@7:1", "TEST_FAULT_ONCE": str(tmp_path / "done")}
    command = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--max_restarts=1", "train.py", *words)
    done = start(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").exists()
    (folder,) = {p.parent for p in tmp_path.glob("outputs/**/config.yaml")}
    assert "continuing after step" in (folder / "train.log").read_text()
    assert len(json.loads((folder / "provenance.json").read_text())) == 2
    whole = train(*words, ranks=2).ok().folder
    compare.assert_bitwise_equal(folder, whole)
