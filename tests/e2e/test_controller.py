"""The controller in plain shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONTROLLER = Path(__file__).parents[2] / "examples" / "controller.sh"


@pytest.mark.slow
def test_the_shell_drives_two_workers() -> None:
    # Where the tests run under a launcher's variables, a worker would refuse another number of ranks.
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**inherited, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", str(CONTROLLER)], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[2] == '<- 0 {"op":"pong","rank":0,"world_size":2,"cuda_device":0}'
    assert lines.count('<- 1 {"op":"nccl_sanity_result","observed_sum":2}') == 1
    assert lines[-1] == '<- 1 {"op":"bye"}'
    # The control: a worker that is not what the controller expects.
    broken = CONTROLLER.read_text().replace("WORLD_SIZE=2", "WORLD_SIZE=3")
    done = subprocess.run(["bash", "-c", broken], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 1
    assert "expected" in done.stderr
