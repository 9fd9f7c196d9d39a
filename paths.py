"""Paths that a user gives: on a disk, or in a bucket (gs://, s3://).

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
from typing import Any

# For the scheme of a bucket: the package that reads it, and our extra that installs the package.
CLIENTS = {'gs': ('gcsfs', 'gcs'), 's3': ('s3fs', 's3')}
LFS_HEADER = b'version https://git-lfs.github.com/spec/'


def to_path(name: str | os.PathLike) -> Any:
    """Return an absolute path on a disk, or a path of gs:// or s3:// with pathlib's methods.

    Raises ValueError for what is no path, for other schemes, for a home folder that does not exist, and for a
    path that the system cannot follow (a loop of links, no permission, a name that is too long).
    """
    scheme, separator, _ = _text(name).partition('://')
    if not separator:
        return disk_path(name)
    if scheme == 'file':
        raise ValueError(f'{name}: paths on a disk are written without file://: write /path/to/it')
    if scheme not in CLIENTS:
        raise ValueError(
            f'{name}: only paths on a disk, gs:// and s3:// are read: download it, and name the copy'
        )
    return _bucket_path(_text(name), scheme)


def disk_path(name: str | os.PathLike) -> Path:
    """Return an absolute path on a disk, free of `~` and `..`: TensorStore refuses those.

    A link in front of a `..` is followed first, as the system does. Raises ValueError as `to_path`, and for
    buckets, which know neither renaming nor locks.
    """
    text = _text(name)
    if '://' in text:
        raise ValueError(
            f'{text}: write to a disk and copy from there, gs:// and s3:// are read only'
        )
    path = Path(os.path.expanduser(text)).absolute()
    if text.startswith('~') and not os.path.isabs(os.path.expanduser(text)):
        raise ValueError(
            f'{text}: there is no such home folder: write ./{text} for a name that begins with ~'
        )
    if '..' in path.parts:
        end = len(path.parts) - path.parts[::-1].index('..')
        path = Path(os.path.realpath(Path(*path.parts[:end])), *path.parts[end:])
    try:
        path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise ValueError(
                f'{text} cannot be opened ({error.strerror}): correct the name, its links or its permissions'
            ) from error
    return path


def to_kvstore(folder: Any) -> dict[str, str]:
    """Return TensorStore's name of a folder of `to_path`."""
    if isinstance(folder, Path):
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f'{str(folder)!r} is not UTF-8, and TensorStore opens no other names: rename the folder'
            ) from None
        return {'driver': 'file', 'path': f'{folder}/'}
    scheme, _, place = str(folder).partition('://')
    bucket, _, path = place.partition('/')
    kvstore = {'driver': {'gs': 'gcs', 's3': 's3'}[scheme], 'bucket': bucket, 'path': f'{path}/'}
    endpoint = os.environ.get('AWS_ENDPOINT_URL')  # a store that is not Amazon's but speaks S3
    if endpoint and scheme == 's3':
        kvstore['endpoint'] = endpoint
    return kvstore


def is_file(file: Any) -> bool:
    """Return whether this path of `to_path` is a file.

    Raises OSError where the system does not let us look: what cannot be seen is not missing.
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
    return status.st_size if isinstance(file, Path) else status.length


def own_file(file: Any) -> Any:
    """Return `file` if it exists and lies in its own folder after links are followed.

    A stranger's checkpoint must not choose which file is read. (Hugging Face's cache links from a model's
    snapshots to its blobs.) Raises ValueError, also for a pointer of git-lfs in place of the file, and OSError
    for a file that the system does not let us read.
    """
    if not is_file(file):
        raise ValueError(f'{file} is missing: bring all files of the checkpoint')
    if isinstance(file, Path):
        root = file.parent.resolve()
        target = file.resolve()
        if root.parent.name == 'snapshots':
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


def _unreadable(file: Path, error: OSError) -> OSError:
    return type(error)(
        f'{file} cannot be read ({error.strerror}): correct its permissions or its disk'
    )


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
    client, extra = CLIENTS[scheme]
    bucket, slash, key = name.removeprefix(f'{scheme}://').partition('/')
    if slash:
        name = f'{scheme}://{bucket}{posixpath.normpath("/" + key).rstrip("/")}'
    os.environ['EPATH_USE_TF'] = 'false'  # else epath imports TensorFlow if that is installed
    # Without these, gcsfs looks for credentials for seconds at every call, and s3fs reads 50 MiB ahead.
    os.environ.setdefault('GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT', 'false')
    os.environ.setdefault('FSSPEC_S3_DEFAULT_CACHE_TYPE', 'none')
    try:
        importlib.import_module(client)
        path = importlib.import_module('etils.epath').Path(name)
    except ImportError as error:
        raise ValueError(f"{name} needs {client}: pip install -e '.[{extra}]'") from error
    try:
        is_bucket = str(path.parent).endswith('/')
        list((path if is_bucket else path.parent).iterdir())  # the clients remember this listing
    except Exception as error:  # each client has its own exceptions
        cause = ' '.join(f'{type(error).__name__}: {error}'.split())
        raise ValueError(
            f'{name} cannot be listed ({cause}): correct its name or rights'
        ) from error
    return path


def read_json(file: Path) -> dict[str, Any]:
    file = own_file(file)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{file} cannot be read ({error}): copy the folder again') from error
    if not isinstance(content, dict):
        raise ValueError(f'{file} holds no JSON object: copy the folder again')
    return content


def check_new(folder: Path) -> None:
    """Raise ValueError where no folder can be made, nor written into: at, below or behind what is none."""
    for place in (folder, *folder.parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(
                f'{folder} cannot be written: {place} is a link to nothing: remove it or name another folder'
            )
        if place.exists() and not place.is_dir():
            raise ValueError(f'{folder} cannot be written: {place} is a file: name another folder')


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a new folder on the disk of `folder`, to be renamed to it when all is written.

    At the end what is left of it is removed and, after an error, every folder that was made for it.
    """
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        prefix = f'{folder.name[:50]}.tmp-'
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as tmp:
            whole = Path(tmp, 'whole')  # which, unlike `tmp`, everybody may read
            whole.mkdir()
            yield whole
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # such as somebody else's files in it
                parent.rmdir()
        raise


def replace_file(file: Path, content: bytes) -> None:
    """Write all of `file` or nothing: a reader finds the old content or the new one, even after a crash."""
    unfinished = file.with_name(f'.{file.name}.unfinished')
    with unfinished.open('wb') as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)
