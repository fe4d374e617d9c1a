"""Ranks that stay alive between tests: starting one costs seconds.

Each worker runs `train.py` with the arguments and launcher variables it is given, as often as it is asked.
The pool plays torchrun's part: it hosts a store for each start and sets the variables that torchrun sets.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
)
SECONDS = 60


@dataclass
class Result:
    """What a start of train.py left: exit codes and console text by rank, and new run folders."""

    exit_codes: list[int]
    texts: list[str]
    cwd: Path
    folders: list[Path] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        assert len(self.folders) == 1, f"want one new run folder, got {self.folders}\n{self.text}"
        return self.folders[0]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)

    def ok(self) -> "Result":
        assert set(self.exit_codes) == {0}, f"exit codes {self.exit_codes}\n{self.text}"
        return self


class Rank:
    """One worker process."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER} | {"OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "tests.ranks"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe, env=environment, text=True)

    def ask(self, request: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return self.process.wait()
        return int(json.loads(line)["exit"])

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Pool:
    """Workers by number; one that died is replaced at the next start."""

    def __init__(self) -> None:
        self.ranks: list[Rank] = []

    def _fresh(self, count: int) -> list[Rank]:
        self.ranks = [r if r.process.poll() is None else Rank() for r in self.ranks]
        while len(self.ranks) < count:
            self.ranks.append(Rank())
        return self.ranks[:count]

    def train(
        self,
        cwd: Path,
        *words: str,
        ranks: int = 0,
        env: dict[str, str] | None = None,
        per_rank: dict[int, dict[str, str]] | None = None,
        words_of: dict[int, list[str]] | None = None,
    ) -> Result:
        """Run `train.py words` in `cwd`: by itself (ranks=0), or as so many ranks of one torchrun.

        Args:
            env: variables of all ranks.
            per_rank: more variables of some ranks.
            words_of: more words of some ranks.
        """
        count = max(1, ranks)
        workers = self._fresh(count)
        before = set(_runs(cwd))
        store = None
        if ranks:
            store = loopback_store()
        logs = [cwd / f".console.{i}" for i in range(count)]
        for i, worker in enumerate(workers):
            variables = dict(env or {}) | (per_rank or {}).get(i, {})
            if store is not None:
                variables |= launcher_variables(i, ranks, store.port)
            argv = [*words, *(words_of or {}).get(i, [])]
            worker.ask({"argv": argv, "cwd": str(cwd), "env": variables, "log": str(logs[i])})
        timer = threading.Timer(SECONDS, lambda: [w.stop() for w in workers])
        timer.start()
        try:
            codes = [worker.answer() for worker in workers]
        finally:
            timer.cancel()
        texts = [log.read_text() for log in logs]
        for log in logs:
            log.unlink()
        return Result(codes, texts, cwd, sorted(set(_runs(cwd)) - before))

    def close(self) -> None:
        for rank in self.ranks:
            rank.stop()


def loopback_store() -> Any:
    """A store as torchrun has one, on IPv4 alone: c10d looks up names of others, which may take seconds."""
    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def launcher_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets for a rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _runs(cwd: Path) -> list[Path]:
    return [p.parent for p in cwd.glob("outputs/**/config.yaml")]


def _serve() -> None:
    """The worker: run one request after the other. The answers go to what was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    console = os.dup(2)
    environment = dict(os.environ)
    import torch

    from ddp_experiments import cli, experiment  # noqa: F401  what every start imports

    for line in sys.stdin:
        request = json.loads(line)
        os.environ.clear()
        os.environ.update(environment | request["env"])
        os.chdir(request["cwd"])
        sys.argv = ["train.py", *request["argv"]]
        sys.orig_argv[:] = [sys.executable, *sys.argv]
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code: Any = 0
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as leaving:
            code = 0 if leaving.code is None else leaving.code
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(console, 1)
        os.dup2(console, 2)
        assert not torch.distributed.is_initialized()
        print(json.dumps({"exit": int(code)}), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
