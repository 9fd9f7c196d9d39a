"""The memory that it takes to open a large checkpoint of each format, and to convert it.

    python benchmarks/restore_memory.py [--config=configs/t5_1_1.py:xl] [--folder=DIR] [--convert]
                                        [--part=encoder]

Writes random float32 parameters of the config's sizes to DIR, as T5X (with our checksums), as
Mesh-TF and as Hugging Face, one after the other. Opens each in a new process on one CPU device and
compares all arrays with what was written. Prints the size of the parameters and the memory of a
process that only imports; then a line per format: seconds, peak resident memory (which includes
pages of mapped files) and its ratio to the size; last the rate of plain reading. Files are dropped
from the page cache before they are read.

With --part=encoder, only the encoders of the checkpoints are opened, and the size is an encoder's.

The number to expect: a ratio of at most 1.3 to load t5_1_1.py:xl, and of 1.1 for its encoder. (In
smaller models the imports weigh more.) That takes 12 GB of disk, with --convert 23.
"""

import os
import re
import resource
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags

import checkpoint
import infer
import model
from formats import hugging_face, write_hugging_face
from modes import convert

ROOT = Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS
config_flags.DEFINE_config_file('config', f'{ROOT}/configs/t5_1_1.py:large', 'Sizes of the model.')
flags.DEFINE_string('folder', None, "Where to write; the system's temporary folder if not given.")
flags.DEFINE_bool('convert', False, 'Also convert each checkpoint.')
flags.DEFINE_enum('part', '', ['', 'encoder'], 'What to open; the whole model if not given.')
NUM_SHARDS = 4  # .data files of a Mesh-TF checkpoint


class Measurement(NamedTuple):
    seconds: float
    peak_bytes: int  # the process's


def main(argv: list[str]) -> None:
    config = model.T5Config(**FLAGS.config.model)
    parameters = {path: Parameter(path, shape) for path, shape in model.shapes(config).items()}
    opened = parameters
    if FLAGS.part == 'encoder':
        opened = {path: x for path, x in parameters.items() if not path.startswith('decoder/')}
    size = sum(4 * int(np.prod(parameter.shape)) for parameter in opened.values())
    imports = in_new_process(peak_bytes)
    print(f'{size / 1e9:.2f} GB of float32 parameters; imports alone take {imports / 1e9:.2f} GB')

    num_bytes = 0
    read_seconds = 0.0
    for name, write in FORMATS.items():
        with tempfile.TemporaryDirectory(dir=FLAGS.folder) as folder:
            source = Path(folder, 'source')
            in_new_process(write, source, config, parameters)
            drop_from_cache(source)
            start = time.perf_counter()
            num_bytes += read_plainly(source)
            read_seconds += time.perf_counter() - start
            measure_format(name, source, Path(folder, 'target'), opened, size)
    print(f'plain reading of the files: {num_bytes / read_seconds / 1e9:.2f} GB/s, cold cache')


def measure_format(
    name: str, source: Path, target: Path, parameters: Mapping[str, 'Parameter'], size: int
) -> None:
    """Load and, if asked, convert the checkpoint `source`. Print a line for each."""
    drop_from_cache(source)
    report(f'{name}, load', in_new_process(load, source, FLAGS.part, parameters), size)
    if not FLAGS.convert:
        return
    for target_format in ('t5x', 'hf'):
        drop_from_cache(source)
        measurement = in_new_process(convert_to, target_format, source, target)
        report(f'{name}, convert to {target_format}', measurement, size)
        shutil.rmtree(target)


def report(text: str, measurement: Measurement, size: int) -> None:
    """Print a measurement beside the `size` of the parameters in bytes."""
    seconds, peak = measurement
    ratio = f'{peak / size:.2f} times the parameters'
    print(f'{text:24} {seconds:6.1f} s, {peak / 1e9:6.2f} GB, {ratio}', flush=True)


def in_new_process(function: Callable, *arguments):
    """Return the function's result.

    On Linux the peak of a process begins with the memory of the process that started it. So this
    process stays small, and even writing happens in another one.
    """
    with futures.ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(function, *arguments).result()


def peak_bytes() -> int:
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(source: Path, part: str, parameters: Mapping[str, 'Parameter']) -> Measurement:
    """Open a checkpoint, or a part of it. Raises ValueError unless its arrays are those that were written."""
    start = time.perf_counter()
    arrays = jax.block_until_ready(infer.load(source, part=part).arrays)
    seconds = time.perf_counter() - start
    for x in arrays.values():
        x.sum().block_until_ready()
    measurement = Measurement(seconds, peak_bytes())
    for path, parameter in parameters.items():
        if not np.array_equal(arrays[path], parameter.read()):
            raise ValueError(f'{path} of {source} is not what was written: correct the reader')
    return measurement


