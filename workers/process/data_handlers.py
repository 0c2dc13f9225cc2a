"""The functions that serve the data plane: calls with samples, data sets, the data store, connections between pools."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...engine.cancellation import cancellable
from ...engine.errors import BatchError
from ...engine.packing.batch import PackedBatch
from ...generation.result import Generation, to_batch
from ..data_plane.links import Links
from ..data_plane.plan import MEDIA, Column
from ..data_plane.samples import batch_of, column_of, columns_of
from ..data_plane.sequence_buffer import key_of
from ..protocol import compute_messages as c
from ..protocol import data_messages as d
from ..protocol.hooks import EvaluateHook
from ..roles.dispatch import dispatch_of
from .handlers import check_method, check_role
from .worker import ModelWorker, OpError

# ---- calls with samples -------------------------------------------------------------------------------------------------


def inference(worker: ModelWorker, request: c.Inference) -> c.InferenceOk:
    """Run a method, and store the values that it returns on the output ranks."""
    result = _run(worker, request, {})
    returns = dispatch_of(worker.host.owner(request.role, request.method), request.method).returns
    if returns in ("objects", "numbers"):
        return c.InferenceOk(result=result if request.wants_result else None)
    if not worker.host.info(request.role).is_output_rank:
        return c.InferenceOk()
    stored = {
        str(name): column_of(key_of(str(name), request.version), "token" if returns == "tokens" else "sequence", values)
        for name, values in result.items()
    }
    _check_rows(request, returns, result, worker)
    _store(worker, request.ids, worker.data.store.lengths(request.ids), stored)
    return c.InferenceOk(fields={name: column for name, (column, _) in stored.items()})


def train_step(worker: ModelWorker, request: c.TrainStep) -> c.TrainStepOk:
    """Run an update."""
    result = _run(worker, request, {"steps": request.steps})
    return c.TrainStepOk(result=result if request.wants_result else None)


def generate(worker: ModelWorker, request: c.Generate) -> c.GenerateOk:
    """Generate, and store each completion with its prompt as a sample. After a `cancel` it ends with the tokens so far."""
    with cancellable(lambda: request.id in worker.cancelled):
        result = _run(worker, request, {})
    answers = [(row, k, g) for row, samples in zip(request.rows, result, strict=True) for k, g in enumerate(samples)]
    if request.wants_result or not all(isinstance(g, Generation) for _, _, g in answers):
        return c.GenerateOk(result=result)
    prompts = dict(zip(request.rows, request.ids, strict=True))
    batch = to_batch([g for _, _, g in answers])
    if any(key.startswith(MEDIA) for key in request.fields):
        # The fields of a prompt are copied to each of its completions.
        with_prompts = batch_for(worker, request)
        places = {row: i for i, row in enumerate(request.rows)}
        batch = replace(batch, media=with_prompts.select([places[row] for row, _, _ in answers]).media)
    ids = [f"{prompts[row]}/{request.version}.{k}" for row, k, _ in answers]
    columns = columns_of(batch)
    fields = {column.key: (column, values) for column, values in columns}
    _store(worker, ids, batch.lengths, fields)
    return c.GenerateOk(
        ids=ids,
        lengths=batch.lengths,
        fields={name: column for name, (column, _) in fields.items()},
        # Distinct from those of other calls, because completions of several calls may become one batch.
        group_ids=[(request.version << 32) + row for row, _, _ in answers],
    )


def _run(worker: ModelWorker, request: c.SampleRequest, options: Mapping[str, Any]) -> Any:
    check_role(worker, request.role)
    check_method(worker, request.role, request.method)
    if len(request.rows) != len(request.ids):
        raise OpError(
            "bad_request", f"there are {len(request.ids)} ids and {len(request.rows)} rows; give one row for each id"
        )
    batch = batch_for(worker, request, request.names)
    if dispatch_of(worker.host.owner(request.role, request.method), request.method).returns == "objects":
        # A generator seeds the sampling of a prompt with its number in the global batch, so that completions do not
        # depend on the layout.
        batch = batch.with_sequence_fields(row=torch.tensor(request.rows, dtype=torch.int64))
    return worker.host.call(request.role, request.method, [batch, *request.args], {**request.options, **options})


def batch_for(worker: ModelWorker, request: c.SampleRequest | EvaluateHook, names: Sequence[str] = ()) -> PackedBatch:
    """Return the samples of a request as a batch.

    Args:
        worker: The worker.
        request: The request, or a hook.
        names: The name of each sample, for messages; its number in the global batch if not given.
    """
    return batch_of(
        worker.data.store,
        request.ids,
        request.fields,
        group_ids=request.group_ids,
        names=names or [f"sequence {row}" for row in request.rows],
        extra_fields=request.extra_fields,
    )


def _check_rows(request: c.Inference, returns: str, result: Mapping[str, Tensor], worker: ModelWorker) -> None:
    count = sum(worker.data.store.lengths(request.ids)) if returns == "tokens" else len(request.ids)
    for name, values in result.items():
        if not torch.is_tensor(values) or values.shape[:1] != (count,):
            shape = list(values.shape) if torch.is_tensor(values) else type(values).__name__
            raise BatchError(f"{request.method} returned {name} as {shape} for a shard of {count} {returns}")


def _store(
    worker: ModelWorker, ids: Sequence[str], lengths: Sequence[int], fields: Mapping[str, tuple[Column, Tensor]]
) -> None:
    # A copy: a role may keep using its results, and a view would keep the memory of the whole tensor alive.
    worker.data.store.put(ids, lengths, [(column, values.clone()) for column, values in fields.values()])


# ---- data sets ----------------------------------------------------------------------------------------------------------


def fetch(worker: ModelWorker, request: d.Fetch) -> d.FetchOk:
    """Load the next samples of this rank's share."""
    check_role(worker, request.role)
    part = worker.host.dataset(request.role).fetch(request.count, request.start)
    if part.batch is None:
        return d.FetchOk(ids=[], lengths=[], positions=[], fields={}, end=part.end)
    columns = columns_of(part.batch)
    ids = [f"{request.role}:{epoch}:{index}" for epoch, index in part.samples]
    worker.data.store.put(ids, part.batch.lengths, columns)
    return d.FetchOk(
        ids=ids,
        lengths=part.batch.lengths,
        positions=list(part.positions),
        fields={column.key: column for column, _ in columns},
        group_ids=None if part.batch.group_ids is None else part.batch.group_ids.tolist(),
        end=part.end,
    )


