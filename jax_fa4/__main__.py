"""python -m jax_fa4 precompile | doctor | benchmark."""

from jax_fa4.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
