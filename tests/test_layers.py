"""The source obeys its own rules (who imports whom, sizes, rings, contexts, texts), and each rule sees its breach."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
import warnings

import pytest
from rules import ROOT, Finding, Source, imports, ring, size, sources, text

KERNELS = "jax_fa4/kernels/sm90/fwd/"
RING = Source(
    "jax_fa4/kernels/common/ring.py",
    '"""Ring."""\nimport cutlass\n\n\ndef start(phase):\n    return Place(0, phase)\n\n\n'
    "def step(at: Place, stages):\n    return Place(at.index + 1, at.phase)\n",
)


def plant(path: str, body: str) -> Source:
    """A file that is not on disk."""
    return Source(path, textwrap.dedent(body).lstrip("\n"))


def device(body: str, name: str = "load") -> list[Source]:
    """Kernel code that has the ring's words in scope, and the ring."""
    head = '"""A role."""\nimport cutlass\nfrom jax_fa4.kernels.common.ring import start, step\n\n\n'
    return [RING, Source(f"{KERNELS}{name}.py", head + textwrap.dedent(body).lstrip("\n"))]


def show(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


# ---- the tree as it stands ----


@pytest.fixture(scope="module")
def tree() -> list[Source]:
    found = sources()
    assert len(found) > 30, "the file list is broken: a handful of sources cannot be the whole tree"
    return found


@pytest.mark.parametrize(
    "check",
    [
        imports.check_imports,
        size.check_size,
        size.check_headers,
        ring.check_ring,
        ring.check_context_stores,
    ],
    ids=lambda f: f.__name__,
)
def test_tree(tree, check):
    found = check(tree)
    assert not found, f"{len(found)} breaches:\n{show(found)}"


def test_tree_parameters(tree):
    """A warning, not a failure: a long list of operands is at times what a thing needs."""
    if found := size.check_parameters(tree):
        warnings.warn(f"{len(found)} functions take many parameters:\n{show(found)}", stacklevel=1)


def test_texts():
    contents = text.texts()
    assert "pyproject.toml" in contents and "jax_fa4/spec.py" in contents
    documents = [p for p in contents if p.endswith(".md")]
    assert "README.md" in documents
    found = text.check_machine_words(contents) + text.check_links(contents, documents)
    assert not found, show(found)


def test_the_ring_rule_sees_the_kernels(tree):
    """The rule knows movers by name. If no kernel calls one, the ring was renamed and the rule is blind."""
    known = ring.Tree(tree)
    calls = [n for r in known.routines for n in ast.walk(r.node) if known.is_mover(r, n)]
    assert len(calls) >= 3


def loaded_by(statement: str, names: tuple[str, ...]) -> list[str]:
    """Which of these root packages a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{m.split('.')[0] for m in sys.modules}} & set({names!r})))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


HEAVY = ("cutlass", "cuda", "flax", "optax", "matplotlib", "tqdm", "torch")


def test_import_is_light():
    assert loaded_by("import jax_fa4", HEAVY) == []


def test_import_is_light_sees_a_breach():
    assert loaded_by("import jax_fa4, tqdm", HEAVY) == ["tqdm"]


def test_import_without_the_dsl_and_flax():
    """Where neither is installed the package imports and attends."""
    code = """
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("cutlass", "cuda", "flax", "tqdm", "matplotlib"):
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Absent())
        import numpy as np, jax_fa4
        x = np.ones((1, 4, 2, 8), np.float32)
        assert np.allclose(jax_fa4.attention(x, x, x, is_causal=True), 1)
    """
    env = {"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    assert run.returncode == 0, run.stderr


# ---- each rule sees its breach ----

IMPORT_BREACHES = {
    "spec takes jax": ("jax_fa4/spec.py", "import jax"),
    "spec takes numpy in a function": ("jax_fa4/mask.py", "def f():\n    import numpy"),
    "artifact takes cutlass": ("jax_fa4/ffi/artifact.py", "import cutlass.cute as cute"),
    "artifact takes jax": ("jax_fa4/ffi/artifact.py", "from jax import numpy"),
    "store takes jax": ("jax_fa4/ffi/store.py", "import jax"),
    "plan takes cutlass": ("jax_fa4/kernels/sm90/fwd/plan.py", "import cutlass"),
    "plan takes cutlass by way of common": (
        "jax_fa4/kernels/sm90/fwd/plan.py",
        "from jax_fa4.kernels.common import ring",
    ),
    "plan takes another arch": ("jax_fa4/kernels/sm90/fwd/plan.py", "from jax_fa4.kernels.sm100.fwd import plan"),
    "role takes jax": ("jax_fa4/kernels/sm90/fwd/load.py", "import jax.numpy as jnp"),
    "role takes another arch": ("jax_fa4/kernels/sm90/fwd/load.py", "from jax_fa4.kernels.sm100 import umma"),
    "role takes another pass": ("jax_fa4/kernels/sm90/bwd/load.py", "from jax_fa4.kernels.sm90.fwd.load import load"),
    "role takes the call": ("jax_fa4/kernels/sm90/fwd/load.py", "from jax_fa4.ffi import call"),
    "common knows an arch": ("jax_fa4/kernels/common/rows.py", "from jax_fa4.kernels.sm90 import wgmma"),
    "arch helper takes a pass": ("jax_fa4/kernels/sm90/wgmma.py", "from jax_fa4.kernels.sm90.fwd import plan"),
    "role takes another pass's package": ("jax_fa4/kernels/sm90/bwd/load.py", "from jax_fa4.kernels.sm90 import fwd"),
    "select takes a kernel": ("jax_fa4/kernels/__init__.py", "from jax_fa4.kernels.sm90.fwd import kernel"),
    "select takes cutlass lazily": ("jax_fa4/kernels/__init__.py", "def f():\n    import cutlass"),
    "compile takes jax": ("jax_fa4/ffi/compile.py", "import jax"),
    "call takes compile eagerly": ("jax_fa4/ffi/call.py", "from jax_fa4.ffi import compile"),
    "call takes cutlass lazily": ("jax_fa4/ffi/call.py", "def f():\n    import cutlass"),
    "primitives take cutlass by name": (
        "jax_fa4/primitives.py",
        "import importlib\nimportlib.import_module('cutlass')",
    ),
    "api takes what stands on it": ("jax_fa4/api.py", "from jax_fa4 import context_parallel"),
    "primitives take the api eagerly": ("jax_fa4/primitives.py", "from jax_fa4.api import attention"),
    "reference takes the kernels": ("jax_fa4/reference.py", "from jax_fa4 import kernels"),
    "api takes flax": ("jax_fa4/api.py", "from jax_fa4.flax import linen"),
    "package takes flax lazily": ("jax_fa4/__init__.py", "def __getattr__(n):\n    from jax_fa4 import flax"),
    "emulator takes the package": ("tests/emulator/core.py", "from jax_fa4 import mask"),
    "emulator takes scipy": ("tests/emulator/core.py", "import scipy"),
    "example takes an inner part": ("examples/train_text.py", "from jax_fa4.ffi import store"),
    "relative import climbs": ("jax_fa4/kernels/sm90/fwd/load.py", "from ...sm100 import umma"),
    "unheard-of package": ("jax_fa4/api.py", "import requests"),
}


@pytest.mark.parametrize("path, statement", IMPORT_BREACHES.values(), ids=IMPORT_BREACHES.keys())
def test_imports_see(tree, path, statement):
    others = [s for s in tree if s.path != path]
    clean, broken = (plant(path, f'"""File."""\n{extra}\n') for extra in ("import math", statement))
    assert imports.check_imports([*others, clean], only=path) == []
    assert imports.check_imports([*others, broken], only=path)


def test_imports_see_a_module_without_a_row():
    found = imports.check_imports([plant("jax_fa4/shiny.py", "import math")])
    assert [f.text for f in found] == ["jax_fa4.shiny has no row in the table of layers"]


def test_imports_allow_what_the_table_says():
    files = [
        RING,
        plant("jax_fa4/spec.py", "import math\nfrom jax_fa4.mask import UNBOUNDED"),
        plant("jax_fa4/mask.py", "import typing"),
        plant("jax_fa4/kernels/__init__.py", "from jax_fa4.kernels.sm90.fwd import plan"),
        plant("jax_fa4/kernels/sm90/fwd/plan.py", "from jax_fa4.spec import Problem\nimport math"),
        plant("jax_fa4/kernels/sm90/fwd/load.py", "import cutlass\nfrom jax_fa4.kernels.common.ring import step"),
        plant("jax_fa4/ffi/compile.py", "import cutlass"),
        plant("jax_fa4/ffi/call.py", "import jax\ndef f():\n    from jax_fa4.ffi import compile"),
        plant("jax_fa4/flax/linen.py", "from flax import linen\nimport jax_fa4"),
        plant("tests/emulator/core.py", "import numpy\nfrom . import parse"),
        plant("tests/emulator/parse.py", "import re"),
        plant("examples/train_text.py", "import textloop, jax_fa4"),
        plant("examples/textloop.py", "import optax"),
    ]
    found = imports.check_imports(files)
    assert not found, show(found)


def test_roles_stay_apart():
    kernel = plant(
        KERNELS + "kernel.py",
        """
        from jax_fa4.kernels.sm90.fwd.load import load
        from jax_fa4.kernels.sm90.fwd.mma import multiply
        from jax_fa4.kernels.sm90.fwd.edge import first_tile
        def forward(ctx):
            n = first_tile(ctx)
            load(ctx)
            multiply(ctx)
        """,
    )
    load = plant(KERNELS + "load.py", "from jax_fa4.kernels.sm90.fwd.edge import first_tile\ndef load(ctx): ...")
    edge = plant(KERNELS + "edge.py", "def first_tile(ctx): ...")
    good = plant(KERNELS + "mma.py", "def multiply(ctx): ...")
    bad = plant(KERNELS + "mma.py", "from jax_fa4.kernels.sm90.fwd.load import load\ndef multiply(ctx): ...")
    assert imports.check_imports([kernel, load, edge, good]) == []
    found = imports.check_imports([kernel, load, edge, bad])
    assert len(found) == 1 and "imports role jax_fa4.kernels.sm90.fwd.load" in found[0].text


@pytest.mark.parametrize(
    "path, decorator, lines, seen",
    [
        ("jax_fa4/api.py", "", 80, False),
        ("jax_fa4/api.py", "", 81, True),
        ("jax_fa4/kernels/sm90/rows.py", "", 120, False),
        ("jax_fa4/kernels/sm90/rows.py", "", 121, True),
        ("tests/shapes.py", "@cute.jit\n", 120, False),
        ("tests/shapes.py", "@cute.jit\n", 121, True),
        ("tests/shapes.py", "@cute.kernel()\n", 121, True),
    ],
)
def test_function_size_sees(path, decorator, lines, seen):
    doc = '    """A docstring\n' + "    of many lines\n" * 200 + '    """\n'
    body = f'"""F."""\nimport cutlass\n\n\n{decorator}def f():\n{doc}' + "    x = 1\n" * (lines - 1)
    assert [f.line for f in size.check_size([Source(path, body)])] == ([5 + bool(decorator)] if seen else [])


@pytest.mark.parametrize("lines, seen", [(800, 0), (801, 1)])
def test_file_size_sees(lines, seen):
    assert len(size.check_size([Source("tests/x.py", "x = 1\n" * lines)])) == seen


def test_parameters_see():
    many = ", ".join(f"a{i}" for i in range(9))
    text_of = f"def f({many}): ...\ndef g(*, {many}): ...\n@cute.kernel\ndef k({many}): ...\n"
    assert [f.line for f in size.check_parameters([Source("tests/x.py", text_of)])] == [1]


@pytest.mark.parametrize("body, seen", [('"""A."""\n', 0), ("", 0), ("# A\nx = 1\n", 1), ('\n"""A."""\n', 1)])
def test_headers_see(body, seen):
    assert len(size.check_headers([Source("tests/x.py", body)])) == seen


RING_BREACHES = {
    "result dropped": """
        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                step(at, 2)
    """,
    "result dropped outside a loop": """
        def load(ctx):
            at = start(1)
            step(at, 2)
            wait(ctx.full, at)
    """,
    "parameter moved, nothing returned": """
        def take(ctx, at):
            wait(ctx.full, at)
            at = step(at, 2)

        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                take(ctx, at)
    """,
    "parameter moved, something else returned": """
        def take(ctx, at):
            row = at.index
            at = step(at, 2)
            return row

        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                row = take(ctx, at)
    """,
    "moved under another name in a loop": """
        def drain(ctx, at):
            here = at
            for n in cutlass.range(2):
                here = step(here, 2)

        def load(ctx):
            at = start(1)
            drain(ctx, at)
    """,
    "moved through two names in a loop": """
        def rest(ctx, behind):
            for n in cutlass.range(2):
                at = step(behind, 2)
                behind = at

        def load(ctx):
            at = start(1)
            rest(ctx, at)
    """,
    "one return of two forgets it": """
        def take(ctx, at):
            at = step(at, 2)
            if cutlass.const_expr(ctx.plan.split):
                return ctx.part
            return at
    """,
    "returned in one arm only": """
        def take(ctx, at):
            if cutlass.const_expr(ctx.plan.split):
                at = step(at, 2)
                return at
    """,
    "helper's place dropped": """
        def take(ctx, at):
            at = step(at, 2)
            return at

        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                take(ctx, at)
    """,
    "helper's place, through a helper, dropped": """
        def take(ctx, at):
            return step(at, 2)

        def both(ctx, at):
            return take(ctx, at), 1

        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                both(ctx, at)
    """,
    "the loop never moves it": """
        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                ahead = step(at, 2)
                wait(ctx.full, ahead)
    """,
    "a helper's result never comes back": """
        def take(ctx, at):
            return step(at, 2)

        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                ahead = take(ctx, at)
    """,
    "record of places moved, not returned": """
        def take(ctx, state):
            state = state._replace(k=step(state.k, 2))
    """,
    "stored in a list": """
        def take(ctx, places):
            places[0] = step(places[0], 2)
    """,
    "stored in an attribute": """
        def load(ctx, role):
            role.at = step(role.at, 2)
    """,
    "index written": """
        def load(ctx, at):
            at.index += 1
            return at
    """,
    "phase written": """
        def load(ctx, at):
            at.phase = at.phase ^ 1
            return at
    """,
    "advance in a helper": """
        def take(ctx, state):
            state.advance()
    """,
    "advance of the context's state": """
        def load(ctx):
            ctx.state.advance()
    """,
    "nonlocal": """
        def load(ctx):
            at = start(1)
            def move():
                nonlocal at
                at = step(at, 2)
    """,
    "called by its module's name": """
        from jax_fa4.kernels.common import ring

        def take(ctx, at):
            at = ring.step(at, 2)
    """,
}

RING_CUSTOMS = {
    "a role's own loop": """
        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                wait(ctx.empty, at)
                at = step(at, 2)
    """,
    "ring in, ring out": """
        def take(ctx, at):
            wait(ctx.full, at)
            return step(at, 2)

        def load(ctx):
            at = start(1)
            for n in cutlass.range(9):
                at = take(ctx, at)
    """,
    "two results": """
        def take(ctx, at, behind):
            behind = at
            at = step(at, 2)
            return at, behind, 3

        def load(ctx):
            at, behind = start(1), start(1)
            for n in cutlass.range(9):
                at, behind, x = take(ctx, at, behind)
    """,
    "look ahead": """
        def peek(ctx, at):
            wait(ctx.full, step(at, 2))
            ahead = step(at, 2)
            wait(ctx.full, ahead)

        def load(ctx):
            at = start(0)
            for n in cutlass.range(9):
                v = step(at, 2)
                k = step(v, 2)
                peek(ctx, k)
                at = k
    """,
    "a place behind": """
        def attend(ctx):
            at, behind = start(0), start(0)
            for n in cutlass.range(9):
                at = step(behind, 2)
                behind = at
    """,
    "static loop over two": """
        def attend(ctx):
            at = start(0)
            for s in cutlass.range_constexpr(2):
                wait(ctx.full, step(at, 2))
    """,
    "a fresh place given away": """
        def drain(ctx, at):
            for n in cutlass.range(2):
                at = step(at, 2)

        def load(ctx):
            drain(ctx, start(1))
    """,
    "record of places": """
        def take(ctx, state):
            state = state._replace(k=step(state.k, 2))
            return state

        def load(ctx, state):
            for n in cutlass.range(2):
                state = take(ctx, state)
            return state
    """,
    "advance in the loop itself": """
        def load(ctx):
            state = make_pipeline_state(1, 2)
            for n in cutlass.range(2):
                state.advance()
    """,
}


@pytest.mark.parametrize("body", RING_BREACHES.values(), ids=RING_BREACHES.keys())
def test_ring_sees(body):
    assert ring.check_ring(device(body))


@pytest.mark.parametrize("body", RING_CUSTOMS.values(), ids=RING_CUSTOMS.keys())
def test_ring_allows(body):
    found = ring.check_ring(device(body))
    assert not found, show(found)


def test_ring_sees_a_kernel_of_ours_broken(tree):
    """Each rebinding step in a role's loop, with its left side taken away, is reported at its line."""
    broken = 0
    for source in tree:
        lines = source.text.splitlines()
        for i, line in enumerate(lines):
            left, _, right = line.partition(" = ")
            if source.is_device_file and right.startswith("step(") and left.strip().isidentifier():
                indent = line[: len(line) - len(line.lstrip())]
                spoilt = Source(source.path, "\n".join([*lines[:i], indent + right, *lines[i + 1 :]]) + "\n")
                found = ring.check_ring([spoilt if s.path == source.path else s for s in tree], spoilt)
                assert any(f.path == source.path and f.line == i + 1 for f in found), f"{source.path}:{i + 1}"
                broken += 1
    assert broken >= 2


