"""Checks of a run's settings, on their own and with its method, before anything is built."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from ..engine.config import OptimConfig
from ..engine.errors import ConfigError
from ..engine.lr_schedule import learning_rate
from .config.data import SourcesConfig
from .config.runs import RunConfig
from .data.dataset import Budget
from .hub import check_push
from .loop.answer_metrics import AnswerMetrics, Metric
from .loop.early_stopping import EarlyStopping
from .loop.loggers import check_loggers
from .methods.base import TrainingMethod

log = logging.getLogger(__name__)


def check_run(config: RunConfig, method: TrainingMethod, metrics: Sequence[Metric] = ()) -> None:
    """Check everything that can be checked without data and without a model. Not collective.

    Args:
        config: The run's settings.
        method: The training method.
        metrics: Metrics of generated answers, beside those that the settings name.

    Raises:
        ConfigError: A setting is wrong; the message names the setting, its value and how to fix it.
    """
    config.check()
    method.check()
    sample_budget(config, method)
    if metrics and not config.trainer.generate:
        raise ConfigError("metrics are given, which measure generated answers, but trainer.generate=0; set it to their number")
    early_stopping_of(config, method, AnswerMetrics.of(config.trainer.metrics, metrics), "")
    check_loggers(config.trainer.loggers)
    if config.trainer.push_to_hub is not None:
        check_push(config.trainer.push_to_hub)


def early_stopping_of(config: RunConfig, method: TrainingMethod, metrics: AnswerMetrics, data: str) -> EarlyStopping:
    """Return the tracker of the best evaluation.

    Args:
        config: The run's settings.
        method: The training method.
        metrics: The metrics of the generated answers, of which higher is better.
        data: The digest of the evaluation data.

    Raises:
        ConfigError: There is no such metric.
    """
    measured = {**method.lower_is_better, **dict.fromkeys(metrics.names, False)}
    return EarlyStopping(
        config.trainer.best_metric, config.trainer.patience, data, measured, config.trainer.stopping_threshold
    )


def warn_about_data(data: SourcesConfig, batch_size: int, samples: int | None, unit: str = "samples") -> None:
    """Warn of settings of the data that are possible and rarely meant.

    Args:
        data: The settings.
        batch_size: `data.batch_size`.
        samples: The number of samples to train on in an epoch; None if it is not known.
        unit: What they are called.
    """
    both = sorted({str(Path(name).resolve()) for name in data.train} & {str(Path(name).resolve()) for name in data.eval})
    if both:
        log.warning(
            "data.eval has %s, which is in data.train too: an evaluation on it measures what was learned by heart", both[0]
        )
    if doubled := data.doubled_columns():
        log.warning("data.columns: %s are one column, %r", " and ".join(doubled), data.columns[doubled[0]])
    if samples is not None and batch_size > samples:
        log.warning(
            "data.batch_size=%d is more than the %d %s: every step uses all of them once, and has no more",
            batch_size,
            samples,
            unit,
        )


def unused_settings(optim: OptimConfig, total_steps: int, name: str = "optim") -> list[str]:
    """Return lines about settings of the optimizer that do not take effect, or not all of it.

    Args:
        optim: The settings.
        total_steps: The number of optimizer steps of the run.
        name: The name of the section.
    """
    defaults, lines = OptimConfig(), []
    if optim.warmup_steps and optim.warmup_ratio:
        lines.append(
            f"{name}.warmup_steps={optim.warmup_steps} counts; {name}.warmup_ratio={optim.warmup_ratio} is used only without it"
        )
    if optim.warmup_steps > total_steps:
        reached = learning_rate(total_steps - 1, optim, total_steps)
        lines.append(
            f"{name}.warmup_steps={optim.warmup_steps} is more than the {total_steps} steps of the run, whose learning rate rises to "
            f"{reached:.3g} of {name}.lr={optim.lr}"
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


def sample_budget(config: RunConfig, method: TrainingMethod) -> Budget:
    """Return the maximum number of tokens in a sample that fits the layout's training and inference micro-batches.

    Args:
        config: The run's settings.
        method: The training method.

    Raises:
        ConfigError: `data.max_length` is larger than this number.
    """
    sizes, multiple = config.engine.micro_batch, math.lcm(config.engine.parallel.token_multiple, method.token_multiple)
    max_tokens, name = sizes.max_tokens, "engine.micro_batch.max_tokens"
    if (config.data.eval or method.infers) and sizes.infer_max_tokens is not None and sizes.infer_max_tokens < max_tokens:
        max_tokens, name = sizes.infer_max_tokens, "engine.micro_batch.infer_max_tokens"
    usable = max_tokens // multiple * multiple
    max_length = config.data.max_length
    if max_length is not None and max_length > usable:
        raise ConfigError(
            f"data.max_length={max_length} is more than {name}={max_tokens}: a sample of that length would not fit in any "
            "micro-batch; raise the budget or lower the length"
        )
    rounded = "" if usable == max_tokens else f" ({usable}, since it is split evenly across {multiple} ranks)"
    return Budget(tokens=usable, setting=f"{name}={max_tokens}{rounded}")
