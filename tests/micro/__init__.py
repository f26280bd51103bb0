"""Small kernels of ours, one feature each, with plain parameters: verifier, lint and emulator are tested on them."""
