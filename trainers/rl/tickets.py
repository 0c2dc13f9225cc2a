"""Tickets: they assign a version of the weights to each prompt, depending only on consumption and never on time.

A ticket stands for a prompt and its group of completions. Tickets are numbered in the order of prompts, issued, answered in any order,
and consumed in the order of their numbers. A version of the weights is the number of steps that they have been trained for; step `w + 1`
is made with version `w`.

*Issuing depends only on consumption*. At the start, `batch * (K + 1)` tickets are issued. When a step has been applied, as many are issued
as it kept, with the version that it made. When a ticket is consumed and its group dropped, one more is issued immediately, with the current
version. So the number of tickets that are out plus the number of groups that the current step has kept is always `batch * (K + 1)`, and
fewer only if the run has no steps left that could keep more. No ticket is consumed more than K versions after it was issued:

1. Let a ticket be issued with version v when the current step has kept j groups. Then at most `batch * (K + 1) - j - 1` others are out.
2. They have smaller numbers, so they are consumed before it; tickets that are issued later have larger numbers, and are consumed after it.
3. Let it be consumed with version w. If w > v, step v + 1 kept `batch - j` groups after the ticket was issued, and the `w - v - 1` steps
   after it `batch` each.
4. All of these were consumed before it: `(w - v) * batch - j <= batch * (K + 1) - j - 1`, hence `w - v < K + 1`.

Imports no torch, and uses neither clocks nor threads.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...engine.errors import CheckpointError, DrivetrainError

TicketEventKind = Literal["begin", "issue", "start", "finish", "give_back", "keep", "drop", "apply"]


class TicketError(DrivetrainError):
    """Tickets were used against the rules."""


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A prompt whose completions are to be generated.

    Args:
        number: Its number, in the order of prompts.
        version: The version of the weights that generates its completions.
    """

    number: int
    version: int


@dataclass(frozen=True, kw_only=True)
class TicketEvent:
    """An event of tickets.

    Args:
        kind: The kind of event; a resumed run has another `begin`, after which its tickets are issued again.
        number: The number of the ticket; for `begin`, that of the first one; for `apply`, the number of groups that a step keeps.
        version: The version of the ticket; for `keep` and `drop`, the version that it is consumed with; for `begin` and `apply`, the
            version from then on.
    """

    kind: TicketEventKind
    number: int
    version: int


