"""A checkpoint as a model that one can call: `load`, `logits`, `score`, `generate`.

Source: T5X t5x/models.py.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import checkpoint
import convert
import decode
import loss
import model
import partition
from vocabulary import EOS_ID, find_vocabulary

SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
UNREAD = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')  # T5X's other features
DTYPES = ('float32', 'bfloat16', 'float16', '')  # of restored parameters; '' is as stored
MAX_LENGTH = 2**15  # of an answer; a larger cache of keys and values fits no device
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
FEATURES = (*SEQUENCES, 'encoder_segment_ids', 'decoder_segment_ids')  # what the model reads


class T5:
    """A checkpoint that runs: `.config`, `.params` (T5X's tree), `.logits`, `.score`, `.generate`. Inputs and
    targets are texts, which get an EOS, or lists of ids, which are taken as they are."""

    def __init__(
        self, config: model.T5Config, arrays: Mapping[str, Any], mesh: Mesh, vocabulary: Any = None
    ):
        self.config, self.mesh, self.arrays, self.vocabulary = config, mesh, arrays, vocabulary
        self.params = checkpoint.unflatten(arrays)
        specs = partition.param_specs(model.PARAMETER_SPECS, arrays)

        def device_logits(params, batch):
            return model.apply(lambda: model.logits(config, batch), params)

        def device_scores(params, batch):
            logits_bTv, targets_bT = device_logits(params, batch), batch['decoder_target_tokens']
            nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
            return -(nats_bT * (targets_bT > 0)).sum(axis=-1)

        def device_tokens(params, inputs_bM, prompt_bT):
            start = lambda: model.start_decoding(config, inputs_bM, prompt_bT.shape[1])  # noqa: E731

            def step(tokens_b, cache):
                return model.apply(lambda: model.decode_step(config, tokens_b, cache), params)

            return decode.greedy(step, model.apply(start, params), prompt_bT, EOS_ID)

        def sharded(f, num_inputs, out_specs):
            in_specs = (specs, *[partition.BATCH] * num_inputs)
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

        self._logits = sharded(device_logits, 1, P('data', None, 'model'))
        self._scores = sharded(device_scores, 1, partition.BATCH)
        self._tokens = sharded(device_tokens, 2, partition.BATCH)

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Return teacher-forced logits, float32 [batch, target length, vocab], of T5X's features.

        They are integers [batch, length] each; packed when there are segment ids. The batch must divide by
        'data'. Raises ValueError for features that do not fit together and for ids that the model lacks.
        """
        return self._logits(self.arrays, self._features(batch))

    def score(self, inputs: Sequence, targets: Sequence) -> np.ndarray:
        """Return the log-likelihood of each target given its input, in nats, float32 [examples]. (T5X's
        score_batch without length normalization.)"""
        inputs_bM, targets_bT = self._ids('inputs', inputs), self._ids('targets', targets)
        if len(inputs) != len(targets):
            raise ValueError(f'{len(inputs)} inputs for {len(targets)} targets: give one for each')
        shifted_bT = np.pad(targets_bT[:, :-1], ((0, 0), (1, 0)))
        batch = dict(zip(SEQUENCES, (inputs_bM, shifted_bT, targets_bT), strict=True))
        return np.asarray(self._scores(self.arrays, batch))[: len(inputs)]

    def generate(self, inputs: Sequence, max_length: int = 128) -> list:
        """Return what the model answers, greedily, in at most `max_length` tokens: texts for texts, else lists
        of ids without EOS."""
        is_count = isinstance(max_length, int | np.integer) and not isinstance(max_length, bool)
        if not is_count or not 1 <= max_length <= MAX_LENGTH:
            raise ValueError(
                f'max_length={max_length!r}: must be a number of tokens from 1 to {MAX_LENGTH}'
            )
        inputs_bM = self._ids('inputs', inputs)
        prompt_bT = np.zeros((len(inputs_bM), max_length), np.int32)
        tokens_bT = np.asarray(self._tokens(self.arrays, inputs_bM, prompt_bT))[: len(inputs)]
        if isinstance(inputs[0], str):
            return [self.vocabulary.decode(tokens_T) for tokens_T in tokens_bT]
        return [[int(i) for i in tokens_T if i > EOS_ID] for tokens_T in tokens_bT]

    def _features(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return what the model reads of a batch, int32."""
        if not isinstance(batch, Mapping):
            raise ValueError(f'a {type(batch).__name__} is no batch: give a dict of T5X features')
        if missing := [name for name in SEQUENCES if name not in batch]:
            raise ValueError(
                f'the batch has {sorted(map(str, batch))}: it needs {", ".join(missing)}'
            )
        if unknown := [name for name in batch if name not in (*FEATURES, *UNREAD)]:
            raise ValueError(
                f'the batch has {unknown[0]!r}: the features are {", ".join((*FEATURES, *UNREAD))}'
            )
        if sum(name in batch for name in SEGMENTS) == 1:
            raise ValueError(f'the batch has only one of {", ".join(SEGMENTS)}: give both or none')
        arrays = {name: _to_array(batch[name]) for name in FEATURES if name in batch}
        for name, x in arrays.items():
            if x.ndim != 2 or 0 in x.shape or x.dtype.kind not in 'iu':
                raise ValueError(
                    f'{name} is {x.dtype} {list(x.shape)}: must be integers [batch, length], each 1 or more'
                )
            # Both stacks have the length of their tokens, and all features the same rows.
            like = SEQUENCES[0] if name.startswith('encoder') else SEQUENCES[1]
            expected = (arrays[SEQUENCES[0]].shape[0], *arrays[like].shape[1:])
            if x.shape != expected:
                raise ValueError(
                    f'{name} has shape {list(x.shape)}: must be {list(expected)}, with the rows of '
                    f'{SEQUENCES[0]} and the length of {like}'
                )
            partition.check_divides(f'{name}: batch size', x.shape[0], 'data', self.mesh)
            if isinstance(x, jax.core.Tracer):  # whose numbers nobody knows yet
                continue
            if name not in SEGMENTS:
                self._check_ids(name, np.asarray(x))
            elif int(x.min()) < 0 or int(x.max()) >= 2**31:
                raise ValueError(
                    f'{name} has {x.min()} to {x.max()}: must be int32, 1 or more, and 0 for padding'
                )
        return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}

    def _ids(self, name: str, examples: Sequence) -> np.ndarray:
        """Return the examples as int32 [rows, length], padded to rows that divide by 'data' and to a length of
        which there are few, because each is compiled."""
        is_list = isinstance(examples, list | tuple | np.ndarray | jax.Array)
        if not is_list or not getattr(examples, 'ndim', 1) or not len(examples):
            raise ValueError(
                f'{name}={_shortened(examples)} is no list of texts or of ids: give one or more'
            )
        encoded: list[Any]
        is_text = [isinstance(example, str) for example in examples]
        if all(is_text):
            encoded = self._encode([str(text) for text in examples])
        elif any(is_text):
            i, j = is_text.index(True), is_text.index(False)
            raise ValueError(f'{name}[{i}] is a text, {name}[{j}] is not: give either texts or ids')
        else:
            encoded = [self._example(f'{name}[{i}]', x) for i, x in enumerate(examples)]
        most, num_rows = max(map(len, encoded)), self.mesh.shape['data']
        ids = np.zeros((-(-len(encoded) // num_rows) * num_rows, -(-most // 32) * 32), np.int32)
        for i, example in enumerate(encoded):
            self._check_ids(f'{name}[{i}]', np.asarray(example))
            ids[i, : len(example)] = example
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, EOS at the end."""
        if self.vocabulary is None:
            raise ValueError('this checkpoint brings no vocabulary: load(..., vocabulary=PATH)')
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f'{_shortened(text)} has half a character (a surrogate): give text of Unicode'
                ) from None
        return [[*ids, EOS_ID] for ids in self.vocabulary.encode(texts, glued_sentinels=True)]

    def _example(self, name: str, example: Any) -> np.ndarray:
        """Return one example that is given as ids."""
        ids = np.asarray(_to_array(example))
        is_huge = ids.dtype == object and all(type(i) is int for i in ids.flat)  # beyond int64
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in 'iu' and not is_huge):
            raise ValueError(
                f'{name}={_shortened(example)} is neither a text nor a list of ids: give one of them'
            )
        if not ids.any():
            raise ValueError(
                f'{name}={_shortened(example)} has no ids but padding: give one or more, 1 is EOS'
            )
        return ids

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        """Raise ValueError for ids that the model has no embeddings of."""
        vocab_size = self.config.vocab_size
        for i in (int(ids.min()), int(ids.max())):
            if not 0 <= i < vocab_size:
                raise ValueError(
                    f'{name} has id {i}: model.vocab_size={vocab_size} has no such rows, only 0 to '
                    f'{vocab_size - 1}: use its own vocabulary'
                )


