"""Plans calls with samples: which rank gets which rows, what has to be moved there, and what the results are."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...engine.errors import BatchError
from ...engine.packing.prefixes import Prefixes
from ..data_plane.data_ref import DataRef
from ..data_plane.plan import Column, Load, Round, part_of
from ..data_plane.redistributor import Need, plan_redistribution
from ..data_plane.sequence_buffer import SequenceBuffer
from ..protocol.compute_messages import Generate, Inference, RankInfo, SampleRequest, TrainStep
from ..protocol.hooks import DataTransferHook, EvaluateHook
from ..roles.dispatch import Assignment, Dispatch
from .planned import PlannedHook, Replies


@dataclass(frozen=True, kw_only=True, eq=False)
class Shares:
    """The data-parallel shares of a call.

    Args:
        places: The processes that run the call, in rank order.
        infos: Where each stands in the role's layout.
        assignment: The rows of each share.
    """

    places: Sequence[str]
    infos: Sequence[RankInfo]
    assignment: Assignment

    def share_of(self, name: str) -> int:
        """Return the share that a process works on."""
        return self.infos[self.places.index(name)].dp_rank

    def rows_of(self, name: str) -> list[int]:
        """Return the rows of a process."""
        return self.assignment.rows[self.share_of(name)]

    def needs(self, ref: DataRef) -> list[Need]:
        """Return which processes need which samples."""
        needs = []
        for share, rows in enumerate(self.assignment.rows):
            targets = tuple(name for name, info in zip(self.places, self.infos, strict=True) if info.dp_rank == share)
            needs.append(
                Need(targets=targets, ids=[ref.ids[row] for row in rows], keys=tuple(dict.fromkeys(ref.keys.values())))
            )
        return needs

    def outputs(self) -> list[tuple[str, list[int]]]:
        """Return the output rank of each share, with its rows."""
        return [
            (name, self.assignment.rows[info.dp_rank])
            for name, info in zip(self.places, self.infos, strict=True)
            if info.is_output_rank
        ]


def transfer(needs: Sequence[Need], buffer: SequenceBuffer, title: str) -> tuple[PlannedHook | None, list[Load]]:
    """Plan what has to be moved, and note it as moved.

    Returns:
        The hook, if anything moves; and its loads, for `SequenceBuffer.mark_lost` if the flush fails.
    """
    rounds: list[Round] = plan_redistribution(needs, buffer)
    loads = [load for steps in rounds for step in steps for load in step.loads]
    if not loads:
        return None, []
    buffer.mark_moved(loads)
    places = tuple(sorted({name for load in loads for name in (load.source, *load.targets)}))
    shown = _digest([(load.source, load.targets, load.ids, [c.key for c in load.columns]) for load in loads])
    hook = PlannedHook(
        name="data_transfer",
        places=places,
        make=lambda name: DataTransferHook(rounds=part_of(rounds, name), title=title),
        common=shown,
    )
    return hook, loads


def fields_of(ref: DataRef) -> dict[str, Column]:
    """Return the fields of a reference, with the types of their columns.

    Raises:
        DataMissingError: Samples were dropped, or lack a column.
        BatchError: There are no samples.
    """
    if not len(ref):
        raise BatchError("the batch has no samples")
    found = {name: ref.buffer.column(ref.ids, key) for name, key in ref.keys.items()}
    # A process that has no sample needs the types, and the others know the numbers of rows.
    return {name: Column(c.key, c.dtype, c.per, c.tail) for name, c in found.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleCall:
    """A call of a role's method with samples.

    Args:
        role: The role.
        method: The method.
        dispatch: How it is called.
        ref: The samples.
        extra_fields: The names of fields that nothing needs to read.
        shares: Who works on which rows.
        args: The other positional arguments.
        options: The keyword arguments.
        version: The version of the results.
        wants_objects: Whether objects are to be returned, instead of becoming samples.
    """

    role: str
    method: str
    dispatch: Dispatch
    ref: DataRef
    extra_fields: frozenset[str]
    shares: Shares
    args: Sequence[Any]
    options: Mapping[str, Any]
    version: int
    wants_objects: bool = True

    @property
    def common(self) -> str:
        """What the requests of all processes have in common."""
        return _digest((self.ref.ids, sorted(self.ref.keys.items()), self.version, self.shares.assignment.steps is None))

    def requests(self) -> Callable[[str], SampleRequest]:
        """Return what makes the request of a process."""
        ref, shares, columns = self.ref, self.shares, self.dispatch.columns
        fields, extra_fields = fields_of(ref), sorted(self.extra_fields)

        def make(name: str) -> SampleRequest:
            rows = shares.rows_of(name)
            options = dict(self.options)
            if columns is not None and options.get(columns) is not None:
                options[columns] = {title: [values[row] for row in rows] for title, values in options[columns].items()}
            common: dict[str, Any] = {
                "role": self.role,
                "method": self.method,
                "ids": [ref.ids[row] for row in rows],
                "fields": fields,
                "rows": rows,
                "names": [] if ref.names is None else [ref.names[row] for row in rows],
                "group_ids": None if ref.group_ids is None else [ref.group_ids[row] for row in rows],
                "extra_fields": extra_fields,
                "args": list(self.args),
                "options": options,
                "version": self.version,
            }
            if self.dispatch.returns == "objects":
                if self.method == "generate":
                    return Generate(**common, wants_result=self.wants_objects)
                return Inference(**common)
            if self.dispatch.split == "minibatches":
                steps = self.shares.assignment.steps
                own = None if steps is None else steps[shares.share_of(name)]
                return TrainStep(**common, steps=own, wants_result=name == shares.places[0])
            numbers = self.dispatch.returns == "numbers"
            return Inference(**common, wants_result=numbers and name == shares.places[0])

        return make

    def finish(self, replies: Replies) -> Any:
        """Return the result, and note where the new columns are."""
        found: dict[str, Any] = dict(replies)
        if self.dispatch.split == "minibatches" or self.dispatch.returns == "numbers":
            return found[self.shares.places[0]].result
        if self.dispatch.returns == "objects":
            stored = self.method == "generate" and all(reply.result is None for reply in found.values())
            return self._responses(found) if stored else self._objects(found)
        return self._columns(found)

    def _columns(self, replies: Mapping[str, Any]) -> DataRef:
        keys: dict[str, str] = {}
        for name, rows in self.shares.outputs():
            fields: dict[str, Column] = replies[name].fields
            if keys and keys.keys() != fields.keys():
                raise BatchError(
                    f"{self.role}.{self.method} returned {', '.join(keys)} on one rank and {', '.join(fields)} on another"
                )
            keys = {title: column.key for title, column in fields.items()}
            # What was dropped meanwhile is gone, with its results.
            left = [row for row in rows if self.ref.ids[row] in self.ref.buffer]
            ids, lengths = [self.ref.ids[row] for row in left], [self.ref.lengths[row] for row in left]
            self.ref.buffer.add(ids, lengths, list(fields.values()), [name])
        return replace(self.ref, keys=keys, extra_fields=frozenset())

    def _objects(self, replies: Mapping[str, Any]) -> list[Any]:
        by_row: dict[int, Any] = {}
        for name, rows in self.shares.outputs():
            by_row.update(zip(rows, replies[name].result or [], strict=True))
        return [by_row[row] for row in range(len(self.ref))]

    def _responses(self, replies: Mapping[str, Any]) -> DataRef:
        """Return new samples, in the order of their prompts."""
        buffer = self.ref.buffer
        found: list[tuple[int, str, int]] = []
        keys: dict[str, str] = {}
        for name, _ in self.shares.outputs():
            reply = replies[name]
            found += zip(reply.group_ids or [], reply.ids, reply.lengths, strict=True)
            keys = keys or {title: column.key for title, column in reply.fields.items()}
        # Stable: the responses to one prompt stay in their order.
        found.sort(key=lambda item: item[0])
        buffer.create([sample for _, sample, _ in found], [length for *_, length in found], [row for row, *_ in found])
        for name, _ in self.shares.outputs():
            reply = replies[name]
            buffer.add(reply.ids, reply.lengths, list(reply.fields.values()), [name])
        # The lower half of a response's group is the row of its prompt.
        prompts = [self.ref.lengths[row & 0xFFFFFFFF] for row, _, _ in found]
        return DataRef(
            ids=tuple(sample for _, sample, _ in found),
            lengths=tuple(length for _, _, length in found),
            keys=keys,
            buffer=buffer,
            group_ids=tuple(row for row, _, _ in found),
            prefixes=Prefixes.of_prompts([row for row, _, _ in found], prompts),
            extra_fields=frozenset({"finished", "versions"}),
        )


def evaluation(ref: DataRef, extra_fields: frozenset[str], shares: Shares, method: str) -> PlannedHook:
    """Return the hook that evaluates a role on samples."""
    fields = fields_of(ref)

    def make(name: str) -> EvaluateHook:
        rows = shares.rows_of(name)
        return EvaluateHook(
            ids=[ref.ids[row] for row in rows],
            fields=fields,
            rows=rows,
            group_ids=None if ref.group_ids is None else [ref.group_ids[row] for row in rows],
            extra_fields=sorted(extra_fields),
            method=method,
        )

    return PlannedHook(
        name="evaluate",
        places=tuple(shares.places),
        make=make,
        common=_digest((ref.ids, sorted(ref.keys.items()), method)),
    )


def _digest(content: object) -> str:
    """Return a digest of plain data."""
    return hashlib.sha256(repr(content).encode()).hexdigest()
