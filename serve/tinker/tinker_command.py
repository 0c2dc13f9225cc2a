"""`drivetrain tinker`: a training service for clients of Tinker's protocol. Many clients train their own LoRA adapters on one model.

With --full it trains all weights of the model instead, for one client at a time.

drivetrain tinker [NAME=]MODEL ... [--host 127.0.0.1] [--port 8000] [--api-key-file FILE] [--state DIR] [--nproc N] [engine.KEY=VALUE ...]
"""

import argparse
import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

from ...engine.config import EngineConfig, ModelConfig, OptimConfig
from ...engine.errors import ConfigError, DrivetrainError, ModelError
from ...engine.hf.config import read_config
from ...engine.hf.media import media_config
from ...engine.hf.model_path import fingerprint
from ...engine.hf.shape import context_of, router_aux_coef
from ...generation.options import RolloutConfig
from ...generation.vllm.adapters import DEFAULT_RANK as VLLM_RANK
from ...trainers.config.parse import parse
from ...workers.groups.process import ProcessWorkerGroup
from ...workers.groups.ray import RayWorkerGroup
from ...workers.process.role_host import RoleSpec
from ...workers.roles.adapters import AdapterWorker
from ...workers.roles.base import Worker, WorkerConfig
from ...workers.roles.full_training import FullTrainingWorker
from ...workers.roles.generator import RolloutWorker
from ...workers.supervision.supervisor import SupervisorSettings
from ..openai.listening import HTTPServer, listen
from ..openai.replicas import Replicas
from ..openai.text import Texts
from .app import TrainingApp
from .chunks import ModelImages
from .database import Database
from .futures import Futures
from .passes import Passes
from .sampler_weights import AdapterSnapshots, ModelSnapshots
from .sampling import MAX_SAMPLES_AT_ONCE, SamplingService
from .settings import TrainingServiceSettings, read_keys
from .training import Training
from .training_group import POOL, ROLE, FullTrainingGroup, TrainingGroup

# Seconds to wait for open requests at shutdown. Clients keep requests for results open for `poll_s` seconds, which is not
# waited for.
SHUTDOWN_S = 2
DATABASE = "service.sqlite"


