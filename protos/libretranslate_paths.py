"""LibreTranslate's API for the OpenAPI document: paths, and schemas of JSON; that forms are read too is left out."""

from inference_paths import JSON, NUMBER, TEXT, Schema, described, one_or_some, operation, ref, some, thing

# Method, path, id, what it is, request and answer.
PATHS: tuple[tuple[str, str, str, str, str, Schema], ...] = (
    ("post", "/translate", "Translate", "Translates texts.", "TranslateRequest", ref("TranslateResponse")),
    ("post", "/detect", "Detect", "Tells languages that a text may have.", "DetectRequest", some(ref("DetectedLanguage"))),
    ("get", "/languages", "Languages", "Languages that there are models for.", "", some(ref("TranslatedLanguage"))),
    ("get", "/frontend/settings", "FrontendSettings", "What a page needs to know.", "", {"type": "object"}),
    ("get", "/health", "Health", "Whether the server is ready; 503 if it is not.", "", thing("", ("status",), status=TEXT)),
)
OF_BODIES = ("400", "403", "408", "413", "415", "429", "504")


def paths(headers: list[Schema]) -> dict[str, Schema]:
    """Return every path.

    Args:
        headers: Those that requests may have.
    """
    found: dict[str, Schema] = {}
    for method, path, name, text, request, answer in PATHS:
        statuses = sorted(("405", "500", "503", *(OF_BODIES if request else ())))
        content = {JSON: {"schema": answer}}
        found[path] = {method: operation(name, text, path, headers, request, content, statuses, "LibreTranslate's API")}
    return found


def schemas() -> dict[str, Schema]:
    """Return every schema by its name."""
    key = described(TEXT, "Token of the caller, where it is in no header.")
    detected = one_or_some(ref("DetectedLanguage"))
    return {
        "TranslateRequest": thing(
            "Texts, and their languages.",
            ("q", "source", "target"),
            is_open=True,
            q=described(one_or_some(TEXT, maxItems=1024), "A text, or a list of them."),
            source=described(TEXT, "Code of a language, or `auto`."),
            target=described(TEXT, "Code of a language."),
            format=TEXT | {"enum": ["text"]},
            alternatives=described(NUMBER, "Further answers wanted."),
            api_key=key,
            model=described(TEXT, "Name of a model, where several have the languages."),
        ),
        "TranslateResponse": thing(
            "Translations, in lists where `q` is one.",
            ("translatedText",),
            translatedText=one_or_some(TEXT),
            alternatives=some({"oneOf": [TEXT, some(TEXT)]}),
            detectedLanguage=described(detected, "Where `source` is `auto`."),
        ),
        "DetectRequest": thing("A text.", ("q",), is_open=True, q=TEXT, api_key=key),
        "DetectedLanguage": thing("", ("language", "confidence"), language=TEXT, confidence={"type": "number"}),
        "TranslatedLanguage": thing("", ("code", "name", "targets"), code=TEXT, name=TEXT, targets=some(TEXT)),
    }
