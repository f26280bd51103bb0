"""Scaling: the script end to end on virtual devices, its byte counts, and predictions against hand-made rates."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
try:
    import predict
    import shardmeasure
finally:
    sys.path.remove(str(ROOT / "examples"))

SHAPES = {"heads": 16, "kv_heads": 4, "depth": 128}
MEASURED = [ROOT / "docs" / "measured" / f"2026-11-29_{name}.json" for name in ("h200x2_sharding", "h200_flax_step")]
TINY = ["--tokens", "16", "--heads", "4", "--kv-heads", "2", "--depth", "8", "--layers", "1", "--width", "64",
        "--length", "8", "--batch", "1", "--placed-length", "16"]  # fmt: skip


def rates(**changes):
    """1e-6 T^2 ms for attention; 100 MB a ms and more over the links."""
    known = {"quadratic": 1e-6, "linear": 0.0, "call": 0.0, "shapes": SHAPES}
    links = {"ppermute": 200.0, "all_gather": 100.0, "all_to_all": 150.0, "all_reduce": 100.0}
    return predict.Rates(**known | {"links": links} | changes)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A run on four virtual devices; less optimised code compiles in half the time."""
    folder = tmp_path_factory.mktemp("scaling")
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    files = ["--out", str(folder / "new" / "scaling.json"), "--plot", str(folder / "scaling.png")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "scaling.py"), *TINY, *files],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "all equal one device" in done.stdout and "mean nothing here" in done.stdout
    return json.loads((folder / "new" / "scaling.json").read_text()) | {"stdout": done.stdout}


def test_the_run_holds_every_part(report):
    rows = {r["what"]: r for r in report["rows"] if "predicted_ms" in r}
    ways = {f"{m} {x}" for m in ("ring", "all_gather", "all_to_all") for x in ("contiguous", "zigzag")}
    assert set(rows) == ways | {"batch sharded", "heads sharded", "model 4 x 1", "model 2 x 2"}
    for name, row in rows.items():
        assert row["error"] < 1e-5 and row["ms"] > 0 and row["predicted_ms"] > 0, name
        assert f"\n{name}" in report["stdout"]
    assert {r["length"] for r in report["rows"] if r["what"] in ways} == {4 * 16}
    assert rows["model 2 x 2"]["batch"] == 4


def test_the_compiled_program_sends_what_is_predicted(report):
    """float32, 64 tokens, four devices. XLA keeps K and V of the ring's forward turns for the backward ones."""
    rows = {r["what"]: r for r in report["rows"] if "predicted_ms" in r}
    kv = 2 * 16 * 2 * 8 * 4 / 1e6  # K and V of a device
    for layout in ("contiguous", "zigzag"):
        assert math.isclose(rows[f"all_gather {layout}"]["moved_mb"], 2 * 3 * kv, rel_tol=1e-9)
        ring = rows[f"ring {layout}"]
        assert math.isclose(ring["predicted_moved_mb"], (3 + 3 + 4) * kv, rel_tol=1e-9)
        assert math.isclose(ring["moved_mb"], (3 + 4) * kv, rel_tol=1e-9)
    for name in ("all_gather zigzag", "model 4 x 1", "model 2 x 2"):
        assert math.isclose(rows[name]["moved_mb"], rows[name]["predicted_moved_mb"], rel_tol=0.02), name
    assert rows["batch sharded"]["moved_mb"] == 0 and rows["batch sharded"]["share_ms"] > 0
    kinds = {line.split()[0] for line in rows["all_gather zigzag"]["collectives"]}
    assert kinds == {"all-gather", "reduce-scatter"}


