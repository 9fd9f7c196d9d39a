"""The command line: parse the flags, read the config, and do what --mode asks for.

    python main.py --config=configs/NAME.py[:ARG] [--workdir=DIR] [--config.KEY=VALUE ...]
    python main.py --mode=evaluate --checkpoint=RUN [--step=all] [--split=test] [--watch]
    python main.py --mode=infer --checkpoint=PATH --text='...' [--config.KEY=VALUE ...]
    python main.py --mode=infer --checkpoint=PATH --output_dir=DIR [--input=FILE] [--shard=i/n]
    python main.py --mode=infer --checkpoint=PATH --output_dir=DIR --encode [--pool=mean]
    python main.py --mode=cache --config=... --config.data.cache_dirs=DIR [--shard=i/n]
    python main.py --mode=convert --from=CHECKPOINT --to=FOLDER [--format=t5x|hf]
    python main.py --mode=report --runs=RUN[,RUN...] [--output_dir=DIR]

Exit status: 0 done; 1 failed, after the steps before are saved; 2 bad arguments or configuration;
129, 130 and 143 after SIGHUP, SIGINT and SIGTERM. An error is one line on stderr, below the traceback
of your own code if that failed. After a signal the run finishes and saves its step, and the same
command goes on from there. A second signal ends the process at once.
"""

import contextlib
import errno
import os
import pathlib
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import paths
import settings
import user_code

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
    'config',
    default=None,
    help_string='A config file; --config.KEY=VALUE changes one of its settings.',
    lock_config=True,
)
flags.DEFINE_string('workdir', default=None, help='The folder of the run; runs/NAME if not given.')
flags.DEFINE_enum(
    'mode',
    default='train',
    enum_values=['train', 'evaluate', 'infer', 'cache', 'convert', 'report'],
    help='What to do.',
)
flags.DEFINE_list('runs', default=[], help='The runs to report on, separated by commas.')
flags.DEFINE_string(
    'from', default=None, help='The checkpoint to convert: T5X, Mesh-TF or Hugging Face.'
)
flags.DEFINE_string('to', default=None, help='The folder to write it to.')
flags.DEFINE_enum('format', default='t5x', enum_values=['t5x', 'hf'], help='The format to write.')
flags.DEFINE_string(
    'shard', default='1/1', help='i/n does part i of n, for n machines with the same command.'
)
flags.DEFINE_string(
    'checkpoint', default=None, help='The model: any checkpoint or run that infer.load opens.'
)
flags.DEFINE_string(
    'output_dir',
    default='',
    help='The folder of the results; if not given, standard output, or the run that is evaluated or '
    'reported first.',
)
flags.DEFINE_string(
    'input',
    default='',
    help='A file of text, JSON Lines, CSV or TSV, by its name or data.kind, or - for standard input; if not '
    'given, data.task.',
)
flags.DEFINE_string('text', default=None, help='One text: its answer is printed.')
flags.DEFINE_string(
    'split',
    default='',
    help='The split: train, validation or test; if not given, test, or infer_eval.split to evaluate.',
)
flags.DEFINE_string(
    'step',
    default='',
    help='Which checkpoint of a run: last, which is the default, best, or a number; to evaluate also all, or '
    'several, as in 1000,2000.',
)
flags.DEFINE_bool(
    'watch',
    default=False,
    help='Evaluate every checkpoint of a run, and each new one as it appears.',
)
flags.DEFINE_bool('score', default=False, help='Score the targets in place of predicting them.')
flags.DEFINE_bool(
    'encode',
    default=False,
    help="Write the encoder's outputs in place of predicting, as safetensors.",
)
flags.DEFINE_enum(
    'pool',
    default='none',
    enum_values=['none', 'mean'],
    help='What --encode writes of an example: a vector for each token, or their mean, EOS included.',
)
flags.DEFINE_list(
    'fields',
    default=[],
    help='The fields of the examples that lines of the results have, or all; else the texts.',
)
flags.DEFINE_bool('output_ids', default=False, help='Write the ids of predictions, too.')
flags.DEFINE_bool(
    'trim', default=False, help='Cut texts that are longer than data.lengths, in place of stopping.'
)
# The modes that each flag besides --mode is for.
MODES_OF_FLAG = {
    'config': ('train', 'evaluate', 'infer', 'cache'),
    'workdir': ('train',),
    'shard': ('infer', 'cache'),
    'checkpoint': ('evaluate', 'infer'),
    'output_dir': ('evaluate', 'infer', 'report'),
    'split': ('evaluate', 'infer'),
    'step': ('evaluate', 'infer', 'convert'),
    'watch': ('evaluate',),
    'input': ('infer',),
    'text': ('infer',),
    'score': ('infer',),
    'encode': ('infer',),
    'pool': ('infer',),
    'fields': ('infer',),
    'output_ids': ('infer',),
    'trim': ('infer',),
    'runs': ('report',),
    'from': ('convert',),
    'to': ('convert',),
    'format': ('convert',),
}
# What to do about errors of the system.
NAME_REMEDY = 'correct its name or permissions, or name another'
REMEDIES = {
    errno.ENOSPC: 'free some space, or name a folder on another disk',
    errno.EDQUOT: 'free some space, or name a folder on another disk',
    errno.EFBIG: 'name a folder on a disk that takes larger files',
    errno.EIO: 'check the disk, or name a folder on another one',
}
CONFIGS = pathlib.Path(settings.base.__file__).resolve().parent
HELP = {'--help', '-help', '-h', '--helpshort', '--helpfull', '-?'}


