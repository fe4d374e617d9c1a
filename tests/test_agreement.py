"""Ranks that aren't about to do the same are stopped before they begin."""

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_experiments import agreement
from ddp_experiments.data import TensorData
from tests.probes import Noisy
from tests.ranks import Result

MLP = (
    "experiment=digits_mlp",
    "mode=multigpu",
    "train.max_epochs=null",
    "train.max_steps=2",
    "mode.threads=1",
)
Train = Callable[..., Result]
HERE = socket.gethostname()

DIFFERENT = {  # what rank 1 has, and the line
    "a setting": (
        ["optimizer.lr=9"],
        {},
        f"optimizer.lr differs: rank 0 on {HERE} has 0.003, rank 1 on {HERE} has 9",
    ),
    "the seed": (["seed=3"], {}, f"seed differs: rank 0 on {HERE} has 0, rank 1 on {HERE} has 3"),
    "a setting that may change on the way": (["log.every_steps=3"], {}, "log.every_steps differs"),
    "the data": (["data._target_=tests.probes.of_this_rank"], {}, "data, train part differs: rank 0"),
    "the model": (["model._target_=tests.probes.WiderOnRank1"], {}, "head.weight differs: rank 0"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_are_refused_with_the_rank_the_host_and_the_key(
    name: str, train: Train, tmp_path: Path
) -> None:
    words, env, line = DIFFERENT[name]
    both = [w for w in words if "tests.probes" in w]
    before = time.monotonic()
    result = train(*MLP, *both, ranks=2, words_of={1: [w for w in words if w not in both]}, per_rank={1: env})
    assert result.exit_codes == [2, 2], result.text
    assert time.monotonic() - before < 20
    assert line in result.texts[0], result.text
    assert "start all ranks by the same command, from the same code and data" in result.texts[0]
    assert list(tmp_path.glob("outputs/*")) == []


def test_a_value_from_the_environment_is_compared_but_not_told(train: Train) -> None:
    words = (*MLP, "name='n${oc.env:TEST_NAME}'")
    result = train(*words, ranks=2, per_rank={0: {"TEST_NAME": "one"}, 1: {"TEST_NAME": "other"}})
    assert result.exit_codes == [2, 2]
    assert "name differs: rank 0 on" in result.text
    assert "none" not in result.text.lower().replace("oc.env:test_name", "") and "other" not in result.text


def test_the_ranks_of_a_sweep_differ_in_one_job_only(train: Train, tmp_path: Path) -> None:
    """A sampler that draws on every rank, say: the jobs that are the same still run."""
    result = train(*MLP, "-m", ranks=2, words_of={0: ["seed=1,2", "run_id=s"], 1: ["seed=1,3", "run_id=s"]})
    assert result.exit_codes == [1, 1], result.text
    assert "seed differs: rank 0" in result.text
    assert [f.name for f in result.folders] == ["00_seed=1"]


def test_a_fingerprint_changes_with_length_and_content_and_draws_no_random_numbers() -> None:
    data = TensorData(torch.arange(5000.0).unsqueeze(1), torch.zeros(5000))
    same = TensorData(torch.arange(5000.0).unsqueeze(1), torch.zeros(5000))
    other = TensorData(torch.arange(5000.0).unsqueeze(1) + 1, torch.zeros(5000))
    shorter = data.take(range(4999))
    assert agreement.fingerprint(data) == agreement.fingerprint(same)
    assert len({agreement.fingerprint(d) for d in (data, other, shorter, None)}) == 4
    before = torch.get_rng_state()
    assert agreement.fingerprint(Noisy(data)) == "5000 samples"
    assert torch.equal(before, torch.get_rng_state())
