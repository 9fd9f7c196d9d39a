"""Random files and command lines: a right answer, or one line that names what is wrong.

Not a traceback, a crash of native code, a hang, nor more memory than 64 MB and twice the size of the file.
`pytest -m chaos` reads many and prints their counts; the short form runs in the quick suite.
"""

import collections
import gzip
import importlib.util
import itertools
import json
import multiprocessing
import os
import struct
import sys

import msgpack
import pytest
from forms import first_in_ci
from fuzz_targets import MAX_BYTES, TARGETS, make_all, serve
from sentencepiece import sentencepiece_model_pb2
from tensor_bundle import proto, table, varint

from configs import base
from configs import check as settings
from formats import mesh_tf
from modes import command_line
from sources import tfrecord

hypothesis = pytest.importorskip('hypothesis', reason="pip install -e '.[test]'")
st = hypothesis.strategies

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')
MAX_SECONDS = 60  # an input takes milliseconds, but the machine may have other work


# The process that reads.


class Reader:
    """Reads files in a process of its own, which native code may end."""

    def __init__(self, root):
        self.folders = make_all(root)
        self.contents = {}
        for name, target in TARGETS.items():
            self.contents[name] = (self.folders[name] / target.file).read_bytes()
        self.process = None

    def start(self):
        context = multiprocessing.get_context('spawn')
        self.connection, theirs = context.Pipe()
        arguments = (theirs, self.folders, self.contents)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.connection.recv() == 'ready'

    def read(self, name, content):
        """Return 'read' or 'refused'. Fails for any other end."""
        if self.process is None:
            self.start()
        self.connection.send((name, content))
        try:
            if self.connection.poll(MAX_SECONDS):
                ended, num_bytes = self.connection.recv()
                if num_bytes > MAX_BYTES + 2 * len(content):
                    ended = f'{num_bytes:,} bytes of memory'
            else:
                self.close()
                ended = f'no answer in {MAX_SECONDS} s'
        except (EOFError, ConnectionError):
            self.process.join()
            ended = f'the process ended with {self.process.exitcode}'
            self.process = None
        if ended not in ('read', 'refused'):
            pytest.fail(f'{name}, {len(content)} bytes: {ended}\n{content[:2000]!r}')
        return ended

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


@pytest.fixture(scope='module')
def reader(tmp_path_factory):
    reader = Reader(tmp_path_factory.mktemp('fuzz'))
    yield reader
    reader.close()


# What is wrong with bytes.

NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
TOKENS = [
    b'\0',
    b'\xff',
    b'\n',
    b'\r',
    b'"',
    b',',
    b'{',
    b'}',
    b'NaN',
    b'-Infinity',
    b'1e999',
    b'9' * 5000,
    b'\\ud800',
    b'\xed\xa0\x80',
    b'\xc3',
    b'\xef\xbb\xbf',
    b'\0' * 100,
    b'\xff' * 10,
    b'\x80' * 10,
    b'[' * 3000,
    b'[' * 950 + b']' * 950,
    b'{"a":' * 3000,
    b'\x91' * 3000,  # msgpack's list in a list in a list
    b'\xdd\x00\xff\xff\xff' * 1000,
    b'\x0a\x80\x80\x01' * 100,
    *(struct.pack('<Q', number % 2**64) for number in NUMBERS),
    *(varint(number % 2**64) for number in NUMBERS),
]


