"""What layers report: the same losses on every mesh, in microbatches, with remat and with a scan."""

import dataclasses
import json

import haiku as hk
import jax
import numpy as np
import pytest
from forms import first_in_ci
from runs import assert_same_run, metrics_of, run, small_config, stop_after
from small_models import as_one_device, assert_close, make_mesh, random_batch, run_config

import infer
import model
import partition
import train
from prepare import make_spec

COEFFICIENT = 50.0
# An Mlp that reports the mean square of what it adds, and in each decoder's first layer 3.0.
PENALTY = f"""
import dataclasses

import jax.numpy as jnp

import model


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b, mask):
        y_bTD, aux = super().__call__(x_bTD, rows_b, mask)
        activity_b = jnp.square(y_bTD.astype(jnp.float32)).mean(axis=(1, 2))
        aux = {{**aux, 'activity': activity_b}}
        if self.module_name == 'decoder/layers_0/mlp':
            aux['three'] = jnp.full_like(activity_b, 3.0)
        return y_bTD, aux


def modules(family):
    losses = lambda config: {{'activity': {COEFFICIENT}}}
    parts = dataclasses.replace(family.parts, mlp=Mlp)
    return dataclasses.replace(family, parts=parts, losses=losses)
"""


@pytest.fixture(scope='module')
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp('own') / 'penalty.py'
    path.write_text(PENALTY)
    return path


def spec_of(file, mesh=(1, 1, 1), num_microbatches=1, factor='NUM_REAL_TARGET_TOKENS', **settings):
    data, fsdp, model_axis = mesh
    config = run_config(data, model_axis, fsdp, num_decoder_layers=2, **settings)
    config.model.module = str(file)
    config.loss.loss_normalizing_factor = factor
    return make_spec(config, num_microbatches)


def without_losses(spec):
    own = dataclasses.replace(spec.model_config.own, losses=lambda config: {})
    config = dataclasses.replace(spec.model_config, own=own)
    return dataclasses.replace(spec, model_config=config)


def take_steps(spec, count=2):
    """Return the metrics of some steps and the last state."""
    state = train.compile_init(spec)()
    metrics = []
    for seed in range(count):
        state, found = train.jit_step(spec)(state, random_batch(seed))
        metrics.append(jax.device_get(found))
    return metrics, jax.device_get(state.params)


def activity_by_hand(config, params, batch):
    """Return the mean over the three layers of the mean square of what their Mlps add, [b]."""
    found = []

    def spy(next_method, args, kwargs, context):
        out = next_method(*args, **kwargs)
        if isinstance(context.module, model.Mlp) and context.method_name == '__call__':
            found.append(out[0])
        return out

    def outputs(params, batch):
        found.clear()
        with hk.intercept_methods(spy):
            model.apply(model.logits, params, config, batch)
        return list(found)

    specs = (model.param_specs(config), partition.BATCH)
    mlps = as_one_device(outputs, specs)(params, batch)
    return np.mean([np.square(np.float64(y_bTD)).mean(axis=(1, 2)) for y_bTD in mlps], axis=0)


@pytest.mark.slow
@pytest.mark.parametrize('factor', first_in_ci(['', 'NUM_REAL_TARGET_TOKENS', '3.0']))
def test_the_loss_has_coefficient_times_the_mean_over_rows(file, factor):
    """Once, whatever divides the cross entropy. Values that `losses` does not name are only logged."""
    spec = spec_of(file, factor=factor, dropout_rate=0.0)
    batch = random_batch(0)
    params = jax.device_get(train.compile_init(spec)().params)
    expected_b = activity_by_hand(spec.model_config, params, batch)
    assert len(expected_b) == 8 and expected_b.std() > 1e-3
    [with_loss], _ = take_steps(spec, count=1)
    [without], _ = take_steps(without_losses(spec), count=1)
    assert with_loss['aux/activity'] == pytest.approx(expected_b.sum(), rel=1e-5)
    assert without['aux/activity'] == pytest.approx(expected_b.sum(), rel=1e-5)
    penalty = COEFFICIENT * expected_b.mean()
    assert with_loss['aux_loss'] == pytest.approx(penalty, rel=1e-5)
    assert with_loss['loss'] == pytest.approx(without['loss'] + penalty, rel=1e-5)
    assert with_loss['nats'] == pytest.approx(without['nats'], rel=1e-6)
    assert 'aux_loss' not in without and with_loss['aux/three'] == 8 * 3
    assert (
        abs(with_loss['gradient_norm'] - without['gradient_norm']) > 1e-4 * without['gradient_norm']
    )


# A mesh, microbatches, remat, scan.
WAYS = [
    ((2, 2, 2), 1, 'full', True),
    ((2, 2, 2), 4, 'none', False),
    ((1, 1, 1), 4, 'dots', True),
    ((1, 1, 1), 1, 'none', True),
]


