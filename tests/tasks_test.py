"""Mixing rates, against SeqIO's."""

import json
import pathlib

import pytest

import tasks

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'seqio_t5'
CASES = json.loads((GOLDEN / 'mixing_rates.json').read_text())


def cases_of(kind):
    return [case for case in CASES if case['kind'] == kind]


@pytest.mark.parametrize('case', cases_of('num_examples'), ids=lambda case: str(case['kwargs']))
def test_rates_by_number_of_examples_are_seqios(case):
    sizes = {f'task {i}': size for i, size in enumerate(case['sizes'])}
    rate = tasks.proportional(**case['kwargs'])
    found = tasks.Mixture('all', dict.fromkeys(sizes, rate)).rates(sizes)
    assert list(found) == list(sizes)
    assert list(found.values()) == pytest.approx(case['rates'], rel=1e-9)
    assert sum(found.values()) == pytest.approx(case['total'], rel=1e-9)


@pytest.mark.parametrize('case', cases_of('nested'), ids=lambda case: str(case['extra']))
def test_rates_of_a_nested_mixture_are_seqios(case):
    inner = tasks.Mixture('inner', dict(zip(case['tasks'], case['submixture_rates'], strict=True)))
    name, rate = case['extra']
    outer = tasks.Mixture('outer', {inner: case['submixture_weight'], name: rate})
    found = outer.rates({})
    assert [found[task] for task in case['tasks']] == pytest.approx(case['rates'], rel=1e-9)
    assert sum(found.values()) == pytest.approx(case['total'], rel=1e-9)


def test_equal_rates_need_no_sizes():
    assert tasks.Mixture('both', {'a': 1.0, 'b': 1.0}).rates({}) == {'a': 1.0, 'b': 1.0}


@pytest.mark.parametrize(
    'rates, message',
    [
        ({}, "mixture 'm' has no task: name one with its rate"),
        ({'a': -1.0}, "mixture 'm': the rate of 'a' is -1.0: use a finite number, 0 or more"),
        ({'a': float('nan')}, "the rate of 'a' is nan: use a finite"),
        ({'a': 0.0}, "mixture 'm': all rates are 0: give one task a rate"),
        ({'a': tasks.proportional()}, "'a' has a rate by its number of examples, which is unknown"),
        (
            {tasks.Mixture('n', {'b': 1.0}): tasks.proportional()},
            "the rate of mixture 'n' depends on a number of examples: give it a number",
        ),
    ],
)
def test_rates_that_cannot_be_are_refused(rates, message):
    with pytest.raises(ValueError, match=message):
        tasks.Mixture('m', rates).rates({})


@pytest.mark.parametrize('settings', [{'maximum': 0}, {'temperature': 0.0}, {'scale': -1.0}])
def test_settings_of_a_rate_that_cannot_be_are_refused(settings):
    [name] = settings
    with pytest.raises(ValueError, match=f'{name}={settings[name]}: must be above 0'):
        tasks.proportional(**settings)