def spec(worker: ModelWorker, request: d.Spec) -> d.SpecOk:
    """Return the size of a data set."""
    check_role(worker, request.role)
    dataset = worker.host.dataset(request.role)
    return d.SpecOk(samples=len(dataset), shard=dataset.shard_size, position=dataset.position)


def model_config(worker: ModelWorker, request: d.ModelConfigRequest) -> d.ModelConfigOk:
    """Return the configuration of a role's model."""
    check_role(worker, request.role)
    return d.ModelConfigOk(config_json=worker.host.model_config(request.role))


# ---- the data store -----------------------------------------------------------------------------------------------------


def put(worker: ModelWorker, request: d.Put) -> d.PutOk:
    """Store samples that come with the request."""
    tensors = request.tensors or []
    if len(tensors) != len(request.columns) or not all(torch.is_tensor(values) for values in tensors):
        raise OpError("bad_request", f"there are {len(request.columns)} columns and {len(tensors)} tensors; give one for each")
    worker.data.store.put(request.ids, request.lengths, list(zip(request.columns, tensors, strict=True)))
    return d.PutOk()


def get(worker: ModelWorker, request: d.Get) -> d.GetOk:
    """Return columns of samples."""
    columns = [worker.data.store.get(request.ids, key) for key in request.keys]
    return d.GetOk(columns=[column for column, _ in columns], tensors=[values for _, values in columns])


def digest(worker: ModelWorker, request: d.Digest) -> d.DigestOk:
    """Return a digest of columns of samples."""
    return d.DigestOk(digest=worker.data.store.digest(request.ids, request.keys))


def clear_data_cache(worker: ModelWorker, request: d.ClearDataCache) -> d.ClearDataCacheOk:
    """Drop samples."""
    store = worker.data.store
    dropped, deferred = store.drop(request.ids, request.keys)
    # torch's allocator keeps the memory for the next samples. Unmapping it would wait for the device, which is computing.
    return d.ClearDataCacheOk(dropped=dropped, deferred=deferred, samples=len(store), bytes_held=store.bytes_held)


def listen(worker: ModelWorker, request: d.Listen) -> d.Listening:
    """Open the socket for the data of other pools."""
    if worker.data.links is not None:
        raise OpError("bad_request", f"{worker.id} is already listening at {worker.data.links.address}")
    worker.data.links = Links(
        worker.id,
        request.endpoint,
        request.keys,
        worker.settings.timeout_s,
        worker.data.discard,
        incarnation=request.incarnation,
    )
    return d.Listening(address=worker.data.links.address)


def peers(worker: ModelWorker, request: d.Peers) -> d.PeersOk:
    """Set the addresses of the other workers."""
    if worker.data.links is None:
        raise OpError("bad_request", f"{worker.id} does not listen; send listen first")
    worker.data.links.set_addresses(request.addresses, request.incarnations)
    return d.PeersOk()
