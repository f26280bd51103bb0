"""The command line and precompile: what a traced function needs, what is built, refused or failed, and exit codes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import roofline
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import cli, kernels, traced
from jax_fa4.ffi import bundle, store
from jax_fa4.precompile import describe, plans_for, wanted
from jax_fa4.spec import AttentionSpec, Problem, Unsupported

shaped = jax.ShapeDtypeStruct
ROOT = Path(__file__).resolve().parent.parent
Q = shaped((2, 32, 4, 64), jnp.bfloat16)
FORWARD = [("fwd", 2, 4)]  # direction, batch, heads


def attend(q, **options):
    return jax_fa4.attention(q, q, q, is_causal=True, **options)


def loss(q):
    return attend(q).astype(jnp.float32).sum()


@jax.custom_vjp
def doubled(q):
    return 2 * attend(q)


doubled.defvjp(lambda q: (doubled(q), q), lambda q, g: (g,))


def scanned(q):
    return jax.lax.scan(lambda x, _: (attend(x), None), q, length=3)[0]


def sharded(q):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(q)


HIDDEN = {
    "plain": (attend, FORWARD),
    "jit": (jax.jit(attend), FORWARD),
    "scan": (scanned, FORWARD),
    "cond": (lambda q: jax.lax.cond(q[0, 0, 0, 0] > 0, attend, lambda q: q, q), FORWARD),
    "while": (lambda q: jax.lax.while_loop(lambda x: x[0, 0, 0, 0] > 0, attend, q), FORWARD),
    "custom_vjp": (doubled, FORWARD),
    "remat": (jax.checkpoint(attend), FORWARD),
    "shard_map": (sharded, [("fwd", 1, 4)]),
    "vmap": (lambda q: jax.vmap(attend)(q[:, None]), FORWARD),
    "jit in scan in jit": (
        jax.jit(lambda q: jax.lax.scan(lambda x, _: (jax.jit(attend)(x), None), q, length=2)),
        FORWARD,
    ),
    "grad": (jax.grad(loss), [("fwd", 2, 4), ("bwd", 2, 4)]),
    "grad of remat": (jax.grad(jax.checkpoint(loss)), [("fwd", 2, 4), ("fwd", 2, 4), ("bwd", 2, 4)]),
    "xla": (functools.partial(attend, implementation="xla"), FORWARD),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_calls_are_found_wherever_a_jaxpr_hides_them(name):
    fn, want = HIDDEN[name]
    calls = traced.calls_in(fn, Q)
    assert [(c.problem.direction, c.problem.b, c.problem.n) for c in calls] == want
    assert all(c.problem.spec.band and (c.problem.t, c.problem.d) == (32, 64) for c in calls)


def test_flops_of_a_training_step_are_those_of_the_dense_products():
    """Forward 2 products of the square, backward 5; a scan counts its length."""
    product = 2 * 2 * 4 * 32 * 32 * 64
    assert traced.attention_flops(attend, Q) == 2 * product
    assert traced.attention_flops(jax.grad(loss), Q) == 7 * product
    assert traced.attention_flops(scanned, Q) == 6 * product


def test_jaxs_roofline_knows_both_passes():
    """Its FLOPs are those of `attention_flops`, its bytes each operand and result of the passes once."""
    forward = roofline.roofline(attend)(Q)[1]
    both = roofline.roofline(jax.grad(loss))(Q)[1]
    assert forward.flops == traced.attention_flops(attend, Q)
    assert both.flops == traced.attention_flops(jax.grad(loss), Q)
    tensor, row = 2 * 32 * 4 * 64 * 2, 2 * 4 * 32 * 4  # bfloat16; the log-sum-exp in float32
    values = 2 * 4 + 3 * 2 * 4 + 2 * 4  # window; offset and two lengths of two examples; scale and cap
    assert forward.hbm_bytes == 4 * tensor + row + values
    assert both.hbm_bytes - forward.hbm_bytes == 8 * tensor + 2 * row + values


def test_xla_counts_a_custom_call_as_unknown():
    """Why `attention_flops` exists: no attribute of an FFI call reaches XLA's cost analysis. If this fails, use it."""
    call = jax.ffi.ffi_call("nothing_of_that_name", shaped((8, 8), jnp.float32), has_side_effect=True)
    cost = jax.jit(lambda x: call(x)).lower(shaped((8, 8), jnp.float32)).cost_analysis()
    assert cost["flops"] == -1


