"""Artifacts as bytes: what was written comes back, and any damage is refused with a text that says what is wrong."""

import dataclasses
import hashlib
import json
import pickle
import random

import pytest

from jax_fa4.ffi.artifact import (
    DIGEST_BYTES,
    FORMAT_VERSION,
    HEAD,
    MAGIC,
    Artifact,
    CorruptArtifact,
    default_host_target,
)

SAMPLE = Artifact(
    plan="Plan(depth=128)",
    arch="sm_90a",
    host_target="x86-64-v2",
    object=bytes(range(256)) * 8,
    key="k" * 64,
    versions={"jax_fa4": "1", "dsl": "2", "sources": "3"},
    facts={"kernels": [{"name": "fwd", "registers": 168}], "spills": 0},
)


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def with_header(header: object, payload: bytes = b"x") -> bytes:
    """Bytes that are right in everything but the header's content."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return sealed(HEAD.pack(MAGIC, FORMAT_VERSION, len(text), len(payload)) + text + payload)


def regions(data: bytes) -> dict[str, range]:
    """Byte ranges of each part of an artifact's bytes."""
    _, _, header, payload = HEAD.unpack_from(data)
    bounds = {"magic": 8, "version": 12, "header length": 16, "payload length": HEAD.size}
    bounds |= {"header": HEAD.size + header, "payload": HEAD.size + header + payload, "digest": len(data)}
    starts = [0, *bounds.values()]
    return {name: range(a, b) for (name, b), a in zip(bounds.items(), starts, strict=False)}


def test_round_trip_is_exact_and_deterministic():
    data = SAMPLE.to_bytes()
    assert Artifact.from_bytes(data) == SAMPLE
    assert Artifact.from_bytes(data).to_bytes() == data
    shuffled = Artifact(**dict(reversed(list(vars(SAMPLE).items()))))
    assert shuffled.to_bytes() == data
    versions = dict(reversed(list(SAMPLE.versions.items())))
    assert dataclasses.replace(SAMPLE, versions=versions).to_bytes() == data


def test_digest_is_that_of_the_object():
    assert SAMPLE.digest == hashlib.sha256(SAMPLE.object).digest()


@pytest.mark.parametrize("region", list(regions(SAMPLE.to_bytes())))
def test_a_flipped_bit_anywhere_is_found(region):
    data = SAMPLE.to_bytes()
    where = regions(data)[region]
    assert len(where) > 0
    for at in {where[0], where[len(where) // 2], where[-1]}:
        for bit in range(8):
            damaged = bytearray(data)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptArtifact):
                Artifact.from_bytes(bytes(damaged))


def test_every_single_byte_matters():
    data = SAMPLE.to_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x55
        with pytest.raises(CorruptArtifact):
            Artifact.from_bytes(bytes(damaged))


def test_every_truncation_and_extension_is_found():
    data = SAMPLE.to_bytes()
    for length in range(len(data)):
        with pytest.raises(CorruptArtifact):
            Artifact.from_bytes(data[:length])
    for extra in (b"\0", b"x" * 100, data):
        with pytest.raises(CorruptArtifact, match="promises"):
            Artifact.from_bytes(data + extra)
        with pytest.raises(CorruptArtifact):
            Artifact.from_bytes(extra + data)


def test_random_bytes_are_refused():
    rng = random.Random(20261129)
    for _ in range(3000):
        noise = rng.randbytes(rng.choice([0, 1, HEAD.size, HEAD.size + DIGEST_BYTES, 300, 5000]))
        with pytest.raises(CorruptArtifact):
            Artifact.from_bytes(noise)
        # The same behind a right magic and version, so that the lengths are read.
        with pytest.raises(CorruptArtifact):
            Artifact.from_bytes(MAGIC + FORMAT_VERSION.to_bytes(4, "little") + noise)


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        b"null",
        [],
        {},
        {"plan": "p"},
        {"plan": 1, "arch": "a", "host_target": "h", "key": "", "versions": {}, "facts": {}},
        {"plan": "p", "arch": "a", "host_target": "h", "key": "", "versions": [], "facts": {}},
        {"plan": "p", "arch": "a", "host_target": "h", "key": "", "versions": {}, "facts": {}, "object": "x"},
        {"plan": "p", "arch": "a", "host_target": "h", "key": "", "versions": {}, "facts": {}, "more": 1},
    ],
)
def test_a_sealed_but_wrong_header_is_refused(header):
    with pytest.raises(CorruptArtifact, match="header"):
        Artifact.from_bytes(with_header(header))


def test_a_sealed_right_header_is_accepted():
    """The helper above is refused for its headers, not for its own mistakes."""
    header = {"plan": "p", "arch": "a", "host_target": "h", "key": "", "versions": {}, "facts": {}}
    assert Artifact.from_bytes(with_header(header)).object == b"x"


def test_another_magic_is_refused():
    body = bytearray(SAMPLE.to_bytes()[:-DIGEST_BYTES])
    body[0] ^= 1
    with pytest.raises(CorruptArtifact, match="starts with"):
        Artifact.from_bytes(sealed(bytes(body)))


def test_other_versions_say_so():
    body = bytearray(SAMPLE.to_bytes()[:-DIGEST_BYTES])
    body[8] = FORMAT_VERSION + 1
    with pytest.raises(CorruptArtifact, match=f"format version {FORMAT_VERSION + 1}"):
        Artifact.from_bytes(sealed(bytes(body)))


class Trap:
    fired = False

    def __reduce__(self):
        return (setattr, (Trap, "fired", True))


def test_a_pickle_is_not_run():
    for data in (pickle.dumps(Trap()), with_header(pickle.dumps(Trap(), protocol=0))):
        with pytest.raises(CorruptArtifact):
            Artifact.from_bytes(data)
    assert not Trap.fired
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.fired  # the trap works


def test_facts_must_be_json():
    with pytest.raises(TypeError):
        Artifact("p", "a", "h", b"x", facts={"x": object()}).to_bytes()
    with pytest.raises(ValueError):
        Artifact("p", "a", "h", b"x", facts={"x": float("nan")}).to_bytes()


def test_host_targets():
    assert default_host_target("x86_64") == default_host_target("AMD64") == "x86-64-v2"
    assert default_host_target("aarch64") == default_host_target("arm64") == "linux-aarch64"
    with pytest.raises(ValueError, match="riscv64"):
        default_host_target("riscv64")


def test_host_targets_are_those_of_the_compiler():
    from jax_fa4.ffi import artifact
    from jax_fa4.ffi import compile as compiler

    assert set(artifact.HOST_TARGETS.values()) <= set(compiler.HOST_TARGETS)
