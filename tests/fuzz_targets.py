"""Files that anybody may have written, and what reads each: for tests/chaos/fuzz_test.py and atheris.

A reader returns where the answer is right, and raises what main.py makes one line of. `serve` runs readers in a process
of its own, which native code may end.
"""

import functools
import gzip
import importlib.util
import json
import os
import re
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
from absl import flags
from absl.testing import flagsaver
from corpora import make_config
from small_models import SMALLEST, random_params

import checkpoint
import formats.open
import paths
import prepare
import sources.cache
import sources.open
import tasks.open
import vocabulary
from formats import best, write_hugging_face
from formats.vocabulary import named_vocabulary
from messages import Refused
from modes import command_line, errors, infer_input
from modes import train as train_mode
from run import checks
from sources import BadLines, Share, templates

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 64 << 20  # the memory that an input may take, and twice its size
MAX_ADDRESSES = 4 << 30  # memory that may be reserved and never touched
MAX_LINE = 5000  # characters of a message


class Target(NamedTuple):
    """A file of a format in a folder with all that belongs to it."""

    file: str
    make: Callable[[Path], Any]  # fills the folder with valid files
    read: Callable[[Path], Any]  # takes the path of the file
    names: Callable[[Path, bytes], list[str]] = lambda file, content: [str(file.parent)]


def outcome(target: Target, folder: Path, content: bytes) -> str:
    """Return 'read' or 'refused', how reading `content` instead of the file ends; else what is wrong."""
    file = folder / target.file
    file.write_bytes(content)
    try:
        target.read(file)
    except (Refused, OSError) as error:  # main.py prints a line
        line = errors.one_line(error)
        if not any(name in line for name in target.names(file, content)):
            return f'the message names no file or setting: {line}'
        if '\n' in line or len(line) > MAX_LINE:
            return f'the message has {len(line)} characters: {line}'
        return 'refused'
    except (Exception, SystemExit):  # main.py would print a traceback
        return traceback.format_exc()
    return 'read'


# Lines.

RECORDS = [{'question': f'q{i} é', 'answer': i, 'more': {'a': [None, True]}} for i in range(4)]
JSON_LINES = '\n'.join(map(json.dumps, RECORDS)).encode()
TABLE = 'question,answer\n' + ''.join(f'"q{i}\n",{i}\n' for i in range(4))
FILLED = {'inputs': 'q: {question}', 'targets': '{answer}'}


@functools.cache
def config_of_lines(file: Path, on_bad_line: str) -> Any:
    """Return settings for a file, once: to make them takes longer than to read it."""
    settings = {'max_bad_fraction': 1.0, 'validation_fraction': 0.3, **FILLED}
    config = make_config(files=str(file), on_bad_line=on_bad_line, **settings)
    config.lengths.inputs = config.lengths.targets = 1 << 20
    return config


def read_lines(file: Path) -> None:
    """Read the records as training, --mode=cache and --mode=infer do."""
    for whole in (False, True):
        source = sources.open.open_source(config_of_lines(file, 'skip'), whole_records=whole)
        found = []
        for split in ('train', 'validation'):
            stored = list(source.records(split))
            read = []
            for lane in range(2):
                share = Share(seed=0, epoch=0, lane=lane, num_lanes=2)
                read += [document.record for document in source.documents(split, share)]
            assert sorted(map(repr, read)) == sorted(map(repr, stored))
            found += stored
        if file.suffix == '.jsonl':
            _check_json_lines(file, found, whole)
    config = config_of_lines(file, 'stop')
    byte_vocabulary = vocabulary.ByteVocabulary()
    list(infer_input.FileExamples(str(file), config, byte_vocabulary, True, trim=False))
    source = sources.open.open_source(config)
    for split in ('train', 'validation'):
        list(source.records(split))


