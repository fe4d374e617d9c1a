"""Which interface is chosen, on machines with several addresses."""

import json
import logging
import os
import sys
from pathlib import Path

import pytest

from ddp_experiments.environment import INTERFACES, Environment
from ddp_experiments.network import Here, address_towards, interface_of, is_loopback, use_interface
from tests.hosts import Host, needs_hosts, two_hosts
from tests.ranks import ROOT

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads what Linux says about interfaces")
TWO = Environment(
    launched=True, rank=3, world_size=4, node_rank=1, nnodes=2, master_addr="127.0.0.1", master_port=29500
)


@pytest.fixture(autouse=True)
def open_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in INTERFACES:
        monkeypatch.setenv(variable, "")  # and what a test sets is gone after it


@linux
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_loopback_address_belongs_to_lo(address: str) -> None:
    assert is_loopback(address) and interface_of(address) == "lo"


@linux
def test_address_that_no_interface_has_is_not_found() -> None:
    assert interface_of("203.0.113.7") is None


def test_way_to_a_name_that_does_not_resolve_is_none() -> None:
    assert address_towards("no-such-host.invalid", 29500) is None


def test_own_name_of_the_machine_leads_over_loopback() -> None:
    assert address_towards("localhost", 29500) in ("127.0.0.1", "::1")


def test_one_machine_chooses_nothing_and_asks_nobody() -> None:
    use_interface(Environment(), lambda key, here: pytest.fail("asked"))
    assert not any(os.environ[variable] for variable in INTERFACES)


def test_launchers_on_one_machine_leave_the_choice_open(caplog: pytest.LogCaptureFixture) -> None:
    use_interface(TWO, lambda key, here: [here] * 4)
    assert caplog.records == [] and not any(os.environ[variable] for variable in INTERFACES)


def test_other_machine_behind_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    other = Here(host="other", address="127.0.0.1")
    use_interface(TWO, lambda key, here: [other, here])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and record.getMessage().startswith("rank 3 on ")
    assert "set GLOO_SOCKET_IFNAME=INTERFACE and NCCL_SOCKET_IFNAME=INTERFACE" in record.getMessage()


CHOOSE = """
import json, logging, os, sys
from ddp_experiments.environment import INTERFACES, Environment
from ddp_experiments.network import use_interface
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
master, others, given = json.loads(sys.argv[1])
os.environ.update(given)
two = Environment(launched=True, world_size=2, nnodes=2, master_addr=master, master_port=29500)
use_interface(two, lambda key, here: [here, *({"host": "hostB", "address": a} for a in others)])
print(json.dumps([os.environ.get(name) for name in INTERFACES]))
"""


def choose(host: Host, folder: Path, master: str, *others: str, **given: str) -> list[str]:
    """What a machine prints: what it logs, and the two variables."""
    log = folder / "choose.log"
    log.unlink(missing_ok=True)
    words = [sys.executable, "-c", CHOOSE, json.dumps([master, others, given])]
    assert host.start(words, ROOT, log).wait(20) == 0, log.read_text()
    return log.read_text().splitlines()


@needs_hosts
def test_interface_on_the_way_to_the_master_is_chosen(tmp_path: Path) -> None:
    with two_hosts(tmp_path, a_hosts="127.0.1.1 hostA", b_hosts="10.77.0.1 hostA") as (a, b):
        for host in (a, b):
            assert choose(host, tmp_path, "10.77.0.1", "10.77.0.2") == [
                f"rank 0 on {host.name}: interface {host.interface}, {host.address}",
                f'["{host.interface}", "={host.interface}"]',
            ]
        by_name = f"rank 0 on hostA: interface {a.interface}, {a.address}"
        assert choose(a, tmp_path, "hostA", "10.77.0.2")[0] == by_name
        assert choose(a, tmp_path, "hostA")[0] == "[null, null]"


@needs_hosts
def test_second_address_and_ipv6_address_of_an_interface_are_found(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (a, _):
        for address in ("10.78.0.1/24", "fd77::1/64"):
            a.ip("addr", "add", address, "dev", a.interface, *(["nodad"] if ":" in address else []))
        for other, own in (("10.78.0.2", "10.78.0.1"), ("fd77::2", "fd77::1")):
            assert choose(a, tmp_path, other)[0] == f"rank 0 on hostA: interface vA, {own}"


@needs_hosts
def test_variable_that_the_user_set_stays(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as (a, _):
        line = choose(a, tmp_path, "10.77.0.1", GLOO_SOCKET_IFNAME="lo")[-1]
        assert line == '["lo", "=vA"]'
        both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        assert choose(a, tmp_path, "10.77.0.1", **both) == ['["lo", "lo"]']
