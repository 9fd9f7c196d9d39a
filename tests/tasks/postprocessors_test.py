"""What metrics compare, against t5: tests/golden/seqio_t5/postprocessors.json is made by t5 e081111."""

import json
import pathlib

from tasks import postprocessors

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'seqio_t5' / 'postprocessors.json'
CASES = json.loads(GOLDEN.read_text())


def test_values_are_t5s():
    for case in CASES:
        postprocess = getattr(postprocessors, case['fn'])
        found = postprocess(case['string'], case['example'], case['is_target'], **case['kwargs'])
        assert json.loads(json.dumps(found)) == case['result'], case


def test_texts_of_tfds_are_bytes():
    example = {'answers': [b'a', b'\xc3\xa9'], 'idx/passage': 1, 'idx/query': 2}
    assert postprocessors.qa('x', example, is_target=True) == ['a', 'é']
    assert postprocessors.record('x', example, is_target=True)['value'] == ['a', 'é']
    assert postprocessors.wsc_simple('É', {'targets_pretokenized': b'\xc3\x89', 'label': 1}) == 1


def test_no_finite_number_is_the_default():
    for text in ('nan', 'inf', '-Infinity', '1e999', 'x'):
        assert postprocessors.string_to_float(text, default=-2.0) == -2.0


def test_a_sentinel_at_the_beginning_goes():
    for text, expected in [
        ('<extra_id_0> Springfield.', 'Springfield.'),
        ('<extra_id_0>', ''),
        (' a <extra_id_0>', ' a <extra_id_0>'),
        ('<extra_id_1> a', '<extra_id_1> a'),
    ]:
        assert postprocessors.without_sentinel(text) == expected