@pytest.mark.slow
@pytest.mark.parametrize('mesh, num_microbatches, remat, scan_layers', first_in_ci(WAYS))
def test_the_same_in_all_ways(file, mesh, num_microbatches, remat, scan_layers):
    if num_microbatches > 1 and mesh == (2, 2, 2):
        num_microbatches = 2  # two rows each
    settings = {'num_encoder_layers': 2}
    expected, expected_params = take_steps(spec_of(file, **settings))
    settings |= {'remat': remat, 'scan_layers': scan_layers}
    found, params = take_steps(spec_of(file, mesh, num_microbatches, **settings))
    for metrics, expected_metrics in zip(found, expected, strict=True):
        for name in ('loss', 'aux_loss', 'aux/activity', 'nats', 'gradient_norm'):
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-5), name
    assert_close(params, expected_params, 1e-5)


# A run with parts of all kinds in one file: an activation, a layer, an attention, an option, a loss term.

ALL = """
import dataclasses

import jax
import jax.numpy as jnp

import model


@dataclasses.dataclass(frozen=True)
class Options:
    sharpness: float = 1.0
    penalty: float = 0.1


class Attention(model.Attention):
    def attend(self, q_bThK, *others):
        return super().attend(self.config.options.sharpness * q_bThK, *others)


class Mlp(model.Mlp):
    def __call__(self, x_bTD, rows_b, mask):
        y_bTD, aux = super().__call__(x_bTD, rows_b, mask)
        return y_bTD, {**aux, 'activity': jnp.square(y_bTD.astype(jnp.float32)).mean(axis=(1, 2))}


class DecoderLayer(model.DecoderLayer):
    def __call__(self, x_bTD, *others):
        y_bTD, cache, aux = super().__call__(x_bTD, *others)
        return (x_bTD + y_bTD) / 2, cache, aux


def modules(family):
    parts = dataclasses.replace(
        family.parts,
        activations=(*family.parts.activations, ('cube', lambda x: jax.nn.relu(x) ** 3)),
        attention=Attention,
        decoder_layer=DecoderLayer,
        mlp=Mlp,
    )
    losses = lambda config: {'activity': config.options.penalty}
    return dataclasses.replace(family, parts=parts, losses=losses)
"""


@pytest.mark.slow
def test_parts_of_all_kinds_in_one_file(corpus, tmp_path):
    """With LoRA, a scan and remat on 2 x 2 x 2 devices: stopped, resumed, opened."""
    file = tmp_path / 'all.py'
    file.write_text(ALL)

    def make_config(mesh, **settings):
        config = small_config(corpus, steps=4)
        config.mesh.update(data=mesh[0], fsdp=mesh[1], model=mesh[2])
        config.model.update(module=str(file), mlp_activations=('cube',), num_decoder_layers=2)
        config.model.options.sharpness = 2.0
        config.eval.every_steps = 2
        config.save.every_steps = 2
        config.update_from_flattened_dict(settings)
        return config

    base = make_config((1, 1, 1))
    run(base, tmp_path / 'base')
    lora = {
        'restore.path': str(tmp_path / 'base'),
        'model.lora_rank': 2,
        'model.lora_targets': '.+/kernel',
        'model.remat': 'full',
        'model.scan_layers': True,
        'optimizer.name': 'adamw',
    }
    one_device = run(make_config((1, 1, 1), **lora), tmp_path / 'one')
    eight = make_config((2, 2, 2), **lora)
    run(eight, tmp_path / 'eight')
    stop_after(2, eight, tmp_path / 'stopped')
    run(eight, tmp_path / 'stopped')
    assert_same_run(tmp_path / 'stopped', tmp_path / 'eight', 4)
    lines = metrics_of(tmp_path / 'eight')
    for line, expected in zip(lines, metrics_of(one_device), strict=True):
        for name in ('loss', 'activity', 'cross_ent_loss'):
            assert line[name] == pytest.approx(expected[name], rel=1e-5), (name, line['step'])
        assert line['loss'] == pytest.approx(
            line['cross_ent_loss'] + line['z_loss'] + 0.1 * line['activity'], rel=1e-5
        )
    assert {line['run'] for line in lines} == {'train', 'training_eval/span_corruption'}
    settings = json.loads((tmp_path / 'eight/checkpoint_4/config.json').read_bytes())['model']
    assert settings['options'] == {'sharpness': 2.0, 'penalty': 0.1} and 'own' not in settings
    t5 = infer.load(tmp_path / 'eight', mesh=make_mesh(2, 2))
    assert t5.config.options.sharpness == 2.0 and t5.config.lora_rank == 0
    batch = random_batch(0)
    alone = infer.load(tmp_path / 'eight')
    assert_close(t5.logits(batch), alone.logits(batch), 1e-5)
    assert len(t5.generate([[5, 6, 7, 1]], max_length=8, beam_size=3)) == 1
