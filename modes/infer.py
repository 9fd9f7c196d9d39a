"""`--mode=infer`: predict, score or encode a task's split or a file, or answer one text.

Predictions and scores are JSON Lines in T5X's form, in the order of the examples:

    infer.json                      the settings; results of others are refused
    TASK-MODE.jsonl                 the results
    TASK-MODE.jsonl-SSSSS-of-NNNNN  those of a shard: of shard i of n every n-th example

Encodings (`--encode`) are the encoder's outputs, float32; of the checkpoint no decoder is read.
Files are numbered through the shards, one shard after the other:

    TASK-encodings-CCCCC-of-NNNNN.safetensors
        indices     int64 [n]: the number of each example in the file or split, from 0
        embeddings  --pool=mean: [n, emb_dim], the mean of an example's tokens, EOS included, as in
                    Sentence-T5, without its projection and normalization
                    --pool=none: [sum of lengths, emb_dim], the tokens of one example after the
                    other, EOS included, without padding
        lengths     --pool=none alone: int32 [n], the number of tokens of each example

A file has its name only once it is complete: then the same command does not make it again.
Source: T5X t5x/infer.py. Differs from T5X: an integer is written as one, not as 0.0.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import safetensors.numpy
import tqdm
from absl import logging
from absl.flags import FlagValues
from ml_collections import ConfigDict

import formats.open
import infer
import partition
import paths
import user_code
from configs import check
from decode import Decoding
from formats import own_model, own_options
from messages import Refused, first_ten
from model import T5Config
from modes import command_line, infer_input, process
from modes.of_checkpoint import changes_model, check_rows, settings_of, vocabulary_of_checkpoint
from run import checks, results
from run.agreement import check_alike
from run.console import describe_trimming
from run.decoding import decoding_of
from run.examples import PRETOKENIZED, Example, check_split, read_split
from run.lock import lock
from vocabulary import Vocabulary

SETTINGS = 'infer.json'
# How many examples share a file of encodings, which is made in memory: by --pool.
EXAMPLES_PER_FILE = {'none': 256, 'mean': infer.EXAMPLES_PER_CHUNK}

MODEL_PART = {False: 'whole', True: 'encoder'}  # by --encode


def main(config: ConfigDict | None, flags: FlagValues, signals: process.Signals) -> int:
    part, num_parts = command_line.parse_shard(flags.shard)
    values = command_line.values_of_mode() | {'shard': part, 'num_shards': num_parts}
    signals.advice = 'the same command makes the unfinished file again'
    job = prepare(Request(**values), config, command_line.changes())
    signals.begin_work()
    if job.is_prompt:
        t5 = load(job)
        signals.raise_interrupts()
        answer_typed_lines(job, t5)
        return 0
    process.print_lines(infer_all(job), sys.stderr)
    return 0


class Request(NamedTuple):
    """What the flags ask for, beside the config."""

    checkpoint: str
    step: str = ''  # '' for the newest of a run
    output_dir: str = ''  # '' writes to standard output
    input: str = ''  # a file; '' takes the split of a task
    text: str | None = None  # instead of both
    split: str = ''  # 'test' if not given
    score: bool = False
    encode: bool = False
    pool: str = 'none'  # with `encode`; 'mean' for one vector of each example
    fields: tuple[str, ...] = ()  # to write beside the texts; 'all' for all
    output_ids: bool = False
    trim: bool = False
    shard: int = 1
    num_shards: int = 1


class Part(NamedTuple):
    """The examples of one task or file that are in the shard."""

    name: str
    examples: list[infer.Example]
    written: list[dict]  # the fields of each example that its line has
    num_examples: int  # all shards together
    num_trimmed: int
    digest: str  # a hash of what is predicted and written, of all shards


class Job(NamedTuple):
    """Everything that `infer` needs, checked."""

    request: Request
    config: ConfigDict
    directory: paths.AnyPath  # the checkpoint's
    model_config: T5Config
    vocabulary: Vocabulary
    decoding: Decoding
    parts: list[Part]  # none for a text, a prompt and lines
    messages: list[str]  # on examples that were cut or left out
    text_ids: infer.Ids
    lines: infer_input.FileExamples | None  # standard input: each line is answered when it comes
    is_prompt: bool

    @property
    def mode(self) -> str:
        """T5X's name of what is computed, which is in the names of files."""
        if self.request.score:
            return 'score'
        if self.request.encode:
            return f'encode_{self.request.pool}'
        if self.config.decode.return_scores:
            return 'predict_with_aux'
        return 'predict'


# From the request to a job.


