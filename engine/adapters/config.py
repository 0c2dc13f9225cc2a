"""The settings of one of several adapters."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..config import MOST_SEED, Settings, check_least, setting
from ..errors import ConfigError

Target = Literal["attention", "mlp", "unembedding"]
TARGETS: tuple[Target, ...] = ("attention", "mlp", "unembedding")
"""The targets of adapters: the linear layers of all token mixers, those of all feed-forward networks, and the head."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(Settings):
    """An adapter (Hu et al. 2021, arXiv:2106.09685), one of several on the same frozen model."""

    section: ClassVar[str] = "adapter"

    rank: int = setting(32, "rank of the adapter", most=65536)
    alpha: float = setting(32.0, "the output of the adapter is scaled by alpha / rank", most=1e6)
    targets: tuple[str, ...] = setting(("attention", "mlp"), "the layers to adapt: attention, mlp, unembedding")
    seed: int = setting(0, "seed of the initial matrices A; the matrices B are initialized with zeros", most=MOST_SEED)

    def _check_values(self) -> None:
        check_least("adapter.rank", self.rank, 1)
        check_least("adapter.seed", self.seed, 0)
        if not self.alpha > 0:
            raise ConfigError(f"adapter.alpha={self.alpha}; it must be above 0")
        if not self.targets:
            raise ConfigError(f"adapter.targets=[]; name at least one of {', '.join(TARGETS)}")
        for target in self.targets:
            if target not in TARGETS:
                raise ConfigError(f"adapter.targets has {target!r}; an adapter can adapt {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """The factor on the adapter's output."""
        return self.alpha / self.rank
