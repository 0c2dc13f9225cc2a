"""An agent that plays a task of verifiers (0.4): python -m drivetrain.serve.gateway.agents.verifiers_agent TASKSET [JSON]

TASKSET is the id of a task set, as for `--env.taskset.id`; JSON has further settings of its environment. A row's column `index` is the
number of its task. The harness is that of verifiers; it finds the policy at the address that the run passes to it.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf


def main() -> None:
    """Play the task from standard input; print its reward."""
    task = json.load(sys.stdin)
    settings: dict[str, Any] = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    # Harnesses run their programs with uv, which is installed next to this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    print(json.dumps(asyncio.run(play(task, sys.argv[1], settings))))


async def play(task: dict[str, Any], taskset: str, settings: dict[str, Any]) -> dict[str, float]:
    """Play a task; return its reward and its metrics.

    Args:
        task: The task that the run has sent.
        taskset: The id of the task set.
        settings: Settings of the environment.

    Raises:
        SystemExit: The episode has failed.
    """
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    config = vf.SingleAgentEnvConfig.model_validate(
        {"agent": agent, **settings, "taskset": {"id": taskset, **settings.get("taskset", {})}}
    )
    environment = vf.SingleAgentEnv(config)
    context = vf.ModelContext(
        model=task["model"], client=vf.EvalClientConfig(base_url=task["base_url"], api_key_var="OPENAI_API_KEY")
    )
    async with environment.serving():
        # The prompt of the row is not used: the task has its own.
        (chosen,) = environment.taskset.include(idx=[int(task["columns"]["index"])])
        episode = await environment.run_episode(chosen, context)
    if not episode.ok:
        raise SystemExit(f"the episode has failed: {episode.errors or [trace.errors for trace in episode.traces]}")
    metrics = {name: float(value) for trace in episode.traces for name, value in trace.metrics.items()}
    return {**metrics, "reward": sum(float(trace.reward) for trace in episode.traces)}


if __name__ == "__main__":
    main()
