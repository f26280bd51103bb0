"""Bulk additions stand as stores of the same bytes before the verifier: what that asks is more, never less."""

from dataclasses import replace

import numpy as np
import pytest
from emulator import run as emulate
from launch import Launch, Parameter, to_emulator
from verifier import run
from verifier.mutate import drop
from verifier.stores import ADDITION, additions_as_stores, has_additions

verifies = pytest.mark.skipif(bool(run.missing()), reason=run.missing() or "-")
WAIT = r"cp\.async\.bulk\.wait_group\.read[^\n]*"

# 32 threads fill 2 KiB; one adds them to the row of its CTA, waits until they have been read, and fills a word again.
TEXT = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 128 .b8 room[];
.visible .entry adds(
\t.param .u64 .ptr .global .align 16 adds_param_0,
\t.param .u64 .ptr .global .align 16 adds_param_1,
\t.param .u32 adds_param_2
)
.reqntid 32, 1, 1
{
\t.reg .pred %p<2>;
\t.reg .b32 %r<12>;
\t.reg .b64 %rd<8>;
\tmov.u32 %r1, %tid.x;
\tmov.u32 %r2, %ctaid.x;
\tld.param.b32 %r3, [adds_param_2];
\tmov.b32 %r4, room;
\tmul.lo.s32 %r5, %r1, 16;
\tadd.s32 %r6, %r4, %r5;
\tmov.b32 %r7, 0f3F800000;
\tst.shared.v4.b32 [%r6], {%r7, %r7, %r7, %r7};
\tst.shared.v4.b32 [%r6+512], {%r7, %r7, %r7, %r7};
\tst.shared.v4.b32 [%r6+1024], {%r7, %r7, %r7, %r7};
\tst.shared.v4.b32 [%r6+1536], {%r7, %r7, %r7, %r7};
\tfence.proxy.async.shared::cta;
\tbar.sync 0;
\tsetp.ne.s32 %p1, %r1, 0;
\t@%p1 bra $done;
\tld.param.b64 %rd1, [adds_param_0];
\tmul.lo.s32 %r8, %r2, %r3;
\tcvt.u64.u32 %rd2, %r8;
\tadd.s64 %rd3, %rd1, %rd2;
\tcp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd3], [%r4], 2048;
\tcp.async.bulk.commit_group;
\tcp.async.bulk.wait_group.read 0;
\tst.shared.b32 [%r4+2044], %r7;
\tcp.async.bulk.wait_group 0;
$done:
\tret;
}
"""


def launched(step: int, text: str = TEXT) -> Launch:
    """Of two CTAs, which add to places so many bytes apart."""
    parameters = (
        Parameter(0, "pointer", "work", "work"),
        Parameter(1, "pointer", "other", "other"),
        Parameter(2, "int32", "step", step),
    )
    buffers = {"work": ("float32", (1024,)), "other": ("float32", (1024,))}
    return Launch("adds", text, (2, 1, 1), 32, 1, 2048, parameters, buffers)


def as_stores(step: int, text: str = TEXT) -> Launch:
    return additions_as_stores(launched(step, text), "work")


@verifies
def test_both_are_safe_where_places_are_apart():
    for one in (launched(2048), as_stores(2048)):
        assert run.judge(one).safe


@verifies
def test_what_is_written_before_it_was_read_is_caught_in_both():
    for one in (launched(2048), as_stores(2048)):
        # the last word alone, and the other wait does not help: so all that is read counts, up to its end
        verdict = run.judge(replace(one, ptx=drop(WAIT, 0)(one.ptx)))
        assert verdict.result == "potential_race", verdict


@verifies
@pytest.mark.parametrize("step", [0, 1024, 2044])
def test_stores_to_one_place_are_a_race_and_additions_are_none(step):
    """The stricter of both, down to the last element that two CTAs have in common."""
    if step % 16 == 0:
        assert run.judge(launched(step)).safe
    verdict = run.judge(as_stores(step))
    assert verdict.result == "potential_race", verdict


@verifies
def test_an_addition_to_another_buffer_has_no_verdict():
    verdict = run.judge(as_stores(2048, TEXT.replace("[adds_param_0]", "[adds_param_1]")))
    assert not verdict.safe and verdict.result != "potential_race", verdict


def test_stores_go_where_additions_go():
    memory = {"work": np.zeros(1024, np.float32), "other": np.zeros(1024, np.float32)}
    stores = as_stores(2048)
    *before, added = stores.parameters
    stores = replace(stores, parameters=(*before, replace(added, value=replace(added.value, shape=(1024,)))))
    for one in (launched(2048), stores):
        found = emulate(one.ptx, to_emulator(one), memory, seed=2).check().outputs
        assert np.array_equal(found["work"], np.ones(1024, np.float32)) and not found["other"].any()


def test_only_additions_change_and_lines_keep_their_numbers():
    before, after = TEXT.splitlines(), as_stores(2048).ptx.splitlines()
    assert len(before) == len(after)
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    assert [bool(ADDITION.search(line)) for line in changed] == [False, False, True]
    assert "adds_param_2" in changed[0] and ".reg .b64" in changed[1]
    assert has_additions(launched(2048)) and not has_additions(as_stores(2048))


def test_what_is_no_multiple_of_a_store_is_refused():
    with pytest.raises(ValueError, match="an addition of 1040 bytes, which is no multiple of 1024"):
        as_stores(2048, TEXT.replace("2048;", "1040;"))
