"""Common prefixes: which are found, how documents are laid out around them, and how they are divided into micro-batches."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import BudgetError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.engine.packing.microbatch import balance, count_units, partition
from drivetrain.engine.packing.prefixes import Prefixes
from drivetrain.engine.packing.sharing import find_prefixes, shared_layout
from drivetrain.workers.roles.dispatch import MiniBatches

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7)


def found(documents: list[list[int]], **fields: Any) -> Prefixes | None:
    return find_prefixes(from_lists(documents, **fields))


def computed(lengths: list[int], prefixes: Prefixes, part: list[int]) -> int:
    layout = shared_layout([lengths[i] for i in part], prefixes.select(part))
    return sum(lengths[i] for i in part) if layout is None else layout.tokens


@pytest.mark.parametrize(
    ("documents", "families", "parents"),
    [
        ([[5, 6, 7, 1], [5, 6, 7, 2, 3]], (0, 0), (2,)),
        # One answer is the beginning of another; equal answers.
        ([[5, 6], [5, 6, 7]], (0, 0), (1,)),
        ([[5, 6, 7], [5, 6, 7]], (0, 0), (2,)),
        # Two families that have one token in common, which would be a parent of nothing.
        ([[1, 2, 3, 4], [1, 5, 6, 7], [1, 2, 3, 5], [1, 5, 6, 8]], (0, 1, 0, 1), (2, 2)),
        # One of these is better off alone: with it, all three would share less.
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]], (0, 0, -1), (3,)),
        # A prompt that is much longer than the answers differ: all of them share it.
        ([[1] * 9 + [2, 3], [1] * 9 + [2, 4], [1] * 9 + [3, 5], [1] * 9 + [4]], (0, 0, 0, 0), (8,)),
    ],
)
def test_the_families_that_save_the_most(
    documents: list[list[int]], families: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    assert found(documents) == Prefixes(families=families, parents=parents)


@pytest.mark.parametrize("documents", [[[1, 2, 3]], [[1, 2], [2, 1]], [[1], [1], [1]], [[7, 1], [7, 2]]])
def test_documents_that_share_nothing(documents: list[list[int]]) -> None:
    assert found(documents) is None


def test_what_is_not_worth_the_while_is_left() -> None:
    batch = from_lists([[5, 6, 7, 8, 1], [5, 6, 7, 8, 2], [5, 6, 9]])
    prefixes = find_prefixes(batch, least=3)
    assert prefixes is not None
    assert prefixes.saved() == 3
    # Of neighbors four tokens are common, but not all of them can be saved.
    assert find_prefixes(batch, least=3.5) is None
    assert find_prefixes(batch, least=9) is None


def test_groups_and_positions_are_respected() -> None:
    documents = [[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 7, 3]]
    assert found(documents, group_ids=[0, 1, 0]) == Prefixes(families=(0, -1, 0), parents=(2,))
    # Unequal prompts under one group.
    assert found([[1, 2, 3], [4, 5, 6]], group_ids=[0, 0]) is None
    batch = from_lists(documents)
    moved = batch._derive(position_ids=batch.position_ids + torch.tensor([0] * 4 + [1] * 4 + [0] * 4))
    assert find_prefixes(moved) == Prefixes(families=(0, -1, 0), parents=(2,))
    assert find_prefixes(batch._derive(position_ids=batch.position_ids.expand(3, -1))) is None


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_no_other_cut_of_the_sorted_documents_saves_more(documents: list[list[int]]) -> None:
    ordered = sorted(documents)
    best = 0
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        runs, run = [], [ordered[0]]
        for document, cut in zip(ordered[1:], cuts, strict=True):
            if cut:
                runs.append(run)
                run = []
            run.append(document)
        saved = 0
        for some in [*runs, run]:
            common = next((i for i, column in enumerate(zip(*some, strict=False)) if len({*column}) > 1), min(map(len, some)))
            saved += (len(some) - 1) * max(0, common - 1)
        best = max(best, saved)
    prefixes = found(documents)
    assert (0 if prefixes is None else prefixes.saved()) == best


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_a_layout_has_every_token_behind_what_comes_before_it(documents: list[list[int]]) -> None:
    prefixes = found(documents)
    if prefixes is None:
        return
    batch = from_lists(documents)
    layout = shared_layout(batch.lengths, prefixes)
    assert layout is not None
    assert layout.tokens == batch.num_tokens - prefixes.saved()
    assert torch.equal(batch.input_ids[layout.index][layout.origin], batch.input_ids)
    assert torch.equal(batch.position_ids[layout.index][layout.origin], batch.position_ids)
    segment_of = torch.repeat_interleave(torch.arange(len(layout.parents)), torch.tensor(layout.bounds).diff())
    for document, (start, end) in enumerate(itertools.pairwise(batch.bounds)):
        segments = list(dict.fromkeys(segment_of[layout.origin[start:end]].tolist()))
        assert layout.parents[segments[-1]] == (segments[0] if len(segments) > 1 else -1)
        # All tokens of its parent and all of its own, in order.
        spans = [torch.arange(layout.bounds[s], layout.bounds[s + 1]) for s in segments]
        assert torch.equal(layout.origin[start:end], torch.cat(spans))
        # The last token of the prefix, whose successors differ, is the document's own.
        assert (prefixes.families[document] >= 0) == (len(segments) > 1)
        assert len(spans[-1]) >= 1


def test_a_family_of_one_in_a_micro_batch_is_a_document() -> None:
    prefixes = Prefixes(families=(0, 0, -1), parents=(2,))
    assert shared_layout([4, 3], prefixes.select([1, 2])) is None


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(7, 14), st.integers(1, 4))
def test_micro_batches_keep_to_the_budget_in_computed_tokens(documents: list[list[int]], budget: int, at_least: int) -> None:
    prefixes = found(documents)
    if prefixes is None:
        return
    lengths = [len(document) for document in documents]
    parts = partition(lengths, budget, at_least=at_least, prefixes=prefixes)
    assert sorted(i for part in parts for i in part) == list(range(len(documents)))
    assert all(computed(lengths, prefixes, part) <= budget for part in parts)
    units, spared = count_units(lengths, budget, None, prefixes)
    assert len(parts) <= units
    assert sum(computed(lengths, prefixes, part) for part in parts) <= sum(lengths) - sum(spared)


def test_a_large_family_is_cut_evenly_and_its_parent_repeated() -> None:
    documents = [[*range(20), 30 + i, 50 + i, 70 + i] for i in range(8)]
    prefixes = found(documents)
    assert prefixes is not None
    assert prefixes.parents == (19,)
    lengths = [23] * 8
    # All of them need 19 + 8 * 4 tokens, half of them 35.
    assert len(partition(lengths, 51, prefixes=prefixes)) == 1
    assert partition(lengths, 50, prefixes=prefixes) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert count_units(lengths, 50, None, prefixes) == (2, [19] * 6)
    # Groups of the caller are never cut.
    with pytest.raises(BudgetError, match="the group of 8 sequences that starts with sequence 0 has 51 tokens, more than"):
        partition(lengths, 50, prefixes=prefixes, groups=[0] * 8)
    assert len(partition(lengths, 51, prefixes=prefixes, groups=[0] * 8)) == 1
    with pytest.raises(BudgetError, match="sequence 0 has 23 tokens"):
        partition(lengths, 22, prefixes=prefixes)


LENGTHS_OF_GROUPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=6
)


def answers(groups: list[tuple[int, list[int]]]) -> tuple[list[int], Prefixes]:
    """The lengths of answers with their prompts, and what is known of them."""
    prompts = [i for i, (_, some) in enumerate(groups) for _ in some]
    sizes = [prompt for prompt, some in groups for _ in some]
    lengths = [prompt + answer for prompt, some in groups for answer in some]
    return lengths, Prefixes.of_prompts(prompts, sizes)


@settings(deadline=None, max_examples=200)
@given(LENGTHS_OF_GROUPS, st.integers(1, 4))
def test_ranks_are_balanced_by_what_they_compute(groups: list[tuple[int, list[int]]], parts: int) -> None:
    lengths, prefixes = answers(groups)
    shares = balance(lengths, parts, prefixes=prefixes, ratio=0.0)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    highest = max(computed(lengths, prefixes, share) for share in shares)
    for other in (balance(lengths, parts, ratio=0.0), balance(lengths, parts, groups=prefixes.families, ratio=0.0)):
        # A rank that happens to get two parts of a family computes even less than was reckoned with.
        assert highest <= max(computed(lengths, prefixes, share) for share in other) * 1.5


def test_a_family_stays_on_one_rank_unless_that_is_a_disadvantage() -> None:
    lengths, prefixes = answers([(100, [10] * 4)] * 4)
    for share in balance(lengths, 2, prefixes=prefixes):
        assert len({prefixes.families[i] for i in share}) == 2
    # One prompt, two ranks: better twice than one rank without work.
    lengths, prefixes = answers([(100, [50] * 8)])
    assert [len(share) for share in balance(lengths, 2, prefixes=prefixes)] == [4, 4]
    # Without knowing of them, the answers to a prompt are spread.
    lengths, prefixes = answers([(100, [10, 20, 30, 40])] * 4)
    assert any(len({prefixes.families[i] for i in share}) > 2 for share in balance(lengths, 2))
    # What a caller has grouped is never cut.
    assert sorted(map(len, balance([50] * 8, 2, groups=[0] * 8, prefixes=answers([(10, [40] * 8)])[1]))) == [0, 8]


@settings(deadline=None, max_examples=100)
@given(LENGTHS_OF_GROUPS, st.integers(1, 9), st.booleans())
def test_optimizer_steps_have_as_many_sequences_and_fewer_families(
    groups: list[tuple[int, list[int]]], size: int, shuffle: bool
) -> None:
    lengths, prefixes = answers(groups)
    some = MiniBatches(size=size, shuffle=shuffle, epochs=2, seed=3)
    steps, plain = some.steps(range(len(lengths)), prefixes), some.steps(range(len(lengths)))
    assert [len(step) for step in steps] == [len(step) for step in plain]
    half = len(steps) // 2
    for epoch in (steps[:half], steps[half:]):
        assert sorted(i for step in epoch for i in step) == list(range(len(lengths)))
        # At most one family continues in the next step.
        assert sum(len({prefixes.families[i] for i in step}) for step in epoch) <= len(groups) + len(epoch) - 1


def test_families_of_several_batches() -> None:
    one, two = Prefixes.of_prompts([5, 5, 9], [3, 3, 1]), Prefixes(families=(-1, 0, 0), parents=(7,))
    assert one == Prefixes(families=(0, 0, 1), parents=(2, 0))
    assert Prefixes.join([one, two]) == Prefixes(families=(0, 0, 1, -1, 2, 2), parents=(2, 0, 7))
    assert Prefixes.join([]) == Prefixes(families=(), parents=())
