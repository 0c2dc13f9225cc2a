"""Metrics of the service, in the Prometheus format."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .replicas import Replicas

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """The metrics of one service."""

    def __init__(self) -> None:
        # Not the global registry, in which a second service in this process would register the same names.
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "drivetrain_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self.seconds = Histogram(
            "drivetrain_request_seconds",
            "Seconds to the end of a response, or to the beginning of a stream.",
            ["path"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.first_token = Histogram(
            "drivetrain_first_token_seconds", "Seconds to the first token.", registry=self._registry, buckets=_SECONDS
        )
        self.tokens = Counter("drivetrain_generated_tokens", "Tokens that were generated.", registry=self._registry)
        self.prompt_tokens = Counter("drivetrain_prompt_tokens", "Tokens of prompts.", registry=self._registry)
        self._active = Gauge("drivetrain_active_requests", "Completions that are being generated.", registry=self._registry)
        self._workers = Gauge("drivetrain_workers", "Workers that accept requests.", registry=self._registry)
        self._restarts = Gauge("drivetrain_worker_restarts", "Restarts of workers.", registry=self._registry)

    def text(self, replicas: Replicas) -> bytes:
        """Return all metrics as text."""
        # Gauges are read when they are asked for, and not kept up to date in between.
        self._active.set(replicas.active)
        self._workers.set(sum(worker.control.is_started() for worker in replicas.workers))
        self._restarts.set(sum(worker.control.restarts for worker in replicas.workers))
        return generate_latest(self._registry)
