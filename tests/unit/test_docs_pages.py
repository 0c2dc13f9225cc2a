"""The pages as texts: what they name exists, and each of them can be found."""

import ast
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import llms
from docs.algorithms import PAPERS, TITLES, algorithm_settings
from docs.algorithms import pages as generated_pages
from drivetrain.engine.errors import ConfigError
from drivetrain.losses import traced_loss
from drivetrain.losses.algorithms import ALGORITHMS
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig
from drivetrain.trainers.config.runs import DPOConfig
from drivetrain.trainers.methods.preference import preference_loss
from drivetrain.trainers.rl.algorithms import published, resolve

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GROUPS = ("Train", "Reinforcement learning", "Serve", "Build on it")
INDEX = (DOCS / "index.md").read_text()
CONFIG = (ROOT / "mkdocs.yml").read_text()
LINK = re.compile(r"\[([^\]]+)\]\(((?:api/)?[\w-]+\.md)\)")


def flat(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The titles and files of a part of the navigation, with those of the parts in it."""
    pages: list[tuple[str, str]] = []
    for title, entry in (pair for part in entries for pair in part.items()):
        pages += flat(entry) if isinstance(entry, list) else [(title, entry)]
    return pages


def navigation(config: str) -> dict[str, list[tuple[str, str]]]:
    """The titles and files of each group of the site's navigation."""
    home, *groups = yaml.safe_load(config[config.index("nav:\n") :])["nav"]
    assert home == {"Home": "index.md"}
    return {name: flat(entries) for group in groups for name, entries in group.items()}


def listed(index: str) -> dict[str, list[tuple[str, str]]]:
    """The titles and files of each group of the index."""
    _, *parts = re.split(r"^## (.+)\n", index, flags=re.MULTILINE)
    assert len(set(parts[::2])) == len(parts[::2])
    return {name: LINK.findall(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def pages() -> set[str]:
    """The files of all pages but the index."""
    return {str(path.relative_to(DOCS)) for path in (*DOCS.glob("*.md"), *DOCS.glob("api/*.md"))} - {"index.md"}


def missing_tests(text: str) -> list[str]:
    """The tests that a text names, as `tests/FILE.py` or `tests/FILE.py::NAME`, and that do not exist."""
    missing = []
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        path = ROOT / file
        tests = (
            [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            if path.is_file()
            else []
        )
        if not path.is_file() or (name and name not in tests):
            missing.append(f"{file}::{name}" if name else file)
    return missing


def test_navigation_and_index_have_every_page_in_one_group() -> None:
    groups = navigation(CONFIG)
    assert tuple(groups) == GROUPS
    assert listed(INDEX) == groups
    files = [file for entries in groups.values() for _, file in entries]
    assert len(set(files)) == len(files)
    assert set(files) == pages()
    # Controls: a page that one of them lacks, a page in another group, and another title.
    line = "      - Rewards: rewards.md\n"
    assert line in CONFIG
    assert "'rewards.md'" not in str(navigation(CONFIG.replace(line, "")))
    assert navigation(CONFIG.replace(line, "").replace("  - Serve:\n", f"  - Serve:\n{line}")) != groups
    assert listed(INDEX.replace("[Rewards](rewards", "[Prices](rewards")) != groups


def test_llms_txt_lists_every_page() -> None:
    listing = llms.FILE.read_text()
    assert listing == llms.text(INDEX), "run python -m docs.llms"
    title, _, summary, *_ = listing.splitlines()
    assert title == "# Drivetrain"
    assert summary.startswith("> ")
    linked = {file.replace(".html", ".md") for file in re.findall(r"\]\(([^)]+)\)", listing)}
    assert linked == pages()
    assert re.findall(r"^## (.+)$", listing, re.MULTILINE) == [*GROUPS]
    # Control: a page that the index lacks.
    assert "(rewards.md)" not in llms.text(INDEX.replace("- [Rewards](rewards.md)", "[Rewards](rewards.md)"))


def test_every_test_that_the_page_of_bugs_names_exists() -> None:
    page = (DOCS / "bugs.md").read_text()
    assert page.count("`tests/") >= 20
    assert missing_tests(page) == []
    # Controls: a wrong name, a wrong file.
    assert missing_tests(page.replace("test_adapters_side_by_side`", "test_adapters_far_apart`")) == [
        "tests/distributed/test_vllm.py::test_adapters_far_apart"
    ]
    assert missing_tests("`tests/unit/test_nothing.py`") == ["tests/unit/test_nothing.py"]


def test_the_page_of_papers_has_all_of_them_with_titles() -> None:
    page = PAPERS.read_text()
    assert page == generated_pages()[PAPERS], "run python -m docs.algorithms"
    rows = [line.split(" | ") for line in page.splitlines() if "(https://arxiv.org/" in line]
    assert len(rows) >= 35
    numbers = {number for row in rows for number in re.findall(r"arXiv:([\d.]+)\]", row[1])}
    assert numbers == TITLES.keys()
    assert all(row[0].strip("| ") for row in rows)
    # Registrations cite each of them, and have all that this page cites.
    sources = "".join(path.read_text() for path in (*(ROOT / "losses").rglob("*.py"), ROOT / "docs" / "dpo.md"))
    assert all(f"arXiv:{number}" in sources for number in numbers)


def rl_config(*settings: str) -> GRPOConfig:
    config = parse(GRPOConfig, ["model.path=/tmp", "data.train=[x.jsonl]", "rewards.use=[answer]", *settings])
    assert isinstance(config, GRPOConfig)
    return config


@pytest.mark.parametrize("name", ALGORITHMS.all())
def test_the_settings_that_the_page_lists_are_those_of_the_algorithm(name: str) -> None:
    settings = [word.strip("`") for word in algorithm_settings(ALGORITHMS.get(name))]
    config = rl_config(f"rl.algorithm={name}", *settings)
    assert resolve(config) == resolve(rl_config(f"rl.algorithm={name}"))
    assert published(name).dynamic_sampling == ("rl.dynamic_sampling=true" in settings)


def test_a_wrong_setting_of_an_algorithm_is_seen() -> None:
    assert "`rl.loss.kl_coef=0.04`" in algorithm_settings(ALGORITHMS.get("grpo"))
    assert resolve(rl_config("rl.algorithm=grpo", "rl.loss.kl_coef=0.05")) != resolve(rl_config("rl.algorithm=grpo"))


def test_the_settings_of_preference_papers_are_accepted() -> None:
    rows = [line for line in PAPERS.read_text().splitlines() if "`dpo.loss=" in line and "`dpo.loss=kto`" not in line]
    assert len(rows) >= 15
    for row in rows:
        words = [word.replace("=E", "=0.1") for word in re.findall(r"`(dpo\.[^`]+)`", row)]
        config = parse(DPOConfig, ["model.path=/tmp", "data.train=[x.jsonl]", *words])
        preference_loss(config.dpo)
    with pytest.raises(ConfigError, match="label_smoothing"):
        preference_loss(parse(DPOConfig, ["model.path=/tmp", "data.train=[x.jsonl]", "dpo.loss=exo_pair"]).dpo)


def test_the_page_lists_the_operations_of_custom_losses() -> None:
    page = (DOCS / "training-service.md").read_text()
    section = page.split("## Custom losses\n")[1].split("\n## ")[0]
    rows = {
        cells[0].strip("| "): set(re.findall(r"`([a-z_0-9]+)`", cells[1]))
        for line in section.splitlines()
        if len(cells := line.split(" | ")) == 2
    }
    of_torch = {name.removeprefix("torch.") for name in traced_loss._FUNCTIONS if re.fullmatch(r"torch\.\w+", name)}
    of_functional = {name.rpartition(".")[2] for name in traced_loss._FUNCTIONS if name.startswith("torch.nn.functional.")}
    operators = {name.rpartition(".")[2] for name in traced_loss._FUNCTIONS if name.startswith("operator.")}
    assert rows["Python's operators"] == operators
    assert rows["`torch.nn.functional`"] == of_functional
    both = set().union(
        *(
            rows[kind]
            for kind in rows
            if kind.startswith(("arithmetic", "exponentials", "comparisons", "reductions", "shapes"))
        )
    )
    assert both | rows["only as `torch.X`"] == of_torch
    assert both | rows["only as methods"] == traced_loss._METHODS
    for limit in (traced_loss.MOST_NODES, traced_loss.MOST_CHARACTERS, traced_loss.MOST_ELEMENTS, traced_loss.MOST_INPUTS):
        assert f"{limit:,}" in section


# ---- CONTRIBUTING.md and AGENTS.md ---------------------------------------------------------------------------------------

PACKAGES = {init.parent.name for init in ROOT.glob("[!.]*/__init__.py")}
FOLDERS = PACKAGES | {"tests", "docs", "examples", "benchmarks"}


def folders_of(text: str) -> set[str]:
    """The folders that the table of folders names, those in a row as they are below the first one."""
    section = text.split("## The folders\n")[1].split("\n## ")[0]
    folders = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            first, second = line.strip("| ").split(" | ")
            names = re.findall(r"`([\w/]+)/`", first)
            folders |= {*names, *(f"{names[0]}/{name}" for name in re.findall(r"`(\w+)/`", second))}
    return folders


def not_importable(text: str) -> list[str]:
    """The dotted names of a text that begin with a package or module of the product, and do not exist."""
    names = re.findall(rf"`((?:{'|'.join((*sorted(PACKAGES), 'commands'))})(?:\.\w+)+)`", text)
    wrong = []
    for name in {name for name in names if not name.endswith((".py", ".md"))}:
        try:
            pkgutil.resolve_name(f"drivetrain.{name}")
        except (ImportError, AttributeError):
            wrong.append(name)
    return sorted(wrong)


def missing_files(text: str) -> list[str]:
    """The files with a folder that a text names, in backquotes or as links, and that do not exist anywhere that such a name is short for."""
    names = {*re.findall(r"`([\w.-]+/[\w./-]+\.(?:py|md|toml|yaml|json))`", text), *re.findall(r"\]\(([\w./-]+)[)#]", text)}
    files = [*(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")), *ROOT.glob("*.*"), *ROOT.glob(".ci/*")]
    ends = {"/" + str(path.relative_to(ROOT)) for path in files}
    return sorted(name for name in names if "NAME" not in name and not any(end.endswith(f"/{name}") for end in ends))


def test_the_tour_names_every_folder_and_only_those() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = folders_of(text)
    assert {name.split("/")[0] for name in folders} == FOLDERS
    assert [name for name in sorted(folders) if not (ROOT / name).is_dir()] == []
    below = {str(init.parent.relative_to(ROOT)) for name in PACKAGES for init in (ROOT / name).glob("*/__init__.py")}
    assert below <= folders
    # Controls: a folder that is not there, and one that the table lacks.
    assert "engine/wings" in folders_of(text.replace("`parallel/`", "`wings/`"))
    assert "media" not in folders_of(text.replace("| `media/` |", "| media |"))


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "AGENTS.md"])
def test_what_contributors_read_names_things_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not_importable(text) == []
    assert missing_files(text) == []
    assert missing_tests(text) == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {*re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE)} <= targets


def test_the_check_of_names_sees_wrong_ones() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(re.findall(r"`losses\.[\w.]+`", text)) >= 5
    assert not_importable(text.replace("base.Objective`", "base.Objection`")) == ["losses.objectives.base.Objection"]
    assert missing_files("`engine/nothing.py`, [a page](docs/nothing.md), `engine/base.py`") == [
        "docs/nothing.md",
        "engine/nothing.py",
    ]
