"""The commands and examples of the documentation work as written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_experiments import config
from tests.ranks import ROOT, Pool, Result

PAGES = ("runs", *(pytest.param(page, marks=pytest.mark.slow) for page in ("start", "modes", "sweeps")))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    return [shlex.split(line) for block in blocks(page, "sh") for line in block.splitlines() if line.strip()]


def run(words: list[str], pool: Pool, folder: Path) -> int:
    """Run a command of the documentation; train.py on living ranks."""
    if words[:2] == ["python", "train.py"]:
        return max(pool.train(folder, *words[2:]).exit_codes)
    if words[0] == "torchrun":
        count = next((int(w.partition("=")[2]) for w in words if w.startswith("--nproc_per_node")), 1)
        return max(pool.train(folder, *words[words.index("train.py") + 1 :], ranks=count).exit_codes)
    assert words[0] == "python"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words[1:]], cwd=folder, env=environment, check=False).returncode


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work_from_top_to_bottom(page: str, pool: Pool, tmp_path: Path) -> None:
    found = commands(ROOT / f"docs/{page}.md")
    assert len(found) >= 3
    failed = [shlex.join(words) for words in found if run(words, pool, tmp_path) != 0]
    assert failed == []


def test_the_commands_of_the_readme_are_known(train: Callable[..., Result]) -> None:
    """Every setting in a command of the README is one: `--cfg job` composes it."""
    text = (ROOT / "README.md").read_text()
    lines = [
        m
        for m in re.findall(r"`((?:python|torchrun)[^`]*train\.py[^`]*)`", text)
        if "NAME" not in m and "…" not in m
    ]
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line)[shlex.split(line).index("train.py") + 1 :]
        words = [w for w in words if w not in ("--help", "-m", "--cfg", "job") and "," not in w]
        result = train(*words, "--cfg", "job")
        assert result.exit_codes == [0], f"{line}\n{result.text}"


def test_the_own_model_and_data_of_the_documentation_train(tmp_path: Path) -> None:
    page = ROOT / "docs/own.md"
    project = tmp_path / "project"
    shutil.copytree(ROOT / "conf", project / "conf")
    shutil.copy(ROOT / "train.py", project)
    for code in blocks(page, "python"):
        name = re.match(r"# (\w+\.py)", code)
        if name:
            (project / name[1]).write_text(code)
    (project / "conf/model/net.yaml").write_text(blocks(page, "yaml")[0])
    (project / "conf/data/squares.yaml").write_text("_target_: mydata.squares\nsamples: 256\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    short = ["data=squares", "train.max_epochs=null", "train.max_steps=2", "log.every_steps=1"]
    readme = next(b for b in blocks(ROOT / "README.md", "sh") if "_target_" in b)

    def run_here(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train.py", *words, *short]
        return subprocess.run(
            command, cwd=project, env=environment, capture_output=True, text=True, check=False
        )

    for words in (["model=net", "model.hidden=64"], shlex.split(readme)[2:]):
        done = run_here(*words)
        assert done.returncode == 0, done.stderr
    wrong = run_here("model=net", "model.hiden=64")
    assert wrong.returncode == 2
    assert "did you mean model.hidden?" in wrong.stderr or "Did you mean model.hidden?" in wrong.stderr


def test_the_page_of_settings_is_that_of_the_code() -> None:
    assert (ROOT / "docs/settings.md").read_text() == config.reference()


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"docs/{p.name}" not in readme] == []


def test_links_lead_to_files() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
