"""`--mode=cache`: tokenize tasks to disk once, as SeqIO's task caches.

Each task has passes, each over some of its files. A pass has shards, which are as independent as the
lanes of a batch, so that processes and machines can share them. A complete shard gets its final name,
and its statistics go to `.progress`. The process that finds all statistics there completes the cache.
Imports no jax.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import tqdm
from absl.flags import FlagValues
from ml_collections import ConfigDict

import paths
import tasks
import tasks.open
from formats.vocabulary import add_tokens, kept_files, mark_sentinels, named_vocabulary
from messages import Refused
from modes import command_line, process
from randomness import permutation
from run import prefetch
from run.lock import alone_in
from sources import FEATURES, NO_SPLIT, Record, Share, Source
from sources import cache as task_cache
from sources.gzipped import GzippedFiles
from sources.open import cache_roots, check_not_of_records
from sources.tfrecord import write_record
from stream import Tokenized, TokenizedTask
from vocabulary import Vocabulary

BYTES_PER_SHARD = 1 << 24  # plain text
MAX_SHARDS = 1024
COMPRESSION = 3  # roughly the ratio of gzipped text
RECORDS_AT_ONCE = 128  # records tokenized together
PROGRESS = '.progress'  # the folder of the statistics of finished shards


class ShardJob(NamedTuple):
    """One shard of one pass over a task: it writes one file for each of `splits`."""

    folder: Path  # the cache of the task
    task: str
    splits: tuple[str, ...]
    shard: int
    num_shards: int

    def file(self, split: str) -> Path:
        return self.folder / f'{split}.tfrecord-{self.shard:05}-of-{self.num_shards:05}'

    def statistics_file(self, split: str) -> Path:
        """Return the file with the statistics of the shard until the cache is complete."""
        return self.folder / PROGRESS / f'{self.file(split).name}.json'


def main(config: ConfigDict, flags: FlagValues, signals: process.Signals) -> int:
    signals.advice = process.SAME_COMMAND
    lines = cache(config.data, *command_line.parse_shard(flags.shard))
    signals.begin_work()
    process.print_lines(lines, sys.stdout)
    return 0


def cache(config: ConfigDict, part: int = 1, num_parts: int = 1) -> list[str]:
    """Cache part `part` of config.task below the first of config.cache_dirs. Return the lines to print.

    `config`: config.data. Skips tasks and shards that an earlier call finished. Raises Refused if
    another cache is in the way.
    """
    config = config.copy_and_resolve_references()
    if not cache_roots(config):
        raise Refused('--mode=cache needs data.cache_dirs: name a folder for the caches')
    if not config.vocabulary:
        raise Refused("data.vocabulary='': --mode=cache needs the vocabulary of its ids: name one")
    check_not_of_records(config)
    config.use_cached = 'no'
    vocabulary = vocabulary_of(config)
    root = paths.disk_path(cache_roots(config)[0])
    messages = []
    opened: dict[Path, TokenizedTask] = {}
    for name, task in tasks.open.tasks_of(tasks.open.find(config)).items():
        folder = Path(root, *name.split(':'))
        if task_cache.find([root], name):
            messages.append(f'{name} is cached already, in {folder}: remove it to cache it again.')
        elif task.train_split == task.validation_split == NO_SPLIT:
            messages.append(f'{name} is not cached: it has neither train nor validation.')
        else:
            opened_task = tasks.open.open_task(task, config)
            opened[folder] = TokenizedTask(opened_task, config, vocabulary)
            source = opened[folder].source
            if task.train_split != NO_SPLIT:
                source.check_not_empty('train')
            if source.validation is not None:
                source.check_not_empty('validation')
    jobs = {}
    for folder, tokenized_task in opened.items():
        with alone_in(folder):  # several parts may begin or end at once
            prepare_folder(folder, tokenized_task, vocabulary)
        jobs[folder] = jobs_of(folder, tokenized_task)
    unfinished_jobs = []
    for job in [*itertools.chain(*jobs.values())][part - 1 :: num_parts]:
        if not all(job.statistics_file(split).exists() for split in job.splits):
            unfinished_jobs.append(job)
    run_jobs(config, unfinished_jobs)
    for folder in jobs:
        with alone_in(folder):
            messages.append(complete(folder, jobs[folder]))
    return messages


def jobs_of(folder: Path, task: TokenizedTask) -> list[ShardJob]:
    """Return all shards of a task: their number depends only on its files.

    Without files for validation, one pass writes both splits.
    """
    source = task.source
    if source.validation is None:
        splits = [split for split in ('train', 'validation') if source.may_hold(split)]
        passes = [(splits, source.train)]
    else:
        passes = [(['train'], source.train), (['validation'], source.validation)]
    jobs = []
    for splits, part in passes:
        num_bytes = sum(file.num_bytes for file in source.files if file.split in splits)
        max_shards = MAX_SHARDS
        if isinstance(part, GzippedFiles):
            num_bytes *= COMPRESSION
            max_shards = len(part.names)
        num_shards = min(max(num_bytes // BYTES_PER_SHARD, 1), max_shards)
        for shard in range(num_shards):
            jobs.append(ShardJob(folder, task.name, tuple(splits), shard, num_shards))
    return jobs


class ShardWriter:
    """Writes the examples of one shard of one split, and counts them as SeqIO's stats do.

    The files get their names when `unfinished` closes.
    """

    def __init__(self, job: ShardJob, split: str, unfinished: contextlib.ExitStack):
        path = str(job.file(split))
        self._statistics_file = job.statistics_file(split)
        self._files: list[IO[bytes]] = []
        for name in (path, *task_cache.ids_files(path)):
            file = paths.replacing(Path(name), writer=f'-{os.getpid()}')
            self._files.append(unfinished.enter_context(file))
        self._num_ids = 0
        self._statistics: dict[str, Any] = {'examples': 0}
        for feature in FEATURES:
            self._statistics |= {f'{feature}_tokens': 0, f'{feature}_max_tokens': 0}

    def write(self, example: Tokenized) -> None:
        """Append an example: ids without EOS, the texts, and the other fields that a cache can hold."""
        content: dict[str, Any] = {}
        fields = {}
        for name, value in example.texts.items():
            description = task_cache.described(value)
            if description is not None and name not in FEATURES:
                content[name] = value
                fields[name] = description
        statistics = self._statistics
        if statistics['examples']:
            fields = task_cache.described_by_both(statistics['fields'], fields)
        statistics['fields'] = fields
        statistics['examples'] += 1
        for feature in FEATURES:
            feature_ids = example.ids.get(feature, np.zeros(0, np.int32))
            content[feature] = feature_ids
            content[f'{feature}_pretokenized'] = example.texts.get(feature, '')
            most = f'{feature}_max_tokens'
            statistics[f'{feature}_tokens'] += len(feature_ids)
            statistics[most] = max(statistics[most], len(feature_ids))
        records, ids, index = self._files
        write_record(records, task_cache.encode(content))
        entry = task_cache.write_ids(
            ids, self._num_ids, inputs=content['inputs'], targets=content['targets']
        )
        self._num_ids += entry.num_inputs + entry.num_targets
        index.write(np.array(entry, '<i8').tobytes())

    def finish(self) -> None:
        """Record that the files are complete; they already have their names."""
        paths.replace_file(self._statistics_file, json.dumps(self._statistics).encode())


def write_shard(task: TokenizedTask, job: ShardJob) -> Iterator[int]:
    """Write the files of a shard. Yield the number of examples in each group of records."""
    records = records_of(task.source, job)
    with contextlib.ExitStack() as unfinished:
        writers = {split: ShardWriter(job, split, unfinished) for split in job.splits}
        for group in iter(lambda: list(itertools.islice(records, RECORDS_AT_ONCE)), []):
            for split, writer in writers.items():
                examples = task.tokenize([record for name, record in group if name == split])
                for example in examples:
                    writer.write(example)
                yield len(examples)
    for writer in writers.values():
        writer.finish()


def records_of(source: Source, job: ShardJob) -> Iterator[tuple[str, Record]]:
    """Yield the records of a shard in a random order, each with its split."""
    part = source.part_of(job.splits[0])
    share = Share(seed=0, epoch=0, lane=job.shard, num_lanes=job.num_shards)
    for number, records in part.pools(share, first=0):
        for i in permutation(len(records), 'pool', 0, 0, job.shard, number):
            record = records[i]
            if record is None:
                continue
            is_held_out = len(job.splits) > 1 and source.is_in_split('validation', record)
            yield 'validation' if is_held_out else job.splits[0], record


def run_jobs(config: ConfigDict, jobs: Sequence[ShardJob]) -> None:
    """Write shards in worker processes, and show their progress. Raise an error that one sends."""
    num_processes = min(config.num_workers or os.cpu_count() or 1, len(jobs))
    context = multiprocessing.get_context('spawn')
    processes = []
    connections: list[Connection] = []
    for i in range(num_processes):
        receiver, workers_end = context.Pipe(duplex=False)
        arguments = (config, jobs[i::num_processes], workers_end)
        process = context.Process(target=write_shards, args=arguments, daemon=True)
        process.start()
        workers_end.close()
        processes.append(process)
        connections.append(receiver)
    num_examples = 0
    num_done = 0
    try:
        with tqdm.tqdm(total=len(jobs), unit='shard', desc='Caching', mininterval=1.0) as bar:
            while connections:
                for connection in wait(connections):
                    assert isinstance(connection, Connection)
                    try:
                        report = connection.recv()
                    except EOFError:
                        connections.remove(connection)
                        continue
                    if isinstance(report, Exception):
                        raise report
                    num_new_examples, num_new_shards, faults = report
                    for fault in faults:
                        bar.write(f'Left out: {fault}')
                    num_examples += num_new_examples
                    num_done += num_new_shards
                    bar.set_postfix_str(f'{num_examples:,} examples', refresh=False)
                    bar.update(num_new_shards)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if num_done < len(jobs):
        raise ChildProcessError(
            f'a process that wrote shards died, and {len(jobs) - num_done} shards are missing: if memory '
            'ran out, use fewer data.num_workers; the same command continues'
        )


def write_shards(config: ConfigDict, jobs: Sequence[ShardJob], connection: Connection) -> None:
    prefetch.send_all(reports(config, jobs), connection)


def vocabulary_of(config: ConfigDict) -> Vocabulary:
    """Return the vocabulary that `config`, config.data, names."""
    vocabulary = named_vocabulary('data.vocabulary', config.vocabulary, config.extra_ids)
    vocabulary = add_tokens(vocabulary, config.added_tokens)
    mark_sentinels(vocabulary, config.sentinels)
    return vocabulary


def reports(config: ConfigDict, jobs: Sequence[ShardJob]) -> Iterator[tuple[int, int, list[str]]]:
    """Write shards. Yield the numbers of new examples and new shards, and the skipped lines, of each group of records."""
    vocabulary = vocabulary_of(config)
    members = tasks.open.tasks_of(tasks.open.find(config))
    opened: dict[str, TokenizedTask] = {}
    for job in jobs:
        if job.task not in opened:
            opened_task = tasks.open.open_task(members[job.task], config)
            opened[job.task] = TokenizedTask(opened_task, config, vocabulary)
        task = opened[job.task]
        for num_examples in write_shard(task, job):
            yield num_examples, 0, task.source.faults()[0]
        yield 0, 1, task.source.faults()[0]


def prepare_folder(folder: Path, task: TokenizedTask, vocabulary: Vocabulary) -> None:
    """Create the folder of a cache, or check that it holds a part of the same cache."""
    content = {
        'fingerprint': task.source.fingerprint,
        'vocabulary_hash': vocabulary.hash,
        'validation_fraction': task.source.validation_fraction,
        'text_field': task.task.text_field,
        'inputs': task.task.inputs,
        'targets': task.task.targets,
    }
    (folder / PROGRESS).mkdir(parents=True, exist_ok=True)
    file = folder / task_cache.ORIGIN
    if not file.exists():
        paths.replace_file(file, json.dumps(content, indent=2).encode())
        for name, model in kept_files(vocabulary).items():
            paths.replace_file(folder / name, model)
        return
    old = task_cache.read_json(file)
    changes = [name for name, value in content.items() if old.get(name) != value]
    if changes:
        raise Refused(f'{folder} has other data ({", ".join(changes)} changed): remove it')


def complete(folder: Path, jobs: Sequence[ShardJob]) -> str:
    """Complete a cache if it has all shards. Return the line to print."""
    statistics: dict[str, list[dict[str, int]]] = {}
    num_missing = 0
    for job in jobs:
        for split in job.splits:
            file = job.statistics_file(split)
            if file.exists():
                statistics.setdefault(split, []).append(task_cache.read_json(file))
            else:
                num_missing += 1
    name = jobs[0].task
    if num_missing and not (folder / 'COMPLETED').exists():
        return (
            f'{name}: {num_missing:,} files of other parts are still missing: the last part (--shard) '
            'to end completes the cache.'
        )
    if not num_missing:
        for split, statistics_of_shards in statistics.items():
            task_cache.write_info(folder, split, statistics_of_shards)
        (folder / 'COMPLETED').touch()
        shutil.rmtree(folder / PROGRESS, ignore_errors=True)
        for unfinished in folder.glob('.*.unfinished*'):  # left by killed calls
            unfinished.unlink(missing_ok=True)
    sizes = []
    for split in task_cache.splits(folder):
        opened = task_cache.open_split(folder, split)
        sizes.append(f'{opened.num_examples:,} examples in split {split}')
    return f'{name} is cached in {folder}: {", ".join(sizes)}.'
