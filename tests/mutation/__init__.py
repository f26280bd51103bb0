"""Mutation proof: faults planted in the PTX of known-good kernels, and which tier notices each.

`python tests/mutation/measure.py` prints the table and writes docs/measured/mutants.{json,md}.
"""
