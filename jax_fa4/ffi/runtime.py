"""The DSL's runtime library: found without importing the DSL, its XLA handler registered once in a process.

The library (`libcute_dsl_runtime.so`) holds the handler that loads a compiled object and launches it. It links neither
CUDA nor Python, so it loads on any Linux machine of its architecture. XLA keeps one handler under a name. Measured on
the host platform (jaxlib 0.10.2 and 0.11.2, 2026-11-29): registering the same copy of the library again is harmless, so
`cutlass.jax` may do so before or after us; another copy is refused, with "already registered" for the type. A refusal
means that a handler of the same contract stands there already, and it serves our calls.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ENV = "JAX_FA4_RUNTIME"
DSL_ENV = "CUTE_DSL_LIBS"  # the DSL's own override: its choice then, and so ours
LIBRARY = "libcute_dsl_runtime.so"
PREFIX = "CuteDSLRT_NvJaxCutlassCall"
TARGET = PREFIX + "_v2"
TYPE = PREFIX + "Types_v2"
STAGES = ("prepare", "instantiate", "execute")
MAJORS = (13, 12)  # CUDA versions that the DSL ships a library for, newest first
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
INSTALL = (
    f'pip install "jax_fa4[cuda13]" (or "jax_fa4[cuda12]", as your jax plugin), or set {ENV} to the path of {LIBRARY}'
)


class RuntimeMissing(RuntimeError):
    """No runtime library that can launch kernels here. The text says what was looked at and what to install or set."""


class Library(NamedTuple):
    """A copy of the runtime library and how it was found."""

    path: Path
    source: str  # the environment variable or the distribution that named it
    major: int | None = None  # CUDA version, where known


def plugin_major() -> int | None:
    """CUDA major version of the installed jax plugin; None without one, or with several."""
    found = []
    for major in MAJORS:
        try:
            importlib.metadata.distribution(f"jax-cuda{major}-plugin")
            found.append(major)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found[0] if len(found) == 1 else None


def wrong_file(path: Path) -> str | None:
    """Why a file is no library for this machine (a stub for another system, a broken download), or None."""
    try:
        with open(path, "rb") as file:
            head = file.read(20)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return "is not an ELF library"
    (machine,) = struct.unpack_from("<H", head, 18)
    found = ELF_MACHINES.get(machine, f"ELF machine {machine}")
    here = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
    return None if found == here else f"is built for {found}; this machine is {here}"


def _installed() -> Iterator[Library]:
    """The copies that installed distributions list, by CUDA version; never the linker stubs beside them."""
    for major in MAJORS:
        name = f"nvidia-cutlass-dsl-libs-cu{major}"
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == LIBRARY and file.parts[-3:-1] == (f"cu{major}", "lib"):
                yield Library(Path(str(file.locate())), name, major)


def find() -> Library:
    """The library to use, or RuntimeMissing.

    Order: JAX_FA4_RUNTIME; the copy that the DSL is told to use (CUTE_DSL_LIBS); the installed copy of the jax plugin's
    CUDA version; any other installed one, newest first.
    """
    if named := os.environ.get(ENV):
        path = Path(named).expanduser()
        if problem := wrong_file(path):
            raise RuntimeMissing(f"{ENV} is {named!r}, which {problem}. Correct it, or unset it and {INSTALL}")
        return Library(path, ENV)
    looked = []
    for named in os.environ.get(DSL_ENV, "").split(os.pathsep):
        if Path(named).name == LIBRARY:
            if not wrong_file(Path(named)):
                return Library(Path(named), DSL_ENV)
            looked.append(f"{named} {wrong_file(Path(named))}")
    wanted = plugin_major()
    for library in sorted(_installed(), key=lambda found: found.major != wanted):
        problem = wrong_file(library.path)
        if not problem:
            return library
        looked.append(f"{library.path} {problem}")
    seen = "; ".join(looked) or "no distribution nvidia-cutlass-dsl-libs-cu13 or -cu12 is installed"
    raise RuntimeMissing(f"the library that launches kernels was not found ({seen}): {INSTALL}")


def load(library: Library) -> dict[str, int]:
    """Loads the library; addresses by name: the stages, `type_id`, `type_info`. RuntimeMissing if it has not all."""
    try:
        loaded = ctypes.CDLL(str(library.path))
    except OSError as error:
        raise RuntimeMissing(f"{library.path} ({library.source}) cannot be loaded: {error}. {INSTALL}") from None
    symbols = {stage: f"{PREFIX}{stage.capitalize()}_v2" for stage in STAGES}
    symbols |= {"type_id": f"{PREFIX}StateTypeId_v2", "type_info": f"{PREFIX}StateTypeInfo_v2"}
    addresses: dict[str, int] = {}
    for name, symbol in symbols.items():
        try:
            function = getattr(loaded, symbol)
        except AttributeError:
            raise RuntimeMissing(
                f"{library.path} ({library.source}) has no {symbol}: it is another library, or of a version before"
                f" 4.8. {INSTALL}"
            ) from None
        function.restype = ctypes.c_void_p
        # A stage is the function itself; the type's two are functions that return an address.
        address = function() if name.startswith("type") else ctypes.cast(function, ctypes.c_void_p).value
        if not address:
            raise RuntimeMissing(f"{library.path}: {symbol} gives no address. {INSTALL}")
        addresses[name] = address
    return addresses


_lock = threading.Lock()
_registered: dict[str, Library] = {}


def register(platform_name: str = "CUDA") -> Library:
    """Registers the handler with XLA, the first time; the library in use. RuntimeMissing if there is none.

    Needed once in a process that runs kernels, also one that only calls deserialised `jax.export` modules. Any thread.
    """
    if (done := _registered.get(platform_name)) is not None:
        return done
    with _lock:
        if platform_name not in _registered:
            library = find()
            addresses = load(library)
            _register(addresses, platform_name)
            _registered[platform_name] = library
        return _registered[platform_name]


def registered() -> Library | None:
    """The library that serves CUDA in this process, if `register` has run."""
    return _registered.get("CUDA")


def _register(addresses: dict[str, int], platform_name: str) -> None:
    import jax

    def capsule(name: str) -> Any:
        return jax.ffi.pycapsule(addresses[name])

    type_parts: Any = {"type_id": capsule("type_id"), "type_info": capsule("type_info")}
    try:
        jax.ffi.register_ffi_type(TYPE, type_parts, platform=platform_name)
        jax.ffi.register_ffi_target(TARGET, {stage: capsule(stage) for stage in STAGES}, platform=platform_name)
    except Exception as error:
        # jaxlib raises its own error type, whose home moved between versions: only the text tells.
        if "already registered" not in str(error):
            raise


def cuda_here() -> bool:
    """Whether this process has a CUDA backend; a build machine that lowers for others has none."""
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def register_if_cuda() -> Library | None:
    """`register()` where kernels may run in this process; nothing where they are only lowered or exported."""
    return _registered.get("CUDA") or (register() if cuda_here() else None)
