"""`--mode=infer`: predict, score or encode a task's split or a file, or answer one text.

Predictions and scores are JSON Lines in T5X's form.

Examples are written in chunks, so a job that was killed goes on after the last complete one. Shard i
of n takes every n-th example; the last shard to end merges the results.

    infer.json                           the settings; results of others are refused
    tmp-TASK-SSSSS-of-NNNNN/             the chunks of a shard, until it ends
    TASK-MODE.jsonl-SSSSS-of-NNNNN       the lines of a shard
    TASK-MODE.jsonl-SSSSS-of-NNNNN.COMPLETED
    TASK-MODE.jsonl                      the lines of all shards, in the order of the examples

Encodings (`--encode`) are the encoder's outputs, float32; of the checkpoint no decoder is read.
Each chunk is a file that stays, and all files are numbered through the shards, one shard after
the other:

    TASK-encodings-CCCCC-of-NNNNN.safetensors
        indices     int64 [n]: the number of each example in the file or split, from 0
        embeddings  --pool=mean: [n, emb_dim], the mean of an example's tokens, EOS included, as in
                    Sentence-T5, without its projection and normalization
                    --pool=none: [sum of lengths, emb_dim], the tokens of one example after the
                    other, EOS included, without padding
        lengths     --pool=none alone: int32 [n], the number of tokens of each example

FILE.COMPLETED, of a shard, a chunk or a file of encodings, has the size and checksum of FILE. Where
the two differ, FILE is made anew.

Source: T5X t5x/infer.py. Differs from T5X: its .COMPLETED are empty, and lines that are cut or
changed go into its results; here a whole number is written as one, not as 0.0.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import google_crc32c
import jax
import numpy as np
import safetensors.numpy
import tqdm
from absl import logging

import checkpoint
import convert
import infer
import infer_input
import model
import own_model
import partition
import paths
import settings
import workdir
from infer_input import PRETOKENIZED, Item
from results import json_default
from vocabulary import Vocabulary, check_rows, read_settings, vocabulary_of_checkpoint

SETTINGS = 'infer.json'
SPLITS = ('train', 'validation', 'test')
# Whose encodings are in one file, which is made in memory: by --pool.
EXAMPLES_PER_FILE = {'none': 256, 'mean': infer.EXAMPLES_PER_CHUNK}


class Request(NamedTuple):
    """What the flags ask for, beside the config."""

    checkpoint: str
    step: str = ''  # of a run; its newest if not given
    output_dir: str = ''  # '' writes to standard output
    input: str = ''  # a file; '' takes the split of a task
    text: str | None = None  # in place of both
    split: str = ''  # 'test' if not given
    score: bool = False
    encode: bool = False
    pool: str = 'none'  # of encodings; 'mean' for one vector of each example
    fields: tuple[str, ...] = ()  # of the examples that lines have beside the texts; 'all' for all
    output_ids: bool = False
    trim: bool = False
    shard: int = 1
    num_shards: int = 1

    @property
    def part(self) -> str:
        """Return which part of the checkpoint is opened, one of `convert.PARTS`."""
        return 'encoder' if self.encode else 'whole'


class Part(NamedTuple):
    """The examples of one task, and what is known of them."""

    name: str
    spool: infer_input.Spool  # those of the shard
    num_examples: int  # of all shards
    num_trimmed: int
    digest: str  # of what is predicted and written
    faults: list[str]  # records that were left out


class Job(NamedTuple):
    """Everything that `infer` needs, checked."""

    request: Request
    config: Any
    directory: Any  # of the checkpoint
    model_config: model.T5Config
    vocabulary: Vocabulary
    parts: list[Part]  # none for a text

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


def prepare(request: Request, config: Any | None, changes: Mapping[str, Any]) -> Job:
    """Check everything that can be checked before the parameters are read. Writes nothing.

    `config` is that of --config. Without it, the settings of the run that saved the checkpoint
    count, else the defaults, with `changes`, {'data.task': value}. Raises ValueError and OSError.
    """
    check_request(request)
    model_config = own_model.make_config(config.model) if config is not None else None
    opened = convert.open_model(request.checkpoint, model_config, request.step, request.part)
    if config is None:
        config = infer.settings_of(opened.directory, changes)
        if request.input:  # data.kind of a run is said of its own files
            config.data.kind = changes.get('data.kind', '')
        model_config = changed_model(opened, config, changes, request.part)
    else:
        model_config = opened.config
    settings.check(config)
    vocabulary = vocabulary_of_checkpoint(opened.directory, config.data)
    check_rows(vocabulary, opened.directory, model_config.vocab_size)
    check_decoding(config.decode, model_config)
    parts = []
    if request.text is None:
        for examples in examples_of(request, config.data, vocabulary):
            part = read(examples, request)
            partition.check_alike(f'the examples of {part.name}', part.digest.encode())
            parts.append(part)
    else:
        infer_input.encode_text(request.text, vocabulary, config.data.lengths.inputs, request.trim)
    job = Job(request, config, opened.directory, model_config, vocabulary, parts)
    if request.output_dir:
        check_output(job)
    if opened.note:
        logging.warning(opened.note)
    return job


def check_request(request: Request) -> None:
    """Raise ValueError for flags that do not fit together."""
    if not request.checkpoint:
        raise ValueError('--mode=infer needs a model: name it with --checkpoint=PATH')
    if request.text is not None:
        if not request.text.strip():
            raise ValueError("--text='' has no text: write one, as in --text='translate ...'")
        for name in ('output_dir', 'input', 'score', 'encode', 'fields', 'output_ids'):
            if getattr(request, name):
                raise ValueError(
                    f'--{name} is not for --text, which prints one answer: leave one of them out'
                )
    if request.encode:
        for name in ('score', 'fields', 'output_ids'):
            if getattr(request, name):
                raise ValueError(
                    f'--{name} is not for --encode, which writes arrays: leave one of them out'
                )
        if not request.output_dir:
            raise ValueError('--encode needs a folder for its arrays: name --output_dir')
    elif request.pool != 'none':
        raise ValueError(f'--pool={request.pool} is of encodings: add --encode, or leave it out')
    if request.split and (request.input or request.text is not None):
        raise ValueError(
            f'--split={request.split} is of a task, and --input or --text is given: leave one of them out'
        )
    if request.split not in ('', *SPLITS):
        raise ValueError(f'--split={request.split}: must be one of {", ".join(SPLITS)}')
    if request.input == infer_input.STANDARD_INPUT and jax.process_count() > 1:
        raise ValueError(
            f'--input=- in {jax.process_count()} processes: each reads all examples, and only one has '
            'standard input: name a file with --input'
        )
    if request.num_shards > 1:
        shard = f'--shard={request.shard}/{request.num_shards}'
        if not request.output_dir:
            raise ValueError(f'{shard} needs a folder for the results of all: name --output_dir')
        if request.input == infer_input.STANDARD_INPUT:
            raise ValueError(f'{shard} needs a file that each shard reads: name it with --input')


def changed_model(
    opened: convert.OpenedModel, config: Any, changes: Mapping[str, Any], part: str
) -> model.T5Config:
    """Return the model of a checkpoint with the changes that the command line makes."""
    changed = [key for key in changes if key.startswith('model.')]
    if not changed:
        return opened.config
    if 'model' not in read_settings(opened.directory):
        raise ValueError(
            f'--config.{changed[0]} changes a setting of the model, and {opened.directory} has no settings: '
            'name a config file with --config'
        )
    if 'model.module' not in changed:
        config.model.module = opened.config.module  # where its file is now
    found = convert.open_model(opened.directory, own_model.make_config(config.model), part=part)
    return found.config


def check_decoding(config: Any, model_config: model.T5Config) -> None:
    """Raise ValueError for options of decoding that do not fit together."""
    infer.Decoding.of_settings(config)
    if config.top_k > model_config.vocab_size:
        raise ValueError(
            f'decode.top_k={config.top_k}: must be at most model.vocab_size={model_config.vocab_size}; 0 '
            'keeps all'
        )


def examples_of(
    request: Request, config: Any, vocabulary: Vocabulary
) -> Iterable[infer_input.Examples]:
    """Return the examples of a file, or of each task of a mixture; `config`: config.data."""
    if not request.input:
        return infer_input.examples_of_tasks(config, vocabulary, request.split or 'test')
    examples = infer_input.FileExamples(
        request.input,
        config,
        vocabulary,
        needs_targets=request.score,
        trim=request.trim,
    )
    return [examples]


def read(examples: infer_input.Examples, request: Request) -> Part:
    """Read all examples: what is wrong with one of them is found before anything is computed."""
    spool = infer_input.Spool()
    digest = hashlib.blake2b(digest_size=16)
    num_examples = 0
    num_trimmed = 0
    for item in examples:
        if num_examples % request.num_shards == request.shard - 1:
            spool.add(num_examples, item)
        num_examples += 1
        num_trimmed += item.is_trimmed
        digest.update(item.inputs.tobytes())
        if request.score and item.targets is not None:
            digest.update(b' targets ' + item.targets.tobytes())
        written = selected(item.fields, request.fields)
        digest.update(json.dumps(written, default=json_default).encode())
    if num_examples == 0:
        raise ValueError(f'{examples.name} has no example: name a split or a file with some')
    return Part(
        name=examples.name,
        spool=spool,
        num_examples=num_examples,
        num_trimmed=num_trimmed,
        digest=digest.hexdigest(),
        faults=examples.faults(),
    )


# From a job to lines.


def infer_all(job: Job) -> list[str]:
    """Do a job: write its results, or print them. Return what to say at the end.

    All processes compute, each some rows of a batch; the first one writes and prints.
    """
    if job.request.text is not None:
        print_answers(job, job.request.text)
        return []
    messages: list[str] = []
    for part in job.parts:
        counts = {part.name: [part.num_examples, part.num_trimmed]}
        messages += workdir.describe_trimming(counts)
        messages += [f'Left out: {fault}' for fault in part.faults]
    if job.request.output_dir:
        messages += write_results(job, paths.disk_path(job.request.output_dir))
    else:
        print_lines(job)
    if jax.process_index() > 0:
        return []
    return messages


def print_answers(job: Job, text: str) -> None:
    """Print the answers to a text, one a line; their scores go to stderr."""
    config = job.config
    ids = infer_input.encode_text(
        text, job.vocabulary, config.data.lengths.inputs, job.request.trim
    )
    options = infer.decoding_options(config.decode)
    [answer] = infer.predict_all(load(job), [infer.Example(ids)], batch_size=1, options=options)
    if jax.process_index() > 0:
        return
    for i, tokens in enumerate(answer.tokens):
        if config.decode.return_scores:
            print(f'{answer.scores[i]:.6g} nats:', file=sys.stderr, flush=True)
        print(job.vocabulary.decode(tokens), flush=True)


def print_lines(job: Job) -> None:
    """Print the line of each example."""
    t5 = load(job)
    for part in job.parts:
        with progress_bar(part.name, part.num_examples) as bar:
            for chunk in chunks(part.spool):
                for line in lines_of(job, t5, chunk, bar.update):
                    if jax.process_index() == 0:
                        sys.stdout.write(line)
                sys.stdout.flush()


def write_results(job: Job, folder: Path) -> list[str]:
    """Write what is not there yet. Return what to print."""
    messages = []
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            stack.enter_context(paths.writing_results(folder))
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder, job.request))
            record_settings(job, folder)
        if job.request.encode:
            return write_encodings(job, folder)
        t5 = None
        for part in job.parts:
            results = Results(folder, part.name, job)
            if not results.is_complete(results.file):
                if t5 is None:
                    t5 = load(job)
                write_shard(job, t5, part, results)
            if jax.process_index() == 0:
                messages.append(results.merge())
    return messages


def load(job: Job) -> infer.T5:
    """Read the parameters of the checkpoint."""
    return infer.load(
        job.directory,
        config=job.model_config,
        mesh=partition.make_mesh(**job.config.mesh),
        dtype=job.config.restore.dtype,
        part=job.request.part,
    )


def write_shard(job: Job, t5: infer.T5, part: Part, results: 'Results') -> None:
    """Write the chunks of a shard that are not there yet, and put them together."""
    is_first = jax.process_index() == 0
    if is_first:
        results.start()
    num_chunks = 0
    with progress_bar(part.name, len(part.spool)) as bar:
        for chunk in chunks(part.spool):
            if results.is_complete(results.chunk(num_chunks)):
                if is_first:
                    bar.initial += len(chunk)  # they count for no speed
                bar.update(len(chunk))
            else:
                lines = ''.join(lines_of(job, t5, chunk, bar.update))
                if is_first:
                    paths.replace_file(results.chunk(num_chunks), lines.encode())
                    results.complete(results.chunk(num_chunks))
            num_chunks += 1
    if is_first:
        results.finish(num_chunks)


def chunks(spool: infer_input.Spool, size: int = 0) -> Iterator[list[tuple[int, Item]]]:
    """Yield lists of items, each with its number, of the size that is sorted by length."""
    items = iter(spool)
    while chunk := list(itertools.islice(items, size or infer.EXAMPLES_PER_CHUNK)):
        yield chunk


def progress_bar(name: str, total: int) -> tqdm.tqdm:
    """Return a bar on stderr that shows examples and the time left."""
    mininterval = 1.0 if sys.stderr.isatty() else 30.0
    return tqdm.tqdm(
        total=total,
        unit=' examples',
        desc=name,
        mininterval=mininterval,
        disable=jax.process_index() > 0,
    )


def lines_of(
    job: Job, t5: infer.T5, chunk: Sequence[tuple[int, Item]], progress: Callable[[int], Any]
) -> Iterator[str]:
    """Yield the line of each item."""
    request = job.request
    config = job.config.decode
    examples = []
    for number, item in chunk:
        targets = np.zeros(0, np.int32) if item.targets is None else item.targets
        examples.append(infer.Example(item.inputs, targets, number))
    if request.score:
        scores = infer.score_all(t5, examples, config.batch_size, progress)
        for (_, item), score in zip(chunk, scores, strict=True):
            yield as_line({'inputs': selected(item.fields, request.fields), 'score': score})
        return
    options = infer.decoding_options(config)
    answers = infer.predict_all(t5, examples, config.batch_size, options, progress)
    for (_, item), answer in zip(chunk, answers, strict=True):
        line = prediction(answer, job.vocabulary, config.return_scores, request.output_ids)
        yield as_line({'inputs': selected(item.fields, request.fields), **line})


def prediction(
    answer: infer.Answer, vocabulary: Vocabulary, with_scores: bool, output_ids: bool
) -> dict[str, Any]:
    """Return the part of a line that T5X's modes predict and predict_with_aux add to the inputs.

    Of several answers it has a list, the best first.
    """
    texts: Any = [vocabulary.decode(tokens) for tokens in answer.tokens]
    tokens: Any = answer.tokens
    scores: Any = answer.scores
    if len(texts) == 1:
        [texts] = texts
        [tokens] = tokens
    if len(scores) == 1:
        [scores] = scores
    line = {'prediction': texts}
    if output_ids:
        line['prediction_tokens'] = tokens
    if with_scores:
        line['aux'] = {'scores': scores}
    return line


def selected(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the fields of an example that its line has: the texts, and those in `names`."""
    if tuple(names) == ('all',):
        return dict(fields)
    for name in names:
        if name not in fields:
            raise ValueError(
                f'--fields names {name!r}: the fields of an example are '
                f'{settings.first_ten([repr(field) for field in fields])}'
            )
    found = {}
    for name, value in fields.items():
        is_text = name.endswith(PRETOKENIZED)
        if name in names or (is_text and not names):
            found[name] = value
        elif is_text and name.removesuffix(PRETOKENIZED) in names:
            found[name] = value
    return found


