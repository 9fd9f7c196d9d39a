"""The vocabulary of a checkpoint or a run, or the one that a user names, with tokens added by transformers.

`vocabulary.py` defines vocabularies. Imports no jax.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import logging
from sentencepiece import sentencepiece_model_pb2

import paths
from configs import check as settings
from formats import tokenizer_json
from formats.tokenizer_json import BOS, T5_TOKENIZER, TokenizerVocabulary
from messages import Refused, first_ten, named
from paths import AnyPath
from run import hub
from vocabulary import (
    DEFAULT_EXTRA_IDS,
    EOS_ID,
    PAD_ID,
    SENTINEL,
    SPECIAL_TOKENS,
    UNK_ID,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    added_settings,
    sentinel_ids_of,
)

# Names of a vocabulary's file, in search order.
VOCABULARY_NAMES = (
    'vocabulary.model',
    'spiece.model',
    'sentencepiece.model',
    'tokenizer.model',  # Llama's and Pile-T5's
    'tokenizer.json',
    tokenizer_json.ROBERTA_VOCAB,  # with merges.txt
)
GEMMA_TOKENIZER = 'GemmaTokenizer'
ADAPTER_CONFIG = 'adapter_config.json'  # names the base of peft's adapters
TOKEN_FILES = [
    'added_tokens.json',
    'special_tokens_map.json',
    'tokenizer_config.json',
    'tokenizer.json',
]


def find_vocabulary(folder: AnyPath, name: str | AnyPath | None = None) -> Vocabulary | None:
    """Return the vocabulary that `name` names, or else the one of a checkpoint or run, or None.

    `name` is 'bytes', a SentencePiece model, or a folder that has one. The checkpoint tells its number of sentinels.
    """
    vocabulary: Vocabulary | None
    if name == 'bytes':
        vocabulary = ByteVocabulary()
    elif name:
        vocabulary = named_vocabulary('vocabulary', name, stored_data(folder)['extra_ids'])
    else:
        vocabulary = own_vocabulary(folder)
    check_tokens(folder, vocabulary)
    return vocabulary


def own_vocabulary(folder: AnyPath, extra_ids: int = DEFAULT_EXTRA_IDS) -> Vocabulary | None:
    """Return the vocabulary of a checkpoint or run; `extra_ids`: for a folder without this setting."""
    data = stored_data(folder, extra_ids)
    if data['vocabulary'] == 'bytes':
        return ByteVocabulary(data['extra_ids'])
    file = model_file(folder)
    if file is None and paths.is_file(folder / ADAPTER_CONFIG):
        base = paths.source_path(base_of(folder), has_weights=False)
        return own_vocabulary(base, extra_ids)
    if file is None:
        return None
    remedy = 'copy it again, or remove it and name data.vocabulary'
    return read_model(paths.own_file(file), data['extra_ids'], remedy)


def base_of(folder: AnyPath) -> str:
    """Return the base that peft's adapters name: a path or, if that does not exist, a name on the hub."""
    settings = paths.read_json(folder / ADAPTER_CONFIG)
    name = str(settings.get('base_model_name_or_path'))
    url = f'{hub.SCHEME}{name}'
    if hub.MODEL.fullmatch(url) is None or paths.to_path(name).exists():
        return name
    revision = settings.get('revision')
    return f'{url}@{revision}' if revision else url


def named_vocabulary(setting: str, name: str | AnyPath, extra_ids: int) -> Vocabulary:
    """Return the vocabulary that `name` names. Errors begin with the name of the `setting`."""
    if name == 'bytes':
        return ByteVocabulary(extra_ids)
    with named(f'{setting}={str(name)!r}'):
        path = paths.source_path(name, has_weights=False)
        if stored_data(path)['vocabulary'] == 'bytes':
            return ByteVocabulary(extra_ids)
        file = path if paths.is_file(path) else None
        if path.is_dir():
            file = model_file(path)
        if file is None:
            names = ', '.join(VOCABULARY_NAMES)
            remedy = hub.suggestion(path) or "one, or 'bytes'"
            raise Refused(f'not a file, and not a folder with {names}: name {remedy}')
        vocabulary = read_model(paths.own_file(file), extra_ids, remedy='name another vocabulary')
        check_tokens(file.parent, vocabulary)
        return vocabulary


def model_file(folder: AnyPath) -> AnyPath | None:
    """Return the vocabulary's file in a checkpoint or run, or next to it, else None."""
    for candidate in folders_of(folder):
        for name in VOCABULARY_NAMES:
            if paths.is_file(candidate / name):
                return candidate / name
    return None