# ---- precompile ------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_compiler(monkeypatch):
    """Objects of no use, made at once, in the same worker processes."""
    monkeypatch.setattr(bundle, "BUILDER", "store_fakes:fake_build")


def bias_and_plain(q):
    return attend(q), jax_fa4.attention(q, q, q, bias=jnp.zeros((4, 32, 32), q.dtype)), attend(q[:, :16])


def test_a_function_is_traced_and_its_kernels_are_built_once(fake_compiler, tmp_path):
    made = jax_fa4.precompile(bias_and_plain, Q, archs="sm_90a", store=tmp_path / "s", jobs=1, progress=False)
    (plan,) = made.plans  # both lengths are one kernel
    assert plan == kernels.select(Problem(AttentionSpec(band=True), 1, 8, 8, 2, 1, 64, 64), "sm_90a")
    assert made.store.find(plan).object and made.entries[0].plan == repr(plan)
    (refused,) = made.refused
    assert refused.problem.spec.bias and "dense bias" in refused.reason
    assert "forward bfloat16 D64 bias on sm_90a" in str(made)


def test_what_asks_for_xla_is_passed_over(fake_compiler, tmp_path):
    fn = functools.partial(attend, implementation=("xla", "fa4"))
    made = jax_fa4.precompile(fn, Q, archs=["sm_90a"], store=tmp_path / "s", progress=False)
    assert (made.plans, made.refused) == ((), ())


def test_a_function_that_insists_on_kernels_is_refused_as_it_would_be_there(fake_compiler, tmp_path):
    def fn(q):
        return jax_fa4.attention(q, q, q, bias=jnp.zeros((4, 32, 32), q.dtype), implementation="fa4")

    with pytest.raises(Unsupported, match="dense bias"):
        jax_fa4.precompile(fn, Q, archs=["sm_90a"], store=tmp_path / "s")


def test_empty_calls_need_no_kernel(fake_compiler, tmp_path):
    problems = [Problem(AttentionSpec(), 0, 8, 8, 2, 2, 64, 64)]
    assert jax_fa4.precompile(problems, archs="sm_90a", store=tmp_path / "s").plans == ()


@pytest.mark.parametrize(
    ("what", "archs", "error", "text"),
    [
        (attend, "sm_80", ValueError, "sm_80"),
        (attend, [], ValueError, "sm_90a"),
        ([3], "sm_90a", TypeError, r"\[3\]"),
    ],
)
def test_wrong_arguments_are_named(what, archs, error, text, tmp_path):
    with pytest.raises(error, match=text):
        jax_fa4.precompile(what, *[Q] * callable(what), archs=archs, store=tmp_path / "s")


CHILD = """
import sys
sys.modules["cutlass"] = None  # no compiler
import jax, jax.numpy as jnp, jax_fa4
from jax_fa4.ffi import store
q = jax.ShapeDtypeStruct((3, 100, 8, 64), jnp.bfloat16)
fn = lambda q: jax_fa4.attention(q, q[:, :, :2], q[:, :, :2], local_window_size=(7, 0), implementation="fa4")
with jax_fa4.config(arch="sm_90a"):
    text = jax.jit(fn).trace(q).lower(lowering_platforms=("cuda",)).as_text()
assert "CuteDSLRT_NvJaxCutlassCall_v2" in text
print(store.counters())
"""


def child(folder):
    environment = os.environ | {"JAX_FA4_STORE": str(folder), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300)


def test_a_process_that_finds_the_bundle_compiles_nothing(tmp_path):
    """Built by the real compiler from one shape, found for another shape, other heads and a window, without it."""
    pytest.importorskip("cutlass")
    made = jax_fa4.precompile(attend, Q, archs="sm_90a", store=tmp_path / "s", jobs=1, progress=False)
    assert made.bytes > 20_000 and made.entries[0].seconds > 0
    served = child(tmp_path / "s")
    assert served.returncode == 0, served.stderr
    assert eval(served.stdout) == {"builds": 0, "disk_hits": 1, "memory_hits": 1, "misses": 0, "corrupt": 0}
    alone = child(tmp_path / "empty")
    assert alone.returncode != 0 and "Unsupported" in alone.stderr and "is in no store" in alone.stderr


# ---- python -m jax_fa4 precompile ------------------------------------------------------------------------------------


def command(*arguments):
    return cli.main(["precompile", "--quiet", "--jobs", "1", *map(str, arguments)])


