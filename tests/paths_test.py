"""What users write for a path: every form means the same everywhere, or is refused."""

import dataclasses
import os
from pathlib import Path

import pytest
from permissions import another_user

import paths
from messages import Refused

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


@dataclasses.dataclass
class PathLike:
    name: object

    def __fspath__(self):
        return self.name


MEANINGS = {
    'real/': 'real',
    'real//sub/.': 'real/sub',
    'real/../real/sub': 'real/sub',
    'link/..': 'real',
    'link/../sub': 'real/sub',
    'link/../../file': 'file',
    'dangling': 'dangling',
    'file/below': 'file/below',
    '~': 'home',
    '~/../x': 'x',
    './~': '~',
    Path('~/x'): 'home/x',
    Path('real/..'): '',
    **{name: name for name in ODD_NAMES},
}


def test_a_name_and_what_it_means(here):
    for to_path in (paths.to_path, paths.disk_path):
        for name, expected in MEANINGS.items():
            assert to_path(name) == here / expected
            assert to_path(to_path(name)) == here / expected
        assert to_path(PathLike('real')) == here / 'real'


def test_the_root():
    for name in ('/', '/..', '//'):
        assert os.fspath(paths.to_path(name)).strip('/') == ''


def test_what_is_no_path(here):
    for to_path in (paths.to_path, paths.disk_path):
        for name in ('', ' ', '~nobodyhere/x', 'http://x/y', 'file:///x'):
            with pytest.raises(Refused) as error:
                to_path(name)
            assert '\n' not in str(error.value)
            assert str(name) in str(error.value) or repr(name) in str(error.value)
        for name in ('loop', 'loop/x', 'a' * 300):
            with pytest.raises(Refused, match=name):
                to_path(name)
    for refused in (
        paths.disk_path,
        paths.to_path,
    ):  # no disk; a client would remove gs://b/xy, too
        with pytest.raises(Refused, match='gs://b/x'):
            refused('gs://b/x*')
    with pytest.raises(Refused):
        paths.to_kvstore(here / os.fsdecode(b'latin-\xe9'))
    assert paths.to_kvstore(here) == {'driver': 'file', 'path': f'{here}/'}


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
        for read, name in [(paths.is_file, 'real/file'), (paths.own_file, 'file')]:
            with pytest.raises(PermissionError, match='file'):
                read(here / name)
    (here / 'file').chmod(0o644)
    for name in ('dangling', 'loop', 'file/below', 'real', 'a' * 254):
        assert not paths.is_file(here / name)


def test_files_that_are_missing_and_pointers(here):
    (here / 'real/pointer').write_text('version https://git-lfs.github.com/spec/v1\noid sha256:0\n')
    for name in ('pointer', 'nothing', 'sub'):
        with pytest.raises(Refused, match=f'real/{name}'):
            paths.own_file(here / 'real' / name)
    assert paths.own_file(here / 'file') == here / 'file'
    assert paths.status_of(here / 'file').num_bytes == 7


def test_a_folder_that_cannot_be_made(here):
    for name in ('new', 'real', 'real/sub/new', 'link/new'):
        paths.check_new(here / name)
    for name, blocking in [('file/below/it', 'file'), ('dangling/new', 'dangling')]:
        with pytest.raises(Refused, match=f'/{blocking}'):
            paths.check_new(here / name)


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
        final.parent.mkdir(parents=True)
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
    assert (here / 'file').read_bytes() == b'new' and sorted(os.listdir(here)) == names
    paths.replace_file(here / 'file', b'newest')
    assert (here / 'file').read_bytes() == b'newest' and sorted(os.listdir(here)) == names
