"""The collectives of small programs are counted: kinds, axes, bytes, and the turns of loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import partition
from modes.collectives import Collective, axes_of, collectives_of

MESH = partition.make_mesh(data=2, fsdp=2, model=2)
SWAP = [(0, 1), (1, 0)]
BYTES = 16 * 128 * 4 // 8  # a device's part of the programs' argument, float32 [16, 128]


def compile_collectives(f):
    """Return the collectives of a function of one device's part of float32 [16, 128]."""
    x = jnp.ones([16, 128])
    spec = P(('data', 'fsdp', 'model'))
    step = jax.shard_map(f, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    return collectives_of(jax.jit(step).lower(x).compile().as_text(), MESH)


def repeat(num_turns, f):
    return lambda x: lax.fori_loop(0, num_turns, lambda _, y: f(y), x)


def psum(axes):
    return lambda x: jnp.tanh(lax.psum(x, axes))


def exchange(x):
    return lax.all_to_all(x, 'model', 0, 1, tiled=True)


@pytest.mark.parametrize(
    'f, kind, axes, num_bytes, times',
    [
        (psum(('data', 'fsdp', 'model')), 'all-reduce', 'data fsdp model', BYTES, 1),
        (repeat(3, repeat(7, psum('data'))), 'all-reduce', 'data', BYTES, 21),
        (lambda x: lax.all_gather(x, 'data', tiled=True), 'all-gather', 'data', 2 * BYTES, 1),
        (lambda x: lax.psum_scatter(x, 'fsdp', tiled=True), 'reduce-scatter', 'fsdp', BYTES, 1),
        (exchange, 'all-to-all', 'model', BYTES // 2, 2),
        (lambda x: lax.ppermute(x, 'fsdp', SWAP), 'collective-permute', 'fsdp', BYTES, 1),
    ],
)
def test_one_collective(f, kind, axes, num_bytes, times):
    expected = Collective(kind, tuple(axes.split()), num_bytes, is_async=False, times=times)
    assert compile_collectives(f) == [expected]


# As XLA prints the program of a TPU: the bound of a loop is the constant of its condition, and an
# all-gather that is hidden behind a product is in several fusions.
TPU_PROGRAM = """
%gather.1 (param_0.1: bf16[1,8]) -> (bf16[1,8], bf16[2,8]) {
  %param_0.1 = bf16[1,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[2,8]{1,0:T(8,128)(2,1)} all-gather(%param_0.1), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
}

%async_collective_fusion.2 (param_0.2: bf16[1,8]) -> bf16[2,8] {
  %param_0.2 = bf16[1,8]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %all-gather.2 = bf16[2,8]{1,0:T(8,128)(2,1)} all-gather(%param_0.2), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
}

%body.4 (param.4: (s32[], bf16[1,8], /*index=2*/f32[4])) -> (s32[], bf16[1,8], f32[4]) {
  %param.4 = (s32[]{:T(128)}, bf16[1,8]{1,0:T(8,128)(2,1)}, /*index=2*/f32[4]{0}) parameter(0)
  %part.4 = bf16[1,8]{1,0:T(8,128)(2,1)} get-tuple-element(%param.4), index=1
  %sum.4 = f32[4]{0:T(128)} get-tuple-element(%param.4), index=2
  %async-collective-start.4 = (bf16[1,8]{1,0}, bf16[2,8]{1,0}) fusion(%part.4), kind=kCustom, calls=%gather.1
  %fusion.4 = bf16[2,8]{1,0} fusion(%part.4), kind=kOutput, calls=%async_collective_fusion.2
  %both.4 = (f32[4]{0:T(128)}, f32[4]{0:T(128)}) all-reduce(%sum.4, %sum.4), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %tuple.4 = (s32[], bf16[1,8], f32[4]) tuple(%param.4)
}

%condition.5 (param.5: (s32[], bf16[1,8], f32[4])) -> pred[] {
  %constant.5 = s32[]{:T(128)} constant(6), metadata={op_name="jit(step)"}
  %param.5 = (s32[]{:T(128)}, bf16[1,8]{1,0}, f32[4]{0}) parameter(0)
  %turn.5 = s32[]{:T(128)} get-tuple-element(%param.5), index=0
  ROOT %lt.5 = pred[]{:T(512)} compare(%turn.5, %constant.5), direction=LT
}

ENTRY %main.6 (start.6: (s32[], bf16[1,8], f32[4])) -> (s32[], bf16[1,8], f32[4]) {
  %start.6 = (s32[], bf16[1,8], f32[4]) parameter(0)
  ROOT %while.6 = (s32[], bf16[1,8], f32[4]) while(%start.6), condition=%condition.5, body=%body.4
}
"""


def test_a_program_of_a_tpu():
    assert collectives_of(TPU_PROGRAM, MESH) == [
        Collective('all-gather', ('model',), num_bytes=32, is_async=True, times=6),
        Collective('all-reduce', ('model',), num_bytes=16, is_async=False, times=12),
    ]


# As XLA prints the program of a GPU: what runs beside nothing begins with a start, too.
GPU_PROGRAM = """
ENTRY %main.1 (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %sum.1 = f32[4]{0} all-reduce-start(%x.1), channel_id=1, replica_groups={}, backend_config={"is_sync":true}
  %end.1 = f32[4]{0} all-reduce-done(%sum.1)
  %sum.2 = f32[4]{0} all-reduce-start(%end.1), channel_id=2, replica_groups={}, backend_config={"is_sync":false}
  ROOT %end.2 = f32[4]{0} all-reduce-done(%sum.2)
}
"""


def test_a_program_of_a_gpu():
    assert collectives_of(GPU_PROGRAM, MESH) == [
        Collective('all-reduce', ('data', 'fsdp', 'model'), num_bytes=16, is_async=False, times=1),
        Collective('all-reduce', ('data', 'fsdp', 'model'), num_bytes=16, is_async=True, times=1),
    ]


@pytest.mark.parametrize(
    'groups, axes',
    [
        ('{}', ['data', 'fsdp', 'model']),
        ('[4,2]<=[8]', ['model']),
        ('[2,4]<=[4,2]T(1,0)', ['data', 'fsdp']),
        ("mesh['a'=4,'b'=2] {'b'}", ['model']),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ['data']),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", ['fsdp', 'model']),
        ("mesh['a'=4,'b'=2] {'a','b'}", ['data', 'fsdp', 'model']),
        ('{{0,3},{1,2},{4,7},{5,6}}', ['others']),
        ('[8,1]<=[8]', []),
    ],
)
def test_the_axes_of_groups_of_devices(groups, axes):
    text = f'%x), channel_id=1, replica_groups={groups}, dimensions={{0}}'
    assert axes_of(text, MESH) == tuple(axes)
