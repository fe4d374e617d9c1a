"""Which names in a config may become an object, and with which arguments."""

import sys
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_experiments import targets
from ddp_experiments.config import OPEN_GROUPS
from ddp_experiments.data import Splits

HOSTILE = [
    "os.system",
    "posix.system",
    "subprocess.run",
    "subprocess.Popen",
    "builtins.eval",
    "builtins.exec",
    "builtins.open",
    "numpy.load",
    "numpy.fromfile",
    "pathlib.Path",
    "pathlib.Path.write_text",
    "shutil.copy",
    "shutil.rmtree",
    "pickle.loads",
    "yaml.unsafe_load",
    "importlib.import_module",
    "hydra.utils.instantiate",
    "omegaconf.OmegaConf",
    "webbrowser.open",
    "ctypes.CDLL",
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "torch.hub.download_url_to_file",
    "torch.utils.collect_env.run",
    "torch.utils.cpp_extension.load",
    "torch.jit.load",
    "torch.os.system",
    "torch.sys.exit",
    "torch.nn.Module.__init__.__globals__",
    "torch._utils._rebuild_tensor",
    "torch.PyTorchFileWriter",
    "torch.PyTorchFileReader",
    "torch.classes.load_library",
    "torch.ops.load_library",
    "torch.utils.tensorboard.SummaryWriter",
    "torch.distributed.TCPStore",
    "torch.distributed.FileStore",
    "torch.distributed.init_process_group",
    "torch.multiprocessing.Process",
    "ddp_experiments.identity.new_folder",
    "ddp_experiments.launch.refuse",
    "ddp_experiments.checkpoint.export.export",
    "ddp_experiments.cli.os.system",
    "train.main",
    "torch",
    "",
    "model",
    "a b.c",
    "torch.nn.Linear()",
    5,
    None,
    ["torch.nn.Linear"],
]


@pytest.mark.parametrize("name", HOSTILE, ids=str)
@pytest.mark.parametrize("group", OPEN_GROUPS)
def test_hostile_target_is_refused_in_every_group(group, name):
    with pytest.raises(ValueError, match=rf"^{group}\._target_=") as refusal:
        targets.check({"_target_": name}, group)
    assert "\n" not in str(refusal.value)


class Outer(nn.Module):
    """A model that takes anything as its part."""

    def __init__(self, part: Any = None, parts: Any = ()) -> None:
        super().__init__()
        self.part, self.parts = part, parts


OUTER = "tests.test_targets.Outer"


@pytest.mark.parametrize("name", HOSTILE, ids=str)
@pytest.mark.parametrize("where", ["part", "parts"])
def test_hostile_part_of_a_model_is_refused(name, where):
    part = {"_target_": name}
    node = (
        {"_target_": OUTER, "part": part}
        if where == "part"
        else {"_target_": OUTER, "parts": [1, {"x": part}]}
    )
    key = r"model\.part" if where == "part" else r"model\.parts\.1\.x"
    with pytest.raises(ValueError, match=rf"^{key}\._target_="):
        targets.check(node, "model")
    with pytest.raises(ValueError, match=rf"^{key}\._target_="):
        targets.build(node, "model")


def test_foreign_module_on_the_path_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    mark = tmp_path / "imported"
    (tmp_path / "site-packages" / "foreign_package_xyz.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    with pytest.raises(ValueError, match="set DDPX_TRUST=foreign_package_xyz in the environment"):
        targets.check({"_target_": "foreign_package_xyz.Net"}, "model")
    assert not mark.exists() and "foreign_package_xyz" not in sys.modules
    monkeypatch.setenv("DDPX_TRUST", "other,foreign_package_xyz")
    with pytest.raises(ValueError, match="no 'Net' in foreign_package_xyz"):
        targets.check({"_target_": "foreign_package_xyz.Net"}, "model")
    assert mark.exists()


def test_package_installed_below_the_working_folder_is_foreign(tmp_path, monkeypatch):
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "installed_xyz.py").write_text("")
    (tmp_path / "own_xyz.py").write_text("")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert targets.is_trusted("own_xyz") and not targets.is_trusted("installed_xyz")


def test_standard_library_is_foreign_from_every_working_folder(monkeypatch):
    monkeypatch.chdir(Path(typing.__file__).parent)
    assert not targets.is_trusted("shutil") and not targets.is_trusted("typing")


class Missing(nn.Module):
    def __init__(self, width: int, rate: float = 0.1, kind: Literal["a", "b"] = "a") -> None:
        super().__init__()


class Open(nn.Module):
    def __init__(self, **anything: Any) -> None:
        super().__init__()
        self.anything = anything


def splits(n: int = 1) -> Splits:
    return Splits(torch.utils.data.TensorDataset(torch.zeros(n)))


def dataset(n: int) -> Dataset[int]:
    return torch.utils.data.TensorDataset(torch.zeros(n))


def unannotated(n=1):
    return splits(n)


