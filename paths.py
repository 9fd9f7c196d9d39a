"""Paths that a user gives, on a disk or in a bucket (gs://, s3://): names, safe reading, atomic writing.

Every flag, setting and argument that takes a path goes through `to_path`, `disk_path` or `matching_files` once, so
that `..`, `~`, links, spaces and a trailing slash mean the same everywhere. Imports nothing of ours.
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
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple


class Store(NamedTuple):
    """What reads the buckets of a scheme."""

    client: str  # a package
    extra: str  # of setup.py, which installs the package
    driver: str  # of TensorStore
    checksum: str  # what its listings call the checksum of a file


STORES = {
    'gs': Store(client='gcsfs', extra='gcs', driver='gcs', checksum='crc32c'),
    's3': Store(client='s3fs', extra='s3', driver='s3', checksum='ETag'),
}
RESTORE_LINE = 'restore the file from a copy, or remove this line'
LFS_HEADER = b'version https://git-lfs.github.com/spec/'


LOOK_BEHIND_BYTES = 1 << 12  # that are fetched before the position in a file of a bucket


# Names.


def to_path(name: str | os.PathLike) -> Any:
    """Return an absolute path on a disk, or a path of gs:// or s3:// with pathlib's methods.

    Raises ValueError for a value that is no path, for other schemes, for a home folder that does not exist,
    and for a path that the system cannot follow (a loop of links, no permission, a name that is too long).
    """
    text = _text(name)
    if not is_in_bucket(text):
        return disk_path(text)
    return _bucket_path(text)


def disk_path(name: str | os.PathLike) -> Path:
    """Return an absolute path on a disk, without `~` and `..`, which TensorStore refuses.

    A link in front of a `..` is followed first, as the system does. Raises ValueError as `to_path` does, and
    for buckets, which have neither renaming nor locks.
    """
    text = _text(name)
    if '://' in text:
        raise ValueError(
            f'{text}: write to a disk and copy from there, gs:// and s3:// are read only'
        )
    expanded = os.path.expanduser(text)
    path = Path(expanded).absolute()
    if text.startswith('~') and not os.path.isabs(expanded):
        raise ValueError(
            f'{text}: there is no such home folder: write ./{text} for a name that begins with ~'
        )
    if '..' in path.parts:
        after_last = len(path.parts) - path.parts[::-1].index('..')
        resolved = os.path.realpath(Path(*path.parts[:after_last]))
        path = Path(resolved, *path.parts[after_last:])
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise ValueError(
                f'{text} cannot be opened ({error.strerror}): correct the name, its links or its permissions'
            ) from error
    return path


def matching_files(name: str) -> list[str]:
    """Return the files that `name`, a path or a glob, stands for: absolute paths, or URLs of a bucket.

    Raises ValueError if there is none, for a folder, and as `to_path` does.
    """
    if is_in_bucket(name):
        return _matching_objects(name)
    path = disk_path(name)
    if path.is_dir():
        raise ValueError(f'{name!r} is a folder: name its files: {path}/*.txt')
    # The part of a path that exists is taken literally, so that [1] in its name is no glob.
    literal = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    rest = path.relative_to(literal).parts
    matches = glob.glob(os.path.join(glob.escape(str(literal)), *rest))
    files = [match for match in matches if not os.path.isdir(match)]
    if not files:
        raise ValueError(f'{name!r} matches no file; correct it')
    for file in files:
        if not disk_path(file).is_file():
            raise ValueError(
                f'{file} is a link to nothing, or no regular file: restore it, copy it to a '
                'file, or leave it out'
            )
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
            raise ValueError(
                f'{str(folder)!r} is not UTF-8, and TensorStore opens no other names: rename the folder'
            ) from None
        return {'driver': 'file', 'path': f'{folder}/'}
    scheme, _, location = str(folder).partition('://')
    bucket, _, path = location.partition('/')
    kvstore = {
        'driver': STORES[scheme].driver,
        'bucket': bucket,
        'path': f'{path}/',
    }
    endpoint = os.environ.get('AWS_ENDPOINT_URL')  # an S3 store that is not Amazon's
    if endpoint and scheme == 's3':
        kvstore['endpoint'] = endpoint
    return kvstore


def _text(name: str | os.PathLike) -> str:
    if not isinstance(name, str | os.PathLike) or isinstance(os.fspath(name), bytes):
        raise ValueError(f'{name!r} is no path: give a string or a pathlib.Path')
    text = os.fspath(name)
    try:
        is_name = text.strip() and b'\0' not in os.fsencode(text)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise ValueError(f'{text!r} is no path: name a file or a folder')
    return text


def _bucket_path(name: str) -> Any:
    client_of(name)
    name = _normalized(name)
    path = importlib.import_module('etils.epath').Path(name)
    try:
        is_bucket = str(path.parent).endswith('/')
        list((path if is_bucket else path.parent).iterdir())  # the clients remember this listing
    except Exception as error:  # each client has its own exceptions
        raise _unlisted(name, error) from error
    return path


def _normalized(name: str) -> str:
    """Return the URL of a bucket without a `..` and a slash at its end."""
    scheme, _, location = name.partition('://')
    bucket, slash, key = location.partition('/')
    if slash:
        return f'{scheme}://{bucket}{posixpath.normpath("/" + key).rstrip("/")}'
    return name


def _matching_objects(pattern: str) -> list[str]:
    client = client_of(pattern)
    pattern = _normalized(pattern)
    scheme = pattern.partition('://')[0]
    try:
        found = client.glob(pattern, detail=True)
    except Exception as error:  # each client has its own exceptions
        raise _unlisted(pattern, error) from error
    files = [f'{scheme}://{key}' for key, status in found.items() if status['type'] == 'file']
    if files:
        return files
    literal = re.split(r'[*?[]', pattern)[0]
    if found and literal == pattern:
        raise ValueError(f'{pattern!r} is a folder: name its files: {pattern}/*.txt')
    _bucket_path(posixpath.dirname(literal))  # which may be the reason
    raise ValueError(f'{pattern!r} matches no file; correct it')


def _unlisted(name: str, error: Exception) -> ValueError:
    return ValueError(f'{name} cannot be listed ({_one_line(error)}): correct its name or rights')


def client_of(name: str) -> Any:
    """Return what reads the bucket of a URL, a file system of fsspec.

    Raises ValueError for other schemes than gs and s3, and if the client is not installed.
    """
    scheme = name.partition('://')[0]
    if scheme == 'file':
        raise ValueError(f'{name}: paths on a disk are written without file://: write /path/to/it')
    if scheme not in STORES:
        raise ValueError(
            f'{name}: only paths on a disk, gs:// and s3:// are read: download it, and name the copy'
        )
    os.environ['EPATH_USE_TF'] = 'false'  # else epath imports TensorFlow if that is installed
    # Without these, gcsfs looks for credentials for seconds at every call, and s3fs reads 50 MiB ahead.
    os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
    os.environ.setdefault('FSSPEC_S3_DEFAULT_CACHE_TYPE', 'none')
    store = STORES[scheme]
    try:
        importlib.import_module(store.client)
        importlib.import_module('etils.epath')
        return importlib.import_module('fsspec').filesystem(scheme)
    except ImportError as error:
        raise ValueError(
            f"{name} needs {store.client}: pip install -e '.[{store.extra}]'"
        ) from error


def _one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())


# Reading.


def open_file(name: str, read_ahead: int = 1 << 16) -> io.BufferedReader:
    """Open a file for reading: an absolute path on a disk or a URL of a bucket.

    A read from a bucket fetches `read_ahead` bytes at least. It raises ReadError.
    """
    if is_in_bucket(name):
        return io.BufferedReader(BucketFile(name, read_ahead))
    return open(name, 'rb')


class ReadError(OSError):
    """A bucket that does not answer. Damage to a file is another error."""


class BucketFile(io.RawIOBase):
    """A file in a bucket, of which a part is kept around the position.

    The client tries again for a while when the network fails.
    """

    def __init__(self, name: str, read_ahead: int):
        self.name = name
        self._read_ahead = read_ahead
        self._client = client_of(name)
        self._size = file_size(name)
        self._position = 0
        self._part = b''
        self._part_start = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {
            os.SEEK_SET: 0,
            os.SEEK_CUR: self._position,
            os.SEEK_END: self._size,
        }
        self._position = origins[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, or less of it where the part or the file ends."""
        if not 0 <= self._position - self._part_start < len(self._part):
            self._fetch(len(buffer))
        start = self._position - self._part_start
        content = self._part[start : start + len(buffer)]
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _fetch(self, num_bytes: int) -> None:
        """Keep the part of the file that begins a little before the position."""
        start = max(self._position - LOOK_BEHIND_BYTES, 0)
        end = min(self._position + max(num_bytes, self._read_ahead), self._size)
        self._part = b''
        if self._position >= end:
            return
        try:
            self._part = self._client.cat_file(self.name, start=start, end=end)
        except Exception as error:  # each client has its own exceptions
            raise _unread(self.name, error) from error
        if len(self._part) != end - start:
            raise ReadError(
                f'{self.name} has no longer {self._size:,} bytes: restore it, and start again'
            )
        self._part_start = start


