"""Paths that a user gives, on a disk or in a bucket (gs://, s3://): names, safe reading, atomic writing.

Every flag, setting and argument that takes a path goes through `to_path`, `disk_path` or `matching_files` once.
Buckets are read and written through fsspec. Imports nothing of ours.
"""

import contextlib
import errno
import glob
import importlib
import io
import json
import os
import posixpath
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class Store(NamedTuple):
    """How the buckets of a scheme are read and written."""

    module: str  # of the client
    client: str  # its class, a file system of fsspec
    driver: str  # TensorStore's, and the name of the extra in setup.py that installs the client
    checksum: str  # the name in its listings of the checksum of a file


STORES = {
    # gcsfs itself would take a class that looks for credentials for seconds at every call.
    'gs': Store(module='gcsfs.core', client='GCSFileSystem', driver='gcs', checksum='crc32c'),
    's3': Store(module='s3fs', client='S3FileSystem', driver='s3', checksum='ETag'),
}
RESTORE_LINE = 'restore the file from a copy, or remove this line'
LFS_HEADER = b'version https://git-lfs.github.com/spec/'


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

    def unlink(self, missing_ok: bool = True) -> None:
        with contextlib.suppress(FileNotFoundError):  # S3 does not raise it
            self.client.rm_file(str(self))


AnyPath: TypeAlias = Path | BucketPath  # what `to_path` returns
PathOfOneKind = TypeVar('PathOfOneKind', bound=AnyPath)


class FileStatus(NamedTuple):
    num_bytes: int
    checksum: str | None = None  # that a bucket keeps of it


class ReadError(OSError):
    """A bucket that does not answer. Damage to a file is another error."""


# Names.


def to_path(name: str | os.PathLike, may_be_new: bool = False) -> AnyPath:
    """Return an absolute path on a disk, or a path of gs:// or s3:// with pathlib's methods.

    `may_be_new`: it need not exist. Raises ValueError for what is no path, for one that the system cannot follow
    (a loop of links, no permission), and for a bucket that cannot be listed.
    """
    text = _text(name)
    if not is_in_bucket(text):
        return disk_path(text)
    if may_be_new and re.search('[*?[]', text):
        raise ValueError(f'{text}: a client takes *, ? and [ for a pattern: name another folder')
    client = client_of(text)
    text = _normalized(text)
    with client_errors(text, 'listed', ValueError):
        if may_be_new:
            with contextlib.suppress(FileNotFoundError):
                client.ls(text)
        else:
            client.ls(posixpath.dirname(text) if text.count('/') > 2 else text)
    return BucketPath(text)


def disk_path(name: str | os.PathLike) -> Path:
    """Return an absolute path on a disk, without `~` and `..`, which TensorStore refuses.

    Raises ValueError as `to_path` does, and for buckets.
    """
    text = _text(name)
    if is_in_bucket(text):
        raise ValueError(
            f'{text}: write to a disk: only --workdir and --mode=evaluate write to buckets'
        )
    expanded = os.path.expanduser(text)
    if expanded.startswith('~'):
        raise ValueError(f'{text} is in no home folder: write ./{text} for a name with ~')
    path = Path(expanded).absolute()
    if '..' in path.parts:  # a link in front of it is followed first, as the system does
        after_last = len(path.parts) - path.parts[::-1].index('..')
        resolved = os.path.realpath(Path(*path.parts[:after_last]))
        path = Path(resolved, *path.parts[after_last:])
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ValueError(f'{text} cannot be opened ({error.strerror}): correct it') from error
    return path


def matching_files(name: str) -> dict[str, FileStatus]:
    """Return the files of a path or a glob: absolute paths, or URLs. Raises ValueError if there is none."""
    files = {}
    if is_in_bucket(name):
        client = client_of(name)
        pattern = _normalized(name)
        scheme = pattern.partition('://')[0]
        with client_errors(pattern, 'listed', ValueError):
            matches = client.glob(pattern, detail=True)
        if not matches:
            to_path(posixpath.dirname(re.split(r'[*?[]', pattern)[0]))  # which may be the reason
        for key, description in matches.items():
            if description['type'] == 'file':
                files[f'{scheme}://{key}'] = _status(scheme, description)
    else:
        path = disk_path(name)
        # The part of a path that exists is taken literally, so that [1] in its name is no glob.
        literal = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        pattern = os.path.join(glob.escape(str(literal)), *path.relative_to(literal).parts)
        for match in glob.glob(pattern, recursive=True):  # ** is any number of folders
            file = disk_path(match)
            if file.is_file():
                files[match] = status_of(match)
            elif not file.is_dir():
                raise ValueError(f'{match} is a link to nothing, or no regular file: restore it')
    if not files:
        raise ValueError(
            f'{name!r} matches no file: correct it; for all files of a folder, FOLDER/*'
        )
    return files


