"""Lazy imports of the public names, so that importing a configuration does not import torch, and errors for moved modules."""

import ast
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = __name__.rpartition(".")[0]

MOVED_MODULES = {
    "checkpoint_tools.cli": "checkpoint_tools.commands",
    "engine.checkpointable": "engine.base",
    "engine.fsdp.trial": "engine.fsdp.packing_check",
    "serve.app": "serve.openai.app",
    "serve.chat": "trainers.chat",
    "serve.cli": "serve.openai.serve_command",
    "serve.generate": "trainers.generate",
    "serve.model": "serve.openai.model",
    "serve.replicas": "serve.openai.replicas",
    "serve.settings": "serve.openai.settings",
    "serve.source": "checkpoint_tools.model_source",
    "trainers.data_show.cli": "trainers.data_show.data_command",
    "trainers.demo.cli": "trainers.demo.demo_command",
    "trainers.parity.cli": "trainers.parity.parity_command",
    "trainers.dry_run": "trainers.offline.dry_run",
    "trainers.hub": "trainers.loop.hub",
    "trainers.launch": "trainers.main",
    "trainers.loop.resume": "trainers.offline.run",
    "trainers.loop.parts": "trainers.loop.callbacks",
    "trainers.report": "trainers.offline.report",
    "trainers.loop.answer_metrics": "trainers.loop.completion_metrics",
    "trainers.rl.answers": "trainers.rl.completions",
    "trainers.rl.cli": "trainers.rl.phase_commands",
    "trainers.rl.controllers": "trainers.loop.ranks",
    "trainers.rl.lane": "trainers.rl.reward_runner",
    "trainers.rl.ledger": "trainers.rl.memory_manager",
    "trainers.rl.step_bundles": "trainers.rl.bundle",
    "trainers.run": "trainers.offline.run",
    "trainers.run_folder": "trainers.loop.run_folder",
    "trainers.trainer": "trainers.offline.trainer",
    "workers.advantages": "losses.advantages",
    "workers.batch_adapters": "workers.roles.batch_adapters",
    "workers.dispatch": "workers.roles.dispatch",
    "workers.embeddings": "generation.embeddings",
    "workers.embeddings.scheduler": "generation.embeddings.text_scheduler",
    "workers.embeddings.worker": "workers.roles.embedder",
    "workers.groups.hooks": "workers.protocol.hooks",
    "workers.groups.planned": "workers.groups.group_call",
    "workers.groups.receipts": "workers.groups.base",
    "workers.groups.sample_calls": "workers.groups.group_call",
    "workers.losses": "losses",
    "workers.model_worker": "workers.process",
    "workers.model_worker.buckets": "workers.data_plane.buckets",
    "workers.model_worker.cli": "workers.process.program",
    "workers.model_worker.codec": "workers.protocol.codec",
    "workers.model_worker.comm_id": "workers.protocol.comm_id",
    "workers.model_worker.compute_messages": "workers.protocol.compute_messages",
    "workers.model_worker.controller": "workers.supervision.controller",
    "workers.model_worker.data_messages": "workers.protocol.data_messages",
    "workers.model_worker.digests": "workers.data_plane.digests",
    "workers.model_worker.errors": "workers.protocol.errors",
    "workers.model_worker.hooks": "workers.protocol.hooks",
    "workers.model_worker.hosts": "workers.supervision.hosts",
    "workers.model_worker.manifest": "workers.protocol.manifest",
    "workers.model_worker.messages": "workers.protocol.messages",
    "workers.model_worker.names": "workers.protocol.names",
    "workers.model_worker.process": "workers.supervision.child_process",
    "workers.model_worker.protocol": "workers.protocol.operations",
    "workers.model_worker.response_stream": "workers.supervision.response_stream",
    "workers.model_worker.step_handlers": "workers.tensor_parallel.handlers",
    "workers.model_worker.stream_messages": "workers.protocol.stream_messages",
    "workers.model_worker.supervision": "workers.supervision.supervisor",
    "workers.model_worker.supervisor": "workers.supervision.supervisor",
    "workers.model_worker.transports": "workers.protocol.transports",
    "workers.model_worker.values": "workers.protocol.values",
    "workers.process.hook_runner": "workers.process.hooks",
    "workers.processes": "engine.parallel",
    "workers.rewards": "rewards",
    "workers.rollout": "generation",
    "workers.rollout.generation": "generation.result",
    "workers.rollout.scheduler": "generation.token_scheduler",
    "workers.rollout.worker": "workers.roles.generator",
    "workers.scheduler": "generation.scheduler",
    "workers.sharded_lm": "workers.tensor_parallel",
}
"""Old names of modules and packages, mapped to the new ones. A package's modules have moved with it unless they are listed themselves."""

RENAMED = {"RLOutcome": "TrainResult", "RunOutcome": "TrainResult"}
"""Old public names, mapped to the new ones."""


def lazy_exports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build a package's `__getattr__` and `__dir__` (PEP 562) from the stub beside it, which type checkers read.

    Args:
        package: The package's `__name__`.
        file: The package's `__file__`.
    """

    @cache
    def modules() -> dict[str, str]:
        tree = ast.parse(Path(file).with_suffix(".pyi").read_text())
        return {
            alias.name: f".{node.module}" for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
        }

    def resolve(name: str) -> Any:
        if name in RENAMED:
            # Python would replace an AttributeError with a message that does not mention the new name.
            raise ImportError(f"{name} is now {RENAMED[name]}: use from {_ROOT} import {RENAMED[name]}")
        # Dunder names, which the import system and introspection tools look up, are not in the stub.
        if name.startswith("_") or name not in modules():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules()[name], package), name)

    return resolve, lambda: sorted(modules())


def public_names_only(package: str) -> Callable[[str], Any]:
    """Build the `__getattr__` of a package whose public names can be imported from the top-level package only.

    Args:
        package: The package's `__name__`.
    """

    def refuse(name: str) -> Any:
        root = sys.modules[_ROOT]
        if not name.startswith("_") and name in dir(root):
            # Python would replace an AttributeError with a message that does not mention the public path.
            raise ImportError(f"{name} is a public name: use from {_ROOT} import {name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return refuse


def moved_module(name: str) -> str | None:
    """Return the new name of a module, given its old name relative to this package; None if it has not moved."""
    prefix = name
    while prefix:
        if prefix in MOVED_MODULES:
            return MOVED_MODULES[prefix] + name.removeprefix(prefix)
        prefix = prefix.rpartition(".")[0]
    return None


class _MovedModules(MetaPathFinder, Loader):
    """The last import finder: a module that no other finder has found may have moved. The error names its new path.

    Python first imports the parent packages of a module. Moved packages load as empty ones, so that the error is about the module.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a moved package.

        Raises:
            ModuleNotFoundError: The name is that of a moved module; the message names the new one.
        """
        root, _, name = fullname.partition(".")
        new = moved_module(name) if root == _ROOT else None
        if new is None:
            return None
        place = Path(__file__).parent / new.replace(".", "/")
        if place.is_dir():
            return ModuleSpec(fullname, self, is_package=True)
        if place.with_suffix(".py").is_file():
            raise ModuleNotFoundError(f"{fullname} has moved: import {_ROOT}.{new}", name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Use Python's default module creation."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Make every attribute of a moved package raise an error that names its new path."""
        new = moved_module(module.__name__.partition(".")[2])

        def refuse(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            raise ImportError(f"{module.__name__} has moved: import {name} from {_ROOT}.{new}")

        module.__dict__["__getattr__"] = refuse


def name_moved_modules() -> None:
    """Install the finder that reports the new paths of moved modules."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
