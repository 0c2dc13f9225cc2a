"""Settings: typed, checked, read by somebody; commands that answer before torch is imported; schedules; the registry."""

import ast
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drivetrain.engine.config import EngineConfig, ModelConfig, OptimConfig
from drivetrain.engine.errors import ConfigError, DrivetrainError
from drivetrain.engine.lr_schedule import is_decayed, learning_rate
from drivetrain.engine.registry import BackendSpec, backends, options_class, register, spec_of, unregister
from drivetrain.lazy_imports import MOVED_MODULES, RENAMED
from drivetrain.trainers.config.data import DataConfig
from drivetrain.trainers.config.parse import RECIPES, changes, differences, keys, parse, recipes_of, to_yaml
from drivetrain.trainers.config.rl import GRPOConfig, OnlineDPOConfig, PPOConfig
from drivetrain.trainers.config.runs import DPOConfig, RMConfig, SFTConfig
from drivetrain.trainers.config.trainer import TrainerConfig

ROOT = Path(__file__).parents[2]
USAGE = "usage"


def test_overrides_win_over_recipe_and_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("optim: {lr: 0.5, weight_decay: 0.25}\nengine: {parallel: {cp: 2}}\ndata: {train: [a.jsonl]}\n")
    config = parse(SFTConfig, [f"recipe={recipe}", "optim.lr=3e-4", "engine.options.reshard_after_forward=false"], USAGE)
    assert (config.optim.lr, config.optim.weight_decay, config.engine.parallel.cp) == (3e-4, 0.25, 2)
    assert config.data.train == ("a.jsonl",)
    assert config.engine.options.reshard_after_forward is False
    assert config.optim.betas == (0.9, 0.95)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["engine.paralel.cp=2"], "unknown setting 'engine.paralel.cp'; did you mean 'engine.parallel.cp'"),
        (["trainer.max_step=3"], "did you mean 'trainer.max_steps'"),
        (
            ["engine.options.nonsense=1"],
            "unknown setting 'engine.options.nonsense'; this backend's engine.options are allow_unverified_family",
        ),
        (["optim.lr=abc"], "optim.lr=abc; it must be a number"),
        (["engine.recompute=sometimes"], "engine.recompute=sometimes; it must be one of auto, none, full"),
        (["engine.compile=perhaps"], "engine.compile: Value 'perhaps' of type 'str'; use auto, true or false"),
        (["engine.backend=fsdq"], "engine.backend='fsdq' is unknown; .*did you mean 'fsdp'"),
        (["recipe=nowhere"], "recipe=nowhere does not exist; the built-in recipes are sft, sft_demo, sft_lora"),
        (["recipe=sft_lorra"], "did you mean 'sft_lora'"),
        (["recipe=sft", "recipe=sft_lora"], "given 2 times"),
        (["--lr"], "'--lr' is not a setting; did you mean 'optim.lr'"),
        (["--batch-size"], "'--batch-size' is not a setting; did you mean 'data.batch_size'"),
        (["--fsdp"], "'--fsdp' is not a setting; the model is sharded over all processes"),
        (["recipe"], "'recipe' is not a setting; write recipe=VALUE"),
        (["anything"], "'anything' is not a setting; write key=value"),
        (["optim.schedule=cosin"], "optim.schedule=cosin; it must be one of .*; did you mean 'cosine'"),
        (["data.turns=apart"], "data.turns=apart is now called per_turn; write data.turns=per_turn"),
        (["data.turns=together"], "write data.turns=single"),
        (["data.turns=[apart]"], "data.turns=.*; it must be one of auto, single, per_turn"),
    ],
)
def test_bad_settings_say_what_to_do(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(SFTConfig, words, USAGE)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  path: a\nmodel:\n  path: b\n",
            "line 3 of FILE is not valid YAML: the key 'model' is given twice; keep one of them",
        ),
        ("data:\n  train: [a.jsonl\noptim:\n  lr: 1\n", "line 2 of FILE is not valid YAML: [ has no closing ]"),
        ("model: {path: a}}", "line 1 of FILE is not valid YAML: } has no opening {"),
        ("model: 'a", "line 1 of FILE is not valid YAML: a quotation mark is not closed"),
        ("model:\n\tpath: a\n", "line 2 of FILE is not valid YAML: a tab, or a character that cannot begin a value"),
        ("model:\n path: a\n  init: b\n", "line 3 of FILE is not valid YAML: a second colon"),
        ("optim: {lr: 1}\n---\noptim: {lr: 2}\n", "line 2 of FILE is not valid YAML: a second document (---)"),
        ("data: {train: *a}", "line 1 of FILE is not valid YAML: a value that begins with *"),
        ("model: ${", "FILE is not valid YAML: ${ without a reference after it"),
        (
            "data.train=[good.jsonl",
            "data.train=[good.jsonl cannot be read: [ has no closing ]; write a list or a mapping as one word",
        ),
        ("data.train=[a.jsonl, b.jsonl]", ""),
        ("data.columns={prompt: a", "data.columns={prompt: a cannot be read: { has no closing }; write a list"),
        ("data.columns={prompt: a, prompt: b}", "cannot be read: the key 'prompt' is given twice; keep one of them"),
        ("data.train='a", "data.train='a cannot be read: a quotation mark is not closed"),
    ],
)
def test_what_is_not_yaml_is_told_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    file, is_word = tmp_path / "mine.yaml", re.match(r"[\w.]+=", text)
    file.write_text(text)
    words = [text] if is_word else [f"recipe={file}"]
    if not message:
        parse(SFTConfig, words, USAGE)
        return
    with pytest.raises(ConfigError, match=re.escape(message.replace("FILE", str(file)))) as found:
        parse(SFTConfig, words, USAGE)
    assert "\n" not in str(found.value)
    # A list with spaces that the shell has divided.
    with pytest.raises(ConfigError, match=r"^data\.train=\[a, cannot be read: \[ has no closing \]"):
        parse(SFTConfig, ["data.train=[a,", "b]"], USAGE)


