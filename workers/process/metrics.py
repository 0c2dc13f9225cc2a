"""Named numbers of a worker process, which travel to its controller with every beat. Does not import torch."""

import threading

_lock = threading.Lock()
_values: dict[str, float] = {}


def add(name: str, value: float = 1.0) -> None:
    """Add to a number, which begins at 0."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + value


def put(name: str, value: float) -> None:
    """Set a number."""
    with _lock:
        _values[name] = float(value)


def snapshot() -> dict[str, float]:
    """Return all numbers."""
    with _lock:
        return dict(_values)
