"""Runs entries in worker processes, each within a time limit. A crash or a hang is a failure of what was being looked at."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
START_LIMIT = 300  # seconds for the imports, on a machine that does other things


class Worker:
    def __init__(self) -> None:
        paths = [str(HERE), str(HERE.parent / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TORCH_OFFLOAD_LINK": link()}
        # Without caches of its own for small pieces the C library can fill all that it gives out.
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        environment["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (the process writes to it as long as it lives)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        first = self.lines.get(timeout=START_LIMIT)
        if not first:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
            raise RuntimeError(
                f"a process for PyTorch's op database ended while it started ({self.stop()}): {said[-2000:]}"
            )
        self.names = json.loads(first)["names"]

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def stop(self) -> int:
        self.process.kill()
        return self.process.wait()


def link() -> str:
    import torch

    return os.environ.get("TORCH_OFFLOAD_LINK", "auto" if torch.cuda.is_available() else "sim")


class Pool:
    """Args:
    samples: how many samples of an entry, or None for all.
    limit: seconds for an entry.
    """

    def __init__(self, workers: int, samples: int | None, limit: float) -> None:
        self.samples = samples
        self.limit = limit
        self.idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self.idle.put(None)
        self.threads = ThreadPoolExecutor(workers)
        self.known_names: list[str] = []

    def names(self) -> list[str]:
        """All entries of this torch."""
        if not self.known_names:
            worker = self.take()
            self.known_names = worker.names
            self.idle.put(worker)
        return self.known_names

    def take(self) -> Worker:
        worker = self.idle.get()
        try:
            return worker or Worker()
        except BaseException:
            self.idle.put(None)
            raise

    def submit(self, name: str) -> "Future[dict]":
        return self.threads.submit(self.look, name)

    def look(self, name: str) -> dict:
        worker = self.take()
        skip: dict[str, str] = {}
        try:
            while True:
                asked = {"name": name, "samples": self.samples, "skip": [pair.split() for pair in skip]}
                worker.process.stdin.write(json.dumps(asked) + "\n")
                worker.process.stdin.flush()
                done, at, how = self.answer(worker)
                if done is not None:
                    done["failures"] |= skip
                    return done
                worker = None
                worker = Worker()
                if at is None or len(skip) == 4:
                    return {"samples": {}, "failures": skip, "plain_errors": [], "error": how, "seconds": self.limit}
                skip[at] = how
        finally:
            self.idle.put(worker)

    def answer(self, worker: Worker) -> tuple[dict | None, str | None, str]:
        at = None
        timer = threading.Timer(self.limit, worker.process.kill)
        timer.start()
        try:
            while line := worker.lines.get():
                message = json.loads(line)
                if "done" in message:
                    return message["done"], at, ""
                at = " ".join(message["at"])
        finally:
            late = timer.finished.is_set()
            timer.cancel()
        return None, at, f"no answer within {self.limit:.0f} s" if late else f"ended by signal {-worker.stop()}"

    def close(self) -> None:
        self.threads.shutdown(cancel_futures=True)
        while not self.idle.empty():
            if worker := self.idle.get():
                worker.stop()
