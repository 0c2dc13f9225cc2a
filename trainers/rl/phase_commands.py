"""`drivetrain rl rollout|score|train`: run the phases of a step separately, with a replay bundle between them.

drivetrain rl rollout OUT key=value ...             generates completions of all prompts of data.train, with log-probabilities and versions
drivetrain rl score BUNDLE OUT key=value ...        adds rewards, and the outputs of reference, critic and reward model
drivetrain rl train BUNDLE [OUT] key=value ...      updates the policy; OUT is a folder for the updated model
drivetrain rl check-log RUN                         checks the order and the weight versions of the completions that a run was trained on

`rollout` takes the settings of drivetrain grpo. The others take those of the bundle, changed by key=value, and run in this process unless
group.* is set. `train` on a bundle that trainer.bundle_every has written repeats its step and compares loss and gradient norm.
"""

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ...engine.checkpoint.machine import warn_if_machine_differs
from ...engine.config import ParallelConfig
from ...engine.errors import CheckpointError, ConfigError
from ...engine.ops.expert_routes import ROUTED_EXPERTS
from ...engine.packing.batch import PackedBatch
from ...engine.parallel.process import report_failure
from ...engine.registry import is_installed
from ...engine.resolve import compute_dtype
from ..config.parse import parse, parse_over
from ..config.rl import GroupConfig, GRPOConfig, RLConfig
from ..loop.logs import configure_logging
from .algorithms import Algorithm, resolve
from .bundle import Bundle, bundle_of, settings_of
from .completions import Completions, join, prefixes_of
from .phases import Phases
from .prompts import load_data
from .reward_runner import check_scored
from .roles import Roles, build_roles, check_roles
from .session import controller_ranks, open_phases
from .step import train_on
from .ticket_log import check_log

log = logging.getLogger(__name__)

TOLERANCE = {"loss": 1e-6, "grad_norm": 1e-5}
"""The relative difference up to which a repeated step counts as equal, in float32 and float64."""
SCORERS = ("reference", "critic", "reward")
HELP = {
    "rollout": """drivetrain rl rollout OUT key=value ...

Generates completions of all prompts of data.train once, in order, and writes them with their tokens, log-probabilities and versions to
the replay bundle OUT. Takes the settings of drivetrain grpo.

  drivetrain rl rollout rollouts.safetensors recipe=grpo model.path=MODEL data.train=prompts.jsonl rewards.use=[answer]""",
    "score": """drivetrain rl score BUNDLE OUT key=value ...

Scores the completions of a bundle, and writes them to OUT with their rewards. If the algorithm needs them, it adds the log-probabilities of
the reference, the values of the critic and the rewards of the reward model. Takes the settings of the bundle, changed by key=value. Names
of code in the bundle are ignored unless they are repeated here.

  drivetrain rl score rollouts.safetensors scored.safetensors""",
    "train": """drivetrain rl train BUNDLE [OUT] key=value ...

Makes one update of the policy with the scored completions of a bundle, in this process. With OUT, the updated model is written to that folder.
Takes the settings of the bundle, changed by key=value. For a bundle that a run wrote (trainer.bundle_every), the run's step is repeated from its
checkpoints: loss and gradient norm are compared with those of the run, and the exit code is 1 if they differ.

  drivetrain rl train scored.safetensors updated
  drivetrain rl train runs/grpo/bundles/step-00000010.safetensors""",
    "check-log": """drivetrain rl check-log RUN

Checks the log of a run's tickets (RUN/tickets.jsonl) against the rules. Prompts are consumed in order, each once. No completion comes from weights
older than rl.staleness allows. The version of the weights depends only on what was consumed before, not on time. The exit code is 1 if the log
breaks a rule.

  drivetrain rl check-log runs/grpo""",
}


def main(argv: Sequence[str]) -> int:
    """Run a phase and return the exit code."""
    words = list(argv)
    if not words or any(word in ("-h", "--help") for word in words):
        print(HELP[words[0]] if words and words[0] in HELP else (__doc__ or "").strip())
        return 0
    phases = {
        "rollout": (_rollout, 1, 1),
        "score": (_score, 2, 2),
        "train": (_train, 1, 2),
        "check-log": (_check_log, 1, 1),
    }
    if words[0] not in phases:
        print(f"error: unknown phase {words[0]!r}; the phases are {', '.join(phases)}", file=sys.stderr)
        return 2
    run, least, most = phases[words[0]]
    if unknown := [word for word in words[1:] if word.startswith("-")]:
        print(f"error: drivetrain rl has no option {unknown[0]}; settings are key=value, see --help", file=sys.stderr)
        return 2
    paths = [Path(word) for word in words[1:] if not _is_setting(word)]
    if not least <= len(paths) <= most:
        print(
            f"error: drivetrain rl {words[0]} takes {least if least == most else f'{least} or {most}'} path{'s' if most > 1 else ''}; see --help",
            file=sys.stderr,
        )
        return 2
    configure_logging()
    try:
        return run(paths, [word for word in words[1:] if _is_setting(word)])
    except Exception as e:  # reported as one line, like those of the trainers
        return report_failure(e)


