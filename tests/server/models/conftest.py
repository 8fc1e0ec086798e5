import pytest

from dragoman.server.models import memory as placement
from dragoman.server.models import reconciler as model_keeper


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Poll often where the program polls, so that no test waits."""
    monkeypatch.setattr(model_keeper, "WATCH_SECONDS", 0.002)
    monkeypatch.setattr(placement, "LOOK_SECONDS", 0.001)
