"""Numbers in the lines that a command prints."""

from datetime import timedelta


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, `1 sample`, `2 samples` or `2 processes`."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def format_percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """Format seconds as `h:mm:ss`."""
    return str(timedelta(seconds=round(seconds)))
