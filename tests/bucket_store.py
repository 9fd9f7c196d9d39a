"""A store of buckets on loopback, which the real clients of gs:// and s3:// read from and write to.

It answers what they ask in Google's JSON API and in S3's path style: contents, sizes, lists, conditional writes.
"""

import collections
import contextlib
import datetime
import email.utils
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from pathlib import Path

import google_crc32c
import pytest

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden'
CLIENTS = {'gs': 'gcsfs', 's3': 's3fs'}
GOOGLE = re.compile(r'(?:/download|/upload)?/storage/v1/b/([^/]+)/o/?(.*)')


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'  # the clients keep their connections
    disable_nagle_algorithm = True

    def handle(self):
        with contextlib.suppress(ConnectionError):  # the client was killed
            super().handle()

    def parse(self):
        """Return whether a request is Google's, its bucket, the folder of that, its key and its query."""
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        google = GOOGLE.fullmatch(url.path)
        bucket, key = (google or re.fullmatch(r'/([^/]+)/?(.*)', url.path)).groups()
        folder = self.server.folder / bucket
        return bool(google), bucket, folder, urllib.parse.unquote(key), query

    def do_GET(self):
        google, bucket, folder, key, query = self.parse()
        file = folder / key
        if self.server.failures[f'{bucket}/{key}'] > 0 and self.headers.get('Range'):
            self.server.failures[f'{bucket}/{key}'] -= 1
            self.answer(503, b'<Error><Code>SlowDown</Code></Error>')
        elif not key and folder.is_dir():
            self.answer(200, self.listing(folder, query, google))
        elif bucket == 'private':  # as the real ones answer who has no right
            self.answer(401 if google else 403, b'<Error><Code>AccessDenied</Code></Error>')
        elif not file.is_file():
            code = 'NoSuchKey' if folder.is_dir() else 'NoSuchBucket'
            self.answer(404, f'<Error><Code>{code}</Code></Error>'.encode())
        elif google and 'alt' not in query:
            self.answer(200, json.dumps(describe(folder, key)).encode())
        else:
            self.send(file, self.headers.get('Range'))

    do_HEAD = do_GET

    def do_PUT(self):
        """S3's upload of an object, and its copy."""
        _, _, folder, key, _ = self.parse()
        content = self.content()
        copied = self.headers.get('x-amz-copy-source')
        if copied:
            source = self.server.folder / urllib.parse.unquote(copied).lstrip('/')
            if not source.is_file():
                self.answer(404, b'<Error><Code>NoSuchKey</Code></Error>')
                return
            content = source.read_bytes()
        self.write(folder, key, content, must_be_new=self.headers.get('If-None-Match') == '*')

    def do_POST(self):
        """Google's upload of an object and its copy, and S3's removal of several."""
        google, _, folder, key, query = self.parse()
        content = self.content()
        if not google:
            for name in re.findall(rb'<Key>(.*?)</Key>', content):
                self.remove(folder / name.decode())
            self.answer(200, b'<DeleteResult></DeleteResult>')
        elif '/rewriteTo/b/' in key:
            source, target = key.split(f'/rewriteTo/b/{folder.name}/o/')
            self.write(folder, target, (folder / source).read_bytes())
        elif query['uploadType'] == 'media':
            self.write(folder, query['name'], content, query.get('ifGenerationMatch') == '0')
        else:
            boundary = re.search('boundary="(.*)"', self.headers['Content-Type'])[1].encode()
            _, metadata, rest = content.split(b'--' + boundary, 2)
            name = json.loads(metadata.split(b'\n\n')[1])['name']
            content = rest.split(b'\n\n', 1)[1].removesuffix(b'\n--' + boundary + b'--')
            self.write(folder, name, content, query.get('ifGenerationMatch') == '0')

    def do_DELETE(self):
        _, _, folder, key, _ = self.parse()
        existed = self.remove(folder / key)
        self.answer(204 if existed else 404, b'')

    def content(self):
        content = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        if 'aws-chunked' in self.headers.get('Content-Encoding', ''):
            length, content = content.split(b'\r\n', 1)
            content = content[: int(length.split(b';')[0], 16)]
        return content

    def write(self, folder, key, content, must_be_new=False):
        name = f'{folder.name}/{key}'
        file = folder / key
        with self.server.writing:
            status = self.server.interfere(name, 'before')
            if status is None and must_be_new and file.exists():
                status = 412
            if status is None and not folder.is_dir():
                status = 404
            if status is None:
                replace(self.server, file, content)
                status = self.server.interfere(name, 'after')
        if status is None:
            described = json.dumps({**describe(folder, key), 'done': True}).encode()
            is_google = self.command == 'POST'
            self.answer(200, described if is_google else b'', etag=f'"{md5_of(file)}"')
        else:
            code = {412: 'PreconditionFailed', 404: 'NoSuchBucket'}.get(status, 'AccessDenied')
            self.answer(status, f'<Error><Code>{code}</Code></Error>'.encode())

    def remove(self, file):
        with self.server.writing:
            self.server.interfere(str(file.relative_to(self.server.folder)), 'before removing')
            existed = file.is_file()
            if existed:
                file.unlink()
        return existed

    def send(self, file, part):
        content = file.read_bytes()
        first, last = re.fullmatch(r'bytes=(\d+)-(\d*)', part or 'bytes=0-').groups()
        body = content[int(first) : int(last or len(content)) + 1]
        headers = {
            'etag': f'"{md5_of(file)}"',
            'last_modified': email.utils.formatdate(file.stat().st_mtime, usegmt=True),
            'x_goog_generation': generation_of(file),
        }
        if part:
            place = f'bytes {first}-{int(first) + len(body) - 1}/{len(content)}'
            self.answer(206, body, content_range=place, **headers)
        else:
            self.answer(200, body, **headers)
        if self.command == 'GET':
            self.server.sent[str(file.relative_to(self.server.folder))] += len(body)

    def listing(self, folder, query, google):
        """The keys that begin with `prefix`; with a `delimiter` only those without it in the rest, and the
        others as folders."""
        prefix, delimiter = query.get('prefix', ''), query.get('delimiter') or '\0'
        files = (folder / prefix.rpartition('/')[0]).rglob('*')
        keys = (file.relative_to(folder).as_posix() for file in files if file.is_file())
        rests = sorted(key.removeprefix(prefix) for key in keys if key.startswith(prefix))
        items = [describe(folder, prefix + rest) for rest in rests if delimiter not in rest]
        folders = {prefix + rest.split(delimiter)[0] + '/' for rest in rests if delimiter in rest}
        if google:
            return json.dumps({'items': items, 'prefixes': sorted(folders)}).encode()
        tags = [f'<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>' for name in folders]
        for item in items:
            fields = {'Key': item['name'], 'Size': item['size'], 'ETag': f'"{item["md5"]}"'}
            fields['LastModified'] = item['updated']
            text = ''.join(f'<{name}>{value}</{name}>' for name, value in fields.items())
            tags.append(f'<Contents>{text}</Contents>')
        return f'<ListBucketResult>{"".join(tags)}</ListBucketResult>'.encode()

    def answer(self, status, content, **headers):
        self.send_response(status)
        for name, value in {**headers, 'content_length': len(content)}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)

    def log_message(self, *args):
        pass