class Tickets:
    """The tickets of a run, a state machine that the scheduler of the run drives.

    Args:
        batch: The number of groups that a step keeps.
        staleness: K, the maximum number of versions between a completion and the weights that are trained on it.
        version: The version of the weights.
        first: The number of the first ticket.
        steps: The number of the run's last step, after which no groups are needed; None if there is none.
        observe: Called with every event; see `check_events`.

    Raises:
        TicketError: A number is out of range.
    """

    def __init__(
        self,
        batch: int,
        staleness: int,
        *,
        version: int = 0,
        first: int = 0,
        steps: int | None = None,
        observe: Callable[[TicketEvent], object] = lambda event: None,
    ) -> None:
        if batch < 1 or staleness < 0:
            raise TicketError(f"batch={batch}, staleness={staleness}; batch must be at least 1 and staleness at least 0")
        self.batch, self.staleness, self.version, self.steps = batch, staleness, version, steps
        self.kept = 0
        """The number of groups that the current step has kept."""
        self._observe, self._next = observe, first
        self._out: deque[Ticket] = deque()
        """The issued, unconsumed tickets, in order."""
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._finished: set[int] = set()
        self._consumed: list[Ticket] = []
        """The tickets that the current step has consumed."""
        self._note("begin", first, version)
        self._issue()

    def _note(self, kind: TicketEventKind, number: int, version: int) -> None:
        self._observe(TicketEvent(kind=kind, number=number, version=version))

    def _issue(self, *, begins_step: bool = True) -> None:
        """Issue as many tickets as may be out."""
        for _ in range(max_outstanding(self.batch, self.staleness, self.version, self.steps) - self.kept - len(self._out)):
            ticket = Ticket(number=self._next, version=self.version)
            self._next += 1
            self._out.append(ticket)
            self._waiting.append(ticket)
            self._note("issue", ticket.number, ticket.version)
        if begins_step:
            self._consumed, self._next_at_begin = [], self._next

    # ---- for the generator -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[Ticket]:
        """The tickets that are not being answered yet, in order."""
        return tuple(self._waiting)

    @property
    def running(self) -> Sequence[Ticket]:
        """The tickets that are being answered, in order."""
        return tuple(self._running[number] for number in sorted(self._running))

    def start(self) -> Ticket:
        """Take the next ticket that is not being answered yet.

        Raises:
            TicketError: There is none.
        """
        if not self._waiting:
            raise TicketError("no ticket is waiting; consume some, or apply a step")
        ticket = self._waiting.popleft()
        self._running[ticket.number] = ticket
        self._note("start", ticket.number, ticket.version)
        return ticket

    def finish(self, number: int) -> None:
        """Record that the completions of a ticket are finished.

        Raises:
            TicketError: It is not being answered.
        """
        ticket = self._taken(number)
        self._finished.add(number)
        self._note("finish", number, ticket.version)

    def give_back(self, number: int) -> None:
        """Record that the call that was answering a ticket is lost: the ticket waits again, in its place and for the same version.

        Raises:
            TicketError: It is not being answered.
        """
        ticket = self._taken(number)
        self._waiting = deque(sorted((*self._waiting, ticket), key=lambda one: one.number))
        self._note("give_back", number, ticket.version)

    def _taken(self, number: int) -> Ticket:
        if number not in self._running:
            raise TicketError(f"ticket {number} is not being answered; those that are: {sorted(self._running) or 'none'}")
        return self._running.pop(number)

    # ---- for the trainer -------------------------------------------------------------------------------------------------

    @property
    def next(self) -> Ticket | None:
        """The next ticket to consume, if its completions are finished and the step is not full; otherwise None."""
        return self._out[0] if not self.is_full and self.consumable(1) else None

    @property
    def first(self) -> int:
        """The number of the next ticket to consume, issued or not."""
        return self._out[0].number if self._out else self._next

    @property
    def answered(self) -> frozenset[int]:
        """The numbers of the finished, unconsumed tickets."""
        return frozenset(self._finished)

    def consumable(self, count: int) -> list[int]:
        """Return the numbers of the tickets that can be consumed now, consecutively and at most `count` of them."""
        numbers: list[int] = []
        for ticket in self._out:
            if len(numbers) == count or ticket.number not in self._finished:
                break
            numbers.append(ticket.number)
        return numbers

    @property
    def is_full(self) -> bool:
        """Whether the current step has kept its groups."""
        return self.kept == self.batch

    def keep(self) -> Ticket:
        """Consume the next ticket, and keep its group for the current step.

        Raises:
            TicketError: It is not finished, the step is full, or its completions are older than the bound allows.
        """
        ticket = self._consume("keep")
        self.kept += 1
        return ticket

    def drop(self) -> Ticket:
        """Consume the next ticket, and drop its group; another ticket is issued instead.

        Raises:
            TicketError: As for `keep`.
        """
        ticket = self._consume("drop")
        self._issue(begins_step=False)
        return ticket

    def _consume(self, kind: Literal["keep", "drop"]) -> Ticket:
        ticket = self.next
        if ticket is None:
            first = f"ticket {self._out[0].number} has no answer yet" if self._out else f"step {self.steps} was the last one"
            raise TicketError(f"no ticket can be consumed: {'the step is full: apply it' if self.is_full else first}")
        if self.version - ticket.version > self.staleness:
            raise TicketError(
                f"ticket {ticket.number} was answered by version {ticket.version} of the weights, and version {self.version} is trained; "
                f"rl.staleness={self.staleness} allows {self.staleness} versions between them"
            )
        self._consumed.append(self._out.popleft())
        self._finished.remove(ticket.number)
        self._note(kind, ticket.number, self.version)
        return ticket

    def apply(self) -> int:
        """Record that the current step has been applied; return the version that it made. As many tickets are issued as it kept.

        Raises:
            TicketError: The step is not full.
        """
        if not self.is_full:
            raise TicketError(f"the step has kept {self.kept} of {self.batch} groups; keep the others first")
        self.version += 1
        self.kept = 0
        self._note("apply", self.batch, self.version)
        self._issue()
        return self.version

    # ---- saving ----------------------------------------------------------------------------------------------------------

    def num_unanswered(self, before: int) -> int:
        """Return the number of unfinished tickets with a version before the given one."""
        return sum(ticket.version < before for ticket in (*self._waiting, *self._running.values()))

    def state(self, stored: Collection[int] = ()) -> dict[str, Any]:
        """Return the state for a checkpoint: the tickets as of the end of the last step.

        Args:
            stored: The numbers of the tickets whose completions are also in the checkpoint. The others are answered again.

        Raises:
            TicketError: A ticket that would be answered again has another version of the weights than the checkpoint.
        """
        # As of the beginning of the current step: tickets that it has consumed are out again,
        # and those that were issued since then are not.
        out = [ticket for ticket in (*self._consumed, *self._out) if ticket.number < self._next_at_begin]
        if old := [ticket.number for ticket in out if ticket.version < self.version and ticket.number not in stored]:
            raise TicketError(
                f"the checkpoint has neither the completions of the tickets {old} nor the weights that generate them"
            )
        return {
            "batch": self.batch,
            "staleness": self.staleness,
            "version": self.version,
            "next": self._next_at_begin,
            "out": [[ticket.number, ticket.version, ticket.number in stored] for ticket in out],
        }

    @classmethod
    def restore(
        cls,
        state: Mapping[str, Any],
        *,
        batch: int,
        staleness: int,
        steps: int | None = None,
        observe: Callable[[TicketEvent], object] = lambda event: None,
    ) -> "Tickets":
        """Return the tickets of a checkpoint.

        Raises:
            CheckpointError: They were issued with other settings, or the state is damaged.
        """
        try:
            saved = {name: int(state[name]) for name in ("batch", "staleness", "version", "next")}
            out = [Ticket(number=int(number), version=int(version)) for number, version, _ in state["out"]]
            finished = {int(number) for number, _, is_finished in state["out"] if is_finished}
        except (KeyError, TypeError, ValueError) as e:
            raise CheckpointError(f"it does not say which tickets are out ({e!r}); it was not saved by this trainer") from e
        # Check the state against the rules: consecutive numbers, versions in order, and none that is too old.
        first, made_by, most = saved["next"] - len(out), saved["version"], saved["batch"] * (saved["staleness"] + 1)
        numbers = [ticket.number for ticket in out]
        ages = [made_by - ticket.version for ticket in out]
        in_order = numbers == list(range(first, saved["next"])) and ages == sorted(ages, reverse=True)
        if not in_order or len(out) > most or not all(0 <= age <= saved["staleness"] for age in ages):
            raise CheckpointError(f"its tickets {numbers} are not those of a run with {most} tickets out")
        # A run that now has fewer steps does not need the last tickets.
        out = out[: max_outstanding(batch, staleness, made_by, steps)]
        if not any(ages) and not finished:
            # Treat them as issued now.
            return cls(batch, staleness, version=made_by, first=first, steps=steps, observe=observe)
        for name, now in (("batch", batch), ("staleness", staleness)):
            if saved[name] != now:
                setting = {"batch": "data.batch_size", "staleness": "rl.staleness"}[name]
                raise CheckpointError(
                    f"it was saved with {setting} = {saved[name]}, now it is {now}, which changes the outstanding prompts; keep the setting, or "
                    "start over from the exported model in another trainer.output_dir"
                )
        # The constructor would issue the tickets again with the current version.
        made = cls.__new__(cls)
        made.batch, made.staleness, made.version, made.steps, made.kept = batch, staleness, made_by, steps, 0
        made._observe, made._running, made._next = observe, {}, first + len(out)
        made._out, made._finished = deque(out), {ticket.number for ticket in out if ticket.number in finished}
        made._waiting = deque(ticket for ticket in out if ticket.number not in finished)
        made._note("begin", first, made_by)
        for ticket in out:
            made._note("issue", ticket.number, ticket.version)
        # The run may now have more steps than when it was saved.
        made._issue()
        # The log requires that all tickets that are due are issued before one is answered.
        for ticket in out:
            if ticket.number in finished:
                made._note("start", ticket.number, ticket.version)
                made._note("finish", ticket.number, ticket.version)
        return made


