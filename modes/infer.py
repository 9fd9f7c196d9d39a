"""`--mode=infer`: predict, score or encode a task's split or a file, or answer one text.

Predictions and scores are JSON Lines in T5X's form, in the order of the examples:

    infer.json                      the settings; results of other settings are refused
    TASK-MODE.jsonl                 the results
    TASK-MODE.jsonl-SSSSS-of-NNNNN  the results of shard i of n: every n-th example

Encodings (`--encode`) are the encoder's outputs, float32; the decoder is not read.
Files are numbered across the shards, one shard after the other:

    TASK-encodings-CCCCC-of-NNNNN.safetensors
        indices     int64 [n]: the number of each example in the file or split, from 0
        embeddings  --pool=mean: [n, width], the mean of an example's tokens, EOS included, after any
                    further modules of modules.json: see formats/sentence_transformers.py
                    --pool=none: [sum of lengths, emb_dim], the tokens of one example after the
                    other, EOS included, without padding
        lengths     only with --pool=none: int32 [n], the number of tokens of each example

A file gets its name once it is complete; the same command then skips it.
Source: T5X t5x/infer.py. Differs from T5X: an integer is written as such, not as 0.0.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy
import tqdm
from absl.flags import FlagValues
from ml_collections import ConfigDict

import formats.open
import infer
import partition
import paths
import user_code
from answers import batches
from formats import own_model, sentence_transformers
from messages import Refused, first_ten
from modes import command_line, infer_input, process
from modes.of_checkpoint import check_rows, settings_and_model, vocabulary_of_checkpoint
from randomness import digest
from run import checks, hub, results
from run.agreement import check_alike, from_first_process
from run.examples import PRETOKENIZED, RecordExample, check_split, read_split
from run.lock import lock
from run.task_metrics import decoding_of

SETTINGS = 'infer.json'
# The number of examples in a file of encodings, which is built in memory, by --pool.
EXAMPLES_PER_FILE = {'none': 256, 'mean': batches.EXAMPLES_PER_CHUNK}
MODEL_PART = {False: 'whole', True: 'encoder'}  # by --encode


def main(config: ConfigDict | None, flags: FlagValues, signals: process.Signals) -> int:
    part, num_parts = command_line.parse_shard(flags.shard)
    values = command_line.values_of_mode() | {'shard': part, 'num_shards': num_parts}
    values['fields'] = tuple(flags.fields)
    signals.advice = 'the same command makes the unfinished file again'
    job = Job(Request(**values), config, command_line.changes())
    signals.begin_work()
    if job.is_prompt:
        t5 = load(job)
        signals.raise_interrupts()
        answer_typed_lines(job, t5)
    else:
        process.print_lines(infer_all(job), sys.stderr)
    return 0


class Request(NamedTuple):
    """The request in the flags, in addition to the config."""

    checkpoint: str
    step: str = ''  # '' for the newest of a run
    output_dir: str = ''  # '' writes to standard output
    input: str = ''  # a file; '' takes the split of a task
    text: str | None = None  # instead of both
    split: str = ''  # 'test' if not given
    score: bool = False
    encode: bool = False
    pool: str = 'none'  # with `encode`; 'mean' for one vector per example
    fields: tuple[str, ...] = ()  # written with the texts; 'all' for all
    output_ids: bool = False
    trim: bool = False
    shard: int = 1
    num_shards: int = 1


@dataclasses.dataclass
class Part:
    """The shard's examples of one task or file, or the examples of one file of encodings."""

    name: str
    examples: list[infer.Question] = dataclasses.field(default_factory=list)
    written: list[dict] = dataclasses.field(default_factory=list)  # the fields of each line
    num_examples: int = 0  # all shards together
    digest: str = ''  # a hash of the examples of all shards


