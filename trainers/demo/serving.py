"""The last step of the demo: the exported model behind `drivetrain serve`, queried with the OpenAI client."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

QUESTIONS = 20
_NEEDS = ("fastapi", "uvicorn", "prometheus_client", "openai")
_READY = " is served at "


def missing() -> list[str]:
    """Return the packages that this step needs but that are not installed."""
    return [name for name in _NEEDS if find_spec(name) is None]


def served_accuracy(run: Path, data: Path, show: int) -> float:
    """Serve a run and return the fraction of held-out questions that are answered exactly.

    Args:
        run: The folder of the run.
        data: The questions.
        show: The number of questions to print with their answers.

    Raises:
        RuntimeError: The service did not start.
    """
    import openai

    chats = [json.loads(line)["messages"] for line in data.read_text().splitlines()[:QUESTIONS]]
    words = [sys.executable, "-m", "drivetrain.cli", "serve", str(run), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            # Port 0 lets the system choose a free port; the service prints it when it is ready.
            line = next((line for line in server.stdout if _READY in line), None)
            if line is None:
                raise RuntimeError(f"drivetrain serve {run} did not start")
            print(f"     {line.strip()}", flush=True)
            client = openai.OpenAI(base_url=line.rpartition(" ")[2].strip(), api_key="none", max_retries=0)
            right = 0
            for number, (question, expected) in enumerate(chats):
                answer = client.chat.completions.create(model="", messages=[question], temperature=0, max_tokens=4)
                text = answer.choices[0].message.content
                right += text == expected["content"]
                if number < show:
                    print(
                        f"       {question['content']}{text}{'' if text == expected['content'] else '   (wrong)'}", flush=True
                    )
            return right / len(chats)
        finally:
            server.terminate()
            server.wait(30)
