"""Parsing of YAML recipes and dotted overrides into a typed config.

This module does not import torch, so that `--help` and errors about mistyped settings appear at once.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, TypeVar, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from ...engine.config import EngineConfig, expand_path
from ...engine.errors import ConfigError
from ...engine.parallel.process import discard_output
from ...engine.registry import backends, options_class
from .unknown import hint_for
from .value_errors import value_error
from .yaml_errors import yaml_error

log = logging.getLogger(__name__)

RECIPES = Path(__file__).parents[1] / "recipes"

RENAMED_VALUES = {"data.turns": {"together": "single", "apart": "per_turn"}}
"""Renamed values of settings, mapped from the old name to the new one."""

Config = TypeVar("Config")


@dataclass(frozen=True)
class Key:
    """A setting: its dotted name, type, default, help text, and whether it is a path."""

    name: str
    type: str
    default: Any
    help: str
    path: bool


def keys(cls: type, prefix: str = "") -> tuple[Key, ...]:
    """Return every setting of a config class, depth first.

    Args:
        cls: The config class.
        prefix: The prefix of the dotted names.
    """
    return _cached_keys(cls, prefix)  # type: ignore[arg-type]


# Called many times while a command line is parsed.
@cache
def _cached_keys(cls: type, prefix: str) -> tuple[Key, ...]:
    return tuple(_keys(cls, prefix, cls()))


def _keys(cls: type, prefix: str, defaults: Any) -> Iterator[Key]:
    hints = get_type_hints(cls)
    for f in fields(cls):
        name, hint, default = prefix + f.name, hints[f.name], getattr(defaults, f.name)
        if is_dataclass(hint) and isinstance(hint, type):
            yield from _keys(hint, f"{name}.", default)
        else:
            yield Key(name, _type_name(hint), default, f.metadata.get("help", ""), f.metadata.get("path", False))


def _type_name(hint: Any) -> str:
    if hint == bool | Literal["auto"]:
        return "auto | true | false"
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    literal, _, suffix = text.removeprefix("typing.Optional[").partition("]")
    if literal.startswith("typing.Literal["):
        names = literal.removeprefix("typing.Literal[").replace("'", "").split(", ")
        return " | ".join([*names, "None"] if text.startswith("typing.Optional[") or "None" in suffix else names)
    return text.replace("typing.", "").replace("NoneType", "None")


def help_text(cls: type, usage: str) -> str:
    """Return the text that `--help` prints.

    Args:
        cls: The trainer's config class.
        usage: The first lines of the text.
    """
    is_rl = "group" in get_type_hints(cls)
    lines = [
        usage,
        "",
        "--nproc N starts N worker processes (group.nproc)."
        if is_rl
        else "--nproc N starts N processes on this machine, by default one; --nnodes, --node-rank, --master-addr and the other options "
        "of torchrun for several machines are passed through.",
        "--dry-run runs only the first step, saves nothing and reports the memory use.",
        "Settings are key=value; recipe=NAME or recipe=PATH loads a YAML file first.",
        "",
        f"Built-in recipes: {', '.join(recipes_of(cls))}",
    ]
    rows = [k for k in keys(cls) if k.name != "engine.options"]
    for backend in backends():
        options = options_class(backend)
        if options is not None:
            rows += [replace(k, help=f"{backend}: {k.help}") for k in keys(options, "engine.options.")]
    sections: dict[str, list[Key]] = {}
    for key in rows:
        sections.setdefault(_section(key.name), []).append(key)
    for section, members in sections.items():
        lines += ["", f"{section}:"]
        for key in members:
            default = list(key.default) if isinstance(key.default, tuple) else key.default
            value = (
                "unset" if default == "" else yaml.safe_dump(default, default_flow_style=True, width=1000).partition("\n")[0]
            )
            named = [part for part in key.type.split(" | ") if part != "None"]
            choices = f" ({' | '.join(named)})" if len(named) > 1 and "[" not in key.type else ""
            lines.append(f"  {key.name:34} {key.help}{choices} (default: {value})")
    return "\n".join(lines)


def _section(name: str) -> str:
    """Return the section of a setting in `--help`: its top-level section, or the nested one for the largest sections."""
    parts = name.split(".")[:-1]
    return ".".join(parts[:2] if parts[0] in ("engine", "model", "rl") else parts[:1])


def recipes_of(cls: type) -> list[str]:
    """Return the names of a trainer's built-in recipes, given its config class."""
    prefix = getattr(cls, "recipe_prefix", cls.__name__.removesuffix("Config").lower())
    return sorted(p.stem for p in RECIPES.glob(f"{prefix}*.yaml"))


