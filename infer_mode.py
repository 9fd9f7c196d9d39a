"""`--mode=infer`: predict or score a task's split, a file or one text, as JSON Lines in T5X's form.

Examples are written in chunks. A finished chunk is renamed to its name, so a job that was killed
goes on after it. Shard i of n takes every n-th example; the last shard to end merges the results.

    infer.json                           the settings; results of others are refused
    tmp-TASK-SSSSS-of-NNNNN/             the chunks of a shard, until it ends
    TASK-MODE.jsonl-SSSSS-of-NNNNN       the lines of a shard
    TASK-MODE.jsonl-SSSSS-of-NNNNN.COMPLETED
    TASK-MODE.jsonl                      the lines of all shards, in the order of the examples

Source: T5X t5x/infer.py.
"""

import contextlib
import fcntl
import gzip
import hashlib
import itertools
import json
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import tqdm
from ml_collections import ConfigDict

import checkpoint
import convert
import data
import infer
import mixtures
import model
import partition
import paths
import settings
import sources
import tasks
import workdir
from configs import base
from objectives import takes_inputs
from results import json_default
from vocabulary import (
    EOS_ID,
    ByteVocabulary,
    Vocabulary,
    find_vocabulary,
    named_vocabulary,
    read_settings,
)

SETTINGS = 'infer.json'
RUN_SETTINGS = (
    'model.',
    'data.',
    'decode.',
    'infer_eval.',
)  # those that a run's checkpoint is used with
RECORDS_AT_ONCE = 128  # that are tokenized
SPLITS = ('train', 'validation', 'test')
STANDARD_INPUT = '-'
PRETOKENIZED = '_pretokenized'  # T5X's name of a text is that of its ids with this at its end


class Request(NamedTuple):
    """What the flags ask for, beside the config."""

    checkpoint: str
    output_dir: str = ''  # '' writes to standard output
    input: str = ''  # a file; '' takes the split of a task
    text: str | None = None  # in place of both
    split: str = ''  # 'test' if not given
    score: bool = False
    fields: tuple[str, ...] = ()  # of the examples that lines have beside the texts; 'all' for all
    output_ids: bool = False
    trim: bool = False
    shard: int = 1
    num_shards: int = 1


class Item(NamedTuple):
    """An example, and what may be written of it: T5X's features by name, and its other fields."""

    fields: dict[str, Any]
    inputs: np.ndarray  # ids, EOS included
    targets: np.ndarray | None
    is_trimmed: bool


class Examples(Protocol):
    """Examples that can be read again and again, in the same order."""

    name: str

    def __iter__(self) -> Iterator[Item]: ...

    def faults(self) -> list[str]:
        """Return descriptions of records that were left out since the last call."""
        ...


class Survey(NamedTuple):
    """What one reading of all examples finds."""

    num_examples: int
    num_trimmed: int
    digest: str  # of what is predicted and written


class Part(NamedTuple):
    """The examples of one task, and what is known of them."""

    examples: Examples
    survey: Survey


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
    model_config = model.T5Config(**config.model) if config is not None else None
    opened = convert.open_model(request.checkpoint, model_config)
    vocabulary_name = changes.get('data.vocabulary', '')
    if config is None:
        config = settings_of(opened.directory, changes)
        model_config = changed_model(opened, config, changes)
    else:
        vocabulary_name = config.data.vocabulary
        model_config = opened.config
    settings.check(config)
    vocabulary = vocabulary_of(
        opened.directory, vocabulary_name, config.data, model_config.vocab_size
    )
    check_decoding(config.decode, model_config)
    parts = []
    if request.text is None:
        for examples in examples_of(request, config.data, vocabulary):
            parts.append(Part(examples, survey(examples, request)))
    else:
        encode_text(request.text, vocabulary, config.data.lengths.inputs, request.trim)
    job = Job(request, config, opened.directory, model_config, vocabulary, parts)
    if request.output_dir:
        check_output(job)
    return job


