"""What a checkout must be: no tracked binary and nothing large, hooks that run the linters, deliberate defects that fit the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from mutants import load_mutants

from helpers.files import module_of

ROOT = Path(__file__).parents[2]
CHECK = module_of(ROOT / ".ci" / "check_files.py")


def test_binaries_and_large_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "small.py").write_text("x = 1\n")
    (tmp_path / "wheel.whl").write_bytes(b"PK\0\0")
    (tmp_path / "large.json").write_text("0" * 300_001)
    (tmp_path / "docs" / "picture.png").write_bytes(b"\0" * 400_000)
    names = ["small.py", "wheel.whl", "large.json", "docs/picture.png", "deleted.py"]
    assert CHECK.unwanted(tmp_path, names) == [
        "wheel.whl is a binary file; leave it out of the repository (.gitignore)",
        "large.json has 300001 bytes, more than 300000; make it smaller, or leave it out of the repository",
    ]


def test_this_repository_has_none() -> None:
    done = subprocess.run([sys.executable, str(ROOT / ".ci" / "check_files.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_hooks_run_what_make_check_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    makefile = (ROOT / "Makefile").read_text()
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        words = hook["entry"].removeprefix(".venv/bin/python ").removesuffix(" --force-exclude")
        assert words == "make check" or words in makefile


def test_every_deliberate_defect_fits_the_code() -> None:
    mutants = load_mutants()
    assert len(mutants) >= 40
    assert all(mutant.old != mutant.new for mutant in mutants)


def test_the_page_of_families_says_what_the_code_does() -> None:
    from drivetrain.engine.bridge.family import FAMILIES as BRIDGED
    from drivetrain.engine.bridge.family import PARTS, find_family
    from drivetrain.engine.fsdp.families import EXACT, UNSUPPORTED
    from drivetrain.engine.hf.media import FAMILIES as MEDIA_FAMILIES
    from drivetrain.engine.tiny_configs import COMPARED_UNDER_CP, tiny_model_config
    from drivetrain.engine.tiny_media import tiny_media_config

    page = (ROOT / "docs" / "families.md").read_text()
    texts, media = page.split("## Images, video and audio")
    said = {row[0].strip("`"): [cell == "yes" for cell in row[2:]] for row in _rows(texts)}
    mixtures = {name for name in BRIDGED if find_family(name).decoder(tiny_model_config(name)).experts is not None}
    assert said == {f: [True, f in COMPARED_UNDER_CP, f in BRIDGED, f in mixtures] for f in EXACT}
    assert all(f"`{name}`" in page for name in UNSUPPORTED)
    listed = {name.strip("`"): row[2:] for row in _rows(media) for name in row[0].split(", ")}
    assert listed.keys() == MEDIA_FAMILIES.keys()
    for name, (*kinds, bridged, fields) in listed.items():
        modalities = MEDIA_FAMILIES[name].modalities
        decoder = tiny_media_config(name).get_text_config().model_type
        assert (bridged == "yes") == (decoder in {*BRIDGED, *PARTS})
        assert [kind == "yes" for kind in kinds] == [kind in modalities for kind in ("image", "video", "audio")]
        assert {f"`{field}`" for m in modalities.values() for field in (*m.fields, *m.optional)} <= {
            *re.split("[,;] ", fields)
        }


def _rows(page: str) -> list[list[str]]:
    """The cells of the tables whose first cell is a name."""
    lines = [line for line in page.splitlines() if line.startswith("| `") and "model_type" not in line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


@pytest.mark.parametrize("page", ["coming-from.md", "faq.md"])
def test_settings_that_a_page_names_exist(page: str) -> None:
    from drivetrain.trainers.config.parse import keys
    from drivetrain.trainers.config.rl import GRPOConfig
    from drivetrain.trainers.config.runs import DPOConfig, RMConfig, SFTConfig

    known = {key.name for cls in (SFTConfig, DPOConfig, RMConfig, GRPOConfig) for key in keys(cls)}
    text = (ROOT / "docs" / page).read_text()
    if page == "coming-from.md":
        # The first column has the names of others.
        text = "\n".join(line.split("|", 2)[2] if line.startswith("| ") else line for line in text.splitlines())
    sections = {name.partition(".")[0] for name in known}
    named = {name for name in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)+)(?=[`=, ])", text) if name.partition(".")[0] in sections}
    named = {name for name in named if not name.endswith((".md", ".py")) and "compute_" not in name and ".update" not in name}
    unknown = {name for name in named if name not in known and not any(k.startswith(f"{name}.") for k in known)}
    assert len(named) > 15
    assert unknown <= {"advantage.reject"}
