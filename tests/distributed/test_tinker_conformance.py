"""The checks of training services: ours passes all of them, and a service that is broken in a known way fails the check that is made for it."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from drivetrain.engine.config import OptimConfig
from drivetrain.engine.conformance.tiny import save_tiny_model
from drivetrain.serve.openai.text import Texts
from drivetrain.serve.tinker.conformance.checks import CHECKS, SEVERAL_MODELS
from drivetrain.serve.tinker.conformance.client import Send
from drivetrain.serve.tinker.conformance.conformance_command import main, run
from drivetrain.serve.tinker.sampler_weights import ModelSnapshots
from drivetrain.serve.tinker.sampling import SamplingService
from drivetrain.serve.tinker.training import Training
from drivetrain.serve.tinker.training_group import ROLE, FullTrainingGroup, TrainingGroup
from drivetrain.serve.tinker.training_queue import ModelQueue, QueuedRequest
from helpers.tinker_replicas import LocalReplicas
from helpers.tinker_service import full_group_of, group_of, running

pytestmark = pytest.mark.usefixtures("process_group")
ERROR = re.compile(r"FAIL \w+ +(\w*(Error|Exception): |.* failed: |.* returned status \d+ instead of )")
"""What a check prints if it failed because of an error, instead of a comparison."""
KEYS = ("tml-a-user-of-tests", "tml-another-user-of-tests")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("conformance") / "model", "llama", vocab_size=300)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    """A tokenizer of the model's vocabulary. Each token is two letters, so that a stop string can begin in one token and end in the next."""
    # Not in the folder of the model, of which it would change the end-of-sequence tokens.
    tokenizer = Tokenizer(models.WordLevel({chr(97 + i // 20) + chr(97 + i % 20): i for i in range(300)}, unk_token="aa"))
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return Texts(folder)


@contextmanager
def served(folder: Path, state: Path, **options: Any) -> Iterator[Send]:
    """What sends requests to a service whose event loop is in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = running(folder, state, max_adapters=64, **options)
    try:
        service = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)

        def send(method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
            request = service.http.request(method, path, content=body, headers=headers)
            response: httpx.Response = asyncio.run_coroutine_threadsafe(request, loop).result(60)
            return response.status_code, response.headers.get("content-type", ""), response.content

        yield send
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class LosesChunks(TrainingGroup):
    """Zeroes the gradient before each pass."""

    async def forward_backward(self, requests: Any) -> Any:
        worker: Any = self._group._worker.host._workers[ROLE]  # type: ignore[union-attr]
        for adapter in {r.adapter for r in requests if not r.forward_only}:
            worker.trainer.bank[adapter].grads = None
        return await super().forward_backward(requests)


def changed(requests: Any, change: Any) -> list[Any]:
    return [replace(r, batch=r.batch.with_fields(**change(r))) if not r.forward_only else r for r in requests]


class Means(TrainingGroup):
    """Divides weights by the number of tokens."""

    async def forward_backward(self, requests: Any) -> Any:
        def mean(r: Any) -> dict[str, Any]:
            return {k: v / r.batch.num_tokens for k, v in r.batch.token_fields.items() if k == "loss_weights"}

        return await super().forward_backward(changed(requests, mean))


class MeanGradients(TrainingGroup):
    """Divides weights by the number of tokens in the backward pass, but not in the loss."""

    async def forward_backward(self, requests: Any) -> Any:
        return await replies_of_other_gradients(
            super().forward_backward,
            requests,
            lambda r: {k: v / r.batch.num_tokens for k, v in r.batch.token_fields.items() if k == "loss_weights"},
        )


async def replies_of_other_gradients(compute: Any, requests: Any, change: Any) -> Any:
    """The right losses of requests, whose gradients are those of batches with changed fields."""
    replies = await compute([replace(r, forward_only=True) for r in requests])
    if trained := [r for r in requests if not r.forward_only]:
        await compute(changed(trained, change))
    return replies


class TrainsAlways(TrainingGroup):
    """Adds gradients of forward passes too."""

    async def forward_backward(self, requests: Any) -> Any:
        return await super().forward_backward(
            [replace(r, forward_only=False) if not (r.adapter or "").startswith("score") else r for r in requests]
        )


def with_adam(base: type[TrainingGroup], change: Callable[[OptimConfig], OptimConfig]) -> type[TrainingGroup]:
    """A class of groups whose steps have changed settings."""

    class OtherAdam(base):  # type: ignore[misc, valid-type]
        async def optim_step(self, name: str, optim: OptimConfig) -> Any:
            return await super().optim_step(name, change(optim))

    return OtherAdam


ADAM: dict[str, Callable[[OptimConfig], OptimConfig]] = {
    "a fixed learning rate": lambda optim: replace(optim, lr=1e-2),
    "a fixed beta1": lambda optim: replace(optim, betas=(0.9, optim.betas[1])),
    "a fixed beta2": lambda optim: replace(optim, betas=(optim.betas[0], 0.95)),
    "a fixed eps": lambda optim: replace(optim, eps=1e-8),
    "half the weight decay": lambda optim: replace(optim, weight_decay=optim.weight_decay / 2),
    "twice the norm of clipping": lambda optim: replace(
        optim, clip_grad_norm=None if optim.clip_grad_norm is None else 2 * optim.clip_grad_norm
    ),
}
"""Defects of an optimizer, each of one setting."""


class WrongOrder(TrainingGroup):
    """Gives log-probabilities in another order."""

    async def forward_backward(self, requests: Any) -> Any:
        replies: Any = await super().forward_backward(requests)
        return [replace(reply, log_probs=reply.log_probs.flip(0)) for reply in replies]


def nearer(request: Any) -> dict[str, Any]:
    """The field of the sampler's log-probabilities, bounded so that ratios are truncated."""
    fields = request.batch.token_fields
    return {"old_log_probs": fields["old_log_probs"].clamp_min(-5.0)} if "old_log_probs" in fields else {}


class Truncates(TrainingGroup):
    """Bounds the ratios of importance sampling, unasked."""

    async def forward_backward(self, requests: Any) -> Any:
        bounded = [replace(r, batch=r.batch.with_fields(**nearer(r))) for r in requests]
        return await super().forward_backward(bounded)


class TruncatesGradients(TrainingGroup):
    """Bounds the ratios in the backward pass, but not in the loss."""

    losses: tuple[str, ...] = ("importance_sampling", "ppo", "cispo")

    async def forward_backward(self, requests: Any) -> Any:
        return await replies_of_other_gradients(
            super().forward_backward, requests, lambda r: nearer(r) if r.loss.name in self.losses else {}
        )


class TruncatesGradientsOfDro(TruncatesGradients):
    """Bounds the difference of log-probabilities in the backward pass of dro, but not in its loss."""

    losses = ("dro",)


class ForgetsMoments(TrainingGroup):
    """Loads checkpoints without their optimizers."""

    async def load(self, name: str, folder: str, *, optimizer: bool) -> Any:
        return await super().load(name, folder, optimizer=False)


class OneForAll(TrainingGroup):
    """Steps all adapters when one does."""

    async def optim_step(self, name: str, optim: Any) -> Any:
        step = await super().optim_step(name, optim)
        for other in await self.call("adapter_names"):
            if other != name and not other.startswith("score"):
                await super().optim_step(other, optim)
        return step


class RunsTwice(Training):
    """Runs a repeated request once more, if so many requests of the model are done as `done` says, counted from this request."""

    repeated = "forward_backward"
    done = 0

    async def submit(self, owner: str, model: str, seq: int, kind: str, body: bytes) -> str:
        is_late = self.queue_of(model, owner).next_seq >= seq + self.done
        if kind == self.repeated and is_late and self._known(model, seq, kind, body) is not None:
            if kind == "optim_step":
                await self._group.optim_step(model, self._arguments(model, kind, body))
            else:
                await self._group.forward_backward(self._passes.pieces(model, body))
        return await super().submit(owner, model, seq, kind, body)


class RunsLatePassesTwice(RunsTwice):
    """Forgets a pass when the step after it is done."""

    done = 2


class RunsStepsTwice(RunsTwice):
    """Runs a repeated step once more."""

    repeated = "optim_step"


class RunsLateStepsTwice(RunsStepsTwice):
    """Forgets a step when it is done."""

    done = 1


class AsTheyCome(Training):
    """Runs requests in the order of their arrival."""

    async def _accept(self, queue: ModelQueue, request: QueuedRequest, *args: Any, **options: Any) -> str:
        queue.ready = lambda: next(iter(queue.waiting.values()), None)  # type: ignore[method-assign]
        # The number of the next request never advances; otherwise a request with a lower number that is being written to disk would
        # be taken for one that has run.
        queue.done = lambda request: queue.waiting.__delitem__(request.seq)  # type: ignore[method-assign]
        return await super()._accept(queue, request, *args, **options)


class LiveSnapshots(SamplingService):
    """Has the factors of the latest snapshot in all samplers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        scores = self._scorer.scores

        async def of_newest(owner: str, folder: str, *args: Any) -> Any:
            newest = self._database.read("SELECT folder FROM samplers WHERE folder != '' ORDER BY rowid DESC LIMIT 1")
            return await scores(owner, newest[0]["folder"] if folder else "", *args)

        self._scorer.scores = of_newest  # type: ignore[method-assign, assignment]


class MixesSnapshots(SamplingService):
    """Samples from the newest snapshot with the one before it, and the other way around. Log-probabilities of prompts are right."""

    async def _attempt(self, request: Any, source: Any, stops: Any) -> Any:
        rows = self._database.read("SELECT folder FROM samplers WHERE folder != '' ORDER BY rowid DESC LIMIT 2")
        folders = [row["folder"] for row in rows]
        if len(folders) == 2 and source.folder in folders:
            source = replace(source, folder=folders[1 - folders.index(source.folder)])
            request = replace(request, options=replace(request.options, adapter=self._weights.adapter(source.name)))
        return await super()._attempt(request, source, stops)


class IgnoresStopStrings(SamplingService):
    """Continues behind stop strings, but not behind stop tokens."""

    async def _attempt(self, request: Any, source: Any, stops: Any) -> Any:
        return await super()._attempt(request, source, ())


class OtherLogProbs(LocalReplicas):
    """Says how likely tokens are among the ten most likely."""

    def generate(self, request: Any) -> Any:
        result = super().generate(request)
        return replace(result, log_probs=[p + 0.2 for p in result.log_probs])


class IgnoresStops(LocalReplicas):
    """Goes on behind stops."""

    def generate(self, request: Any) -> Any:
        return super().generate(replace(request, options=replace(request.options, stop_tokens=())))


class IgnoresSeeds(LocalReplicas):
    """Has a seed of its own."""

    def generate(self, request: Any) -> Any:
        return super().generate(replace(request, options=replace(request.options, seed=1), sample=0))


class SharesSnapshots(SamplingService):
    """Samples from the model whatever the sampler is."""

    async def _attempt(self, request: Any, source: Any, stops: Any) -> Any:
        return await super()._attempt(
            replace(request, options=replace(request.options, adapter="")), replace(source, folder=""), stops
        )


BROKEN: dict[str, tuple[dict[str, Any], set[str]]] = {
    "loses chunks": ({"group": LosesChunks}, {"chunks"}),
    "means": ({"group": Means}, {"sums", "chunks"}),
    "means in gradients": ({"group": MeanGradients}, {"sums"}),
    "trains in forward passes": ({"group": TrainsAlways}, {"forward_only"}),
    **{name: ({"group": with_adam(TrainingGroup, change)}, {"adam"}) for name, change in ADAM.items()},
    "another order of numbers": ({"group": WrongOrder}, {"log_prob_order"}),
    "truncates ratios": ({"group": Truncates}, {"ratios"}),
    "truncates ratios in gradients": ({"group": TruncatesGradients}, {"ratios"}),
    "truncates differences in gradients of dro": ({"group": TruncatesGradientsOfDro}, {"ratios"}),
    "forgets moments": ({"group": ForgetsMoments}, {"saved"}),
    "one step for all": ({"group": OneForAll}, {"tenants"}),
    "passes twice": ({"training_class": RunsTwice}, {"repetition"}),
    "late passes twice": ({"training_class": RunsLatePassesTwice}, {"repetition"}),
    "steps twice": ({"training_class": RunsStepsTwice}, {"repetition"}),
    "late steps twice": ({"training_class": RunsLateStepsTwice}, {"repetition"}),
    "as they come": ({"training_class": AsTheyCome}, {"order"}),
    "live snapshots": ({"sampling_class": LiveSnapshots}, {"snapshots"}),
    "mixes snapshots": ({"sampling_class": MixesSnapshots}, {"snapshots"}),
    "other log-probabilities": ({"replicas": OtherLogProbs}, {"sampled"}),
    "ignores stops": ({"replicas": IgnoresStops}, {"stops"}),
    "ignores stop strings": ({"sampling_class": IgnoresStopStrings}, {"stops"}),
    "ignores seeds": ({"replicas": IgnoresSeeds}, {"seeds"}),
    "samples from the model": ({"sampling_class": SharesSnapshots}, {"sampled", "snapshots"}),
}
"""Broken services: their parts, and the checks that must all fail. Other checks may fail too."""


def with_texts(base: type[SamplingService], texts: Texts) -> type[SamplingService]:
    """A class of sampling services that have a tokenizer."""

    class SamplingWithTexts(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._texts = texts

    return SamplingWithTexts


def options_of(folder: Path, texts: Texts, parts: dict[str, Any]) -> dict[str, Any]:
    options = dict(parts)
    options["group"] = options.get("group", TrainingGroup)(group_of(folder, adapters=70))
    options["replicas"] = options.get("replicas", LocalReplicas)(folder)
    options["sampling_class"] = with_texts(options.get("sampling_class", SamplingService), texts)
    return options


def test_our_service_passes_all_checks(folder: Path, texts: Texts, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = options_of(folder, texts, {})
    with served(folder, tmp_path / "state", **options) as send:
        assert run(send, "tiny", KEYS, list(CHECKS), decode=texts.decode) == []
        assert "stop strings" not in capsys.readouterr().out
        assert run(send, "tiny", KEYS, ["stops"]) == []
        assert "stop strings were not checked; pass --tokenizer" in capsys.readouterr().out
    options["replicas"].close()


FAST = ("loses chunks", "live snapshots")


@pytest.mark.parametrize("how", [how if how in FAST else pytest.param(how, marks=pytest.mark.slow) for how in BROKEN])
def test_a_broken_service_fails_its_check(
    folder: Path, texts: Texts, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parts, fails = BROKEN[how]
    options = options_of(folder, texts, parts)
    with served(folder, tmp_path / "state", **options) as send:
        assert set(run(send, "tiny", KEYS, sorted(fails), decode=texts.decode)) == fails
    # By what was compared, and not because something has failed.
    assert not [line for line in capsys.readouterr().out.splitlines() if ERROR.search(line)]
    options["replicas"].close()


class FullMeans(Means, FullTrainingGroup):
    """Divides weights by the number of tokens."""


class FullForgetsMoments(ForgetsMoments, FullTrainingGroup):
    """Loads checkpoints without their optimizers."""


FULL_BROKEN: dict[str, tuple[type[TrainingGroup], set[str]]] = {
    "means": (FullMeans, {"sums", "chunks"}),
    **{name: (with_adam(FullTrainingGroup, change), {"adam"}) for name, change in ADAM.items()},
    "forgets moments": (FullForgetsMoments, {"saved"}),
}


@contextmanager
def served_full(folder: Path, state: Path, group: type[TrainingGroup] = FullTrainingGroup) -> Iterator[Send]:
    """A service that trains all weights of one model at a time."""
    replicas = LocalReplicas(folder, adapters=0)
    snapshots = ModelSnapshots(replicas, str(folder))  # type: ignore[arg-type]
    whole = group(full_group_of(folder).build)
    with served(folder, state, group=whole, replicas=replicas, weights=snapshots, full=True) as send:
        yield send
    replicas.close()


@pytest.mark.slow
def test_our_service_that_trains_all_weights_passes_the_checks_of_one_model(folder: Path, tmp_path: Path) -> None:
    with served_full(folder, tmp_path / "state") as send:
        assert run(send, "tiny", KEYS, [name for name in CHECKS if name not in SEVERAL_MODELS], full=True) == []
        # The check of several models is left out because such a service refuses a second one.
        assert run(send, "tiny", KEYS, sorted(SEVERAL_MODELS), full=True) == sorted(SEVERAL_MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("how", FULL_BROKEN)
def test_a_broken_service_that_trains_all_weights_fails_its_check(
    folder: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    group, fails = FULL_BROKEN[how]
    with served_full(folder, tmp_path / "state", group) as send:
        assert set(run(send, "tiny", KEYS, sorted(fails), full=True)) == fails
    assert not [line for line in capsys.readouterr().out.splitlines() if ERROR.search(line)]


def test_a_check_of_several_models_is_refused_for_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:1", "--model", "tiny", "--full", "--only", "sums", "tenants"])
    assert "tenants needs several models at a time" in capsys.readouterr().err


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:1", "--model", "tiny", "--tokenizer", str(tmp_path)])
    assert f"--tokenizer: {tmp_path} has no tokenizer" in capsys.readouterr().err


def test_every_check_has_a_broken_service() -> None:
    assert {check for _, fails in BROKEN.values() for check in fails} == set(CHECKS)
