"""Conformance checks: `torchrun --nproc-per-node N -m drivetrain.engine.conformance BACKEND [cp=2 ...]`."""

import argparse
import os
from dataclasses import fields, replace
from typing import Any

import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from ..config import ParallelConfig
from ..errors import ConfigError, DrivetrainError
from ..parallel.collectives import collective_errors
from ..parallel.process import exit_process, report_failure
from ..parallel.process_groups import close_distributed, init_distributed
from ..parallel.topology import resolve_parallel
from ..registry import spec_of
from .checks import CHECKS
from .engine_factory import ConformanceError, engine_factory


def parse_layout(words: list[str]) -> ParallelConfig:
    """Parse a layout.

    Args:
        words: The axes, as in `["cp=2", "dp_replicate=2"]`.

    Raises:
        ConfigError: An axis is unknown, or its size is not a number.
    """
    layout = ParallelConfig()
    axis_names = {f.name for f in fields(ParallelConfig)}
    for word in words:
        axis, _, value = word.partition("=")
        switch = {"true": True, "false": False}.get(value.lower())
        is_switch = isinstance(getattr(layout, axis, None), bool)
        if axis not in axis_names or (switch is None if is_switch else not value.isdigit()):
            raise ConfigError(
                f"{word!r} is not an axis with a size (axis=N, tp_sequence=true); the axes are {', '.join(sorted(axis_names))}"
            )
        sizes: dict[str, Any] = {axis: switch if is_switch else int(value)}
        layout = replace(layout, **sizes)
    return layout


def main() -> int:
    """Run the checks and return the exit code.

    Raises:
        DrivetrainError: The layout does not fit the backend or the number of processes, or checks failed.
    """
    parser = argparse.ArgumentParser(
        prog="drivetrain conformance", description="Check that a backend conforms to the engine interface."
    )
    parser.add_argument("backend")
    parser.add_argument("layout", nargs="*", help="parallel layout, e.g. cp=2 dp_replicate=2")
    parser.add_argument("--family", default="qwen3", help="model family of the tiny model")
    parser.add_argument("--only", nargs="+", choices=sorted(CHECKS), help="run only these checks")
    args = parser.parse_args()
    spec_of(args.backend)
    layout = parse_layout(args.layout)
    resolve_parallel(layout, int(os.environ.get("WORLD_SIZE", "1")))
    disable_progress_bar()
    device = init_distributed()
    main_rank, failed = dist.get_rank() == 0, 0
    with engine_factory(args.backend, layout, args.family) as factory:
        # A layout that the engine rejects is reported once, not by every check.
        with collective_errors():
            factory.check()
        for name in args.only or CHECKS:
            error: str | None = None
            try:
                CHECKS[name](factory)
            except Exception as e:  # a backend may fail in any way, and the next check must still run
                error = str(e) if isinstance(e, ConformanceError) else f"{type(e).__name__}: {e}"
            # Ranks that passed also learn of the failure, so that all begin the next check together.
            errors: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(errors, error)
            first = next((f"rank {r}: {text}" for r, text in enumerate(errors) if text), None)
            failed += first is not None
            if main_rank:
                print(f"{'FAIL' if first else 'ok':4}  {name:14} {first or ''}", flush=True)
    if main_rank:
        where = f"{dist.get_world_size()} processes with {device.type}"
        print(f"{len(args.only or CHECKS) - failed} checks passed, {failed} failed, on {where}")
    close_distributed()
    if failed:
        raise DrivetrainError(f"{failed} of {len(args.only or CHECKS)} checks failed")
    return 0


if __name__ == "__main__":
    try:
        exit_process(main())
    except Exception as e:
        # After any error this process must exit now, because its peers would wait for it until their timeout.
        exit_process(report_failure(e))
