"""Checks of a whole run before anything is built: the settings, and that they fit the method."""

import math

from ..engine.errors import ConfigError
from .config.runs import RunConfig
from .data.dataset import Budget
from .hub import check_push
from .loop.early_stopping import EarlyStopping
from .loop.loggers import check_loggers
from .methods.base import Method


def check_run(config: RunConfig, method: Method) -> None:
    """Check all that can be checked without data and without a model. Not collective.

    Args:
        config: The run's settings.
        method: The method of training.

    Raises:
        ConfigError: Names the setting, its value and the way out.
    """
    config.check()
    method.check()
    sample_budget(config, method)
    EarlyStopping(config.trainer.best_metric, config.trainer.patience, "", method.lower_is_better)
    check_loggers(config.trainer.loggers)
    if config.trainer.push_to_hub is not None:
        check_push(config.trainer.push_to_hub)


def sample_budget(config: RunConfig, method: Method) -> Budget:
    """Return the number of tokens that a sample may have, to fit training and inference micro-batches of the layout.

    Args:
        config: The run's settings.
        method: The method of training.

    Raises:
        ConfigError: `data.max_length` is larger.
    """
    sizes, multiple = config.engine.micro_batch, math.lcm(config.engine.parallel.token_multiple, method.token_multiple)
    least, name = sizes.max_tokens, "engine.micro_batch.max_tokens"
    if (config.data.eval or method.infers) and sizes.infer_max_tokens is not None and sizes.infer_max_tokens < least:
        least, name = sizes.infer_max_tokens, "engine.micro_batch.infer_max_tokens"
    usable = least // multiple * multiple
    longest = config.data.max_length
    if longest is not None and longest > usable:
        raise ConfigError(
            f"data.max_length={longest} is more than {name}={least}: such a sample would fit no micro-batch; raise the budget or lower the length"
        )
    rounded = "" if usable == least else f" ({usable}, since {multiple} ranks share it evenly)"
    return Budget(tokens=usable, setting=f"{name}={least}{rounded}")
