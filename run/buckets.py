"""Paths of buckets, gs:// and s3://, which are read and written through fsspec's clients.

`paths` imports this file when it is given such a path: all others call `paths`.
"""

import contextlib
import importlib
import io
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple

from messages import Refused
from paths import AnyPath, FileStatus, ReadError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Store(NamedTuple):
    """How the buckets of a scheme are read and written."""

    module: str  # the client's
    client: str  # its class, a file system of fsspec
    driver: str  # TensorStore's, and the name of the extra in setup.py that installs the client
    checksum: str  # its key in the client's listings


STORES = {
    # gcsfs itself would take a class that looks for credentials for seconds at every call.
    'gs': Store(module='gcsfs.core', client='GCSFileSystem', driver='gcs', checksum='crc32c'),
    's3': Store(module='s3fs', client='S3FileSystem', driver='s3', checksum='ETag'),
}


class BucketPath(PurePosixPath):
    """A path of gs:// or s3://, with the methods of pathlib.Path that a bucket can follow."""

    def __str__(self) -> str:
        scheme, _, location = super().__str__().partition(':/')
        return f'{scheme}://{location}'

    @property
    def client(self) -> 'AbstractFileSystem':
        return client_of(str(self))

    def exists(self) -> bool:
        return self.client.exists(str(self))

    def is_file(self) -> bool:
        return self.client.isfile(str(self))

    def is_dir(self) -> bool:
        return self.client.isdir(str(self))

    def iterdir(self) -> Iterator['BucketPath']:
        for name in self.client.listdir(str(self), detail=False):
            yield self / posixpath.basename(name)

    def glob(self, pattern: str) -> Iterator['BucketPath']:
        for name in self.client.glob(f'{self}/{pattern}'):
            yield BucketPath(f'{self.parts[0]}//{name}')

    def open(self, mode: str = 'rb') -> IO[bytes]:
        return self.client.open(str(self), mode)

    def read_bytes(self) -> bytes:
        return self.client.cat_file(str(self))

    def mkdir(self, parents: bool, exist_ok: bool) -> None:
        """Do nothing: a bucket has no folders."""

    def unlink(self) -> None:
        """Remove the file if it exists, which S3 does not tell."""
        with contextlib.suppress(FileNotFoundError):
            self.client.rm_file(str(self))

    def rename(self, new: AnyPath) -> None:
        """Rename this folder by copying its files inside of the store. Raises OSError."""
        with client_errors(str(self), 'renamed', OSError):
            names = self.client.find(str(self))  # without gs://
            old = str(self).partition('://')[2]
            self.client.copy(names, [f'{new}{name.removeprefix(old)}' for name in names])
        self.remove_folder()

    # Methods that pathlib.Path lacks, or has in several calls.

    def file_sizes(self) -> dict[AnyPath, int]:
        """Return {path: bytes} of this folder's content, {} if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            found = self.client.ls(str(self), detail=True)
            return {self / posixpath.basename(x['name']): x['size'] for x in found}
        return {}

    def create(self, content: bytes) -> bool:
        """Write the file unless it exists, and return whether this call did: among several, one does."""
        with client_errors(str(self), 'written', OSError):
            try:
                self.client.pipe_file(str(self), content, mode='create')
            except OSError:  # each client has its own subclass
                if not self.exists():
                    raise
                return False
        return True

    def replace_with(self, content: bytes) -> None:
        """Write the file as one object. Raises OSError."""
        with client_errors(str(self), 'written', OSError):
            self.client.pipe_file(str(self), content)

    def remove_folder(self) -> None:
        """Remove the folder and what is in it. Raises OSError."""
        with client_errors(str(self), 'removed', OSError):
            self.client.rm(str(self), recursive=True)

    def to_kvstore(self) -> dict[str, str]:
        """Return the TensorStore spec of this folder."""
        scheme, _, location = str(self).partition('://')
        bucket, _, path = location.partition('/')
        kvstore = {'driver': STORES[scheme].driver, 'bucket': bucket, 'path': f'{path}/'}
        endpoint = os.environ.get('AWS_ENDPOINT_URL')  # an S3 store that is not Amazon's
        if endpoint and scheme == 's3':
            kvstore['endpoint'] = endpoint
        return kvstore


def to_path(name: str, may_be_new: bool) -> BucketPath:
    """Return the path of a URL. Raises Refused for a bucket that cannot be listed."""
    if may_be_new and re.search('[*?[]', name):
        raise Refused(f'{name}: *, ? and [ make a pattern: name another folder')
    client = client_of(name)
    name = normalized(name)
    with client_errors(name, 'listed', Refused):
        if may_be_new:
            with contextlib.suppress(FileNotFoundError):
                client.ls(name)
        else:
            client.ls(posixpath.dirname(name) if name.count('/') > 2 else name)
    return BucketPath(name)


def matching_files(name: str) -> dict[str, FileStatus]:
    """Return the files of a URL or a glob. Raises Refused for a bucket that cannot be listed."""
    client = client_of(name)
    pattern = normalized(name)
    scheme = pattern.partition('://')[0]
    with client_errors(pattern, 'listed', Refused):
        matches = client.glob(pattern, detail=True)
    if not matches:  # the folder may be the reason
        to_path(posixpath.dirname(re.split(r'[*?[]', pattern)[0]), may_be_new=False)
    files = {}
    for key, description in matches.items():
        if description['type'] == 'file':
            files[f'{scheme}://{key}'] = file_status(scheme, description)
    return files


def status_of(name: str) -> FileStatus:
    with client_errors(name, 'read', ReadError):
        return file_status(name.partition('://')[0], client_of(name).info(name))


def open_file(name: str, read_ahead: int, num_bytes: int | None) -> io.BufferedReader:
    """Open a file for reading, as `paths.open_file` describes it."""
    client = client_of(name)
    if num_bytes is None:
        num_bytes = status_of(name).num_bytes

    def fetch(start, end):
        with client_errors(name, 'read', ReadError):
            content = client.cat_file(name, start=start, end=end)
        if len(content) != end - start:
            raise ReadError(f'{name} no longer has {num_bytes:,} bytes: restore it')
        return content

    raw = importlib.import_module('fsspec.spec').AbstractBufferedFile(
        client, name, block_size=read_ahead, cache_type='readahead', size=num_bytes
    )
    raw.cache.fetcher = fetch
    return io.BufferedReader(raw, min(read_ahead, io.DEFAULT_BUFFER_SIZE) or 1)


def client_of(name: str) -> 'AbstractFileSystem':
    """Return the file system of a URL."""
    store = STORES.get(name.partition('://')[0])
    if store is None or find_spec(store.module.partition('.')[0]) is None:
        raise Refused(f'{name}: only disks, gs:// and s3:// are known (extras .[gcs], .[s3])')
    module = importlib.import_module(store.module)
    # It keeps no listing: TensorStore and other processes write, too.
    return getattr(module, store.client)(use_listings_cache=False)


def normalized(name: str) -> str:
    """Return the URL of a bucket without a `..` and a slash at its end."""
    scheme, _, location = name.partition('://')
    return f'{scheme}://{posixpath.normpath("/" + location)[1:]}'


def file_status(scheme: str, description: Mapping) -> FileStatus:
    """Return what a client says of a file."""
    return FileStatus(description['size'], description.get(STORES[scheme].checksum))


@contextlib.contextmanager
def client_errors(name: str, verb: str, kind: type[Exception]) -> Iterator[None]:
    """Raise `kind`, which names the file, for an error of a client. Each has its own exceptions."""
    try:
        yield
    except Exception as error:
        text = ' '.join(f'{type(error).__name__}: {error}'.split())
        remedy = 'check its name, your rights and the network'
        raise kind(f'{name} cannot be {verb} ({text}): {remedy}') from error
