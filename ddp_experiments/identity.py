"""Which run this is: its folder, agreed by all ranks; its lock, status, and where it came from. No torch."""

import json
import logging
import os
import platform
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TypeVar

import yaml
from omegaconf import Container, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from ddp_experiments.config import Config, resume_rule
from ddp_experiments.environment import launch_token
from ddp_experiments.errors import Refused
from ddp_experiments.lock import Lock

T = TypeVar("T")
logger = logging.getLogger("ddp_experiments")
PATCH_BYTES = 1 << 20  # of uncommitted changes; a larger patch is cut and says so
OTHER_RESOLVER = re.compile(r"\$\{(?!oc\.env:)[\w.]+:")
SHARED_SECONDS = 10.0  # network file systems show new files late
PACKAGES = ("torch", "hydra-core", "omegaconf", "numpy", "tensorboard", "scikit-learn", "ddp_experiments")


class Agreement(Protocol):
    """What `meeting.Meeting` offers: decisions of rank 0 that all ranks share before there is a group."""

    def once(self, key: str, make: Callable[[], str]) -> str: ...
    def rank0_decides(self, key: str, decide: Callable[[], T]) -> T: ...
    def all_say(self, key: str, value: T) -> list[T]: ...


@dataclass(frozen=True)
class Origin:
    """Where a run comes from: what was asked for, to be written down."""

    settings: Mapping[str, Any]  # resolved; environment values stay `${oc.env:...}`
    overrides: Sequence[str] = ()
    command: str = ""
    folder: str | None = None  # where a sweep wants it


# ---- the config as it is written down


