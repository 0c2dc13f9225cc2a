"""Branches of conversations: as documents, of which each turn is learned once, and as one episode when they are judged and compared."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import ConfigError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.environments.environment import Done, EpisodeRow, Observation, Turn
from drivetrain.generation.result import Generation
from drivetrain.generation.trajectories import PolicyTurn, trajectories_of
from drivetrain.losses.estimators.base import ESTIMATORS
from drivetrain.trainers.config.parse import parse
from drivetrain.trainers.config.rl import GRPOConfig
from drivetrain.trainers.data.conversation_tokens import ConversationTokens
from drivetrain.trainers.data.prompts import Prompt
from drivetrain.trainers.data.turn_ends import TurnEnds
from drivetrain.trainers.loop.ranks import TrainerRanks
from drivetrain.trainers.rl.completions import Completion, episodes_of, scored_only
from drivetrain.trainers.rl.episodes import Episodes
from drivetrain.trainers.rl.metrics import completion_metrics
from drivetrain.trainers.rl.update import turn_columns
from drivetrain.workers.roles.advantage import AdvantageConfig, AdvantageWorker
from helpers.templates import CHATML, DROPS_THOUGHTS, OTHER_END, tokenizer

TOKENIZER: Any = tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<e>")
ENDS = TurnEnds(("<e>",), ())


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_each_turn_is_learned_once_behind_what_was_read(seed: int) -> None:
    chance = random.Random(seed)
    turns: list[PolicyTurn] = []
    for number in range(chance.randrange(12)):
        count = chance.choice([0, 1, 2, 5])
        turns.append(
            PolicyTurn(
                number=number,
                parent=chance.choice([None, *turns]),
                observed=tuple(range(100 * number, 100 * number + chance.randrange(1, 4))),
                tokens=tuple(range(1000 * number, 1000 * number + count)),
                log_probs=tuple(-float(number) for _ in range(count)),
                versions=(number,) * count,
                finished=chance.random() < 0.5,
            )
        )
    learned: list[int] = []
    for one in trajectories_of(turns):
        document = one.generation
        assert [*document.prompt, *document.response] == one.turns[-1].context()
        assert one.turns[-1].tokens
        assert document.finished == one.turns[-1].finished
        assert document.sampled is not None
        for number, (turn, (begin, end)) in enumerate(zip(one.turns, one.spans, strict=True)):
            assert tuple(document.response[begin:end]) == turn.tokens
            assert document.sampled[begin:end] == [number >= one.new] * len(turn.tokens)
            if number >= one.new:
                assert document.log_probs[begin:end] == list(turn.log_probs)
                assert document.versions[begin:end] == list(turn.versions)
                learned += [turn.number] * bool(turn.tokens)
        unlearned = [i for i, sampled in enumerate(document.sampled) if not sampled]
        assert all(document.versions[i] == -1 and document.log_probs[i] == 0.0 for i in unlearned)
    assert sorted(learned) == [turn.number for turn in turns if turn.tokens]


class Scripted:
    """A pool of one environment that answers from a script."""

    def __init__(self, answers: Sequence[Observation | Done | None]) -> None:
        self._answers = list(answers)
        self.turns: list[Turn] = []

    def reset(self, key: Any, row: EpisodeRow) -> Future[Any]:
        return self._next()

    def step(self, key: Any, turn: Turn) -> Future[Any]:
        self.turns.append(turn)
        return self._next()

    def _next(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self._answers.pop(0))
        return future

    def close_episode(self, key: Any) -> None:
        pass


def episode(
    answers: Sequence[Observation | Done | None],
    texts: Sequence[str] = (),
    *,
    words: Any = TOKENIZER,
    more: Sequence[str] = (),
    pool: Scripted | None = None,
) -> tuple[list[Completion], list[list[int]], Scripted]:
    """Run an episode; return its documents, what the policy has read, and the pool."""
    settings_of_run = ["model.path=none", "rollout.environment=single_turn", "rollout.max_tokens=40", *more]
    pool = pool or Scripted(answers)
    episodes = Episodes(
        parse(GRPOConfig, settings_of_run, ""),
        TrainerRanks(alone=True),
        cast(Any, pool),
        words,
        ConversationTokens(words, ENDS),
        title=1,
        seed=0,
    )
    episodes.begin(0, Prompt(name="p", ids=[40, 41, 42], content="p"), 1)
    read: list[list[int]] = []
    left = list(texts)
    for _ in range(50):
        episodes.poll(wait=False)
        if kept := episodes.take_complete():
            return list(kept[0].rows), read, pool
        due = episodes.due()
        turns = []
        for one in due:
            read.append(one.context.ids)
            ids = [*words(left.pop(0) if left else "a", add_special_tokens=False)["input_ids"], END][: episodes.room(one)]
            turns.append(
                Generation(
                    prompt=one.context.ids,
                    response=ids,
                    log_probs=[-1.0] * len(ids),
                    versions=[0] * len(ids),
                    finish_reason="stop" if ids[-1] == END else "length",
                )
            )
        episodes.take(due, turns)
    raise AssertionError("the episode has not ended")


def says(text: str, **more: Any) -> Observation:
    return Observation(messages=[{"role": "user", "content": text}], **more)


def test_an_episode_that_branches() -> None:
    rows, read, pool = episode(
        [
            None,
            says("one", reward=1.0),
            says("two", after=0, reward=2.0),
            says("new", after=-1),
            says("unread", after=2, reward=4.0),
            Done(reward=8.0, unread=[4]),
        ]
    )
    prompt, turn = [40, 41, 42], [*TOKENIZER("a")["input_ids"], END]
    behind = {text: TOKENIZER(f"\n<s>user\n{text}<e>\n<s>assistant\n")["input_ids"] for text in ("one", "two", "unread")}
    assert read[:3] == [prompt, [*prompt, *turn, *behind["one"]], [*prompt, *turn, *behind["two"]]]
    assert read[3] == TOKENIZER("<s>user\nnew<e>\n<s>assistant\n")["input_ids"]
    assert [turn.context_length for turn in pool.turns] == [len(one) for one in read]
    assert [row.prompt.ids for row in rows] == [prompt, prompt, read[3]]
    records = [row.episode for row in rows if row.episode is not None]
    assert [(one.document, one.documents, one.first_turn, len(one.spans), one.own_prompt) for one in records] == [
        (0, 3, 0, 2, False),
        (1, 3, 1, 1, False),
        (2, 3, 0, 1, True),
    ]
    assert [one.turn_rewards for one in records] == [(1.0, 2.0), (None,), (4.0,)]
    assert [one.reward for one in records] == [15.0, 15.0, 15.0]
    assert [message["content"] for message in records[1].turns] == ["a", "two", "a"]
    assert [row.is_scored for row in rows] == [False, False, True]
    assert episodes_of(rows) == [2, 2, 2]
    assert scored_only(rows) == rows[2:]
    assert [len(row.written) for row in rows] == [2 * len(turn), len(turn), len(turn)]
    numbers = completion_metrics(rows)
    assert (numbers["completions"], numbers["turns"], numbers["documents"], numbers["length"]) == (
        1.0,
        4.0,
        3.0,
        4.0 * len(turn),
    )
    columns = turn_columns(rows, [15.0] * 3, 1.0)
    # A turn has the number that it has in its conversation, and what is left of the total is at the end of each document.
    assert [int(number) for number in columns["turns"].unique()] == [-1, 0, 1]
    begin = len(prompt) + len(rows[0].tokens)
    assert columns["turns"][begin + 2 : begin + 2 + len(turn)].tolist() == [-1] * len(turn)
    assert [
        float(part.sum()) for part in columns["turn_rewards"].split([len(r.prompt.ids) + len(r.tokens) for r in rows])
    ] == [15.0] * 3


def test_a_turn_ends_at_a_stop_string() -> None:
    rows, _, pool = episode([says("q", stop=["STOP", "END"]), says("q", stop=["zz"]), Done()], ["ab STOP cd END", "abc"])
    assert (pool.turns[0].text, pool.turns[0].stop, pool.turns[0].finished) == ("ab ", "STOP", True)
    assert TOKENIZER.decode(pool.turns[0].tokens) == "ab STOP"
    assert (pool.turns[1].text, pool.turns[1].stop) == ("abc", "")
    (row,) = rows
    assert row.episode is not None
    assert row.tokens[: row.episode.spans[0][1]] == list(pool.turns[0].tokens)
    # The template ends the turn that the stop string has ended.
    assert TOKENIZER.decode(row.tokens[row.episode.spans[0][1] :]).startswith("<e>\n<s>user")


def test_the_length_of_a_turn_is_limited_by_the_environment() -> None:
    _, _, pool = episode([says("q", max_tokens=3), says("q", max_tokens=1000), Done()], ["a b c d e f g", "x" * 300])
    assert [len(turn.tokens) for turn in pool.turns] == [3, 40]
    assert [turn.finished for turn in pool.turns] == [False, False]


def test_texts_follow_as_they_are() -> None:
    _, read, _ = episode([Observation(text="<s>hello"), Observation(text="<e>there"), Observation(text=""), Done()])
    first = TOKENIZER("<s>hello")["input_ids"]
    turn = [*TOKENIZER("a")["input_ids"], END]
    # The end that the policy has written is not there twice.
    assert read[:2] == [first, [*first, *turn, *TOKENIZER("there")["input_ids"]]]
    assert read[2] == [*read[1], *turn]


def test_what_a_template_cannot_continue_begins_again_or_fails(caplog: pytest.LogCaptureFixture) -> None:
    words = tokenizer(OTHER_END)
    history: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rows, read, _ = episode([says("q"), says("more", history=history), Done(reward=1.0)], words=words)
    assert "rendered again from its beginning" in caplog.text
    assert len(rows) == 2
    assert read[1] == words("<s>user\nq<e>\n<s>assistant\na<e>\n<s>user\nmore<e>\n<s>assistant\n")["input_ids"]
    rows, _, _ = episode([says("q"), says("more"), Done(reward=1.0)], words=words)
    assert [row.episode.end for row in rows if row.episode] == ["invalid"]
    # A template that drops what others wrote still says what follows the policy's own tokens.
    rows, _, _ = episode([says("q"), says("more", history=history), Done()], words=tokenizer(DROPS_THOUGHTS))
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ([None, says("x", after=1), Done()], "invalid"),
        ([says("x", after=0), Done()], "invalid"),
        ([Observation(text=""), Done()], "invalid"),
        ([None, says("x " * 900, after=-1), Done()], "max_tokens"),
        ([None, says("x " * 900), Done()], "max_tokens"),
        ([says("x " * 9000), Done()], "invalid"),
    ],
)
def test_observations_that_cannot_be_used(answers: list[Any], end: str) -> None:
    rows, _, _ = episode(answers, more=["engine.micro_batch.max_tokens=1024"])
    assert [row.episode.end for row in rows if row.episode] == [end]


def test_an_episode_of_which_nobody_has_read_anything_has_failed() -> None:
    rows, _, _ = episode([None, Done(reward=1.0, unread=[0])])
    (row,) = rows
    assert row.episode is not None
    assert (row.episode.end, row.episode.failure, row.tokens, row.episode.spans) == ("invalid", "invalid", [], ())
    assert row.sample().failure == "invalid"


def test_settings_that_an_episode_cannot_have_end_the_run() -> None:
    class Unsettled(Scripted):
        def reset(self, key: Any, row: EpisodeRow) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(ConfigError("the address is taken"))
            return future

    with pytest.raises(ConfigError, match="the address is taken"):
        episode([], pool=Unsettled([]))


GROUPS = [0, 0, 0, 0, 1, 1]
EPISODES = [1, 1, 2, 3, 4, 5]
REWARDS = [2.0, 2.0, 0.0, 1.0, 2.0, 0.5]


def advantages(name: str, rows: Sequence[int], *, marked: bool) -> list[list[float]]:
    documents = [[1, 2, 5, 5, *[5] * (row % 3)] for row in range(len(GROUPS))]
    batch = from_lists(
        [documents[row] for row in rows],
        supervised=[[False, False, *[True] * (len(documents[row]) - 2)] for row in rows],
        sequence_fields={
            "rewards": [REWARDS[row] for row in rows],
            **({"episode": [EPISODES[row] for row in rows]} if marked else {}),
        },
        group_ids=[GROUPS[row] for row in rows],
    )
    worker = AdvantageWorker(AdvantageConfig(estimator=ESTIMATORS.get(name)())).initialize()
    result: torch.Tensor = worker.compute_advantages(batch)["advantages"]
    return [part[part != 0].unique().tolist() for part in result.split(list(batch.lengths))]


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "gpg", "pass_at_k"])
def test_an_episode_is_compared_once(name: str) -> None:
    """All its documents have the advantage that its last one has if it is there alone; the control: without the field it counts twice."""
    alone = advantages(name, [1, 2, 3, 4, 5], marked=False)
    assert advantages(name, range(6), marked=True) == [alone[0], *alone]
    assert advantages(name, range(6), marked=False) != [alone[0], *alone]


def test_rewards_of_episodes_that_branch_are_asked_for_once() -> None:
    from drivetrain.trainers.rl.reward_runner import RewardRunner

    rows, _, _ = episode([None, says("one"), says("two", after=0), Done(reward=8.0)])
    asked: list[Any] = []

    class Pending:
        def __len__(self) -> int:
            return 1

        def result(self, models: Any) -> Any:
            asked.append(models)
            outcome = SimpleNamespace(value=8.0, message="", kind="value")
            return SimpleNamespace(rewards=[8.0], outcomes={"environment": [outcome]}, counts=lambda name: {"value": 1})

    runner = RewardRunner.__new__(RewardRunner)
    runner._ranks, runner._shown = TrainerRanks(alone=True), set()

    def submit(samples: Any) -> Pending:
        asked.append(samples)
        return Pending()

    runner._scorer = cast(Any, SimpleNamespace(submit=submit))
    pending = runner.submit(rows)
    judged, _ = runner.result(rows, [pending], [0.25, 0.75])
    assert [row.reward for row in judged] == [8.0, 8.0]
    assert [sample.environment_reward for sample in asked[0]] == [8.0]
    assert asked[1] == {"model": [0.75]}
