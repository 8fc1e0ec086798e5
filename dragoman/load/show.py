"""Numbers for people: as many digits as mean something, thousands grouped, a dash for what was not measured."""

NOTHING = "–"


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds, without the unit."""
    return NOTHING if seconds is None else number(seconds * 1000)


def duration(seconds: float | None) -> str:
    """Return a time with its unit: milliseconds below ten seconds."""
    if seconds is None:
        return NOTHING
    return f"{milliseconds(seconds)} ms" if abs(seconds) < 10 else f"{number(seconds)} s"


def number(value: float | None) -> str:
    """Return a number with about three digits that count."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if size >= 10 else f"{value:,.2f}"


def share(value: float | None) -> str:
    """Return a share in percent; only all of it is 100 %."""
    if value is None:
        return NOTHING
    percent = value * 100
    return f"{int(percent * 1000) / 1000:.3f} %" if 99.9 < percent < 100 else f"{percent:.1f} %"


def one_line(text: str, max_characters: int = 500) -> str:
    """Return what somebody else wrote as one line without control characters, cut where it is longer."""
    line = " ".join(text[: 2 * max_characters].split())
    line = "".join(character if character.isprintable() else "�" for character in line)
    return line if len(line) <= max_characters else f"{line[:max_characters]}…"
