"""A user's paths, on a disk or in a bucket (gs://, s3://): names, safe reading, atomic writing.

Every path in a flag, setting or argument goes through `to_path` or `disk_path` once, except the globs of
sources/files.py. A path in a bucket is a UPath, which has pathlib's methods.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias, Union

from messages import Refused
from run import buckets, hub
from run.buckets import FileStatus

if TYPE_CHECKING:
    from upath import UPath


RESTORE_LINE = 'restore the file from a copy, or remove this line'
LFS_HEADER = b'version https://git-lfs.github.com/spec/'

AnyPath: TypeAlias = Union[Path, 'UPath']


# Names.


def to_path(name: str | os.PathLike | AnyPath) -> AnyPath:
    """Return an absolute path on a disk, or a path of gs:// or s3://, whether it exists or not.

    Raises Refused if `name` is not a path, the system cannot follow it (a loop of links, no permission), or the bucket
    cannot be listed.
    """
    if is_in_bucket(str(name)):
        return buckets.to_path(str(name))
    return disk_path(name)


def source_path(name: str | os.PathLike | AnyPath, has_weights: bool = True) -> AnyPath:
    """Return `to_path(name)`; for a model on the hub its folder in the cache, with its weights if `has_weights`."""
    if hub.is_name(str(name)):
        from run import hub_client  # late: the client is large

        return hub_client.to_folder(str(name), has_weights)
    return to_path(name)


def disk_path(name: str | os.PathLike) -> Path:
    """Return an absolute path on a disk, without `~` and `..`, which TensorStore refuses. Raises like `to_path`."""
    if is_in_bucket(str(name)):
        raise Refused(f'{name} is in a bucket: name a path on a disk')
    text = os.fspath(name)
    if not text.strip():
        raise Refused(f'{name!r} is not a path: name a file or a folder')
    expanded = os.path.expanduser(text)
    if expanded.startswith('~'):
        raise Refused(f'{text}: no user of that name: write ./{text} for a file with ~')
    path = Path(expanded).absolute()
    if '..' in path.parts:  # the system follows links before it first
        path = Path(os.path.realpath(path))
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except OSError as error:
        raise Refused(f'{text} cannot be opened ({error.strerror}): correct it') from error
    return path


def is_in_bucket(name: str) -> bool:
    """Return whether a name is a URL; an absolute path on a disk has no two slashes."""
    return '://' in name


def to_kvstore(folder: AnyPath) -> dict[str, str]:
    if isinstance(folder, Path):
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            raise Refused(f'{str(folder)!r} is not UTF-8: rename the folder') from None
        return {'driver': 'file', 'path': f'{folder}/'}
    return buckets.to_kvstore(folder)


# Reading.


def open_file(
    name: str, read_ahead: int = 1 << 16, num_bytes: int | None = None
) -> io.BufferedReader:
    """Open a file for reading: an absolute path on a disk or a URL of a bucket.

    A read from a bucket fetches `read_ahead` bytes more than requested, and reading forward fetches each byte once.
    `num_bytes`, if the size is known, saves a request. Raises ReadError. Refuses a pointer of git-lfs.
    """
    if hub.is_name(name):
        from run import hub_client

        name = hub_client.local_file(name)
    if is_in_bucket(name):
        return buckets.open_file(name, read_ahead, num_bytes)
    stream = open(name, 'rb')
    if stream.peek().startswith(LFS_HEADER):
        stream.close()
        raise Refused(f'{name} is a pointer of git-lfs, not the file: run `git lfs pull`')
    return stream


def is_file(file: AnyPath) -> bool:
    """Return whether a path is a file. Raises OSError without permission to look."""
    try:
        return stat.S_ISREG(file.stat().st_mode)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        if not is_missing and error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        return False


def status_of(file: str | AnyPath) -> FileStatus:
    """Return the size of a file and a bucket's checksum of it. Raises OSError."""
    if is_in_bucket(str(file)):
        return buckets.status_of(str(file))
    return FileStatus(os.stat(file).st_size)


def list_folder(folder: AnyPath) -> list[AnyPath]:
    """Return the files and folders in a folder; [] if it does not exist."""
    if not isinstance(folder, Path):
        return [*buckets.list_folder(folder)]
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def own_file(file: AnyPath) -> AnyPath:
    """Return `file` if `open_file` opens it, for a library. Raises OSError without permission to read."""
    if not is_file(file):
        raise Refused(f'{file} is missing: copy the folder again')
    if isinstance(file, Path):
        open_file(str(file)).close()
    return file


def read_json(file: AnyPath) -> dict:
    """Return the JSON object in a file. Raises like `own_file` and `json_object`."""
    return json_object(own_file(file).read_bytes(), str(file), 'restore it from a copy')


def json_object(content: bytes, title: str, remedy: str = RESTORE_LINE) -> dict:
    """Return a JSON object. Refuses other content, naming `title`."""
    try:
        return {**json.loads(content)}
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: not an object
        raise Refused(f'{title} is damaged ({error}): {remedy}') from None


def reason(error: BaseException) -> str:
    """Return an error's text, for an OSError of the system its file and reason."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    if not error.filename:
        return error.strerror
    return f'{error.filename}: {error.strerror}'


# Writing, all or nothing.


def check_new(folder: AnyPath) -> None:
    """Refuse a `folder` with a file or a broken link in its way."""
    for path in (folder, *folder.parents):
        if os.path.lexists(str(path)) and not path.is_dir():  # False for a URL
            raise Refused(f'{folder}: {path} is a file, not a folder: name another one')


@contextlib.contextmanager
def naming(path: AnyPath, unfinished: Path | None = None) -> Iterator[None]:
    """Make an OSError name `path` if it names no file (a full disk), or one that begins like `unfinished`.

    TensorStore and safetensors have an OSError's number in the text of their errors.
    """
    prefix = str(unfinished or path)
    try:
        yield
    except Exception as error:
        number = re.search(r"(?:os error |os_error_code=')(\d+)", str(error))
        if isinstance(error, OSError) and error.errno:
            if str(error.filename or prefix).startswith(prefix):
                error.filename = str(path)
        elif number:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        raise


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """Yield a new folder on the disk of `folder`; the caller fills and renames it, or it is removed."""
    top = [path for path in (folder, *folder.parents) if not path.exists()][-1]
    prefix = f'{top.name[:50]}.tmp-'
    with (
        naming(folder, top.parent / prefix),
        tempfile.TemporaryDirectory(dir=top.parent, prefix=prefix) as private,
    ):
        new = Path(private, 'new')  # with the user's permissions, unlike `private`
        new.mkdir()
        yield new


@contextlib.contextmanager
def replacing(file: Path, writer: str = '') -> Iterator[IO[bytes]]:
    """Yield a file that replaces `file` at the end. Processes that write the same file have different `writer`s."""
    temporary = file.with_name(f'.{file.name}.unfinished{writer}')
    with naming(file, temporary):
        try:
            with temporary.open('wb') as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def replace_file(file: AnyPath, content: bytes, writer: str = '') -> None:
    """Write `file`: on a disk with `replacing`, in a bucket as one object. Raises OSError."""
    if isinstance(file, Path):
        with replacing(file, writer) as stream:
            stream.write(content)
    else:
        buckets.write(file, content)


def remove_folder(folder: AnyPath) -> None:
    if isinstance(folder, Path):
        shutil.rmtree(folder)
    else:
        buckets.remove(folder)
