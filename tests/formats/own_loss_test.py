"""A loss of one's own, loss.module: its numbers, its settings, and a run that resumes with it."""

import jax
import numpy as np
import pytest
from runs import metrics_of, run, small_config, stop_after
from small_models import assert_refused, random_batch, run_config

import train
from configs import base, check
from formats import own_loss
from modes import command_line
from prepare import make_spec

# T5's loss, with a penalty of the mean square of the encoder's outputs where there are tokens.
PENALTY = """
import dataclasses
import jax.numpy as jnp
import loss

@dataclasses.dataclass(frozen=True)
class Options:
    penalty: float = 0.5

def weighted_sums(outputs, batch, weights_bT, divisor, settings):
    sums = loss.weighted_sums(outputs, batch, weights_bT, divisor, settings)
    square_bM = jnp.square(outputs.encoded_bMD.astype(jnp.float32)).mean(axis=-1)
    square = jnp.where(outputs.segments_bM > 0, square_bM, 0).sum()
    sums['loss'] += settings.options.penalty * square / divisor
    return sums | {'square': square}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'penalty.py'
    path.write_text(PENALTY)
    return path


def take_steps(config, num_microbatches=1):
    spec = make_spec(config, num_microbatches)
    state = train.compile_init(spec)()
    for seed in range(2):
        state, metrics = train.jit_step(spec)(state, random_batch(seed))
    return jax.device_get(metrics), jax.device_get(state.params)


@pytest.mark.slow
def test_a_loss_of_the_encoders_outputs(file):
    """Its sums and gradients are the same on every mesh and in microbatches; penalty 0 gives T5's loss."""
    results = []
    for mesh, num_microbatches, penalty in (
        ((1, 1, 1), 1, 0.5),
        ((2, 2, 2), 2, 0.5),
        ((1, 1, 1), 1, 0),
    ):
        config = run_config(*mesh)
        config.loss.module = str(file)
        config.loss.options.penalty = float(penalty)
        results.append(take_steps(config, num_microbatches))
    plain, plain_params = take_steps(run_config(1, 1, 1))
    (metrics, params), (on_mesh, params_on_mesh), (without, params_without) = results
    for name in metrics:
        np.testing.assert_allclose(on_mesh[name], metrics[name], rtol=1e-4, err_msg=name)
    for path in params:
        np.testing.assert_allclose(params_on_mesh[path], params[path], atol=1e-5, err_msg=path)
        np.testing.assert_array_equal(params_without[path], plain_params[path], err_msg=path)
    assert without['loss'] == plain['loss'] < metrics['loss']
    assert max(abs(params[path] - plain_params[path]).max() for path in params) > 1e-3


@pytest.mark.slow
def test_a_run_with_a_loss(corpus, file, tmp_path):
    """It logs the new sum, may save the best by it, and resumes with the same file at another path alone."""
    config = small_config(corpus, steps=3)
    config.loss.module = str(file)
    config.save.update(best_metric='training_eval/span_corruption/square', best_is='lower')
    workdir = tmp_path / 'run'
    stop_after(2, config, workdir)
    [checkpoint] = workdir.glob('checkpoint_*')
    assert (checkpoint / 'own_loss.py').read_text() == PENALTY
    for module, content in (('', None), (str(file), f'{PENALTY}\n')):
        if content:
            file.write_text(content)
        config.loss.module = module
        assert_refused(lambda: run(config, workdir), 'loss.module')
    moved = tmp_path / 'moved.py'
    moved.write_text(PENALTY)
    config.loss.module = str(moved)
    config.loss.options.penalty = 0.25
    assert_refused(lambda: run(config, workdir), 'loss/options/penalty')
    config.loss.options.penalty = 0.5
    run(config, workdir)
    assert all(line['square'] > 0 for line in metrics_of(workdir) if line['run'] != 'infer_eval')


def test_the_options_of_a_loss(file):
    """The command line gives texts, which have the types of the defaults; --help lists them."""
    words = ['main.py', f'--config.loss.module={file}', '--config.loss.options.penalty=2']
    assert command_line.take_options(words) == words[:2]
    config = base.get_config()
    config.loss.module = str(file)
    check.set_options(config, command_line.OPTIONS)
    command_line.take_options([])
    check.check(config)
    assert own_loss.load(config.loss).options.penalty == 2.0
    assert '  --config.loss.options.penalty=0.5' in own_loss.describe_options(str(file))
