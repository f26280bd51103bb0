"""The comparison with peers, on a CPU at toy size: FlashAttention-4's plans and buffers, the checks, the table."""

import importlib
import json
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fa4 import benchmark
from jax_fa4.cases import Case
from jax_fa4.ffi import runtime

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
TOY = {causal: Case(64, 72, 2, 2, causal=causal) for causal in (False, True)}
BLOCK = """
from torch import nothing_of_it_is_run
@dataclass(frozen=True)
class FwdConfig:
    m_block_size: int
def _tile_size_fwd_sm90(depth, value_depth, causal, local):
    assert (depth, value_depth, causal, local) == (64, 64, True, False)
    return FwdConfig({rows})
"""


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("peers")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def hopper(peers):
    return sys.modules["fa4_hopper"]


@pytest.fixture
def dense(peers, hopper, monkeypatch):
    """Float32 formulas in place of FlashAttention-4's objects, by the names and shapes of its buffers."""

    def forward(plan, q, k, v):
        scores = jnp.einsum("btnd,bsnd->bnts", q, k) * plan.depth**-0.5
        t, s = scores.shape[-2:]
        scores = jnp.where(jnp.tri(t, s, dtype=bool) | (not plan.causal), scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        return jnp.exp(scores - lse[..., None]), lse

    def made(plan, artifact, operands, shapes):
        assert artifact == plan, "the plan's own object"
        extents = plan.extents(shapes)
        assert set(operands) >= {b.name for b in plan.inputs}
        x = {b.name: operands[b.name].astype(jnp.float32) for b in plan.inputs}
        assert all(x[b.name].shape == b.sized(extents) for b in plan.inputs)
        p, lse = forward(plan, x["q"], x["k"], x["v"])
        if isinstance(plan, hopper.Fa4Forward):
            out = {"out": jnp.einsum("bnts,bsnd->btnd", p, x["v"]), "lse": lse}
        else:  # from out and LSE as they are given
            p *= jnp.exp(lse - x["lse"])[..., None]
            delta = (x["out"] * x["dout"]).sum(-1).swapaxes(1, 2)[..., None]
            ds = p * (jnp.einsum("btnd,bsnd->bnts", x["dout"], x["v"]) - delta) * plan.depth**-0.5
            sums = {"dq": ("bnts,bsnd->btnd", ds, "k"), "dk": ("bnts,btnd->bsnd", ds, "q")}
            sums["dv"] = ("bnts,btnd->bsnd", p, "dout")
            out = {name: jnp.einsum(how, a, x[b]) for name, (how, a, b) in sums.items()}
        return {b.name: out[b.name].astype(b.dtype) for b in plan.outputs if b.role == "out"}

    monkeypatch.setattr(peers.call, "call", made)
    monkeypatch.setattr(peers.call, "compiled", lambda plan: plan)
    monkeypatch.setattr(peers, "SECONDS", 1e-4)
    monkeypatch.setattr(benchmark, "SETS", 1)


def xla(causal):
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")


def test_everybody_is_checked_and_then_timed(peers, dense, monkeypatch):
    def swapped(causal):
        """Right but for two gradients, in each other's place."""

        @jax.custom_vjp
        def attend(q, k, v):
            return xla(causal)(q, k, v)

        def backward(saved, dout):
            dq, dk, dv = jax.vjp(xla(causal), *saved)[1](dout)
            return dq, dv, dk

        attend.defvjp(lambda *x: (attend(*x), x), backward)
        return attend

    def raising(*_):
        raise NotImplementedError("not on this card")

    def nan(_):
        return lambda q, k, v: v.at[0, 0, 0, 0].set(jnp.nan)

    kinds = {"fa4": peers.fa4, "swapped": swapped, "nan": nan, "raises": lambda _: raising}
    monkeypatch.setattr(peers, "implementations", lambda case, names: {n: kinds[n](case.causal) for n in names})
    case = TOY[True]
    rows = {row.name: row for row in peers.measure(case, list(kinds), 2)}
    row = rows.pop("fa4")
    assert not row.note and set(row.errors) == {"out", "dq", "dk", "dv"} and max(row.errors.values()) < 6e-3
    assert {which: len(found) for which, found in row.samples.items()} == dict.fromkeys(peers.PASSES, 2)
    assert row.seconds["alone"] == np.median(row.samples["alone"]) and set(row.tflops) == {"fwd", "bwd", "alone"}
    assert not any(row.tflops or row.samples for row in rows.values()), "who is wrong gets no number"
    assert rows["swapped"].errors["out"] < 6e-3 and rows["swapped"].errors["dk"] > 0.1
    assert "wrong" in rows["swapped"].note and "wrong: nan" in rows["nan"].note
    assert "not on this card" in rows["raises"].note


def test_what_fails_or_has_no_time_is_named(peers, monkeypatch, tmp_path):
    first, second = TOY.values()
    args = peers.parser().parse_args(["time", "--seconds", "60", "--out", str(tmp_path / "r.json")])
    monkeypatch.setattr(benchmark, "matmul_tflops", lambda: 700.0)

    def measure(case, names, samples):
        if case == first:
            raise MemoryError("too large")
        return [peers.Row(case.label, "ours", tflops={"fwd": 1.0, "bwd": 2.0, "alone": 3.0})]

    monkeypatch.setattr(peers, "measure", measure)
    found = peers.take([first, second], args)
    assert found["left"] == [first.label] and [r["case"] for r in found["rows"]] == [second.label]
    assert json.loads((tmp_path / "r.json").read_text()) == found
    args.seconds = 0.0
    assert peers.take([second], args)["left"] == [second.label]


def test_the_measure_of_right_is_float32_attention(peers):
    for case in [TOY[True]]:
        q, k, v, dout = benchmark.inputs(case)[0]
        wide = [x.astype(jnp.float32) for x in (q, k, v, dout)]
        out, back = jax.vjp(xla(case.causal), *wide[:3])
        for got, want in zip(peers.exact(case)(q, k, v, dout), (out, *back(wide[3])), strict=True):
            assert got.dtype == jnp.float32 and benchmark.error(got, want) < 1e-5


@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_buffers_reach_the_handler_in_their_order(peers, monkeypatch, depth, causal):
    """The calls as XLA for CUDA gets them: two kernels, each with its operands and its results and scratch."""

    class Artifact:
        object, digest = b"an object", "its digest"

    monkeypatch.setattr(peers.call, "compiled", lambda plan: Artifact)
    b, t, s, n = 2, 200, 328, 3
    q, k = (jax.ShapeDtypeStruct((b, length, n, depth), jnp.bfloat16) for length in (t, s))
    grads = jax.jit(lambda q, k, v, dout: jax.vjp(peers.fa4(causal), q, k, v)[1](dout))
    text = grads.trace(q, k, k, q).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if runtime.TARGET in line]
    rows, keys, line = f"{b}x{t}x{n}x{depth}xbf16", f"{b}x{s}x{n}x{depth}xbf16", f"{b}x{n}x{t}xf32"
    padded = -(-t // {64: 128, 128: 64 if causal else 80}[depth]) * {64: 128, 128: 64 if causal else 80}[depth]
    scratch = [f"{b}x{n}x{padded}xf32"] * 2 + [f"{b}x{n}x{padded}x{depth}xf32"]
    wanted = [([rows, keys, keys], [rows, line]), ([rows, keys, keys, rows, rows, line], [rows, keys, keys, *scratch])]
    for text, (given, made) in zip(calls, wanted, strict=True):
        operands, results = text.rsplit(" : ", 1)[1].split(" -> ")
        assert [x.strip("() ").removeprefix("tensor<").rstrip(">") for x in operands.split(", ")] == given
        assert [x.strip("() ").removeprefix("tensor<").rstrip(">") for x in results.split(", ")] == made


def test_the_package_chooses_the_form(hopper, monkeypatch, tmp_path):
    at = tmp_path / "flash_attn" / "cute"
    at.mkdir(parents=True)
    monkeypatch.setenv(hopper.ENV, str(tmp_path))
    plan = hopper.Fa4Forward(64, True)
    (at / "interface.py").write_text(BLOCK.format(rows=192))
    assert hopper.chosen(plan).m_block_size == plan.rows == 192
    (at / "interface.py").write_text(BLOCK.format(rows=128))
    with pytest.raises(ValueError, match=r"has 192 queries a tile; .*m_block_size=128"):
        hopper.chosen(plan)


def test_columns(peers):
    cases = peers.columns([64, 128], [1024, 4096, 16384])
    assert len({case.label for case in cases}) == 12
    assert {(c.batch * c.length, c.heads * c.depth, c.dtype, c.kv_heads) for c in cases} == {
        (16384, 2048, "bfloat16", 0)
    }
    assert {(c.depth, c.causal, c.length) for c in cases} == {
        (d, causal, n) for d in (64, 128) for causal in (False, True) for n in (1024, 4096, 16384)
    }


def test_the_table_and_its_means(peers, tmp_path, monkeypatch, capsys):
    a, b = (Case(128, 4096, 4, 16, causal=causal).label for causal in (False, True))

    def row(case, name, x, note=""):
        return {"case": case, "name": name, "tflops": x and {"fwd": x, "bwd": x / 2, "alone": x / 4}, "note": note}

    rows = [row(b, "ours", 400.0), row(b, "cudnn", 100.0), row(b, "fa4", 500.0), row(b, "tokamax", {}, "not here")]
    rows += [row(a, "ours", 300.0), row(a, "cudnn", 300.0), row(a, "fa4", 200.0), row(a, "tokamax", 250.0)]
    found = peers.ratios({a: {"ours": 300.0, "cudnn": 300.0, "fa4": 200.0, "tokamax": 250.0}, b: {"ours": 4.0}})
    assert found[a]["ours/best peer"] == 1.0 and found[a]["fa4/cudnn"] == pytest.approx(2 / 3)
    assert all(math.isnan(x) for x in found[b].values()), "no ratio without both numbers"
    assert peers.mean([2.0, 8.0, math.nan]) == pytest.approx(4.0) and math.isnan(peers.mean([math.nan]))
    (tmp_path / "r.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(sys, "argv", ["peers.py", "table", str(tmp_path / "r.json")])
    assert peers.main() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "forward ours cudnn fa4 tokamax ours/cudnn fa4/cudnn tokamax/cudnn ours/best peer".split()
    assert lines[1][-8:] == "300 300 200 250 1.000 0.667 0.833 1.000".split() and "full" in lines[1]
    assert lines[2][-8:] == "400 100 500 - 4.000 5.000 - 0.800".split() and "causal" in lines[2]
    assert lines[3] == "geometric mean 2.000 1.826 0.833 0.894".split()
    assert lines[7][-8:-4] == "200 50 250 -".split() and lines[-1] == f"{b} tokamax: not here".split()


def test_readme_tells_where_we_are_behind(peers, capsys, monkeypatch):
    """If it fails: put what `python benchmarks/peers.py brief REPORT` prints into README.md."""
    readme = (ROOT / "README.md").read_text()
    (name,) = re.findall(r"docs/measured/(\S*_h200_peers\.json)", readme)
    monkeypatch.setattr(sys, "argv", ["peers.py", "brief", str(ROOT / "docs" / "measured" / name)])
    assert peers.main() == 0
    text = capsys.readouterr().out.strip()
    assert text in readme and "| forward D128 causal |" in text


def test_what_is_behind_is_bold(peers):
    case, other = (Case(64, n, 16384 // n, 32).label for n in (1024, 4096))
    rates = {case: {"ours": 200.0, "cudnn": 100.0, "fa4": 400.0}, other: {"ours": 200.0, "cudnn": 100.0}}
    rows = [
        {"case": c, "name": name, "tflops": {"fwd": x, "bwd": 100.0}}
        for c, of in rates.items()
        for name, x in of.items()
    ]
    lines = peers.brief([*rows, {"case": other, "name": "fa4", "tflops": {}}]).splitlines()
    assert (
        lines[0] == "| ours / best peer | 1k | 4k | mean |"
        and lines[2] == "| forward D64 full | **0.50** | 2.00 | 1.00 |"
    )
    assert lines[3] == "| forward, all |  |  | 1.00 |" and lines[5] == "| backward, all |  |  | 1.00 |"
