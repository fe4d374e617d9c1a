"""What a person sees of a run: console lines and a progress bar, train.log, metrics.jsonl, TensorBoard.

Rank 0 writes; the other ranks have a log file of their own. A full disk is said once; training goes on.
"""

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from ddp_experiments.config import Config
from ddp_experiments.events import Appender, EventWriter
from ddp_experiments.identity import Run, flat
from ddp_experiments.loop import Point, State
from ddp_experiments.world import World

logger = logging.getLogger("ddp_experiments")
NOT_HYPERPARAMETERS = (
    "name",
    "run_id",
    "from_run",
    "init_from",
    "eval_only",
    "mode",
    "strategy",
    "eval",
    "checkpoint",
    "log",
    "resume",
    "sweep",
)


# ---- log lines


class _Console(logging.Handler):
    """Lines on stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            with suppress(OSError, ValueError):  # a closed stderr must not end the run
                tqdm.write(self.format(record), file=sys.stderr)


class _File(logging.Handler):
    """Lines in the rank's log file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = Appender(
            path, lambda error: print(f"can't write {path}: {error.strerror}; going on", file=sys.stderr)
        )

    def emit(self, record: logging.LogRecord) -> None:
        self.file.write(f"{self.format(record)}\n".encode())

    def close(self) -> None:
        self.file.close()
        super().close()


@contextmanager
def log_lines(run: Run, rank: int) -> Iterator[None]:
    """Log to the console and the rank's file while the block runs; other ranks than 0 show warnings only."""
    console, file = _Console(), _File(run.folder / ("train.log" if rank == 0 else f"rank{rank}.log"))
    tag = "" if rank == 0 else f"[rank {rank}] "
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(logging.Formatter(f"{tag}%(message)s"))
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = (logger.level, logger.propagate)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in (console, file):
        logger.addHandler(handler)
    try:
        yield
    except Exception:
        logger.removeHandler(console)  # the traceback is printed once, by the entry point
        logger.exception("the run failed")
        raise
    finally:
        for handler in (console, file):
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(before[0])
        logger.propagate = before[1]


# ---- points