def test_the_kinds_asked_for(fake_compiler):
    parse = cli.parser().parse_args
    base = ["precompile", "--arch", "sm_90a", "--store", "x", "--head-dim", "64", "192,128"]

    def kinds(*more):
        return [describe(p) for p in cli.problems(parse([*base, *more])) if not p.spec.lengths]

    assert kinds("--causal", "--forward-only") == ["forward bfloat16 D64 band", "forward bfloat16 D192,128 band"]
    assert len(kinds()) == 2 * 2 * 2  # passes, depths, masks
    assert kinds("--full", "--sinks", "--deterministic")[-1] == "backward bfloat16 D192,128 sinks+deterministic"
    assert kinds("--full", "--forward-only", "--soft-cap", "both", "--dtype", "float16") == [
        "forward float16 D64 full",
        "forward float16 D64 soft_cap",
        "forward float16 D192,128 full",
        "forward float16 D192,128 soft_cap",
    ]


def plans_of(spec, depth):
    """All that shapes may choose between, forward on Hopper."""
    kind = Problem(spec, 1, 1, 1, 1, 1, depth, depth)
    return {kernels.select(one, "sm_90a") for one in kernels.of_every_shape(kind, "sm_90a")[1:]}


def test_a_table_a_manifest_and_exit_code_0(fake_compiler, tmp_path, capsys):
    folder = tmp_path / "s"
    asked = ("--arch", "sm_90a", "--head-dim", 64, 128, "--causal", "--forward-only", "--store", folder)
    assert command(*asked) == 0
    manifest = bundle.read_manifest(folder)
    count = len(plans_of(AttentionSpec(band=True), 64)) + len(plans_of(AttentionSpec(band=True), 128))
    assert count >= 6, "of each: for few queries, few tiles, long sequences at least"
    assert [e["bytes"] for e in manifest["entries"]] == [49152] * count
    text = capsys.readouterr().out
    assert "sm_90a fwd bfloat16 D64 band" in text and "49.2" in text and f"{count} kernels" in text
    assert command(*asked) == 0
    assert capsys.readouterr().out.count("was there") == count


def test_labels_tell_kernels_apart():
    """Whatever fields the plans of an arch and a pass have."""
    args = (
        "--arch",
        *kernels.ARCHITECTURES,
        "--head-dim",
        "64",
        "128",
        "192,128",
        "--deterministic",
        "both",
        "--store",
        "x",
    )
    parsed = cli.parser().parse_args(["precompile", *args])
    plans, _ = plans_for(wanted(list(cli.problems(parsed)), (), list(kernels.ARCHITECTURES)))
    assert len(plans) >= 6 and len({cli.label(plan) for plan in plans}) == len(plans)


def test_what_is_refused_is_listed_and_makes_the_exit_code_1(fake_compiler, tmp_path, capsys):
    asked = ("--arch", "sm_90a", "--head-dim", 64, 100, "--full", "--forward-only", "--store", tmp_path / "s")
    assert command(*asked) == 1
    text = capsys.readouterr().out
    assert "REFUSED on sm_90a: depth 100" in text and "forward bfloat16 D100 full" in text and "1 refused" in text
    assert len(bundle.read_manifest(tmp_path / "s")["entries"]) == len(plans_of(AttentionSpec(), 64))
    assert command(*asked, "--skip-unsupported") == 0


def test_what_fails_is_listed_and_the_rest_is_kept(monkeypatch, tmp_path, capsys):
    (tmp_path / "one_bad_depth.py").write_text(
        "import store_fakes\n"
        "def build(plan, *, host_target):\n"
        "    if plan.depth == 128: raise ValueError('depth 128 is out of order')\n"
        "    return store_fakes.fake_build(plan, host_target=host_target)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bundle, "BUILDER", "one_bad_depth:build")
    folder = tmp_path / "s"
    assert command("--arch", "sm_90a", "--head-dim", 64, 128, "--full", "--forward-only", "--store", folder) == 1
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("FAILED  sm_90a fwd bfloat16 D128 full ")]
    assert len(lines) == len(plans_of(AttentionSpec(), 128))
    assert all(line.endswith("ValueError: depth 128 is out of order") for line in lines)
    assert (
        "sm_90a fwd bfloat16 D64 full" in text
        and "was there" not in text
        and len(bundle.read_manifest(folder)["entries"]) == len(plans_of(AttentionSpec(), 64))
    )


