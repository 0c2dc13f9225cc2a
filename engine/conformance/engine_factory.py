"""What checks stand on: engines of the backend under test on a tiny model, a plain loss, comparisons that explain themselves."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..base import BaseEngine
from ..config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from ..packing.batch import PackedBatch
from ..packing.convert import from_lists
from ..packing.microbatch import balance
from ..registry import engine_class
from .tiny import save_tiny_model

OPTIM = OptimConfig(lr=1e-4, betas=(0.9, 0.999), weight_decay=0.1)


class ConformanceError(AssertionError):
    """An engine breaks the contract."""


@dataclass(kw_only=True)
class EngineFactory:
    """Builds engines of one backend for the checks.

    Args:
        backend: its name.
        parallel: the layout to check; must make the number of processes.
        family: of the tiny model.
        options: `engine.options`.
        folder: of the tiny model, shared by all ranks.
    """

    backend: str
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    family: str = "qwen3"
    options: Any = None
    folder: Path

    @contextmanager
    def engine(self, *, max_tokens: int = 96, optim: OptimConfig | None = OPTIM, **settings: Any) -> Iterator[BaseEngine]:
        """An initialised engine, closed at the end."""
        config = EngineConfig(
            backend=self.backend,
            parallel=self.parallel,
            micro_batch=MicroBatchConfig(max_tokens=max_tokens),
            options=self.options,
            **settings,
        )
        engine = engine_class(self.backend)(model=ModelConfig(path=str(self.folder)), engine=config, optim=optim).initialize()
        try:
            yield engine
        finally:
            engine.close()

    def share(self, engine: BaseEngine, documents: Sequence[Sequence[int]], **fields: Any) -> PackedBatch:
        """This rank's balanced share of a global batch."""
        mine = self.indices(engine, documents)
        return self.pack(documents, mine, **fields)

    def indices(self, engine: BaseEngine, documents: Sequence[Sequence[int]]) -> list[int]:
        """Which documents this rank works on."""
        return balance([len(d) for d in documents], engine.topology.dp_size)[engine.topology.dp_rank]

    def pack(self, documents: Sequence[Sequence[int]], mine: Sequence[int], **fields: Any) -> PackedBatch:
        """Chosen documents, packed; empty shares are allowed."""
        return from_lists([documents[i] for i in mine], names=[f"doc {i}" for i in mine], **fields)


def near(what: str, got: float, want: float, bound: float) -> None:
    """Raise unless two numbers agree to a relative bound."""
    off = abs(got - want) / max(abs(want), 1e-30)
    if not off <= bound:
        raise ConformanceError(f"{what}: {got!r}, expected {want!r}; off by {off:.1e}, allowed {bound:.0e}")


def holds(condition: bool, what: str) -> None:
    """Raise unless a condition holds."""
    if not condition:
        raise ConformanceError(what)


def raises(kinds: type[Exception] | tuple[type[Exception], ...], do: Callable[[], Any], what: str) -> Exception:
    """Run something that must fail in a certain way; the error."""
    try:
        do()
    except kinds as e:
        return e
    except Exception as e:
        raise ConformanceError(f"{what}: raised {type(e).__name__} ({e})") from e
    raise ConformanceError(f"{what}: nothing was raised")


def weights_of(engine: BaseEngine) -> dict[str, Tensor]:
    """Copies of all weights, under Hugging Face names."""
    with engine.named_weights() as stream:
        return {name: value.detach().cpu().clone() for name, value in stream}


@contextmanager
def bench(
    backend: str, parallel: ParallelConfig | None = None, family: str = "qwen3", options: Any = None
) -> Iterator[EngineFactory]:
    """A bench on a tiny model in a temporary folder. Collective over the default process group."""
    with tempfile.TemporaryDirectory() as made:
        shared = [made]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0]) / "model"
        if dist.get_rank() == 0:
            save_tiny_model(folder, family)
        dist.barrier()
        yield EngineFactory(
            backend=backend, parallel=parallel or ParallelConfig(), family=family, options=options, folder=folder
        )
        # The first rank's folder must outlive everybody's reading.
        dist.barrier()
