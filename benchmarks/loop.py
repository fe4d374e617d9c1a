"""python -m benchmarks.loop: our loop, logging on, against the best hand-written one, step by step.

Both train the same network on the same data with fused Adam, in turns in one process. The tiny network is
judged by the median of step times; the medium one, whose steps are long, by CPU time.
Ratios are ours / by hand.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn

from ddp_experiments import build, config, recorder
from ddp_experiments.data import Batch, Splits, TensorData
from ddp_experiments.environment import Environment
from ddp_experiments.health import StopRequest, Watch
from ddp_experiments.identity import Run
from ddp_experiments.loop import State, train
from ddp_experiments.tracking import Tracker
from ddp_experiments.world import World

CONF = str(Path(__file__).resolve().parent.parent / "conf")
SIZES = {  # hidden widths, inputs, classes, batch, steps a round, rounds
    "tiny MLP 10-20-2, batch 128": ([20], 10, 2, 128, 400, 12),
    "medium MLP 784-1024-1024-10, batch 256": ([1024, 1024], 784, 10, 256, 15, 30),
}


def random_data(samples: int, features: int, classes: int) -> Splits:
    """Random inputs and classes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator)
    return Splits(TensorData(inputs, torch.randint(classes, (samples,), generator=generator)))


class Stopwatch:
    """Wall-clock times between steps, and CPU time over rounds."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.cpu = 0.0
        self.rounds: list[float] = []

    def timed_round(self, run: Callable[[], None], steps: int) -> None:
        before = time.process_time()
        run()
        self.rounds.append((time.process_time() - before) / steps)


def by_hand(splits: Splits, model: nn.Module, batch_size: int, watch: Stopwatch) -> Callable[[int], None]:
    """The loop that an expert writes: gather by index, fused Adam, set_to_none, no .item()."""
    data: Any = splits.train
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    def run(steps: int) -> None:
        done = 0
        while done < steps:
            order = torch.randperm(len(data))
            for start in range(0, len(data) - batch_size + 1, batch_size):
                before = time.perf_counter()
                index = order[start : start + batch_size]
                inputs, targets = data.inputs[index], data.targets[index]
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                watch.steps.append(time.perf_counter() - before)
                done += 1
                if done == steps:
                    break

    return run


class TimedBatches:
    """Our batches, with the time from asking for one to asking for the next written down."""

    def __init__(self, batches: Any, watch: Stopwatch) -> None:
        self.batches, self.watch = batches, watch

    def starting_at(self, epoch: int, samples: int) -> Iterator[Batch]:
        stream = self.batches.starting_at(epoch, samples)
        before = time.perf_counter()
        while True:
            yield next(stream)
            now = time.perf_counter()
            self.watch.steps.append(now - before)
            before = now


def ours(
    words: list[str], data: dict[str, Any], folder: Path, watch: Stopwatch
) -> tuple[Callable[[int], None], nn.Module, Splits]:
    """The real loop with its real recorder: TensorBoard, metrics.jsonl and log lines into a folder."""
    with initialize_config_dir(CONF, version_base="1.3"):
        cfg = compose("config", overrides=words)
    OmegaConf.update(cfg, "data", data, merge=False)
    settings = config.typed(cfg)
    what = build.build(settings, Environment())
    world = World(0, 0, 1, 1, 0, torch.device("cpu"), None, 1)
    run = Run(folder, writer=True, continued=False, lock=None)
    progress = recorder.Progress(run, 0)
    place = recorder.Place(run, progress, world, Watch(world, StopRequest()))
    tracker = Tracker(run, settings, world, step=0, total_steps=1)
    parts = build.make_parts(settings, what, world, 1, None)
    record = recorder.Recorder(settings, parts, tracker, place, length=len(what.splits.train))  # type: ignore[arg-type]
    record.save = lambda state: None  # type: ignore[method-assign]  # saves are not part of a step's time
    batches: Any = TimedBatches(what.batches(settings, world), watch)
    state: State = progress.state

    def go(steps: int) -> None:
        total = state.step + steps
        train(
            parts,
            batches,
            state,
            settings,
            total_steps=total,
            watch=place.watch,
            evaluation=None,
            recorder=record,
        )

    return go, parts.module, what.splits


def measure(name: str) -> None:
    hidden, features, classes, batch, steps, rounds = SIZES[name]
    words = [
        "experiment=none",
        "model=mlp",
        f"model.hidden={hidden}",
        f"model.in_features={features}",
        f"model.out_features={classes}",
        "optimizer=adam",
        "scheduler=constant",
        f"train.global_batch_size={batch}",
        "log.every_steps=50",
        "mode.threads=1",
    ]
    own, hand = Stopwatch(), Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        target = "benchmarks.loop.random_data"
        data = {"_target_": target, "samples": batch * 16, "features": features, "classes": classes}
        go, model, splits = ours(words, data, Path(folder), own)
        twin = type(model)(features, hidden, classes)  # type: ignore[call-arg]
        twin.load_state_dict(model.state_dict())
        run = by_hand(splits, twin.layers, batch, hand)  # type: ignore[arg-type]
        go(steps), run(steps)  # both warm
        for watch in (own, hand):
            watch.steps.clear()
        for turn in range(rounds):
            pair = [(own, go), (hand, run)]
            for watch, train_steps in pair if turn % 2 else reversed(pair):  # neither always goes first
                watch.timed_round(lambda train_steps=train_steps: train_steps(steps), steps)
    p50 = [statistics.median(w.steps) * 1e6 for w in (own, hand)]
    cpu = [statistics.median(w.rounds) * 1e6 for w in (own, hand)]
    print(name)
    print(f"  median step  ours {p50[0]:9.1f} µs   by hand {p50[1]:9.1f} µs   ratio {p50[0] / p50[1]:.3f}")
    paired = statistics.median(a / b for a, b in zip(own.rounds, hand.rounds, strict=True))
    print(f"  CPU a step   ours {cpu[0]:9.1f} µs   by hand {cpu[1]:9.1f} µs   ratio {paired:.3f} by pairs")


def main() -> None:
    torch.set_num_threads(1)
    config.register()
    for name in SIZES:
        measure(name)


if __name__ == "__main__":
    main()
