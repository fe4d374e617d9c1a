"""Checkpoints: tensor files, folders that are whole or not there, retention, damage, full disks."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from ddp_experiments.checkpoint import directories
from ddp_experiments.checkpoint.directories import Writer
from ddp_experiments.checkpoint.tensors import DTYPES, Stage, read, save
from ddp_experiments.errors import NoUsableCheckpoint
from ddp_experiments.tasks import Classification
from tests import compare
from tests.disk import mounted, root_only
from tests.ranks import ROOT

MLP = ["experiment=digits_mlp", "train.max_epochs=null", "mode.threads=1", "eval.every_epochs=null"]
BIG = ["model.hidden=[512,512]", "checkpoint.every_steps=2", "checkpoint.keep_last=9", "log.every_steps=1"]


def example() -> dict[str, Tensor]:
    """Every dtype, and shapes and layouts that are easy to get wrong."""
    numbers = torch.arange(24).view(4, 6)
    found = {f"dtype.{name}": numbers.to(dtype) for name, dtype in DTYPES.items()}
    return found | {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(3, 5).t(),
        "strided": torch.randn(8, 8)[::2, 1::3],
        "expanded": torch.randn(1, 4).expand(3, 4),
    }


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and a[k].contiguous().flatten().view(torch.uint8).equal(b[k].contiguous().flatten().view(torch.uint8))
        for k in a
    )


# ---- tensor files


def test_the_safetensors_library_reads_our_files_bit_for_bit(tmp_path):
    tensors = example()
    save(tensors, tmp_path / "ours.safetensors")
    assert same_bits(safetensors.torch.load_file(tmp_path / "ours.safetensors"), tensors)
    assert same_bits(read(tmp_path / "ours.safetensors"), tensors)


def test_we_read_files_of_the_safetensors_library_bit_for_bit(tmp_path):
    tensors = {k: t.contiguous() for k, t in example().items()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors")
    assert same_bits(read(tmp_path / "theirs.safetensors"), tensors)


def test_a_file_without_tensors_is_read_as_none(tmp_path):
    save({}, tmp_path / "none.safetensors")
    assert read(tmp_path / "none.safetensors") == {}
    assert safetensors.torch.load_file(tmp_path / "none.safetensors") == {}


def test_an_unaligned_file_is_read(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((5 - len(header)) % 8)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2.0))
    assert read(path)["x"].tolist() == [1.5, -2.0]
    assert read(path)["x"].data_ptr() % 4 == 0  # some machines can't take it otherwise


def test_what_is_read_can_be_changed_without_changing_the_file(tmp_path):
    save({"x": torch.ones(4)}, tmp_path / "x.safetensors")
    read(tmp_path / "x.safetensors")["x"].zero_()
    assert read(tmp_path / "x.safetensors")["x"].tolist() == [1.0] * 4


def test_a_dtype_that_the_format_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match=r"weight: torch\.complex128 can't be saved"):
        Stage({"weight": torch.zeros(1, dtype=torch.complex128)})


def with_header(entry: object) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        header = json.dumps(entry).encode()
        return struct.pack("<Q", len(header)) + header + bytes(16)

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "last byte cut": lambda b: b[:-1],
    "half": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "seven bytes": lambda b: b[:7],
    "header length 2^60": lambda b: struct.pack("<Q", 1 << 60) + b[8:],
    "header flipped": lambda b: b[:8] + bytes([b[8] ^ 0xFF]) + b[9:],
    "header a list": with_header([]),
    "header nested too deep": lambda b: struct.pack("<Q", 200_000) + b"[" * 200_000,
    "entry a number": with_header({"x": 1}),
    "offsets outside": with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [800, 808]}}),
    "offsets negative": with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
    "offsets backwards": with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}),
    "three offsets": with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 16]}}),
    "offsets of text": with_header({"x": {"dtype": "F32", "shape": [2], "data_offsets": "08"}}),
    "shape too large": with_header({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
    "shape a number": with_header({"x": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}),
    "shape negative": with_header({"x": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}),
    "shape beyond any memory": with_header(
        {"x": {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]}}
    ),
    "dtype too wide": with_header({"x": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}),
    "dtype unknown": with_header({"x": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_value_error_that_names_it(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    save({"x": torch.arange(64.0)}, path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read(path)


def test_a_tensor_outside_the_file_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(DAMAGES["offsets outside"](b""))
    with pytest.raises(ValueError, match="x lies outside the file"):
        read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        read(tmp_path / "model.safetensors")


# ---- folders


def writer(root: Path, *, keep_last: int = 2, is_mine: Callable[[], bool] = lambda: True) -> Writer:
    return Writer(root, keep_last=keep_last, is_writer=True, is_mine=is_mine)


def write(to: Writer, step: int, *, best: int | None = None) -> Path:
    """A checkpoint whose weights are its step."""
    verdict = None if best is None else {"step": best, "metric": "loss", "value": 0.5}
    to.save(step, {"model": {"weight": torch.full((100,), float(step))}}, {"state": {"step": step}}, verdict)
    to.wait()
    if to.error:
        raise to.error
    return to.root / f"step-{step}"


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_a_checkpoint_is_a_folder_whose_files_are_those_of_its_manifest(tmp_path):
    folder = write(writer(tmp_path), 3)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(manifest["files"]) == ["model-00000.safetensors", "state.json"]
    assert names(folder) == ["manifest.json", "model-00000.safetensors", "state.json"]
    assert directories.verify(folder)["state"] == {"step": 3}
    assert directories.tensors(folder, "model")["weight"].tolist() == [3.0] * 100
    assert directories.tensors(folder, "ema") == {}


def test_the_newest_and_the_best_are_kept(tmp_path):
    to = writer(tmp_path, keep_last=2)
    for step in range(1, 7):
        write(to, step, best=2 if step >= 2 else None)
    assert names(tmp_path) == ["best.json", "step-2", "step-5", "step-6"]
    assert directories.best(tmp_path) == tmp_path / "step-2"
    assert directories.newest(tmp_path) == tmp_path / "step-6"
    write(to, 7, best=7)
    assert names(tmp_path) == ["best.json", "step-6", "step-7"]


def test_steps_are_ordered_as_numbers(tmp_path):
    to = writer(tmp_path, keep_last=1)
    for step in (9, 10, 100):
        write(to, step)
    assert names(tmp_path) == ["step-100"]


def test_a_copy_is_written_whatever_the_weights_do_meanwhile(tmp_path):
    to, weight = writer(tmp_path), torch.ones(1_000_000)
    to.save(1, {"model": {"weight": weight}}, {}, None)
    weight.zero_()
    to.wait()
    assert directories.tensors(tmp_path / "step-1", "model")["weight"].eq(1).all()


def test_other_ranks_write_nothing(tmp_path):
    to = Writer(tmp_path / "checkpoints", keep_last=1, is_writer=False, is_mine=lambda: True)
    to.save(1, {"model": {"weight": torch.ones(1)}}, {}, None)
    to.wait()
    assert names(tmp_path) == []


def test_who_lost_the_lock_writes_nothing(tmp_path):
    write(writer(tmp_path), 1)
    with pytest.raises(RuntimeError, match="has been taken over by another start"):
        write(writer(tmp_path, is_mine=lambda: False), 2)
    assert names(tmp_path) == ["step-1"]


def flip(path: Path, at: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def rename_in_manifest(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"].pop("model-00000.safetensors")
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def link_away(folder: Path) -> None:
    path = folder / "model-00000.safetensors"
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def newer_format(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 7}
    (folder / "manifest.json").write_text(json.dumps(manifest))


FOLDER_DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of the weights": (lambda f: flip(f / "model-00000.safetensors"), "model-00000.*SHA-256"),
    "a bit of the header": (lambda f: flip(f / "model-00000.safetensors", 20), "model-00000.*SHA-256"),
    "weights cut": (lambda f: os.truncate(f / "model-00000.safetensors", 99), "model-00000.* has 99 bytes"),
    "weights missing": (lambda f: (f / "model-00000.safetensors").unlink(), "model-00000.safetensors"),
    "state empty": (lambda f: os.truncate(f / "state.json", 0), "state.json has 0 bytes"),
    "manifest missing": (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
    "manifest empty": (lambda f: os.truncate(f / "manifest.json", 0), "manifest.json is damaged"),
    "manifest a list": (
        lambda f: f.joinpath("manifest.json").write_text("[]") and None,
        "manifest.json is damaged",
    ),
    "a file of another folder": (rename_in_manifest("../step-1/model-00000.safetensors"), "no plain file"),
    "an absolute path": (rename_in_manifest("/etc/hostname"), "no plain file"),
    "a link": (link_away, "no plain file"),
    "a newer format": (newer_format, "has checkpoint format 7, this version reads 1"),
}


@pytest.mark.parametrize("damage", FOLDER_DAMAGES)
def test_a_damaged_checkpoint_is_skipped_by_name_and_the_one_before_is_taken(tmp_path, caplog, damage):
    to = writer(tmp_path)
    write(to, 1)
    spoil, reason = FOLDER_DAMAGES[damage]
    spoil(write(to, 2))
    with pytest.raises((ValueError, OSError), match=reason):
        directories.verify(tmp_path / "step-2")
    caplog.set_level("WARNING", "ddp_experiments")
    assert directories.newest(tmp_path) == tmp_path / "step-1"
    assert "step-2" in caplog.text
    assert "taking step-1" in caplog.text


def test_files_that_the_manifest_lacks_are_not_read(tmp_path):
    folder = write(writer(tmp_path), 1)
    save({"other": torch.ones(1)}, folder / "model-00001.safetensors")
    assert list(directories.tensors(folder, "model")) == ["weight"]


def test_a_state_that_the_manifest_lacks_is_not_read(tmp_path):
    folder = write(writer(tmp_path), 1)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["state.json"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"doesn't name state\.json"):
        directories.verify(folder)


def test_if_all_are_damaged_every_reason_is_given(tmp_path):
    to = writer(tmp_path)
    for step in (1, 2):
        flip(write(to, step) / "state.json")
    with pytest.raises(NoUsableCheckpoint, match=r"step-2: .*SHA-256.*step-1: .*SHA-256"):
        directories.newest(tmp_path)


def test_retention_after_a_damaged_checkpoint_keeps_the_sound_ones(tmp_path):
    to = writer(tmp_path, keep_last=1)
    write(to, 10)
    shutil.copytree(tmp_path / "step-10", tmp_path / "step-20")
    flip(tmp_path / "step-20" / "state.json")
    assert write(writer(tmp_path, keep_last=1), 12).exists()
    assert directories.newest(tmp_path) == tmp_path / "step-12"
    write(to, 20)  # replaces the damaged one
    assert names(tmp_path) == ["step-20"]
    directories.verify(tmp_path / "step-20")


KILLED = """
import sys, torch
from pathlib import Path
from ddp_experiments.checkpoint.directories import Writer
to = Writer(Path(sys.argv[1]), keep_last=3, is_writer=True, is_mine=lambda: True)
print("ready", flush=True)
for step in range(1, 1000):
    weight = torch.full((2_000_000,), float(step))
    to.save(step, {"model": {"weight": weight}}, {"state": {"step": step}}, None)