def is_file(file: Any) -> bool:
    """Return whether a path of `to_path` is a file.

    Raises OSError where the system does not let this process look: such a file is not missing.
    """
    if not isinstance(file, Path):
        return file.is_file()
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return False
        raise _unreadable(file, error) from error


def file_size(file: Any) -> int:
    """Return the number of bytes of a file of `to_path` or of `matching_files`."""
    if isinstance(file, str) and is_in_bucket(file):
        return _status(file).num_bytes
    if isinstance(file, str | Path):
        return os.stat(file).st_size
    return file.stat().length


def stored_checksum(name: str) -> str | None:
    """Return the checksum that a bucket keeps of a file; None if it keeps none, and on a disk."""
    if not is_in_bucket(name):
        return None
    return _status(name).checksum


class Status(NamedTuple):
    """What a bucket says of a file."""

    num_bytes: int
    checksum: str | None


@functools.lru_cache(maxsize=1 << 17)
def _status(name: str) -> Status:
    """Return what a bucket says of a file: no request if it was listed. Raises ReadError."""
    scheme = name.partition('://')[0]
    try:
        found = client_of(name).info(name)
    except Exception as error:  # each client has its own exceptions
        raise _unread(name, error) from error
    return Status(found['size'], found.get(STORES[scheme].checksum))


