"""Fulfills tickets with episodes: a call of the generator writes a turn of each episode that is due, while environments run concurrently."""

from typing import cast

from ..config.rl import RLConfig
from .phases import Phases, RunningTurns
from .prompts import Prompts
from .rollouts import Rollouts
from .tickets import Ticket, Tickets


class EpisodeRollouts(Rollouts):
    """The completions of a run's tickets, with an environment.

    A ticket is in flight from the start of its episodes until all of them have ended, over several calls of the generator. With
    `rl.inflight_weight_updates=false`, all turns are written by the version that the ticket was issued with, so episodes of a later version start
    when no episode of an earlier one is left. Between two calls, tokens are only in the controller's memory, so a generator that dies
    loses only the turns in flight.

    Args:
        config: The run's settings.
        phases: The phases.
        prompts: The prompts.
        tickets: The tickets.
    """

    def __init__(self, config: RLConfig, phases: Phases, prompts: Prompts, tickets: Tickets) -> None:
        super().__init__(config, phases, prompts, tickets)
        self._episodes = phases.new_episodes()

    def advance(self) -> None:
        """Proceed if the generator's call is done, or environments have returned. Does not wait."""
        if self._advancing or not self._episodes.numbers:
            return
        if self._running is not None:
            super().advance()
            return
        self._take_answers(wait=False)
        self.send_weights()
        self._begin()

    def _begin(self) -> None:
        """Start the episodes of waiting tickets, and let the generator write the turns that are due, if it is idle."""
        if self._running is not None:
            return
        self._begin_episodes()
        # Sending new weights may have started a call.
        if self._running is not None:
            return
        with self._no_advance():
            self._episodes.poll(wait=False)
            self._add_complete()
            # The next call is to have the turns of all episodes, so that batches do
            # not depend on the speed of environments.
            if self._episodes.waits_for_all and self._episodes.at_work:
                return
            per_call, size = self._config.rollout.prompts_per_call, self._config.rl.group_size
            due = self._episodes.due(None if per_call is None else per_call * size)
            if not due:
                return
            issued_with = {ticket.number: ticket.version for ticket in self.tickets.running}
            # Episodes of several versions may be due together; the oldest one bounds the versions of their tokens.
            oldest = min(issued_with[episode.number] for episode in due)
            try:
                with self._replacing_generator():
                    if not self._overlaps:
                        self._phases.memory_manager.enter("rollout")
                    version = self.tickets.version if self._inflight_updates else oldest
                    self._verify(version)
                    self._cancelled = False
                    self._running = self._phases.begin_turns(
                        self._episodes, due, self._phases.sampling_options, version=version, oldest=oldest
                    )
            finally:
                # The call did not start, because preparing it failed or the generator's
                # processes died, so these turns are due again.
                if self._running is None:
                    self._episodes.give_back(due)

    def _begin_episodes(self) -> None:
        running = self.tickets.running
        if (
            self._unsent is not None
            and self.tickets.waiting
            and (self._inflight_updates or (not running and self._version_of_next == self._unsent))
        ):
            self.send_weights()
            running = self.tickets.running
        while self.tickets.waiting and (self._inflight_updates or not running or self._version_of_next == running[0].version):
            ticket = self.tickets.start()
            running = (*running, ticket)
            self._episodes.begin(ticket.number, self._prompts.of_ticket(ticket.number), self._config.rl.group_size)

    @property
    def _version_of_next(self) -> int:
        """The version of the first waiting ticket."""
        ticket: Ticket = self.tickets.waiting[0]
        return ticket.version

    def _finish(self) -> None:
        """Wait for the generator's call, or if there is none, for the running environments, and take the results."""
        if self._running is None:
            self._take_answers(wait=True)
            return
        running = cast("RunningTurns", self._running)
        with self._no_advance():
            with self._replacing_generator():
                turns = self._phases.finish_turns(running)
            # The generator's processes died during the call, and its turns are due again.
            if self._running is None:
                return
            self._generating_s.append(running.seconds)
            self._running, self._deaths = None, 0
            self._episodes.take(running.episodes, turns, cancelled=self._cancelled)
            self._add_complete()

    def _drop_call(self) -> None:
        """Record that the running call has written nothing. Episodes continue from their last turns."""
        if self._running is not None:
            self._episodes.give_back(cast("RunningTurns", self._running).episodes)

    def _take_answers(self, *, wait: bool) -> None:
        with self._no_advance():
            with self._phases.timed("environments"):
                self._episodes.poll(wait=wait)
            self._add_complete()

    def _add_complete(self) -> None:
        """Submit to the rewards the episodes of tickets whose episodes have all ended."""
        for number, kept in self._episodes.take_complete().items():
            if self._overlaps:
                self._kept[number] = kept
            self._add(number, self._phases.put_completions(kept.batch, kept.rows))
