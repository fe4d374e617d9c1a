"""Whether mode and launcher fit, and the line to type when they don't."""

import shlex
import sys

import pytest

from ddp_experiments import environment, launch
from tests.ranks import ROOT, launcher_variables

TINY = ("debug=tiny", "mode.threads=1", "eval.test=false")

REFUSED = [
    # words, ranks of the launcher (0 = plain python), what the line must hold
    (
        "mode=multinode seed=1",
        0,
        "type: python train.py mode=multinode seed=1 mode.nnodes=2 mode.node_rank=0 "
        "mode.rdzv_endpoint=HOST:29500; or: torchrun --nnodes=2 --node_rank=0 --master_addr=HOST "
        "--master_port=29500 --nproc_per_node=2 train.py mode=multinode seed=1",
    ),
    (
        "mode=multinode mode.nnodes=3 mode.nproc_per_node=8",
        0,
        "mode.node_rank=0 mode.rdzv_endpoint=HOST:29500; or: torchrun --nnodes=3 --node_rank=0 "
        "--master_addr=HOST --master_port=29500 --nproc_per_node=8 train.py",
    ),
    (
        "mode=multinode mode.rdzv_endpoint=h:1 mode.nnodes=2 mode.node_rank=2",
        0,
        "mode.node_rank=2: 2 machines are numbered from 0 to 1",
    ),
    (
        "mode=multinode mode.nnodes=2 mode.node_rank=0 mode.rdzv_endpoint=host",
        0,
        "mode.rdzv_endpoint=host: want HOST:PORT",
    ),
    ("mode=multigpu mode.node_rank=0", 0, "mode.node_rank=0 needs mode=multinode"),
    (
        "mode=single mode.max_restarts=1",
        0,
        "mode.max_restarts=1 needs processes that are started: try mode=multigpu",
    ),
    ("mode=multigpu mode.max_restarts=-1", 0, "mode.max_restarts=-1 must be at least 0"),
    (
        "mode=multigpu train.global_batch_size=3 mode.nproc_per_node=4",
        0,
        "train.global_batch_size=3 is smaller than 4 ranks",
    ),
    ("mode=multigpu strategy=single", 0, "strategy.replicate=1, but the number of ranks is 2"),
    ("mode=multigpu mode.device=mps", 0, "mode.device=mps, but this machine has none"),
    ("mode=multigpu mode.max_restarts=3", 2, "leave it out, torchrun has --max_restarts"),
    ("mode=multinode mode.node_rank=0 mode.nnodes=1", 2, "leave it out, torchrun has --node_rank"),
    ("mode=single", 2, "the launcher started 2 processes, but mode=single is one; add mode=multigpu"),
    ("seed=1", 2, "add mode=multigpu, or type: python train.py seed=1"),
    (
        "mode=multigpu mode.nproc_per_node=4",
        2,
        "mode.nproc_per_node=4, but the launcher started 2; leave it out, or start torchrun --nproc_per",
    ),
    ("mode=multinode mode.nnodes=2", 2, "mode.nnodes=2, but the launcher started 1; leave it out"),
    (
        "mode=multigpu strategy.replicate=3",
        2,
        "strategy.replicate=3, but the number of ranks is 2; try strategy.replicate=auto",
    ),
    ("mode=multigpu strategy=single", 2, "strategy.replicate=1, but the number of ranks is 2"),
    (
        "mode=multigpu train.global_batch_size=3 train.accumulation_steps=2",
        2,
        "try train.global_batch_size=4",
    ),
    ("mode=multigpu optimizer.lr=abc", 2, "optimizer.lr='abc'"),
    ("mode=multigpu train.max_epoch=3", 2, "Did you mean train.max_epochs?"),
]


@pytest.mark.parametrize(
    ("line", "ranks", "part"), REFUSED, ids=[f"{line} on {ranks}" for line, ranks, _ in REFUSED]
)
def test_misfit_is_refused_once_with_the_line_to_type(train, tmp_path, line, ranks, part):
    result = train(*line.split(), ranks=ranks)
    assert result.exit_codes == [2] * max(1, ranks), result.text
    said = result.texts[0].strip().splitlines()
    assert len(said) == 2 and part in said[1], result.text
    assert [text.strip() for text in result.texts[1:]] == [""] * (len(result.texts) - 1)
    assert list(tmp_path.iterdir()) == []


