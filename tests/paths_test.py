"""What users write for a path: every form means the same everywhere, or is refused in one line."""

import os
import re
from pathlib import Path

import pytest
from permissions import another_user

import paths

ODD_NAMES = ['with space', 'größe 文', "#?%&'[]", 'a,b', '*', '-x', '$HOME', '"', 'a\\b', 'x.index']


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a file, folders and links in it; HOME is its `home`."""
    (tmp_path / 'real/sub').mkdir(parents=True)
    (tmp_path / 'home').mkdir()
    (tmp_path / 'file').write_text('content')
    (tmp_path / 'link').symlink_to('real/sub')
    (tmp_path / 'dangling').symlink_to('nothing')
    (tmp_path / 'loop').symlink_to('loop')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    return tmp_path


class PathLike:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f'PathLike({self.name!r})'

    def __fspath__(self):
        return self.name


@pytest.mark.parametrize(
    'name, expected',
    [
        ('real', 'real'),
        ('./real', 'real'),
        ('real/', 'real'),
        ('real//sub/.', 'real/sub'),
        ('real/../real/sub', 'real/sub'),
        ('link', 'link'),
        ('link/..', 'real'),
        ('link/../sub', 'real/sub'),
        ('link/../../file', 'file'),
        ('dangling', 'dangling'),
        ('nothing/yet', 'nothing/yet'),
        ('file/below', 'file/below'),
        ('~', 'home'),
        ('~/x', 'home/x'),
        ('~/../x', 'x'),
        ('./~', '~'),
        ('C:\\x', 'C:\\x'),
        (Path('~/x'), 'home/x'),
        (Path('real/..'), ''),
        (PathLike('real'), 'real'),
        *((name, name) for name in ODD_NAMES),
    ],
    ids=repr,
)
def test_a_name_and_what_it_means(here, name, expected):
    for to_path in (paths.to_path, paths.disk_path):
        assert to_path(name) == here / expected
        assert to_path(to_path(name)) == here / expected


def test_the_root():
    for name in ('/', '/..', '//'):
        assert os.fspath(paths.to_path(name)).strip('/') == ''


NO_PATH = 'is no path: '
FOLLOWED = 'cannot be opened (Too many levels of symbolic links): correct the name'


@pytest.mark.parametrize(
    'name, message',
    [
        ('', NO_PATH),
        (' ', NO_PATH),
        (None, NO_PATH),
        (b'real', NO_PATH),
        (5, NO_PATH),
        (['real'], NO_PATH),
        (PathLike(b'real'), NO_PATH),
        ('a\0b', NO_PATH),
        ('\ud800', NO_PATH),
        ('~nobodyhere/x', 'there is no such home folder: write ./~nobodyhere/x'),
        ('loop', FOLLOWED),
        ('loop/x', FOLLOWED),
        ('a' * 300, 'File name too long'),
        ('http://x/y', 'http://x/y: '),
        ('file:///x', 'file:///x: '),
        ('hdfs://x', 'hdfs://x: '),
    ],
    ids=repr,
)
def test_what_is_no_path(here, name, message):
    for to_path in (paths.to_path, paths.disk_path):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            to_path(name)
        assert '\n' not in str(error.value)


def test_schemes_have_their_remedies():
    for name, remedy in [
        ('http://x', 'only paths on a disk, gs:// and s3:// are read: download it'),
        ('file:///x', 'paths on a disk are written without file://'),
    ]:
        with pytest.raises(ValueError, match=remedy):
            paths.to_path(name)
    with pytest.raises(ValueError, match='gs://b/x: write to a disk and copy from there'):
        paths.disk_path('gs://b/x')


def test_what_cannot_be_seen_is_not_missing(open_path):
    here = open_path
    (here / 'real').mkdir()
    (here / 'file').write_text('content')
    (here / 'dangling').symlink_to('nothing')
    (here / 'loop').symlink_to('loop')
    (here / 'real/file').write_text('content')
    (here / 'real').chmod(0o700)
    (here / 'file').chmod(0)
    assert paths.own_file(here / 'real/file')
    with another_user():
        assert paths.is_file(here / 'file') and not paths.is_file(here / 'nothing')
        for read in (
            lambda: paths.is_file(here / 'real/file'),
            lambda: paths.own_file(here / 'file'),
        ):
            with pytest.raises(
                PermissionError, match='cannot be read .Permission denied.: correct'
            ):
                read()
    (here / 'file').chmod(0o644)
    for name in ('dangling', 'loop', 'file/below', 'real', 'a' * 254):
        assert not paths.is_file(here / name)


def test_files_of_others_and_pointers(here):
    (here / 'real/out').symlink_to('../file')
    (here / 'real/beside').symlink_to('sub')
    (here / 'real/pointer').write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\n')
    for name, words in [
        ('out', 'outside of its folder: do not trust it'),
        ('pointer', 'is a pointer of git-lfs, not the file itself: run `git lfs pull`'),
        ('nothing', 'is missing: bring all files'),
        ('sub', 'is missing: bring all files'),
    ]:
        with pytest.raises(ValueError, match=words):
            paths.own_file(here / 'real' / name)
    assert paths.own_file(here / 'file') == here / 'file'
    assert paths.file_size(here / 'file') == 7


def test_names_for_tensorstore(here):
    assert paths.to_kvstore(here) == {'driver': 'file', 'path': f'{here}/'}
    with pytest.raises(ValueError, match='is not UTF-8, and TensorStore opens no other names'):
        paths.to_kvstore(here / os.fsdecode(b'latin-\xe9'))


def test_a_folder_that_cannot_be_made(here):
    for name in ('new', 'real', 'real/sub/new', 'link/new'):
        paths.check_new(here / name)
        assert paths.blocking_file(here / name) is None
    for name in ('file', 'file/below/it'):
        assert paths.blocking_file(here / name) == here / 'file'
        with pytest.raises(ValueError, match='/file is a file: name another folder'):
            paths.check_new(here / name)
    with pytest.raises(
        ValueError, match='/dangling is a link to nothing: remove it or name another'
    ):
        paths.check_new(here / 'dangling/new')


def test_a_new_folder_appears_at_once_or_not_at_all(here):
    final = here / 'a/b/final'
    with pytest.raises(OSError, match='disk full'):
        with paths.unfinished(final) as new:
            (new / 'file').write_text('half')
            raise OSError('disk full')
    assert not (here / 'a').exists()
    with paths.unfinished(final) as new:
        (new / 'file').write_text('all')
        assert not final.exists()
        new.rename(final)
    assert [path.name for path in (here / 'a/b').iterdir()] == ['final']
    assert (final / 'file').read_text() == 'all'


def test_a_file_is_replaced_at_once_or_not_at_all(here, monkeypatch):
    paths.replace_file(here / 'file', b'new')
    assert (here / 'file').read_bytes() == b'new'
    names = sorted(os.listdir(here))

    def fail(descriptor):
        raise OSError('disk full')

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match='disk full'):
        paths.replace_file(here / 'file', b'newer')
    monkeypatch.undo()
    assert (here / 'file').read_bytes() == b'new'
    paths.replace_file(here / 'file', b'newest')  # what the first attempt left is no hindrance
    assert (here / 'file').read_bytes() == b'newest' and sorted(os.listdir(here)) == names


@pytest.mark.parametrize(
    'content, message',
    [
        (b'{', 'cannot be read .*: restore it from a copy'),
        (b'[' * 100_000, 'cannot be read .*: restore it from a copy'),
        (b'[]', 'holds no JSON object: restore it from a copy'),
    ],
    ids=['torn', 'deep', 'list'],
)
def test_json_of_others(here, content, message):
    (here / 'config.json').write_bytes(b'{"a": 1}')
    assert paths.read_json(here / 'config.json') == {'a': 1}
    (here / 'config.json').write_bytes(content)
    with pytest.raises(ValueError, match=message):
        paths.read_json(here / 'config.json')
