"""Metrics of a worker process, sent to its controller with every heartbeat."""

import threading

_lock = threading.Lock()
_values: dict[str, float] = {}


def add(name: str, value: float = 1.0) -> None:
    """Add to a metric, which starts at 0."""
    with _lock:
        _values[name] = _values.get(name, 0.0) + value


def put(name: str, value: float) -> None:
    """Set a metric."""
    with _lock:
        _values[name] = float(value)


def snapshot() -> dict[str, float]:
    """Return all metrics."""
    with _lock:
        return dict(_values)
