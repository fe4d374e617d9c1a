"""What the launcher's variables mean, and that no other room reads them."""

import ast

import pytest

from ddp_experiments.environment import Environment, first_on_machine, launch_token, read
from ddp_experiments.errors import Refused
from tests.ranks import ROOT, launcher_variables

ONE = launcher_variables(0, 1, 29500)
TWO_NODES = {  # rank 3 of 2 machines with 2 processes each
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


TORCHRUNS = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT")


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {k: v for k, v in variables.items() if k not in names}


READ = {
    "plain python": ({"HOME": "/x"}, Environment()),
    "a port left over from elsewhere": ({"MASTER_PORT": "1", "WORLD_SIZE": "8"}, Environment()),
    "one rank of torchrun": (
        ONE,
        Environment(launched=True, master_addr="127.0.0.1", master_port=29500, agent_store=True),
    ),
    "two machines": (
        TWO_NODES,
        Environment(
            launched=True,
            rank=3,
            local_rank=1,
            world_size=4,
            local_world_size=2,
            node_rank=1,
            nnodes=2,
            master_addr="host",
            master_port=29500,
            forgetful=True,
        ),
    ),
    "a launcher that doesn't count machines": (
        without(TWO_NODES, "GROUP_RANK", "GROUP_WORLD_SIZE", *TORCHRUNS),
        Environment(
            launched=True,
            rank=3,
            local_rank=1,
            world_size=4,
            local_world_size=2,
            node_rank=1,
            nnodes=2,
            master_addr="host",
            master_port=29500,
        ),
    ),
    "one rank without an address": (
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        Environment(launched=True),
    ),
}


@pytest.mark.parametrize(("variables", "expected"), READ.values(), ids=READ)
def test_variables_are_understood(variables, expected):
    assert read(variables) == expected


REFUSED = {
    "RANK without LOCAL_RANK": (
        without(ONE, "LOCAL_RANK"),
        ["LOCAL_RANK is not", "--node-rank", "env -u RANK"],
    ),
    "no WORLD_SIZE": (without(ONE, "WORLD_SIZE"), ["WORLD_SIZE=None is not a number"]),
    "no LOCAL_WORLD_SIZE": (
        without(TWO_NODES, "LOCAL_WORLD_SIZE"),
        ["LOCAL_WORLD_SIZE=None is not a number"],
    ),
    "a word": ({**ONE, "RANK": "zero"}, ["RANK='zero' is not a number; start with torchrun"]),
    "negative": ({**ONE, "LOCAL_RANK": "-1"}, ["LOCAL_RANK='-1' is not a number"]),
    "a digit that is no decimal": ({**ONE, "RANK": "²"}, ["RANK='²' is not a number"]),
    "rank outside the world": ({**ONE, "RANK": "1"}, ["contradict", "RANK=1 WORLD_SIZE=1"]),
    "local rank outside": ({**TWO_NODES, "LOCAL_RANK": "2"}, ["contradict", "LOCAL_RANK=2"]),
    "more here than in all": ({**TWO_NODES, "LOCAL_WORLD_SIZE": "5"}, ["contradict", "LOCAL_WORLD_SIZE=5"]),
    "machine outside": ({**TWO_NODES, "GROUP_RANK": "2"}, ["contradict", "GROUP_RANK=2 GROUP_WORLD_SIZE=2"]),
    "no address": (without(TWO_NODES, "MASTER_ADDR"), ["MASTER_ADDR or MASTER_PORT is not set"]),
    "no port": (without(TWO_NODES, "MASTER_PORT"), ["MASTER_ADDR or MASTER_PORT is not set"]),
}


@pytest.mark.parametrize(("variables", "parts"), REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused_with_what_was_given(variables, parts):
    with pytest.raises(Refused) as refusal:
        read(variables)
    assert len(refusal.value.faults) == 1 and "\n" not in refusal.value.faults[0]
    assert all(part in refusal.value.faults[0] for part in parts), refusal.value.faults


@pytest.mark.parametrize(("value", "speaks"), [(None, True), ("0", True), ("1", False), ("odd", False)])
def test_one_process_speaks_for_its_machine(monkeypatch, value, speaks):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if value is not None:
        monkeypatch.setenv("LOCAL_RANK", value)
    assert first_on_machine() == speaks


def test_each_start_has_its_own_token():
    assert len({launch_token() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "path", sorted((ROOT / "ddp_experiments").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_other_room_reads_the_launchers_variables(path):
    tree = ast.parse(path.read_text())
    words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    launchers = {w for w in words if w in TWO_NODES or w.startswith(("TORCHELASTIC_", "SLURM_", "MASTER_"))}
    assert not launchers or path.name == "environment.py", launchers
    reads = "environ" in {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    # besides the launcher's: HYDRA_FULL_ERROR, DDPX_TRUST
    assert not reads or path.name in ("environment.py", "cli.py", "targets.py")
