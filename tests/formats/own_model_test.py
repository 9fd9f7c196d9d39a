"""Own models: the example trains, decodes, saves and loads; models do not mix; what is refused."""

import dataclasses
import functools
import importlib
import json
import runpy
import shutil
import sys

import jax
import numpy as np
import pytest
from runs import ROOT, run, small_config, state_of
from small_models import (
    OPTIONS,
    OWN_SIZES,
    as_one_device,
    assert_close,
    assert_refused,
    check_answers,
    check_on_meshes,
    load_own,
    make_mesh,
    random_batch,
    random_params,
    run_config,
    sharp_params,
    stepwise_logits,
    t5_config,
)

import checkpoint
import families
import infer
import model
import partition
from configs import check as settings
from formats import own_model, t5x
from messages import Refused
from modes import convert
from modes import evaluate as evaluate_mode
from prepare import prepare

EXAMPLE = ROOT / 'examples/squared_relu/squared_relu.py'
ROTARY = ROOT / 'families/rotary.py'
WINDOW = ROOT / 'examples/sliding_window/sliding_window.py'
GROUPED = ROOT / 'families/grouped_heads.py'
# An Mlp with parameters of its own.
MLP = """
import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import model
import partition


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b, mask):
        width = partition.split(self.config.mlp_dim, 'model')
        up_Df = hk.get_parameter('up', (x_bTD.shape[-1], width), init=model.NORMAL)
        down_fD = hk.get_parameter('down', (width, x_bTD.shape[-1]), init=model.NORMAL)
        hidden_bTf = jax.nn.softplus(jnp.einsum('bTD,Df->bTf', x_bTD, up_Df))
        return lax.psum(jnp.einsum('bTf,fD->bTD', hidden_bTf, down_fD), 'model'), {}


def modules(family):
    up = (r'.+/mlp/up', P(None, 'model'))
    down = (r'.+/mlp/down', P('model', None))
    parts = dataclasses.replace(family.parts, mlp=Mlp)
    return dataclasses.replace(family, parts=parts, specs=(*family.specs, up, down))
"""


def example_config(corpus, mesh=(1, 1), steps=2, file=EXAMPLE):
    """Two steps of a run with the example's model, every one saved."""
    config = small_config(corpus, steps, *mesh)
    config.model.module = str(file)
    config.model.mlp_activations = ('squared_relu',)
    config.model.dropout_rate = 0.0  # a step compiles twice as fast
    config.save.every_steps = 1
    return config


@pytest.fixture(scope='module')
def trained(corpus, make_once):
    """The workdir of such a run, and beside it the file of its model. Tests only read it."""

    def train_it(folder):
        (folder / 'files').mkdir()
        file = shutil.copy(EXAMPLE, folder / 'files/own.py')
        run(example_config(corpus, file=file), folder / 'run')

    return make_once('own_model', train_it)


# The numbers of an own model.


@pytest.mark.parametrize('first', ['own', pytest.param('plain', marks=pytest.mark.slow)])
def test_own_and_plain_models_do_not_mix(first):
    """relu(x)^2 is the gated Mlp ('relu', 'relu') of model.py with the same kernel twice."""
    plain_config = t5_config(**OWN_SIZES)
    params = random_params(plain_config)
    gated_params = {}
    for path, x in params.items():
        if path.endswith('mlp/wi/kernel'):
            gated_params[path.replace('wi', 'wi_0')] = x
            gated_params[path.replace('wi', 'wi_1')] = x
        else:
            gated_params[path] = x

    def of_name(name):
        if name == 'own':
            config = load_own(EXAMPLE, mlp_activations=('squared_relu',))
            return infer.T5(config, params, make_mesh(1, 2))
        gated = dataclasses.replace(plain_config, mlp_activations=('relu', 'relu'))
        return infer.T5(gated, gated_params, make_mesh(1, 2))

    batch = random_batch(seed=0)
    last = 'plain' if first == 'own' else 'own'
    of_first = of_name(first)
    of_last = of_name(last)
    expected = of_last.logits(batch)  # compiled before the one that was made first
    assert_close(of_first.logits(batch), expected, 1e-6)
    assert_refused(lambda: load_own('', mlp_activations=('squared_relu',)), 'squared_relu')


