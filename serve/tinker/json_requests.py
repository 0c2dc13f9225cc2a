"""The JSON requests of the protocol, and their conversion to settings of the engine, the generator and the losses."""

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
"""Replacements in error messages: names of optimizer settings in the engine, and the names that clients use."""
S = TypeVar("S", bound=msgspec.Struct)
ALPHA = 32.0
"""The alpha of all adapters, for any rank. Alpha is not part of the protocol, and the client's recommended learning rates assume this value."""
DEFAULT_RANK = 32
MOST_SEED = 2**63 - 1


# msgspec ignores unknown fields, so requests of newer clients may have more fields.
class CreateSession(msgspec.Struct):
    """Create a session."""

    tags: list[str] = []
    user_metadata: Any = None
    project_id: str | None = None
    display_name: str | None = None


class SessionRequest(msgspec.Struct):
    """A heartbeat of a session."""

    session_id: str


class LoraSettings(msgspec.Struct):
    """The settings of a new model's adapter."""

    rank: int = DEFAULT_RANK
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerFamily(msgspec.Struct):
    """The optimizer type of a new model."""

    type: str = "adam"


class CreateModel(msgspec.Struct):
    """Create a model with a new adapter."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerFamily | None = None
    user_metadata: Any = None


class ModelRequest(msgspec.Struct):
    """A request for information about a model."""

    model_id: str


class NumberedRequest(msgspec.Struct):
    """The fields of a model's request that must be valid for it to be accepted. Errors in other fields are reported in its result."""

    model_id: str
    seq_id: int
    path: Any = None


class LoadTarget(msgspec.Struct):
    """The field that tells whether load_weights is for an existing model."""

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
    """Run an optimizer step."""

    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(msgspec.Struct):
    """Save the weights of a model, for training, for sampling or for export."""

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
    """Load a checkpoint into an existing model (`model_id`, `seq_id`) or into a new one (`session_id`, `model_seq_id`)."""

    path: str
    optimizer: bool = False
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Any = None


class CreateSamplingSession(msgspec.Struct):
    """Create a sampler of a checkpoint or of the base model."""

    session_id: str
    sampling_session_seq_id: int
    model_path: str | None = None
    base_model: str | None = None


class SamplerRequest(msgspec.Struct):
    """A request that names a sampler."""

    sampling_session_id: str


class LossInput(msgspec.Struct):
    """An input of a custom loss. Its rank is 0 for a number per document, 1 for a number per token, and 2 for several per token."""

    name: str
    rank: int


class LossGraph(msgspec.Struct):
    """The traced operations of a custom loss."""

    nodes: list[dict[str, Any]]
    format: int = 1


class CreateCustomLoss(msgspec.Struct):
    """Create a custom loss."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[LossInput]
    graph: LossGraph


class PromptChunk(msgspec.Struct):
    """A chunk of a prompt: token ids, or an image."""

    type: str = "encoded_text"
    tokens: list[int] = []
    data: str = ""
    format: str = ""
    expected_tokens: int | None = None
    override_dimensions: Any = None


class SamplePrompt(msgspec.Struct):
    """A prompt."""

    chunks: list[PromptChunk]


class SampleParams(msgspec.Struct):
    """The sampling parameters."""

    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop: str | list[str | int] | None = None


class TokenMatrix(msgspec.Struct):
    """A matrix of token ids: dense or, if it has index arrays, sparse (CSR)."""

    data: list[int]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class SampleBody(msgspec.Struct):
    """Sample completions of a prompt."""

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
        """The number of completions to generate, including the completions of one token that are alternatives to prompt tokens."""
        tokens = sum(len(chunk.tokens) for chunk in self.prompt.chunks)
        return self.num_samples + max(0, self.prompt_alt_tokens_k) * max(0, tokens - 1)


class RetrieveFuture(msgspec.Struct):
    """Request the result of a future."""

    request_id: str
    allow_metadata_only: bool = False


class SamplerTarget(msgspec.Struct):
    """A sampler, or a copy of it in another process of the client, which has its own range of sequence numbers."""

    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveFutures(msgspec.Struct):
    """Request the list of a sampler's finished requests."""

    target: SamplerTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class PathRequest(msgspec.Struct):
    """A request for information about a checkpoint."""

    tinker_path: str


class TimeToLive(msgspec.Struct):
    """The new time to live of a checkpoint; None to keep it."""

    ttl_seconds: float | None = None


