"""Weights out of a run and into a model: export, init_from, eval_only, --from-run."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from ddp_experiments.checkpoint import directories, export
from ddp_experiments.errors import NoUsableCheckpoint, Refused
from ddp_experiments.models.mlp import MLP as Model
from ddp_experiments.tracking import read_metrics
from tests import compare
from tests.ranks import ROOT

MLP = ["experiment=digits_mlp", "train.max_epochs=null", "mode.threads=1", "log.every_steps=1"]
RUN = [*MLP, "train.max_steps=6", "eval.every_steps=2", "checkpoint.keep_last=1", "optimizer.lr=3e-2"]
RUN += ["checkpoint.metric=loss", "checkpoint.metric_mode=max"]  # so that the best is not the last


def model() -> Model:
    return Model(in_features=64, hidden=[64, 64], out_features=10)


def values(folder: Path, part: str) -> list[dict[str, Any]]:
    """The evaluations of a part, in order, without the step and the best value."""
    lines = [{k: v for k, v in line.items() if k.startswith(f"{part}/")} for line in read_metrics(folder)]
    return [line for line in lines if line]


def program(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddp_experiments.checkpoint", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


# ---- the same again


def test_from_run_gives_the_same_values_in_a_new_folder(train):
    first = train(*RUN, "model.dropout=0.1", "data.augment=true").ok().folder
    second = train("--from-run", str(first)).ok().folder
    assert second != first
    compare.assert_bitwise_equal(first, second)


def test_from_run_takes_changes(train):
    first = train(*RUN).ok().folder
    second = train("--from-run", str(first), "seed=5", "train.max_steps=2").ok().folder
    assert len(compare.losses(second)) == 2
    assert compare.losses(second) != compare.losses(first)[:2]


def test_continue_goes_on_with_a_job_of_a_sweep(train):
    sweep = train(
        *MLP, "train.max_steps=2", "scheduler=constant", "-m", "optimizer.lr=1e-3,1e-2", ranks=1
    ).ok()
    job = sweep.folders[1]
    assert job.name == "01_lr=0.01"
    train("--continue", str(job), "train.max_steps=4").ok()
    assert [line["step"] for line in compare.points(job) if "train/loss" in line] == [1, 2, 3, 4]
    assert compare.last(job).name == "step-4"


# ---- evaluating a run


@pytest.mark.parametrize("ranks", [0, 2])
def test_eval_only_gives_the_values_of_the_run_itself(train, ranks):
    run = train(*RUN, "train.ema_decay=0.5").ok().folder
    best = directories.read_json(run / "checkpoints/best.json")["step"]
    evaluations = values(run, "eval")
    assert best < 6
    mode = ["mode=multigpu"] if ranks else []

    def again(weights: str) -> Path:
        words = ("eval_only=true", "--from-run", str(run), f"eval.weights={weights}", *mode)
        return train(*words, ranks=ranks).ok().folder

    for weights, want in (("best", evaluations[best // 2 - 1]), ("last", evaluations[-1])):
        folder = again(weights)
        (got,) = values(folder, "eval")
        assert got["eval/accuracy"] == want["eval/accuracy"]
        assert got["eval/loss"] == pytest.approx(want["eval/loss"], rel=1e-6)
        assert (got == want) or ranks  # on the same world bit for bit
        assert not (folder / "checkpoints").exists()
        if weights == "best":
            assert values(folder, "test")[0]["test/accuracy"] == values(run, "test")[0]["test/accuracy"]


def test_eval_only_takes_the_weights_of_the_run_and_not_those_it_started_from(train):
    first = train(*RUN).ok().folder
    second = train(*RUN, f"init_from={first}", "seed=3").ok().folder
    third = train("eval_only=true", "--from-run", str(second), "eval.weights=last").ok().folder
    assert values(third, "eval") == [values(second, "eval")[-1]]


def test_eval_only_of_a_run_without_a_checkpoint_ends_with_3(train):
    run = train(*RUN).ok().folder
    shutil.rmtree(run / "checkpoints")
    result = train("eval_only=true", "--from-run", str(run))
    assert result.exit_codes == [3]
    assert f"{run} has no checkpoint yet" in result.text
    assert result.folders == []


# ---- init_from


def first_step(folder: Path) -> dict[str, Any]:
    return next(line for line in compare.points(folder) if "train/loss" in line)


def as_file(name: str, wrap: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path, Path], Path]:
    """Writes the best weights of a run into a file of that name."""

    def write(run: Path, folder: Path) -> Path:
        content, path = wrap(export.find_weights(run)), folder / name
        if path.suffix == ".safetensors":
            safetensors.torch.save_file({k: v.contiguous() for k, v in content.items()}, path)
        else:
            torch.save(content, path)
        return path

    return write


def prefixed(prefix: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {f"{prefix}{k}": v.clone() for k, v in tensors.items()}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in tensors.items()}


SOURCES: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "run": (lambda run, _: run, ""),
    "checkpoint": (lambda run, _: directories.best(run / "checkpoints") or run, ""),
    "safetensors": (as_file("w.safetensors", copied), ""),
    "pt": (as_file("w.pt", copied), ""),
    "pt of the article": (as_file("w.pt", lambda t: {"epoch": 3, "model_state_dict": copied(t)}), ""),
    "pt of DDP": (as_file("w.pt", prefixed("module.")), "prefix module. taken off"),
    "pt of torch.compile": (as_file("w.pt", prefixed("_orig_mod.")), "prefix _orig_mod. taken off"),
    "pt of both": (as_file("w.pt", prefixed("module._orig_mod.")), "prefix _orig_mod., module. taken off"),
    "pt of both, turned round": (
        as_file("w.pt", prefixed("_orig_mod.module.")),
        "prefix _orig_mod., module.",
    ),
    "safetensors of DDP": (as_file("w.safetensors", prefixed("module.")), "prefix module. taken off"),
}


@pytest.fixture(scope="module")
def source(pool, tmp_path_factory) -> Path:
    """A run to take weights from."""
    return pool.train(tmp_path_factory.mktemp("source"), *RUN).ok().folder


@pytest.mark.parametrize("kind", SOURCES)
def test_init_from_starts_with_the_weights_of_a(source, tmp_path, caplog, kind):
    write, message = SOURCES[kind]
    fresh = model()
    caplog.set_level("INFO", "ddp_experiments")
    export.load_weights(fresh, write(source, tmp_path))
    want = export.weights_in(directories.best(source / "checkpoints"))
    assert all(torch.equal(t, want[k]) for k, t in fresh.state_dict().items())
    assert message in caplog.text
    assert bool(caplog.text) == bool(message)


def test_init_from_takes_weights_only(train, source):
    once = train(*MLP, "train.max_steps=1", f"init_from={source}").ok().folder
    other = train(*MLP, "train.max_steps=1").ok().folder
    assert first_step(once)["step"] == 1
    assert first_step(once)["optim/lr"] == first_step(other)["optim/lr"]
    assert first_step(once)["train/loss"] < first_step(other)["train/loss"]
    optimizer = compare.weights(once, "optimizer")
    assert {t.item() for k, t in optimizer.items() if k.endswith(".step")} == {1.0}


class Hostile:
    """Unpickling it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {os.environ['TEST_MARK']}",)


