"""Runs the tests that face jax against the oldest supported jax and the newest, each in an environment of its own.

    python tools/versions.py                 # both; interpreters python3.11 and python3.12 must be there
    python tools/versions.py newest --keep DIR --tests tests/test_api.py

Each environment is made from nothing: the declared dependencies at the versions named below, and the test extra.
Prints a table; the exit status is 1 when a run fails, 2 when an interpreter is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What depends on jax: transforms, sharding, export, the FFI call, Flax modules. Compilers and emulators do not.
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        "api",
        "call",
        "reference",
        "transforms",
        "sharding",
        "context_parallel",
        "export",
        "flax_modules",
        "flax_masks",
        "flax_decode",
        "public_failures",
    )
)


@dataclass(frozen=True)
class Environment:
    """One interpreter and what is pinned in it. jax 0.11 and later need Python 3.12."""

    name: str
    python: str
    pins: tuple[str, ...]


def oldest_jax(text: str) -> str:
    """The lower bound that pyproject.toml declares, as X.Y.0."""
    found = re.search(r'"jax>=([\d.]+)"', text)
    if not found:
        raise ValueError("pyproject.toml declares no lower bound of jax as jax>=X.Y")
    return found.group(1) + ".0" * (found.group(1).count(".") == 1)


def environments() -> dict[str, Environment]:
    """The two ends of what pyproject.toml accepts."""
    oldest = oldest_jax((ROOT / "pyproject.toml").read_text())
    return {
        "oldest": Environment("oldest", "python3.11", (f"jax=={oldest}", f"jaxlib=={oldest}")),
        "newest": Environment("newest", "python3.12", ("jax",)),
    }


def interpreter(name: str) -> str | None:
    """A path to the interpreter that runs: a pyenv shim may be there without its version being active."""
    candidates = [shutil.which(name), *map(str, sorted(Path.home().glob(f".pyenv/versions/{name[6:]}*/bin/{name}")))]
    for path in filter(None, candidates):
        if subprocess.run([path, "-c", "pass"], capture_output=True).returncode == 0:
            return path
    return None


def run(environment: Environment, folder: Path, tests: list[str]) -> tuple[str, int]:
    """(a line of the table, exit status)."""
    python = interpreter(environment.python)
    if python is None:
        return f"{environment.name}: no {environment.python} here", 2
    home = folder / environment.name
    if not (home / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", home], check=True)
    inside = str(home / "bin" / "python")
    subprocess.run([inside, "-m", "pip", "install", "-q", "--upgrade", *environment.pins, f"{ROOT}[test]"], check=True)
    subprocess.run([inside, "-m", "pip", "check"], check=True)
    subprocess.run([inside, "-m", "pip", "uninstall", "-q", "-y", "jax_fa4"], check=True)  # the tree is what is tested
    say = "import jax, flax, sys; print(sys.version.split()[0], 'jax', jax.__version__, 'flax', flax.__version__)"
    versions = subprocess.run([inside, "-c", say], capture_output=True, text=True, check=True).stdout.strip()
    began = time.perf_counter()
    command = [inside, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    last = (done.stdout.strip().splitlines() or ["nothing printed"])[-1].strip("= ")
    return f"{environment.name}: Python {versions}: {last} ({time.perf_counter() - began:.0f} s)", int(
        done.returncode != 0
    )


def main(argv: list[str] | None = None) -> int:
    """Both ends, or those named."""
    known = environments()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[[], *known], help="oldest, newest (default both)")
    parser.add_argument("--keep", type=Path, help="folder of the environments, used again if they are there")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        lines = [run(known[name], folder, options.tests) for name in options.which or known]
    print("\n".join(line for line, _ in lines))
    return max(status for _, status in lines)


if __name__ == "__main__":
    sys.exit(main())