def as_line(content: Mapping[str, Any]) -> str:
    """Return a line of JSON Lines."""
    return json.dumps(content, default=json_default) + '\n'


# The output folder.


def write_encodings(job: Job, folder: Path) -> list[str]:
    """Write the files of encodings that are not there yet. Return what to print."""
    t5 = None
    is_first = jax.process_index() == 0
    messages = []
    for part in job.parts:
        files = encoding_files(job, part, folder)
        results = Results(folder, part.name, job)
        own_files = [file for file, shard in files.items() if shard == job.request.shard]
        own_chunks = chunks(part.spool, EXAMPLES_PER_FILE[job.request.pool])
        with progress_bar(part.name, len(part.spool)) as bar:
            for file, chunk in zip(own_files, own_chunks, strict=True):
                if results.is_complete(file):
                    if is_first:
                        bar.initial += len(chunk)  # they count for no speed
                    bar.update(len(chunk))
                    continue
                if t5 is None:
                    t5 = load(job)
                arrays = encodings_of(job, t5, chunk, bar.update)
                if is_first:
                    paths.replace_file(file, safetensors.numpy.save(arrays))
                    results.complete(file)
        num_missing = sum(not mark_of(file).exists() for file in files)
        message = f'The encodings of {part.name} are in {folder}'
        if num_missing:
            message += f'; {num_missing} of {len(files)} files are missing, those of other shards'
        messages.append(message)
    return messages