@pytest.mark.slow
def test_own_parameters(tmp_path):
    """The answers are those of the uncached logits, on a mesh, whose logits are those of one device."""
    file = tmp_path / 'own.py'
    file.write_text(MLP)
    config = load_own(file)
    assert model.shapes(config)['decoder/layers_0/mlp/up'] == (16, 16)
    assert 'decoder/layers_0/mlp/wi/kernel' not in model.shapes(config)
    check_on_meshes(config, sharp_params(config))


# Rotary positions: one class that is changed, for training and decoding.


@pytest.fixture(scope='module')
def rotary():
    config = load_own(ROTARY, num_decoder_layers=2)
    params = sharp_params(config)
    assert not [path for path in params if 'relpos_bias' in path]
    return config, params


def test_rotary_positions_cached_and_uncached(rotary):
    """The logits are equal, later tokens change no earlier one, and distances count alone."""
    config, params = rotary
    batch = random_batch(seed=0)
    batch = {name: np.where(x == 0, 5, x) for name, x in batch.items()}  # no padding
    t5 = infer.T5(config, params, make_mesh(1, 1))
    expected = np.asarray(t5.logits(batch))
    inputs, tokens = batch['encoder_input_tokens'], batch['decoder_input_tokens']
    stepwise = stepwise_logits(config, make_mesh(1, 1))
    assert_close(stepwise(params, inputs, tokens), expected, 1e-5)
    changed = np.where(np.arange(16)[None] < 9, tokens, 383 - tokens)
    for logits in (
        t5.logits(batch | {'decoder_input_tokens': changed}),
        stepwise(params, inputs, changed),
    ):
        assert_close(np.asarray(logits)[:, :9], expected[:, :9], 1e-5)
        assert np.abs(logits[:, 9:] - expected[:, 9:]).max(axis=2).min() > 1e-3
    # Neighbours are in the row, and all positions are moved.
    packed = {name: np.pad(x, ((0, 0), (7, 0)), constant_values=9) for name, x in batch.items()}
    for name, x in (('encoder', inputs), ('decoder', tokens)):
        packed[f'{name}_segment_ids'] = np.pad(
            np.full_like(x, 2), ((0, 0), (7, 0)), constant_values=1
        )
    del packed['decoder_loss_weights']
    assert_close(np.asarray(t5.logits(packed))[:, 7:], expected, 1e-4)
    without = t5_config(**OWN_SIZES | {'num_decoder_layers': 2})
    plain = model.shapes(without)
    zeros = {path: np.zeros(plain[path], np.float32) for path in plain if path not in params}
    no_positions = infer.T5(without, {**params, **zeros}, make_mesh(1, 1)).logits(batch)
    assert np.abs(no_positions - expected).max() > 0.1


@pytest.mark.slow
def test_rotary_positions_decode(rotary):
    check_on_meshes(*rotary)


EXAMPLES = [EXAMPLE, WINDOW]


@pytest.mark.parametrize('file', EXAMPLES, ids=lambda file: file.stem)
def test_the_config_of_an_example(file):
    found = runpy.run_path(str(file.with_name(f'tiny_{file.name}')))
    config = found['get_config']()
    settings.check(config)
    assert own_model.load(config.model).module == str(file)


BUCKETS = """
import dataclasses

import model


def relpos_bias(config, **names):
    config = dataclasses.replace(config, relative_attention_num_buckets=16)
    return model.RelativePositionBias(config, **names)


def modules(family):
    parts = dataclasses.replace(family.parts, relpos_bias=relpos_bias)
    return dataclasses.replace(family, parts=parts)
"""


