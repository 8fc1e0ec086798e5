from io import StringIO

from dragoman.client.progress import line_progress


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_without_a_terminal_nothing_is_shown() -> None:
    stream = StringIO()
    with line_progress(stream, "in.txt", 2) as advance:
        advance()
    assert stream.getvalue() == ""


def test_without_a_stream_nothing_is_shown() -> None:
    with line_progress(None, "in.txt", 2) as advance:
        advance()


def test_terminal_shows_lines_done_and_their_pace() -> None:
    stream = Terminal()
    with line_progress(stream, "[b]in.txt", 2) as advance:
        advance()
        advance()
    assert "[b]in.txt" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert "lines/s" in stream.getvalue()
