"""Settings and configs: every config names a task and a model that can be split."""

import importlib

import pytest
from runs import ROOT

import tasks
import tasks.open
from configs import base
from configs import check as settings
from messages import Refused
from prepare import make_spec

ARGUMENTS = {
    'base': [''],
    'byt5': ['small', 'base', 'large', 'xl', 'xxl'],
    'cnn_dailymail': ['', 't5_1_1:large'],
    'finetune': [
        '',
        't5:small',
        't5_1_1:base',
        't5_1_1_lm:xl',
        'flan_t5:small',
        'mt5',
        'byt5:large',
        'umt5',
    ],
    'finetune_pydoc': [''],
    'flan_jsonl': ['', 'small'],
    'flan_t5': ['small', 'base', 'large', 'xl', 'xxl'],
    'g2p': ['', 'long', 'test'],
    'glue': ['', 't5:base'],
    'long_t5': ['base', 'large', 'xl'],
    'mlong_t5': ['base', 'large', 'xl'],
    'mt5': ['small', 'base', 'large', 'xl', 'xxl'],
    'nano': ['base', 'small'],
    'prompt_tuning': ['', 'tiny', 'mt5:base'],
    'qa_csv': ['', 'tiny', 't5:small'],
    'small_c4': ['', 'test'],
    'squad': ['', 't5_1_1:base'],
    'superglue': ['', 't5:11b'],
    'switch': ['base_8', 'base_256', 'large_128', 'xxl_128', 'c_2048'],
    't0': ['3b', '11b', '11b:64'],
    't5': ['small', 'base', 'large', '3b', '11b'],
    't5_1_1': ['small', 'base', 'large', 'xl', 'xxl'],
    't5_1_1_lm': ['small', 'base', 'large', 'xl', 'xxl'],
    't5gemma': ['small', 'tiny', 's', '2b', '9b_2b'],
    'tiny': [''],
    'ul2': ['20b', 'flan', 'tiny'],
    'umt5': ['small', 'base', 'large', 'xl', 'xxl'],
    'wmt': ['', 't5_1_1:small'],
    'wmt_from_scratch': ['', 'small'],
}


def module_of(name):
    return importlib.import_module(f'configs.{name}')


def config_of(name, argument):
    if argument:
        return module_of(name).get_config(argument)
    return module_of(name).get_config()


def test_every_config_is_tested():
    files = {file.stem for file in (ROOT / 'configs').glob('*.py')}
    assert files - {'__init__', 'check', 'setting'} == set(ARGUMENTS)


@pytest.mark.parametrize('name', ARGUMENTS)
def test_every_config_names_a_task(name):
    for argument in ARGUMENTS[name]:
        config = config_of(name, argument)
        settings.check(config)
        tasks.open.find(config.data)
        assert 'Waits for' not in module_of(name).__doc__


def changed(key, default):
    """Return a valid value of a setting that is not its default."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return next(x for x in settings.declared()[key].choices or ['something'] if x != default)
    return default + 1


@pytest.mark.parametrize('setting, any_of, dependents', settings.NEEDS)
def test_a_setting_that_acts_only_with_another(setting, any_of, dependents):
    defaults = dict(settings.leaves(base.get_config()))
    if any_of:
        needed = any_of[-1]
    else:
        needed = changed(setting, defaults[setting])
    other = defaults[setting]
    if other == needed:
        other = 'adamw'  # any other value
    for key in dependents:
        config = base.get_config()
        config.update_from_flattened_dict({setting: other, key: changed(key, defaults[key])})
        settings.check_effects(config, given=[setting])  # a config file may set what does not act
        with pytest.raises(Refused, match=key):
            settings.check_effects(config, given=[setting, key])
        config.update_from_flattened_dict({setting: needed})
        settings.check_effects(config, given=[setting, key])
        config.update_from_flattened_dict({setting: other, key: defaults[key]})
        settings.check_effects(config, given=[setting, key])


@pytest.mark.parametrize('name', ARGUMENTS)
def test_every_config_has_a_model_that_can_be_split(name):
    """Names, shapes and partition specs of few layers of the default size; nothing is computed."""
    config = module_of(name).get_config()
    num_layers = config.model.options.get('sparse_step', 1)
    config.model.update(num_encoder_layers=num_layers, num_decoder_layers=num_layers)
    spec = make_spec(config)
    assert spec.state_specs.params.keys() == spec.state_shapes.params.keys()


@pytest.mark.parametrize('name', sorted(set(ARGUMENTS) - {'base', 'finetune_pydoc', 'tiny'}))
def test_an_argument_that_does_not_exist(name):
    with pytest.raises(Refused):
        module_of(name).get_config('huge')


@pytest.mark.parametrize('value', ['auto', 1, 4])
def test_a_whole_number_or_auto(value):
    config = base.get_config()
    config.train.num_microbatches = value
    settings.check(config)
