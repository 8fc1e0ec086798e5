"""What an engine is started with: what follows from the settings."""

import msgspec
import pytest

from dragoman.server.engine.settings import EngineSettings


@pytest.mark.parametrize(
    ("max_slots", "chosen", "allowed"),
    [(64, 0, 16), (256, 0, 64), (32, 0, 16), (8, 0, 8), (1, 0, 1), (64, 64, 64), (64, 1, 1), (8, 5, 5)],
)
def test_a_request_may_take_a_quarter_of_the_slots_or_sixteen_unless_a_setting_says_otherwise(
    max_slots: int, chosen: int, allowed: int
) -> None:
    settings = EngineSettings(
        "ipc://x", "bundle", 1, max_slots, 10, 1000, 1000, False, "error", "json", max_slots_per_request=chosen
    )
    assert settings.slots_per_request == allowed
    again = msgspec.json.decode(msgspec.json.encode(settings), type=EngineSettings)
    assert again.slots_per_request == allowed
