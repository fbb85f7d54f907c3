"""Numbers as people write them: a fixed number of digits, true minus signs, powers of ten."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_LARGE = 1e9  # from here on digits are counted by a power of ten


def is_number(value: float | None) -> bool:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def power(exponent: int) -> str:
    """Return a power of ten, such as "10⁻³"."""
    return "10" + str(exponent).translate(_SUPERSCRIPT)


def fixed(value: float, digits: int) -> str:
    """Return a number with so many digits behind the point.

    Parameters
    ----------
    value : float
        Any number; NaN is written "NaN", an infinity "∞".
    digits : int
        Behind the point.

    Examples
    --------
    >>> fixed(-0.12345, 3)
    '−0.123'
    >>> fixed(12345.6, 0)
    '12\u202f346'
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    text = f"{abs(value):.{max(digits, 0)}f}"
    whole, point, rest = text.partition(".")
    if len(whole) > 4:  # groups of three digits, with a thin space that breaks no line
        whole = f"{int(whole):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    negative = value < 0 and any(digit in "123456789" for digit in text)
    return f"{MINUS if negative else ''}{whole}{point}{rest}"


def scientific(value: float, digits: int = 1) -> str:
    """Return a number as a mantissa with so many digits behind the point, times a power of ten.

    Examples
    --------
    >>> scientific(0.00012)
    '1.2×10⁻⁴'
    """
    if value == 0 or not math.isfinite(value):
        return fixed(value, digits)
    mantissa, _, exponent = f"{value:.{max(digits, 0)}e}".partition("e")
    return f"{mantissa.replace('-', MINUS)}×{power(int(exponent))}"


def is_out_of_reach(value: float, digits: int) -> bool:
    """Whether so many digits behind the point show nothing of a number, or far too much."""
    return math.isfinite(value) and value != 0 and (abs(value) >= _LARGE or float(f"{value:.{max(digits, 0)}f}") == 0)


def figure(value: float, digits: int) -> str:
    """Return a number with so many digits behind the point, or with a power of ten where these would show nothing.

    Examples
    --------
    >>> figure(0.5, 2), figure(0.0004, 2)
    ('0.50', '4.0×10⁻⁴')
    """
    return scientific(value) if is_out_of_reach(value, digits) else fixed(value, digits)
