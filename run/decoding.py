"""The options of config.decode, with the filters of its module."""

import dataclasses

from ml_collections import ConfigDict

import infer
import user_code
from infer import Decoding
from messages import Refused
from vocabulary import Vocabulary


def decoding_of(settings: ConfigDict, vocabulary: Vocabulary | None = None) -> Decoding:
    """Return the options of config.decode, `settings`. Without a vocabulary its module's filters are left out."""
    names = {field.name for field in dataclasses.fields(Decoding)} - {'filters'}
    given = {name: settings[name] for name in names}
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
    infer.check_decoding(decoding)
    return decoding