def main(argv: list[str]) -> int:
    """Do what the flags in `argv` ask for. Return the exit status."""
    if HELP & set(argv[1:]):
        print(__doc__, FLAGS.main_module_help(), settings.describe(), sep='\n')
        return 0
    signals = Signals()
    try:
        config = parse(argv)
        if FLAGS.mode == 'convert':
            import convert

            source: Any = FLAGS['from'].value
            print(convert.convert_checkpoint(source, FLAGS.to, FLAGS.format, FLAGS.step))
            return 0
        if FLAGS.mode == 'report':
            import report

            print(report.write(FLAGS.runs, FLAGS.output_dir))
            return 0
        if FLAGS.mode == 'cache':
            import cache

            part, num_parts = parse_shard(FLAGS.shard)
            assert config is not None
            for line in cache.cache(config.data, part, num_parts):
                print(line)
            return 0
        if FLAGS.mode == 'evaluate':
            return evaluate(config)
        if FLAGS.mode == 'infer':
            return infer(config, signals)
        import train  # imported late: a wrong flag is reported before JAX starts

        run = train.prepare(config, workdir_of_run())
    except (ValueError, OSError) as error:
        report_error(error)
        return 2
    try:
        signals.can_wait = True
        number = train.train(run, lambda: signals.number)
    except (FloatingPointError, ValueError, OSError) as error:  # the loss, the data, the disk
        report_error(error)
        return 1
    if number:
        return 128 + number
    return 0


def evaluate(config: ConfigDict | None) -> int:
    """Evaluate checkpoints. Return the exit status. Raises ValueError and OSError for bad input."""
    import evaluate_mode
    import infer

    if config is None:
        changes = config_flags.get_override_values(FLAGS['config'])
        config = infer.settings_of(paths.to_path(FLAGS.checkpoint), changes)
        settings.check(config)
    evaluation = evaluate_mode.CheckpointEvaluation(
        config,
        FLAGS.checkpoint,
        output_dir=FLAGS.output_dir,
        step=FLAGS.step,
        split=FLAGS.split,
        watch=FLAGS.watch,
    )
    try:
        evaluation.run()
    except (ValueError, OSError) as error:
        report_error(error)
        return 1
    return 0