@st.composite
def damaged(draw, content):
    """Bytes of which some are cut, repeated or others."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = min(start + draw(st.sampled_from([0, 0, 1, 2, 8, 100, 10**9])), len(content))
        middle = draw(
            st.sampled_from(TOKENS) | st.binary(max_size=20) | st.just(content[start:end] * 2)
        )
        content = content[:start] + middle + content[end:]
    return content


def files(content, *others):
    """Bytes that have little to do with `content`, some that are like it, and `others`."""
    return st.one_of(st.binary(max_size=200), damaged(content), *others)


# What is wrong with trees of JSON, msgpack and others.

NAMES = [
    '',
    '.',
    '..',
    '/',
    '../../etc/passwd',
    '/dev/zero',
    'a\0b',
    'x' * 300,
    '\ud800',
    'é',
    '*',
    '(',
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(NUMBERS),
    st.integers(),
    st.floats(),
    st.sampled_from(NAMES),
    st.text(max_size=20),
)
ODD = st.recursive(
    SCALARS,
    lambda node: (
        st.lists(node, max_size=4) | st.dictionaries(st.text(max_size=5), node, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw, tree, odd=ODD):
    """A tree of dicts and lists of which one node is another, is missing, or has another name."""
    if not isinstance(tree, dict | list) or not tree or draw(st.integers(0, 9)) == 0:
        return draw(odd)
    found = dict(tree) if isinstance(tree, dict) else dict(enumerate(tree))
    key = draw(st.sampled_from(list(found)))
    change = draw(st.sampled_from(['below', 'below', 'below', 'missing', 'other name']))
    node = found.pop(key)
    if change == 'below':
        found[key] = draw(changed(node, odd))
    elif change == 'other name':
        found[draw(st.text(max_size=5)) if isinstance(tree, dict) else -1] = node
    return found if isinstance(tree, dict) else list(found.values())


def json_of(tree):
    """JSON, with lone surrogates as they are written there."""
    return st.builds(lambda found: json.dumps(found).encode(), tree)


# The formats.


def json_lines(content):
    records = st.sampled_from([json.loads(line) for line in content.splitlines()])
    line = json_of(records.flatmap(changed)) | st.sampled_from([b'', b' ', *content.splitlines()])
    return files(content, st.builds(b'\n'.join, st.lists(line, min_size=1, max_size=6)))


def gzipped(content):
    inner = json_lines(gzip.decompress(content))
    return files(content, st.builds(gzip.compress, inner))


def tfrecords(content):
    """Also records with right checksums that hold other examples, and lengths of other files."""
    length = int.from_bytes(content[:8], 'little')
    record = content[12 : 12 + length]

    def framed(records):
        return b''.join(
            length + tfrecord.checksum(length) + record + tfrecord.checksum(record)
            for length, record in records
        )

    lengths = st.sampled_from(NUMBERS).map(lambda number: (number % 2**64).to_bytes(8, 'little'))
    contents = damaged(record) | st.binary(max_size=50) | st.just(record)
    right = contents.map(lambda record: (len(record).to_bytes(8, 'little'), record))
    records = st.lists(st.one_of(right, right, st.tuples(lengths, contents)), max_size=4)
    return files(content, records.map(framed))


def index_of_t5x(content):
    tree = msgpack.unpackb(content, ext_hook=msgpack.ExtType)
    arrays = st.tuples(
        st.lists(st.sampled_from([*NUMBERS[:-1], 2, 3]), max_size=3) | ODD,
        st.sampled_from(['float32', 'bfloat16', 'O', 'V8', 'U4', 'M8[s]', 'f4,i4', 'x', '']) | ODD,
        st.binary(max_size=20) | ODD,
    ).map(lambda content: msgpack.ExtType(1, pack(content)))
    extensions = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=50))
    chunked = st.fixed_dictionaries(
        {'__msgpack_chunked_array__': st.just(True), 'shape': ODD, 'chunks': ODD}
    )
    nodes = st.one_of(ODD, arrays, extensions, chunked, st.binary(max_size=10))
    return files(content, changed(tree, nodes).map(pack))


def pack(tree):
    return msgpack.packb(tree, default=str, unicode_errors='surrogatepass') if fits(tree) else b''


def fits(tree):
    """Whether msgpack can write a tree: its integers have 64 bits."""
    if isinstance(tree, dict):
        return all(map(fits, tree.values()))
    if isinstance(tree, list | tuple) and not isinstance(tree, msgpack.ExtType):
        return all(map(fits, tree))
    return not isinstance(tree, int) or -(2**63) <= tree < 2**64


def zarray(content):
    compressors = st.fixed_dictionaries(
        {'id': st.sampled_from(['gzip', 'zlib', 'blosc', 'bz2', 'zstd', 'x'])},
        optional={'level': ODD, 'cname': ODD, 'clevel': ODD, 'shuffle': ODD, 'blocksize': ODD},
    )
    dtypes = st.sampled_from(
        ['<f4', '>f4', '<i8', '|S1', '|V4', [['a', '<f4']], 'bfloat16', '<M8[s]']
    )
    sizes = st.lists(st.sampled_from([*NUMBERS, 6, 8]), max_size=3)
    return files(content, json_of(changed(json.loads(content), ODD | compressors | dtypes | sizes)))


def bundle_index(content):
    """Also tables with right checksums that hold other entries."""
    pairs = dict(sorted(mesh_tf._read_table(content).items()))
    fields = st.lists(
        st.tuples(
            st.integers(0, 9),
            st.one_of(
                st.sampled_from([number % 2**64 for number in NUMBERS]),
                st.binary(max_size=8),
                st.tuples(st.just('fixed32'), st.integers(0, 2**32 - 1)),
                st.lists(st.sampled_from([2**62, 2**32, 0, 1]), max_size=10).map(
                    lambda sizes: proto(*((2, proto((1, size))) for size in sizes))
                ),
            ),
        ),
        max_size=8,
    )

    @st.composite
    def tables(draw):
        found = dict(pairs)
        name = draw(st.sampled_from(list(found)))
        value = found.pop(name)
        value = draw(damaged(value) | fields.map(lambda found: proto(*found)) | st.just(value))
        found[draw(st.just(name) | st.binary(max_size=9))] = value
        change = draw(st.sampled_from([bytes, lambda body: draw(damaged(body))]))
        compress = draw(st.sampled_from([(0,), (1,), (0, 1)]))
        return table(sorted(found.items()), compress=compress, change=change)

    return files(content, tables())


def safetensors_file(content):
    length = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8 : 8 + length])

    def write(tree, length, data):
        text = json.dumps(tree).encode()
        length = len(text) if length is None else length % 2**64
        return length.to_bytes(8, 'little') + text + data

    offsets = st.lists(st.sampled_from(NUMBERS), min_size=2, max_size=2)
    dtypes = st.sampled_from(['F64', 'F32', 'BF16', 'F16', 'I64', 'F8_E4M3', 'F4', 'BOOL'])
    return files(
        content,
        st.builds(
            write,
            changed(header, ODD | offsets | dtypes),
            st.none() | st.none() | st.sampled_from(NUMBERS),
            st.just(content[8 + length :]) | st.binary(max_size=50),
        ),
    )


def sentencepiece_model(content):
    """Also models whose fields have other values."""

    @st.composite
    def models(draw):
        proto = sentencepiece_model_pb2.ModelProto.FromString(content)
        for _ in range(draw(st.integers(1, 3))):
            change_message(draw, proto)
        return proto.SerializeToString()

    return files(content, models())


def change_message(draw, message):
    """Draw other values for a field of a protobuf message, or of one in it."""
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    value = getattr(message, field.name)
    if field.type == field.TYPE_MESSAGE:
        if field.is_repeated:
            change = draw(st.sampled_from(['one', 'one', 'one', 'none', 'fewer', 'more']))
            if change == 'none':
                message.ClearField(field.name)
            elif value and change == 'fewer':
                del value[draw(st.integers(0, len(value) - 1)) :]
            elif value and change == 'more':
                value.add().CopyFrom(draw(st.sampled_from(list(value))))
            elif value:
                change_message(draw, draw(st.sampled_from(list(value)[:6] + list(value)[-3:])))
        else:
            change_message(draw, value)
        return
    text = st.sampled_from(
        ['', '▁', '<s>', '</s>', '<pad>', '<unk>', 'a', '<extra_id_0>', '<0x41>', 'x' * 300]
    )
    values = {
        field.TYPE_INT32: st.sampled_from([0, 1, 2, 3, -1, 39, 40, 2**31 - 1, -(2**31)]),
        field.TYPE_UINT64: st.sampled_from([0, 1, 2**64 - 1]),
        field.TYPE_FLOAT: st.floats(width=32),
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_STRING: text | st.text(st.characters(exclude_categories=['Cs']), max_size=5),
        field.TYPE_BYTES: st.binary(max_size=60),
    }
    if field.type == field.TYPE_BYTES and value:
        values[field.TYPE_BYTES] = damaged(value)
    if field.type == field.TYPE_ENUM:
        values[field.TYPE_ENUM] = st.sampled_from([x.number for x in field.enum_type.values])
    drawn = draw(values[field.type])
    if field.is_repeated:
        value.append(drawn)
    else:
        setattr(message, field.name, drawn)


def template(content):
    parts = st.sampled_from(
        ['{', '}', '{{', '}}', '{question}', '{a.b}', '{a[0]}', '{!r}', ':', '\0', ' é', '{0}']
    )
    texts = st.lists(parts | st.text(max_size=3), max_size=8).map(''.join)
    pairs = st.builds(lambda a, b: f'{a}\0{b}', texts, texts)
    return files(content, pairs.map(lambda text: text.encode(errors='surrogatepass')))


def prompts(content):
    yaml = importlib.import_module('yaml')
    tree = yaml.safe_load(content.replace(b' !Template', b'').replace(b'Metadata\n', b'\n'))
    parts = '{{ }} {% %} if text ||| {{text}} |choice [9] .a |x * - 1 for i in'.split()
    texts = st.lists(st.sampled_from(parts) | st.text(max_size=3), max_size=6).map(' '.join)
    trees = changed(tree, ODD | texts | texts)
    return files(content, trees.map(lambda found: yaml.safe_dump(found).encode(errors='replace')))


VALUES = """~ ~x %s {a} [ (? ((a+)+)+b ' " () ('a',) (1,2) [] {} None 1e5 0x10 1_0 ² 1/2 3:1 all best""".split()


def command_lines(content):
    defaults = dict(settings.leaves(base.get_config()))
    # A model of a thousand layers takes a while.
    keys = [key for key in defaults if not key.endswith('coder_layers')]
    keys += ['train', 'data.lengths', 'x', 'train.stepz', '', 'seed.x', 'é']
    names = {name for of_mode in command_line.FLAGS_OF_MODE.values() for name in of_mode}
    names = names - {'config'} | {'flagfile', 'undefok', 'helpxml', 'v'}  # absl's
    numbers = st.sampled_from(NUMBERS) | st.floats() | st.integers(-3, 300)
    texts = st.one_of(
        st.sampled_from(
            [
                *map(str, defaults.values()),
                *itertools.chain(*(x.choices or () for x in settings.declared().values())),
            ]
        ),
        st.sampled_from([*NAMES, *VALUES, '"' * 99, '(' * 500, '-' * 9999]),
        st.text(st.characters(exclude_categories=['Cs'], exclude_characters='\0'), max_size=12),
    )
    value = numbers.map(str) | texts
    setting = st.builds('--config.{}={}'.format, st.sampled_from(keys), value)
    flag = st.builds('--{}={}'.format, st.sampled_from([*sorted(names), 'mode', 'x']), value)
    mode = st.sampled_from(list(command_line.FLAGS_OF_MODE)).map('--mode={}'.format)
    word = st.one_of(value, setting.map(lambda text: text.partition('=')[0]), flag, mode)
    arguments = st.lists(st.one_of(setting, setting, setting, word), min_size=1, max_size=4)

    def given(argument):
        """The system gives a program no zeros, and bytes that are not UTF-8 as half surrogate pairs."""
        return argument.replace('\0', '').replace('\ud800', '\udcff')

    return arguments.map(lambda found: os.fsencode('\0'.join(map(given, found))))


STRATEGIES = {
    'flags': command_lines,
    'JSON Lines': json_lines,
    'JSON Lines, gzipped': gzipped,
    'CSV': files,
    'TFRecord': tfrecords,
    'info.json of a cache': lambda content: files(content, json_of(changed(json.loads(content)))),
    'index of a cache': files,
    'msgpack index': index_of_t5x,
    '.zarray': zarray,
    'TensorBundle index': bundle_index,
    'safetensors': safetensors_file,
    'config.json of Hugging Face': lambda content: files(
        content, json_of(changed(json.loads(content)))
    ),
    'SentencePiece': sentencepiece_model,
    'templates': template,
    "promptsource's templates": prompts,
}


@pytest.mark.parametrize('num_inputs', [20, pytest.param(2000, marks=pytest.mark.chaos)])
@pytest.mark.slow
@pytest.mark.parametrize('name', first_in_ci(STRATEGIES, 6))
def test_a_file_is_read_or_named(reader, name, num_inputs):
    if 'promptsource' in name:
        pytest.importorskip('yaml', reason="pip install -e '.[prompts]'")
    counts = collections.Counter()

    @hypothesis.settings(
        max_examples=num_inputs,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(STRATEGIES[name](reader.contents[name]))
    def check(content):
        counts[reader.read(name, content)] += 1

    check()
    print(f'\n{name}: {counts.total()} inputs: {dict(sorted(counts.items()))}')
