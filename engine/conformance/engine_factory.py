"""Utilities of the conformance checks: a factory of engines of the backend under test, and assertions with clear errors."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..base import BaseEngine
from ..config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig
from ..packing.batch import PackedBatch
from ..packing.convert import from_lists
from ..packing.microbatch import balance
from ..packing.sharing import find_prefixes
from ..registry import engine_class
from .tiny import save_tiny_model

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)


class ConformanceError(AssertionError):
    """An engine does not conform to the engine interface."""


@dataclass(kw_only=True)
class EngineFactory:
    """Factory of engines of one backend for the checks.

    Args:
        backend: The name of the backend.
        parallel: The parallel layout to check, which must match the number of processes.
        family: The family of the tiny model.
        options: The settings specific to the backend, `engine.options`.
        folder: The folder of the tiny model, shared by all ranks.
    """

    backend: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    family: str = "qwen3"
    options: Any = None
    folder: Path

    @contextmanager
    def engine(
        self,
        *,
        max_tokens: int = 96,
        optim: OptimConfig | None = OPTIM,
        model: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Iterator[BaseEngine]:
        """Yield an initialized engine, which is closed at the end of the `with` block.

        It computes in float32, also on a GPU, because the checks' bounds are for float32. Nothing is compiled.

        Args:
            max_tokens: The token budget of a micro-batch.
            optim: The optimizer settings; None for an engine that only runs inference.
            model: Additional fields of `ModelConfig`.
            **settings: Additional fields of `EngineConfig`.
        """
        config = EngineConfig(
            backend=self.backend,
            parallel=self.parallel,
            micro_batch=MicroBatchConfig(max_tokens=max_tokens),
            options=self.options,
            **{"precision": PrecisionConfig(compute="float32"), "compile": False, **settings},
        )
        built = engine_class(self.backend)(
            model=ModelConfig(path=str(self.folder), **(model or {})), engine=config, optim=optim
        )
        engine = built.initialize()
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def with_model(self, family: str) -> Iterator["EngineFactory"]:
        """Yield a factory with a tiny model of another family, in the same backend and layout. Collective."""
        folder = self.folder.parent / family
        if dist.get_rank() == 0:
            save_tiny_model(folder, family)
        # No rank may read the folder before it is complete.
        dist.barrier()
        yield replace(self, family=family, folder=folder)
        dist.barrier()

    def check(self) -> None:
        """Check that the engine accepts the layout, without building it. Not collective.

        Raises:
            DrivetrainError: The engine does not accept the layout.
        """
        config = EngineConfig(backend=self.backend, parallel=self.parallel, options=self.options)
        engine_class(self.backend)(model=ModelConfig(path=str(self.folder)), engine=config).check()

    def share(self, engine: BaseEngine, documents: Sequence[Sequence[int]], **fields: Any) -> PackedBatch:
        """Return this rank's balanced data-parallel shard of a global batch."""
        indices = self.indices(engine, documents)
        return self.pack(documents, indices, **fields)

    def indices(self, engine: BaseEngine, documents: Sequence[Sequence[int]]) -> list[int]:
        """Return the indices of the documents in this rank's data-parallel shard."""
        prefixes = find_prefixes(from_lists(documents)) if engine.shares_prefixes else None
        return balance([len(d) for d in documents], engine.topology.dp_size, prefixes=prefixes)[engine.topology.dp_rank]

    def pack(self, documents: Sequence[Sequence[int]], mine: Sequence[int], **fields: Any) -> PackedBatch:
        """Pack the documents with the indices `mine`, which may be empty."""
        return from_lists([documents[i] for i in mine], names=[f"doc {i}" for i in mine], **fields)


def assert_close(what: str, got: float, want: float, bound: float) -> None:
    """Check that two numbers agree within a relative bound.

    Args:
        what: The description of the number, for the message.
        got: The number to check.
        want: The expected number.
        bound: The maximum relative error.

    Raises:
        ConformanceError: The numbers differ by more.
    """
    error = abs(got - want) / max(abs(want), 1e-30)
    if not error <= bound:
        raise ConformanceError(f"{what}: {got!r}, expected {want!r}; relative error {error:.1e}, allowed {bound:.0e}")


def assert_that(condition: bool, what: str) -> None:
    """Check a condition.

    Args:
        condition: The condition.
        what: The message if it is false.

    Raises:
        ConformanceError: The condition is false.
    """
    if not condition:
        raise ConformanceError(what)


def assert_raises(kinds: type[Exception] | tuple[type[Exception], ...], do: Callable[[], Any], what: str) -> Exception:
    """Check that a call raises a certain error, and return the error.

    Args:
        kinds: The expected type or types of the error.
        do: The call.
        what: The description of the call, for the message.

    Raises:
        ConformanceError: The call raised another error or none.
    """
    try:
        do()
    except kinds as e:
        return e
    except Exception as e:
        raise ConformanceError(f"{what}: raised {type(e).__name__} ({e})") from e
    raise ConformanceError(f"{what}: nothing was raised")


def weights_of(engine: BaseEngine) -> dict[str, Tensor]:
    """Return copies of all weights under Hugging Face names. Collective."""
    with engine.named_weights() as stream:
        return {name: value.detach().cpu().clone() for name, value in stream}


@contextmanager
def engine_factory(
    backend: str, parallel: ParallelConfig | None = None, family: str = "qwen3", options: Any = None
) -> Iterator[EngineFactory]:
    """Yield an `EngineFactory` for a tiny model in a temporary folder. Collective over the default process group.

    Args:
        backend: The name of the backend.
        parallel: The parallel layout to check; the default layout if None.
        family: The family of the tiny model.
        options: The settings specific to the backend, `engine.options`.
    """
    with tempfile.TemporaryDirectory() as temporary:
        shared = [temporary]
        # Each rank has created a folder; all of them use that of the first rank.
        dist.broadcast_object_list(shared)
        folder = Path(shared[0]) / "model"
        if dist.get_rank() == 0:
            save_tiny_model(folder, family)
        dist.barrier()
        yield EngineFactory(
            backend=backend, parallel=parallel or ParallelConfig(), family=family, options=options, folder=folder
        )
        # The first rank must not delete the folder before all ranks have read it.
        dist.barrier()
