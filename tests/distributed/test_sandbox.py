"""Programs that a model wrote, hostile ones among them, in the sandbox; without one, they do not run."""

import os
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.errors import ConfigError
from drivetrain.engine.parallel.orphans import adopting_orphans
from drivetrain.rewards import sandbox
from drivetrain.rewards.config import RewardsConfig
from drivetrain.rewards.programs import check_program, find_program
from drivetrain.rewards.sample import RewardSample
from drivetrain.rewards.sandbox import ProgramResult, SandboxLimits, check_sandbox, run_program
from drivetrain.rewards.scorer import RewardScorer


def _missing() -> str:
    try:
        check_sandbox()
    except ConfigError as e:
        return str(e)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_missing()), reason=_missing() or "there is one")
QUICK = SandboxLimits(seconds=4, memory_mb=256)


def strangers() -> list[str]:
    """The processes under a user id that nobody has, with those that have ended and that nobody has reaped."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid >= 2**30:
                found.append((folder / "stat").read_text())
        except OSError:
            continue
    return found


def run(program: str, limits: SandboxLimits = QUICK) -> ProgramResult:
    began = time.monotonic()
    found = run_program(program, "", limits)
    assert time.monotonic() - began < limits.seconds + 10
    assert not strangers()
    return found


@pytest.mark.slow
@needs_sandbox
def test_programs_read_and_print() -> None:
    assert run_program("print(input()[::-1], 'é')", "olleh\n") == ProgramResult(
        kind="ended", exit_code=0, stdout="hello é\n", stderr=""
    )
    assert run_program("", "").exit_code == 0
    assert run_program("import sys; sys.exit(3)").exit_code == 3
    assert "ZeroDivisionError" in run_program("1/0").stderr
    # More than a pipe holds, in both directions, and a program that does not read it.
    text = "x" * 300_000
    assert run_program("print(input())", text).stdout == text + "\n"
    assert run_program("print(1)", text).stdout == "1\n"
    assert run_program("import os; os.write(1, bytes([255, 254]))").stdout == "\ufffd\ufffd"
    assert run_program("import sys; print(sys.stdin.read() == '')").stdout == "True\n"
    # Nothing stays behind either where it is ended while bwrap still prepares.
    for milliseconds in range(1, 13):
        run("print(1)", replace(QUICK, seconds=milliseconds / 1000))


@pytest.mark.parametrize("told", [True, False])
def test_what_bwrap_leaves_is_adopted_killed_and_reaped(told: bool) -> None:
    # As bwrap does when it is killed, a shell leaves a process, of which it has told or not.
    command = f"{'setsid ' if told else ''}sleep 600 & echo $!"
    with (
        adopting_orphans(),
        subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        left = int(process.stdout.readline())
        process.wait()
        sandbox._reap(process.pid, left if told else None)
    assert not os.path.exists(f"/proc/{left}")


@needs_sandbox
def test_it_sees_nothing_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-trainer")
    (tmp_path / "weights").write_text("secret")
    os.chmod(tmp_path, 0o755)
    program = f"""
import glob, os
print(sorted(os.environ))
for path in ({str(tmp_path / "weights")!r}, "/etc/passwd", "/root", "/home", "/run", "/proc/{os.getpid()}/environ", {str(Path.cwd())!r}):
    assert not os.path.exists(path), path
print(any("secret" in open(f, errors="replace").read() for f in glob.glob("/proc/[0-9]*/environ") if os.access(f, os.R_OK)))
print(sorted(os.listdir("/")), os.getuid() != 0, sorted(os.listdir("/tmp")))
print(max(int(name) for name in os.listdir("/proc/self/fd")) < 6)
"""
    found = run(program)
    lines = found.stdout.splitlines()
    assert found.exit_code == 0, found.stderr
    assert lines[0] == "['HOME', 'LC_CTYPE', 'PATH', 'PWD', 'PYTHONIOENCODING']"
    assert lines[1:] == ["False", "['bin', 'dev', 'lib', 'lib64', 'main.py', 'proc', 'tmp', 'usr'] True []", "True"]


@needs_sandbox
def test_it_reaches_nobody(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        named.bind(str(tmp_path / "socket"))
        named.listen()
        hidden.bind("\0drivetrain-test")
        hidden.listen()
        program = f"""
import socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {listener.getsockname()[1]})),
    (socket.AF_INET, ("192.0.2.1", 80)),
    (socket.AF_UNIX, {str(tmp_path / "socket")!r}),
    (socket.AF_UNIX, "\\0drivetrain-test"),
):
    try:
        socket.socket(family).connect(address)
        print("reached", address)
    except OSError as e:
        print(type(e).__name__)
"""
        assert "reached" not in run(program).stdout


HOSTILE = {
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "memory"}),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(10**7))", {"ended", "memory"}),
    "memory of many": (
        "import os, time\nfor _ in range(6):\n    if not os.fork():\n        x = bytearray(2 * 10**8); time.sleep(60)\ntime.sleep(60)",
        {"memory"},
    ),
    "disk filler": (
        "import os\nfor place in ('/tmp', '/dev/shm', '/dev', '/', '/usr'):\n    try:\n        with open(place + '/x', 'wb') as f:\n"
        "            while True: f.write(bytes(10**6))\n    except OSError as e: print(place, e.errno, e.__class__.__name__)",
        {"ended"},
    ),
    "many files": ("i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').write('x' * 4096); i += 1", {"ended", "timeout"}),
    "writer": (
        "import os\nfor path in ('/usr/bin/x', '/main.py', '/proc/sys/kernel/hostname', '/dev/null2'):\n    try: open(path, 'w'); print('wrote', path)\n"
        "    except OSError: pass",
        {"ended"},
    ),
    "killer": (
        "import os, signal\nfor pid in (os.getppid(), 1, -1):\n    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass",
        {"ended"},
    ),
    "daemon": (
        "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(600)",
        {"ended"},
    ),
    "million lines": ("for i in range(10**6): print(i)\nwhile True: print(i)", {"output"}),
    "symbolic links": (
        "import os\nos.symlink('/etc/passwd', '/tmp/a'); os.symlink('/proc/1/root', '/tmp/b')\nfor path in ('/tmp/a', '/tmp/b/etc/passwd'):\n"
        "    try: print('read', open(path).read())\n    except OSError: pass",
        {"ended"},
    ),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "stopped group": (
        "import os, signal\nif not os.fork():\n    os.setsid()\n    os.kill(os.getpid(), signal.SIGSTOP)\nos.kill(0, signal.SIGSTOP)",
        {"timeout"},
    ),
    "deaf": (
        "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\ntime.sleep(600)",
        {"timeout"},
    ),
    "silent": ("import os, time\nos.close(1); os.close(2)\ntime.sleep(600)", {"timeout"}),
    "memory that nobody maps": (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.shmget(0, 2**20, 0o1600), libc.unshare(0x10000000), libc.memfd_create(b'x', 0), ctypes.get_errno())",
        {"ended"},
    ),
    "mounts": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nprint(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/usr', 2), libc.setuid(0))",
        {"ended"},
    ),
}


@needs_sandbox
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if kinds == {"timeout"} or name in ("fork bomb", "many files") else [])
        for name, (_, kinds) in HOSTILE.items()
    ],
)
def test_hostile_programs_change_nothing(name: str) -> None:
    program, kinds = HOSTILE[name]
    processes = len(os.listdir("/proc"))
    # A limit of memory is to be reached before that of time, on a busy machine too.
    found = run(program, replace(QUICK, seconds=30) if kinds == {"memory"} else QUICK)
    assert found.kind in kinds, found
    assert not any(word in found.stdout for word in ("wrote", "read "))
    if name == "disk filler":
        assert found.stdout.splitlines()[2:] == ["/dev 30 OSError", "/ 30 OSError", "/usr 30 OSError"]
    if name == "memory that nobody maps":
        assert found.stdout == "-1 -1 -1 1\n"
    if name == "mounts":
        assert found.stdout == "-1 -1 -1\n"
    assert len(os.listdir("/proc")) < processes + 30
    # The next one runs as if nothing had been.
    assert run("print(1)").stdout == "1\n"


@needs_sandbox
def test_the_number_of_processes_is_limited() -> None:
    program = """
import os, time
made = 0
for _ in range(100):
    try:
        if not os.fork():
            time.sleep(600)
        made += 1
    except OSError:
        break
