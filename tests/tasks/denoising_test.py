"""Noise masks and token functions against T5's, and how text is joined and cut.

tests/golden/seqio_t5 was made by running SeqIO b898b9f and t5 e081111; masks are random there, so
their counts and their structure are compared.
"""

import itertools

import numpy as np
import pytest
from corpora import golden, is_near

import data
from tasks import denoising


def test_random_spans_helper_matches_t5():
    checked = 0
    for case in golden('random_spans_helper'):
        *arguments, extra_inputs, extra_targets, result = case.values()
        if (extra_inputs, extra_targets) == (1, 1):  # ours marks each span with one sentinel
            assert data.random_spans_helper(*arguments) == tuple(result), case
            checked += 1
    assert checked >= 9


def count_spans(mask):
    return int(np.sum(mask[:, 0]) + np.sum(mask[:, 1:] & ~mask[:, :-1]))


def test_noise_masks_have_t5s_counts_and_structure():
    for case in golden('noise_masks'):
        length, density, mean = (
            case['length'],
            case['noise_density'],
            case['mean_noise_span_length'],
        )
        masks = data.random_spans_noise_mask((16, length), density, mean, length)
        assert masks.shape == (16, length) and masks.dtype == bool
        for mask in masks:
            assert mask.sum() == case['num_noise_tokens'][0]
            assert count_spans(mask[None]) == case['num_noise_spans'][0]
            assert not mask[0] and (mask[-1] or length == 1)


def test_noise_is_uniform_over_all_ways_to_cut():
    lengths = data.random_segments(6000, 5, 3, 'test')  # 4 choose 2: six ways
    ways, counts = np.unique(lengths, axis=0, return_counts=True)
    assert len(ways) == 6 and np.all(ways.sum(axis=1) == 5) and np.all(ways >= 1)
    assert np.all(np.abs(counts - 1000) < 5 * np.sqrt(1000))


def test_masks_stay_possible_where_t5_fails():
    for length in range(1, 30):
        mask = data.random_spans_noise_mask((2, length), 0.5, 1.0, length)
        assert not mask[:, 0].any()


def last_ids(vocabulary_size):
    """T5's sentinels."""
    return vocabulary_size - 1 - np.arange(100, dtype=np.int32)


def kept(tokens):
    return tokens[tokens != data.DROPPED].tolist()


def test_token_functions_match_t5():
    for case in golden('denoise_fns'):
        tokens = np.array([case['tokens']], np.int32)
        mask = np.array([case['noise_mask']])
        found = data.noise_span_to_unique_sentinel(tokens, mask, last_ids(case['vocab_size']))
        assert found.dtype == np.int32 and kept(found) == case['noise_span_to_unique_sentinel']
        other = data.noise_span_to_unique_sentinel(tokens, ~mask, last_ids(case['vocab_size']))
        assert kept(other) == case['nonnoise_span_to_unique_sentinel']
        for name, dropped in {'drop_noise_tokens': mask, 'drop_nonnoise_tokens': ~mask}.items():
            found = data.drop_noise_tokens(tokens, dropped)
            assert found.dtype == np.int32 and kept(found) == case[name], name


@pytest.mark.parametrize('density, shortest', [(0.5, 1), (0.25, 5), (0.1, 8)])
def test_a_prefix_has_any_length(density, shortest):
    """T5: from round((1 - 2 density)(length - 1)), and 1, to length - 1."""
    masks = denoising.random_prefix_noise_mask((10_000, 11), density, 'test')
    assert not (masks[:, 1:] & ~masks[:, :-1]).any()
    counts = np.bincount(masks.sum(axis=1), minlength=12)
    assert counts[:shortest].sum() == 0 and counts[11] == 0
    assert all(is_near(count, 10_000 / (11 - shortest)) for count in counts[shortest:11])


def test_the_shortest_rows_have_a_prefix():
    assert not denoising.random_prefix_noise_mask((5, 1), 0.5, 0).any()
    assert denoising.random_prefix_noise_mask((5, 2), 0.5, 0).tolist() == [[True, False]] * 5


def test_tokens_are_permuted_in_all_ways():
    tokens = np.tile(np.arange(10, 13, dtype=np.int32), (6000, 1))
    found = denoising.permute_tokens(tokens, 'test')
    ways, counts = np.unique(found, axis=0, return_counts=True)
    assert len(ways) == 6 and (np.sort(ways, axis=1) == tokens[0]).all()
    assert all(is_near(count, 1000) for count in counts)


def test_concatenating_and_splitting_match_seqio():
    case = golden('split_concat')
    documents = [np.array(example['targets'], np.int32) for example in case['examples']]

    def rows_of(group, ends):
        whole = np.concatenate(group)
        rows = data.split_tokens(ends, itertools.repeat(8))
        return [whole[begin:end].tolist() for begin, end in rows]

    groups = [documents[i : i + 3] for i in range(0, len(documents), 3)]
    concatenated = [np.concatenate(group).tolist() for group in groups]
    assert concatenated == [example['targets'] for example in case['reduce_concat_batch3']]
    ends = np.cumsum([len(document) for document in documents])
    expected = [example['targets'] for example in case['split_tokens_max8']]
    assert rows_of(documents, ends) == expected
    found = []
    for group in groups:
        found += rows_of(group, [sum(map(len, group))])
    assert found == [example['targets'] for example in case['concat3_then_split8']]


@pytest.mark.parametrize('rule', ['append_eos', 'append_eos_after_trim'])
def test_eos_is_appended_as_seqio_does(rule):
    """To features with add_eos; without trimming they may become too long."""
    for case in golden('append_eos'):
        lengths = case['sequence_length'] or {}
        for example, expected in zip(case['examples'], case[rule], strict=True):
            for key in ('inputs', 'targets'):
                found = example[key]
                if case[f'{key}_add_eos']:
                    length = len(found) + 1
                    if rule == 'append_eos_after_trim':
                        length = lengths.get(key, length)
                    tokens = np.array([found], np.int32)
                    found = data.append_eos_after_trim(tokens, length, np.array([1]))[0].tolist()
                assert found == expected[key]


def test_a_long_document_gives_one_aligned_chunk():
    ids = np.arange(2 * data.MAX_DOCUMENT_TOKENS + 5, dtype=np.int32)
    lengths, starts = set(), set()
    for i in range(30):
        chunk = data.join_documents(['a'], [{'targets': ids}], i).ids
        starts.add(int(chunk[0]))
        lengths.add(len(chunk))
    assert starts == {0, 65536, 131072} and lengths == {65536, 5}
    whole = data.join_documents(['a'], [{'targets': ids[:65536]}], 0).ids
    np.testing.assert_array_equal(whole, ids[:65536])