def check_request(request: Request) -> None:
    """Raise ValueError for flags that do not fit together."""
    if not request.checkpoint:
        raise ValueError('--mode=infer needs a model: name it with --checkpoint=PATH')
    if request.text is not None:
        if not request.text.strip():
            raise ValueError("--text='' has no text: write one, as in --text='translate ...'")
        for name in ('output_dir', 'input', 'score', 'fields', 'output_ids'):
            if getattr(request, name):
                raise ValueError(
                    f'--{name} is not for --text, which prints one answer: leave one of them out'
                )
    if request.split and (request.input or request.text is not None):
        raise ValueError(
            f'--split={request.split} is of a task, and --input or --text is given: leave one of them out'
        )
    if request.split not in ('', *SPLITS):
        raise ValueError(f'--split={request.split}: must be one of {", ".join(SPLITS)}')
    if request.num_shards > 1:
        shard = f'--shard={request.shard}/{request.num_shards}'
        if not request.output_dir:
            raise ValueError(f'{shard} needs a folder for the results of all: name --output_dir')
        if request.input == STANDARD_INPUT:
            raise ValueError(f'{shard} needs a file that each shard reads: name it with --input')


def settings_of(directory: Any, changes: Mapping[str, Any]) -> ConfigDict:
    """Return the settings of the run that saved a checkpoint, else the defaults, with `changes`.

    The mesh and all that concerns training are not the run's.
    """
    config = base.get_config()
    stored = checkpoint.flatten(read_settings(directory))
    for key, _ in settings.leaves(config):
        name = key.replace('.', '/')
        if key.startswith(RUN_SETTINGS) and name in stored:
            config.update_from_flattened_dict({key: stored[name]})
    config.update_from_flattened_dict(dict(changes))
    return config


