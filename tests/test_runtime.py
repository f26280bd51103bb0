"""The runtime library: which copy is taken, what is said where none can be, and one registration in a process."""

import importlib.metadata
import os
import platform
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jax_fa4.ffi import runtime
from jax_fa4.ffi.runtime import LIBRARY, Library, RuntimeMissing

ROOT = Path(runtime.__file__).resolve().parents[2]
HERE = {v: k for k, v in runtime.ELF_MACHINES.items()}.get(platform.machine(), 62)


def elf(path: Path, machine: int = HERE) -> Path:
    """A file that starts like a shared library of that machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 3, machine) + bytes(44))
    return path


class FakeDistributions:
    """importlib.metadata with what a test has installed: distribution name -> its files below a root."""

    def __init__(self, root: Path):
        self.root, self.files = root, {}

    def add_library(self, major: int, machine: int = HERE) -> Path:
        base = f"nvidia_cutlass_dsl/cu{major}/lib"
        names = [f"{base}/stubs/aarch64-unknown-linux-gnu/{LIBRARY}", f"{base}/{LIBRARY}", f"{base}/other.a"]
        self.files[f"nvidia-cutlass-dsl-libs-cu{major}"] = names
        elf(self.root / names[0], machine)  # on the stub's own machine only the path tells
        return elf(self.root / names[1], machine)

    def distribution(self, name: str):
        if name not in self.files:
            raise importlib.metadata.PackageNotFoundError(name)

        return SimpleNamespace(files=[self._path(f) for f in self.files[name]])

    def _path(self, name: str):
        path = importlib.metadata.PackagePath(name)
        path.dist = SimpleNamespace(locate_file=lambda p: self.root / str(p))
        return path


@pytest.fixture
def installed(tmp_path, monkeypatch):
    fake = FakeDistributions(tmp_path / "site")
    monkeypatch.setattr(importlib.metadata, "distribution", fake.distribution)
    monkeypatch.delenv(runtime.ENV, raising=False)
    monkeypatch.delenv(runtime.DSL_ENV, raising=False)
    return fake


def test_nothing_installed_says_what_to_install(installed):
    with pytest.raises(RuntimeMissing, match=r"no distribution.*cuda13.*cuda12.*JAX_FA4_RUNTIME") as error:
        runtime.find()
    assert "pip install" in str(error.value)


@pytest.mark.parametrize("plugin, taken", [(12, 12), (13, 13), (None, 13)])
def test_the_copy_of_the_plugins_cuda_version(installed, plugin, taken):
    paths = {major: installed.add_library(major) for major in (12, 13)}
    if plugin:
        installed.files[f"jax-cuda{plugin}-plugin"] = []
    assert runtime.find() == Library(paths[taken], f"nvidia-cutlass-dsl-libs-cu{taken}", taken)


def test_the_only_copy_is_taken_whatever_the_plugin(installed):
    path = installed.add_library(12)
    installed.files["jax-cuda13-plugin"] = []
    assert runtime.find().path == path


def test_both_plugins_tell_nothing(installed):
    installed.files |= {"jax-cuda12-plugin": [], "jax-cuda13-plugin": []}
    assert runtime.plugin_major() is None


def test_a_copy_for_another_machine_is_passed_over(installed):
    other = 183 if HERE == 62 else 62
    path13, path12 = installed.add_library(13, machine=other), installed.add_library(12)
    assert runtime.find().path == path12
    path12.unlink()
    with pytest.raises(RuntimeMissing, match="is built for") as error:
        runtime.find()
    assert str(path13) in str(error.value) and "cannot be read" in str(error.value)


def test_the_environment_comes_first(installed, tmp_path, monkeypatch):
    installed.add_library(13)
    told = elf(tmp_path / "dsl" / LIBRARY)
    monkeypatch.setenv(runtime.DSL_ENV, os.pathsep.join([str(tmp_path / "libother.so"), str(told)]))
    assert runtime.find() == Library(told, runtime.DSL_ENV)
    mine = elf(tmp_path / "mine.so")
    monkeypatch.setenv(runtime.ENV, str(mine))
    assert runtime.find() == Library(mine, runtime.ENV)


def test_a_wrong_environment_variable_is_not_passed_over(installed, tmp_path, monkeypatch):
    """The user meant that file: another copy instead would hide the mistake."""
    installed.add_library(13)
    (tmp_path / "text").write_text("#!/bin/sh\n" * 10)
    elf(tmp_path / "other.so", 243)
    for name, text in (("none.so", "cannot be read"), ("text", "is not an ELF"), ("other.so", "ELF machine 243")):
        monkeypatch.setenv(runtime.ENV, str(tmp_path / name))
        with pytest.raises(RuntimeMissing, match=f"{runtime.ENV} is .*{name}.*{text}"):
            runtime.find()


def test_a_broken_library_says_so(tmp_path):
    with pytest.raises(RuntimeMissing, match="cannot be loaded"):
        runtime.load(Library(elf(tmp_path / "broken.so"), "a test"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library of another kind")
def test_a_library_without_the_handler_says_what_is_missing(tmp_path):
    (tmp_path / "x.c").write_text("int CuteDSLRT_NvJaxCutlassCallPrepare_v2(void) { return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "x.so", "x.c"], cwd=tmp_path, check=True)
    with pytest.raises(RuntimeMissing, match=r"has no CuteDSLRT_NvJaxCutlassCallInstantiate_v2"):
        runtime.load(Library(tmp_path / "x.so", "a test"))


# ---- the real library, on the host platform: XLA's registry is the same code for every platform ----------------------


def real_library() -> Path | None:
    try:
        return runtime.find().path
    except RuntimeMissing:
        return None


needs_library = pytest.mark.skipif(real_library() is None, reason="the runtime library is not installed")


def fresh(code: str, **env: str) -> str:
    """Output of a new process: what is registered stays in one."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_library
