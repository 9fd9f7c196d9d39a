"""`--mode=cache`: tokenize tasks to disk once, as SeqIO's task caches.

Each task has passes, each over some of its files; a pass has shards, which are as independent as
the lanes of a batch, so that processes and machines share them. A shard that is whole is renamed
to its name and its statistics are written to `.progress`. Whoever finds all of them there completes
the cache. Imports no jax.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import tqdm

import data
import mixtures
import paths
import prefetch
import seqio_cache
import sources
import tasks
from mixtures import Task
from vocabulary import Vocabulary, named_vocabulary

BYTES_PER_SHARD = 1 << 24  # of text
MAX_SHARDS = 1024
COMPRESSION = 3  # of gzipped text, roughly
RECORDS_AT_ONCE = 128  # that are tokenized
SECONDS_BETWEEN_REPORTS = 1.0
PROGRESS = '.progress'  # the folder of the statistics of finished shards


class Job(NamedTuple):
    """One shard of one pass over a task: it writes one file for each of `splits`."""

    task: str
    splits: tuple[str, ...]
    shard: int
    num_shards: int


def cache(config: Any, part: int = 1, num_parts: int = 1) -> list[str]:
    """Cache what config.data.task names below the first of data.cache_dirs, part `part` of it.

    `config`: config.data. Tasks that are cached already are skipped, and so are shards that an
    earlier call finished. Return what to print at the end. Raises ValueError for settings that are
    not valid and where another cache is in the way.
    """
    config = raw_settings(config)
    vocabulary = vocabulary_of(config)
    root = sources.cache_roots(config)[0]
    messages = []
    opened = []
    for name, task in mixtures.tasks_of(tasks.find(config)).items():
        if seqio_cache.find([root], name):
            messages.append(f'{name} is cached already, in {folder_of(root, name)}.')
        else:
            opened.append(open_task(task, config, vocabulary))
            source = opened[-1].source
            if task.train_split != sources.NO_SPLIT:
                source.check_not_empty('train')
            if source.validation is not None:
                source.check_not_empty('validation')
    jobs = []
    for opened_task in opened:
        prepare_folder(folder_of(root, opened_task.name), opened_task, vocabulary)
        jobs += jobs_of(opened_task)
    own = [job for job in jobs[part - 1 :: num_parts] if not is_done(root, job)]
    run_jobs(config, root, own)
    for opened_task in opened:
        messages.append(complete(folder_of(root, opened_task.name), jobs_of(opened_task)))
    return messages


def raw_settings(config: Any) -> Any:
    """Return a copy of config.data that reads no cache. Raises ValueError without a place for one."""
    config = config.copy_and_resolve_references()
    if not sources.cache_roots(config):
        raise ValueError('--mode=cache needs a folder for the caches: name it with data.cache_dirs')
    config.use_cached = 'no'
    return config


def vocabulary_of(config: Any) -> Vocabulary:
    """Return the vocabulary whose ids are cached."""
    if not config.vocabulary:
        raise ValueError(
            "data.vocabulary='': --mode=cache needs the vocabulary whose ids it writes: name a "
            'SentencePiece model, a folder that holds one (such as a run), or bytes'
        )
    return named_vocabulary(
        'data.vocabulary', config.vocabulary, config.extra_ids, byte_extra_ids=config.extra_ids
    )


def open_task(task: Task, config: Any, vocabulary: Vocabulary) -> data.TokenizedTask:
    """Open the source of a task."""
    opened = mixtures.OpenTask(task, mixtures.open_task(task, config), rate=1.0)
    return data.TokenizedTask(opened, config, vocabulary)


def folder_of(root: Path, task: str) -> Path:
    """Return the folder of a task's cache."""
    return Path(root, *task.split(':'))


# Shards.


def jobs_of(task: data.TokenizedTask) -> list[Job]:
    """Return all shards of a task. How many there are depends on its files alone.

    Without files for validation one pass writes both splits.
    """
    source = task.source
    splits = [split for split in ('train', 'validation') if source.may_hold(split)]
    if source.validation is None:
        return shards(task.name, tuple(splits), source.train, source)
    jobs = shards(task.name, ('train',), source.train, source)
    return jobs + shards(task.name, ('validation',), source.validation, source)


