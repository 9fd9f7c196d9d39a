"""Texts of examples, against those of t5.

tests/golden/tasks.jsonl, more_texts.jsonl and seqio_t5/text_formats.jsonl were made by running t5 0.9.4
and google-research's t5_closed_book_qa 0c1bbe5 on records as TFDS yields them.
"""

import json
import pathlib

import numpy as np
from corpora import make_config

import sources.pydoc
import tasks
import tasks.open

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'


def cases():
    """(task, record, examples) of all files: only some fields of each example are listed."""
    found = []
    files = {
        'tasks.jsonl': 'examples',
        'more_texts.jsonl': 'examples',
        'seqio_t5/text_formats.jsonl': 'outputs',
    }
    for file, key in files.items():
        for line in (GOLDEN / file).read_text().splitlines():
            case = json.loads(line)
            found.append((case['task'], case['raw'], case[key]))
    return found


def as_tfds(value):
    """The same value as TFDS decodes it: bytes and arrays."""
    if isinstance(value, dict):
        return {name: as_tfds(x) for name, x in value.items()}
    if isinstance(value, list):
        return np.array([as_tfds(x) for x in value], object)
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, int):
        return np.int64(value)
    return np.float32(value)


def as_json(value):
    """The same value of an example as JSON has it."""
    return json.loads(json.dumps(value, default=lambda x: x.item()))


def test_examples_are_t5s():
    """Of records as JSON has them, and as TFDS does."""
    for name, record, expected in cases():
        task = tasks.get(name)
        for given in (record, as_tfds(record)):
            found = list(task.preprocess([given]))
            for example, listed in zip(found, expected, strict=True):
                assert as_json({key: example[key] for key in listed}) == listed, name
                assert isinstance(example['inputs'], str)
                assert isinstance(example['targets'], str)


def test_the_label_of_a_table_is_a_text():
    names = set()
    for case in cases():
        name, record, _ = case
        if isinstance(record.get('label'), int):
            expected = list(tasks.get(name).preprocess([record]))
            found = list(tasks.get(name).preprocess([record | {'label': f' {record["label"]}'}]))
            assert [(x['inputs'], x['targets']) for x in found] == [
                (x['inputs'], x['targets']) for x in expected
            ]
            names.add(name)
    assert {'glue_cola_v002', 'super_glue_wsc_v102_simple_train'} <= names


def test_a_docstring_has_a_summary_and_the_rest():
    task = tasks.get('pydoc_summary')
    fields = {'summary': 'Return a key.', 'rest': 'The key is that of a sort.', 'text': 'both'}
    assert list(task.preprocess([fields])) == [
        {'inputs': 'summarize: The key is that of a sort.', 'targets': 'Return a key.'}
    ]
    for short in ({'rest': ''}, {'rest': 'No more.'}, {'summary': 'A key.'}):
        assert list(task.preprocess([fields | short])) == []


def test_summaries_are_read_from_the_documentation(pydoc_documents, monkeypatch):
    monkeypatch.setattr(sources.pydoc, 'documents', lambda: pydoc_documents)
    config = make_config(task='pydoc_summary', validation_fraction=0.05)
    source = tasks.open.open_mixture(config).tasks[0].source
    records = list(source.records('validation'))
    examples = list(tasks.get('pydoc_summary').preprocess([x.fields for x in records]))
    assert 100 < len(examples) < len(records)
