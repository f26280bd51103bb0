"""Bulk additions as plain stores of the same bytes: a stricter question, which the verifier answers in a quarter of the
time.

Of `cp.reduce.async.bulk` sentryward 0.1.1 makes an atomic access for each element, and with one atomic access in a
kernel it compares all pairs of accesses instead of families of them (a backward step of two heads, D 128: 121 s, and
30 s with stores). A store reads the same bytes of shared memory and writes the same bytes of global memory, in the same
bulk group. The only difference to the memory model is that two additions to one place are no race and two stores are.
So what is race-free with stores is race-free with additions; the converse does not hold, and a finding decides neither.

Plain bulk stores it has no words for, hence a tensor map: the buffer as one row of float32, stored to by boxes of 256
elements, as many as an addition is long.
"""

from __future__ import annotations

import re
from dataclasses import replace

from launch import Launch, Parameter, TensorMap

ADDITION = re.compile(
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32 \[(%rd\d+)\], \[(%r\d+)\], (\d+);"
)
BYTES = 1024  # of a store: a box has at most 256 elements in a dimension
EVERYWHERE = 1 << 30  # elements: no place that an addition can reach is outside


def has_additions(launch: Launch) -> bool:
    return bool(ADDITION.search(launch.ptx, *_body(launch)))


def additions_as_stores(launch: Launch, buffer: str) -> Launch:
    """The launch with a parameter more, a map of the buffer, all of whose additions stand as stores by it.

    A place is what lies between its address and the buffer's, so an addition to another buffer has no place, and no
    verdict. Lines keep their numbers.
    """
    start, end = _body(launch)
    head, _, body = launch.ptx[start:end].partition("\n{")
    which = next(p.index for p in launch.parameters if p.kind == "pointer" and p.name == buffer)
    new = len(launch.parameters)
    head = re.sub(r"\n\)", f", .param .align 64 .b8 {launch.entry}_param_{new}[128]\n)", head, count=1)
    before = (
        " .reg .b32 %element; .reg .b64 %added, %buffer, %map;"
        f" ld.param.b64 %buffer, [{launch.entry}_param_{which}];"
        f" mov.b64 %map, {launch.entry}_param_{new}; cvta.param.u64 %map, %map;"
    )
    # registers are declared before the first instruction
    first = re.search(r"\n(?=\s*(?!\.reg|//)\w)", body)
    assert first is not None, "a kernel without instructions"
    body = body[: first.start()] + before + body[first.start() :]
    return replace(
        launch,
        ptx=launch.ptx[:start] + head + "\n{" + ADDITION.sub(_store, body) + launch.ptx[end:],
        parameters=(*launch.parameters, Parameter(new, "map", buffer, _whole(buffer))),
    )


def _store(addition: re.Match) -> str:
    place, at, size = addition[1], addition[2], int(addition[3])
    if size % BYTES:
        raise ValueError(f"an addition of {size} bytes, which is no multiple of {BYTES}")
    made = f"sub.s64 %added, {place}, %buffer; shr.u64 %added, %added, 2; cvt.u32.u64 %element, %added;"
    for i in range(size // BYTES):
        made += f" add.s32 %element, %element, {BYTES // 4};" if i else ""
        made += f" cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%map, {{%element}}], [{at}+{i * BYTES}];"
    return made


def _whole(buffer: str) -> TensorMap:
    return TensorMap(buffer, "float32", (EVERYWHERE,), (), (BYTES // 4,), 0, True)


def _body(launch: Launch) -> tuple[int, int]:
    start = launch.ptx.index(f".entry {launch.entry}(")
    return start, launch.ptx.find(".entry ", start + 1) % (len(launch.ptx) + 1)
