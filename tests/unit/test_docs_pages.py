"""The pages as texts: what they name exists, and each of them can be found."""

import ast
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GROUPS = ("Train", "Reinforce", "Serve", "Build on it")
INDEX = (DOCS / "index.md").read_text()
CONFIG = (ROOT / "mkdocs.yml").read_text()
LINK = re.compile(r"\[([^\]]+)\]\(((?:api/)?[\w-]+\.md)\)")


def flat(entries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The titles and files of a part of the navigation, with those of the parts in it."""
    pages = []
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
    assert "rewards.md" not in str(navigation(CONFIG.replace(line, "")))
    assert navigation(CONFIG.replace(line, "").replace("  - Serve:\n", f"  - Serve:\n{line}")) != groups
    assert listed(INDEX.replace("[Rewards](rewards", "[Prices](rewards")) != groups


def test_every_test_that_the_page_of_bugs_names_exists() -> None:
    page = (DOCS / "bugs.md").read_text()
    assert page.count("`tests/") >= 20
    assert missing_tests(page) == []
    # Controls: a wrong name, a wrong file.
    assert missing_tests(page.replace("test_adapters_side_by_side`", "test_adapters_far_apart`")) == [
        "tests/distributed/test_vllm.py::test_adapters_far_apart"
    ]
    assert missing_tests("`tests/unit/test_nothing.py`") == ["tests/unit/test_nothing.py"]