def test_bundles_for_other_hosts(fake_compiler, tmp_path):
    asked = ("--arch", "sm_90a", "--head-dim", 64, "--full", "--forward-only", "--store", tmp_path)
    tmp_path.chmod(0o700)
    assert command(*asked, "--host-target", "aarch64") == 0
    assert bundle.read_manifest(tmp_path)["host_target"] == "linux-aarch64"
    plan = kernels.select(Problem(AttentionSpec(), 1, 8, 8, 1, 1, 64, 64), "sm_90a")
    assert store.Store([tmp_path], host_target="linux-aarch64").find(plan) is not None
    assert store.Store([tmp_path], host_target="x86-64-v2").find(plan) is None


def test_without_a_compiler_the_missing_is_named_and_the_stored_still_served(monkeypatch, tmp_path, capsys):
    import importlib.util

    asked = ("--arch", "sm_90a", "--head-dim", 64, "--full", "--forward-only", "--store", tmp_path / "s")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "cutlass" else real(name, *a))
    assert command(*asked) == 1
    assert "pip install 'jax_fa4[compile]'" in capsys.readouterr().err
    with monkeypatch.context() as other:
        other.setattr(bundle, "BUILDER", "store_fakes:fake_build")
        assert command(*asked) == 0
    assert command(*asked) == 0  # what is there needs no compiler


def test_wrong_arguments_give_2(tmp_path, capsys):
    asked = ["--arch", "sm_90a", "--head-dim", "64", "--store", str(tmp_path / "s")]
    for wrong in (["--head-dim", "1,2,3"], ["--arch", "sm_80"], ["--dtype", "float32"], ["--sinks", "never"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["precompile", *asked, *wrong])
        assert stop.value.code == 2
    assert cli.main(["precompile", *asked, "--jobs", "0"]) == 2
    (tmp_path / "file").write_text("")
    with pytest.warns(store.StoreWarning, match="not a folder"):
        assert command(*asked[:-1], tmp_path / "file") == 2
    assert "cannot be used as a store" in capsys.readouterr().err


def test_the_export_checks_are_public():
    assert [str(c) for c in jax_fa4.export_disabled_checks()] == [
        str(jax.export.DisabledSafetyCheck.custom_call("CuteDSLRT_NvJaxCutlassCall_v2"))
    ]


def test_the_kernels_of_flax_models_are_found():
    from flax import linen, nnx

    from jax_fa4.flax import linen as ours_linen
    from jax_fa4.flax import nnx as ours_nnx

    x = jnp.ones((2, 16, 32), jnp.bfloat16)
    options = {"num_heads": 4, "is_causal": True, "dtype": jnp.bfloat16}

    class Stack(linen.Module):
        @linen.compact
        def __call__(self, x):
            return ours_linen.MultiHeadAttention(**options)(linen.remat(ours_linen.MultiHeadAttention)(**options)(x))

    model = Stack()
    params = model.init(jax.random.key(0), x)
    calls = traced.calls_in(jax.grad(lambda p, x: model.apply(p, x).astype(jnp.float32).sum()), params, x)
    assert sorted(c.problem.direction for c in calls) == ["bwd"] * 2 + ["fwd"] * 3  # one forward is done again
    assert {(c.problem.d, c.problem.spec.band) for c in calls} == {(8, True)}

    layer = ours_nnx.MultiHeadAttention(in_features=32, decode=False, rngs=nnx.Rngs(0), **options)
    step = nnx.jit(nnx.value_and_grad(lambda layer, x: layer(x).astype(jnp.float32).sum()))
    assert [c.problem.direction for c in traced.calls_in(step, layer, x)] == ["fwd", "bwd"]


def test_arrays_serve_as_shapes():
    (call,) = traced.calls_in(attend, np.zeros((2, 32, 4, 64), np.float16))
    assert call.problem.dtype == "float16"


# ---- cold start ------------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_cold_start_builds_each_kernel_once_and_nothing_with_a_filled_store(tmp_path):
    """All layers share a forward and a backward; by the compiler itself, in processes of their own."""
    out = tmp_path / "cold.json"
    command = [sys.executable, "benchmarks/cold_start.py", "--layers", "3", "--length", "256", "--out", str(out)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(out.read_text())
    assert found["empty"]["kernels"] == {"builds": 2, "disk_hits": 0}
    assert found["filled"]["kernels"] == {"builds": 0, "disk_hits": 2}
