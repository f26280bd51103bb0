"""Counters: instructions by family and bytes and cycles by cause, for each warp and role."""

from collections import defaultdict

MUFU_LANES = 16  # results a cycle of an SM's special-function unit
SHARED_BYTES = 128  # bytes a cycle of an SM's shared memory
TENSOR_RATE = {"sm_90a": 4096, "sm_100a": 8192}  # dense 16-bit FLOP a cycle and SM


class Counters:
    """`instructions[role][family]`: warp-instructions. `amounts[role][cause]`: bytes, or cycles for `tensor.cycles`."""

    def __init__(self, roles):
        self.instructions = defaultdict(lambda: defaultdict(float))
        self.amounts = defaultdict(lambda: defaultdict(float))
        self.role_of = {warp: name for name, warps in roles.items() for warp in warps}

    def role(self, warp):
        return self.role_of.get(warp, f"warp {warp}")

    def add(self, warp, cause, amount):
        self.amounts[self.role(warp)][cause] += amount

    def add_cta(self, cta, warp, cause, amount):
        """An amount that falls to `cta`, caused by `warp` of itself or of its peer."""
        self.add(warp, cause, amount)

    def total(self, name):
        """Sum over roles of a family or cause."""
        return sum(t.get(name, 0) for table in (self.instructions, self.amounts) for t in table.values())

    def mufu_elements(self, family="mufu.ex2"):
        return 32 * self.total(family)

    def cycles(self):
        """{resource: cycles} by the counting rules: tensor, exp (all MUFU elements of ex2 / 16), shared memory by
        cause (bytes / 128).
        """
        causes = ("mma.read", "tma.write", "bulk.read", "bulk.write", "load.shared", "store.shared")
        out = {"tensor": self.total("tensor.cycles"), "exp": self.mufu_elements() / MUFU_LANES}
        return out | {c: self.total(c) / SHARED_BYTES for c in causes}

    def table(self):
        """Text for people: one row a role and name."""
        lines = []
        for title, data in (("warp-instructions", self.instructions), ("bytes, cycles", self.amounts)):
            lines.append(title)
            for role in sorted(data):
                row = ", ".join(f"{k} {v:.0f}" for k, v in sorted(data[role].items()) if v)
                lines.append(f"  {role}: {row}")
        lines.append("cycles: " + ", ".join(f"{k} {v:.0f}" for k, v in self.cycles().items()))
        return "\n".join(lines)