def infer(config: ConfigDict | None, signals: 'Signals') -> int:
    """Predict, score or encode. Return the exit status. Raises ValueError and OSError as `prepare` does."""
    import infer_mode

    part, num_parts = parse_shard(FLAGS.shard)
    request = infer_mode.Request(
        checkpoint=FLAGS.checkpoint,
        step=FLAGS.step,
        output_dir=FLAGS.output_dir,
        input=FLAGS.input,
        text=FLAGS.text,
        split=FLAGS.split,
        score=FLAGS.score,
        encode=FLAGS.encode,
        pool=FLAGS.pool,
        fields=tuple(FLAGS.fields),
        output_ids=FLAGS.output_ids,
        trim=FLAGS.trim,
        shard=part,
        num_shards=num_parts,
    )
    signals.loss = 'the same command goes on'
    changes = config_flags.get_override_values(FLAGS['config'])
    job = infer_mode.prepare(request, config, changes)
    try:
        for message in infer_mode.infer_all(job):
            print(message, file=sys.stderr)
    except (ValueError, OSError) as error:
        report_error(error)
        return 1
    return 0


class Signals:
    """A listener for SIGHUP, SIGINT and SIGTERM.

    `number` is the first signal, which the loop asks for between two steps. A second signal ends
    the process at once, and so does the first while there is nothing to save (`can_wait` is False).
    A thread listens, because a handler in Python would have to wait for XLA, which may compile for
    minutes. SIGHUP stays ignored below nohup.
    """

    def __init__(self):
        self.number = 0
        self.can_wait = False
        self.loss = 'no step was taken'
        self.incoming, self.outgoing = socket.socketpair()
        self.outgoing.setblocking(False)
        signal.set_wakeup_fd(self.outgoing.fileno())
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue
            # Without a handler nothing is written to the descriptor.
            signal.signal(number, ignore)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        while True:
            [number] = self.incoming.recv(1)
            if not self.can_wait:
                self.report(f'main.py: stopped at once, {self.loss}')
                os._exit(128 + number)
            if self.number:
                self.report('main.py: stopped at once, the last checkpoint stands')
                os._exit(128 + number)
            self.number = number
            self.report(
                'main.py: stopping, this step is finished and saved; once more to stop at once'
            )

    @staticmethod
    def report(text: str) -> None:
        """Print to a terminal that may be gone."""
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def ignore(number: int, frame: Any) -> None:
    """Handle a signal by doing nothing: Signals reads it from the descriptor."""


def parse(argv: list[str]) -> ConfigDict | None:
    """Return the locked, checked config, or None for a mode without one.

    Raises ValueError with a message of one line for whatever is wrong with a flag or with the
    config file.
    """
    argv = [expand_home(argument) for argument in argv]
    file = config_file(argv)
    if file is not None:
        check_config_file(file)
    elif needs_no_config(argv):
        # The settings of the checkpoint's run take the place of these.
        argv = [argv[0], f'--config={settings.base.__file__}', *argv[1:]]
    parse_flags(argv, file)
    check_flags_of_mode()
    if FLAGS.mode == 'evaluate' and not FLAGS.checkpoint:
        raise ValueError('--mode=evaluate needs --checkpoint=RUN, or a checkpoint')
    if FLAGS.mode in ('evaluate', 'infer') and file is None:
        return None
    if FLAGS.mode == 'convert':
        if not FLAGS['from'].value or not FLAGS.to:
            raise ValueError('--mode=convert needs --from=CHECKPOINT and --to=FOLDER')
        return None
    if FLAGS.mode == 'report':
        return None
    if file is None:
        raise ValueError('--config is missing: try --config=configs/tiny.py')
    if '://' in (FLAGS.workdir or ''):
        raise ValueError(
            f'--workdir={FLAGS.workdir}: name a folder on a disk, buckets are read only'
        )
    settings.check(FLAGS.config)
    if FLAGS.mode == 'train':
        settings.check_effects(FLAGS.config, config_flags.get_override_values(FLAGS['config']))
    return FLAGS.config


