"""A Hugging Face hub on loopback, for the real client: revisions, listings, pull requests, files in ranges, refusals."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from pathlib import Path

import pytest
from huggingface_hub import constants

ROUTE = re.compile(
    r'/(?P<api>api/)?(?P<kind>models/|datasets/)?(?P<name>[^/]+/[^/]+)'
    r'(?:/(?P<verb>revision|tree|refs|resolve)(?:/(?P<revision>[^/]+)(?:/(?P<path>.+))?)?)?'
)


class Hub:
    """Repositories as {revision: {path: content}}, and the requests that were answered."""

    def __init__(self, url: str):
        self.url = url
        self.repositories: dict[str, dict[str, dict[str, bytes]]] = {}
        self.gated: set[str] = set()
        self.breaks_once: set[str] = set()  # files whose connection breaks in the middle
        self.requests: list[str] = []

    def add(self, name: str, files: dict[str, bytes] | Path, revision: str = 'main') -> str:
        """Set the files of a revision, a folder's if it is one; return its commit. Data is named datasets/ORG/NAME."""
        if isinstance(files, Path):
            folder = files
            names = [x for x in folder.rglob('*') if x.is_file()]
            files = {str(x.relative_to(folder)): x.read_bytes() for x in names}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories.setdefault(name, {})[revision] = files
        self.repositories[name][commit] = files
        return commit

    def num_fetched(self, path: str) -> int:
        """Return how often the content of a file was asked for."""
        return sum(request.startswith('GET') and path in request for request in self.requests)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        hub = self.server.hub
        hub.requests.append(f'{self.command} {self.path}')
        url = urllib.parse.urlsplit(self.path)
        route = ROUTE.fullmatch(url.path)
        name = route['name']
        if route['kind'] == 'datasets/':
            name = f'datasets/{name}'
        revisions = hub.repositories.get(name)
        revision = urllib.parse.unquote(route['revision'] or 'main')
        path = urllib.parse.unquote(route['path'] or '')
        if revisions is None:
            self.answer(401, {'error': 'not there'}, **{'X-Error-Code': 'RepoNotFound'})
        elif name in hub.gated and self.headers.get('Authorization') != 'Bearer hf_mine':
            # As the real one: anybody may read the description.
            if route['verb'] in ('tree', 'resolve'):
                self.answer(403, {'error': 'gated'}, **{'X-Error-Code': 'GatedRepo'})
            else:
                self.answer(200, self.describe(name, revisions[revision]))
        elif route['verb'] == 'refs':
            pulls = [x for x in revisions if x.startswith('refs/pr/')]
            refs = [{'name': x, 'ref': x, 'targetCommit': self.commit(revisions[x])} for x in pulls]
            self.answer(200, dict(branches=[], converts=[], tags=[], pullRequests=refs))
        elif revision not in revisions:
            self.answer(404, {'error': 'no'}, **{'X-Error-Code': 'RevisionNotFound'})
        elif route['verb'] == 'tree':
            is_recursive = 'recursive=true' in url.query.lower()
            self.answer(200, self.tree(revisions[revision], path, is_recursive))
        elif route['verb'] == 'resolve':
            self.send(name, revisions[revision], path)
        else:
            self.answer(200, self.describe(name, revisions[revision]))

    do_HEAD = do_GET

    @staticmethod
    def commit(files):
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def describe(self, name, files):
        siblings = [{'rfilename': path} for path in files]
        name = name.removeprefix('datasets/')
        return {'id': name, 'sha': self.commit(files), 'siblings': siblings, 'tags': []}

    def tree(self, files, folder, is_recursive):
        entries = {}
        for path, content in files.items():
            if folder and not path.startswith(f'{folder}/'):
                continue
            rest = path.removeprefix(f'{folder}/') if folder else path
            if '/' in rest and not is_recursive:
                parent = path.removesuffix(rest) + rest.partition('/')[0]
                entries[parent] = {'type': 'directory', 'path': parent, 'oid': '0' * 40}
            else:
                oid = hashlib.sha1(content).hexdigest()
                entries[path] = {'type': 'file', 'path': path, 'size': len(content), 'oid': oid}
        return list(entries.values())

    def send(self, name, files, path):
        if path not in files:
            self.answer(404, {'error': 'no'}, **{'X-Error-Code': 'EntryNotFound'})
            return
        content = files[path]
        headers = {
            'ETag': f'"{hashlib.sha1(content).hexdigest()}"',
            'X-Repo-Commit': self.commit(files),
            'Accept-Ranges': 'bytes',
        }
        first = re.fullmatch(r'bytes=(\d+)-.*', self.headers.get('Range', ''))
        start = int(first[1]) if first else 0
        if start:
            headers['Content-Range'] = f'bytes {start}-{len(content) - 1}/{len(content)}'
        is_broken = self.command == 'GET' and path in self.server.hub.breaks_once
        self.answer(206 if start else 200, content[start:], is_broken, **headers)
        if is_broken:
            self.server.hub.breaks_once.remove(path)

    def answer(self, status, content, is_broken=False, **headers):
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {'Content-Length': str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content[: len(content) // 2] if is_broken else content)
        self.close_connection = self.close_connection or is_broken

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub():
    """A hub of its own for each test."""
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        server.daemon_threads = True
        server.hub = Hub(f'http://127.0.0.1:{server.server_port}')
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        with contextlib.ExitStack() as stack:
            stack.callback(server.shutdown)
            yield server.hub


@pytest.fixture
def home(hub, monkeypatch, tmp_path):
    """The folder of an empty cache, for this process as its client would have it from the environment."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, 'HUGGINGFACE_CO_URL_TEMPLATE', hub.url + template)
    monkeypatch.setattr(constants, 'ENDPOINT', hub.url)
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'home/hub'))
    monkeypatch.setenv('HF_TOKEN', '')
    monkeypatch.chdir(tmp_path)
    return tmp_path / 'home'
