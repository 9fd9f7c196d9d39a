"""What a run says before its first step of the targets that its vocabulary changes."""

import json

import pytest
from corpora import HUNT
from runs import small_config

import tasks.open
import vocabulary as vocabularies
from prepare import prepare
from run import examples
from stream import TokenizedTask

GOOD = vocabularies.SentencePieceVocabulary((HUNT / 'good.model').read_bytes())
# Targets, whether they change, and the example. This vocabulary has no blank for a newline, as T5's has.
TARGETS = [
    ('it is: me', False, ''),
    ('it\nis', True, r"'it\nis' becomes 'it ⁇ is'"),
    ('it  is', True, "'it  is' becomes 'it is'"),
    ('it is éü', True, "'it is éü' becomes"),
    ('it is ' * 99 + '\nit', True, r"it is \nit' becomes"),
]


def lines_of(tmp_path, targets, vocabulary):
    config = small_config('').data
    config.update(task='text_to_text', inputs='{i}', targets='{t}', validation_fraction=0.0)
    config.lengths.targets = 1000
    config.files = f'{tmp_path}/a.jsonl'
    rows = [{'i': f'#  {i}', 't': text} for i, text in enumerate(targets)]
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    opened = [TokenizedTask(x, config, vocabulary) for x in tasks.open.open_mixture(config).tasks]
    return list(examples.changes_of_targets(opened))


def test_targets_that_the_vocabulary_changes(tmp_path):
    for text, changes, sample in TARGETS:
        lines = lines_of(tmp_path, ['it is', text], GOOD)
        assert len(lines) == changes, text
        for line in lines:
            begin = 'task text_to_text: 1 of the first 2 targets change by encoding and decoding: '
            assert line.startswith(begin) and sample in line
            assert len(line) < 200 and '\n' not in line
    [line] = lines_of(tmp_path, ['it  is'] * 150, GOOD)
    assert ': 100 of the first 100 targets' in line
    assert lines_of(tmp_path, [text for text, _, _ in TARGETS], vocabularies.ByteVocabulary()) == []


def test_a_run_says_it_before_it_compiles(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr('train.compile_step', None)
    config = small_config(str(HUNT / 'multiline_memo.jsonl'))
    config.data.update(task='text_to_text', inputs='{inputs}', targets='{targets}')
    config.data.update(num_pieces=100, metrics='accuracy')
    config.infer_eval.every_steps = 3
    with pytest.raises(TypeError):
        prepare(config, tmp_path / 'run')
    said = r"'name: Oslo\nkind: city' becomes 'name: Oslo kind: city'"
    assert f'targets change by encoding and decoding: {said}' in capsys.readouterr().out
