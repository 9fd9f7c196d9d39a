"""`--mode=plan`: what a step of decoding takes of the memory, and what it exchanges."""

import pytest
from runs import small_config

from messages import Refused
from modes import plan_decoding
from prepare import make_spec
from run import memory


def planned_with(every_steps, fsdp=2):
    """Return the spec of a small model on 4 * fsdp devices, and its step of decoding."""
    config = small_config('', data_axis=2, model_axis=2)
    config.mesh.fsdp = fsdp
    config.infer_eval.every_steps = every_steps
    config.infer_eval.batch_size = 5
    config.decode.batch_size = 5
    config.decode.max_length = 65
    config.decode.beam_size = 2
    spec = make_spec(config)
    return spec, plan_decoding.plan_decoding(config, spec)


def test_a_step_of_decoding():
    """Parameters are gathered over 'fsdp'; sums over 'model' are those of heads and MLPs."""
    spec, planned = planned_with(every_steps=0)
    whole = 0
    for path, x in spec.state_shapes.params.items():
        whole += x.size * 4 // (2 if 'model' in spec.state_specs.params[path] else 1)
    # A CPU has transposed kernels, too: of attention, of the MLP, of the logits.
    transposed = 6 * 16 * 16 + 3 * 16 * 32 + 16 * 384
    assert planned.parameters == whole + transposed * 4 // 2
    # A device has two inputs, one of two heads of 8 numbers, 128 tokens of each of two beams.
    keys_and_values = 2 * 2 * 8 * (2 * 128 + 32) * 4
    mask_writers_length = 2 * 32 + 2 * 2 * 128 * 4 + 4
    assert planned.cache == keys_and_values + mask_writers_length
    assert planned.fits
    assert planned.total > 8 * (planned.parameters + planned.cache)
    lines = list(plan_decoding.lines_of(planned, spec))
    # 5 rows become 8 on the 4 devices of 'data' and 'fsdp', 65 tokens get room for 128.
    assert '8 inputs of 32 tokens, 2 answer(s) of 128 tokens each, fits: ' in lines[0]
    # The embedding, two attentions and the MLP.
    assert lines[1].endswith(': all-reduce over model, 4 arrays, 0.00 MB')


@pytest.mark.parametrize('fsdp', [1, 2])
def test_a_run_that_decodes_keeps_its_state(fsdp):
    """Its parameters are in memory twice only where they are gathered."""
    spec, of_run = planned_with(every_steps=1, fsdp=fsdp)
    _, alone = planned_with(every_steps=0, fsdp=fsdp)
    shapes, specs = spec.state_shapes, spec.state_specs
    state = memory.bytes_on_device(spec.mesh, shapes.opt_state, specs.opt_state) + 4
    if fsdp > 1:
        state += memory.bytes_on_device(spec.mesh, shapes.params, specs.params)
    assert of_run.total == alone.total + spec.mesh.size * state


@pytest.mark.parametrize('every_steps', [0, 1])
def test_what_does_not_fit_is_refused_for_a_run_that_decodes(every_steps, monkeypatch):
    monkeypatch.setattr(memory, 'memory_limit', lambda mesh: 1000)
    spec, planned = planned_with(every_steps)
    assert planned.step is None
    assert 'does NOT fit' in ''.join(plan_decoding.lines_of(planned, spec))
    if every_steps:
        with pytest.raises(Refused, match='infer_eval.every_steps'):
            plan_decoding.check_fits(planned)
    else:
        plan_decoding.check_fits(planned)