def changed_model(
    opened: convert.OpenedModel, config: Any, changes: Mapping[str, Any]
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
    found = convert.open_model(opened.directory, model.T5Config(**config.model))
    return found.config


def vocabulary_of(directory: Any, name: str, config: Any, vocab_size: int) -> Vocabulary:
    """Return the vocabulary that `name` names, else the checkpoint's; `config`: config.data.

    Raises ValueError for none, and for one that is not the checkpoint's.
    """
    own = find_vocabulary(directory)
    if isinstance(own, ByteVocabulary):
        name = name or 'bytes'
    found = own
    if name:
        found = named_vocabulary(
            'data.vocabulary', name, config.extra_ids, byte_extra_ids=config.extra_ids
        )
    if found is None:
        raise ValueError(
            f'{directory} has no vocabulary: name one with --config.data.vocabulary: a SentencePiece '
            'model, a folder that holds one, or bytes'
        )
    if own is not None and own.model != found.model:
        raise ValueError(
            f'data.vocabulary={name!r} is not the vocabulary of {directory}: leave it out'
        )
    if found.size > vocab_size:
        raise ValueError(
            f'the vocabulary has {found.size:,} ids, and {directory} has {vocab_size:,} rows for '
            'them: name the vocabulary it was trained with (--config.data.vocabulary)'
        )
    return found


def check_decoding(config: Any, model_config: model.T5Config) -> None:
    """Raise ValueError for options of decoding that do not fit together."""
    infer.Decoding.of_settings(config)
    if config.top_k > model_config.vocab_size:
        raise ValueError(
            f'decode.top_k={config.top_k}: must be at most model.vocab_size={model_config.vocab_size}; 0 '
            'keeps all'
        )


def survey(examples: Examples, request: Request) -> Survey:
    """Read all examples once: what is wrong with one of them is found before anything is computed."""
    digest = hashlib.blake2b(digest_size=16)
    num_examples = 0
    num_trimmed = 0
    for item in examples:
        num_examples += 1
        num_trimmed += item.is_trimmed
        digest.update(item.inputs.tobytes())
        if request.score and item.targets is not None:
            digest.update(b' targets ' + item.targets.tobytes())
        written = selected(item.fields, request.fields)
        digest.update(json.dumps(written, default=json_default).encode())
    if num_examples == 0:
        raise ValueError(f'{examples.name} has no example: name a split or a file with some')
    return Survey(num_examples, num_trimmed, digest.hexdigest())


# Where examples come from.


def examples_of(request: Request, config: Any, vocabulary: Vocabulary) -> Iterator[Examples]:
    """Yield the examples of a file, or of each task of a mixture; `config`: config.data."""
    if request.input:
        yield FileExamples(request, config, vocabulary)
        return
    for name, task in mixtures.tasks_of(tasks.find(config)).items():
        if not takes_inputs(task.objective):
            raise ValueError(
                f'data.task={name!r} has no inputs to answer: name a text-to-text task with '
                '--config.data.task, a file with --input, or a text with --text'
            )
        opened = mixtures.OpenTask(task, mixtures.open_task(task, config), rate=1.0)
        tokenized = data.TokenizedTask(opened, config, vocabulary)
        yield TaskExamples(tokenized, request.split or 'test')


class TaskExamples:
    """The examples of a split of a task, cut as in training."""

    def __init__(self, task: data.TokenizedTask, split: str):
        self.name = task.name
        self.task = task
        self.split = split

    def __iter__(self) -> Iterator[Item]:
        source = self.task.source
        records = source.records(self.split, whole=True)
        if source.is_tokenized:
            for record in records:
                texts = texts_of(record.fields, suffix=PRETOKENIZED)
                yield from self.items(self.task.tokenize([record]), record.fields, texts)
            return
        while group := list(itertools.islice(records, RECORDS_AT_ONCE)):
            for tokenized in self.task.tokenize(group):
                yield from self.items([tokenized], tokenized.texts, texts_of(tokenized.texts))

    def faults(self) -> list[str]:
        return self.task.source.faults()[0]

    def items(
        self,
        examples: Sequence[data.Tokenized],
        fields: Mapping[str, Any],
        texts: Mapping[str, str],
    ) -> Iterator[Item]:
        """Yield an example cut to its row; none where it is bad or the objective drops it."""
        names = [example.name for example in examples]
        ids = [example.ids for example in examples]
        for made in self.task.objective.examples(names, ids):
            yield Item(
                fields=features_of(fields, texts, made.inputs, made.targets),
                inputs=made.inputs,
                targets=made.targets,
                is_trimmed=made.is_trimmed,
            )


def texts_of(fields: Mapping[str, Any], suffix: str = '') -> dict[str, str]:
    """Return {'inputs': text, 'targets': text}, those of them that an example has."""
    texts = {}
    for name in ('inputs', 'targets'):
        if name + suffix in fields:
            texts[name] = fields[name + suffix]
    return texts


def features_of(
    fields: Mapping[str, Any],
    texts: Mapping[str, str],
    inputs: np.ndarray,
    targets: np.ndarray | None,
) -> dict[str, Any]:
    """Return the features of an example by T5X's names: ids, texts, and the other fields."""
    found: dict[str, Any] = {}
    for name, ids in (('inputs', inputs), ('targets', targets)):
        if ids is not None:
            found[name] = ids
        if name in texts:
            found[name + PRETOKENIZED] = texts[name]
    for name, value in fields.items():
        found.setdefault(name, value)
    return found


class FileExamples:
    """The lines of a file: JSON objects, or texts that are inputs.

    The inputs and targets of a JSON object are those of data.inputs and data.targets, if they are
    set, else its fields of that name. Standard input is JSON Lines if its first character is '{'.
    """

    def __init__(self, request: Request, config: Any, vocabulary: Vocabulary):
        self.path = request.input
        self.title = request.input
        self.is_json = sources.kind_of(self.path) == 'json'
        self.name = Path(self.path.removesuffix('.gz')).stem
        if self.path == STANDARD_INPUT:
            self.title = 'standard input'
            self.name = 'stdin'
            self.spooled = spooled_standard_input()  # as long as it is open
            self.path = self.spooled.name
            self.is_json = first_byte(self.path) == b'{'
        elif sources.kind_of(self.path) not in ('json', 'text'):
            raise ValueError(
                f'--input={self.path}: only text and JSON Lines (.jsonl, .json, .ndjson, each also gzipped) '
                'are read: convert it'
            )
        else:
            [self.path, *others] = paths.matching_files(self.path)
            if others:
                raise ValueError(
                    f'--input={request.input} stands for {len(others) + 1} files: name one'
                )
        if request.score and not self.is_json:
            raise ValueError(
                f'--score needs targets, and {self.title} is plain text: write JSON Lines, each with the '
                "fields 'inputs' and 'targets'"
            )
        self.templates = {
            'inputs': sources.Template('data.inputs', config.inputs or '{inputs}'),
            'targets': sources.Template('data.targets', config.targets or '{targets}'),
        }
        self.needs_targets = request.score
        self.trim = request.trim
        self.lengths = dict(config.lengths)
        self.vocabulary = vocabulary

    def __iter__(self) -> Iterator[Item]:
        lines = numbered_lines(self.path, self.title)
        while group := list(itertools.islice(lines, RECORDS_AT_ONCE)):
            yield from self.items(group)

    def faults(self) -> list[str]:
        return []  # a line that cannot be read stops the job

    def items(self, lines: Sequence[tuple[int, str]]) -> Iterator[Item]:
        """Yield the examples of some lines."""
        fields = [self.fields_of(number, line) for number, line in lines]
        texts = []
        for i, (number, _) in enumerate(lines):
            texts.append(self.texts_of(number, fields[i]))
        ids = {}
        for name in ('inputs', 'targets'):
            of_name = [of_line.get(name, '') for of_line in texts]
            ids[name] = self.vocabulary.encode_as_arrays(of_name, glued_sentinels=True)
        for i, (number, _) in enumerate(lines):
            inputs = self.ended('inputs', ids['inputs'][i], number)
            is_trimmed = len(inputs) <= len(ids['inputs'][i])
            targets = None
            if 'targets' in texts[i]:
                targets = self.ended('targets', ids['targets'][i], number)
                is_trimmed |= len(targets) <= len(ids['targets'][i])
            features = features_of(fields[i], texts[i], inputs, targets)
            yield Item(features, inputs, targets, is_trimmed)

    def fields_of(self, number: int, line: str) -> dict[str, Any]:
        """Return the fields of a line."""
        title = f'line {number} of {self.title}'
        if not line.strip():
            raise ValueError(f'{title} is empty: remove it, each line is an example')
        if not self.is_json:
            return {'inputs': line}
        try:
            return sources.json_object(line.strip(), 'inputs')
        except ValueError as error:
            raise ValueError(f'{title}: {error}') from None

    def texts_of(self, number: int, fields: Mapping[str, Any]) -> dict[str, str]:
        """Return the inputs of a line and, if it has them, its targets."""
        texts = {}
        try:
            texts['inputs'] = self.filled('inputs', fields)
            is_text = []
            for field in self.templates['targets'].fields:
                is_text.append(isinstance(fields.get(field), str | int | float))
            if self.needs_targets or all(is_text):
                texts['targets'] = self.filled('targets', fields)
        except ValueError as error:
            raise ValueError(f'line {number} of {self.title}: {error}') from None
        return texts

    def filled(self, name: str, fields: Mapping[str, Any]) -> str:
        """Return the inputs or targets of a line. Numbers are written as JSON writes them."""
        template = self.templates[name]
        if not self.is_json:
            template = sources.Template(name, f'{{{name}}}')
        values = {}
        for field in template.fields:
            value = fields.get(field)
            if isinstance(value, int | float):
                values[field] = json.dumps(value)
                continue
            values[field] = sources.json_string(
                dict(fields), field, remedy=f'add it, or name others with --config.data.{name}'
            )
        return template.fill(values)

    def ended(self, name: str, ids: np.ndarray, number: int) -> np.ndarray:
        """Return ids with EOS at their end. Those that are too long are cut if the user says so."""
        length = self.lengths[name]
        if len(ids) >= length:
            if not self.trim:
                title = f'the {name} in line {number} of {self.title}'
                raise too_long(title, len(ids) + 1, name, length)
            ids = ids[: length - 1]
        return np.append(ids, np.int32(EOS_ID)).astype(np.int32)


def too_long(title: str, num_tokens: int, name: str, length: int) -> ValueError:
    """Return the error that a text has more tokens than its row."""
    return ValueError(
        f'{title} have {num_tokens} tokens, EOS included, more than data.lengths.{name}={length}: shorten them, '
        f'cut them with --trim, or set --config.data.lengths.{name}={num_tokens}'
    )


def encode_text(text: str, vocabulary: Vocabulary, length: int, trim: bool) -> list[int]:
    """Return the ids of --text, EOS included. Raises ValueError for one that is too long."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError('--text is not UTF-8: write it in UTF-8') from None
    [ids] = vocabulary.encode([text], glued_sentinels=True)
    if len(ids) >= length and not trim:
        raise too_long('the words of --text', len(ids) + 1, 'inputs', length)
    return [*ids[: length - 1], EOS_ID]


def numbered_lines(path: str, title: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) of a file, which may be gzipped. Raises ValueError for what is no text."""
    number = 0
    try:
        with sources.open_unzipped(path, sources.SEQUENTIAL_READ_AHEAD) as file:
            for number, line in enumerate(file, start=1):
                encoding = 'utf-8-sig' if number == 1 else 'utf-8'
                yield number, line.decode(encoding).removesuffix('\n').removesuffix('\r')
    except UnicodeDecodeError as error:
        raise ValueError(
            f'line {number} of {title}: byte {error.start + 1} is not UTF-8: convert the file'
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f'{title} is broken gzip ({error}): copy it again') from None
    if number == 0:
        raise ValueError(f'{title} is empty: write a line for each example')


def spooled_standard_input() -> Any:
    """Return a temporary file that holds standard input, which is read twice."""
    file = tempfile.NamedTemporaryFile(prefix='standard-input-')  # noqa: SIM115
    shutil.copyfileobj(sys.stdin.buffer, file)
    file.flush()
    return file


def first_byte(path: str) -> bytes:
    """Return the first byte of a file, b'' if it is empty."""
    with open(path, 'rb') as file:
        return file.read(1)


# From a job to lines.


def infer_all(job: Job) -> list[str]:
    """Do a job: write its results, or print them. Return what to say at the end."""
    if job.request.text is not None:
        print_answers(job, job.request.text)
        return []
    messages: list[str] = []
    for part in job.parts:
        counts = {part.examples.name: [part.survey.num_examples, part.survey.num_trimmed]}
        messages += workdir.describe_trimming(counts)
        messages += [f'Left out: {fault}' for fault in part.examples.faults()]
    if not job.request.output_dir:
        print_lines(job)
        return messages
    return messages + write_results(job, paths.disk_path(job.request.output_dir))


def print_answers(job: Job, text: str) -> None:
    """Print the answers to a text, one a line; their scores go to stderr."""
    config = job.config
    ids = encode_text(text, job.vocabulary, config.data.lengths.inputs, job.request.trim)
    options = infer.decoding_options(config.decode)
    [answer] = infer.predict_all(load(job), [infer.Example(ids)], batch_size=1, options=options)
    for tokens, score in zip(answer.tokens, answer.scores, strict=True):
        if config.decode.return_scores:
            print(f'{score:.6g} nats:', file=sys.stderr, flush=True)
        print(job.vocabulary.decode(tokens), flush=True)


def print_lines(job: Job) -> None:
    """Print the line of each example."""
    t5 = load(job)
    for part in job.parts:
        items = enumerate(part.examples)
        with progress_bar(part.examples.name, part.survey.num_examples) as bar:
            for chunk in chunks(items):
                for line in lines_of(job, t5, chunk, bar.update):
                    sys.stdout.write(line)
                sys.stdout.flush()


def write_results(job: Job, folder: Path) -> list[str]:
    """Write what is not there yet. Return what to print."""
    messages = []
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, job.request):
        record_settings(job, folder)
        t5 = None
        for part in job.parts:
            results = Results(folder, part.examples.name, job)
            if not results.completed.exists():
                if t5 is None:
                    t5 = load(job)
                write_shard(job, t5, part, results)
            messages.append(results.merge())
    return messages