def shards(
    task: str,
    splits: tuple[str, ...],
    part: sources.Blocks | sources.GzippedFiles,
    source: sources.Source,
) -> list[Job]:
    """Return the shards of one pass, which reads `part` of a source."""
    num_bytes = sum(file.num_bytes for file in source.files if file.split in splits)
    most = MAX_SHARDS
    if isinstance(part, sources.GzippedFiles):
        num_bytes *= COMPRESSION
        most = len(part.names)
    num_shards = min(max(num_bytes // BYTES_PER_SHARD, 1), most)
    return [Job(task, splits, shard, num_shards) for shard in range(num_shards)]


def file_name(job: Job, split: str) -> str:
    """Return the name of the file of a split."""
    return f'{split}.tfrecord-{job.shard:05}-of-{job.num_shards:05}'


def statistics_file(folder: Path, job: Job, split: str) -> Path:
    """Return where the statistics of a file are until the cache is complete."""
    return folder / PROGRESS / f'{file_name(job, split)}.json'


def is_done(root: Path, job: Job) -> bool:
    """Return whether all files of a shard are whole."""
    folder = folder_of(root, job.task)
    return all(statistics_file(folder, job, split).exists() for split in job.splits)


class ShardWriter:
    """Writes the examples of one shard of one split, and counts them as SeqIO's stats do.

    The end of `unfinished` gives the files their names.
    """

    def __init__(self, folder: Path, job: Job, split: str, unfinished: contextlib.ExitStack):
        path = str(folder / file_name(job, split))
        self._statistics_file = statistics_file(folder, job, split)
        self._files: list[IO[bytes]] = []
        for name in (path, *seqio_cache.ids_files(path)):
            file = paths.replacing(Path(name), writer=f'-{os.getpid()}')
            self._files.append(unfinished.enter_context(file))
        self._num_ids = 0
        self._statistics = {'examples': 0}
        for feature in seqio_cache.FEATURES:
            self._statistics[f'{feature}_tokens'] = 0
            self._statistics[f'{feature}_max_tokens'] = 0

    def write(self, example: data.Tokenized) -> None:
        """Append an example: ids without EOS, and the texts."""
        content: dict[str, Any] = {}
        self._statistics['examples'] += 1
        for feature in seqio_cache.FEATURES:
            feature_ids = example.ids.get(feature, np.zeros(0, np.int32))
            content[feature] = feature_ids
            content[f'{feature}_pretokenized'] = example.texts.get(feature, '')
            self._statistics[f'{feature}_tokens'] += len(feature_ids)
            longest = max(self._statistics[f'{feature}_max_tokens'], len(feature_ids))
            self._statistics[f'{feature}_max_tokens'] = longest
        records, ids, index = self._files
        seqio_cache.write_record(records, seqio_cache.encode(content))
        entry = seqio_cache.write_ids(
            ids, self._num_ids, inputs=content['inputs'], targets=content['targets']
        )
        self._num_ids += entry.num_inputs + entry.num_targets
        index.write(np.array(entry, '<i8').tobytes())

    def finish(self) -> None:
        """Say that the files, which have their names by now, are whole."""
        paths.replace_file(self._statistics_file, json.dumps(self._statistics).encode())


def write_shard(task: data.TokenizedTask, job: Job, root: Path) -> Iterator[int]:
    """Write the files of a shard. Yield the number of new examples now and then."""
    folder = folder_of(root, job.task)
    records = records_of(task.source, job)
    with contextlib.ExitStack() as unfinished:
        writers = {split: ShardWriter(folder, job, split, unfinished) for split in job.splits}
        while True:
            group = list(itertools.islice(records, RECORDS_AT_ONCE))
            if not group:
                break
            for split, writer in writers.items():
                own = [record for record_split, record in group if record_split == split]
                examples = task.tokenize(own)
                for example in examples:
                    writer.write(example)
                yield len(examples)
    for writer in writers.values():
        writer.finish()


def records_of(source: sources.Source, job: Job) -> Iterator[tuple[str, sources.Record]]:
    """Yield the records of a shard in a random order, each with its split."""
    part = source.part_of(job.splits[0])
    share = sources.Share(seed=0, epoch=0, lane=job.shard, num_lanes=job.num_shards)
    for number, records in part.pools(share, first=0, keep=lambda record: True):
        for i in sources.permutation(len(records), 'pool', 0, 0, job.shard, number):
            record = records[i]
            if record is None:
                continue
            split = job.splits[0]
            if len(job.splits) > 1 and source.is_in_split('validation', record):
                split = 'validation'
            yield split, record


# Processes, each of which writes some of the shards.


class Report(NamedTuple):
    """What a process says now and then."""

    num_examples: int  # since its last report
    num_shards: int
    faults: list[str]  # lines that were left out


def run_jobs(config: Any, root: Path, jobs: Sequence[Job]) -> None:
    """Write shards in processes of their own, and show how far they are."""
    num_processes = min(config.num_workers or os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context('spawn')
    processes = []
    connections: list[Connection] = []
    for i in range(num_processes):
        own_end, workers_end = context.Pipe(duplex=False)
        arguments = (config, root, jobs[i::num_processes], workers_end)
        process = context.Process(target=write_shards, args=arguments, daemon=True)
        process.start()
        workers_end.close()
        processes.append(process)
        connections.append(own_end)
    try:
        show_progress(connections, len(jobs))
    finally:
        for process in processes:
            process.kill()
            process.join()


def show_progress(connections: list[Connection], num_jobs: int) -> None:
    """Show the reports of all processes until they end. Raise an error that one of them sends."""
    num_examples = 0
    num_done = 0
    with tqdm.tqdm(total=num_jobs, unit='shard', desc='Caching', mininterval=1.0) as bar:
        while connections:
            for connection in wait(connections):
                assert isinstance(connection, Connection)
                try:
                    report: Report | Exception = connection.recv()
                except EOFError:
                    connections.remove(connection)
                    continue
                if isinstance(report, Exception):
                    raise report
                for fault in report.faults:
                    bar.write(f'Left out: {fault}')
                num_examples += report.num_examples
                num_done += report.num_shards
                bar.set_postfix_str(f'{num_examples:,} examples', refresh=False)
                bar.update(report.num_shards)
    if num_done < num_jobs:
        raise ChildProcessError(
            f'a process that wrote shards died ({num_jobs - num_done} of {num_jobs} shards are missing): if the '
            'machine ran out of memory, use fewer data.num_workers; the same command goes on'
        )


def write_shards(config: Any, root: Path, jobs: Sequence[Job], connection: Connection) -> None:
    """Write shards, and send reports."""
    prefetch.send_all(reports(config, root, jobs), connection)


def reports(config: Any, root: Path, jobs: Sequence[Job]) -> Iterator[Report]:
    """Write shards. Yield a report every second, and after each shard."""
    vocabulary = vocabulary_of(config)
    found = mixtures.tasks_of(tasks.find(config))
    opened: dict[str, data.TokenizedTask] = {}
    reported = time.monotonic()
    for job in jobs:
        if job.task not in opened:
            opened[job.task] = open_task(found[job.task], config, vocabulary)
        task = opened[job.task]
        num_examples = 0
        for count in write_shard(task, job, root):
            num_examples += count
            if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                yield Report(num_examples, 0, task.source.faults()[0])
                num_examples = 0
                reported = time.monotonic()
        yield Report(num_examples, 1, task.source.faults()[0])


# The folder of a task.


def prepare_folder(folder: Path, task: data.TokenizedTask, vocabulary: Vocabulary) -> None:
    """Make the folder of a cache, or check that it holds a part of the same cache."""
    content = {
        'fingerprint': task.source.fingerprint,
        'vocabulary_hash': vocabulary.hash,
        'validation_fraction': task.source.validation_fraction,
        'text_field': task.task.text_field,
        'inputs': task.task.inputs,
        'targets': task.task.targets,
    }
    (folder / PROGRESS).mkdir(parents=True, exist_ok=True)
    file = folder / seqio_cache.ORIGIN
    if not file.exists():
        paths.replace_file(file, json.dumps(content, indent=2).encode())
        if vocabulary.model:
            paths.replace_file(folder / 'vocabulary.model', vocabulary.model)
        return
    old = seqio_cache.read_json(file)
    changed = [name for name, value in content.items() if old.get(name) != value]
    if changed:
        raise ValueError(
            f'{folder} holds part of a cache of other data ({", ".join(changed)} changed): remove it, or name '
            'another folder with data.cache_dirs'
        )


def complete(folder: Path, jobs: Sequence[Job]) -> str:
    """Complete a cache all of whose shards are whole. Return what to print."""
    statistics: dict[str, list[dict[str, int]]] = {}
    num_missing = 0
    for job in jobs:
        for split in job.splits:
            file = statistics_file(folder, job, split)
            if file.exists():
                statistics.setdefault(split, []).append(seqio_cache.read_json(file))
            else:
                num_missing += 1
    name = jobs[0].task
    if num_missing and not (folder / 'COMPLETED').exists():
        return (
            f'{name}: {num_missing:,} files are still missing, those of other parts: the last part '
            '(--shard) to end completes the cache.'
        )
    if not num_missing:
        for split, of_shards in statistics.items():
            seqio_cache.write_info(folder, split, of_shards)
        (folder / 'COMPLETED').touch()
        shutil.rmtree(folder / PROGRESS, ignore_errors=True)
        for unfinished in folder.glob('.*.unfinished*'):  # of calls that were killed
            unfinished.unlink(missing_ok=True)
    sizes = []
    for split in seqio_cache.splits(folder):
        opened = seqio_cache.open_split(folder, split)
        sizes.append(f'{opened.num_examples:,} examples in split {split}')
    return f'{name} is cached in {folder}: {", ".join(sizes)}.'
