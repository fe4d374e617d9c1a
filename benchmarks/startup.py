"""python -m benchmarks.startup: CPU time of commands that must not import torch, against `import torch`."""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "--cfg job": [sys.executable, "train.py", "--cfg", "job"],
    "completion": [sys.executable, "train.py", "--shell-completion", "query=bash"],
    "--help": [sys.executable, "train.py", "--help"],
}
ROUNDS = 7


def cpu_seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    environment = {**os.environ, "COMP_LINE": "train.py optimizer=", "COMP_POINT": "19"}
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(ROUNDS + 1):
        for name, command in COMMANDS.items():
            seconds = cpu_seconds(command, environment)
            if turn:  # the first is to warm up
                times[name].append(seconds)
    base = statistics.median(times["import torch"])
    print("CPU seconds of a whole process")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:14} {median:6.2f} s   / import torch {median / base:.2f}")


if __name__ == "__main__":
    main()