def encoding_files(job: Job, part: Part, folder: Path) -> dict[Path, int]:
    """Return {file: its shard} of a task's encodings of all shards, whether they are there or not."""
    num_shards = job.request.num_shards
    shard_of_file = []
    for shard in range(1, num_shards + 1):
        num_examples = len(range(shard - 1, part.num_examples, num_shards))
        num_files = math.ceil(num_examples / EXAMPLES_PER_FILE[job.request.pool])
        shard_of_file += [shard] * num_files
    task = part.name.replace('/', '_')
    files = {}
    for number, shard in enumerate(shard_of_file):
        name = f'{task}-encodings-{number:05}-of-{len(shard_of_file):05}.safetensors'
        files[folder / name] = shard
    return files


def encodings_of(
    job: Job, t5: infer.T5, chunk: Sequence[tuple[int, Item]], progress: Callable[[int], Any]
) -> dict[str, np.ndarray]:
    """Return the arrays of a file, as the head of this file has them."""
    pool = job.request.pool
    examples = [infer.Example(item.inputs, number=number) for number, item in chunk]
    encoded = list(infer.encode_all(t5, examples, job.config.decode.batch_size, pool, progress))
    arrays = {'indices': np.array([example.number for example in examples], np.int64)}
    if pool == 'mean':
        return arrays | {'embeddings': np.stack(encoded)}
    arrays['lengths'] = np.array([len(of_example) for of_example in encoded], np.int32)
    return arrays | {'embeddings': np.concatenate(encoded)}


