"""The bundles of a folder of models, opened."""

from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError


def find_bundles(folder: Path) -> list[Bundle]:
    """Open every bundle in a folder, or the one that the folder itself is; sorted by name. Hidden folders are left alone.

    Raises:
        BundleError: If there is none, one is damaged, or two have the same name.
    """
    if not folder.is_dir():
        raise BundleError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if (folder / MANIFEST_FILE).exists():
        directories = [folder]
    else:
        manifests = folder.glob(f"*/{MANIFEST_FILE}")
        directories = sorted(path.parent for path in manifests if not path.parent.name.startswith("."))
    if not directories:
        raise BundleError(f"{folder}: holds no bundle (a directory with {MANIFEST_FILE})")
    bundles: dict[str, Bundle] = {}
    for directory in directories:
        bundle = Bundle.open(directory)
        name = bundle.manifest.name
        if name in bundles:
            raise BundleError(f"{directory} and {bundles[name].directory} both hold a model named {name!r}")
        bundles[name] = bundle
    return [bundles[name] for name in sorted(bundles)]
