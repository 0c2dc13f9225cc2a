"""Plans calls of roles' methods: turns arguments of any form and hooks into a `GroupCall`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from msgspec.structs import replace

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch, media_costs
from ...engine.packing.convert import from_lists
from ...engine.packing.prefixes import Prefixes
from ...engine.packing.sharing import find_prefixes
from ...generation.options import SamplingOptions, check_prompts
from ..data_plane.data_ref import DataRef
from ..protocol.compute_messages import Call, Generate, Inference, RankInfo, SampleRequest, TrainStep
from ..protocol.hooks import CallHook, Evaluate, EvaluateHook, Offload, Save, SyncParams, WeightDType
from ..roles.actor import ActorConfig
from ..roles.base import Worker
from ..roles.batch_adapters import BatchAdapter, adapt_batch
from ..roles.dispatch import Assignment, Dispatch, MiniBatches, assign_mini_batches, assign_rows, check_columns
from ..roles.reference import ReferenceWorkerConfig
from .group_call import GroupCall, PlannedHook, SampleCall
from .group_data import GroupData, RoleProcesses
from .shards import ShardedSamples, Shards

_PLACES = ("host", "disk", "device")


class CallPlanner:
    """Plans the calls of a group.

    Args:
        group: The group's roles and processes.
        data: Its data stores.

    Raises:
        ConfigError: The roles compute log-probabilities at different temperatures.
    """

    def __init__(self, group: RoleProcesses, data: GroupData) -> None:
        self._group, self._data = group, data
        temperatures = {
            name: role.config.temperature
            for name, role in group.roles.items()
            if isinstance(role.config, ActorConfig | ReferenceWorkerConfig)
        }
        if len(set(temperatures.values())) > 1:
            raise ConfigError(
                "the roles compute log-probabilities at different temperatures "
                f"({', '.join(f'{n}: {t:g}' for n, t in temperatures.items())}), so these could not be compared; give all "
                "roles the temperature at which completions are sampled"
            )
        self._temperature = next(iter(temperatures.values()), None)

    def plan(
        self,
        role: str,
        method: str,
        args: Sequence[Any],
        options: Mapping[str, Any],
        *,
        mini_batches: MiniBatches | None = None,
        before: Sequence[CallHook] = (),
        after: Sequence[CallHook] = (),
    ) -> GroupCall:
        """Plan a call. A batch of tensors is put into the data stores.

        Args:
            role: The name of the role.
            method: The name of the method.
            args: The positional arguments.
            options: The keyword arguments.
            mini_batches: The mini-batches of an update; None makes one step on the entire batch.
            before: The hooks to run before the calls of the flush.
            after: The hooks to run after this call.

        Raises:
            ConfigError: An argument or a hook is not valid here.
        """
        spec, title = self._group.role(role), f"{role}.{method}"
        dispatch = spec.dispatch(method)
        _check(title, dispatch, mini_batches, before, after)
        infos, workers = self._group.rank_infos(role), self._group.workers(role)
        if dispatch.split == "all":
            return GroupCall(
                id=self._group.next_id(),
                title=title,
                workers=workers,
                message=Call(role=role, method=method, args=list(args), options=dict(options)),
                before=[self._plan_hook(hook) for hook in before],
                after=[self._plan_hook(hook) for hook in after],
            )
        if not args:
            raise ConfigError(f"{title} needs a batch; pass it as the first argument")
        self._check_temperature(title, (*args, *options.values()))
        if spec.generates(method):
            # Generators work independently of each other, whatever the layout of the role's engine.
            infos = [
                RankInfo(dp_rank=rank, dp_size=len(infos), is_output_rank=True, attention_ratio=0.0)
                for rank in range(len(infos))
            ]
        adapter: BatchAdapter | None = None
        if isinstance(args[0], DataRef):
            ref = args[0]
            self._data.check_ref(ref)
            shards = self._shards(role, infos, ref, dispatch, mini_batches)
            _check_columns(dispatch, options, len(ref))
        else:
            adapter = self._adapter(role, method, args[0])
            _check_columns(dispatch, options, adapter.batch.num_sequences)
            shards = self._shards_of_batch(role, infos, adapter.batch, dispatch, mini_batches)
            ref = self._data.put_batch(adapter.batch, shards)
        try:
            number = self._group.next_id()
            samples = ShardedSamples(ref=ref, shards=shards, extra_fields=self._extra_fields(role, method, ref))
            return SampleCall(
                id=number,
                title=title,
                workers=workers,
                message=_message(role, method, dispatch, args[1:], options, self._data.next_version(), adapter is not None),
                before=[self._plan_hook(hook) for hook in before],
                after=[
                    self._plan_evaluation(role, infos, hook) if isinstance(hook, Evaluate) else self._plan_hook(hook)
                    for hook in after
                ],
                data=self._data,
                dispatch=dispatch,
                samples=samples,
                adapter=adapter,
            )
        except BaseException:
            # The samples were put for this call only.
            if adapter is not None:
                self._data.drop(ref, workers)
            raise

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def plan_hooks(self, hooks: Sequence[CallHook], title: str) -> GroupCall:
        """Plan a call that consists of hooks only.

        Args:
            hooks: The hooks.
            title: The name of the call in messages; empty uses the names of the hooks.

        Raises:
            ConfigError: A role does not exist, or cannot do this.
        """
        planned = [self._plan_hook(hook) for hook in hooks]
        return GroupCall(id=self._group.next_id(), title=title or ", ".join(hook.name for hook in planned), before=planned)

    def _plan_hook(self, hook: CallHook) -> PlannedHook:
        """Plan a hook on the state of roles, with the processes that take part."""
        group = self._group
        if isinstance(hook, Offload):
            group.role(hook.role).dispatch("to")
            if hook.place not in _PLACES:
                raise ConfigError(f"Offload(place={hook.place!r}); it must be one of {', '.join(_PLACES)}")
            return PlannedHook(message=hook, workers=group.workers(hook.role))
        if isinstance(hook, Save):
            group.role(hook.role).dispatch("save_checkpoint")
            if isinstance(hook.step, bool) or not isinstance(hook.step, int) or hook.step < 0:
                raise ConfigError(f"Save(step={hook.step!r}); give the number of a step, at least 0")
            try:
                save = replace(hook, root=str(hook.root), extra=dict(hook.extra))
                # Tried here, because in the workers it would fail in the middle of writing a checkpoint.
                json.dumps(save.extra)
            except (TypeError, ValueError) as e:
                raise ConfigError(
                    f"Save(extra=...) cannot be written as JSON: {e}; give plain numbers, texts, lists and dicts"
                ) from None
            return PlannedHook(message=save, workers=group.workers(hook.role))
        if isinstance(hook, SyncParams):
            return self._plan_sync(hook)
        raise ConfigError(
            f"{hook!r:.80} is not a valid hook here; the hooks are Offload, Save, SyncParams, and after an update Evaluate"
        )

    def _plan_sync(self, hook: SyncParams) -> PlannedHook:
        group, version = self._group, hook.version
        if not 0 <= hook.eta <= 1:
            raise ConfigError(f"sync_params: eta={hook.eta}; the weight of the new parameters must be between 0 and 1")
        if version is not None and (isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63):
            raise ConfigError(f"sync_params: version={version!r}; it must be an integer of at least 0, or None")
        for name, method in ((hook.source, "weights"), (hook.target, "load_adapters" if hook.adapters else "load_weights")):
            worker = group.role(name).worker
            if not hasattr(worker, method):
                raise ConfigError(
                    f"sync_weights({hook.source!r}, {hook.target!r}): {worker.__name__}, the worker of {name!r}, has no method "
                    f"{method}"
                )
        if (hook.keep or hook.resend) and version is None:
            raise ConfigError(
                f"sync_weights({hook.source!r}, {hook.target!r}): keep and resend need a version number; set version="
            )
        if hook.adapters and (hook.eta != 1 or hook.base is not None):
            raise ConfigError(
                f"sync_weights({hook.source!r}, {hook.target!r}): sending only adapters replaces the previous ones; use eta=1, without "
                "changes=True"
            )
        if hook.adapters:
            self._check_adapters(hook)
        sources, targets = group.workers(hook.source), group.workers(hook.target)
        if hook.resend:
            # Kept versions exist only here, in host memory.
            sources = sources[:1]
        # A moving average and adapters are combined with weights that the target already has.
        as_it_is = hook.eta != 1 or hook.adapters
        dtypes = set() if as_it_is else {info.weight_dtype for info in group.rank_infos(hook.target)}
        sync = replace(
            hook,
            sources=list(sources),
            targets=list(targets),
            # Titles begin with a growing number, by which a worker recognizes messages of transfers that it has given
            # up.
            title=f"{group.next_id()}/{hook.source} to {hook.target}",
            # Only if all processes of the target have the same one.
            dtype=next((dtype for dtype in get_args(WeightDType) if dtypes == {dtype}), ""),
            backend="" if hook.resend else group.sync_backend(hook.source, hook.target),
        )
        return PlannedHook(message=sync, workers=tuple(dict.fromkeys((*sources, *targets))))

    def _check_adapters(self, hook: SyncParams) -> None:
        """Check that the target interprets the adapters as the source does."""
        source, target = (self._group.role(name).config for name in (hook.source, hook.target))
        has = {"model.path": source.model.path, "model.lora": source.model.lora, "base_dtype": source.engine.precision.params}
        takes = {"model.path": target.model.path, "model.lora": target.model.lora, "base_dtype": target.base_dtype}
        if differing := [name for name in has if has[name] != takes[name]]:
            raise ConfigError(
                f"sync_weights({hook.source!r}, {hook.target!r}, adapters=True): {differing[0]} of the target is {takes[differing[0]]}, and that of "
                f"the source {has[differing[0]]} (base_dtype is its engine.precision.params); give the target's RolloutConfig the same"
            )

    def _plan_evaluation(self, role: str, infos: Sequence[RankInfo], hook: Evaluate) -> PlannedHook:
        if not isinstance(hook.data, DataRef):
            raise ConfigError(
                f"Evaluate(data=...) is a {type(hook.data).__name__}; put() the batch first, and pass the DataRef"
            )
        self._data.check_ref(hook.data)
        dispatch = self._group.roles[role].dispatch(hook.method)
        if dispatch.returns != "numbers":
            raise ConfigError(f"Evaluate(method={hook.method!r}): {role}.{hook.method} does not return numbers; use evaluate")
        samples = ShardedSamples(
            ref=hook.data,
            shards=self._shards(role, infos, hook.data, dispatch, None),
            extra_fields=self._extra_fields(role, hook.method, hook.data),
        )
        message = EvaluateHook(ids=[], fields={}, method=hook.method)
        return PlannedHook(message=message, workers=self._group.workers(role), samples=samples)

    # ---- batches -----------------------------------------------------------------------------------------------------

    def _adapter(self, role: str, method: str, batch: Any) -> BatchAdapter:
        """Return the adapter that converts a caller's batch, and the results back."""
        spec = self._group.roles[role]
        if spec.dispatch(method).returns == "objects" and not isinstance(batch, PackedBatch):
            # Prompts consist of tokens only.
            batch = from_lists(check_prompts(batch))
        return adapt_batch(batch, self._declared(), every=not issubclass(spec.owner(method), Worker))

    def _shards(
        self,
        role: str,
        infos: Sequence[RankInfo],
        ref: DataRef,
        dispatch: Dispatch,
        mini_batches: MiniBatches | None,
    ) -> Shards:
        prefixes = ref.prefixes if infos[0].shares_prefixes else None
        media = ref.media_costs(infos[0].media_costs)
        assignment = _assign(ref.lengths, ref.group_ids, ref.prefixes, prefixes, media, dispatch, infos[0], mini_batches)
        return Shards(workers=self._group.workers(role), infos=infos, assignment=assignment)

    def _shards_of_batch(
        self,
        role: str,
        infos: Sequence[RankInfo],
        batch: PackedBatch,
        dispatch: Dispatch,
        mini_batches: MiniBatches | None,
    ) -> Shards:
        groups = None if batch.group_ids is None else batch.groups()
        # With a single shard there is nothing to keep together, so the search is left out.
        prefixes = find_prefixes(batch) if infos[0].dp_size > 1 and infos[0].shares_prefixes else None
        media = media_costs(batch, infos[0].media_costs)
        assignment = _assign(batch.lengths, groups, None, prefixes, media, dispatch, infos[0], mini_batches)
        return Shards(workers=self._group.workers(role), infos=infos, assignment=assignment)

    def _declared(self) -> set[str]:
        # All roles accept the extra_fields of any role, because the same batch goes from role to role.
        return {name for other in self._group.roles.values() for name in getattr(other.config, "extra_fields", ())}

    def _extra_fields(self, role: str, method: str, ref: DataRef) -> frozenset[str]:
        every = not issubclass(self._group.roles[role].owner(method), Worker)
        return ref.extra_fields | self._declared() | (ref.keys.keys() if every else set())

    def _check_temperature(self, title: str, arguments: Sequence[Any]) -> None:
        """Check that completions to be trained on are sampled at the temperature that the roles compute at.

        Raises:
            ConfigError: The temperatures differ, and the completions are not for evaluation.
        """
        for options in arguments:
            if not isinstance(options, SamplingOptions) or options.evaluation or self._temperature is None:
                continue
            if options.temperature not in (0.0, self._temperature):
                raise ConfigError(
                    f"{title} samples at temperature={options.temperature:g}, but the group's other roles compute "
                    f"log-probabilities at {self._temperature:g}, so importance ratios and KL estimates would compare "
                    "different distributions; use the same temperature, or set SamplingOptions(evaluation=True) if nothing is "
                    "trained on the completions"
                )


