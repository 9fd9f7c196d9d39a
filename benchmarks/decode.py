"""Our generate against transformers' and CTranslate2's, from one checkpoint on two cores.

    pip install -e '.[peers]' ctranslate2
    python benchmarks/decode.py [--rounds=3] [--calls=3]

Writes random float32 weights with the shapes of T5 1.1 small. The contenders take turns, each in a new
process: 8 inputs of 128 tokens, 64 tokens of output, greedily and with 4 beams. The logits of padding
and EOS are always 0, never among the best, so that all take 64 steps. Each process makes one call that
is not counted (ours compiles), then `calls` that are. CTranslate2 computes in float32 and in int8.
Ours is measured on a mesh of one device per core, with heads, MLP and vocabulary split, also with
parameters rounded to bfloat16, and on one device for both cores.

Prints a row per contender: output tokens per second, the median over all calls and the range; the
ratio to transformers; and the share of tokens that equal transformers', position by position. Random
weights have near ties: with a trained model, more tokens are equal. Then prints our limits: the time
until the first token, which the encoder takes; the time of a step; and the time to read the decoder's
weights once at the speed at which both cores read memory.

The goal: at least 2 times transformers greedily, at least 1.5 times with 4 beams.
"""

import functools
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

# Before the folder of this file, so that `import decode` imports the measured module.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
import turns
from absl import app, flags

import infer
import partition

FLAGS = flags.FLAGS
flags.DEFINE_integer('rounds', 3, 'How often each contender is measured.', lower_bound=1)
flags.DEFINE_integer('calls', 3, 'Calls per round that are measured.', lower_bound=1)

NUM_CORES = 2
BATCH_SIZE = 8
INPUT_LENGTH = 128
OUTPUT_LENGTH = 64
BEAMS = (1, 4)
VOCAB_SIZE = 32128
EOS_ID = 1
CONFIG = {  # as transformers names it
    'vocab_size': VOCAB_SIZE,
    'd_model': 512,
    'd_kv': 64,
    'd_ff': 1024,
    'num_layers': 8,
    'num_decoder_layers': 8,
    'num_heads': 6,
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
    'decoder_start_token_id': 0,
    'pad_token_id': 0,
    'eos_token_id': EOS_ID,
}

# (inputs, beams) -> answers, lists of ids
Generate = Callable[[np.ndarray, int], list[list[int]]]


class Measurement(NamedTuple):
    """The figures of a contender in one round."""

    seconds: list[float]  # per call
    answers: list[list[int]]


class Limits(NamedTuple):
    """The bounds of our rate."""

    first_seconds: dict[int, float]  # {beams: seconds of a call for one token}
    weights_bytes: int  # read by a step
    bytes_per_second: float  # while both cores read memory


def main(argv: list[str]) -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    if turns.print_conditions('jax', 'torch', 'transformers', 'ctranslate2'):
        sys.exit(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        turns.in_new_process(write_model, folder)
        limits = turns.in_new_process(measure_limits, folder)
        for beams in BEAMS:
            contenders = {}
            for name, open_model in OPENERS.items():
                contenders[name] = functools.partial(measure_generate, open_model, beams)
            measurements = turns.take_turns(contenders, FLAGS.rounds, FLAGS.calls, folder)
            report(beams, measurements, limits)


def report(beams: int, measurements: Mapping[str, list[Measurement]], limits: Limits) -> None:
    """Print a row per contender, and our limits."""
    print(f'\n{beams} beams')
    turns.print_header('contender', 'tokens/s', 'x transformers', 'same tokens')
    seconds = {}
    for name, rounds in measurements.items():
        seconds[name] = [x for measurement in rounds for x in measurement.seconds]
    theirs = measurements['transformers'][0].answers
    for name, rounds in measurements.items():
        rates = [BATCH_SIZE * OUTPUT_LENGTH / x for x in seconds[name]]
        ratio = statistics.median(seconds['transformers']) / statistics.median(seconds[name])
        same = np.equal(rounds[0].answers, theirs).mean()
        turns.print_row(name, turns.spread(rates), f'{ratio:.2f}', f'{same:.1%}')
    first_seconds = limits.first_seconds[beams]
    step_seconds = (statistics.median(seconds['ours']) - first_seconds) / (OUTPUT_LENGTH - 1)
    reading_seconds = limits.weights_bytes / limits.bytes_per_second
    print(
        f'ours: {first_seconds * 1e3:.0f} ms until the first token, then {step_seconds * 1e3:.1f} ms a step; '
        f'reading the {limits.weights_bytes / 1e6:.0f} MB of weights takes {reading_seconds * 1e3:.1f} ms'
    )


def write_model(folder: Path) -> None:
    """Write a random model as transformers and as CTranslate2 read it."""
    import torch
    import transformers
    from ctranslate2.converters import transformers as converters

    class Tokenizer:
        """The tokenizer's interface that the converter needs: ids have names."""

        unk_token = 't2'
        eos_token = 't1'
        pad_token = 't0'
        bos_token = None

        def get_vocab(self) -> dict[str, int]:
            return {f't{i}': i for i in range(VOCAB_SIZE)}

        def convert_ids_to_tokens(self, i: int) -> str:
            return f't{i}'

    class Converter(converters.TransformersConverter):
        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            # This tells the converter whether to rescale logits; transformers 5 always sets True.
            model.config.tie_word_embeddings = False
            return model

        def load_tokenizer(self, *args: Any, **kwargs: Any) -> Tokenizer:
            return Tokenizer()

    torch.manual_seed(0)
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**CONFIG))
    with torch.no_grad():
        # transformers 5 ties them, whatever the config says.
        t5.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn(VOCAB_SIZE, CONFIG['d_model']))
        t5.lm_head.weight[: EOS_ID + 1] = 0.0
        t5.shared.weight *= 0.1  # so that answers depend on more than the newest token
    t5.save_pretrained(folder / 'transformers')
    Converter(str(folder / 'transformers')).convert(str(folder / 'ctranslate2'))


