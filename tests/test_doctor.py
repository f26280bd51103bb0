"""doctor: what it says of this machine, of machines made up (no compiler, no runtime, bad store), of wrong results."""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from store_fakes import fake_build

from jax_fa4 import doctor, kernels, primitives
from jax_fa4.api import attention
from jax_fa4.ffi import runtime, store
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

ROOT = Path(__file__).resolve().parent.parent
REMEDY = re.compile(r"pip (un)?install|unset |set JAX_FA4|chmod|implementation='xla'")


def broken(findings):
    """The texts of what is broken; each says what to install or set."""
    texts = [f.text for f in findings if f.level == doctor.BROKEN]
    assert all(REMEDY.search(text) for text in texts), texts
    return texts


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with an H200, its runtime library and the compiler, whose store is empty."""
    monkeypatch.setattr(primitives, "device_arch", lambda: "sm_90a")
    monkeypatch.setattr(doctor, "driver", lambda: doctor.Driver(("NVIDIA H200 (compute capability 9.0)",), "580.159"))
    monkeypatch.setattr(doctor, "has_compiler", lambda: True)
    monkeypatch.setenv(store.ENV, str(tmp_path / "kernels"))


def missing():
    raise runtime.RuntimeMissing(f"nothing found: {runtime.INSTALL}")


def test_this_machine_in_a_process_of_its_own(tmp_path):
    """No GPU: XLA runs, it says so and why, and exits with 0."""
    environment = os.environ | {"JAX_FA4_STORE": str(tmp_path / "s"), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "jax_fa4", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "no CUDA device",
        "jaxlib",
        "every call runs in XLA",
        str(tmp_path / "s"),
        ": right",
        "nothing is broken",
    ):
        assert text in done.stdout, text
    assert "BROKEN" not in done.stdout


def test_the_exit_code_is_that_of_the_findings(monkeypatch, capsys):
    for levels, code in (((), 0), (("ok", "note"), 0), (("ok", "BROKEN"), 1)):
        findings = [doctor.Finding(level, "x", "text") for level in levels]
        monkeypatch.setattr(doctor, "CHECKS", (("x", lambda found=findings: found),))
        assert doctor.run(argparse.Namespace(no_self_test=False)) == code
    assert "1 things are broken" in capsys.readouterr().out


def test_a_check_that_fails_is_a_finding():
    def check():
        raise RuntimeError("the library is gone")

    (finding,) = doctor.guarded("x", check)
    assert "the library is gone (at test_doctor.py" in broken([finding])[0]


# ---- machines made up ------------------------------------------------------------------------------------------------


def test_a_gpu_that_jax_does_not_use(hopper, monkeypatch):
    assert broken(doctor.device()) == []
    monkeypatch.setattr(primitives, "device_arch", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "unset JAX_PLATFORMS (it is 'cpu')" in broken(doctor.device())[0]
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset CUDA_VISIBLE_DEVICES (it is '')" in broken(doctor.device())[0]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    assert 'pip install "jax_fa4[cuda13]"' in broken(doctor.device())[0]
    monkeypatch.setattr(doctor, "version_of", lambda name: "0.11.2" if name == "jax-cuda13-plugin" else None)
    assert "with driver 580.159: CUDA 13 needs 580" in broken(doctor.device())[0]


def test_a_card_without_kernels_is_no_fault(hopper, monkeypatch):
    monkeypatch.setattr(primitives, "device_arch", lambda: "sm_80")
    monkeypatch.setattr(runtime, "find", missing)
    found = doctor.device() + doctor.runtime_library() + doctor.calls()
    assert broken(found) == []
    assert any("arch sm_80" in f.text for f in found)


def test_no_runtime_library(hopper, monkeypatch):
    monkeypatch.setattr(runtime, "find", missing)
    assert "jax_fa4[cuda13]" in broken(doctor.runtime_library())[0]
    monkeypatch.setattr(primitives, "device_arch", lambda: None)
    assert broken(doctor.runtime_library()) == []


def test_a_runtime_library_of_another_cuda(hopper, monkeypatch):
    monkeypatch.setattr(runtime, "find", lambda: runtime.Library(Path("x.so"), "somewhere", 12))
    monkeypatch.setattr(runtime, "load", lambda library: {})
    for major, count in ((12, 0), (13, 1), (None, 0)):
        monkeypatch.setattr(runtime, "plugin_major", lambda major=major: major)
        assert len(broken(doctor.runtime_library())) == count


def test_another_compiler_than_the_pinned(monkeypatch):
    monkeypatch.setattr(store, "installed_dsl", lambda: "4.9.0")
    assert "4.9.0 is not 4.8.1" in broken(doctor.versions())[0]
    monkeypatch.setattr(store, "installed_dsl", lambda: None)
    assert broken(doctor.versions()) == []


def test_kernels_of_the_store_serve_without_a_compiler(hopper, monkeypatch, tmp_path):
    problem = doctor.TYPICAL["bfloat16 D128 causal, 32:8 heads"]
    plan = kernels.select(problem, "sm_90a")
    assert "built at the first call" in doctor._taken(problem, "sm_90a", "forward").text
    monkeypatch.setattr(doctor, "has_compiler", lambda: False)
    assert "would fail" in doctor._taken(problem, "sm_90a", "forward").text
    text = broken(doctor.stores())[0]
    assert "no kernel for sm_90a in any store" in text and "JAX_FA4_STORE" in text
    store.Store([tmp_path / "kernels"]).get(plan, build=fake_build)
    assert broken(doctor.stores()) == []
    finding = doctor._taken(problem, "sm_90a", "forward")
    assert finding.level == doctor.OK and "in the store" in finding.text
    monkeypatch.setattr(primitives, "device_arch", lambda: "sm_100a")  # the kernels there are another card's
    monkeypatch.setattr(doctor, "kernel_arch", lambda: "sm_100a")
    assert "no kernel for sm_100a in any store" in broken(doctor.stores())[0]


def test_the_self_test_takes_kernels_that_are_there(hopper, monkeypatch, tmp_path):
    assert doctor.tested_depth() == doctor.DEPTHS[0]
    monkeypatch.setattr(doctor, "has_compiler", lambda: False)
    assert doctor.tested_depth() is None
    note, xla = doctor.self_test()
    assert note.level == doctor.NOTE and "not tested" in note.text and xla.text.startswith("implementation='xla'")
    problem = Problem(AttentionSpec(band=True), **doctor.SHAPE, d=128, v=128)
    forward = kernels.select(problem, "sm_90a")
    store.Store([tmp_path / "kernels"]).get(forward, build=fake_build)
    real = kernels.select

    def forward_only(problem, arch):
        if problem.direction == "bwd":
            raise Unsupported("no backward")
        return real(problem, arch)

    monkeypatch.setattr(kernels, "select", forward_only)
    assert doctor.tested_depth() == 128
    monkeypatch.setattr(kernels, "select", lambda p, a: (forward, "a backward that is not there")[p.direction == "bwd"])
    monkeypatch.setattr(doctor, "in_store", lambda plan: plan is forward)
    assert doctor.tested_depth() is None


def test_every_typical_call_has_a_reason(hopper):
    findings = [str(f) for f in doctor.calls()]
    assert len(findings) == 3 * len(doctor.TYPICAL)
    by_name = dict(zip(findings[::3], zip(findings[1::3], findings[2::3], strict=True), strict=True))
    assert "kernel for sm_90a" in by_name["bfloat16 D128 causal, 32:8 heads"][0]
    assert all("xla: a dense bias" in text for text in by_name["bfloat16 D128 dense bias"])
    assert all("xla: dtype float32" in text for text in by_name["float32 D128 causal"])


def test_stores(hopper, monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    assert broken(doctor.stores()) == []
    store.Store([folder]).get(kernels.select(doctor.TYPICAL["float16 D64 full"], "sm_90a"), build=fake_build)
    assert any("1 entries, 0.0 MB, 1 for this machine, trusted, read and" in f.text for f in doctor.stores())
    (folder / "0123.fa4").write_bytes(b"damaged")
    assert any(f.level == doctor.NOTE and "1 entries there are damaged" in f.text for f in doctor.stores())
    folder.chmod(0o777)
    assert "run chmod go-w on it" in broken(doctor.stores())[0]


def test_a_bundle_of_another_version(hopper, monkeypatch, tmp_path):
    from jax_fa4.ffi import bundle

    other = store.Store([tmp_path / "kernels"])
    other.versions = other.versions | {"jax_fa4": "0.0.1"}
    other.get(kernels.select(doctor.TYPICAL["float16 D64 full"], "sm_90a"), build=fake_build)
    bundle.write_manifest(other)
    assert any("1 entries, 0.0 MB, 0 for this machine" in f.text for f in doctor.stores())
    assert broken(doctor.stores()) == []  # the compiler builds what is missing
    monkeypatch.setattr(doctor, "has_compiler", lambda: False)
    notes = [f.text for f in doctor.stores() if f.level == doctor.NOTE]
    assert "another jax_fa4 0.0.1" in notes[0] and "precompile" in notes[0]
    assert "in any store" in broken(doctor.stores() + doctor.compiler())[0]


# ---- self-test -------------------------------------------------------------------------------------------------------


def wrong_scale(*args, implementation, **options):
    return attention(*args, scale=0.13, **options)


def unmasked(*args, implementation, is_causal):
    return attention(*args)


def nan_in_one_row(*args, implementation, is_causal):
    return attention(*args, is_causal=True).at[0, 0, 0, 0].add(jnp.nan)


def crashes(*args, **options):
    raise RuntimeError("the kernel could not be loaded")


@pytest.mark.parametrize("wrong", [wrong_scale, unmasked, nan_in_one_row, crashes], ids=lambda f: f.__name__)
def test_the_self_test_sees_wrong_results(monkeypatch, wrong):
    monkeypatch.setattr(doctor, "attention", wrong)
    assert len(broken(doctor.self_test())) == 1


def test_the_self_test_passes_here():
    (finding,) = doctor.self_test()
    assert finding.level == doctor.OK and "right" in finding.text


def test_the_dense_gradients_are_those_of_finite_differences():
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, 5, n, 3)) for n in (4, 2, 2, 4))
    _, *grads = doctor.dense(q, k, v, dout)
    for i, grad in enumerate(grads):
        way = rng.standard_normal(grad.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [x + step * way if j == i else x for j, x in enumerate((q, k, v))]
            ends.append((doctor.dense(*moved, dout)[0] * dout).sum())
        np.testing.assert_allclose((ends[0] - ends[1]) / 2e-6, (grad * way).sum(), rtol=1e-6)


def test_typical_problems_are_possible():
    for name, p in doctor.TYPICAL.items():
        assert p.n % p.k == 0 and name.startswith(f"{p.dtype} D{p.d}"), name
        assert dataclasses.replace(p, direction="bwd") == p.backward()
