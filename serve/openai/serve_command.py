"""`drivetrain serve`: an HTTP service for a model, a run or a checkpoint.

drivetrain serve MODEL|RUN|CHECKPOINT [--host 127.0.0.1] [--port 8000] [--engine transformers|tensor_parallel|vllm] [--tp N] [--replicas N]
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from ...checkpoint_tools.model_source import is_embedding_model, model_folder
from ...engine.config import ModelConfig
from ...engine.errors import ConfigError, DrivetrainError, WorkerError
from ...generation.embeddings.config import EmbeddingConfig
from ...generation.options import RolloutConfig
from ...generation.registry import ENGINES, generator_class
from ...workers.roles.embedder import EmbeddingWorker
from ...workers.roles.generator import RolloutWorker
from ...workers.supervision.hosts import Host, RayHost
from ...workers.supervision.supervisor import SupervisorSettings
from .app import create_app
from .listening import HTTPServer, listen
from .model import ServedModel
from .replicas import Replicas, gpus_of_replicas
from .settings import KEY_VARIABLE, ServeSettings

WEIGHTS_KEY_VARIABLE = "DRIVETRAIN_WEIGHTS_KEY"
SHUTDOWN_S = 5
"""The number of seconds that pending responses may continue after a signal to stop."""
_UNFIT = "generator=continuous cannot run"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until the process receives a signal to stop; return the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = _settings(args)
        with model_folder(args.source, lambda text: print(text, flush=True)) as folder:
            embeds = args.task == "embed" or (args.task == "auto" and is_embedding_model(folder))
            return asyncio.run(
                serve(args, settings, folder, lambda model, replicas: create_app(settings, model, replicas), embeds=embeds)
            )
    except KeyboardInterrupt:
        return 130
    except (DrivetrainError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="drivetrain serve", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add_common_arguments(parser)
    add(
        "--task",
        choices=("auto", "generate", "embed"),
        default="auto",
        help="the task of the model; auto: determined from its folder",
    )
    add("--api-key", action="append", default=[], metavar="KEY", help=f"a key that requests must carry; or {KEY_VARIABLE}")
    add("--max-images", type=int, default=8, metavar="N", help="the maximum number of images in a request; 0: none")
    add("--weights-dir", type=Path, default=None, metavar="DIR", help="allow POST /weights to load subfolders of this folder")
    add("--weights-key", default=None, metavar="KEY", help=f"the key for POST /weights; or {WEIGHTS_KEY_VARIABLE}")
    return parser


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a service with a model: its address, and its generation engine."""
    add = parser.add_argument
    add("source", metavar="MODEL|RUN|CHECKPOINT", help="a model folder, a Hub name, the folder of a run, or a checkpoint")
    add("--name", default=None, help="the name of the model in requests; default: the folder's name")
    add("--host", default="127.0.0.1", help="the address to listen on; any but the loopback address needs --api-key")
    add("--port", type=int, default=8000, help="the port to listen on; 0: a free one")
    add("--engine", choices=list(ENGINES), default="transformers", help="the generation engine")
    add(
        "--tp",
        type=int,
        default=None,
        metavar="N",
        help="the number of devices of a model; needs --engine tensor_parallel or vllm",
    )
    add("--replicas", type=int, default=1, metavar="N", help="the number of workers, each with the whole model")
    add(
        "--group",
        choices=("process", "ray"),
        default="process",
        help="where workers run: on this machine, or spread over the Ray cluster at RAY_ADDRESS, with one GPU per device of a model",
    )
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="auto: bfloat16 on a GPU, otherwise float32")
    add("--quant", choices=("int8",), default=None, help="8-bit weights; needs --engine tensor_parallel")
    add(
        "--invariant",
        action="store_true",
        help="make each completion bitwise independent of other requests; needs --engine transformers and a CPU",
    )
    add(
        "--max-batch-size",
        type=int,
        default=RolloutConfig.max_batch_size,
        metavar="N",
        help="completions to generate at the same time",
    )
    add(
        "--max-batch-total-tokens",
        type=int,
        default=0,
        metavar="N",
        help="total tokens of these completions and their prompts, which is the size of the KV cache; 0, the default: as many as "
        "fit on the GPU, or 32,768 without one",
    )
    add(
        "--queue-size",
        type=int,
        default=1024,
        metavar="N",
        help="maximum number of pending requests; further ones are rejected with 429",
    )
    add(
        "--max-wait-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="how long a request to an idle model waits for others to join its batch",
    )
    add("--allowed-host", action="append", default=[], metavar="NAME", help="an additional host name that requests may use")
    add("--max-body-mib", type=float, default=32.0, metavar="N", help="the maximum size of a request")
    add(
        "--restarts",
        type=int,
        default=SupervisorSettings.restarts,
        metavar="N",
        help="how many times in a row a worker that died is restarted",
    )
    add("--trust-remote-code", action="store_true", help="run code from the model folder")