def test_a_wrong_result_fails(monkeypatch, capsys, tmp_path):
    """The command's exit status hangs on the comparison."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import scaling

    good = {"what": "ring zigzag", "length": 8, "ms": 1.0, "error": 0.0, "moved_mb": None, "efficiency": 1.0,
            "exposed_ms": 0.0}  # fmt: skip
    guess = {"ms": 1.0, "efficiency": 1.0, "exposed_ms": 0.0, "moved_mb": 1.0}
    monkeypatch.setattr(scaling, "rates_of", lambda *_: ([], rates()))
    for error, status in ((0.0, 0), (0.5, 1), (math.nan, 1)):
        row = scaling.beside(good | {"error": error}, guess)
        monkeypatch.setattr(scaling, "measured", lambda o, r, d, report, row=row: report["rows"].append(row))
        assert scaling.main([]) == status
        assert ("FAILED: ring zigzag differs from one device" in capsys.readouterr().err) == bool(status)


@pytest.mark.parametrize("option", ["--tokens=3", "--layers=0", "--width=100"])
def test_bad_options(monkeypatch, capsys, option):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import scaling

    with pytest.raises(SystemExit) as stop:
        scaling.arguments([option])
    assert stop.value.code == 2
    assert option[-1] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("groups", "sent"),
    [("{{0,1},{2,3}}", 8), ("[2,2]<=[4]", 8), ("{}", 12), ("mesh['a'=2,'b'=2] {'a'}", 8),
     ("mesh['a'=2,'b'=2] {'a','b'}", 12), ("mesh['a'=8] {'a':(1)2}", 8), ("strange", None)],
)  # fmt: skip
def test_groups_as_hlo_writes_them(groups, sent):
    """An all-reduce of 8 bytes: 2 (g-1)/g of them."""
    text = f"%a = f32[2]{{0}} all-reduce(%b), channel_id=1, replica_groups={groups}, to_apply=%add"
    got = shardmeasure.sent_mb(text, 4)
    assert got == (None if sent is None else pytest.approx(sent / 1e6))


def test_started_collectives_count_once():
    """The asynchronous forms that GPU programs have name operands beside results."""
    text = """
      %s = (bf16[2,4], bf16[8,4]) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
      %d = bf16[8,4] all-gather-done(%s)
      %p = (f32[10], f32[10]) collective-permute-start(%y), source_target_pairs={{0,1},{1,0}}
      %q = f32[10] collective-permute-done(%p)
      %r = f32[3] reduce-scatter(%z), replica_groups=[1,4]<=[4], dimensions={0}
      %t = (f32[6], bf16[2]) all-to-all(%u, %v), replica_groups={{0,1}}
      %a = ((f32[6], bf16[2]), (f32[6], bf16[2])) all-to-all-start(%u, %v), replica_groups={{0,1}}
      %e = (f32[12], f32[3]) reduce-scatter-start(%z), replica_groups=[1,4]<=[4], dimensions={0}
    """
    assert shardmeasure.sent_mb(text, 4) == pytest.approx((48 + 40 + 36 + 14 + 14 + 36) / 1e6)
    assert shardmeasure.collectives(text)[1] == "collective-permute-start (f32[10], f32[10])"


@pytest.mark.parametrize(
    ("body", "out", "sent"),
    [(lambda x: jax.lax.all_gather(x, "x", tiled=True), P(), 3 * 32), (lambda x: jax.lax.psum(x, "x"), P(), 1.5 * 32),
     (lambda x: jax.lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]), P("x"), 32)],
)  # fmt: skip
def test_bytes_of_real_programs(body, out, sent):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("x")))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))
    assert shardmeasure.sent_mb(shardmeasure.compiled(run, (x,)).as_text(), 4) == pytest.approx(sent / 1e6)


def test_rates_come_back_from_rows_made_of_them():
    rows = [{"what": "one GPU", "length": n, "ms": 2e-6 * n**2 + 1e-3 * n} for n in (1000, 3000)]
    rows += [{"what": f"link {x}", "gb_per_s": g} for x, g in (("ppermute", 2), ("all_gather", 3), ("all_to_all", 4))]
    rows += [{"what": "one GPU", "length": 10, "batch": 4, "ms": 8.0}, {"what": "batch sharded", "ms": 4.5}]
    found = predict.Rates.of(rows, SHAPES)
    assert found.quadratic == pytest.approx(2e-6) and found.linear == pytest.approx(1e-3)
    assert found.call == pytest.approx(0.5) and found.links["all_reduce"] == 3
    ring = predict.sequence(found, 4000, 2, "ring", "zigzag")["ms"] + 0.1 * found.one_ms(4000) / 2
    again = predict.Rates.of([*rows, {"what": "ring zigzag", "length": 4000, "ms": ring}], SHAPES)
    assert again.ring_extra == pytest.approx(0.1)
    assert predict.sequence(again, 4000, 2, "ring", "zigzag")["ms"] == pytest.approx(ring)
    with pytest.raises(ValueError, match=r"two lengths and the links.*lengths \[1000\]"):
        predict.Rates.of(rows[:1], SHAPES)


def test_sequence_by_hand():
    """8192 tokens on 4 devices of one host: K and V of a device are 4.194304 MB, attention takes 67.108864 ms / 4."""
    kv, share = 2 * 2048 * 4 * 128 * 2 / 1e6, 1e-6 * 8192**2 / 4
    gathered = predict.sequence(rates(), 8192, 4, "all_gather", "zigzag")
    assert gathered["moved_mb"] == pytest.approx(6 * kv)
    assert gathered["ms"] == pytest.approx(share + 6 * kv / 100)
    assert predict.sequence(rates(), 8192, 4, "all_gather", "contiguous")["ms"] == pytest.approx(
        share * 7 / 4 + 6 * kv / 100
    )
    hidden = predict.sequence(rates(), 8192, 4, "ring", "zigzag")
    assert hidden["waiting_ms"] == pytest.approx(2 * kv / 200)  # the last turn of dK and dV, float32
    assert hidden["transfer_ms"] == pytest.approx((6 * kv + 4 * 2 * kv) / 200)
    part = rates(quadratic=1.1 * 3.5 * kv / 200 * 16 / 8192**2)  # a forward step computes for 1.1 turns of K and V
    waits = 3 * (0 + 3 - 1.1 * 2.5) + 2  # a backward one for 2.75, and K, V, dK, dV (float32) need three
    assert predict.sequence(part, 8192, 4, "ring", "zigzag")["waiting_ms"] == pytest.approx(waits * kv / 200)
    slow = predict.sequence(rates(quadratic=0.0), 8192, 4, "ring", "zigzag")
    assert slow["waiting_ms"] == pytest.approx(slow["transfer_ms"])  # nothing to hide behind
    assert not predict.possible("all_to_all", 64, SHAPES) and predict.possible("all_to_all", 8, SHAPES)


def test_work_of_the_busiest_device():
    """`imbalance` against pairs counted one by one, and zigzag order against the same."""
    from jax_fa4 import context_parallel as cp

    devices, length = 4, 64
    for layout in cp.LAYOUTS:
        order = cp.to_zigzag(jnp.arange(length), devices, 0) if layout == "zigzag" else jnp.arange(length)
        work = [sum(int(q) + 0.5 for q in part) for part in jnp.split(order, devices)]
        assert max(work) * devices / sum(work) == pytest.approx(predict.imbalance("ring", layout, devices))


def test_hosts():
    """Between hosts the network limits a ring and an all-to-all, and a gather when one card serves it."""
    fabric = predict.Fabric(host=8, network=40)
    assert fabric.turn_ms(80, 200, 8) == 0.4 and fabric.turn_ms(80, 200, 16) == 2
    assert fabric.exchange_ms(150, 150, 8) == 1
    assert fabric.exchange_ms(150, 150, 16) == pytest.approx(80 / 40)  # 8 of 15 peers are elsewhere
    assert fabric.gathering_ms(150, 100, 16, 8) == 1.5  # 80 MB through eight cards
    assert fabric.gathering_ms(150, 100, 16, 1) == pytest.approx(160 * 15 / 16 / 40)


def test_model_step_by_hand():
    model = predict.Model(layers=2, width=10, tokens=100, cut=1000, whole=50, one_ms=7.0, itemsize=2)
    row = predict.model_step(rates(), model, 4, 2)
    gradients, activations = 1.5 * (1000 / 2 + 50) * 4 / 1e6, 6 * 2 * (100 * 2) * 10 * 2 / 1e6
    assert row["moved_mb"] == pytest.approx(gradients + activations)
    assert row["ms"] == pytest.approx(7 + (gradients + activations) / 100)
    assert predict.model_step(rates(), model, 1, 1)["ms"] == 7


def test_measured_times_are_predicted():
    """Two H200s: every context-parallel row within 6 % of what one GPU and the links give."""
    report = json.loads(MEASURED[0].read_text())
    found = predict.Rates.of(report["rows"], report["shapes"], ring=False)
    rows = [r for r in report["rows"] if "moved_mb" in r]
    assert len(rows) == 12
    for r in rows:
        guess = predict.sequence(found, r["length"], 2, *r["what"].split())
        assert guess["ms"] == pytest.approx(r["ms"], rel=0.06), r["what"]


def test_the_page_is_what_the_command_writes(tmp_path):
    """The page names its reports; made again from them it is the same, to the letter."""
    page = (ROOT / "docs" / "scaling.md").read_text()
    command = next(x for x in page.splitlines() if x.startswith("python examples/predict.py"))
    names = [str(ROOT / x) for x in command.split() if x.endswith(".json")]
    assert predict.main([*names, "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text() == page
    for count in ("8", "64", "512"):
        assert sum(line.startswith(f"| {count} |") for line in page.splitlines()) == 6


def test_a_page_needs_two_gpus(capsys):
    with pytest.raises(SystemExit):
        predict.main([str(MEASURED[1])])
    assert "none of these is: 2026-11-29_h200_flax_step.json" in capsys.readouterr().err
