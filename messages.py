"""The error of a wrong value, and a part of its messages. Imports nothing."""


class Refused(ValueError):
    """A value that a person typed or copied is wrong: a flag, setting, path, line of a file, checkpoint, argument.

    The message is one line: the value, the rule, the remedy. main.py prints it without a traceback. Every other
    exception is a mistake in code and keeps its traceback.
    """


def first_ten(items: list[str], separator: str = ', ') -> str:
    """Return the first ten items joined, and the number of the others."""
    text = separator.join(items[:10])
    if len(items) > 10:
        text += f' and {len(items) - 10:,} more'
    return text
