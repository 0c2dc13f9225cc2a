"""Names of the product: each class stands for one thing, and words that readers stumbled at stay out."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "checkpoint_tools",
    "engine",
    "environments",
    "generation",
    "losses",
    "media",
    "rewards",
    "serve",
    "trainers",
    "workers",
)
FORBIDDEN_NAMES = (
    "lane",
    "ledger",
    "tally",
    "distrust",
    "outdate",
    "passengers",
    "last_words",
    "holdings_of",
    "note_exit",
    "note_end",
    "note_moved",
    "note_lost",
    "warn_of",
    "Patience",
    "Holding",
    "Tally",
)
FORBIDDEN_VALUES = ("found", "given", "own", "shown", "some", "told", "near", "began", "wanted", "rest", "known")
"""As names of arguments and local values, of which they do not say what they hold."""
FORBIDDEN_PHRASES = (
    r"last words",
    r"\bfor ever\b",
    r"came to be",
    r"has come to mean",
    r"\b(?:is|are) told\b",
    r"\bnobody\b",
    r"\bwhoever\b",
    r"\bgo(?:es)? on\b",
    r"\bworth the while\b",
    r"\bin vain\b",
    r"\bteach(?:es)? nothing\b",
    r"no GPU has seen",
    r"\bin the manner of\b",
    r"\bas such\b",
    r"\bis learned from\b",
    r"of many types",
    # "There is no limit" is English; "the file is no folder" is not. "No longer" and comparisons are English as well.
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b|less\b|larger\b|smaller\b|later\b|faster\b|slower\b)",
)
ALLOWED = {
    # Modules that have moved, by their old paths.
    "lazy_imports.py": {"lane", "ledger"},
    # The name of a field in messages.
    "workers/protocol/messages.py": {"found"},
    # The name in files and messages, which stay readable.
    "workers/protocol/compute_messages.py": {"passengers"},
    "workers/protocol/hooks.py": {"passengers"},
    "workers/protocol/values.py": {"passengers"},
    "trainers/rl/bundle.py": {"passengers"},
    # The name of a request that does not exist.
    "generation/conformance/checks.py": {r"\bnobody\b"},
}


def sources() -> list[Path]:
    return [*sorted(ROOT.glob("*.py")), *(path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))]


def class_names(tree: ast.Module) -> set[str]:
    """Classes at any depth, and aliases of types at the top."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            names |= {name} if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name) else set()
    return names


