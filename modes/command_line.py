"""The command line: its flags, which belong to modes, and the config that it names. Imports no jax."""

import inspect
import os
import pathlib
import re
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

import user_code
from configs import base
from configs import check as settings
from configs.setting import kind_of
from messages import Refused
from modes import processes

FLAGS_OF_MODE = {
    'train': [*processes.FLAGS, 'config', 'workdir', 'profile'],
    'evaluate': [*processes.FLAGS, 'config', 'checkpoint', 'step', 'output_dir', 'split', 'watch'],
    'infer': [*processes.FLAGS, 'config', 'checkpoint', 'step', 'output_dir', 'split', 'shard']
    + ['input', 'text', 'score', 'encode', 'pool', 'fields', 'output_ids', 'trim'],
    'cache': ['config', 'shard'],
    'convert': ['from', 'to', 'format', 'step'],
    'plan': ['config', 'topology'],
    'report': ['runs', 'output_dir'],
    'tasks': ['config', 'split', 'examples', 'vocabulary'],
}
HELP = {'--help', '-help', '-h', '--helpshort', '--helpfull', '-?'}
# The form of options: --config.model.options.NAME=VALUE, --config.loss.options.NAME=VALUE.
OPTION = re.compile(r'--?(?:no)?config\.((?:model|loss)\.options)(?:\.(\w+)=(.*)|.*)', re.DOTALL)
OPTIONS: dict[str, str] = {}  # {'model.options.NAME': text} of the command line
WORDS: list[str] = []  # the other words, which ml_collections searches for settings
FLAGS = flags.FLAGS


class ReadConfig(flags.ArgumentParser):
    """Gives --config the config that `parse` has read: absl would replace an error in its file with its own."""

    config: ConfigDict | None = None

    def parse(self, argument: str) -> ConfigDict | None:
        return self.config


READ_CONFIG = ReadConfig()
config_flags.DEFINE_config_file(
    'config',
    default=None,
    help_string='A config file; --config.KEY=VALUE changes one of its settings.',
    lock_config=True,
    sys_argv=WORDS,
)
FLAGS['config'].parser = READ_CONFIG
# fmt: off
flags.DEFINE_string('workdir', None, 'The folder of the run; runs/NAME if not given.')
flags.DEFINE_string('profile', '', 'FIRST:LAST, such as 10:13: write a trace of these steps to the workdir.')
flags.DEFINE_string('from', None, 'The checkpoint to convert: T5X, Mesh-TF or Hugging Face.')
flags.DEFINE_string('to', None, 'The folder to write it to.')
flags.DEFINE_string('shard', '1/1', 'i/n does part i of n, for n machines with the same command.')
flags.DEFINE_string('checkpoint', None, 'The model: any checkpoint or run that infer.load opens, such as hf://google/flan-t5-small.')
flags.DEFINE_string('output_dir', '', 'The folder of the results; else standard output, or the first run.')
flags.DEFINE_string('input', '', 'A text, JSON Lines, CSV, TSV or Parquet file, - for standard input; else data.task, or a prompt.')
flags.DEFINE_string('text', None, 'One text: its answer is printed.')
flags.DEFINE_string('split', '', 'train, validation or test; else test, infer_eval.split, or the first of a task.')
flags.DEFINE_string('step', '', 'The checkpoint of a run: last, best, a number; to evaluate also all, or 100,200.')
flags.DEFINE_string('topology', '', 'The devices to plan for: TPUs, GPUs or cpu:N; else the local ones.')
flags.DEFINE_string('vocabulary', '', 'Also print their ids: a SentencePiece model, a folder that has one, or bytes.')
flags.DEFINE_string('coordinator_address', None, 'HOST:PORT, the host of process 0 and a free port, without a launcher.')
flags.DEFINE_bool('watch', False, 'Evaluate the checkpoints of a run, and each new one as it appears.')
flags.DEFINE_bool('score', False, 'Score the targets instead of predicting them.')
flags.DEFINE_bool('encode', False, "Write the encoder's outputs instead of predicting.")
flags.DEFINE_bool('output_ids', False, 'Also write the ids of predictions.')
flags.DEFINE_bool('trim', False, 'Cut texts that are longer than data.lengths, instead of stopping.')
flags.DEFINE_list('runs', [], 'The runs to report on, separated by commas.')
flags.DEFINE_list('fields', [], 'The fields of the examples in the results, or all; else the texts.')
flags.DEFINE_enum('mode', 'train', list(FLAGS_OF_MODE), 'What to do.')
flags.DEFINE_enum('format', 't5x', ['t5x', 'hf', 'peft'], 'The format to write; peft: the adapters of a run.')
flags.DEFINE_enum('pool', 'none', ['none', 'mean'], 'What --encode writes: a vector per token, or their mean, EOS included.')
flags.DEFINE_integer('examples', 0, 'How many examples of the task to print.', lower_bound=0)
flags.DEFINE_integer('num_processes', None, 'The number of processes on all hosts.', lower_bound=1)
flags.DEFINE_integer('process_id', None, 'The number of this process, from 0.', lower_bound=0)
flags.DEFINE_integer('heartbeat', 30, 'Seconds until all processes stop after one dies or hangs.', lower_bound=2)
# fmt: on
FLAGS.set_gnu_getopt()  # flags may follow the name of a task


