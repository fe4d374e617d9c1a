"""The files of conf/: each composes with the schema, each opens with a command, and the commands work."""

import shlex

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from ddp_experiments import check, cli, identity, launch, preflight, targets
from ddp_experiments import config as schema
from ddp_experiments.environment import read
from tests.ranks import ROOT, launcher_variables

CONF = ROOT / "conf"
FILES = sorted(CONF.rglob("*.yaml"))
OPTIONS = [(p.parent.name, p.stem) for p in FILES if p.parent != CONF and p.stem != "own"]


@pytest.fixture(scope="module", autouse=True)
def composing():
    schema.register()
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def composed(*words):
    return hydra.compose("config", overrides=list(words))


def head(path):
    """The command in a file's first comment that isn't Hydra's."""
    lines = path.read_text().splitlines()
    first = next(line for line in lines if not line.startswith("# @package"))
    assert first.startswith("# ")
    return first.removeprefix("# ")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CONF)))
def test_file_opens_with_its_command_and_what_to_expect(path):
    if path.name == "hydra_settings.yaml":
        assert head(path).startswith("Hydra's own settings")
        return
    command, _, expected = head(path).partition("     ")
    words = shlex.split(command)
    assert "train.py" in words and words[0] in ("python", "torchrun")
    if path.parent != CONF:
        assert expected.strip() or len(words) > 3, "say what to expect"
        used = {w.partition("=")[0] for w in words[words.index("train.py") + 1 :]}
        assert used & {path.parent.name, f"{path.parent.name}._target_", "experiment"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CONF)))
def test_command_in_a_files_head_is_accepted_as_typed(path):
    if path.name == "hydra_settings.yaml":
        pytest.skip("has no command")
    command = shlex.split(head(path).partition("     ")[0])
    options, words = command[: command.index("train.py")], command[command.index("train.py") + 1 :]
    words, environment = cli.own_targets(words), read()
    if options[0] == "torchrun":
        count = next(int(o.split("=")[1]) for o in options if o.startswith("--nproc_per_node"))
        nodes = next((int(o.split("=")[1]) for o in options if o.startswith("--nnodes")), 1)
        variables = launcher_variables(0, count * nodes, 29500)
        variables |= {"LOCAL_WORLD_SIZE": str(count), "GROUP_WORLD_SIZE": str(nodes)}
        environment = read(variables)
    config = schema.typed(composed(*words))
    said = [
        *check.slips(words),
        *check.orphans(words, {"experiment": "digits_cnn"}),
        *schema.conflicts(config),
    ]
    said += launch.faults(config, environment, words)
    for group in schema.OPEN_GROUPS:
        targets.check(getattr(config, group), group)
    assert said == []


@pytest.mark.parametrize(("group", "option"), OPTIONS, ids=["/".join(o) for o in OPTIONS])
def test_option_composes_and_its_values_survive_the_schema(group, option):
    cfg = composed(f"{group}={option}", *([] if group == "experiment" else ["experiment=none"]))
    written = yaml.safe_load((CONF / group / f"{option}.yaml").read_text()) or {}
    written.pop("defaults", None)
    plain = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    inside = plain if group in ("experiment", "debug") else plain[group]

    def compare(given, found, key):
        for k, v in given.items():
            if isinstance(v, dict):
                compare(v, found[k], f"{key}.{k}")
            else:
                same = found[k] == v or float(found[k]) == float(v)
                assert same, f"{key}.{k}: {v} was written, {found[k]} came out"

    compare(written, inside, group)
    assert schema.typed(cfg)