def _is_setting(word: str) -> bool:
    """Return whether a word is key=value; a path may have a = after a slash, or as ./a=b."""
    key = word.partition("=")[0]
    return "=" in word and "/" not in key


def _rollout(paths: Sequence[Path], settings: Sequence[str]) -> int:
    config = parse(GRPOConfig, settings, __doc__ or "")
    config.check()
    prompts = load_data(config)
    algorithm = resolve(config)
    if algorithm.needs_baselines:
        raise ConfigError(
            f"rl.algorithm={config.rl.algorithm} compares with the greedy completion of each prompt, which a bundle cannot store; "
            "use drivetrain grpo"
        )
    roles = build_roles(config, algorithm, total_steps=1)
    check_roles(roles)
    with (
        controller_ranks(config) as ranks,
        open_phases(config, algorithm, roles, ranks, only=("rollout",), judges=False) as phases,
    ):
        parts = []
        for first in range(0, len(prompts.order), config.data.batch_size):
            numbers = range(first, min(first + config.data.batch_size, len(prompts.order)))
            parts.append(phases.rollout([prompts.of_ticket(number) for number in numbers], numbers, version=None))
        completions = join(parts)
        _write(phases, completions, paths[0], step=0)
    print(f"{len(completions)} completions of {len(prompts.order)} prompts: {paths[0]}")
    return 0


def _check_log(paths: Sequence[Path], settings: Sequence[str]) -> int:
    if settings:
        raise ConfigError(f"drivetrain rl check-log takes no settings ({settings[0]}); give only the folder of a run")
    checked = check_log(paths[0])
    print(
        f"{checked.events} events of {checked.processes} process{'es' if checked.processes > 1 else ''}: {checked.kept} groups trained on, by weights at most "
        f"{checked.oldest} version{'s' if checked.oldest != 1 else ''} newer than those that generated them; {checked.dropped} dropped: "
        "the rules hold"
    )
    return 0


def _score(paths: Sequence[Path], settings: Sequence[str]) -> int:
    bundle = Bundle.read(paths[0])
    config, algorithm, roles = _opened(bundle, settings)
    # Only the roles that score are built.
    needed = {name for name in SCORERS if name in roles.specs} | ({"actor"} if roles.has_own_reference else set())
    # At least one role must hold the completions.
    needed = needed or {"advantage"}
    with controller_ranks(config) as ranks, open_phases(config, algorithm, roles, ranks, only=needed) as phases:
        ref = phases.group.data.put(bundle.batch.with_extra_fields(*bundle.batch.token_fields)).with_prefixes(
            prefixes_of(bundle.rows)
        )
        completions = Completions(ref=ref, rows=bundle.rows, pending=phases.submit(bundle.rows))
        completions, counts = phases.collect_rewards(phases.score(completions))
        check_scored(completions, counts)
        _write(phases, completions, paths[1], step=bundle.step)
        mean = sum(row.reward for row in completions.rows) / max(1, len(completions))
    dropped = ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if count)
    print(f"{len(completions)} completions, mean reward {mean:.4g}{f'; {dropped}' if dropped else ''}: {paths[1]}")
    return 0


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """An update that was made with the completions of a bundle.

    Args:
        bundle: The bundle.
        config: The settings of the update.
        metrics: All numbers of the update.
        exported: The folder of the updated model; None if it was not written.
    """

    bundle: Bundle
    config: RLConfig
    metrics: Mapping[str, float]
    exported: str | None = None


def replay(path: Path, settings: Sequence[str] = (), out: Path | None = None) -> Replayed:
    """Make one update of the policy with the scored completions of a bundle, in this process.

    Args:
        path: The bundle.
        settings: Changes of its settings, `key=value`.
        out: The folder for the updated model; None to write none.

    Raises:
        ConfigError: The completions have no rewards, or a setting is invalid.
        CheckpointError: The file is not a bundle, or is damaged.
    """
    bundle = Bundle.read(path)
    if any(math.isnan(row.reward) for row in bundle.rows):
        raise ConfigError(f"{path} has completions without rewards; run drivetrain rl score on it first")
    config, algorithm, roles = _opened(bundle, settings)
    with (
        controller_ranks(config) as ranks,
        open_phases(config, algorithm, roles, ranks, only=("actor", "critic", "advantage"), judges=False) as phases,
    ):
        # A bundle from elsewhere must not name folders outside of its own.
        for role, folder in bundle.checkpoints.items():
            phases.group[role].load_checkpoint(str(_inside(path.parent, folder)))
        phases.adaptive.restore(bundle.adaptive)
        ref = phases.group.data.put(_batch_for(bundle, config), role="actor").with_prefixes(prefixes_of(bundle.rows))
        _, _, metrics = train_on(phases, Completions(ref=ref, rows=bundle.rows), {}, step=bundle.step)
        exported = None if out is None else phases.group["actor"].export(str(out.absolute()))
    return Replayed(bundle=bundle, config=config, metrics=metrics, exported=exported)


