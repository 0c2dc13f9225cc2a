"""Starts groups of processes for tests: one way, with a timeout, and every failing rank's traceback shown.

Ranks fork from one server process that has imported torch and transformers already, so that a group costs a fraction of a
second instead of several.
"""

import gc
import importlib.util
import multiprocessing as mp
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from helpers.gpus import shown_gpus

PRELOAD = ["drivetrain.tests.helpers.preloaded.imports"]
TIMEOUT_S = 120.0

_context: Any = None


def _server() -> Any:
    global _context
    if _context is None:
        os.environ["OMP_NUM_THREADS"] = "1"
        _context = mp.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
    return _context


def run_ranks(fn: Callable[..., Any], nproc: int, *args: Any, timeout_s: float = TIMEOUT_S, cuda: bool = False) -> list[Any]:
    """Run a module-level function of a test file in `nproc` gloo ranks; the results in rank order.

    Args:
        fn: called as fn(*args) in every rank, with the default process group up.
        nproc: number of ranks.
        args: picklable.
        timeout_s: after which all ranks are killed and the test fails.
        cuda: one rank that sees the GPUs and starts its own default group; all others run on the CPU.

    Raises:
        AssertionError: a rank failed or hung; the message holds each failed rank's traceback.
    """
    # Forked, a process could not start CUDA if something had looked for GPUs in the server, where they are hidden.
    context = mp.get_context("spawn") if cuda else _server()
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        where = (str(Path(sys.modules[fn.__module__].__file__ or "").resolve()), fn.__name__)
        workers = [
            context.Process(target=_rank, args=(where, rank, nproc, f"{folder}/store", cuda, args, results), daemon=True)
            for rank in range(nproc)
        ]
        with shown_gpus() if cuda else nullcontext():
            for worker in workers:
                worker.start()
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        try:
            while len(found) + len(failed) < nproc:
                # When one rank failed, the others may wait for it in a collective: they get a moment, not the full time.
                left = min(deadline - time.monotonic(), 5.0) if failed else deadline - time.monotonic()
                try:
                    rank, value, error = results.get(timeout=max(left, 0.01))
                except queue.Empty:
                    break
                if error is None:
                    found[rank] = pickle.loads(value)
                else:
                    failed[rank] = error
        finally:
            for worker in workers:
                worker.join(timeout=0.0 if len(found) < nproc else 5.0)
                if worker.is_alive():
                    worker.kill()
        silent = [r for r in range(nproc) if r not in found and r not in failed]
        if failed or silent:
            shown = "\n".join(f"--- rank {r} ---\n{text}" for r, text in sorted(failed.items()))
            hung = f"ranks without an answer (killed, or hung for {timeout_s} s): {silent}\n" if silent else ""
            raise AssertionError(f"{fn.__name__} on {nproc} ranks failed\n{hung}{shown}")
        return [found[r] for r in range(nproc)]


def _rank(where: tuple[str, str], rank: int, nproc: int, store: str, cuda: bool, args: tuple[Any, ...], results: Any) -> None:
    try:
        # A collection would walk through everything that the server has imported, half a second each time.
        gc.freeze()
        os.environ["OMP_NUM_THREADS"] = "1"
        if not cuda:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(nproc), LOCAL_RANK=str(rank), CUDA_VISIBLE_DEVICES="")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        if not cuda:
            dist.init_process_group("gloo", store=dist.FileStore(store, nproc), rank=rank, world_size=nproc)
        spec = importlib.util.spec_from_file_location(f"ranks_{Path(where[0]).stem}", where[0])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        value = getattr(module, where[1])(*args)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        # By value: tensors would travel as handles to memory of a process that is about to end.
        results.put((rank, pickle.dumps(value), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        # Flush before leaving: a killed queue thread would lose the traceback.
        results.close()
        results.join_thread()
        os._exit(1)
