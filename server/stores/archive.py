"""Archives of bundle folders: one file, whose SHA-256 is given, that is unpacked where nobody looks and read like any folder."""

import lzma
import os
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Final

from dragoman.export.bundle import BundleError
from dragoman.export.fields import MAX_BUNDLE_BYTES, one_line

MAX_MEMBERS: Final = 100_000


def unpack(archive: Path, folder: Path, name: str) -> None:
    """Unpack an archive, a tar as it is or compressed.

    Args:
        archive: The file.
        folder: An empty one.
        name: Of the archive, for messages.

    Raises:
        BundleError: If it is no tar, would write outside of the folder, or holds more than there is room for.
        OSError: If it cannot be written.
    """
    room = min(shutil.disk_usage(folder).free, MAX_BUNDLE_BYTES)
    try:
        with tarfile.open(archive) as opened:
            for number, member in enumerate(opened, start=1):
                room -= member.size
                if number > MAX_MEMBERS or room < 0:
                    raise BundleError(f"{name}: holds more than there is room for")
                if not (member.isreg() or member.isdir()):
                    raise BundleError(f"{name}: {one_line(member.name)} is neither a file nor a folder")
                opened.extract(member, folder, filter="data")
    except BundleError:
        raise
    except (tarfile.TarError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise BundleError(f"{name}: cannot be unpacked: {one_line(str(error))}") from error
    except OSError as error:
        if error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), error.filename or str(folder)) from error
        raise BundleError(f"{name}: cannot be unpacked: {one_line(str(error))}") from error  # of the compression