def _check_json_lines(file: Path, records: list, whole: bool) -> None:
    """Compare the records with json's, line by line; NaN and Infinity are missing values."""
    content = file.read_bytes()
    kinds: dict = {'parse_float': str, 'parse_int': str}  # the text of the line
    if whole:
        kinds = {'parse_int': lambda text: float(text) if text == '-0' else int(text)}
    decoder = json.JSONDecoder(parse_constant=lambda name: None, **kinds)
    for record in records:
        offset = int(record.name.rpartition(':')[2])
        line = content[offset:].split(b'\n')[0]
        expected = decoder.decode(line.decode('utf-8-sig' if offset == 0 else 'utf-8'))
        if not whole:
            for field in ('question', 'answer'):
                if not isinstance(expected[field], str):
                    expected[field] = json.dumps(expected[field])
            expected = {field: expected[field].strip() for field in ('question', 'answer')}
        assert repr(record.fields) == repr(expected)


def lines(name: str, content: bytes) -> Target:
    return Target(name, lambda folder: (folder / name).write_bytes(content), read_lines)


# Task caches.


def write_cache(folder: Path) -> None:
    """A cache with the ids beside the records."""
    with (
        (folder / 'train.tfrecord-00000-of-00001').open('wb') as records,
        (folder / 'train.ids-00000-of-00001').open('wb') as ids,
        (folder / 'train.index-00000-of-00001').open('wb') as index,
    ):
        start = 0
        for i in range(3):
            example = {name: np.arange(i, i + 5, dtype=np.int32) for name in sources.FEATURES}
            texts = {f'{name}_pretokenized': f'{name} é' for name in example}
            sources.tfrecord.write_record(records, sources.cache.encode(example | texts))
            entry = sources.cache.write_ids(ids, start, *example.values())
            index.write(np.array(entry, '<i8').tobytes())
            start += 10
    names = [f'{name}_{what}' for name in sources.FEATURES for what in ('tokens', 'max_tokens')]
    sources.cache.write_info(folder, 'train', [{'examples': 3} | dict.fromkeys(names, 5)])
    (folder / 'COMPLETED').touch()


def write_cache_of_seqio(folder: Path) -> None:
    write_cache(folder)
    for name in ('ids', 'index'):
        (folder / f'train.{name}-00000-of-00001').unlink()


def read_cache(file: Path) -> None:
    """Read the examples as training does, and with all that is stored, from an index and without."""
    folder = file.parent
    parts = [sources.open.open_cache(folder, 'train', BadLines('stop', 0.0))]
    parts.append(parts[0].whole())
    split = sources.cache.open_split(folder, 'train')
    large = sources.cache.LargeCache(split, parts[0].files, BadLines('stop', 0.0))
    for part in (*parts, large, large.whole()):
        records = [record for record in part.in_order() if record is not None]
        assert part.num_records in (None, len(records))


def cache(file: str, make: Callable = write_cache_of_seqio) -> Target:
    return Target(file, make, read_cache)


# Checkpoints.


def write_t5x(folder: Path) -> None:
    tree: dict[str, Any] = {'state/step': np.int32(6)}
    for path, array in random_params(SMALLEST).items():
        tree[f'target/{path}'] = array
    for slot in ('m', 'v'):
        tree[f'state/param_states/{path}/{slot}'] = np.zeros(1, np.float32)
    checkpoint.save(folder.parent, 6, tree).rename(folder)
    (folder / checkpoint.MANIFEST).unlink()  # as T5X leaves it


def write_bundle(folder: Path) -> None:
    """As in tests/golden, of TensorFlow."""
    prefix = folder / 'model.ckpt-1000000'
    golden = ROOT / 'tests/golden/mtf_t5_1_1'
    for file in golden.glob('model.ckpt*'):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / 'checkpoint').write_text(f'model_checkpoint_path: "{prefix.name}"\n')


def write_folder(folder: Path) -> None:
    folder.rmdir()
    write_hugging_face.write(folder, SMALLEST, random_params(SMALLEST))


def read_checkpoint(file: Path) -> None:
    """Open the folder as a model, and read all that it holds."""
    opened = formats.open.open_model(file.parent)
    assert formats.open.saved_step(opened.leaves) in range(2**31)
    arrays = checkpoint.restore(opened.leaves)
    for path, leaf in opened.leaves.items():
        assert arrays[path].shape == tuple(leaf.shape), path


