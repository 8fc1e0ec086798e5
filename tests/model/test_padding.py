from dragoman.model.padding import pad


def test_padding_fills_up_on_the_right() -> None:
    assert pad([[5], [6, 7, 8], []], 9).tolist() == [[5, 9, 9], [6, 7, 8], [9, 9, 9]]
