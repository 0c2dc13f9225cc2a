"""Every setting of an engine, in one vocabulary for all backends. Imports no torch.

A field's `help` metadata is its line in `--help` and in the configuration reference. Durations are in steps, sizes in
tokens unless the name says otherwise.
"""

import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from .errors import ConfigError

DType = Literal["float32", "bfloat16", "float16", "float64"]
OffloadTarget = Literal["none", "host", "disk"]
Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
NonFinitePolicy = Literal["raise", "skip"]
Recompute = Literal["none", "full", "selective"]


def setting(default: Any = MISSING, help: str = "", *, factory: Callable[[], Any] | None = None, path: bool = False) -> Any:
    """A dataclass field with its help line.

    Args:
        default: of the field.
        help: its line.
        factory: makes nested and mutable defaults.
        path: it names files or folders; `expand_paths` expands `~` and `$VARIABLE` in it.
    """
    metadata = {"help": help, "path": path}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_least(name: str, value: float | None, least: int) -> None:
    """Check a lower bound.

    Args:
        name: The setting's name, for the message.
        value: Its value; None where it is unset, which passes.
        least: The smallest value it may have.

    Raises:
        ConfigError: The value is smaller.
    """
    if value is not None and value < least:
        raise ConfigError(f"{name}={value}; it must be at least {least}")


def expand_path(value: str, name: str) -> str:
    """A path with `~`, `~user` and `$VARIABLE` replaced, as a shell does it, but for `$` in the name of a file that exists. A shell
    itself does not expand what stands behind `key=`.

    Args:
        value: the path; a URL or a Hugging Face name may stand there too.
        name: of the setting.

    Raises:
        ConfigError: a user or a variable does not exist, or a variable is empty.
    """
    expanded = os.path.expanduser(value)
    if value.startswith("~") and expanded == value:
        raise ConfigError(f"{name}={value}: there is no user {value.partition('/')[0][1:]!r}; give the path in full")
    if "$" not in expanded or os.path.exists(expanded):
        return expanded
    for variable in re.findall(r"\$(\w+|\{[^}]*\})", expanded):
        # An empty one would leave another path than anybody meant.
        if not os.environ.get(variable.strip("{}")):
            raise ConfigError(
                f"{name}={value}: the environment has no variable ${variable}, or an empty one; set it, or give the path in full"
            )
    return os.path.expandvars(expanded)