@pytest.mark.parametrize(
    "body, seen",
    [
        ("def role(ctx):\n    ctx.lse[0] = 1", 1),
        ("def role(ctx):\n    ctx.out[2][0, 1] = 1", 1),
        ("def role(ctx):\n    ctx.lse[0] += 1", 1),
        ("def role(ctx):\n    ctx.row = 1", 1),
        ("def role(ctx):\n    a, ctx.lse[0] = 1, 2", 1),
        ("def role(c: Context):\n    c.lse[0] = 1", 1),
        ("def role(ctx):\n    c = ctx\n    c.lse[0] = 1", 1),
        ("def role(ctx):\n    def inner():\n        ctx.lse[0] = 1", 1),
        ("def role(ctx):\n    to = ctx.lse\n    to[0] = 1", 0),
        ("def role(ctx):\n    x = ctx.lse[0]", 0),
        ("def role(ctx, table):\n    table[ctx.row] = 1", 0),
    ],
)
def test_context_stores_see(body, seen):
    assert len(ring.check_context_stores(device(body))) == seen


def test_context_stores_in_host_code_are_no_matter():
    assert ring.check_context_stores([plant("jax_fa4/api.py", "def f(ctx):\n    ctx.x[0] = 1")]) == []


# Spelt in pieces: this file is read by the rule.
MACHINE_WORDS = [
    "see /wo" + "rk/main/x",
    "cd /ro" + "ot/.cache",
    "open('/ho" + "me/ann/x')",
    "https:/" + "/wheels.corp.lan/simple",
    "https:/" + "/notgithub.com/x",
]


@pytest.mark.parametrize("line", MACHINE_WORDS)
def test_machine_words_see(line):
    assert len(text.check_machine_words({"a.md": f"fine\n{line}\n"})) == 1


@pytest.mark.parametrize(
    "line", ["https://github.com/jax-ml/jax", "a/work/b", "docs/root/x", "https://docs.nvidia.com/x"]
)
def test_machine_words_allow(line):
    assert text.check_machine_words({"a.md": line}) == []


@pytest.mark.parametrize(
    "line, seen",
    [
        ("see `examples/quickstart.py`", 0),
        ("see `examples/no_such.py`", 1),
        ("see [it](docs/no_such.md)", 1),
        ("run `make demo`", 0),
        ("run `make coffee`", 1),
        ("we make progress", 0),
        ("    make coffee", 1),
    ],
)
def test_links_see(line, seen):
    contents = {"README.md": line, "Makefile": "demo: x\n\techo\n"}
    assert len(text.check_links(contents, ["README.md"])) == seen
