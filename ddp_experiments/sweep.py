"""A sweep: its folder, its jobs, what has become of each, and the table. No torch.

The folder tells everything, so that a sweep can be started again: `jobs.json` is the plan, and every job's
folder has a `job.json`. A job is known by what it trains, never by its number.
"""

import csv
import hashlib
import io
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode

from ddp_experiments.config import HORIZON, Config, resume_rule
from ddp_experiments.environment import Environment, launch_token
from ddp_experiments.errors import Refused
from ddp_experiments.identity import flat, new_folder, replace_file, shown, unwritable, write_json
from ddp_experiments.lock import Lock

NAME_BYTES = 120
COLUMNS = ("job", "overrides", "status", "metric", "value", "seconds", "folder", "error")
DONE = "done"
BASIC = ("BasicSweeper", "BasicLauncher")  # Hydra's defaults: every combination, one after the other


# ---- what varies


def combinations(overrides: Sequence[Override]) -> Iterator[list[str]]:
    """The overrides of each job: every combination of the swept values, the last one varying fastest."""
    choices = []
    for o in overrides:
        key = o.get_key_element()
        values = o.sweep_string_iterator() if o.is_sweep_override() else [o.get_value_element_as_str()]
        choices.append([f"{key}={v}" for v in values])
    yield from (list(job) for job in itertools.product(*choices))


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line."""
    return "'" + text.replace("\\", "\\\\").replace("'", r"\'") + "'"


def split(override: str) -> tuple[str, str]:
    """(key, value) of one `key=value`, without the plus signs."""
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def key_of(settings: Mapping[str, Any], swept: Sequence[str], horizon: bool) -> str:
    """What a job trains, as a short name: a hash of the settings that aren't free, and of what varies.

    Args:
        settings: resolved.
        swept: the overrides of this job that vary in the sweep.
        horizon: the learning rate follows from the length of the run.
    """
    varied = dict(map(split, swept))
    values = dict(flat(settings))
    parts = {k: v for k, v in values.items() if resume_rule(k, horizon) != "free" or _under(k, varied)}
    if settings.get("eval_only"):  # what is evaluated
        parts |= {k: v for k, v in values.items() if k in ("from_run", "eval.weights")}
    known = {k for k in varied if any(_under(v, [k]) for v in values)}
    parts |= {f"{k}=": v for k, v in varied.items() if k not in known}  # a preset, say
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _under(key: str, sections: Any) -> bool:
    return any(key == s or key.startswith(f"{s}.") for s in sections)


def job_name(number: int, width: int, swept: Sequence[str]) -> str:
    """`00_lr=0.001,model=cnn`: the job's number, then what varies, in the shortest unique form."""
    varied = dict(map(split, swept))
    last = [key.rpartition(".")[2] for key in varied]
    parts = []
    for (key, value), short in zip(varied.items(), last, strict=True):
        text = value.strip("[]{}'\"").replace(", ", ",")
        with suppress(ValueError):
            text = text if text.lstrip("+-").isdigit() else f"{float(text):g}"
        parts.append(f"{short if last.count(short) == 1 else key}={text}")
    name = f"{number:0{width}d}_" + ",".join(parts)
    return re.sub(r"[^A-Za-z0-9_.=,+-]+", "-", name)[:NAME_BYTES].rstrip("-_,.")


# ---- the plan


@dataclass
class Plan:
    """The jobs of a sweep by what they train, each with the name of its folder."""

    command: str = ""
    given: list[str] = field(default_factory=list)  # keys of the overrides that all jobs share
    jobs: dict[str, "Planned"] = field(default_factory=dict)

    def add(self, key: str, swept: Sequence[str], width: int) -> None:
        self.jobs[key] = Planned(job_name(len(self.jobs), width, swept), list(swept))

    def continue_from(self, before: "Plan") -> None:
        """Jobs keep the folders that they had when the sweep was started before; new ones get new numbers."""
        jobs = dict(before.jobs)
        for key, job in self.jobs.items():
            if key not in jobs:
                number, _, rest = job.folder.partition("_")
                jobs[key] = Planned(f"{len(jobs):0{len(number)}d}_{rest}", job.overrides)
            jobs[key] = Planned(jobs[key].folder, job.overrides)  # what varies now
        self.jobs = jobs


@dataclass(frozen=True)
class Planned:
    folder: str
    overrides: list[str]  # what varies


