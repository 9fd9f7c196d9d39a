"""The memory that it takes to open a large checkpoint of each format, and to convert it.

    python benchmarks/restore_memory.py [--config=configs/t5_1_1.py:xl] [--folder=DIR] [--convert]

Writes random float32 parameters of the config's sizes to DIR as T5X (with our checksums), Mesh-TF and
Hugging Face, one after the other; opens each in a new process, on one CPU device; compares all arrays with
what was written. Prints the parameters' size and what a process takes that only imports; then a line a
format: seconds, peak resident memory (pages of mapped files count) and its ratio to the size; last the
rate of plain reading. Files are dropped from the page cache before they are read. The bar is a ratio of
1.3 for t5_1_1.py:xl, to load: smaller models have the imports' weight. That takes 12 GB of disk, with
--convert 23.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ['JAX_PLATFORMS'] = 'cpu'

import jax
import numpy as np
from absl import app, flags
from ml_collections import config_flags

import checkpoint
import convert
import hugging_face
import infer
import model

ROOT = Path(__file__).resolve().parents[1]
FLAGS = flags.FLAGS
config_flags.DEFINE_config_file('config', f'{ROOT}/configs/t5_1_1.py:large', 'Sizes of the model.')
flags.DEFINE_string('folder', None, "Where to write; the system's temporary folder if not given.")
flags.DEFINE_bool('convert', False, 'Convert each checkpoint, too.')
NUM_SHARDS = 4  # .data files of a Mesh-TF checkpoint


def main(argv: list[str]) -> None:
    config = model.T5Config(**FLAGS.config.model)
    parameters = {path: Parameter(path, shape) for path, shape in model.shapes(config).items()}
    size = sum(4 * int(np.prod(parameter.shape)) for parameter in parameters.values())
    imports = in_new_process(peak_bytes)
    print(f'{size / 1e9:.2f} GB of float32 parameters; imports alone take {imports / 1e9:.2f} GB')

    def report(words: str, seconds: float, peak: int) -> None:
        ratio = f'{peak / size:.2f} times the parameters'
        print(f'{words:24} {seconds:6.1f} s, {peak / 1e9:6.2f} GB, {ratio}', flush=True)

    num_bytes, read_seconds = 0, 0.0
    for form, write in FORMATS.items():
        with tempfile.TemporaryDirectory(dir=FLAGS.folder) as folder:
            source, target = Path(folder, 'source'), Path(folder, 'target')
            in_new_process(write, source, config, parameters)
            drop_from_cache(source)
            start = time.perf_counter()
            num_bytes += read_plainly(source)
            read_seconds += time.perf_counter() - start
            drop_from_cache(source)
            report(f'{form}, load', *in_new_process(load, source, parameters))
            for to in ('t5x', 'hf') if FLAGS.convert else ():
                drop_from_cache(source)
                report(f'{form}, convert to {to}', *in_new_process(convert_to, to, source, target))
                shutil.rmtree(target)
    print(f'plain reading of the files: {num_bytes / read_seconds / 1e9:.2f} GB/s, cold cache')


def in_new_process(function: Callable, *arguments):
    """Its result. A peak is a process's, and in Linux it begins with what the starting one takes: therefore
    nothing large happens here, writing included."""
    with futures.ProcessPoolExecutor(1, get_context('spawn')) as pool:
        return pool.submit(function, *arguments).result()


def peak_bytes() -> int:
    """Of this process until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def load(source: Path, parameters: Mapping) -> tuple[float, int]:
    """(seconds, peak) of opening it. ValueError unless all arrays are those that were written."""
    start = time.perf_counter()
    arrays = jax.block_until_ready(infer.load(source).arrays)
    seconds = time.perf_counter() - start
    for x in arrays.values():
        x.sum().block_until_ready()
    peak = peak_bytes()
    for path, parameter in parameters.items():
        if not np.array_equal(arrays[path], parameter.read()):
            raise ValueError(f'{path} of {source} is not what was written: mend its reader')
    return seconds, peak


def convert_to(form: str, source: Path, target: Path) -> tuple[float, int]:
    """(seconds, peak)."""
    start = time.perf_counter()
    convert.convert_checkpoint(source, target, form)
    return time.perf_counter() - start, peak_bytes()


@dataclass(frozen=True)
class Parameter:
    """Made when it is read, and so written like what `checkpoint.read_index` returns."""

    path: str
    shape: tuple[int, ...]
    dtype = np.dtype(np.float32)

    def read(self) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(self.path.encode()))
        return np.resize(rng.standard_normal(65537, np.float32), self.shape)  # prime: rows differ


def write_t5x(folder: Path, config: model.T5Config, parameters: Mapping) -> None:
    tree = {f'target/{path}': parameter for path, parameter in parameters.items()}
    checkpoint.save(folder, 0, {'state/step': np.int32(0)} | tree)


def write_mesh_tf(folder: Path, config: model.T5Config, parameters: Mapping) -> None:
    """Parameter i goes to shard i % NUM_SHARDS."""
    sys.path.insert(0, str(ROOT / 'tests'))
    from tensor_bundle import masked, proto, table  # its `bundle` holds all in memory

    folder.mkdir()
    prefix, names = folder / 'model.ckpt-0', hugging_face.parameter_names(config)
    entries = {b'': proto((1, NUM_SHARDS), (3, proto((1, 1))))}
    for i, (path, parameter) in enumerate(parameters.items()):
        x, shard = parameter.read(), i % NUM_SHARDS
        with open(f'{prefix}.data-{shard:05}-of-{NUM_SHARDS:05}', 'ab') as stream:
            place = ((3, shard), (4, stream.tell()), (5, x.nbytes))
            stream.write(x.data)
        shape = proto(*((2, proto((1, n))) for n in x.shape))
        crc32c = ('fixed32', masked(x.view(np.uint8).reshape(-1)))
        entry = proto((1, 1), (2, shape), *place, (6, crc32c))  # dtype 1 is float32
        entries[mesh_tf_name(names[path]).encode()] = entry
    Path(f'{prefix}.index').write_bytes(table(sorted(entries.items()), compress=(0,)))


def mesh_tf_name(name: str) -> str:
    """Of Hugging Face's, such as encoder.block.0.layer.1.DenseReluDense.wo.weight, which is akin to it."""
    number = lambda match: f'{match[1]}_{int(match[2]):03}'  # noqa: E731
    name = re.sub(r'(block|layer)\.(\d+)', number, name.removesuffix('.weight')).replace('.', '/')
    names = {'shared': 'shared/embedding', 'lm_head': 'decoder/logits/kernel'}
    suffix = '/kernel' if '/DenseReluDense/' in name else '/scale' if name.endswith('_norm') else ''
    return names.get(name, name + suffix)


FORMATS: dict[str, Callable] = {
    't5x': write_t5x,
    'mesh_tf': write_mesh_tf,
    'hf': hugging_face.write,
}


def drop_from_cache(folder: Path) -> None:
    for file in filter(Path.is_file, folder.rglob('*')):
        with file.open('rb') as stream:
            os.fsync(stream.fileno())  # the cache keeps what is not on the disk yet
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path) -> int:
    """Bytes of all files, each read into the same block."""
    block, num_bytes = bytearray(2**24), 0
    for file in filter(Path.is_file, folder.rglob('*')):
        with file.open('rb', buffering=0) as stream:
            while count := stream.readinto(block):
                num_bytes += count
    return num_bytes


if __name__ == '__main__':
    app.run(main)