class Results:
    """The files of one task's results, of one shard."""

    def __init__(self, folder: Path, task: str, job: Job):
        task = task.replace('/', '_')
        self.num_shards = job.request.num_shards
        self.merged = folder / f'{task}-{job.mode}.jsonl'
        self.file = self.of_shard(job.request.shard)
        content = json.dumps(settings_as_json(job), sort_keys=True).encode()
        self.settings = hashlib.blake2b(content, digest_size=16).hexdigest()
        suffix = self.file.name.removeprefix(f'{self.merged.name}-')
        self.chunks = folder / f'tmp-{task}-{suffix}'

    def of_shard(self, shard: int) -> Path:
        """Return the file of a shard, the first one being 1."""
        name = f'{self.merged.name}-{shard - 1:05}-of-{self.num_shards:05}'
        return self.merged.with_name(name)

    def chunk(self, number: int) -> Path:
        """Return the file of a chunk."""
        return self.chunks / f'{self.file.name}-chunk{number:05}'

    def complete(self, file: Path) -> None:
        """Mark a shard, a chunk or a file of encodings as complete."""
        paths.replace_file(mark_of(file), json.dumps(self.summary(file)).encode())

    def summary(self, file: Path) -> dict[str, Any]:
        """Return what marks a shard or chunk as complete: whose it is, its size and checksum."""
        checksum = google_crc32c.Checksum()
        num_lines = 0
        num_bytes = 0
        with file.open('rb') as lines:
            for line in lines:
                checksum.update(line)
                num_lines += 1
                num_bytes += len(line)
        return {
            'file': file.name,
            'settings': self.settings,
            'lines': num_lines,
            'bytes': num_bytes,
            'crc32c': int.from_bytes(checksum.digest()),
        }

    def is_unchanged(self, file: Path) -> bool:
        """Return whether a shard or chunk is what was marked as complete."""
        try:
            return json.loads(mark_of(file).read_bytes()) == self.summary(file)
        except (FileNotFoundError, ValueError, RecursionError):
            return False

    def is_complete(self, file: Path) -> bool:
        """Return whether a shard or chunk is complete. Say so where it was and has changed.

        The first process, which writes, decides for all.
        """
        found = False
        if jax.process_index() == 0 and mark_of(file).exists():
            found = self.is_unchanged(file)
            if not found:
                text = f'{file} has changed or is gone since it was completed: it is made anew.'
                tqdm.tqdm.write(text, file=sys.stderr)
        return bool(partition.from_first_process(np.array(found)))

    def start(self) -> None:
        """Prepare for the chunks of a shard that is not complete, or no longer."""
        mark_of(self.file).unlink(missing_ok=True)
        self.chunks.mkdir(exist_ok=True)

    def finish(self, num_chunks: int) -> None:
        """Put the chunks together."""
        with paths.replacing(self.file) as file:
            for number in range(num_chunks):
                with self.chunk(number).open('rb') as chunk:
                    shutil.copyfileobj(chunk, file)
        self.complete(self.file)

    def merge(self) -> str:
        """Merge the shards if all are complete. Return what to print."""
        shutil.rmtree(self.chunks, ignore_errors=True)
        files = [self.of_shard(shard) for shard in range(1, self.num_shards + 1)]
        missing = [file for file in files if not mark_of(file).exists()]
        if missing:
            return (
                f'{self.file} is written; {len(missing)} of {self.num_shards} shards are missing: the last '
                'one to end merges them.'
            )
        for shard, file in enumerate(files, start=1):
            if not self.is_unchanged(file):
                raise ValueError(
                    f'{file} has changed or is gone since it was completed: only complete shards are merged: make it '
                    f'anew, with the same command and --shard={shard}/{self.num_shards}'
                )
        with contextlib.ExitStack() as stack:
            parts = [stack.enter_context(file.open('rb')) for file in files]
            merged = stack.enter_context(paths.replacing(self.merged, self.file.name))
            for line in interleaved(parts):
                merged.write(line)
        return f'The results are in {self.merged}'


