"""Server package, importable only as `dragoman.server`: under two names each class would exist twice."""

if __name__ != "dragoman.server":
    raise ImportError("import dragoman.server instead", name=__name__)