def _settings(args: argparse.Namespace) -> ServeSettings:
    keys = [*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    # A variable keeps the key out of the list of processes, which other users can read.
    weights_key = args.weights_key or os.environ.get(WEIGHTS_KEY_VARIABLE, "")
    if args.weights_dir is not None and not weights_key:
        raise ConfigError(f"--weights-dir needs --weights-key KEY, or the environment variable {WEIGHTS_KEY_VARIABLE}")
    check_common_arguments(args)
    if args.weights_key is not None and args.weights_dir is None:
        raise ConfigError("--weights-key without --weights-dir DIR, the folder that weights may be loaded from")
    return ServeSettings(
        name=args.name or Path(args.source).resolve().name,
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        allowed_hosts=tuple(args.allowed_host),
        max_body_mib=args.max_body_mib,
        max_images=args.max_images,
        # All completions of a request must fit into the queue.
        max_samples=min(ServeSettings.max_samples, args.queue_size),
        weights_dir=args.weights_dir,
        weights_key=weights_key,
    )


def check_common_arguments(args: argparse.Namespace) -> None:
    """Check the arguments of `add_common_arguments` against each other.

    Raises:
        ConfigError: Two of them are incompatible, or a number is out of range.
    """
    if args.tp is not None and args.engine == "transformers":
        raise ConfigError(f"--tp {args.tp} with --engine transformers, which uses one device; use --engine tensor_parallel")
    if args.quant is not None and args.engine != "tensor_parallel":
        raise ConfigError(f"--quant {args.quant} with --engine {args.engine}; use --engine tensor_parallel")
    if args.max_batch_total_tokens < 2 and args.max_batch_total_tokens != 0:
        raise ConfigError(
            f"--max-batch-total-tokens {args.max_batch_total_tokens}; a prompt and its completion need at least 2, and 0 means as many "
            "as fit"
        )
    if args.replicas < 1:
        raise ConfigError(f"--replicas {args.replicas}; it must be at least 1")
    # Fails now if the engine is not installed, and not in a worker.
    generator_class(ENGINES[args.engine])


class _Stop:
    """Stops the service gracefully on the first signal, and immediately on the second.

    Args:
        task: The task to cancel if the service has not started yet.
    """

    def __init__(self, task: "asyncio.Task[Any] | None") -> None:
        self.server: uvicorn.Server | None = None
        self.code = 0
        self._task = task

    def __call__(self, number: int) -> None:
        """Handle a signal."""
        # Before the service has started, its workers may be loading a model: the task is cancelled and closes them.
        if self.server is None:
            # The exit code that shells use for a process that was ended by a signal.
            self.code = 128 + number
            if self._task is not None:
                self._task.cancel()
            return
        if self.server.should_exit:
            self.server.force_exit = True
        self.server.should_exit, self.code = True, 128 + number


MakeApp = Callable[[ServedModel, Replicas], FastAPI]


async def serve(
    args: argparse.Namespace,
    settings: ServeSettings,
    folder: Path,
    make_app: MakeApp,
    *,
    embeds: bool = False,
    path: str = "/v1",
) -> int:
    """Start the workers of a service and serve until a signal arrives; return the exit code.

    Args:
        args: The arguments of `add_common_arguments`.
        settings: The settings.
        folder: The folder of the model.
        make_app: Returns the application; called after the workers have started.
        embeds: Whether the model embeds texts.
        path: The path to print for users.

    Raises:
        DrivetrainError: The address is in use, or the model cannot be loaded.
    """
    stop = _Stop(asyncio.current_task())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Before the workers start, so that a signal during their long start also closes them.
        loop.add_signal_handler(number, stop, number)
    try:
        return await _serve_until(stop, args, settings, folder, make_app, embeds=embeds, path=path)
    except asyncio.CancelledError:
        return stop.code


async def _serve_until(
    stop: _Stop, args: argparse.Namespace, settings: ServeSettings, folder: Path, make_app: MakeApp, *, embeds: bool, path: str
) -> int:
    model = ServedModel(
        folder,
        generates=not embeds,
        room=args.max_batch_total_tokens or None,
        aliases=[args.source, str(folder)],
        trust_remote_code=args.trust_remote_code,
    )
    # Bind the address before the slow start of the workers, so that an error appears at once.
    listener = listen(settings.host, settings.port)
    print(f"loading {args.source}", flush=True)
    replicas = await _start(args, folder, embeds=embeds)
    try:
        if not embeds:
            # Replicas may run on different GPUs, and any of them may get a request, so the smallest cache is the limit.
            model.limit(min([await worker.acall("largest_request") for worker in replicas.workers]))
        app = make_app(model, replicas)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S
        )
        server = HTTPServer(config)
        stop.server = server
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        # uvicorn offers nothing to await for its start.
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if server.started:
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            print(f"{settings.name} is served at http://{host}:{listener.getsockname()[1]}{path}", flush=True)
        while not serving.done():
            # When all workers have ended for good, the service could only return errors, so it stops.
            await asyncio.wait({serving}, timeout=0.5)
            if replicas.is_over() and not server.should_exit:
                print("error: all workers have died; stopping the service", file=sys.stderr)
                server.should_exit = True
                stop.code = 1
        await serving
    finally:
        await asyncio.shield(replicas.close())
    return stop.code


