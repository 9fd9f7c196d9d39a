"""Errors in one line: of flags, config files, the system, a user's own code. Imports no jax."""

import contextlib
import errno
import pathlib
import sys
import traceback

from absl import flags

import paths
import user_code
from configs import base
from configs import check as settings

# What to do about errors of the system.
NAME_REMEDY = 'correct its name or permissions, or name another'
FULL_REMEDY = 'free some space, or name a folder on another disk'
REMEDIES = {
    errno.ENOSPC: FULL_REMEDY,
    errno.EDQUOT: FULL_REMEDY,
    errno.EFBIG: 'name a folder on a disk that takes larger files',
    errno.EPIPE: 'the program that reads the output has ended',
    errno.EBADF: 'it is closed: redirect it to a file (> FILE)',
    errno.EIO: 'check the disk, or name a folder on another one',
}
MAX_LENGTH = 4000  # longest message: names and values in a file may have any length
COMMAND_LINE = (user_code.PROGRAM / 'modes/command_line.py').resolve()
CONFIGS = pathlib.Path(base.__file__).resolve().parent


def report(error: BaseException, of: str = '') -> None:
    """Print an error and its notes, a line each, below the traceback of the user's own code.

    `of`: the process whose error it is, where there are several.
    """
    speaker = f'main.py: {of}: ' if of else 'main.py: '
    with contextlib.suppress(OSError):  # standard error cannot be written, and the status has to do
        print(f'{user_code.frames_of(error)}{speaker}{one_line(error)}', file=sys.stderr)
        for note in getattr(error, '__notes__', ()):
            if 'JAX_TRACEBACK_FILTERING' not in note:  # JAX's note on a traceback
                print(f'main.py: {note}', file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the message of `error` without line breaks.

    For a ValueError that a library raised, append the line of this program that called it.
    """
    text = ' '.join(paths.reason(error).split())
    text = text.encode(errors='backslashreplace').decode()  # names of files that are not UTF-8
    if len(text) > MAX_LENGTH:  # the file is named at its beginning, the remedy at its end
        text = f'{text[: MAX_LENGTH // 2]} ... {text[-MAX_LENGTH // 2 :]}'
    if isinstance(error, OSError) and error.errno:  # the system's
        text += f': {REMEDIES.get(error.errno, NAME_REMEDY)}'
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if user_code.is_in_program(frame.filename)]
    if isinstance(error, ValueError) and own and own[-1] is not frames[-1]:
        text += f' ({user_code.place_of_frame(own[-1])})'
    return text


def explain_flag(error: flags.Error, file: str | None) -> str:
    """Return one line about an error of absl, which may be one in the config `file`."""
    cause: BaseException | None = error
    while cause is not None:
        if config_frames(cause):
            return explain_config(cause, file)
        cause = cause.__context__
    text = str(error).strip().splitlines()[-1]
    if isinstance(error, flags.UnrecognizedFlagError):
        if error.flagname.startswith('config.'):
            return f'--{error.flagname} needs --config=FILE: try --config=configs/tiny.py'
        text = ' '.join(str(error).split())  # its name may have several lines
    if 'get_config()' in text:
        return f'{text.removeprefix("TypeError: ")}: write --config={file}, with :ARG or without'
    is_value = isinstance(error, flags.IllegalFlagValueError)
    if not is_value or str(error).startswith('flag --config='):
        return text

    # The value of a flag or setting has another type.
    given, _, reason = str(error).removeprefix('flag ').rpartition(f': {error.__context__}')
    given = ' '.join(f'{given}{reason}'.split())
    name = given.partition('=')[0].removeprefix('--')
    setting = name.removeprefix('config.')
    defaults: dict[str, settings.Value] = dict(settings.leaves(base.get_config()))
    rule = f'{setting} is a group of settings: set one of them, --{name}.NAME=VALUE'
    if setting == name:
        rule = 'must be true or false' if flags.FLAGS[name].boolean else str(error.__context__)
    elif setting in defaults:
        rule = settings.kind_of(defaults[setting])
    return f'{given}: {rule}'


def explain_config(error: BaseException, file: str | None) -> str:
    """Return one line about an error in the config file, or in the name of a setting."""
    if isinstance(error, SyntaxError):
        return f'{error.filename or file}, line {error.lineno or 1}: {error.msg}'
    frames = config_frames(error)
    kind = type(error).__name__
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]  # ml_collections wraps errors so
    text = one_line(error)
    if error.args and isinstance(error.args[0], str):
        text = ' '.join(error.args[0].split())  # a KeyError has quotes around it
    if not frames:
        if 'get_config' in text:
            return f'--config={file} has no function get_config: start as configs/tiny.py does'
        text = text.rpartition('Attempting to lookup: ')[2]
        return f'unknown setting: {text}: --help lists all'
    if pathlib.Path(frames[-1].filename).resolve().parent == CONFIGS:
        return text  # one of our configs refuses its argument
    return f'{user_code.place_of_frame(frames[-1])}: {kind}: {text}'


def config_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of a traceback that are in config files: not in command_line.py, nor in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [x for x in frames if not x.filename.startswith(('<', *user_code.LIBRARIES))]
    return [frame for frame in others if pathlib.Path(frame.filename).resolve() != COMMAND_LINE]
