"""Every python block of README and docs runs, the commands they show exist, and the site has all pages."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from rules import ROOT

import jax_fa4
from jax_fa4 import cli

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line of its first line, text) of each block of a language."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start(2)) + 1, m[2]) for m in BLOCK.finditer(text) if m[1] == language]


def run(page: Path, names: dict[str, Any]) -> None:
    """All blocks of a page, one after the other in one namespace. A failure shows page and line."""
    for line, text in blocks(page, "python"):
        tree = ast.increment_lineno(ast.parse(text), line - 1)
        exec(compile(tree, page.name, "exec"), names)


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def for_sharding() -> dict[str, Any]:
    cut = PartitionSpec("data", None, "model")
    q, k, v = arrays(*[(8, 16, 4, 8)] * 3)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = jax.device_put((q, k, v), jax.NamedSharding(mesh, cut))
    step = lambda q, k, v: jax_fa4.attention(q, k, v, is_causal=True)  # noqa: E731
    return {"step": step, "arrays_on_a_mesh": placed, "mesh": mesh, "cut": cut, "q": q, "k": k, "v": v}


def for_emulator() -> dict[str, Any]:
    """A kernel that counts its threads."""
    from emulator import Launch, Pointer, Uninitialised
    from emulator.snippets import module

    text = "ld.param.b64 %d0, [p0];\nmul.wide.u32 %d1, %r1, 4;\nadd.s64 %d2, %d0, %d1;\nst.global.b32 [%d2], %r1;\n"
    launch = Launch((Pointer("out"),), grid=(1, 1, 1), block=(32, 1, 1))
    memory = {"out": Uninitialised((32,), np.uint32)}
    return {"ptx": module(text, (Pointer("out"),)), "launch": launch, "memory": memory}


def names_for(page: Path) -> dict[str, Any]:
    """What the text around a page's blocks takes for granted."""
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "jax_fa4": jax_fa4, "__name__": "docs"}
    if page.name == "README.md":  # without a batch axis, so that they are packed sequences as well
        q, k, v = arrays((12, 8, 64), (12, 2, 64), (12, 2, 64))
        cu = jnp.array([0, 5, 12])
        return names | {"q": q, "k": k, "v": v, "cu_q": cu, "cu_k": cu}
    q, k, v = arrays((2, 64, 8, 32), (2, 64, 2, 32), (2, 64, 2, 32))
    return (
        names
        | {"q": q, "k": k, "v": v}
        | {"sharding.md": for_sharding, "emulator.md": for_emulator}.get(page.name, dict)()
    )


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_blocks_run(page):
    names = names_for(page)
    run(page, names)
    if page.name == "emulator.md":
        assert (names["report"].outputs["out"] == np.arange(32)).all()
    if page.name == "api.md":
        shown, real = inspect.signature(names["attention"]), inspect.signature(jax_fa4.attention)
        assert [(p.name, p.kind, p.default) for p in shown.parameters.values()] == [
            (p.name, p.kind, p.default) for p in real.parameters.values()
        ]


def test_blocks_are_found(tmp_path):
    """None is passed over, and one that fails, fails with the line it stands on."""
    for page in PAGES:
        text = page.read_text()
        assert len(blocks(page, "python")) == text.count("\n```python"), page.name
    broken = tmp_path / "broken.md"
    broken.write_text("# A page\n\n```python\nx = 1\nassert x == 2, 'two'\n```\n")
    with pytest.raises(AssertionError, match="two") as caught:
        run(broken, {})
    assert (caught.traceback[-1].lineno, str(caught.traceback[-1].path)[-9:]) == (4, "broken.md")  # counted from 0


def commands() -> list[tuple[str, list[str]]]:
    """(page, arguments) of each `python -m jax_fa4 ...` and `python FILE ...` in a bash block."""
    found = []
    for page in PAGES:
        for _, text in blocks(page, "bash"):
            lines = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
            found += [(page.name, line[1:]) for line in lines if line[:1] == ["python"]]
    return found


def test_commands_exist():
    """Command lines parse: no option that has gone, no file that was renamed."""
    seen = commands()
    assert len(seen) > 5
    for page, arguments in seen:
        if arguments[:2] == ["-m", "jax_fa4"]:
            try:
                cli.parser().parse_args(arguments[2:])
            except SystemExit as error:
                pytest.fail(f"{page}: python {' '.join(arguments)} does not parse: {error}")
        elif arguments[0] != "-m":
            assert (ROOT / arguments[0]).is_file(), f"{page}: {arguments[0]} is not there"
            source = (ROOT / arguments[0]).read_text()
            for option in (a for a in arguments[1:] if a.startswith("--")):
                assert f'"{option}"' in source, f"{page}: {arguments[0]} has no option {option}"


def test_site_has_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r": ([\w/]+\.md)$", text, re.MULTILINE)
    assert len(nav) == len(set(nav)) > 10
    for page in nav:
        assert (ROOT / "docs" / page).is_file(), f"{page} is in the site's contents and does not exist"
    missing = {p.name for p in (ROOT / "docs").glob("*.md")} - set(nav)
    assert not missing, f"not in the site's contents: {missing}"


def test_links_between_pages():
    """Links of a page to a heading of another meet one."""
    slug = lambda title: re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")  # noqa: E731
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([\w/.]*\.md)#([\w\-]+)\)", page.read_text()):
            titles = re.findall(r"^#+ (.+)$", (page.parent / target).read_text(), re.MULTILINE)
            assert anchor in map(slug, titles), f"{page.name}: {target} has no heading #{anchor}"


def test_plans_page_shows_the_plans():
    """The generated page names every ring and role of the plans as they are now. (Numbers: `tools/draw_plans.py`.)"""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import draw_plans
    finally:
        sys.path.pop(0)
    text = (ROOT / "docs" / "plans.md").read_text()
    shown = draw_plans.shown()
    assert len(shown) >= 5
    for title, plan in shown:
        assert f"## {title}\n" in text, f"run tools/draw_plans.py: {title} is missing"
        part = text.split(f"## {title}\n")[1].split("\n## ")[0]
        for ring in plan.rings:
            assert f"| {ring.name} | {ring.producer} | {ring.consumer} |" in part, f"run tools/draw_plans.py: {title}"


def test_counts_agree_with_the_rules():
    """The counted cycles that the picture shows: tensor and shared memory as by the rule, exp one more for each row."""
    cases = json.loads((ROOT / "docs" / "measured" / "blackwell_forward_counts.json").read_text())["cases"]
    assert len(cases) == 8
    for name, case in cases.items():
        counted, rule = case["counted"], case["rule"]
        for unit in ("tensor", "operand reads", "fills"):
            assert counted[unit] == rule[unit], (name, unit)
        assert counted["exp"] == rule["exp"] + 128 / 16, name