def test_one_path_may_stand_for_a_list_of_one() -> None:
    config = parse(SFTConfig, ["data.train=a.jsonl", "model.lora.targets=q_proj"], USAGE)
    assert config.data.train == ("a.jsonl",)
    assert config.model.lora.targets == ("q_proj",)


PATHS = (
    "model.path",
    "model.chat_template",
    "data.train",
    "data.eval",
    "data.cache_dir",
    "data.media_dir",
    "trainer.output_dir",
    "trainer.checkpoint_dir",
    "trainer.resume",
    "reference.path",
)


@pytest.mark.parametrize("name", PATHS)
def test_paths_are_expanded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WHERE", "here")

    def given(*values: str) -> list[str]:
        value: Any = parse(DPOConfig, [f"{name}=[{','.join(values)}]" if len(values) > 1 else f"{name}={values[0]}"], "")
        for part in name.split("."):
            value = getattr(value, part)
        return [value] if isinstance(value, str) else list(value)

    assert given("~/a") == [f"{tmp_path}/a"]
    assert given("$WHERE/$WHERE.x") == ["here/here.x"]
    assert given("s3://bucket/~a") == ["s3://bucket/~a"]
    with pytest.raises(ConfigError, match=rf"{name}=\$NOWHERE/a: the environment variable \$NOWHERE is not set"):
        given("$NOWHERE/a")
    with pytest.raises(ConfigError, match=f"{name}=~nobody-here/a: there is no user 'nobody-here'"):
        given("~nobody-here/a")
    with pytest.raises(ConfigError, match=r"write an environment variable as \$NAME"):
        given("${HOME}/a")
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError, match=r"variable \$EMPTY is not set or is empty"):
        given("$EMPTY/a")
    monkeypatch.setenv("PRICE", "5$")
    assert given("$PRICE/a") == ["5$/a"]
    # A file that is called so.
    (tmp_path / "cost$NOWHERE").touch()
    assert given(f"{tmp_path}/cost$NOWHERE") == [f"{tmp_path}/cost$NOWHERE"]
    if name in ("data.train", "data.eval"):
        assert given("~/a", "$WHERE") == [f"{tmp_path}/a", "here"]


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    assert ModelConfig(path=tmp_path / "m").path == str(tmp_path / "m")  # type: ignore[arg-type]
    assert DataConfig(train=[tmp_path / "a", "b"]).train == (str(tmp_path / "a"), "b")  # type: ignore[arg-type,list-item]


