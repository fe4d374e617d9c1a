"""What a sweep costs: its check before job 0, a job beside the same job alone, and the parent's memory.

python -m benchmarks.sweep            about a minute
python -m benchmarks.sweep 200        memory and job times over 200 jobs as well
"""

import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
JOB = (
    "experiment=digits_mlp",
    "mode.threads=1",
    "train.max_epochs=null",
    "train.max_steps=2",
    "eval.test=false",
)
PAIRS = 5


def start(cwd: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "train.py"), *words]
    return subprocess.Popen(command, cwd=cwd, stderr=subprocess.DEVNULL)


def seconds(cwd: Path, *words: str) -> float:
    before = time.perf_counter()
    start(cwd, *words).wait()
    return time.perf_counter() - before


def until_first_job(cwd: Path, jobs: int) -> float:
    """Seconds from the start to the plan on disk, which follows the check of every job."""
    before = time.perf_counter()
    process = start(cwd, *JOB, "-m", f"seed=range({jobs})", f"run_id=check{jobs}")
    while not list(cwd.glob(f"outputs/*/check{jobs}/jobs.json")):
        time.sleep(0.01)
    taken = time.perf_counter() - before
    process.terminate()
    process.wait()
    return taken


def resident(pid: int) -> float:
    """MiB of memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def check(cwd: Path) -> None:
    one, thousand = until_first_job(cwd, 1), until_first_job(cwd, 1000)
    each = (thousand - one) / 999 * 1000
    print(f"check before job 0: 1 job {one:.1f} s, 1000 jobs {thousand:.1f} s, {each:.1f} ms a job")


def overhead(cwd: Path) -> None:
    """A job of a sweep of two, less that of a sweep of one, beside the same job alone; interleaved."""
    for mode in (("mode=single",), ("mode=multigpu", "mode.nproc_per_node=2")):
        alone, more = [], []
        for i in range(PAIRS):
            alone.append(seconds(cwd, *JOB, *mode))
            one = seconds(cwd, *JOB, *mode, "-m", f"seed={i}")
            more.append(seconds(cwd, *JOB, *mode, "-m", f"seed={i},{i + 100}") - one)
        lone, job = statistics.median(alone), statistics.median(more)
        print(f"{mode[0]}: alone {lone:.2f} s, a job of a sweep {job:.2f} s, more by {job - lone:+.2f} s")


def memory(cwd: Path, jobs: int) -> None:
    process = start(cwd, *JOB, "-m", f"seed=range({jobs})", "run_id=many")
    seen: dict[int, float] = {}
    while process.poll() is None:
        done = len(list(cwd.glob("outputs/*/many/*/job.json")))
        if done not in seen and process.poll() is None:
            seen[done] = resident(process.pid)
        time.sleep(0.2)
    (table,) = cwd.glob("outputs/*/many/sweep.csv")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["status"] == "done" for row in rows), json.dumps(rows)
    took = [float(row["seconds"]) for row in rows]
    tenth = max(1, jobs // 10)
    first, last = statistics.median(took[:tenth]), statistics.median(took[-tenth:])
    print(
        f"{jobs} jobs: parent {seen[min(10, jobs)]:.0f} MiB at job 10, {seen[max(seen)]:.0f} MiB at the end; "
        f"a job {first:.2f} s in the first tenth, {last:.2f} s in the last"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        check(Path(folder))
        overhead(Path(folder))
        if len(sys.argv) > 1:
            memory(Path(folder), int(sys.argv[1]))
