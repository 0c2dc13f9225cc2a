"""Replay bundles: files with completions and all of their tensors, from which a phase continues, or a step is repeated elsewhere.

A bundle is a safetensors file. Its metadata is JSON: the completions, and the settings that produced them. It never executes code: names
of code and `trust_remote_code` in its settings are ignored.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...engine.checkpoint.machine import describe_machine
from ...engine.checkpoint.retention import folder_name
from ...engine.errors import CheckpointError, disk_error
from ...engine.packing.batch import PackedBatch
from ..config.rl import RLConfig
from ..data.prompts import Prompt
from .batch_file import batch_from, tensors_of
from .completions import Completion, Completions, EpisodeRecord
from .phases import Phases

FORMAT = 1
KEY = "drivetrain.bundle"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Completions with all of their data.

    Args:
        batch: The documents, each a prompt with its completion, and their fields.
        rows: The completions.
        config: The settings of the run, as plain data.
        step: The number of the step; 0 if there is none.
        adaptive: The state of the adapted values before the step.
        checkpoints: The checkpoint of each role before the step, relative to the bundle.
        expected: The metrics of the step.
        machine: The machine that computed it; see `describe_machine`. None in a bundle of an older version.
    """

    batch: PackedBatch
    rows: tuple[Completion, ...]
    config: Mapping[str, Any]
    step: int = 0
    adaptive: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    expected: Mapping[str, float] = field(default_factory=dict)
    machine: Mapping[str, Any] | None = field(default_factory=describe_machine)

    def write(self, path: Path) -> None:
        """Write the bundle atomically.

        Raises:
            CheckpointError: The file cannot be written.
        """
        rollout = self.config["rollout"]
        about = {
            "format": FORMAT,
            "step": self.step,
            "config": self.config,
            "log_probs": {name: rollout[name] for name in ("temperature", "top_p", "top_k")},
            "adaptive": dict(self.adaptive),
            "checkpoints": dict(self.checkpoints),
            # JSON has no NaN.
            "expected": {name: value if math.isfinite(value) else None for name, value in self.expected.items()},
            "machine": self.machine,
            "passengers": sorted(self.batch.extra_fields),
            "answers": [_completion_record(row) for row in self.rows],
        }
        # Renamed at the end, so that a bundle is complete or absent.
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(tensors_of(self.batch), temporary, metadata={KEY: json.dumps(about, default=str)})
            os.replace(temporary, path)
        except OSError as e:
            temporary.unlink(missing_ok=True)
            raise disk_error(f"the bundle {path}", e) from e

    @classmethod
    def read(cls, path: Path) -> "Bundle":
        """Read a bundle.

        Raises:
            CheckpointError: The file is not a bundle, or is damaged.
        """
        if not path.is_file():
            raise CheckpointError(
                f"{path} is not a file; give a bundle that drivetrain rl, or trainer.bundle_every, has written"
            )
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get(KEY)
                if text is None:
                    raise CheckpointError(f"{path} is a safetensors file, but not a bundle of drivetrain rl")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a safetensors file is not a mapping
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{path} is not a bundle, or is damaged: {e}") from e
        try:
            about = json.loads(text)
            # First, because another format may have other fields.
            if about["format"] != FORMAT:
                raise CheckpointError(f"{path} has format {about['format']!r}; this version reads format {FORMAT}")
            sampled = {name: about["config"]["rollout"][name] for name in ("temperature", "top_p", "top_k")}
            if about["log_probs"] != sampled:
                raise ValueError(f"its log-probabilities are of {about['log_probs']}, but its settings have {sampled}")
            batch = batch_from(tensors, about["passengers"])
            rows = tuple(_completion_of(record, batch, i) for i, record in enumerate(about["answers"]))
            if len(rows) != batch.num_sequences:
                raise ValueError(f"it has {len(rows)} completions and {batch.num_sequences} documents")
            return cls(
                batch=batch,
                rows=rows,
                config=about["config"],
                step=int(about["step"]),
                adaptive=about["adaptive"],
                checkpoints=about["checkpoints"],
                machine=about.get("machine"),
                expected={n: math.nan if v is None else float(v) for n, v in about["expected"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"{path} is malformed: {type(e).__name__}: {e}") from e


def bundle_of(config: RLConfig, batch: PackedBatch, rows: Sequence[Completion], **more: Any) -> Bundle:
    """Return a bundle of completions.

    Args:
        config: The run's settings.
        batch: The documents with their fields.
        rows: The completions.
        more: Other arguments of `Bundle`.
    """
    return Bundle(batch=batch, rows=tuple(rows), config=asdict(config), **more)


def _completion_record(row: Completion) -> dict[str, Any]:
    return {
        "name": row.prompt.name,
        "prompt": row.prompt.content,
        "prompt_tokens": len(row.prompt.ids),
        "columns": dict(row.prompt.columns),
        "group": row.group,
        "answer": row.text,
        "finished": row.finished,
        "versions": list(row.versions),
        "rewards": row.rewards,
        "reward": None if math.isnan(row.reward) else row.reward,
        "baseline": row.baseline,
        "episode": None if row.episode is None else asdict(row.episode),
    }


def _completion_of(record: Mapping[str, Any], batch: PackedBatch, row: int) -> Completion:
    begin, end = batch.bounds[row], batch.bounds[row + 1]
    ids: list[int] = batch.input_ids[begin:end].tolist()
    first = int(record["prompt_tokens"])
    if not 0 < first <= len(ids):
        raise ValueError(f"completion {row} has a prompt of {first} tokens in a document of {len(ids)}")
    prompt = Prompt(name=str(record["name"]), ids=ids[:first], content=record["prompt"], columns=dict(record["columns"]))
    return Completion(
        prompt=prompt,
        group=int(record["group"]),
        tokens=ids[first:],
        text=str(record["answer"]),
        finished=bool(record["finished"]),
        versions=tuple(int(version) for version in record["versions"]),
        rewards={str(name): float(value) for name, value in record["rewards"].items()},
        reward=math.nan if record["reward"] is None else float(record["reward"]),
        baseline=None if record["baseline"] is None else float(record["baseline"]),
        # Bundles from before environments were supported have no episode.
        episode=None if record.get("episode") is None else EpisodeRecord.from_json(record["episode"]),
    )


_PATHS = ("path", "chat_template", "train", "eval", "output_dir", "checkpoint_dir", "resume")
"""Names of settings in which environment variables are expanded."""


def _check_literal(section: Mapping[str, Any], prefix: str) -> None:
    """Check that no path refers to environment variables, whose values a bundle from elsewhere could leak.

    Raises:
        CheckpointError: A path does.
    """
    for name, value in section.items():
        if isinstance(value, Mapping):
            _check_literal(value, f"{prefix}{name}.")
        elif name in _PATHS:
            for path in value if isinstance(value, list) else [value]:
                if isinstance(path, str) and ("$" in path or path.startswith("~")):
                    raise CheckpointError(
                        f"the bundle's {prefix}{name}={path} refers to a variable or a home folder, which is not allowed in a bundle"
                    )


_RENAMED = {"generate": "eval_completions", "generate_tokens": "eval_max_tokens"}
"""The settings `trainer.*` of older bundles, and their names now."""


def settings_of(bundle: Bundle) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a bundle without those that would run code, and the names of the removed ones.

    Args:
        bundle: The bundle, which may come from an untrusted source.
    """
    # A deep copy, which can be changed.
    settings: dict[str, Any] = json.loads(json.dumps(bundle.config))
    ignored: list[str] = []

    def clean(section: dict[str, Any], prefix: str) -> None:
        for name, value in list(section.items()):
            if name == "trust_remote_code" and value:
                section[name] = False
                ignored.append(f"{prefix}{name}")
            elif isinstance(value, dict):
                clean(value, f"{prefix}{name}.")

    clean(settings, "")
    trainer = settings["trainer"]
    for old, new in _RENAMED.items():
        if old in trainer:
            trainer[new] = trainer.pop(old)
    _check_literal(settings, "")
    # A name with a colon is module:function, and using it would import the module.
    functions = [name for name in settings["rewards"]["use"] if ":" in name]
    if functions:
        settings["rewards"]["use"] = [name for name in settings["rewards"]["use"] if name not in functions]
        for part in ("weights", "settings"):
            for name in functions:
                settings["rewards"][part].pop(name, None)
        ignored.append(f"rewards.use ({', '.join(functions)})")
    if ":" in settings["rollout"]["generator"]:
        ignored.append(f"rollout.generator ({settings['rollout']['generator']})")
        settings["rollout"]["generator"] = RLConfig().rollout.generator
    return settings, ignored


class StepBundles:
    """Writes a bundle of every `trainer.bundle_every`th step into `bundles/` of the run's folder.

    Args:
        phases: The phases.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._every = phases.config.trainer.bundle_every
        self._folder = Path(phases.config.trainer.output_dir).absolute() / "bundles"

    def begin(self, completions: Completions, step: int) -> Bundle | None:
        """Save the inputs of a step's update before it; return the bundle without the update's metrics, or None if none is due.

        Args:
            completions: The completions with rewards and scores, and with `old_log_probs`.
            step: The number of the step.
        """
        if not self._every or step % self._every:
            return None
        group, name = self._phases.group, folder_name(step)
        checkpoints = {}
        # Saving loads the state of a role for a while, so the generator must make room first.
        self._phases.memory_manager.enter("score")
        for role in ("actor", "critic"):
            if role in group.roles:
                group[role].save_checkpoint(str(self._folder / name / role), step - 1, {})
                checkpoints[role] = f"{name}/{role}/{folder_name(step - 1)}"
        batch, adaptive = group.data.get_batch(completions.ref), self._phases.adaptive.state()
        return bundle_of(self._phases.config, batch, completions.rows, step=step, adaptive=adaptive, checkpoints=checkpoints)

    def write(self, bundle: Bundle, metrics: Mapping[str, float]) -> None:
        """Write the bundle of a step after its update.

        Args:
            bundle: The bundle from `begin`.
            metrics: The metrics of the update.
        """
        complete = replace(bundle, expected=dict(metrics))
        self._phases.ranks.run_on_rank0(lambda: complete.write(self._folder / f"{folder_name(bundle.step)}.safetensors"))