def prepare(request: Request, config: ConfigDict | None, changes: Mapping) -> Job:
    """Check everything that can be checked before the parameters are read. Writes nothing.

    `config` is that of --config. Without it, use the settings of the run that saved the checkpoint,
    else the defaults, with `changes`, {'data.task': value}. Raises Refused and OSError.
    """
    check_request(request)
    is_prompt = asks_for_prompt(request, changes)
    path = request.checkpoint
    model_part = MODEL_PART[request.encode]
    if config is not None:
        opened = formats.open.open_model(
            path, own_model.load(config.model), request.step, model_part
        )
    else:
        opened = formats.open.open_model(path, None, request.step, model_part)
        config = settings_of(opened.directory, changes)
        if request.input:  # the run's describe its own files
            config.data.kind = changes.get('data.kind', '')
            config.data.delimiter = changes.get('data.delimiter', '')
        if changes_model(opened.directory, changes):
            if 'model.module' not in changes:
                config.model.module = opened.config.module  # the current path of its file
            model_config = own_model.load(config.model)
            opened = formats.open.open_model(opened.directory, model_config, '', model_part)
    check.check(config)
    vocabulary = vocabulary_of_checkpoint(opened.directory, config.data)
    vocab_size = opened.config.vocab_size
    check_rows(vocabulary, opened.directory, vocab_size)
    opened.config.family.check_mesh(opened.config, partition.make_mesh(**config.mesh))
    decoding = decoding_of(config.decode, vocabulary)
    infer.words_of(decoding, vocabulary, vocab_size)
    if config.decode.top_k > vocab_size:
        raise Refused(f'decode.top_k={config.decode.top_k}: must be at most {vocab_size}')
    parts: list[Part] = []
    messages: list[str] = []
    text_ids: infer.Ids = ()
    arriving = None
    if is_prompt:
        pass
    elif request.text is not None:
        length = config.data.lengths.inputs
        text_ids = infer_input.encode_text(request.text, vocabulary, length, request.trim)
    elif request.input:
        lines = infer_input.FileExamples(
            request.input,
            infer_input.with_templates(config.data),
            vocabulary,
            needs_targets=request.score,
            trim=request.trim,
            fields=request.fields,
        )
        if request.input == infer_input.STANDARD_INPUT and not request.output_dir:
            arriving = lines
        else:
            parts.append(read(lines.name, lines, request))
    else:
        for task in infer_input.open_tasks(config.data, vocabulary):
            parts.append(read(task.name, read_split(task, request.split or 'test'), request))
            for fault in task.source.faults()[0]:
                messages.append(f'Left out: {fault}')
    for part in parts:
        check_alike(f'the examples of {part.name}', part.digest.encode())
        messages += describe_trimming({part.name: [part.num_examples, part.num_trimmed]})
    job = Job(
        request=request,
        config=config,
        directory=opened.directory,
        model_config=opened.config,
        vocabulary=vocabulary,
        decoding=decoding,
        parts=parts,
        messages=messages,
        text_ids=text_ids,
        lines=arriving,
        is_prompt=is_prompt,
    )
    if request.output_dir:
        check_output(job)
    if 'mlp_activations' in opened.note:  # `load`, which is given the config, says all else
        logging.warning(opened.note)
    return job


def check_request(request: Request) -> None:
    """Raise Refused for flags that do not fit together."""
    reads_stdin = request.input == infer_input.STANDARD_INPUT
    if not request.checkpoint:
        raise Refused('--mode=infer needs a model: name it with --checkpoint=PATH')
    if request.text is not None and not request.text.strip():
        raise Refused("--text='': write a text")
    for flag, excluded in (
        ('text', ('output_dir', 'input', 'encode', 'score', 'fields', 'output_ids', 'split')),
        ('input', ('split',)),
        ('encode', ('score', 'fields', 'output_ids')),
    ):
        for name in excluded:
            if getattr(request, flag) and getattr(request, name):
                raise Refused(f'--{name} is not for --{flag}: leave one of them out')
    shard = f'--shard={request.shard}/{request.num_shards}'
    for flag, is_given in (('--encode', request.encode), (shard, request.num_shards > 1)):
        if is_given and not request.output_dir:
            raise Refused(f'{flag} needs a folder for its results: name --output_dir')
    if request.pool != 'none' and not request.encode:
        raise Refused(f'--pool={request.pool} is of encodings: add --encode, or leave it out')
    check_split(request.split or 'test')
    if reads_stdin and (request.num_shards > 1 or jax.process_count() > 1):
        raise Refused(f'--input=- in several processes, {shard}: only one can read it: name a file')


