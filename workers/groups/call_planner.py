"""Plans calls of roles' methods: arguments of any form, hooks included, become requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import from_lists
from ...engine.packing.prefixes import Prefixes
from ...engine.packing.sharing import find_prefixes
from ...generation.options import SamplingOptions, check_prompts
from ..data_plane.data_ref import DataRef
from ..data_plane.plan import Load
from ..protocol.compute_messages import Call, RankInfo
from ..roles.actor import ActorConfig
from ..roles.base import Worker
from ..roles.batch_adapters import adapt_batch
from ..roles.dispatch import Assignment, Dispatch, MiniBatches, assign_mini_batches, assign_rows, check_columns
from ..roles.reference import ReferenceWorkerConfig
from . import hooks as h
from .planned import PlannedHook, PlannedRequest, Replies
from .sample_calls import SampleCall, Shares, evaluation, transfer
from .state_hooks import plan_hook

if TYPE_CHECKING:
    from .base import WorkerGroup


@dataclass(frozen=True, kw_only=True)
class CallSpec:
    """A call as its caller writes it.

    Args:
        role: The name of the role.
        method: The name of the method.
        args: The positional arguments.
        options: The keyword arguments.
        mini_batches: The mini-batches of an update; None makes one step on the entire batch.
        before: What to do before the calls of the flush.
        after: What to do after this call.
    """

    role: str
    method: str
    args: Sequence[Any]
    options: Mapping[str, Any]
    mini_batches: MiniBatches | None = None
    before: Sequence[h.Hook] = ()
    after: Sequence[h.Hook] = ()

    @property
    def title(self) -> str:
        """What the call is called in messages."""
        return f"{self.role}.{self.method}"


class CallPlanner:
    """Plans the calls of a group.

    Args:
        group: The group.

    Raises:
        ConfigError: The roles compute log-probabilities at different temperatures.
    """

    def __init__(self, group: "WorkerGroup") -> None:
        self._group = group
        temperatures = {
            name: role.config.temperature
            for name, role in group.roles.items()
            if isinstance(role.config, ActorConfig | ReferenceWorkerConfig)
        }
        if len(set(temperatures.values())) > 1:
            raise ConfigError(
                "the roles compute log-probabilities at different temperatures "
                f"({', '.join(f'{n}: {t:g}' for n, t in temperatures.items())}), so these could not be compared; give all "
                "roles the temperature at which responses are sampled"
            )
        self._temperature = next(iter(temperatures.values()), None)

    def plan(self, call: CallSpec) -> PlannedRequest:
        """Return the request of a call. A batch of tensors is put into the data stores.

        Raises:
            ConfigError: An argument or a hook is not possible here.
        """
        group, mini_batches = self._group, call.mini_batches
        spec = group.role(call.role)
        dispatch = spec.dispatch(call.method)
        if mini_batches is not None and not isinstance(mini_batches, MiniBatches):
            raise ConfigError(f"mini_batches={mini_batches!r}; give MiniBatches(size=...)")
        if mini_batches is not None and dispatch.split != "minibatches":
            raise ConfigError(f"mini_batches applies to updates only; {call.title} is not an update")
        for name, hooks in (("before", call.before), ("after", call.after)):
            if not isinstance(hooks, list | tuple):
                raise ConfigError(f"{name}={hooks!r:.80}; give a list of hooks")
        evaluates = [hook for hook in (*call.before, *call.after) if isinstance(hook, h.Evaluate)]
        if evaluates and (dispatch.split != "minibatches" or any(hook in evaluates for hook in call.before)):
            raise ConfigError(
                f"the hook evaluate comes after an update alone: give it in after= of one, not with {call.title}"
            )
        infos = group.rank_infos(call.role)
        if dispatch.split == "all":
            return self._plan_same(call)
        if not call.args:
            raise ConfigError(f"{call.title} needs a batch")
        self._check_temperature(call.title, (*call.args, *call.options.values()))
        if spec.generates(call.method):
            # Generators work independently of each other, whatever the layout of the role's engine.
            infos = [
                RankInfo(dp_rank=rank, dp_size=len(infos), is_output_rank=True, attention_ratio=0.0)
                for rank in range(len(infos))
            ]
        if isinstance(call.args[0], DataRef):
            return self._plan_samples(call, call.args[0], infos)
        return self._plan_tensors(call, infos)

    def _plan_same(self, call: CallSpec) -> PlannedRequest:
        """Plan a call with the same arguments on all ranks."""
        group, places = self._group, self._group.places(call.role)

        def make(name: str) -> Call:
            return Call(
                role=call.role,
                method=call.method,
                args=list(call.args),
                options=dict(call.options),
                wants_result=name == places[0],
            )

        return PlannedRequest(
            id=group.next_id(),
            title=call.title,
            mesh=places,
            make=make,
            common="",
            before=[plan_hook(group, hook) for hook in call.before],
            after=[plan_hook(group, hook) for hook in call.after],
            finish=lambda replies: replies[places[0]].result,  # type: ignore[attr-defined]
        )

    def _plan_samples(
        self,
        call: CallSpec,
        ref: DataRef,
        infos: Sequence[RankInfo],
        *,
        shares: Shares | None = None,
        wants_objects: bool = False,
    ) -> PlannedRequest:
        group = self._group
        spec = group.roles[call.role]
        dispatch = spec.dispatch(call.method)
        group.check_ref(ref)
        shares = shares or self._shares(call.role, ref, dispatch, infos, call.mini_batches)
        if dispatch.columns is not None and call.options.get(dispatch.columns) is not None:
            check_columns(call.options[dispatch.columns], len(ref))
        number = group.next_id()
        samples = SampleCall(
            role=call.role,
            method=call.method,
            dispatch=dispatch,
            ref=ref,
            extra_fields=self._extra_fields(call.role, call.method, ref),
            shares=shares,
            args=call.args[1:],
            options=call.options,
            version=group.next_version(),
            wants_objects=wants_objects,
        )
        make = samples.requests()
        moved: list[Load] = []
        held_out: list[tuple[DataRef, Shares, str]] = []
        after: list[PlannedHook] = []
        for i, hook in enumerate(call.after):
            if isinstance(hook, h.Evaluate):
                data, own = hook.data, self._evaluated(call, hook, infos)
                held_out.append((data, own, f"evaluate {i}"))
                after.append(evaluation(data, self._extra_fields(call.role, hook.method, data), own, hook.method))
            else:
                after.append(plan_hook(group, hook))

        def transfers() -> list[PlannedHook]:
            # When the flush is sent: what was dropped since the submission is missing, and what others have moved is there.
            hooks = []
            for data, own, what in ((ref, shares, "batch"), *held_out):
                group.check_ref(data)
                planned, loads = transfer(own.needs(data), group.buffer, f"{number}/{what}")
                moved.extend(loads)
                hooks += [planned] if planned is not None else []
            return hooks

        return PlannedRequest(
            id=number,
            title=call.title,
            mesh=tuple(shares.places),
            make=make,
            common=samples.common,
            before=[plan_hook(group, hook) for hook in call.before],
            after=after,
            has_samples=True,
            transfers=transfers,
            finish=samples.finish,
            undo=lambda: group.buffer.mark_lost(moved),
        )

    def _evaluated(self, call: CallSpec, hook: h.Evaluate, infos: Sequence[RankInfo]) -> Shares:
        """Return who evaluates which samples."""
        if not isinstance(hook.data, DataRef):
            raise ConfigError(f"Evaluate(data=...) is a {type(hook.data).__name__}; put it first, and give the DataRef")
        self._group.check_ref(hook.data)
        dispatch = self._group.roles[call.role].dispatch(hook.method)
        if dispatch.returns != "numbers":
            raise ConfigError(
                f"Evaluate(method={hook.method!r}): {call.role}.{hook.method} does not return numbers; use evaluate"
            )
        return self._shares(call.role, hook.data, dispatch, infos, None)

    def _plan_tensors(self, call: CallSpec, infos: Sequence[RankInfo]) -> PlannedRequest:
        """Put the batch for the call; its result is got, and both are dropped."""
        group = self._group
        spec = group.roles[call.role]
        dispatch = spec.dispatch(call.method)
        data = call.args[0]
        if dispatch.returns == "objects" and not isinstance(data, PackedBatch):
            # Prompts, which consist of tokens only.
            data = from_lists(check_prompts(data))
        adapter = adapt_batch(data, self._declared(), every=not issubclass(spec.owner(call.method), Worker))
        batch = adapter.batch
        if dispatch.columns is not None and call.options.get(dispatch.columns) is not None:
            check_columns(call.options[dispatch.columns], batch.num_sequences)
        groups = None if batch.group_ids is None else batch.groups()
        prefixes = find_prefixes(batch) if infos[0].dp_size > 1 and infos[0].shares_prefixes else None
        assignment = self._assign(batch.lengths, groups, None, prefixes, dispatch, infos, call.mini_batches)
        shares = Shares(places=group.places(call.role), infos=infos, assignment=assignment)
        ref = group.put_batch(batch, shares)
        try:
            request = self._plan_samples(call, ref, infos, shares=shares, wants_objects=True)
        except BaseException:
            group.drop(ref, shares.places)
            raise

        def finish(replies: Replies) -> Any:
            try:
                result = request.finish(replies)
                if not isinstance(result, DataRef):
                    return result
                values = group.get(result, list(result.keys))
                return adapter.answer(values) if dispatch.returns == "tokens" else adapter.answer_rows(values)
            finally:
                group.drop(ref, shares.places)

        def undo() -> None:
            request.undo()
            group.drop(ref, shares.places)

        return replace(request, finish=finish, undo=undo)

    def _shares(
        self,
        role: str,
        ref: DataRef,
        dispatch: Dispatch,
        infos: Sequence[RankInfo],
        mini_batches: MiniBatches | None,
    ) -> Shares:
        prefixes = ref.prefixes if infos[0].shares_prefixes else None
        assignment = self._assign(ref.lengths, ref.group_ids, ref.prefixes, prefixes, dispatch, infos, mini_batches)
        return Shares(places=self._group.places(role), infos=infos, assignment=assignment)

    def _assign(
        self,
        lengths: Sequence[int],
        groups: Sequence[int] | None,
        families: Prefixes | None,
        prefixes: Prefixes | None,
        dispatch: Dispatch,
        infos: Sequence[RankInfo],
        mini_batches: MiniBatches | None,
    ) -> Assignment:
        dp_size, ratio = infos[0].dp_size, infos[0].attention_ratio
        if dispatch.split == "dp":
            return assign_rows(lengths, groups, dp_size, ratio, prefixes=prefixes)
        steps = mini_batches or MiniBatches()
        return assign_mini_batches(lengths, groups, dp_size, ratio, steps, families=families, prefixes=prefixes)

    def _declared(self) -> set[str]:
        # The extra_fields of one role are accepted by all, because the same batch goes from role to role.
        return {name for other in self._group.roles.values() for name in getattr(other.config, "extra_fields", ())}

    def _extra_fields(self, role: str, method: str, ref: DataRef) -> frozenset[str]:
        every = not issubclass(self._group.roles[role].owner(method), Worker)
        return ref.extra_fields | self._declared() | (ref.keys.keys() if every else set())

    def _check_temperature(self, call: str, arguments: Sequence[Any]) -> None:
        """Check that responses to be trained on are sampled at the temperature that the roles compute at.

        Raises:
            ConfigError: The temperatures differ, and the responses are not for evaluation.
        """
        for options in arguments:
            if not isinstance(options, SamplingOptions) or options.evaluation or self._temperature is None:
                continue
            if options.temperature not in (0.0, self._temperature):
                raise ConfigError(
                    f"{call} samples at temperature={options.temperature:g}, but the group's other roles compute "
                    f"log-probabilities at {self._temperature:g}, so importance ratios and KL estimates would compare "
                    "different distributions; use the same temperature, or set SamplingOptions(evaluation=True) if nothing is "
                    "trained on the responses"
                )
