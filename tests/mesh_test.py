"""The same numbers on every mesh, dropout on: what finds a missing or doubled collective.

Tolerances are max|a-b| <= 1e-5 * max|b| per array: the order of sums differs between meshes.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import chex
import jax
import numpy as np
import pytest
from forms import first_in_ci
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_models import assert_close, assert_refused, random_batch, random_params, run_config

import model
import partition
import state_names
import train
from messages import Refused
from prepare import make_spec

STEPS = 3

gradients = jax.jit(train.gradients, static_argnums=0)


class Numbers(NamedTuple):
    """What is equal on every mesh."""

    start: dict  # the initial parameters
    losses: list
    end: dict  # parameters and optimizer state after the last step


def run(config, num_microbatches=1, steps=STEPS):
    spec = make_spec(config, num_microbatches)
    state = train.compile_init(spec)()
    start = {name: np.asarray(x) for name, x in state.params.items()}
    losses = []
    for i in range(steps):
        batch = random_batch(i, config.model.vocab_size, config.train.batch_size)
        state, metrics = train.jit_step(spec)(state, batch)
        losses.append(float(metrics['loss']))
    end = jax.tree.map(np.asarray, state_names.to_t5x(*state))
    return Numbers(start=start, losses=losses, end=end)


def assert_same(found, expected):
    chex.assert_trees_all_equal(found.start, expected.start)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert_close(found.end, expected.end, 1e-5)


# Ways to compute the same: a mesh (data, fsdp, model), model.remat, model.scan_layers, microbatches.
# Any two settings of different columns occur together but one device and 'dots'.
WAYS = [
    ((1, 1, 1), 'full', True, 4),
    ((8, 1, 1), 'none', True, 4),
    ((8, 1, 1), 'full', False, 1),
    ((8, 1, 1), 'dots', False, 4),
    ((1, 8, 1), 'none', False, 1),
    ((1, 8, 1), 'full', False, 4),
    ((1, 8, 1), 'dots', True, 1),
    ((2, 2, 2), 'none', True, 1),
    ((2, 2, 2), 'full', False, 1),
    ((2, 2, 2), 'dots', True, 4),
    ((1, 4, 2), 'none', False, 4),
    ((1, 4, 2), 'full', True, 1),
    ((1, 4, 2), 'dots', False, 1),
    ((1, 2, 4), 'none', True, 4),
    ((1, 2, 4), 'full', True, 1),
    ((1, 2, 4), 'dots', False, 4),
]
QUICK = (WAYS[9],)
SLOW = (WAYS[2], WAYS[13])  # with QUICK every setting of remat, scans and microbatches occurs


def marks_of(way):
    if way in QUICK:
        return ()
    return pytest.mark.slow if way in SLOW else pytest.mark.scale


def config_of(mesh=(1, 1, 1), remat='none', scan_layers=False):
    data, fsdp, model_axis = mesh
    config = run_config(data, model_axis, fsdp, num_encoder_layers=2)
    config.model.update(remat=remat, scan_layers=scan_layers)
    config.train.batch_size = 32
    return config


@pytest.fixture(scope='module')
def plain():
    """One device, one microbatch, every layer written out, all activations kept."""
    return run(config_of())


@pytest.mark.parametrize(
    'mesh, remat, scan_layers, num_microbatches',
    [pytest.param(*way, marks=marks_of(way)) for way in WAYS],
)
def test_all_ways_give_the_same(plain, mesh, remat, scan_layers, num_microbatches):
    found = run(config_of(mesh, remat, scan_layers), num_microbatches)
    chex.assert_trees_all_equal(found.start, plain.start)
    np.testing.assert_allclose(found.losses, plain.losses, rtol=1e-5)
    assert_close(found.end, plain.end, 1e-5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('name', ['adamw', 'muon'])
def test_adamw(name):
    """Its first update is g / (|g| + 1e-8): where g is hardly larger than 1e-8, its rounding shows.

    Where g is larger, parameters are as close as Adafactor's. Three steps later the others differ by up
    to 1.7e-3 of the largest value, at a learning rate of 0.01, and the losses do not show it.
    """
    found = {}
    for mesh in ((1, 1, 1), (2, 2, 2)):
        config = config_of(mesh)
        config.optimizer.name = name
        found[mesh] = {steps: run(config, steps=steps) for steps in (1, STEPS)}
    one, several = found.values()
    for path, x in one[1].end.items():
        difference = np.abs(several[1].end[path] - x)
        if path.startswith('target/'):
            first_moment = one[1].end[f'state/param_states/{path.removeprefix("target/")}/mu']
            gradient = np.abs(first_moment) / (1 - config.optimizer.adamw.beta1)
            difference = difference[gradient > 1e-6]
            assert difference.size > 0, path
        assert difference.max() <= 1e-5 * np.abs(x).max(), path
    np.testing.assert_allclose(several[STEPS].losses, one[STEPS].losses, rtol=1e-5)
    assert_close(several[STEPS].end, one[STEPS].end, 5e-3)


def collectives(mesh, remat='none', scan_layers=False, num_layers=1, **settings):
    """Return {kind: the types of its results} of what devices exchange in a lowered step."""
    config = config_of(mesh, remat, scan_layers)
    config.model.update(num_encoder_layers=num_layers, num_decoder_layers=num_layers)
    config.model.dropout_rate = 0.0  # is traced faster
    config.update_from_flattened_dict(settings)
    program = train.lower_step(make_spec(config)).as_text()
    found = {}
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce'):
        found[kind] = []
        # A reduction has a region, and its type is on a later line.
        pattern = rf'"stablehlo.{kind}".*?replica_groups = (.*?)}}>.*?\) -> tensor<(\w+)>'
        for groups, result in re.findall(pattern, program, re.DOTALL):
            if group_size(groups, mesh) > 1:
                found[kind].append(result)
    return found


def group_size(groups, mesh):
    """Return how many devices exchange: JAX 0.12 names axes of the mesh, JAX 0.10 lists devices."""
    listed = re.search(r'tensor<\d+x(\d+)xi64>', groups)
    if listed:
        return int(listed[1])
    sizes = dict(zip(partition.MESH_AXES, mesh, strict=True))
    return math.prod(sizes[axis] for axis in re.findall(r'name = "(\w+)"', groups))


@pytest.mark.slow
def test_what_fsdp_adds_to_a_step():
    """A parameter is gathered where it is read, and its gradients come back by a reduce-scatter."""
    plain = collectives((8, 1, 1))
    assert not plain['all_gather'] and not plain['reduce_scatter']
    found = collectives((1, 8, 1))
    split = 7 + 11 + 1 + 1  # kernels of encoder and decoder, of the logits, and the embedding
    assert len(found['all_gather']) == len(found['reduce_scatter']) == split
    # Their gradients need no other sum.
    assert len(found['all_reduce']) == len(plain['all_reduce']) - split


@pytest.mark.parametrize('gradient_dtype', ['float32', 'bfloat16'])
def test_the_dtypes_that_travel(gradient_dtype):
    """Matrices as the model computes; the embedding and the logits compute in float32."""
    settings = {'model.dtype': 'bfloat16', 'train.gradient_dtype': gradient_dtype}
    found = collectives((1, 8, 1), **settings)
    assert sorted(x.split('x')[-1] for x in found['all_gather']) == ['bf16'] * 18 + ['f32'] * 2
    dtype = {'float32': 'f32', 'bfloat16': 'bf16'}[gradient_dtype]
    assert {x.split('x')[-1] for x in found['reduce_scatter']} == {dtype}


@pytest.mark.slow
def test_dots_sums_nothing_again():
    counts = {}
    for remat in ('none', 'dots', 'full'):
        counts[remat] = len(collectives((1, 1, 2), remat)['all_reduce'])
    assert counts['full'] > counts['dots'] == counts['none']


@pytest.mark.slow
def test_a_scan_gathers_one_layer_at_a_time():
    """However many layers there are: matrices, not stacks of them."""
    one = collectives((1, 8, 1), 'full', scan_layers=True, num_layers=1)
    three = collectives((1, 8, 1), 'full', scan_layers=True, num_layers=3)
    for kind in ('all_gather', 'reduce_scatter'):
        assert three[kind] == one[kind]
        assert all(x.count('x') == 2 for x in one[kind])


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['none', 'full'])
def test_a_scan_in_bfloat16(remat):
    """The gradients of what its layers share have the dtype of that."""
    collectives((1, 1, 1), remat, scan_layers=True, num_layers=2, **{'model.dtype': 'bfloat16'})


@pytest.mark.scale
@pytest.mark.parametrize('remat, scan_layers', [('none', False), ('full', True)])
def test_layers_that_are_gathered_together(remat, scan_layers):
    """With remat and a scan, more layers need no more room for whole matrices when compiled."""
    needs = {}
    for num_layers in (2, 6):
        config = config_of((1, 8, 1), remat, scan_layers)
        config.model.update(num_encoder_layers=num_layers, mlp_dim=1024, dropout_rate=0.0)
        config.data.lengths.update(inputs=8, targets=8)
        spec = make_spec(config)
        needs[num_layers] = train.compile_step(spec).memory_analysis().temp_size_in_bytes
    of_layers = 0
    for path, shape in model.shapes(spec.model_config).items():
        if re.match(r'encoder/layers_[2-5]/.+/kernel', path):
            of_layers += 4 * math.prod(shape)
    # A device has an eighth of them, stacked, and of their gradients in any case.
    assert (needs[6] - needs[2] < 0.3 * of_layers) == scan_layers


@pytest.mark.parametrize('mesh', [(1, 8, 1), (2, 2, 2)])
def test_a_device_has_its_part_of_the_state(mesh):
    """1 / (fsdp * model) of what is split, in rows and columns of Adafactor the part of theirs."""
    spec = make_spec(config_of(mesh))
    _, fsdp, model_axis = mesh
    shapes = state_names.to_t5x(*spec.state_shapes)
    rest = set()
    for path, split in state_names.to_t5x(*spec.state_specs).items():
        shape = shapes[path].shape
        if shape in [(), (1,)]:  # the step, and slots that are not used
            continue
        shard = NamedSharding(spec.mesh, split).shard_shape(shape)
        num_parts = math.prod(shape) // math.prod(shard)
        if re.fullmatch('target/.+/(kernel|embedding)', path):
            assert num_parts == fsdp * model_axis, path
        elif re.fullmatch('state/.+/(kernel|embedding)/(v_row|v_col)', path):
            assert num_parts in (fsdp, model_axis), path
        else:
            rest.add(re.search('norm/scale|relpos_bias/rel_embedding', path)[0])
    assert rest == {'norm/scale', 'relpos_bias/rel_embedding'}


def gradients_of(config):
    spec = make_spec(config)
    params = random_params(model.T5Config(**config.model))
    grads, _ = gradients(spec, params, random_batch(0), np.arange(8), jax.random.key(1))
    return jax.tree.map(np.asarray, grads)


@pytest.mark.slow
def test_same_gradients_on_another_mesh():
    assert_close(gradients_of(run_config(4, 2)), gradients_of(run_config(1, 1)), 1e-5)


SMALL = dict(emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32)
SIX_HEADS = dict(num_heads=6, head_dim=24, mlp_dim=96, logits_via_embedding=True)


@pytest.mark.slow
@pytest.mark.parametrize('data, model_axis', first_in_ci([(2, 3), (1, 2)]))
def test_sizes_that_are_no_powers_of_two(data, model_axis):
    assert_same(run(run_config(data, model_axis, **SIX_HEADS)), run(run_config(1, 1, **SIX_HEADS)))


@pytest.mark.slow
def test_dropout_is_on_and_differs_between_rows_steps_and_seeds():
    config = run_config(1, 1, **SMALL)
    spec = make_spec(config)
    params = random_params(model.T5Config(**config.model))
    batch = {name: np.repeat(x[:1], 8, axis=0) for name, x in random_batch(0).items()}

    def loss(rows, seed):
        _, sums = gradients(spec, params, batch, rows, jax.random.key(seed))
        return float(sums['loss'])

    rows = np.arange(8)
    assert loss(rows, 0) == loss(rows, 0)
    assert loss(rows, 0) != loss(rows, 1)
    assert loss(rows, 0) != loss(rows + 8, 0)
    np.testing.assert_allclose(loss(rows, 0), loss(rows[::-1].copy(), 0), rtol=1e-6)


@pytest.mark.parametrize('mesh, name', [
    ((2, 3, 1), 'model.num_heads'),
    ((3, 1, 1), 'train.batch_size'),
    ((1, 1, 3), 'model.emb_dim'),
    ((-1, 3, 1), 'mesh.model=3'),
    ((16, 1, 1), 'mesh.data=16'),
    ((-1, -1, 1), 'mesh.data=-1'),
])  # fmt: skip
def test_a_mesh_that_cannot_be(mesh, name):
    data, model_axis, fsdp = mesh
    with pytest.raises(Refused) as error:
        make_spec(run_config(data, model_axis, fsdp))
    assert name in str(error.value)


@dataclasses.dataclass(frozen=True)
class Device:
    """One of four TPUs of a slice, or of four GPUs of a host."""

    id: int
    platform: str
    device_kind: str = 'TPU v6 lite'
    process_index: int = 0
    core_on_chip: int = 0

    @property
    def slice_index(self):
        return self.id // 4

    @property
    def coords(self):
        return (self.id % 2, self.id // 2 % 2, 0)


def test_data_alone_goes_over_slices():
    devices = [Device(i, 'tpu') for i in range(8)]
    mesh = partition.make_mesh(data=4, model=2, devices=devices)
    of_slices = [[device.slice_index for device in row] for row in mesh.devices.reshape(4, 2)]
    assert of_slices == [[0, 0], [0, 0], [1, 1], [1, 1]]
    with pytest.raises(Refused):
        partition.make_mesh(data=1, fsdp=8, devices=devices)
    gpus = [Device(i, 'gpu') for i in range(8)]
    assert partition.make_mesh(data=1, fsdp=8, devices=gpus).size == 8


def test_a_spec_may_split_over_several_axes():
    for spec in (P('fsdp', ('data', 'model')), P(('data', 'fsdp'))):
        assert partition.replicated_batch_axes(spec) == ()
    assert partition.replicated_batch_axes(P('model', 'fsdp')) == ('data',)
    for spec in (P('model', None), P()):
        assert partition.replicated_batch_axes(spec) == partition.BATCH_AXES


def test_every_parameter_has_one_row():
    with pytest.raises(ValueError) as error:
        partition.param_specs({'.+/kernel': None}, ['encoder/bias'])
    assert 'encoder/bias' in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    'data, model_axis, num_microbatches', first_in_ci([(2, 2, 4), (1, 1, 8), (1, 1, 2)])
)
def test_microbatches_give_the_gradients_of_the_whole_batch(data, model_axis, num_microbatches):
    """Dropout on, and divided by the tokens of the whole batch.

    Small matrices: the float32 rounding of large ones, which differs between batch sizes, is itself
    about 1e-6 of some gradients. Here it is up to 1.2e-6 of a norm's, on one of two kinds of CPU.
    """
    config, found = run_config(data, model_axis, **SMALL), {}
    params = random_params(model.T5Config(**config.model))
    for count in (1, num_microbatches):
        spec = make_spec(config, count)
        found[count] = gradients(spec, params, random_batch(0), np.arange(8), jax.random.key(1))
    (grads, sums), (expected, expected_sums) = found[num_microbatches], found[1]
    assert_close(grads, expected, 2e-6)
    assert_close(sums, expected_sums, 1e-6)


# An own model in which every second layer has another Mlp, and reports a value of the loss.
EVERY_SECOND = """
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
        if self.index % 2 == 0:
            return super().__call__(x_bTD, rows_b, mask)
        c = self.config
        shape = (c.emb_dim, partition.split(c.mlp_dim, 'model'))
        up_Df = hk.get_parameter('up', shape, init=model.NORMAL)
        down_fD = hk.get_parameter('down', shape[::-1], init=model.NORMAL)
        x_bTf = jax.nn.softplus(jnp.einsum('bTD,Df->bTf', x_bTD, up_Df))
        x_bTf = model.dropout(x_bTf, c.dropout_rate, rows_b, (1, c.mlp_dim), split_dim=2)
        y_bTD = lax.psum(jnp.einsum('bTf,fD->bTD', x_bTf, down_fD), 'model')
        return y_bTD, {'size': jnp.square(y_bTD).mean(axis=(1, 2))}


