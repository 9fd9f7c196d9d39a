"""The command line: flags, the config, and which of the program's jobs to do.

    python main.py --config=configs/NAME.py[:ARG] [--workdir=DIR] [--config.KEY=VALUE ...]

Every setting, with its unit and default, is in configs/base.py. Exit status: 0 done, 1 failed,
2 bad arguments or configuration (one line), 130 interrupted.
"""

import os
import pathlib
import sys

from absl import flags
from ml_collections import ConfigDict, config_flags

FLAGS = flags.FLAGS
WHAT = 'A file of settings; --config.KEY=VALUE changes one of them.'
config_flags.DEFINE_config_file('config', None, WHAT, lock_config=True)
flags.DEFINE_string('workdir', None, 'Where the run leaves everything; runs/NAME if not given.')
flags.DEFINE_enum('mode', 'train', ['train'], 'What to do.')


def main(argv: list[str]) -> int:
    if {'--help', '-h', '--helpshort', '--helpfull'} & set(argv[1:]):
        print(__doc__, FLAGS.main_module_help(), sep='\n')
        return 0
    try:
        config = parse(argv)
        import train  # after the flags, so that a wrong one is said before JAX starts

        name = pathlib.Path(config_flags.get_config_filename(FLAGS['config'])).stem
        run = train.prepare(config, FLAGS.workdir or os.path.join('runs', name))
    except (ValueError, OSError) as error:
        print(f'main.py: {error}', file=sys.stderr)
        return 2
    try:
        train.train(run)
    except (FloatingPointError, UnicodeError, OSError) as error:  # the loss, the data, the disk
        print(f'main.py: {error}', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            '\nInterrupted. The same command goes on from the newest checkpoint.', file=sys.stderr
        )
        return 130
    return 0


def parse(argv: list[str]) -> ConfigDict:
    """The locked config. Raises ValueError, in one line, for whatever is wrong with a flag or a file."""
    try:
        rest = FLAGS(argv)[1:]
    except (AttributeError, KeyError) as error:  # a key that the config does not have
        text = str(error).encode().decode('unicode_escape').replace('\\', '').replace("'", '')
        raise ValueError('no such setting: ' + ' '.join(text.split()).strip('"')) from error
    except (flags.Error, TypeError) as error:
        raise ValueError(str(error).strip().splitlines()[-1]) from error
    if rest:
        raise ValueError(f'{rest[0]!r} is no flag: write --config=FILE --config.KEY=VALUE')
    if not isinstance(FLAGS.config, ConfigDict):
        file = FLAGS['config'].value and config_flags.get_config_filename(FLAGS['config'])
        raise ValueError(f'--config={file}: no such file; try --config=configs/tiny.py')
    return FLAGS.config


if __name__ == '__main__':
    sys.exit(main(sys.argv))