def load(job: Job) -> infer.T5:
    """Read the parameters of the checkpoint."""
    return infer.load(
        job.directory,
        config=job.model_config,
        mesh=partition.make_mesh(**job.config.mesh),
        dtype=job.config.restore.dtype,
    )


def write_shard(job: Job, t5: infer.T5, part: Part, results: 'Results') -> None:
    """Write the chunks of a shard that are not there yet, and put them together."""
    request = job.request
    first = request.shard - 1
    items = itertools.islice(enumerate(part.examples), first, None, request.num_shards)
    num_own = len(range(first, part.survey.num_examples, request.num_shards))
    results.make_folder()
    num_chunks = 0
    with progress_bar(part.examples.name, num_own) as bar:
        for chunk in chunks(items):
            if results.chunk(num_chunks).exists():
                bar.initial += len(chunk)
                bar.update(len(chunk))
            else:
                lines = ''.join(lines_of(job, t5, chunk, bar.update))
                paths.replace_file(results.chunk(num_chunks), lines.encode())
            num_chunks += 1
    results.finish(num_chunks)


def chunks(items: Iterator[tuple[int, Item]]) -> Iterator[list[tuple[int, Item]]]:
    """Yield lists of items, each with its number, of the size that is sorted by length."""
    while chunk := list(itertools.islice(items, infer.EXAMPLES_PER_CHUNK)):
        yield chunk


