"""The closed settings: their help and resume rules, their ranges, and what belongs together."""

from dataclasses import replace
from enum import Enum

import pytest

from ddp_experiments import config as schema
from ddp_experiments.config import Config, Mode, ModeName, Strategy, Train

SETTINGS = dict(schema.walk())


def valid() -> Config:
    return Config(
        name="x",
        mode=Mode(ModeName.single, 1, 1),
        strategy=Strategy("ddp", "auto"),
        train=Train(max_epochs=1),
    )


@pytest.mark.parametrize("key", SETTINGS)
def test_setting_has_help_and_a_resume_rule(key):
    metadata = SETTINGS[key].metadata
    assert metadata["resume"] in ("free", "ask", "fixed")
    assert len(metadata["help"]) > 5 and "\n" not in metadata["help"]


@pytest.mark.parametrize("key", SETTINGS)
def test_unit_of_a_duration_is_in_its_name(key):
    assert ("second" in SETTINGS[key].metadata["help"]) == key.endswith("_seconds")


def test_valid_config_has_no_conflict():
    assert list(schema.conflicts(valid())) == []


CONFLICTS = [
    # dotted key, value, what the line must hold
    ("name", "", "becomes a folder"),
    ("name", "..", "becomes a folder"),
    ("name", "a/b", "becomes a folder"),
    ("name", "a b", "becomes a folder"),
    ("name", "a\n", "becomes a folder"),
    ("name", "a\0", "becomes a folder"),
    ("name", "-a", "first a letter or digit"),
    ("name", "ü", "letters, digits"),
    ("name", "a" * 65, "64 at most"),
    ("run_id", "../../x", "becomes a folder"),
    ("run_id", "x.tmp", "becomes a folder"),
    ("seed", -1, "at least 0"),
    ("mode.device", "cuda:x", "allowed are auto, cpu, cuda, cuda:N, mps"),
    ("mode.nnodes", 2, "needs mode=multinode"),
    ("mode.nnodes", "two", "must be auto or at least 1"),
    ("mode.nproc_per_node", 0, "must be auto or at least 1"),
    ("mode.threads", -1, "must be auto or at least 1"),
    ("mode.timeout_seconds", 0, "must be at least 1"),
    ("mode.init_timeout_seconds", 0, "must be at least 1"),
    ("strategy.replicate", 0, "must be auto or at least 1"),
    ("train.global_batch_size", 0, "must be at least 1"),
    ("train.accumulation_steps", 0, "must be at least 1"),
    ("train.accumulation_steps", 100, "is smaller than train.accumulation_steps=100"),
    ("train.max_epochs", 0, "must be at least 1"),
    ("train.max_epochs", None, "both null"),
    ("train.max_steps", -5, "must be at least 1"),
    ("train.early_stop_patience", 0, "must be at least 1"),
    ("train.num_workers", -1, "must be at least 0"),
    ("train.clip_norm", 0.0, "must be above 0"),
    ("train.clip_norm", float("inf"), "must be above 0"),
    ("train.clip_norm", float("nan"), "must be above 0"),
    ("train.ema_decay", -0.1, "at least 0 and below 1"),
    ("train.ema_decay", 1.0, "at least 0 and below 1"),
    ("train.ema_decay", float("nan"), "at least 0 and below 1"),
    ("eval.every_steps", 0, "null switches it off"),
    ("eval.every_epochs", 0, "null switches it off"),
    ("eval.microbatch_size", 0, "must be at least 1"),
    ("checkpoint.every_steps", 0, "null switches it off"),
    ("checkpoint.keep_last", 0, "must be at least 1"),
    ("log.every_steps", 0, "must be at least 1"),
    ("log.profile_steps", -1, "must be at least 0"),
    ("eval_only", True, "needs weights"),
]


@pytest.mark.parametrize(("key", "value", "part"), CONFLICTS, ids=[f"{k}={v!r}" for k, v, _ in CONFLICTS])
def test_value_out_of_range_is_told_in_one_line_with_its_key(key, value, part):
    config = valid()
    section, _, last = key.rpartition(".")
    setattr(getattr(config, section) if section else config, last, value)
    said = list(schema.conflicts(config))
    assert len(said) == 1 and key in said[0] and part in said[0] and "\n" not in said[0], said


@pytest.mark.parametrize("name", ["x", "2026-12-01_03-42-30", "a=1", "A.b_c-d", "9" * 64])
def test_plain_name_passes(name):
    assert list(schema.conflicts(replace(valid(), name=name, run_id=name))) == []


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:12"])
def test_device_names_pass(device):
    config = valid()
    config.mode.device = device
    assert list(schema.conflicts(config)) == []


def test_evaluation_alone_does_not_continue_a_run():
    config = replace(valid(), eval_only=True, from_run="x")
    assert list(schema.conflicts(config)) == []
    config.resume.run = "x"
    assert "doesn't continue a run" in next(schema.conflicts(config))


RULES = [
    ("seed", False, "fixed"),
    ("mode.device", False, "free"),
    ("train.precision", False, "ask"),
    ("train.max_epochs", False, "free"),
    ("train.max_epochs", True, "ask"),
    ("train.max_steps", False, "free"),
    ("train.max_steps", True, "ask"),
    ("model.hidden", False, "fixed"),
    ("model.part.deep", False, "fixed"),
    ("data.noise", True, "fixed"),
    ("optimizer.lr", False, "ask"),
    ("optimizer._target_", False, "fixed"),
    ("scheduler._target_", True, "fixed"),
    ("optimizer.part._target_", False, "fixed"),
    ("log.every_steps", True, "free"),
]


@pytest.mark.parametrize(("key", "horizon", "rule"), RULES)
def test_rule_of_the_deepest_declared_part_decides(key, horizon, rule):
    assert schema.resume_rule(key, horizon) == rule


def test_every_part_of_the_config_is_declared_as_free_ask_or_fixed():
    assert {schema.resume_rule(key, False) for key in SETTINGS} == {"free", "ask", "fixed"}


WANTED = [
    (int, "a whole number"),
    (float | None, "a number or null"),
    (bool, "true or false"),
    (int | str, "a whole number or auto"),
    (str | None, "a word or null"),
    (list[str], "a list, [a,b]"),
    (schema.Precision, "one of fp32, fp64, bf16, fp16"),
    (Train, "a section"),
]


@pytest.mark.parametrize(("hint", "words"), WANTED, ids=[w for _, w in WANTED])
def test_type_is_told_in_words(hint, words):
    assert schema.wanted(hint) == words


def test_enums_are_written_as_they_are_named():
    enums = [
        t for t in vars(schema).values() if isinstance(t, type) and issubclass(t, Enum) and t is not Enum
    ]
    assert len(enums) == 6
    assert all(member.name == member.value for enum in enums for member in enum)
