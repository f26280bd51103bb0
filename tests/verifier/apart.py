"""The verifier in a process of its own: `python apart.py WORDS.json` prints the verdict of a call with these words.

A proof of equality runs in the process that asks for it, and its budget of memory counts all that this process holds:
8 GB of it were a test worker's own, after an hour of emulated kernels, and 26 proofs had no verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def verify(folder: Path, **words: Any) -> dict[str, Any]:
    """What `ask.ask` returns for these words, of which `ptx` is the first; the folder takes them along."""
    at = folder / "words.json"
    at.write_text(json.dumps(words))
    done = subprocess.run([sys.executable, __file__, str(at)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the verifier's process ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    from ask import ask  # beside this file

    words = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps(ask(words.pop("ptx"), **words), default=str))
