"""Time from the start of the process to the first step, and to `--help`, against importing only torch and transformers.

    python -m benchmarks.startup

The three alternate; the results are medians.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROUNDS = 5
SFT = [sys.executable, "-u", "-m", "drivetrain.trainers.sft"]
IMPORTS = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer; from transformers.models.qwen3 import modeling_qwen3; print('imported', flush=True)"
TASK = (
    "import sys; from pathlib import Path; from drivetrain.trainers.tasks.addition import write_data, write_model\n"
    "write_data(Path(sys.argv[1]) / 'data', 0); write_model(Path(sys.argv[1]) / 'model', 0)"
)


def until(words: list[str], line: str, environment: dict[str, str]) -> float:
    """Return the seconds until a process prints a line with this beginning."""
    start = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert any(printed.startswith(line) for printed in process.stdout), process.communicate()[1]
        seconds = time.perf_counter() - start
        process.kill()
    return seconds


def main() -> None:
    """Print one line of JSON for each measurement."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        subprocess.run([sys.executable, "-c", TASK, folder], check=True, env=environment, stderr=subprocess.DEVNULL)
        train = [f"model.path={folder}/model", f"data.train={folder}/data/train.jsonl", "engine.micro_batch.max_tokens=2048"]
        runs: dict[str, Callable[[], float]] = {
            "torch and transformers imported": lambda: until([sys.executable, "-c", IMPORTS], "imported", environment),
            "first step of sft": lambda: until(
                [*SFT, *train, f"trainer.output_dir={folder}/{time.monotonic_ns()}", "trainer.max_steps=1"],
                "step 1/1",
                environment,
            ),
            "sft --help": lambda: until([*SFT, "--help"], "  trainer.timeout_minutes", environment),
        }
        # The first round fills caches: the page cache and the token cache.
        rounds = [{case: run() for case, run in runs.items()} for _ in range(1 + ROUNDS)][1:]
    medians = {case: statistics.median(r[case] for r in rounds) for case in runs}
    imports = medians["torch and transformers imported"]
    for case, median in medians.items():
        print(json.dumps({"case": case, "seconds": round(median, 2), "to_imports_alone": round(median / imports, 2)}))


if __name__ == "__main__":
    main()
