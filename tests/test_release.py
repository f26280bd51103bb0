"""What is released: the wheel holds the package and its type marker, needs what it declares, has one version."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from rules import ROOT

import jax_fa4

SMALL_CALL = """
import sys
import jax, jax.numpy as jnp, jax_fa4
assert jax_fa4.__file__.startswith({where!r}), jax_fa4.__file__
x = jnp.ones((1, 4, 2, 8))
assert jax.grad(lambda x: jax_fa4.attention(x, x, x, is_causal=True).sum())(x).shape == x.shape
from jax_fa4 import cli
cli.parser().format_help()
assert not [m for m in ("flax", "cutlass", "matplotlib", "tqdm", "hypothesis") if m in sys.modules]
print("version", jax_fa4.__version__)
"""


def copied(to: Path) -> Path:
    """The files that a checkout would hold of what the build reads."""
    to.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, to)
    (to / "tests").mkdir()
    shutil.copy(Path(__file__), to / "tests")  # setuptools would take the files named test_*.py, without their helpers
    shutil.copytree(ROOT / "jax_fa4", to / "jax_fa4", ignore=shutil.ignore_patterns("__pycache__"))
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built by `python -m build`, from the source distribution that it makes first, with the setuptools here."""
    source, out = copied(tmp_path_factory.mktemp("release") / "source"), tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (made,) = out.glob("*.whl")
    return made


def metadata(wheel: Path) -> importlib.metadata.PathDistribution:
    root = zipfile.Path(wheel)
    (info,) = (p for p in root.iterdir() if p.name.endswith(".dist-info"))
    return importlib.metadata.PathDistribution(info)


def declared(requirements: list[str]) -> list[Requirement]:
    """Those that hold here, extras left out."""
    found = [Requirement(text) for text in requirements]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def needed(requirements: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions of the requirements and of theirs."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = declared(requirements)
    while todo:
        one = todo.pop()
        if one.name not in found:
            found[one.name] = importlib.metadata.distribution(one.name)
            todo += declared(found[one.name].requires or [])
    return found


def test_one_version(wheel):
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", jax_fa4.__version__)
    first = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d|unreleased)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first and first[1] == jax_fa4.__version__, f"CHANGELOG.md begins with {first and first[0]}"
    assert metadata(wheel).version == jax_fa4.__version__
    assert f"-{jax_fa4.__version__}-py3-none-any.whl" in wheel.name


def test_contents(wheel):
    """Every source file of the package and the type marker; nothing of tests, tools, docs."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {p.relative_to(ROOT).as_posix() for p in (ROOT / "jax_fa4").rglob("*.py")} | {"jax_fa4/py.typed"}
    assert wanted <= names, f"missing: {sorted(wanted - names)}"
    others = {n for n in names - wanted if ".dist-info/" not in n}
    assert not others, f"should not be in it: {sorted(others)}"
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert "Typing :: Typed" in metadata(wheel).metadata.get_all("Classifier")


def test_source_distribution(wheel):
    """The package, what builds it, licence and changelog; no part of the tests."""
    (path,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(path) as tar:
        names = {n.split("/", 1)[1] for n in tar.getnames() if "/" in n and tar.getmember(n).isfile()}
    assert {p.relative_to(ROOT).as_posix() for p in (ROOT / "jax_fa4").rglob("*.py")} <= names
    tops = {n.split("/")[0] for n in names}
    files = {"PKG-INFO", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in"}
    assert tops == files | {"jax_fa4", "jax_fa4.egg-info"}


def test_declared_dependencies_are_enough(wheel, tmp_path):
    """Imports and runs with nothing but the interpreter, the wheel and what it declares (links to what is here)."""
    for name, distribution in needed(metadata(wheel).requires or []).items():
        for top in {f.parts[0] for f in distribution.files or () if f.parts[0] != ".."}:
            place, link = Path(str(distribution.locate_file(top))), tmp_path / top
            if top != "__pycache__" and not link.exists():
                assert place.exists(), f"{name}: {place}"
                link.symlink_to(place)
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert not (tmp_path / "flax").exists() and (tmp_path / "jax").exists()
    alone = f"import sys\nsys.path[:] = [{str(tmp_path)!r}, *(p for p in sys.path if 'site-packages' not in p)]\n"
    run = isolated(sys.executable, alone + SMALL_CALL.format(where=str(tmp_path)))
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"version {jax_fa4.__version__}\n"


def isolated(python: str, code: str) -> subprocess.CompletedProcess[str]:
    """Code in an interpreter that sees neither the user's packages nor this folder."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, env={**environment, "JAX_PLATFORMS": "cpu"}, cwd="/"
    )


@pytest.mark.prove
def test_clean_environment(wheel, tmp_path):
    """`pip install` of the wheel into a new environment, `pip check`, and a call there. Downloads jax."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    for command in (["install", "-q", str(wheel)], ["check"]):
        run = subprocess.run([python, "-m", "pip", *command], capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    run = isolated(python, SMALL_CALL.format(where=str(tmp_path / "env")))
    assert run.returncode == 0, run.stderr
    assert run.stdout == f"version {jax_fa4.__version__}\n"


@pytest.mark.prove
def test_build_isolated(tmp_path):
    """`python -m build` as a release runs it: a source archive, and the wheel from it, with a fresh setuptools."""
    source = copied(tmp_path / "source")
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(source)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(p.suffix for p in (tmp_path / "dist").iterdir()) == [".gz", ".whl"]
