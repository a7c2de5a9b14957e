"""Numbers as text. Anything that is not a finite number becomes a dash."""

MISSING = "-"
LARGEST = 1e15
"""Magnitudes beyond this are treated like infinity: no figure of a run is that large."""


def finite(value: object) -> float | None:
    """The value as a float, None for NaN, infinities, absurd magnitudes and whatever is no number.

    >>> finite(3), finite(float("nan")), finite(10**400), finite(True), finite("3")
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None


def plain(value: object, *, digits: int = 3) -> str:
    """Fixed number of decimals, thousands apart; what rounds to zero has no sign.

    >>> plain(2310.4, digits=0), plain(0.5), plain(-0.0001), plain(None)
    ('2,310', '0.500', '0.000', '-')
    """
    number = finite(value)
    return MISSING if number is None else f"{number:z,.{digits}f}"


def percent(value: object) -> str:
    """A share 0..1 with one decimal.

    >>> percent(0.125), percent(float("nan"))
    ('12.5%', '-')
    """
    number = finite(value)
    return MISSING if number is None else f"{number:z.1%}"


def fixed(value: object) -> str:
    """As many digits as fit into five characters; only larger figures take more.

    >>> fixed(1.8434), fixed(12.8434), fixed(1234.6), fixed(12345.6), fixed(None), fixed(float("nan"))
    ('1.843', '12.84', ' 1235', '12346', '    -', '    -')
    """
    number = finite(value)
    if number is None:
        return MISSING.rjust(5)
    digits = max(0, 4 - len(f"{number:.0f}"))
    return f"{number:z.{digits}f}".rjust(5)


def compact(value: object) -> str:
    """Three significant digits with a unit prefix.

    >>> compact(1_234_567), compact(2_310), compact(999.7), compact(0.25), compact(0.00001234)
    ('1.23M', '2.31k', '1k', '0.25', '1.23e-05')
    """
    number = finite(value)
    if number is None:
        return MISSING
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * scale:  # what would round up to it
            return f"{number / scale:.3g}{unit}"
    return f"{number:z.3g}"


def duration(seconds: object) -> str:
    """A length of time in its two largest units.

    >>> duration(59.9), duration(60), duration(3_599), duration(3_600), duration(86_400), duration(None)
    ('59.9 s', '1 min 0 s', '59 min 59 s', '1 h 0 min', '1 d 0 h', '-')
    """
    number = finite(seconds)
    if number is None:
        return MISSING
    if number < 60:
        return f"{number:.1f} s"
    whole = round(number)
    for large, small, units in ((86_400, 3_600, "d h"), (3_600, 60, "h min"), (60, 1, "min s")):
        if whole >= large:
            first, second = units.split()
            return f"{whole // large} {first} {whole % large // small} {second}"
    return f"{whole} s"
