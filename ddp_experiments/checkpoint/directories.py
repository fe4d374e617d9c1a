"""Checkpoint folders that are whole or not there.

    checkpoints/step-1000/  model-00000.safetensors  optimizer-00000.safetensors  state.json  manifest.json
    checkpoints/best.json   {"step": 1000, "metric": "loss", "value": 0.1}

A step is written into `step-N.tmp`, every file synced, the manifest with sizes and SHA-256 last; then the
folder is renamed and its parent synced. Nothing is overwritten; what is removed becomes `.trash-...` first.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_experiments.checkpoint.tensors import Stage, read
from ddp_experiments.errors import NoUsableCheckpoint

FORMAT = 1
JSON_BYTES = 64 << 20  # a larger state or manifest is refused before it is read
logger = logging.getLogger("ddp_experiments")


# ---- reading


def steps(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints of a run, oldest first; unchecked."""
    if not root.is_dir():
        return []
    found = ((re.fullmatch(r"step-(\d+)", p.name), p) for p in root.iterdir() if p.is_dir())
    return sorted((int(match[1]), p) for match, p in found if match)


def read_json(path: Path) -> Any:
    """The content of a JSON file of ours.

    Raises:
        ValueError: it is damaged or too large.
    """
    if path.stat().st_size > JSON_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {JSON_BYTES}")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint against its manifest; returns its state.

    Raises:
        OSError, ValueError: a file is missing or differs; the message names it.
    """
    manifest = read_json(folder / "manifest.json")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{folder / 'manifest.json'} is damaged: no list of files")
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"{folder} has checkpoint format {manifest.get('format')}, this version reads {FORMAT}"
        )
    for name, entry in manifest["files"].items():
        path = folder / name
        if Path(name).name != name or path.is_symlink():
            raise ValueError(
                f"{folder / 'manifest.json'} names {name!r}, which is no plain file of the folder"
            )
        if (size := path.stat().st_size) != entry["size"]:
            raise ValueError(f"{path} has {size} bytes, its manifest says {entry['size']}")
        if _hash(path) != entry["sha256"]:
            raise ValueError(f"{path} is damaged: its SHA-256 is not that of the manifest")
    if "state.json" not in manifest["files"]:
        raise ValueError(f"{folder / 'manifest.json'} is damaged: it doesn't name state.json")
    state = read_json(folder / "state.json")
    if not isinstance(state, dict):
        raise ValueError(f"{folder / 'state.json'} is damaged: no object")
    return state


def newest(root: Path) -> Path | None:
    """The newest checkpoint of a run that is sound; None if there never was one.

    Raises:
        NoUsableCheckpoint: there are some, but none is sound.
    """
    reasons = []
    for _, folder in reversed(steps(root)):
        try:
            verify(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reasons.append(f"{folder.name}: {error}")
            continue
        for reason in reasons:
            logger.warning("checkpoint skipped: %s; taking %s", reason, folder.name)
        return folder
    if reasons:
        raise NoUsableCheckpoint(f"no usable checkpoint in {root}: " + "; ".join(reasons))
    return None


def best(root: Path) -> Path | None:
    """The folder that best.json points to, if it points to one."""
    try:
        folder = root / f"step-{int(read_json(root / 'best.json')['step'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if folder.is_dir() else None


def tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """All tensors of a kind (model, optimizer, ema) in a checkpoint; empty if it has none."""
    found: dict[str, Tensor] = {}
    for name in sorted(read_json(folder / "manifest.json")["files"]):  # nothing that verify hasn't seen
        if re.fullmatch(rf"{kind}-\d+\.safetensors", name):
            found.update(read(folder / name))
    return found


# ---- writing


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, value: object) -> dict[str, object]:
    text = json.dumps(value, allow_nan=False, indent=1).encode()
    with path.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}


def remove(folder: Path) -> None:
    """Remove a folder so that no moment shows half of it under its own name."""
    trash = folder.with_name(f".trash-{folder.name}-{os.getpid()}")
    folder.rename(trash)
    _sync_folder(folder.parent)
    shutil.rmtree(trash)


class Writer:
    """Writes the checkpoints of a run in a thread. Other ranks than 0 hold replicas: there it does nothing.

    Args:
        keep_last: newest checkpoints kept; the best one stays as well.
        is_mine: tells whether this start still is the run's writer; asked before every rename.
    """

    def __init__(self, root: Path, *, keep_last: int, is_writer: bool, is_mine: Callable[[], bool]) -> None:
        self.root, self.keep_last, self.is_writer, self.is_mine = root, keep_last, is_writer, is_mine
        self.stages: dict[str, Stage] = {}
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        if is_writer:
            root.mkdir(parents=True, exist_ok=True)
            for left in (*root.glob("step-*.tmp"), *root.glob(".trash-*")):
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self,
        step: int,
        kinds: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        best: Mapping[str, Any] | None,
    ) -> None:
        """Copy the tensors, and write them in the background. A failure shows in `error`.

        Args:
            kinds: tensors by name, by kind (model, optimizer, ema).
            best: what best.json has to say if this run has a best step.
        """
        self.wait()
        if not self.is_writer or self.error:
            return
        for kind, named in kinds.items():
            if kind not in self.stages or not self.stages[kind].fits(named):
                self.stages[kind] = Stage(named)
            self.stages[kind].copy(named)
        self._thread = threading.Thread(target=self._write, args=(step, dict(state), best), name="checkpoint")
        self._thread.start()

    def point_to(self, best: Mapping[str, Any]) -> None:
        """Make best.json say which step is the best, if it doesn't."""
        with suppress(OSError, ValueError):
            if read_json(self.root / "best.json") == best:
                return
        temporary = self.root / ".best.json.tmp"
        _write_json(temporary, best)
        temporary.replace(self.root / "best.json")
        _sync_folder(self.root)

    def wait(self) -> None:
        """Wait until the last save is on disk, or has failed."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[str, Any], best: Mapping[str, Any] | None) -> None:
        temporary, final = self.root / f"step-{step}.tmp", self.root / f"step-{step}"
        try:
            temporary.mkdir()
            files = {f"{kind}-00000.safetensors": stage for kind, stage in self.stages.items()}
            entries = {name: stage.write(temporary / name) for name, stage in files.items()}
            entries["state.json"] = _write_json(temporary / "state.json", {"format": FORMAT, **state})
            _write_json(temporary / "manifest.json", {"format": FORMAT, "files": entries})
            _sync_folder(temporary)
            if not self.is_mine():
                raise RuntimeError(f"{self.root.parent} has been taken over by another start of the same run")
            if final.exists():  # the run went back behind this step; what is newer replaces it
                remove(final)
            temporary.rename(final)
            _sync_folder(self.root)
            if best is not None:
                self.point_to(best)
            self._retain(step, None if best is None else int(best["step"]))
        except Exception as error:
            self.error = error
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                self.error = self._explained(error, final)

    def _explained(self, error: Exception, final: Path) -> Exception:
        if not isinstance(error, OSError):
            return error
        needed = sum(stage.size for stage in self.stages.values())
        free = shutil.disk_usage(self.root).free
        text = f"checkpoint {final} not written: {error.strerror}; it needs {needed} bytes, {free} are free"
        return OSError(error.errno, f"{text}; the checkpoints before it are intact")

    def _retain(self, written: int, best_step: int | None) -> None:
        # Where damaged checkpoints were skipped, newer folders than the one just written don't count.
        until_now = [(step, folder) for step, folder in steps(self.root) if step <= written]
        for step, folder in until_now[: -self.keep_last]:
            if step != best_step:
                remove(folder)
