"""The verifier tier: sm_100a kernels judged by sentryward, a static verifier that executes their PTX symbolically.

It proves, for one launch, that every schedule has the same synchronisation, that conflicting accesses are ordered and
that tensor memory and barriers are used within their lifetimes; optionally that results equal a PyTorch function over
the real numbers. It knows nothing of rounding, proxy fences, `wait::ld`, register budgets and bounds: tests/ptx_lint.py
and the emulator look there.
"""
