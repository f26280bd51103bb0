"""The committed verdicts: each with a digest of the PTX that was judged, and of the sources that the PTX comes from.

Sources tell quickly that nothing has changed: their digest is over the syntax tree without docstrings, so comments,
texts and layout do not count. Where it differs the PTX tells, which takes a compile for each plan.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "docs" / "measured" / "sm100_safety.json"
EVERYWHERE = ("jax_fa4.ffi.compile",)  # what every object is made by


def ptx_digest(ptx: str) -> str:
    """Of the instructions: kernels' names are labels of profilers, and comments are the compiler's."""
    names = re.findall(r"\.entry\s+(\w+)", ptx)
    for n, name in enumerate(sorted(names, key=len, reverse=True)):
        ptx = ptx.replace(name, f"kernel{n}")
    lines = (line.split("//")[0].strip() for line in ptx.rstrip("\0").splitlines())
    return hashlib.sha256("\n".join(line for line in lines if line).encode()).hexdigest()[:16]


def _file(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def code_of(source: str) -> str:
    """The syntax tree as text, without docstrings, and the same in every Python: fields that are empty do not count, as
    each version has some that those before it have not."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return _words(tree)


def _words(node: Any) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(_words, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields)
    told = (f"{name}={_words(x)}" for name, x in fields if x is not None and x != [])
    return f"{type(node).__name__}({', '.join(told)})"


def _imports(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return {name for name in found if name.startswith("jax_fa4")}


@cache
def code_digest(launcher: str) -> str:
    """Of all modules of ours that a launcher's objects come from: it, what it imports, and so on."""
    todo, seen = [launcher, *EVERYWHERE], {}
    while todo:
        name = todo.pop()
        path = _file(name)
        if name not in seen and path is not None:
            source = path.read_text()
            seen[name] = code_of(source)
            todo += _imports(source)
    assert launcher in seen, f"{launcher} is no module of ours"
    whole = "".join(f"{name}\0{code}\0" for name, code in sorted(seen.items()))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    return {p: importlib.metadata.version(p) for p in ("sentryward", "nvidia-cutlass-dsl")}


def read() -> dict[str, Any]:
    return json.loads(LEDGER.read_text()) if LEDGER.exists() else {"runs": {}}


def safe(entry: dict[str, Any]) -> bool:
    """Race-free with no warning, every kernel of the call."""
    return all(v["result"] == "race_free" and not v["warnings"] for v in entry["kernels"].values())


def same_text(entry: dict[str, Any], plan: Any) -> bool:
    """Whether plan and sources are those of the verdict, told without a compile."""
    return entry["plan"] == repr(plan) and entry["code"] == code_digest(plan.launcher)


def problems(ledger: dict[str, Any], kinds: Any) -> list[str]:
    """What the committed file does not say truly: kinds that are in neither list, verdicts that prove nothing."""
    runs, opened = ledger["runs"], ledger["open"]
    current = {name: entry for name, entry in runs.items() if not entry.get("stale")}
    proved = {name.split(":")[0] for name, entry in current.items() if safe(entry)}
    found = [f"{kind}: no verdict, and not listed under `open`" for kind in kinds if kind not in proved | set(opened)]
    found += [f"{kind}: listed under `open`, but it has a verdict" for kind in opened if kind in proved]
    found += [f"{name}: no plan of this kind is chosen any more" for name in runs if name.split(":")[0] not in kinds]
    found += [f"{kind}: open, but no plan of this kind is chosen" for kind in opened if kind not in kinds]
    doubtful = {name for name, entry in current.items() if not safe(entry)} - set(ledger["not proved"])
    return found + [f"{name}: not race-free, and not listed under `not proved`" for name in sorted(doubtful)]
