from collections.abc import Iterator

import pytest

from tests.load.harness import LoadService, serving


@pytest.fixture
def server() -> Iterator[LoadService]:
    with serving() as service:
        yield service
