"""Event files: written at once, whole records only, read with each step once."""

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_experiments import events
from ddp_experiments.events import Appender, EventWriter, read_scalars
from tests.disk import fill, free, mounted, root_only


def unexpected(error: OSError) -> None:
    raise AssertionError("a write failed") from error


def points(folder: Path, first: int, last: int, value: float) -> None:
    """A start that writes the steps from first to last."""
    writer = EventWriter(folder, unexpected, first_step=first)
    for step in range(first, last + 1):
        writer.scalars({"train/loss": value, "optim/lr": value / 2}, step)
    writer.close()


def accumulated(folder: Path) -> EventAccumulator:
    """TensorBoard's own reader, without leaving out points."""
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


# ---- appending


def test_a_record_is_in_the_file_when_write_returns(tmp_path):
    appender = Appender(tmp_path / "a", unexpected)
    appender.write(b"one\n")
    assert (tmp_path / "a").read_bytes() == b"one\n"
    appender.close()


def test_records_follow_what_is_there(tmp_path):
    (tmp_path / "a").write_bytes(b"one\n")
    appender = Appender(tmp_path / "a", unexpected)
    appender.write(b"two\n")
    appender.close()
    assert (tmp_path / "a").read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize(
    ("before", "after"), [(b"", b"new\n"), (b"old\n", b"old\nnew\n"), (b"old\nha", b"old\nha\nnew\n")]
)
def test_a_half_line_is_ended_before_the_next(tmp_path, before, after):
    (tmp_path / "a").write_bytes(before)
    appender = Appender(tmp_path / "a", unexpected)
    appender.finish_line()
    appender.write(b"new\n")
    appender.close()
    assert (tmp_path / "a").read_bytes() == after


@root_only
def test_a_full_disk_is_said_once_and_its_records_follow_when_there_is_room(tmp_path):
    said: list[OSError] = []
    with mounted(tmp_path / "disk", "size=64k") as disk:
        appender = Appender(disk / "a", said.append)
        records = [f"{i:05d}".encode() * 1000 for i in range(6)]
        appender.write(records[0])
        fill(disk)
        for record in records[1:4]:
            appender.write(record)
        assert [e.errno for e in said] == [28]
        assert (disk / "a").read_bytes() == records[0]  # no half record
        free(disk)
        appender.write(records[4])
        assert (disk / "a").read_bytes() == b"".join(records[:5])
        fill(disk)
        appender.write(records[5])
        assert len(said) == 2  # another series
        free(disk)
        appender.close()
        assert (disk / "a").read_bytes() == b"".join(records)


@root_only
def test_a_disk_that_stays_full_costs_the_oldest_records_not_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "PENDING", 3)
    with mounted(tmp_path / "disk", "size=64k") as disk:
        appender = Appender(disk / "a", lambda _: None)
        fill(disk)
        for i in range(10):
            appender.write(f"{i}\n".encode())
        free(disk)
        appender.close()
        assert (disk / "a").read_bytes() == b"6\n7\n8\n9\n"


# ---- event files


def test_points_are_on_disk_before_the_file_is_closed(tmp_path):
    writer = EventWriter(tmp_path, unexpected, first_step=1)
    for step in range(1, 201):
        writer.scalars({"train/loss": step / 2}, step)
    assert read_scalars(tmp_path) == {"train/loss": {step: step / 2 for step in range(1, 201)}}
    writer.close()


def test_a_later_start_replaces_the_points_from_its_first_step_on(tmp_path):
    points(tmp_path, 1, 5, 1.0)
    points(tmp_path, 4, 6, 2.0)
    want = [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]
    assert len(list(tmp_path.iterdir())) == 2
    assert sorted(read_scalars(tmp_path)["train/loss"].items()) == want
    assert read_scalars(tmp_path)["optim/lr"] == {step: value / 2 for step, value in want}
    assert [(e.step, e.value) for e in accumulated(tmp_path).Scalars("train/loss")] == want


def test_a_later_start_that_got_less_far_leaves_no_old_points_behind(tmp_path):
    points(tmp_path, 1, 9, 1.0)
    points(tmp_path, 3, 4, 2.0)
    assert read_scalars(tmp_path)["train/loss"] == {1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}
    assert [e.step for e in accumulated(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4]


def test_starts_of_the_same_second_and_of_a_clock_that_was_set_back_stay_in_order(tmp_path):
    (tmp_path / "events.out.tfevents.9999999990.host.1").write_bytes(b"")
    for value in (1.0, 2.0, 3.0):
        points(tmp_path, 1, 2, value)
    assert len(list(tmp_path.iterdir())) == 4
    assert read_scalars(tmp_path)["train/loss"] == {1: 3.0, 2: 3.0}


def test_a_half_record_of_a_killed_start_is_left_out(tmp_path):
    points(tmp_path, 1, 5, 1.0)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size - 3)
    assert list(read_scalars(tmp_path)["train/loss"]) == [1, 2, 3, 4]
    points(tmp_path, 5, 6, 2.0)
    assert list(read_scalars(tmp_path)["train/loss"]) == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in accumulated(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("value", "read"), [("nan", "nan"), ("inf", "inf"), ("-0.0", "-0.0"), ("1e300", "inf"), ("0.5", "0.5")]
)
def test_odd_numbers_are_written_and_read(tmp_path, value, read):
    writer = EventWriter(tmp_path, unexpected, first_step=1)
    writer.scalars({"train/loss": float(value)}, 1)
    writer.close()
    assert repr(read_scalars(tmp_path)["train/loss"][1]) == read
    assert repr(accumulated(tmp_path).Scalars("train/loss")[0].value) == read
