"""What must be the same on all ranks before they begin: settings, code and versions, model, data, clocks."""

import hashlib
import json
import platform
import socket
import time
from contextlib import suppress
from dataclasses import asdict
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from ddp_experiments.build import Ingredients
from ddp_experiments.checkpoint.names import model_tensors
from ddp_experiments.config import Config
from ddp_experiments.data import TensorData
from ddp_experiments.errors import Refused
from ddp_experiments.identity import Origin, flat
from ddp_experiments.meeting import Meeting

OF_A_MACHINE = ("mode.node_rank",)  # settings that may differ
CLOCK_SECONDS = 30.0  # clocks that differ by more are told
SAMPLES = 1024  # of a part of the data that its fingerprint looks at

Facts = dict[str, dict[str, str]]  # by section and key


def compare(config: Config, origin: Origin, what: Ingredients, meeting: Meeting) -> list[str]:
    """Compare every rank with rank 0; returns what is odd but no reason to stop.

    Collective: all ranks must call.

    Raises:
        Refused: a rank differs; the same lines on all ranks.
    """
    if meeting.environment.world_size == 1:
        return []
    facts = facts_of(config, origin, what)
    mine: dict[str, Any] = {
        "host": socket.gethostname(),
        "digests": {k: _digest(v) for k, v in facts.items()},
    }
    said = meeting.gather("facts", mine)
    differing, now = meeting.rank0_decides("differing", lambda: (_differing(said), time.time()))
    if differing:
        details = meeting.gather("details", facts[differing[0]])
        hosts = [s["host"] for s in said]
        raise Refused(*meeting.rank0_decides("difference", lambda: _difference(details, hosts)))
    skew = time.time() - now  # rank 0 has waited for this rank, and this one has heard of it at once
    if abs(skew) < CLOCK_SECONDS:
        return []
    return [
        f"the clock of {mine['host']} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} rank 0's"
    ]


def _differing(said: list[dict[str, Any]]) -> list[str]:
    """The sections that aren't the same on all ranks."""
    first = said[0]["digests"]
    return [section for section in first if any(s["digests"][section] != first[section] for s in said)]


def _difference(details: list[dict[str, str]], hosts: list[str]) -> list[str]:
    """A line for the first rank that differs from rank 0, naming the first key."""
    first = details[0]
    rank = next(r for r, found in enumerate(details) if found != first)
    other = details[rank]
    key = next(k for k in {**first, **other} if first.get(k) != other.get(k))
    return [
        f"{key} differs: rank 0 on {hosts[0]} has {first.get(key, 'none')}, "
        f"rank {rank} on {hosts[rank]} has {other.get(key, 'none')}; start all ranks by the same command, "
        "from the same code and data"
    ]


def facts_of(config: Config, origin: Origin, what: Ingredients) -> Facts:
    """What this rank is about to do, as texts."""
    splits = what.splits
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {
        "settings": _settings(config, origin),
        "versions": _versions(),
        "model": {k: f"{list(t.shape)} {t.dtype}" for k, t in model_tensors(what.module).items()},
        "data": {f"data, {name} part": fingerprint(part) for name, part in parts.items()},
    }


def _settings(config: Config, origin: Origin) -> dict[str, str]:
    """Every setting; of those from the environment a hash, since they may be secrets."""
    written = dict(flat(origin.settings))
    found = {}
    for key, value in flat(asdict(config)):
        if key in OF_A_MACHINE:
            continue
        text = str(value.value if isinstance(value, Enum) else value)
        from_environment = "${oc.env:" in str(written.get(key, ""))
        found[key] = f"{written[key]} with the hash {_digest(text)[:6]}" if from_environment else text
    return found


@cache
def _versions() -> dict[str, str]:
    """Of what computes: Python, torch, NCCL, this project and its code."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    code = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:12]
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    found = {"Python": platform.python_version(), "torch": torch.__version__, "NCCL": str(nccl)}
    with suppress(metadata.PackageNotFoundError):  # run from its folder, not installed
        found["ddp_experiments"] = metadata.version("ddp_experiments")
    return {f"the version of {name}": v for name, v in found.items()} | {"the code of ddp_experiments": code}


def fingerprint(part: Dataset[Any] | None) -> str:
    """Length of a part of the data; of tensors in memory also a hash of some rows, evenly spread.

    Other data sets may draw random numbers for their items, so these aren't looked at.
    """
    if part is None:
        return "none"
    length = len(part)  # type: ignore[arg-type]
    if not isinstance(part, TensorData):
        return f"{length} samples"
    total = hashlib.sha256()
    for tensor in (part.inputs, part.targets):
        rows = tensor[:: max(1, length // SAMPLES)].contiguous()
        total.update(rows.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{length} samples with the hash {total.hexdigest()[:12]}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
