"""What would run on this machine, and what keeps the faster thing from running.

Looks at versions, GPU, driver, runtime library, compiler and store; says for a few typical calls which implementation
each pass takes and why; runs a small forward and backward pass against a dense computation in float64.

Exit code: 0 if what can run here runs right (in XLA, where there is no GPU); 1 if something is broken. Each line that
reports something broken says what to install or set.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa4 import kernels, primitives
from jax_fa4.api import attention, is_supported
from jax_fa4.spec import AttentionSpec, Problem, Unsupported
from jax_fa4.version import __version__

OK, NOTE, BROKEN = "ok", "note", "BROKEN"
INSTALL_JAX = 'pip install "jax_fa4[cuda13]" (or "jax_fa4[cuda12]"; the driver must be 580 or newer, or 525)'
COMPILE = (
    "pip install 'jax_fa4[compile]', or fill a store elsewhere (python -m jax_fa4 precompile) and set JAX_FA4_STORE"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str  # ok | note | BROKEN
    about: str
    text: str

    def __str__(self) -> str:
        return f"{'' if self.level == OK else self.level + ': '}{self.text}"


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--no-self-test", action="store_true", help="look only, run nothing")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if something is broken."""
    broken = 0
    for about, check in CHECKS:
        if check is self_test and args.no_self_test:
            continue
        print(about, flush=True)
        for finding in guarded(about, check):
            print(f"  {finding}", flush=True)
            broken += finding.level == BROKEN
    print(f"{broken} things are broken" if broken else "nothing is broken")
    return int(broken > 0)


def guarded(about: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """What a check finds; one that fails is itself a finding."""
    try:
        return check()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} (at {Path(where.filename).name}:{where.lineno})"
        return [Finding(BROKEN, about, text + hint(error))]


def hint(error: Exception) -> str:
    """What to do about an error, where its own text does not say so."""
    text = str(error)
    if "pip install" in text or "set JAX" in text:
        return ""
    return (
        "; without kernels: jax_fa4.config.update(implementation='xla'). Please report this with all that doctor says"
    )


# ---- versions, machine ---------------------------------------------------------------------------------------------


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> list[Finding]:
    from jax_fa4.ffi import store

    out = [Finding(OK, "versions", f"jax_fa4 {__version__}, python {platform.python_version()}, {platform.platform()}")]
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "flax")
    out.append(Finding(OK, "versions", ", ".join(f"{n} {version_of(n) or '-'}" for n in names)))
    dsl = store.installed_dsl()
    libraries = [f"nvidia-cutlass-dsl-libs-cu{n}" for n in (12, 13)]
    text = ", ".join(f"{n} {version_of(n) or '-'}" for n in (store.DSL, *libraries))
    out.append(Finding(OK, "versions", text))
    if dsl not in (None, store.PINNED_DSL):
        fix = f"pip install '{store.DSL}=={store.PINNED_DSL}'"
        out.append(Finding(BROKEN, "versions", f"{store.DSL} {dsl} is not {store.PINNED_DSL}, which is tested: {fix}"))
    if version_of("jax-cuda12-plugin") and version_of("jax-cuda13-plugin"):
        text = "jax plugins for CUDA 12 and 13 are both installed: pip uninstall the one (and its -pjrt) not wanted"
        out.append(Finding(BROKEN, "versions", text))
    return out


class Driver(NamedTuple):
    """What nvidia-smi says."""

    cards: tuple[str, ...]
    version: str


