"""`drivetrain serve --group ray`: workers on the machines of a Ray cluster."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.server import Server, until
from helpers.texts import save_text_model

pytestmark = pytest.mark.slow
REQUEST: dict[str, Any] = {"model": "model", "prompt": "two plus two", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray cluster of two machines with a CPU each, both of them this one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def workers(address: str) -> dict[int, int]:
    """The workers of a cluster by their process ids, each with the process id of its machine's raylet."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if b"drivetrain.workers.process" in (folder / "cmdline").read_bytes().split(b"\0"):
                raylet = parent(parent(int(folder.name)))
                if address.encode() in Path(f"/proc/{raylet}/cmdline").read_bytes():
                    found[int(folder.name)] = raylet
        except OSError:  # it has ended, or is no process
            continue
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_replicas_run_on_the_machines_of_a_cluster(tmp_path: Path, address: str) -> None:
    save_text_model(tmp_path / "model")
    with Server(tmp_path / "model") as server:
        expected = server.client().completions.create(**REQUEST).choices[0].text
    settings = ("--group", "ray", "--replicas", "2")
    with Server(tmp_path / "model", *settings, environment={"RAY_ADDRESS": address}) as server:
        found = workers(address)
        assert len(found) == len(set(found.values())) == 2
        for _ in range(4):
            assert server.client().completions.create(**REQUEST).choices[0].text == expected
        os.kill(min(found), signal.SIGKILL)
        until(lambda: server.number("drivetrain_worker_restarts") == 1 and server.number("drivetrain_workers") == 2, 120)
        assert server.client().completions.create(**REQUEST).choices[0].text == expected
        server.process.terminate()
        assert server.process.wait(40) == 128 + signal.SIGTERM
    until(lambda: not workers(address), 60)


def test_a_cluster_without_room_is_refused(tmp_path: Path, address: str) -> None:
    save_text_model(tmp_path / "model")
    settings = ("--group", "ray", "--replicas", "3")
    with (
        pytest.raises(
            AssertionError, match="3 workers need 1 CPUs each, on one machine; the machines of the Ray cluster have room for 2"
        ),
        Server(tmp_path / "model", *settings, environment={"RAY_ADDRESS": address}),
    ):
        pass


def test_a_model_has_to_fit_on_one_machine(tmp_path: Path, address: str) -> None:
    save_text_model(tmp_path / "model")
    settings = ("--group", "ray", "--engine", "tensor_parallel", "--tp", "2")
    with (
        pytest.raises(AssertionError, match=r"1 workers need 2 CPUs each, on one machine; .* have room for 0"),
        Server(tmp_path / "model", *settings, environment={"RAY_ADDRESS": address}),
    ):
        pass


def test_a_cluster_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    with (
        pytest.raises(AssertionError, match=r"RAY_ADDRESS=127.0.0.1:1 cannot be reached"),
        Server(tmp_path / "model", "--group", "ray", environment={"RAY_ADDRESS": "127.0.0.1:1"}),
    ):
        pass