"""


@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.09, 0.15])
def test_a_kill_leaves_whole_checkpoints_and_what_the_next_start_sweeps(tmp_path, seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("step-?")) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(seconds)
    process.kill()
    process.wait()
    process.stdout.close()
    whole = [folder for _, folder in directories.steps(tmp_path)]
    assert whole
    for folder in whole:
        step = directories.verify(folder)["state"]["step"]
        assert directories.tensors(folder, "model")["weight"].eq(step).all()
    writer(tmp_path)
    assert names(tmp_path) == sorted(folder.name for folder in whole)


def test_what_a_killed_start_left_is_swept(tmp_path):
    write(writer(tmp_path), 1)
    for left in ("step-2.tmp", ".trash-step-0-99"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "model-00000.safetensors").write_bytes(b"half")
    writer(tmp_path)
    assert names(tmp_path) == ["step-1"]


# ---- full disks

SMALL_DISK = "size=9m"  # a checkpoint of BIG has 3.7 MB


@root_only
def test_a_full_disk_says_path_and_bytes_and_leaves_the_old_checkpoint(tmp_path):
    with mounted(tmp_path / "disk", "size=300k") as disk:
        to = writer(disk)
        write(to, 1)
        (disk / "filler").write_bytes(bytes(290 * 1024 - 20_000))
        to.save(2, {"model": {"weight": torch.ones(20_000)}}, {"state": {}}, None)
        to.wait()
        free = shutil.disk_usage(disk).free
        needed = to.stages["model"].size
        assert str(to.error).endswith(
            f"checkpoint {disk / 'step-2'} not written: No space left on device; it needs {needed} bytes, "
            f"{free} are free; the checkpoints before it are intact"
        )
        assert names(disk) == ["filler", "step-1"]
        directories.verify(disk / "step-1")


@root_only
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_run_whose_disk_gets_full_ends_with_one_sentence_and_its_checkpoints(train, tmp_path, ranks):
    mode = ["mode=multigpu"] if ranks else []
    with mounted(tmp_path / "outputs", SMALL_DISK):
        result = train(*MLP, *BIG, *mode, "train.max_steps=40", "eval.test=false", "run_id=full", ranks=ranks)
        assert set(result.exit_codes) == {1}, result.text
        folder = tmp_path / "outputs/digits_mlp/full"
        saved = directories.steps(folder / "checkpoints")
        assert [step for step, _ in saved] == [2, 4]
        for _, path in saved:
            directories.verify(path)
        assert not list((folder / "checkpoints").glob("*.tmp"))
        last = result.texts[0].strip().splitlines()[-1]
        assert str(folder / "checkpoints/step-6") in last
        assert "it needs" in last
        assert "are free" in last
        assert "--continue outputs/digits_mlp/full" in last
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("failed", 1)


# ---- a run


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(train):
    words = [*MLP, "checkpoint.every_steps=2", "log.every_steps=1", "run_id=a", "data.validation_fraction=0"]
    words = [*words, "checkpoint.keep_last=3"]
    folder = train(*words, "train.max_steps=6").ok().folder
    whole = compare.points(folder)
    flip(folder / "checkpoints/step-6/optimizer-00000.safetensors")
    result = train(*words, "train.max_steps=6").ok()
    assert "checkpoint skipped: step-6: " in result.text
    assert "optimizer-00000.safetensors is damaged" in result.text
    assert "taking step-4" in result.text
    assert compare.last(folder).name == "step-6"
    assert compare.points(folder) == whole


def test_a_save_under_way_is_finished_when_the_run_fails(train):
    words = [
        *MLP,
        "scheduler._target_=tests.probes.FaultyCosine",
        "model.hidden=[1500,1500]",
        "train.max_steps=9",
    ]
    result = train(*words, "checkpoint.every_steps=2", env={"TEST_FAULT": "raise@3"})
    assert result.exit_codes == [1]
    assert compare.last(result.folder).name == "step-2"
    assert "last checkpoint" in result.text.strip().splitlines()[-1]


def test_a_run_without_a_sound_checkpoint_ends_with_3_and_loses_nothing(train):
    words = [*MLP, "checkpoint.every_steps=1", "train.max_steps=2", "run_id=a"]
    folder = train(*words).ok().folder
    for _, saved in directories.steps(folder / "checkpoints"):
        flip(saved / "model-00000.safetensors")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and "checkpoints" in p.parts}
    metrics = (folder / "metrics.jsonl").read_bytes()
    result = train(*words)
    assert result.exit_codes == [3]
    (line,) = result.text.strip().splitlines()
    assert line.startswith(f"no usable checkpoint in {folder / 'checkpoints'}: step-2: ")
    assert "step-1: " in line
    assert {p: p.read_bytes() for p in before} == before
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert json.loads((folder / "status.json").read_text())["state"] == "done"  # of the start before


def test_all_ranks_leave_with_3_when_no_checkpoint_is_sound(train):
    words = [*MLP, "train.max_steps=2", "run_id=a", "mode=multigpu"]
    folder = train(*words, ranks=2).ok().folder
    flip(compare.last(folder) / "state.json")
    assert train(*words, ranks=2).exit_codes == [3, 3]


def test_the_best_step_is_noted_and_kept(train):
    words = [*MLP, "train.max_steps=6", "eval.every_steps=2", "checkpoint.keep_last=1", "log.every_steps=1"]
    folder = train(*words).ok().folder
    values = {
        line["step"]: line["eval/accuracy"] for line in compare.points(folder) if "eval/accuracy" in line
    }
    noted = json.loads((folder / "checkpoints/best.json").read_text())
    first = min(step for step, value in values.items() if value == max(values.values()))
    assert noted == {"step": first, "metric": "accuracy", "value": values[first]}
    assert sorted(step for step, _ in directories.steps(folder / "checkpoints")) == sorted({first, 6})


class Foretold(Classification):
    """Its evaluations lose what TEST_EVALUATIONS says, one after the other."""

    done = 0

    def finish(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        metrics = super().finish(sums, count)
        if count > 64:  # more than a batch: the validation part
            metrics["loss"] = float(os.environ["TEST_EVALUATIONS"].split()[self.done])
            self.done += 1
        return metrics


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_an_evaluation_that_is_not_finite_is_never_the_best(train, value):
    words = [*MLP, "task._target_=tests.test_checkpoint.Foretold", "train.max_steps=3", "eval.every_steps=1"]
    words += ["checkpoint.metric=loss", "checkpoint.metric_mode=min", "eval.test=false"]
    folder = train(*words, env={"TEST_EVALUATIONS": f"{value} 2.0 {value}"}).ok().folder
    noted = json.loads((folder / "checkpoints/best.json").read_text())
    assert noted == {"step": 2, "metric": "loss", "value": 2.0}


@root_only
def test_a_folder_that_cannot_be_written_is_refused_by_path(train, tmp_path):
    with mounted(tmp_path / "outputs", "size=1m,ro"):
        for word in ("run_id=a", "run_id=null"):
            result = train(*MLP, "train.max_steps=1", word)
            assert result.exit_codes == [2]
            assert "can't write to outputs/digits_mlp" in result.text
            assert "Read-only file system" in result.text
            assert "Traceback" not in result.text
