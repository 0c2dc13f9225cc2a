"""The requests of the protocol that are JSON: their fields, and what they ask for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ...engine.adapters.config import TARGETS, AdapterConfig, Target
from ...engine.config import OptimConfig
from ...engine.errors import ConfigError
from ...generation.options import SamplingOptions
from ...losses.traced_loss import TracedLoss
from .errors import BadRequestError
from .paths import CheckpointPath, checked_name

_ADAM_NAMES = {
    "optim.lr": "learning_rate",
    "optim.betas": "[beta1, beta2]",
    "optim.eps": "eps",
    "optim.weight_decay": "weight_decay",
    "optim.clip_grad_norm": "grad_clip_norm",
    "set it to null for no clipping": "0 for no clipping",
    "or null for no clipping": "or 0 for no clipping",
}
"""The settings of the optimizer in messages, and what clients call them."""
S = TypeVar("S", bound=msgspec.Struct)
ALPHA = 32.0
"""The alpha of all adapters, whatever their rank: it is not part of the protocol, and the client's learning rates are made for this one."""
DEFAULT_RANK = 32
MOST_SEED = 2**63 - 1


# msgspec ignores fields that a class does not have, so newer clients may send more.
class CreateSession(msgspec.Struct):
    """A client begins."""

    tags: list[str] = []
    user_metadata: Any = None
    project_id: str | None = None
    display_name: str | None = None


class SessionRequest(msgspec.Struct):
    """A client is still there."""

    session_id: str


class LoraSettings(msgspec.Struct):
    """The adapter of a new model."""

    rank: int = DEFAULT_RANK
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFamily(msgspec.Struct):
    """The optimizer of a new model."""

    type: str = "adam"


class CreateModel(msgspec.Struct):
    """Create a model."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerFamily | None = None
    user_metadata: Any = None


class ModelRequest(msgspec.Struct):
    """A question about a model."""

    model_id: str


class NumberedRequest(msgspec.Struct):
    """What says where a request stands, whatever else may be wrong with it."""

    model_id: str
    seq_id: int
    path: Any = None


class AnyTarget(msgspec.Struct):
    """Whether a request is about a model that there is."""

    model_id: Any = None


class AdamParams(msgspec.Struct):
    """The settings of an optimizer step."""

    # The protocol's defaults, which are not those of torch.
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(msgspec.Struct):
    """Make an optimizer step."""

    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(msgspec.Struct):
    """Save a model, to continue from, to sample from, or to export."""

    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: float | None = None
    overwrite: bool = False
    user_metadata: Any = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(msgspec.Struct):
    """Load a checkpoint: into a model, or into a new one."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Any = None


class CreateSamplingSession(msgspec.Struct):
    """Create a sampler."""

    session_id: str
    sampling_session_seq_id: int
    model_path: str | None = None
    base_model: str | None = None


class SamplerRequest(msgspec.Struct):
    """A request that names a sampler."""

    sampling_session_id: str


class LossInput(msgspec.Struct):
    """An input of a loss: a number, or one or several of each token."""

    name: str
    rank: int


class LossGraph(msgspec.Struct):
    """The operations of a loss."""

    nodes: list[dict[str, Any]]
    format: int = 1


class CreateCustomLoss(msgspec.Struct):
    """Create a loss."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[LossInput]
    graph: LossGraph


class PromptChunk(msgspec.Struct):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[int] = []
    data: str = ""
    format: str = ""
    expected_tokens: int | None = None


class SamplePrompt(msgspec.Struct):
    """A prompt."""

    chunks: list[PromptChunk]


class SampleParams(msgspec.Struct):
    """How to sample."""

    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop: str | list[str | int] | None = None


class TokenMatrix(msgspec.Struct):
    """Token ids, dense or, with the indices of rows and columns, sparse (CSR)."""

    data: list[int]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(msgspec.Struct):
    """Sample responses."""

    sampling_session_id: str
    seq_id: int
    prompt: SamplePrompt
    sampling_params: SampleParams
    num_samples: int = 1
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: TokenMatrix | None = None

    @property
    def completions(self) -> int:
        """The number of completions that are generated, including those of one token that are alternatives in the prompt."""
        tokens = sum(len(chunk.tokens) for chunk in self.prompt.chunks)
        return self.num_samples + max(0, self.prompt_alt_tokens_k) * max(0, tokens - 1)


class RetrieveFuture(msgspec.Struct):
    """Ask for a result."""

    request_id: str
    allow_metadata_only: bool = False


class SamplerTarget(msgspec.Struct):
    """The requests of a sampler, or of a copy of it in another process."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFutures(msgspec.Struct):
    """Ask which requests of a sampler are done."""

    target: SamplerTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class PathRequest(msgspec.Struct):
    """A question about a checkpoint."""

    tinker_path: str


class TimeToLive(msgspec.Struct):
    """For how long a checkpoint is kept."""

    ttl_seconds: float | None = None