def hostile(path: Path) -> None:
    torch.save({"model_state_dict": model().state_dict(), "extra": Hostile()}, path)


def bare_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Hostile()))


@pytest.mark.parametrize("write", [hostile, bare_pickle])
def test_a_hostile_file_is_refused_and_not_run(train, tmp_path, monkeypatch, write):
    monkeypatch.setenv("TEST_MARK", str(tmp_path / "mark"))
    write(tmp_path / "w.pt")
    result = train(*MLP, "train.max_steps=1", f"init_from={tmp_path / 'w.pt'}")
    assert result.exit_codes == [2]
    assert f"{tmp_path / 'w.pt'}: torch.load(weights_only=True) refuses it" in result.text
    assert "Traceback" not in result.text
    assert not (tmp_path / "mark").exists()
    assert result.folders == []


def test_a_hostile_file_would_run_if_it_were_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_MARK", str(tmp_path / "mark"))
    hostile(tmp_path / "w.pt")
    torch.load(tmp_path / "w.pt", weights_only=False)
    assert (tmp_path / "mark").exists()


def changed(**tensors: Tensor | None) -> Callable[[Path], None]:
    """Writes a model's weights with some replaced, or left out."""

    def write(path: Path) -> None:
        found = {**model().state_dict(), **{k.replace("__", "."): v for k, v in tensors.items()}}
        torch.save({k: v for k, v in found.items() if v is not None}, path)

    return write


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "another shape": (
        changed(layers__0__weight=torch.zeros(3, 3)),
        r"layers\.0\.weight is torch\.float32 \[3, 3\], but the model wants torch\.float32 \[64, 64\]",
    ),
    "another kind of number": (
        changed(layers__0__bias=torch.zeros(64, dtype=torch.int64)),
        r"layers\.0\.bias is torch\.int64",
    ),
    "one missing": (changed(layers__0__bias=None), r"lacks layers\.0\.bias"),
    "one too many": (changed(head__weight=torch.zeros(1)), r"has head\.weight, which the model doesn't know"),
    "no tensors": (lambda p: torch.save({"lr": 0.1}, p), "holds no state dict: want names and tensors"),
    "a list": (lambda p: torch.save([torch.ones(1)], p), "holds no state dict"),
    "numbers for names": (lambda p: torch.save({0: torch.ones(1)}, p), "holds no state dict"),
    "no torch file": (lambda p: p.write_bytes(b"weights") and None, "refuses it"),
    "empty": (lambda p: p.write_bytes(b"") and None, "refuses it"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(tmp_path, kind):
    write, message = REFUSED[kind]
    write(tmp_path / "w.pt")
    fresh = model()
    before = copied(fresh.state_dict())
    with pytest.raises(Refused, match=message) as caught:
        export.load_weights(fresh, tmp_path / "w.pt")
    assert str(tmp_path / "w.pt") in str(caught.value)
    assert all(torch.equal(t, before[k]) for k, t in fresh.state_dict().items())


def test_a_damaged_safetensors_file_is_refused(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"123")
    with pytest.raises(Refused, match=r"w\.safetensors: too short"):
        export.load_weights(model(), tmp_path / "w.safetensors")


def test_a_missing_file_is_refused_before_there_is_a_folder(train):
    result = train(*MLP, "train.max_steps=1", "init_from=nowhere.pt")
    assert result.exit_codes == [2]
    assert "nowhere.pt: no such file or folder" in result.text
    assert result.folders == []


# ---- names


@pytest.mark.parametrize("ranks", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_no_name_of_a_wrapper_is_written(train, ranks):
    mode = ["mode=multigpu"] if ranks else ["train.compile=true"]
    run = train(*RUN, *mode, "train.ema_decay=0.5", ranks=ranks).ok().folder
    saved = compare.weights(run)
    assert {k.partition("/")[0] for k in saved} == {"model", "optimizer", "ema"}
    assert [k for k in saved if "module." in k or "_orig_mod." in k] == []
    model().load_state_dict(export.find_weights(run), strict=True)


# ---- export


@pytest.mark.parametrize("weights", ["best", "last"])
def test_export_writes_a_file_that_a_bare_model_loads_strictly(train, tmp_path, weights):
    run = train(*RUN, "train.ema_decay=0.5", "mode=multigpu", ranks=2).ok().folder
    done = program("export", str(run), "out.safetensors", "--weights", weights, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"out.safetensors: {(tmp_path / 'out.safetensors').stat().st_size} bytes\n"
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    model().load_state_dict(found, strict=True)
    folder = directories.best(run / "checkpoints") if weights == "best" else compare.last(run)
    averages = directories.tensors(folder, "ema")
    assert averages.keys() == found.keys()
    assert all(torch.equal(t, found[k]) for k, t in averages.items())


def test_export_overwrites_nothing(source, tmp_path):
    (tmp_path / "out.safetensors").write_text("mine")
    done = program("export", str(source), "out.safetensors", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "out.safetensors exists; nothing is overwritten, give another name\n"
    assert (tmp_path / "out.safetensors").read_text() == "mine"


def test_export_says_in_one_line_what_hinders_it(source, tmp_path):
    with pytest.raises(Refused, match="nowhere: no such file or folder"):
        export.export(tmp_path / "nowhere", tmp_path / "out.safetensors")
    with pytest.raises(Refused, match=r"can't write .*out\.safetensors: No such file or directory"):
        export.export(source, tmp_path / "no folder" / "out.safetensors")
    with pytest.raises(NoUsableCheckpoint, match="has no checkpoint yet"):
        export.export(tmp_path, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == []
