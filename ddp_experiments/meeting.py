"""What the ranks of a start agree on through the launcher's store, before, beside and after a group.

Always under a prefix that all ranks agree on anew: the keys of an earlier round of workers, or of an earlier
job of a sweep, can't be read by a later one.
"""

import json
import math
import re
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ddp_experiments import network
from ddp_experiments.config import Mode
from ddp_experiments.environment import Environment
from ddp_experiments.errors import Exit, NonFiniteError, NoUsableCheckpoint, PeerFailed, Refused, Stopped
from ddp_experiments.lookout import LATE_SECONDS, LEAVE_SECONDS, Lookout

T = TypeVar("T")
PACKAGE = Path(__file__).parent
ABOUT = ("loop", "experiment", "recorder")  # modules whose functions say what a rank was about
OWN_ERRORS = (Refused, NoUsableCheckpoint, NonFiniteError)  # all ranks agree on them and raise them alike


class Meeting:
    """The ranks of one start, meeting at the launcher's store; without a launcher one rank, and no store."""

    def __init__(self, environment: Environment, mode: Mode) -> None:
        self.environment, self.timeout = environment, timedelta(seconds=mode.init_timeout_seconds)
        self.launcher_store: Store | None = None
        self.store: Store | None = None
        self.cause: dict[str, Any] | None = None
        self.abort: Callable[[], None] | None = None  # of a group whose calls don't end by themselves
        self._spoken = False
        self._lookout: Lookout | None = None
        if environment.launched and environment.master_port:
            self.launcher_store = self.client(hosts=not environment.agent_store and environment.rank == 0)
            self.round = self._round()
            if environment.rank == 0:
                self.launcher_store.delete_key("ddpx/cause")  # of an attempt before
            self.store = PrefixStore(f"ddpx/{self.round}", self.launcher_store)
            # All are here now; what a rank decides may take longer, such as checking a large checkpoint.
            self.timeout = max(self.timeout, timedelta(seconds=mode.timeout_seconds))
            self.store.set_timeout(self.timeout)
            if environment.world_size > 1:
                self._lookout = Lookout(self)

    def client(self, hosts: bool = False) -> Store:
        """The launcher's own store; where it has none, one that rank 0 hosts at the address it gave.

        Raises:
            Refused: another program has the port, or the address can't be right.
            RuntimeError: nothing answers at the address.
        """
        address, port = self.environment.master_addr, self.environment.master_port
        seconds = network.patience(self.environment, self.timeout.total_seconds())
        try:
            store = TCPStore(
                address,
                port,
                is_master=hosts,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=seconds),
            )
        except dist.DistError as error:
            if hosts and "EADDRINUSE" in str(error):
                taken = f"port {port}, MASTER_PORT, is taken by another program"
                raise Refused(f"{taken}; set another one for all ranks") from None
            raise network.unreachable(self.environment, error) from None
        store.set_timeout(self.timeout)
        return store

    def _round(self) -> str:
        """A name for this round of workers, agreed by all ranks, however often the store was used before.

        Every rank posts a request under a name that nobody used before, so no answer can be an old one.
        The restart count of torchrun won't do: it is counted by each machine for itself.
        """
        store, me = self.launcher_store, uuid.uuid4().hex
        rank, world_size = self.environment.rank, self.environment.world_size
        assert store is not None
        if rank > 0:
            store.queue_push("ddpx/round", f"request {rank} {me}")
            self._until(lambda: store.check([f"ddpx/round/{me}"]), lambda: [0])
            agreed = store.get(f"ddpx/round/{me}").decode()
            store.queue_push("ddpx/round", f"agreed {rank} {agreed}")
            return agreed
        met: set[int] = set()
        while len(met) < world_size - 1:
            self._until(
                lambda: store.queue_len("ddpx/round") > 0, lambda: sorted(set(range(1, world_size)) - met)
            )
            kind, who, name = store.queue_pop("ddpx/round").decode().split()
            if kind == "request":
                store.set(f"ddpx/round/{name}", me)
            elif name == me:
                met.add(int(who))
        return me

    def _until(self, is_true: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Wait, in Python: a signal's handler isn't called while the store waits in C++.

        Raises:
            PeerFailed: it takes too long.
        """
        end, pause = time.monotonic() + self.timeout.total_seconds(), 0.001
        longest = 0.02 * max(1, self.environment.world_size / 64)  # seconds: many ranks ask one store
        while not is_true():
            if time.monotonic() > end:
                who = f"rank {', '.join(map(str, missing()))} of {self.environment.world_size}"
                raise PeerFailed(
                    f"rank {self.environment.rank} waited {self.timeout.seconds} s for {who}: start all of "
                    "them, or raise mode.init_timeout_seconds"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    # ---- agreeing

    def once(self, key: str, make: Callable[[], str]) -> str:
        """A value that rank 0 makes at the first start; it stays over restarts of the workers."""
        if self.launcher_store is None:
            return make()
        store, name = self.launcher_store, f"ddpx/{key}"
        if self.environment.rank == 0 and not store.check([name]):
            store.set(name, make())
        self._until(lambda: store.check([name]) or self._failed(), lambda: [0])
        return store.get(name).decode()

    def _failed(self) -> bool:
        """False; raises why another rank has failed, if one has."""
        if self.look() is not None:
            self.raise_cause()
        return False

    def _wait(self, key: str, who: int) -> Any:
        """What rank `who` says under a key of this round; ends early if a rank has failed."""
        store = self.store
        assert store is not None
        self._until(lambda: store.check([key]) or self._failed(), lambda: [who])
        return json.loads(store.get(key))

    def gather(self, key: str, value: T) -> list[T]:
        """Every rank's value, by rank, as plain values: on rank 0; elsewhere nothing.

        Collective: all ranks must call.

        Raises:
            PeerFailed, Refused, NoUsableCheckpoint, Stopped: a rank has failed, or has not come in time.
        """
        if self.store is None:
            return [value]
        rank, world_size = self.environment.rank, self.environment.world_size
        store, keys = self.store, [f"{key}/{r}" for r in range(world_size)]
        store.set(keys[rank], json.dumps(value))
        if rank > 0:
            return []
        self._until(
            lambda: store.check(keys) or self._failed(),
            lambda: [r for r, name in enumerate(keys) if not store.check([name])],
        )
        return [json.loads(said) for said in store.multi_get(keys)]

    def all_say(self, key: str, value: T) -> list[T]:
        """Every rank's value, by rank, as plain values. Collective: all ranks must call.

        Raises:
            as `gather`.
        """
        said = self.gather(key, value)
        return self.rank0_decides(f"{key}/all", lambda: said)

    def rank0_decides(self, key: str, decide: Callable[[], T]) -> T:
        """Rank 0's decision, as JSON, for all ranks; its refusal is raised on all of them.

        Raises:
            Refused, NoUsableCheckpoint: rank 0 raised it.
        """
        if self.store is None:
            return decide()
        if self.environment.rank == 0:
            try:
                answer: dict[str, Any] = {"value": decide()}
            except Refused as refusal:
                answer = {"refused": refusal.faults}
            except NoUsableCheckpoint as error:
                answer = {"unusable": str(error)}
            except Exception as error:
                self.settle(error)
                raise
            self.store.set(key, json.dumps(answer))
        answer = self._wait(key, 0)
        if "refused" in answer:
            raise Refused(*answer["refused"])
        if "unusable" in answer:
            raise NoUsableCheckpoint(answer["unusable"])
        value: T = answer["value"]
        return value

    # ---- failing

    def blame(self, error: BaseException, where: str = "") -> None:
        """Tell the others that this rank fails. The first to say so is the cause of what the others see.

        Call it before the group is closed: the others see that as an error of their own.
        """
        if self.store is None or self._spoken:
            return
        self._spoken = True
        told = _as_told(error) | {"rank": self.environment.rank, "host": socket.gethostname()}
        with suppress(dist.DistError, RuntimeError):  # the launcher is gone, and its store
            self.store.set(f"failing/{self.environment.rank}", "")
            self.store.add("failing", 1)
            lost = _is_of_a_collective(error)
            if lost or isinstance(error, PeerFailed):  # what another rank has done, or not done
                silent = self._silent()
                if lost and silent:
                    who = f"rank {', '.join(map(str, silent))} did not come or is gone"
                    text = re.sub(r"\[[^\]]*\] ", "", told["text"])  # a place in somebody's C++ sources
                    told["text"] = f"{who}; rank {self.environment.rank} waited{where}: {text}"
                    told["silent"] = silent
            self.cause = json.loads(self.store.compare_set("cause", "", json.dumps(told)))
            if self.guilty():
                self.leave_word("cause", self.cause)

    def _silent(self) -> list[int]:
        """The ranks that say nothing of a failure, though a collective has failed that they take part in."""
        store, world_size = self.store, self.environment.world_size
        assert store is not None
        end = time.monotonic() + LATE_SECONDS
        while time.monotonic() < end and store.add("failing", 0) < world_size and not store.check(["cause"]):
            time.sleep(0.05)
        if store.check(["cause"]):
            return []
        return [r for r in range(world_size) if not store.check([f"failing/{r}"])]

    def look(self) -> dict[str, Any] | None:
        """Why a rank has failed in this round, as the first one told; None if none has."""
        if self.store is not None and self.cause is None and self.store.check(["cause"]):
            self.cause = json.loads(self.store.get("cause"))
        return self.cause

    def guilty(self) -> bool:
        """Tell whether this rank was the first to fail, if any has."""
        return self.store is None or (self.cause is not None and self.cause["rank"] == self.environment.rank)

    def raise_cause(self, error: BaseException | None = None) -> NoReturn:
        """Raise what ended another rank, in place of what this rank has seen of it."""
        assert self.cause is not None
        cause = self.cause
        who = f"rank {cause['rank']} on {cause['host']}"
        if cause["kind"] == "refused":
            raise Refused(*(f"{who}: {fault}" for fault in cause["faults"])) from error
        if cause["kind"] == "unusable":
            raise NoUsableCheckpoint(f"{who}: {cause['text']}") from error
        if cause["kind"] == "stopped":
            raise Stopped(Exit(cause["code"])) from error
        raise PeerFailed(f"{who} failed: {cause['text']}") from error

    def settle(self, error: BaseException) -> None:
        """Blame this rank for an error, or raise the other rank's that made it. For an except clause."""
        if isinstance(error, SystemExit) and not isinstance(error, Stopped):
            ended = RuntimeError(f"something called sys.exit({error.code!r}) in the run")
            self.blame(ended)
            raise ended from error
        self.blame(error, f" in {_place_of(error)}")
        own = (*OWN_ERRORS, PeerFailed, SystemExit, KeyboardInterrupt)
        if self.cause is None or isinstance(error, own):
            return
        if not self.guilty():
            self.raise_cause(error)
        if "silent" in self.cause:
            raise PeerFailed(self.cause["text"]) from error

    def verdict(self, error: BaseException | None, stop: Exit | None) -> dict[str, Any] | None:
        """Why a job of a sweep failed, if it did: the same on all ranks, when all have left the job.

        Collective: all ranks must call. A rank that doesn't leave, long after another has failed, ends the
        sweep: `stays` in the answer names it.

        Args:
            stop: a signal that this rank got and could not heed.

        Raises:
            Stopped: a rank got one, or was stopped.
        """
        if self.store is None:
            return None if error is None else _as_told(error) | {"rank": 0, "host": socket.gethostname()}
        if error is not None:
            self.blame(error)
        self.close()
        if stop is not None:
            self.store.set("stop", str(int(stop)))
        self.store.set(f"left/{self.environment.rank}", "")
        self.store.add("left", 1)
        end, pause, world_size = math.inf, 0.005, self.environment.world_size
        while self.store.add("left", 0) < world_size:
            cause = self.look()
            if cause is not None:  # the lookout ends late ranks
                end = min(end, time.monotonic() + (3 * LATE_SECONDS if "silent" in cause else LEAVE_SECONDS))
                if time.monotonic() > end:
                    return cause | {
                        "stays": [r for r in range(world_size) if not self.store.check([f"left/{r}"])]
                    }
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        cause = self.look()
        if cause is not None and cause["kind"] == "stopped":
            raise Stopped(Exit(cause["code"]))
        if self.store.check(["stop"]):
            raise Stopped(Exit(int(self.store.get("stop"))))
        return cause

    # ---- leaving

    def leave_word(self, key: str, value: object) -> None:
        """Let rank 0, or the rank that failed first, say something to whoever has started the ranks."""
        if self.launcher_store is not None and (self.environment.rank == 0 or self.guilty()):
            self.launcher_store.set(f"ddpx/{key}", json.dumps(value))

    def close(self) -> None:
        """The round is over for this rank."""
        if self._lookout is not None:
            self._lookout.close()


def _as_told(error: BaseException) -> dict[str, Any]:
    """An error as plain values."""
    name, text = type(error).__name__, str(error).strip().partition("\n")[0]
    told = {"type": name, "text": f"{name}: {text}" if text else name, "kind": "failed"}
    if isinstance(error, PeerFailed):
        told["text"] = text
    told["traceback"] = "".join(traceback.format_exception(error))
    if isinstance(error, Refused):
        return told | {"kind": "refused", "faults": list(error.faults)}
    if isinstance(error, NoUsableCheckpoint):
        return told | {"kind": "unusable", "text": text}
    if isinstance(error, Stopped):
        return told | {"kind": "stopped", "code": int(error.code)}
    if isinstance(error, KeyboardInterrupt):
        return told | {"kind": "stopped", "code": int(Exit.INTERRUPTED)}
    return told


def in_words(cause: Mapping[str, Any]) -> str:
    """Who failed first, and why."""
    return f"rank {cause['rank']} on {cause['host']}: {cause['text']}"


def _is_of_a_collective(error: BaseException) -> bool:
    """Tell whether an error comes from the network between the ranks, and not from what they do."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "/gloo/" in str(error))


def _place_of(error: BaseException) -> str:
    """What a rank was about: train_step, train, evaluate, ..."""
    frames = traceback.extract_tb(error.__traceback__)
    names = [f.name for f in frames if Path(f.filename).parent == PACKAGE and Path(f.filename).stem in ABOUT]
    return names[-1] if names else "the start"
