"""Which slow tests continuous integration runs for a change: those that execute it, the most specific first, and not too many."""

from pathlib import Path

import pytest

from helpers.slow_share import FOR_CHANGE, changed_since, chosen_for_change, load_slow_map, part_of, write_slow_map

BASE, RARE, SHARED = "engine/base.py", "engine/rare.py", "trainers/shared.py"
NAMES = [f"tests/e2e/test_{i // 10}.py::test_{i % 10}" for i in range(100)]
# All execute the base, a quarter what trainers share, three the rare module.
EXECUTED = {
    name: [BASE, *([SHARED] if i % 4 == 0 else []), *([RARE] if i in (8, 50, 99) else [])] for i, name in enumerate(NAMES)
}
RARE_TESTS = {NAMES[8], NAMES[50], NAMES[99]}


def test_tests_that_execute_the_change_are_chosen() -> None:
    assert set(chosen_for_change(NAMES, EXECUTED, [RARE])) == RARE_TESTS
    # Of several changed modules, the one that fewest execute comes first, and who executes both before who executes one.
    ranked = chosen_for_change(NAMES, EXECUTED, [SHARED, RARE, "docs/page.md"])
    assert ranked[0] == NAMES[8]
    assert set(ranked[:3]) == RARE_TESTS
    assert len(ranked) == FOR_CHANGE * len(NAMES)
    assert all(SHARED in EXECUTED[name] for name in ranked[3:])


def test_what_most_tests_execute_chooses_none() -> None:
    assert chosen_for_change(NAMES, EXECUTED, [BASE, "docs/page.md"]) == []
    assert set(chosen_for_change(NAMES, EXECUTED, [BASE, RARE])) == RARE_TESTS
    # The control: of fewer tests, the same module chooses.
    few = {name: modules if i < 40 else [] for i, (name, modules) in enumerate(EXECUTED.items())}
    assert len(chosen_for_change(NAMES, few, [BASE])) == FOR_CHANGE * len(NAMES)


def test_tests_that_are_not_recorded_are_chosen_by_their_file_alone() -> None:
    known = {name: modules for name, modules in EXECUTED.items() if "test_5.py" not in name}
    assert set(chosen_for_change(NAMES, known, [RARE])) == RARE_TESTS - {NAMES[50]}
    assert chosen_for_change(NAMES, known, ["tests/e2e/test_5.py"]) == sorted(NAMES[50:60])
    assert chosen_for_change(NAMES, {}, [RARE, BASE]) == []
    assert chosen_for_change([], EXECUTED, [RARE]) == []


def test_every_test_is_in_one_part() -> None:
    parts = [part_of(name, 3) for name in NAMES]
    assert {*parts} == {0, 1, 2}
    assert min(parts.count(part) for part in range(3)) > 20


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_slow_map(EXECUTED, tmp_path / "map.json")
    assert {name: set(modules) for name, modules in load_slow_map(tmp_path / "map.json").items()} == {
        name: set(modules) for name, modules in EXECUTED.items()
    }
    assert load_slow_map(tmp_path / "none.json") == {}


def test_a_commit_that_git_does_not_have_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert changed_since("no-such-commit") is None
    monkeypatch.setattr("helpers.slow_share.ROOT", tmp_path)
    assert changed_since("HEAD") is None


def test_most_of_what_is_recorded_exists() -> None:
    """What has been renamed since is not found, and chooses nothing: then it is time for `make slow-map`."""
    root = Path(__file__).parents[2]
    executed = load_slow_map()
    names = {module for modules in executed.values() for module in modules} | {test.partition("::")[0] for test in executed}
    missing = [name for name in names if not (root / name).exists()]
    assert len(missing) <= len(names) / 4, sorted(missing)
