"""Imported as `dragoman.model`, by that name alone: under two names each class here would exist twice."""

if __name__ != "dragoman.model":
    raise ImportError("import dragoman.model instead", name=__name__)