def asks_for_prompt(request: Request, changes: Mapping) -> bool:
    """Return whether nothing is named that could be answered, and somebody is there to type it."""
    named = bool(request.input or request.split or request.output_dir or request.fields)
    named |= request.text is not None or request.score or request.encode or request.output_ids
    if named or 'data.task' in changes or jax.process_count() > 1 or sys.stdin is None:
        return False
    return sys.stdin.isatty() and sys.stdout.isatty()


def read(name: str, examples: Iterable[Example], request: Request, first: int = 0) -> Part:
    """Read all examples: what is wrong with one of them is found before anything is computed.

    `first`: the number of the first one.
    """
    part = Part(name, examples=[], written=[], num_examples=0, num_trimmed=0, digest='')
    digest = hashlib.blake2b(digest_size=16)
    num_examples = 0
    num_trimmed = 0
    for number, example in enumerate(examples, start=first):
        written = selected(example.features(), request.fields)
        targets = example.targets
        digest.update(example.inputs.tobytes())
        if request.score and targets is not None:
            digest.update(b' targets ' + targets.tobytes())
        if targets is None or request.encode:
            targets = np.zeros(0, np.int32)
        if number % request.num_shards == request.shard - 1:
            part.examples.append(infer.Example(example.inputs, targets, number))
            part.written.append(written)
        num_examples += 1
        num_trimmed += example.is_trimmed
        digest.update(json.dumps(written, default=results.json_default).encode())
    if num_examples == 0:
        raise Refused(f'{name} has no example: name another split or file')
    return part._replace(
        num_examples=num_examples, num_trimmed=num_trimmed, digest=digest.hexdigest()
    )


# From a job to lines.


def infer_all(job: Job) -> list[str]:
    """Do a job: write its results, or print them. Return what the first process says at the end.

    All processes compute, each some rows of a batch; the first one writes and prints.
    """
    request = job.request
    messages = list(job.messages)
    if request.text is not None:
        answer_text(job, load(job), infer.Example(job.text_ids))
    elif request.output_dir:
        messages += write_files(job)
    elif job.lines is not None:
        messages += answer_arriving_lines(job.lines, job, load(job))
    else:
        t5 = load(job)
        for part in job.parts:
            with progress_bar(part.name, len(part.examples)) as bar:
                print_now(lines_of(job, t5, part, bar.update))
    if jax.process_index() > 0:
        messages.clear()
    return messages


def answer_arriving_lines(lines: infer_input.FileExamples, job: Job, t5: infer.T5) -> Iterator[str]:
    """Answer the lines of standard input as they come. Yield what to say of them at the end."""
    num_examples = 0
    num_trimmed = 0
    with tqdm.tqdm(unit=' examples', desc=lines.name, mininterval=30.0) as bar:
        for group in infer_input.as_they_come(lines, infer.EXAMPLES_PER_CHUNK):
            part = read(lines.name, group, job.request, first=num_examples)
            print_now(lines_of(job, t5, part, bar.update))
            num_examples += part.num_examples
            num_trimmed += part.num_trimmed
    yield from describe_trimming({lines.name: [num_examples, num_trimmed]})


def answer_typed_lines(job: Job, t5: infer.T5) -> None:
    """Answer the lines that are typed at a terminal, one after the other, until Ctrl-D.

    Ctrl-C drops the line that is typed, or the answer once its compiled program has ended.
    """
    say = functools.partial(print, file=sys.stderr, flush=True)
    say('Type a text and press Enter; Ctrl-C drops a line or an answer, Ctrl-D ends.')
    for number in itertools.count():
        try:
            text = process.read_line('> ')
            if text.strip():
                ids = infer_input.encode_text(
                    text,
                    job.vocabulary,
                    job.config.data.lengths.inputs,
                    job.request.trim,
                    title='this line',
                )
                answer_text(job, t5, infer.Example(ids, number=number))
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)
        except UnicodeDecodeError:
            say('this line is not UTF-8: write it in UTF-8')
        except Refused as error:
            say(error)


def answer_text(job: Job, t5: infer.T5, example: infer.Example) -> None:
    """Print the answers to one text."""
    [answer] = infer.answer_batch(t5, job.decoding, [example])
    if jax.process_index() > 0:
        return
    for i, text in enumerate(answer.texts):
        if answer.scores:
            print(f'{answer.scores[i]:.6g} nats:', file=sys.stderr, flush=True)
        with process.writing(sys.stdout):
            print(text, flush=True)


