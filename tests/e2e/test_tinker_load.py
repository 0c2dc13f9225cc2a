"""The training service under load: many clients at the same time, whose connections break, and three kills."""

from pathlib import Path

import pytest
from tinker_load import VICTIMS, load


@pytest.mark.slow
def test_clients_under_load_get_what_each_gets_alone(tmp_path: Path, real_commands: None) -> None:
    report = load(tmp_path, clients=16, requests=40, kills=3)
    assert report.kills == dict.fromkeys(VICTIMS, 1)
    assert report.broken > 16
    assert report.repeated > 16
