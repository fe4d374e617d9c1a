"""The command line: what is refused before anything exists, what works, and what a sweep is called."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from torch import Tensor, nn

from ddp_experiments import check, cli, identity
from ddp_experiments.data import Splits
from tests import probes
from tests.ranks import ROOT

TINY = ("debug=tiny", "mode.threads=1", "eval.test=false")

# (words, what the one line must hold)
WRONG = [
    # unknown keys
    ("optimzer.lr=1", ["optimzer: no such setting", "Did you mean optimizer?", "Allowed: name, run_id"]),
    ("+optimzer.lr=1", ["optimzer: no such setting", "Did you mean optimizer?"]),
    ("++optimzer.lr=1", ["optimzer: no such setting", "Did you mean optimizer?"]),
    ("modle=cnn", ["modle: no such setting", "Did you mean model?"]),
    ("trian.max_epochs=1", ["trian: no such setting", "Did you mean train?"]),
    ("train.max_epoch=1", ["train.max_epoch: no such", "Did you mean train.max_epochs?", "max_steps"]),
    ("+train.max_epoch=1", ["train.max_epoch: no such", "Did you mean train.max_epochs?", "max_steps"]),
    ("++train.max_epoch=1", ["train.max_epoch: no such", "Did you mean train.max_epochs?", "max_steps"]),
    ("optimizer.lrr=1", ["optimizer.lrr: no such setting", "Did you mean optimizer.lr?", "weight_decay"]),
    ("+optimizer.lrr=1", ["optimizer.lrr: AdamW has no such argument", "did you mean optimizer.lr?"]),
    ("++optimizer.lrr=1", ["optimizer.lrr: AdamW has no such argument", "did you mean optimizer.lr?"]),
    ("+lr=1", ["lr: no such setting"]),
    ("model.dropout.p=1", ["model.dropout.p: model.dropout is a value", "set model.dropout=..."]),
    # wrong types
    ("optimizer.lr=abc", ["optimizer.lr='abc'", "wants float"]),
    ("optimizer.lr=None", ["optimizer.lr='None'", "wants float"]),
    ("optimizer.lr=null", ["optimizer.lr=None", "wants float"]),
    ("optimizer.lr=50%", ["optimizer.lr='50%'", "wants float"]),
    ("optimizer.lr=", ["optimizer.lr=''", "wants float"]),
    ("""optimizer.lr='"1e-3"'""", ["optimizer.lr='\"1e-3\"'", "wants float"]),
    ('optimizer.lr="1e-3"', ["optimizer.lr='1e-3'", "without quotes", "optimizer.lr=1e-3"]),
    ("model.dropout=true", ["model.dropout=True", "wants float"]),
    ("model.channels=7", ["model.channels=7"]),
    ("train.max_epochs=two", ["train.max_epochs=two: want a whole number or null"]),
    ("train.max_epochs=2.7", ["train.max_epochs=2.7: want a whole number or null"]),
    ("train.max_epochs=True", ["train.max_epochs=True: want a whole number or null"]),
    ("train.clip_norm=true", ["train.clip_norm=true: want a number or null"]),
    ("train.global_batch_size=null", ["train.global_batch_size=null: want a whole number"]),
    ("train.drop_last=2", ["train.drop_last=2: want true or false"]),
    ("train.precision=bf17", ["train.precision=bf17: want one of fp32, fp64, bf16, fp16"]),
    ("train.no_weight_decay=bias", ["train.no_weight_decay=bias: want a list"]),
    ("mode.nnodes=1.5", ["mode.nnodes=1.5: want a whole number or auto"]),
    # removed, missing, broken
    ("~optimizer", ["~optimizer: nothing may be removed"]),
    ("~optimizer.lr", ["~optimizer.lr: nothing may be removed"]),
    ("~train.clip_norm", ["~train.clip_norm: nothing may be removed", "train.clip_norm=null"]),
    ("name=???", ["name has no value; give name=..."]),
    ("train.max_epochs=???", ["train.max_epochs has no value; give train.max_epochs=..."]),
    ("model.in_channels=???", ["model.in_channels has no value; give model.in_channels=..."]),
    ("model.in_channels=${nope.x}", ["model.in_channels: Interpolation key 'nope.x' not found"]),
    (
        "optimizer.lr=${oc.env:NOT_SET}",
        ["optimizer.lr: the environment variable NOT_SET is not set", "export"],
    ),
    ("optimizer.lr", ["optimizer.lr: want key=value"]),
    ("optimizer.lr==3", ["optimizer.lr==3: want key=value"]),
    ("model.channels=[1", ["model.channels=[1: want key=value"]),
    ("train.max_epochs=1 train.max_epochs=9", ["train.max_epochs is given twice; leave one"]),
    ("optimizer.lr=1 ++optimizer.lr=2", ["optimizer.lr is given twice; leave one"]),
    ("optimizer.lr=1e-3,1e-2", ["optimizer.lr=1e-3,1e-2 has several values: add -m"]),
    # options
    (
        "optimizer=sgdd",
        ["optimizer=sgdd: no such option", "Did you mean sgd?", "Allowed: adam, adamw, own, sgd"],
    ),
    ("experiment=digits", ["experiment=digits: no such option", "Did you mean digits_", "teacher"]),
    ("debug=tinny", ["debug=tinny: no such option", "Did you mean tiny?"]),
    ("model=", ["model=: no such option", "Allowed: cnn, linear, mlp"]),
    ("optimizer=0.5", ["optimizer=0.5: want the name of an option"]),
    ("model=null", ["model=null: want the name of an option"]),
    ("experiment=null", ["experiment=null: want the name of an option"]),
    ("+experiment=article", ["+experiment=...: experiment is chosen already; leave out the +"]),
    # a preset's value for a group that the command line replaces
    (
        "experiment=teacher optimizer=adam",
        ["optimizer.lr=0.02 for optimizer=sgd", "give optimizer.lr=... too"],
    ),
    ("experiment=article model=cnn", ["experiment=article sets model.in_features=10", "experiment=none"]),
    # names that become folders
    ("name=../x", ["name='../x' becomes a folder: letters, digits"]),
    ("name=", ["name='' becomes a folder"]),
    ("name=x.tmp", ["name='x.tmp' becomes a folder"]),
    ("run_id=../x", ["run_id='../x' becomes a folder"]),
    ("run_id=/x", ["run_id='/x' becomes a folder"]),
    ("run_id='a\nb'", ["run_id='a\\nb' becomes a folder"]),
    ("run_id='a\0b'", ["run_id='a\\x00b' becomes a folder"]),
    # targets
    ("model._target_=os.system", ["model._target_=os.system: 'os' is neither in this project nor one of"]),
    ("model._target_=torch.hub.load", ["model._target_=torch.hub.load: want a subclass of Module"]),
    ("model._target_=torch.nn.Linaer", ["no 'Linaer' in torch.nn; did you mean Linear?"]),
    ("+model._partial_=true", ["model._partial_ is not supported"]),
    ("+optimizer.params=[1]", ["optimizer.params is filled in by the program; leave it out"]),
    # sizes and places
    ("train.global_batch_size=0", ["train.global_batch_size=0 must be at least 1"]),
    ("train.global_batch_size=-4", ["train.global_batch_size=-4 must be at least 1"]),
    ("train.accumulation_steps=0", ["train.accumulation_steps=0 must be at least 1"]),
    ("train.accumulation_steps=65", ["is smaller than train.accumulation_steps=65", "try train.accum"]),
    ("train.max_steps=0", ["train.max_steps=0 must be at least 1"]),
    ("train.max_epochs=null", ["train.max_epochs and train.max_steps are both null", "train.max_epochs=10"]),
    ("train.ema_decay=1", ["train.ema_decay=1.0 must be at least 0 and below 1"]),
    ("train.clip_norm=nan", ["train.clip_norm=nan must be above 0", "null switches"]),
    ("seed=-1", ["seed=-1 must be at least 0"]),
    ("eval.microbatch_size=0", ["eval.microbatch_size=0 must be at least 1"]),
    ("checkpoint.keep_last=0", ["checkpoint.keep_last=0 must be at least 1"]),
    ("log.every_steps=0", ["log.every_steps=0 must be at least 1"]),
    ("checkpoint.metric=acuracy", ["this task has loss, accuracy; try checkpoint.metric=accuracy"]),
    ("train.precision=fp16 mode.device=cpu", ["train.precision=fp16", "try train.precision=bf16"]),
    ("mode.backend=nccl mode.device=cpu", ["mode.backend=nccl needs CUDA", "try mode.backend=gloo"]),
    ("mode.device=gpu", ["mode.device=gpu: allowed are auto, cpu, cuda, cuda:N, mps"]),
    ("mode.threads=0", ["mode.threads=0 must be auto or at least 1"]),
    ("strategy.replicate=2", ["strategy.replicate=2, but the number of ranks is 1", "replicate=auto"]),
    ("mode.nnodes=2", ["mode.nnodes=2 needs mode=multinode"]),
    ("mode.nproc_per_node=2", ["mode=single is one process", "try mode=multigpu"]),
    # secrets
    ("+data.api_key=hunter2", ["data.api_key: a secret must not be written", "data.api_key=${oc.env:NAME}"]),
    ("+data.api_key=12345", ["data.api_key: a secret must not be written down"]),
    ("+model.password=hunter2", ["model.password: a secret must not be written down"]),
    ("+mode.password=hunter2", ["mode.password: no such setting"]),
    # Hydra's own settings would make folders and files, or take the check away
    ("hydra.run.dir=x", ["hydra.run.dir=x: the run folder", "allowed are hydra.mode"]),
    ("hydra.output_subdir=x", ["hydra.output_subdir=x: the run folder"]),
    ("hydra.callbacks.preflight=null", ["hydra.callbacks.preflight=null: the run folder"]),
    ("hydra/job_logging=default", ["hydra/job_logging=default: the run folder"]),
    # which run
    ("eval_only=true", ["eval_only=true needs weights: add --from-run DIR or init_from=PATH"]),
    ("--from-run nowhere", ["nowhere/config.yaml: No such file or directory; give the folder of a run"]),
    ("--continue nowhere", ["nowhere/config.yaml: No such file or directory; give the folder of a run"]),
    ("--from-run=nowhere", ["nowhere/config.yaml: No such file or directory; give the folder of a run"]),
    ("--from-run", ["type one of --from-run DIR, --continue DIR, once"]),
    ("--from-run a --continue b", ["type one of --from-run DIR, --continue DIR, once"]),
    ("--continue a --continue b", ["type one of --from-run DIR, --continue DIR, once"]),
    # sweeps: before job 0
    ("-m optimizer.lr=1e-3,abc", ["job 1, optimizer.lr=abc: optimizer.lr='abc'", "wants float"]),
    ("-m seed=0,-1,-2", ["job 1, seed=-1: seed=-1 must be", "\n  - job 2, seed=-2: seed=-2 must be"]),
    ("-m optimizer.lr=1e-3,1e-2 log.every_steps=0", ["- log.every_steps=0 must be at least 1"]),
    (
        "-m train.max_epochs=0,1 seed=1,2",
        ["job 0, train.max_epochs=0 seed=1 (and 1 more): train.max_epochs=0"],
    ),
    ("-m optimizer=adam,sgdd", ["job 1, optimizer=sgdd: optimizer=sgdd: no such option"]),
    ("-m optimizer=adam,null", ["job 1, optimizer=null: optimizer=null: want the name of an option"]),
    ("-m seed=1,2 +data.token=5", ["- data.token: a secret must not be written down"]),
]


def split(line: str) -> list[str]:
    """Words at single spaces: quotes belong to Hydra here."""
    return line.split(" ") if line else []


@pytest.mark.parametrize(("line", "parts"), WRONG, ids=[repr(line) for line, _ in WRONG])
def test_wrong_line_is_refused_in_one_line_and_leaves_nothing(train, tmp_path, line, parts):
    result = train(*split(line))
    assert result.exit_codes == [2], result.text
    said = result.text.strip().splitlines()
    assert said[0] == "Refused before anything was started:"
    assert len(said) == 1 + (2 if "\n" in parts[-1] else 1), result.text
    assert all(part in result.text for part in parts), result.text
    assert "Traceback" not in result.text and "hunter2" not in result.text
    assert list(tmp_path.iterdir()) == []


def test_missing_values_and_broken_interpolations_are_listed_together(train, tmp_path):
    result = train("name=???", "seed=???", "model.out_features=${oc.env:NOT_SET}", "optimizer.lr=${nope}")
    assert result.exit_codes == [2]
    keys = [line.split()[1].rstrip(":") for line in result.text.strip().splitlines()[1:]]
    assert sorted(keys) == ["model.out_features", "name", "optimizer.lr", "seed"]
    assert list(tmp_path.iterdir()) == []


def test_conflicts_of_several_sections_are_listed_together(train):
    result = train("seed=-1", "log.every_steps=0", "train.max_steps=0", "name=a/b")
    assert result.exit_codes == [2] and len(result.text.strip().splitlines()) == 5, result.text


def test_unknown_option_of_the_program_is_refused(train, tmp_path):
    result = train("--nope")
    assert result.exit_codes == [2] and "unrecognized arguments: --nope" in result.text
    assert list(tmp_path.iterdir()) == []


def test_device_that_this_machine_lacks_is_refused(train, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    result = train("mode.device=cuda")
    assert result.exit_codes == [2] and "no CUDA device; try mode.device=auto" in result.text
    result = train("mode.backend=nccl")
    assert result.exit_codes == [2] and "try mode.backend=gloo" in result.text
    assert list(tmp_path.iterdir()) == []


def test_other_groups_are_refused_for_saved_settings(train):
    run = train(*TINY).ok().folder
    result = train("--from-run", str(run), "optimizer=sgd")
    assert result.exit_codes == [2]
    assert "--from-run and --continue take single settings, not other groups" in result.text


# ---- what works as typed


def test_numbers_reach_the_run_with_their_types(train):
    saved = yaml.safe_load(
        (train(*TINY, "optimizer.lr=1e-3", "train.clip_norm=1").ok().folder / "config.yaml").read_text()
    )
    assert (saved["optimizer"]["lr"], type(saved["optimizer"]["lr"])) == (0.001, float)
    assert (saved["train"]["clip_norm"], type(saved["train"]["clip_norm"])) == (1.0, float)


@pytest.mark.parametrize(
    "switch", ["optimizer=sgd", "scheduler=constant", "scheduler=step", "scheduler=one_cycle", "model=mlp"]
)
def test_group_switch_without_an_experiment_takes_that_options_own_values(train, switch):
    run = train(*TINY, switch).ok().folder
    saved = yaml.safe_load((run / "config.yaml").read_text())
    group, option = switch.split("=")
    own = yaml.safe_load((Path(cli.__file__).parents[1] / "conf" / group / f"{option}.yaml").read_text())
    if option == "one_cycle":
        own["max_lr"] = 3e-3
    assert saved[group] == own


def test_pinned_value_of_the_default_preset_is_refused_with_another_option(train, tmp_path):
    presets = tmp_path / "own" / "experiment"
    presets.mkdir(parents=True)
    (presets / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /optimizer: adam\noptimizer:\n  lr: 0.5\n"
    )
    (tmp_path / "own" / "mine_config.yaml").write_text(
        "defaults:\n  - config\n  - override experiment: mine\n  - _self_\n"
    )
    own = ("--config-dir", str(tmp_path / "own"), "--config-name", "mine_config")
    result = train(*own, *TINY, "optimizer=sgd")
    assert result.exit_codes == [2] and "experiment=mine sets optimizer.lr=0.5" in result.text, result.text
    train(*own, *TINY, "optimizer=sgd", "optimizer.lr=0.1").ok()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_sweep_flag_works_anywhere_on_the_line(train, at):
    words = ["optimizer.lr=1e-3,1e-2", *TINY]
    words.insert(at, "-m")
    names = sorted(folder.name for folder in train(*words, ranks=1).ok().folders)
    assert names == ["00_lr=0.001", "01_lr=0.01"]


# ---- without torch and without a trace


WITHOUT_TORCH = [
    (
        ["--help"],
        ["Groups: choose one by group=option", "optimizer: adam, adamw, own, sgd", "torchrun --nproc"],
    ),
    (["--cfg", "job"], ["global_batch_size: 64", "name: digits_cnn"]),
    (["--cfg", "job", "optimizer=sgd", "train.max_epochs=3"], ["max_epochs: 3", "torch.optim.SGD"]),
    (["--cfg", "hydra", "--resolve"], ["dir: outputs", "subdir: ."]),
    (["--info", "defaults"], ["optimizer/adamw", "experiment/digits_cnn"]),
    (["--shell-completion", "query=bash"], ["optimizer=adam", "optimizer=sgd"]),
    (["optimzer.lr=1"], []),
]


@pytest.mark.parametrize(("words", "parts"), WITHOUT_TORCH, ids=[" ".join(w) for w, _ in WITHOUT_TORCH])
def test_questions_are_answered_without_torch_and_without_a_trace(start, tmp_path, words, parts):
    asked = {"COMP_LINE": "python train.py optimizer=", "COMP_POINT": "26"}
    result = start("-X", "importtime", "train.py", *words, env=asked)
    assert result.returncode == (0 if parts else 2), result.stderr[-2000:]
    assert all(part in result.stdout for part in parts), result.stdout
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "hydra" in imported and "torch" not in imported
    assert list(tmp_path.iterdir()) == []


# ---- secrets


def test_environment_values_are_saved_as_they_were_typed(monkeypatch):
    monkeypatch.setenv("TOP", "hunter2")
    monkeypatch.setenv("NUMBER", "64")
    cfg = OmegaConf.create(
        {
            "a": "${oc.env:TOP}",
            "b": "https://${a}@host",
            "c": ["${oc.env:TOP}", {"d": "${..0}"}],
            "e": {"f": "${c}", "g": "${oc.env:NOT_SET,5}", "h": "${oc.env:NOT_SET,'x y'}"},
            "i": "${oc.env:NOT_SET,null}",
            "k": "${j.${oc.env:TOP}}",
            "j": {"hunter2": 1},
            "n": 3,
            "m": "${n}",
            "o": "${oc.decode:${oc.env:NUMBER}}",
        }
    )
    saved = identity.saved_form(cfg)
    assert "hunter2" not in json.dumps({**saved, "j": None})
    assert saved["a"] == "${oc.env:TOP}" and saved["b"] == "https://${oc.env:TOP}@host"
    assert saved["c"] == ["${oc.env:TOP}", {"d": "${oc.env:TOP}"}] == saved["e"]["f"]
    assert saved["k"] == "${j.${oc.env:TOP}}" and saved["m"] == 3
    assert saved["o"] == "${oc.decode:${oc.env:NUMBER}}"  # a number, wherever it is read again
    again = OmegaConf.create(saved)
    assert OmegaConf.to_container(again, resolve=True) == OmegaConf.to_container(cfg, resolve=True)


def keyed(api_key: str, urls: list[str]) -> Splits:
    """Data that wants a secret."""
    assert api_key == "hunter2" and urls == ["http://hunter2/"], (api_key, urls)
    return probes.indexed()


def test_secret_from_the_environment_is_in_no_file_of_the_run(train, tmp_path):
    (tmp_path / "own" / "data").mkdir(parents=True)
    (tmp_path / "own" / "data" / "keyed.yaml").write_text(
        "_target_: tests.test_cli.keyed\napi_key: ${oc.env:TOP_KEY}\nurls: ['http://${data.api_key}/']\n"
    )
    words = [*TINY, "experiment=none", "data=keyed", "task=regression", "model=linear"]
    words += ["model.out_features=1", "--config-dir", str(tmp_path / "own")]
    run = train(*words, env={"TOP_KEY": "hunter2"}).ok().folder
    files = [p for p in run.rglob("*") if p.is_file()]
    assert len(files) > 3 and not [p for p in files if b"hunter2" in p.read_bytes()]
    again = train("--from-run", str(run), env={"TOP_KEY": "hunter2"}).ok().folder
    assert again != run


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("password", True),
        ("api_key", True),
        ("apikey", True),
        ("hf_token", True),
        ("token", True),
        ("aws_secret", True),
        ("credentials", True),
        ("tokens", False),
        ("max_token", False),
        ("keys", False),
        ("tokenizer", False),
    ],
)
def test_names_that_mean_secrets_are_known(key, secret):
    assert bool(check.SECRET.search(key)) == secret


# ---- one's own model beside train.py, one's own folder of options


class Net(nn.Module):
    """A user's model, with parts that are modules themselves."""

    def __init__(self, width: int, act: nn.Module, layers: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, width), act, *(layers or []))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


