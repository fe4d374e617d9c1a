"""A small file system of its own, to see what happens when a disk is full."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

root_only = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="mounting a file system needs root on Linux"
)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory at the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Leave no byte free."""
    with (disk / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def free(disk: Path) -> None:
    (disk / "filler").unlink()