def own_sections(cls: type) -> tuple[tuple[str, str, type], ...]:
    """Return the sections that default to a top-level one, such as `actor.engine` to `engine`.

    Args:
        cls: The config class.

    Returns:
        For each, its dotted name, the name of the top-level section, and its class.
    """
    hints = get_type_hints(cls)
    sections: list[tuple[str, str, type]] = []
    for key in keys(cls):
        parent = key.name.rpartition(".")[2]
        hint = hints.get(parent)
        # `rollout.environment` is a name, unlike the section `environment`.
        if "." in key.name and isinstance(hint, type) and is_dataclass(hint) and hint.__name__ in key.type:
            sections.append((key.name, parent, hint))
    return tuple(sections)


def parse(cls: type[Config], argv: Sequence[str], usage: str = "") -> Config:
    """Merge the defaults, the recipe and the overrides, in this order, into a typed config.

    Args:
        cls: The config class.
        argv: The command-line arguments, such as `recipe=sft_demo engine.parallel.cp=2`.
        usage: The first lines of `--help`, which prints its text and exits.

    Returns:
        The config, an instance of `cls`.

    Raises:
        ConfigError: A key is unknown (the message suggests the closest one), a value has the wrong type, or the recipe does
            not exist.
    """
    if any(word in ("-h", "--help") for word in argv):
        try:
            # The reader of a pipe may end early, as `head` does.
            print(help_text(cls, usage), flush=True)
        except BrokenPipeError:
            discard_output()
        raise SystemExit(0)
    layers = [_words(cls, [w for w in argv if not w.startswith("recipe=")])]
    names = [word.partition("=")[0] for word in argv]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1 and name != "recipe"):
        # Every process parses the same words; one of them warns.
        if os.environ.get("RANK", "0") == "0":
            log.warning("%s is given %d times; the last one is used", name, names.count(name))
    recipes = [w.removeprefix("recipe=") for w in argv if w.startswith("recipe=")]
    if len(recipes) > 1:
        raise ConfigError(f"recipe= is given {len(recipes)} times; give only one")
    if recipes:
        # The recipe comes first, since later layers override earlier ones.
        layers.insert(0, _recipe(recipes[0], recipes_of(cls)))
    return _merged(cls, layers)


def _merged(cls: type[Config], layers: Sequence[DictConfig]) -> Config:
    """Merge the defaults and the layers, in this order, into a typed config."""
    # The backend first: it determines the type of `engine.options`, which everything else is checked against.
    backend = next(
        (b for layer in reversed(layers) if (b := OmegaConf.select(layer, "engine.backend")) is not None),
        EngineConfig().backend,
    )
    if len(layers) > 1 and OmegaConf.select(layers[0], "engine.backend", default=EngineConfig().backend) != backend:
        # The options of the recipe's engine do not apply to another engine.
        ignored = OmegaConf.select(layers[0], "engine.options")
        if ignored:
            log.warning("engine.backend=%s: ignoring engine.options of the recipe's engine (%s)", backend, ", ".join(ignored))
            layers[0].engine.pop("options")
    options = options_class(str(backend))
    setting_names = {key.name for key in keys(cls)}
    if options is not None:
        setting_names |= {key.name for key in keys(options, "engine.options.")}
    # Then the names of all settings, including those of sections that default to others.
    parents = {name: parent for name, parent, _ in own_sections(cls)}
    for name, _, section in own_sections(cls):
        setting_names |= {key.name for key in keys(section, f"{name}.")}
    lists = [key.name for key in keys(cls) if key.type.startswith("tuple[str")]
    nested = [key for name, _, section in own_sections(cls) for key in keys(section, f"{name}.")]
    switches = [key.name for key in [*keys(cls), *nested] if {"on", "off"} & {*key.type.split(" | ")}]
    free = {key.name for key in [*keys(cls), *nested] if key.type.startswith("dict[")} | {
        f"{name}.options" for name in parents if f"{name}.options" in setting_names
    }
    try:
        for layer in layers:
            _check_keys(layer, setting_names, free)
            _check_renamed(layer)
            for name in lists:
                # A single word stands for a list of one.
                if isinstance(value := OmegaConf.select(layer, name), str):
                    OmegaConf.update(layer, name, [value])
            for name in switches:
                # YAML reads on and off as true and false.
                if isinstance(value := OmegaConf.select(layer, name), bool):
                    OmegaConf.update(layer, name, "on" if value else "off")
        base = OmegaConf.structured(cls)
        if options is not None:
            with read_write(base.engine):  # a frozen dataclass becomes a read-only node
                base.engine.options = OmegaConf.structured(options)
        # Values are checked against the types of `base` here, after unknown names were rejected with a better message.
        merged = OmegaConf.merge(base, *layers)
        for name, parent in parents.items():
            _inherit(merged, name, parent, layers)
        result = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, TypeError) as e:
        raise ConfigError(value_error(e, layers, {key.name: key.type for key in keys(cls)})) from e
    assert isinstance(result, cls)
    return result


