"""The errors that main.py prints in one line, and parts of messages."""

import contextlib
from collections.abc import Iterator


class Refused(ValueError):
    """A value that a person typed or copied is wrong: a flag, setting, path, line of a file, checkpoint, argument.

    One line: value, rule, remedy. main.py prints it, and OSErrors, without the traceback that a mistake in code has.
    """


class LossNotFinite(FloatingPointError):
    """The loss, a gradient or a parameter is not finite after a training step."""


@contextlib.contextmanager
def named(title: str) -> Iterator[None]:
    """Begin a refusal with its subject: a setting, a file, or a line of a file."""
    try:
        yield
    except Refused as error:
        raise Refused(f'{title}: {error}') from error


@contextlib.contextmanager
def noting(text: str) -> Iterator[None]:
    """Add a note to an error for facts that its traceback lacks, such as a record or a task."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


def first_ten(items: list[str], separator: str = ', ') -> str:
    """Return the first ten items joined, and the number of the others."""
    text = separator.join(items[:10])
    if len(items) > 10:
        text += f' and {len(items) - 10:,} more'
    return text
