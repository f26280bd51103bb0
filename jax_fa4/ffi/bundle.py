"""precompile(): fills a store with many plans' artifacts, in parallel over cores, and writes its manifest.

Each worker is a process of its own: the compiler must not run twice at once in one, and what kills it (it aborts on
some errors) costs one plan, not all. Workers are plain child processes that read plans from a pipe, so that, unlike
with `multiprocessing`, the caller's script is not imported again and needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jax_fa4.ffi.artifact import Artifact, CorruptArtifact
from jax_fa4.ffi.store import MANIFEST, PACKAGE, SUFFIX, Store, write_atomically

BUILDER = "jax_fa4.ffi.compile:build"
MANIFEST_FORMAT = 1


class BundleError(RuntimeError):
    """Some plans could not be built; the others are in the store. `failures`: (plan, what the worker said)."""

    def __init__(self, failures: list[tuple[Any, str]], wanted: int):
        self.failures = failures
        texts = "\n".join(f"{plan!r}: {text}" for plan, text in failures)
        super().__init__(f"{len(failures)} of {wanted} plans could not be built:\n{texts}")


class Entry(NamedTuple):
    """One plan's line in the manifest."""

    key: str
    plan: str
    arch: str
    bytes: int
    seconds: float  # 0 where the store had it


def precompile(
    plans: Sequence[Any], store: Store, *, jobs: int | None = None, progress: bool = True, builder: str = BUILDER
) -> list[Entry]:
    """Builds what the store lacks of `plans`, and writes `manifest.json` beside the entries. In the plans' order.

    A machine without the DSL that finds the folder (JAX_FA4_STORE), with the same version of jax_fa4 and the same
    host target, then compiles nothing. `jobs`: processes, by default one for each core. `builder`: "module:function".
    Raises BundleError if some could not be built (the rest is kept), ValueError if the store has no folder.
    """
    if store.home is None:
        raise ValueError("a bundle needs a store with a folder that can be written to; see the warning about it")
    unique = {store.key(plan): plan for plan in plans}
    missing = [plan for plan in unique.values() if store.find(plan) is None]
    jobs = max(1, min(jobs or len(os.sched_getaffinity(0)), len(missing)))
    seconds, failures = _build_all(missing, store, jobs, progress, builder) if missing else ({}, [])
    entries = []
    for key, plan in unique.items():
        artifact = store.find(plan)
        if artifact is not None:
            entries.append(Entry(key, artifact.plan, artifact.arch, len(artifact.object), seconds.get(key, 0.0)))
        elif not any(failed is plan for failed, _ in failures):
            failures.append((plan, f"built, but not to be found in {store.home}"))
    write_manifest(store, entries)
    if failures:
        raise BundleError(failures, len(unique))
    return entries


def write_manifest(store: Store, new: Sequence[Entry] = ()) -> Path:
    """Writes what the store's folder holds for its versions: `new`, and older entries that are whole."""
    assert store.home is not None
    path = store.home / MANIFEST
    known = {e.key: e._asdict() for e in new}
    for file in store.home.glob("*" + SUFFIX):
        try:
            artifact = Artifact.from_bytes(file.read_bytes())
        except (OSError, CorruptArtifact):
            continue
        ours = artifact.versions == store.versions and artifact.host_target == store.host_target
        if ours and artifact.key == file.name.removesuffix(SUFFIX) and artifact.key not in known:
            entry = Entry(artifact.key, artifact.plan, artifact.arch, len(artifact.object), 0.0)
            known[artifact.key] = entry._asdict()
    manifest = {
        "format": MANIFEST_FORMAT,
        "versions": store.versions,
        "host_target": store.host_target,
        "bytes": sum(e["bytes"] for e in known.values()),
        "entries": sorted(known.values(), key=lambda e: (e["arch"], e["plan"])),
    }
    write_atomically(path, json.dumps(manifest, indent=1).encode())
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """A bundle's manifest; ValueError if the file is not one of this format."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("format") != MANIFEST_FORMAT:
        raise ValueError(f"{folder / MANIFEST} is no manifest of format {MANIFEST_FORMAT}")
    return manifest


def _build_all(
    plans: list[Any], store: Store, jobs: int, progress: bool, builder: str
) -> tuple[dict[str, float], list[tuple[Any, str]]]:
    """Seconds by key of what was built, and the failures."""
    from tqdm import tqdm  # of the extra that brings the compiler

    todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for plan in plans:
        todo.put(plan)
    seconds: dict[str, float] = {}
    failures: list[tuple[Any, str]] = []
    with tqdm(total=len(plans), desc="kernels", unit="kernel", disable=not progress) as bar:

        def tend() -> None:
            worker = None
            try:
                while True:
                    try:
                        plan = todo.get_nowait()
                    except queue.Empty:
                        return
                    worker = _Worker(store, builder) if worker is None else worker
                    text, taken = worker.build(plan)
                    if text is None:
                        seconds[store.key(plan)] = taken
                    else:
                        failures.append((plan, text))
                        worker.close()
                        worker = None
                    bar.update()
            finally:
                if worker is not None:
                    worker.close()

        threads = [threading.Thread(target=tend) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return seconds, failures


class _Worker:
    """A child process that builds one plan after the other into the store."""

    def __init__(self, store: Store, builder: str):
        code = "from jax_fa4.ffi import bundle; bundle.work()"
        # The child must find this package and what the plans' classes come from, wherever the parent found them.
        paths = [str(PACKAGE.parent), *(p for p in sys.path if p)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        )
        setup = (str(store.home), store.host_target, str(store.package), builder)
        self._send(setup)

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(what, self._process.stdin)
        self._process.stdin.flush()

    def build(self, plan: Any) -> tuple[str | None, float]:
        """What went wrong (None = nothing) and the seconds it took."""
        assert self._process.stdout is not None
        try:
            self._send(plan)
            text, taken = pickle.load(self._process.stdout)
            return text, taken
        except (OSError, EOFError, pickle.UnpicklingError):
            return f"the worker process died with exit status {self._process.wait()}", 0.0

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def work() -> None:
    """A worker's life: its set-up, then plans until the pipe closes. What the compiler prints goes to stderr."""
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    folder, host_target, package, builder = pickle.load(sys.stdin.buffer)
    store = Store([folder], host_target=host_target, package=Path(package))
    module, _, name = builder.partition(":")
    while True:
        try:
            plan = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        start, text = time.perf_counter(), None
        try:
            store.get(plan, build=getattr(importlib.import_module(module), name))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        pickle.dump((text, time.perf_counter() - start), answers)
        answers.flush()
