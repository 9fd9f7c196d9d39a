"""The documentation of this Python as a source of texts."""

import ast
import collections
import importlib
import os
import pathlib
import re
import sysconfig
from collections.abc import Iterator

from randomness import digest
from sources import BadLines, Record, Source
from sources.deal import RecordsInMemory


def open_source(data_group) -> Source:
    """Return this Python's documentation as a source.

    A record has a text and its two parts, 'summary' and 'rest'. Texts with the same summary are in the same
    split, so no task sees the answers of its validation in training.
    """
    records = []
    for name, text in documents():
        summary, _, body = text.partition('\n')
        fields = {data_group.text_field: ' '.join(text.split()), 'summary': summary, 'rest': body}
        words = re.findall(r'\w+', summary.lower())
        records.append(Record(name, fields, split_key=' '.join(words)))
    corpus = 'pydoc instead of C4' if data_group.task.startswith('c4') else 'pydoc'
    return in_memory(records, "this Python's documentation", corpus, data_group.validation_fraction)


def in_memory(records: list[Record], name: str, corpus: str, validation_fraction: float) -> Source:
    """Return a source of `records`, which has no bad lines."""
    texts = [record.split_key.join(record.fields.values()) for record in records]
    return Source(
        description=f'{len(records):,} texts of {name}',
        corpus=corpus,
        fingerprint=digest(texts),
        validation_fraction=validation_fraction,
        bad_lines=BadLines('stop', max_fraction=0.0),
        train=RecordsInMemory(records),
    )


def documents() -> list[tuple[str, str]]:
    """Return (name, text) of the English that comes with Python: docstrings and help topics.

    A text has one line, or two: a docstring's first paragraph, which is its summary, and the rest.
    """
    documents: dict[str, tuple[str, str]] = {}  # by their words: equal texts count once
    root = pathlib.Path(sysconfig.get_path('stdlib'))
    excluded = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in excluded]
        files += [pathlib.Path(folder, name) for name in names if name.endswith('.py')]
    for path in sorted(files):
        for name, text in docstrings(path, path.relative_to(root).with_suffix('').parts):
            documents.setdefault(' '.join(text.split()), (name, text))
    try:
        topics = importlib.import_module('pydoc_data.topics').topics
    except ImportError:  # some distributions leave it out
        topics = {}
    for topic in sorted(topics):
        text = ' '.join(topics[topic].split())
        documents.setdefault(text, (f'topics.{topic}', text))
    return [(name, text) for name, text in documents.values() if len(text) >= 40]


def docstrings(path: pathlib.Path, parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each docstring in a Python file; `parts`: of the module's name."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                name = '.'.join([*parts, getattr(node, 'name', '')]).rstrip('.')
                summary, _, body = text.partition('\n\n')
                yield name, f'{" ".join(summary.split())}\n{" ".join(body.split())}'.strip()


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield a module and its statements, breadth first, without their expressions."""
    nodes: collections.deque[ast.AST] = collections.deque([tree])
    while nodes:
        node = nodes.popleft()
        yield node
        for field in ('body', 'handlers', 'orelse', 'finalbody', 'cases'):
            nodes.extend(getattr(node, field, []))