def saved_form(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, to be written down: resolved, but `${oc.env:...}` stays as it is."""
    raw = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    OmegaConf.register_new_resolver("oc.env", _as_typed, replace=True)
    try:
        plain = _plain(raw)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    assert isinstance(plain, dict)
    return plain


def _as_typed(name: str, *default: Any) -> str:
    """What was typed to get an environment value, in place of the value: it may be a secret."""
    quoted = ["null" if d is None else repr(d) if isinstance(d, str) else str(d) for d in default]
    return f"${{oc.env:{','.join([name, *quoted])}}}"


def _plain(node: Container) -> Any:
    """Plain values, resolved; what needs the environment to be found at all stays as it is."""

    def entry(key: Any) -> Any:
        raw = node._get_node(key)._value()  # type: ignore[union-attr]
        try:
            value = node[key]
        except OmegaConfBaseException:
            return raw
        if isinstance(value, str) and "${oc.env:" in value and OTHER_RESOLVER.search(str(raw)):
            return raw  # what is around it, a decoder say, is still to be done
        return _plain(value) if isinstance(value, Container) else value

    if isinstance(node, ListConfig):
        return [entry(i) for i in range(len(node))]
    return {str(key): entry(key) for key in node}


# ---- the folder


def new_folder(parent: Path, name: str = "") -> Path:
    """Make a folder named by the clock, or otherwise; of several starts in the same second each gets its own.

    Raises:
        Refused: it can't be made.
    """
    stamp = name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for folder in (parent / stamp, *(parent / f"{stamp}_{i}" for i in range(2, 10_000))):
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise unwritable(parent, error) from None
    raise Refused(f"no free name below {parent}; give run_id=NAME")


def unwritable(path: Path, error: OSError) -> Refused:
    return Refused(f"can't write to {path}: {error.strerror}; start where outputs/ can be written")


def load_config(folder: Path) -> dict[str, Any]:
    """The saved settings of a run; environment values stay `${oc.env:...}`.

    Raises:
        Refused: the folder holds no run.
    """
    try:
        node = OmegaConf.load(folder / "config.yaml")
    except (OSError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or f"not readable: {error}".splitlines()[0]
        runs = sorted((p.parent for p in folder.glob("*/config.yaml")), key=lambda p: p.stat().st_mtime)
        which = shown(runs[-1].resolve()) if runs else "outputs/NAME/RUN"
        raise Refused(f"{folder / 'config.yaml'}: {reason}; give the folder of a run, {which}") from None
    saved = OmegaConf.to_container(node, resolve=False)
    if not isinstance(saved, dict) or not saved:
        raise Refused(
            f"{folder / 'config.yaml'} holds no settings; give the folder of a run, outputs/NAME/RUN"
        )
    return {str(k): v for k, v in saved.items()}


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested settings."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changes(old: Mapping[str, Any], new: Mapping[str, Any], horizon: bool) -> list[tuple[str, Any, Any, str]]:
    """(key, old, new, resume rule) of every setting that differs."""
    before, after = dict(flat(old)), dict(flat(new))
    keys = (k for k in {**before, **after} if before.get(k) != after.get(k))
    return [(k, before.get(k), after.get(k), resume_rule(k, horizon)) for k in keys]


def check_changes(
    folder: Path, saved: Mapping[str, Any], allow: Sequence[str], horizon: bool
) -> list[tuple[str, Any, Any, str]]:
    """The settings that differ from the run's own, if each may.

    Raises:
        Refused: one may not; the lines are the difference.
    """
    found = changes(load_config(folder), saved, horizon)
    faults = []
    for key, old, new, rule in found:
        if rule == "fixed":
            faults.append(
                f"{key}: {folder} has {old}, now {new}; it is fixed for a run: leave it, or start a new run"
            )
        elif rule == "ask" and not any(key == a or key.startswith(f"{a}.") for a in allow):
            faults.append(
                f"{key}: {folder} has {old}, now {new}; add 'resume.allow=[{key}]' to change it on the way"
            )
    if faults:
        raise Refused(*faults)
    return found


# ---- a run


@dataclass
class Run:
    """A run folder that belongs to this start. Rank 0 writes its files; the others write only their log."""

    folder: Path
    writer: bool
    continued: bool
    lock: Lock | None

    def status(self, state: str, *, step: int, reason: str = "", exit_code: int | None = None) -> None:
        """Replace status.json: running, done, failed, interrupted or preempted. Rank 0 only does it."""
        if self.writer:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            body = {"state": state, "step": step, "reason": reason, "exit_code": exit_code}
            where = {"host": socket.gethostname(), "pid": os.getpid(), "time": now}
            try:
                write_json(self.folder / "status.json", {**body, **where})
            except OSError as error:  # a full disk must not end the run, nor hide what ended it
                logger.warning("status.json not written: %s", error)


@contextmanager
def claim(config: Config, origin: Origin, agreement: Agreement, *, rank: int, horizon: bool) -> Iterator[Run]:
    """The folder of this run, made or continued, locked while the block runs. All ranks must call.

    Args:
        horizon: the learning rate follows from the length of the run.

    Raises:
        Refused: the folder can't be written, is in use, is no run, or the settings may not change so.
    """
    token = agreement.once("token", launch_token)
    lock: list[Lock] = []

    def decide() -> dict[str, Any]:
        folder, continued = _choose(config, agreement, origin)
        holder = Lock(folder, token)
        try:
            holder.acquire()
            if continued:
                found = check_changes(folder, origin.settings, config.resume.allow, horizon)
                _write_config(folder, origin.settings, keep=bool(found))
            else:
                _write_config(folder, origin.settings, keep=False)
        except BaseException as error:
            holder.release()
            if isinstance(error, OSError):
                raise unwritable(folder, error) from None
            raise
        lock.append(holder)
        return {"folder": str(folder.resolve()), "continued": continued}

    answer = agreement.rank0_decides("run", decide)
    run = Run(Path(answer["folder"]), rank == 0, answer["continued"], lock[0] if lock else None)
    try:
        _check_shared(run, token, agreement, rank)
        yield run
    finally:
        if run.lock:
            run.lock.release()


def _check_shared(run: Run, token: str, agreement: Agreement, rank: int) -> None:
    """See that every rank has the run's folder before its eyes, and not one of its own machine.

    Raises:
        Refused: a rank hasn't, on all ranks alike; what was made for this start is gone again.
    """
    end = time.monotonic() + SHARED_SECONDS
    while not (sees := Lock(run.folder, token).is_seen()) and time.monotonic() < end:
        time.sleep(0.1)
    blind = [who for who in agreement.all_say("sees", None if sees else [rank, socket.gethostname()]) if who]
    if not blind:
        return
    if run.lock and not run.continued:
        run.lock.release()
        _remove(run.folder)
    ranks = ", ".join(f"rank {who} on {host}" for who, host in blind)
    raise Refused(
        f"{ranks}: {run.folder} of rank 0 isn't there; start all ranks where outputs/ is on storage that all "
        "machines share, at the same path"
    )


def _remove(folder: Path) -> None:
    """Take back what `claim` made, and the folders above as far as they are empty."""
    for name in ("config.yaml", "lock"):
        (folder / name).unlink(missing_ok=True)
    for path in (folder, folder.parent, folder.parent.parent):
        with suppress(OSError):  # something is in it
            path.rmdir()


def names_a_run(config: Config) -> bool:
    """Tell whether the settings name a run that exists, and so continue it."""
    if config.resume.run:
        return True
    return (
        bool(config.run_id) and (Path("outputs") / config.name / str(config.run_id) / "config.yaml").exists()
    )


def go_on(folder: Path) -> str:
    """What to type to continue a run."""
    return f"python train.py --continue {shlex.quote(shown(folder.resolve()))}"


def last_word(folder: str | None, text: str) -> str:
    """The sentence for ranks that could not say it themselves: cause, last checkpoint, what to type."""
    if folder is None or not (Path(folder) / "config.yaml").exists():
        return text
    steps = [int(p.name[5:]) for p in Path(folder).glob("checkpoints/step-*") if p.name[5:].isdecimal()]
    last = Path(folder) / "checkpoints" / f"step-{max(steps, default=0)}"
    saved = f"last checkpoint {shown(last.resolve())}" if steps else "no checkpoint yet"
    return f"{text}; {saved}; go on with: {go_on(Path(folder))}"


def shown(path: Path) -> str:
    """A path as a person would type it: relative to where the program runs, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _choose(config: Config, agreement: Agreement, origin: Origin) -> tuple[Path, bool]:
    """(folder, whether it already holds a run). Rank 0 only."""
    if config.resume.run:
        folder = Path(config.resume.run)
        load_config(folder)
        return folder, True
    if origin.folder is not None:
        folder = Path(origin.folder)
        return folder, (folder / "config.yaml").exists()
    parent = Path("outputs") / config.name
    folder = parent / (config.run_id or agreement.once("run_id", lambda: new_folder(parent).name))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [p.name for p in folder.iterdir() if p.name != "lock" and not p.name.startswith(".")]
    except OSError as error:
        raise unwritable(folder, error) from None
    if others and "config.yaml" not in others:
        raise Refused(f"{folder} exists and is no run (no config.yaml); give another run_id=NAME")
    return folder, bool(others)


# ---- where it came from


def write_json(path: Path, value: object) -> None:
    """Replace a file by JSON, whole or not at all."""
    replace_file(path, json.dumps(value, indent=1) + "\n")


def replace_file(path: Path, text: str) -> None:
    """Replace a file by a text, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write_config(folder: Path, saved: Mapping[str, Any], *, keep: bool) -> None:
    path = folder / "config.yaml"
    if keep:  # what ran before is not lost
        number = 1 + sum(1 for _ in folder.glob("config.[0-9]*.yaml"))
        (folder / f"config.{number}.yaml").write_bytes(path.read_bytes())
    head = f"# the same again: python train.py --from-run {shlex.quote(str(folder))}\n"
    replace_file(path, head + OmegaConf.to_yaml(dict(saved)))  # quotes texts that it would read as numbers


def record_start(run: Run, origin: Origin, world: Mapping[str, Any]) -> dict[str, Any]:
    """Add this start to provenance.json: command, versions, git state, host, world. Rank 0 only."""
    commit, patch = _git()
    start = {
        "command": origin.command,
        "overrides": list(origin.overrides),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "git_commit": commit,
        "git_dirty": bool(patch),
        **world,
    }
    path = run.folder / "provenance.json"
    try:
        starts = json.loads(path.read_text()) if path.exists() else []
        if patch:
            (run.folder / f"git.{len(starts) + 1}.patch").write_bytes(patch)
        write_json(path, [*starts, start])
    except (OSError, ValueError) as error:  # a full disk, or a damaged file: the other ranks go on as well
        logger.warning("%s not written: %s", path, error)
    return start


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> tuple[str | None, bytes]:
    """(commit, patch of uncommitted changes); without git or a repository nothing."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> bytes:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, check=True, timeout=20
        ).stdout

    try:
        commit, patch = git("rev-parse", "HEAD").decode().strip(), git("diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None, b""
    if len(patch) > PATCH_BYTES:
        patch = patch[:PATCH_BYTES] + f"\n# cut: the patch has {len(patch)} bytes\n".encode()
    return commit, patch
