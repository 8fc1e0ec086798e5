import pytest

from dragoman.server.models import executor, memory, reconciler


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often where the program polls, so that no test waits."""
    monkeypatch.setattr(reconciler, "WATCH_SECONDS", 0.002)
    for module in (executor, memory):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
