"""From the command line to a run, and errors a person can use. No torch until a run starts."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from ddp_experiments import check, identity, launch
from ddp_experiments import config as schema
from ddp_experiments.errors import Exit, Refused
from ddp_experiments.preflight import Preflight

FROM_RUN = {"--from-run": "from_run", "--continue": "resume.run"}  # option: the setting that keeps its folder


def take_saved_config(argv: list[str]) -> list[str]:
    """Replace `--from-run DIR` and `--continue DIR` by the saved config of that run, under a name for Hydra.

    Raises:
        Refused: there is no saved config, or both options are given.
    """
    words = [
        part
        for word in argv
        for part in (word.split("=", 1) if word.split("=", 1)[0] in FROM_RUN else [word])
    ]
    given = [option for option in FROM_RUN if option in words]
    if not given:
        return own_targets(argv)
    at = words.index(given[0])
    if len(given) > 1 or words.count(given[0]) > 1 or at + 1 >= len(words):
        raise Refused(f"type one of {' DIR, '.join(FROM_RUN)} DIR, once, with the folder of a run")
    folder = Path(words[at + 1])
    saved = identity.load_config(folder)
    settings = ["run_id", "from_run", "resume"]  # of that start, not of the experiment
    if "eval_only=true" in words:
        settings.append("init_from")  # the weights are those that the run ended with
    places = [g for g in ("mode", "strategy") if any(w.startswith(f"{g}=") for w in words)]  # chosen anew
    node: dict[str, Any] = {k: v for k, v in saved.items() if k not in (*settings, *places)}
    quiet = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
    node["defaults"] = ["schema", "hydra_settings", *({g: "single"} for g in places), "_self_", *quiet]
    ConfigStore.instance().store(schema.SAVED, node)
    setting = FROM_RUN[given[0]] + "='" + str(folder.resolve()).replace("'", r"\'") + "'"
    return ["--config-name", schema.SAVED, *words[:at], setting, *words[at + 2 :]]


def flags_first(argv: list[str]) -> list[str]:
    """Put -m and --config-dir before the overrides: between them Hydra doesn't understand them.

    Raises:
        Refused: a setting written in another way than key=value.
    """
    flags, rest, words = [], [], iter(argv)
    for word in words:
        name = word.strip("-").partition("=")[0]
        if word in ("-m", "--multirun") or word.startswith("--config-dir="):
            flags.append(word)
        elif word in ("--config-dir", "-cd"):
            flags += [word, next(words, "")]
        elif word == "=":
            raise Refused("no blanks around =, please: type key=value")
        elif word.startswith("--") and (
            name in check.OTHER_NAMES or name in dict(schema.walk()) or "." in name
        ):
            raise Refused(
                f"{word}: settings are typed without dashes, {check.OTHER_NAMES.get(name, name)}=VALUE"
            )
        else:
            rest.append(word)
    return [*flags, *rest]


def own_targets(argv: list[str]) -> list[str]:
    """Where a group's `_target_` is typed but no option, leave out the arguments of the default option."""
    chosen = {word.partition("=")[0] for word in argv}
    groups = {g for g in schema.OPEN_GROUPS if f"{g}._target_" in chosen and g not in chosen}

    def words(word: str) -> list[str]:
        group, _, argument = word.partition("=")[0].partition(".")
        if group not in groups or not argument:
            return [word]
        return [f"{group}=own", word] if argument == "_target_" else [f"++{word}"]

    return [new for word in argv for new in words(word)]


def entry(main: Callable[[], Any]) -> None:
    """Run a @hydra.main function: one line for each mistake, the exit codes of `errors.py`."""
    schema.register()
    Preflight.reset()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving
    try:
        code = _start(main, wants_traceback=wants_traceback)
    finally:
        if Preflight.folder is not None:
            Preflight.folder.close()
    if code:
        sys.exit(code)


def _start(main: Callable[[], Any], *, wants_traceback: bool) -> int:
    """Check the words, let Hydra compose and call `main`; the exit code."""
    try:
        sys.argv[1:] = take_saved_config(flags_first(sys.argv[1:]))
        if said := list(check.slips(sys.argv[1:])):
            launch.refuse(said)
        main()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else Exit.DONE
    except Refused as refusal:
        launch.refuse(refusal.faults)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except launch.JobFailed:
        return Exit.FAILED
    except Exception as error:
        if Preflight.passed:
            traceback.print_exc()
            return Exit.FAILED
        if wants_traceback:
            raise
        launch.refuse([check.explain(error)])
    return Exit.DONE
