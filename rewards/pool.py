"""Processes for reward functions; each can be killed."""

import pickle
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any, Self

from ..engine.errors import ConfigError
from ..engine.parallel.fork_pool import LOAD_S, CallError, ForkPool, PoolClosedError, StartError, is_importing_program
from ..engine.parallel.fork_server import ProcessEndedError
from .registry import import_function
from .sample import RewardOutcome, RewardSample
from .signatures import Signature, judge, signature_of

MIB = 2**20
_CLOSED = "the reward pool was closed"

DoneCallback = Callable[[list[RewardOutcome], bool], None]
RewardTarget = str | Callable[..., Any]
"""A reward function, or its location as `module:function`."""


class RewardPool:
    """Runs reward functions in separate processes, with limits on time and memory. Use it as a context manager, or close it.

    A process whose call takes too long is killed and replaced, and the call has no value. A process that ends by itself is replaced too,
    also when all of them end because the system runs out of memory. A call whose process ended is retried once, since something else may
    have ended the process; it has no value if the second process ends too. Pending calls run when a process is available again.

    Args:
        workers: The number of processes.
        timeout_s: The time limit of a call, in seconds.
        memory_mb: The memory limit for the data of a process, in MiB.
        targets: Functions whose modules every process imports at its start, so that the import does not count toward a call's time.

    Raises:
        ConfigError: A function cannot be sent to another process.
    """

    def __init__(
        self, workers: int = 2, timeout_s: float = 10.0, memory_mb: int = 4096, targets: Sequence[RewardTarget] = ()
    ) -> None:
        if is_importing_program():
            raise ConfigError(
                "a reward process imports this program, which must start its run under if __name__ == '__main__':"
            )
        for target in targets:
            if getattr(target, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
                raise ConfigError(
                    f"the reward {title_of(target)} is defined in a program without a file (a notebook, python -c or standard input), "
                    "which other processes cannot import; define it in a module"
                )
            try:
                pickle.dumps(target)
            except Exception as e:  # pickling runs code of the function's class, which can raise anything
                raise ConfigError(
                    f"the reward {title_of(target)} cannot be used: {type(e).__name__}: {e}; it must be at the top level of a module"
                ) from e
        self.timeout_s = timeout_s
        # The functions can be unpickled only after the program has been imported.
        start = (memory_mb * MIB, pickle.dumps(tuple(targets)))
        self._pool = ForkPool(workers, __name__, _prepare, start, imports_program=True)

    def describe(self, target: RewardTarget) -> Signature:
        """Import a function in one of the processes, and return its signature.

        Raises:
            ConfigError: It cannot be imported or called, or importing it takes too long.
        """
        try:
            signature: Signature = self._pool.submit(_describe, target, timeout_s=LOAD_S).result()
        except ConfigError:
            raise
        except TimeoutError:
            raise ConfigError(f"the module of the reward {title_of(target)} took more than {LOAD_S:g} s to import") from None
        except StartError as e:
            raise ConfigError(
                f"the reward processes end as soon as they start ({e}): they import this program, which must start its run under "
                "if __name__ == '__main__':"
            ) from e
        except Exception as e:  # the module raised it, or its result cannot be pickled
            raise ConfigError(
                f"the reward {title_of(target)} cannot be used: {_text(e)}; it must be at the top level of a module"
            ) from e
        return signature

    def submit(
        self,
        target: RewardTarget,
        samples: Sequence[RewardSample],
        settings: Mapping[str, Any],
        done: DoneCallback,
        *,
        calls: int = 1,
    ) -> None:
        """Score completions in one of the processes, as soon as it is free.

        Args:
            target: The function.
            samples: The completions.
            settings: Additional arguments of the function.
            done: Called in a thread of the pool with an outcome for each completion, and whether the outcomes are separate. They are not
                if one failure stands for all: the call was killed, its process died, or a function of all completions raised.
            calls: The time limit for the completions, in multiples of `timeout_s`.

        Raises:
            ConfigError: The pool was closed.
        """
        limit = self.timeout_s * calls

        def call(finish: Callable[[Future[Any]], None]) -> None:
            try:
                outcome = self._pool.submit(_score, target, list(samples), dict(settings), self.timeout_s, timeout_s=limit)
            except PoolClosedError:
                raise
            except Exception as e:  # pickle: the completions hold something that cannot be sent
                outcome = Future()
                outcome.set_exception(e)
            outcome.add_done_callback(finish)

        def finish(ended: Future[Any]) -> None:
            done(*_outcomes(ended, len(samples), limit))

        def finish_first(ended: Future[Any]) -> None:
            if not ended.cancelled() and isinstance(ended.exception(), ProcessEndedError):
                # If the pool has been closed in the meantime, the first failure is the result.
                with suppress(PoolClosedError):
                    call(finish)
                    return
            finish(ended)

        try:
            call(finish_first)
        except PoolClosedError:
            raise ConfigError(_CLOSED) from None

    @property
    def closed(self) -> bool:
        """Whether it no longer accepts calls."""
        return self._pool.closed

    def close(self) -> None:
        """End all processes; running calls are killed, and pending ones are dropped."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def title_of(target: RewardTarget) -> str:
    """Return the name of a function for messages."""
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__name__)


def _outcomes(ended: "Future[Any]", count: int, limit: float) -> tuple[list[RewardOutcome], bool]:
    """Return the outcome of each completion, and whether the outcomes are separate (see `RewardPool.submit`)."""
    try:
        outcomes, separate = ended.result()
        return outcomes, separate
    except TimeoutError:
        outcome = RewardOutcome(
            kind="timeout", message=f"it took more than {limit:g} s and was killed", seconds=limit / max(1, count)
        )
    except ProcessEndedError as e:
        outcome = RewardOutcome(kind="error", message=f"its process ended ({e})")
    except BaseException as e:  # raised by the call or by pickle
        outcome = RewardOutcome(kind="error", message=_text(e))
    return [outcome] * count, False


def _text(error: BaseException) -> str:
    if isinstance(error, PoolClosedError):
        return _CLOSED
    return str(error) if isinstance(error, CallError) else f"{type(error).__name__}: {error}"


# ---- in a process -------------------------------------------------------------------------------------------------------


def _prepare(size: int, targets: bytes) -> None:
    # Limits private memory; a limit of the address space would also count reserved memory.
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    # An import error is reported by the call itself.
    with suppress(Exception):
        for target in pickle.loads(targets):
            with suppress(Exception):
                _resolve(target)
                # The function imports this library when it first needs it, which would count toward the time of that
                # call.
                if str(target).endswith(":match_answer"):
                    import_module("math_verify")


def _resolve(target: RewardTarget) -> Callable[..., Any]:
    return import_function(target) if isinstance(target, str) else target


def _describe(target: RewardTarget) -> Signature:
    return signature_of(_resolve(target))


def _score(
    target: RewardTarget, samples: list[RewardSample], settings: dict[str, Any], timeout_s: float
) -> tuple[list[RewardOutcome], bool]:
    return judge(_resolve(target), samples, settings, timeout_s)