class Folder:
    """The folder of a sweep that this process runs, or helps to run."""

    def __init__(self, path: Path, lock: Lock | None, *, speaks: bool) -> None:
        self.path, self.lock, self.speaks = path, lock, speaks

    def close(self) -> None:
        """Print and write the table."""
        if self.speaks:
            found = rows(self.path)
            print(table(self.path, found), file=sys.stderr, flush=True)
            with _told("sweep.csv"):
                write_table(self.path, found)
        if self.lock is not None:
            self.lock.release()


def read_plan(folder: Path) -> Plan:
    plan = Plan(**json.loads((folder / "jobs.json").read_text()))
    plan.jobs = {key: Planned(**job) for key, job in plan.jobs.items()}  # type: ignore[arg-type]
    return plan


def choose_folder(name: str, run_id: str | None) -> Path:
    """A new folder, or the one that run_id names: a sweep that is started again.

    Raises:
        Refused: the folder is something else, or can't be made.
    """
    parent = Path("outputs") / name
    if run_id is None:
        return new_folder(parent)
    folder = parent / run_id
    try:
        folder.mkdir(parents=True, exist_ok=True)
        others = [p.name for p in folder.iterdir() if p.name != "lock"]
    except OSError as error:
        raise unwritable(folder, error) from None
    if others and "jobs.json" not in others:
        raise Refused(f"{folder} exists and is no sweep (no jobs.json); give another run_id=NAME")
    return folder


def together(config: Config, plan: Plan, environment: Environment) -> Folder:
    """The sweep's folder, the same on all ranks, with its plan written down, locked against a second start.

    Collective under a launcher: all ranks must call.

    Raises:
        Refused: the folder is something else, can't be made, or is in use.
    """
    from ddp_experiments.meeting import Meeting

    if config.mode.node_rank:  # the machine with node_rank 0 decides; all have the same name for it
        return Folder(_other_machines(config, plan), None, speaks=False)
    meeting, locks = Meeting(environment, config.mode), list[Lock]()

    def decide() -> str:
        path = Path(meeting.once("sweep", lambda: str(choose_folder(config.name, config.run_id))))
        lock = Lock(path, meeting.once("token", launch_token))
        lock.acquire()
        locks.append(lock)
        if (path / "jobs.json").exists():
            plan.continue_from(read_plan(path))
        write_json(path / "jobs.json", asdict(plan))
        return str(path)

    try:
        path = Path(meeting.rank0_decides("folder", decide))
    finally:
        meeting.close()
    return Folder(path, locks[0] if locks else None, speaks=bool(locks))


def _other_machines(config: Config, plan: Plan) -> Path:
    """The folder, once the machine with node_rank 0 has written the plan of these jobs there."""
    path = Path("outputs") / config.name / str(config.run_id)
    end = time.monotonic() + config.mode.init_timeout_seconds
    while not (path / "jobs.json").exists() or not plan.jobs.keys() <= read_plan(path).jobs.keys():
        if time.monotonic() > end:
            seconds = config.mode.init_timeout_seconds
            raise Refused(
                f"{path} is not there after {seconds} s: start the same command with mode.node_rank=0, where "
                "outputs/ is a folder that all machines share"
            )
        time.sleep(0.2)
    return path


# ---- one job


@dataclass
class Job:
    """One job of a sweep, as this process sees it."""

    number: int
    folder: Path
    key: str  # what it trains
    overrides: list[str]  # what varies
    length: list[Any]
    metric: str
    better: str
    writes: bool
    started: float = field(default_factory=time.time)

    def begin(self) -> dict[str, Any]:
        """{folder, done, value}: claim the job's folder, or find the job done already."""
        before = read_job(self.folder)
        value = before.get("value")
        if before.get("key", self.key) != self.key:  # values drawn anew, that are written alike
            self.folder = new_folder(self.folder.parent, self.folder.name)
        elif before.get("status") == DONE and _is_shorter(self.length, before["length"]):
            longer = " ".join(f"{k}={v}" for k, v in zip(HORIZON, before["length"], strict=True))
            raise Refused(f"{self.folder} is done with {longer}, longer than now; give another run_id=NAME")
        elif before.get("status") == DONE and before["length"] == self.length:
            return {"folder": str(self.folder), "done": True, "value": value}
        self.folder.mkdir(parents=True, exist_ok=True)
        self.note("running")
        return {"folder": str(self.folder), "done": False, "value": None}

    def note(self, status: str, *, value: float | None = None, error: str = "") -> None:
        """Write down what has become of the job: running, done, failed or interrupted."""
        if not self.writes:
            return
        body = {
            "job": self.number,
            "key": self.key,
            "overrides": self.overrides,
            "status": status,
            "metric": self.metric,
            "better": self.better,
            "value": value,
            "seconds": round(time.time() - self.started, 2),
            "error": error,
            "length": self.length,
        }
        with _told("job.json"):
            write_json(self.folder / "job.json", body)

    def log(self, traceback: str, why: str) -> None:
        """Add to the job's own log what its ranks may not have been able to write."""
        log, innermost = self.folder / "train.log", "\n".join(traceback.strip().splitlines()[-3:])
        if not self.writes:
            return
        with _told("train.log"):
            known = log.exists() and innermost in log.read_text()
            with log.open("a") as file:
                file.write(f"{why}\n" if known else f"{traceback.rstrip()}\n{why}\n")


