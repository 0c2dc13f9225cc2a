"""Rollout by transformers: plain generation's own answers, their log-probabilities, an actor's weights."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drivetrain.engine.config import EngineConfig, MicroBatchConfig, ModelConfig, OptimConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.engine.errors import ConfigError, ModelError
from drivetrain.engine.packing.convert import from_lists
from drivetrain.generation.options import RolloutConfig, SamplingOptions
from drivetrain.generation.result import to_padded
from drivetrain.workers.groups.local import LocalWorkerGroup
from drivetrain.workers.process.role_host import RoleSpec
from drivetrain.workers.roles.actor import ActorConfig, ActorWorker
from drivetrain.workers.roles.batch_adapters import adapt_batch
from drivetrain.workers.roles.generator import RolloutWorker
from helpers.engines import build, steps
from helpers.harness import run_ranks

PROMPTS = [[5, 6, 7], [9], [5, 6, 7, 8, 9, 10, 11], [200, 100], [3, 3, 3, 3]]
GREEDY = SamplingOptions(max_tokens=7, temperature=0.0)
SAMPLED = SamplingOptions(max_tokens=6, temperature=1.5, samples=2, top_p=0.9, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("rollout") / "model", "qwen3")


def worker(folder: Path, **more: Any) -> RolloutWorker:
    return RolloutWorker(RolloutConfig(model=ModelConfig(path=str(folder)), **more)).initialize()


def plain_answers(model: Any, count: int = 7) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
        found.append(out[len(prompt) :])
    return found


def told(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        z = (model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    found: list[float] = z.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()
    return found


def test_greedy_answers_are_those_of_plain_generate(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # In one batch, and in several.
    for room in (16384, 24):
        answers = worker(folder, max_batch_total_tokens=room).generate(PROMPTS, GREEDY)
        assert [a[0].response for a in answers] == plain_answers(model)
        assert [a[0].prompt for a in answers] == PROMPTS
        for (a,) in answers:
            assert a.log_probs == pytest.approx(told(model, a.prompt, a.response), abs=2e-5)
            assert not a.finished
    # A stop token ends an answer, is part of it, and nothing follows it.
    first = plain_answers(model)[0]
    (stopped,) = worker(folder).generate(PROMPTS[:1], replace(GREEDY, stop_tokens=(first[2],)))[0]
    assert stopped.response == first[: first.index(first[2]) + 1]
    assert len(stopped.log_probs) == len(stopped.response)
    assert stopped.finished


def test_sampled_answers_say_how_likely_they_were(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = SamplingOptions(max_tokens=5, temperature=1.7, samples=3, top_k=40, seed=4)
    answers = worker(folder).generate(PROMPTS, options)
    assert [len(a) for a in answers] == [3] * 5
    for some in answers:
        assert len({tuple(a.response) for a in some}) > 1
        for a in some:
            assert a.log_probs == pytest.approx(told(model, a.prompt, a.response, 1.7), abs=2e-5)
    assert answers_of(worker(folder).generate(PROMPTS, options)) == answers_of(answers)
    assert answers_of(worker(folder).generate(PROMPTS, replace(options, seed=5))) != answers_of(answers)


def test_tokens_are_drawn_as_often_as_the_model_says(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    count, temperature = 4000, 0.25
    with torch.no_grad():
        z = model(torch.tensor([[5, 6, 7]])).logits[0, -1].double() / temperature
    for more in ({"top_k": 6}, {"top_p": 0.4}, {}):
        options = SamplingOptions(max_tokens=1, temperature=temperature, samples=count, seed=1, **more)
        want = z.softmax(-1)
        ordered = want.sort(descending=True)
        kept = more.get("top_k") or (1 + int((ordered.values.cumsum(0) < more["top_p"]).sum()) if "top_p" in more else 256)
        want = torch.zeros_like(want).index_put((ordered.indices[:kept],), ordered.values[:kept])
        want /= want.sum()
        drawn = [a.response[0] for a in worker(folder, max_batch_total_tokens=10**6).generate([[5, 6, 7]], options)[0]]
        seen = torch.bincount(torch.tensor(drawn), minlength=256) / count
        assert not seen[want == 0].any()
        # Within five standard deviations of every token's frequency.
        assert ((seen - want).abs() <= 5 * (want * (1 - want) / count).sqrt() + 1e-12).all()


def test_what_is_drawn_for_a_row_depends_on_nothing_else(folder: Path) -> None:
    options = SamplingOptions(max_tokens=5, temperature=2.0, samples=2, seed=7)
    rows = torch.arange(len(PROMPTS))
    whole = worker(folder).generate(PROMPTS, options)
    # One batch for each prompt, and a share of the rows.
    assert answers_of(worker(folder, max_batch_total_tokens=24).generate(PROMPTS, options)) == answers_of(whole)
    batch = from_lists(PROMPTS).with_sequence_fields(row=rows)
    assert answers_of(worker(folder).generate(batch.select([3, 1]), options)) == answers_of([whole[3], whole[1]])
    # The same prompt in another row, and without a seed: others.
    assert answers_of(worker(folder).generate(PROMPTS[3:4], options)) != answers_of(whole[3:4])
    unseeded = replace(options, seed=None)
    assert answers_of(worker(folder).generate(PROMPTS, unseeded)) != answers_of(worker(folder).generate(PROMPTS, unseeded))


def answers_of(found: Any) -> list[list[list[int]]]:
    return [[a.response for a in some] for some in found]


def test_continuous_batching_gives_the_same(folder: Path) -> None:
    # With room for one at a time.
    narrow = worker(folder, generator="continuous", max_batch_total_tokens=24)
    for (a,), (b,) in zip(worker(folder).generate(PROMPTS, GREEDY), narrow.generate(PROMPTS, GREEDY), strict=True):
        assert a.response == b.response
        assert a.log_probs == pytest.approx(b.log_probs, abs=2e-4)
    # Drawn ones say how likely they were, depend on the seed, and leave torch's random state alone.
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rollout = worker(folder, generator="continuous", max_batch_total_tokens=2048)
    options, state = SamplingOptions(max_tokens=5, temperature=1.7, samples=2, seed=4), torch.get_rng_state()
    answers = rollout.generate(PROMPTS, options)
    for some in answers:
        for one in some:
            assert one.log_probs == pytest.approx(told(model, one.prompt, one.response, 1.7), abs=2e-4)
    assert torch.equal(torch.get_rng_state(), state)
    assert answers_of(rollout.generate(PROMPTS, options)) == answers_of(answers)
    assert answers_of(rollout.generate(PROMPTS, replace(options, seed=5))) != answers_of(answers)
    # All generators of this kind draw alike, filtered or not.
    for more in ({}, {"top_k": 5}, {"top_p": 0.5}):
        drawn = replace(options, **more)
        assert answers_of(rollout.generate(PROMPTS, drawn)) == answers_of(worker(folder).generate(PROMPTS, drawn))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2"])
def test_it_takes_an_actors_weights(tmp_path: Path, family: str) -> None:
    """After training the rollout answers as a plain model of the exported weights does: tied and fused tensors too."""
    path = save_tiny_model(tmp_path / "model", family, tie_word_embeddings=family != "qwen3_moe")
    engine = build(path, optim=OptimConfig(lr=3e-2))
    steps(engine, 3)
    rollout = worker(path)
    before = [a[0].response for a in rollout.generate(PROMPTS, GREEDY)]
    with engine.named_weights() as stream:
        rollout.load_weights(stream)
    from drivetrain.engine.export import export_hf

    model: Any = AutoModelForCausalLM.from_pretrained(export_hf(engine, tmp_path / "hf"), dtype=torch.float32).eval()
    after = [a[0].response for a in rollout.generate(PROMPTS, GREEDY)]
    assert after == plain_answers(model)
    assert after != before
    engine.close()


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    rollout = worker(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    whole = dict(model.state_dict())
    with pytest.raises(ModelError, match=r"1 tensors match no parameter \(other\), 0 parameters have no tensor"):
        rollout.load_weights({**whole, "other": torch.zeros(1)}.items())
    del whole["model.norm.weight"]
    with pytest.raises(ModelError, match=r"1 parameters have no tensor \(model.norm.weight\)"):
        rollout.load_weights(whole.items())
    with pytest.raises(ModelError, match="they are different models"):
        rollout.load_weights({"model.norm.weight": torch.zeros(3)}.items())
    # Of two models it would answer nonsense.
    with pytest.raises(ModelError, match="weights are a mix of two models"):
        rollout.generate(PROMPTS, GREEDY)
    rollout.load_weights(model.state_dict().items())
    assert [a[0].response for a in rollout.generate(PROMPTS, GREEDY)] == plain_answers(model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingOptions(max_tokens=0), "max_tokens=0"),
        (lambda: SamplingOptions(top_p=0.0), "top_p=0.0"),
        (lambda: SamplingOptions(temperature=0.0, samples=2), "all completions would be the same"),
        (lambda: RolloutWorker(RolloutConfig(model=ModelConfig(), dtype="float16")), "dtype=float16"),
        (lambda: RolloutWorker(RolloutConfig(model=ModelConfig())).generate([[1]], GREEDY), "not initialized"),
    ],
)
def test_settings_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_prompts_that_do_not_fit_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"prompt 2 has 7 tokens; .* up to max_tokens=7 it needs room for 14 \(max_batch_total_tokens=12\)"
    ):
        worker(folder, max_batch_total_tokens=12).generate(PROMPTS, GREEDY)
    with pytest.raises(ConfigError, match="prompt 0 has token ids from 3 to 999; the model only has those below 256"):
        worker(folder).generate([[3, 999]], GREEDY)
    with pytest.raises(ConfigError, match="prompt 0 has 0 tokens"):
        worker(folder).generate([[]], GREEDY)


def rank_group(folder: str) -> Any:
    """Actor and rollout in every process: answer, learn, sync, answer."""
    model = ModelConfig(path=folder)
    engine = EngineConfig(micro_batch=MicroBatchConfig(max_tokens=128))
    roles = {
        "actor": RoleSpec(worker=ActorWorker, config=ActorConfig(model=model, engine=engine, optim=OptimConfig(lr=3e-2))),
        "rollout": RoleSpec(worker=RolloutWorker, config=RolloutConfig(model=model)),
    }
    with LocalWorkerGroup(roles) as group:
        first = group["rollout"].generate(PROMPTS, GREEDY)
        data: Any = to_padded([a for some in first for a in some])
        with pytest.raises(ConfigError, match=r"rollout.generate samples at temperature=1.5, .*at 1, .*evaluation=True"):
            group["rollout"].generate(PROMPTS, SAMPLED)
        sampled = group["rollout"].generate(PROMPTS, replace(SAMPLED, evaluation=True))
        log_probs = group["actor"].compute_log_probs(data)["log_probs"]
        assert torch.allclose(log_probs, data["rollout_log_probs"], atol=2e-5)
        data |= {"old_log_probs": log_probs, "advantages": torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)}
        group["actor"].update(data)
        group.sync_weights("actor", "rollout")
        group["rollout"].to("host")
        group["rollout"].to("device")
        second = group["rollout"].generate(PROMPTS, GREEDY)
        # Answers to one prompt by several processes are not the same ones.
        for seed in (3, None):
            same = group["rollout"].generate([[5, 6, 7]] * 2, SamplingOptions(max_tokens=6, seed=seed))
            assert same[0][0].response != same[1][0].response
        state = torch.get_rng_state()
        group["rollout"].generate([[5, 6, 7]], SamplingOptions(max_tokens=2, seed=1))
        assert torch.equal(torch.get_rng_state(), state)
        fresh = group["actor"].compute_log_probs(adapt_batch(to_padded([a for some in second for a in some])).batch)
        assert fresh["log_probs"].any()
        return answers_of(first), answers_of(second), answers_of(sampled)


@pytest.mark.slow
def test_a_group_answers_learns_and_answers_anew(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (alone,) = run_ranks(rank_group, 1, str(folder))
    for found in run_ranks(rank_group, 2, str(folder)):
        assert [a[0] for a in found[0]] == plain_answers(model)
        assert found[1] != found[0]
        # However many processes answer, they draw the same.
        assert (found[0], found[2]) == (alone[0], alone[2])


# ---- what a model's folder asks for -------------------------------------------------------------------------------------

FOLDER_SETTINGS = {
    "use_cache": False,
    "repetition_penalty": 1.3,
    "suppress_tokens": list(range(3, 128)),
    "min_new_tokens": 5,
    "no_repeat_ngram_size": 1,
    "forced_eos_token_id": 2,
    "guidance_scale": 3.0,
    "num_beams": 4,
    "temperature": 0.6,
    "top_k": 3,
    "do_sample": True,
    "renormalize_logits": True,
    "max_length": 9,
}


def folder_with(folder: Path, to: Path, generation: dict[str, Any], **config: Any) -> Path:
    """The same model, with other settings beside its weights."""
    shutil.copytree(folder, to)
    for name, changes in (("generation_config.json", generation), ("config.json", config)):
        told = json.loads((to / name).read_text())
        (to / name).write_text(json.dumps({**told, **changes}))
    return to


@pytest.mark.parametrize("continuous", [False, True])
def test_generation_follows_no_settings_of_the_folder_but_names_them_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, continuous: bool
) -> None:
    more: dict[str, Any] = {"generator": "continuous", "max_batch_total_tokens": 2048} if continuous else {}
    plain = worker(folder, **more)
    assert "which rollout ignores" not in caplog.text
    asks = worker(folder_with(folder, tmp_path / "asks", FOLDER_SETTINGS, use_cache=False), **more)
    sampled = SamplingOptions(max_tokens=6, samples=2, seed=3)
    for options in (GREEDY, sampled):
        assert answers_of(asks.generate(PROMPTS, options)) == answers_of(plain.generate(PROMPTS, options))
    told = [record.getMessage() for record in caplog.records if "which rollout ignores" in record.getMessage()]
    assert len(told) == 1
    for name, value in FOLDER_SETTINGS.items():
        assert f"{name}={value}" in told[0]
    # The tokens that end an answer are the model's own affair.
    assert " eos_token_id" not in told[0]


def test_the_control_of_the_test_above(folder: Path, tmp_path: Path) -> None:
    """What the folder asks for changes plain generation."""
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name in ("repetition_penalty", "suppress_tokens", "no_repeat_ngram_size"):
        changed = folder_with(folder, tmp_path / name, {name: FOLDER_SETTINGS[name]})
        asks: Any = AutoModelForCausalLM.from_pretrained(changed, dtype=torch.float32).eval()
        assert plain_answers(asks, 12) != plain_answers(plain, 12)


def test_generation_always_has_a_cache(folder: Path, tmp_path: Path) -> None:
    off = folder_with(folder, tmp_path / "off", {"use_cache": False}, use_cache=False)
    (off / "generation_config.json").unlink()
    rollout: Any = worker(off)
    widths: list[int] = []
    rollout.generator._lm.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    rollout.generate([[5, 6, 7]], GREEDY)
    # The prompt once, then a token at a time.
    assert widths == [3, *[1] * 6]


# ---- what ends in one clear error ---------------------------------------------------------------------------------------


def spoiled(folder: Path, to: Path, value: float) -> Path:
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_on_load_and_on_sync(folder: Path, tmp_path: Path, value: float) -> None:
    with pytest.raises(
        ModelError, match=r"model.layers.1.mlp.up_proj.weight has values that are not finite .*the weights are damaged"
    ):
        worker(spoiled(folder, tmp_path / "spoiled", value))
    rollout, model = worker(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bad = {**good, "model.norm.weight": torch.full_like(good["model.norm.weight"], value)}
    with pytest.raises(ModelError, match=r"model.norm.weight has values that are not finite .*that were sent are damaged"):
        rollout.load_weights(bad.items())
    with pytest.raises(ModelError, match="weights are a mix of two models"):
        rollout.generate(PROMPTS, GREEDY)
    rollout.load_weights(good.items())
    assert rollout.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("options", "continuous"), [(GREEDY, False), (SAMPLED, False), (SamplingOptions(max_tokens=3, seed=1), True)]
)
def test_logits_that_are_nan_are_one_error(folder: Path, options: SamplingOptions, continuous: bool) -> None:
    rollout: Any = worker(folder, generator="continuous" if continuous else "static", max_batch_total_tokens=2048)
    head = rollout.generator._lm.model.lm_head
    head.register_forward_hook(lambda module, args, output: output * float("nan"))
    with pytest.raises(ModelError, match="computes NaN"):
        rollout.generate(PROMPTS, options)


def test_continuous_batching_without_a_token_that_ends_answers(folder: Path, tmp_path: Path) -> None:
    endless = folder_with(folder, tmp_path / "endless", {"eos_token_id": None}, eos_token_id=None)
    rollout = worker(endless, generator="continuous", max_batch_total_tokens=2048)
    assert answers_of(rollout.generate(PROMPTS, GREEDY)) == answers_of(worker(endless).generate(PROMPTS, GREEDY))
    stopped = replace(GREEDY, stop_tokens=(2,))
    assert answers_of(rollout.generate(PROMPTS, stopped)) == answers_of(worker(endless).generate(PROMPTS, stopped))


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, None, "1", True])
def test_sampling_that_is_no_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        SamplingOptions(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 1.5), ("samples", 2.0), ("top_k", None), ("stop_tokens", 5), ("temperature", 1e-40)]
)
def test_sampling_of_another_kind_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        SamplingOptions(**{name: value})


def test_the_context_is_that_of_the_scaled_rope(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
    scaled = folder_with(folder, tmp_path / "scaled", {}, rope_parameters=rope)
    assert worker(scaled).generate([[5] * 300], GREEDY)
    assert "may exceed" not in caplog.text
    rollout = worker(folder)
    for _ in range(2):
        rollout.generate([[5] * 250], replace(GREEDY, max_tokens=7))
    assert caplog.text.count("may exceed the 256 positions") == 1


def test_an_infinite_logit_is_one_error(folder: Path) -> None:
    rollout: Any = worker(folder)
    rollout.generator._lm.model.lm_head.register_forward_hook(
        lambda module, args, output: output.index_fill(-1, torch.tensor(7), torch.inf)
    )
    for options in (GREEDY, SAMPLED):
        with pytest.raises(ModelError, match="computes NaN or infinity"):
            rollout.generate(PROMPTS, options)


def test_a_reward_model_answers_nothing(folder: Path, tmp_path: Path) -> None:
    tied = save_tiny_model(tmp_path / "tied", "qwen3", tie_word_embeddings=True)
    tensors = load_file(tied / "model.safetensors")
    save_file({**tensors, "score.weight": torch.zeros(1, 64)}, tied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"it has score.weight"):
        worker(tied)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (torch.tensor([[0, 5, 6], [7, 8, 9]]), r"prompts is a Tensor \[2, 3\], in which padding cannot be distinguished"),
        ({"input_ids": torch.tensor([[0, 5]])}, "prompts is a dict, in which padding cannot be distinguished"),
        (["text"], "prompt 0 is 'text'; it must be a list of token ids"),
        ([5, 6], "prompt 0 is 5; it must be a list of token ids"),
        ("text", "prompts is a str; pass a list of token ids"),
        (None, "prompts is a NoneType; pass a list"),
        ([[None]], r"prompt 0 is \[None\]; it must be a list of token ids"),
        ([[1.5, 2.0]], r"prompt 0 is \[1.5, 2.0\]"),
        ([[True, False]], r"prompt 0 is \[True, False\]"),
        ([{1, 2}], "prompt 0 is {1, 2}"),
        ([[5] * 300], r"prompt 0 has 300 tokens, which leaves no room for a completion in the 256 positions"),
    ],
)
def test_prompts_that_are_none_are_one_error(folder: Path, prompts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        worker(folder).generate(prompts, GREEDY)
    with (
        LocalWorkerGroup(
            {"rollout": RoleSpec(worker=RolloutWorker, config=RolloutConfig(model=ModelConfig(path=str(folder))))}
        ) as group,
        pytest.raises(ConfigError, match=message),
    ):
        group["rollout"].generate(prompts, GREEDY)


def test_no_prompts_and_no_answers(folder: Path) -> None:
    assert worker(folder).generate([], GREEDY) == []
    data = to_padded([])
    assert data["input_ids"].shape == (0, 0)
    assert [a[0].response for a in worker(folder).generate([torch.tensor(PROMPTS[0])], GREEDY)]  # type: ignore[list-item]


def test_a_folder_without_a_language_models_head_is_refused(folder: Path, tmp_path: Path) -> None:
    headless = tmp_path / "headless"
    shutil.copytree(folder, headless)
    tensors = {name: tensor for name, tensor in load_file(headless / "model.safetensors").items() if name != "lm_head.weight"}
    save_file(tensors, headless / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors that a language model needs, lm_head.weight among them"):
        worker(headless)


def test_damaged_weights_are_an_error_that_names_the_model(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"hello")
    with pytest.raises(ModelError, match=rf"model.path={damaged} cannot be loaded for rollout: SafetensorError: .*header"):
        worker(damaged)
