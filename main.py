"""The command line: flags, the config, and which of the program's jobs to do.

    python main.py --config=configs/NAME.py[:ARG] [--workdir=DIR] [--config.KEY=VALUE ...]
    python main.py --mode=convert --from=CHECKPOINT --to=FOLDER [--format=t5x|hf]

Every setting, with its unit and default, is in configs/base.py. Exit status: 0 done, 1 failed,
2 bad arguments or configuration (one line), 130 and 143 after SIGINT and SIGTERM: the step is finished
and saved, and the same command goes on. A second signal ends the process at once.
"""

import os
import pathlib
import signal
import socket
import sys
import threading
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

FLAGS = flags.FLAGS
WHAT = 'A file of settings; --config.KEY=VALUE changes one of them.'
config_flags.DEFINE_config_file('config', None, WHAT, lock_config=True)
flags.DEFINE_string('workdir', None, 'Where the run leaves everything; runs/NAME if not given.')
flags.DEFINE_enum('mode', 'train', ['train', 'convert'], 'What to do.')
flags.DEFINE_string('from', None, 'The checkpoint to convert: of T5X, Mesh-TF or Hugging Face.')
flags.DEFINE_string('to', None, 'The folder to write it to.')
flags.DEFINE_enum('format', 't5x', ['t5x', 'hf'], 'The format to write.')


def main(argv: list[str]) -> int:
    if {'--help', '-h', '--helpshort', '--helpfull'} & set(argv[1:]):
        print(__doc__, FLAGS.main_module_help(), sep='\n')
        return 0
    signals = Signals()
    try:
        config = parse(argv)
        if FLAGS.mode == 'convert':
            import evaluate

            source: Any = FLAGS['from'].value
            print(evaluate.convert_checkpoint(source, FLAGS.to, FLAGS.format))
            return 0
        import train  # after the flags, so that a wrong one is said before JAX starts

        name = pathlib.Path(config_flags.get_config_filename(FLAGS['config'])).stem
        run = train.prepare(config, FLAGS.workdir or os.path.join('runs', name))
    except (ValueError, OSError) as error:
        print(f'main.py: {error}', file=sys.stderr)
        return 2
    try:
        signals.can_wait = True
        number = train.train(run, lambda: signals.number)
    except (FloatingPointError, ValueError, OSError) as error:  # the loss, the data, the disk
        print(f'main.py: {error}', file=sys.stderr)
        return 1
    return 128 + number if number else 0


class Signals:
    """SIGINT and SIGTERM. The first is kept as `number`, for who asks between two steps; a second ends the
    process at once, and so does the first while there is nothing to finish (`can_wait` is False). A thread
    listens, because a handler of Python's would have to wait for XLA, which may compile for minutes."""

    def __init__(self):
        self.number, self.can_wait = 0, False
        self.incoming, self.outgoing = socket.socketpair()
        self.outgoing.setblocking(False)
        signal.set_wakeup_fd(self.outgoing.fileno())
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # or the descriptor would not hear of it
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while received := self.incoming.recv(1):
            if self.number or not self.can_wait:
                words = 'the last checkpoint stands' if self.can_wait else 'no step was taken'
                print(f'main.py: stopped at once, {words}', file=sys.stderr, flush=True)
                os._exit(128 + received[0])
            self.number = received[0]
            words = 'this step is finished and saved; once more to stop at once'
            print(f'main.py: stopping, {words}', file=sys.stderr, flush=True)


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
    if '://' in (FLAGS.workdir or ''):
        raise ValueError(
            f'--workdir={FLAGS.workdir}: name a folder on a disk, buckets are read only'
        )
    if FLAGS.mode == 'convert':
        if not (FLAGS['from'].value and FLAGS.to):
            raise ValueError('--mode=convert needs --from=CHECKPOINT and --to=FOLDER')
        return FLAGS.config
    if not isinstance(FLAGS.config, ConfigDict):
        file = FLAGS['config'].value and config_flags.get_config_filename(FLAGS['config'])
        raise ValueError(f'--config={file}: no such file; try --config=configs/tiny.py')
    return FLAGS.config


if __name__ == '__main__':
    sys.exit(main(sys.argv))
