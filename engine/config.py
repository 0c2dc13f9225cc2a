"""All settings of an engine, shared by all backends.

The `help` metadata of a field is its line in `--help` and in the configuration reference. Durations are in steps and sizes in
tokens unless the name says otherwise.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from itertools import zip_longest
from types import UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from .errors import ConfigError
from .model_types import LM, head_names

DType = Literal["float32", "bfloat16", "float16", "float64"]
OffloadTarget = Literal["none", "host", "disk"]
Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]
NonFinitePolicy = Literal["raise", "skip"]
SharePrefixes = Literal["auto", "on", "off"]
Recompute = Literal["auto", "none", "full", "selective"]
Compute = Literal["auto", "float32", "bfloat16", "float16", "float64"]

MOST_SEED = 2**63 - 1
"""The largest seed that all random number generators take."""
MOST_PROCESSES = 4096
"""The most processes on one machine or in one pool; a larger number is treated as a typo."""


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    path: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a dataclass field with a help line.

    Args:
        default: The default value of the field.
        help: The help line.
        factory: The factory of a nested or mutable default.
        path: Whether the setting is a path or a list of paths, in which `expand_paths` expands `~` and `$VARIABLE`.
        least: The smallest plausible number above 0; None for no bound.
        most: The largest plausible number; None for no bound.
    """
    metadata = {"help": help, "path": path, "least": least, "most": most}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_least(name: str, value: float | None, least: int) -> None:
    """Check a lower bound.

    Args:
        name: The setting's name, for the message.
        value: The setting's value; None (unset) is accepted.
        least: The smallest allowed value.

    Raises:
        ConfigError: The value is smaller.
    """
    if value is not None and value < least:
        raise ConfigError(f"{name}={value}; it must be at least {least}")


def expand_path(value: str, name: str) -> str:
    """Expand `~`, `~user` and `$VARIABLE` in a path, which a shell does not do in the value of `key=value`.

    The path of an existing file with a `$` in its name is left unchanged.

    Args:
        value: The path, or a URL or a Hugging Face name.
        name: The name of the setting, for messages.

    Raises:
        ConfigError: A user or a variable does not exist, or a variable is empty.
    """
    expanded = os.path.expanduser(value)
    if value.startswith("~") and expanded == value:
        raise ConfigError(f"{name}={value}: there is no user {value.partition('/')[0][1:]!r}; give the full path")
    if "$" not in expanded or os.path.exists(expanded):
        return expanded
    for variable in re.findall(r"\$(\w+|\{[^}]*\})", expanded):
        # An empty variable would silently produce a different path than intended.
        if not os.environ.get(variable.strip("{}")):
            raise ConfigError(
                f"{name}={value}: the environment variable ${variable} is not set or is empty; set it, or give the full path"
            )
    return os.path.expandvars(expanded)


def expand_paths(settings: Any, prefix: str) -> None:
    """Expand the path settings of a frozen dataclass in place. Call it from the `__post_init__` of the dataclass.

    Args:
        settings: The dataclass instance.
        prefix: The prefix of its settings' names, for messages.

    Raises:
        ConfigError: A path cannot be expanded; see `expand_path`.
    """
    for f in fields(settings):
        value, name = getattr(settings, f.name), f"{prefix}.{f.name}"
        if not f.metadata.get("path") or value is None:
            continue
        single = isinstance(value, str | os.PathLike)
        paths = tuple(expand_path(os.fspath(v), name) for v in ([value] if single else value))
        object.__setattr__(settings, f.name, paths[0] if single else paths)


class Settings:
    """Base class of configurations, which are frozen dataclasses. Checks types and values when an instance is created.

    Lists are converted to tuples where the field is a tuple, a single string becomes a tuple of one, and paths are expanded.
    """

    section: ClassVar[str] = ""
    """The prefix of the settings' names, for messages."""

    def __post_init__(self) -> None:
        """Check the types, and expand paths.

        Raises:
            ConfigError: A value has the wrong type, or a path cannot be expanded; the message names the setting.
        """
        # Instances are frozen, so converted values are set through `object.__setattr__`.
        hints = _hints(type(self))  # type: ignore[arg-type]
        for f in fields(self):  # type: ignore[arg-type]
            value, hint = getattr(self, f.name), hints[f.name]
            if isinstance(value, str) and hint == tuple[str, ...]:
                object.__setattr__(self, f.name, value := (value,))
            if isinstance(value, list) and any(get_origin(part) is tuple for part in _parts(hint)):
                object.__setattr__(self, f.name, value := tuple(value))
            if not _fits(value, hint):
                name = f"{self.section or type(self).__name__}.{f.name}"
                kind = "null" if value is None else _article(type(value).__name__)
                raise ConfigError(f"{name}={value!r} is {kind}; it must be {_wanted(hint)}")
            if isinstance(value, int | float):
                _check_plausible(f"{self.section or type(self).__name__}.{f.name}", value, f.metadata)
        expand_paths(self, self.section)
        self._check_values()

    def _check_values(self) -> None:
        """Check each value on its own.

        Raises:
            ConfigError: A value is out of range; the message names the setting and the value.
        """