def mark_of(file: Path) -> Path:
    """Return the file that says that `file` is complete."""
    return file.with_name(f'{file.name}.COMPLETED')


def interleaved(files: Iterable[IO[bytes]]) -> Iterator[bytes]:
    """Yield the first line of each file, the second of each, and so on."""
    for file in itertools.cycle(files):
        line = file.readline()
        if not line:
            return
        yield line


@contextlib.contextmanager
def locked(folder: Path, request: Request) -> Iterator[None]:
    """Hold the lock of a shard. Raises ValueError where another process holds it."""
    path = folder / f'.lock-{request.shard - 1:05}-of-{request.num_shards:05}'
    with path.open('a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f'shard {request.shard}/{request.num_shards} of {folder} is being written by another process: '
                'wait for it, or give each process its own --shard=i/n'
            ) from None
        yield
        path.unlink(missing_ok=True)


def check_output(job: Job) -> None:
    """Raise ValueError for an output folder that holds results of other settings, or other files."""
    folder = paths.disk_path(job.request.output_dir)
    paths.check_new(folder)
    if jax.process_index() == 0:
        paths.check_writable(folder)
    file = folder / SETTINGS
    if not file.exists():
        for part in job.parts:
            results = Results(folder, part.name, job)
            for path in (results.merged, results.file, *encoding_files(job, part, folder)):
                if path.exists():
                    raise ValueError(
                        f'{path} is there, and {SETTINGS} beside it is not: name another --output_dir'
                    )
        return
    old = checkpoint.flatten(paths.read_json(file))
    new = checkpoint.flatten(settings_as_json(job))
    changes = []
    for name in sorted(old | new):
        if old.get(name) != new.get(name):
            changes.append(f'{name}: {old.get(name)!r} -> {new.get(name)!r}')
    if changes:
        raise ValueError(
            f'{folder} holds results of other settings ({settings.first_ten(changes, "; ")}): name another '
            '--output_dir, or remove it'
        )


