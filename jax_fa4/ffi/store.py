"""Store: content-addressed artifacts in memory and on disk; built once, whatever number of threads and processes ask.

An entry's name is the sha256 of everything that its bytes depend on (`Store.key`). Objects are code, so a folder is
used only if it and the entry belong to this user (or to root) and nobody else may write there, and an entry is loaded
only if its digest and its key match. Anything else is a miss and is built again; a folder that cannot be used costs one
warning.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import filelock
import platformdirs

from jax_fa4.ffi.artifact import Artifact, CorruptArtifact, default_host_target
from jax_fa4.version import __version__

ENV = "JAX_FA4_STORE"
SUFFIX = ".fa4"
MANIFEST = "manifest.json"
PINNED_DSL = "4.8.1"  # the version that pyproject.toml pins: what a machine without the DSL asks its store for
DSL = "nvidia-cutlass-dsl"
LOCK_SECONDS = 300.0  # a build takes seconds: whoever holds a lock this long is stopped, not working
PACKAGE = Path(__file__).resolve().parent.parent
COUNTED = ("builds", "disk_hits", "memory_hits", "misses", "corrupt")


class HasArch(Protocol):
    """All that a store knows of a plan; its `repr` is its complete text."""

    @property
    def arch(self) -> str: ...


class HasObject(Protocol):
    """What a build function returns (`ffi.compile.Built`). Facts: a dataclass or a dict, of what JSON can hold."""

    @property
    def object(self) -> bytes: ...
    @property
    def facts(self) -> Any: ...


Build = Callable[..., HasObject]  # build(plan, host_target=...), as `ffi.compile.build`


_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


class StoreWarning(UserWarning):
    """A store folder that cannot be used, or not fully. Results stay right; kernels may be built again."""


def kernel_sources(package: Path = PACKAGE) -> list[Path]:
    """Every source file that an object's bytes may depend on."""
    single = [package / "mask.py", package / "ffi" / "compile.py", package / "ffi" / "buffers.py"]
    return sorted([*(package / "kernels").rglob("*.py"), *(p for p in single if p.exists())])


def sources_digest(package: Path = PACKAGE) -> str:
    """sha256 over names and contents of `kernel_sources`."""
    total = hashlib.sha256()
    for path in kernel_sources(package):
        content = path.read_bytes()
        total.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


@cache
def installed_dsl() -> str | None:
    """Version of the installed DSL, without importing it."""
    try:
        return importlib.metadata.version(DSL)
    except importlib.metadata.PackageNotFoundError:
        return None


