"""Windows of INT4 codes from their definition: words by value, one code and scale at a time."""

import math
from bisect import bisect_right
from fractions import Fraction

# Where a code's window begins, in scales.
STARTS = {1: "7/16", 2: "3/4", 3: "5/4", 4: "2", 5: "5/2", 6: "3", 7: "7/2", 8: "4"}


def bf16_value(magnitude: int) -> float:
    """Of a finite BF16 word without its sign."""
    exponent, mantissa = divmod(magnitude, 128)
    if exponent == 0:
        return math.ldexp(mantissa, -133)
    return math.ldexp(128 + mantissa, exponent - 134)


VALUES = [bf16_value(magnitude) for magnitude in range(0x7F80)]


def last_not_above(value: Fraction) -> int:
    """The largest BF16 magnitude that a value reaches."""
    return bisect_right(VALUES, value) - 1


def window_of(code: int, scale: float) -> range:
    """The words of a code that is not 0."""
    scale = scale if math.isfinite(scale) else 0.0
    first = last_not_above(Fraction(STARTS[abs(code)]) * Fraction(abs(scale)))
    negative = (code < 0) != (math.copysign(1, scale) < 0)
    return range(first + 0x8000 * negative, first + 0x8000 * negative + 256)


def high_bytes_of_zero(scale: float) -> list[int | None]:
    """The high byte that each class of code 0 stands for; None where it stands for none."""
    scale = scale if math.isfinite(scale) else 0.0
    top = last_not_above(Fraction(abs(scale)) / 2) // 256
    below = [top - step if top >= step else None for step in range(3)]
    return [*below, 0, *(byte if byte is None else byte + 128 for byte in below), None]


def told(word: int, code: int, scale: float) -> bool:
    """Whether a code and the low byte, or the class, tell the word."""
    if code:
        return word in window_of(code, scale)
    return word // 256 in high_bytes_of_zero(scale)


def codes_left(word: int, scale: float) -> list[int]:
    """The codes that GPTQ may give a weight, of a scale above 0: those whose window holds its word,
    and 0 for a word that is below all windows, or that is in that of 1 and told by 0 as well."""
    sign = -1 if word >= 0x8000 else 1
    codes = [sign * size for size in range(1, 9) if sign * size < 8]
    found = [code for code in codes if told(word, code, scale)]
    magnitude = word % 0x8000
    if magnitude < window_of(1, scale).start or (sign in found and told(word, 0, scale)):
        found.append(0)
    # Beyond all windows.
    return found or [codes[-1]]
