"""Fixtures: the pool of living ranks, and train.py as a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.ranks import LAUNCHER, ROOT, Pool, Result

os.environ["OMP_NUM_THREADS"] = "1"


def heed_signals() -> None:
    """Undo what nohup, or a shell that starts the tests in the background, has set for all they start."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture
def train(pool: Pool, tmp_path: Path) -> Callable[..., Result]:
    """`train(*words, ranks=2)`: train.py in this test's folder, on living ranks."""

    def run(*words: str, **options: object) -> Result:
        return pool.train(tmp_path, *words, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`start("train.py", ...)`: a new process in this test's folder, under torchrun with `torchrun=2`."""

    def run(
        *words: str, torchrun: int = 0, env: dict[str, str] | None = None, timeout: int = 100
    ) -> subprocess.CompletedProcess[str]:
        program = [str(ROOT / w) if w == "train.py" else w for w in words]
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={torchrun}"] if torchrun else []
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER} | (env or {})
        command = [sys.executable, *launcher, *program]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout
        )

    return run


@pytest.fixture
def background(tmp_path: Path) -> Callable[..., AbstractContextManager[subprocess.Popen[str]]]:
    """`with background(...) as process`: train.py as a process of its own, killed at the end of the block."""

    @contextmanager
    def run(*words: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER} | (env or {})
        environment["PYTHONPATH"] = str(ROOT)  # of tests.probes
        with (tmp_path / ".console").open("w+") as console:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *words],
                cwd=tmp_path,
                env=environment,
                stdout=console,
                stderr=console,
                text=True,
                preexec_fn=heed_signals,
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    return run


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """`wait_for(lambda: ...)`: until it is true, or the test fails."""

    def wait(is_true: Callable[[], object], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < end, "it did not happen"
            time.sleep(0.05)

    return wait