def test_every_setting_that_names_a_file_or_folder_is_a_path() -> None:
    mark_supervised = {key.name for cls in (SFTConfig, DPOConfig, RMConfig) for key in keys(cls) if key.path}
    assert mark_supervised == set(PATHS)
    spoken = {
        key.name
        for cls in (SFTConfig, DPOConfig, RMConfig)
        for key in keys(cls)
        if re.search(r"\b(files?|folder)\b", key.help)
    }
    # The order of the files, and what comes with the folder, are no paths.
    assert spoken - mark_supervised == {"data.shuffle", "data.txt", "model.trust_remote_code"}


def test_a_recipe_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("trainer:\n  output_dir: ~/runs\n")
    assert parse(SFTConfig, ["recipe=~/mine.yaml"], "").trainer.output_dir == f"{tmp_path}/runs"


def test_a_pattern_is_no_reference_of_yaml() -> None:
    for word in ("model.freeze=*.mlp.*", "model.freeze=[*.mlp.*]", 'model.freeze=["*.mlp.*"]'):
        assert parse(SFTConfig, [word], USAGE).model.freeze == ("*.mlp.*",)
    assert parse(SFTConfig, ["model.freeze=[a.*,*.b, *c]"], USAGE).model.freeze == ("a.*", "*.b", "*c")
    assert parse(SFTConfig, ["model.added_tokens=[<a>,<b>]"], USAGE).model.added_tokens == ("<a>", "<b>")