HERE = "tests.test_targets"
WRONG = [
    ("model", {"_target_": f"{HERE}.Missing"}, "model: Missing: missing a required argument: 'width'"),
    ("model", {"_target_": f"{HERE}.Missing", "widht": 1}, "did you mean model.width"),
    ("model", {"_target_": f"{HERE}.Missing", "width": 1.5}, "model.width=1.5: Missing wants int"),
    ("model", {"_target_": f"{HERE}.Missing", "width": True}, "model.width=True: Missing wants int"),
    ("model", {"_target_": f"{HERE}.Missing", "width": 1, "rate": "0.1"}, "without quotes it is one"),
    ("model", {"_target_": f"{HERE}.Missing", "width": 1, "kind": "c"}, "model.kind='c'"),
    ("model", {"_target_": f"{HERE}.Missing", "width": 1, "_args_": [2]}, "model._args_ is not supported"),
    ("model", {"_target_": "torch.nn.Module"}, "want a subclass of Module"),
    ("model", {"_target_": "torch.optim.SGD"}, "want a subclass of Module"),
    ("model", {"_target_": f"{HERE}.Gone"}, f"no 'Gone' in {HERE}"),
    ("model", {"_target_": "tests.nowhere.Net"}, "no 'nowhere' in tests"),
    ("model", {"width": 1}, "has no _target_"),
    ("model", None, "model=None is no option"),
    ("model", "cnn", "model='cnn' is no option"),
    ("data", {"_target_": f"{HERE}.unannotated"}, "a function annotated to return one"),
    ("optimizer", {"_target_": "torch.optim.Optimizer"}, "want a subclass of Optimizer"),
    (
        "optimizer",
        {"_target_": "torch.optim.SGD", "params": []},
        "optimizer.params is filled in by the program",
    ),
    ("optimizer", {"_target_": "torch.optim.SGD", "lr": [1]}, "optimizer.lr=[1]: SGD wants float"),
    (
        "scheduler",
        {"_target_": "torch.optim.lr_scheduler.StepLR"},
        "missing a required argument: 'step_size'",
    ),
    ("task", {"_target_": "ddp_experiments.tasks.Task"}, "want a subclass of Task"),
]


@pytest.mark.parametrize(("group", "node", "part"), WRONG, ids=[p for _, _, p in WRONG])
def test_wrong_node_is_told_in_one_line(group, node, part):
    with pytest.raises(ValueError) as refusal:
        targets.check(node, group)
    assert part in str(refusal.value) and "\n" not in str(refusal.value)


RIGHT = [
    ("model", {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 2}),
    ("model", {"_target_": f"{HERE}.Missing", "width": 1, "rate": 1, "kind": "b"}),
    ("model", {"_target_": f"{HERE}.Open", "anything": 1, "else_": [1]}),
    ("data", {"_target_": f"{HERE}.splits"}),
    ("data", {"_target_": f"{HERE}.dataset", "n": 3}),
    ("optimizer", {"_target_": "torch.optim.SGD", "lr": 1}),
    ("optimizer", {"_target_": "torch.optim.AdamW", "betas": [0.9, 0.99]}),
    ("scheduler", {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1}),
    ("scheduler", {"_target_": "ddp_experiments.optim.WarmupCosine", "warmup_steps": 1, "min_factor": 0.0}),
    ("task", {"_target_": "ddp_experiments.tasks.Regression"}),
]


@pytest.mark.parametrize(("group", "node"), RIGHT, ids=[n["_target_"] for _, n in RIGHT])
def test_right_node_passes(group, node):
    targets.check(node, group)


def test_nested_parts_are_made_from_the_inside():
    node = {
        "_target_": OUTER,
        "part": {"_target_": OUTER, "part": {"_target_": "torch.nn.ReLU", "inplace": True}},
        "parts": [{"_target_": "torch.nn.Tanh"}, {"deep": {"_target_": "torch.nn.Identity"}}, 3],
    }
    targets.check(node, "model")
    made = targets.build(node, "model")
    assert isinstance(made.part.part, nn.ReLU) and made.part.part.inplace
    assert isinstance(made.parts[0], nn.Tanh) and isinstance(made.parts[1]["deep"], nn.Identity)
    assert made.parts[2] == 3


def test_check_makes_nothing():
    class_calls = []

    class Loud(nn.Module):
        def __init__(self) -> None:
            class_calls.append(1)

    globals()["Loud"] = Loud
    Loud.__module__, Loud.__qualname__ = HERE, "Loud"
    targets.check({"_target_": f"{HERE}.Loud"}, "model")
    assert class_calls == []
    with pytest.raises(AttributeError):  # Module.__init__ wasn't called, so it isn't complete
        targets.build({"_target_": f"{HERE}.Loud"}, "model").training_mode  # noqa: B018
    assert class_calls == [1]


def test_optional_runtime_argument_goes_only_where_it_is_wanted():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    step = {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 1}
    cycle = {"_target_": "torch.optim.lr_scheduler.OneCycleLR", "max_lr": 0.1}
    targets.build(step, "scheduler", optimizer=optimizer, total_steps=7)
    assert targets.build(cycle, "scheduler", optimizer=optimizer, total_steps=7).total_steps == 7
    assert targets.takes(cycle, "scheduler", "total_steps") and not targets.takes(
        step, "scheduler", "total_steps"
    )


def test_functions_return_annotation_tells_one_data_set_from_all_parts():
    assert targets.makes_dataset({"_target_": f"{HERE}.dataset"})
    assert not targets.makes_dataset({"_target_": f"{HERE}.splits"})


FITS = [
    (1, float, True),
    (True, float, False),
    (1.0, int, False),
    (True, int, False),
    (None, int | None, True),
    (None, int, False),
    ("a", Literal["a"], True),
    ([1, 2], tuple[int, ...], True),
    (1, list[int], False),
    ({}, dict[str, int], True),
    (1, torch.Tensor, False),
    (1, float | torch.Tensor, True),
    ("x", float | torch.Tensor, False),
    ("x", Any, True),
    ("x", typing.Callable[..., int], True),
]


@pytest.mark.parametrize(("value", "hint", "expected"), FITS)
def test_value_fits_a_hint_unless_it_surely_does_not(value, hint, expected):
    assert targets.fits(value, hint) is expected