def describe(argv: list[str]) -> str:
    """Return the text of --help: the flags, the settings, and the options of a user's model and loss.

    `argv` names the model and the loss, or the config does. Raises Refused for an invalid config.
    """
    _, _, table = FLAGS.module_help(__name__).partition(f'{__name__}:')
    text = f'Flags:{table}\n{settings.describe()}'
    modules = {}
    for group in ('model', 'loss'):
        modules[group] = ''.join(values_of(f'config.{group}.module', argv)[-1:])
    if not any(modules.values()) and values_of('config', argv):
        parse([word for word in argv if word not in HELP])
        modules = {group: FLAGS.config[group].module for group in modules}
    if any(modules.values()):
        from formats import own_loss, own_model  # late: they import JAX

        lines = own_model.describe_options(modules['model'])
        lines += own_loss.describe_options(modules['loss'])
        text += '\n'.join(['', *lines])
    return text


def parse(argv: list[str]) -> ConfigDict | None:
    """Return the locked, checked config, or None for a mode without one.

    Raises Refused for a wrong flag or setting. An error in the config file is raised unchanged.
    """
    try:
        argv = take_options(FLAGS.read_flags_from_files(argv, force_gnu=False))
    except (flags.Error, UnicodeDecodeError, OSError) as error:
        raise Refused(f'--flagfile: {error}: name a text file of flags') from error
    [mode] = values_of('mode', argv)[-1:] or ['train']
    files = values_of('config', argv)
    if len(files) > 1:
        raise Refused(f'--config is given {len(files)} times: give one file')
    file = ''.join(files)
    if files:
        READ_CONFIG.config = read_config(file)
    elif mode in ('evaluate', 'infer', 'tasks'):
        # With a checkpoint, the settings of its run replace these.
        READ_CONFIG.config = base.get_config()
        argv.insert(1, f'--config={base.__file__}')
    WORDS[:] = argv
    try:
        words = FLAGS(argv)[1:]
    except flags.Error as error:
        if getattr(error, 'flagname', '').startswith('config.'):
            check_mode_of('config', str(FLAGS['mode'].value))
        raise Refused(explain_flag(error)) from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        # raised by ml_collections, or for a very long name
        reason: BaseException = error
        while isinstance(reason.args[0], BaseException):  # ml_collections wraps errors
            reason = reason.args[0]
        text = ' '.join(str(reason.args[0]).split()).rpartition('Attempting to lookup: ')[2]
        raise Refused(f'unknown setting: {text}: --help lists all') from error
    for names in FLAGS_OF_MODE.values():
        for name in names:
            if FLAGS[name].present:
                check_mode_of(name, FLAGS.mode)
    if OPTIONS:
        check_mode_of('config', FLAGS.mode)
    if words[1 if FLAGS.mode == 'tasks' else 0 :]:
        raise Refused(f'{words[-1]!r} is not a flag: write --config=FILE --config.KEY=VALUE')
    if 'config' not in FLAGS_OF_MODE[FLAGS.mode]:
        return None
    if not file and FLAGS.mode in ('evaluate', 'infer'):
        return None
    if not file and FLAGS.mode != 'tasks':
        raise Refused(
            f'--mode={FLAGS.mode} needs --config=FILE, which sets the model, the data and the batch: try '
            '--config=configs/tiny.py'
        )
    if FLAGS.mode == 'tasks':
        FLAGS.config.data.task = ''.join(words) or changes().get('data.task', '')
    settings.check(FLAGS.config)
    settings.set_options(FLAGS.config, OPTIONS)
    if FLAGS.mode == 'train':
        settings.check_effects(FLAGS.config, changes())
    return FLAGS.config


