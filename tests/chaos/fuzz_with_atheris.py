"""Inputs that a fuzzer makes of the lines of the readers that it reaches: python tests/chaos/fuzz_with_atheris.py TARGET

The targets are those of tests/fuzz_targets.py. Options of libFuzzer may follow, such as -max_total_time=60 and -seed=1.
It stops at an input that ends neither with a right answer nor with one line, and writes it to ./crash-HASH.
Packages: pip install -e '.[fuzz]'
"""

import pathlib
import sys
import tempfile

import atheris

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]
OURS = [
    'checkpoint',
    'configs',
    'formats',
    'modes',
    'paths',
    'run',
    'sources',
    'tasks',
    'vocabulary',
]

with atheris.instrument_imports(include=OURS):
    import fuzz_targets


def main() -> None:
    name = sys.argv.pop(1)
    target = fuzz_targets.TARGETS[name]
    root = pathlib.Path(tempfile.mkdtemp())
    folder = root / 'files'
    folder.mkdir()
    target.make(folder)
    valid = root / 'valid'
    valid.mkdir()
    (valid / 'input').write_bytes((folder / target.file).read_bytes())

    def check(content: bytes) -> None:
        ended = fuzz_targets.outcome(target, folder, content)
        assert ended in ('read', 'refused'), ended

    atheris.Setup([*sys.argv, str(valid)], check)
    atheris.Fuzz()


if __name__ == '__main__':
    main()