def _unread(name: str, error: Exception) -> ReadError:
    return ReadError(
        f'{name} cannot be read ({_one_line(error)}): check the network and your rights, and start '
        'again'
    )


def own_file(file: Any) -> Any:
    """Return `file` if it exists and lies in its own folder after links are followed.

    A link in a foreign checkpoint must not choose which file is read. Raises ValueError, also for a pointer of
    git-lfs in place of the file, and OSError for a file that the system does not let this process read.
    """
    if not is_file(file):
        raise ValueError(f'{file} is missing: bring all files of the checkpoint')
    if isinstance(file, Path):
        root = file.parent.resolve()
        target = file.resolve()
        if root.parent.name == 'snapshots':  # Hugging Face's cache links from there to its blobs
            root = root.parent.parent
        if not target.is_relative_to(root):
            raise ValueError(
                f'{file} links to {target}, outside of its folder: do not trust it, or load it from there'
            )
        check_not_lfs(file)
    return file


def check_not_lfs(file: Path) -> None:
    """Raise ValueError if `file` is the pointer that git leaves where git-lfs is not installed."""
    try:
        with file.open('rb') as stream:
            header = stream.read(len(LFS_HEADER))
    except OSError as error:
        raise _unreadable(file, error) from error
    if header == LFS_HEADER:
        raise ValueError(
            f'{file} is a pointer of git-lfs, not the file itself: run `git lfs pull` in its repository'
        )