print(made)
"""
    made = int(run(program).stdout)
    assert 1 <= made <= 16


@needs_sandbox
def test_programs_are_tested() -> None:
    answer = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n"
    assert check_program(answer, tests="assert add(1, 2) == 3") == 1.0
    assert check_program(answer, tests=["assert add(1, 2) == 3", "assert add(1, 2) == 4"]) == 0.0
    assert check_program(answer, tests=["assert add(1, 2) == 3", "assert add(1, 2) == 4"], partial=True) == 0.5
    assert check_program("import os; os._exit(0)", tests="assert False") == 0.0
    assert check_program("raise SystemExit", tests="assert False") == 0.0
    echo: dict[str, Any] = {"inputs": ["1\n2\n", ""], "outputs": ["3  \n", "0\n"]}
    program = "import sys\nprint(sum(map(int, sys.stdin)))"
    assert check_program(program, tests=echo) == 1.0
    assert check_program(program, tests='{"inputs": ["1"], "outputs": ["2"]}') == 0.0
    assert (
        check_program(
            "```py\nprint(1)\n```\nor\n```py\nwhile True: pass\n```", tests={"inputs": [""], "outputs": ["1"]}, seconds=1
        )
        == 0.0
    )
    for tests, message in (
        ("", "no tests"),
        ([], "no tests"),
        (3, "tests is a int"),
        ({"inputs": [""]}, "lists of texts of equal length"),
    ):
        with pytest.raises(ValueError, match=message):
            check_program(program, tests=tests)
    assert find_program("no block") == "no block"
    with pytest.raises(RuntimeError, match="the sandbox did not start the program"):
        check_program(program, tests=echo, memory_mb=8)
    others: list[Any] = [
        {"fn_name": "add", "inputs": ["1"], "outputs": ["3"]},
        {"inputs": "12", "outputs": "13"},
        {"inputs": [[1]], "outputs": [3]},
    ]
    for tests in others:
        with pytest.raises(ValueError, match="lists of texts of equal length, and nothing else"):
            check_program(program, tests=tests)


@pytest.mark.parametrize(
    "text",
    [
        "```python3\nx = 1\n```",
        "```Python\r\nx = 1\r\n```",
        "```bash\nls\n```\nthen\n```python\nx = 1\n```\nprints\n```\n3\n```",
        "```\n0\n```\n```\nx = 1\n```",
        "```py\nx = 1",
    ],
)
def test_where_a_program_stands(text: str) -> None:
    assert find_program(text) == "x = 1"


@needs_sandbox
def test_programs_as_a_reward() -> None:
    samples = [
        RewardSample(prompt="p", completion=completion, columns={"tests": "assert f() == 1"})
        for completion in ("def f(): return 1", "def f(): return 2", "import time; time.sleep(60)")
    ]
    with RewardScorer(RewardsConfig(use=("code",), settings={"code": {"seconds": 3.0}})) as scorer:
        assert scorer.score(samples).rewards == [1.0, 0.0, 0.0]
    # Killed with its reward process, in the middle.
    with RewardScorer(RewardsConfig(use=("code",), timeout_s=1.0, settings={"code": {"seconds": 60.0}})) as scorer:
        assert scorer.score(samples[2:]).counts("code")["timeout"] == 1
    assert not strangers()


def test_without_a_sandbox_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sandbox.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sandbox.shutil, "which", lambda tool: None if tool == "bwrap" else tool)
            with pytest.raises(ConfigError, match="which needs bwrap: apt-get install bubblewrap"):
                run_program("print(1)")
        with monkeypatch.context() as patch:
            patch.setattr(sandbox.shutil, "which", lambda tool: tool)
            patch.setattr(
                sandbox, "_run", lambda *_: ProgramResult(kind="ended", exit_code=1, stdout="", stderr="bwrap: No permissions")
            )
            with pytest.raises(
                ConfigError, match=r"(?s)does not work on this machine: bubblewrap says: bwrap: No permissions"
            ):
                run_program("print(1)")
    finally:
        check_sandbox.cache_clear()


@pytest.mark.parametrize("name", ["seconds", "memory_mb", "processes", "disk_mb", "output_mb"])
def test_limits_must_be_positive(name: str) -> None:
    values: list[Any] = [0, -1, float("nan"), float("inf")]
    for value in values:
        with pytest.raises(ConfigError, match=f"the sandbox's {name}="):
            SandboxLimits(**{name: value})
