"""What the text of the repository must not say: paths of somebody's machine, unknown hosts, links to nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from . import ROOT, Finding, files

# Spelt in pieces, so that this file passes its own rule.
HOMES = [
    re.compile(r"(?<![\w.\-/])/" + folder) for folder in ("work" + "/", "root" + "/", r"home/\w", r"Users/\w", "mnt/")
]
HOSTS = re.compile(r"\b(?:https?|git|ssh)://(?:[^\s/@]+@)?([A-Za-z0-9.\-]+)(?::\d+)?")
KNOWN_HOSTS = (
    "apache.org", "arxiv.org", "github.com", "nvidia.com", "python.org", "readthedocs.io", "jax.dev", "openxla.org",
    "pypi.org", "localhost", "example.com", "example.org", "numpy.org", "spdx.org",
)  # fmt: skip
BINARY = (".png", ".jpg", ".npz", ".npy", ".cubin", ".o", ".bin", ".gz", ".pdf")
NAMED = re.compile(r"`((?:jax_fa4|tests|examples|docs)/[\w./\-]+)`|\]\((?!https?:|#)([^)#\s]+)")
COMMANDS = re.compile(r"\bmake ([a-z]+)\b")


def texts(root: Path = ROOT) -> dict[str, str]:
    """Path -> content of each text file of the repository."""
    found = {}
    for path in files(root):
        if path.suffix not in BINARY:
            found[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8", errors="replace")
    return found


def check_machine_words(contents: dict[str, str]) -> list[Finding]:
    """Absolute paths under somebody's home or workplace, and hosts that no reader could know."""
    found = []
    for path, text in contents.items():
        for number, line in enumerate(text.splitlines(), 1):
            found += [
                Finding(path, number, f"a path of one machine: {line.strip()[:100]}") for h in HOMES if h.search(line)
            ]
            for host in HOSTS.findall(line):
                if not any(host == k or host.endswith("." + k) for k in KNOWN_HOSTS):
                    found.append(Finding(path, number, f"unknown host {host}; known are {', '.join(KNOWN_HOSTS)}"))
    return found


def check_links(contents: dict[str, str], documents: Iterable[str], root: Path = ROOT) -> list[Finding]:
    """Files that a document names (in backticks or as a link) and make targets it tells the reader to run exist."""
    found = []
    targets = set(re.findall(r"^([a-z]+):", contents.get("Makefile", ""), re.MULTILINE))
    for path in documents:
        for number, line in enumerate(contents[path].splitlines(), 1):
            for quoted, linked in NAMED.findall(line):
                base = root if quoted else (root / path).parent
                if not (base / (quoted or linked)).exists():
                    found.append(Finding(path, number, f"names {quoted or linked}, which does not exist"))
            for quote in re.findall(r"`([^`]+)`", line) + ([line] if line.startswith(("    make ", "make ")) else []):
                for target in COMMANDS.findall(quote):
                    if target not in targets:
                        found.append(Finding(path, number, f"`make {target}` is no target of the Makefile"))
    return found
