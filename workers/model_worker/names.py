"""The classes and functions that a message may refer to, by name. Imports no torch.

A message holds data, and names `module:attribute` out of a list that is fixed when a worker starts, so that whoever can write to
a worker cannot make it import anything else. Drivetrain's own configurations and roles are always on the list.
"""

import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from ...engine import registry
from ...engine.errors import ConfigError

_ROOT = __name__.rpartition(".workers.")[0]
MAIN = "__main__"
_ALIAS = f"{_ROOT}_main"
"""The name of the controller's program as a module of a worker, whose own __main__ is another program."""

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
        "engine.loss": ("StepResult",),
        "engine.packing.batch": ("MediaField", "PackedBatch"),
        "workers.losses.policy": ("PolicyLoss",),
        "workers.losses.value": ("ValueLoss",),
        "workers.roles.actor": ("ActorConfig", "ActorWorker"),
        "workers.roles.base": ("WorkerConfig",),
        "workers.roles.critic": ("CriticConfig", "CriticWorker"),
        "workers.roles.reference": ("ReferenceConfig", "ReferenceWorker"),
        "workers.roles.reward": ("FunctionRewardConfig", "FunctionRewardWorker", "RewardWorker"),
        "workers.rollout.engine": ("Generation", "RolloutConfig", "SamplingOptions"),
        "workers.rollout.worker": ("RolloutWorker",),
    }.items()
    for attribute in attributes
)
"""The names that every worker knows, beside the options of the registered backends."""


def name_of(target: Any) -> str:
    """Return the name of a class or function.

    Raises:
        ConfigError: It is not at the top level of a module, so that no other process could find it.
    """
    module, attribute = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not module or not attribute:
        raise ConfigError(
            f"{target!r:.80} cannot be sent to a worker; send plain values, tensors, or a class or function of a module"
        )
    if "<" in attribute or _attribute(sys.modules.get(module), attribute) is not target:
        what = "a lambda" if attribute.endswith("<lambda>") else f"{attribute} of {module}"
        raise ConfigError(
            f"{what} cannot be sent to a worker, because another process could not find it by its name; define it at the top "
            "level of a module"
        )
    return f"{MAIN if module == _ALIAS else module}:{attribute}"


def is_reference(value: Any) -> bool:
    """Return whether a value is sent as a name."""
    return isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)


class Names:
    """A list of names.

    Args:
        extra: Names beside those of Drivetrain.
        main: The file of the program that started this worker, to which names `__main__:...` refer; None if this process is
            that program.
        objects: Classes and functions by names of their own, for processes that received them together with this list.
    """

    def __init__(self, extra: Iterable[str] = (), main: Path | None = None, objects: Mapping[str, Any] | None = None) -> None:
        options = {spec.options for spec in registry.backends().values() if spec.options}
        self._objects = dict(objects or {})
        self._object_names = {id(target): name for name, target in self._objects.items()}
        self.allowed = BUILT_IN | options | frozenset(extra) | self._objects.keys()
        self._main = main

    def refer(self, target: Any) -> str:
        """Return the name of a class or function.

        Raises:
            ConfigError: It has none, or the name is not on the list.
        """
        name = self._object_names.get(id(target)) or name_of(target)
        self._check(name)
        return name

    def resolve(self, name: str) -> Any:
        """Import the class or function of a name.

        Raises:
            ConfigError: The name is not on the list, or there is no such thing.
        """
        self._check(name)
        if name in self._objects:
            return self._objects[name]
        module_name, _, attribute = name.partition(":")
        try:
            module = self._main_module() if module_name == MAIN and self._main else import_module(module_name)
        except ImportError as e:
            raise ConfigError(f"{name} cannot be imported by the worker: {e}; install its module, or set PYTHONPATH") from e
        found = _attribute(module, attribute)
        if found is None:
            raise ConfigError(f"{name}: the module has no {attribute}")
        return found

    def _check(self, name: str) -> None:
        if name not in self.allowed:
            raise ConfigError(
                f"{name} is not on the list of names that was fixed when the workers started; add it there (names=[...] of a "
                "group, --allow of a worker)"
            )

    def _main_module(self) -> types.ModuleType:
        # As with multiprocessing, not as __main__, so that the program itself does not run again.
        if _ALIAS not in sys.modules:
            assert self._main is not None
            spec = spec_from_file_location(_ALIAS, self._main)
            if spec is None or spec.loader is None:
                raise ConfigError(f"{self._main} is not a Python program, so its functions cannot be found by a worker")
            module = module_from_spec(spec)
            sys.modules[_ALIAS] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[_ALIAS]
                raise
        return sys.modules[_ALIAS]


def references(value: Any) -> list[Any]:
    """Return what a value refers to: classes, functions and the classes of its dataclasses, at any depth."""
    if is_reference(value):
        return [value]
    parts: list[Any] = []
    found: list[Any] = []
    if is_dataclass(value):
        found.append(type(value))
        parts = [getattr(value, f.name) for f in fields(value) if f.init]
    elif isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    return found + [reference for part in parts for reference in references(part)]


def collect(value: Any) -> set[str]:
    """Return the names of what a value refers to, beside Drivetrain's own.

    Raises:
        ConfigError: A class or function has no name that another process could use.
    """
    return {name_of(target) for target in references(value)} - BUILT_IN


def main_file() -> Path | None:
    """Return the file of this program; None in an interactive session, whose functions no worker can find."""
    file = getattr(sys.modules.get(MAIN), "__file__", None)
    return None if file is None else Path(file).resolve()


def _attribute(module: types.ModuleType | None, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
