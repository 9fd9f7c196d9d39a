"""Models whose vocabulary has SentencePiece's default ids: unknown 0, BOS 1, EOS 2, as MADLAD-400 has.

They are read in T5's order, pad 0, EOS 1, unknown 2, so that no other file knows these ids. The decoder starts with
pad, so pad's row of the token table becomes that of the checkpoint's start; pad's logits are those of BOS. All other
ids stay. Imports no jax.
"""

import copy
from collections.abc import Mapping

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

import paths
from messages import Refused

UNK_ID, BOS_ID, EOS_ID = 0, 1, 2
# T5's ids, as config.json has them.
T5_IDS = {'pad_token_id': 0, 'eos_token_id': 1, 'decoder_start_token_id': 0}
ROWS_OF_LOGITS = (BOS_ID, EOS_ID, UNK_ID)  # the rows in a file that become rows 0, 1 and 2


def has_default_ids(settings: Mapping) -> bool:
    """Return whether transformers' config.json is of such a model."""
    return settings.get('eos_token_id') == EOS_ID


def is_folder(folder: paths.AnyPath) -> bool:
    """Return whether the config.json in a folder is of such a model."""
    file = folder / 'config.json'
    return paths.is_file(file) and has_default_ids(paths.read_json(file))


def rows_of_tokens(settings: Mapping, is_tied: bool) -> tuple[int, int, int]:
    """Return the rows of the token table in a file that become rows 0, 1 and 2."""
    start = settings.get('decoder_start_token_id', UNK_ID)
    if start not in (UNK_ID, BOS_ID) or (start == UNK_ID and is_tied):
        raise Refused(
            f'decoder_start_token_id={start}: must be {BOS_ID}, or {UNK_ID} with an lm_head'
        )
    return (start, EOS_ID, UNK_ID)


def in_t5_order(model: bytes) -> bytes:
    """Return a SentencePiece model with pieces 1, 2 and 0 first; what is not one stays as it is."""
    try:
        proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    except DecodeError:
        return model
    if len(proto.pieces) < 3:
        return model
    first = [copy.deepcopy(proto.pieces[i]) for i in ROWS_OF_LOGITS]
    for i, piece in enumerate(first):
        proto.pieces[i].CopyFrom(piece)
    proto.trainer_spec.pad_piece = first[0].piece
    proto.trainer_spec.pad_id, proto.trainer_spec.eos_id, proto.trainer_spec.unk_id = 0, 1, 2
    return proto.SerializeToString()