def progress_bar(name: str, total: int) -> tqdm.tqdm:
    """Return a bar on stderr that shows examples and the time left."""
    mininterval = 1.0 if sys.stderr.isatty() else 30.0
    return tqdm.tqdm(total=total, unit=' examples', desc=name, mininterval=mininterval)


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


class Results:
    """The files of one task's results, of one shard."""

    def __init__(self, folder: Path, task: str, job: Job):
        task = task.replace('/', '_')
        self.num_shards = job.request.num_shards
        self.merged = folder / f'{task}-{job.mode}.jsonl'
        self.file = self.of_shard(job.request.shard)
        self.completed = completed(self.file)
        suffix = self.file.name.removeprefix(f'{self.merged.name}-')
        self.chunks = folder / f'tmp-{task}-{suffix}'

    def of_shard(self, shard: int) -> Path:
        """Return the file of a shard, the first one being 1."""
        name = f'{self.merged.name}-{shard - 1:05}-of-{self.num_shards:05}'
        return self.merged.with_name(name)

    def chunk(self, number: int) -> Path:
        """Return the file of a chunk, which exists when the chunk is finished."""
        return self.chunks / f'{self.file.name}-chunk{number:05}'

    def make_folder(self) -> None:
        self.chunks.mkdir(exist_ok=True)

    def finish(self, num_chunks: int) -> None:
        """Put the chunks together, and only then say that the shard is whole."""
        with paths.replacing(self.file) as file:
            for number in range(num_chunks):
                with self.chunk(number).open('rb') as chunk:
                    shutil.copyfileobj(chunk, file)
        self.completed.touch()

    def merge(self) -> str:
        """Merge the shards if all are whole. Return what to print."""
        shutil.rmtree(self.chunks, ignore_errors=True)
        files = [self.of_shard(shard) for shard in range(1, self.num_shards + 1)]
        missing = [file for file in files if not completed(file).exists()]
        if missing:
            return (
                f'{self.file} is written; {len(missing)} of {self.num_shards} shards are missing: the last '
                'one to end merges them.'
            )
        if not self.merged.exists():
            with contextlib.ExitStack() as stack:
                parts = [stack.enter_context(file.open('rb')) for file in files]
                merged = stack.enter_context(paths.replacing(self.merged, self.file.name))
                for line in interleaved(parts):
                    merged.write(line)
        return f'The results are in {self.merged}'


def completed(file: Path) -> Path:
    """Return the file that says that `file` is whole."""
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
    file = folder / SETTINGS
    if not file.exists():
        for part in job.parts:
            results = Results(folder, part.examples.name, job)
            for path in (results.merged, results.file):
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
    return {
        'checkpoint': {'path': str(job.directory), 'manifest': manifest_digest(job.directory)},
        'vocabulary': job.vocabulary.hash,
        'model': {'dtype': job.model_config.dtype},
        'restore': {'dtype': job.config.restore.dtype},
        'mode': job.mode,
        'decode': job.config.decode.to_dict(),
        'fields': list(request.fields),
        'output_ids': request.output_ids,
        'num_shards': request.num_shards,
        'examples': {part.examples.name: part.survey.digest for part in job.parts},
    }


def manifest_digest(directory: Any) -> str:
    """Return a digest of the manifest of a checkpoint of ours; '' for others."""
    file = directory / checkpoint.MANIFEST
    if not paths.is_file(file):
        return ''
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
