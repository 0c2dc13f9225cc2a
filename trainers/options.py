"""From YAML and dotted overrides to a typed config. Imports no torch: `--help` and a typing error answer at once."""

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from ..engine.config import EngineConfig, ModelConfig, OptimConfig, setting
from ..engine.errors import ConfigError
from ..engine.registry import options_class

Format = Literal["auto", "messages", "prompt_completion"]
TooLong = Literal["error", "skip", "truncate_left", "truncate_right"]

RECIPES = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is learned from."""

    train: tuple[str, ...] = setting((), "jsonl or parquet files")
    eval: tuple[str, ...] = setting((), "jsonl or parquet files to evaluate on")
    format: Format = setting("auto", "messages: chats; prompt_completion: two texts; auto: by the columns")
    max_length: int | None = setting(None, "tokens in a sample, at most; null: engine.micro_batch.max_tokens")
    too_long: TooLong = setting("error", "what happens to a longer sample")
    batch_size: int = setting(32, "samples a step, all ranks together")
    shuffle: bool = setting(True, "a new order every epoch; false keeps the order of the files")
    seed: int = setting(0, "seed of the order")


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop, and what it leaves behind."""

    output_dir: str = setting("runs/sft", "folder of this run: config, metrics, checkpoints, export")
    max_steps: int | None = setting(None, "optimizer steps; null: as many as the epochs make")
    epochs: int = setting(1, "passes over the training data")
    eval_every: int | None = setting(None, "steps between evaluations; null: only at the end")
    save_every: int | None = setting(None, "steps between checkpoints; null: only at the end")
    keep_last: int | None = setting(2, "checkpoints kept; null: all")
    resume: str = setting("auto", "auto: the run's last complete checkpoint, if any; none; or a checkpoint folder")
    log_every: int = setting(1, "steps between lines of progress")
    loggers: tuple[str, ...] = setting(("console", "jsonl", "tensorboard"), "console, jsonl, tensorboard")
    export_hf: bool = setting(True, "write the trained model in Hugging Face format at the end")
    timeout_minutes: float = setting(30.0, "after which a rank that waits for the others gives up")


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """`python -m drivetrain.trainers.sft`."""

    model: ModelConfig = setting(factory=ModelConfig, help="the model")
    data: DataConfig = setting(factory=DataConfig, help="the data")
    engine: EngineConfig = setting(factory=EngineConfig, help="the engine")
    optim: OptimConfig = setting(factory=OptimConfig, help="the optimizer")
    trainer: TrainerConfig = setting(factory=TrainerConfig, help="the loop")


Config = TypeVar("Config")


@dataclass(frozen=True)
class Key:
    """One setting: its dotted name, type, default and help line."""

    name: str
    type: str
    default: Any
    help: str


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Every setting of a config class, depth first."""
    hints = get_type_hints(cls)
    for f in fields(cls):
        name, hint = prefix + f.name, hints[f.name]
        if is_dataclass(hint) and isinstance(hint, type):
            yield from keys(hint, f"{name}.")
        else:
            yield Key(name, _type_name(hint), f.default, f.metadata.get("help", ""))


def _type_name(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    if text.startswith("typing.Literal["):
        return " | ".join(text.removeprefix("typing.Literal[").removesuffix("]").replace("'", "").split(", "))
    return text.replace("typing.", "").replace("NoneType", "None")


def help_text(cls: type, usage: str) -> str:
    """What `--help` prints."""
    lines = [usage, "", "Settings are key=value; recipe=NAME or recipe=PATH loads a YAML file first.", ""]
    lines.append(f"Built-in recipes: {', '.join(sorted(p.stem for p in RECIPES.glob('*.yaml')))}")
    lines.append("")
    backend = EngineConfig().backend
    options = options_class(backend)
    rows = [k for k in keys(cls) if k.name != "engine.options"]
    if options is not None:
        rows += [replace(k, help=f"{backend}: {k.help}") for k in keys(options, "engine.options.")]
    for key in rows:
        shown = list(key.default) if isinstance(key.default, tuple) else key.default
        choices = f" ({key.type})" if " | " in key.type and "None" not in key.type else ""
        lines.append(f"  {key.name:34} {key.help}{choices} [{'null' if shown is None else shown}]")
    return "\n".join(lines)


def parse(cls: type[Config], argv: Sequence[str], usage: str) -> Config:
    """Defaults, then the recipe, then overrides; typed.

    Args:
        cls: the config class.
        argv: words like `recipe=sft_demo engine.parallel.cp=2`.
        usage: first lines of `--help`, which prints and exits.

    Raises:
        ConfigError: an unknown key (the nearest is suggested), a wrong type, a recipe that is not there.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(help_text(cls, usage))
        raise SystemExit(0)
    layers = [_words([w for w in argv if not w.startswith("recipe=")])]
    recipes = [w.removeprefix("recipe=") for w in argv if w.startswith("recipe=")]
    if len(recipes) > 1:
        raise ConfigError(f"recipe= is given {len(recipes)} times; give one")
    if recipes:
        layers.insert(0, _recipe(recipes[0]))
    backend = next(
        (b for layer in reversed(layers) if (b := OmegaConf.select(layer, "engine.backend")) is not None),
        EngineConfig().backend,
    )
    options = options_class(str(backend))
    known = {key.name for key in keys(cls)}
    if options is not None:
        known |= {key.name for key in keys(options, "engine.options.")}
    lists = [key.name for key in keys(cls) if key.type.startswith("tuple[str")]
    for layer in layers:
        _check_keys(layer, known)
        for name in lists:
            if isinstance(value := OmegaConf.select(layer, name), str):
                OmegaConf.update(layer, name, [value])
    try:
        base = OmegaConf.structured(cls)
        if options is not None:
            with read_write(base.engine):  # frozen dataclasses make read-only nodes
                base.engine.options = OmegaConf.structured(options)
        merged = OmegaConf.merge(base, *layers)
        result = OmegaConf.to_object(merged)
    except OmegaConfBaseException as e:
        where = f"{e.full_key}: " if e.full_key else ""
        raise ConfigError(f"{where}{str(e).splitlines()[0]}") from e
    assert isinstance(result, cls)
    return result


