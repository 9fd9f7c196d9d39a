"""`--mode=plan`: one step of decoding, as the task metrics of a run and `--mode=infer` take it."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

import infer
import kernels
import model
import train
from messages import Refused
from modes.collectives import collectives_of
from run import memory
from run.decoding import decoding_of


class DecodingStep(NamedTuple):
    """What a step of decoding takes, in bytes."""

    size: str  # the rows and tokens decoded together
    is_of_run: bool  # task metrics of a run, whose training state is in memory, too
    total: float
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
    """Raise Refused if a run that computes task metrics has no room for them."""
    if planned.is_of_run and not planned.fits:
        raise Refused(
            f'decoding for infer_eval.every_steps needs {planned.total / memory.GIB:.1f} of '
            f'{planned.limit / memory.GIB:.1f} GiB of memory: use more of mesh.model, or smaller batches'
        )


def specs_of(arguments):
    """Return the specs of a tree of shapes."""
    return jax.tree.map(lambda x: x.sharding.spec, arguments)


def plan_decoding(config: ConfigDict, spec: train.StepSpec) -> DecodingStep:
    """Return a step of decoding, which is compiled if parameters and cache fit."""
    mesh = spec.mesh
    merge = functools.partial(model.merge_adapters, spec.model_config)
    params = jax.eval_shape(merge, spec.state_shapes.params)
    t5 = infer.T5(model.without_adapters(spec.model_config), params, mesh)
    decoding = decoding_of(config.decode)
    is_of_run = config.infer_eval.every_steps > 0
    batch_size = config.infer_eval.batch_size if is_of_run else config.decode.batch_size
    step, arguments = infer.decoding_step(t5, decoding, batch_size, config.data.lengths.inputs)

    # The kernels that a CPU has as columns for decoding are in memory as they are, too.
    step_params, tokens_r, cache = arguments
    columns = {path: x for path, x in step_params.items() if isinstance(x, kernels.Columns)}
    specs = model.specs_in_use(t5.config, model.shapes(t5.config))
    parameter_bytes = memory.bytes_on_device(mesh, params, specs)
    parameter_bytes += memory.bytes_on_device(mesh, columns, specs_of(columns))
    cache_bytes = memory.bytes_on_device(mesh, cache, specs_of(cache))
    num_bytes = parameter_bytes + cache_bytes
    if is_of_run:
        shapes = spec.state_shapes
        state_specs = spec.state_specs
        if mesh.shape['fsdp'] == 1 and not spec.model_config.lora_rank:
            shapes = shapes._replace(params={})  # they are those of the step
            state_specs = state_specs._replace(params={})
        num_bytes += memory.bytes_on_device(mesh, shapes, state_specs)
    is_on_cpu = kernels.is_on_cpu(mesh.abstract_mesh)
    num_sharing = len(mesh.local_devices) if is_on_cpu else 1  # one memory
    num_rows = len(tokens_r) // decoding.num_decodes
    length = cache.mask_b11M.shape[-1]
    room = cache.writers_gnM.shape[-1]
    planned = DecodingStep(
        size=f'{num_rows} inputs of {length} tokens, {decoding.num_decodes} answer(s) of {room} tokens each,',
        is_of_run=is_of_run,
        total=num_bytes * num_sharing,
        limit=memory.memory_limit(mesh),
        parameters=parameter_bytes,
        cache=cache_bytes,
        step=None,
    )
    if not planned.fits:
        return planned
    try:
        compiled = step.lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        return planned._replace(total=memory.bytes_of_refusal(error))
    analysis = compiled.memory_analysis()
    assert analysis is not None
    num_bytes += analysis.temp_size_in_bytes
    num_bytes += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return planned._replace(total=num_bytes * num_sharing, step=compiled)