def test_a_recipe_may_stand_on_another(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("recipe: sft\noptim: {lr: 0.5}\n")
    config = parse(SFTConfig, [f"recipe={tmp_path / 'mine.yaml'}"], USAGE)
    assert (config.optim.lr, config.engine.precision.compute) == (0.5, "auto")
    (tmp_path / "round.yaml").write_text(f"recipe: {tmp_path / 'round.yaml'}\n")
    with pytest.raises(ConfigError, match="form a cycle"):
        parse(SFTConfig, [f"recipe={tmp_path / 'round.yaml'}"], USAGE)


def test_what_a_run_has_otherwise_is_told(tmp_path: Path) -> None:
    config = parse(SFTConfig, ["optim.lr=1", "engine.options.reshard_after_forward=false"], USAGE)
    assert changes(config) == {"optim.lr": 1.0, "engine.options.reshard_after_forward": False}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    other = parse(SFTConfig, ["optim.lr=2", "engine.options.reshard_after_forward=false", "data.train=x.jsonl"], USAGE)
    assert differences(tmp_path / "config.yaml", config) == []
    assert differences(tmp_path / "config.yaml", other) == ["data.train: [] -> ['x.jsonl']", "optim.lr: 1.0 -> 2.0"]


def test_every_recipe_parses_and_names_its_command() -> None:
    from drivetrain.trainers.validate import unused_settings

    classes: tuple[type, ...] = (SFTConfig, DPOConfig, RMConfig, GRPOConfig, PPOConfig, OnlineDPOConfig)
    offered = {cls: recipes_of(cls) for cls in classes}
    assert sorted(name for names in offered.values() for name in names) == sorted(p.stem for p in RECIPES.glob("*.yaml"))
    for cls, names in offered.items():
        assert names
        for name in names:
            config: Any = parse(cls, [f"recipe={name}"], USAGE)
            assert not unused_settings(config.optim, 1000), name
            assert f"recipe={name}" in (RECIPES / f"{name}.yaml").read_text().split("\n\n")[0]


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse(SFTConfig, ["model.lora.rank=3", "data.train=[x.jsonl]", "data.max_length=null"], USAGE)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert parse(SFTConfig, [f"recipe={tmp_path / 'again.yaml'}"], USAGE) == config


def sources() -> dict[str, ast.Module]:
    return {
        str(f): ast.parse(f.read_text()) for folder in ("engine", "trainers", "workers") for f in (ROOT / folder).rglob("*.py")
    }


def test_every_setting_is_read_by_somebody() -> None:
    read = {
        node.attr
        for path, tree in sources().items()
        if not path.endswith("/config.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    options = options_class("fsdp")
    assert options is not None
    every = [*keys(SFTConfig), *keys(DPOConfig), *keys(RMConfig), *keys(options, "engine.options.")]
    unread = [k.name for k in every if k.name.rpartition(".")[2] not in read]
    assert not unread
    assert not [k.name for k in every if not k.help]


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "drivetrain.trainers.sft", "--help"],
        ["-m", "drivetrain.trainers.dpo", "--help"],
        ["-m", "drivetrain.trainers.rm", "--help"],
        ["-m", "drivetrain.trainers.grpo", "--help"],
        ["-m", "drivetrain.cli", "--help"],
    ],
)
def test_help_answers_without_torch(words: list[str]) -> None:
    code = textwrap.dedent(f"""
        import runpy, sys
        sys.argv = {words[1:]!r}
        try:
            runpy.run_module({words[1]!r}, run_name="__main__", alter_sys=True)
        except SystemExit as e:
            assert not e.code, e.code
        heavy = [m for m in ("torch", "transformers", "datasets") if m in sys.modules]
        assert not heavy, heavy
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "drivetrain" in done.stdout


@pytest.mark.parametrize(
    "module",
    [
        "engine",
        "engine.config",
        "engine.errors",
        "engine.registry",
        "engine.lr_schedule",
        "engine.capabilities",
        "engine.fsdp.options",
        "trainers.config.parse",
        "trainers.config.rl",
        "trainers.config.runs",
        "trainers.sft",
        "cli",
    ],
)
def test_light_modules_import_no_torch(module: str) -> None:
    code = f"import sys, drivetrain.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_package_list_equals_the_disk() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    skip = {"tests", "docs", "benchmarks", "examples", "build", "dist", "site", "runs"}
    on_disk = {"drivetrain"}
    for init in ROOT.rglob("__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        if parts and parts[0] not in skip and not parts[0].startswith(".") and not parts[0].endswith(".egg-info"):
            on_disk.add(".".join(("drivetrain", *parts)))
    assert listed == on_disk
    assert all((ROOT / p.removeprefix("drivetrain").replace(".", "/").lstrip("/")).is_dir() for p in listed)
    loose = [
        f for f in ROOT.rglob("*.py") if not (f.parent / "__init__.py").exists() and f.relative_to(ROOT).parts[0] not in skip
    ]
    assert not [f for f in loose if not f.relative_to(ROOT).parts[0].startswith(".")]


def test_stubs_of_public_names_are_installed() -> None:
    """Without its stub, an installed package has no public names."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    tracked = subprocess.run(
        ["git", "ls-files", "*.pyi"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    stubs = tracked or ["__init__.pyi", "checkpoint_tools/__init__.pyi"]
    for stub in stubs:
        package = ".".join(("drivetrain", *Path(stub).parent.parts))
        assert Path(stub).name in data.get(package, []), stub


@pytest.mark.parametrize("package", ["drivetrain", "drivetrain.checkpoint_tools"])
def test_lazy_exports_resolve(package: str) -> None:
    face = import_module(package)
    assert len(dir(face)) >= 5
    for name in dir(face):
        assert getattr(face, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = face.Nothing


@pytest.mark.parametrize("package", ["engine", "workers", "trainers.config"])
def test_public_names_have_one_place(package: str) -> None:
    module = import_module(f"drivetrain.{package}")
    with pytest.raises(ImportError, match="use from drivetrain import EngineConfig"):
        _ = module.EngineConfig
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = module.Nothing


def test_a_renamed_public_name_says_what_it_is_now() -> None:
    with pytest.raises(ImportError, match="RunOutcome is now TrainResult: use from drivetrain import TrainResult"):
        from drivetrain import RunOutcome  # type: ignore[attr-defined]  # noqa: F401
    assert {*RENAMED.values()} <= {*dir(import_module("drivetrain"))}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trainers.trainer", "trainers.offline.trainer"),
        ("workers.losses.policy", "losses.policy"),
        ("workers.rollout.worker", "workers.roles.generator"),
        ("workers.rollout.options", "generation.options"),
        ("workers.model_worker.messages", "workers.protocol.messages"),
        ("workers.model_worker.digests", "workers.data_plane.digests"),
        ("trainers.rl.ledger", "trainers.rl.memory_manager"),
        ("serve.generate", "trainers.generate"),
    ],
)
def test_a_module_that_has_moved_says_where_it_is(old: str, new: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"drivetrain\.{old} has moved: import drivetrain\.{new}$"):
        import_module(f"drivetrain.{old}")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        import_module("drivetrain.workers.rollout.nothing")
    with pytest.raises(ImportError, match=r"import RoleSpec from drivetrain\.workers\.process"):
        _ = import_module("drivetrain.workers.model_worker").RoleSpec


@pytest.mark.parametrize("new", sorted(set(MOVED_MODULES.values())))
def test_what_has_moved_is_there(new: str) -> None:
    assert find_spec(f"drivetrain.{new}") is not None


# ---- schedules -------------------------------------------------------------------------------------------------------


def rates(total: int | None = 10, **settings: Any) -> list[float]:
    optim = OptimConfig(lr=1.0, **settings)
    return [round(learning_rate(s, optim, total), 6) for s in range(10)]


def test_schedules() -> None:
    assert rates(schedule="constant") == [1.0] * 10
    assert rates(schedule="constant", warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(schedule="constant", warmup_ratio=0.2)[:3] == [0.5, 1.0, 1.0]
    assert rates(schedule="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert rates(schedule="linear", min_lr_ratio=0.5)[5] == 0.75
    cosine = rates(schedule="cosine", min_lr_ratio=0.1)
    assert cosine[0] == 1.0
    assert cosine[5] == pytest.approx(0.55)
    assert cosine == sorted(cosine, reverse=True)
    assert rates(schedule="wsd", decay_ratio=0.4) == [1.0] * 7 + [0.75, 0.5, 0.25]
    root = rates(schedule="inverse_sqrt", warmup_steps=4, total=None)
    assert root[3] == 1.0
    assert root[8] == pytest.approx((4 / 9) ** 0.5, abs=1e-6)
    assert learning_rate(99, OptimConfig(lr=1.0, schedule="cosine", min_lr_ratio=0.1), 10) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "linear"},
        {"warmup_ratio": 0.1},
    ],
)
def test_impossible_optimizers_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"optim\."):
        OptimConfig(**settings).check(None)