class Job:
    """Everything that `infer_all` needs, checked before the parameters are read. Writes nothing.

    `config` comes from --config. Without it, use the settings of the run that saved the checkpoint,
    else the defaults, with `changes`, {'data.task': value}. Raises Refused and OSError.
    """

    def __init__(self, request: Request, config: ConfigDict | None, changes: Mapping):
        check_request(request)
        self.request = request
        self.is_prompt = asks_for_prompt(request, changes)
        directory = formats.open.checkpoint_folder(request.checkpoint, request.step)
        # `named_model` is None for the checkpoint's own.
        self.config, self.named_model = settings_and_model(directory, config, changes)
        if config is None and request.input:  # the run's settings describe its own files
            self.config.data.kind = changes.get('data.kind', '')
            self.config.data.delimiter = changes.get('data.delimiter', '')
        self.opened = formats.open.open_model(
            directory, self.named_model, part=MODEL_PART[request.encode]
        )
        self.pooling = sentence_transformers.Pooling()
        if request.pool == 'mean':
            self.pooling = sentence_transformers.read(self.opened.directory)
        is_default = config is None and 'data.lengths.inputs' not in changes
        if self.pooling.max_length and is_default:
            self.config.data.lengths.inputs = self.pooling.max_length
        self.vocabulary = vocabulary_of_checkpoint(
            self.opened.directory, self.config.data, self.opened.config
        )
        vocab_size = self.opened.config.vocab_size
        check_rows(self.vocabulary, self.opened.directory, vocab_size)
        mesh = partition.make_mesh(**self.config.mesh)
        self.opened.config.family.check_mesh(self.opened.config, mesh)
        settings = self.config.decode
        self.decoding = decoding_of(settings, self.vocabulary, vocab_size)
        if settings.top_k > vocab_size:
            raise Refused(f'decode.top_k={settings.top_k}: must be at most {vocab_size}')
        self.messages: list[str] = []  # about skipped examples
        self.parts: Iterable[Part] = ()
        if request.text is not None:
            self.text_ids = encode_text(self, request.text, '--text')
        elif not self.is_prompt:
            self.parts = parts_of(self)
        if request.output_dir:
            check_output(self)

    @property
    def mode(self) -> str:
        """T5X's name of the computation, for file names."""
        if self.request.score:
            return 'score'
        if self.request.encode:
            return f'encode_{self.request.pool}'
        if self.config.decode.return_scores:
            return 'predict_with_aux'
        return 'predict'


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
        raise Refused(f'--pool={request.pool} applies only to --encode: add that, or leave it out')
    check_split(request.split or 'test')
    if reads_stdin and (request.num_shards > 1 or jax.process_count() > 1):
        raise Refused(f'--input=- in several processes, {shard}: only one can read it: name a file')


def asks_for_prompt(request: Request, changes: Mapping) -> bool:
    """Return whether the request names no input, and a user can type one at a terminal."""
    is_named = request._replace(checkpoint='', step='', trim=False) != Request('')
    if is_named or 'data.task' in changes or jax.process_count() > 1 or sys.stdin is None:
        return False
    return sys.stdin.isatty() and sys.stdout.isatty()


def parts_of(job: Job) -> Iterable[Part]:
    """Read the examples. Lines of standard input that are answered as they arrive are read later."""
    request = job.request
    parts = []
    if request.input:
        lines = infer_input.FileExamples(
            request.input,
            infer_input.with_templates(job.config.data),
            job.vocabulary,
            needs_targets=request.score,
            trim=request.trim,
            fields=request.fields,
        )
        if request.input == infer_input.STANDARD_INPUT and not request.output_dir:
            return arriving_parts(lines, request)
        parts.append(read(lines.name, lines, request))
    else:
        for task in infer_input.open_tasks(job.config.data, job.vocabulary):
            parts.append(read(task.name, read_split(task, request.split or 'test'), request))
            job.messages.extend(f'Left out: {fault}' for fault in task.source.faults()[0])
    for part in parts:
        check_alike(f'the examples of {part.name}', part.digest.encode())
    return parts


def arriving_parts(lines: infer_input.FileExamples, request: Request) -> Iterator[Part]:
    """Yield the lines of standard input in the groups in which they arrive."""
    first = 0
    group = []
    for example in lines:
        group.append(example)
        if not lines.has_more:
            yield read(lines.name, group, request, first)
            first += len(group)
            group = []


def read(name: str, examples: Iterable[RecordExample], request: Request, first: int = 0) -> Part:
    """Read all examples, to find a mistake in one of them before anything is computed.

    `first`: the number of the first one.
    """
    part = Part(name)
    content = hashlib.blake2b(digest_size=16)
    for number, example in enumerate(examples, start=first):
        line_fields = selected(example.features(), request.fields)
        targets = example.targets
        if targets is None or request.encode:
            targets = np.zeros(0, np.int32)
        if number % request.num_shards == request.shard - 1:
            part.examples.append(
                infer.Question(example.inputs, targets, number, numbers=example.numbers)
            )
            part.written.append(line_fields)
        part.num_examples += 1
        facts = [line_fields, example.inputs, targets]
        if example.numbers:
            facts.append(dict(example.numbers))
        content.update(json.dumps(facts, default=results.json_default).encode())
    if part.num_examples == 0:
        raise Refused(f'{name} has no example: name another split or file')
    part.digest = content.hexdigest()
    return part


def selected(fields: Mapping, names: Sequence[str]) -> dict:
    """Return the fields of an example for its line: those in `names`, by default the texts."""
    if tuple(names) == ('all',):
        return dict(fields)
    for name in names:
        if name not in fields:
            all_names = first_ten([repr(field) for field in fields])
            raise Refused(f'--fields names {name!r}: the fields of an example are {all_names}')
    selection = {}
    for name, value in fields.items():
        feature = name.removesuffix(PRETOKENIZED)
        if name in names or (feature != name and (not names or feature in names)):
            selection[name] = value
    return selection


