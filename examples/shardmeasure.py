"""Measures attention over several devices: times, bytes that the compiled program sends, errors against one device.

Times are medians of whole compiled programs, forward and backward, dispatch included. efficiency = time on one device /
(devices x time). exposed = time beyond the busiest device's share of the one-device time (`predict.imbalance`): what
transfers, launches and merges cost that computing does not hide.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import predict
from context_parallel import distance, inputs, with_gradients
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import context_parallel as cp

_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\((.*)")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]|(\{\})|mesh\[(.*?)\].*?\{(.*?)\})")


def milliseconds(run: Any, given: Any, samples: int = 5) -> float:
    """Median of whole programs, after two that warm up; programs of over half a second run three times."""
    found: list[float] = []
    for i in range(samples + 2):
        start = time.perf_counter()
        jax.block_until_ready(run(*given))
        found.append((time.perf_counter() - start) * 1e3)
        if i >= 3 and found[-1] > 500:
            break
    return statistics.median(found[2:])


def compiled(run: Any, given: Any) -> Any:
    """The program for these operands, compiled once for all that is asked of it."""
    return run.lower(*given).compile()


def temporary_mb(program: Any) -> float:
    """Compiled temporary memory of one device."""
    return program.memory_analysis().temp_size_in_bytes / 1e6


def sent_mb(text: str, devices: int) -> float | None:
    """MB that one device sends in one run of the compiled HLO `text`, by ring algorithms; None if it cannot be read.

    Each of g devices sends (g-1)/g of what a gather gives or an all-to-all holds, g-1 times what a reduce-scatter
    gives, 2 (g-1)/g of what an all-reduce sums, all that a permute gives. A collective inside a loop counts once.
    """
    total = 0.0
    for found in _COLLECTIVE.finditer(text):
        shape, kind, start, rest = found.groups()
        size = sum(_bytes(*x) for x in _ARRAY.findall(shape))
        if kind == "collective-permute":
            total += size / 2 if start else size  # the started form names its operand beside its result
            continue
        g = _group_size(rest, devices)
        if g is None:
            return None
        if start:  # these name their operand beside their result, in one shape
            size *= {"all-gather": g / (g + 1), "reduce-scatter": 1 / (g + 1), "all-to-all": 1 / 2}.get(kind, 1)
        total += size * {"all-reduce": 2 * (g - 1) / g, "reduce-scatter": g - 1}.get(kind, (g - 1) / g)
    return total / 1e6


def collectives(text: str) -> list[str]:
    """What sent_mb counted, an entry each: kind, whether it is the started form, and the shape that HLO names."""
    return [
        f"{kind}{start or ''} {shape}" for shape, kind, start, _ in (x.groups() for x in _COLLECTIVE.finditer(text))
    ]


def _group_size(rest: str, devices: int) -> int | None:
    """Devices of a group: {{0,1},{2,3}}, [2,2]<=[4], {} for all, mesh['a'=2,'b'=2] {'a'}; 'a':(1)2 is a part of 'a'."""
    groups = _GROUPS.search(rest)
    if groups is None:
        return None
    listed, counted, everything, axes, named = groups.groups()
    if everything:
        return devices
    if counted or listed:
        return int(counted) if counted else len(listed.split(","))
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes))
    found = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named)
    return math.prod(int(part or sizes[name]) for name, part in found) if found else None


def _bytes(dtype: str, shape: str) -> float:
    """Of one array as HLO writes it; bool and 8-bit types take a byte."""
    bits = int(re.sub(r"\D", "", dtype) or 8)
    return math.prod(int(x) for x in shape.split(",") if x) * bits / 8


def alone(length: int, shapes: dict[str, int], dtype: Any = jnp.bfloat16) -> tuple[dict[str, Any], Any, Any]:
    """(row, operands, results) of causal attention on one device."""
    arrays = inputs(length, shapes["heads"], shapes["kv_heads"], shapes["depth"], dtype)
    run = compiled(with_gradients(functools.partial(jax_fa4.attention, is_causal=True)), arrays)
    want, ms = run(*arrays), milliseconds(run, arrays)
    flops = 3.5 * 4 * shapes["heads"] * shapes["depth"] * length**2 / 2
    row = {"what": "one GPU", "length": length, "ms": ms, "tflops": flops / ms / 1e9, "mb": temporary_mb(run)}
    return row, arrays, want


def sequence_rows(
    length: int, shapes: dict[str, int], mesh: Any, dtype: Any = jnp.bfloat16, ways: Any = (cp.MODES, cp.LAYOUTS)
) -> list[dict[str, Any]]:
    """One device against the sequence over all of them, for each mode and layout that the heads allow."""
    size = mesh.shape["x"]
    first, arrays, want = alone(length, shapes, dtype)
    one, rows = first["ms"], [first]
    print(say(first), flush=True)
    place = NamedSharding(mesh, P(None, "x"))
    for layout in ways[1]:
        order = functools.partial(cp.to_zigzag, devices=size) if layout == "zigzag" else lambda x: x
        given, wanted = (jax.device_put([order(x) for x in xs], place) for xs in (arrays, want))
        for mode in ways[0]:
            if not predict.possible(mode, size, shapes):
                print(f"{mode}: {shapes['heads']}:{shapes['kv_heads']} heads do not divide over {size}; left out")
                continue
            call = functools.partial(cp.attention, mesh=mesh, axis="x", mode=mode, layout=layout, is_causal=True)
            run = compiled(with_gradients(call), given)
            error = distance(list(run(*given)), wanted)
            ms, text = milliseconds(run, given), run.as_text()
            rows.append(
                {
                    "what": f"{mode} {layout}",
                    "length": length,
                    "ms": ms,
                    "efficiency": one / size / ms,
                    "exposed_ms": ms - one / size * predict.imbalance(mode, layout, size),
                    "moved_mb": sent_mb(text, size),
                    "collectives": collectives(text),
                    "error": error,
                    "mb": temporary_mb(run),
                }
            )
            print(say(rows[-1]), flush=True)
    return rows


def link_rows(mesh: Any, megabytes: int = 256) -> list[dict[str, Any]]:
    """Rates of the collectives alone, GB/s sent by each device."""
    size = mesh.shape["x"]
    x = jax.device_put(jnp.ones((size, megabytes * 500_000 // 4, 4), jnp.bfloat16), NamedSharding(mesh, P("x")))
    turn = [(r, (r + 1) % size) for r in range(size)]
    programs = {
        "ppermute": (lambda x: jax.lax.ppermute(x, "x", turn), P("x"), 1),
        "all_gather": (lambda x: jax.lax.all_gather(x, "x", axis=0, tiled=True)[:1], P("x"), size - 1),
        "all_to_all": (lambda x: jax.lax.all_to_all(x[0], "x", 0, 0, tiled=True)[None], P("x"), (size - 1) / size),
        "all_reduce": (lambda x: jax.lax.psum(x, "x"), P(), 2 * (size - 1) / size),
    }
    rows = []
    for name, (body, out, share) in programs.items():
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=out, check_vma=False))
        ms = milliseconds(run, (x,))
        rows.append({"what": f"link {name}", "gb_per_s": share * x.nbytes / size / ms / 1e6, "ms": ms})
        print(say(rows[-1]), flush=True)
    return rows


def placed_rows(
    shapes: dict[str, int], mesh: Any, length: int = 8192, dtype: Any = jnp.bfloat16
) -> list[dict[str, Any]]:
    """Batch over the devices, heads over the devices: the same work as one device, divided."""
    size, n, k = mesh.shape["x"], shapes["heads"], shapes["kv_heads"]
    keys = jax.random.split(jax.random.key(1), 4)
    arrays = [
        jax.random.normal(key, (2 * size, length, h, shapes["depth"]), dtype)
        for key, h in zip(keys, (n, k, k, n), strict=True)
    ]
    call = with_gradients(functools.partial(jax_fa4.attention, is_causal=True))
    run = compiled(call, arrays)
    want, one = run(*arrays), milliseconds(run, arrays)
    rows: list[dict[str, Any]] = [{"what": "one GPU", "length": length, "batch": 2 * size, "ms": one}]
    print(say(rows[0]), flush=True)
    cut_heads = P(None, None, "x")
    ways = {"batch": (P("x"), P("x")), "heads": (cut_heads, P() if k % size else cut_heads)}
    for what, (spec, key_spec) in ways.items():
        if what == "heads" and n % size:
            print(f"heads sharded: {n} heads do not divide over {size} devices; left out")
            continue
        specs = (spec, key_spec, key_spec, spec)
        given = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
        run = compiled(call, given)
        got, ms, text = run(*given), milliseconds(run, given), run.as_text()
        local = [jax.device_put(x.addressable_shards[0].data, jax.devices()[0]) for x in given]
        if what == "heads" and k % size:  # whole key heads everywhere, of which a device's queries see their own
            local[1:3] = [x[:, :, : max(1, k // size)] for x in local[1:3]]
        share = milliseconds(compiled(call, local), local)
        rows.append(
            {
                "what": f"{what} sharded",
                "length": length,
                "batch": 2 * size,
                "ms": ms,
                "efficiency": one / size / ms,
                "exposed_ms": ms - one / size,
                "share_ms": share,  # a device's part, on one device alone: what a smaller call loses of its own accord
                "moved_mb": sent_mb(text, size),
                "all_gathers": len(re.findall(r" all-gather(-start)?\(", text)),
                "error": distance(got, want),
            }
        )
        print(say(rows[-1]), flush=True)
    return rows


def call_row(shapes: dict[str, int], mesh: Any, dtype: Any = jnp.bfloat16, length: int = 128) -> dict[str, Any]:
    """What a call costs that computes next to nothing: on one device, and with its batch over all of `mesh`."""
    size = mesh.shape["x"]
    heads = (shapes[x] for x in ("heads", "kv_heads", "kv_heads", "heads"))
    arrays = [jnp.ones((size, length, h, shapes["depth"]), dtype) for h in heads]
    call = with_gradients(functools.partial(jax_fa4.attention, is_causal=True))
    given = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in arrays]
    return {
        "what": "small call",
        "length": length,
        "one_ms": milliseconds(compiled(call, arrays), arrays, 20),
        "ms": milliseconds(compiled(call, given), given, 20),
    }


def say(row: dict[str, Any]) -> str:
    """A row on one line."""
    head, rest = f"{row['what']:24s}", {key: x for key, x in row.items() if key not in ("what", "collectives")}
    return head + "  ".join(f"{key} {x:.4g}" if isinstance(x, float) else f"{key} {x}" for key, x in rest.items())
