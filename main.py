"""The command line: flags, the config, and which of the program's jobs to do.

    python main.py --config=configs/NAME.py[:ARG] [--workdir=DIR] [--config.KEY=VALUE ...]
    python main.py --mode=convert --from=CHECKPOINT --to=FOLDER [--format=t5x|hf]

Exit status: 0 done, 1 failed, 2 bad arguments or configuration (one line), 129, 130 and 143 after SIGHUP, SIGINT
and SIGTERM: the step is finished and saved, and the same command goes on. A second signal ends the process at
once.
"""

import contextlib
import os
import pathlib
import signal
import socket
import sys
import sysconfig
import threading
import traceback
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import settings

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    'config',
    default=None,
    help_string='A file of settings; --config.KEY=VALUE changes one of them.',
    lock_config=True,
)
flags.DEFINE_string(
    'workdir', default=None, help='Where the run leaves everything; runs/NAME if not given.'
)
flags.DEFINE_enum('mode', default='train', enum_values=['train', 'convert'], help='What to do.')
flags.DEFINE_string(
    'from', default=None, help='The checkpoint to convert: of T5X, Mesh-TF or Hugging Face.'
)
flags.DEFINE_string('to', default=None, help='The folder to write it to.')
flags.DEFINE_enum('format', default='t5x', enum_values=['t5x', 'hf'], help='The format to write.')
# The flags of each mode besides --mode.
MODE_FLAGS = {'train': ('config', 'workdir'), 'convert': ('from', 'to', 'format')}
CONFIGS = pathlib.Path(settings.base.__file__).resolve().parent
HELP = {'--help', '-help', '-h', '--helpshort', '--helpfull', '-?'}


def main(argv: list[str]) -> int:
    """Do what the flags in `argv` ask for; return the exit status."""
    if HELP & set(argv[1:]):
        print(__doc__, FLAGS.main_module_help(), settings.describe(), sep='\n')
        return 0
    signals = Signals()
    try:
        config = parse(argv)
        if FLAGS.mode == 'convert':
            import convert

            source: Any = FLAGS['from'].value
            print(convert.convert_checkpoint(source, FLAGS.to, FLAGS.format))
            return 0
        import train  # after the flags, so that a wrong one is reported before JAX starts

        run = train.prepare(config, workdir_of_run())
    except (ValueError, OSError) as error:
        print(f'main.py: {one_line(error)}', file=sys.stderr)
        return 2
    try:
        signals.can_wait = True
        number = train.train(run, lambda: signals.number)
    except (FloatingPointError, ValueError, OSError) as error:  # the loss, the data, the disk
        print(f'main.py: {one_line(error)}', file=sys.stderr)
        return 1
    return 128 + number if number else 0


class Signals:
    """SIGHUP, SIGINT and SIGTERM.

    The first is kept as `number`, for who asks between two steps; a second ends the process at once, and so does
    the first while there is nothing to finish (`can_wait` is False). A thread listens, because a handler of
    Python's would have to wait for XLA, which may compile for minutes. nohup's SIGHUP stays ignored.
    """

    def __init__(self):
        self.number = 0
        self.can_wait = False
        self.incoming, self.outgoing = socket.socketpair()
        self.outgoing.setblocking(False)
        signal.set_wakeup_fd(self.outgoing.fileno())
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            # Without a handler the descriptor would not hear of it.
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while received := self.incoming.recv(1):
            if self.number or not self.can_wait:
                outcome = 'the last checkpoint stands' if self.can_wait else 'no step was taken'
                self.report(f'main.py: stopped at once, {outcome}')
                os._exit(128 + received[0])
            self.number = received[0]
            self.report(
                'main.py: stopping, this step is finished and saved; once more to stop at once'
            )

    @staticmethod
    def report(text: str) -> None:
        """Print to a terminal that may be gone."""
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def parse(argv: list[str]) -> ConfigDict | None:
    """Return the locked, checked config, None for a mode without one.

    Raises ValueError, in one line, for whatever is wrong with a flag or with the file of settings.
    """
    argv = [expand_home(argument) for argument in argv]
    file = config_file(argv)
    if file is not None:
        check_config_file(file)
    try:
        rest = FLAGS(argv)[1:]
    except flags.Error as error:
        cause: BaseException | None = error
        while cause is not None:  # absl hides what a file of settings raised
            if user_frames(cause):
                raise ValueError(explain(cause, file)) from error
            cause = cause.__context__
        text = str(error).strip().splitlines()[-1]
        if 'get_config()' in text:
            text = (
                f'{text.removeprefix("TypeError: ")}: write --config={file}, with :ARG or without'
            )
        raise ValueError(text) from error
    except Exception as error:  # the file is a program of the user's: anything may happen
        raise ValueError(explain(error, file)) from error
    if rest:
        raise ValueError(f'{rest[0]!r} is no flag: write --config=FILE --config.KEY=VALUE')
    for mode, names in MODE_FLAGS.items():
        for name in names:
            if mode != FLAGS.mode and FLAGS[name].present:
                raise ValueError(f'--{name} is not for --mode={FLAGS.mode}: it needs --mode={mode}')
    if FLAGS.mode == 'convert':
        if not (FLAGS['from'].value and FLAGS.to):
            raise ValueError('--mode=convert needs --from=CHECKPOINT and --to=FOLDER')
        return None
    if file is None:
        raise ValueError('--config is missing: try --config=configs/tiny.py')
    if '://' in (FLAGS.workdir or ''):
        raise ValueError(
            f'--workdir={FLAGS.workdir}: name a folder on a disk, buckets are read only'
        )
    settings.check(FLAGS.config)
    return FLAGS.config