def replace(server, file, content):
    """Write an object: a reader gets all of the old or all of the new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(dir=server.folder)
    with open(descriptor, 'wb') as stream:
        stream.write(content)
    os.replace(unfinished, file)


def describe(folder, key):
    file = folder / key
    modified = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC)
    return {
        'bucket': folder.name,
        'name': key,
        'size': file.stat().st_size,
        'md5': md5_of(file),
        'crc32c': str(google_crc32c.value(file.read_bytes())),
        'generation': str(generation_of(file)),
        'updated': modified.strftime('%Y-%m-%dT%H:%M:%S.%fZ'),
        'timeCreated': modified.strftime('%Y-%m-%dT%H:%M:%S.%fZ'),
    }


def generation_of(file):
    return file.stat().st_mtime_ns // 1000


def md5_of(file):
    return hashlib.md5(file.read_bytes()).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = (
        128  # connections that wait: more are refused, and tried again after seconds
    )


@pytest.fixture
def store(tmp_path):
    """Serves each folder of `folder` as a bucket, at first 'golden'; `sent` counts {BUCKET/KEY: bytes}."""
    server = Server(('127.0.0.1', 0), Handler)
    server.folder = tmp_path / 'buckets'
    server.sent = collections.Counter()
    server.failures = collections.Counter()  # BUCKET/KEY: how many reads of it still fail
    server.writing = threading.RLock()
    server.interfere = lambda name, moment: None  # with a write: the status of an error, or None
    server.folder.mkdir()
    (server.folder / 'golden').symlink_to(GOLDEN)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(params=CLIENTS)
def scheme(request):
    client = CLIENTS[request.param]
    pytest.importorskip(client, reason=f'{client} is not installed')
    return request.param


def environment_of(store):
    """Return the environment of a process that knows no store but ours, and no credentials."""
    others = ('AWS_', 'FSSPEC_', 'GCSFS_', 'GOOGLE_')
    environment = {name: x for name, x in os.environ.items() if not name.startswith(others)}
    url = f'http://127.0.0.1:{store.server_port}'
    return environment | {
        'PYTHONPATH': f'{ROOT}:{ROOT}/tests:{os.environ.get("PYTHONPATH", "")}',
        'XLA_FLAGS': '',
        'JAX_PLATFORMS': 'cpu',
        'STORAGE_EMULATOR_HOST': url,  # gcsfs
        'FSSPEC_GS_TOKEN': 'anon',
        'TENSORSTORE_GCS_HTTP_URL': url,
        'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'ours',  # else TensorStore looks for a cloud around it
        'AWS_ENDPOINT_URL': url,
        'AWS_ACCESS_KEY_ID': 'ours',
        'AWS_SECRET_ACCESS_KEY': 'ours',
    }


def run_in_another_process(script, arguments, store):
    """Return the lines that a script prints in a process that knows no store but ours."""
    process = subprocess.run(
        [sys.executable, '-c', script, *arguments],
        cwd=ROOT,
        env=environment_of(store),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()
