"""One mutant through the tiers, cheapest first: lint, emulator, and the verifier for what is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ptx_lint
from emulator import PtxError
from emulator.mutants import Mutant

from mutation.explained import reason

# (seed, variant): lazy seeds first, as they notice most; then the eager ones and the quick one.
TURNS = ((2, 0), (2, 1), (4, 0), (6, 1), (8, 0), (4, 1), (6, 0), (8, 1), (1, 0), (3, 1), (0, 0))


class Endless(Exception):
    """A run that does not end."""


@dataclass(frozen=True)
class Variant:
    """One launch of a kernel. execute(text, seed) -> the emulator's Report. right(outputs): do the results obey the
    error rule?"""

    execute: Callable[[str, int], Any]
    right: Callable[[dict], bool]


@dataclass(frozen=True)
class Subject:
    """A known-good kernel and how it is run and judged: on one launch or two.

    Outputs of two schedules of the right kernel are the same bits but for `loose` buffers, whose order of addition is
    free. lines: where faults are planted. verify(text) -> Verdict, or None where the verifier cannot judge the kernel.
    """

    name: str
    ptx: str
    variants: tuple[Variant, ...]
    lines: tuple[int, int] = (0, 1 << 30)
    loose: tuple[str, ...] = ()
    verify: Callable[[str], Any] | None = None
    shares: dict[int, int] | None = None  # registers of a thread -> warpgroups that take them


@dataclass
class Fate:
    """What happened to a mutant: tier lint, emulator, verifier or nothing; how says by what; why it shows so little."""

    subject: str
    kind: str
    line: int
    code: str
    tier: str
    how: str
    why: str = ""


def with_patience(call: Callable[[], Any], seconds: float) -> Any:
    """The call's result; Endless after so many CPU seconds."""

    def stop(*_: Any) -> None:
        raise Endless

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Judge:
    """Judges mutants of one subject against what the right kernel gives."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.findings = {(f.rule, f.line) for f in ptx_lint.lint(subject.ptx)}
        if self.findings:
            raise ValueError(f"{subject.name}: lint findings in the right kernel: {sorted(self.findings)}")
        self.good, self.reached, self.advice = [], set(), set()  # advice: advisories of the right kernel
        started = time.process_time()
        for variant in subject.variants:
            report = variant.execute(subject.ptx, 0).check()
            if not variant.right(report.outputs):
                raise ValueError(f"{subject.name}: the right kernel's results are wrong")
            self.good.append(report.outputs)
            self.reached |= report.reached
            self.advice |= {f.kind for f in report.findings}
        self.patience = 1.0 + 10 * (time.process_time() - started)  # CPU seconds of a run; translation counts too

    def lint(self, text: str) -> str:
        found = ptx_lint.lint(text)
        if self.subject.shares is not None:
            found += ptx_lint.registers(text, self.subject.shares)
        return found[0].rule if found else ""

    def emulator(self, text: str) -> str:
        """By what it is noticed; empty if not. `other bits`: results within the error rule, but not the same."""
        weak = ""
        for seed, number in TURNS:
            if number >= len(self.subject.variants):
                continue
            variant = self.subject.variants[number]
            try:
                report = with_patience(lambda: variant.execute(text, seed), self.patience)  # noqa: B023
            except Endless:
                return "does not end"
            if report.deadlock is not None:
                return "deadlock"
            if report.errors:
                return report.errors[0].kind
            if (
                new := {f.kind for f in report.findings} - self.advice
            ):  # our kernels have none, and tests hold them to it
                return f"{min(new)} (advisory)"
            differ = {n for n, x in self.good[number].items() if x.tobytes() != report.outputs[n].tobytes()}
            if differ and not variant.right(report.outputs):
                return "wrong results"
            if differ - set(self.subject.loose):
                weak = "other bits"
        return weak

    def fate(self, mutant: Mutant, verify: bool = True) -> Fate | None:
        """None if the text is no program: such a fault cannot be made."""
        code = self.subject.ptx.split("\n")[mutant.line - 1].strip()

        def made(tier: str, how: str, why: str = "") -> Fate:
            return Fate(self.subject.name, mutant.kind, mutant.line, code[:160], tier, how, why)

        if how := self.lint(mutant.text):
            return made("lint", how)
        try:
            how = self.emulator(mutant.text)
        except PtxError:
            return None
        if how and how != "other bits":
            return made("emulator", how)
        why = reason(self.subject.name, mutant.kind, code)
        if verify and self.subject.verify is not None and not why:
            verdict = self.subject.verify(mutant.text)
            if not verdict.safe and verdict.result not in ("None", "timeout"):
                return made("verifier", verdict.result)
        if not why and mutant.line not in self.reached:
            why = "not seen: no shape here executes this line"
        return made("emulator" if how else "nothing", how or "survives", why)
