"""Make one PPO step and one GRPO step on recorded rollouts from a single controller: actor, critic, reference and reward.

    python examples/hybridflow_step.py                          two processes of this machine, all roles on both
    python examples/hybridflow_step.py --backend mcore
    python examples/hybridflow_step.py --group ray              the same numbers on Ray
    torchrun --nproc-per-node 2 examples/hybridflow_step.py --group local       and without a controller

Without --model, tiny models are created. Prints the loss and the gradient norm of every optimizer step; with --json, all metrics as
one JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig, ParallelConfig
from drivetrain.engine.parallel.process import exit_process, report_failure
from drivetrain.losses.policy import PolicyLoss
from drivetrain.losses.value import ValueLoss
from drivetrain.workers.data_plane.data_ref import DataRef
from drivetrain.workers.groups.base import WorkerGroup
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.groups.ray import RayWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.advantage import AdvantageConfig, AdvantageWorker
from drivetrain.workers.roles.base import WorkerConfig
from drivetrain.workers.roles.critic import CriticConfig, CriticWorker
from drivetrain.workers.roles.dispatch import MiniBatches
from drivetrain.workers.roles.reference import ReferenceWorker, ReferenceWorkerConfig
from drivetrain.workers.roles.reward import RewardWorker

ROLLOUTS = Path(__file__).parent / "rollouts.json"
KL_COEF, GAMMA, LAM = 0.05, 1.0, 0.95
STEPS = MiniBatches(size=4, epochs=2, shuffle=True, seed=1)
PPO = PolicyLoss.from_settings(clip_low=0.2, entropy_coef=0.01)
GRPO = PolicyLoss.from_settings(clip_low=0.2, clip_high=0.28, kl_coef=0.04, aggregation="seq-mean-token-mean")


def roles_on(backend: str, models: Path, parallel: ParallelConfig) -> dict[str, RoleSpec]:
    """Return the roles of the four models and of the advantage computation, all on one pool and in one layout."""
    engine = EngineConfig(backend=backend, parallel=parallel, micro_batch=MicroBatchConfig(max_tokens=64))
    optim = OptimConfig(lr=1e-3, betas=(0.9, 0.999))
    # The number of a completion's prompt; only the controller reads it.
    common: dict[str, Any] = {"engine": engine, "extra_fields": ("uids",)}
    policy, reward = ModelConfig(path=str(models / "policy")), ModelConfig(path=str(models / "reward"), head="value")
    return {
        "actor": RoleSpec(worker=ActorWorker, config=ActorConfig(model=policy, optim=optim, loss=PPO, **common)),
        "critic": RoleSpec(
            worker=CriticWorker, config=CriticConfig(model=reward, optim=optim, loss=ValueLoss(clip=0.2), **common)
        ),
        "reference": RoleSpec(
            worker=ReferenceWorker, config=ReferenceWorkerConfig(model=ModelConfig(path=str(models / "reference")), **common)
        ),
        "reward": RoleSpec(worker=RewardWorker, config=WorkerConfig(model=reward, **common)),
        "gae": RoleSpec(worker=AdvantageWorker, config=AdvantageConfig.from_settings(kl_coef=KL_COEF, gamma=GAMMA, lam=LAM)),
        "grpo": RoleSpec(worker=AdvantageWorker, config=AdvantageConfig.from_settings(estimator="grpo")),
    }


def read_rollouts(path: Path) -> dict[str, Tensor]:
    """Read recorded completions into the tensors of RL frameworks: prompts padded on the left, completions on the right."""
    rows = json.loads(path.read_text())
    p, r = max(len(row["prompt"]) for row in rows), max(len(row["response"]) for row in rows)
    ids, mask = torch.zeros(len(rows), p + r, dtype=torch.int64), torch.zeros(len(rows), p + r, dtype=torch.int64)
    for i, row in enumerate(rows):
        begin, end = p - len(row["prompt"]), p + len(row["response"])
        ids[i, begin:end] = torch.tensor([*row["prompt"], *row["response"]])
        mask[i, begin:end] = 1
    uids = torch.tensor([row["group"] for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "responses": ids[:, p:], "uids": uids}


def ppo_step(group: WorkerGroup, batch: DataRef) -> dict[str, list[Any]]:
    """Compute KL-penalized rewards and GAE, then update actor and critic in mini-batches."""
    batch |= group["actor"].compute_log_probs(batch).rename(log_probs="old_log_probs")
    batch |= group["reference"].compute_log_probs(batch)
    batch |= group["critic"].compute_values(batch)
    batch |= group["reward"].compute_rewards(batch)
    batch |= group["gae"].compute_advantages(batch)
    return {
        "actor": group["actor"].update(batch, mini_batches=STEPS),
        "critic": group["critic"].update(batch, mini_batches=STEPS),
    }


def grpo_step(group: WorkerGroup, batch: DataRef) -> dict[str, list[Any]]:
    """Compute advantages among the completions of each prompt, then update the actor with a KL term in the loss."""
    batch |= group["actor"].compute_log_probs(batch).rename(log_probs="old_log_probs")
    batch |= group["reference"].compute_log_probs(batch)
    batch |= group["reward"].compute_rewards(batch)
    # Only the prompt numbers are fetched; with them, the completions of one prompt are compared on one rank.
    uids = group.data.get(batch, ["uids"])["uids"].tolist()
    batch |= group["grpo"].compute_advantages(batch.with_groups(uids))
    return {"actor": group["actor"].update(batch, mini_batches=STEPS, loss=GRPO)}


def run(group: WorkerGroup, rollouts: Path = ROLLOUTS) -> dict[str, Any]:
    """Make both steps; return the loss and the gradient norm of every optimizer step."""
    # From here on, the completions stay with the workers, and the controller sees only references to them.
    batch = group.data.put(read_rollouts(rollouts))
    records: dict[str, Any] = {}
    for name, step in (("ppo", ppo_step), ("grpo", grpo_step)):
        for role, results in step(group, batch).items():
            records[f"{name} {role}"] = [{"loss": r.loss, "grad_norm": r.grad_norm, **r.metrics} for r in results]
    group.data.clear_data_cache(batch)
    return records


def print_records(records: dict[str, Any], *, as_json: bool) -> None:
    """Print the records of updates as a table, or all records with all their metrics as one JSON object."""
    if as_json:
        print(json.dumps(records))
        return
    print(f"{'update':<12} {'step':>4} {'loss':>9} {'grad_norm':>9}")
    for name, steps in records.items():
        if isinstance(steps, list):
            for i, step in enumerate(steps):
                print(f"{name:<12} {i + 1:>4} {step['loss']:>9.4f} {step['grad_norm']:>9.4f}")


def make_models(folder: Path) -> Path:
    """Create tiny models with a vocabulary of digits: a policy, a reference that differs from it, a reward model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from drivetrain.trainers.tasks.addition import write_model

    for name, seed in (("policy", 0), ("reference", 1)):
        write_model(folder / name, seed)
    config = AutoModelForCausalLM.from_pretrained(folder / "policy").config
    config.num_labels = 1
    torch.manual_seed(2)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder / "reward")
    return folder


def start_group(kind: str, roles: dict[str, RoleSpec], processes: int) -> WorkerGroup:
    """Return a group of a kind; the steps are the same for all kinds."""
    if kind == "local":
        return LocalWorkerGroup(roles)
    if kind == "process":
        return ProcessWorkerGroup(roles, pools={"main": processes})
    return RayWorkerGroup(roles, pools={"main": processes})


def main() -> None:
    """Run both steps and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp", help="fsdp or mcore")
    parser.add_argument("--group", choices=("process", "ray", "local"), default="process")
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="number of processes of the pool; under torchrun, its --nproc-per-node is used",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size, mcore only")
    parser.add_argument("--model", type=Path, default=None, help="folder with the models policy, reference and reward")
    parser.add_argument("--json", action="store_true", help="print all metrics as one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        roles = roles_on(args.backend, args.model or make_models(Path(folder)), ParallelConfig(tp=args.tp))
        with start_group(args.group, roles, args.processes) as group:
            records = run(group)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print_records(records, as_json=args.json)


if __name__ == "__main__":
    try:
        main()
    except Exception as e:
        # End the process at once: its peers under torchrun may be waiting for it.
        exit_process(report_failure(e))
