"""Who may import whom: the table of layers, and the check of every import statement against it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from . import Finding, Source


class Layer(NamedTuple):
    """A row of the table. Names are regular expressions for whole dotted names; {arch} and {way} are the importer's.

    The standard library is allowed to everyone. An outside package is named by its root. `never` holds for everything
    that importing the module brings in with it, at any distance.
    """

    who: str
    may: tuple[str, ...]
    lazily: tuple[str, ...] = ()  # besides, inside functions
    never: tuple[str, ...] = ()


ARCH = r"jax_fa4\.kernels\.(?P<arch>sm\d+)"
WAY = ARCH + r"\.(?P<way>fwd|bwd)"
MEANING = ("jax_fa4.mask", "jax_fa4.spec", "jax_fa4.version")
# cuda.bindings comes with the DSL and is needed with it only.
DSL = ("cutlass", "cuda")

# The first row that fits a module is its row.
TABLE = (
    Layer(r"jax_fa4\.(mask|spec|version)", MEANING, never=("jax", "numpy", *DSL)),
    Layer(r"jax_fa4\.config", (*MEANING, "jax"), never=DSL),
    Layer(r"jax_fa4\.ffi", ()),
    Layer(r"jax_fa4\.ffi\.(buffers|artifact)", MEANING, never=("jax", *DSL)),
    Layer(
        r"jax_fa4\.ffi\.store",
        (*MEANING, r"jax_fa4\.ffi\.(buffers|artifact)", "platformdirs", "filelock"),
        never=("jax", *DSL),
    ),
    # Plans and the tables they are written in: read by tests, planner and caller, with no compiler in the process.
    Layer(
        r"jax_fa4\.kernels\.(sm\d+\.(fwd|bwd)|passes)(\..*)?\.(\w+_)?plan",
        (
            *MEANING,
            r"jax_fa4\.ffi\.buffers",
            r"jax_fa4\.kernels\.common\..*",
            r"jax_fa4\.kernels\.passes\..*",
            r"jax_fa4\.kernels\.{arch}\..*",
        ),
        lazily=(r"jax_fa4\.kernels\.{arch}\.{way}\.kernel", r"jax_fa4\.kernels\.passes\..*"),
        never=("jax", *DSL),
    ),
    Layer(
        r"jax_fa4\.kernels",
        (*MEANING, r"jax_fa4\.ffi\.buffers", r"jax_fa4\.kernels\.common\.\w+", r"jax_fa4\.kernels\.(.*\.)?(\w+_)?plan"),
        never=("jax", *DSL),
    ),
    Layer(
        r"jax_fa4\.kernels\.common(\..*)?",
        (*MEANING, r"jax_fa4\.ffi\.buffers", r"jax_fa4\.kernels\.common(\..*)?", *DSL),
        never=("jax",),
    ),
    Layer(
        r"jax_fa4\.kernels\.passes(\..*)?",
        (*MEANING, r"jax_fa4\.ffi\.buffers", r"jax_fa4\.kernels\.(common|passes)(\..*)?", *DSL),
        never=("jax",),
    ),
    # Roles, contexts, kernels and helpers of one pass; see also `roles_apart`.
    Layer(
        WAY + r"(\..*)?",
        (
            *MEANING,
            r"jax_fa4\.ffi\.buffers",
            r"jax_fa4\.kernels\.(common|passes)(\..*)?",
            r"jax_fa4\.kernels\.{arch}(\.(?!(fwd|bwd)$)\w+)?",
            r"jax_fa4\.kernels\.{arch}\.{way}(\..*)?",
            *DSL,
        ),
        never=("jax",),
    ),
    Layer(
        ARCH + r"(\.\w+)?",
        (
            *MEANING,
            r"jax_fa4\.ffi\.buffers",
            r"jax_fa4\.kernels\.common(\..*)?",
            r"jax_fa4\.kernels\.{arch}(\.(?!(fwd|bwd)$)\w+)?",
            *DSL,
        ),
        never=("jax",),
    ),
    # The one door to the compiler.
    Layer(
        r"jax_fa4\.ffi\.compile",
        (*MEANING, r"jax_fa4\.ffi\.(buffers|artifact|runtime)", r"jax_fa4\.kernels(\..*)?", *DSL),
        lazily=(r"jax_fa4\.kernels\..*",),
        never=("jax",),
    ),
    Layer(r"jax_fa4\.ffi\.runtime", (*MEANING, r"jax_fa4\.ffi\.(artifact|store)", "jax"), never=DSL),
    Layer(r"jax_fa4\.operands", (*MEANING, r"jax_fa4\.reference", "jax", "numpy"), never=DSL),
    Layer(r"jax_fa4\.reference", (*MEANING, "jax", "numpy"), never=DSL),
    Layer(r"jax_fa4\.sharding", (*MEANING, r"jax_fa4\.(config|operands|reference)", "jax", "numpy"), never=DSL),
    Layer(
        r"jax_fa4\.(ffi\.(call|bundle)|primitives|api)",
        (
            *MEANING,
            r"jax_fa4\.(config|operands|reference|sharding|primitives|kernels)",
            r"jax_fa4\.kernels\.common\.parts",
            r"jax_fa4\.ffi(\.(buffers|artifact|store|runtime|call))?",
            "jax",
            "numpy",
            "ml_dtypes",
        ),
        lazily=(r"jax_fa4\.ffi\.(compile|bundle)", r"jax_fa4\.api", "tqdm"),
        never=DSL,
    ),
    Layer(
        r"jax_fa4\.context_parallel",
        (*MEANING, r"jax_fa4\.(api|config|operands|reference|sharding|primitives)", "jax", "numpy"),
        never=DSL,
    ),
    Layer(
        r"jax_fa4",
        (
            *MEANING,
            r"jax_fa4\.(api|config|context_parallel|precompile|primitives|sharding)",
            r"jax_fa4\.ffi\.(bundle|call)",
        ),
        lazily=(r"jax_fa4\.ffi\.\w+",),
        never=("flax", *DSL),
    ),
    Layer(r"jax_fa4\.traced", (*MEANING, r"jax_fa4\.primitives", "jax"), never=DSL),
    Layer(
        r"jax_fa4\.precompile",
        (*MEANING, r"jax_fa4\.(config|kernels|traced)", r"jax_fa4\.ffi(\.(bundle|store))?"),
        lazily=(r"jax_fa4\.ffi\.compile",),
        never=DSL,
    ),
    Layer(
        r"jax_fa4\.(__main__|cli)",
        (*MEANING, r"jax_fa4\.(benchmark|cli|doctor|kernels|precompile)", r"jax_fa4\.ffi\.(bundle|compile|store)"),
        never=("flax", *DSL),
    ),
    Layer(r"jax_fa4\.cases", (*MEANING, "numpy"), never=("jax", *DSL)),
    Layer(
        r"jax_fa4\.(doctor|benchmark|report)",
        (
            r"jax_fa4(\.(api|cases|doctor|benchmark|report|config|spec|mask|version|kernels|primitives|reference))?",
            "jax",
            "numpy",
        ),
        lazily=(r"jax_fa4\.(ffi|kernels)(\..*)?", *DSL, "flax", "matplotlib", "tokamax", "tqdm"),
        never=("flax", *DSL),
    ),
    Layer(
        r"jax_fa4\.flax(\..*)?",
        (*MEANING, r"jax_fa4(\.(api|config|flax(\..*)?))?", "jax", "flax", "numpy"),
        never=DSL,
    ),
    # Judges of the kernels share nothing with them.
    Layer(r"tests\.emulator(\..*)?", (r"tests\.emulator(\..*)?", "numpy"), never=("jax", "jax_fa4", *DSL)),
    Layer(
        r"examples\..*",
        (
            r"jax_fa4(\.(benchmark|context_parallel|flax(\..*)?))?",
            r"examples\..*",
            "jax",
            "numpy",
            "flax",
            "optax",
            "orbax",
            "matplotlib",
            "tqdm",
        ),
        never=DSL,
    ),
)


class Import(NamedTuple):
    """One module that a statement brings in. Lazy: inside a function or for the type checker only."""

    name: str
    line: int
    lazy: bool


def imports(source: Source, known: set[str]) -> Iterator[Import]:
    """Everything that the file imports, with relative names resolved; `import_module("x")` counts as lazy."""
    package = source.module if source.is_package else source.module.rpartition(".")[0]
    for node, lazy in statements(source):
        if isinstance(node, ast.Import):
            yield from (Import(locate(a.name, package, known), node.lineno, lazy) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = locate(".".join([*above, *filter(None, [node.module])]), package, known)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, node.lineno, lazy)
        elif node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            yield Import(locate(node.args[0].value, package, known), node.lineno, True)


@cache
def statements(source: Source) -> tuple[tuple[ast.Import | ast.ImportFrom | ast.Call, bool], ...]:
    """The nodes of a file that import, and whether each is lazy. Kept: the tests ask for the whole tree many times."""
    found: list[tuple[ast.Import | ast.ImportFrom | ast.Call, bool]] = []
    stack: list[tuple[ast.AST, bool]] = [(source.tree, False)]
    while stack:
        node, lazy = stack.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append((node, lazy))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found.append((node, True))
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        body = set(map(id, node.body)) if typing else set()
        stack.extend((child, inside or id(child) in body) for child in ast.iter_child_nodes(node))
    return tuple(found)


def locate(name: str, package: str, known: set[str]) -> str:
    """`name` as a module of the tree where a script's own folder (or tests/) is on the path; else unchanged."""
    for folder in (package.split(".")[0], "tests") if package.split(".")[0] in ("tests", "examples") else ():
        if f"{folder}.{name.split('.')[0]}" in known:
            return f"{folder}.{name}"
    return name


