"""Settings that hold for every call that does not say otherwise. They are part of jit's cache key: no stale traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from jax_fa4.spec import check_implementation

ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")


@dataclass(frozen=True)
class Settings:
    """One consistent set of settings."""

    deterministic: bool = False  # backward bitwise reproducible
    implementation: Any = None  # None | "fa4" | "xla" | a sequence of them
    arch: str | None = None  # build kernels for this one instead of the device's own (cross-lowering)

    def __post_init__(self) -> None:
        check_implementation(self.implementation)
        if not isinstance(self.deterministic, bool):
            raise TypeError(f"config.deterministic must be True or False; it is {self.deterministic!r}")
        if self.arch is not None and self.arch not in ARCHITECTURES:
            raise ValueError(f"config.arch must be None or one of {ARCHITECTURES}; it is {self.arch!r}")


_context = jax.make_user_context(default_value=Settings())
# The process-wide value: jax 0.10.0 has no public way to set it, but the same object inside.
_process: Any = _context if hasattr(_context, "set_global") else _context._obj


class Config:
    """Read settings as attributes; change them for the process with `update`, for a block with `config(...)`.

    >>> with jax_fa4.config(deterministic=True):
    ...     grads = jax.grad(loss)(params)
    """

    @property
    def settings(self) -> Settings:
        return _context.value

    @property
    def deterministic(self) -> bool:
        return self.settings.deterministic

    @property
    def implementation(self) -> Any:
        return self.settings.implementation

    @property
    def arch(self) -> str | None:
        return self.settings.arch

    def update(self, **changes: Any) -> None:
        """Changes settings for the whole process; unknown names are refused."""
        _process.set_global(self._changed(_process.get_global(), changes))

    @contextmanager
    def __call__(self, **changes: Any) -> Iterator[Settings]:
        """Changes settings inside a `with` block, in this thread."""
        new = self._changed(self.settings, changes)
        with _context(new):
            yield new

    @staticmethod
    def _changed(old: Settings, changes: dict[str, Any]) -> Settings:
        unknown = sorted(set(changes) - set(Settings.__dataclass_fields__))
        if unknown:
            raise ValueError(f"unknown setting {unknown[0]!r}; there are {sorted(Settings.__dataclass_fields__)}")
        if isinstance(changes.get("implementation"), list):
            changes = changes | {"implementation": tuple(changes["implementation"])}
        return replace(old, **changes)

    def __repr__(self) -> str:
        return repr(self.settings)


config = Config()