def _check_plausible(name: str, value: float, bounds: Mapping[str, Any]) -> None:
    """Reject implausible numbers, which are usually typos. Numbers of 0 and below are handled by separate checks."""
    least, most = bounds.get("least"), bounds.get("most")
    if most is not None and value > most:
        raise ConfigError(f"{name}={value}; it must be at most {most:g}")
    if least is not None and 0 < value < least:
        raise ConfigError(f"{name}={value}; it must be at least {least:g}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type. Integers are accepted as floats; booleans are not accepted as numbers."""
    kind = get_origin(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    # The type is compared too, because True == 1 and 1 == 1.0 in Python.
    if kind is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(hint))
    if kind is tuple:
        inner = get_args(hint)
        if not isinstance(value, tuple) or (Ellipsis not in inner and len(value) != len(inner)):
            return False
        return all(_fits(v, inner[0] if Ellipsis in inner else t) for v, t in zip_longest(value, inner[: len(value)]))
    if kind is dict:
        key, item = get_args(hint)
        return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, item) for k, v in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str | os.PathLike)
    return hint is None or isinstance(value, hint) if hint is not type(None) else value is None


def _wanted(hint: Any) -> str:
    names = {float: "a number", int: "a whole number", str: "text", bool: "true or false", type(None): "null"}
    descriptions = []
    for part in _parts(hint):
        if get_origin(part) is Literal:
            descriptions.append(f"one of {', '.join(map(str, get_args(part)))}")
        elif get_origin(part) is tuple:
            inner = get_args(part)
            plural = {float: "numbers", int: "whole numbers", str: "texts"}.get(inner[0], "values")
            descriptions.append(f"a list of {plural if Ellipsis in inner else f'{len(inner)} {plural}'}")
        else:
            descriptions.append(names.get(part) or (_article(part.__name__) if isinstance(part, type) else str(part)))
    return " or ".join(descriptions)


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