def checkpoint_file(file: str, make: Callable) -> Target:
    return Target(file, make, read_checkpoint)


KERNEL = 'target.encoder.layers_0.mlp.wo.kernel'


def read_array(file: Path) -> None:
    """Read an array in T5X's layout."""
    path = KERNEL.replace('.', '/')
    leaf = checkpoint.read_index(file.parent.parent)[path]
    assert leaf.dtype == np.float32
    [array] = checkpoint.restore({path: leaf}).values()
    assert array.shape == leaf.shape


# Vocabularies.

TEXTS = [
    '',
    'a few words',
    '<extra_id_0> and<extra_id_1>',
    'é \u2581 ｆｕｌｌ \U0001f600\u0301',
    'x' * 500,
]


def write_vocabulary(folder: Path) -> None:
    words = ['Return the list of words.', 'Raise an error if it is empty.', 'é ｆｕｌｌ'] * 20
    rules = folder / 'rules.tsv'  # a hundredth of the normalization rules of T5's vocabulary
    rules.write_text('FF46\t66\nFF55\t75\nFF4C\t6C\n65 301\tE9\n')
    options = {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1, 'minloglevel': 2}
    with (folder / 'spiece.model').open('wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(words),
            model_writer=file,
            vocab_size=40,
            hard_vocab_limit=False,
            normalization_rule_tsv=str(rules),
            **options,
        )


def read_vocabulary(file: Path) -> None:
    """Open it, and encode and decode some texts."""
    found = named_vocabulary('data.vocabulary', file, extra_ids=10)
    for ids in found.encode(TEXTS, glued_sentinels=True):
        assert all(0 <= i < found.size for i in ids)
        assert isinstance(found.decode(ids), str)
    assert isinstance(found.decode([*range(found.size + 3)]), str)


# Templates.

TEMPLATE = b'q: {question} {{}}\0{answer}'
PROMPTS = """\
dataset: story
subset: cloze
templates:
  0d5fcb55: !Template
    answer_choices: "{{first}} ||| {{second}}"
    id: 0d5fcb55
    jinja: "{{text}} {% if label %}yes{% endif %} ||| {{ answer_choices[label] }}"
    metadata: !TemplateMetadata
      choices_in_prompt: true
      metrics: [Accuracy]
      original_task: true
    name: Choose
    reference: ''
"""


def write_template(folder: Path) -> None:
    (folder / 'template').write_bytes(TEMPLATE)


def read_template(file: Path) -> None:
    """Fill data.inputs and data.targets, which stand in the file, with a zero between."""
    inputs, _, targets = file.read_bytes().decode(errors='surrogateescape').partition('\0')
    config = config_of_lines(file, 'stop')
    config.inputs = inputs
    config.targets = targets
    fields = {name: f'[{name}]' for name in templates.fields_named(config)}
    for key, template in templates.templates_of(config).items():
        # But for braces, a text filled with the names of its fields is the template.
        assert re.sub(r'[][{}]', '', template.fill(fields)) == re.sub(r'[][{}]', '', config[key])


def read_prompts(file: Path) -> None:
    from tasks import promptsource

    fields = {'text': 'some words', 'first': 'a', 'second': 'b', 'label': 1}
    for task in promptsource.tasks(str(file), files='a.csv'):
        for example in task.preprocess([fields]):
            assert isinstance(example['inputs'], str)


# The command line.


def write_flags(folder: Path) -> None:
    (folder / 'words.txt').write_text('some words\nof a corpus\n' * 20)
    (folder / 'argv').write_text('--config.seed=1\0--workdir=run')