@dataclass(frozen=True, kw_only=True)
class ServiceEngine:
    """The settings of the form `engine.KEY=VALUE` on the command line."""

    engine: EngineConfig = field(default_factory=EngineConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code."""
    # Intermixed, because models and settings may come before or after options.
    args = _parser().parse_intermixed_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        sources = [word for word in args.words if not word.startswith("engine.")]
        engine = parse(ServiceEngine, [word for word in args.words if word.startswith("engine.")]).engine
        return asyncio.run(_serve(args, _settings(args, sources), engine))
    except KeyboardInterrupt:
        return 130
    except (DrivetrainError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drivetrain tinker", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    add, defaults = parser.add_argument, TrainingServiceSettings
    add(
        "words",
        nargs="+",
        metavar="MODEL|engine.KEY=VALUE",
        help="the folder of the model, or NAME=FOLDER with the name that clients use; and settings of the training engine",
    )
    add(
        "--host",
        default=defaults.host,
        help="the address to listen on; any address except a loopback address requires --api-key-file",
    )
    add("--port", type=int, default=defaults.port, help="the port to listen on; 0 chooses a free one")
    add("--api-key-file", type=Path, default=None, metavar="FILE", help="a file with the accepted API keys, one per line")
    add(
        "--state",
        type=Path,
        default=Path("tinker-state"),
        metavar="DIR",
        help="the folder of all data that survives a restart",
    )
    add(
        "--full",
        action="store_true",
        help="train all weights of the model (rank 0 in the protocol) instead of adapters, for one client at a time",
    )
    add("--nproc", type=int, default=1, metavar="N", help="the number of training processes")
    add(
        "--group",
        choices=("process", "ray"),
        default="process",
        help="where training processes run: on this machine, or on a Ray cluster",
    )
    add("--samplers", type=int, default=1, metavar="N", help="the number of sampling processes, each with a copy of the model")
    add(
        "--generator",
        choices=("continuous", "static", "vllm"),
        default="continuous",
        help="the generator, which determines how completions are batched",
    )
    add(
        "--max-lora-rank",
        type=int,
        default=None,
        metavar="N",
        help=f"the maximum rank of an adapter; {defaults.max_lora_rank} by default. With --generator vllm: 8, 16, 32, 64, 128, 256, 320 or "
        f"512, and {VLLM_RANK} by default, because vLLM allocates memory for this rank",
    )
    add(
        "--max-batch-total-tokens",
        type=int,
        default=32768,
        metavar="N",
        help="the maximum number of tokens in all running prompts and completions of a sampling process",
    )
    add(
        "--max-adapters",
        type=int,
        default=defaults.max_adapters,
        metavar="N",
        help="the maximum number of adapters in training",
    )
    add(
        "--max-adapters-per-key",
        type=int,
        default=defaults.max_adapters_per_key,
        metavar="N",
        help="the maximum number of adapters in training per API key",
    )
    add(
        "--max-body-mib",
        type=float,
        default=defaults.max_body_mib,
        metavar="N",
        help="the maximum size of a request in MiB, also after decompression",
    )
    add(
        "--max-queued-mib",
        type=float,
        default=defaults.max_queued_mib,
        metavar="N",
        help="the maximum size in MiB of a key's requests whose effects are not yet in a saved state",
    )
    add(
        "--max-disk-mib",
        type=float,
        default=defaults.max_disk_mib,
        metavar="N",
        help="the maximum size of a key's checkpoints in MiB",
    )
    add(
        "--session-s",
        type=float,
        default=defaults.session_s,
        metavar="S",
        help="idle seconds (without a heartbeat) after which a session expires",
    )
    add(
        "--steps-per-save",
        type=int,
        default=defaults.steps_per_save,
        metavar="N",
        help="the number of optimizer steps between saved states, from which a restarted service continues",
    )
    add(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another host name that requests may use; may be repeated",
    )
    return parser


def _settings(args: argparse.Namespace, sources: Sequence[str]) -> TrainingServiceSettings:
    models: dict[str, Path] = {}
    for source in sources:
        name, _, folder = source.rpartition("=")
        models[name or folder] = Path(folder).resolve()
    if len(set(models.values())) > 1:
        raise ConfigError(
            f"{' '.join(sources)} are different models, but a service has one; pass one folder, which may have several names: NAME=FOLDER "
            "OTHER=FOLDER"
        )
    for number in ("nproc", "samplers"):
        if getattr(args, number) < 1:
            raise ConfigError(f"--{number} {getattr(args, number)} is out of range; it must be at least 1")
    rank = VLLM_RANK if args.generator == "vllm" else TrainingServiceSettings.max_lora_rank
    return TrainingServiceSettings(
        models=models,
        state=args.state,
        host=args.host,
        port=args.port,
        keys=() if args.api_key_file is None else read_keys(args.api_key_file),
        allowed_hosts=tuple(args.allowed_host),
        full=args.full,
        max_adapters=args.max_adapters,
        max_adapters_per_key=args.max_adapters_per_key,
        max_lora_rank=rank if args.max_lora_rank is None else args.max_lora_rank,
        max_body_mib=args.max_body_mib,
        max_queued_mib=args.max_queued_mib,
        max_disk_mib=args.max_disk_mib,
        session_s=args.session_s,
        steps_per_save=args.steps_per_save,
    )


async def _serve(args: argparse.Namespace, settings: TrainingServiceSettings, engine: EngineConfig) -> int:
    folder = next(iter(settings.models.values()))
    model = ModelConfig(path=str(folder))
    config = read_config(model)
    # Opened first, so that a port in use is reported before the model is loaded.
    listener = listen(settings.host, settings.port)
    try:
        settings.state.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"--state {settings.state} cannot be created ({e.strerror}); choose another folder") from e
    database = Database(settings.state / DATABASE)
    # After a restart, requests are computed again, so the weights of the model must be the same.
    database.claim("model", fingerprint(str(folder)), "model")
    futures = Futures(database)
    _claim_kind(database, settings)
    group = _training_group(args, settings, engine, database)
    rollout = RolloutConfig(
        model=model,
        generator=args.generator,
        max_batch_total_tokens=args.max_batch_total_tokens,
        max_adapters=0 if settings.full else settings.max_adapters,
        options={"max_lora_rank": settings.max_lora_rank} if args.generator == "vllm" and not settings.full else {},
    )
    replicas = Replicas(RolloutWorker, rollout, args.samplers, SupervisorSettings(name="sampler", environment=_QUIET))
    # A datum is one document, which must fit into a pass and into the context of the model.
    longest = min(engine.micro_batch.max_tokens, context_of(config) or sys.maxsize)
    images = ModelImages(model, media_config(model, config))
    passes = Passes(database, config.vocab_size, longest, images)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app: list[TrainingApp] = []
    # The application and the training scheduler refer to each other; the list is filled before the first request arrives.
    training = Training(settings, database, futures, group, passes, lambda *of: app[0].arguments(*of))
    try:
        print(f"loading {folder}", flush=True)
        await asyncio.gather(group.start(), replicas.start(), asyncio.to_thread(images.load))
        # A request may be sent to any worker, so the smallest limit applies.
        room = min([await worker.acall("largest_request") for worker in replicas.workers])
        room = min(room, context_of(config) or room)
        sampling = SamplingService(
            database,
            futures,
            replicas,
            training.scoring,
            _texts(folder),
            room,
            config.vocab_size,
            ModelSnapshots(replicas, str(folder)) if settings.full else AdapterSnapshots(replicas, settings.max_adapters),
            images,
            MAX_SAMPLES_AT_ONCE * args.samplers,
            engine.micro_batch.max_tokens,
            settings.max_queued_mib * 2**20,
        )
        app.append(TrainingApp(settings, database, futures, training, sampling, lambda: secrets.randbelow(2**62)))
        training.published = sampling.refresh
        await training.start()
        await sampling.start()
        cleanup = asyncio.create_task(app[0].clean_periodically())
        try:
            await _listen_until(stop, app[0].build(), listener, settings)
        finally:
            cleanup.cancel()
            # Sampling is closed first, because it waits for log-probabilities that the training processes compute.
            await sampling.close()
            await training.close()
    finally:
        # Shielded, so that an interrupt cannot leave processes running.
        await asyncio.shield(asyncio.gather(group.close(), replicas.close()))
        database.close()
    return 0


_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def _claim_kind(database: Database, settings: TrainingServiceSettings) -> None:
    """Record in the database whether the service trains adapters or all weights, which must be the same after a restart.

    Raises:
        ConfigError: The state folder belongs to a service of the other kind.
    """
    what = "kind of training (adapters, or all weights with --full)"
    if database.one("SELECT 1 FROM about WHERE name = 'trains'") is None and database.one("SELECT 1 FROM models") is not None:
        # The database was written by a version that could train adapters only.
        database.claim("trains", "adapters", what)
    database.claim("trains", "all weights" if settings.full else "adapters", what)


def _training_group(
    args: argparse.Namespace, settings: TrainingServiceSettings, engine: EngineConfig, database: Database
) -> TrainingGroup:
    folder = str(next(iter(settings.models.values())))
    if settings.full:
        model = ModelConfig(path=folder)
        # Losses are sums over tokens without the auxiliary loss of a mixture's routers, so `FullWeightTrainer` refuses models with it.
        if router_aux_coef(read_config(model), model):
            model = replace(model, router_aux_loss_coef=0.0)
        # The learning rate is a placeholder: each step has its own optimizer settings.
        config = WorkerConfig(model=model, engine=engine, optim=OptimConfig(lr=1e-5))
        return FullTrainingGroup(_group(FullTrainingWorker, config, args.group, args.nproc))
    open_models = database.read("SELECT COUNT(*) AS n FROM models WHERE state = 'open'")[0]["n"]
    # After a restart with a smaller --max-adapters, all open models must still be restored.
    adapters = max(settings.max_adapters, open_models) + TrainingGroup.snapshots
    config = WorkerConfig(model=ModelConfig(path=folder, max_adapters=adapters), engine=engine)
    return TrainingGroup(_group(AdapterWorker, config, args.group, args.nproc))


def _group(worker: type[Worker], config: WorkerConfig, kind: str, processes: int) -> Callable[[], Any]:
    roles = {ROLE: RoleSpec(worker=worker, config=config)}
    group = {"process": ProcessWorkerGroup, "ray": RayWorkerGroup}[kind]
    return lambda: group(roles, pools={POOL: processes}, environment=_QUIET)


def _texts(folder: Path) -> Texts | None:
    try:
        return Texts(folder)
    except ModelError:
        return None


async def _listen_until(stop: asyncio.Event, app: Any, listener: Any, settings: TrainingServiceSettings) -> None:
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S)
    server = HTTPServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    # uvicorn has no event for the end of its startup. The address is printed when the server accepts requests.
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"training service for {settings.default_model}: http://{host}:{listener.getsockname()[1]}", flush=True)
    waiting = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    waiting.cancel()
    await serving


if __name__ == "__main__":
    sys.exit(main())
