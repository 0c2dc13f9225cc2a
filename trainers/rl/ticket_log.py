"""The log of a run's tickets, `tickets.jsonl`, and its check.

Each line is a JSON array: `["settings", batch, staleness, steps]` before the first event of a process of the run, then `[kind, number,
version]` for every event.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ...engine.errors import disk_error
from .tickets import TicketError, TicketEvent, TicketEventKind, check_events

NAME = "tickets.jsonl"


class TicketLog:
    """Writes the events of a run's tickets, after every step.

    Args:
        folder: The run's folder; None to write nothing, in processes other than the first.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / NAME
        self._lines: list[str] = []

    def begin(self, batch: int, staleness: int, steps: int | None) -> None:
        """Record the settings of the tickets whose events follow."""
        self._lines.append(json.dumps(["settings", batch, staleness, steps]))

    def note(self, event: TicketEvent) -> None:
        """Record an event."""
        self._lines.append(json.dumps([event.kind, event.number, event.version]))

    def write(self) -> None:
        """Write the events since the last call.

        Raises:
            CheckpointError: The file cannot be written.
        """
        # Lines are taken even if nothing is written, or they would accumulate in the other processes.
        lines, self._lines = self._lines, []
        if self._path is None or not lines:
            return
        try:
            with self._path.open("ab+") as file:
                # A killed process may have left an incomplete line.
                file.seek(max(0, file.tell() - 1))
                torn = file.read(1) not in (b"", b"\n")
                file.write(("\n" * torn + "".join(f"{line}\n" for line in lines)).encode())
        except OSError as e:
            raise disk_error(str(self._path), e) from e


@dataclass(frozen=True, kw_only=True)
class CheckedLog:
    """A summary of a checked log.

    Args:
        processes: The number of processes that have written it, one after another.
        events: The number of events.
        kept: The number of groups that were trained on, including those of repeated steps.
        dropped: The number of groups that were dropped.
        oldest: The maximum number of versions between a group that was trained on and the weights that were trained on it.
    """

    processes: int
    events: int
    kept: int
    dropped: int
    oldest: int


def check_log(path: Path) -> CheckedLog:
    """Check the log of a run against the rules of tickets.

    Args:
        path: The run's folder, or the file.

    Raises:
        TicketError: There is no log, or it breaks a rule; the message names the event.
    """
    file = path / NAME if path.is_dir() else path
    if not file.is_file():
        raise TicketError(f"{file} does not exist; give the folder of a run of reinforcement learning")
    parts = list(_parts(file))
    kept = dropped = oldest = 0
    for number, ((batch, staleness, steps), events) in enumerate(parts, 1):
        try:
            check_events(events, batch, staleness, steps)
        except TicketError as e:
            raise TicketError(f"{file}, process {number} of {len(parts)}: {e}") from e
        # A resumed run issues tickets again, but their events are in another part.
        issued = {event.number: event.version for event in events if event.kind == "issue"}
        for event in events:
            kept += event.kind == "keep"
            dropped += event.kind == "drop"
            if event.kind == "keep":
                oldest = max(oldest, event.version - issued[event.number])
    return CheckedLog(
        processes=len(parts),
        events=sum(len(events) for _, events in parts),
        kept=kept,
        dropped=dropped,
        oldest=oldest,
    )


def _parts(file: Path) -> Iterator[tuple[tuple[int, int, int | None], list[TicketEvent]]]:
    """Yield the settings and the events of each process that has written the log."""
    settings: tuple[int, int, int | None] | None = None
    events: list[TicketEvent] = []
    lines = file.read_text().splitlines()
    for i, line in enumerate(lines):
        try:
            kind, *values = _words(line)
        except ValueError as e:
            # The last line of a process that was killed during a write.
            if i + 1 == len(lines) or lines[i + 1].startswith('["settings"'):
                continue
            raise TicketError(f"{file}:{i + 1} is not a line of a log of tickets") from e
        if kind == "settings":
            if settings is not None:
                yield settings, events
            batch, staleness, steps = values
            settings, events = (batch, staleness, steps), []
        elif settings is None:
            raise TicketError(f"{file}:{i + 1} is an event before any settings; it is not a line of a log of tickets")
        else:
            events.append(TicketEvent(kind=kind, number=values[0], version=values[1]))
    if settings is None:
        raise TicketError(f"{file} has no events; the run has not made a step yet")
    yield settings, events


def _words(line: str) -> list[Any]:
    """Parse a line.

    Raises:
        ValueError: It is not a line of a log.
    """
    words = json.loads(line)
    numbers = words[1:] if isinstance(words, list) else []
    if not numbers or words[0] not in ("settings", *get_args(TicketEventKind)):
        raise ValueError(f"{line!r:.80} is not an event")
    if words[0] == "settings" and len(numbers) == 3 and numbers[2] is None:
        numbers = numbers[:2]
    elif len(numbers) != (3 if words[0] == "settings" else 2):
        raise ValueError(f"{line!r:.80} has {len(numbers)} numbers")
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise ValueError(f"{line!r:.80} has values that are not numbers")
    return words