async def _start(args: argparse.Namespace, folder: Path, *, embeds: bool) -> Replicas:
    settings = SupervisorSettings(
        name="replica",
        restarts=args.restarts,
        queue_size=args.queue_size,
        max_wait_ms=args.max_wait_ms,
        environment={"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    host: Host | None = None
    gpus: list[str] = []
    if args.group == "ray":
        host = RayHost(devices=args.tp or 1, count=args.replicas)
    else:
        cache_is_given = embeds or args.max_batch_total_tokens > 0
        gpus = gpus_of_replicas(args.replicas, args.tp or 1, cache_is_given=cache_is_given)
    if embeds:
        replicas = Replicas(EmbeddingWorker, _embedding_config(args, folder), args.replicas, settings, host, gpus)
        await _started(replicas)
        return replicas
    generator = ENGINES[args.engine]
    replicas = Replicas(RolloutWorker, _rollout_config(args, folder, generator), args.replicas, settings, host, gpus)
    try:
        await _started(replicas)
    except WorkerError as e:
        # Recognized by its message: other errors of a worker that cannot load a model have the same class.
        if _UNFIT not in str(e):
            raise
        logging.getLogger(__name__).warning("%s", str(e).splitlines()[0])
        print(
            "the attention of this model does not support continuous batching; requests are served in batches, one after another",
            flush=True,
        )
        replicas = Replicas(RolloutWorker, _rollout_config(args, folder, "static"), args.replicas, settings, host, gpus)
        await _started(replicas)
    return replicas


async def _started(replicas: Replicas) -> None:
    try:
        await replicas.start()
    except asyncio.CancelledError:
        await asyncio.shield(replicas.close())
        raise


def _dtype(args: argparse.Namespace) -> str:
    if args.dtype != "auto":
        return str(args.dtype)
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"


def _rollout_config(args: argparse.Namespace, folder: Path, generator: str) -> RolloutConfig:
    options: dict[str, Any] = {}
    if generator != "continuous" and generator != "static":
        options = {name: value for name, value in (("tp", args.tp), ("quant", args.quant)) if value is not None}
    return RolloutConfig(
        model=ModelConfig(path=str(folder), trust_remote_code=args.trust_remote_code),
        generator=generator,
        dtype=_dtype(args),
        max_batch_size=args.max_batch_size,
        max_batch_total_tokens=args.max_batch_total_tokens,
        invariant=args.invariant,
        options=options,
    )


def _embedding_config(args: argparse.Namespace, folder: Path) -> EmbeddingConfig:
    return EmbeddingConfig(
        model=ModelConfig(path=str(folder), trust_remote_code=args.trust_remote_code),
        dtype=_dtype(args),
        max_batch_size=args.max_batch_size,
    )


if __name__ == "__main__":
    sys.exit(main())