def read_flags(file: Path) -> None:
    """Do what main.py does of a command line, up to the model and the data of a training run."""
    argv = ['main.py', f'--config={ROOT}/configs/tiny.py']
    argv += [f'--config.data.files={file.parent}/words.txt', *arguments_of(file.read_bytes())]
    sys.argv = argv  # ml_collections looks there
    with flagsaver.flagsaver():
        config = command_line.parse(argv)
        values = command_line.values_of_mode()
        if 'shard' in values:
            command_line.parse_shard(values['shard'])
        if flags.FLAGS.mode == 'train':
            folder = values['workdir'] or str(file.parent / 'run')
            train_mode.parse(values['profile'], folder)
            best.check_settings(config)
            tasks.open.find(config.data)
            checks.check_is_run(paths.to_path(folder, may_be_new=True))
            prepare.make_spec(config)
            tasks.open.open_mixture(config.data)


def arguments_of(content: bytes) -> list[str]:
    return [os.fsdecode(argument) for argument in content.split(b'\0')]


def names_of_flags(file: Path, content: bytes) -> list[str]:
    """Return the names and values of which a message has to have one."""
    names = ['get_config', 'data.', 'model.', 'train.', 'unknown setting', 'command line flag']
    for argument in arguments_of(content):
        name, _, value = argument.lstrip('-').removeprefix('config.').partition('=')
        for text in (name, name.rpartition('.')[2], value):
            names += [' '.join(text.split()) or '--', repr(text)[1:-1] or '--']
    return names


TARGETS = {
    'flags': Target('argv', write_flags, read_flags, names_of_flags),
    'JSON Lines': lines('a.jsonl', JSON_LINES),
    'JSON Lines, gzipped': lines('a.jsonl.gz', gzip.compress(JSON_LINES)),
    'CSV': lines('a.csv', TABLE.encode()),
    'TFRecord': cache('train.tfrecord-00000-of-00001'),
    'info.json of a cache': cache('info.train.json'),
    'index of a cache': cache('train.index-00000-of-00001', write_cache),
    'msgpack index': checkpoint_file('checkpoint', write_t5x),
    '.zarray': Target(f'{KERNEL}/.zarray', write_t5x, read_array),
    'TensorBundle index': checkpoint_file('model.ckpt-1000000.index', write_bundle),
    'safetensors': checkpoint_file('model.safetensors', write_folder),
    'config.json of Hugging Face': checkpoint_file('config.json', write_folder),
    'SentencePiece': Target('spiece.model', write_vocabulary, read_vocabulary),
    'templates': Target(
        'template',
        write_template,
        read_template,
        lambda file, content: ['data.inputs', 'data.targets'],
    ),
    "promptsource's templates": Target(
        'templates.yaml',
        lambda folder: (folder / 'templates.yaml').write_text(PROMPTS),
        read_prompts,
        lambda file, content: [str(file), "task '"],
    ),
}
if importlib.util.find_spec('yaml') is None:  # in the extra prompts
    del TARGETS["promptsource's templates"]


def make_all(root: Path) -> dict[str, Path]:
    """Write the files of all targets below `root`. Return the folder of each."""
    folders = {}
    for name, target in TARGETS.items():
        folders[name] = root / re.sub(r'\W+', '_', name)
        folders[name].mkdir()
        target.make(folders[name])
    return folders


# The process.


def serve(connection: Any, folders: dict[str, Path], contents: dict[str, bytes]) -> None:
    """Answer (name of a target, content) with how it ends, and the bytes of memory that it took."""
    for number in (1, 2):  # libraries print what they think of a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    for name, content in contents.items():  # loads what is loaded once
        ended = outcome(TARGETS[name], folders[name], content)
        if ended != 'read':
            connection.send(f'{name}: {ended}')
    limit = memory('VmSize') + MAX_ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send('ready')
    while True:
        name, content = connection.recv()
        Path('/proc/self/clear_refs').write_text('5')  # forget the peak
        before = memory('VmRSS')
        ended = outcome(TARGETS[name], folders[name], content)
        connection.send((ended, memory('VmHWM') - before))


def memory(key: str) -> int:
    """Return the bytes of memory that this process has (VmRSS, VmSize) or had at most (VmHWM)."""
    found = re.search(rf'{key}:\s+(\d+) kB', Path('/proc/self/status').read_text())
    assert found
    return 1024 * int(found[1])
