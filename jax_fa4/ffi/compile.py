"""Plan -> object bytes for the runtime library's XLA handler: the only file that calls the compiler. No jax, no GPU.

The handler calls the object's entry with the stream, then for each operand and each result a pointer to
{void* data; int64_t* shape}. The entry reads both words, and starts the plan's kernels one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import io
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from jax_fa4.kernels.common.parts import Plan, label

# Host code of an object. The DSL's default is this machine's CPU, AVX-512 included: such an object dies elsewhere.
BASELINE = "x86-64-v2"
HOST_TARGETS = {
    BASELINE: "'llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64-v2'",
    "linux-aarch64": "linux-aarch64",  # Grace
}
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
ENTRY = "cutlass_call"  # the prefix that the handler asks for
RUNTIME = "libcute_dsl_runtime.so"
_LOCK = threading.Lock()  # concurrent compiles abort the process (DSL 4.8.1)
_LOADED: list[Any] = []  # the runtime library and the traced entry, once they are there


class CompilerMissing(ImportError):
    """The CuTe DSL is not installed here. The text names the extra that brings it."""


class BuildError(RuntimeError):
    """The compiler failed, or said nothing of what it made."""


class SlowKernel(RuntimeWarning):
    """The object is right but slower than its plan means: spills beyond the plan's allowance, serialised wgmma.

    A warning, because a call that works slowly is worth more than none. In this project's tests it is an error.
    """


@dataclass(frozen=True)
class KernelFacts:
    """What ptxas said of one kernel."""

    name: str
    registers: int
    spill_stores: int  # bytes
    spill_loads: int
    stack: int
    barriers: int


@dataclass(frozen=True)
class Facts:
    """Of one object: its kernels, and ptxas' log with its advice."""

    kernels: tuple[KernelFacts, ...]
    serialised: tuple[str, ...] = ()  # C7512 and its like: each wgmma waits for the one before
    log: str = field(default="", repr=False)

    @property
    def spills(self) -> int:
        """Bytes, of the worst kernel."""
        return max((max(k.spill_stores, k.spill_loads) for k in self.kernels), default=0)


@dataclass(frozen=True)
class Built:
    """One object and what was learned on the way. ptx and cubin only where asked for."""

    object: bytes = field(repr=False)
    facts: Facts
    ptx: str | None = field(default=None, repr=False)
    cubin: bytes | None = field(default=None, repr=False)


def build(plan: Plan, *, host_target: str = BASELINE, keep_ptx: bool = False) -> Built:
    """Compiles the plan's kernels and their host entry into one object. The same plan gives the same bytes.

    host_target: a key of HOST_TARGETS. keep_ptx: bring PTX text and cubin too; the object stays the same.
    Raises CompilerMissing, ValueError (unknown arch or host target), BuildError; warns with SlowKernel.
    """
    if plan.arch not in ARCHS:
        raise ValueError(f"arch {plan.arch!r} cannot be built for; known are {', '.join(ARCHS)}")
    if host_target not in HOST_TARGETS:
        raise ValueError(f"host target {host_target!r} is not known; known are {', '.join(HOST_TARGETS)}")
    with _LOCK, tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {plan.arch} --host-target {HOST_TARGETS[host_target]} remarks{{ptx}}"
        if keep_ptx:
            options += f" --keep-ptx --keep-cubin --dump-dir {folder}"
        _compiler()
        with _remarks() as text:
            try:
                made = _compile(plan, options)
                module = made.dump_to_object(ENTRY)
            except Exception as error:
                raise BuildError(f"the compiler failed on {plan}: {error}\n{text.getvalue()}") from error
        facts = read_remarks(text.getvalue())
        _judge(plan, facts)
        return Built(module, facts, made.__ptx__ if keep_ptx else None, made.__cubin__ if keep_ptx else None)


