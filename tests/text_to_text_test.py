"""Objectives of texts, against SeqIO and t5.

tests/golden/seqio_t5/sentinel.json and trivia_qa_truncate_inputs.json were made by running SeqIO's
`add_task_with_sentinels` and t5's `trivia_qa_truncate_inputs`; the latter lists all parts that 200
seeds gave.
"""

import types

import numpy as np
import pytest
from corpora import golden, make_config

from messages import Refused
from tasks import objectives
from vocabulary import ByteVocabulary

SENTINEL_CASES = golden('sentinel')
PARTS = golden('trivia_qa_truncate_inputs')


def objective_of(name, lengths, vocabulary_size=100, num_sentinels=1):
    config = make_config(**{f'lengths.{feature}': length for feature, length in lengths.items()})
    vocabulary = types.SimpleNamespace(
        eos_id=1,
        ends=ByteVocabulary().ends,
        size=vocabulary_size,
        num_sentinels=num_sentinels,
        sentinel_ids=vocabulary_size - 1 - np.arange(num_sentinels, dtype=np.int32),
    )
    return objectives.OBJECTIVES[name](config, vocabulary)


def as_arrays(record):
    return {feature: np.array(ids, np.int32) for feature, ids in record.items()}


@pytest.mark.parametrize('case', SENTINEL_CASES, ids=lambda case: str(case['lengths']))
def test_sentinels_are_where_seqio_puts_them(case):
    objective = objective_of('text_to_text_1_sentinel', case['lengths'], case['vocabulary_size'])
    records = [as_arrays(record) for record in case['records']]
    found = objective.examples([str(i) for i in range(len(records))], records)
    for example, record, expected in zip(found, case['records'], case['examples'], strict=True):
        assert example.inputs.tolist() == expected['inputs']
        assert example.targets.tolist() == expected['targets']
        is_trimmed = any(len(record[x]) + 2 > case['lengths'][x] for x in record)
        assert example.is_trimmed == is_trimmed


@pytest.mark.parametrize(
    'inputs, targets, num_sentinels, named',
    [
        (2, 8, 1, 'data.lengths.inputs=2'),
        (8, 2, 1, 'data.lengths.targets=2'),
        (8, 8, 0, 'data.extra_ids=0'),
    ],
)
def test_no_room_for_a_sentinel(inputs, targets, num_sentinels, named):
    lengths = {'inputs': inputs, 'targets': targets}
    with pytest.raises(Refused, match=named):
        objective_of('text_to_text_1_sentinel', lengths, num_sentinels=num_sentinels)


@pytest.mark.parametrize('case', PARTS, ids=lambda case: f'{len(case["inputs"])} {case["targets"]}')
def test_long_inputs_are_cut_around_their_targets(case):
    """The parts are those of t5, each of them is drawn, and EOS is at their ends."""
    length = case['length']
    objective = objective_of('trivia_qa_truncate_inputs', {'inputs': length, 'targets': 9})
    record = as_arrays({'inputs': case['inputs'], 'targets': case['targets']})
    seen = set()
    for seed in range(200):
        for example in objective.examples(['a'], [record], seed):
            assert example.targets.tolist() == [*case['targets'], 1]
            assert example.is_trimmed
            seen.add(tuple(example.inputs.tolist()))
    assert seen == {(*part[: length - 1], 1) for part in case['windows']}
    assert bool(seen) != case['dropped']


def test_a_record_without_its_targets_leaves_the_others_as_they_are():
    objective = objective_of('trivia_qa_truncate_inputs', {'inputs': 8, 'targets': 8})
    long = as_arrays({'inputs': list(range(10, 30)), 'targets': [5]})
    short = as_arrays({'inputs': [7, 8], 'targets': [5]})
    too_long = as_arrays({'inputs': list(range(10, 30)), 'targets': list(range(10, 20))})
    found = objective.examples(['a', 'b', 'c'], [long, short, too_long], 0)
    assert [(x.names, x.inputs.tolist(), x.targets.tolist()) for x in found] == [
        (['b'], [7, 8, 1], [5, 1])
    ]
    assert objective.examples([], [], 0) == []
