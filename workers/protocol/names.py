"""The classes and functions that a message may refer to by name.

A message holds data and names `module:attribute` from an allowlist that is fixed when a worker starts. A client that can write to a
worker therefore cannot make it import anything else. Drivetrain's own configurations and roles are always on the list.
"""

import json
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Protocol

from ...engine import registry
from ...engine.errors import ConfigError
from ...lazy_imports import moved_module
from ...losses.registry import RegistryConfig

_ROOT = __name__.rpartition(".workers.")[0]
MAIN = "__main__"

BUILT_IN: frozenset[str] = frozenset(
    f"{_ROOT}.{module}:{attribute}"
    for module, attributes in {
        "engine.config": (
            "EngineConfig",
            "LoraConfig",
            "MicroBatchConfig",
            "ModelConfig",
            "OffloadConfig",
            "OptimConfig",
            "ParallelConfig",
            "PrecisionConfig",
        ),
        "engine.adapters.config": ("AdapterConfig",),
        "engine.adapters.slot": ("AdapterStep",),
        "engine.loss": ("StepResult",),
        "engine.packing.batch": ("MediaField", "PackedBatch"),
        "workers.data_plane.dataset": ("DatasetSpec",),
        "generation.embeddings.config": ("EmbeddingConfig",),
        "workers.roles.embedder": ("EmbeddingWorker",),
        "losses.policy": ("PolicyLoss",),
        "losses.token_sums": ("TokenSumLoss",),
        "losses.traced_loss": ("TracedLoss",),
        "losses.value": ("ValueLoss",),
        "workers.roles.actor": ("ActorConfig", "ActorWorker"),
        "workers.roles.adapters": ("AdapterReply", "AdapterRequest", "AdapterWorker"),
        "workers.roles.advantage": ("AdvantageConfig", "AdvantageWorker"),
        "workers.roles.base": ("WorkerConfig",),
        "workers.roles.critic": ("CriticConfig", "CriticWorker"),
        "workers.roles.reference": ("ReferenceWorkerConfig", "ReferenceWorker"),
        "workers.roles.reward": ("FunctionRewardConfig", "FunctionRewardWorker", "RewardWorker"),
        "generation.result": ("Generation",),
        "generation.generator": ("GeneratorStats",),
        "generation.options": ("RolloutConfig", "SamplingOptions"),
        "workers.roles.generator": ("RolloutWorker",),
    }.items()
    for attribute in attributes
)
"""The names that every worker knows, in addition to the options of the registered backends."""

MOVED_CLASSES = {"workers.roles.reference:ReferenceConfig": "workers.roles.reference:ReferenceWorkerConfig"}
"""The new names of renamed classes, by their old names relative to this package."""


class Pickler(Protocol):
    """A module like `pickle`, for values that are only sent to processes that this process has started."""

    def dumps(self, value: Any) -> bytes:
        """Return a value as bytes."""
        ...

    def loads(self, data: Any) -> Any:
        """Return the value of pickled bytes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program that started a worker; names in `__main__` refer to it.

    Args:
        module: Its module, if it was started with `python -m`; otherwise empty.
        file: Its file.
        argv: Its command line.
    """

    module: str = ""
    file: str = ""
    argv: tuple[str, ...] = ()

    @property
    def alias(self) -> str:
        """The program's module name in a worker, whose own `__main__` is a different program."""
        return self.module or f"{_ROOT}_main"


_importing = False


def importing_program() -> bool:
    """Return whether this process is a worker importing its controller's program, which must not start workers during that."""
    return _importing


def name_of(target: Any) -> str:
    """Return the name of a class or function.

    Raises:
        ConfigError: It is not at the top level of a module, so another process could not find it.
    """
    module, attribute = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not attribute:
        raise ConfigError(
            f"{target!r:.80} cannot be sent to a worker, because another process could not find it by its name; define a function "
            "at the top level of a module"
        )
    if _attribute(sys.modules.get(module), attribute) is not target:
        what = "a lambda" if attribute.endswith("<lambda>") else f"{attribute} of {module}"
        raise ConfigError(
            f"{what} cannot be sent to a worker, because another process could not find it by its name; define it at the top "
            "level of a module"
        )
    return f"{module}:{attribute}"


def current_name(name: str) -> str:
    """Return the current name of a class or function whose name comes from a message of an older version."""
    root, _, below = name.partition(".")
    if root != _ROOT:
        return name
    module, _, attribute = below.partition(":")
    moved = f"{moved_module(module) or module}:{attribute}"
    return f"{_ROOT}.{MOVED_CLASSES.get(below, MOVED_CLASSES.get(moved, moved))}"


def is_reference(value: Any) -> bool:
    """Return whether a value is sent by name: a class, a function, or another callable that can be found in its module."""
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return True
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    # Objects of many kinds have these attributes, so the name must lead back to the object.
    named = callable(value) and isinstance(module, str) and isinstance(attribute, str)
    return named and _attribute(sys.modules.get(str(module)), str(attribute)) is value