def row(module: str, table: Iterable[Layer] = TABLE) -> tuple[Layer, dict[str, str]] | None:
    """The module's row and what `{arch}` and `{way}` stand for in it."""
    for layer in table:
        if match := re.fullmatch(layer.who, module):
            place = re.match(WAY, module) or re.match(ARCH, module)
            return layer, {"arch": "-", "way": "-"} | (place or match).groupdict()
    return None


def fits(name: str, patterns: Iterable[str], words: dict[str, str]) -> bool:
    """Whether a dotted name is one of `patterns`, or lies under an outside package that is."""
    inside = name.split(".")[0] in ("jax_fa4", "tests", "examples")
    for pattern in patterns:
        for word, value in words.items():
            pattern = pattern.replace("{" + word + "}", value)
        if re.fullmatch(pattern, name if inside else name.split(".")[0]):
            return True
    return False


def check_imports(files: Iterable[Source], only: str | None = None) -> list[Finding]:
    """Every import that the table does not allow, and every module of the package that has no row.

    `only` limits the report to one path; the others still count for what it brings in.
    """
    files = list(files)
    known = {s.module for s in files}
    eager = {s.module: [i.name for i in imports(s, known) if not i.lazy] for s in files}
    found = []
    for source in (s for s in files if only in (None, s.path)):
        place = row(source.module)
        if place is None:
            if source.module.startswith("jax_fa4"):
                found.append(Finding(source.path, 1, f"{source.module} has no row in the table of layers"))
            continue
        layer, words = place
        for item in imports(source, known):
            if item.name.split(".")[0] in sys.stdlib_module_names:
                continue
            if not fits(item.name, layer.may + (layer.lazily if item.lazy else ()), words):
                how = "imports" if not item.lazy else "imports, even lazily,"
                found.append(Finding(source.path, item.line, f"{source.module} {how} {item.name}: not in its row"))
        for chain in forbidden_chains(source.module, layer.never, eager):
            found.append(Finding(source.path, 1, f"importing it brings in {chain[-1]}: {' -> '.join(chain)}"))
        found += roles_apart(source, files, known)
    return sorted(set(found))