def parse_over(cls: type[Config], saved: Mapping[str, Any], argv: Sequence[str]) -> Config:
    """Merge settings over a complete, saved configuration.

    Args:
        cls: The config class.
        saved: The saved settings, as plain data.
        argv: The command-line arguments, `key=value`.

    Raises:
        ConfigError: A key is unknown, or a value has the wrong type.
    """
    return _merged(cls, [OmegaConf.create(_escaped(dict(saved))), _words(cls, argv)])


def _escaped(value: Any) -> Any:
    """Return plain data in which `${` is escaped, so that it is not an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _inherit(merged: Any, name: str, parent: str, layers: Sequence[DictConfig]) -> None:
    """Fill a partly given section from its top-level counterpart."""
    # The section is the top-level one, changed by what each layer sets in it; without any such setting it stays null.
    nodes = [node for layer in layers if (node := OmegaConf.select(layer, name)) is not None]
    if not nodes:
        return
    top = OmegaConf.select(merged, parent)
    # A copy, because the section must not change the top-level one.
    base = OmegaConf.structured(OmegaConf.to_object(top))
    if parent == "engine":
        backend = next((b for node in reversed(nodes) if (b := OmegaConf.select(node, "backend")) is not None), top.backend)
        # Options belong to a backend, so those of another one are replaced by defaults.
        if backend != top.backend:
            options = options_class(str(backend))
            with read_write(base):
                base.options = None if options is None else OmegaConf.structured(options)
    holder, _, last = name.rpartition(".")
    with read_write(merged):
        section = OmegaConf.select(merged, holder)
        with read_write(section):
            section[last] = OmegaConf.merge(base, *nodes)
        try:
            OmegaConf.to_object(section[last])
        except ConfigError as e:
            # The section's own error names the setting as if it were at the top level.
            raise ConfigError(f"{holder}.{e}") from e


def _words(cls: type, words: Sequence[str]) -> DictConfig:
    for word in words:
        if "=" not in word or word.startswith("-"):
            if word.startswith("--") and "=" in word:
                raise ConfigError(f"{word!r} is not a setting; write {word.lstrip('-')}")
            name, setting_names = word.lstrip("-").replace("-", "_"), [key.name for key in keys(cls)]
            hint = "write key=value, for example engine.parallel.cp=2 (--help lists all settings)"
            if name == "recipe" or name in setting_names:
                hint = f"write {name}=VALUE"
            elif (suggestion := hint_for(name, setting_names)).startswith((";", ":")):
                hint = suggestion.lstrip(";: ")
            raise ConfigError(f"{word!r} is not a setting; {hint}")
        try:
            # Each word by itself, so that an error names the word.
            OmegaConf.from_dotlist([_quoted(word)])
        except Exception as e:  # the parser raises its own types, and others on malformed text
            problem = yaml_error(e, word)[1]
            hint = "; write a list or a mapping as one word, in quotes if it has spaces" if problem[0] in "[]{}" else ""
            raise ConfigError(f"{shorten(' '.join(word.split()), 120)} cannot be read: {problem}{hint}") from e
    return OmegaConf.from_dotlist([_quoted(word) for word in words])


def _quoted(word: str) -> str:
    # YAML reads a value that starts with * as an alias; here it is a pattern, so it is quoted.
    return re.sub(r"(^[^=]*=\[?|,)\s*([*&!%@`][^,\]]*)", r'\1"\2"', word)


def _recipe(name: str, built_in: Sequence[str], depth: int = 0) -> DictConfig:
    path = Path(expand_path(name, "recipe")) if name.endswith((".yaml", ".yml")) else RECIPES / f"{name}.yaml"
    if depth == 0 and path.parent == RECIPES and path.is_file() and name not in built_in:
        raise ConfigError(f"recipe={name} belongs to another trainer; this one has {', '.join(built_in)}")
    if not path.is_file():
        close_matches = difflib.get_close_matches(name, built_in, n=1)
        hint = f"did you mean {close_matches[0]!r}? " if close_matches else ""
        raise ConfigError(
            f"recipe={name} does not exist; {hint}the built-in recipes are {', '.join(built_in)}; or give the path of a "
            ".yaml file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"recipe={name}: {path} cannot be read: {getattr(e, 'strerror', None) or e}") from e
    try:
        loaded = OmegaConf.load(path)
    except Exception as e:
        line, problem = yaml_error(e, text)
        raise ConfigError(f"recipe={name}: {f'line {line} of ' if line else ''}{path} is not valid YAML: {problem}") from e
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"recipe={name}: {path} contains no settings; write them as lines of NAME: VALUE")
    base = loaded.pop("recipe", None)
    if base is None:
        return loaded
    if depth > 4:
        raise ConfigError(
            f"recipe={name}: the recipes that it is based on form a cycle, or more than four levels; remove a line `recipe:`"
        )
    return DictConfig(OmegaConf.merge(_recipe(str(base), built_in, depth + 1), loaded))


def _check_keys(layer: DictConfig, setting_names: set[str], free: set[str]) -> None:
    for name in _leaves(layer):
        if (
            name in setting_names
            or any(k.startswith(f"{name}.") for k in setting_names)
            or any(name.startswith(f"{k}.") for k in free)
        ):
            continue
        if name.startswith("engine.options."):
            options = ", ".join(
                sorted(k.removeprefix("engine.options.") for k in setting_names if k.startswith("engine.options."))
            )
            raise ConfigError(f"unknown setting {name!r}; this backend's engine.options are {options}")
        raise ConfigError(f"unknown setting {name!r}{hint_for(name, setting_names)}")


def _check_renamed(layer: DictConfig) -> None:
    for name, values in RENAMED_VALUES.items():
        value = OmegaConf.select(layer, name)
        if isinstance(value, str) and value in values:
            raise ConfigError(f"{name}={value} is now called {values[value]}; write {name}={values[value]}")


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[str]:
    for key in node:
        # Indexing would resolve interpolations, which may refer to settings of other layers.
        value = node._get_node(key)
        name = f"{prefix}{key!s}"
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{name}.")
        else:
            yield name


def to_yaml(config: Any) -> str:
    """Return a resolved config as YAML, with every key."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def changes(config: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults, keyed by dotted name."""
    changed: dict[str, Any] = {}
    for key in keys(type(config)):
        value: Any = config
        for part in key.name.split("."):
            value = getattr(value, part)
        if is_dataclass(value) and not isinstance(value, type):
            changed |= {f"{key.name}.{n}": v for n, v in changes(value).items()}
        elif value != key.default:
            changed[key.name] = list(value) if isinstance(value, tuple) else value
    return changed


def differences(old: Path, config: Any) -> list[str]:
    """Return how a config differs from an earlier run's `config.yaml`, as lines of the form `name: old -> new`.

    Args:
        old: The earlier run's file.
        config: The config of this run.
    """
    before, now = OmegaConf.load(old), OmegaConf.create(_plain(asdict(config)))
    lines = []
    switched = OmegaConf.select(before, "engine.backend") != OmegaConf.select(now, "engine.backend")
    for name in sorted({*_leaves(DictConfig(before)), *_leaves(now)}):
        a, b = OmegaConf.select(before, name), OmegaConf.select(now, name)
        # If only one side has nested settings, their own lines suffice. Another backend has other options.
        inside = any(isinstance(value, DictConfig) and len(value) for value in (a, b))
        if a != b and not inside and not (switched and name.startswith("engine.options")):
            lines.append(f"{name}: {a} -> {b}")
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
