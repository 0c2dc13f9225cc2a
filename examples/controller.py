"""Make a PPO step on recorded completions with a custom controller: fetch samples, flush the calls whose inputs are ready, with hooks.

    python examples/controller.py                           two processes of this machine, all roles on both
    python examples/controller.py --backend mcore --tp 2

Each worker loads its own shard of the completions. The controller sees only metadata: it knows which columns each sample has, and so which
calls can run. Its numbers equal those of `hybridflow_step.py`. Prints the loss and the gradient norm of every optimizer step; with --json,
all metrics and the results of the hooks as one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridflow_step import ROLLOUTS, STEPS, make_models, print_records, roles_on

from drivetrain.engine.config import ParallelConfig
from drivetrain.workers.data_plane.data_ref import DataRef
from drivetrain.workers.data_plane.dataset import DatasetSpec
from drivetrain.workers.groups.base import WorkerGroup
from drivetrain.workers.groups.group_call import GroupCall
from drivetrain.workers.groups.process import ProcessWorkerGroup
from drivetrain.workers.protocol.hooks import CallHook, Evaluate, Offload, Save, SyncParams


@dataclass(frozen=True, kw_only=True)
class Node:
    """A call of the step.

    Args:
        role: The role.
        method: Its method.
        needs: The fields that it needs; it runs once the samples have them.
        reads: The fields that it reads under another name.
        options: Its other arguments.
    """

    role: str
    method: str
    needs: Collection[str] = ("input_ids",)
    reads: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The name of the call."""
        return f"{self.role}.{self.method}"


OLD = {"log_probs": "old_log_probs"}
PPO = (
    Node(role="actor", method="compute_log_probs"),
    Node(role="reference", method="compute_log_probs"),
    Node(role="critic", method="compute_values"),
    Node(role="reward", method="compute_rewards"),
    Node(
        role="gae",
        method="compute_advantages",
        needs=("log_probs", "reference_log_probs", "values", "rewards"),
        reads=OLD,
    ),
    Node(role="actor", method="update", needs=("advantages",), reads=OLD, options={"mini_batches": STEPS}),
    Node(role="critic", method="update", needs=("returns",), reads=OLD, options={"mini_batches": STEPS}),
)


def load_rollouts(path: str) -> Sequence[Mapping[str, Any]]:
    """Return the recorded completions as a dataset. Called by the workers."""
    return [
        {
            "input_ids": [*row["prompt"], *row["response"]],
            "loss_mask": [False] * len(row["prompt"]) + [True] * len(row["response"]),
        }
        for row in json.loads(Path(path).read_text())
    ]


def hooks_of(node: Node, batch: DataRef, folder: Path) -> Sequence[CallHook]:
    """Return the hooks that the workers run after a call, before its reply."""
    if node.title == "reference.compute_log_probs":
        return [Offload(role="reference")]
    if node.title == "actor.update":
        return [
            Evaluate(data=batch),
            Save(role="actor", root=str(folder), step=1),
            SyncParams(source="actor", target="reference", eta=0.1),
        ]
    return []


def step(group: WorkerGroup, folder: Path) -> dict[str, Any]:
    """Fetch all samples, and run every call as soon as its inputs are ready; return the results of the updates."""
    count = group.data.spec("actor").samples
    group.data.fetch(count, "actor")
    records: dict[str, Any] = {}
    waiting = list(PPO)
    while waiting:
        submitted: list[tuple[Node, Sequence[CallHook], GroupCall]] = []
        for node in waiting:
            ids = group.data.buffer.ready(node.needs, node.title, count)
            if ids:
                batch = DataRef.of(group.data.buffer, ids)
                batch = batch.rename(**{name: other for name, other in node.reads.items() if name in batch.keys})
                after = hooks_of(node, batch, folder)
                submitted.append((node, after, group.submit(node.role, node.method, batch, after=after, **node.options)))
        if not submitted:
            raise SystemExit(f"nothing can run: {', '.join(node.title for node in waiting)} lack fields that no call computes")
        waiting = [node for node in waiting if node not in [done for done, *_ in submitted]]
        # One flush for all calls of a level. The replies are metadata, which determine the calls of the next level.
        group.flush()
        for node, after, call in submitted:
            result = call.result()
            if node.method == "update":
                records[f"ppo {node.role}"] = [{"loss": r.loss, "grad_norm": r.grad_norm, **r.metrics} for r in result]
                for hook, found in zip(after, call.hook_results(), strict=True):
                    if isinstance(hook, Evaluate):
                        records[f"{node.role} after"] = found
                    elif isinstance(hook, SyncParams):
                        records[f"{node.role} synced"] = found
    return records


def main() -> None:
    """Run the step and print its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="fsdp", help="fsdp or mcore")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size, mcore only")
    parser.add_argument("--json", action="store_true", help="print all metrics as one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        roles = roles_on(args.backend, make_models(Path(name)), ParallelConfig(tp=args.tp))
        data = DatasetSpec(load=load_rollouts, options={"path": str(ROLLOUTS)})
        roles["actor"] = replace(roles["actor"], dataset=data)
        with ProcessWorkerGroup(roles, pools={"main": 2}) as group:
            records = step(group, Path(name))
        print_records(records, as_json=args.json)


if __name__ == "__main__":
    main()
