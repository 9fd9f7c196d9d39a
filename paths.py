"""Paths that a user gives, on a disk or in a bucket (gs://, s3://): names, safe reading, atomic writing.

Every flag, setting and argument that takes a path goes through `to_path`, `disk_path` or `matching_files` once, so
that `..`, `~`, links, spaces and a trailing slash mean the same everywhere. Buckets are read and written through
fsspec. Imports nothing of ours.
"""

import contextlib
import errno
import functools
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
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeAlias


class Store(NamedTuple):
    """How the buckets of a scheme are read and written."""

    client: str  # fsspec's package
    driver: str  # TensorStore's, and the name of the extra in setup.py that installs the package
    checksum: str  # what its listings call the checksum of a file


STORES = {
    'gs': Store(client='gcsfs', driver='gcs', checksum='crc32c'),
    's3': Store(client='s3fs', driver='s3', checksum='ETag'),
}
RESTORE_LINE = 'restore the file from a copy, or remove this line'
LFS_HEADER = b'version https://git-lfs.github.com/spec/'


class BucketPath(PurePosixPath):
    """A path of gs:// or s3://, with the methods of pathlib.Path that a bucket can follow."""

    def __str__(self) -> str:
        scheme, _, location = super().__str__().partition(':/')
        return f'{scheme}://{location}'

    def exists(self) -> bool:
        return client_of(str(self)).exists(str(self))

    def is_file(self) -> bool:
        return client_of(str(self)).isfile(str(self))

    def is_dir(self) -> bool:
        return client_of(str(self)).isdir(str(self))

    def iterdir(self) -> Iterator['BucketPath']:
        for name in client_of(str(self)).listdir(str(self), detail=False):
            yield self / posixpath.basename(name)

    def glob(self, pattern: str) -> Iterator['BucketPath']:
        scheme = self.parts[0]
        for name in client_of(str(self)).glob(f'{self}/{pattern}'):
            yield BucketPath(f'{scheme}//{name}')

    def open(self, mode: str = 'rb') -> IO[bytes]:
        return client_of(str(self)).open(str(self), mode)

    def read_bytes(self) -> bytes:
        return client_of(str(self)).cat_file(str(self))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            client_of(str(self)).rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmtree(self) -> None:
        client_of(str(self)).rm(str(self), recursive=True)


AnyPath: TypeAlias = Path | BucketPath  # what `to_path` returns


class ReadError(OSError):
    """A bucket that does not answer. Damage to a file is another error."""


# Names.


def to_path(name: str | os.PathLike, may_be_new: bool = False) -> AnyPath:
    """Return an absolute path on a disk, or a path of gs:// or s3:// with pathlib's methods.

    `may_be_new`: it is written to, and need not exist. Raises ValueError for what is no path, for one that the
    system cannot follow (a loop of links, no permission, a name that is too long), and for a bucket that cannot
    be listed.
    """
    text = _text(name)
    if not is_in_bucket(text):
        return disk_path(text)
    if may_be_new and re.search('[*?[]', text):
        raise ValueError(f'{text}: a client takes *, ? and [ for a pattern: name another folder')
    client = client_of(text)
    text = _normalized(text)
    folder = posixpath.dirname(text) if text.count('/') > 2 else text
    _status.cache_clear()  # what was known of it may have changed
    with client_errors(text, 'listed', ValueError):
        try:
            client.ls(text if may_be_new else folder)
        except FileNotFoundError:
            if not may_be_new:
                raise
    return BucketPath(text)


def disk_path(name: str | os.PathLike) -> Path:
    """Return an absolute path on a disk, without `~` and `..`, which TensorStore refuses.

    Follows a link in front of a `..` first, as the system does. Raises ValueError as `to_path` does, and for
    buckets.
    """
    text = _text(name)
    if is_in_bucket(text):
        raise ValueError(
            f'{text}: write to a disk: only --workdir and --mode=evaluate write to buckets'
        )
    expanded = os.path.expanduser(text)
    if text.startswith('~') and not os.path.isabs(expanded):
        raise ValueError(f'{text}: there is no such home folder: write ./{text} for a name with ~')
    path = Path(expanded).absolute()
    if '..' in path.parts:
        after_last = len(path.parts) - path.parts[::-1].index('..')
        resolved = os.path.realpath(Path(*path.parts[:after_last]))
        path = Path(resolved, *path.parts[after_last:])
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise ValueError(f'{text} cannot be opened ({error.strerror}): correct it') from error
    return path


