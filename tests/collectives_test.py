"""Without any one of its collectives, a program is refused when it is traced, or a test of its numbers fails.

A collective is taken out by the loader of its file: the call becomes its first argument. TAKEN_OUT in the environment
of a process, such as "loss.py 1", takes out the second collective of loss.py.
"""

import ast
import builtins
import importlib.machinery
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = [
    'model.py',
    'loss.py',
    'partition.py',
    'kernels.py',
    'train.py',
    'validation.py',
    'decode.py',
]
FILES += sorted(f'families/{file.name}' for file in ROOT.glob('families/*.py'))
COLLECTIVES = {'psum', 'pmax', 'pmin', 'pcast', 'all_gather', 'psum_scatter', 'all_to_all'}
COLLECTIVES |= {'ppermute', 'pvary', 'pmean', 'reduce_scatter', 'pshuffle', 'pbroadcast'}
COUNT = re.compile(r'1|n|size|len\(\w+\)|\w+\.size|\w+\.shape\[-?\d\]')  # sums of the same number
# What tracing accepts, and the test whose numbers show it.
NUMBERS = [
    ('loss.py', "lax.pmax(x.max(axis=-1), 'model')", 'decode_test.py::test_the_lowest_id_wins_among_equals'),
    ('decode.py', "lax.pmax(probs_rv.max(axis=1, keepdims=True), 'model')", 'decode_test.py::test_what_is_kept_of_a_split_vocabulary'),
    ('families/switch.py', 'partition.psum(confidence, partition.BATCH_AXES)', 'families/switch_test.py::test_the_routers_confidence_is_that_of_all_tokens'),
    ('families/switch.py', "lax.pcast(x_bTD, 'model', to='varying')", 'families/switch_test.py::test_gates_share_a_sum_of_gradients'),
    ('families/switch.py', "lax.all_to_all(y_ePD, 'fsdp', 1, 0, tiled=True)", 'families/switch_test.py::test_inference_on_many_devices[fsdp]'),
]  # fmt: skip


def collectives_of(tree):
    """Return the calls of collectives in a file, in its order."""
    calls = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split('.')[-1] in COLLECTIVES:
            if not COUNT.fullmatch(ast.unparse(node.args[0])):
                calls.append(node)
    return sorted(calls, key=lambda node: (node.lineno, node.col_offset))


def all_collectives():
    """Return {'FILE NUMBER': code}."""
    found = {}
    for file in FILES:
        for i, call in enumerate(collectives_of(ast.parse((ROOT / file).read_text()))):
            found[f'{file} {i}'] = ast.unparse(call)
    return found


# In a process with a collective taken out.


def take_out(name):
    """Load the file of a collective without it from now on. Return a list, which grows when a call is left out."""
    file, number = name.split()
    reached = []
    load = importlib.machinery.SourceFileLoader.get_code

    def first_argument(x, *others, **settings):
        reached.append(name)
        return x

    def get_code(loader, fullname):
        if loader.path != str(ROOT / file):
            return load(loader, fullname)
        tree = ast.parse((ROOT / file).read_text())
        call = collectives_of(tree)[int(number)]
        call.func = ast.copy_location(ast.Name('first_argument', ast.Load()), call.func)
        return compile(tree, loader.path, 'exec')

    builtins.first_argument = first_argument
    importlib.machinery.SourceFileLoader.get_code = get_code
    return reached


if 'TAKEN_OUT' in os.environ:
    take_out(os.environ['TAKEN_OUT'])


def programs(file):
    """Yield functions that trace a step, an evaluation and decoding, on 2 x 2 x 2 devices."""
    import functools

    import numpy as np
    from small_models import random_batch, random_params, run_config, sharded

    import prepare
    import train
    import validation
    from answers import programs
    from answers.options import Decoding
    from vocabulary import ByteVocabulary

    models = [('', {})]
    models += [('switch', {'split_experts': axis, 'sparse_step': 1}) for axis in ('model', 'fsdp')]
    models.append(('t5gemma', {'num_kv_heads': 1}))  # fewer heads of keys than devices
    if file.startswith('families/'):
        models.reverse()
    decodings = [
        Decoding(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1, return_scores=True),
        Decoding(beam_size=2),
    ]
    for module, options in models:
        config = run_config(2, 2, 2, emb_dim=16, mlp_dim=32, module=module)
        config.model.options.update(options)
        spec = prepare.make_spec(config)
        yield functools.partial(train.lower_step, spec)
        batch = random_batch(0)
        params = random_params(spec.model_config)
        sums = validation.make_sums(
            spec.model_config, spec.mesh, spec.loss_config, (7,), num_microbatches=1
        )
        yield functools.partial(sums.lower, params, batch)

        rows = batch['encoder_input_tokens'][:, 0]
        prompt_bT = np.zeros((8, 8), np.int32)
        asked = {'inputs_bM': batch['encoder_input_tokens'], 'prompt_bT': prompt_bT}
        asked |= {'lengths_b': 0 * rows + 8, 'example_b': rows, 'seed_b': rows}
        asked['temperature_b'] = np.ones(8, np.float32)
        for decoding in decodings:
            f = sharded(
                functools.partial(
                    programs.answers, spec.model_config, decoding, ByteVocabulary().ends
                ),
                spec.model_config,
                spec.mesh,
            )
            yield functools.partial(f.lower, params, asked)


def how_tracing_ends(name):
    """Return the error of the first program that is refused without a collective; '' if none is."""
    for module in list(sys.modules.values()):
        file = pathlib.Path(getattr(module, '__file__', None) or '/')
        if file.is_relative_to(ROOT) and module.__name__ not in ('__main__', 'conftest'):
            del sys.modules[module.__name__]
    load = importlib.machinery.SourceFileLoader.get_code
    reached = take_out(name)
    try:
        for trace in programs(name.split()[0]):
            trace()
    except Exception as error:
        return f'{type(error).__name__}: {error}'
    finally:
        importlib.machinery.SourceFileLoader.get_code = load
    assert reached, f'no program comes to {name}'
    return ''


if __name__ == '__main__':
    import conftest  # noqa: F401  sets the environment before JAX starts

    for collective in sys.argv[1:]:
        print(json.dumps([collective, how_tracing_ends(collective)]), flush=True)
    sys.exit()


# The tests.


@pytest.mark.slow
def test_every_collective_is_missed():
    names = all_collectives()
    done = subprocess.run(
        [sys.executable, __file__, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ends = dict(json.loads(line) for line in done.stdout.splitlines())
    accepted = {(name.split()[0], names[name]) for name in names if not ends[name]}
    assert accepted == {(file, code) for file, code, _ in NUMBERS}
    for name, end in ends.items():
        if name.startswith(('model.py', 'loss.py')) and 'psum' in names[name]:
            assert 'differs between the devices of' in end, end


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize('file, code, test', NUMBERS)
def test_its_numbers_are_wrong(file, code, test):
    [name] = [x for x, call in all_collectives().items() if (x.split()[0], call) == (file, code)]
    command = [sys.executable, '-m', 'pytest', '-x', '-n', '0', '-m', '', '-p', 'collectives_test']
    environment = os.environ | {'TAKEN_OUT': name, 'PYTHONPATH': str(ROOT / 'tests')}
    done = subprocess.run(
        [*command, f'tests/{test}'], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and 'AssertionError' in done.stdout, done.stdout
