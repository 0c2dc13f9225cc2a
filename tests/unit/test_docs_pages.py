"""The pages as texts: what they name exists, and each of them can be found."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_every_test_that_the_page_of_bugs_names_exists() -> None:
    page = (DOCS / "bugs.md").read_text()
    assert page.count("`tests/") >= 20
    assert missing_tests(page) == []
    # Controls: a wrong name, a wrong file.
    assert missing_tests(page.replace("test_adapters_side_by_side`", "test_adapters_far_apart`")) == [
        "tests/distributed/test_vllm.py::test_adapters_far_apart"
    ]
    assert missing_tests("`tests/unit/test_nothing.py`") == ["tests/unit/test_nothing.py"]
