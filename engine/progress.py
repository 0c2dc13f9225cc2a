"""Count of the units of work that this process has finished, so that a supervisor can tell slow from stuck."""

_done = 0


def advance() -> None:
    """Count one finished unit: a micro-batch, a generated token of a batch, a tensor of the weights."""
    global _done
    _done += 1


def finished() -> int:
    """Return the number of finished units since the process started."""
    return _done
