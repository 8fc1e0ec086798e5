from dataclasses import fields
from typing import get_type_hints

import pytest

from dragoman.client.search import AS_THE_MODEL_DOES, Search, SearchOptions, with_options


def test_keywords_are_the_fields_of_the_search() -> None:
    assert get_type_hints(SearchOptions) == get_type_hints(Search)
    assert list(SearchOptions.__annotations__) == [field.name for field in fields(Search)]
    assert SearchOptions.__required_keys__ == frozenset()


def test_keywords_win_over_the_search() -> None:
    beams = Search(num_beams=4, length_penalty=0.5)
    assert with_options(beams, num_beams=2, top_k=7) == Search(num_beams=2, length_penalty=0.5, top_k=7)
    assert with_options(beams, num_beams=None) == Search(length_penalty=0.5)
    assert with_options(AS_THE_MODEL_DOES) is AS_THE_MODEL_DOES


@pytest.mark.parametrize(
    ("name", "hint"), [("num_beam", "; is 'num_beams' meant\\?"), ("sample", "; is 'do_sample' meant\\?"), ("scope_", "")]
)
def test_keyword_that_is_none_is_named(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"^unexpected keyword argument '{name}'{hint}$"):
        with_options(AS_THE_MODEL_DOES, **{name: 1})


@pytest.mark.parametrize("search", [None, {"num_beams": 4}, 4, Search])
def test_what_is_no_search_is_refused(search: object) -> None:
    with pytest.raises(TypeError, match=r"^search: a Search is wanted, not "):
        with_options(search)
