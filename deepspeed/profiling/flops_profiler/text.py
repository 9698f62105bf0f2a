"""Figures as text."""

from __future__ import annotations

_UNITS = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """A number with a unit.

    Args:
        num: any.
        units: T, G, M, K, "", m or u; None picks the largest of which there is one.
        precision: digits behind the point.

    Example:
        >>> number_to_string(6.28e12)
        '6.28 T'
    """
    if units is None:
        units = next((unit for unit, size in _UNITS.items() if abs(num) >= size), "" if num == 0 else "u")
    return f"{num / _UNITS[units]:.{precision}f} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds: '3.14 TMACs'."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Operations, or operations per second, which upstream writes alike: '6.28 TFLOPS'."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = 2) -> str:
    """Bytes: '1.50 GB'."""
    return f"{number_to_string(b, units, precision)}B"


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Seconds: '76.39 ms'."""
    return f"{number_to_string(duration, units, precision)}s"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Parameters: '336.23 M', and B for 1e9."""
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()
