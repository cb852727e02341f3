"""What a probe comes to: a description, a norm that is not told, or no norm."""

from __future__ import annotations

from dataclasses import dataclass

from normswap.spec import NormSpec, Unknown

__all__ = ["Nothing", "Outcome"]


@dataclass(frozen=True)
class Nothing:
    """No norm, and how that was seen."""

    seen: str


Outcome = NormSpec | Unknown | Nothing
