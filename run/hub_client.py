"""Models and data on the hub, fetched by huggingface_hub into its own cache. Imported for the first hub name.

The client's environment variables apply (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, ...). Its locks let one
process fetch a file for all.
"""

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent import futures
from pathlib import Path

from absl import logging
from fsspec.utils import glob_translate
from huggingface_hub import (
    HfApi,
    constants,
    errors,
    get_cached_repo_tree,
    hf_hub_download,
    snapshot_download,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import tqdm

from messages import Refused, first_ten
from run import hub
from run.buckets import FileStatus, ReadError

TIMEOUT = 10  # seconds for the first answer
NUM_THREADS = 8
# The files of a model to read, apart from its weights.
FILES = [
    'config.json',
    'generation_config.json',
    'adapter_config.json',
    'model.safetensors.index.json',
    '*.model',
    'tokenizer*.json',
    'special_tokens_map.json',
    'added_tokens.json',
    'vocab.json',
    'merges.txt',
    'modules.json',
    '[0-9]_*/*',
]
# The files of weights: `first_matches` of these patterns.
SAFETENSORS = [
    r'model\.safetensors',
    r'model-\d+-of-\d+\.safetensors',
    r'adapter_model\.safetensors',
]
FLAX = [r'flax_model\.msgpack', r'flax_model-\d+-of-\d+\.msgpack']
CONVERT = 'https://huggingface.co/spaces/safetensors/convert'


# Models.


def to_folder(url: str, has_weights: bool = True) -> Path:
    """Return the folder of a model in the cache, and fetch its missing files.

    If main has no safetensors, take them from a pull request, if exactly one has any; else take Flax's weights. If the
    hub is out of reach, the cache must have the model. Raises Refused.
    """
    name = hub.parse(url)
    if name.pattern:
        raise Refused(f'{url} is data: write hf://ORG/NAME for a model')
    with client_errors(url, name):
        try:
            files = file_names(name.repository, name.revision)
        except Exception as error:
            response = getattr(error, 'response', None)
            if response is not None and response.status_code < 500:  # the hub has answered
                raise
            return cached_folder(url, name, has_weights, error)
        revision = name.revision
        weights = first_matches(SAFETENSORS, files)
        pulls: list[str] = []
        if has_weights and not weights and revision is None:
            pulls = pulls_with_weights(name.repository)
            if len(pulls) == 1:
                [revision] = pulls
                weights = first_matches(SAFETENSORS, file_names(name.repository, revision))
                logging.warning('%s has no safetensors on main: %s has some', url, revision)
        weights = weights or first_matches(FLAX, files)
        if has_weights and not weights:
            several = f', and {first_ten(pulls)} have some: name one after @' if pulls else ''
            raise Refused(
                f'{url} has no safetensors and no Flax weights{several}; {CONVERT} adds them as pull request N: name '
                '@refs/pr/N'
            )
        patterns = [*FILES, *weights] if has_weights else FILES
        if is_commit(revision):
            with contextlib.suppress(errors.LocalEntryNotFoundError):
                return cached_snapshot(name.repository, revision, 'model', patterns)
        folder = snapshot_download(
            name.repository, revision=revision, allow_patterns=patterns, tqdm_class=Bar
        )
    return Path(folder)


class Bar(tqdm):
    """A progress bar on a terminal, and none in a file."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **{'disable': None, **settings})


def is_commit(revision: str | None) -> bool:
    return re.fullmatch(hub.COMMIT, revision or '') is not None


def file_names(repository: str, revision: str | None) -> list[str]:
    """Return the files of a revision; for a commit in the cache without asking the hub."""
    if is_commit(revision):
        with contextlib.suppress(errors.CachedRepoTreeNotFoundError):
            return [file.path for file in get_cached_repo_tree(repository, revision=revision)]
    info = HfApi().model_info(repository, revision=revision, timeout=TIMEOUT)
    return [file.rfilename for file in info.siblings or []]


def first_matches(patterns: Collection[str], names: Collection[str]) -> list[str]:
    """Return the names that match the first pattern with matches."""
    for pattern in patterns:
        matches = [name for name in names if re.fullmatch(pattern, name)]
        if matches:
            return matches
    return []


def pulls_with_weights(repository: str) -> list[str]:
    """Return the pull requests that have safetensors, such as refs/pr/7."""
    pulls = HfApi().list_repo_refs(repository, include_pull_requests=True).pull_requests or []

    def has_weights(pull) -> bool:
        return bool(first_matches(SAFETENSORS, file_names(repository, pull.ref)))

    with futures.ThreadPoolExecutor(NUM_THREADS) as threads:
        matches = list(threads.map(has_weights, pulls))
    return [pull.ref for pull, matched in zip(pulls, matches, strict=True) if matched]


def cached_folder(url: str, name: hub.Name, has_weights: bool, reason: Exception) -> Path:
    """Return the folder that an earlier `to_folder` fetched."""
    revisions = [name.revision or 'main']
    if name.revision is None:
        repository = name.repository.replace('/', '--')
        pulls = Path(constants.HF_HUB_CACHE, f'models--{repository}', 'refs/refs/pr')
        revisions += [f'refs/pr/{file.name}' for file in sorted(pulls.glob('*'))]
    for revision in revisions:
        with contextlib.suppress(errors.LocalEntryNotFoundError):
            folder = cached_snapshot(name.repository, revision, 'model')
            files = [file.name for file in folder.iterdir()]
            if not has_weights or first_matches([*SAFETENSORS, *FLAX], files):
                logging.warning('%s: the hub is out of reach: reading %s', url, folder)
                return folder
    raise Refused(
        f'{url} is not in the cache, and the hub is out of reach ({one_line(reason)}): name a folder, or connect'
    )


def cached_snapshot(
    repository: str, revision: str | None, repo_type: str, patterns: Sequence[str] = ()
) -> Path:
    """Return the folder of a revision in the cache.

    Raises errors.LocalEntryNotFoundError if there is none, or if it lacks files that match a pattern.
    """
    return Path(
        snapshot_download(
            repository,
            repo_type=repo_type,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=True,
        )
    )


# Data.


def matching_files(url: str) -> dict[str, FileStatus]:
    """Return the files of a name or a glob, {name with its commit: size and hash}; fetch only the listing.

    With HF_HUB_OFFLINE, list the cache and log a warning. Raises Refused.
    """
    name = hub.parse(url)
    if not name.pattern:
        raise Refused(f'{url} is a model: write hf://datasets/ORG/NAME/FILES for data')
    commit = commit_of_data(url)
    statuses: dict[str, FileStatus] = {}
    with client_errors(url, name):
        if constants.HF_HUB_OFFLINE:
            folder = cached_snapshot(name.repository, commit, 'dataset')
            for file in folder.rglob('*'):
                if file.is_file():  # a link to a blob named by its hash
                    path = str(file.relative_to(folder))
                    statuses[path] = FileStatus(file.stat().st_size, file.resolve().name)
        else:
            statuses = listed_files(name.repository, commit, name.pattern)
    pattern = re.compile(glob_translate(name.pattern))
    files = {}
    for path, status in statuses.items():
        if pattern.fullmatch(path):
            files[f'{hub.SCHEME}datasets/{name.repository}@{commit}/{path}'] = status
    if constants.HF_HUB_OFFLINE:
        logging.warning('%s: HF_HUB_OFFLINE is set, and %d files are in the cache', url, len(files))
    return files


def commit_of_data(url: str) -> str:
    name = hub.parse(url)
    with client_errors(url, name):
        if constants.HF_HUB_OFFLINE:
            return cached_commit(name)
        info = HfApi().dataset_info(name.repository, revision=name.revision, timeout=TIMEOUT)
    return str(info.sha)


def cached_commit(name: hub.Name) -> str:
    """Return the commit in the cache: of the revision, else the only one.

    The client records no branch for files that were fetched by their commit.
    """
    try:
        return cached_snapshot(name.repository, name.revision, 'dataset').name
    except errors.LocalEntryNotFoundError:
        repository = name.repository.replace('/', '--')
        snapshots = Path(constants.HF_HUB_CACHE, f'datasets--{repository}', 'snapshots')
        commits = [folder.name for folder in snapshots.glob('*')]
        if name.revision or len(commits) != 1:
            raise
        return commits[0]


def listed_files(repository: str, commit: str, pattern: str) -> dict[str, FileStatus]:
    """List the folders in which files may match a glob."""
    folder = re.split(r'[^/]*[*?\[]', pattern)[0].rpartition('/')[0]
    entries = HfApi().list_repo_tree(
        repository,
        path_in_repo=folder or None,
        recursive='/' in pattern.removeprefix(f'{folder}/'),
        revision=commit,
        repo_type='dataset',
    )
    statuses = {}
    with contextlib.suppress(errors.EntryNotFoundError):
        for entry in entries:
            if isinstance(entry, RepoFile):
                checksum = entry.lfs.sha256 if entry.lfs else entry.blob_id
                statuses[entry.path] = FileStatus(entry.size, checksum)
    return statuses


def local_file(url: str) -> str:
    """Return the path in the cache of a file that `matching_files` names; fetch it if it is missing.

    Raises ReadError.
    """
    name = hub.parse(url)
    with client_errors(url, name, ReadError):
        return hf_hub_download(
            name.repository, name.pattern, repo_type='dataset', revision=name.revision
        )


def with_commit(url: str, has_weights: bool) -> str:
    """Add the current commit to a hub name; return a path unchanged."""
    if not hub.is_name(url):
        return url
    name = hub.parse(url)
    if is_commit(name.revision):
        return url
    if not name.pattern:
        return f'{url}@{to_folder(url, has_weights).name}'
    head = url.removesuffix(f'/{name.pattern}')
    return f'{head}@{commit_of_data(url)}/{name.pattern}'


# Errors.


@contextlib.contextmanager
def client_errors(url: str, name: hub.Name, kind: type[Exception] = Refused) -> Iterator[None]:
    """Raise `kind` for an error of the client; one line says what to do about it."""
    try:
        yield
    except Refused:
        raise
    except errors.GatedRepoError as error:
        page = f'{constants.ENDPOINT}/{"datasets/" if name.pattern else ""}{name.repository}'
        raise kind(
            f'{url} is gated: accept its terms at {page}, and put your token into HF_TOKEN, or run `hf auth login`'
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise kind(
            f'{url} is not on the hub, or private: correct it, or put your token into HF_TOKEN'
        ) from error
    except errors.RevisionNotFoundError as error:
        raise kind(
            f'{url}: the hub lacks this revision: name a branch, tag, commit or refs/pr/N'
        ) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno and error.filename:  # a full disk
            raise
        raise kind(
            f'{url} cannot be fetched ({one_line(error)}): check HF_TOKEN and the network'
        ) from error


def one_line(error: Exception) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())[:200]