def print_now(lines: Iterator[str]) -> None:
    """Print lines from the first process. All compute them."""
    for line in lines:
        if jax.process_index() == 0:
            with process.writing(sys.stdout):
                print(line, end='', flush=True)


def load(job: Job) -> infer.T5:
    """Read the parameters of the checkpoint."""
    with process.returning_large_blocks():
        t5 = infer.load(
            job.directory,
            config=job.model_config,
            mesh=partition.make_mesh(**job.config.mesh),
            dtype=job.config.restore.dtype,
            part=MODEL_PART[job.request.encode],
        )
    t5.vocabulary = job.vocabulary
    return t5


def progress_bar(name: str, num_examples: int) -> tqdm.tqdm:
    """Return a bar on stderr."""
    return tqdm.tqdm(
        total=num_examples,
        unit=' examples',
        desc=name,
        mininterval=1.0 if sys.stderr.isatty() else 30.0,
        disable=jax.process_index() > 0,
    )


def lines_of(job: Job, t5: infer.T5, part: Part, progress: Callable[[int], None]) -> Iterator[str]:
    """Yield the line of each example."""
    config = job.config.decode
    if job.request.score:

        def score(batch: Sequence[infer.Example], num_rows: int) -> Iterator[np.ndarray]:
            choices = [example._replace(targets=[example.targets]) for example in batch]
            return infer.score_batch(t5, choices, num_rows)

        scores = infer.in_batches(score, part.examples, config.batch_size, progress)
        for written, [nats] in zip(part.written, scores, strict=True):
            yield results.as_line({'inputs': written, 'score': float(nats)})
        return
    predict = functools.partial(infer.answer_batch, t5, job.decoding)
    answers = infer.in_batches(predict, part.examples, config.batch_size, progress)
    for written, answer in zip(part.written, answers, strict=True):
        line: dict = {'inputs': written, 'prediction': one_or_all(answer.texts, config.num_return)}
        if job.request.output_ids:
            ids = [list(itertools.takewhile(bool, tokens)) for tokens in answer.tokens]  # as T5X
            line['prediction_tokens'] = one_or_all(ids, config.num_return)
        if config.return_scores:
            line['aux'] = {'scores': one_or_all(answer.scores, config.num_return)}
        yield results.as_line(line)


def one_or_all(values: list, num_return: int):
    """Return the one value that is asked for, or the list of several: the best answer is the first."""
    return values[0] if num_return == 1 else values


def selected(fields: Mapping, names: Sequence[str]) -> dict:
    """Return the fields of an example that its line has: those in `names`, by default the texts."""
    if tuple(names) == ('all',):
        return dict(fields)
    for name in names:
        if name not in fields:
            known = first_ten([repr(field) for field in fields])
            raise Refused(f'--fields names {name!r}: the fields of an example are {known}')
    found = {}
    for name, value in fields.items():
        feature = name.removesuffix(PRETOKENIZED)
        if name in names or (feature != name and (not names or feature in names)):
            found[name] = value
    return found


def encodings_of(
    job: Job, t5: infer.T5, examples: Sequence[infer.Example], progress: Callable[[int], None]
) -> dict[str, np.ndarray]:
    """Return the arrays of a file, as the head of this file has them."""
    pool = job.request.pool

    def encode(batch: Sequence[infer.Example], num_rows: int) -> Iterator[np.ndarray]:
        for example, outputs_MD in zip(batch, infer.encode_batch(t5, batch, num_rows), strict=True):
            if pool == 'mean':
                yield outputs_MD[np.asarray(example.inputs) > 0].mean(axis=0)
            else:
                yield outputs_MD

    encoded = list(infer.in_batches(encode, examples, job.config.decode.batch_size, progress))
    arrays = {'indices': np.array([example.number for example in examples], np.int64)}
    if pool != 'none':
        return arrays | {'embeddings': np.stack(encoded)}
    arrays['lengths'] = np.array([len(of_example) for of_example in encoded], np.int32)
    return arrays | {'embeddings': np.concatenate(encoded)}


# Files.


class Output(NamedTuple):
    """A file of the shard's results."""

    path: Path
    part: Part
    examples: Sequence[infer.Example]  # of encodings, some of the part's