def max_outstanding(batch: int, staleness: int, version: int, steps: int | None) -> int:
    """Return the maximum number of tickets that are out, plus the groups that the current step has kept.

    Args:
        batch: The number of groups that a step keeps.
        staleness: The bound.
        version: The version of the weights.
        steps: The number of the run's last step; None if there is none.
    """
    return batch * (staleness + 1 if steps is None else max(0, min(staleness + 1, steps - version)))


def check_events(events: Iterable[TicketEvent], batch: int, staleness: int, steps: int | None = None) -> int:
    """Check the events of a run against the definition of the rules, independently of `Tickets`.

    Args:
        events: The events, in order; a resumed run has several sequences, each from a `begin`.
        batch: The number of groups that a step keeps.
        staleness: The bound.
        steps: The number of the run's last step; None if there is none.

    Returns:
        The number of events.

    Raises:
        TicketError: One of them breaks a rule; the message names both.
    """
    issued: dict[int, int] = {}
    running: set[int] = set()
    finished: set[int] = set()
    consumed = due = kept = version = count = 0
    resumes = False

    def require(holds: bool, event: TicketEvent, rule: str) -> None:
        if not holds:
            raise TicketError(f"event {count} ({event.kind} {event.number}, version {event.version}): {rule}")

    for event in events:
        count += 1
        if event.kind == "begin":
            issued, running, finished = {}, set(), set()
            consumed, due, kept, version = (
                event.number,
                max_outstanding(batch, staleness, event.version, steps),
                0,
                event.version,
            )
            resumes = True
            continue
        number = event.number
        if event.kind == "issue":
            require(due > 0, event, "no ticket is due")
            require(number == consumed + len(issued), event, f"the next ticket is {consumed + len(issued)}")
            # The tickets of a resumed run were issued earlier.
            earlier = resumes and event.version < version
            require(earlier or event.version == version, event, f"it is issued with version {version}")
            issued[number], due = event.version, due - 1
            resumes = resumes and due > 0
            continue
        # Tickets are issued at once, before any other event.
        require(not due, event, f"{due} tickets are due first")
        if event.kind == "apply":
            require(kept == number == batch, event, f"the step has kept {kept} groups of {batch}")
            require(event.version == version + 1, event, f"the step makes version {version + 1}")
            version, kept = event.version, 0
            due = max_outstanding(batch, staleness, version, steps) - len(issued)
            continue
        require(number in issued, event, "the ticket is not out")
        if event.kind == "start":
            require(number not in running | finished, event, "the ticket is answered already")
            running.add(number)
        elif event.kind in ("finish", "give_back"):
            require(number in running, event, "the ticket is not being answered")
            running.remove(number)
            finished |= {number} if event.kind == "finish" else set()
        else:
            require(number == consumed, event, f"ticket {consumed} is consumed before it")
            require(number in finished, event, "the ticket has no answer")
            require(event.version == version, event, f"version {version} is trained")
            bound = f"its completions are of version {issued[number]}, and at most {staleness} versions may be between"
            require(version - issued[number] <= staleness, event, bound)
            require(kept < batch, event, "the step is full")
            finished.remove(number)
            del issued[number]
            consumed += 1
            # A dropped group is replaced by one more ticket; kept ones are replaced when the step is applied.
            kept, due = (kept + 1, due) if event.kind == "keep" else (kept, 1)
    return count