def forbidden_chains(module: str, never: tuple[str, ...], eager: dict[str, list[str]]) -> list[list[str]]:
    """One chain of imports for each root in `never` that importing `module` loads.

    The package's own __init__ is left out: what it loads is measured by the test that imports it.
    """
    chains: list[list[str]] = []
    stack, seen = [[module]], {module}
    while stack:
        chain = stack.pop()
        for name in eager.get(chain[-1], []):
            if name in seen or (name == "jax_fa4" and not module.startswith("tests")):
                continue
            seen.add(name)
            if name.split(".")[0] in never:
                chains.append([*chain, name])
            else:
                stack.append([*chain, name])
    return chains


def roles_apart(source: Source, files: list[Source], known: set[str]) -> list[Finding]:
    """No role imports another.

    A role is a file of a pass from which kernel.py calls something as a statement of its own: roles give nothing back,
    helpers do.
    """
    folder = source.module.rpartition(".")[0]
    kernel = next((s for s in files if s.module == f"{folder}.kernel"), None)
    if kernel is None or not re.fullmatch(WAY, folder) or source is kernel:
        return []
    origin: dict[str, str] = {}
    for node in ast.walk(kernel.tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                origin[alias.asname or alias.name] = inner if inner in known else node.module
    calls = (n.value.func for n in ast.walk(kernel.tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call))
    called = {origin.get(ast.unparse(f).split(".")[0], "") for f in calls}
    roles = {m for m in called if m.rpartition(".")[0] == folder}
    if source.module not in roles:
        return []
    return [
        Finding(source.path, i.line, f"role {source.module} imports role {i.name}")
        for i in imports(source, known)
        if i.name in roles and i.name != source.module
    ]
