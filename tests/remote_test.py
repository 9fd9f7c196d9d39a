"""Checkpoints, data and vocabularies in buckets: the real clients of gs:// and s3:// read from a store on loopback.

The store answers what readers ask in Google's JSON API and in S3's path style: contents, sizes, lists.
"""

import collections
import csv
import gzip
import hashlib
import http.server
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import chex
import corpora
import google_crc32c
import numpy as np
import pytest

import infer
import sources

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / 'tests/golden'
T5X = 't5x_t5_1_1_tiny'
MESH_TF = 'mtf_t5_1_1/model.ckpt-1000000'
VALID = [f'{T5X}/checkpoint_6', T5X, MESH_TF]  # the second leads to its newest, the first
REFUSED = {  # URL: how its message begins
    'golden/none': 'golden/none/checkpoint is missing',
    'half': 'half/checkpoint_6/target.token_embedder.embedding',
    'none/checkpoint_6': 'none/checkpoint_6',
    'private/checkpoint_6': 'private/checkpoint_6',
}
CLIENTS = {
    'gs': 'gcsfs',
    's3': 's3fs',
}
LOAD = """
import sys
import numpy as np
import infer

folder, *urls = sys.argv[1:]
for i, url in enumerate(urls):
    try:
        np.savez(f'{folder}/{i}.npz', **infer.load(url).arrays)
    except Exception as error:
        print(f'{type(error).__name__}: {error}')
"""


READ = """
import json
import sys

import corpora
import sources
import vocabulary

sources.MAX_BLOCK_BYTES = 1 << 14
sources.MIN_BLOCKS = 32  # a corpus of half a megabyte has blocks of that size
sources.SEQUENTIAL_READ_AHEAD = 1 << 16
for names in json.loads(sys.argv[1]):
    try:
        if names['files'].endswith('.model'):
            print(json.dumps(vocabulary.named_vocabulary('data.vocabulary', names['files'], 100, 0).hash))
            continue
        source = sources.open_source(corpora.make_config(validation_fraction=0.0, **names))
        documents = corpora.epoch_documents(source, splits=['train'])
        texts = [[text for _, text in lane] for lane in documents]
        print(json.dumps([source.fingerprint, texts]))
    except (ValueError, OSError) as error:
        print(json.dumps(f'{type(error).__name__}: {error}'))
"""

READ_WHAT_GOES_AWAY = """
import os
import sys

import corpora
import sources

sources.MIN_BLOCKS = 1
for file in sys.argv[2:]:
    config = corpora.make_config(files=sys.argv[1] + os.path.basename(file), on_bad_line='skip')
    source = sources.open_source(config)
    os.remove(file)
    try:
        corpora.epoch_documents(source)
    except OSError as error:
        print(error)
"""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'  # the clients keep their connections

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        google = re.fullmatch(r'(?:/download)?/storage/v1/b/([^/]+)/o/?(.*)', url.path)
        bucket, key = (google or re.fullmatch(r'/([^/]+)/?(.*)', url.path)).groups()
        folder, key = self.server.folder / bucket, urllib.parse.unquote(key)
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

    def send(self, file, part):
        content = file.read_bytes()
        first, last = re.fullmatch(r'bytes=(\d+)-(\d*)', part or 'bytes=0-').groups()
        body = content[int(first) : int(last or len(content)) + 1]
        if part:
            place = f'bytes {first}-{int(first) + len(body) - 1}/{len(content)}'
            self.answer(206, body, content_range=place, etag=f'"{md5_of(file)}"')
        else:
            self.answer(200, body, etag=f'"{md5_of(file)}"')
        if self.command == 'GET':
            self.server.sent[str(file.relative_to(self.server.folder))] += len(body)

    def listing(self, folder, query, google):
        """The keys that begin with `prefix`; with a `delimiter` only those without it in the rest, and the
        others as folders."""
        prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '\0')
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
            text = ''.join(f'<{name}>{value}</{name}>' for name, value in fields.items())
            tags.append(f'<Contents>{text}</Contents>')
        return f'<ListBucketResult>{"".join(tags)}</ListBucketResult>'.encode()

    def answer(self, status, content, **headers):
        if self.command == 'GET' and status in (200, 206):
            self.server.num_answers += 1
        self.send_response(status)
        for name, value in {**headers, 'content_length': len(content)}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(content)

    def log_message(self, *args):
        pass


