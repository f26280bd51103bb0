"""FlashAttention-4's own kernels from its public package, through our emulator, counters and verifier.

Known right on Blackwell hardware, so that what the emulator says of them says something about the emulator. None of its
code is here: `measure.py` fetches the package into a folder of its own.
"""
