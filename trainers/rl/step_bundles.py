"""Replay bundles of a run's steps, each with the checkpoints from which its update can be repeated."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...engine.checkpoint.retention import folder_name
from ..config.rl import RLConfig
from .answers import Answers
from .bundle import Bundle, bundle_of
from .controllers import Controllers
from .phases import Phases


class StepBundles:
    """Writes a bundle of every `trainer.bundle_every`th step into `bundles/` of the run's folder.

    Args:
        config: The run's settings.
        phases: The phases.
        controllers: The processes of the controller.
    """

    def __init__(self, config: RLConfig, phases: Phases, controllers: Controllers) -> None:
        self._config, self._phases, self._controllers = config, phases, controllers
        self._folder = Path(config.trainer.output_dir).absolute() / "bundles"

    def begin(self, answers: Answers, step: int) -> Bundle | None:
        """Save what repeats the update of a step, before it; return the bundle without the update's metrics, None if none is due.

        Args:
            answers: The judged and scored answers, with `old_log_probs`.
            step: The number of the step.
        """
        every = self._config.trainer.bundle_every
        if not every or step % every:
            return None
        group, name = self._phases.group, folder_name(step)
        checkpoints = {}
        self._phases.memory_manager.enter("score")
        for role in ("actor", "critic"):
            if role in group.roles:
                group[role].save_checkpoint(str(self._folder / name / role), step - 1, {})
                checkpoints[role] = f"{name}/{role}/{folder_name(step - 1)}"
        batch, adaptive = group.get_batch(answers.ref), self._phases.adaptive.state()
        return bundle_of(self._phases.config, batch, answers.rows, step=step, adaptive=adaptive, checkpoints=checkpoints)

    def write(self, bundle: Bundle, metrics: Mapping[str, float]) -> None:
        """Write the bundle of a step after its update.

        Args:
            bundle: What `begin` returned.
            metrics: The metrics of the update.
        """
        complete = replace(bundle, expected=dict(metrics))
        self._controllers.run_on_rank0(lambda: complete.write(self._folder / f"{folder_name(bundle.step)}.safetensors"))
