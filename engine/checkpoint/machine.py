"""The processor, its threads and torch's kernels, which determine the order of sums and with it the last bits of results."""

import logging
import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)


def describe_machine() -> dict[str, Any]:
    """Return the processor or GPU, the number of threads and the version of torch of this process, as JSON."""
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}"
    )
    return {"device": device, "threads": torch.get_num_threads(), "torch": torch.__version__}


@cache
def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def warn_if_machine_differs(source: object, stored: Any) -> None:
    """Warn that results may differ in the last bits, if a stored run continues on another machine.

    Args:
        source: The name of the stored state, for the message.
        stored: What `describe_machine` returned there; None if an older version stored it.
    """
    if not isinstance(stored, dict):
        return
    here = describe_machine()
    others = [f"{name} {stored[name]} instead of {value}" for name, value in here.items() if stored.get(name, value) != value]
    if others:
        log.warning(
            "%s was computed with %s: results agree within rounding, but not to the bit; the run continues",
            source,
            ", ".join(others),
        )
