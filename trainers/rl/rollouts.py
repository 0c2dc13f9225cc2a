"""Fulfills tickets with the generator. With K > 0, the other roles keep running meanwhile, and the generator has dedicated processes."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from ...engine.errors import WorkerLostError
from ..config.rl import RLConfig
from .completions import Completions, split
from .kept_completions import KeptCompletions
from .phases import Phases, RunningRollout, RunningTurns
from .prompts import Prompts
from .roles import held_versions
from .tickets import Tickets

log = logging.getLogger(__name__)


class Rollouts:
    """The completions of a run's tickets.

    A call of the generator handles tickets of one version, at most `rollout.prompts_per_call` of them, starting with the first waiting one.
    During a call, nothing can be copied to or from the generator. With K > 0, new weights are therefore sent between two calls. If the
    generator has dedicated processes, completions are moved to the stores of the actor's processes as soon as a call is done.

    With `rl.inflight_weight_updates=true`, new weights do not wait for a call: it is cancelled, and its tickets wait again, with their tokens so far. The
    next call continues from these with the new weights. Otherwise the version that a ticket was issued with generates all of its
    completions.

    If dedicated processes of the generator die, they are restarted: they receive the weights that they had, and the lost tickets are
    handled again.

    Args:
        config: The run's settings.
        phases: The phases.
        prompts: The prompts.
        tickets: The tickets.
    """

    def __init__(self, config: RLConfig, phases: Phases, prompts: Prompts, tickets: Tickets) -> None:
        self.tickets = tickets
        self._config, self._phases, self._prompts = config, phases, prompts
        self._overlaps = config.rl.staleness > 0
        self._has_own_pool = "rollout" in config.group.pools
        self._inflight_updates = config.rl.inflight_weight_updates
        self._deaths = 0
        """The number of consecutive restarts of the generator's processes without a completed call in between."""
        self._running: RunningRollout | RunningTurns | None = None
        self._answered: dict[int, Completions] = {}
        """The completions of unconsumed tickets, whose rewards are being computed."""
        self._kept: dict[int, KeptCompletions] = {}
        """With K > 0: the completions of all tickets of the current step and later ones."""
        self._resumable: dict[int, KeptCompletions] = {}
        """The unfinished completions of tickets that wait again because their call was cancelled."""
        self._cancelled = False
        """Whether the running call was cancelled."""
        self._advancing = False
        self._generating_s: list[float] = []
        self._unsent: int | None = None
        """The version of the actor's weights, if the generator does not have it yet."""
        self._verified: int | None = None
        """The last version of the weights for which the generator's processes were compared."""
        if self._overlaps:
            # The end of each phase of other roles is a moment to look at the
            # generator's call, so that no thread is needed.
            phases.after_each = self.advance

    # ---- the generator ---------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """If the generator's call is done, take its completions, and start the next one. Does not wait."""
        if self._advancing or self._running is None or not all(call.done for call in self._running.calls):
            return
        self._finish()
        self.send_weights()
        self._begin()

    @contextmanager
    def _no_advance(self) -> Iterator[None]:
        # This work consists of phases itself, each of which would call `advance` again.
        before, self._advancing = self._advancing, True
        try:
            yield
        finally:
            self._advancing = before

    def _begin(self) -> None:
        """Start a call for the first waiting tickets, if the generator is idle."""
        waiting = self.tickets.waiting
        if self._running is not None or not waiting:
            return
        if self._unsent is not None and (self._inflight_updates or waiting[0].version == self._unsent):
            self.send_weights()
            if self._running is not None or not (waiting := self.tickets.waiting):
                return
        # A call computes with one version, so it takes only tickets of the version of the first one. If new weights may
        # replace old ones within a completion, any tickets can share it.
        first = waiting[: self._config.rollout.prompts_per_call or len(waiting)]
        count = len(first) if self._inflight_updates else sum(ticket.version == first[0].version for ticket in first)
        tickets = [self.tickets.start() for _ in range(count)]
        numbers = [ticket.number for ticket in tickets]
        prompts = [self._prompts.of_ticket(number) for number in numbers]
        most = self._config.rollout.max_tokens
        resumable = {number: self._resumable[number].resumable(most) for number in numbers if number in self._resumable}
        with self._no_advance(), self._replacing_generator():
            if not self._overlaps:
                self._phases.memory_manager.enter("rollout")
            version = self.tickets.version if self._inflight_updates else tickets[0].version
            self._verify(version)
            self._cancelled = False
            self._running = self._phases.begin_rollout(
                prompts, numbers, version=version, oldest=tickets[0].version, resumable=resumable
            )

    def _verify(self, version: int) -> None:
        """Compare the outputs of the generator's processes with a version of the weights that they hold, before it is used."""
        if held_versions(self._config) > 1 and version != self._verified:
            self._phases.memory_manager.verify(version)
            self._verified = version

    def _finish(self) -> None:
        """Wait for the generator's call, if there is one, and submit its completions to the rewards."""
        if self._running is None:
            return
        with self._no_advance():
            with self._replacing_generator():
                completions = self._phases.finish_rollout(cast("RunningRollout", self._running))
                if self._has_own_pool:
                    completions = self._moved(completions)
            if self._running is None:
                return
            self._generating_s.append(self._running.seconds)
            self._running = None
            if completions.rows:
                self._deaths = 0
            for number, one in split(completions).items():
                self._resumable.pop(number, None)
                self._add(number, one)

    def _cancel(self) -> None:
        """Cancel the generator's call, if there is one, keeping its tokens so far."""
        if self._running is None:
            return
        with self._no_advance(), self._replacing_generator():
            # With K > 0 there is only one call: greedy baselines, the second one, need the current weights.
            (call,) = self._running.calls
            self._cancelled = self._phases.group.cancel(call)
        self._finish()

    def _add(self, number: int, completions: Completions) -> None:
        # Submit each ticket separately: which tickets share a call depends on timing, and a reward may compare the completions of a batch.
        greedy = completions.baselines
        self._answered[number] = replace(
            completions,
            pending=self._phases.submit(completions.rows),
            baselines=None if greedy is None else replace(greedy, pending=self._phases.submit(greedy.rows)),
        )
        self.tickets.finish(number)

    def _moved(self, completions: Completions) -> Completions:
        """Move completions to the stores of the actor's processes, and with K > 0 also keep them here. Return those of complete groups."""
        data, most, greedy = self._phases.group.data, self._config.rollout.max_tokens, completions.baselines
        # Read before the generator's processes drop their samples.
        batch = data.get_batch(completions.ref)
        greedy_batch = None if greedy is None else data.get_batch(greedy.ref)
        for one in (completions, greedy):
            if one is not None:
                data.clear_data_cache(one.ref)
        numbers: dict[int, list[int]] = {}
        for row, number in enumerate(completions.groups):
            numbers.setdefault(number, []).append(row)
        complete: list[int] = []
        for number, rows in numbers.items():
            kept = KeptCompletions(batch=batch.select(rows), rows=tuple(completions.rows[row] for row in rows))
            if self._cancelled and any(row.is_unfinished(most) for row in kept.rows):
                self._resumable[number] = kept
                self.tickets.give_back(number)
            else:
                if self._overlaps:
                    self._kept[number] = kept
                complete += rows
        if not complete:
            return completions.select([])
        moved = self._phases.put_completions(batch.select(complete), [completions.rows[row] for row in complete])
        if greedy is None or greedy_batch is None:
            return moved
        return replace(moved, baselines=self._phases.put_completions(greedy_batch, greedy.rows))

    # ---- the trainer -----------------------------------------------------------------------------------------------------

    def answered(self, count: int) -> list[int]:
        """Wait for the completions of the next tickets to consume; return their numbers, in order.

        Args:
            count: The maximum number of tickets. With K = 0, all of them are generated before this returns.
        """
        # With K = 0, generation does not overlap with the work of other roles, so finish all tickets first.
        while self.tickets.next is None or (not self._overlaps and (self.tickets.waiting or self.tickets.running)):
            self._begin()
            self._finish()
        if self._overlaps:
            self._begin()
        return self.tickets.consumable(count)

    def completions(self, number: int) -> Completions:
        """Return the completions of a finished, unconsumed ticket."""
        return self._answered[number]

    def replace(self, number: int, completions: Completions) -> None:
        """Replace the completions of a ticket by ones with more data, such as their rewards."""
        self._answered[number] = completions

    def keep(self) -> Completions:
        """Consume the next ticket for the current step; return its completions."""
        return self._answered.pop(self.tickets.keep().number)

    def drop(self) -> Completions:
        """Consume the next ticket without training on its completions; return them."""
        return self._answered.pop(self.tickets.drop().number)

    def apply(self) -> int:
        """Record that the current step was applied; return the version of the weights that it made.

        The generator receives these weights immediately if it is idle or its call can be cancelled. Otherwise it receives them after its
        call, unless the next step waits for that call anyway.
        """
        first = self.tickets.first
        # The completions of this step were trained on, so that no checkpoint needs them any more.
        self._kept = {number: kept for number, kept in self._kept.items() if number >= first}
        version = self._unsent = self.tickets.apply()
        # If roles take turns on their devices, weights cannot be sent in the middle of a step.
        at_once = held_versions(self._config) == 1 or self._config.group.offload != "none"
        if at_once or self._running is None or self.tickets.next is None:
            self.send_weights()
        if self._overlaps:
            self._begin()
        return version

    def send_weights(self) -> None:
        """Send the actor's weights to the generator, unless it has them. Called before they are changed."""
        # If the generator's processes die on the way, `_replacing_generator`
        # restarts them, and the weights are sent again.
        while self._unsent is not None:
            version = self._unsent
            if self._inflight_updates:
                self._cancel()
            else:
                # The new version replaces the oldest one that the generator holds,
                # which unfinished tickets may still need.
                self.settle(version - held_versions(self._config) + 1)
            with self._no_advance(), self._replacing_generator(), self._phases.timed("sync"):
                self._phases.memory_manager.sync(version)
                self._unsent = None

    def use_newest(self) -> None:
        """Make the generator idle, with the newest weights, for an evaluation."""
        self.send_weights()
        if self._inflight_updates:
            self._cancel()
        else:
            self.settle(self.tickets.version)
        with self._replacing_generator():
            self._verify(self.tickets.version)

    def settle(self, before: int) -> None:
        """Wait until the generator is idle, and no unfinished ticket has a version before the given one."""
        while self._running is not None or self.tickets.num_unanswered(before):
            if self._running is None:
                self._begin()
            self._finish()

    def generating_s(self) -> float:
        """Return the generator's time, in seconds, in calls that have ended since this was last called."""
        seconds, self._generating_s = sum(self._generating_s), []
        return seconds

    # ---- the generator's processes ---------------------------------------------------------------------------------------

    @contextmanager
    def _replacing_generator(self) -> Iterator[None]:
        # The caller must then repeat the work of the block.
        try:
            yield
        except WorkerLostError as e:
            self.replace_generator(e)

    def replace_generator(self, error: WorkerLostError) -> None:
        """Restart the generator's processes after one has died; they get the weights that they had, and their tickets wait again.

        Args:
            error: The error that reported the death.

        Raises:
            WorkerLostError: Other processes have died too, or the restarts are used up.
        """
        group, pool = self._phases.group, self._phases.roles.specs["rollout"].pool
        if not self._has_own_pool:
            raise error
        self._drop_call()
        self._running, self._verified = None, None
        sent = self.tickets.version - (self._unsent is not None)
        # Weights that were being sent are sent again later, before any ticket needs them.
        newest = {sent} if self._unsent is None else set()
        # Tickets are answered by the version that they were issued with, so the new processes need those as well.
        old = () if self._inflight_updates else (*self.tickets.waiting, *self.tickets.running)
        needed = sorted({*newest, *(ticket.version for ticket in old if ticket.version <= sent)})
        while True:
            # Only the generator can be replaced: other processes have state that is nowhere else.
            if {*group.lost_pools} != {pool} or self._deaths >= self._config.rollout.restarts:
                raise error
            self._deaths += 1
            log.warning(
                "%s; restarting the generator's processes (%d of %d times in a row, rollout.restarts)",
                str(error).splitlines()[0],
                self._deaths,
                self._config.rollout.restarts,
            )
            try:
                group.restart_pool(pool)
                for version in needed:
                    self._phases.memory_manager.resend(version)
                return
            # The new processes may die too, for example because of the same lack of memory; the loop counts them.
            except WorkerLostError as e:
                error = e

    def _drop_call(self) -> None:
        """Record that the running call has produced nothing."""
        for ticket in self.tickets.running:
            self.tickets.give_back(ticket.number)

    # ---- saving ----------------------------------------------------------------------------------------------------------

    def kept(self) -> dict[int, KeptCompletions]:
        """Return the completions that a checkpoint must store; nothing is generated afterwards until tickets are requested.

        With K = 0 there are none: all tickets are of the saved version, which can generate them again.
        """
        self.settle(self.tickets.version)
        return dict(self._kept)

    def restore(self, kept: Mapping[int, KeptCompletions]) -> None:
        """Restore the completions of a checkpoint, whose tickets are already finished."""
        self._kept = dict(kept)
        for number, one in kept.items():
            # Rewards are not stored; they are computed again.
            completions = self._phases.put_completions(one.batch, one.rows)
            self._answered[number] = replace(completions, pending=self._phases.submit(one.rows))
