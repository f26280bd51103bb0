"""Rules on the source text, kept without running it: what a rule reports, and the files it reads."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PYTHON_FOLDERS = ("jax_fa4", "tests", "examples")


class Finding(NamedTuple):
    """One breach. Prints as `path:line: text`."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    """One Python file: `path` relative to the root, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @property
    def module(self) -> str:
        """The dotted name, as if the root were on the path: tests.emulator.core, jax_fa4.kernels."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def is_device_file(self) -> bool:
        """Whether the file holds kernel code: it stands under kernels/ and imports the DSL when it is imported."""
        return self.path.startswith("jax_fa4/kernels/") and any(
            name.split(".")[0] == "cutlass"
            for node in self.tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        )


def files(root: Path = ROOT) -> list[Path]:
    """Every file that is or would be committed; outside a git checkout, every file that is not hidden."""
    run = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if run.returncode == 0 and run.stdout:
        return sorted(p for name in set(run.stdout.split("\0")) if name and (p := root / name).is_file())
    hidden = (p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts))
    return sorted(p for p in hidden if p.is_file())


def sources(root: Path = ROOT) -> list[Source]:
    """The Python files of the package, the tests and the examples."""
    found = []
    for path in files(root):
        name = path.relative_to(root).as_posix()
        if name.endswith(".py") and name.split("/")[0] in PYTHON_FOLDERS:
            found.append(Source(name, path.read_text(encoding="utf-8")))
    return found