def encode_text(job: Job, text: str, title: str) -> np.ndarray:
    """Return the ids of a typed text, with its ends."""
    [ids] = job.vocabulary.encode([text], glued_sentinels=True)
    length = job.config.data.lengths.inputs
    title = f'the words of {title}'
    return infer_input.ended(title, ids, job.vocabulary.ends, 'inputs', length, job.request.trim)


# Answers.


def infer_all(job: Job) -> list[str]:
    """Write or print the results of a job. Return the last messages of the first process.

    All processes compute, each some rows of a batch; the first one writes and prints.
    """
    if job.request.output_dir:
        job.messages.extend(write_files(job))
    elif job.request.text is not None:
        answer_text(job, load(job), infer.Question(job.text_ids))
    else:
        t5 = load(job)
        with progress_bar(job.parts) as bar:
            for part in job.parts:
                for line in results_of(job, t5, part, bar.update):
                    if jax.process_index() == 0:
                        with process.writing(sys.stdout):
                            print(line.decode(), end='', flush=True)
    if jax.process_index() > 0:
        return []
    return job.messages


def load(job: Job) -> infer.T5:
    """Read the parameters of the checkpoint."""
    t5 = infer.load(
        job.opened.directory,
        config=job.named_model,
        mesh=partition.make_mesh(**job.config.mesh),
        dtype=job.config.restore.dtype,
        part=MODEL_PART[job.request.encode],
    )
    t5.vocabulary = job.vocabulary
    return t5


def answer_typed_lines(job: Job, t5: infer.T5) -> None:
    """Answer lines typed at a terminal, one by one, until Ctrl-D.

    Ctrl-C drops the current line, or the answer once its compiled program has ended.
    """
    say = functools.partial(print, file=sys.stderr, flush=True)
    say('Type a text and press Enter; Ctrl-C drops a line or an answer, Ctrl-D ends.')
    for number in itertools.count():
        try:
            text = process.read_line('> ')
            if text.strip():
                ids = encode_text(job, text, 'this line')
                answer_text(job, t5, infer.Question(ids, number=number))
        except EOFError:
            print(flush=True)
            return
        except KeyboardInterrupt:
            print(flush=True)
        except UnicodeError:
            say('this line is not UTF-8: write it in UTF-8')
        except Refused as error:
            say(error)


def answer_text(job: Job, t5: infer.T5, example: infer.Question) -> None:
    [answer] = infer.answer_batch(t5, job.decoding, [example])
    if jax.process_index() > 0:
        return
    for i, text in enumerate(answer.texts):
        if answer.scores:
            print(f'{answer.scores[i]:.6g} nats:', file=sys.stderr, flush=True)
        with process.writing(sys.stdout):
            print(text, flush=True)


def progress_bar(parts: Iterable[Part]) -> tqdm.tqdm:
    """Return a bar on stderr for the examples of some parts."""
    total = None  # unknown for standard input
    if isinstance(parts, Sequence):
        total = sum(len(part.examples) for part in parts)
    return tqdm.tqdm(
        total=total,
        unit=' examples',
        mininterval=1.0 if sys.stderr.isatty() else 30.0,
        disable=jax.process_index() > 0,
    )


def results_of(
    job: Job, t5: infer.T5, part: Part, progress: Callable[[int], None]
) -> Iterator[bytes]:
    """Yield the content of a file of results, as described at the top: line by line, or all encodings at once."""
    request = job.request
    settings = job.config.decode

    def compute(batch: Sequence[infer.Question], num_rows: int) -> Iterable:
        if request.score:
            choices = [example._replace(targets=[example.targets]) for example in batch]
            return infer.score_batch(t5, choices, num_rows)
        if not request.encode:
            return infer.answer_batch(t5, job.decoding, batch, num_rows)
        encoded = infer.encode_batch(t5, batch, num_rows)
        return map(pooled, batch, encoded) if request.pool == 'mean' else encoded

    def pooled(example: infer.Question, outputs_MD: np.ndarray) -> np.ndarray:
        return job.pooling(outputs_MD[None], np.asarray(example.inputs)[None] > 0)

    def one_or_all(values: list) -> Any:
        return values[0] if settings.num_return == 1 else values  # the best answer is the first

    answers = infer.in_batches(compute, part.examples, settings.batch_size, progress)
    if request.encode:
        encoded = list(answers)
        arrays = {'embeddings': np.concatenate(encoded)}
        arrays['indices'] = np.array([example.number for example in part.examples], np.int64)
        if request.pool == 'none':
            arrays['lengths'] = np.array(list(map(len, encoded)), np.int32)
        yield safetensors.numpy.save(arrays)
        return
    for written, result in zip(part.written, answers, strict=True):
        if request.score:
            yield results.as_line({'inputs': written, 'score': float(result[0])}).encode()
            continue
        line = {'inputs': written, 'prediction': one_or_all(result.texts)}
        if request.output_ids:
            ids = [list(itertools.takewhile(bool, tokens)) for tokens in result.tokens]  # as T5X
            line['prediction_tokens'] = one_or_all(ids)
        if settings.return_scores:
            line['aux'] = {'scores': one_or_all(result.scores)}
        yield results.as_line(line).encode()


