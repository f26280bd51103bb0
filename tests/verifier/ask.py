"""The one call of sentryward, by either search of its memory check. Needs nothing of ours: it travels with a folder."""

from __future__ import annotations

from typing import Any


def ask(ptx: str, *, every_order: bool = False, timeout_seconds: int, memory_limit_mib: int, **words: Any) -> Any:
    """What `sentryward.verify` returns.

    every_order: conflicting accesses are put in an order that must hold, one after the other, instead of compared
    by families of alike ones. Where warps differ, as those of segments do, families are hardly larger than one, and
    comparing them has taken 826 s where this takes 59 s (a backward step with segments, D 128). Both searches are
    complete. This one does not know of stores that several lanes make alike: it calls them races, the other warns.
    """
    if not every_order:
        from sentryward import verify

        return verify(ptx, **words, timeout_seconds=timeout_seconds, memory_limit_mib=memory_limit_mib)
    from sentryward.frontend.ptx_native import run_ptx

    found = run_ptx(
        ptx,
        words.pop("input"),
        wellsync_timeout_seconds=timeout_seconds,
        pipeline_timeout_seconds=timeout_seconds,
        rss_limit_mib=memory_limit_mib,
        continue_memory_search=True,
        semantic_assumptions={"duplicate_tma_store_benign": False},
        **words,
    )
    found["elapsed_seconds"] = found.pop("_process", {}).get("elapsed_seconds", 0)
    return found