def describe(folder, key):
    file = folder / key
    return {
        'bucket': folder.name,
        'name': key,
        'size': file.stat().st_size,
        'md5': md5_of(file),
        'crc32c': str(google_crc32c.value(file.read_bytes())),
    }


def md5_of(file):
    return hashlib.md5(file.read_bytes()).hexdigest()


@pytest.fixture
def store(tmp_path):
    """Serves each folder of `folder` as a bucket, at first 'golden'; `sent` counts {BUCKET/KEY: bytes}."""
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.folder = tmp_path / 'buckets'
    server.sent = collections.Counter()
    server.num_answers = 0  # that are no errors
    server.failures = collections.Counter()  # BUCKET/KEY: how many reads of it still fail
    server.folder.mkdir()
    (server.folder / 'golden').symlink_to(GOLDEN)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    yield server
    server.shutdown()
    server.server_close()


def run_in_another_process(script, arguments, store):
    """Return the lines that a script prints in a process that knows no store but ours, and no credentials."""
    others = ('AWS_', 'FSSPEC_', 'GCSFS_', 'GOOGLE_')
    environment = {name: x for name, x in os.environ.items() if not name.startswith(others)}
    url = f'http://127.0.0.1:{store.server_port}'
    environment |= {
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
    process = subprocess.run(
        [sys.executable, '-c', script, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


@pytest.mark.peers
@pytest.mark.parametrize('scheme', CLIENTS)
def test_a_bucket_is_read_as_a_disk_is(scheme, store, tmp_path):
    """Parameters come out alike; what a bucket lacks or refuses is named in a line. In one process."""
    pytest.importorskip(CLIENTS[scheme], reason=f'{CLIENTS[scheme]} is not installed')
    half = store.folder / 'half/checkpoint_6'
    shutil.copytree(GOLDEN / T5X / 'checkpoint_6', half)
    (half / 'target.token_embedder.embedding/0.0').unlink()
    urls = [f'{scheme}://golden/{name}' for name in VALID]
    urls += [f'{scheme}://{name}' for name in REFUSED]
    messages = run_in_another_process(LOAD, [str(tmp_path), *urls], store)

    for i, name in enumerate(VALID):
        found = dict(np.load(tmp_path / f'{i}.npz'))
        expected = infer.load(GOLDEN / name).arrays
        chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
        for path, x in expected.items():
            assert found[path].tobytes() == np.asarray(x).tobytes(), path
    # What is needed came from the store, once for each load, and nothing else did.
    sent = {}
    for key, size in store.sent.items():
        if key.startswith('golden/'):
            sent[key.removeprefix('golden/')] = size
    chunks = [*(GOLDEN / T5X / 'checkpoint_6').glob('target.*/[0-9]*')]
    assert len(chunks) == 52
    for file in chunks:
        assert sent[str(file.relative_to(GOLDEN))] == 2 * file.stat().st_size, file
    assert not [key for key in sent if '/state.' in key or key.startswith(f'{T5X}/checkpoint_0')]
    shard = f'{MESH_TF}.data-00001-of-00003'  # of the parameters; the next is Adafactor's
    assert sent[shard] == (GOLDEN / shard).stat().st_size
    assert f'{MESH_TF}.data-00002-of-00003' not in sent

    for message, beginning in zip(messages, REFUSED.values(), strict=True):
        assert message.startswith(f'ValueError: {scheme}://{beginning}'), message


def write_corpora(folder):
    """Write a corpus of each kind, half a megabyte or more, and return globs of them."""
    random = np.random.default_rng(0)
    texts = [f'{i} ' + 'é"x, ' * int(random.integers(200)) for i in range(1500)]
    texts[700] = 'long line ' * 120_000  # is cut in plain text
    rows = io.StringIO()
    csv.writer(rows).writerows([['id', 'text'], *enumerate(texts[:600] + texts[800:])])
    contents = {
        'plain.txt': '\n'.join(texts),
        'rows.csv': rows.getvalue(),
        'rows.tsv': 'id\ttext\n' + ''.join(f'{i}\t{text}\n' for i, text in enumerate(texts)),
        'lines.jsonl': ''.join(json.dumps({'text': text}) + '\n' for text in texts),
        'small.txt': '\n'.join(texts[:20]),
    }
    for name, content in contents.items():
        for part in ('one', 'three'):
            content += f'\nof part {part}' if name.endswith('.txt') else ''
            (folder / f'{part}-{name}').write_text(content)
            (folder / f'{part}-{name}.gz').write_bytes(gzip.compress(content.encode()))
    globs = [f'*-{name}{gz}' for name in contents for gz in ('', '.gz')]
    if importlib.util.find_spec('pyarrow'):
        parquet = importlib.import_module('pyarrow.parquet')
        table = importlib.import_module('pyarrow').table({'id': range(1500), 'text': texts})
        parquet.write_table(table, folder / 'a.parquet', row_group_size=400)
        globs.append('*.parquet')
    return globs


@pytest.mark.peers
@pytest.mark.parametrize('scheme', CLIENTS)
def test_data_in_a_bucket_gives_the_stream_that_it_gives_on_a_disk(scheme, store, pydoc_model):
    """Text, tables, JSON Lines and Parquet, plain and gzipped, and vocabularies; what fails is named in a line."""
    pytest.importorskip(CLIENTS[scheme], reason=f'{CLIENTS[scheme]} is not installed')
    bucket = store.folder / 'data/c4/en'
    bucket.mkdir(parents=True)
    (bucket / 'sub').mkdir()
    (bucket / 'sub/empty.txt').write_bytes(b'')
    globs = write_corpora(bucket)
    (bucket / 'sentencepiece.model').write_bytes(pydoc_model)
    names = [f'data/c4/en/{name}' for name in [*globs, 'one-plain.txt', 'sentencepiece.model']]
    names += [
        'data/*/e[n]/../en/t*-small.txt',
        'data/c4/en/one-small.txt,{}data/c4/en/three-small.txt',
    ]
    store.failures['data/c4/en/one-lines.jsonl.gz'] = 1  # the client tries again
    cases = []
    for name in names:
        for root in (f'{scheme}://', f'{store.folder}/'):
            cases.append({'files': root + name.replace('{}', root)})
    lines = run_in_another_process(READ, [json.dumps(cases)], store)
    assert len(lines) == len(cases)
    for i, name in enumerate(names):
        in_bucket, on_disk = map(json.loads, lines[2 * i : 2 * i + 2])
        if name.endswith('.model'):
            assert in_bucket == on_disk and 'Error' not in on_disk
            continue
        assert isinstance(in_bucket, list) and isinstance(on_disk, list), (in_bucket, on_disk)
        assert in_bucket[1] == on_disk[1], name
    # A block is fetched with a little around it, a gzipped file once for each lane that reads it, and the
    # beginning of each file once more.
    assert store.failures['data/c4/en/one-lines.jsonl.gz'] == 0
    for name in ('one-lines.jsonl', 'one-lines.jsonl.gz'):
        assert store.sent[f'data/c4/en/{name}'] <= 3 * (bucket / name).stat().st_size, name


@pytest.mark.peers
@pytest.mark.parametrize('scheme', CLIENTS)
def test_a_corpus_in_a_bucket_is_known_by_its_content(scheme, store):
    """Names change nothing; a change of equal size does."""
    pytest.importorskip(CLIENTS[scheme], reason=f'{CLIENTS[scheme]} is not installed')
    cases = []
    for name, text in {'one/a.txt': 'words', 'two/b.txt': 'words', 'three/a.txt': 'other'}.items():
        (store.folder / name).parent.mkdir()
        (store.folder / name).write_text(text)
        cases += [{'files': f'{scheme}://{name}'}, {'files': f'{scheme}://{name[:-5]}*'}]
    cases.append({'files': f'{scheme}://one/*', 'validation_files': f'{scheme}://two/b.txt'})
    cases.append({'files': f'{scheme}://one/*', 'validation_files': f'{scheme}://three/*'})
    *lines, same, good = run_in_another_process(READ, [json.dumps(cases)], store)
    fingerprints = [json.loads(line)[0] for line in lines]
    assert len(set(fingerprints[:4])) == 1
    assert len(set(fingerprints[4:])) == 1 and fingerprints[0] != fingerprints[-1]
    assert '://one/a.txt of data.files and ' in same and 'hold the same' in same
    assert isinstance(json.loads(good), list)


@pytest.mark.peers
@pytest.mark.parametrize('scheme', CLIENTS)
def test_data_in_a_bucket_that_cannot_be_read(scheme, store):
    pytest.importorskip(CLIENTS[scheme], reason=f'{CLIENTS[scheme]} is not installed')
    (store.folder / 'data/sub').mkdir(parents=True)
    (store.folder / 'data/a.txt').write_text('words')
    (store.folder / 'data/empty.txt').write_bytes(b'')
    messages = {
        'none/*.txt': 'data.files: {}none.* cannot be listed .*: correct its name or rights',
        'none/a.txt': 'data.files: {}none.* cannot be listed .*: correct its name or rights',
        'private/a*.txt': 'data.files: {}private.* cannot be listed .*: correct its name or rights',
        'data': r"data.files: '{}data' is a folder: name its files: {}data/\*.txt",
        'data/b.txt': "data.files: '{}data/b.txt' matches no file; correct it",
        'data/b*': "data.files: '{}data/b.' matches no file; correct it",
        'data/nowhere/*': "data.files: '{}data/nowhere/.' matches no file; correct it",
        'data/empty*': "data.files='{}data/empty.' matches empty files only: name files with text",
    }
    root = f'{scheme}://'
    lines = run_in_another_process(
        READ, [json.dumps([{'files': root + name} for name in messages])], store
    )
    for line, message in zip(lines, messages.values(), strict=True):
        assert re.match(f'ValueError: {message.replace("{}", root)}', json.loads(line)), line


@pytest.mark.peers
@pytest.mark.parametrize('scheme', CLIENTS)
def test_a_file_that_goes_away_stops_the_run(scheme, store):
    """Whatever is done with bad lines: a network that fails is no bad line."""
    pytest.importorskip(CLIENTS[scheme], reason=f'{CLIENTS[scheme]} is not installed')
    (store.folder / 'data').mkdir()
    files = [store.folder / 'data' / name for name in ('a.jsonl.gz', 'b.txt')]
    text = json.dumps({'text': 'words'}) + '\n'
    files[0].write_bytes(gzip.compress(text.encode() * 100))
    files[1].write_text('words\n' * 50_000)
    arguments = [f'{scheme}://data/', *map(str, files)]
    lines = run_in_another_process(READ_WHAT_GOES_AWAY, arguments, store)
    for line, file in zip(lines, files, strict=True):
        assert line.startswith(f'{scheme}://data/{file.name} cannot be read (FileNotFoundError: ')
        assert line.endswith('): check the network and your rights, and start again')


@pytest.mark.parametrize('scheme, extra', [('gs', 'gcs'), ('s3', 's3')])
def test_a_client_that_is_not_installed_is_named_with_its_remedy(scheme, extra, monkeypatch):
    monkeypatch.setattr(os, 'environ', dict(os.environ))
    monkeypatch.setitem(sys.modules, CLIENTS[scheme], None)
    with pytest.raises(ValueError) as error:
        infer.load(f'{scheme}://bucket/x')
    with pytest.raises(ValueError, match='data.files: .*://bucket/x.txt needs .*: pip install'):
        sources.open_source(corpora.make_config(files=f'{scheme}://bucket/x.txt'))
    assert f"pip install -e '.[{extra}]'" in str(error.value) and '\n' not in str(error.value)