def outputs(job: Job) -> Iterator[Output]:
    """Yield the files that the shard writes."""
    request = job.request
    folder = paths.disk_path(request.output_dir)
    for part in job.parts:
        task = results.file_name(part.name)
        if not request.encode:
            name = f'{task}-{job.mode}.jsonl'
            if request.num_shards > 1:
                name += f'-{request.shard - 1:05}-of-{request.num_shards:05}'
            yield Output(folder / name, part, part.examples)
            continue
        size = EXAMPLES_PER_FILE[request.pool]
        files_before = [0]  # each shard, and after the last one
        for shard in range(request.num_shards):
            num_examples = len(range(shard, part.num_examples, request.num_shards))
            files_before.append(files_before[-1] + math.ceil(num_examples / size))
        for start in range(0, len(part.examples), size):
            number = files_before[request.shard - 1] + start // size
            name = f'{task}-encodings-{number:05}-of-{files_before[-1]:05}.safetensors'
            yield Output(folder / name, part, part.examples[start : start + size])


def write_files(job: Job) -> list[str]:
    """Write the files of the shard that are not there. Return what to say of them."""
    request = job.request
    folder = paths.disk_path(request.output_dir)
    is_first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        if is_first:
            stack.enter_context(paths.naming(folder))
            folder.mkdir(parents=True, exist_ok=True)
            shard = f'{request.shard}/{request.num_shards}'
            lock_file = folder / f'.lock-{request.shard - 1:05}-of-{request.num_shards:05}'
            remedy = 'wait for it, or give each process its own --shard=i/n'
            stack.enter_context(lock(lock_file, f'shard {shard} of {folder}', remedy))
            check_output(job)  # another shard may have begun
            if not (folder / SETTINGS).exists():
                content = json.dumps(settings_as_json(job), indent=1).encode()
                paths.replace_file(folder / SETTINGS, content, shard.replace('/', '-of-'))
        missing = []
        for output in outputs(job):
            is_there = partition.from_first_process(np.array(output.path.exists()))
            if not is_there:
                missing.append(output)
        if missing:
            write_missing(job, missing)
        if is_first:
            lock_file.unlink(missing_ok=True)
    if request.encode:
        return [f'The encodings of {part.name} are in {folder}' for part in job.parts]
    return [f'The results are in {output.path}' for output in outputs(job)]


def write_missing(job: Job, missing: Sequence[Output]) -> None:
    """Compute files in all processes, and write them in the first one."""
    t5 = load(job)
    is_first = jax.process_index() == 0
    num_examples = sum(len(output.examples) for output in missing)
    with progress_bar(missing[0].part.name, num_examples) as bar:
        for output in missing:
            bar.set_description(output.part.name, refresh=False)
            if job.request.encode:
                arrays = encodings_of(job, t5, output.examples, bar.update)
                if is_first:
                    paths.replace_file(output.path, safetensors.numpy.save(arrays))
                continue
            with contextlib.ExitStack() as stack:
                if is_first:
                    file = stack.enter_context(paths.replacing(output.path))
                for line in lines_of(job, t5, output.part, bar.update):
                    if is_first:
                        file.write(line.encode())


def check_output(job: Job) -> None:
    """Raise Refused for an output folder that holds results of other settings, or other files."""
    folder = paths.disk_path(job.request.output_dir)
    paths.check_new(folder)
    if jax.process_index() > 0:  # its copy of the model may have other times
        return
    results.check_writable(folder)
    file = folder / SETTINGS
    changes = []
    if file.exists():
        changes = checks.changed_settings(paths.read_json(file), settings_as_json(job))
    else:
        for output in outputs(job):
            if output.path.exists():
                changes.append(f'{output.path.name} without {SETTINGS}')
    if changes:
        raise Refused(
            f'{folder} has other results ({first_ten(changes, "; ")}): name another folder'
        )


def settings_as_json(job: Job) -> dict:
    """Return everything that the results depend on."""
    request = job.request
    model_settings: dict = {'dtype': job.model_config.dtype}
    for name, content in own_model.files_of(job.model_config).items():
        model_settings[name] = digest_of(content)
    if job.model_config.options is not None:
        model_settings['options'] = own_options.as_dict(job.model_config.options)
    decode_settings = job.config.decode.to_dict()
    if job.config.decode.module:
        file = user_code.module_file('decode.module', job.config.decode.module)
        decode_settings['module'] = digest_of(file.read_bytes())
    return {
        'checkpoint': {
            'path': str(job.directory),
            'files': formats.open.identity(job.directory),
        },
        'vocabulary': job.vocabulary.hash,
        'model': model_settings,
        'restore': {'dtype': job.config.restore.dtype},
        'mode': job.mode,
        'decode': json.loads(json.dumps(decode_settings)),  # lists for tuples
        'fields': list(request.fields),
        'output_ids': request.output_ids,
        'num_shards': request.num_shards,
        'examples': {part.name: part.digest for part in job.parts},
    }


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