MODES = {
    "single": ("single", 1, 1),
    "multigpu": ("multigpu", 1, "auto"),
    "multinode": ("multinode", "auto", "auto"),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_values_reach_the_typed_config(mode):
    config = schema.typed(composed(f"mode={mode}"))
    assert (config.mode.name.value, config.mode.nnodes, config.mode.nproc_per_node) == MODES[mode]


PRESETS = [
    (e, d) for e in ("article", "digits_cnn", "digits_mlp", "none", "teacher") for d in ("none", "tiny")
]


def test_table_of_presets_is_complete():
    assert {e for e, _ in PRESETS} == {p.stem for p in (CONF / "experiment").glob("*.yaml")}
    assert set(MODES) == {p.stem for p in (CONF / "mode").glob("*.yaml")}


@pytest.mark.parametrize(("experiment", "debug"), PRESETS)
def test_every_preset_passes_the_whole_check(experiment, debug):
    words = [f"experiment={experiment}", f"debug={debug}"]
    assert check.faults(composed(*words), words) == []


@pytest.mark.parametrize("debug", ["overfit", "profile"])
def test_debug_preset_wins_over_the_experiment(debug):
    config = schema.typed(composed("experiment=teacher", f"debug={debug}"))
    assert config.name == "debug" and config.train.max_epochs is None and config.train.max_steps
    assert config.data["_target_"].endswith("teacher")


def test_command_line_wins_over_every_preset():
    words = ["experiment=teacher", "debug=tiny", "train.max_steps=7", "optimizer.lr=0.5", "name=mine"]
    config = schema.typed(composed(*words))
    assert (config.train.max_steps, config.optimizer["lr"], config.name) == (7, 0.5, "mine")


def test_default_preset_pins_nothing_in_an_open_group():
    default = composed()
    chosen = next(
        d for d in yaml.safe_load((CONF / "config.yaml").read_text())["defaults"] if "experiment" in d
    )
    preset = yaml.safe_load((CONF / "experiment" / f"{chosen['experiment']}.yaml").read_text())
    assert not set(preset) & set(schema.OPEN_GROUPS), "a switch of that group would keep the other's value"
    assert default.name == chosen["experiment"]


def test_no_preset_switches_defaults_of_the_schema_off():
    """What no file mentions keeps the default that the schema declares."""
    config = schema.typed(composed("experiment=none"))
    assert config.log == schema.Log() and config.resume == schema.Resume() and config.eval == schema.Eval()
    assert config.checkpoint == schema.Checkpoint() and config.seed == 0


def test_settings_of_this_machine_are_taken_when_they_exist(train, tmp_path):
    (tmp_path / "own" / "local").mkdir(parents=True)
    (tmp_path / "own" / "local" / "default.yaml").write_text(
        "# @package _global_\nmode:\n  threads: 1\nseed: 5\n"
    )
    run = train("debug=tiny", "--config-dir", str(tmp_path / "own")).ok().folder
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert (saved["mode"]["threads"], saved["seed"]) == (1, 5)


JOBS = [
    [
        "optimizer.lr=1e-3",
        "seed=1",
        "train.precision=fp32",
        "mode.threads=auto",
        "train.clip_norm=null",
        "name=a",
    ],
    ["optimizer.lr=1e-2", "seed=2", "train.precision=fp64", "mode.threads=2", "train.clip_norm=1", "name=a"],
    ["optimizer.lr=0.5", "seed=3", "train.precision=bf16", "mode.threads=1", "train.clip_norm=0.5", "name=a"],
]


def test_a_job_of_a_sweep_that_is_made_from_a_copy_is_the_one_that_hydra_composes():
    compose = preflight.Composer("config")
    for number, job in enumerate(JOBS):
        assert compose.is_quick(job[:-1]) == (number > 0)
        made, wanted = compose(job, job[:-1]), preflight._compose("config", job)
        assert identity.saved_form(made) == identity.saved_form(wanted)
        assert schema.typed(made) == schema.typed(wanted)


@pytest.mark.parametrize("word", ["model=mlp", "model.channels=[8,8]", "+model.more=1", "optimizer={lr:1}"])
def test_what_is_no_plain_value_is_composed_by_hydra(word):
    compose = preflight.Composer("config")
    compose([], [])
    assert not compose.is_quick(["seed=1", word])
