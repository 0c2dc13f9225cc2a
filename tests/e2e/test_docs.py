"""The pages: their commands and programs run as they stand there, and their diagrams are drawn."""

import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from docs.draw import FENCE, PICTURES, TAG, diagrams
from docs.sizes import PAGE, page
from drivetrain.cli import COMMANDS
from drivetrain.serve.openai.serve_command import _parser as serve_parser
from drivetrain.trainers.tasks.rising_digits import write_pairs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TYPED_ELSEWHERE = {
    "own-data.md": "test_trainer.py types it from top to bottom",
    "rl.md": "test_rl.py types it from top to bottom",
    "first-run.md": "make demo",
    "cluster.md": "several machines; test_commands.py has two launchers on one",
}
RUN = ("sft", "dpo", "rm", "merge", "inspect", "verify", "data", "generate")
"""Commands that the pages show with settings; the others are parsed only, or have tests of their own."""


def commands(name: str) -> list[list[str]]:
    """The commands of a page's bash blocks, each as its words."""
    text = (DOCS / name).read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


PAGES = sorted(p.name for p in DOCS.glob("*.md") if p.name not in TYPED_ELSEWHERE and commands(p.name))


def test_every_command_of_the_pages_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in PAGES:
        for words in commands(name):
            if words[:2] == ["pip", "install"]:
                # Nothing is on a package index, so extras are installed from the clone.
                named = re.fullmatch(r"-e \.\[([\w,]+)\]", " ".join(words[2:]))
                assert named is not None, (name, words)
                assert {*named[1].split(",")} <= extras.keys(), (name, words)
            elif words[0] == "drivetrain":
                assert words[1] in COMMANDS, (name, words)
                if words[1] == "serve":
                    serve_parser().parse_args(words[2:])
            else:
                assert words[0] == "curl", (name, words)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in PAGES if any(w[0] == "drivetrain" and w[1] in RUN for w in commands(name))])
def test_the_commands_of_a_page_run(name: str, task: Path) -> None:
    write_pairs(task / "pairs", 0)
    files = {
        "MODEL": task / "model",
        "DATA.jsonl": task / "data" / "train.jsonl",
        "HELD_OUT.jsonl": task / "data" / "eval.jsonl",
        "PAIRS.jsonl": task / "pairs" / "train.jsonl",
    }
    if name in ("dpo.md", "rm.md"):
        files["HELD_OUT.jsonl"] = task / "pairs" / "eval.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "29517"}

    def typed(words: list[str]) -> None:
        given = [re.sub("|".join(map(re.escape, files)), lambda found: str(files[found[0]]), word) for word in words]
        if given[0] in ("sft", "dpo", "rm"):
            given += ["trainer.max_steps=3", "data.batch_size=8", "engine.micro_batch.max_tokens=256"]
        command = [sys.executable, "-m", "drivetrain.cli", *given]
        done = subprocess.run(command, cwd=task, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, (given, done.stdout[-500:], done.stderr[-2000:])

    shown = [words[1:] for words in commands(name) if words[0] == "drivetrain" and words[1] in RUN]
    if name == "merge.md":
        # The run that the page begins with.
        typed(["sft", "model.path=MODEL", "data.train=DATA.jsonl", "trainer.output_dir=runs/mine"])
    for words in shown:
        typed(words)


@pytest.mark.slow
def test_the_programs_of_the_page_for_python(task: Path) -> None:
    """Each by itself, in one process, as the cells of a notebook."""
    text = (DOCS / "python.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(programs) >= 7
    for name, file in (("train", "train"), ("held_out", "eval")):
        shutil.copy(task / "data" / f"{file}.jsonl", task / f"{name}.jsonl")
    program = "\n".join(f"exec(compile({text!r}, 'python.md', 'exec'), {{'__name__': '__main__'}})" for text in programs)
    program = program.replace("MODEL", str(task / "model"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=task, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "off_by" in (task / "runs" / "metric" / "metrics.jsonl").read_text()
    for run in ("python", "rows", "callback", "focal", "metric"):
        assert (task / "runs" / run / "hf").is_dir(), run
    assert not (task / "runs" / "later").exists()


def test_every_diagram_is_drawn_and_every_picture_is_there() -> None:
    assert {path.name for path in PICTURES.glob("diagram-*.svg")} == set(diagrams()), "run python -m docs.draw"
    for file in DOCS.glob("*.md"):
        for picture in re.findall(r"\]\((pictures/[^)]+)\)", file.read_text()):
            assert (DOCS / picture).is_file(), f"{file.name} shows {picture}"


def test_no_diagram_shows_html() -> None:
    """A label is text: of HTML only line breaks become what they mean, on GitHub and in the drawn pictures."""
    assert TAG.findall('a["<b>trainers/</b><br/>x < y"] --> b') == ["<b>", "</b>"]
    for file in (*DOCS.glob("*.md"), *ROOT.glob("*.md")):
        for diagram in FENCE.findall(file.read_text()):
            assert not TAG.findall(diagram), file.name
    for picture in PICTURES.glob("diagram-*.svg"):
        assert not TAG.findall(html.unescape(re.sub(r"<[^>]*>", "", picture.read_text()))), picture.name


@pytest.mark.slow
def test_the_table_of_sizes_is_what_the_engine_estimates() -> None:
    assert PAGE.read_text() == page(), "docs/sizes.md is not what the engine estimates; run python -m docs.sizes"