@contextmanager
def _told(name: str) -> Iterator[None]:
    """A file that can't be written, on a full disk say, is told; the sweep goes on."""
    try:
        yield
    except OSError as error:
        print(f"{name} not written: {error.strerror}; the sweep goes on", file=sys.stderr, flush=True)


def _is_shorter(length: Sequence[int | None], before: Sequence[int | None]) -> bool:
    pairs = zip(length, before, strict=True)
    return any(now is not None and (was is None or now < was) for now, was in pairs)


def read_job(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "job.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def job_of(
    folder: Path,
    number: int,
    overrides: Sequence[str],
    config: Config,
    settings: Mapping[str, Any],
    horizon: bool,
    *,
    writes: bool,
) -> Job:
    """A job with its place in the folder: the planned one, or a new one where values are drawn on the way."""
    plan = read_plan(folder)
    swept = [o for o in overrides if split(o)[0] not in plan.given]
    key = key_of(settings, swept, horizon)
    planned = plan.jobs.get(key)
    name = planned.folder if planned else job_name(number, 3, swept)
    values = dict(flat(settings))
    return Job(
        number=int(name.partition("_")[0]),
        folder=folder / name,
        key=key,
        overrides=swept,
        length=[values.get(k) for k in HORIZON],
        metric=config.checkpoint.metric,
        better=config.checkpoint.metric_mode.value,
        writes=writes,
    )


def hydras_job() -> tuple[Path, int] | None:
    """(sweep's folder, number) where a sweeper of Hydra's has called us for a job."""
    hydra = HydraConfig.get()
    return (Path(hydra.sweep.dir), int(hydra.job.num)) if hydra.mode is RunMode.MULTIRUN else None


# ---- the table


def rows(folder: Path) -> list[dict[str, Any]]:
    """What has become of every job that was planned or run, by number."""
    planned = {job.folder: job.overrides for job in read_plan(folder).jobs.values()}
    found = []
    for name in {*planned, *(p.parent.name for p in folder.glob("*/job.json"))}:
        row = dict.fromkeys(COLUMNS, "") | {"job": int(name.partition("_")[0]), "status": "not run"}
        row |= {"overrides": planned.get(name, []), "folder": shown((folder / name).resolve())}
        found.append(row | read_job(folder / name))
    return sorted(found, key=lambda row: (row["job"], row["folder"]))


def best_of(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row with the best value, if jobs have one of the same metric."""
    done = [r for r in found if r["status"] == DONE and isinstance(r["value"], float | int)]
    done = [r for r in done if math.isfinite(r["value"])]
    if not done or len({(r["metric"], r["better"]) for r in done}) > 1:
        return None
    return (min if done[0]["better"] == "min" else max)(done, key=lambda row: row["value"])


def write_table(folder: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write sweep.csv, whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "overrides": " ".join(row["overrides"])} for row in found)
    replace_file(folder / "sweep.csv", text.getvalue())


def table(folder: Path, found: Sequence[Mapping[str, Any]]) -> str:
    """The closing table, and the best job."""
    lines = [("job", "overrides", "status", "metric", "seconds", "folder or error")]
    for row in found:
        value, seconds = row["value"], row["seconds"]
        lines.append(
            (
                str(row["job"]),
                " ".join(row["overrides"]),
                row["status"],
                f"{row['metric']} {value:.4g}" if isinstance(value, float | int) else "",
                f"{seconds:.1f}" if isinstance(seconds, float | int) else "",
                row["error"] or row["folder"],
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    best = best_of(found)
    if best is not None:
        text.append(f"best {best['metric']} {best['value']:.4g}: {best['folder']}")
    if any(row["status"] != DONE for row in found):
        text.append(f"to run what is not done: the same command with run_id={folder.name}")
    text.append(f"sweep {shown(folder.resolve())}, table in sweep.csv")
    return "\n".join(text)
