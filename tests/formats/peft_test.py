"""peft's folders: its own logits, there and back, and folders that are not read.

golden/peft: folders that peft 0.21.2 saved over golden/hf_t5_1_1, and the logits of its models in float32 on a CPU,
written by PYTHONPATH=tests/formats:tests:. python -c 'import peft_test; peft_test.write_golden()'.
Tolerances are max|a-b| <= tol * max|b|.
"""

import json
import pathlib
import shutil
from functools import partial

import numpy as np
import pytest
from forms import first_quick
from safetensors.numpy import load_file, save_file
from small_models import assert_close, assert_refused, random_params, t5_config, with_adapters
from transformers_folders import SIZES, edit_arrays, edit_json, name_mt5, their_logits, token_batch

import checkpoint
import families.lora
import formats.open
import infer
import partition
from formats import own_model, peft, write_hugging_face
from formats.vocabulary import find_vocabulary, names_of
from modes import convert

FOLDER = pathlib.Path(__file__).parents[1] / 'golden'
GOLDEN = FOLDER / 'peft'
TOLERANCE = 1e-5
# The arguments of peft.LoraConfig.
PATTERNS = {
    'target_modules': ['q', 'k', 'v', 'o', 'wi_0', 'wi_1', 'wo'],
    'rank_pattern': {'wo': 5, r'decoder\.block\.1\..*\.EncDecAttention\.q': 3},
    'alpha_pattern': {'SelfAttention.q': 3, 'wi_0': 0.5},
}
LORAS = {
    'patterns': PATTERNS,
    'rslora': {'target_modules': ['q', 'v'], 'use_rslora': True},
    'dora': {'target_modules': ['v', 'wi_0'], 'use_dora': True},
    'lm_head': {'target_modules': ['q', 'lm_head']},
    'one_module': {'target_modules': r'.*encoder\.block\.1.*\.o'},
    'saved': {'target_modules': ['q'], 'modules_to_save': ['lm_head', 'final_layer_norm']},
}
GOLDEN_ADAPTERS = {**LORAS, 'prompt': {'num_virtual_tokens': 4}}
del GOLDEN_ADAPTERS['one_module']
MODELS = {
    't5': {'mlp_activations': ('relu',), 'logits_via_embedding': True},
    't5_1_1': {},
    'mt5': {},
    'umt5': {'relpos_bias_per_layer': True},
}


def write_base(folder, name):
    """A folder of transformers with random parameters."""
    config = t5_config(**SIZES | MODELS[name])
    write_hugging_face.write(folder, config, random_params(config))
    if name == 'mt5':
        name_mt5(folder)
    return config


# Golden folders.


@pytest.fixture(scope='module')
def golden_logits():
    return np.load(GOLDEN / 'logits.npz')


@pytest.fixture
def at_the_base(monkeypatch):
    """The current folder, in which the golden folders name their base."""
    monkeypatch.chdir(FOLDER)