def read_json(file: Any) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError for other content, and as `own_file` does."""
    file = own_file(file)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{file} cannot be read ({error}): restore it from a copy') from error
    if not isinstance(content, dict):
        raise ValueError(f'{file} holds no JSON object: restore it from a copy')
    return content


def json_object(content: bytes, title: str) -> dict[str, Any]:
    """Return the JSON object on a line. Raises ValueError, which names the line by its title."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{title} is damaged ({error}): {RESTORE_LINE}') from None
    if not isinstance(value, dict):
        raise ValueError(f'{title} is damaged (no JSON object): {RESTORE_LINE}')
    return value


def _unreadable(file: Path, error: OSError) -> OSError:
    return type(error)(
        f'{file} cannot be read ({error.strerror}): correct its permissions or its disk'
    )


def reason(error: BaseException) -> str:
    """Return the file of an error and what the system says of it; the text of an error of our own."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if not error.filename:
        return error.strerror
    return f'{error.filename}: {error.strerror}'


# Writing, which leaves all of the new or all of the old.


def check_new(folder: Path) -> None:
    """Raise ValueError where the system cannot make `folder`: a file or a link to nothing is in its way."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise ValueError(
                f'{folder} cannot be written: {path} is a link to nothing: remove it or name another folder'
            )
    file = blocking_file(folder)
    if file is not None:
        raise ValueError(f'{folder} cannot be written: {file} is a file: name another folder')


def check_writable(folder: Path) -> None:
    """Raise ValueError where this process may not make `folder` or write into it."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise ValueError(
            f'{folder} cannot be written: {existing} is read-only for you: correct its permissions, or name '
            'another folder with --output_dir'
        )


@contextlib.contextmanager
def writing_results(folder: Path) -> Iterator[None]:
    """Let an OSError of the system name `folder`, that of --output_dir, and a remedy."""
    try:
        yield
    except OSError as error:
        is_elsewhere = not Path(str(error.filename or folder)).is_relative_to(folder)
        if error.strerror is None or is_elsewhere:
            raise
        raise OSError(
            f'{folder} cannot be written ({error.strerror}): free space on its disk, correct its '
            'permissions, or name another folder with --output_dir'
        ) from error


def blocking_file(folder: Path) -> Path | None:
    """Return `folder` or the parent of it that exists and is no folder; None if all are folders."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            return path
    return None


@contextlib.contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Raise the OSError of the system whose number is in the text of a library's error.

    TensorStore and safetensors have errors of their own.
    """
    try:
        yield
    except Exception as error:
        found = re.search(r"os error (\d+)|os_error_code='(\d+)'", str(error))
        if found is None:
            raise
        number = int(found[1] or found[2])
        raise OSError(number, os.strerror(number), str(path)) from error


@contextlib.contextmanager
def naming(path: Path, unfinished: Path) -> Iterator[None]:
    """Make an error of the system name `path`, not an unfinished one that begins like `unfinished`.

    An error of writing, as on a full disk, names no file of its own.
    """
    try:
        yield
    except OSError as error:
        if error.errno and str(error.filename or unfinished).startswith(str(unfinished)):
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
    """Yield a file to write, which then takes the place of `file` at once.

    A reader finds the old content or the new content, even after a crash. `writer` differs between
    processes that write the same file.
    """
    unfinished = file.with_name(f'.{file.name}.unfinished{writer}')
    with naming(file, unfinished):
        with unfinished.open('wb') as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)


def replace_file(file: Path, content: bytes, writer: str = '') -> None:
    """Write `file` as `replacing` does."""
    with replacing(file, writer) as stream:
        stream.write(content)