def expand_paths(settings: Any, prefix: str) -> None:
    """Expand a frozen dataclass's path settings in place: for its `__post_init__`.

    Args:
        settings: the object.
        prefix: of its names, for messages.

    Raises:
        ConfigError: see `expand_path`.
    """
    for f in fields(settings):
        value, name = getattr(settings, f.name), f"{prefix}.{f.name}"
        if not f.metadata.get("path") or value is None:
            continue
        single = isinstance(value, str | os.PathLike)
        found = tuple(expand_path(os.fspath(v), name) for v in ([value] if single else value))
        object.__setattr__(settings, f.name, found[0] if single else found)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Off while `rank` is 0."""

    rank: int = setting(0, "rank of the adapters; 0 trains the model itself")
    alpha: float = setting(16.0, "adapters are scaled by alpha / rank")
    dropout: float = setting(0.0, "dropout on the input of the adapters while training")
    targets: tuple[str, ...] = setting(
        ("all-linear",), "names of the linear layers that get an adapter; all-linear is every one but the head"
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, how its weights come to be, and what its head returns."""

    path: str = setting("", "folder with config.json, tokenizer and safetensors, or a Hugging Face name", path=True)
    init: Literal["weights", "random"] = setting("weights", "read the weights, or draw them from the config and the seed")
    head: Literal["lm", "value"] = setting("lm", "lm: a distribution over tokens; value: one number per token")
    lora: LoraConfig = setting(factory=LoraConfig, help="low-rank adapters")
    router_aux_loss_coef: float | None = setting(
        None, "weight of a mixture-of-experts router's balancing loss; null follows the model's own config"
    )
    added_tokens: tuple[str, ...] = setting(
        (), "tokens that the tokenizer learns; the embeddings grow where they must, by the mean of the old rows"
    )
    chat_template: str | None = setting(
        None, "file with a Jinja chat template to use, and to export, instead of the tokenizer's", path=True
    )
    freeze: tuple[str, ...] = setting((), "parameters that are not trained, as patterns with * over Hugging Face names")
    quantization: Literal["none", "int8", "nf4"] = setting("none", "number format of a frozen base under adapters (QLoRA)")
    trust_remote_code: bool = setting(False, "run Python code that comes with the model folder")

    def __post_init__(self) -> None:
        expand_paths(self, "model")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the processes share a model and its data; the product of the axes is the number of processes."""

    dp_replicate: int = setting(1, "data-parallel replicas, each with a full set of (sharded) parameters")
    dp_shard: int | None = setting(None, "data-parallel ranks that share one set of parameters; null: what is left")
    cp: int = setting(1, "context parallel: ranks that share every sequence by Ulysses all-to-alls")
    tp: int = setting(1, "tensor parallel: ranks that share every matrix")
    tp_sequence: bool = setting(False, "with tp: norms and dropouts hold only their part of the sequence")
    pp: int = setting(1, "pipeline parallel: ranks that hold successive layers")
    vpp: int = setting(1, "with pp: interleaved chunks of layers on each rank")
    ep: int = setting(1, "expert parallel: ranks that share the experts of a mixture")
    etp: int = setting(1, "tensor parallel inside an expert")

    @property
    def token_multiple(self) -> int:
        """What the tokens of a micro-batch must be a multiple of, so that the ranks that share them hold equal slices."""
        return self.cp * (self.tp if self.tp_sequence else 1)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats."""

    params: DType = setting("float32", "stored parameters and optimizer state")
    compute: DType = setting("float32", "matrix products and activations")
    reduce: DType = setting("float32", "gradient reduction between ranks")


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """Token budgets: hard bounds on the packed length of one forward pass, over all of its context-parallel ranks."""

    max_tokens: int = setting(8192, "tokens in a training micro-batch, at most")
    infer_max_tokens: int | None = setting(None, "tokens in an inference micro-batch; null: twice max_tokens")


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where state rests. Parameters stream to the device layer by layer; moments come for the optimizer's step."""

    params: OffloadTarget = setting("none", "resting place of the sharded parameters and gradients")
    optimizer: OffloadTarget = setting("none", "resting place of the optimizer's moments between steps")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What runs the model, and how."""

    backend: str = setting("fsdp", "name of the engine; see `drivetrain backends`")
    parallel: ParallelConfig = setting(factory=ParallelConfig, help="parallel layout")
    precision: PrecisionConfig = setting(factory=PrecisionConfig, help="number formats")
    micro_batch: MicroBatchConfig = setting(factory=MicroBatchConfig, help="token budgets")
    recompute: Recompute = setting("none", "activations that the backward pass computes again instead of keeping")
    compile: bool = setting(False, "torch.compile each layer")
    offload: OffloadConfig = setting(factory=OffloadConfig, help="state that rests outside the device")
    non_finite: NonFinitePolicy = setting("raise", "a NaN or infinite loss or gradient: stop, or skip that step")
    seed: int = setting(0, "seed of random weights, new heads and adapters, and dropout")
    deterministic: bool = setting(False, "ask torch for deterministic kernels; an operation without one fails")
    options: Any = setting(None, "settings that only this backend has")

    def check(self) -> None:
        """Check these settings by themselves; the layout is checked when the number of processes is known.

        Raises:
            ConfigError: Names the setting and its value.
        """
        check_least("engine.micro_batch.max_tokens", self.micro_batch.max_tokens, 1)
        check_least("engine.micro_batch.infer_max_tokens", self.micro_batch.infer_max_tokens, 1)
        check_least("engine.seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning-rate schedule; norms and biases are never decayed."""

    name: Literal["adamw", "sgd"] = setting("adamw", "adamw (Loshchilov & Hutter 2019), or sgd without momentum")
    lr: float = setting(1e-5, "peak learning rate")
    betas: tuple[float, float] = setting((0.9, 0.95), "decay of AdamW's first and second moment")
    eps: float = setting(1e-8, "AdamW's term against division by zero")
    weight_decay: float = setting(0.0, "decoupled weight decay of matrices and embeddings")
    clip_grad_norm: float | None = setting(1.0, "largest norm of the whole gradient; null: no clipping")
    schedule: Schedule = setting("constant", "shape of the learning rate after warm-up")
    warmup_steps: int = setting(0, "steps of linear warm-up")
    warmup_ratio: float = setting(0.0, "warm-up as a share of all steps; used when warmup_steps is 0")
    min_lr_ratio: float = setting(0.0, "lowest learning rate as a share of lr")
    decay_ratio: float = setting(0.2, "wsd only: share of all steps in the final decay")

    def check(self, total_steps: int | None) -> None:
        """Check these settings by themselves.

        Args:
            total_steps: The steps of the whole run; None where no schedule needs to know.

        Raises:
            ConfigError: Names the setting and its value.
        """
        for name in ("linear", "cosine", "wsd"):
            if self.schedule == name and total_steps is None:
                raise ConfigError(f"optim.schedule={name} needs a known number of steps; use constant or inverse_sqrt")
        if self.warmup_ratio and not self.warmup_steps and total_steps is None:
            raise ConfigError(f"optim.warmup_ratio={self.warmup_ratio} needs a known number of steps; set optim.warmup_steps")
        check_least("optim.warmup_steps", self.warmup_steps, 0)
        for name, value, low, high in (
            ("lr", self.lr, 0, math.inf),
            ("eps", self.eps, 0, math.inf),
            ("weight_decay", self.weight_decay, 0, math.inf),
            ("min_lr_ratio", self.min_lr_ratio, 0, 1),
            ("decay_ratio", self.decay_ratio, 0, 1),
            ("warmup_ratio", self.warmup_ratio, 0, 1),
            ("betas", self.betas[0], 0, 1),
            ("betas", self.betas[1], 0, 1),
        ):
            if not low <= value <= high:
                raise ConfigError(f"optim.{name}={value}; it must be from {low} to {high}")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ConfigError(f"optim.clip_grad_norm={self.clip_grad_norm}; use a positive norm, or null for no clipping")