def is_in_bucket(name: str) -> bool:
    """Return whether a name is a URL; no absolute path on a disk has two slashes in it."""
    return '://' in name


def to_kvstore(folder: AnyPath) -> dict[str, str]:
    """Return the TensorStore spec of a folder."""
    if isinstance(folder, Path):
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            raise ValueError(f'{str(folder)!r} is not UTF-8: rename the folder') from None
        return {'driver': 'file', 'path': f'{folder}/'}
    scheme, _, location = str(folder).partition('://')
    bucket, _, path = location.partition('/')
    kvstore = {'driver': STORES[scheme].driver, 'bucket': bucket, 'path': f'{path}/'}
    endpoint = os.environ.get('AWS_ENDPOINT_URL')  # an S3 store that is not Amazon's
    if endpoint and scheme == 's3':
        kvstore['endpoint'] = endpoint
    return kvstore


def _text(name: str | os.PathLike) -> str:
    with contextlib.suppress(TypeError, UnicodeEncodeError):
        text = os.fspath(name)
        if isinstance(text, str) and text.strip() and b'\0' not in os.fsencode(text):
            return text
    raise ValueError(f'{name!r} is no path: name a file or a folder')


# Buckets.


def client_of(name: str) -> 'AbstractFileSystem':
    """Return the file system of a URL. Raises ValueError for other schemes, and if it is not installed."""
    scheme = name.partition('://')[0]
    if scheme not in STORES:
        raise ValueError(
            f'{name}: only disks, gs:// and s3:// are known: download it, or omit file://'
        )
    store = STORES[scheme]
    try:
        module = importlib.import_module(store.module)
    except ImportError:
        remedy = f"pip install -e '.[{store.driver}]'"
        raise ValueError(f'{name} needs {store.module}: {remedy}') from None
    # It keeps no listing: TensorStore and other processes write, too.
    return getattr(module, store.client)(use_listings_cache=False)


def _normalized(name: str) -> str:
    """Return the URL of a bucket without a `..` and a slash at its end."""
    scheme, _, location = name.partition('://')
    return f'{scheme}://{posixpath.normpath("/" + location)[1:]}'


def _status(scheme: str, description: Mapping) -> FileStatus:
    """Return what a client says of a file."""
    return FileStatus(description['size'], description.get(STORES[scheme].checksum))


@contextlib.contextmanager
def client_errors(name: str, verb: str, kind: type[Exception]) -> Iterator[None]:
    """Raise `kind`, which names the file, for an error of a client. Each has its own exceptions."""
    try:
        yield
    except Exception as error:
        text = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise kind(
            f'{name} cannot be {verb} ({text}): check its name, your rights and the network'
        ) from error


# Reading.


def open_file(
    name: str, read_ahead: int = 1 << 16, num_bytes: int | None = None
) -> io.BufferedReader:
    """Open a file for reading: an absolute path on a disk or a URL of a bucket.

    A read from a bucket fetches `read_ahead` bytes more than it needs, and no byte twice while it goes forward.
    With `num_bytes`, its size, the bucket is not asked for it. Raises ReadError.
    """
    if not is_in_bucket(name):
        return open(name, 'rb')
    client = client_of(name)
    if num_bytes is None:
        num_bytes = status_of(name).num_bytes

    def fetch(start, end):
        with client_errors(name, 'read', ReadError):
            content = client.cat_file(name, start=start, end=end)
        if len(content) != end - start:
            raise ReadError(f'{name} has no longer {num_bytes:,} bytes: restore it')
        return content

    raw = importlib.import_module('fsspec.spec').AbstractBufferedFile(
        client, name, block_size=read_ahead, cache_type='readahead', size=num_bytes
    )
    raw.cache.fetcher = fetch
    return io.BufferedReader(raw, min(read_ahead, io.DEFAULT_BUFFER_SIZE) or 1)


def is_file(file: AnyPath) -> bool:
    """Return whether a path is a file. Raises OSError where this process may not look."""
    if not isinstance(file, Path):
        return file.is_file()
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return False
        raise


def status_of(file: str | AnyPath) -> FileStatus:
    """Return what a disk or a bucket says of a file. Raises OSError."""
    name = os.fspath(file)
    if not is_in_bucket(name):
        return FileStatus(os.stat(name).st_size)
    with client_errors(name, 'read', ReadError):
        return _status(name.partition('://')[0], client_of(name).info(name))