# Files.


def outputs(job: Job) -> dict[Path, Part]:
    """Return the files that the shard writes."""
    request = job.request
    folder = paths.disk_path(request.output_dir)
    parts = {}
    for part in job.parts:
        task = results.file_name(part.name)
        if not request.encode:
            name = f'{task}-{job.mode}.jsonl'
            if request.num_shards > 1:
                name += f'-{request.shard - 1:05}-of-{request.num_shards:05}'
            parts[folder / name] = part
            continue
        size = EXAMPLES_PER_FILE[request.pool]
        num_files = []  # per shard
        for shard in range(request.num_shards):
            num_files.append(math.ceil((part.num_examples - shard) / request.num_shards / size))
        number = sum(num_files[: request.shard - 1])
        for start in range(0, len(part.examples), size):
            name = f'{task}-encodings-{number:05}-of-{sum(num_files):05}.safetensors'
            examples = part.examples[start : start + size]
            parts[folder / name] = dataclasses.replace(part, examples=examples)
            number += 1
    return parts


def write_files(job: Job) -> list[str]:
    """Write the files of the shard that do not exist yet. Return lines that name all of them."""
    request = job.request
    folder = paths.disk_path(request.output_dir)
    files = outputs(job)
    is_first = jax.process_index() == 0
    shard = f'{request.shard}/{request.num_shards}'
    lock_file = folder / f'.lock-{shard.replace("/", "-of-")}'
    remedy = 'wait for it, or give each process its own --shard=i/n'
    with lock(lock_file, f'shard {shard} of {folder}', remedy, is_first):
        if is_first:
            check_output(job)  # another shard may have begun
            if not (folder / SETTINGS).exists():
                content = json.dumps(settings_as_json(job), indent=1).encode()
                paths.replace_file(folder / SETTINGS, content, writer=lock_file.name)
        missing_files = {}
        for path, part in files.items():
            if not from_first_process(np.array(path.exists())):
                missing_files[path] = part
        if missing_files:
            write_missing(job, missing_files)
        if is_first:
            lock_file.unlink()
    if request.encode:
        return [f'The encodings of {part.name} are in {folder}' for part in job.parts]
    return [f'The results are in {path}' for path in files]


def write_missing(job: Job, files: Mapping[Path, Part]) -> None:
    """Compute files in all processes, and write them in the first one."""
    t5 = load(job)
    is_first = jax.process_index() == 0
    with progress_bar([*files.values()]) as bar:
        for path, part in files.items():
            with contextlib.ExitStack() as stack:
                if is_first:
                    file = stack.enter_context(paths.replacing(path))
                for content in results_of(job, t5, part, bar.update):
                    if is_first:
                        file.write(content)


def check_output(job: Job) -> None:
    """Raise Refused for an output folder that holds results of other settings, or other files."""
    folder = paths.disk_path(job.request.output_dir)
    paths.check_new(folder)
    if jax.process_index() > 0:  # its copy of the model may have other modification times
        return
    results.check_writable(folder)
    file = folder / SETTINGS
    if file.exists():
        changes = checks.changed_settings(paths.read_json(file), settings_as_json(job))
    else:
        changes = [f'{path.name} without {SETTINGS}' for path in outputs(job) if path.exists()]
    if changes:
        raise Refused(
            f'{folder} has other results ({first_ten(changes, "; ")}): name another folder'
        )


def settings_as_json(job: Job) -> dict:
    """Return everything that the results depend on."""
    request = job.request
    model_config = job.opened.config
    files = {name: digest([x]) for name, x in own_model.files_of(model_config).items()}
    decode_settings = job.config.decode.to_dict()
    if decode_settings['module']:
        file = user_code.module_file('decode.module', decode_settings['module'])
        decode_settings['module'] = digest([file.read_bytes()])
    directory = job.opened.directory
    settings = {
        'checkpoint': {'path': hub.name_of(directory), 'files': formats.open.identity(directory)},
        'vocabulary': job.vocabulary.hash,
        'model': own_model.as_settings(model_config) | files,
        'restore': {'dtype': job.config.restore.dtype},
        'mode': job.mode,
        'decode': decode_settings,
        'fields': request.fields,
        'output_ids': request.output_ids,
        'num_shards': request.num_shards,
        'examples': {part.name: part.digest for part in job.parts},
    }
    return json.loads(json.dumps(settings))  # lists for tuples