def _to_array(value: Any) -> Any:
    """Return `value` as an array; one of objects where it is lists of several lengths."""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except (ValueError, TypeError):
        return np.asarray(None)


def _shortened(value: Any) -> str:
    """Return `value` as an error message shows it, in one line."""
    text = ' '.join(repr(value).split())
    return text if len(text) <= 60 else f'{text[:57]}...'


def load(
    path: str | Path,
    vocabulary: str | Path | None = None,
    config: model.T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
) -> T5:
    """Open a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its prefix
    or folder) or a Hugging Face folder; parameters only, in `dtype` ('' as stored), on one device if no mesh.

    Sizes come from `config`, else from the checkpoint's own config, else from its shapes; the vocabulary
    ('bytes', a SentencePiece model, or a folder that has one, such as a run or a checkpoint) from the checkpoint
    or its run, else there is none. Raises ValueError, in one line, for what is no checkpoint of these, and OSError
    for files that may not be read.
    """
    if not isinstance(dtype, str | None):
        dtype = _dtype_name(dtype)  # jnp.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f'dtype={dtype!r}: must be one of {", ".join(map(repr, DTYPES))}')
    if mesh is None:
        mesh = partition.make_mesh(1, 1, jax.devices()[:1])
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != {'data', 'model'}:
        raise ValueError(
            f"mesh={_shortened(mesh)}: must have the axes 'data' and 'model': use partition.make_mesh(4, 2)"
        )
    directory, config, index = convert.open_model(path, config)
    model.check_mesh(config, mesh)
    found = find_vocabulary(directory, vocabulary)
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(config))
    placed = {f'target/{p}': x for p, x in partition.shardings(mesh, specs).items()}
    arrays = checkpoint.restore(
        {path: index[path] for path in index if path in placed}, placed, dtype
    )
    return T5(config, checkpoint.parameters(arrays), mesh, found)


def _dtype_name(dtype: Any) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return _shortened(dtype)
