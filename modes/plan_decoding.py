"""`--mode=plan`: one step of decoding, as the task metrics of a run and `--mode=infer` take it."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import decode
import infer
import kernels
import model
import partition
import train
from modes.collectives import collectives_of
from run import memory


class DecodingStep(NamedTuple):
    """What a step of decoding takes, in bytes."""

    size: str  # of what is decoded at once
    is_of_run: bool  # that computes task metrics: its training state is in memory, too
    total: float  # of the memory of `limit`
    limit: float  # memory.memory_limit
    parameters: int  # on a device
    cache: int  # on a device
    step: jax.stages.Compiled | None  # None where parameters and cache alone do not fit

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def lines_of(planned: DecodingStep, spec: train.StepSpec) -> Iterator[str]:
    """Yield what a step of decoding takes, and what it exchanges."""
    answer = 'fits' if planned.fits else 'does NOT fit'
    beside = ', beside the training state' if planned.is_of_run else ''
    yield (
        f'Decoding {planned.size} {answer}{beside}: {planned.total / memory.GIB:.2f} of '
        f'{planned.limit / memory.GIB:.2f} GiB; on a device the parameters, gathered over mesh.fsdp, take '
        f'{planned.parameters / memory.GIB:.2f} and the cache {planned.cache / memory.GIB:.2f}'
    )
    if planned.step is None:
        return
    totals: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for x in collectives_of(planned.step.as_text() or '', spec.mesh):
        total = totals.setdefault((x.kind, x.axes), [0, 0])
        total[0] += x.times
        total[1] += x.times * x.num_bytes
    moved = []
    for (kind, axes), (times, num_bytes) in totals.items():
        moved.append(f'{kind} over {", ".join(axes)}, {times} arrays, {num_bytes / 1e6:.2f} MB')
    yield f'Collectives of a step of decoding on each device: {"; ".join(moved) or "none"}'


def check_fits(planned: DecodingStep) -> None:
    """Raise ValueError where a run that computes task metrics has no room for them."""
    if planned.is_of_run and not planned.fits:
        raise ValueError(
            f'decoding for infer_eval.every_steps needs {planned.total / memory.GIB:.1f} GiB of memory, and '
            f'{planned.limit / memory.GIB:.1f} are available: split the parameters over mesh.model, or set '
            'infer_eval.every_steps=0 and use --mode=evaluate on other devices'
        )


def plan_decoding(config: Any, spec: train.StepSpec) -> DecodingStep:
    """Return a step of decoding, which is compiled if parameters and cache fit."""
    mesh = spec.mesh
    base = model.without_adapters(spec.model_config)
    base = dataclasses.replace(base, scan_layers=False)
    merge = functools.partial(model.merge_adapters, spec.model_config)
    params = jax.eval_shape(merge, spec.state_shapes.params)
    specs = partition.gathered(model.param_specs(base))
    parameter_bytes = memory.bytes_on_device(mesh, params, specs)
    dtypes = model.step_kernels(base, params)
    columns = jax.eval_shape(lambda params: kernels.for_decoding(mesh, params, dtypes), params)
    params |= columns
    param_specs = jax.tree.broadcast(kernels.specs_of(params, specs), params)
    column_specs = {path: param_specs[path] for path in columns}
    parameter_bytes += memory.bytes_on_device(mesh, columns, column_specs)

    # What is decoded at once, in the sizes that infer.T5 compiles for.
    is_of_run = config.infer_eval.every_steps > 0
    batch_size = config.infer_eval.batch_size if is_of_run else config.decode.batch_size
    num_rows = infer.next_size(batch_size, partition.axes_size(mesh, partition.BATCH_AXES))
    length = infer.next_size(config.data.lengths.inputs, infer.LENGTH_MULTIPLE)
    room = infer.room_for(config.decode.max_length)
    beam_size = config.decode.beam_size
    num_decodes = max(beam_size, config.decode.num_return)

    def start(params, inputs_bM):
        return model.apply(
            lambda: model.start_decoding(base, inputs_bM, room, num_decodes, beam_size > 1), params
        )

    def step(params, tokens_r, cache):
        return model.apply(lambda: model.decode_step(base, tokens_r, cache), params)

    rows = partition.BATCH
    layers = P(partition.BATCH_AXES, 'model')
    cache_specs: Any = decode.Cache(P(), rows, rows, layers)  # type: ignore[arg-type]
    start = jax.shard_map(
        start, mesh=mesh, in_specs=(param_specs, partition.BATCH), out_specs=cache_specs
    )
    inputs = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
    cache = jax.eval_shape(start, params, inputs)
    cache_specs = jax.tree.broadcast(cache_specs, cache)

    cache_bytes = memory.bytes_on_device(mesh, cache, cache_specs)
    num_bytes = parameter_bytes + cache_bytes
    if is_of_run:
        shapes = spec.state_shapes
        state_specs = spec.state_specs
        if mesh.shape['fsdp'] == 1 and not spec.model_config.lora_rank:
            shapes = shapes._replace(params={})  # they are those of the step
            state_specs = state_specs._replace(params={})
        num_bytes += memory.bytes_on_device(mesh, shapes, state_specs)
    num_sharing = len(mesh.local_devices) if memory.is_on_cpu(mesh) else 1  # one memory
    planned = DecodingStep(
        size=f'{num_rows} inputs of {length} tokens, {num_decodes} answer(s) of {room} tokens each,',
        is_of_run=is_of_run,
        total=num_bytes * num_sharing,
        limit=memory.memory_limit(mesh),
        parameters=parameter_bytes,
        cache=cache_bytes,
        step=None,
    )
    if not planned.fits:
        return planned
    in_specs = (param_specs, partition.BATCH, cache_specs)
    out_specs = (P(partition.BATCH_AXES, 'model'), cache_specs)
    step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    tokens = jax.ShapeDtypeStruct((num_rows * num_decodes,), jnp.int32)
    arguments = jax.tree.map(
        lambda x, to: x.update(sharding=to),
        (params, tokens, cache),
        partition.shardings(mesh, in_specs),
    )
    jit_step = jax.jit(step, donate_argnums=2)
    try:
        compiled = jit_step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        return planned._replace(total=memory.bytes_of_refusal(error))
    analysis: Any = compiled.memory_analysis()
    num_bytes += analysis.temp_size_in_bytes
    num_bytes += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return planned._replace(total=num_bytes * num_sharing, step=compiled)
