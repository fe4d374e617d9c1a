"""Who started this process and which rank it is. The only room that reads RANK, MASTER_ADDR and the like."""

import hashlib
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_experiments.errors import Refused

TELL_SECONDS = 10.0  # so long the other ranks of a machine wait for the one that speaks
INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}  # and how an exact name is written


@dataclass(frozen=True)
class Environment:
    """What the launcher says, or one process when there is none."""

    launched: bool = False  # by torchrun, or by anything else that sets the same variables
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    nnodes: int = 1
    master_addr: str = ""
    master_port: int = 0
    agent_store: bool = False  # the launcher's own store listens on master_addr:master_port
    forgetful: bool = False  # torchrun, but without its store nothing outlives a round of workers


def read(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the launcher's variables.

    Raises:
        Refused: they contradict one another, or RANK counts machines (a pod operator's meaning).
    """
    env = os.environ if variables is None else variables
    if "RANK" not in env:
        return Environment()
    if "LOCAL_RANK" not in env:
        raise Refused(
            "RANK is set but LOCAL_RANK is not: RANK may count machines (as pod operators do) or processes; "
            'on each machine type: torchrun --nnodes="$WORLD_SIZE" --node-rank="$RANK" '
            '--master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --nproc-per-node=N train.py '
            "mode=multinode; "
            "for one process without a launcher: env -u RANK -u WORLD_SIZE python train.py"
        )

    def number(name: str, default: int | None = None) -> int:
        text = env.get(name)
        if text is None and default is not None:
            return default
        if text is None or not text.isdecimal():
            raise Refused(f"the launcher's variable {name}={text!r} is not a number; start with torchrun")
        return int(text)

    world_size = number("WORLD_SIZE")
    local_world_size = number("LOCAL_WORLD_SIZE", 1 if world_size == 1 else None)
    result = Environment(
        launched=True,
        rank=number("RANK"),
        local_rank=number("LOCAL_RANK"),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=number("GROUP_RANK", number("RANK") // max(1, local_world_size)),
        nnodes=number("GROUP_WORLD_SIZE", max(1, world_size // max(1, local_world_size))),
        master_addr=env.get("MASTER_ADDR", ""),
        master_port=number("MASTER_PORT", 0),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        forgetful=env.get("TORCHELASTIC_USE_AGENT_STORE") == "False",
    )
    inside = (
        result.rank < result.world_size and result.local_rank < result.local_world_size <= result.world_size
    )
    if not inside or result.node_rank >= result.nnodes:
        raise Refused(
            f"the launcher's variables contradict one another: RANK={result.rank} "
            f"WORLD_SIZE={result.world_size} LOCAL_RANK={result.local_rank} "
            f"LOCAL_WORLD_SIZE={result.local_world_size} GROUP_RANK={result.node_rank} "
            f"GROUP_WORLD_SIZE={result.nnodes}; start with torchrun"
        )
    if result.world_size > 1 and not (result.master_addr and result.master_port):
        raise Refused("WORLD_SIZE is above 1 but MASTER_ADDR or MASTER_PORT is not set; start with torchrun")
    return result


def first_on_machine() -> bool:
    """Tell whether this process speaks for its machine; never fails, so that it can say what is wrong."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def agent_folder() -> Path | None:
    """The folder that torch elastic keeps for its workers on this machine, over all restarts; else None."""
    file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))  # FOLDER/attempt_N/LOCAL_RANK/error.json
    return file.parents[2] if len(file.parents) > 2 and file.parents[1].name.startswith("attempt_") else None


def say_once(text: str, *, is_final: bool = True) -> None:
    """Print what all ranks of a machine have to say alike, once, also over restarts of the workers.

    Args:
        is_final: and end torchrun, where it would start them again: they would end the same way.
    """
    folder = agent_folder()
    plain = re.sub(r"rank \d+ on \S+: ", "", text)  # the others say whose it is
    mark = None if folder is None else folder / f"told_{hashlib.sha256(plain.encode()).hexdigest()[:16]}"
    if mark and not first_on_machine():
        end = time.monotonic() + TELL_SECONDS  # torchrun ends all ranks as soon as one has left
        while not mark.exists() and time.monotonic() < end:
            time.sleep(0.02)
    if first_on_machine() if mark is None else not mark.exists():
        print(text, file=sys.stderr, flush=True)
    if first_on_machine() and is_final:
        stop_restarts()
    if mark:
        with suppress(OSError):
            mark.touch()


def stop_restarts() -> None:
    """End torchrun, where it would start the workers again. Nothing a worker leaves with tells it not to.

    Only torchrun's own program is ended: a program with another purpose may be an agent, too.
    """
    done, most = (os.environ.get(f"TORCHELASTIC_{n}", "") for n in ("RESTART_COUNT", "MAX_RESTARTS"))
    if not (done.isdecimal() and most.isdecimal() and int(done) < int(most)):
        return
    agent = os.getppid()
    with suppress(OSError):  # it has gone, or this system doesn't tell: it starts the workers again
        words = Path(f"/proc/{agent}/cmdline").read_text(errors="replace").split("\0")
        if any(w == "torch.distributed.run" or Path(w).name == "torchrun" for w in words):
            os.kill(agent, signal.SIGTERM)


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for what is started while the block runs."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def interface_variables(name: str) -> dict[str, str]:
    """What tells gloo and NCCL the network interface, where the user hasn't."""
    return {variable: exact + name for variable, exact in INTERFACES.items() if not os.environ.get(variable)}


def name_interface(name: str) -> bool:
    """Tell gloo and NCCL the network interface, where the user hasn't; tell whether either was told."""
    unset = interface_variables(name)
    os.environ.update(unset)
    return bool(unset)


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch_token() -> str:
    """A name for one start of the program, unlike that of any other start."""
    return secrets.token_hex(8)