def matching_files(name: str) -> list[str]:
    """Return the files of a path or a glob: absolute paths, or URLs. Raises ValueError if there is none."""
    if is_in_bucket(name):
        return _matching_objects(name)
    path = disk_path(name)
    if path.is_dir():
        raise ValueError(f'{name!r} is a folder: name its files: {path}/*.txt')
    # The part of a path that exists is taken literally, so that [1] in its name is no glob.
    literal = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    rest = path.relative_to(literal).parts
    pattern = os.path.join(glob.escape(str(literal)), *rest)
    matches = glob.glob(pattern, recursive=True)  # ** is any number of folders
    files = [match for match in matches if not os.path.isdir(match)]
    if not files:
        what = 'folders alone: name their files' if matches else 'no file; correct it'
        raise ValueError(f'{name!r} matches {what}')
    for file in files:
        if not disk_path(file).is_file():
            raise ValueError(f'{file} is a link to nothing, or no regular file: restore it')
    return files


def is_in_bucket(name: str) -> bool:
    """Return whether a name is a URL; no absolute path on a disk has two slashes in it."""
    return '://' in name


def to_kvstore(folder: Any) -> dict[str, str]:
    """Return the TensorStore spec of a folder, which is a path of `to_path`."""
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


def client_of(name: str) -> Any:
    """Return fsspec's file system of a URL. Raises ValueError for other schemes, and if it is not installed."""
    scheme = name.partition('://')[0]
    if scheme not in STORES:
        raise ValueError(
            f'{name}: only disks, gs:// and s3:// are known: download it, or omit file://'
        )
    os.environ['EPATH_USE_TF'] = 'false'  # else epath imports TensorFlow if that is installed
    # Without it, gcsfs looks for credentials for seconds at every call.
    os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
    store = STORES[scheme]
    try:
        importlib.import_module(store.client)
    except ImportError:
        remedy = f"pip install -e '.[{store.driver}]'"
        raise ValueError(f'{name} needs {store.client}: {remedy}') from None
    fsspec = importlib.import_module('fsspec')
    # No client, epath's own among them, remembers what it lists: TensorStore and other processes write, too.
    fsspec.config.conf.setdefault(scheme, {})['use_listings_cache'] = False
    return fsspec.filesystem(scheme)


def _matching_objects(pattern: str) -> list[str]:
    client = client_of(pattern)
    pattern = _normalized(pattern)
    scheme = pattern.partition('://')[0]
    with client_errors(pattern, 'listed', ValueError):
        found = client.glob(pattern, detail=True)
    files = {f'{scheme}://{key}': x for key, x in found.items() if x['type'] == 'file'}
    _matched.update(files)
    if files:
        return list(files)
    literal = re.split(r'[*?[]', pattern)[0]
    if found and literal == pattern:
        raise ValueError(f'{pattern!r} is a folder: name its files: {pattern}/*.txt')
    to_path(posixpath.dirname(literal))  # which may be the reason
    raise ValueError(f'{pattern!r} matches no file; correct it')


def _normalized(name: str) -> str:
    """Return the URL of a bucket without a `..` and a slash at its end."""
    scheme, _, location = name.partition('://')
    return f'{scheme}://{posixpath.normpath("/" + location)[1:]}'


_matched: dict[str, dict[str, Any]] = {}  # what buckets said of files that matched a name of data


@functools.lru_cache(maxsize=1 << 17)
def _status(name: str) -> dict[str, Any]:
    """Return what a bucket says of a file: no request if it has matched a name. Raises ReadError."""
    if name in _matched:
        return _matched[name]
    with client_errors(name, 'read', ReadError):
        return client_of(name).info(name)


@contextlib.contextmanager
def client_errors(name: str, verb: str, kind: type[Exception]) -> Iterator[None]:
    """Raise `kind`, which names the file, for an error of a client. Each has its own exceptions."""
    try:
        yield
    except Exception as error:
        text = ' '.join(f'{type(error).__name__}: {error}'.split())
        remedy = 'check its name, your rights and the network'
        raise kind(f'{name} cannot be {verb} ({text}): {remedy}') from error


# Reading.


