"""Paths that a user gives, on a disk or in a bucket (gs://, s3://): names, safe reading, atomic writing.

Every flag, setting and argument that takes a path goes through `to_path` or `disk_path` once, so that `..`, `~`,
links, spaces and a trailing slash mean the same everywhere. Imports nothing of ours.
"""

import contextlib
import errno
import importlib
import json
import os
import posixpath
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Store(NamedTuple):
    """What reads the buckets of a scheme."""

    client: str  # a package
    extra: str  # of setup.py, which installs the package
    driver: str  # of TensorStore


STORES = {
    'gs': Store(client='gcsfs', extra='gcs', driver='gcs'),
    's3': Store(client='s3fs', extra='s3', driver='s3'),
}
LFS_HEADER = b'version https://git-lfs.github.com/spec/'


# Names.


def to_path(name: str | os.PathLike) -> Any:
    """Return an absolute path on a disk, or a path of gs:// or s3:// with pathlib's methods.

    Raises ValueError for a value that is no path, for other schemes, for a home folder that does not exist,
    and for a path that the system cannot follow (a loop of links, no permission, a name that is too long).
    """
    text = _text(name)
    scheme, separator, _ = text.partition('://')
    if not separator:
        return disk_path(text)
    if scheme == 'file':
        raise ValueError(f'{text}: paths on a disk are written without file://: write /path/to/it')
    if scheme not in STORES:
        raise ValueError(
            f'{text}: only paths on a disk, gs:// and s3:// are read: download it, and name the copy'
        )
    return _bucket_path(text, scheme)


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


def _bucket_path(name: str, scheme: str) -> Any:
    store = STORES[scheme]
    bucket, slash, key = name.removeprefix(f'{scheme}://').partition('/')
    if slash:
        name = f'{scheme}://{bucket}{posixpath.normpath("/" + key).rstrip("/")}'
    os.environ['EPATH_USE_TF'] = 'false'  # else epath imports TensorFlow if that is installed
    # Without these, gcsfs looks for credentials for seconds at every call, and s3fs reads 50 MiB ahead.
    os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
    os.environ.setdefault('FSSPEC_S3_DEFAULT_CACHE_TYPE', 'none')
    try:
        importlib.import_module(store.client)
        path = importlib.import_module('etils.epath').Path(name)
    except ImportError as error:
        raise ValueError(
            f"{name} needs {store.client}: pip install -e '.[{store.extra}]'"
        ) from error
    try:
        is_bucket = str(path.parent).endswith('/')
        list((path if is_bucket else path.parent).iterdir())  # the clients remember this listing
    except Exception as error:  # each client has its own exceptions
        cause = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise ValueError(
            f'{name} cannot be listed ({cause}): correct its name or rights'
        ) from error
    return path


# Reading.


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
    """Return the number of bytes of a file of `to_path`."""
    status = file.stat()
    if isinstance(file, Path):
        return status.st_size
    return status.length


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
        raise ValueError(f'{file} cannot be read ({error}): copy the folder again') from error
    if not isinstance(content, dict):
        raise ValueError(f'{file} holds no JSON object: copy the folder again')
    return content


def _unreadable(file: Path, error: OSError) -> OSError:
    return type(error)(
        f'{file} cannot be read ({error.strerror}): correct its permissions or its disk'
    )


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


def blocking_file(folder: Path) -> Path | None:
    """Return `folder` or the parent of it that exists and is no folder; None if all are folders."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            return path
    return None


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a new folder on the disk of `folder`, which the caller fills and renames to `folder`.

    At the end, removes the new folder if it is still there and, after an error, the parents made for it.
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f'{folder.name[:50]}.tmp-'
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as private:
            new = Path(private, 'new')  # unlike `private`, with the permissions that the user set
            new.mkdir()
            yield new
    except BaseException:
        for parent in missing:
            with contextlib.suppress(OSError):  # others may have put files into it
                parent.rmdir()
        raise


def replace_file(file: Path, content: bytes) -> None:
    """Write `file` at once: a reader finds the old content or the new content, even after a crash."""
    new = file.with_name(f'.{file.name}.unfinished')
    with new.open('wb') as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)