def _check(
    title: str,
    dispatch: Dispatch,
    mini_batches: MiniBatches | None,
    before: Sequence[CallHook],
    after: Sequence[CallHook],
) -> None:
    """Check the mini-batches and hooks of a call against its method.

    Raises:
        ConfigError: The method is not an update, or an argument is not a list of hooks.
    """
    is_update = dispatch.split == "minibatches"
    if mini_batches is not None and not isinstance(mini_batches, MiniBatches):
        raise ConfigError(f"mini_batches={mini_batches!r}; give MiniBatches(size=...)")
    if mini_batches is not None and not is_update:
        raise ConfigError(f"mini_batches applies to updates only; {title} is not an update")
    for name, hooks in (("before", before), ("after", after)):
        if not isinstance(hooks, list | tuple):
            raise ConfigError(f"{name}={hooks!r:.80}; give a list of hooks")
    if any(isinstance(hook, Evaluate) for hook in (before if is_update else [*before, *after])):
        raise ConfigError(f"the hook evaluate is valid only after an update: pass it in after= of one, not with {title}")


def _check_columns(dispatch: Dispatch, options: Mapping[str, Any], rows: int) -> None:
    if dispatch.columns is not None and options.get(dispatch.columns) is not None:
        check_columns(options[dispatch.columns], rows)


