"""The role that trains adapters: a frozen model with adapters that are created, trained, saved and dropped while it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from ...engine.adapter_checkpoint import adapter_config_of
from ...engine.adapter_trainer import AdapterTrainer
from ...engine.adapters.config import AdapterConfig
from ...engine.adapters.slot import AdapterStep
from ...engine.call_trainer import CallTrainer, TrainingCall, TrainingCallResult
from ...engine.config import OptimConfig
from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.microbatch import balance
from ...losses.token_sums import TokenSumLoss
from ...losses.traced_loss import TracedLoss
from .base import Worker, WorkerConfig
from .dispatch import register


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterRequest:
    """A batch for one adapter and its loss, summed over all tokens of the batch.

    Args:
        adapter: The name of the adapter; None for the frozen model without adapters, which can only be evaluated.
        batch: The documents, with the fields that the loss reads. Their `labels` may be any tokens (`PackedBatch.free_labels`); `targets`
            holds several labels per token. See `TrainingCall`.
        loss: The loss.
        forward_only: Whether to only evaluate the loss, without gradients.
        top_k: The number of most likely next tokens to return per token.
    """

    adapter: str | None
    batch: PackedBatch
    loss: TokenSumLoss | TracedLoss
    forward_only: bool = False
    top_k: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterReply:
    """The reply to an `AdapterRequest`.

    Args:
        loss: The loss; NaN if there is an error.
        metrics: The metrics of the loss. Each is a mean over documents, or over the denominator that the loss defines.
        log_probs: `[T]` or `[T, K]` float32, the log-probability of each label or target, in the order of the batch, from the same
            forward pass as the gradients.
        top_tokens: `[T, k]` int64, the ids of the most likely next tokens, the most likely first; None if not requested.
        top_log_probs: `[T, k]` float32, their log-probabilities.
        error: Why the request failed; empty if it succeeded. A failed request changes nothing.
    """

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    log_probs: Tensor | None = None
    top_tokens: Tensor | None = None
    top_log_probs: Tensor | None = None
    error: str = ""


class AdapterWorker(Worker):
    """A frozen model with adapters (`model.max_adapters`). All methods take the same arguments on all ranks.

    Requests for many adapters are computed together. The gradients of an adapter accumulate until its optimizer step.

    Args:
        config: The configuration of the role.
        ranks: The global ranks that run its engine; None uses all ranks.
    """

    trainable: ClassVar[bool] = False

    def __init__(self, config: WorkerConfig, ranks: Sequence[int] | None = None) -> None:
        if not config.model.max_adapters:
            raise ConfigError(
                "model.max_adapters=0: an AdapterWorker creates adapters while it runs; set model.max_adapters to their maximum number"
            )
        super().__init__(config, ranks)
        self._trainer: AdapterTrainer | None = None

    @property
    def trainer(self) -> AdapterTrainer:
        """The trainer of the engine's adapters."""
        if self._trainer is None:
            self._trainer = AdapterTrainer(self.engine)
        return self._trainer

    @register("all")
    def create_adapter(self, name: str, config: AdapterConfig) -> None:
        """Create an adapter.

        Raises:
            ConfigError: The name is taken, the maximum number of adapters is reached, or the settings do not fit the model.
        """
        self.trainer.create(name, config)

    @register("all")
    def drop_adapter(self, name: str) -> None:
        """Free an adapter, with its gradients and moments.

        Raises:
            ConfigError: There is no adapter with this name.
        """
        self.trainer.drop(name)

    @register("all")
    def adapter_names(self) -> list[str]:
        """Return the names of the adapters in order of creation."""
        return list(self.trainer.bank.names)

    @register("all", changes_weights=True)
    def forward_backward(self, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
        """Compute the losses of requests, and add their gradients to those of their adapters; see `AdapterTrainer.forward_backward`.

        Each request is divided over the data-parallel ranks independently, so its result does not depend on the other requests.

        Args:
            requests: The requests; those of one adapter are processed in order.

        Returns:
            The reply to each request.
        """
        return compute_requests(self.trainer, requests)

    @register("all", changes_weights=True)
    def optim_step(self, name: str, optim: OptimConfig) -> AdapterStep:
        """Run an optimizer step of an adapter with the gradients accumulated since the last one; see `AdapterSlot.optim_step`.

        Raises:
            ConfigError: There is no such adapter, or the optimizer is not AdamW.
            NonFiniteError: The gradient is not finite. It was dropped, and the adapter is unchanged.
        """
        return self.trainer.optim_step(name, optim)

    @register("all")
    def save_adapter(self, name: str, root: str, extra: Mapping[str, Any] | None = None) -> str:
        """Write the checkpoint `root/step-XXXXXXXX` of an adapter and return its folder; see `adapter_checkpoint.save_adapter`."""
        return self.trainer.save(name, root, extra)

    @register("all", changes_weights=True)
    def load_adapter(self, name: str, folder: str, *, optimizer: bool = True) -> AdapterConfig:
        """Load a checkpoint into an adapter. If there is no adapter with this name, it is created with the settings of the checkpoint.

        Args:
            name: The name of the adapter.
            folder: The folder of the checkpoint, or its URL.
            optimizer: Whether to load the moments and the step count as well; otherwise they start from zero.

        Returns:
            The settings of the adapter.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another model or to an adapter with other settings. If the adapter was
                created by this call, it is dropped again.
        """
        bank, created = self.trainer.bank, False
        if name not in bank:
            # Every rank reads the folder; if that fails on one rank, no rank creates the adapter.
            with self.engine.topology.collective_errors():
                settings = adapter_config_of(folder)
            self.trainer.create(name, settings)
            created = True
        try:
            self.trainer.load(name, folder, optimizer=optimizer)
        except BaseException:
            if created:
                self.trainer.drop(name)
            raise
        return bank[name].config


def compute_requests(trainer: CallTrainer, requests: Sequence[AdapterRequest]) -> list[AdapterReply]:
    """Compute requests, and return the reply to each. Collective.

    The documents of each request are divided over the data-parallel ranks independently of other requests.

    Args:
        trainer: The trainer of the models that the requests name.
        requests: The requests.
    """
    engine = trainer.engine
    topology = engine.topology
    ratio = engine.model_shape.attention_ratio
    # All ranks have all requests and compute the same assignment of documents, so no documents have to be sent.
    assigned = [balance(request.batch.lengths, topology.dp_size, ratio=ratio) for request in requests]
    calls = [
        TrainingCall(
            adapter=request.adapter,
            # A rank without documents takes part too, because the call is collective.
            batch=request.batch.select(rows) if (rows := of_request[topology.dp_rank]) else None,
            loss=request.loss,
            forward_only=request.forward_only,
            top_k=request.top_k,
        )
        for request, of_request in zip(requests, assigned, strict=True)
    ]
    results = trainer.forward_backward(calls)
    local = [_outputs(result) for result in results] if topology.is_output_rank else None
    # The ranks of a data-parallel shard compute the same outputs, so only one of them, its output rank, contributes. All
    # ranks gather the outputs, because all of them return the replies.
    by_shard = [part for part in topology.all_gather_object(local) if part is not None]
    return [
        _reply(request, result, of_request, [part[number] for part in by_shard])
        for number, (request, result, of_request) in enumerate(zip(requests, results, assigned, strict=True))
    ]


def _reply(
    request: AdapterRequest,
    result: TrainingCallResult,
    assigned: Sequence[Sequence[int]],
    parts: Sequence[Mapping[str, Tensor]],
) -> AdapterReply:
    """Build the reply to a request, with the outputs of all data-parallel ranks in the order of its documents."""
    if result.error is not None:
        return AdapterReply(loss=result.loss, error=str(result.error))
    outputs: dict[str, Tensor] = {}
    # Each shard has the outputs of its documents; together, they cover the batch.
    for rows, part in zip(assigned, parts, strict=True):
        for name, value in part.items():
            whole = outputs.setdefault(name, value.new_zeros(request.batch.num_tokens, *value.shape[1:]))
            whole[request.batch.token_index(rows)] = value
    return AdapterReply(
        loss=result.loss,
        metrics=dict(result.metrics),
        log_probs=outputs.get("log_probs"),
        top_tokens=outputs.get("top_tokens"),
        top_log_probs=outputs.get("top_log_probs"),
    )


def _outputs(result: TrainingCallResult) -> dict[str, Tensor]:
    """Return a call's outputs for the tokens of this rank's documents; empty if this rank has no documents."""
    outputs = {"log_probs": result.log_probs, "top_tokens": result.top_tokens, "top_log_probs": result.top_log_probs}
    return {name: value for name, value in outputs.items() if value is not None}