def parse_flags(argv: list[str], file: str | None) -> None:
    """Set FLAGS from `argv`, which loads the config `file`. Raises ValueError as `parse` does."""
    try:
        rest = FLAGS(argv)[1:]
    except flags.Error as error:
        raise ValueError(explain_flag(error, file)) from error
    except Exception as error:  # the config file is a program of the user's: it may raise anything
        raise ValueError(explain_config(error, file)) from error
    if rest:
        raise ValueError(f'{rest[0]!r} is no flag: write --config=FILE --config.KEY=VALUE')


def check_flags_of_mode() -> None:
    """Raise ValueError for a flag that belongs to another mode."""
    for name, modes in MODES_OF_FLAG.items():
        if FLAGS[name].present and FLAGS.mode not in modes:
            raise ValueError(not_of_mode(name, FLAGS.mode, modes))


def not_of_mode(flag: str, mode: str, modes: Sequence[str]) -> str:
    return f'--{flag} is not for --mode={mode}: it needs --mode={" or ".join(modes)}'


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of --shard=i/n, the first i being 1."""
    part, separator, num_parts = text.partition('/')
    if separator and part.isdecimal() and num_parts.isdecimal():
        if 1 <= int(part) <= int(num_parts):
            return int(part), int(num_parts)
    raise ValueError(f'--shard={text}: write i/n with i from 1 to n, such as 1/8')


def workdir_of_run() -> str:
    """Return --workdir, else runs/NAME for a config file NAME.py."""
    if FLAGS.workdir is not None:
        return FLAGS.workdir
    name = pathlib.Path(config_flags.get_config_filename(FLAGS['config'])).stem
    return os.path.join('runs', name)


def expand_home(argument: str) -> str:
    """Return the argument `--config=~/FILE` with the home folder.

    A shell expands `~` only where a word begins.
    """
    name, separator, value = argument.partition('=')
    if name in ('--config', '-config') and value.startswith('~'):
        return name + separator + os.path.expanduser(value)
    return argument


def config_file(argv: list[str]) -> str | None:
    """Return FILE of `--config=FILE[:ARG]` or `--config FILE[:ARG]`, else None.

    Raises ValueError for two of them.
    """
    files = []
    for argument, following in zip(argv, [*argv[1:], ''], strict=True):
        if argument in ('--config', '-config'):
            files.append(following)
        elif argument.startswith(('--config=', '-config=')):
            files.append(argument.partition('=')[2])
    if not files:
        return None
    if len(files) > 1:
        raise ValueError(
            f'--config is given {len(files)} times ({", ".join(files)}): give one file'
        )
    return files[0].partition(':')[0]


def needs_no_config(argv: list[str]) -> bool:
    """Return whether the flags ask for a mode that takes the settings of its checkpoint's run."""
    for argument, following in zip(argv, [*argv[1:], ''], strict=True):
        for mode in ('evaluate', 'infer'):
            if argument in ('--mode', '-mode') and following == mode:
                return True
            if argument in (f'--mode={mode}', f'-mode={mode}'):
                return True
    return False


def check_config_file(file: str) -> None:
    """Raise ValueError unless `file` exists and is named like a Python file, OSError if it is locked."""
    path = pathlib.Path(file)
    if path.is_file() and path.suffix == '.py':
        with path.open():  # raises OSError for a file that may not be read
            return
    remedy = 'try --config=configs/tiny.py'
    if pathlib.Path(f'{file}.py').is_file():
        remedy = f'try --config={file}.py'
    if not path.exists():
        raise ValueError(f'--config={file}: no such file; {remedy}')
    raise ValueError(f'--config={file} is no Python file with a function get_config; {remedy}')