def names_of_several(modules: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The class names that more than one module defines."""
    places = defaultdict(list)
    for path, text in modules:
        for name in class_names(ast.parse(text)):
            places[name].append(path)
    return {name: paths for name, paths in places.items() if len(paths) > 1}


def values(text: str) -> set[str]:
    """The names of arguments and of values that a file assigns."""
    nodes = list(ast.walk(ast.parse(text)))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def pages() -> list[Path]:
    """Prose outside of the packages: pages, recipes, examples, benchmarks, and the files at the top."""
    folders = {"docs": ("md", "py", "txt"), "trainers": ("yaml",), "examples": ("py", "md"), "benchmarks": ("py", "md")}
    inside = [path for name, ends in folders.items() for end in ends for path in sorted((ROOT / name).rglob(f"*.{end}"))]
    scripts = [path for path in sorted((ROOT / ".ci").iterdir()) if path.is_file()]
    return [*sorted(ROOT.glob("*.md")), ROOT / "Makefile", ROOT / "mkdocs.yml", *inside, *scripts]


def phrases(path: str, text: str) -> list[str]:
    """The forbidden phrases of a text, also where a line ends in the middle of one."""
    prose = re.sub(r"\s+(?:# )?", " ", text)
    allowed = ALLOWED.get(path, set())
    return [phrase for phrase in FORBIDDEN_PHRASES if phrase not in allowed and re.search(phrase, prose, re.IGNORECASE)]


def has_part(word: str, name: str) -> bool:
    """Whether a name is a part of an identifier: `lane` of `reward_lane` and `RewardLane`, `Patience` of `PatienceLimits`."""
    if name[0].isupper():
        return re.search(rf"{name}(?![a-z])", word) is not None
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).lower()
    return f"_{name}_" in f"_{snake}_"


def forbidden(path: str, text: str) -> list[str]:
    """The forbidden words of a file, with its path."""
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    assigned = values(text) if words & set(FORBIDDEN_VALUES) else set()
    allowed = ALLOWED.get(path, set())
    # Few files have the letters of any name, and a word is looked at in detail only where they do.
    letters = text.replace("_", "").lower()
    suspects = [name for name in FORBIDDEN_NAMES if name not in allowed and name.replace("_", "").lower() in letters]
    wrong = [name for name in suspects if any(has_part(word, name) for word in words)]
    wrong += [name for name in FORBIDDEN_VALUES if name not in allowed and name in assigned]
    wrong += phrases(path, text)
    return [f"{path}: {word}" for word in wrong]


def gaps(text: str) -> list[int]:
    """The lines of a file with docstrings in which two lines in a row are empty."""
    constants = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docs = [(node.lineno, node.value) for node in constants if isinstance(node, ast.Constant)]
    return [line for line, doc in docs if isinstance(doc, str) and re.search(r"\n\s*\n\s*\n", doc)]


def test_docstrings_have_one_empty_line_at_a_time() -> None:
    wrong = {str(path.relative_to(ROOT)): lines for path in sources() if (lines := gaps(path.read_text()))}
    assert wrong == {}
    assert gaps('def f():\n    """One.\n\n    Two."""\n\n\ndef g():\n    """One.\n\n\n    Two."""\n') == [8]


def test_a_class_name_stands_for_one_class() -> None:
    texts = [(str(path.relative_to(ROOT)), path.read_text()) for path in sources()]
    assert len(texts) > 300
    assert names_of_several(texts) == {}


def test_the_search_sees_classes_and_aliases() -> None:
    one, other = (
        "class Part:\n    class Inner: ...\nKind = int\nLIMIT = 3\n",
        "Part = str\nclass Inner: ...\nLIMIT = 4\nKind = str\n",
    )
    assert names_of_several([("a.py", one), ("b.py", other)]) == {name: ["a.py", "b.py"] for name in ("Part", "Inner", "Kind")}


def test_words_that_readers_stumbled_at_stay_out() -> None:
    wrong = [line for path in sources() for line in forbidden(str(path.relative_to(ROOT)), path.read_text())]
    assert len(pages()) > 60
    for path in pages():
        wrong += [f"{path.relative_to(ROOT)}: {phrase}" for phrase in phrases(str(path.relative_to(ROOT)), path.read_text())]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(lane): ...", ["a.py: lane"]),
        ("self._tally = 1", ["a.py: tally"]),
        ("class RewardLane: ...", ["a.py: lane"]),
        ("class RolePatience: ...", ["a.py: Patience"]),
        ("warn_of_planes(patience=1)", ["a.py: warn_of"]),
        ("# it waits for ever", [r"a.py: \bfor ever\b"]),
        ("# it waits for\n# ever, nobody knows", [r"a.py: \bfor ever\b", r"a.py: \bnobody\b"]),
        ("raise ValueError('it is no folder')", [f"a.py: {FORBIDDEN_PHRASES[-1]}"]),
        ("# There is no folder; it is no longer than that, and are no more", []),
        ("found = [given for given in rows]", ["a.py: found", "a.py: given"]),
        ("def f(some, *, own=1): ...", ["a.py: own", "a.py: some"]),
        ("self.own(given=1)  # some are found", []),
        ("from .data_plane import planets", []),
    ],
)
def test_the_search_sees_names_and_phrases(text: str, words: list[str]) -> None:
    assert forbidden("a.py", text) == words


def test_what_is_allowed_is_still_there() -> None:
    for path, names in ALLOWED.items():
        assert all(re.search(name, (ROOT / path).read_text()) for name in names)
