"""Which network interface leads to the other machines, and why the launcher's store isn't reached. No torch.

Gloo takes the interface that the machine's own name resolves to, and hosts files often say 127.0.0.1: then
the other machines are told to call themselves. The way to the master is the better witness.
"""

import fcntl
import ipaddress
import logging
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

from ddp_experiments.environment import INTERFACES, Environment, name_interface
from ddp_experiments.errors import Refused

logger = logging.getLogger("ddp_experiments")
SIOCGIFCONF = 0x8912  # Linux: all IPv4 addresses of all interfaces
IFREQ_BYTES = 24 + 2 * struct.calcsize("P")
LOOPBACK_SECONDS = 10  # for a store that is up before its workers, at an address that can hardly be right
HINT = (
    "add --local-addr=ADDRESS to each torchrun, with that machine's own address, or give the launcher an "
    "address instead of a name"
)


class Here(TypedDict):
    """What a rank tells about its machine."""

    host: str
    address: str | None  # on the way to the master


def use_interface(environment: Environment, all_say: Callable[[str, Here], list[Here]]) -> None:
    """Choose the interface for gloo and NCCL where the user left it open, and log it.

    Collective if the world spans machines: all ranks must call, whatever is set on theirs.

    Args:
        all_say: `meeting.Meeting.all_say`.
    """
    if environment.nnodes < 2:
        return
    here = Here(
        host=socket.gethostname(), address=address_towards(environment.master_addr, environment.master_port)
    )
    said, address = all_say("network", here), here["address"]
    if address is None or is_loopback(address):  # the master's machine; its name may mean loopback there
        known = [one["address"] for one in said if one["address"] and not is_loopback(one["address"])]
        address = next(filter(None, map(address_towards, known)), address)
    who = f"rank {environment.rank} on {here['host']}"
    if address is None or is_loopback(address):
        if {one["host"] for one in said} != {here["host"]}:  # several launchers on one machine may use it
            logger.warning(
                "%s: no way to the other machines but the loopback address, where they can't answer; set %s "
                "on this machine (ip -br addr lists its interfaces)",
                who,
                " and ".join(f"{variable}=INTERFACE" for variable in INTERFACES),
            )
        return
    name = interface_of(address)
    if name is not None and name_interface(name):
        logger.info("%s: interface %s, %s", who, name, address)


def address_towards(host: str, port: int = 0) -> str | None:
    """The own address on the way to a host, None if there is no way. Sends nothing."""
    found = []
    for family, address in _resolved(host, port or 9):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                found.append(str(probe.getsockname()[0]).partition("%")[0])
        except OSError:
            continue
    return next((a for a in found if not is_loopback(a)), found[0] if found else None)


def _resolved(host: str, port: int) -> Iterator[tuple[int, tuple[str, int]]]:
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            yield family, address  # type: ignore[misc]
    except OSError:
        return


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """The interface that has an address; None where the system doesn't tell in the way of Linux."""
    if sys.platform != "linux":
        return None
    wanted = ipaddress.ip_address(address)
    try:
        pairs = list(_interfaces_4() if wanted.version == 4 else _interfaces_6())
    except OSError:
        return None
    return next((name for name, has in pairs if has == wanted), None)


def _interfaces_4() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    room = array("B", bytes(IFREQ_BYTES * 1024))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        (used,) = struct.unpack_from("i", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    for at in range(0, used, IFREQ_BYTES):
        name, address = struct.unpack_from("16s4x4s", room, at)
        label = name.partition(b"\0")[0].decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(address)  # eth0:1 is a second address of eth0


def _interfaces_6() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(digits))


# ---- a store that can't be reached


def patience(environment: Environment, seconds: float) -> float:
    """How long to try to reach the launcher's store: it is up before its workers, if the address is right."""
    return min(seconds, LOOPBACK_SECONDS) if environment.agent_store and _misled(environment) else seconds


def _misled(environment: Environment) -> str | None:
    """What is wrong with the master's address as this machine understands it."""
    found = {str(address[0]) for _, address in _resolved(environment.master_addr, environment.master_port)}
    if not found:
        return "the name doesn't resolve here"
    if environment.node_rank > 0 and all(is_loopback(a) for a in found):
        return f"here it means {', '.join(sorted(found))}, this machine itself, but rank 0 is on another one"
    return None


def unreachable(environment: Environment, error: Exception) -> Exception:
    """What to raise, in place of torch's own error, when the launcher's store isn't reached."""
    who = (
        f"rank {environment.rank} on {socket.gethostname()} can't reach the launcher's store at "
        f"MASTER_ADDR={environment.master_addr}, port {environment.master_port}"
    )
    misled = _misled(environment)
    if misled is not None:
        return Refused(f"{who}: {misled}; {HINT}")
    found = {str(address[0]) for _, address in _resolved(environment.master_addr, environment.master_port)}
    reason = str(error).partition("\n")[0]
    return RuntimeError(
        f"{who}: {', '.join(sorted(found))} doesn't answer ({reason}); does the launcher there run, and "
        f"does a firewall let the port through? if it is the wrong address, {HINT}"
    )
