"""What lies in a store, by the paths that it lists."""

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.repository.version_names import natural_key
from dragoman.server.stores.found import Found, find

ADDRESS = "s3://models"


def test_versions_have_the_order_that_those_who_serve_them_give_them() -> None:
    names = ["2", "v1", "10", "1.2", "1.b", "2024-11-01", "v10"]
    found = find([f"en-de/{name}/bundle.json" for name in names], ADDRESS)
    assert [each.version for each in found] == sorted(names, key=natural_key)


@pytest.mark.parametrize("version", ["1+2", "x" * 65, "-1"])
def test_a_version_that_nobody_would_serve_is_refused(version: str) -> None:
    with pytest.raises(BundleError, match=r"s3://models/m: .* is no name of a version"):
        Found(f"m/{version}", "m", version).check("s3://models/m")


def test_a_number_beyond_all_bounds_is_a_name_like_any_other() -> None:
    paths = ["1" * 5000 + "/bundle.json", "a/bundle.json"]
    assert {each.folder for each in find(paths, ADDRESS)} == {"1" * 5000, "a"}