def test_the_real_library_is_whole_and_no_stub():
    path = real_library()
    assert "stubs" not in path.parts and path.stat().st_size > 1_000_000
    addresses = runtime.load(Library(path, "a test"))
    assert set(addresses) == {"prepare", "instantiate", "execute", "type_id", "type_info"}
    assert len(set(addresses.values())) == 5 and all(addresses.values())


@needs_library
def test_finding_it_does_not_import_the_dsl():
    code = "from jax_fa4.ffi import runtime; runtime.load(runtime.find())"
    assert fresh(code + "\nprint('cutlass' in sys.modules)") == "False"


TWICE = """
import ctypes, os, shutil, threading
import jax; jax.devices()
from jax_fa4.ffi import runtime
seen = []
threads = [threading.Thread(target=lambda: seen.append(runtime.register("cpu"))) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
assert len(seen) == 8 and len(set(seen)) == 1, seen
runtime._register(runtime.load(runtime.find()), "cpu")      # the same copy again: harmless
copy = os.environ["COPY"]
shutil.copy(runtime.find().path, copy)
runtime._register(runtime.load(runtime.Library(copy, "x")), "cpu")   # another copy: the first goes on serving
print("fine")
"""


@needs_library
def test_registering_again_is_harmless(tmp_path):
    assert fresh(TWICE, COPY=str(tmp_path / "copy.so")).split("\n")[-1] == "fine"


BESIDE = """
import jax; jax.devices()
from jax_fa4.ffi import runtime
# The DSL's own integration, made to register where this machine has a platform.
import cutlass.jax.ffi as theirs
kept = {n: getattr(jax.ffi, n) for n in ("register_ffi_type", "register_ffi_target")}
def on_cpu(name):
    def register(*args, platform, **kw): return kept[name](*args, platform="cpu", **kw)
    return register
for name in kept: setattr(jax.ffi, name, on_cpu(name))
first, second = (theirs.register_ffi, runtime.register)[:: int(sys.argv[1])]
first(); second()
assert theirs.is_ffi_registered()
print("fine")
"""


@needs_library
@pytest.mark.parametrize("order", [1, -1], ids=["theirs first", "ours first"])
def test_cutlass_jax_beside_us(order):
    pytest.importorskip("cutlass.jax", reason="the DSL is not installed")
    code = BESIDE.replace("int(sys.argv[1])", str(order))
    assert fresh(code).split("\n")[-1] == "fine"


def test_registering_without_a_library_raises_each_time(installed, monkeypatch):
    monkeypatch.setattr(runtime, "_registered", {})
    for _ in range(2):
        with pytest.raises(RuntimeMissing):
            runtime.register("nowhere")
    assert runtime.registered() is None


def test_one_registration_for_many_threads(monkeypatch):
    calls, gate = [], threading.Barrier(8)
    monkeypatch.setattr(runtime, "_registered", {})
    monkeypatch.setattr(runtime, "find", lambda: Library(Path("x"), "a test"))
    monkeypatch.setattr(runtime, "load", lambda library: time.sleep(0.02) or {})
    monkeypatch.setattr(runtime, "_register", lambda addresses, name: calls.append(name))

    def go():
        gate.wait()
        runtime.register("CUDA")

    threads = [threading.Thread(target=go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["CUDA"] and runtime.registered() == Library(Path("x"), "a test")


def test_no_gpu_nothing_is_loaded(monkeypatch):
    """A build machine lowers for CUDA without the library; a machine with a CUDA backend needs it."""
    monkeypatch.setattr(runtime, "_registered", {})

    def missing():
        raise RuntimeMissing("not here")

    monkeypatch.setattr(runtime, "find", missing)
    monkeypatch.setattr(runtime, "cuda_here", lambda: False)
    assert runtime.register_if_cuda() is None
    monkeypatch.setattr(runtime, "cuda_here", lambda: True)
    with pytest.raises(RuntimeMissing, match="not here"):
        runtime.register_if_cuda()