def test_norms_and_biases_are_not_decayed() -> None:
    assert is_decayed("model.embed_tokens.weight", 2)
    assert not is_decayed("model.norm.weight", 1)
    assert not is_decayed("model.layers.0.mlp.experts.gate_up_proj_bias", 2)


# ---- registry --------------------------------------------------------------------------------------------------------


def test_registry_refuses_a_taken_name() -> None:
    assert "fsdp" in backends()
    with pytest.raises(ConfigError, match="'fsdp' is already registered"):
        register("fsdp", BackendSpec(engine="x:Y"))
    register("mine", BackendSpec(engine="x:Y"))
    assert spec_of("mine").engine == "x:Y"
    assert options_class("mine") is None
    unregister("mine")
    with pytest.raises(ConfigError, match="'mine' is unknown"):
        spec_of("mine")
    assert EngineConfig().backend == "fsdp"


def write_package(folder: Path, name: str) -> None:
    """A real third-party package: a module and the metadata that pip would install beside it."""
    (folder / f"{name}_engine.py").write_text(
        f"from drivetrain.engine.registry import BackendSpec\nSPEC = BackendSpec(engine='{name}_backend:Engine')\n"
    )
    (folder / f"{name}_backend.py").write_text(
        "from drivetrain.engine.fsdp.engine import FSDPEngine\nclass Engine(FSDPEngine):\n    pass\n"
    )
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[drivetrain.engines]\n{name} = {name}_engine:SPEC\n")