class Names:
    """A list of names.

    Args:
        extra: Names in addition to those of Drivetrain.
        program: The program that started this worker; None if this process is that program.
        pickler: The pickler for values that are neither plain nor named, between a process and its own children; None refuses them.
    """

    def __init__(self, extra: Iterable[str] = (), program: Program | None = None, pickler: Pickler | None = None) -> None:
        options = {spec.options for spec in registry.backends().values() if spec.options}
        self.allowed = BUILT_IN | options | {current_name(name) for name in extra}
        self.pickler = pickler
        self._program = program

    def refer(self, target: Any) -> str:
        """Return the name of a class or function.

        Raises:
            ConfigError: It does not have a name, or the name is not on the list.
        """
        name = name_of(target)
        module, _, attribute = name.partition(":")
        # The controller has the classes and functions of its program in `__main__`.
        if self._program is not None and module == self._program.alias:
            name = f"{MAIN}:{attribute}"
        self._check(name)
        return name

    def resolve(self, name: str) -> Any:
        """Import the class or function of a name.

        Raises:
            ConfigError: The name is not on the list, or there is no such thing.
        """
        name = current_name(name)
        # Before anything is imported: importing a module runs its code.
        self._check(name)
        module_name, _, attribute = name.partition(":")
        try:
            module = _import_program(self._program) if module_name == MAIN and self._program else import_module(module_name)
        except ImportError as e:
            raise ConfigError(f"{name} cannot be imported by the worker: {e}; install its module, or set PYTHONPATH") from e
        target = _attribute(module, attribute)
        if target is None:
            raise ConfigError(f"{name}: the module has no {attribute}")
        return target

    def _check(self, name: str) -> None:
        if name not in self.allowed:
            raise ConfigError(
                f"{name} is not on the list of names that was fixed when the workers started; add it there (names=[...] of a "
                "group, --allow of a worker)"
            )


def references(value: Any) -> list[Any]:
    """Return the classes and functions that a value refers to, including the classes of its dataclasses, at any depth."""
    if is_reference(value):
        return [value]
    parts: list[Any] = []
    targets: list[Any] = []
    if is_dataclass(value):
        targets.append(type(value))
        parts = list(contents(value).values())
    elif isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
        targets += [type(value)] if is_named_tuple(value) else []
    elif isinstance(value, Enum):
        targets.append(type(value))
    return targets + [reference for part in parts for reference in references(part)]


def contents(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance that a message holds, by name; an equal instance can be built from them."""
    return (
        value.settings()
        if isinstance(value, RegistryConfig)
        else {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    )


def is_named_tuple(value: Any) -> bool:
    """Return whether a value is a named tuple."""
    return isinstance(value, tuple) and type(value) is not tuple and hasattr(value, "_fields")


def collect(value: Any) -> set[str]:
    """Return the names of the classes and functions that a value refers to, except Drivetrain's own.

    Raises:
        ConfigError: A class or function does not have a name that another process could use.
    """
    names = {name_of(target) for target in references(value)} - BUILT_IN
    program = this_program()
    for name in sorted(names):
        if name.startswith(f"{MAIN}:") and not (program.file or program.module):
            raise ConfigError(
                f"{name.partition(':')[2]} is defined in a program without a file (an interactive session, python -c, standard "
                "input), where workers cannot find it; put it into a module"
            )
    return names


def this_program() -> Program:
    """Return this program, for the workers that it starts."""
    main = sys.modules.get(MAIN)
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    exists = isinstance(file, str) and Path(file).is_file()
    return Program(
        module=spec.name if spec else "", file=str(Path(str(file)).resolve()) if exists else "", argv=tuple(sys.argv)
    )


def program_arguments() -> list[str]:
    """Return the arguments that let a worker find this program."""
    program = this_program()
    if not (program.module or program.file):
        return []
    return ["--program", json.dumps([program.module, program.file, *program.argv])]


def parse_program(text: str) -> Program:
    """Parse an argument of `program_arguments`.

    Raises:
        ConfigError: The argument is malformed.
    """
    try:
        module, file, *argv = json.loads(text)
        return Program(module=str(module), file=str(file), argv=tuple(str(word) for word in argv))
    except (ValueError, TypeError) as e:
        raise ConfigError(f"--program {text:.80}: {e}") from None


def _import_program(program: Program) -> types.ModuleType:
    # As with multiprocessing, the module is not named __main__, so that the program itself does not run again.
    if program.alias not in sys.modules:
        with _as_program(program):
            try:
                if program.module:
                    return import_module(program.module)
                _execute_file(program)
            except SystemExit as e:
                raise ConfigError(
                    f"{program.module or program.file} ends (SystemExit: {e}) when a worker imports it; put what it does under: "
                    "if __name__ == '__main__':"
                ) from None
    return sys.modules[program.alias]


def _execute_file(program: Program) -> None:
    spec = spec_from_file_location(program.alias, program.file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{program.file} is not a Python program, so its functions cannot be found by a worker")
    module = module_from_spec(spec)
    # As in an import, before the file runs: `dataclasses`, for example, looks up the module of a class there.
    sys.modules[program.alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Otherwise the next attempt would use the partly initialized module.
        del sys.modules[program.alias]
        raise


@contextmanager
def _as_program(program: Program) -> Iterator[None]:
    """Set sys.argv to the command line of the program."""
    global _importing
    argv, sys.argv, _importing = sys.argv, list(program.argv), True
    try:
        yield
    finally:
        sys.argv, _importing = argv, False


def _attribute(module: types.ModuleType | None, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
