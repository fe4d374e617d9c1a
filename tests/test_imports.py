"""Which room may import which, read from the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import ROOT

PACKAGE = "ddp_experiments"
FILES = sorted((ROOT / PACKAGE).rglob("*.py"))
FLOORS = [  # a room imports only rooms of floors below its own
    {"cli"},
    {"preflight"},
    {"check"},
    {"worker"},
    {"launch"},
    {"rank", "sweep", "workers"},
    {"rendezvous"},
    {"experiment"},
    {"agreement"},
    {"build", "recorder"},
    {"resume", "tracking"},
    {"loop"},
    {"checkpoint", "health", "optim", "parallel", "targets"},
    {"metrics"},
    {"identity", "tasks", "world"},
    {"meeting"},
    {"lookout"},
    {"config", "data", "events", "lock", "models", "network"},
    {"environment"},
    {"errors", "process"},
]
WITHOUT_TORCH = [
    "__init__",
    "check",
    "cli",
    "config",
    "environment",
    "errors",
    "identity",
    "launch",
    "lock",
    "network",
    "preflight",
    "process",
    "sweep",
    "targets",
]


def room(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, *, nested: bool) -> Iterator[str]:
    """Full names of what a file imports, at its top, or also inside functions."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor(name: str) -> int:
    found = [i for i, rooms in enumerate(FLOORS) if name in rooms]
    assert found, f"{name} has no floor: add it to the table and to the design's"
    return found[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward_only(path):
    if path.name == "__init__.py" and room(path) == "__init__":
        assert list(imported(path, nested=True)) == []
        return
    me = room(path)
    for name in imported(path, nested=True):
        if name.split(".")[0] == PACKAGE:
            other = name.split(".")[1]
            assert other == me or floor(other) > floor(me), f"{me} imports {other}"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_room_before_the_start_has_no_torch_at_import(name):
    path = ROOT / PACKAGE / f"{name}.py"
    tops = {n.split(".")[0] for n in imported(path, nested=False)}
    assert not tops & {"torch", "numpy", "sklearn", "tensorboard"}
    inner = {n.split(".")[1] for n in imported(path, nested=False) if n.startswith(f"{PACKAGE}.")}
    assert inner <= set(WITHOUT_TORCH)


@pytest.mark.parametrize("name", ["config", "environment", "errors", "identity"])
def test_lowest_rooms_never_import_torch(name):
    path = ROOT / PACKAGE / f"{name}.py"
    assert not any(n.split(".")[0] == "torch" for n in imported(path, nested=True))


def test_train_py_is_short_and_imports_no_torch():
    text = (ROOT / "train.py").read_text()
    assert len(text.splitlines()) <= 25
    assert "import torch" not in text


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_one_room_opens_or_closes_a_group(path):
    calls = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
    opens = calls & {"init_process_group", "destroy_process_group", "new_group", "init_device_mesh"}
    assert not opens or room(path) == "world"
