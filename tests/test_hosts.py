"""Runs over two machines: one run folder, the same losses, and what happens when a machine is lost."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from ddp_experiments.checkpoint import directories
from tests import compare
from tests.hosts import Host, needs_hosts, two_hosts
from tests.ranks import Pool

pytestmark = [needs_hosts, pytest.mark.timeout(300)]
SECONDS = 60
MLP = (
    *("experiment=digits_mlp", "train.max_epochs=null", "train.max_steps=6", "train.precision=fp64"),
    *("mode.threads=1", "log.every_steps=1", "eval.test=false", "log.tensorboard=false"),
)


def static(node: int, ranks: int, master: str = "10.77.0.1") -> list[str]:
    """torchrun's options for a fixed set of machines."""
    where = [f"--node_rank={node}", f"--master_addr={master}", "--master_port=29500"]
    return ["--nnodes=2", *where, f"--nproc_per_node={ranks}"]


def c10d(node: int, ranks: int, nodes: str = "2", restarts: int = 0) -> list[str]:
    """torchrun's options for the rendezvous that machines may join and leave."""
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=10.77.0.1:29400", f"--local-addr=10.77.0.{node + 1}"]
    conf = f"--rdzv-conf=is_host={int(node == 0)},last_call_timeout=2"
    return [f"--nnodes={nodes}", f"--max-restarts={restarts}", *where, conf, f"--nproc_per_node={ranks}"]