class Tracker:
    """Writes points on rank 0: metrics.jsonl, TensorBoard, console. On other ranks it does nothing."""

    def __init__(self, run: Run, config: Config, world: World, *, step: int, total_steps: int) -> None:
        self.run, self.config, self.world, self.total_steps = run, config, world, total_steps
        self.lines: Appender | None = None
        self.events: EventWriter | None = None
        self.bar: tqdm[Any] | None = None
        self.warned = False
        if not world.is_rank0:
            return
        self.lines = Appender(run.folder / "metrics.jsonl", self._warn)
        if run.continued:
            self.lines.finish_line()
            self._line({"continued_from": step})
        if config.log.tensorboard:
            first = step + 1 if run.continued else None
            self.events = EventWriter(run.folder, self._warn, first_step=first)
        terminal = sys.stderr is not None and sys.stderr.isatty()
        if config.log.progress and terminal and not config.eval_only:
            self.bar = tqdm(total=total_steps, initial=step, unit="step", dynamic_ncols=True, leave=False)

    def _warn(self, error: OSError) -> None:
        if self.warned:
            return
        self.warned = True
        logger.warning(
            "can't write to %s: %s; training goes on, points are kept for later",
            self.run.folder,
            error.strerror,
        )

    def _line(self, values: Mapping[str, Any]) -> None:
        assert self.lines is not None
        plain = {k: v if not isinstance(v, float) or math.isfinite(v) else str(v) for k, v in values.items()}
        self.lines.write((json.dumps(plain, allow_nan=False) + "\n").encode())

    def scalars(self, values: Mapping[str, float], state: State, **more: int) -> None:
        """Write scalars of a step; `more` goes into metrics.jsonl only."""
        if self.lines is not None:
            self._line({"step": state.step, **more, **values})
        if self.events is not None:
            self.events.scalars(values, state.step)

    def describe(self, saved: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        """The text tabs, the chart of both losses, and the hyperparameters with this run as their session."""
        if self.events is None:
            return
        from torch.utils.tensorboard.summary import custom_scalars, text

        environment = {k: v for k, v in start.items() if k not in ("command", "overrides")}
        tabs = {
            "config": f"```yaml\n{yaml.safe_dump(dict(saved), sort_keys=False)}```",
            "command": f"`{start['command']}`",
            "environment": f"```yaml\n{yaml.safe_dump(environment, sort_keys=False)}```",
        }
        for tag, body in tabs.items():
            self.events.summary(text(tag, body))  # type: ignore[no-untyped-call]
        chart = {"loss": {"train and eval": ["Multiline", ["train/loss", "eval/loss"]]}}
        self.events.summary(custom_scalars(chart))  # type: ignore[no-untyped-call]
        self.events.summary(session_start(hyperparameters(saved)))

    def log(self, point: Point) -> None:
        """Write a log point of the training."""
        if not self.world.is_rank0:
            return
        values = {f"train/{k}": v for k, v in point.metrics.items()}
        values |= {
            "optim/lr": point.lr,
            "optim/grad_norm": point.grad_norm,
            "perf/step_seconds": point.step_seconds,
            "perf/samples_per_second": point.samples_per_second,
            "perf/data_wait_share": point.data_wait_share,
            "perf/memory_mib": memory_mib(self.world.device),
        }
        self.scalars(values, point.state, epoch=point.epoch)
        of = "" if self.config.train.max_epochs is None else f"/{self.config.train.max_epochs}"
        epoch = f"epoch {point.epoch + 1}{of}"  # for people, who count from 1
        text = f"{words(point.metrics)}  lr {point.lr:.3g}  {point.samples_per_second:,.0f} samples/s"
        if self.bar is not None:
            self.bar.update(point.state.step - self.bar.n)
            self.bar.set_postfix_str(f"{epoch}  {text}", refresh=False)
        else:
            logger.info("step %d/%d  %s  train: %s", point.state.step, self.total_steps, epoch, text)

    def log_evaluation(self, state: State, metrics: Mapping[str, float], part: str = "eval") -> None:
        """Write the metrics of a part: eval (validation) or test."""
        values = {f"{part}/{k}": v for k, v in metrics.items()}
        best = ""
        if part == "eval" and state.best_value is not None:
            values[f"best/{self.config.checkpoint.metric}"] = state.best_value
            if state.best_step == state.step:
                best = f"  (best {self.config.checkpoint.metric} so far)"
        self.scalars(values, state)
        where = f"step {state.step}/{self.total_steps}  " if self.total_steps else ""
        logger.info("%s%s: %s%s", where, part, words(metrics), best)

    def close(self, *, succeeded: bool | None) -> None:
        """End the session; None leaves it open for the start that continues the run."""
        if self.bar is not None:
            self.bar.close()
        if self.events is not None:
            if succeeded is not None:  # TensorBoard keeps the first end it finds
                self.events.summary(session_end(succeeded))
            self.events.close()
        if self.lines is not None:
            self.lines.close()


def words(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def memory_mib(device: torch.device) -> float:
    """The most memory used so far, in MiB: of the device on CUDA, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB elsewhere


# ---- hyperparameters: a session in the run itself, so that TensorBoard shows no second run for them


def hyperparameters(saved: Mapping[str, Any]) -> dict[str, bool | float | str]:
    """The settings that say what is trained, flat; lists as text, nulls left out."""
    what = {k: v for k, v in saved.items() if k not in NOT_HYPERPARAMETERS}
    plain = {
        k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in flat(what) if v is not None
    }
    return {k.replace("._target_", ""): v for k, v in plain.items() if "${" not in str(v)}


def session_start(values: Mapping[str, bool | float | str]) -> Any:
    """The summary that opens a session. TensorBoard makes the experiment, the union over all runs, itself."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in values.items():
        if isinstance(value, bool):
            info.hparams[key].bool_value = value
        elif isinstance(value, str):
            info.hparams[key].string_value = value
        else:
            info.hparams[key].number_value = value
    return _hparams(
        metadata.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info)
    )


def session_end(succeeded: bool) -> Any:
    """The summary that closes a session."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
    info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _hparams(tag: str, content: Any) -> Any:
    from tensorboard.compat.proto import summary_pb2
    from tensorboard.plugins.hparams import metadata

    value = summary_pb2.Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content))
    return summary_pb2.Summary(value=[value])


# ---- reading and profiling


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, each step once: the lines of a continued run replace the older ones."""
    found: list[dict[str, Any]] = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last line of a start that was killed
        if "continued_from" in line:
            found = [earlier for earlier in found if earlier["step"] <= line["continued_from"]]
        else:
            found.append(line)
    return found


def was_tested(folder: Path, step: int) -> bool:
    """Tell whether a run has the results of its test part at this step, its last."""
    if not (folder / "metrics.jsonl").exists():
        return False
    return any("test/loss" in line and line["step"] == step for line in read_metrics(folder))


@contextmanager
def profiling(run: Run, world: World, steps: int) -> Iterator[torch.profiler.profile | None]:
    """Trace some steps after three of warm-up; the trace in the run folder opens in Perfetto."""
    if steps == 0:
        yield None
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    path = run.folder / f"trace-rank{world.rank}.json"

    def done(profiler: torch.profiler.profile) -> None:
        profiler.export_chrome_trace(str(path))
        logger.info("trace of %d steps: %s (open it in https://ui.perfetto.dev)", steps, path)

    schedule = torch.profiler.schedule(wait=1, warmup=2, active=steps, repeat=1)
    with torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=done) as profiler:
        yield profiler
