"""Random files: each reader gives a right answer, or one line that names the file.

Not a traceback, a crash of native code, or 4 GB of memory. `pytest -m chaos` reads many.
"""

import functools
import gzip
import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import sentencepiece
from corpora import make_config
from runs import ROOT
from small_models import SMALLEST, random_params
from tensor_bundle import proto, table, varint

import checkpoint
import formats.open
import sources.cache
import sources.open
import vocabulary
from formats import mesh_tf, write_hugging_face
from formats.vocabulary import named_vocabulary
from messages import Refused
from modes import errors, infer_input
from sources import BadLines, tfrecord

hypothesis = pytest.importorskip('hypothesis', reason="pip install -e '.[test]'")
st = hypothesis.strategies

# Files that anybody may have written, and what reads each.

RECORDS = [{'question': f'q{i} é', 'answer': i, 'more': {'a': [None, True]}} for i in range(4)]
JSON_LINES = '\n'.join(map(json.dumps, RECORDS)).encode()
TABLE = 'question,answer\n' + ''.join(f'"q{i}\n",{i}\n' for i in range(4))


@functools.cache
def config_of_lines(file: Path, on_bad_line: str) -> Any:
    """Return settings for a file, once: to make them takes longer than to read it."""
    settings = {'max_bad_fraction': 1.0, 'inputs': 'q: {question}', 'targets': '{answer}'}
    config = make_config(files=str(file), on_bad_line=on_bad_line, **settings)
    config.lengths.inputs = config.lengths.targets = 1 << 20
    return config


def read_lines(file: Path) -> None:
    """Read the records as training, --mode=cache and --mode=infer do."""
    for whole in (False, True):
        source = sources.open.open_source(config_of_lines(file, 'skip'), whole_records=whole)
        for split in ('train', 'validation'):
            list(source.records(split))
    config = config_of_lines(file, 'stop')
    byte_vocabulary = vocabulary.ByteVocabulary()
    list(infer_input.FileExamples(str(file), config, byte_vocabulary, True, trim=False))
    list(sources.open.open_source(config).records('train'))


def write_cache(folder: Path) -> None:
    """Write a task cache with an index of its ids."""
    names = [f'train.{kind}-00000-of-00001' for kind in ('tfrecord', 'ids', 'index')]
    with (
        (folder / names[0]).open('wb') as records,
        (folder / names[1]).open('wb') as ids,
        (folder / names[2]).open('wb') as index,
    ):
        for i in range(3):
            example = {name: np.arange(i, i + 5, dtype=np.int32) for name in sources.FEATURES}
            texts = {f'{name}_pretokenized': f'{name} é' for name in example}
            tfrecord.write_record(records, sources.cache.encode(example | texts))
            entry = sources.cache.write_ids(ids, 10 * i, *example.values())
            index.write(np.array(entry, '<i8').tobytes())
    counts = [f'{name}_{what}' for name in sources.FEATURES for what in ('tokens', 'max_tokens')]
    statistics = {'examples': 3, 'fields': {}} | dict.fromkeys(counts, 5)
    sources.cache.write_info(folder, 'train', [statistics])
    (folder / 'COMPLETED').touch()


def read_cache(file: Path) -> None:
    """Read the examples as training does, and with all that is stored, from an index and without."""
    part = sources.open.open_cache(file.parent, 'train', BadLines('stop', 0.0))
    split = sources.cache.open_split(file.parent, 'train')
    large = sources.cache.LargeCache(split, part.files, BadLines('stop', 0.0))
    for each in (part, part.whole(), large, large.whole()):
        assert each.num_records in (None, sum(record is not None for record in each.in_order()))


def write_t5x(folder: Path) -> None:
    tree: dict[str, Any] = {'state/step': np.int32(6)}
    for path, array in random_params(SMALLEST).items():
        tree[f'target/{path}'] = array
        tree[f'state/param_states/{path}/v'] = np.zeros(1, np.float32)
    checkpoint.save(folder.parent, 6, tree).rename(folder)
    (folder / checkpoint.MANIFEST).unlink()  # as T5X leaves it


def write_bundle(folder: Path) -> None:
    for file in (ROOT / 'tests/golden/mtf_t5_1_1').glob('model.ckpt*'):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-1000000"\n')


def write_folder(folder: Path) -> None:
    folder.rmdir()
    write_hugging_face.write(folder, SMALLEST, random_params(SMALLEST))


def read_checkpoint(file: Path) -> None:
    """Open the folder as a model, and read all that it holds."""
    opened = formats.open.open_model(file.parent)
    arrays = checkpoint.restore(opened.leaves)
    for path, leaf in opened.leaves.items():
        assert arrays[path].shape == tuple(leaf.shape), path