def driver() -> Driver | None:
    try:
        text = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[x.strip() for x in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    return Driver(tuple(f"{name} (compute capability {cc})" for name, cc, _ in rows), rows[0][2]) if rows else None


def device() -> list[Finding]:
    found, arch = driver(), primitives.device_arch()
    about = "device"
    out = [Finding(OK, about, f"driver {found.version}: {', '.join(found.cards)}" if found else "no NVIDIA driver")]
    out.append(Finding(OK, about, f"jax runs on {jax.default_backend()}: {', '.join(map(str, jax.devices()))}"))
    if arch is None and found:
        out.append(Finding(BROKEN, about, f"there is a GPU, but jax does not use it: {_why_no_gpu(found)}"))
    elif arch is None:
        out.append(Finding(NOTE, about, "no CUDA device: every call runs in XLA, kernels can be built for others"))
    elif arch not in kernels.ARCHITECTURES:
        have = ", ".join(kernels.ARCHITECTURES)
        out.append(Finding(NOTE, about, f"arch {arch}: kernels are for {have}; every call runs in XLA"))
    else:
        out.append(Finding(OK, about, f"arch {arch}"))
    return out


def _why_no_gpu(found: Driver) -> str:
    """What to change so that jax sees the cards."""
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        if (value := os.environ.get(name)) is not None:
            return f"unset {name} (it is {value!r})"
    plugins = [name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if version_of(name)]
    if not plugins:
        return INSTALL_JAX
    return (
        f"{plugins[0]} is installed, and finds no device with driver {found.version}: CUDA 13 needs 580 or newer,"
        ' CUDA 12 needs 525; update the driver, or pip install "jax[cuda12]" in place of cuda13'
    )


# ---- what launches and what holds kernels --------------------------------------------------------------------------


def runtime_library() -> list[Finding]:
    from jax_fa4.ffi import runtime

    try:
        library = runtime.find()
        runtime.load(library)
    except runtime.RuntimeMissing as error:
        needed = kernel_arch() is not None
        text = str(error) if needed else f"{error}. Not needed here: nothing is launched without a GPU"
        return [Finding(BROKEN if needed else NOTE, "runtime library", text)]
    out = [Finding(OK, "runtime library", f"{library.path} (from {library.source})")]
    plugin = runtime.plugin_major()
    if plugin is not None and library.major not in (None, plugin):
        text = f"the library is for CUDA {library.major}, the jax plugin for {plugin}: {runtime.INSTALL}"
        out.append(Finding(BROKEN if kernel_arch() else NOTE, "runtime library", text))
    return out


def kernel_arch() -> str | None:
    """The arch of this process's devices, if there are kernels for it."""
    arch = primitives.device_arch()
    if arch is None:
        return None
    for problem in TYPICAL.values():
        with suppress(Unsupported):
            kernels.select(problem, arch)
            return arch
    return None


def has_compiler() -> bool:
    return importlib.util.find_spec("cutlass") is not None


def compiler() -> list[Finding]:
    if has_compiler():
        return [Finding(OK, "compiler", "the CuTe DSL is installed: missing kernels are built when first called")]
    return [Finding(NOTE, "compiler", f"no CuTe DSL: only kernels that a store holds can run. To build: {COMPILE}")]


def stores() -> list[Finding]:
    from jax_fa4.ffi import store

    about, out = "store", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        here = store.Store(store.default_folders())
    named = os.environ.get(store.ENV)
    out.append(
        Finding(OK, about, f"{store.ENV} is {named!r}" if named else f"{store.ENV} is not set: the user's cache")
    )
    serving = 0
    for n, folder in enumerate(here.folders):
        kind = "read and written" if folder == here.home else "read"
        if folder == here.home and not os.access(folder, os.W_OK):
            kind = "read; it cannot be written to"
        e = entries(folder, here)
        text = f"{e.files} entries, {e.bytes / 1e6:.1f} MB, {e.serving} for this machine, trusted, {kind}"
        out.append(Finding(OK, about, f"{n + 1}. {folder}: {text}"))
        if e.damaged:
            out.append(Finding(NOTE, about, f"{e.damaged} entries there are damaged and not used: delete them"))
        serving += e.serving
    out += [Finding(BROKEN, about, f"{w.message}") for w in caught]
    fix = "fill it again with this version (python -m jax_fa4 precompile), or pip install the version that filled it"
    out += [Finding(NOTE, about, f"{text}: {fix}") for text in here.mismatches()]
    if kernel_arch() and not has_compiler() and not serving:
        text = f"no kernel for {kernel_arch()} in any store, and no compiler: calls fail. {COMPILE}; or call with"
        out.append(Finding(BROKEN, about, f"{text} implementation='xla'"))
    return out


class Entries(NamedTuple):
    """What a store's folder holds."""

    files: int
    bytes: int
    serving: int  # of this version, for this host and this device (any, where there is none)
    damaged: int


def entries(folder: Path, here: Any) -> Entries:
    from jax_fa4.ffi import artifact, store

    serving = damaged = size = 0
    files = list(folder.glob("*" + store.SUFFIX))
    for file in files:
        try:
            data = file.read_bytes()
            found = artifact.Artifact.from_bytes(data)
        except (OSError, artifact.CorruptArtifact):
            damaged += 1
            continue
        size += len(data)
        ours = (found.versions, found.host_target) == (here.versions, here.host_target)
        serving += ours and found.arch in (primitives.device_arch() or found.arch,)
    return Entries(len(files), size, serving, damaged)


# ---- typical calls -------------------------------------------------------------------------------------------------

TYPICAL: dict[str, Problem] = {
    "bfloat16 D128 causal, 32:8 heads": Problem(AttentionSpec(band=True), 2, 4096, 4096, 32, 8, 128, 128),
    "float16 D64 full": Problem(AttentionSpec(), 2, 4096, 4096, 16, 16, 64, 64, "float16"),
    "bfloat16 D192,128 causal (MLA)": Problem(AttentionSpec(band=True), 2, 4096, 4096, 16, 16, 192, 128),
    "bfloat16 D256 window, soft cap": Problem(AttentionSpec(band=True, soft_cap=True), 2, 4096, 4096, 8, 4, 256, 256),
    "bfloat16 D64 window, sinks": Problem(AttentionSpec(band=True, sinks=True), 2, 4096, 4096, 64, 8, 64, 64),
    "bfloat16 D128 segment ids": Problem(AttentionSpec(segments=True), 2, 4096, 4096, 16, 16, 128, 128),
    "bfloat16 D128 deterministic": Problem(
        AttentionSpec(band=True, deterministic=True), 2, 4096, 4096, 16, 16, 128, 128
    ),
    "bfloat16 D128 dense bias": Problem(AttentionSpec(bias=True), 2, 4096, 4096, 16, 16, 128, 128),
    "float32 D128 causal": Problem(AttentionSpec(band=True), 2, 4096, 4096, 16, 16, 128, 128, "float32"),
}


def calls() -> list[Finding]:
    """For each typical call and pass: what runs, and why not a kernel."""
    arch, out = primitives.device_arch(), []
    for name, problem in TYPICAL.items():
        out.append(Finding(OK, "calls", name))
        for one in (problem, problem.backward()):
            word = {"fwd": "forward ", "bwd": "backward"}[one.direction]
            if arch is None:
                out.append(Finding(OK, "calls", f"  {word} xla: no CUDA device. Kernels: {_elsewhere(one)}"))
            else:
                out.append(_taken(one, arch, word))
    return out


def _elsewhere(problem: Problem) -> str:
    """On which archs a kernel would take it, or why none."""
    have, why = [], []
    for arch in kernels.ARCHITECTURES:
        try:
            kernels.select(problem, arch)
            have.append(arch)
        except Unsupported as reason:
            why.append(str(reason))
    return f"on {', '.join(have)}" if have else f"none, because {why[0]}"


def _taken(problem: Problem, arch: str, word: str) -> Finding:
    try:
        plan = kernels.select(problem, arch)
    except Unsupported as reason:
        return Finding(OK, "calls", f"  {word} xla: {reason}")
    if in_store(plan):
        return Finding(OK, "calls", f"  {word} kernel for {arch}, in the store")
    if has_compiler():
        return Finding(OK, "calls", f"  {word} kernel for {arch}, built at the first call (seconds)")
    return Finding(
        NOTE, "calls", f"  {word} would fail: its kernel for {arch} is in no store, and there is no compiler"
    )


def in_store(plan: Any) -> bool:
    from jax_fa4.ffi import store

    return store.default_store().find(plan) is not None


# ---- self-test -----------------------------------------------------------------------------------------------------

DEPTHS = (64, 128, 192, 256, 96)  # the first whose kernels are to be had
SHAPE = {"b": 2, "t": 48, "s": 48, "n": 4, "k": 2}
FLOOR = 1e-3  # relative L2: differences of this size are rounding, whatever the unfused computation's error is
CEILING = 0.02  # and what no rounding of bfloat16 reaches here, should the unfused computation itself be wrong


def self_test() -> list[Finding]:
    """A small causal forward and backward against a dense computation in float64 on the host."""
    rng, s, found = np.random.default_rng(0), SHAPE, []
    depth = tested_depth()
    if depth is None:
        text = f"kernels are not tested: those of causal bfloat16 D{', D'.join(map(str, DEPTHS))} are in no store"
        found.append(Finding(NOTE, "self-test", text))
    d = depth or DEPTHS[0]
    shapes = {
        "query": (s["b"], s["t"], s["n"], d),
        "key": (s["b"], s["s"], s["k"], d),
        "value": (s["b"], s["s"], s["k"], d),
        "dout": (s["b"], s["t"], s["n"], d),
    }
    rounded = {n: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for n, shape in shapes.items()}
    want = dense(*(np.asarray(x, np.float64) for x in rounded.values()))
    yardstick = _passes(_unfused, *rounded.values())
    allowed = [min(2 * distance(a, b) + FLOOR, CEILING) for a, b in zip(yardstick, want, strict=True)]
    for implementation in [None] * (depth is not None) + ["xla"] * (kernel_arch() is not None):
        call = functools.partial(attention, is_causal=True, implementation=implementation)
        found += guarded("self-test", functools.partial(_judged, call, rounded, want, allowed))
    return found


def tested_depth() -> int | None:
    """The first depth whose kernels are to be had here, if kernels run here; else any will do."""
    arch = kernel_arch()
    if arch is None or has_compiler():
        return DEPTHS[0]
    for d in DEPTHS:
        # What the self-test calls: the shape decides too.
        shape: dict[str, Any] = {**SHAPE, "d": d, "v": d}
        problem = Problem(AttentionSpec(band=True), **shape)
        plans = []
        for one in (problem, problem.backward()):
            with suppress(Unsupported):
                plans.append(kernels.select(one, arch))
        if plans and all(in_store(plan) for plan in plans):
            return d
    return None


def _judged(call: Any, given: dict[str, Any], want: Any, allowed: list[float]) -> list[Finding]:
    implementation = call.keywords["implementation"]
    name = f"implementation={implementation!r}"
    if implementation is None:
        ok = [is_supported(given["query"], given["key"], given["value"], is_causal=True, differentiable=b)[0]
              for b in (False, True)]  # fmt: skip
        name += f" (forward {'kernel' if ok[0] else 'XLA'}, backward {'kernel' if ok[1] else 'XLA'})"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "runs in XLA": the lines above say so
        got = _passes(call, *given.values())
    out = []
    errors = [distance(a, b) for a, b in zip(got, want, strict=True)]
    text = ", ".join(f"{n} {e:.1e}" for n, e in zip(("out", "dq", "dk", "dv"), errors, strict=True))
    wrong = [n for n, e, most in zip(("out", "dq", "dk", "dv"), errors, allowed, strict=True) if not e <= most]
    if wrong:
        limits = ", ".join(f"{x:.1e}" for x in allowed)
        fix = "use implementation='xla' and report this" if implementation is None else "this jax is broken here"
        out.append(Finding(BROKEN, "self-test", f"{name}: {', '.join(wrong)} wrong: {text}; allowed {limits}. {fix}"))
    else:
        out.append(Finding(OK, "self-test", f"{name}: relative errors {text}: right"))
    return out


def _passes(call: Callable[..., Any], q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    """out, dq, dk, dv in float64 on the host."""

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, back = jax.vjp(call, q, k, v)
        return (out, *back(dout))

    return [np.asarray(x, np.float64) for x in both(q, k, v, dout)]


def _unfused(q: Any, k: Any, v: Any) -> Any:
    """Causal attention as separate operations in the operands' dtype, softmax in float32: the yardstick of rounding."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("btnd,bsnd->bnts", q, k, preferred_element_type=jnp.float32) / np.sqrt(q.shape[-1])
    visible = np.tril(np.ones(scores.shape[-2:], bool))
    probs = jax.nn.softmax(jnp.where(visible, scores, -np.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bnts,bsnd->btnd", probs, v)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray) -> list[np.ndarray]:
    """out, dq, dk, dv of causal attention, all scores at once, by the formulas of its derivative; float64."""
    group, scale = q.shape[2] // k.shape[2], 1 / np.sqrt(q.shape[-1])
    kk, vv = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = scale * np.einsum("btnd,bsnd->bnts", q, kk)
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnd->btnd", probs, vv)
    dprobs = np.einsum("btnd,bsnd->bnts", dout, vv)
    dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True))
    dq = scale * np.einsum("bnts,bsnd->btnd", dscores, kk)
    dk = scale * np.einsum("bnts,btnd->bsnd", dscores, q)
    dv = np.einsum("bnts,btnd->bsnd", probs, dout)

    def summed(x: np.ndarray) -> np.ndarray:
        b, s, n, d = x.shape
        return x.reshape(b, s, n // group, group, d).sum(3)

    return [out, dq, summed(dk), summed(dv)]


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2; NaN where there is one."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


CHECKS: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
    ("versions", versions),
    ("device", device),
    ("runtime library", runtime_library),
    ("compiler", compiler),
    ("store", stores),
    ("typical calls", calls),
    ("self-test", self_test),
)

if __name__ == "__main__":
    sys.exit(run(argparse.Namespace(no_self_test=False)))
