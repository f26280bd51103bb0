"""Times attention against its peers on a GPU: the same as `python -m jax_fa4 benchmark`, and as a library.

    python examples/benchmark.py                            # the standard sweep; --help lists the arguments
    python examples/benchmark.py --depths 128 --gqa 1 4 --window 1024 --deterministic --out mine.json --plots plots
    python examples/benchmark.py --one                      # a single case, measured from Python

Only numbers of one run belong together: clocks and temperatures differ between runs.
"""

from __future__ import annotations

import argparse
import sys

import jax

from jax_fa4 import benchmark


def one() -> int:
    """A single case from Python: 4 sequences of 4096, 32 query heads, 8 key heads, causal."""
    if jax.default_backend() != "gpu":
        print(f"needs a GPU; the backend is {jax.default_backend()}")
        return 2
    case = benchmark.Case(depth=128, length=4096, batch=4, heads=32, kv_heads=8, causal=True)
    print(benchmark.table(benchmark.measure(case, ["ours", "cudnn"])))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help="a single case, measured from Python")
    benchmark.arguments(parser)
    args = parser.parse_args()
    return one() if args.one else benchmark.run(args)


if __name__ == "__main__":
    sys.exit(main())
