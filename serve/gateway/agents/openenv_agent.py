"""An agent that acts in an OpenEnv environment: python -m drivetrain.serve.gateway.agents.openenv_agent URL [ACTION_FIELD [OBSERVATION_FIELD]]

The environment is a server at URL. It is reset with the seed of the episode and the row's column `reset`, if there is one. The policy reads the row's
prompt, then each observation as a user message; its completions are the actions. The reward is the sum of the rewards of the steps.
"""

import asyncio
import json
import sys
from typing import Any

import openai
from openenv.core.generic_client import GenericEnvClient


def main() -> None:
    """Act in the environment; print the reward."""
    task = json.load(sys.stdin)
    url, *fields = sys.argv[1:]
    print(json.dumps(asyncio.run(play(task, url, *fields))))


async def play(task: dict[str, Any], url: str, action: str = "message", observation: str = "") -> dict[str, float]:
    """Play an episode; return its reward and its number of steps.

    Args:
        task: The task that the run has sent.
        url: The address of the environment.
        action: The field of an action that holds the policy's text.
        observation: The field of an observation that the policy reads; if empty, the whole observation, as JSON.
    """
    prompt = task["prompt"]
    messages: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    reward, steps = 0.0, 0
    # Without a timeout, because a completion may wait for a whole batch; and without retries, which would be further
    # turns.
    async with GenericEnvClient(base_url=url) as environment, openai.AsyncOpenAI(max_retries=0, timeout=None) as client:
        result = await environment.reset(seed=task["seed"], **(task["columns"].get("reset") or {}))
        while not result.done:
            messages.append({"role": "user", "content": text_of(result.observation, observation)})
            answer = await client.chat.completions.create(model=task["model"], messages=messages)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            result = await environment.step({action: text})
            reward += float(result.reward or 0.0)
            steps += 1
    return {"reward": reward, "steps": steps}


def text_of(observation: dict[str, Any], name: str) -> str:
    """Return the text of an observation for the policy."""
    return str(observation[name]) if name else json.dumps(observation)


if __name__ == "__main__":
    main()
