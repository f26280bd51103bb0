"""Artifact: a compiled host function and what it was built from, as self-describing bytes that are checked on reading.

Layout of the bytes (all integers little-endian, unsigned):

    magic 8 | format version 4 | header length 4 | payload length 8 | header (JSON) | payload (object) | sha256 32

The digest covers everything before it, so a flipped, missing or added byte anywhere is found. Reading never runs or
unpickles anything. The digest finds damage; it is no signature: who may write the file may write a right digest too,
which is why the store looks at owners and permissions.
"""

from __future__ import annotations

import hashlib
import json
import platform
import struct
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

MAGIC = b"jaxfa4\x1a\n"
FORMAT_VERSION = 1
HEAD = struct.Struct("<8sIIQ")
DIGEST_BYTES = 32

# The host target of a machine, as `ffi.compile` names them: a baseline of its architecture, so that an object and its
# key do not depend on the processor that built it.
HOST_TARGETS = {"x86_64": "x86-64-v2", "aarch64": "linux-aarch64"}


class CorruptArtifact(ValueError):
    """Bytes that are not a whole artifact of this format. The text says what is wrong, with the numbers."""


def default_host_target(machine: str | None = None) -> str:
    """The host target of this machine (or of one of that `platform.machine()`); ValueError where none is known."""
    machine = platform.machine() if machine is None else machine
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)
    if machine not in HOST_TARGETS:
        raise ValueError(f"no kernels can be built for a host of machine {machine!r}; known are {sorted(HOST_TARGETS)}")
    return HOST_TARGETS[machine]


@dataclass(frozen=True)
class Artifact:
    """Compiled bytes of one host function, which may launch several kernels, and where they come from.

    `plan` is the plan's complete text, `key` the store's name for the entry (empty outside a store), `versions` what
    built it, `facts` what the compiler said about the kernels (registers, spills, shared memory): JSON values only.
    """

    plan: str
    arch: str
    host_target: str
    object: bytes
    key: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the object: what the runtime library keeps loaded modules under."""
        return hashlib.sha256(self.object).digest()

    def to_bytes(self) -> bytes:
        """The whole artifact, the same bytes for the same artifact. TypeError if `facts` hold more than JSON can."""
        header = {name: getattr(self, name) for name in _HEADER_TYPES}
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        body = HEAD.pack(MAGIC, FORMAT_VERSION, len(text), len(self.object)) + text + self.object
        return body + hashlib.sha256(body).digest()

    @staticmethod
    def from_bytes(data: bytes) -> Artifact:
        """The artifact in `data`, or CorruptArtifact on anything that `to_bytes` would not have written."""
        if len(data) < HEAD.size + DIGEST_BYTES:
            raise CorruptArtifact(f"{len(data)} bytes are too few; an artifact has at least {HEAD.size + DIGEST_BYTES}")
        magic, version, header_length, payload_length = HEAD.unpack_from(data)
        if magic != MAGIC:
            raise CorruptArtifact(f"starts with {magic!r}, not {MAGIC!r}")
        if version != FORMAT_VERSION:
            raise CorruptArtifact(f"has format version {version}; this program reads {FORMAT_VERSION}")
        wanted = HEAD.size + header_length + payload_length + DIGEST_BYTES
        if len(data) != wanted:
            raise CorruptArtifact(f"has {len(data)} bytes; its head promises {wanted}")
        if hashlib.sha256(memoryview(data)[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
            raise CorruptArtifact("the digest does not match the content")
        split = HEAD.size + header_length
        return Artifact(object=bytes(data[split:-DIGEST_BYTES]), **_header(data[HEAD.size : split]))


_HEADER_TYPES: dict[str, type] = {
    "plan": str,
    "arch": str,
    "host_target": str,
    "key": str,
    "versions": dict,
    "facts": dict,
}


def _header(text: bytes) -> dict[str, Any]:
    """The header's fields, of the right names and types."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptArtifact(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict) or set(header) != set(_HEADER_TYPES):
        found = sorted(header) if isinstance(header, dict) else type(header).__name__
        raise CorruptArtifact(f"the header has {found}; it must have {sorted(_HEADER_TYPES)}")
    for name, kind in _HEADER_TYPES.items():
        if not isinstance(header[name], kind):
            raise CorruptArtifact(f"header field {name} is a {type(header[name]).__name__}, not a {kind.__name__}")
    return header
