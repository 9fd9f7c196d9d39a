"""The options of config.decode, with the filters of its module."""

from ml_collections import ConfigDict

import user_code
from answers import words
from answers.options import SETTINGS, Decoding
from messages import Refused
from vocabulary import Vocabulary


def decoding_of(
    settings: ConfigDict, vocabulary: Vocabulary | None = None, vocab_size: int = 0
) -> Decoding:
    """Return the options of config.decode, `settings`.

    Without a vocabulary, its texts are not checked, and its module's filters are left out.
    """
    given = {name: settings[name] for name in SETTINGS}
    if settings.module:
        file = user_code.module_file('decode.module', settings.module)
        module = user_code.load_module(file, file.read_bytes())
        if not hasattr(module, 'filters'):
            raise Refused(f'decode.module={settings.module!r}: {file} has no function filters')
        if vocabulary is not None:
            given['filters'] = tuple(module.filters(vocabulary))
    decoding = Decoding(**given)
    if decoding.is_allowed_per_input:
        raise Refused(f'decode.allowed={decoding.allowed}: name texts, the same for all inputs')
    decoding.check()
    if vocabulary is not None:
        words.words_of(decoding, vocabulary, vocab_size)  # raises Refused
    return decoding