def record_settings(job: Job, folder: Path) -> None:
    """Write the settings that all shards must have. Another process may write the same ones."""
    check_output(job)
    file = folder / SETTINGS
    if not file.exists():
        content = json.dumps(settings_as_json(job), indent=1).encode()
        paths.replace_file(file, content, f'{job.request.shard}-of-{job.request.num_shards}')


def settings_as_json(job: Job) -> dict[str, Any]:
    """Return everything that the results depend on."""
    request = job.request
    model_settings = {'dtype': job.model_config.dtype}
    for name, content in own_model.record_of(job.model_config).items():
        model_settings[name] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return {
        'checkpoint': {'path': str(job.directory), 'manifest': manifest_digest(job.directory)},
        'vocabulary': job.vocabulary.hash,
        'model': model_settings,
        'restore': {'dtype': job.config.restore.dtype},
        'mode': job.mode,
        'decode': job.config.decode.to_dict(),
        'fields': list(request.fields),
        'output_ids': request.output_ids,
        'num_shards': request.num_shards,
        'examples': {part.name: part.digest for part in job.parts},
    }


def manifest_digest(directory: Any) -> str:
    """Return a digest of the manifest of a checkpoint of ours; '' for others."""
    file = directory / checkpoint.MANIFEST
    if not paths.is_file(file):
        return ''
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