def parse(body: bytes, kind: type[S]) -> S:
    """Parse the body of a request.

    Args:
        body: The body.
        kind: The class of the request.

    Raises:
        BadRequestError: The body is not valid JSON, lacks a field, or has a field of the wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    # msgspec raises RecursionError for JSON that is nested too deeply, and UnicodeDecodeError for text that is not UTF-8.
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise BadRequestError(f"the body is not a valid {kind.__name__}: {e}", status=422) from e


def encoded(request: msgspec.Struct) -> str:
    """Return a request as JSON, without the unknown fields that the client may have sent."""
    return msgspec.json.encode(request).decode()


@dataclass(frozen=True)
class FullTraining:
    """The settings of a model whose weights are all trained. The field names are those of `AdapterConfig`."""

    rank: int = 0
    targets: tuple[str, ...] = TARGETS


def model_settings(settings: LoraSettings | None, seed: int, *, is_full: bool) -> AdapterConfig | FullTraining:
    """Return the settings of a new model.

    Args:
        settings: The settings in the request; None for the defaults.
        seed: The seed to use if the settings have none.
        is_full: Whether the service trains all weights.

    Raises:
        ConfigError: The settings are not valid or not supported.
    """
    if is_full:
        if settings is not None and (
            settings.rank or not (settings.train_attn and settings.train_mlp and settings.train_unembed)
        ):
            raise ConfigError(
                f"rank={settings.rank}, train_attn={settings.train_attn}, train_mlp={settings.train_mlp}, "
                f"train_unembed={settings.train_unembed}: this service trains all weights of the model (--full); use rank=0, with train_attn, "
                "train_mlp and train_unembed all true"
            )
        return FullTraining()
    settings = settings or LoraSettings()
    if settings.rank == 0:
        raise ConfigError(
            "rank=0 means training all weights, but this service trains adapters; use a rank of at least 1, or a service that was started with "
            "--full"
        )
    flags: Mapping[Target, bool] = {
        "attention": settings.train_attn,
        "mlp": settings.train_mlp,
        "unembedding": settings.train_unembed,
    }
    targets = tuple(target for target, trained in flags.items() if trained)
    if not targets:
        raise ConfigError(
            "train_attn, train_mlp and train_unembed are all false, so there is nothing to train; set at least one"
        )
    chosen = seed if settings.seed is None else settings.seed
    if not 0 <= chosen <= MOST_SEED:
        raise ConfigError(f"seed={chosen} is out of range; it must be from 0 to {MOST_SEED}")
    return AdapterConfig(rank=settings.rank, alpha=ALPHA, targets=targets, seed=chosen)


def optim_of(request: OptimStep) -> OptimConfig:
    """Return the settings of an optimizer step.

    Raises:
        ConfigError: The settings are not valid or not supported.
    """
    if request.optimizer_params is not None:
        kind = str(request.optimizer_params.get("type"))[:100]
        raise ConfigError(f"optimizer_params has type {kind!r}; this service supports adam only, so send adam_params instead")
    params = request.adam_params or AdamParams()
    if params.grad_clip_norm < 0:
        raise ConfigError(f"grad_clip_norm={params.grad_clip_norm} is out of range; it must be above 0, or 0 for no clipping")
    try:
        return OptimConfig(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            # No clipping is 0 in the protocol, and None in the engine.
            clip_grad_norm=params.grad_clip_norm or None,
        )
    except ConfigError as e:
        text = str(e)
        # The message has the engine's names of the settings; clients use other names.
        for ours, theirs in _ADAM_NAMES.items():
            text = text.replace(ours, theirs)
        raise ConfigError(text) from e


def checkpoint_path(request: SaveWeights, kind: str) -> CheckpointPath:
    """Return the path under which a request saves a checkpoint.

    Args:
        request: The request.
        kind: The kind of the checkpoint, one of `paths.KINDS`.

    Raises:
        BadRequestError: The name is missing or not valid, or another setting is not valid or not supported.
    """
    if request.path is None:
        raise BadRequestError("path is missing; set it to a name for the checkpoint")
    if request.age_encryption_recipients:
        raise BadRequestError(
            "age_encryption_recipients is not supported, because this service does not encrypt checkpoints; omit it"
        )
    if request.ttl_seconds is not None and not 0 < request.ttl_seconds < 1e10:
        raise BadRequestError(
            f"ttl_seconds={request.ttl_seconds} is out of range; use a number above 0 and below 1e10, or null to keep the checkpoint"
        )
    return CheckpointPath(request.model_id, kind, checked_name(request.path))


def loss_of_graph(request: CreateCustomLoss) -> TracedLoss:
    """Return the custom loss that a request describes.

    Raises:
        ConfigError: The graph has an unknown format or an operation that is not supported.
    """
    if request.graph.format != 1:
        raise ConfigError(f"graph.format={request.graph.format} is not supported; send format 1")
    inputs = tuple((one.name, one.rank) for one in request.inputs)
    return TracedLoss(name=request.name, inputs=inputs, graph=json.dumps(request.graph.nodes))


def sampling_of(request: SampleBody, adapter: str, room: int) -> tuple[SamplingOptions, list[str]]:
    """Return the generator's options for a sample request, and the texts that end a completion.

    Args:
        request: The request.
        adapter: The name of the adapter in the generator; empty for the base model.
        room: The maximum number of tokens in a completion of the prompt; 0 if it is unknown.

    Raises:
        ConfigError: A sampling parameter is not valid.
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
        raise ConfigError("stop contains an empty text, which would end every completion at once; remove it")
    if params.top_k == 0 or params.top_k < -1:
        raise ConfigError(f"top_k={params.top_k} is out of range; it must be above 0, or -1 for all tokens")
    if params.max_tokens is not None and params.max_tokens > room > 0:
        raise ConfigError(
            f"max_tokens={params.max_tokens} is more than a completion of this prompt can have, {room} tokens; lower it, or shorten the prompt"
        )
    options = SamplingOptions(
        max_tokens=params.max_tokens if params.max_tokens is not None else max(room, 1),
        temperature=params.temperature,
        top_p=params.top_p,
        # All tokens is -1 in the protocol, and 0 in the generator.
        top_k=max(params.top_k, 0),
        stop_tokens=tokens,
        # Without `stop`, completions end at the model's end-of-sequence tokens; with it (even empty), only at `stop`.
        ignore_eos=params.stop is not None,
        seed=params.seed,
        evaluation=True,
        adapter=adapter,
    )
    return options, texts
