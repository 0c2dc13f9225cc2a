"""An environment of OpenEnv, as a server at the port of its argument: it tells how long each message was, three times."""

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class CountAction(Action):
    """What the policy says."""

    message: str


class CountObservation(Observation):
    """What it reads."""

    text: str = ""


class CountingServer(Environment):
    """See the module."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **settings: Any) -> CountObservation:
        self._state = State(episode_id=episode_id or "", step_count=0)
        return CountObservation(text=f"{(seed or 0) % 90}+{settings.get('second', 1)}=", done=False, reward=0.0)

    def step(self, action: CountAction, timeout_s: float | None = None, **settings: Any) -> CountObservation:
        self._state.step_count += 1
        return CountObservation(text=str(len(action.message)), done=self._state.step_count == 3, reward=0.25)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(CountingServer, CountAction, CountObservation, max_concurrent_envs=64)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