def folders_of(folder: AnyPath) -> list[AnyPath]:
    """Return the folders that may have files of a checkpoint, such as its vocabulary."""
    if folder.name.startswith('checkpoint_') or not folder.is_dir():
        return [folder, folder.parent]
    return [folder]


def kept_files(vocabulary: Vocabulary | None) -> dict[str, bytes]:
    """Return {name: content} of a run's vocabulary file; {} for bytes."""
    if vocabulary is None or not vocabulary.model:
        return {}
    name = 'tokenizer.json' if vocabulary.model.startswith(b'{') else 'vocabulary.model'
    return {name: vocabulary.model}


def kept_file(folder: AnyPath) -> AnyPath | None:
    """Return the file that `kept_files` names in the folder of a run or checkpoint, else None."""
    for name in ('vocabulary.model', 'tokenizer.json'):
        if paths.is_file(folder / name):
            return folder / name
    return None


def of_model(model: bytes, extra_ids: int) -> Vocabulary:
    """Return the vocabulary of `Vocabulary.model`."""
    if model.startswith(b'{'):
        return TokenizerVocabulary(json.loads(model))
    return SentencePieceVocabulary(model, extra_ids)


def read_model(file: AnyPath, extra_ids: int, remedy: str) -> Vocabulary:
    """Return the vocabulary of a SentencePiece model's file, or of a tokenizer.json. Errors end with `remedy`.

    It includes the tokens that transformers has added to the folder, if their ids are listed.
    """
    try:
        if file.name in ('tokenizer.json', tokenizer_json.ROBERTA_VOCAB):
            vocabulary: Vocabulary = tokenizer_json.read_tokenizer(file)
        else:
            vocabulary = of_model(file.read_bytes(), extra_ids)
            tokens, _ = listed_tokens(file.parent, vocabulary)
            tokenizer = file.parent / 'tokenizer_config.json'
            has_bos = paths.is_file(tokenizer) and is_gemma(paths.read_json(tokenizer))
            if has_bos and BOS in vocabulary.pieces:  # SentencePiece takes it for text
                bos_id = vocabulary.pieces.index(BOS)
                vocabulary = with_added_tokens(vocabulary, [(BOS, bos_id)], extra_ids)
            ids = [i for _, i in tokens]
            if ids and ids == list(range(vocabulary.size, vocabulary.size + len(ids))):
                vocabulary = with_added_tokens(vocabulary, tokens, extra_ids)
        if vocabulary.unk_id == PAD_ID and '<0x00>' not in vocabulary.pieces:
            logging.warning('%s: unknown is id 0, padding: unknown characters are dropped', file)
        return vocabulary
    except (Refused, json.JSONDecodeError, RecursionError) as error:  # JSON: in `added_settings`
        raise Refused(f'{file}: {error}: {remedy}') from error


def stored_data(folder: AnyPath, extra_ids: int = DEFAULT_EXTRA_IDS) -> dict:
    """Return the settings `data` of a checkpoint or run, or else transformers' extra_ids or `extra_ids`."""
    defaults = {'extra_ids': extra_ids, 'vocabulary': ''}
    tokenizer = folder / 'tokenizer_config.json'
    if paths.is_file(tokenizer):
        content = paths.read_json(tokenizer)
        defaults['extra_ids'] = content.get('extra_ids', extra_ids)
        if is_gemma(content):
            defaults['extra_ids'] = 0
        if content.get('tokenizer_class') == 'ByT5Tokenizer':
            defaults = {'extra_ids': 0, 'vocabulary': 'bytes'}
    return defaults | settings.read_stored(folder).get('data', {})


def is_gemma(tokenizer_config: Mapping) -> bool:
    return str(tokenizer_config.get('tokenizer_class')).removesuffix('Fast') == GEMMA_TOKENIZER


def names_of(vocabulary: Vocabulary) -> list[str]:
    """Return the piece of each id, or <extra_id_N>, even if that is a byte."""
    names = list(vocabulary.pieces)
    for number, i in enumerate(vocabulary.sentinel_ids):
        names[i] = f'<extra_id_{number}>'
    return names


def changed_id(old: Vocabulary, new: Vocabulary) -> str:
    """Return the first id of `old` that is another token in `new`, in words, or ''."""
    old_names = names_of(old)
    new_names = names_of(new)[: len(old_names)]
    for i, (name, new_name) in enumerate(itertools.zip_longest(old_names, new_names)):
        if name != new_name:
            return f'id {i} is {new_name!r} instead of {name!r}'
    return ''


# Tokens that transformers has added to a vocabulary.