class Pair:
    """A run over both machines."""

    def __init__(self, folder: Path, hosts: tuple[Host, Host]) -> None:
        self.folder, self.hosts = folder, hosts
        self.agents: list[subprocess.Popen[bytes]] = []
        self.logs = [folder / f"{host.name}.log" for host in hosts]

    def begin(
        self, node: int, options: Sequence[str], *words: str, cwd: Path | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        words = ("mode=multinode", *words)
        agent = self.hosts[node].torchrun(options, words, cwd or self.folder, self.logs[node], env)
        self.agents.append(agent)
        return agent

    def text(self, node: int) -> str:
        return self.logs[node].read_text()

    def texts(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in self.logs if log.exists())

    def codes(self, *agents: subprocess.Popen[bytes], seconds: float = SECONDS) -> list[int]:
        """The exit codes; a failure with all that was printed if they take too long."""
        end = time.monotonic() + seconds
        try:
            return [agent.wait(max(0.1, end - time.monotonic())) for agent in agents]
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {seconds} s\n{self.texts()}")

    def runs(self) -> list[Path]:
        return [p.parent for p in self.folder.glob("**/outputs/**/config.yaml")]

    def run(self) -> Path:
        assert len(self.runs()) == 1, f"{self.runs()}\n{self.texts()}"
        return self.runs()[0]

    def line(self, log: str, part: str) -> str:
        """The one line of a log of the run that has the part."""
        found = [line for line in (self.run() / log).read_text().splitlines() if part in line]
        assert len(found) == 1, (self.run() / log).read_text()
        return found[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """`pair(a_hosts=..., b_hosts=...)`: two machines that share this test's folder."""
    open_pairs = []

    def make(**names: str) -> Pair:
        context = two_hosts(tmp_path, **names)
        made = Pair(tmp_path, context.__enter__())
        open_pairs.append(context)
        return made

    yield make
    for context in open_pairs:
        context.__exit__(None, None, None)


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """The losses of one process."""

    @cache
    def losses(*words: str) -> list[float]:
        return compare.losses(pool.train(tmp_path_factory.mktemp("alone"), *words).ok().folder)

    return losses


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rendezvous", [static, c10d])
def test_two_machines_are_one_run_with_the_losses_of_one_process(
    pair: Callable[..., Pair],
    alone: Callable[..., list[float]],
    rendezvous: Callable[..., list[str]],
    ranks: int,
) -> None:
    both = pair()  # each machine's own name means 127.0.0.1 there, and no interface is set
    agents = [both.begin(node, rendezvous(node, ranks), *MLP) for node in (0, 1)]
    assert both.codes(*agents) == [0, 0], both.texts()
    assert_same_losses(both.run(), alone(*MLP))
    assert both.line("train.log", "interface").endswith("rank 0 on hostA: interface vA, 10.77.0.1")
    last = 2 * ranks - 1
    assert both.line(f"rank{last}.log", "interface").endswith(
        f"rank {last} on hostB: interface vB, 10.77.0.2"
    )


@pytest.mark.slow
def test_machines_that_start_their_own_shares_are_one_run_with_the_losses_of_one_process(
    pair: Callable[..., Pair], alone: Callable[..., list[float]]
) -> None:
    both, place = pair(), ("mode=multinode", "mode.nnodes=2", "mode.rdzv_endpoint=10.77.0.1:29500")
    shares = [(*place, f"mode.node_rank={node}", "mode.nproc_per_node=1", *MLP) for node in (0, 1)]
    programs = [both.hosts[n].python(shares[n], both.folder, both.logs[n]) for n in (0, 1)]
    assert both.codes(*programs) == [0, 0], both.texts()
    assert_same_losses(both.run(), alone(*MLP))
    assert both.line("rank1.log", "interface").endswith("rank 1 on hostB: interface vB, 10.77.0.2")


@pytest.mark.slow
def test_master_by_a_name_that_means_loopback_on_its_own_machine_is_reached(
    pair: Callable[..., Pair],
) -> None:
    both = pair(a_hosts="127.0.1.1 hostA", b_hosts="127.0.1.1 hostB\n10.77.0.1 hostA")
    agents = [both.begin(node, static(node, 1, master="hostA"), *MLP) for node in (0, 1)]
    assert both.codes(*agents) == [0, 0], both.texts()
    assert both.line("train.log", "interface").endswith("rank 0 on hostA: interface vA, 10.77.0.1")
    assert both.line("rank1.log", "interface").endswith("rank 1 on hostB: interface vB, 10.77.0.2")


@pytest.mark.slow
def test_an_interface_that_the_user_named_is_taken(pair: Callable[..., Pair]) -> None:
    both = pair()
    named = [{f"{kind}_SOCKET_IFNAME": f"v{letter}" for kind in ("GLOO", "NCCL")} for letter in "AB"]
    agents = [both.begin(node, static(node, 1), *MLP, **named[node]) for node in (0, 1)]
    assert both.codes(*agents) == [0, 0], both.texts()
    assert not any("interface" in log.read_text() for log in both.run().glob("*.log"))


# ---- what is refused


def refusal(text: str) -> str:
    """The one line of the one refusal in what a launcher printed."""
    assert text.count("Refused before anything was started:") == 1, text
    return text.partition("Refused before anything was started:\n  - ")[2].partition("\n")[0]


@pytest.mark.slow
def test_machines_without_common_storage_are_refused_on_all_ranks(
    pair: Callable[..., Pair], tmp_path: Path
) -> None:
    both, disk = pair(), tmp_path / "disk"
    disk.mkdir()
    there = both.hosts[1].own_disk(disk)
    agents = [both.begin(node, static(node, 1), *MLP, "run_id=here", cwd=disk) for node in (0, 1)]
    assert both.codes(*agents) == [1, 1], both.texts()
    folder = disk / "outputs" / "digits_mlp" / "here"
    for node in (0, 1):
        assert re.search(r"exitcode +: 2 ", both.text(node)), both.text(node)
        assert refusal(both.text(node)) == (
            f"rank 1 on hostB: {folder} of rank 0 isn't there; start all ranks where outputs/ is on storage "
            "that all machines share, at the same path"
        )
    assert [*disk.iterdir(), *there.iterdir()] == []


@pytest.mark.parametrize(
    ("a_hosts", "address", "reason"),
    [
        ("10.77.0.1 hostA", "hostA", "the name doesn't resolve here"),
        (
            "127.0.0.1 hostA",
            "localhost",
            "here it means 127.0.0.1, this machine itself, but rank 0 is on another one",
        ),
    ],
    ids=["unknown name", "loopback"],
)
@pytest.mark.slow
def test_machine_for_which_the_masters_name_is_wrong_says_so(
    pair: Callable[..., Pair], a_hosts: str, address: str, reason: str
) -> None:
    both = pair(a_hosts=a_hosts)
    options = [[o for o in c10d(node, 1) if not o.startswith("--local-addr")] for node in (0, 1)]
    # torchrun tells machines apart by name and process number, and the first name in the alphabet has rank 0
    options[1].insert(0, "--local-addr=other")
    words = (*MLP, "mode.init_timeout_seconds=25")
    agents = [both.begin(node, options[node], *words) for node in (0, 1)]
    assert both.codes(*agents) == [1, 1], both.texts()
    line = refusal(both.text(1))
    start = f"rank 1 on hostB can't reach the launcher's store at MASTER_ADDR={address}, port "
    assert line.startswith(start) and f": {reason}; add --local-addr=ADDRESS" in line, line
    assert "rank 0 waited 25 s for rank 1 of 2" in both.text(0)
    assert both.runs() == []


# ---- machines that fail and come back

STEPS = 24
LONG = (
    *(*(word for word in MLP if not word.startswith("train.max_steps")), f"train.max_steps={STEPS}"),
    "checkpoint.every_steps=2",
    *("scheduler._target_=tests.probes.FaultyCosine", "mode.timeout_seconds=20"),
)


def worlds(run: Path) -> list[int]:
    """The number of ranks of each start."""
    return [start["world_size"] for start in json.loads((run / "provenance.json").read_text())]


def wait_for(both: Pair, what: Callable[[], bool], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end or all(agent.poll() is not None for agent in both.agents):
            pytest.fail(f"not so after {seconds} s, or all ended\n{both.texts()}")
        time.sleep(0.1)


def saved(both: Pair, step: int) -> Callable[[], bool]:
    """Whether the run has a checkpoint of at least so many steps."""
    return lambda: any(n >= step for run in both.runs() for n, _ in directories.steps(run / "checkpoints"))


def assert_same_losses(run: Path, one: list[float]) -> None:
    losses = compare.losses(run)
    assert len(losses) == len(one)
    assert max(abs(a - b) for a, b in zip(losses, one, strict=True)) < 1e-9


@pytest.mark.slow
def test_worker_killed_on_the_other_machine_goes_on_from_the_last_checkpoint(
    pair: Callable[..., Pair], alone: Callable[..., list[float]], tmp_path: Path
) -> None:
    both = pair()
    env = {"TEST_FAULT": "SIGKILL@15:1", "TEST_FAULT_ONCE": str(tmp_path / "killed")}
    agents = [both.begin(node, c10d(node, 1, restarts=3), *LONG, **env) for node in (0, 1)]
    assert both.codes(*agents) == [0, 0], both.texts()
    assert (tmp_path / "killed").exists() and worlds(both.run()) == [2, 2]
    assert "continuing after step 14" in (both.run() / "train.log").read_text()
    assert_same_losses(both.run(), alone(*LONG))


@pytest.mark.slow
@pytest.mark.parametrize("lose", [Host.kill, Host.unplug], ids=["all its processes die", "cable pulled"])
def test_survivor_of_a_lost_machine_goes_on_from_the_last_checkpoint(
    pair: Callable[..., Pair], alone: Callable[..., list[float]], lose: Callable[[Host], None]
) -> None:
    both = pair()
    options = [c10d(node, 1, nodes="1:2", restarts=3) for node in (0, 1)]
    agents = [both.begin(node, options[node], *LONG, TEST_PAUSE="0.3") for node in (0, 1)]
    wait_for(both, saved(both, 6))
    lose(both.hosts[1])
    assert both.codes(agents[0], seconds=90) == [0], both.texts()
    assert worlds(both.run()) == [2, 1]
    assert "continuing after step" in (both.run() / "train.log").read_text()
    assert_same_losses(both.run(), alone(*LONG))


@pytest.mark.slow
def test_machine_that_comes_back_is_taken_in_again(
    pair: Callable[..., Pair], alone: Callable[..., list[float]]
) -> None:
    both = pair()
    options = [c10d(node, 1, nodes="1:2", restarts=3) for node in (0, 1)]
    env = {"TEST_PAUSE": "1.0", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = (*LONG, "run_id=same")
    agents = [both.begin(node, options[node], *words, **env) for node in (0, 1)]
    wait_for(both, saved(both, 4))
    both.hosts[1].kill()
    wait_for(both, lambda: worlds(both.run()) == [2, 1])
    wait_for(both, saved(both, 6))
    agents[1] = both.begin(1, options[1], *words, **env)
    assert both.codes(*agents) == [0, 0], both.texts()
    assert worlds(both.run()) == [2, 1, 2]
    assert (both.run() / "train.log").read_text().count("continuing after step") == 2
    assert_same_losses(both.run(), alone(*LONG))
