"""Lanes of a warp that may run apart at a barrier: the form that hung on an H200 is found, ours are not of it."""

import importlib.util

import pytest
from ptx_lanes import lanes

from jax_fa4.kernels import select
from jax_fa4.spec import AttentionSpec, Problem

# A reduce warp: all lanes wait for a full part, lane 0 spins for its turn, adds, and frees the part.
HUNG = """
.visible .entry reduce()
{
	mov.u32 	%r1, %laneid;
	setp.ne.b32 	%p1, %r1, 0;
	mov.b32 	%r2, 0;
$L__ROUND:
	// begin inline asm
	{
	.reg .pred       P1;
	LAB_WAIT:
	mbarrier.try_wait.parity.shared.b64 P1, [%r4], %r2, 10000000;
	@P1 bra.uni DONE;
	bra.uni     LAB_WAIT;
	DONE:
	}
	// end inline asm
	@%p1 bra 	$L__OTHERS;
$L__SPIN:
	ld.acquire.gpu.global.b32 	%r5, [%rd1];
	setp.ne.b32 	%p2, %r5, %r6;
	@%p2 bra 	$L__SPIN;
	mbarrier.arrive.shared.b64 	%rd2, [%r7], %r8;
$L__OTHERS:
	xor.b32 	%r2, %r2, 1;
	add.s32 	%r3, %r3, 1;
	setp.ne.b32 	%p3, %r3, 32;
	@%p3 bra 	$L__ROUND;
	ret;
}
"""
CURES = {
    "bar.warp.sync": HUNG.replace("$L__OTHERS:\n", "$L__OTHERS:\n\tbar.warp.sync \t-1;\n"),
    "elect.sync": HUNG.replace("\t@%p1 bra", "\telect.sync \t%r9|%p1, -1;\n\t@%p1 bra"),
    "one lane is the role": HUNG.replace("$L__ROUND:", "\t@%p1 bra \t$L__END;\n$L__ROUND:", 1).replace(
        "\tret;", "$L__END:\n\tret;"
    ),
    "a warp's predicate": HUNG.replace("mov.u32 \t%r1, %laneid", "shfl.sync.idx.b32 \t%r1, %r0, 0, 31, -1"),
}  # fmt: skip
OURS = {
    "Hopper forward": ("sm_90a", "fwd", 64, {}),
    "Hopper backward": ("sm_90a", "bwd", 128, {}),
    "Hopper backward in order": ("sm_90a", "bwd", 128, {"deterministic": True}),
    "Hopper backward in order among segments": ("sm_90a", "bwd", 128, {"deterministic": True, "segments": True}),
    "Blackwell forward": ("sm_100a", "fwd", 128, {"band": True}),
    "Blackwell backward in order": ("sm_100a", "bwd", 64, {"deterministic": True}),
}


def test_the_form_that_hung_is_found():
    (found,) = lanes(HUNG)
    assert found.rule == "lanes" and "mbarrier.try_wait" in found.text


@pytest.mark.parametrize("name", CURES)
def test_what_holds_the_lanes_together(name):
    assert CURES[name] != HUNG and lanes(CURES[name]) == []


def test_the_meeting_must_be_on_every_way():
    """A sync that only the others pass, or that lies outside the loop, holds nobody."""
    beside = HUNG.replace("$L__OTHERS:\n", "\tbra.uni \t$L__JOIN;\n$L__OTHERS:\n\tbar.warp.sync \t-2;\n$L__JOIN:\n")
    before = HUNG.replace("$L__ROUND:\n", "\tbar.warp.sync \t-1;\n$L__ROUND:\n")
    assert [f.rule for f in lanes(beside)] == [f.rule for f in lanes(before)] == ["lanes"]


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")
@pytest.mark.parametrize("name", OURS)
def test_our_kernels_keep_their_lanes_together(name):
    from jax_fa4.ffi.compile import build

    arch, direction, depth, spec = OURS[name]
    problem = Problem(AttentionSpec(**spec), 1, 4096, 4096, 1, 1, depth, depth, "bfloat16", direction)
    assert lanes(build(select(problem, arch), keep_ptx=True).ptx) == []