def check_tokens(checkpoint: AnyPath, vocabulary: Vocabulary | None) -> None:
    """Raise Refused if `vocabulary` lacks tokens that transformers lists for a checkpoint, or has another EOS."""
    eos_id = getattr(vocabulary, 'eos_id', EOS_ID)
    for folder in folders_of(checkpoint):
        file = folder / 'config.json'
        eos = paths.read_json(file).get('eos_token_id') if paths.is_file(file) else None
        # Several may end an answer: Gemma's <end_of_turn>.
        if eos not in (None, eos_id) and eos_id not in np.atleast_1d(eos):
            raise Refused(
                f"{file}: eos_token_id={eos}, and {eos_id} in the vocabulary: use the checkpoint's"
            )
        tokens, files = listed_tokens(folder, vocabulary)
        if tokens:
            names = first_ten(sorted({repr(name) for name, _ in tokens}))
            raise Refused(
                f'{folder}: the vocabulary lacks {names}: use its own, or remove them from {", ".join(files)}'
            )


def listed_tokens(
    folder: AnyPath, vocabulary: Vocabulary | None
) -> tuple[list[tuple[str, int | None]], list[str]]:
    """Return the tokens that transformers lists in a folder but `vocabulary` lacks, and the names of its files.

    The tokens are sorted by id, None if transformers does not list it.
    A sentinel must have the same id in both; ByT5's sentinels are bytes here, as in T5X.
    """
    files = []
    tokens: list[tuple[str, int | None]] = []
    pieces: list[str] = []
    for file in [folder / name for name in TOKEN_FILES]:
        if not paths.is_file(file):
            continue
        content = paths.read_json(file)
        files.append(file.name)
        if file.name == 'added_tokens.json':
            content = {'added_tokens': [{'content': x, 'id': i} for x, i in content.items()]}
        tokens += tokens_of(content)
        vocab = content.get('model', {}).get('vocab', [])  # {piece: id} or [[piece, score]]
        pieces += [piece if isinstance(piece, str) else str(piece[0]) for piece in vocab]
    sentinel_ids: dict[str, int] = {}
    ids: dict[str, int] = {}
    if vocabulary is not None and vocabulary.model:
        sentinel_ids = {f'<extra_id_{n}>': int(i) for n, i in enumerate(vocabulary.sentinel_ids)}
        tokens += [(piece, None) for piece in set(pieces) - set(vocabulary.pieces)]
        ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    new_tokens: dict[str, int | None] = {}
    for name, i in tokens:
        if SENTINEL.fullmatch(name):
            sentinel_id = sentinel_ids.get(name.removeprefix('▁'))
            if sentinel_ids and i not in (None, sentinel_id):
                raise Refused(
                    f'{folder}: {name} is id {i} in {", ".join(files)}, and {sentinel_id} with {len(sentinel_ids)} '
                    'sentinels: set data.extra_ids, or extra_ids in tokenizer_config.json, to as many'
                )
        elif i in (PAD_ID, EOS_ID, UNK_ID) or name in ('', *SPECIAL_TOKENS):
            continue
        elif name not in ids or i not in (None, ids[name]):
            new_tokens[name] = new_tokens.get(name) if i is None else i
    return sorted(new_tokens.items(), key=lambda token: (token[1] or 0, token[0])), files


def with_added_tokens(
    vocabulary: Vocabulary, tokens: Sequence[tuple[str, int | None]], extra_ids: int
) -> Vocabulary:
    """Return a vocabulary with additional tokens. Each has its own id, of a piece or after all pieces."""
    if isinstance(vocabulary, TokenizerVocabulary):
        return vocabulary.with_tokens(tokens)
    proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)  # type: ignore[attr-defined]
    content = added_settings(proto)
    added_tokens = content.get('added_tokens', [])
    added_tokens += [{'id': i, 'content': name} for name, i in tokens]
    content['added_tokens'] = sorted(added_tokens, key=lambda token: token['id'])
    proto.normalizer_spec.normalization_rule_tsv = json.dumps(content)
    return of_model(proto.SerializeToString(), extra_ids)