def test_a_changed_file_is_another_model(tmp_path):
    file = tmp_path / 'own.py'
    file.write_text(BUCKETS)
    old = load_own(file)
    file.write_text(BUCKETS.replace('16', '24'))
    new = load_own(file)
    assert old != new and old.module == new.module
    assert load_own(file) == new and hash(load_own(file)) == hash(new)  # loaded once
    bias = 'encoder/relpos_bias/rel_embedding'
    assert model.shapes(old)[bias] == (2, 16)
    assert model.shapes(new)[bias] == (2, 24)
    assert model.shapes(t5_config(**OWN_SIZES))[bias] == (2, 32)


# The run of the example.


@pytest.mark.slow
def test_the_example_is_loaded_and_decodes(trained):
    t5 = infer.load(trained / 'run', mesh=make_mesh(2, 2))
    assert t5.config.module == str(trained / 'files/own.py')
    check_answers(t5)


@pytest.mark.parametrize('num_taken', [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_goes_on(corpus, trained, tmp_path, num_taken):
    """Also where its file has another name; the steps are those of a run that was not stopped."""
    workdir = shutil.copytree(trained / 'run', tmp_path / 'run')
    moved = shutil.copy(trained / 'files/own.py', tmp_path / 'moved.py')
    if num_taken == 1:
        shutil.rmtree(workdir / 'checkpoint_2')
    run(example_config(corpus, file=moved), workdir)
    expected = state_of(trained / 'run', 2)
    found = state_of(workdir, 2)
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x)
    assert json.loads((workdir / 'config.json').read_bytes())['model']['module'] == str(moved)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_model_alone(corpus, trained, uninterrupted, tmp_path):
    """The message names the file that was recorded, or that there is none."""
    recorded = f'{trained}/run/checkpoint_2/own_model.py'
    config = example_config(corpus)
    config.model.update(module='', mlp_activations=('gelu', 'linear'))
    assert_refused(lambda: prepare(config, trained / 'run'), recorded)
    changed = tmp_path / 'changed.py'
    changed.write_text(EXAMPLE.read_text().replace('jnp.square', '3 * jnp.square'))
    config = example_config(corpus, file=changed)
    assert_refused(lambda: prepare(config, trained / 'run'), recorded)
    config = small_config(corpus)
    config.model.module = str(EXAMPLE)
    assert_refused(lambda: prepare(config, uninterrupted), f'{uninterrupted}/checkpoint_6')
    without = t5_config(**OWN_SIZES | {'mlp_dim': 32})
    assert_refused(lambda: infer.load(trained / 'run', config=without), recorded)


# Finding the file of a checkpoint.


@pytest.mark.slow
def test_a_file_that_is_gone_or_changed(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained, tmp_path / 'copy')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config_file = folder / 'run/checkpoint_2/config.json'
    file = folder / 'files/own.py'
    text = config_file.read_text().replace(str(trained / 'files'), str(folder / 'files'))
    rewrite(config_file, text.encode())
    assert infer.load(folder / 'run').config.module == str(file)
    remedy = f'{elsewhere}/own.py'
    file.write_text(file.read_text() + '\n')
    assert_refused(lambda: infer.load(folder / 'run'), remedy)
    file.unlink()
    assert_refused(lambda: infer.load(folder / 'run'), f'{config_file.parent}/own_model.py')
    shutil.copy(config_file.parent / 'own_model.py', elsewhere / 'own.py')
    assert infer.load(folder / 'run').config.module == str(elsewhere / 'own.py')
    # An evaluation with another setting of the model finds it, too, and ends for want of metrics.
    settings = {'model.dtype': 'bfloat16'}
    assert_refused(
        lambda: evaluate_mode.prepare(None, settings, str(config_file.parent)), 'metrics'
    )


@pytest.mark.slow
def test_no_code_of_a_checkpoint_is_run(trained, tmp_path, monkeypatch):
    """A folder from the network may name a file that it brings."""
    folder = shutil.copytree(trained / 'run', tmp_path / 'run')
    evil = b"raise SystemExit('run')\n"
    directory = folder / 'checkpoint_2'
    (folder / 'evil.py').write_bytes(evil)
    monkeypatch.chdir(folder)
    config = json.loads((directory / 'config.json').read_bytes())
    for name in (str(folder / 'evil.py'), 'evil.py', f'{directory}/own_model.py', 'no/../evil.py'):
        config['model']['module'] = name
        rewrite(directory / 'config.json', json.dumps(config).encode())
        rewrite(directory / 'own_model.py', evil)
        assert_refused(lambda: infer.load(folder), f'{directory}/own_model.py')


def rewrite(file, content):
    """Write a file of a checkpoint, and its checksum into the manifest."""
    file.write_bytes(content)
    step, checksums = t5x._read_manifest(file.parent)
    packed = checkpoint.pack_manifest(step, checksums | {file.name: checkpoint.checksum(file)})
    (file.parent / checkpoint.MANIFEST).write_bytes(packed)


# Mistakes in the file: Python's own errors, but for a file that is not an own model.

HEAD = 'import dataclasses\n\ndef modules(family):\n    return dataclasses.replace(family{})\n'
MISTAKES = [
    (SyntaxError, 'def modules(:\n'),
    (Refused, 'modules = 3\n'),
    (Refused, 'def modules(default):\n    return default\n'),  # the form of an earlier version
    (AssertionError, 'def modules(family):\n    family\n'),
    (TypeError, HEAD.format(', specs={}')),
    (AssertionError, HEAD.format(", adapters='prompt/.+'")),
    (ValueError, MLP.replace("/mlp/down'", "/mlp/dawn'")),  # a parameter without a row
    (AssertionError, OPTIONS.replace('widths: tuple = ()', 'widths: tuple | None = None')),
    (ValueError, OPTIONS.replace('frozen=True', 'frozen=False')),  # it has no hash
]


def test_mistakes_in_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, (kind, text) in enumerate(MISTAKES):
        file = tmp_path / f'own_{i}.py'
        file.write_text(text)
        with pytest.raises(kind) as error:
            load_own(file)
        assert kind is not Refused or file.name in str(error.value)
    assert_refused(lambda: load_own('mine'), "model.module='mine'")
    (tmp_path / 'model.py').write_text(EXAMPLE.read_text())  # the name of one of ours
    config = load_own('model', mlp_activations=('squared_relu',))
    assert config.module == str(tmp_path / 'model.py')


# Settings of its own.


@pytest.fixture
def with_options(tmp_path):
    file = tmp_path / 'own.py'
    file.write_text(OPTIONS)
    return file


# A value as text of the command line, and as a config file or config.json has it.
TYPED = [
    ('num', '3', 3, 3),
    ('rate', '-1e-3', -0.001, -0.001),
    ('rate', '1', 1, 1.0),
    ('gated', 'True', True, True),
    ('gated', '1', True, True),
    ('kind', 'b=c', 'b=c', 'b=c'),
    ('which', "('z',)", ['z'], ('z',)),
    ('which', '()', (), ()),
    ('widths', '(1, 2)', [1, 2], (1, 2)),
]


def test_options_are_typed(with_options):
    declared = own_model.find(str(with_options))[0].code.Options
    for name, text, given, expected in TYPED:
        for value in (text, given):
            options = own_model.options_of(declared, str(with_options), {name: value})
            assert options == dataclasses.replace(declared(), **{name: expected})
            assert type(getattr(options, name)) is type(expected)
            assert own_model.options_of(declared, '', own_model.as_dict(options)) == options


def test_options_are_a_part_of_the_model(with_options):
    configs = [load_own(with_options, options={'num': num}) for num in (2, 3, 3)]
    assert configs[0] == load_own(with_options) != configs[1] == configs[2]
    assert hash(configs[1]) == hash(configs[2])
    params = random_params(configs[0])
    batch = random_batch(seed=0)
    of_two, of_three = (infer.T5(c, params, make_mesh(1, 1)).logits(batch) for c in configs[:2])
    assert np.abs(of_two - of_three).max() > 1e-3


# Several files.

GROUPED_ROTARY = f'{GROUPED},{ROTARY}'


def test_several_files_apply_in_order():
    """With as many heads of keys as of queries they are the second alone; a cache changes no logits."""
    batch = random_batch(seed=0)
    rotary = load_own(ROTARY)
    as_many = load_own(GROUPED_ROTARY, options={'num_kv_heads': 2})
    params = sharp_params(rotary)
    expected = infer.T5(rotary, params, make_mesh(1, 1)).logits(batch)
    assert_close(infer.T5(as_many, params, make_mesh(1, 1)).logits(batch), expected, 1e-6)
    config = load_own(GROUPED_ROTARY)
    assert config == load_own(GROUPED_ROTARY) and config.module == GROUPED_ROTARY
    params = sharp_params(config)
    assert params['decoder/layers_0/self_attention/key/kernel'].shape == (16, 8)
    expected = np.asarray(infer.T5(config, params, make_mesh(1, 1)).logits(batch))
    tokens = (batch['encoder_input_tokens'], batch['decoder_input_tokens'])
    found = np.asarray(stepwise_logits(config, make_mesh(1, 1))(params, *tokens))
    is_token = batch['decoder_target_tokens'] > 0
    assert_close(found[is_token], expected[is_token], 1e-5)


def test_their_options_are_one_group(with_options, tmp_path):
    config = load_own(f'{GROUPED},{with_options}', options={'num_kv_heads': '2', 'num': 3})
    assert (config.options.num_kv_heads, config.options.num, config.options.kind) == (2, 3, 'a')
    for name, value in (('num_kv_heads', 0), ('num', 9)):
        given = {name: value}
        refused = f'model.options.{name}={value}'
        assert_refused(lambda x=given: load_own(f'{GROUPED},{with_options}', options=x), refused)
    same = tmp_path / 'same.py'
    same.write_text(OPTIONS)
    assert_refused(lambda: load_own(f'{same},{with_options}'), 'model.options.num')


def test_a_checkpoint_records_several_files(tmp_path, monkeypatch):
    """The same files in the same order are the same model, with the families between them."""
    monkeypatch.chdir(tmp_path)
    module = f'{GROUPED},prompt_tuning,{ROTARY}'
    config = load_own(module)
    directory = tmp_path / 'run/checkpoint_1'
    directory.mkdir(parents=True)
    files = own_model.files_of(config)
    assert list(files) == ['own_model.py', 'own_model_2.py']
    for name, content in files.items():
        (directory / name).write_bytes(content)
    (directory / 'config.json').write_text(json.dumps({'model': {'module': module}}))
    own_model.check_same(directory, config, 'x')
    for other in (
        GROUPED_ROTARY,
        f'{ROTARY},prompt_tuning,{GROUPED}',
        f'prompt_tuning,{GROUPED_ROTARY}',
        '',
    ):
        refuse = functools.partial(own_model.check_same, may_be_plain=True, otherwise='x')
        assert_refused(functools.partial(refuse, directory, load_own(other)), 'own_model_2.py')
    moved = module.replace(str(ROTARY), '/gone/rotary.py')
    assert_refused(lambda: own_model.module_of(directory, moved), f'{directory}/own_model_2.py')
    shutil.copy(ROTARY, tmp_path)
    assert own_model.module_of(directory, moved) == f'{GROUPED},prompt_tuning,{tmp_path}/rotary.py'


# Families.


def write_family(monkeypatch, folder, text):
    """Put a family 'wide_t5' into the package."""
    folder.mkdir(exist_ok=True)
    (folder / 'wide_t5.py').write_text(text)
    monkeypatch.setattr(families, '__path__', [str(folder)])
    monkeypatch.delitem(sys.modules, f'{families.__name__}.wide_t5', raising=False)
    importlib.invalidate_caches()


def test_a_family_has_a_name(monkeypatch, tmp_path):
    """It comes before a file of that name; a checkpoint does not record its content."""
    write_family(monkeypatch, tmp_path / 'package', OPTIONS)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'wide_t5.py').write_text('raise ValueError\n')
    config = load_own('wide_t5', options={'num': '3'})
    assert config.module == 'wide_t5' and config.options.num == 3
    assert own_model.files_of(config) == {} and config.family.files == ()
    assert load_own('wide_t5', options={'num': 3}) == config
    assert 'Options of model.module=wide_t5:' in own_model.describe_options('wide_t5')
    with pytest.raises(ValueError):
        load_own('wide_t5.py')
    assert_refused(lambda: load_own('wide_t6'), "model.module='wide_t6'")