KERNEL = 'target.encoder.layers_0.mlp.wo.kernel'


def read_array(file: Path) -> None:
    """Read an array in T5X's layout."""
    path = KERNEL.replace('.', '/')
    leaf = checkpoint.read_index(file.parent.parent)[path]
    assert checkpoint.restore({path: leaf})[path].shape == leaf.shape


def write_vocabulary(folder: Path) -> None:
    words = ['Return the list of words.', 'Raise an error if it is empty.', 'é ｆｕｌｌ'] * 20
    with (folder / 'spiece.model').open('wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words), model_writer=file, vocab_size=40,
            hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
        )  # fmt: skip


def read_vocabulary(file: Path) -> None:
    """Open it, and encode and decode some texts."""
    found = named_vocabulary('data.vocabulary', file, extra_ids=10)
    texts = ['', 'a few words', '<extra_id_0> and<extra_id_1>', 'é ｆｕｌｌ \U0001f600', 'x' * 500]
    for ids in found.encode(texts, glued_sentinels=True):
        assert all(0 <= i < found.size for i in ids)
    assert isinstance(found.decode([*range(found.size + 3)]), str)


# What is wrong with bytes, and with trees of JSON and msgpack.

NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
TOKENS = [b'\0', b'\xff', b'\n', b'"', b',', b'{', b'NaN', b'1e999', b'9' * 5000, b'\\ud800']
TOKENS += [b'\xed\xa0\x80', b'\xef\xbb\xbf', b'\0' * 100, b'[' * 3000, b'{"a":' * 3000]
TOKENS += [b'\x91' * 3000, b'\xdd\x00\xff\xff\xff' * 1000]  # msgpack's lists in lists
TOKENS += [struct.pack('<Q', number % 2**64) for number in NUMBERS]
TOKENS += [varint(number % 2**64) for number in NUMBERS]
NAMES = ['', '.', '..', '../../etc/passwd', '/dev/zero', 'a\0b', 'x' * 300, '\ud800', 'é', '*']
SCALARS = st.sampled_from([None, True, *NUMBERS, *NAMES]) | st.integers() | st.floats() | st.text()
ODD = st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8)


