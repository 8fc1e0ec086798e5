from collections.abc import Iterator

import pytest

from tests.load.harness import Scripted, serving


@pytest.fixture
def server() -> Iterator[Scripted]:
    with serving() as service:
        yield service
