"""Fixtures: the pool of living ranks, and train.py as a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import LAUNCHER, ROOT, Pool, Result

os.environ["OMP_NUM_THREADS"] = "1"


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