@st.composite
def damaged(draw, content):
    """Bytes of which some are cut, repeated or others."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(start + draw(st.sampled_from([0, 0, 1, 2, 8, 100, 10**9])), len(content))
        others = st.sampled_from(TOKENS) | st.binary(max_size=20) | st.just(content[start:end] * 2)
        content = content[:start] + draw(others) + content[end:]
    return content


def any_bytes(content, *others):
    return st.one_of(st.binary(max_size=200), damaged(content), *others)


@st.composite
def changed(draw, tree, odd=ODD):
    """A tree of dicts and lists of which one node is another, is missing, or has another name."""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 9)) == 0:
        return draw(odd)
    found = dict(tree) if isinstance(tree, dict) else dict(enumerate(tree))
    key = draw(st.sampled_from(list(found)))
    node = found.pop(key)
    change = draw(st.sampled_from(['below', 'below', 'below', 'missing', 'other name']))
    if change == 'below':
        found[key] = draw(changed(node, odd))
    elif change == 'other name':
        found[draw(st.text(max_size=5))] = node
    return found if isinstance(tree, dict) else list(found.values())


def json_of(tree):
    return st.builds(lambda found: json.dumps(found).encode(), tree)


def json_file(content):
    return any_bytes(content, json_of(changed(json.loads(content))))


def json_lines(content):
    records = st.sampled_from([json.loads(line) for line in content.splitlines()])
    line = json_of(records.flatmap(changed)) | st.sampled_from([b'', b' ', *content.splitlines()])
    return any_bytes(content, st.builds(b'\n'.join, st.lists(line, min_size=1, max_size=6)))


def tfrecords(content):
    """Also records with right checksums that hold other examples."""
    record = content[12 : 12 + int.from_bytes(content[:8], 'little')]

    def framed(record):
        length = len(record).to_bytes(8, 'little')
        return length + tfrecord.checksum(length) + record + tfrecord.checksum(record)

    contents = damaged(record) | st.binary(max_size=50) | st.just(record)
    return any_bytes(content, st.lists(contents.map(framed), max_size=4).map(b''.join))


def index_of_t5x(content):
    """Also trees whose leaves are arrays of other shapes and types."""
    tree = msgpack.unpackb(content, ext_hook=msgpack.ExtType)
    shapes = st.lists(st.sampled_from([*NUMBERS[:-1], 2, 3]), max_size=3) | ODD
    dtypes = st.sampled_from(['float32', 'bfloat16', 'O', 'V8', 'U4', 'M8[s]', 'f4,i4', 'x'])
    arrays = st.tuples(shapes, dtypes | ODD, st.binary(max_size=20) | ODD).map(pack)
    extensions = st.builds(msgpack.ExtType, st.integers(0, 4), arrays)
    chunked = {'__msgpack_chunked_array__': st.just(True), 'shape': ODD, 'chunks': ODD}
    nodes = ODD | extensions | st.fixed_dictionaries(chunked)
    return any_bytes(content, changed(tree, nodes).map(pack))


def pack(tree):
    """Return a tree in msgpack, which has integers of 64 bits."""
    try:
        return msgpack.packb(tree, unicode_errors='surrogatepass')
    except OverflowError:
        return b''


def bundle_index(content):
    """Also tables with right checksums that hold other entries."""
    pairs = dict(sorted(mesh_tf._read_table(content).items()))
    values = st.sampled_from([n % 2**64 for n in NUMBERS]) | st.binary(max_size=8)
    entries = st.lists(st.tuples(st.integers(0, 9), values), max_size=8).map(lambda x: proto(*x))

    @st.composite
    def tables(draw):
        found = dict(pairs)
        name = draw(st.sampled_from(list(found)))
        value = draw(damaged(found.pop(name)) | entries)
        found[draw(st.just(name) | st.binary(max_size=9))] = value
        return table(sorted(found.items()))

    return any_bytes(content, tables())


def safetensors_file(content):
    length = int.from_bytes(content[:8], 'little')
    offsets = st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=2)
    dtypes = st.sampled_from(['F64', 'BF16', 'I64', 'F8_E4M3', 'F4', 'BOOL'])
    headers = json_of(changed(json.loads(content[8 : 8 + length]), ODD | offsets | dtypes))
    write = lambda header: len(header).to_bytes(8, 'little') + header + content[8 + length :]  # noqa: E731
    return any_bytes(content, headers.map(write))


class Target(NamedTuple):
    """A file of a format, in a folder with all that belongs to it."""

    file: str
    make: Callable[[Path], Any] | bytes  # fills the folder with valid files
    read: Callable[[Path], Any]  # takes the path of the file
    draw: Callable[[bytes], Any] = any_bytes  # other contents of the file


TARGETS = {
    'JSON Lines': Target('a.jsonl', JSON_LINES, read_lines, json_lines),
    'JSON Lines, gzipped': Target('a.jsonl.gz', gzip.compress(JSON_LINES), read_lines),
    'CSV': Target('a.csv', TABLE.encode(), read_lines),
    'TFRecord': Target('train.tfrecord-00000-of-00001', write_cache, read_cache, tfrecords),
    'index of a cache': Target('train.index-00000-of-00001', write_cache, read_cache),
    'msgpack index': Target('checkpoint', write_t5x, read_checkpoint, index_of_t5x),
    '.zarray': Target(f'{KERNEL}/.zarray', write_t5x, read_array, json_file),
    'TensorBundle': Target('model.ckpt-1000000.index', write_bundle, read_checkpoint, bundle_index),
    'safetensors': Target('model.safetensors', write_folder, read_checkpoint, safetensors_file),
    'config.json': Target('config.json', write_folder, read_checkpoint, json_file),
    'SentencePiece': Target('spiece.model', write_vocabulary, read_vocabulary),
}


@pytest.fixture
def little_memory():
    """Let a reader reserve 4 GB at most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    [pages, *_] = Path('/proc/self/statm').read_text().split()
    resource.setrlimit(resource.RLIMIT_AS, (int(pages) * resource.getpagesize() + 2**32, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize('num_inputs', [20, pytest.param(2000, marks=pytest.mark.chaos)])
@pytest.mark.slow
@pytest.mark.parametrize('name', TARGETS)
def test_a_file_is_read_or_named(tmp_path, little_memory, name, num_inputs):
    target = TARGETS[name]
    folder = tmp_path / 'files'
    folder.mkdir()
    file = folder / target.file
    if isinstance(target.make, bytes):
        file.write_bytes(target.make)
    else:
        target.make(folder)
    target.read(file)

    @hypothesis.settings(
        max_examples=num_inputs,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(target.draw(file.read_bytes()))
    def check(content):
        file.write_bytes(content)
        try:
            target.read(file)
        except (Refused, OSError) as error:  # main.py prints a line; a traceback of anything else
            line = errors.one_line(error)
            assert str(folder) in line or line.startswith("task '")
            assert '\n' not in line and len(line) < 5000

    check()