def modules(family):
    up = (r'.+/mlp/up', P('fsdp', 'model'))
    down = (r'.+/mlp/down', P('model', 'fsdp'))
    return dataclasses.replace(
        family,
        parts=dataclasses.replace(family.parts, mlp=Mlp),
        specs=(*family.specs, up, down),
        period=lambda config: 2,
        losses=lambda config: {'size': 0.1},
    )
"""


def periodic(folder, mesh=(1, 1, 1), remat='none', scan_layers=False, **settings):
    file = folder / 'own.py'
    file.write_text(EVERY_SECOND)
    config = config_of(mesh, remat, scan_layers)
    config.model.update(module=str(file), num_encoder_layers=4, num_decoder_layers=2, **settings)
    return config


@pytest.mark.long
@pytest.mark.slow
def test_a_scan_of_two_layers(tmp_path):
    expected = run(periodic(tmp_path), steps=2)
    assert 'encoder/layers_1/mlp/up' in expected.start
    assert 'encoder/layers_1/mlp/wo/kernel' not in expected.start
    for mesh, remat in (((1, 1, 1), 'full'), ((1, 2, 2), 'none')):
        found = run(periodic(tmp_path, mesh, remat, scan_layers=True), num_microbatches=2, steps=2)
        assert_same(found, expected)


@pytest.mark.slow
def test_layers_that_are_no_multiple_of_a_period(tmp_path):
    sizes = {'num_encoder_layers': 5, 'num_decoder_layers': 1}
    runs = []
    for is_scan in (False, True):
        config = periodic(tmp_path, scan_layers=is_scan)
        config.model.update(sizes)
        runs.append(run(config, steps=2))
    assert_same(runs[1], runs[0])


def test_a_period_that_is_not_that_of_the_layers(tmp_path):
    config = periodic(tmp_path, scan_layers=True)
    (tmp_path / 'own.py').write_text(EVERY_SECOND.replace('config: 2', 'config: 1'))
    assert_refused(lambda: make_spec(config), 'mlp/')
