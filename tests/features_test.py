"""Packing and feature conversion, against SeqIO's, and by counting every token.

tests/golden/seqio_t5 was made by running SeqIO b898b9f.
"""

from types import SimpleNamespace

import chex
import numpy as np
import pytest
from corpora import golden

import data


def trimmed(example, lengths):
    """The features of an example that `lengths` names, each cut to its length."""
    return {name: np.array(example[name][:length], np.int32) for name, length in lengths.items()}


def sizes_of(examples, lengths):
    return np.array([[len(example[name]) for name in lengths] for example in examples])


@pytest.mark.parametrize('case', golden('packing'), ids=lambda case: str(case['feature_lengths']))
def test_greedy_packing_is_seqios(case):
    lengths = case['feature_lengths']
    examples = [trimmed(example, lengths) for example in case['examples']]
    limits = np.array(list(lengths.values()))
    rows = data.pack_greedily(sizes_of(examples, lengths), limits)
    packed_examples = [[SimpleNamespace(**examples[i]) for i in row] for row in rows]
    found = []
    for name, length in lengths.items():
        packed = data.fill(packed_examples, name, length)
        found.append((name, packed.ids))
        found.append((f'{name}_segment_ids', packed.segment_ids))
        found.append((f'{name}_positions', packed.positions))
    expected = {name: [row[name] for row in case['packed']] for name in case['packed'][0]}
    chex.assert_trees_all_equal(dict(found), {k: np.array(x) for k, x in expected.items()})
    for name, length in lengths.items():
        padded = data.fill([[SimpleNamespace(**example)] for example in examples], name, length).ids
        expected_rows = [row[name] for row in case['trim_and_pad']]
        np.testing.assert_array_equal(padded, expected_rows)


CONVERSIONS = [x for x in golden('feature_converters') if x['converter'].startswith('EncDec')]


@pytest.mark.parametrize('case', CONVERSIONS, ids=lambda case: f'pack={case["pack"]}')
def test_features_are_seqios(case):
    lengths = case['task_feature_lengths']
    examples = [trimmed(example, lengths) for example in case['examples']]
    rows = [[i] for i in range(len(examples))]
    if case['pack']:
        rows = data.pack_greedily(sizes_of(examples, lengths), np.array(list(lengths.values())))
    examples_of_rows = [[data.Example(**examples[i], names=[]) for i in row] for row in rows]
    found = data.encoder_decoder(examples_of_rows, lengths, case['pack'])
    expected = {
        name: np.array([row[name] for row in case['outputs']], np.int32)
        for name in case['outputs'][0]
    }
    assert {name: x.shape[1] for name, x in found.items()} == case['model_feature_lengths']
    chex.assert_trees_all_equal(found, expected)
    assert all(x.dtype == np.int32 for x in found.values())


def random_sizes(seed, count, limits):
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(1, limit + 1, count) for limit in limits], axis=1)


@pytest.mark.parametrize('pack', [data.pack_greedily, data.pack_tightly])
@pytest.mark.parametrize('count', [0, 1, 2, 500])
def test_packing_places_every_example_once_where_it_fits(pack, count):
    limits = np.array([40, 9])
    sizes = random_sizes(count, count, limits) // 2 + 1
    rows = pack(sizes, limits)
    assert sorted(i for row in rows for i in row) == list(range(count))
    for row in rows:
        assert row and (sizes[row].sum(axis=0) <= limits).all()


def test_tight_packing_needs_fewer_rows():
    limits = np.array([512, 114])
    sizes = random_sizes(1, 1000, limits) // 3 + 1
    least = -(-sizes.sum(axis=0) // limits).max()
    tight = len(data.pack_tightly(sizes, limits))
    greedy = len(data.pack_greedily(sizes, limits))
    assert least <= tight < 1.1 * least < greedy


def test_an_example_without_inputs_keeps_the_segments_aligned():
    """SeqIO's numbers drift apart: its second example would have encoder segment 1."""
    row = [data.Example([], [5, 1], []), data.Example([7, 1], [6, 1], [])]
    batch = data.encoder_decoder([row], {'inputs': 4, 'targets': 5}, True)
    assert batch['encoder_segment_ids'].tolist() == [[2, 2, 0, 0]]
    assert batch['decoder_segment_ids'].tolist() == [[1, 1, 2, 2, 0]]


def test_a_zero_inside_an_example_stays():
    """SeqIO cuts the example there."""
    row = [data.Example([4, 0, 5], [6, 0, 1], [])]
    batch = data.encoder_decoder([row], {'inputs': 4, 'targets': 4}, True)
    assert batch['encoder_segment_ids'].tolist() == [[1, 1, 1, 0]]
    assert batch['decoder_loss_weights'].tolist() == [[1, 0, 1, 0]]