def parse(body: bytes, kind: type[S]) -> S:
    """Return a request.

    Raises:
        BadRequestError: It is not JSON, or lacks a field.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    # msgspec raises the second for JSON that is nested too deeply, and the third for text that is not UTF-8.
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise BadRequestError(f"the body is not a valid {kind.__name__}: {e}", status=422) from e


def encoded(request: msgspec.Struct) -> str:
    """Return a request as `parse` reads it, without anything that it does not know."""
    return msgspec.json.encode(request).decode()


@dataclass(frozen=True)
class FullTraining:
    """The settings of a model whose weights are all trained, by the names that `AdapterConfig` has for those of an adapter."""

    rank: int = 0
    targets: tuple[str, ...] = TARGETS


def model_settings(settings: LoraSettings | None, seed: int, *, is_full: bool) -> AdapterConfig | FullTraining:
    """Return the settings of a new model.

    Args:
        settings: The settings of the protocol; None for the service's.
        seed: The seed, if they have none.
        is_full: Whether the service trains all weights.

    Raises:
        ConfigError: They cannot be used.
    """
    if is_full:
        if settings is not None and (
            settings.rank or not (settings.train_attn and settings.train_mlp and settings.train_unembed)
        ):
            raise ConfigError(
                f"rank={settings.rank}: this service trains all weights of the model (--full), which is rank=0, with train_attn, train_mlp and "
                "train_unembed"
            )
        return FullTraining()
    settings = settings or LoraSettings()
    if settings.rank == 0:
        raise ConfigError(
            "rank=0, which stands for training all weights: this service trains adapters. Use a rank of at least 1, or start a service with --full"
        )
    flags: Mapping[Target, bool] = {
        "attention": settings.train_attn,
        "mlp": settings.train_mlp,
        "unembedding": settings.train_unembed,
    }
    targets = tuple(target for target, trained in flags.items() if trained)
    if not targets:
        raise ConfigError("train_attn, train_mlp and train_unembed are all false, so that there is nothing to train; set one")
    chosen = seed if settings.seed is None else settings.seed
    if not 0 <= chosen <= MOST_SEED:
        raise ConfigError(f"seed={chosen}; it must be from 0 to {MOST_SEED}")
    return AdapterConfig(rank=settings.rank, alpha=ALPHA, targets=targets, seed=chosen)


def optim_of(request: OptimStep) -> OptimConfig:
    """Return the settings of an optimizer step.

    Raises:
        ConfigError: They cannot be used.
    """
    if request.optimizer_params is not None:
        kind = str(request.optimizer_params.get("type"))[:100]
        raise ConfigError(f"optimizer_params of type {kind!r}: this service trains with adam; send adam_params")
    params = request.adam_params or AdamParams()
    if params.grad_clip_norm < 0:
        raise ConfigError(f"grad_clip_norm={params.grad_clip_norm}; it must be a norm, or 0 for no clipping")
    try:
        return OptimConfig(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            # In the protocol 0 stands for no clipping, which is None in the engine.
            clip_grad_norm=params.grad_clip_norm or None,
        )
    except ConfigError as e:
        text = str(e)
        # The message names settings of the engine, which the client does not know.
        for ours, theirs in _ADAM_NAMES.items():
            text = text.replace(ours, theirs)
        raise ConfigError(text) from e


def checkpoint_path(request: SaveWeights, kind: str) -> CheckpointPath:
    """Return the path of a checkpoint that is to be saved.

    Raises:
        BadRequestError: Its name cannot be used.
    """
    if request.path is None:
        raise BadRequestError("path is missing; give the checkpoint a name")
    if request.age_encryption_recipients:
        raise BadRequestError("age_encryption_recipients: this service does not encrypt checkpoints; leave it out")
    if request.ttl_seconds is not None and not 0 < request.ttl_seconds < 1e10:
        raise BadRequestError(f"ttl_seconds={request.ttl_seconds}; it must be above 0, or null to keep the checkpoint")
    return CheckpointPath(request.model_id, kind, checked_name(request.path))


def loss_of_graph(request: CreateCustomLoss) -> TracedLoss:
    """Return the loss that a request describes.

    Raises:
        ConfigError: Its graph cannot be run here.
    """
    if request.graph.format != 1:
        raise ConfigError(f"the graph has format {request.graph.format}; this service reads format 1")
    inputs = tuple((one.name, one.rank) for one in request.inputs)
    return TracedLoss(name=request.name, inputs=inputs, graph=json.dumps(request.graph.nodes))


def sampling_of(request: SampleBody, adapter: str, room: int) -> tuple[SamplingOptions, list[str]]:
    """Return the options of a sample request, and the texts that end a response.

    Args:
        request: The request.
        adapter: The name of the adapter in the generator; empty for the model without any.
        room: The largest number of tokens of a response that fits behind the prompt.

    Raises:
        ConfigError: They cannot be used.
    """
    params = request.sampling_params
    texts: list[str] = []
    tokens: tuple[int, ...] = ()
    if isinstance(params.stop, str):
        texts = [params.stop]
    elif params.stop:
        texts = [stop for stop in params.stop if isinstance(stop, str)]
        tokens = tuple(stop for stop in params.stop if isinstance(stop, int))
    if any(not text for text in texts):
        raise ConfigError("stop has an empty text, which every response contains")
    if params.top_k == 0 or params.top_k < -1:
        raise ConfigError(f"top_k={params.top_k}; it must be above 0, or -1 for all tokens")
    if params.max_tokens is not None and params.max_tokens > room > 0:
        raise ConfigError(f"max_tokens={params.max_tokens}: behind this prompt the service has room for {room} tokens")
    options = SamplingOptions(
        max_tokens=params.max_tokens if params.max_tokens is not None else max(room, 1),
        temperature=params.temperature,
        top_p=params.top_p,
        # Here 0 stands for all tokens, which is -1 in the protocol.
        top_k=max(params.top_k, 0),
        stop_tokens=tokens,
        # An empty list ends at nothing; without one, at the tokens of the model.
        ignore_eos=params.stop is not None,
        seed=params.seed,
        evaluation=True,
        adapter=adapter,
    )
    return options, texts