def _assign(
    lengths: Sequence[int],
    groups: Sequence[int] | None,
    families: Prefixes | None,
    prefixes: Prefixes | None,
    media: Sequence[float] | None,
    dispatch: Dispatch,
    info: RankInfo,
    mini_batches: MiniBatches | None,
) -> Assignment:
    dp_size, ratio = info.dp_size, info.attention_ratio
    if dispatch.split == "dp":
        return assign_rows(lengths, groups, dp_size, ratio, prefixes=prefixes, media=media)
    steps = mini_batches or MiniBatches()
    return assign_mini_batches(lengths, groups, dp_size, ratio, steps, families=families, prefixes=prefixes, media=media)


def _message(
    role: str,
    method: str,
    dispatch: Dispatch,
    args: Sequence[Any],
    options: Mapping[str, Any],
    version: int,
    wants_completions: bool,
) -> SampleRequest:
    """Return the part of a call with samples that all its processes receive alike."""
    common: dict[str, Any] = {
        "role": role,
        "method": method,
        "ids": [],
        "args": list(args),
        "options": dict(options),
        "version": version,
    }
    if dispatch.returns == "objects" and method == "generate":
        return Generate(**common, wants_result=wants_completions)
    if dispatch.returns != "objects" and dispatch.split == "minibatches":
        return TrainStep(**common)
    return Inference(**common)