def open_file(name: str, read_ahead: int = 1 << 16) -> io.BufferedReader:
    """Open a file for reading: an absolute path on a disk or a URL of a bucket.

    A read from a bucket fetches `read_ahead` bytes more than it needs, and no byte twice while it goes forward.
    Raises ReadError.
    """
    if not is_in_bucket(name):
        return open(name, 'rb')
    client = client_of(name)
    size = file_size(name)

    def fetch(start, end):
        with client_errors(name, 'read', ReadError):
            content = client.cat_file(name, start=start, end=end)
        if len(content) != end - start:
            raise ReadError(f'{name} has no longer {size:,} bytes: restore it, and start again')
        return content

    raw = importlib.import_module('fsspec.spec').AbstractBufferedFile(
        client, name, block_size=read_ahead, cache_type='readahead', size=size
    )
    raw.cache.fetcher = fetch
    return io.BufferedReader(raw, min(read_ahead, io.DEFAULT_BUFFER_SIZE) or 1)


def is_file(file: Any) -> bool:
    """Return whether a path of `to_path` is a file. Raises OSError where this process may not look."""
    if not isinstance(file, Path):
        return file.is_file()
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return False
        raise


def file_size(file: Any) -> int:
    """Return the number of bytes of a file of `to_path` or of `matching_files`."""
    name = os.fspath(file)
    if is_in_bucket(name):
        return _status(name)['size']
    return os.stat(name).st_size


def stored_checksum(name: str) -> str | None:
    """Return the checksum that a bucket keeps of a file; None if it keeps none, and on a disk."""
    if not is_in_bucket(name):
        return None
    return _status(name).get(STORES[name.partition('://')[0]].checksum)


def own_file(file: Any) -> Any:
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


def read_json(file: Any) -> dict[str, Any]:
    """Return the JSON object in a file. Raises as `own_file` and `json_object` do."""
    return json_object(own_file(file).read_bytes(), str(file), 'restore it from a copy')


def json_object(content: bytes, title: str, remedy: str = RESTORE_LINE) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for other content; `title` says where it stands."""
    fault = 'no JSON object'
    try:
        value = json.loads(content)
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError) as error:
        fault = str(error)
    raise ValueError(f'{title} is damaged ({fault}): {remedy}')


def reason(error: BaseException) -> str:
    """Return the file of an error and what the system says of it; the text of an error of our own."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if not error.filename:
        return error.strerror
    return f'{error.filename}: {error.strerror}'


# Writing, which leaves all of the new or all of the old.


def check_new(folder: Any) -> None:
    """Raise ValueError where a file or a link to nothing is in the way of `folder`. A bucket has no folders."""
    if not isinstance(folder, Path):
        return
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not path.is_dir():
            raise ValueError(f'{folder}: {path} is a file, not a folder: name another one')


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Raise the OSError whose number is in the text of an error of TensorStore or safetensors."""
    try:
        yield
    except Exception as error:
        found = re.search(r"os error (\d+)|os_error_code='(\d+)'", str(error))
        if found is None:
            raise
        number = int(found[1] or found[2])
        raise OSError(number, os.strerror(number), str(path)) from error


@contextlib.contextmanager
def naming(path: Path, unfinished: Path | None = None) -> Iterator[None]:
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
    """Yield a new folder on the disk of `folder`, which the caller fills and renames to `folder`.

    At the end, removes the new folder if it is still there and, after an error, the parents made for it.
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f'{folder.name[:50]}.tmp-'
        with (
            naming(folder, folder.parent / prefix),
            tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as private,
        ):
            new = Path(private, 'new')  # unlike `private`, with the permissions that the user set
            new.mkdir()
            yield new
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):  # others may have put files into it
                parent.rmdir()
        raise


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


def replace_file(file: Any, content: bytes, writer: str = '') -> None:
    """Write `file`: on a disk as `replacing` does, in a bucket as one object. Raises OSError."""
    if isinstance(file, Path):
        with replacing(file, writer) as stream:
            stream.write(content)
        return
    with client_errors(str(file), 'written', OSError):
        client_of(str(file)).pipe_file(str(file), content)


def make_folder(folder: Any) -> None:
    """Make a folder and its parents where they are missing. A bucket has none."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


def remove_folder(folder: Any) -> None:
    """Remove a folder and what is in it. Raises OSError."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
        return
    with client_errors(str(folder), 'removed', OSError):
        folder.rmtree()


def num_files(folder: Any) -> int:
    """Return the number of files below a folder."""
    if isinstance(folder, Path):
        return sum(len(names) for _, _, names in os.walk(folder))
    with client_errors(str(folder), 'listed', OSError):
        return len(client_of(str(folder)).find(str(folder)))