@dataclass(frozen=True, kw_only=True)
class LoraConfig(Settings):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685). Disabled if `rank` is 0."""

    section: ClassVar[str] = "model.lora"

    rank: int = setting(0, "rank of the adapters; 0: no adapters, train the model itself")
    alpha: float = setting(16.0, "the output of the adapters is scaled by alpha / rank")
    rslora: bool = setting(False, "scale by alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732), for large ranks")
    dropout: float = setting(0.0, "dropout on the adapters' inputs during training")
    targets: tuple[str, ...] = setting(
        ("all-linear",),
        "names of the layers that get an adapter, or patterns for their full names, such as *.visual.*; all-linear: all linear layers "
        "except the head. To adapt the head, the embeddings or the experts of a mixture, name them: lm_head, embed_tokens, experts",
    )
    modules_to_save: tuple[str, ...] = setting(
        (),
        "modules that are trained in full alongside the adapters and saved with them, such as embed_tokens and lm_head",
    )

    @property
    def scale(self) -> float:
        """The factor on the adapters' output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """The model, the source of its weights, and the output of its head."""

    section: ClassVar[str] = "model"

    path: str = setting("", "folder with config.json, tokenizer and safetensors, or a Hugging Face name", path=True)
    init: Literal["weights", "random"] = setting(
        "weights", "weights: load the weights; random: initialize them from the config and engine.seed"
    )
    head: str = setting(
        LM, "lm: a distribution over tokens; value: one number per token; actions: a chunk of continuous actions per token"
    )
    head_shape: tuple[int, ...] = setting(
        (), "shape of the head's output for each token, for heads that have one: [4,7] means 4 actions with 7 numbers each"
    )
    lora: LoraConfig = setting(factory=LoraConfig, help="low-rank adapters")
    max_adapters: int = setting(
        0,
        "number of adapters that may be created, trained and dropped on the frozen model at runtime, all at the same time; 0: none, see "
        "model.lora for a single adapter",
        most=100_000,
    )
    router_aux_loss_coef: float | None = setting(
        None,
        "weight of the router's load-balancing loss in a mixture-of-experts model; null: as in the model's config",
        most=1e3,
    )
    router_bias_update_rate: float = setting(
        0.0,
        "for routers with a bias per expert, such as DeepSeek-V3's: how much the bias changes in each step to balance the loads of "
        "the experts (arXiv:2408.15664 uses 0.001)",
        least=0.0,
        most=1.0,
    )
    added_tokens: tuple[str, ...] = setting(
        (), "tokens to add to the tokenizer; if needed, embeddings are extended with the mean of the existing rows"
    )
    chat_template: str | None = setting(
        None, "file with a Jinja chat template to use and export instead of the tokenizer's", path=True
    )
    freeze: tuple[str, ...] = setting(
        (),
        "parameters that are not trained, as patterns with * that match Hugging Face names; encoders: the parameters of the image, video "
        "and audio encoders",
    )
    quantization: Literal["none", "int8", "nf4"] = setting(
        "none", "dtype of the frozen base model under adapters (QLoRA); no built-in backend supports others than none"
    )
    overrides: dict[str, Any] = setting(
        factory=dict,
        help="settings of the model's config.json to change, such as model.overrides.attn_pdrop=0; exports include the changes",
    )
    trust_remote_code: bool = setting(False, "run Python code from the model folder")

    def _check_values(self) -> None:
        if self.head not in (names := head_names()):
            raise ConfigError(f"model.head={self.head}; it must be one of {', '.join(names)}")
        check_least("model.max_adapters", self.max_adapters, 0)
        if any(size < 1 for size in self.head_shape):
            raise ConfigError(f"model.head_shape={list(self.head_shape)}; every number must be at least 1")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Settings):
    """The parallel layout; the product of its axes (pp, dp_replicate, dp_shard, cp, tp) is the number of processes."""

    section: ClassVar[str] = "engine.parallel"

    dp_replicate: int = setting(1, "data-parallel replicas, each with a full set of (sharded) parameters")
    dp_shard: int | None = setting(
        None, "data-parallel ranks over which the parameters are sharded; null: all remaining processes"
    )
    cp: int = setting(1, "context parallel: ranks that split every sequence, with Ulysses all-to-alls")
    tp: int = setting(1, "tensor parallel: ranks that split every weight matrix")
    tp_sequence: bool = setting(False, "with tp: also split the sequence in norms and dropout (sequence parallel)")
    pp: int = setting(1, "pipeline parallel: number of pipeline stages")
    vpp: int = setting(1, "with pp: interleaved chunks of layers per rank (virtual pipeline)")
    ep: int = setting(1, "expert parallel: ranks over which the experts of a mixture-of-experts model are distributed")
    etp: int = setting(1, "tensor parallel within each expert")

    def _check_values(self) -> None:
        for f in fields(self):
            if not isinstance(value := getattr(self, f.name), bool):
                check_least(f"engine.parallel.{f.name}", value, 1)

    @property
    def token_multiple(self) -> int:
        """The number that must divide a micro-batch's token count, so that the ranks that split it get equal slices."""
        return self.cp * (self.tp if self.tp_sequence else 1)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig(Settings):
    """The dtypes of parameters, computation and gradient reduction."""

    section: ClassVar[str] = "engine.precision"

    params: DType = setting(
        "float32",
        "dtype of the stored parameters and the optimizer state; bfloat16 only with adapters or without training",
    )
    compute: Compute = setting(
        "auto",
        "dtype of matrix products and activations; auto: bfloat16 on CUDA, otherwise that of the parameters",
    )
    reduce: DType = setting("float32", "dtype of gradient reduction between ranks")


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig(Settings):
    """Token budgets: hard limits on the packed length of one forward pass, in total over its context-parallel ranks."""

    section: ClassVar[str] = "engine.micro_batch"

    max_tokens: int = setting(8192, "maximum number of tokens in a training micro-batch")
    infer_max_tokens: int | None = setting(
        None, "maximum number of tokens in an inference micro-batch; null: twice max_tokens"
    )

    def _check_values(self) -> None:
        check_least("engine.micro_batch.max_tokens", self.max_tokens, 1)
        check_least("engine.micro_batch.infer_max_tokens", self.infer_max_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Settings):
    """Offloading of state. Parameters are streamed to the device layer by layer, and moments for the optimizer step."""

    section: ClassVar[str] = "engine.offload"

    params: OffloadTarget = setting("none", "where to offload the sharded parameters and gradients")
    optimizer: OffloadTarget = setting("none", "where to offload the optimizer's moments between steps")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """The engine: its backend, and how it runs the model."""

    section: ClassVar[str] = "engine"

    backend: str = setting("fsdp", "name of the backend; `drivetrain backends` lists them")
    parallel: ParallelConfig = setting(factory=ParallelConfig, help="parallel layout")
    precision: PrecisionConfig = setting(
        factory=PrecisionConfig, help="dtypes of parameters, computation and gradient reduction"
    )
    micro_batch: MicroBatchConfig = setting(factory=MicroBatchConfig, help="token budgets")
    recompute: Recompute = setting(
        "none",
        "activation (gradient) checkpointing: which activations the backward pass recomputes instead of storing; auto: as few as fit into the device's memory, by an estimate",
    )
    compile: bool | Literal["auto"] = setting(
        "auto", "compile each layer with torch.compile; auto: on CUDA, if the backend supports it"
    )
    offload: OffloadConfig = setting(factory=OffloadConfig, help="state that is kept outside the device")
    share_prefixes: SharePrefixes = setting(
        "auto",
        "compute a prefix that documents have in common once per micro-batch; auto: if that saves at least a tenth of the tokens; on: if "
        "it saves any",
    )
    invariant: bool = setting(
        False,
        "batch invariance: make the outputs and gradients of a document bitwise independent of the other documents in the batch; slower, CPU only",
    )
    non_finite: NonFinitePolicy = setting("raise", "on a NaN or infinite loss or gradient: raise an error, or skip the step")
    seed: int = setting(0, "seed for random weights, new heads and adapters, and dropout", most=MOST_SEED)
    deterministic: bool = setting(False, "use deterministic kernels; an operation without one raises an error")
    options: Any = setting(None, "settings specific to this backend")

    def check(self) -> None:
        """Check the values of these settings. The layout is checked later, once the number of processes is known.

        Raises:
            ConfigError: A value is out of range; the message names the setting and the value.
        """
        check_least("engine.seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Settings):
    """The optimizer and the learning-rate schedule. Weight decay is never applied to norms and biases."""

    section: ClassVar[str] = "optim"

    name: Literal["adamw", "sgd"] = setting("adamw", "adamw (Loshchilov & Hutter 2019), or sgd without momentum")
    lr: float = setting(1e-5, "peak learning rate")
    betas: tuple[float, float] = setting((0.9, 0.95), "decay rates of AdamW's first and second moments")
    eps: float = setting(1e-8, "AdamW's epsilon, which prevents division by zero", most=1e4)
    weight_decay: float = setting(0.0, "decoupled weight decay of matrices and embeddings")
    clip_grad_norm: float | None = setting(1.0, "maximum norm of the full gradient; null: no clipping")
    schedule: Schedule = setting("constant", "learning-rate schedule after warmup")
    warmup_steps: int = setting(0, "steps of linear warmup")
    warmup_ratio: float = setting(0.0, "warmup as a fraction of all steps; used if warmup_steps is 0")
    min_lr_ratio: float = setting(0.0, "minimum learning rate as a fraction of lr")
    decay_ratio: float = setting(0.2, "wsd only: final decay as a fraction of all steps")

    def _check_values(self) -> None:
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
                bounds = f"at least {low}" if math.isinf(high) else f"from {low} to {high}"
                raise ConfigError(f"optim.{name}={value}; it must be {bounds}")
            if math.isinf(value):
                raise ConfigError(f"optim.{name}={value}; it must be finite")
        if 1 in self.betas:
            raise ConfigError(f"optim.betas={list(self.betas)}; both must be below 1, as a moment never changes at 1")
        if not self.eps:
            raise ConfigError(f"optim.eps={self.eps}; it must be more than 0, or a parameter without a gradient becomes NaN")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ConfigError(f"optim.clip_grad_norm={self.clip_grad_norm}; use a positive norm, or null for no clipping")
        self._check_updates()

    def _check_updates(self) -> None:
        """Reject settings whose steps would immediately destroy a model, or change nothing."""
        most = 10.0 if self.name == "adamw" else 1e4
        if self.lr > most:
            per_step = ", which moves every parameter by about that much in a step" if self.name == "adamw" else ""
            raise ConfigError(f"optim.lr={self.lr} with optim.name={self.name}{per_step}; it must be at most {most:g}")
        if self.lr * self.weight_decay >= 1:
            raise ConfigError(
                f"optim.weight_decay={self.weight_decay} with optim.lr={self.lr}: a step multiplies matrices by 1 - lr * weight_decay = "
                f"{1 - self.lr * self.weight_decay:g}; lower one of them"
            )
        if self.name == "adamw" and self.clip_grad_norm is not None and self.clip_grad_norm < 1e-3 * self.eps:
            raise ConfigError(
                f"optim.clip_grad_norm={self.clip_grad_norm} with optim.eps={self.eps}, which makes such gradients negligible; raise "
                "the norm, or set it to null for no clipping"
            )

    def check(self, total_steps: int | None) -> None:
        """Check the settings that depend on the length of a run.

        Args:
            total_steps: The number of steps of the run; None if it is not known, which some schedules reject.

        Raises:
            ConfigError: The number of steps is missing; the message names the setting that needs it.
        """
        for name in ("linear", "cosine", "wsd"):
            if self.schedule == name and total_steps is None:
                raise ConfigError(f"optim.schedule={name} needs a known number of steps; use constant or inverse_sqrt")
        if self.warmup_ratio and not self.warmup_steps and total_steps is None:
            raise ConfigError(f"optim.warmup_ratio={self.warmup_ratio} needs a known number of steps; set optim.warmup_steps")
