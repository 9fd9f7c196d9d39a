"""What is damaged is found and set aside; what cannot be read stays as it is. Random faults: tests/chaos."""

import errno
import os
import shutil

import numpy as np
import pytest
from permissions import another_user

import checkpoint
from messages import Refused
from run import verify


def test_a_checkpoint_under_a_wrong_name(tmp_path):
    directory = checkpoint.save(tmp_path, 3, {'state/step': np.int32(3)}, {'config.json': b'{}'})
    shutil.copytree(directory, tmp_path / 'copy')
    assert verify.verify(tmp_path / 'copy')
    with pytest.raises(verify.Damaged, match='checkpoint_4 .*manifest.json'):
        verify.verify(directory.rename(tmp_path / 'checkpoint_4'))
    directory = checkpoint.save(tmp_path, 7, {'state/step': np.int32(6)})
    with pytest.raises(verify.Damaged, match='checkpoint_7 '):
        verify.verify(directory)


@pytest.mark.parametrize(
    'files',
    [
        {'config.json': '{"model_type": "t5"}', 'model.safetensors': ''},
        {'config.json': '{"emb_dim": 32}', 'checkpoint': 'model_checkpoint_path: "model.ckpt-5"'},
    ],
    ids=['Hugging Face', 'Mesh-TensorFlow'],
)
def test_other_formats_under_a_name_of_ours_are_not_damaged(tmp_path, files):
    directory = tmp_path / 'checkpoint_5'
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_text(content)
    assert verify.verify(directory) is False
    assert verify.newest_valid(tmp_path, pytest.fail) == 5
    # One of ours that has lost its manifest is damaged.
    (directory / 'config.json').write_text('{"model": {}}')
    with pytest.raises(verify.Damaged, match='manifest.json'):
        verify.verify(directory)


def test_a_file_that_never_ends_and_many_that_are_missing(tmp_path):
    """At most ten are named."""
    directory = checkpoint.save(tmp_path, 1, {f'target/{i}': np.ones(3) for i in range(30)})
    (directory / 'target.3/0').unlink()
    (directory / 'target.3/0').symlink_to('/dev/zero')
    with pytest.raises(verify.Damaged, match='target.3/0'):
        verify.verify(directory)
    for folder in directory.glob('target.*'):
        shutil.rmtree(folder)
    with pytest.raises(verify.Damaged) as error:
        verify.verify(directory)
    assert str(error.value).count('target.') == 10 and '\n' not in str(error.value)


def test_no_run_starts_from_scratch_over_damage(tmp_path):
    assert verify.newest_valid(tmp_path / 'nowhere') is None
    for step in (1, 2):
        directory = checkpoint.save(tmp_path, step, {'state/step': np.int32(step)})
        (directory / 'checkpoint').unlink()
    reports = []
    for _ in range(2):  # nor when it is started once more
        with pytest.raises(Refused, match='checkpoint_2.damaged-1'):
            verify.newest_valid(tmp_path, reports.append)
    assert len(reports) == 2 and 'checkpoint_2 ' in reports[0]
    checkpoint.save(tmp_path, 2, {'state/step': np.int32(2)})
    assert verify.newest_valid(tmp_path, pytest.fail) == 2
    (tmp_path / 'checkpoint_2/manifest.json').write_text('[]')
    with pytest.raises(Refused, match='checkpoint_2.damaged-2'):
        verify.newest_valid(tmp_path, reports.append)
    assert 'checkpoint_2.damaged-2' in reports[2]


@pytest.mark.parametrize(
    'closed', ['manifest.json', 'config.json', 'checkpoint', 'target.a', 'target.a/0.0', '.']
)
def test_what_may_not_be_read_is_not_damaged(open_path, closed):
    tmp_path = open_path
    tree = {'target/a': np.ones((2, 3), np.float32), 'state/step': np.int32(2)}
    directory = checkpoint.save(tmp_path, 2, tree, {'config.json': b'{}'})
    checkpoint.save(tmp_path, 1, {'state/step': np.int32(1)})
    (directory / closed).chmod(0)
    with another_user():
        for check in (verify.verify, lambda path: verify.newest_valid(path.parent)):
            with pytest.raises(OSError, match='checkpoint_2') as error:
                check(directory)
            assert '\n' not in str(error.value) and str(directory) in str(error.value)
        if closed in ('checkpoint', 'target.a', 'target.a/0.0', '.'):
            with pytest.raises((OSError, Refused)):
                checkpoint.restore(directory)
    assert sorted(os.listdir(tmp_path)) == ['checkpoint_1', 'checkpoint_2']
    (directory / closed).chmod(0o755)
    assert verify.newest_valid(tmp_path, pytest.fail) == 2


def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file))

    directory = checkpoint.save(tmp_path, 2, {'target/a': np.ones(3, np.float32)})
    monkeypatch.setattr(checkpoint, 'checksum', fail)
    with pytest.raises(OSError, match=f'{directory} .*checkpoint: .*zarray: '):
        verify.newest_valid(tmp_path)
    assert os.listdir(tmp_path) == ['checkpoint_2']


def test_a_workdir_that_may_not_be_listed_is_not_empty(open_path):
    tmp_path = open_path
    checkpoint.save(tmp_path / 'run', 2, {'state/step': np.int32(2)})
    (tmp_path / 'run').chmod(0o311)
    with another_user():
        for find in (verify.newest_valid, checkpoint.steps):
            with pytest.raises(PermissionError, match='run'):
                find(tmp_path / 'run')


def test_pointers_of_git_lfs_are_not_damage(tmp_path):
    pointer = b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n'
    tree = {'target/a': np.ones((20, 30), np.float32), 'state/step': np.int32(2)}
    directory = checkpoint.save(tmp_path, 2, tree)
    for name in ('target.a/0.0', 'target.a/.zarray', 'checkpoint'):
        content = (directory / name).read_bytes()
        (directory / name).write_bytes(pointer)
        for read in (verify.verify, checkpoint.restore, lambda x: verify.newest_valid(x.parent)):
            with pytest.raises(Refused, match=name):
                read(directory)
        (directory / name).write_bytes(content)
    assert verify.newest_valid(tmp_path, pytest.fail) == 2