@pytest.mark.slow
def test_a_run_of_a_family(corpus, uninterrupted, monkeypatch, tmp_path):
    package = tmp_path / 'package'
    write_family(monkeypatch, package, OPTIONS)
    config = small_config(corpus, steps=1)
    config.model.update(module='wide_t5', dropout_rate=0.0)
    config.model.options.rate = -0.5
    run(config, tmp_path / 'run')
    directory = tmp_path / 'run/checkpoint_1'
    assert not (directory / 'own_model.py').exists()
    stored = json.loads((directory / 'config.json').read_bytes())['model']
    assert stored['module'] == 'wide_t5' and stored['options']['num'] == 2

    # It is opened with its options from anywhere, converted, and evaluated with other settings.
    monkeypatch.chdir(tmp_path)
    t5 = infer.load(tmp_path / 'run')
    assert t5.config.options.rate == -0.5
    check_answers(t5, is_long=False)
    convert.convert_checkpoint(tmp_path / 'run', tmp_path / 't5x', 't5x')
    assert infer.load(tmp_path / 't5x').config == t5.config
    to_hugging_face = lambda: convert.convert_checkpoint(directory, tmp_path / 'hf', 'hf')  # noqa: E731
    assert_refused(to_hugging_face, 'wide_t5')
    settings = {'model.options.num': '3'}
    assert_refused(lambda: evaluate_mode.prepare(None, settings, str(directory)), 'metrics')

    # It is not a T5, nor is a T5 this family.
    own = tmp_path / 'own.py'
    own.write_text(OPTIONS)
    plain = t5_config(**{name: stored[name] for name in OWN_SIZES})
    assert_refused(lambda: infer.load(directory, config=plain), "'wide_t5'")
    for module in ('', str(own)):
        other = small_config(corpus, steps=1)
        other.model.update(module=module, dropout_rate=0.0)
        assert_refused(lambda other=other: prepare(other, tmp_path / 'run'), "'wide_t5'")
        other.restore.update(path=str(directory), only='target/.*')
        assert_refused(lambda other=other: prepare(other, tmp_path / 'new'), 'restore.strict=False')
    family_of_t5 = small_config(corpus)
    family_of_t5.model.module = 'wide_t5'
    assert_refused(lambda: prepare(family_of_t5, uninterrupted), "model.module='wide_t5'")

    # A later version has one more option, and another default.
    config.train.steps = 2
    write_family(monkeypatch, package, OPTIONS.replace('    rate', '    more: int = 5\n    rate'))
    run(config, tmp_path / 'run')
    stored = json.loads((tmp_path / 'run/checkpoint_2/config.json').read_bytes())['model']
    assert stored['options']['more'] == 5
    config.train.steps = 3
    write_family(monkeypatch, package, OPTIONS.replace('default=2', 'default=4'))
    assert_refused(lambda: prepare(config, tmp_path / 'run'), 'model/options/num: 2 -> 4')
    write_family(
        monkeypatch,
        package,
        OPTIONS.replace('default=2', 'default=4').replace(
            '    rate', '    more: int = 1\n    rate'
        ),
    )
    assert_refused(lambda: prepare(config, tmp_path / 'run'), 'model/options/more: 5 -> 1')
    config.model.options.num = 2
    config.model.options.more = 5
    prepare(config, tmp_path / 'run').workdir.lock.close()
    assert infer.load(directory).config.options.num == 2

    # Without the family no file of its name is run.
    (tmp_path / 'wide_t5.py').write_text("raise SystemExit('run')\n")
    write_family(monkeypatch, tmp_path / 'empty', '')
    (tmp_path / 'empty/wide_t5.py').unlink()
    importlib.invalidate_caches()
    assert_refused(lambda: infer.load(directory), 'own_model.py')