def explain_flag(error: flags.Error, file: str | None) -> str:
    """Return one line about an error that absl reports."""
    cause: BaseException | None = error
    while cause is not None:  # an error in the config file is further down the chain
        if user_frames(cause):
            return explain_config(cause, file)
        cause = cause.__context__
    text = str(error).strip().splitlines()[-1]
    if isinstance(error, flags.UnrecognizedFlagError) and error.flagname.startswith('config.'):
        mode: Any = FLAGS['mode'].value
        if mode not in MODES_OF_FLAG['config']:
            return not_of_mode(error.flagname, mode, MODES_OF_FLAG['config'])
        return f'--{error.flagname} needs --config=FILE, whose setting it changes: try --config=configs/tiny.py'
    if 'get_config()' in text:
        return f'{text.removeprefix("TypeError: ")}: write --config={file}, with :ARG or without'
    is_value = isinstance(error, flags.IllegalFlagValueError)
    if is_value and not str(error).startswith('flag --config='):
        return explain_value(error)
    return text


def explain_value(error: flags.Error) -> str:
    """Return one line about the value of a flag or setting, whose type absl says in Python's words."""
    given, _, reason = str(error).removeprefix('flag ').rpartition(f': {error.__context__}')
    given = ' '.join(f'{given}{reason}'.split())
    name = given.partition('=')[0].removeprefix('--')
    setting = name.removeprefix('config.')
    if setting == name:
        if FLAGS[name].boolean:
            return f'{given}: must be true or false'
        return f'{given}: {error.__context__}'
    defaults = dict(settings.leaves(settings.base.get_config()))
    if setting in defaults:
        return f'{given}: {settings.kind_of(defaults[setting])}'
    return f'{given}: {setting} is a group of settings: set one of them, --{name}.NAME=VALUE'


def explain_config(error: BaseException, file: str | None) -> str:
    """Return one line about an error in the user's config file, or in the name of a setting."""
    if isinstance(error, SyntaxError):
        return f'{error.filename or file}, line {error.lineno or 1}: {error.msg}'
    text = innermost_message(error)
    frames = user_frames(error)
    if not frames:
        if 'get_config' in text:
            return f'--config={file} has no function get_config: start as configs/tiny.py does'
        text = text.rpartition('Attempting to lookup: ')[2]
        return f'no such setting: {text}: --help lists all'
    last = frames[-1]
    if pathlib.Path(last.filename).resolve().parent == CONFIGS:
        return text  # one of our configs refuses its argument
    return f'{last.filename}, line {last.lineno}: {type(error).__name__}: {text}'


def innermost_message(error: BaseException) -> str:
    """Return the message of an error, or of the error that it wraps as its argument.

    ml_collections wraps errors so.
    """
    if not error.args:
        return one_line(error)
    [argument, *_] = error.args
    if isinstance(argument, BaseException):
        return innermost_message(argument)
    if isinstance(argument, str):
        return ' '.join(argument.split())
    return str(error)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are neither in this file nor in a library.

    They are in config files.
    """
    others = ('<', __file__, *user_code.LIBRARIES)
    found = traceback.extract_tb(error.__traceback__)
    return [frame for frame in found if not frame.filename.startswith(others)]


def report_error(error: BaseException) -> None:
    """Print an error in one line, below the traceback of the user's own code if that failed.

    Where saving failed after it, that is a second line (train.save_before_error).
    """
    print(f'{user_code.frames_of(error)}main.py: {one_line(error)}', file=sys.stderr)
    for note in getattr(error, '__notes__', ()):
        if 'JAX_TRACEBACK_FILTERING' not in note:  # JAX's note on a traceback
            print(f'main.py: {note}', file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the message of `error` without line breaks.

    A ValueError of a library is most often a fault in the code of a fork: where our code called it
    is added.
    """
    text = ' '.join(paths.reason(error).split())
    if isinstance(error, OSError) and error.errno:  # of the system, not one of our own messages
        text += f': {REMEDIES.get(error.errno, NAME_REMEDY)}'
    folder = pathlib.Path(__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if pathlib.Path(frame.filename).parent == folder]
    if isinstance(error, ValueError) and own and own[-1] is not frames[-1]:
        text += f' ({own[-1].filename}, line {own[-1].lineno})'
    return text


if __name__ == '__main__':
    sys.exit(main(sys.argv))