@pytest.mark.parametrize('name', first_quick(GOLDEN_ADAPTERS))
def test_the_logits_of_peft(name, golden_logits, at_the_base):
    t5 = infer.load(GOLDEN / name)
    assert_close(t5.logits(token_batch(384)), golden_logits[name], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize('form', ['t5x', 'hf'])
def test_converted(form, golden_logits, at_the_base, tmp_path):
    for name in ('patterns', 'dora'):
        convert.convert_checkpoint(f'peft/{name}', tmp_path / name, form)
        logits = infer.load(tmp_path / name).logits(token_batch(384))
        assert_close(logits, golden_logits[name], TOLERANCE)
    again = partial(convert.convert_checkpoint, 'peft/dora', tmp_path / 'x', 'peft')
    assert_refused(again, 'peft/dora')


def test_an_encoder_alone(at_the_base):
    t5 = infer.load(GOLDEN / 'patterns', part='encoder')
    assert t5.config.num_decoder_layers == 0
    whole = infer.load(GOLDEN / 'patterns')
    for path, x in t5.arrays.items():
        np.testing.assert_array_equal(x, whole.arrays[path])


def test_the_vocabulary_is_that_of_the_base(tmp_path, at_the_base):
    shutil.copytree(GOLDEN / 'rslora', tmp_path / 'rslora')
    shutil.copytree(FOLDER / 'hf_t5_1_1', tmp_path / 'base')
    shutil.copy(FOLDER / 'hunt/good.model', tmp_path / 'base/spiece.model')
    edit_json(tmp_path / 'rslora/adapter_config.json', base_model_name_or_path=f'{tmp_path}/base')
    expected = find_vocabulary(tmp_path / 'base')
    assert names_of(find_vocabulary(tmp_path / 'rslora')) == names_of(expected)
    assert find_vocabulary(GOLDEN / 'rslora') is None


# Folders that are not read.


@pytest.fixture
def copies(tmp_path, at_the_base):
    """Return a copy of a golden folder."""

    def copy(name):
        shutil.copytree(GOLDEN / name, tmp_path / name)
        return tmp_path / name

    return copy


SETTINGS = [
    ({'peft_type': 'IA3'}, "peft_type='IA3'"),
    ({'use_qalora': True}, 'use_qalora=True'),
    ({'trainable_token_indices': [1, 2]}, 'trainable_token_indices=[1, 2]'),
    ({'a_new_one': {'x': 1}}, "a_new_one={'x': 1}"),
    ({'init_lora_weights': 'pissa_niter_4'}, "init_lora_weights='pissa_niter_4'"),
    ({'base_model_name_or_path': 'google/t5-v1_1-small'}, "base_model_name_or_path='google/t5-v1_1-small'"),
    ({'base_model_name_or_path': 'peft/dora'}, "base_model_name_or_path='peft/dora'"),
    ({'base_model_name_or_path': 't5x_t5_1_0_tiny/checkpoint_0'}, 'adapter_model.safetensors'),
    ({'r': 3}, 'SelfAttention.q'),
    ({'rank_pattern': {'q': 4}}, 'SelfAttention.q'),
    ({'use_dora': True}, 'SelfAttention.q'),
]  # fmt: skip
Q = 'base_model__model__encoder__block__0__layer__0__SelfAttention__q__'
ARRAYS = [
    ({f'{Q}lora_B__weight': None}, 'SelfAttention.q'),
    ({f'{Q}lora_A__weight': np.ones([2, 5], np.float32)}, 'SelfAttention.q'),
    ({f'{Q}lora_A__weight': np.ones([2, 32], np.int32)}, 'SelfAttention.q.lora_A.weight'),
    ({f'{Q}lora_A__bias': np.ones(3, np.float32)}, 'q.lora_A.bias'),
    ({'base_model__model__shared__lora_embedding_A': np.ones([2, 384], np.float32)}, 'shared.lora_embedding_A'),
    ({'base_model__model__shared__weight': np.ones([384, 32], np.float32)}, 'shared.weight'),
    ({'base_model__model__encoder__final_layer_norm__lora_A__weight': np.ones([2, 32], np.float32)}, 'final_layer_norm'),
    ({'base_model__model__classification_head__weight': np.ones([2, 2], np.float32)}, 'classification_head'),
    ({'base_model__model__lm_head__base_layer__weight': np.ones([90, 32], np.float32)}, 'decoder/logits_dense/kernel'),
]  # fmt: skip


def test_settings_and_arrays_that_are_not_read(copies, tmp_path):
    folder = copies('lm_head')
    opening = partial(formats.open.open_model, folder)
    settings = (folder / 'adapter_config.json').read_bytes()
    for changes, name in SETTINGS:
        edit_json(folder / 'adapter_config.json', **changes)
        assert_refused(opening, name)
        (folder / 'adapter_config.json').write_bytes(settings)
    arrays = (folder / peft.WEIGHTS).read_bytes()
    for changes, name in ARRAYS:
        edit_arrays(folder / peft.WEIGHTS, **changes)
        assert_refused(opening, name)
        (folder / peft.WEIGHTS).write_bytes(arrays)
    # save_embedding_layers of peft writes the token table of the base.
    table = load_file(FOLDER / 'hf_t5_1_1/model.safetensors')['shared.weight']
    edit_arrays(folder / peft.WEIGHTS, base_model__model__shared__weight=table)
    assert opening().config.vocab_size == len(table)
    # The lm_head of a tied base is its token table.
    write_base(tmp_path / 'tied', 't5')
    edit_json(folder / 'adapter_config.json', base_model_name_or_path=f'{tmp_path}/tied')
    assert_refused(opening, 'lm_head')


def test_files_of_a_folder(copies):
    folder = copies('prompt')
    edit_json(folder / 'adapter_config.json', num_virtual_tokens=3)
    assert_refused(partial(formats.open.open_model, folder), 'num_virtual_tokens=3')
    folder = copies('rslora')
    opening = partial(formats.open.open_model, folder)
    for file in folder.iterdir():
        assert_refused(partial(formats.open.open_model, file), f'{folder}')
    save_file({}, folder / peft.WEIGHTS)
    assert_refused(opening, peft.WEIGHTS)
    (folder / peft.WEIGHTS).unlink()
    assert_refused(opening, peft.WEIGHTS)
    (folder / 'adapter_config.json').write_text('[]')
    assert_refused(opening, 'adapter_config.json')


# Writing.


def random_lora(config, targets):
    """The config with adapters, and all its parameters, of which none is 0."""
    adapted = with_adapters(config, lora_rank=3, lora_alpha=1.5, lora_targets=targets)
    return adapted, random_params(adapted) | random_params(config)


def write_lora(folder, config, params, base):
    kernels = {}
    for path in params:
        if path.endswith('/lora_a'):
            scope = path.removesuffix('/lora_a')
            kernels[f'{scope}/kernel'] = (params[path], params[f'{scope}/lora_b'])
    write_hugging_face.write_peft(folder, config, kernels, None, str(base))


@pytest.mark.parametrize('targets, expected', [
    ('.+/(query|value)/kernel', ['q', 'v']),
    ('.+/kernel', ['k', 'lm_head', 'o', 'q', 'v', 'wi_0', 'wi_1', 'wo']),
])  # fmt: skip
def test_written_is_read(tmp_path, targets, expected):
    base = write_base(tmp_path / 'base', 't5_1_1')
    config, params = random_lora(base, targets)
    write_lora(tmp_path / 'new/lora', config, params, tmp_path / 'base')
    settings = json.loads((tmp_path / 'new/lora/adapter_config.json').read_text())
    modules = settings['target_modules']
    assert sorted({x.rpartition('.')[2] for x in modules}) == expected
    opened = formats.open.open_model(tmp_path / 'new/lora')
    assert own_model.as_settings(opened.config) == own_model.as_settings(base)
    for path, x in families.lora.merge(config, params).items():
        np.testing.assert_array_equal(checkpoint.read_leaf(opened.leaves[f'target/{path}']), x)
    assert_refused(partial(write_lora, tmp_path / 'new/lora', config, params, ''), 'new/lora')


def test_a_checkpoint_without_adapters(tmp_path):
    for folder in ('t5x_t5_1_1_tiny/checkpoint_0', 'hf_t5_1_1'):
        writing = partial(convert.convert_checkpoint, FOLDER / folder, tmp_path / 'x', 'peft')
        assert_refused(writing, '--format=peft')
    assert not (tmp_path / 'x').exists()


# With peft.


def adapt(base, lora):
    """The model in the folder `base` with adapters of random values, of peft."""
    import torch
    import transformers

    import_peft = pytest.importorskip('peft')
    torch.manual_seed(0)
    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
    kind = import_peft.LoraConfig
    if 'num_virtual_tokens' in lora:
        kind = import_peft.PromptTuningConfig
    else:
        lora = {'r': 2, 'lora_alpha': 8, 'init_lora_weights': False} | lora
    adapted = import_peft.get_peft_model(module, kind(task_type='SEQ_2_SEQ_LM', **lora))
    for x in adapted.parameters():
        if x.requires_grad:  # also what begins as the base has it, such as the lengths of DoRA
            x.data += torch.randn(x.shape) * 0.1
    return adapted


def write_golden():
    base = FOLDER / 'hf_t5_1_1'
    logits = {}
    for name, lora in GOLDEN_ADAPTERS.items():
        adapted = adapt(base, lora)
        adapted.save_pretrained(GOLDEN / name)
        (GOLDEN / name / 'README.md').unlink()
        edit_json(GOLDEN / name / 'adapter_config.json', base_model_name_or_path='hf_t5_1_1')
        logits[name] = their_logits(adapted, token_batch(384))
    np.savez_compressed(GOLDEN / 'logits.npz', **logits)


@pytest.fixture
def with_peft():
    pytest.importorskip('torch')
    pytest.importorskip('transformers')
    return pytest.importorskip('peft')


@pytest.mark.peers
@pytest.mark.parametrize('lora', first_quick([*LORAS, 'prompt']))
@pytest.mark.parametrize('name', first_quick(MODELS))
def test_we_compute_what_peft_does(with_peft, tmp_path, name, lora):
    write_base(tmp_path / 'base', name)
    settings = LORAS.get(lora, {'num_virtual_tokens': 4})
    if name == 't5':  # its MLP has one wi, and its lm_head is the token table
        renamed = json.dumps(settings).replace('wi_0', 'wi').replace('"lm_head", ', '')
        settings = json.loads(renamed)
        if lora == 'lm_head':
            pytest.skip('refused')
    adapted = adapt(tmp_path / 'base', settings)
    adapted.save_pretrained(tmp_path / 'lora')
    batch = token_batch(96)
    t5 = infer.load(tmp_path / 'lora')
    assert_close(t5.logits(batch), their_logits(adapted, batch), TOLERANCE)
    assert np.abs(infer.load(tmp_path / 'base').logits(batch) - t5.logits(batch)).max() > 1e-3


def reopened(with_peft, base, folder):
    import transformers

    module = transformers.AutoModelForSeq2SeqLM.from_pretrained(base)
    return with_peft.PeftModel.from_pretrained(module, folder)


@pytest.mark.peers
@pytest.mark.parametrize(
    'targets',
    first_quick(['.+/(query|value)/kernel', '.+/kernel', 'decoder/layers_0/.+/out/kernel']),
)
@pytest.mark.parametrize('name', first_quick(MODELS))
def test_peft_computes_what_we_do(with_peft, tmp_path, name, targets):
    config, params = random_lora(write_base(tmp_path / 'base', name), targets)
    write_lora(tmp_path / 'lora', config, params, tmp_path / 'base')
    batch = token_batch(96)
    ours = infer.T5(config, params, partition.make_mesh(data=1)).logits(batch)
    theirs = their_logits(reopened(with_peft, tmp_path / 'base', tmp_path / 'lora'), batch)
    assert_close(theirs, ours, TOLERANCE)


@pytest.mark.peers
@pytest.mark.parametrize('name', first_quick(MODELS))
def test_peft_reads_a_prompt_as_we_do(with_peft, tmp_path, name):
    base = write_base(tmp_path / 'base', name)
    config = own_model.as_family(base, 'prompt_tuning', {'length': 5})
    params = random_params(config) | random_params(base)
    write_hugging_face.write_peft(
        tmp_path / 'prompt', config, {}, params[peft.PROMPT], str(tmp_path / 'base')
    )
    batch = token_batch(96)
    ours = infer.T5(config, params, partition.make_mesh(data=1)).logits(batch)
    theirs = their_logits(reopened(with_peft, tmp_path / 'base', tmp_path / 'prompt'), batch)
    assert_close(theirs, ours, TOLERANCE)
    assert_close(infer.load(tmp_path / 'prompt').logits(batch), ours, TOLERANCE)