def test_third_party_engine_is_found_and_conforms(tmp_path: Path) -> None:
    write_package(tmp_path, "other")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    listed = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli", "backends"], capture_output=True, text=True, check=True, env=environment
    )
    assert "other" in listed.stdout
    words = ["-m", "drivetrain.cli", "conformance", "other", "--only", "reference", "budget"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "2 checks passed, 0 failed" in done.stdout


def test_third_party_engine_may_not_take_our_name(tmp_path: Path) -> None:
    write_package(tmp_path, "fsdp")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "drivetrain.cli", "backends"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode != 0
    assert "two backends are called 'fsdp'" in done.stderr


def test_errors_survive_pickling() -> None:
    import pickle

    for kind in DrivetrainError.__subclasses__():
        error = pickle.loads(pickle.dumps(kind("both numbers: 1 and 2")))
        assert type(error) is kind
        assert str(error) == "both numbers: 1 and 2"


def test_the_configuration_reference_is_current() -> None:
    from docs.reference import PAGE, page

    assert PAGE.read_text() == page(), "docs/configuration.md is not what the dataclasses say; run `make docs`"


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (OptimConfig, {"lr": "1e-4"}, "optim.lr='1e-4' is a str; it must be a number"),
        (OptimConfig, {"lr": True}, "optim.lr=True is a bool; it must be a number"),
        (OptimConfig, {"lr": -1.0}, "optim.lr=-1.0; it must be at least 0"),
        (OptimConfig, {"lr": float("nan")}, "optim.lr=nan; it must be at least 0"),
        (OptimConfig, {"betas": (0.9,)}, r"optim.betas=\(0.9,\) is a tuple; it must be a list of 2 numbers"),
        (OptimConfig, {"betas": ("a", "b")}, "it must be a list of 2 numbers"),
        (OptimConfig, {"clip_grad_norm": "1"}, "it must be a number or null"),
        (EngineConfig, {"compile": "yes"}, "engine.compile='yes' is a str; it must be true or false or one of auto"),
        (EngineConfig, {"parallel": {"cp": 2}}, "engine.parallel={'cp': 2} is a dict; it must be a ParallelConfig"),
        (ModelConfig, {"path": None}, "model.path=None is null; it must be text"),
        (ModelConfig, {"init": "scratch"}, "model.init='scratch' is a str; it must be one of weights, random"),
        (ModelConfig, {"freeze": [1]}, r"model.freeze=\(1,\) is a tuple; it must be a list of texts"),
        (DataConfig, {"columns": {"prompt": 1}}, "data.columns={'prompt': 1} is a dict"),
        (TrainerConfig, {"max_steps": 1.5}, "trainer.max_steps=1.5 is a float; it must be a whole number or null"),
    ],
)
def test_types_are_checked_at_construction(cls: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**settings)


def test_what_means_the_same_is_accepted(tmp_path: Path) -> None:
    assert OptimConfig(lr=1, betas=[0.9, 0.95]).betas == (0.9, 0.95)  # type: ignore[arg-type]
    assert DataConfig(train="a.jsonl").train == ("a.jsonl",)  # type: ignore[arg-type]
    assert DataConfig(train=["a.jsonl", "b.jsonl"]).train == ("a.jsonl", "b.jsonl")  # type: ignore[arg-type]
    assert ModelConfig(path=tmp_path).path == str(tmp_path)  # type: ignore[arg-type]
    assert EngineConfig(compile=True).compile is True