def read_config(name: str) -> ConfigDict:
    """Return the config of --config=FILE[:ARG], locked."""
    file, colon, argument = name.partition(':')
    path = pathlib.Path(os.path.expanduser(file)).absolute()
    if not path.is_file() or path.suffix != '.py':
        raise Refused(f'--config={file}: not a Python file: try --config=configs/tiny.py')
    module = user_code.load_module(path, path.read_bytes())
    get_config = getattr(module, 'get_config', lambda *arguments: None)
    arguments = [argument] if colon else []
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        raise Refused(f'--config={name}: {error}: write it with :ARG or without') from error
    config = get_config(*arguments)
    if isinstance(config, ConfigDict):  # settings.check refuses other types
        config.lock()
    return config


def explain_flag(error: flags.Error) -> str:
    """Return one line about a flag or setting that absl refuses."""
    if isinstance(error, flags.UnrecognizedFlagError) and error.flagname.startswith('config.'):
        return f'--{error.flagname} needs --config=FILE: try --config=configs/tiny.py'
    if not isinstance(error, flags.IllegalFlagValueError):
        return ' '.join(str(error).split())  # a name may have several lines
    # The value of a flag or setting has the wrong type.
    argument, _, reason = str(error).removeprefix('flag ').rpartition(f': {error.__context__}')
    argument = ' '.join(f'{argument}{reason}'.split())
    name = argument.partition('=')[0].removeprefix('--')
    setting = name.removeprefix('config.')
    defaults: dict[str, settings.Value] = dict(settings.leaves(base.get_config()))
    rule = f'{setting} is a group of settings: set one of them, --{name}.NAME=VALUE'
    if setting == name:
        rule = 'must be true or false' if flags.FLAGS[name].boolean else str(error.__context__)
    elif setting in defaults:
        rule = kind_of(defaults[setting])
    return f'{argument}: {rule}'


def take_options(argv: list[str]) -> list[str]:
    """Move the options of users' files from a command line to OPTIONS, and return the other words.

    The names of these options are known only once the files are loaded.
    """
    OPTIONS.clear()
    words = []
    for word in argv:
        match = OPTION.fullmatch(word)
        if not match:
            words.append(word)
            continue
        group, name, text = match.groups()
        key = f'{group}.{name}'
        if name is None or word.lstrip('-').startswith('no'):
            raise Refused(f'{word}: set one of the options, --config.{group}.NAME=VALUE')
        if key in OPTIONS:
            raise Refused(f'--config.{key} is given twice: give it once')
        OPTIONS[key] = text
    return words


def changes() -> dict[str, settings.Value]:
    """Return the settings on the command line, {'data.task': value}."""
    return config_flags.get_override_values(FLAGS['config']) | OPTIONS


def values_of(flag: str, argv: list[str]) -> list[str]:
    """Return the values of a flag on a command line, before absl parses it."""
    values = []
    for argument, following in zip(argv, [*argv[1:], ''], strict=True):
        name, equals, value = argument.partition('=')
        if name in (f'--{flag}', f'-{flag}'):
            values.append(value if equals else following)
    return values


def check_mode_of(flag: str, mode: str) -> None:
    modes = [name for name, names in FLAGS_OF_MODE.items() if flag in names]
    if mode not in modes:
        raise Refused(f'--{flag} is not for --mode={mode}: it needs --mode={" or ".join(modes)}')


def parse_shard(text: str) -> tuple[int, int]:
    """Return (i, n) of --shard=i/n; i counts from 1."""
    part, separator, num_parts = text.partition('/')
    if separator and part.isdecimal() and num_parts.isdecimal():
        if 1 <= int(part) <= int(num_parts):
            return int(part), int(num_parts)
    raise Refused(f'--shard={text}: write i/n with i from 1 to n, such as 1/8')


def values_of_mode() -> dict[str, Any]:
    """Return the mode's own flags, {'step': value}."""
    names = [x for x in FLAGS_OF_MODE[FLAGS.mode] if x not in ('config', *processes.FLAGS)]
    return {name: FLAGS[name].value for name in names}


def all_values() -> dict[str, object]:
    """Return the mode's own flags and the settings of its config."""
    return values_of_mode() | dict(settings.leaves(FLAGS.config)) | OPTIONS