class Store:
    """Artifacts by key. The first of `folders` is read and written, the others (bundles) only read; none = memory only.

    `host_target` as `artifact.HOST_TARGETS`; `package` is where the kernel sources are.
    """

    def __init__(self, folders: Iterable[str | Path] = (), *, host_target: str | None = None, package: Path = PACKAGE):
        paths = [Path(f).expanduser() for f in folders]
        self.host_target = default_host_target() if host_target is None else host_target
        self.package = package
        self._sources = sources_digest(package)
        self._lock = threading.Lock()
        self._memory: dict[str, Artifact] = {}
        self._building: dict[str, threading.Lock] = {}
        self._warned: set[str] = set()
        self._counts = dict.fromkeys(COUNTED, 0)
        self._home = paths[0] if paths and self._prepare(paths[0]) else None
        bundles = [p for p in paths[1:] if self._trusted_folder(p)]
        self._readable = ([self._home] if self._home else []) + bundles
        self.versions = {"jax_fa4": __version__, "dsl": self._dsl(), "sources": self._sources}

    @property
    def home(self) -> Path | None:
        """The folder that new entries go to, if there is one that can be used."""
        return self._home

    @property
    def folders(self) -> list[Path]:
        """Every folder that is looked up, in order."""
        return list(self._readable)

    def key(self, plan: HasArch) -> str:
        """Name of the plan's entry: sha256 over the plan's text and everything else that the bytes depend on."""
        parts = {"plan": repr(plan), "arch": plan.arch, "host_target": self.host_target, **self.versions}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def get(self, plan: HasArch, build: Build) -> Artifact:
        """The plan's artifact: from memory, from disk, or built (once, however many threads and processes ask).

        Whatever `build(plan, host_target=...)` raises comes through, and nothing is kept.
        """
        key = self.key(plan)
        found = self._remembered(key)
        if found is not None:
            return found
        with self._lock:
            mine = self._building.setdefault(key, threading.Lock())
        with mine:
            found = self._remembered(key)
            if found is not None:
                return found
            artifact = self._from_disk(key) or self._make(key, plan, build)
            with self._lock:
                self._memory[key] = artifact
                self._building.pop(key, None)
            return artifact

    def find(self, plan: HasArch) -> Artifact | None:
        """The plan's artifact if memory or disk has it. Builds nothing and counts nothing but corrupt entries."""
        key = self.key(plan)
        with self._lock:
            found = self._memory.get(key)
        return found if found is not None else self._from_disk(key, count=False)

    def counters(self) -> dict[str, int]:
        """How often since the start (or the last reset): builds, disk_hits, memory_hits, misses, corrupt."""
        with self._lock:
            return dict(self._counts)

    def reset_counters(self) -> None:
        with self._lock:
            self._counts = dict.fromkeys(COUNTED, 0)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _warn_once(self, about: str, text: str) -> None:
        with self._lock:
            if about in self._warned:
                return
            self._warned.add(about)
        warnings.warn(text, StoreWarning, stacklevel=3)

    def _dsl(self) -> str:
        """The installed DSL's version; where there is none, what a bundle's manifest says; else the pinned one."""
        if version := installed_dsl():
            return version
        for _, versions in self._manifests():
            if versions["sources"] == self._sources:
                return versions["dsl"]
        return PINNED_DSL

    def _manifests(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """The folders that have a manifest, and the versions (and the host target) in it."""
        for folder in self._readable:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                manifest = json.loads(self._read(folder / MANIFEST))
                found = {name: str(manifest["versions"][name]) for name in ("jax_fa4", "dsl", "sources")}
                yield folder, found | {"host_target": str(manifest["host_target"])}

    def mismatches(self) -> list[str]:
        """Why bundles among the folders serve nothing here: a line for each filled by or for something else."""
        ours = self.versions | {"host_target": self.host_target}
        out = []
        for folder, theirs in self._manifests():
            differ = [f"{n} {theirs[n][:16]} (here {ours[n][:16]})" for n in ours if theirs[n] != ours[n]]
            if differ:
                out.append(f"{folder} was filled with another {', another '.join(differ)}")
        return out

    def _remembered(self, key: str) -> Artifact | None:
        with self._lock:
            found = self._memory.get(key)
            if found is not None:
                self._counts["memory_hits"] += 1
            return found

    def _from_disk(self, key: str, count: bool = True, again: bool = False) -> Artifact | None:
        """The first whole entry of that key in the folders; a damaged or foreign one is counted and passed over."""
        for folder in self._readable:
            path = folder / (key + SUFFIX)
            try:
                artifact = Artifact.from_bytes(self._read(path))
                if artifact.key != key:
                    raise CorruptArtifact(f"it holds the entry {artifact.key[:16]}..., not that of its name")
            except FileNotFoundError:
                continue
            except (CorruptArtifact, OSError) as error:
                if not again:
                    self._count("corrupt")
                self._warn_once(f"entry {path}", f"jax_fa4: store entry {path} is not used: {error}")
                continue
            if count:
                self._count("disk_hits")
            return artifact
        return None

    def _make(self, key: str, plan: HasArch, build: Build) -> Artifact:
        """Builds under the key's lock between processes, unless another process did so while this one waited."""
        with self._locked(key) as waited:
            artifact = self._from_disk(key, again=True) if waited else None
            if artifact is not None:
                return artifact
            self._count("misses")
            built = build(plan, host_target=self.host_target)
            self._count("builds")
            assert built.object, f"the compiler gave no bytes for {plan!r}"
            artifact = Artifact(
                plan=repr(plan),
                arch=plan.arch,
                host_target=self.host_target,
                object=bytes(built.object),
                key=key,
                versions=self.versions,
                facts=_plain(built.facts),
            )
            self._write(key, artifact)
            return artifact

    @contextmanager
    def _locked(self, key: str) -> Any:
        """Holds the key's lock file; yields whether another process may have built meanwhile (always, if locked).

        Without a folder, or where locks do not work (some network file systems), there is no lock: at worst two
        processes build the same bytes.
        """
        if self._home is None:
            yield False
            return
        lock = filelock.FileLock(str(self._home / (key + ".lock")), timeout=LOCK_SECONDS, mode=0o600)
        try:
            lock.acquire()
        except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
            self._warn_once("write", f"jax_fa4: cannot lock in the store {self._home}: {error}; going on without")
            yield True
            return
        try:
            yield True
        finally:
            lock.release()

    def _write(self, key: str, artifact: Artifact) -> None:
        """Whole or not at all: a temporary file, synced, renamed over whatever stood there."""
        if self._home is None:
            return
        if sources_digest(self.package) != self._sources:
            # The process may have run either the old text or the new: its bytes belong to neither key.
            self._warn_once("edited", "jax_fa4: kernel sources changed while this process ran; entries stay in memory")
            return
        try:
            for stale in self._home.glob(f".{key}{SUFFIX}.*.tmp"):  # left by a builder that was killed
                with suppress(OSError):
                    if time.time() - stale.stat().st_mtime > LOCK_SECONDS:
                        stale.unlink()
            write_atomically(self._home / (key + SUFFIX), artifact.to_bytes())
        except OSError as error:
            self._warn_once("write", f"jax_fa4: cannot write to the store {self._home}: {error}; going on in memory")

    def _prepare(self, folder: Path) -> bool:
        """Makes the folder that is written to, private to the user; False if it cannot be used."""
        try:
            if not folder.exists():
                folder.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
        except OSError as error:
            self._warn_once(f"make {folder}", f"jax_fa4: cannot make the store {folder}: {error}; going on in memory")
            return False
        return self._trusted_folder(folder)

    def _trusted_folder(self, folder: Path) -> bool:
        """Whether nobody else could have put code there; one warning if not."""
        try:
            status = os.stat(folder)
            problem = None if stat.S_ISDIR(status.st_mode) else "it is not a folder"
            problem = problem or _writable_by_others(status)
        except OSError as error:
            problem = str(error)
        if problem:
            self._warn_once(f"folder {folder}", f"jax_fa4: the store {folder} is not used: {problem}")
        return problem is None

    def _read(self, path: Path) -> bytes:
        """A file's bytes, if it is a regular file that nobody else could have written; else PermissionError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            problem = None if stat.S_ISREG(status.st_mode) else "it is not a regular file"
            problem = problem or _writable_by_others(status)
            if problem:
                raise PermissionError(problem)
            return file.read()


def write_atomically(path: Path, data: bytes) -> None:
    """The file whole or as it was, also after a crash: a private temporary file beside it, synced, renamed over it."""
    temporary = path.parent / f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _plain(facts: Any) -> dict[str, Any]:
    """Facts as they come back from disk, so that an artifact is the same wherever it comes from.

    Fields that a dataclass leaves out of its repr stay out: the compiler's log has times and paths of the machine in
    it, and the same plan shall give the same bytes.
    """
    if dataclasses.is_dataclass(facts) and not isinstance(facts, type):
        kept = [f.name for f in dataclasses.fields(facts) if f.repr]
        facts = {name: value for name, value in dataclasses.asdict(facts).items() if name in kept}
    plain = json.loads(json.dumps(facts, allow_nan=False))
    assert isinstance(plain, dict), f"facts must be named; they are {facts!r}"
    return plain


def _writable_by_others(status: os.stat_result) -> str | None:
    """What lets another user write there, or None. Root may write anywhere, so root's things are as good as ours."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}, not to {os.geteuid()}; set {ENV} to a folder of your own"
    if status.st_mode & 0o022:
        return f"others may write there (mode {stat.S_IMODE(status.st_mode):04o}); run chmod go-w on it"
    return None


def default_folders(text: str | None = None) -> list[Path]:
    """The folders that JAX_FA4_STORE names, `os.pathsep` between them; unset or empty: the user's cache folder."""
    text = os.environ.get(ENV, "") if text is None else text
    named = [Path(part) for part in text.split(os.pathsep) if part]
    return named or [Path(platformdirs.user_cache_dir("jax_fa4"))]


_default: tuple[str, Store] | None = None
_default_lock = threading.Lock()


def default_store() -> Store:
    """The process's store; made anew when JAX_FA4_STORE has changed."""
    global _default
    text = os.environ.get(ENV, "")
    with _default_lock:
        if _default is None or _default[0] != text:
            _default = text, Store(default_folders(text))
        return _default[1]


def counters() -> dict[str, int]:
    """Counters of the process's store."""
    return default_store().counters()


def reset_counters() -> None:
    default_store().reset_counters()
