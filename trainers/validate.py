"""Checks of settings that all trainers share, made before anything is built."""

import logging
from pathlib import Path

from ..engine.config import OptimConfig
from ..engine.lr_schedule import learning_rate
from .config.data import SourcesConfig
from .config.trainer import LoopConfig
from .loop.hub import check_push
from .loop.loggers import check_loggers

log = logging.getLogger(__name__)


def check_outputs(config: LoopConfig) -> None:
    """Check that the loggers are installed and that the trained model can be pushed.

    Raises:
        ConfigError: One of them is impossible; the message names the setting.
    """
    check_loggers(config.loggers)
    if config.push_to_hub is not None:
        check_push(config.push_to_hub)


def warn_about_data(data: SourcesConfig, batch_size: int, samples: int | None, unit: str = "samples") -> None:
    """Warn about data settings that are valid but rarely intended.

    Args:
        data: The settings.
        batch_size: `data.batch_size`.
        samples: The number of samples in an epoch; None if it is not known.
        unit: The noun for them in messages.
    """
    both = sorted({str(Path(name).resolve()) for name in data.train} & {str(Path(name).resolve()) for name in data.eval})
    if both:
        log.warning("data.eval has %s, which is also in data.train: an evaluation on it measures memorization", both[0])
    if doubled := data.doubled_columns():
        log.warning("data.columns: %s are the same column, %r", " and ".join(doubled), data.columns[doubled[0]])
    if samples is not None and batch_size > samples:
        log.warning(
            "data.batch_size=%d is larger than the dataset (%d %s), so every step uses each of them once; lower it for smaller steps",
            batch_size,
            samples,
            unit,
        )


def unused_settings(optim: OptimConfig, total_steps: int, name: str = "optim") -> list[str]:
    """Return lines about optimizer settings that have no effect, or only part of it.

    Args:
        optim: The settings.
        total_steps: The number of optimizer steps of the run.
        name: The name of the section.
    """
    defaults, lines = OptimConfig(), []
    if optim.warmup_steps and optim.warmup_ratio:
        lines.append(
            f"{name}.warmup_steps={optim.warmup_steps} is used; {name}.warmup_ratio={optim.warmup_ratio} would be used only without it"
        )
    if optim.warmup_steps > total_steps:
        reached = learning_rate(total_steps - 1, optim, total_steps)
        lines.append(
            f"{name}.warmup_steps={optim.warmup_steps} is more than the {total_steps} steps of the run, whose learning rate rises only to "
            f"{reached:.3g}, not to {name}.lr={optim.lr}"
        )
    for others, is_used, where in (
        (("min_lr_ratio",), optim.schedule != "constant", f"{name}.schedule={optim.schedule}"),
        (("decay_ratio",), optim.schedule == "wsd", f"{name}.schedule={optim.schedule}"),
        (("betas", "eps"), optim.name != "sgd", f"{name}.name={optim.name}"),
    ):
        for other in others:
            value = getattr(optim, other)
            if not is_used and value != getattr(defaults, other):
                text = list(value) if isinstance(value, tuple) else value
                lines.append(f"{name}.{other}={text} is not used with {where}")
    if not optim.lr:
        lines.append(f"{name}.lr=0.0: no parameter will change")
    return lines
