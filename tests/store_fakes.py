"""Plans and builders for the store's tests; imported by their child processes too, so it imports little."""

import dataclasses
import hashlib
import os
import time


@dataclasses.dataclass(frozen=True)
class FakePlan:
    depth: int = 64
    arch: str = "sm_90a"


@dataclasses.dataclass(frozen=True)
class FakeBuilt:
    object: bytes
    facts: dict


def object_of(plan) -> bytes:
    """What `fake_build` makes: 48 KB, the size of a real object, that depends on the plan."""
    return hashlib.sha256(repr(plan).encode()).digest() * 1536


def fake_build(plan, *, host_target):
    return FakeBuilt(object_of(plan), {"host": host_target, "registers": (168,)})


def slow_logged_build(plan, *, host_target):
    """As above, in 0.3 s, with a line in $BUILD_LOG for each start and each end."""
    log(f"start {os.getpid()}")
    time.sleep(0.3)
    log(f"end {os.getpid()}")
    return fake_build(plan, host_target=host_target)


def failing_build(plan, *, host_target):
    if plan.depth == 13:
        os.abort()
    if plan.depth == 14:
        raise ValueError("depth 14 is not for us")
    print("chatter of a compiler on stdout", flush=True)
    return fake_build(plan, host_target=host_target)


def log(line: str) -> None:
    with open(os.environ["BUILD_LOG"], "a") as file:
        file.write(line + "\n")


def never(plan, *, host_target):
    raise AssertionError(f"{plan} was built again")