def convert_to(target_format: str, source: Path, target: Path) -> Measurement:
    """Convert a checkpoint."""
    start = time.perf_counter()
    convert.convert_checkpoint(source, target, target_format)
    return Measurement(time.perf_counter() - start, peak_bytes())


@dataclass(frozen=True)
class Parameter:
    """A random array that is made when it is read.

    So it can be written like a leaf of a checkpoint's index.
    """

    path: str
    shape: tuple[int, ...]
    dtype = np.dtype(np.float32)

    def read(self) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(self.path.encode()))
        # A prime number of values is repeated, so that rows differ.
        return np.resize(rng.standard_normal(65537, np.float32), self.shape)


def write_t5x(folder: Path, config: model.T5Config, parameters: Mapping[str, Parameter]) -> None:
    """Write a checkpoint of T5X."""
    tree = {f'target/{path}': parameter for path, parameter in parameters.items()}
    checkpoint.save(folder, 0, {'state/step': np.int32(0)} | tree)


def write_mesh_tf(
    folder: Path, config: model.T5Config, parameters: Mapping[str, Parameter]
) -> None:
    """Write a checkpoint of Mesh-TF, one array after the other.

    Parameter i goes to shard i % NUM_SHARDS.
    """
    sys.path.insert(0, str(ROOT / 'tests'))
    from tensor_bundle import masked, proto, table  # its `bundle` holds all arrays in memory

    folder.mkdir()
    prefix = folder / 'model.ckpt-0'
    names = hugging_face.parameter_names(config)
    entries = {b'': proto((1, NUM_SHARDS), (3, proto((1, 1))))}
    for i, (path, parameter) in enumerate(parameters.items()):
        x = parameter.read()
        shard = i % NUM_SHARDS
        with open(f'{prefix}.data-{shard:05}-of-{NUM_SHARDS:05}', 'ab') as stream:
            offset = stream.tell()
            stream.write(x.data)
        shape = proto(*((2, proto((1, n))) for n in x.shape))
        crc32c = ('fixed32', masked(x.view(np.uint8).reshape(-1)))
        entry = proto(
            (1, 1),  # dtype 1 is float32
            (2, shape),
            (3, shard),
            (4, offset),
            (5, x.nbytes),
            (6, crc32c),
        )
        entries[mesh_tf_name(names[path]).encode()] = entry
    Path(f'{prefix}.index').write_bytes(table(sorted(entries.items()), compress=(0,)))


def mesh_tf_name(name: str) -> str:
    """Return Mesh-TF's name for a parameter of Hugging Face.

    For example, encoder.block.0.layer.1.DenseReluDense.wo.weight.
    """
    name = name.removesuffix('.weight')
    if name == 'shared':
        return 'shared/embedding'
    if name == 'lm_head':
        return 'decoder/logits/kernel'

    def with_three_digits(match: re.Match) -> str:
        return f'{match[1]}_{int(match[2]):03}'

    name = re.sub(r'(block|layer)\.(\d+)', with_three_digits, name).replace('.', '/')
    if '/DenseReluDense/' in name:
        return f'{name}/kernel'
    if name.endswith('_norm'):
        return f'{name}/scale'
    return name


FORMATS: dict[str, Callable] = {
    't5x': write_t5x,
    'mesh_tf': write_mesh_tf,
    'hf': write_hugging_face.write,
}


def files_in(folder: Path) -> list[Path]:
    """Return the files in a folder and in its subfolders."""
    return [path for path in folder.rglob('*') if path.is_file()]


def drop_from_cache(folder: Path) -> None:
    """Write the files of a folder to the disk and drop them from the page cache."""
    for file in files_in(folder):
        with file.open('rb') as stream:
            os.fsync(stream.fileno())  # the cache keeps what is not on the disk yet
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path) -> int:
    """Read all files of a folder into the same block. Return their number of bytes."""
    block = bytearray(2**24)
    num_bytes = 0
    for file in files_in(folder):
        with file.open('rb', buffering=0) as stream:
            count = stream.readinto(block)
            while count:
                num_bytes += count
                count = stream.readinto(block)
    return num_bytes


if __name__ == '__main__':
    app.run(main)