def _words(words: Sequence[str]) -> DictConfig:
    for word in words:
        if "=" not in word or word.startswith("-"):
            raise ConfigError(f"{word!r} is no setting; write key=value, as in engine.parallel.cp=2 (--help lists all)")
    try:
        return OmegaConf.from_dotlist(list(words))
    except Exception as e:
        raise ConfigError(f"the settings cannot be read: {e}") from e


def _recipe(name: str) -> DictConfig:
    path = Path(name) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if not path.is_file():
        built_in = sorted(p.stem for p in RECIPES.glob("*.yaml"))
        near = difflib.get_close_matches(name, built_in, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"recipe={name} does not exist; {hint}built in are {', '.join(built_in)}, or give the path of a .yaml file"
        )
    try:
        loaded = OmegaConf.load(path)
    except Exception as e:
        raise ConfigError(f"recipe={name}: {path} is no valid YAML: {e}") from e
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"recipe={name}: {path} holds no settings")
    return loaded


def _check_keys(layer: DictConfig, known: set[str]) -> None:
    for name in _leaves(layer):
        if name in known or any(k.startswith(f"{name}.") for k in known):
            continue
        if name.startswith("engine.options."):
            own = ", ".join(sorted(k.removeprefix("engine.options.") for k in known if k.startswith("engine.options.")))
            raise ConfigError(f"unknown setting {name!r}; engine.options of this backend has {own}")
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            name.rpartition(".")[2], [k.rpartition(".")[2] for k in known], n=1
        )
        full = next((k for k in sorted(known) if near and k.endswith(near[0])), None)
        raise ConfigError(f"unknown setting {name!r}{f'; did you mean {full!r}?' if full else ''} (--help lists all)")


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        value = node._get_node(key)
        name = f"{prefix}{key!s}"
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def to_yaml(config: Any) -> str:
    """A resolved config as YAML, with every key."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def changes(config: Any) -> dict[str, Any]:
    """The settings that differ from their defaults, by dotted name."""
    found: dict[str, Any] = {}
    for key in keys(type(config)):
        value: Any = config
        for part in key.name.split("."):
            value = getattr(value, part)
        if is_dataclass(value) and not isinstance(value, type):
            found |= {f"{key.name}.{n}": v for n, v in changes(value).items()}
        elif value != key.default:
            found[key.name] = list(value) if isinstance(value, tuple) else value
    return found


def differences(old: Path, config: Any) -> list[str]:
    """What an earlier run's `config.yaml` says otherwise, as lines of `name: old -> new`."""
    before, now = OmegaConf.load(old), OmegaConf.create(_plain(asdict(config)))
    lines = []
    for name in sorted({*_leaves(DictConfig(before)), *_leaves(now)}):
        a, b = OmegaConf.select(before, name), OmegaConf.select(now, name)
        if a != b:
            lines.append(f"{name}: {a} -> {b}")
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def fail(error: Exception) -> int:
    """Say what is wrong, once for the whole job; the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
    return 1