def add_tokens(vocabulary: Vocabulary, entries: Sequence[str]) -> Vocabulary:
    """Return a vocabulary with the tokens of data.added_tokens, a list of tokens and names of .txt files.

    As in transformers, tokens that are pieces keep their ids, and the others follow the last id.
    """
    tokens: list[tuple[str, str]] = []  # (token, place)
    for entry in entries:
        if not isinstance(entry, str) or not entry.endswith('.txt'):
            tokens.append((entry, 'data.added_tokens'))
            continue
        try:
            text = paths.to_path(entry).read_bytes().decode()
        except (OSError, ValueError) as error:
            reason = paths.reason(error)
            raise Refused(f'data.added_tokens={entry!r}: {reason}: name a file in UTF-8') from error
        text = text.replace('\ufeff', '')  # byte order marks, also within concatenated files
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                tokens.append((line.rstrip(), f'data.added_tokens, line {number} of {entry},'))
    if not tokens:
        return vocabulary
    if not vocabulary.model:
        raise Refused(f'data.added_tokens={tuple(entries)} with bytes: name a SentencePiece model')
    ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
    next_id = vocabulary.size
    new_ids: dict[str, int | None] = {}
    for token, place in tokens:
        is_text = isinstance(token, str) and token.strip()
        if not is_text or SENTINEL.fullmatch(token) or token in SPECIAL_TOKENS:
            raise Refused(f'{place} has {token!r}: must be text, and not a token of T5')
        if token not in vocabulary.added_tokens and token not in new_ids:
            new_ids[token] = ids.get(token, next_id)
            next_id += token not in ids
    if not new_ids:
        return vocabulary
    return with_added_tokens(vocabulary, list(new_ids.items()), vocabulary.num_extra_ids)


def mark_sentinels(vocabulary: Vocabulary, pattern: str) -> None:
    """Make the pieces of data.sentinels, such as '<unused{}>', the sentinels, from number 0 on. '' changes nothing."""
    if pattern:
        ids = {piece: i for i, piece in enumerate(vocabulary.pieces)}
        sentinel_ids: list[int] = []
        while (i := ids.pop(pattern.replace('{}', str(len(sentinel_ids))), -1)) >= 0:
            sentinel_ids.append(i)
        vocabulary.sentinel_ids = np.array(sentinel_ids, np.int32)


def files_of(vocabulary: Vocabulary | None) -> dict[str, bytes]:
    """Return {name: content} of the files from which transformers gets the vocabulary's ids."""
    if vocabulary is None or not vocabulary.model:
        return {}
    config: dict = {'tokenizer_class': T5_TOKENIZER}
    ids = (PAD_ID, vocabulary.eos_id, vocabulary.unk_id)
    for name, i in zip(('pad_token', 'eos_token', 'unk_token'), ids, strict=True):
        if i >= 0:
            config[name] = vocabulary.pieces[i]
    if isinstance(vocabulary, TokenizerVocabulary):
        content = tokenizer_json.without_run_keys(json.loads(vocabulary.model))
        if content | tokenizer_json.t5_steps(content) != content:
            config['tokenizer_class'] = 'PreTrainedTokenizerFast'
        names = [f'<extra_id_{i}>' for i in range(vocabulary.num_sentinels)]
        config['extra_ids'] = len(vocabulary.added_tokens.keys() & names)
        files = {'tokenizer.json': json.dumps(content, ensure_ascii=False).encode()}
    else:
        proto = sentencepiece_model_pb2.ModelProto.FromString(vocabulary.model)  # type: ignore[attr-defined]
        has_own_sentinels = len(sentinel_ids_of([piece.piece for piece in proto.pieces])) > 0
        config['extra_ids'] = 0 if has_own_sentinels else vocabulary.num_sentinels
        model = vocabulary.model
        if vocabulary.added_tokens:
            proto.normalizer_spec.ClearField('normalization_rule_tsv')
            model = proto.SerializeToString()
            tokens = {}
            for name, i in vocabulary.added_tokens.items():
                if name != BOS:
                    tokens[str(i)] = {'content': name, **tokenizer_json.TOKEN_FLAGS}
            config['added_tokens_decoder'] = tokens
        files = {'spiece.model': model}
    if BOS in vocabulary.pieces and vocabulary.num_extra_ids == 0:
        config |= {'tokenizer_class': GEMMA_TOKENIZER, 'bos_token': BOS}
        config['add_bos_token'] = bool(vocabulary.ends.inputs[0])
        config['add_eos_token'] = bool(vocabulary.ends.inputs[1])
        if 'spiece.model' in files:
            files = {'tokenizer.model': files['spiece.model']}
    return files | {'tokenizer_config.json': (json.dumps(config, indent=2) + '\n').encode()}


def tokens_of(content: Mapping) -> Iterator[tuple[str, int | None]]:
    """Yield (name, id) of the tokens that a file of transformers lists; None for an id that it omits."""
    for i, token in content.get('added_tokens_decoder', {}).items():
        yield token['content'], int(i)
    for token in content.get('added_tokens', ()):
        yield token['content'], token['id']
    names: list = []
    for key, value in content.items():
        if key.endswith('_special_tokens') and isinstance(value, dict):
            names += value.values()
        elif key.endswith('_special_tokens'):
            names += value or ()
        elif key.endswith('_token'):
            names.append(value)
    for name in names:
        if isinstance(name, dict):
            name = name['content']
        if name and isinstance(name, str):
            yield name, None
