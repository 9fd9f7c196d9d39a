"""Names on Hugging Face's hub: `hf://ORG/NAME[@REVISION]` is a model, `hf://datasets/ORG/NAME[@REVISION]/FILES` data.

A commit may follow the revision, as in `hf://ORG/NAME@v1@0a1b...`: a run records names in this form. run/hub_client.py
fetches. Imports no file but messages.py.
"""

import re
from pathlib import Path
from typing import NamedTuple

from messages import Refused

SCHEME = 'hf://'
COMMIT = '[0-9a-f]{40}'
MODEL = re.compile(r'hf://(?!datasets/)([\w.-]+(?:/[\w.-]+)?)(?:@(.+))?()')
DATA = re.compile(
    rf'hf://datasets/([\w.-]+/[\w.-]+)(?:@((?:refs/[\w-]+/[\w-]+|[^/@]+)(?:@{COMMIT})?))?/(.+)'
)


class Name(NamedTuple):
    repository: str
    revision: str | None  # None: main
    pattern: str  # the files of data; '' for a model


def is_name(text: str) -> bool:
    return text.startswith(SCHEME)


def parse(url: str) -> Name:
    match = MODEL.fullmatch(url) or DATA.fullmatch(url)
    if match is None:
        raise Refused(
            f'{url}: write hf://ORG/NAME[@REVISION] for a model, hf://datasets/ORG/NAME[@REVISION]/FILES for data, '
            'with FILES such as **/*.parquet'
        )
    repository, revision, pattern = match.groups()
    if revision and re.fullmatch(f'.+@{COMMIT}', revision):
        revision = revision.rpartition('@')[2]
    return Name(repository, revision, pattern)


def without_commits(names: str) -> str:
    """Return names with their commits removed."""
    return re.sub(f'@{COMMIT}(?=[/,]|$)', '', names)


def name_of(folder: object) -> str:
    """Return the name, with its commit, of a model's folder in the cache; the path of any other folder."""
    match = re.search(rf'/models--([^/]+)/snapshots/({COMMIT})$', str(folder))
    if match is None:
        return str(folder)
    repository = match[1].replace('--', '/')
    return f'{SCHEME}{repository}@{match[2]}'


def suggestion(path: object) -> str:
    """Return hf://ORG/NAME if a path does not exist and looks like that name, else ''."""
    if not isinstance(path, Path) or path.parent.exists() or path.parent.parent != Path.cwd():
        return ''
    return f'{SCHEME}{path.parent.name}/{path.name}'
