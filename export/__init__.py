"""Imported as `dragoman.export`, by that name alone: under two names each class here would exist twice."""

if __name__ != "dragoman.export":
    raise ImportError("import dragoman.export instead", name=__name__)