def _judge(plan: Plan, facts: Facts) -> None:
    """Refuses what says nothing of itself, and warns of what compiles silently and runs badly."""
    if not facts.kernels:
        raise BuildError(f"no word of ptxas on {plan}: the DSL's remarks have another form than known, {facts.log!r}")
    slow = [f"ptxas serialises wgmma: {'; '.join(facts.serialised)}"] if facts.serialised else []
    if facts.spills > plan.spill_allowance:
        slow.append(f"{facts.spills} bytes of register spills, {plan.spill_allowance} are allowed")
    if slow:
        text = f"jax_fa4: a kernel of {label(plan)} is right but slower than it should be ({', and '.join(slow)})"
        warnings.warn(f"{text}; please report it with {plan!r}, {facts.kernels!r}", SlowKernel, stacklevel=3)


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_NUMBERS = {
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "registers": re.compile(r"Used (\d+) registers"),
    "barriers": re.compile(r"used (\d+) barriers"),
}
_SERIALISED = re.compile(r"(?:\(C\d+\)[^()]*)?instructions are serialized due to [^']*")  # C7512 and its like


def read_remarks(text: str) -> Facts:
    """ptxas' log (with -v), as the DSL prints it, as facts.

    Where ptxas complains (spills), the DSL colours and wraps its log at any blank: so blanks are all alike here.
    """
    log = " ".join(_COLOUR.sub("", text).split())
    pieces = _ENTRY.split(log)  # [head, name, body, name, body, ...]
    kernels: dict[str, KernelFacts] = {}
    for name, body in zip(pieces[1::2], pieces[2::2], strict=True):
        found = {key: pattern.search(body) for key, pattern in _NUMBERS.items()}
        if found["registers"]:
            kernels[name] = KernelFacts(name, **{key: int(m[1]) if m else 0 for key, m in found.items()})
    serialised = dict.fromkeys(found.strip() for found in _SERIALISED.findall(log))
    return Facts(tuple(kernels.values()), tuple(serialised), log)


class _OwnThread(io.TextIOBase):
    """Stands for stderr: keeps what this thread prints, passes on what others do."""

    def __init__(self, kept: io.StringIO, others: TextIO):
        self.kept, self.others, self.thread = kept, others, threading.get_ident()

    def write(self, text: str) -> int:
        return (self.kept if threading.get_ident() == self.thread else self.others).write(text)

    def flush(self) -> None:
        self.others.flush()


@contextlib.contextmanager
def _remarks() -> Iterator[io.StringIO]:
    """The DSL prints its diagnostics to sys.stderr, and offers no other way to them."""
    kept = io.StringIO()
    with contextlib.redirect_stderr(cast(TextIO, _OwnThread(kept, sys.stderr))):
        yield kept


def runtime_library() -> Path:
    """The DSL's host runtime, of which an object's launch symbols come."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    for root in roots:
        for part in ("cu13", "cu12", "."):
            path = Path(root, part, "lib", RUNTIME)
            if path.exists():
                return path
    raise CompilerMissing(f"{RUNTIME} was not found under {roots or 'nvidia_cutlass_dsl'}; {_HOW_TO_INSTALL}")


_HOW_TO_INSTALL = (
    "the CuTe DSL compiles kernels: pip install 'jax_fa4[compile]' (or [cuda12], [cuda13] with jax for a GPU), or use a"
    " store that another machine filled with `python -m jax_fa4 precompile`"
)


def _compiler() -> Any:
    """The traced host entry. First loads the runtime, then the DSL; both once."""
    if not _LOADED:
        if importlib.util.find_spec("cutlass") is None:
            raise CompilerMissing(f"nvidia-cutlass-dsl is not installed; {_HOW_TO_INSTALL}")
        # Without a device the DSL makes no engine, and dump_to_object then looks for the launch symbols in the process.
        library = ctypes.CDLL(str(runtime_library()), ctypes.RTLD_GLOBAL)
        _LOADED.extend((library, importlib.import_module("jax_fa4.kernels.common.entry").entry))
    return _LOADED[1]


def _compile(plan: Plan, options: str) -> Any:
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_ptr

    slot = make_ptr(cute.Int64, 0, cute.AddressSpace.generic, assumed_align=8)
    slots = [slot for _ in plan.inputs + plan.outputs]
    return cute.compile(_compiler(), make_fake_stream(), *slots, plan=plan, options=options)