def workdir_of_run() -> str:
    """Return --workdir, or runs/NAME for a config file NAME.py."""
    if FLAGS.workdir is not None:
        return FLAGS.workdir
    name = pathlib.Path(config_flags.get_config_filename(FLAGS['config'])).stem
    return os.path.join('runs', name)


def expand_home(argument: str) -> str:
    """Return `--config=~/mine.py` with the home folder; the shell expands `~` only at the start of a word."""
    name, separator, value = argument.partition('=')
    if name in ('--config', '-config') and value.startswith('~'):
        return name + separator + os.path.expanduser(value)
    return argument


def config_file(argv: list[str]) -> str | None:
    """Return the file that `--config=FILE[:ARG]` or `--config FILE[:ARG]` names. ValueError for two of them."""
    files = []
    for argument, following in zip(argv, [*argv[1:], ''], strict=True):
        name, separator, value = argument.partition('=')
        if name in ('--config', '-config'):
            files.append(value if separator else following)
    if len(files) > 1:
        raise ValueError(
            f'--config is given {len(files)} times ({", ".join(files)}): give one file'
        )
    return files[0].partition(':')[0] if files else None


def check_config_file(file: str) -> None:
    """Raise ValueError unless `file` is there and looks like Python."""
    path = pathlib.Path(file)
    if path.is_file() and path.suffix == '.py':
        return
    remedy = 'try --config=configs/tiny.py'
    if pathlib.Path(f'{file}.py').is_file():
        remedy = f'try --config={file}.py'
    if not path.exists():
        raise ValueError(f'--config={file}: no such file; {remedy}')
    raise ValueError(f'--config={file} is no Python file with a function get_config; {remedy}')


def explain(error: BaseException, file: str | None) -> str:
    """Return one line about an error in the user's file of settings, or in the name of a setting."""
    if isinstance(error, SyntaxError):
        return f'{error.filename or file}, line {error.lineno or 1}: {error.msg}'
    cause: Any = error
    while isinstance(
        cause, BaseException
    ):  # ml_collections wraps a KeyError into an AttributeError
        text = str(cause)
        cause = cause.args[0] if cause.args else text
    text = ' '.join(str(cause).split()) if isinstance(cause, str) else text
    frames = user_frames(error)
    if frames and pathlib.Path(frames[-1].filename).resolve().parent == CONFIGS:
        return text  # a config of ours has said what is wrong
    if frames:
        return f'{frames[-1].filename}, line {frames[-1].lineno}: {type(error).__name__}: {text}'
    if 'get_config' in text:
        return f'--config={file} has no function get_config: start as configs/tiny.py does'
    return f'no such setting: {text}'


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the lines of a traceback that are in files of settings: neither here nor in a library."""
    libraries = [sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib')]
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        is_library = any(frame.filename.startswith(library) for library in libraries)
        if not is_library and not frame.filename.startswith('<') and frame.filename != __file__:
            frames.append(frame)
    return frames


def one_line(error: Exception) -> str:
    """Return the message of `error` without line breaks."""
    return ' '.join(str(error).split())


if __name__ == '__main__':
    sys.exit(main(sys.argv))
