"""Imported as `dragoman.server`, by that name alone: under two names each class here would exist twice."""

if __name__ != "dragoman.server":
    raise ImportError("import dragoman.server instead", name=__name__)