def load_ours(num_devices: int, dtype: str, folder: Path) -> infer.T5:
    """Load our model on `num_devices` devices of the CPU, before any other use of JAX in this process."""
    jax.config.update('jax_num_cpu_devices', num_devices)
    mesh = partition.make_mesh(data=1, model=num_devices)
    t5 = infer.load(folder / 'transformers', mesh=mesh, dtype=dtype)
    assert not t5.config.logits_via_embedding
    return t5


def open_ours(num_devices: int, dtype: str, folder: Path) -> Generate:
    t5 = load_ours(num_devices, dtype, folder)

    def generate(inputs: np.ndarray, beams: int) -> list[list[int]]:
        return t5.generate(inputs, beam_size=beams, max_length=OUTPUT_LENGTH)

    return generate


def open_transformers(folder: Path) -> Generate:
    import torch
    import transformers

    torch.set_num_threads(NUM_CORES)
    t5 = transformers.T5ForConditionalGeneration.from_pretrained(folder / 'transformers').eval()

    def generate(inputs: np.ndarray, beams: int) -> list[list[int]]:
        ids = torch.tensor(inputs)
        with torch.inference_mode():
            answers = t5.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=OUTPUT_LENGTH,
            )
        return answers[:, 1:].tolist()

    return generate


def open_ctranslate2(compute_type: str, folder: Path) -> Generate:
    import ctranslate2

    translator = ctranslate2.Translator(
        str(folder / 'ctranslate2'),
        device='cpu',
        compute_type=compute_type,
        inter_threads=1,
        intra_threads=NUM_CORES,
    )

    def generate(inputs: np.ndarray, beams: int) -> list[list[int]]:
        texts = [[f't{i}' for i in row] for row in inputs]
        answers = translator.translate_batch(
            texts, beam_size=beams, max_decoding_length=OUTPUT_LENGTH, max_input_length=0
        )
        return [[int(token[1:]) for token in answer.hypotheses[0]] for answer in answers]

    return generate


OPENERS = {
    'transformers': open_transformers,
    'ctranslate2': functools.partial(open_ctranslate2, 'float32'),
    'ctranslate2, int8': functools.partial(open_ctranslate2, 'int8'),
    'ours': functools.partial(open_ours, NUM_CORES, 'float32'),
    'ours, bfloat16': functools.partial(open_ours, NUM_CORES, 'bfloat16'),
    'ours, one device': functools.partial(open_ours, 1, 'float32'),
}


def random_inputs() -> np.ndarray:
    return np.random.default_rng(0).integers(2, VOCAB_SIZE, (BATCH_SIZE, INPUT_LENGTH))


def measure_generate(open_model: Callable, beams: int, num_calls: int, folder: Path) -> Measurement:
    """Measure the calls of one contender."""
    generate = open_model(folder)
    inputs = random_inputs()
    answers = generate(inputs, beams)
    assert all(len(answer) == OUTPUT_LENGTH for answer in answers)
    seconds = []
    for _ in range(num_calls):
        start = time.perf_counter()
        generate(inputs, beams)
        seconds.append(time.perf_counter() - start)
    return Measurement(seconds=seconds, answers=answers)


def measure_limits(folder: Path) -> Limits:
    """Measure the encoder and the memory."""
    t5 = load_ours(NUM_CORES, 'float32', folder)
    inputs = random_inputs()
    first_seconds = {}
    for beams in BEAMS:
        call = functools.partial(t5.generate, inputs, max_length=1, beam_size=beams)
        first_seconds[beams] = turns.fastest_seconds(call)
    weights_bytes = 0
    for path, x in t5.arrays.items():
        is_cross_key_or_value = re.search(r'encoder_decoder_attention/(key|value)', path)
        if path.startswith('decoder/') and not is_cross_key_or_value:
            weights_bytes += x.nbytes
    arrays = [np.ones(2**26, np.float32) for _ in range(NUM_CORES)]
    with futures.ThreadPoolExecutor(NUM_CORES) as pool:
        seconds = turns.fastest_seconds(lambda: list(pool.map(np.sum, arrays)))
    return Limits(
        first_seconds=first_seconds,
        weights_bytes=weights_bytes,
        bytes_per_second=sum(x.nbytes for x in arrays) / seconds,
    )


if __name__ == '__main__':
    app.run(main)