def sizes_in(folder: AnyPath) -> dict[AnyPath, int]:
    """Return the files of a folder and their sizes; none where there is no folder."""
    if isinstance(folder, Path):
        return {file: Path(file).stat().st_size for file in list_folder(folder)}
    with contextlib.suppress(FileNotFoundError):
        found = folder.client.ls(str(folder), detail=True)
        return {folder / posixpath.basename(x['name']): x['size'] for x in found}
    return {}


def list_folder(folder: AnyPath) -> list[AnyPath]:
    """Return what is in a folder, nothing where there is none."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def own_file(file: PathOfOneKind) -> PathOfOneKind:
    """Return `file` if it exists and lies in its own folder after links are followed.

    A link in a foreign checkpoint must not choose which file is read. Raises ValueError, also for a pointer of
    git-lfs, and OSError for a file that this process may not read.
    """
    if not is_file(file):
        raise ValueError(f'{file} is missing: bring all files of the checkpoint')
    if isinstance(file, Path):
        root = file.parent.resolve()
        target = file.resolve()
        if root.parent.name == 'snapshots':  # Hugging Face's cache links from there to its blobs
            root = root.parent.parent
        if not target.is_relative_to(root):
            raise ValueError(f'{file} links to {target}, outside of its folder: do not trust it')
        check_not_lfs(file)
    return file


def check_not_lfs(file: Path) -> None:
    """Raise ValueError if `file` is the pointer that git leaves where git-lfs is not installed."""
    with file.open('rb') as stream:
        if stream.read(len(LFS_HEADER)) == LFS_HEADER:
            raise ValueError(f'{file} is a pointer of git-lfs, not the file: run `git lfs pull`')


def read_json(file: AnyPath) -> dict:
    """Return the JSON object in a file. Raises as `own_file` and `json_object` do."""
    return json_object(own_file(file).read_bytes(), str(file), 'restore it from a copy')


def json_object(content: bytes, title: str, remedy: str = RESTORE_LINE) -> dict:
    """Return a JSON object. Raises ValueError for other content; `title` says where it stands."""
    try:
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError('no JSON object')
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{title} is damaged ({error}): {remedy}') from None
    return value


def reason(error: BaseException) -> str:
    """Return the file of an error and what the system says of it; the text of an error of our own."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if not error.filename:
        return error.strerror
    return f'{error.filename}: {error.strerror}'


# Writing, which leaves all of the new or all of the old.


def check_new(folder: AnyPath) -> None:
    """Raise ValueError where a file or a link to nothing is in the way of `folder`."""
    for path in (folder, *folder.parents):  # on a disk: a URL exists on none
        if os.path.lexists(path) and not path.is_dir():
            raise ValueError(f'{folder}: {path} is a file, not a folder: name another one')


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Raise the OSError whose number is in the text of an error of TensorStore or safetensors."""
    try:
        yield
    except Exception as error:
        found = re.search(r"(?:os error |os_error_code=')(\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextlib.contextmanager
def naming(path: AnyPath, unfinished: Path | None = None) -> Iterator[None]:
    """Make an OSError name `path` if it names no file, as on a full disk, or one that begins like `unfinished`."""
    prefix = str(unfinished or path)
    try:
        yield
    except OSError as error:
        if error.errno and str(error.filename or prefix).startswith(prefix):
            error.filename = str(path)
        raise


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a new folder on the disk of `folder`, which the caller fills and renames; else it is removed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][-1]
    prefix = f'{missing.name[:50]}.tmp-'
    with (
        naming(folder, missing.parent / prefix),
        tempfile.TemporaryDirectory(dir=missing.parent, prefix=prefix) as private,
    ):
        new = Path(private, 'new')  # unlike `private`, with the permissions that the user set
        new.mkdir()
        yield new


@contextlib.contextmanager
def replacing(file: Path, writer: str = '') -> Iterator[IO[bytes]]:
    """Yield a file that replaces `file` at the end, even in a crash all of the new or all of the old.

    `writer` differs between processes that write the same file.
    """
    unfinished = file.with_name(f'.{file.name}.unfinished{writer}')
    with naming(file, unfinished):
        try:
            with unfinished.open('wb') as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def replace_file(file: AnyPath, content: bytes, writer: str = '') -> None:
    """Write `file`: on a disk as `replacing` does, in a bucket as one object. Raises OSError."""
    if isinstance(file, Path):
        with replacing(file, writer) as stream:
            stream.write(content)
        return
    with client_errors(str(file), 'written', OSError):
        file.client.pipe_file(str(file), content)


def remove_folder(folder: AnyPath) -> None:
    """Remove a folder and what is in it. Raises OSError."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
        return
    with client_errors(str(folder), 'removed', OSError):
        folder.client.rm(str(folder), recursive=True)
