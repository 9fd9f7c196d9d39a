"""Additions to universal_pathlib's gs:// and s3:// paths: uncached listings, checksums, reads of known size, exclusive
creation, and errors that name the file.

It imports no file but messages.py; fsspec and a client are imported for the first URL.
"""

import contextlib
import io
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from messages import Refused

if TYPE_CHECKING:
    from upath import UPath

CLIENTS = {'gs': 'gcsfs', 's3': 's3fs'}
DRIVERS = {'gs': 'gcs', 's3': 's3'}  # TensorStore's


class FileStatus(NamedTuple):
    num_bytes: int
    checksum: str | None = None  # the bucket's


class ReadError(OSError):
    """A bucket does not answer. A damaged file raises another error."""


def path_of(url: str) -> 'UPath':
    """Return the path of a URL, without `..`. Refuses schemes other than gs:// and s3://."""
    scheme, _, location = url.partition('://')
    if scheme not in CLIENTS or not find_spec(CLIENTS[scheme]) or not find_spec('upath'):
        raise Refused(f'{url}: only disks, gs:// and s3:// are known (extras .[gcs], .[s3])')
    from fsspec.registry import register_implementation
    from upath import UPath

    # gcsfs.GCSFileSystem is a class that looks for credentials for seconds at every call.
    register_implementation('gs', 'gcsfs.core.GCSFileSystem', clobber=True)
    url = f'{scheme}://{posixpath.normpath(f"/{location}")[1:]}'
    with client_errors(url, 'opened', Refused):
        # Listings are not cached: TensorStore and other processes also write.
        return UPath(url, use_listings_cache=False)


def to_path(url: str) -> 'UPath':
    """Return the path of a URL, whether it exists or not. Refuses a pattern, and a bucket that cannot be listed."""
    if re.search('[*?[]', url):
        raise Refused(f'{url}: *, ? and [ make a pattern: name another folder')
    path = path_of(url)
    list_folder(path)
    return path


def matching_files(url: str) -> dict[str, FileStatus]:
    """Return the files of a URL or a glob. Refuses a bucket that cannot be listed."""
    pattern = path_of(url)
    with client_errors(pattern, 'listed', Refused):
        matches = pattern.fs.glob(pattern.path, detail=True)
    files = {}
    for name, info in matches.items():
        if info['type'] == 'file':
            files[f'{pattern.protocol}://{name}'] = file_status(info)
    return files


def list_folder(folder: 'UPath') -> list['UPath']:
    """Return a folder's content, [] if it does not exist."""
    with client_errors(folder, 'listed', Refused), contextlib.suppress(FileNotFoundError):
        names = folder.fs.ls(folder.path, detail=False)
        return [folder / posixpath.basename(name) for name in names]
    return []


def status_of(url: str) -> FileStatus:
    path = path_of(url)
    with client_errors(url, 'read', ReadError):
        return file_status(path.fs.info(path.path))


def file_status(info: Mapping) -> FileStatus:
    """Take the size and the checksum from a client's description of a file."""
    return FileStatus(info['size'], info.get('crc32c', info.get('ETag')))


def open_file(url: str, read_ahead: int, num_bytes: int | None) -> io.BufferedReader:
    """Open a file for reading, as `paths.open_file` describes it."""
    from fsspec.spec import AbstractBufferedFile

    path = path_of(url)

    def fetch(start, end):
        with client_errors(url, 'read', ReadError):
            content = path.fs.cat_file(path.path, start=start, end=end)
        if len(content) != end - start:
            raise ReadError(f'{url} no longer has {raw.size:,} bytes: restore it')
        return content

    with client_errors(url, 'read', ReadError):
        raw = AbstractBufferedFile(path.fs, path.path, block_size=read_ahead, size=num_bytes)
    raw.cache.fetcher = fetch
    return io.BufferedReader(raw, min(read_ahead, io.DEFAULT_BUFFER_SIZE) or 1)


def write(file: 'UPath', content: bytes) -> None:
    with client_errors(file, 'written', OSError):
        file.fs.pipe_file(file.path, content)


def rename(folder: 'UPath', new: 'UPath') -> None:
    """Copy the files of a folder, and remove it."""
    with client_errors(folder, 'renamed', OSError):
        files = folder.fs.find(folder.path)
        folder.fs.copy(files, [file.replace(folder.path, new.path, 1) for file in files])
    remove(folder)


def remove(folder: 'UPath') -> None:
    with client_errors(folder, 'removed', OSError):
        folder.fs.rm(folder.path, recursive=True)


def create(file: 'UPath', content: bytes) -> bool:
    """Write a file unless it exists; return whether it has this `content`, which must be unique."""
    with client_errors(file, 'written', OSError):
        try:
            file.fs.pipe_file(file.path, content, mode='create')
        except OSError:  # each client has its own subclass
            if not file.exists():
                raise
            return file.read_bytes() == content  # equal if the client repeated its request
    return True


def to_kvstore(folder: 'UPath') -> dict[str, str]:
    """Return the TensorStore spec of a folder."""
    bucket, _, path = folder.path.partition('/')
    kvstore = {'driver': DRIVERS[folder.protocol], 'bucket': bucket, 'path': f'{path}/'}
    endpoint = os.environ.get('AWS_ENDPOINT_URL')  # an S3 store that is not Amazon's
    if endpoint and folder.protocol == 's3':
        kvstore['endpoint'] = endpoint
    return kvstore


@contextlib.contextmanager
def client_errors(file: object, verb: str, kind: type[Exception]) -> Iterator[None]:
    """Raise `kind`, with the file's name, for any error: each client has its own exceptions."""
    try:
        yield
    except Exception as error:
        text = ' '.join(f'{type(error).__name__}: {error}'.split())
        remedy = 'check its name, your rights and the network'
        raise kind(f'{file} cannot be {verb} ({text}): {remedy}') from error