OPTION = """
width: 8
act:
  _target_: torch.nn.LeakyReLU
  negative_slope: 0.2
layers:
  - _target_: torch.nn.LayerNorm
    normalized_shape: ${model.width}
"""


@pytest.fixture
def own(tmp_path):
    """A folder of options with one for `Net`; returns the words that use it."""
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "model" / "net.yaml").write_text(f"_target_: tests.test_cli.Net{OPTION}")
    return ["--config-dir", str(tmp_path / "own"), "model=net", *TINY]


def test_own_model_with_nested_modules_trains_and_takes_overrides(train, own):
    run = train(*own, "model.width=12", "model.act.negative_slope=0.3").ok().folder
    saved = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert saved["width"] == 12 and saved["act"]["negative_slope"] == 0.3
    assert saved["layers"] == [{"_target_": "torch.nn.LayerNorm", "normalized_shape": 12}]


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("+model.widht=3", ["model.widht: Net has no such argument", "did you mean model.width?"]),
        ("model.width=wide", ["model.width='wide'", "wants int"]),
        ("+model.act.slope=1", ["model.act.slope: LeakyReLU has no such argument", "negative_slope"]),
        ("model.act.negative_slope=x", ["model.act.negative_slope='x'", "wants float"]),
        ("model.act._target_=torch.nn.ReLu", ["no 'ReLu' in torch.nn", "did you mean"]),
        ("model.act._target_=os.system", ["model.act._target_=os.system", "'os' is neither in this project"]),
        ("model._target_=tests.test_cli.Nte", ["no 'Nte' in tests.test_cli", "did you mean Net?"]),
        ("model=nett", ["model=nett: no such option", "Did you mean net?", "cnn, linear, mlp, net"]),
    ],
)
def test_mistake_in_an_own_model_is_told_with_its_key(train, own, tmp_path, word, parts):
    words = [w for w in own if not (word.startswith("model=") and w == "model=net")]
    result = train(*words, word)
    assert result.exit_codes == [2] and len(result.text.strip().splitlines()) == 2, result.text
    assert all(part in result.text for part in parts), result.text
    assert not (tmp_path / "outputs").exists()


def test_model_in_a_file_beside_train_py_is_found_from_any_folder(start, tmp_path):
    project = tmp_path / "project"
    for folder in ("conf", "ddp_experiments"):
        shutil.copytree(ROOT / folder, project / folder)
    shutil.copy(ROOT / "train.py", project)
    (project / "my_net.py").write_text(f"from torch import Tensor, nn\n\n\n{inspect.getsource(Net)}")
    (project / "conf" / "model" / "net.yaml").write_text(f"_target_: my_net.Net{OPTION}")
    result = start(str(project / "train.py"), "model=net", *TINY)
    assert result.returncode == 0, result.stderr
    assert list(tmp_path.glob("outputs/debug/*/config.yaml"))


def test_hydras_own_values_can_be_used_in_settings(train):
    run = train(*TINY, "name=${hydra:runtime.choices.model}").ok().folder
    assert run.parent.name == "cnn"


def test_folder_of_a_run_may_have_odd_characters(train, tmp_path):
    run = train(*TINY).ok().folder
    odd = tmp_path / "it's a, run=1"
    run.rename(odd)
    again = train("--from-run", str(odd)).ok().folder
    assert yaml.safe_load((again / "config.yaml").read_text())["from_run"] == str(odd)