DOMAINS = """
import dataclasses
import haiku as hk
import jax.numpy as jnp
import model
from jax.sharding import PartitionSpec as P

class Encoder(model.Encoder):
    @hk.name_like('__call__')
    def embed(self, tokens_bT, segments_bT, table_vD):
        x_bTD, segments_bT = super().embed(tokens_bT, segments_bT, table_vD)
        domain_D = hk.get_parameter('domain', x_bTD.shape[-1:], jnp.float32, jnp.ones)
        if self.batch is not None and 'encoder_domain' in self.batch:
            x_bTD += self.batch['encoder_domain'][..., None] * domain_D[None, None]
        return x_bTD, segments_bT

def modules(family):
    parts = dataclasses.replace(family.parts, encoder=Encoder)
    return dataclasses.replace(family, parts=parts, specs=(*family.specs, ('encoder/domain', P(None))))
"""


def test_a_model_reads_numbers_of_examples(tmp_path):
    """Only rows whose numbers are not 0 differ from T5's, and the parameter that multiplies them has a gradient."""
    file = tmp_path / 'domains.py'
    file.write_text(DOMAINS)
    config = own_model.load({**run_config(1, 1, emb_dim=16, mlp_dim=16).model, 'module': str(file)})
    params = random_params(config)
    plain = dataclasses.replace(config, module='', own=None)
    batch = random_batch(0)
    numbers = np.zeros(batch['encoder_input_tokens'].shape, np.float32)
    numbers[2] = 0.5

    def f(params, batch):
        logits = lambda params: model.apply(model.logits, params, config, batch).logits_bTv  # noqa: E731
        gradient = jax.grad(lambda params: logits(params)[2].sum())(params)['encoder/domain']
        of_t5 = model.apply(model.logits, params, plain, batch).logits_bTv
        return logits(params), of_t5, gradient

    compute = as_one_device(f, (model.param_specs(config), partition.BATCH))
    logits, of_t5, gradient = compute(params, {**batch, 'encoder_domain': numbers})
    differs = abs(logits - of_t5).max(axis=(1, 2)) > 1e-3
    assert differs.tolist() == [i == 2 for i in range(8)]
    assert abs(gradient).min() > 0

    # Answers take them too.
    t5 = infer.T5(config, params, make_mesh(1, 1))
    rows = (1, 2)
    inputs = [np.trim_zeros(batch['encoder_input_tokens'][i]) for i in rows]
    targets = [np.trim_zeros(batch['decoder_target_tokens'][i]) for i in rows]
    scores = t5.score(inputs, targets, numbers={'domain': [0, 0.5]})
    for i, row in enumerate(rows):
        log_p = np.asarray(jax.nn.log_softmax(logits[row]))[np.arange(len(targets[i])), targets[i]]
        assert scores[i] == pytest.approx(log_p.sum(), rel=1e-5)
    answers = {}
    for number in (0.0, 0.5):
        numbers = {'domain': [number, number]}
        answers[number] = t5.generate(inputs, max_length=4, return_scores=True, numbers=numbers)
        tokens = answers[number].tokens
        again = t5.score(inputs, tokens, numbers=numbers)
        outputs, _ = t5.encode(inputs, numbers=numbers)
        if not number:
            np.testing.assert_array_equal(outputs, t5.encode(inputs)[0])
        assert [len(ids) for ids in tokens] == [4, 4]  # no score of EOS
        np.testing.assert_allclose(answers[number].scores, again, rtol=1e-5)
    assert abs(answers[0.5].scores - answers[0.0].scores).min() > 1e-3
    assert_refused(lambda: t5.generate(inputs, numbers={'domain': [1.0]}), "numbers['domain']")