def test_line_to_type_works_as_it_is_printed(train):
    words = ["mode=single", "name=a.b", "model.channels=[8, 8]", *TINY]
    said = train(*words, ranks=2).texts[0].strip().splitlines()[1]
    typed = shlex.split(said.partition("or type: python ")[2])
    assert typed[0] == "train.py" and typed[1:] == words
    train(*typed[1:]).ok()


def test_line_to_type_keeps_the_option_that_names_a_run(train):
    run = train(*TINY).ok().folder
    said = train("--from-run", str(run), ranks=2).text
    assert f"python train.py --from-run {run}" in said, said


@pytest.mark.parametrize("words", [(), ("mode=multigpu",), ("mode=multinode",), ("mode=single",)])
def test_one_rank_of_a_launcher_runs_in_every_mode(train, words):
    train(*TINY, *words, ranks=1).ok()


def test_one_rank_of_a_launcher_may_sweep(train):
    assert len(train(*TINY, "-m", "seed=1,2", ranks=1).ok().folders) == 2


@pytest.mark.parametrize(
    "words", [("mode=multigpu",), ("mode=multinode",), ("mode=multigpu", "strategy=ddp")]
)
def test_two_ranks_run_in_the_modes_for_several(train, words):
    train(*TINY, *words, ranks=2).ok()


def test_rank_that_may_count_machines_is_refused_with_both_lines(train, tmp_path):
    result = train(*TINY, env={"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"})
    assert result.exit_codes == [2], result.text
    said = result.text.strip().splitlines()
    assert len(said) == 2 and "RANK is set but LOCAL_RANK is not" in said[1]
    assert '--node-rank="$RANK"' in said[1] and "env -u RANK -u WORLD_SIZE python train.py" in said[1]
    assert list(tmp_path.iterdir()) == []


def attempts(folder):
    """How often torchrun started workers, from the folders that it leaves."""
    return sorted(p.name for p in folder.glob("torchelastic_*/*/attempt_*"))


LATE = """
import os, time
time.sleep(1 if os.environ.get("LOCAL_RANK") == "0" else 0)
"""
WRAPPED = ("--no-python", "sh", "-c", f'{sys.executable} {ROOT / "train.py"} "$@"; exit $?', "sh")


@pytest.mark.parametrize(
    ("fault", "restarts", "late"),
    [
        ("seed=-1", 3, False),
        pytest.param("seed=-1", 0, True, marks=pytest.mark.slow),
        pytest.param("model._target_=no.Such", 3, True, marks=pytest.mark.slow),
    ],
)
def test_refusal_under_torchrun_is_told_once_and_not_tried_again(start, tmp_path, fault, restarts, late):
    (tmp_path / "sitecustomize.py").write_text(LATE if late else "")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path)}
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--max-restarts={restarts}")
    result = start(*launcher, "train.py", "mode=multigpu", fault, env=env)
    assert result.returncode == 1, result.stderr
    assert result.stderr.count("Refused before anything was started") == 1, result.stderr
    assert result.stderr.count(fault) == 1, result.stderr
    assert attempts(tmp_path) == ["attempt_0"], result.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_refusal_leaves_a_parent_alone_that_is_not_torchrun_and_is_told_once(start, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--max-restarts=1", *WRAPPED)
    result = start(*launcher, "mode=multigpu", "seed=-1", env={"TMPDIR": str(tmp_path)})
    assert result.returncode == 1 and "SignalException" not in result.stderr, result.stderr
    assert result.stderr.count("seed=-1 must be at least 0") == 1, result.stderr
    assert attempts(tmp_path) == ["attempt_0", "attempt_1"], result.stderr
    assert "exitcode: -15" not in result.stderr.partition("FAILED")[0], result.stderr


def test_rank_that_is_refused_alone_says_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "attempt_0/1").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0/1/error.json"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(environment, "TELL_SECONDS", 0.1)
    for count in (1, 0):  # at the next attempt it is known
        with pytest.raises(SystemExit, match="2"):
            launch.refuse(["no", "never", "no"])
        assert capsys.readouterr().err.count("  - no\n  - never\n") == count


def test_run_that_restarted_workers_could_not_find_again_needs_a_name(train, tmp_path):
    env = launcher_variables(0, 1, 29500) | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    result = train(*TINY, env=env)
    assert result.exit_codes == [2] and "add run_id=NAME" in result.text, result.text
    assert list(tmp_path.iterdir()) == []
