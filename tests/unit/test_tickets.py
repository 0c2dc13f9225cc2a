"""The tickets of a run: the bound, the order and the end of all waiting, in every reachable state of small runs and in random larger ones."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.engine.errors import CheckpointError
from drivetrain.trainers.rl.tickets import Ticket, TicketError, TicketEvent, Tickets, check_events

Action = Callable[[Tickets], object]


def actions(tickets: Tickets) -> dict[str, Action]:
    """Everything that may happen next, in whatever order and at whatever time."""
    found: dict[str, Action] = {"start": Tickets.start} if tickets.waiting else {}
    for number in tickets._running:
        found[f"finish {number}"] = partial(lambda number, one: one.finish(number), number)
        found[f"give back {number}"] = partial(lambda number, one: one.give_back(number), number)
    if tickets.next is not None:
        found |= {"keep": lambda one: one.keep(), "drop": lambda one: one.drop()}
    if tickets.is_full:
        found["apply"] = lambda one: one.apply()
    return found


def relative(tickets: Tickets) -> tuple[Any, ...]:
    """The state without what grows for ever."""
    first = tickets._out[0].number if tickets._out else tickets._next
    out = tuple(
        (t.number - first, tickets.version - t.version, t.number in tickets._running, t.number in tickets._finished)
        for t in tickets._out
    )
    return tickets.kept, tuple(t.number - first for t in tickets.waiting), out


def reachable(begin: Tickets) -> Iterator[Tickets]:
    seen, ahead = {relative(begin)}, deque([begin])
    while ahead:
        tickets = ahead.popleft()
        yield tickets
        for action in actions(tickets).values():
            after = copy.deepcopy(tickets)
            action(after)
            if (state := relative(after)) not in seen:
                seen.add(state)
                ahead.append(after)


def saved_alike(tickets: Tickets) -> None:
    """In the middle of a step too, a checkpoint has the tickets of its beginning, if it has the answers that only older weights make."""
    begin = [ticket for ticket in (*tickets._consumed, *tickets._out) if ticket.number < tickets._next_at_begin]
    answered = {ticket.number for ticket in tickets._consumed} | tickets._finished
    stored = {ticket.number for ticket in begin} & answered
    if any(ticket.version < tickets.version and ticket.number not in stored for ticket in begin):
        with pytest.raises(TicketError, match="neither the completions of the tickets"):
            tickets.state(stored)
        return
    restored = Tickets.restore(tickets.state(stored), batch=tickets.batch, staleness=tickets.staleness)
    assert [*restored._out] == begin
    assert restored._finished == stored
    assert [*restored.waiting] == [ticket for ticket in begin if ticket.number not in stored]
    assert (restored.kept, restored.version, restored._next) == (0, tickets.version, tickets._next_at_begin)


SIZES = [
    pytest.param(batch, staleness, marks=pytest.mark.slow if batch * (staleness + 1) == 6 else [])
    for batch in (1, 2, 3)
    for staleness in (0, 1, 2)
    if batch * (staleness + 1) <= 6
]


@pytest.mark.parametrize(("batch", "staleness"), SIZES)
def test_the_rules_hold_in_every_state(batch: int, staleness: int) -> None:
    oldest = states = 0
    for tickets in reachable(Tickets(batch, staleness)):
        states += 1
        # Something can always happen, and all that waits for it is an answer: nobody waits for ever.
        assert actions(tickets)
        if not tickets._running and not tickets.waiting:
            assert tickets.next is not None or tickets.is_full
        saved_alike(tickets)
        # The tickets that are out follow each other, and are as many as may be.
        numbers = [ticket.number for ticket in tickets._out]
        assert numbers == list(range(tickets._next - batch * (staleness + 1) + tickets.kept, tickets._next))
        if (ticket := tickets.next) is not None:
            oldest = max(oldest, tickets.version - ticket.version)
    # The bound is kept, and is reached.
    assert oldest == staleness
    assert states >= 4


def one_more(tickets: Tickets) -> None:
    ticket = Ticket(number=tickets._next, version=tickets.version)
    tickets._next += 1
    tickets._out.append(ticket)
    tickets._waiting.append(ticket)


class IssuesOneTooMany(Tickets):
    def apply(self) -> int:
        version = super().apply()
        one_more(self)
        return version


class IssuesInOrderOfCompletion(Tickets):
    """A ticket more as soon as one has its answer, whenever that is."""

    def finish(self, number: int) -> None:
        super().finish(number)
        one_more(self)


class IssuesForDroppedOnesLater(Tickets):
    def drop(self) -> Any:
        ticket = self._consume("drop")
        if not self._out:
            self._issue(begins_step=False)
        return ticket


def as_many_as_may_be(kind: type[Tickets]) -> bool:
    states = zip(range(10000), reachable(kind(2, 1)), strict=False)
    return all(len(tickets._out) == 4 - tickets.kept for _, tickets in states)


def test_no_more_tickets_are_issued_than_the_last_steps_keep() -> None:
    events: list[TicketEvent] = []
    tickets = Tickets(2, 2, steps=4, observe=events.append)
    issued = [len(tickets._out)]
    while tickets.version < 4:
        while tickets.waiting:
            tickets.finish(tickets.start().number)
        if tickets.version == 3 and not tickets.kept:
            tickets.drop()
            tickets.finish(tickets.start().number)
        tickets.keep()
        if tickets.is_full:
            tickets.apply()
            issued.append(len(tickets._out))
    assert issued == [6, 6, 4, 2, 0]
    assert sum(event.kind == "issue" for event in events) == 2 * 4 + 1
    assert check_events(events, 2, 2, 4) == len(events)
    with pytest.raises(TicketError, match="2 tickets are due first"):
        check_events(events, 2, 2, 5)
    with pytest.raises(TicketError, match="step 4 was the last one"):
        tickets.keep()
    # A run that is continued for longer issues the others with its present version.
    longer = Tickets.restore(tickets.state(), batch=2, staleness=2, steps=6)
    assert [(ticket.number, ticket.version) for ticket in longer.waiting] == [(9 + i, 4) for i in range(4)]


def test_other_rules_are_seen() -> None:
    assert as_many_as_may_be(Tickets)
    for broken in (IssuesOneTooMany, IssuesInOrderOfCompletion, IssuesForDroppedOnesLater):
        assert not as_many_as_may_be(broken)


@settings(deadline=None, max_examples=150)
@given(batch=st.integers(1, 5), staleness=st.integers(0, 4), data=st.data())
def test_what_is_consumed_does_not_depend_on_time(batch: int, staleness: int, data: st.DataObject) -> None:
    """Whoever answers, dies and comes back, however late: the same tickets are consumed, with the same versions."""
    dropped = data.draw(st.sets(st.integers(0, 60), max_size=20))

    def run(choose: Callable[[list[str]], str], steps: int) -> tuple[list[tuple[int, int, int]], list[TicketEvent]]:
        events: list[TicketEvent] = []
        tickets = Tickets(batch, staleness, observe=events.append)
        consumed: list[tuple[int, int, int]] = []
        while tickets.version < steps:
            possible = actions(tickets)
            if tickets.next is not None:
                possible.pop("keep" if tickets.next.number in dropped else "drop")
            name = choose(sorted(possible))
            before = tickets.next
            possible[name](tickets)
            if name in ("keep", "drop") and before is not None:
                consumed.append((before.number, before.version, tickets.version))
        return consumed, events

    calm, calm_events = run(lambda names: next(n for n in names if not n.startswith("give back")), 6)
    random = data.draw(st.randoms(use_true_random=False))
    wild, events = run(random.choice, 6)
    assert wild == calm
    assert [number for number, _, _ in wild] == list(range(len(wild)))
    assert all(0 <= now - made <= staleness for _, made, now in wild)
    for one in (events, calm_events):
        assert check_events(one, batch, staleness) == len(one)


def test_a_run_without_staleness_waits_for_each_step() -> None:
    tickets = Tickets(2, 0, version=5, first=10)
    for step in range(3):
        for _ in range(2):
            ticket = tickets.start()
            assert ticket.version == 5 + step
            tickets.finish(ticket.number)
            assert tickets.keep() == ticket
        assert not tickets.waiting
        assert tickets.apply() == 6 + step


def test_mistakes_are_named() -> None:
    tickets = Tickets(1, 0)
    with pytest.raises(TicketError, match="ticket 0 has no answer yet"):
        tickets.keep()
    with pytest.raises(TicketError, match=r"ticket 0 is not being answered; those that are: none"):
        tickets.finish(0)
    tickets.start()
    with pytest.raises(TicketError, match="no ticket is waiting"):
        tickets.start()
    tickets.finish(0)
    with pytest.raises(TicketError, match="has kept 0 of 1 groups"):
        tickets.apply()
    tickets.keep()
    with pytest.raises(TicketError, match="the step is full: apply it"):
        tickets.drop()
    for batch, staleness in ((0, 0), (1, -1)):
        with pytest.raises(TicketError, match="batch must be at least 1 and staleness at least 0"):
            Tickets(batch, staleness)


def test_a_completion_that_is_too_old_is_not_trained_on() -> None:
    tickets = Tickets(1, 1)
    tickets.start()
    tickets.finish(0)
    # As if somebody else had counted the steps.
    tickets.version = 2
    with pytest.raises(TicketError, match=r"version 0 of the weights, and version 2 is trained; rl\.staleness=1 allows 1"):
        tickets.keep()


def test_a_checkpoint_goes_on_with_the_same_tickets() -> None:
    tickets = Tickets(2, 1)
    for _ in range(4):
        tickets.finish(tickets.start().number)
    tickets.drop()
    tickets.keep()
    tickets.keep()
    tickets.apply()
    assert tickets.num_unanswered(before=1) == 1
    tickets.finish(tickets.start().number)
    assert tickets.num_unanswered(before=1) == 0
    events: list[TicketEvent] = []
    state = tickets.state([3, 4])
    restored = Tickets.restore(state, batch=2, staleness=1, observe=events.append)
    assert check_events(events, 2, 1) == 1 + 4 + 2 * 2
    assert relative(restored) == relative(tickets)
    assert restored.state([3, 4]) == state
    assert [t.number for t in restored.waiting] == [5, 6]
    with pytest.raises(TicketError, match=r"neither the completions of the tickets \[3, 4\]"):
        tickets.state()
    with pytest.raises(CheckpointError, match=r"saved with rl\.staleness = 1, now it is 2"):
        Tickets.restore(state, batch=2, staleness=2)
    with pytest.raises(CheckpointError, match=r"saved with data\.batch_size = 2, now it is 3"):
        Tickets.restore(state, batch=3, staleness=1)
    with pytest.raises(CheckpointError, match="does not say which tickets are out"):
        Tickets.restore({"batch": 2, "staleness": 1}, batch=2, staleness=1)
    for out in ([[1, 0, True]], [[3, 2, True]], [[3, 1, True], [4, 0, True]], [[n, 1, False] for n in range(2, 7)]):
        with pytest.raises(CheckpointError, match="are not those of a run with 4 tickets out"):
            Tickets.restore({**state, "out": out, "next": 7 if len(out) == 5 else 5}, batch=2, staleness=1)


def test_a_run_that_is_to_end_earlier_needs_fewer_tickets() -> None:
    tickets = Tickets(2, 2, steps=8)
    for _ in range(6):
        tickets.finish(tickets.start().number)
    tickets.keep()
    tickets.keep()
    tickets.apply()
    state = tickets.state([2, 3, 4, 5])
    events: list[TicketEvent] = []
    restored = Tickets.restore(state, batch=2, staleness=2, steps=2, observe=events.append)
    assert [ticket.number for ticket in restored._out] == [2, 3]
    assert restored.answered == {2, 3}
    restored.keep()
    restored.keep()
    restored.apply()
    assert check_events(events, 2, 2, 2) == len(events)


def test_a_checkpoint_without_answers_may_go_on_with_other_settings() -> None:
    tickets = Tickets(2, 0)
    for _ in range(2):
        tickets.finish(tickets.start().number)
        tickets.keep()
    tickets.apply()
    restored = Tickets.restore(tickets.state(), batch=3, staleness=1)
    assert [(ticket.number, ticket.version) for ticket in restored.waiting] == [(2 + i, 1) for i in range(6)]


def events_of(text: str) -> list[TicketEvent]:
    kinds: dict[str, Any] = {"b": "begin", "i": "issue", "s": "start", "f": "finish", "k": "keep", "d": "drop", "a": "apply"}
    return [TicketEvent(kind=kinds[word[0]], number=int(word[1]), version=int(word[2])) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b00 i00 i10", r"event 3 \(issue 1, version 0\): no ticket is due"),
        ("b00 i10", "the next ticket is 0"),
        ("b00 i01", "it is issued with version 0"),
        ("b00 s00", "1 tickets are due first"),
        ("b00 i00 s10", "the ticket is not out"),
        ("b00 i00 s00 s00", "the ticket is answered already"),
        ("b00 i00 f00", "the ticket is not being answered"),
        ("b00 i00 k00", "the ticket has no answer"),
        ("b00 i00 s00 f00 k01", "version 0 is trained"),
        ("b00 i00 s00 f00 k00 a12", "the step makes version 1"),
        ("b00 i00 s00 f00 a11", "the step has kept 0 groups of 1"),
    ],
)
def test_a_log_that_breaks_a_rule_is_refused(text: str, message: str) -> None:
    assert check_events(events_of("b00 i00 s00 f00 k00 a11 i11 s11 f11 d11 i21"), 1, 0) == 11
    with pytest.raises(TicketError, match=message):
        check_events(events_of(text), 1, 0)


def test_a_log_of_answers_out_of_order_or_too_old_is_refused() -> None:
    with pytest.raises(TicketError, match="ticket 0 is consumed before it"):
        check_events(events_of("b00 i00 i10 s00 s10 f10 k10"), 2, 0)
    # Resumed with a ticket of a version before.
    assert check_events(events_of("b02 i01 i12 s01 f01 k02"), 1, 1) == 6
    with pytest.raises(TicketError, match="its completions are of version 0, and at most 1 versions may be between"):
        check_events(events_of("b02 i00 i12 s00 f00 k02"), 1, 1)