def _batch_for(bundle: Bundle, config: RLConfig) -> PackedBatch:
    """Return the batch of a bundle, with the expert routes that the settings ask for.

    Raises:
        ConfigError: They ask for the generator's routes, which the bundle does not have.
    """
    batch, asked = bundle.batch, config.rl.routing_replay
    if asked == bundle.config["rl"].get("routing_replay", "off"):
        return batch
    if asked == "rollout":
        raise ConfigError(
            "rl.routing_replay=rollout, but the bundle does not have the routes of the generator; set it to off or actor, or generate the "
            "completions again with this setting"
        )
    # Its log-probabilities were computed with other routes.
    fields = {n: v for n, v in batch.token_fields.items() if n not in (ROUTED_EXPERTS, "old_log_probs", "entropy")}
    return replace(batch, token_fields=fields)


def _train(paths: Sequence[Path], settings: Sequence[str]) -> int:
    update = replay(paths[0], settings, paths[1] if len(paths) > 1 else None)
    names = ("loss", "grad_norm", "lr", "updates")
    print(json.dumps({name: value for name, value in update.metrics.items() if name.rpartition("/")[2] in names}))
    if update.exported:
        print(f"updated model: {update.exported}")
    warn_if_machine_differs("the bundle", update.bundle.machine)
    expected = update.bundle.expected
    return _compare(expected, update.metrics, update.config) if expected else 0


def _compare(expected: Mapping[str, float], metrics: Mapping[str, float], config: RLConfig) -> int:
    """Print how a repeated step differs from the recorded one; return 1 if it differs but must not."""
    import torch

    exact = compute_dtype(config.engine.precision, cuda=torch.cuda.is_available()) in ("float32", "float64")
    worst = 0
    for name, value in expected.items():
        kind = name.rpartition("/")[2]
        if name not in ("loss", "grad_norm", "critic/loss", "critic/grad_norm"):
            continue
        # Losses of advantages with a mean of zero are differences of larger numbers, so small ones are compared on the scale of 1.
        repeated = metrics.get(name, math.nan)
        difference = abs(repeated - value) / max(abs(value), 1.0 if kind == "loss" else 1e-12)
        equal = difference <= TOLERANCE[kind]
        worst = max(worst, int(not equal and exact))
        print(
            f"{name:16} {value:.9g} recorded, {repeated:.9g} now, difference {difference:.1e}{'' if equal else '  (differs)'}"
        )
    if worst:
        print("error: the repeated step differs from the recorded one", file=sys.stderr)
    else:
        print(
            "the repeated step equals the recorded one" if exact else "not compared, because 16-bit sums depend on their order"
        )
    return worst


def _opened(bundle: Bundle, settings: Sequence[str]) -> tuple[RLConfig, Algorithm, Roles]:
    """Return the settings of a bundle, changed by those of the command line, for a single process."""
    try:
        saved, ignored = settings_of(bundle)
        engines = _engines(saved)
    except (KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"the settings of the bundle are malformed: {type(e).__name__}: {e}") from e
    for name in ignored:
        log.warning(
            "ignored in the bundle, because it would run code: %s; repeat it on the command line if you trust it", name
        )
    alone = OmegaConf.to_container(OmegaConf.structured(GroupConfig(kind="local")))
    parallel = OmegaConf.to_container(OmegaConf.structured(ParallelConfig()))
    saved["group"] = alone
    # The completions of a bundle already exist, so their sampling settings cannot change.
    saved["rl"] |= {"staleness": 0, "inflight_weight_updates": False}
    saved["rollout"]["held_versions"] = None
    for section in engines:
        section["parallel"] = parallel
        # The bundle may come from a machine that has other backends.
        if not is_installed(str(section["backend"])):
            section["backend"], section["options"] = "fsdp", None
    config: RLConfig = parse_over(RLConfig, saved, settings)
    config.check()
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(config.rollout, name)
        if value != saved["rollout"][name]:
            raise ConfigError(
                f"rollout.{name}={value}, but the completions of the bundle were sampled at {saved['rollout'][name]}, and their "
                "log-probabilities are of that distribution; remove the setting"
            )
    log.info("model.path=%s", config.model.path)
    algorithm = resolve(config)
    roles = build_roles(replace(config, trainer=replace(config.trainer, max_steps=None)), algorithm, total_steps=1)
    check_roles(roles)
    return config, algorithm, roles


def _engines(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    sections = [saved["engine"], *(saved[role]["engine"] for role in ("actor", "critic", "reference", "reward"))]
    return [section for section in sections if section is not None]


def _inside(folder: Path, relative: str) -> Path:
    """Return a path of a bundle, which must be inside the bundle's folder.

    Raises:
        ConfigError: It is outside.
    """
    path = (folder / relative).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ConfigError(
            f"the bundle names the checkpoint {relative}, which is outside of {folder}; give a bundle whose checkpoint is beside it"
        )
    return path


def _write(phases: Phases, completions: Completions, path: Path, *, step: int) -> None:
    batch = phases.group.data.get_batch(completions.ref)
    bundle_of(phases.config, batch, completions.rows, step=step).write(path)
