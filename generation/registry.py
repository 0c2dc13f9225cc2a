"""Registry of generators: maps each name to a class, which is imported on demand.

A third party adds its own through the entry-point group `drivetrain.generators`, or names it as `module:class`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..engine.errors import ConfigError, install_command
from ..engine.registry import print_list
from .options import RolloutConfig

if TYPE_CHECKING:
    from .generator import BaseGenerator

ENTRY_POINT_GROUP = "drivetrain.generators"
_PACKAGE = __name__.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class GeneratorSpec:
    """The location of a generator.

    Args:
        generator: The location of the `BaseGenerator` subclass, as `module:class`.
        needs: A module that it requires.
        extra: The extra of drivetrain that installs this module.
    """

    generator: str
    needs: str | None = None
    extra: str | None = None


_GENERATORS: dict[str, GeneratorSpec] = {
    "vllm": GeneratorSpec(generator=f"{_PACKAGE}.vllm.generator:VLLMGenerator", needs="vllm", extra="vllm"),
    "vllm_server": GeneratorSpec(generator=f"{_PACKAGE}.vllm.server:VLLMServerGenerator", needs="vllm", extra="vllm"),
    "static": GeneratorSpec(generator=f"{_PACKAGE}.static:StaticGenerator"),
    "tensor_parallel": GeneratorSpec(
        generator=f"{_PACKAGE.rpartition('.')[0]}.workers.tensor_parallel.generator:TensorParallelGenerator"
    ),
    "continuous": GeneratorSpec(generator=f"{_PACKAGE}.continuous:ContinuousGenerator"),
    "exact": GeneratorSpec(generator=f"{_PACKAGE}.exact:ExactGenerator"),
}

ENGINES = {"transformers": "continuous", "tensor_parallel": "tensor_parallel", "vllm": "vllm"}
"""The values of `--engine` of the commands, with the generator of each."""


def generators() -> dict[str, GeneratorSpec]:
    """Return all registered generators.

    Raises:
        ConfigError: Two of them have the same name.
    """
    specs = dict(_GENERATORS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in specs:
            raise ConfigError(
                f"two generators are called {point.name!r}: {specs[point.name].generator} and the entry point {point.value}; "
                "uninstall one of the two packages, or rename its entry point"
            )
        specs[point.name] = GeneratorSpec(generator=point.value)
    return dict(sorted(specs.items()))


def main(argv: Sequence[str]) -> int:
    """Run `drivetrain generators`; return the exit code."""
    rows = {name: spec.generator for name, spec in generators().items()}
    return print_list("generators", "the generators that rollout.generator accepts", argv, rows)


def generator_class(name: str) -> "type[BaseGenerator]":
    """Import a generator and return its class.

    Args:
        name: Its name, or `module:class`.

    Raises:
        ConfigError: There is no such generator, or a module that it requires is not installed.
    """
    specs = generators()
    if ":" in name:
        spec = GeneratorSpec(generator=name)
    elif name in specs:
        spec = specs[name]
    else:
        close_matches = get_close_matches(name, specs, n=1)
        hint = f"did you mean {close_matches[0]!r}?" if close_matches else "name your own as module:class"
        raise ConfigError(f"generator={name!r} is unknown; available: {', '.join(specs)}; {hint}")
    # Found without importing it, which takes seconds for vLLM.
    if spec.needs is not None and find_spec(spec.needs) is None:
        raise ConfigError(
            f"generator={name} needs {spec.needs}, which is not installed: {install_command(spec.extra or '')}, or use another "
            "generator"
        )
    module, _, attribute = spec.generator.partition(":")
    try:
        generator: type[BaseGenerator] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"generator={name}: {spec.generator} cannot be imported: {e}") from e
    return generator


def build_generator(config: RolloutConfig) -> "BaseGenerator":
    """Build the generator that a configuration names.

    Raises:
        ConfigError: There is no such generator, or a setting is invalid.
        ModelError: Its model cannot be loaded.
    """
    # It reads the model's config, for which it needs torch.
    with_cache_size = import_module(f"{_PACKAGE}.memory").with_cache_size
    # Still one batch at a time, but with the steps of ContinuousGenerator: those of a padded batch depend on its longest prompt.
    name = "continuous" if config.invariant and config.generator == "static" else config.generator
    return generator_class(name)(with_cache_size(config))
