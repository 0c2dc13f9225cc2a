"""The random state of a process as JSON, so that a resumed run draws the same numbers as an uninterrupted one."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """Return the state of torch's, NumPy's and Python's generators."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
        "python": [version, list(internal), gauss],
    }


def check_rng(state: Any) -> None:
    """Check that `restore_rng` accepts a state, before anything is changed.

    Raises:
        ValueError: It is not a valid random state.
    """
    # The generators themselves are the only complete check of a state, so it is set and taken back.
    before = rng_state()
    try:
        restore_rng(state)
    except Exception as e:  # anything can be wrong in an untrusted file
        raise ValueError(f"{type(e).__name__} {e}") from e
    finally:
        restore_rng(before)


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore a state that `rng_state` returned."""
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def seed_all(*parts: int) -> None:
    """Seed all generators from several numbers; each combination gives different seeds."""
    # `SeedSequence` mixes the numbers, so neighboring seeds and ranks get unrelated states.
    entropy = np.random.SeedSequence(list(parts)).generate_state(3, dtype=np.uint32)
    torch.manual_seed(int(entropy[0]))
    np.random.seed(int(entropy[1]))
    random.seed(int(entropy[2]))


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8).clone()
