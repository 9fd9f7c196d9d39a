"""A checkpoint as a model that one can call: `load`, `logits`, `score`, `generate`.

    t5 = infer.load('runs/small')
    t5.generate(['The <extra_id_0> walks in <extra_id_1> park.'])

Source: T5X t5x/models.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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
import settings
from vocabulary import EOS_ID, find_vocabulary

# T5X's features, int32 [batch, length].
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
FEATURES = (*SEQUENCES, *SEGMENTS)
IGNORED_FEATURES = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')

MAX_LENGTH = 2**15  # of an answer; no device holds a larger cache of keys and values
LENGTH_MULTIPLE = 32  # lengths are padded to a multiple, because each length is compiled


def load(
    path: str | Path,
    vocabulary: str | Path | None = None,
    config: model.T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
) -> 'T5':
    """Open a checkpoint as a model.

    `path` is a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its prefix or
    folder) or a Hugging Face folder, on a disk or in a bucket.
    `vocabulary` is 'bytes', a SentencePiece model, or a folder that has one, such as a run or a checkpoint; else
    the checkpoint's or its run's counts, if there is one.
    `config` has the sizes; else the checkpoint's own config counts, else its shapes.
    `mesh` has the axes 'data' and 'model'; else one device has all.
    `dtype` is that of the parameters: 'float32', 'bfloat16', 'float16', or '' for the stored one.

    Only parameters are read. Raises ValueError, in one line, for what is no such checkpoint and for arguments
    that do not fit it, and OSError for files that may not be read.
    """
    dtype = _checked_dtype(dtype)
    if mesh is None:
        mesh = partition.make_mesh(1, 1, jax.devices()[:1])
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != set(partition.MESH_AXES):
        raise ValueError(
            f"mesh={_shortened(mesh)}: must have the axes 'data' and 'model': use partition.make_mesh(4, 2)"
        )
    opened = convert.open_model(path, config)
    model.check_mesh(opened.config, mesh)
    found = find_vocabulary(opened.directory, vocabulary)
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(opened.config))
    shardings = {}
    for name, sharding in partition.shardings(mesh, specs).items():
        shardings[f'target/{name}'] = sharding
    leaves = {name: leaf for name, leaf in opened.leaves.items() if name in shardings}
    arrays = checkpoint.restore(leaves, shardings, dtype)
    return T5(opened.config, checkpoint.parameters(arrays), mesh, found)


class T5:
    """A checkpoint that one can call. `load` makes it.

    `config` has its sizes, `arrays` its parameters as {T5X's path: array}, `params` the same as nested dicts.

    Inputs and targets are either texts, to which EOS is added, or lists of token ids, which are taken as they
    are. All methods raise ValueError, in one line, for what is neither, for ids that the model has no embedding
    of, and for texts where the checkpoint brings no vocabulary.
    """

    def __init__(
        self,
        config: model.T5Config,
        arrays: Mapping[str, Any],
        mesh: Mesh,
        vocabulary: Any = None,
    ):
        self.config = config
        self.arrays = arrays
        self.params = checkpoint.unflatten(arrays)
        self.mesh = mesh
        self.vocabulary = vocabulary
        self._logits = self._compile(
            _logits, num_inputs=1, out_specs=P(partition.BATCH_AXES, None, 'model')
        )
        self._scores = self._compile(_scores, num_inputs=1, out_specs=partition.BATCH)
        self._tokens = self._compile(_tokens, num_inputs=2, out_specs=partition.BATCH)

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Return teacher-forced logits, float32 [batch, target length, vocab].

        `batch` has T5X's features as integers [batch, length]: `SEQUENCES`, and `SEGMENTS` if it is packed. Its
        size must divide by the mesh's 'data'. Raises ValueError for features that do not fit together.
        """
        return self._logits(self.arrays, self._features(batch))

    def score(self, inputs: Sequence, targets: Sequence) -> np.ndarray:
        """Return the log-likelihood of each target given its input, in nats, float32 [examples].

        It is T5X's score_batch without length normalization.
        """
        inputs_bM = self._ids('inputs', inputs)
        targets_bT = self._ids('targets', targets)
        if len(inputs) != len(targets):
            raise ValueError(f'{len(inputs)} inputs for {len(targets)} targets: give one for each')
        batch = {
            'encoder_input_tokens': inputs_bM,
            'decoder_input_tokens': np.pad(targets_bT[:, :-1], ((0, 0), (1, 0))),
            'decoder_target_tokens': targets_bT,
        }
        scores_b = np.asarray(self._scores(self.arrays, batch))
        return scores_b[: len(inputs)]  # without the padding rows

    def generate(self, inputs: Sequence, max_length: int = 128) -> list:
        """Return the model's greedy answers, each of at most `max_length` tokens.

        They are texts if the inputs are texts, else lists of ids without EOS.
        """
        is_number = isinstance(max_length, int | np.integer) and not isinstance(max_length, bool)
        if not is_number or not 1 <= max_length <= MAX_LENGTH:
            raise ValueError(
                f'max_length={max_length!r}: must be a number of tokens from 1 to {MAX_LENGTH}'
            )
        inputs_bM = self._ids('inputs', inputs)
        prompt_bT = np.zeros((len(inputs_bM), max_length), np.int32)
        tokens_bT = np.asarray(self._tokens(self.arrays, inputs_bM, prompt_bT))
        answers = []
        for tokens_T in tokens_bT[: len(inputs)]:  # without the padding rows
            if isinstance(inputs[0], str):
                answers.append(self.vocabulary.decode(tokens_T))
            else:
                answers.append([int(i) for i in tokens_T if i > EOS_ID])
        return answers

    def _compile(self, device_function: Callable, num_inputs: int, out_specs: P) -> Callable:
        """Return `device_function` on the mesh: (parameters, inputs split by rows) -> output."""
        param_specs = partition.param_specs(model.PARAMETER_SPECS, self.arrays)
        input_specs = [partition.BATCH] * num_inputs
        mapped = jax.shard_map(
            functools.partial(device_function, self.config),
            mesh=self.mesh,
            in_specs=(param_specs, *input_specs),
            out_specs=out_specs,
        )
        return jax.jit(mapped)

    def _features(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the features that the model reads, int32. Raises ValueError where they do not fit together."""
        _check_names(batch)
        arrays = {name: _to_array(batch[name]) for name in FEATURES if name in batch}
        features = {}
        for name, x in arrays.items():
            if x.ndim != 2 or 0 in x.shape or x.dtype.kind not in 'iu':
                raise ValueError(
                    f'{name} is {x.dtype} {list(x.shape)}: must be integers [batch, length], each 1 or more'
                )
            _check_shape(name, arrays)
            partition.check_divides(
                f'{name}: batch size', x.shape[0], partition.BATCH_AXES, self.mesh
            )
            if not isinstance(x, jax.core.Tracer):  # inside of another function values are unknown
                self._check_values(name, np.asarray(x))
            features[name] = jnp.asarray(x, jnp.int32)
        return features

    def _ids(self, name: str, examples: Sequence) -> np.ndarray:
        """Return examples as int32 [rows, length], padded with zeros.

        The rows divide by the mesh's 'data', the length by LENGTH_MULTIPLE.
        """
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
            raise ValueError(
                f'{name}[{is_text.index(True)}] is a text, {name}[{is_text.index(False)}] is not: give either '
                'texts or ids'
            )
        else:
            encoded = [_to_ids(f'{name}[{i}]', example) for i, example in enumerate(examples)]
        num_rows = _round_up(len(encoded), partition.axes_size(self.mesh, partition.BATCH_AXES))
        length = _round_up(max(map(len, encoded)), LENGTH_MULTIPLE)
        ids = np.zeros((num_rows, length), np.int32)
        for i, example in enumerate(encoded):
            self._check_ids(f'{name}[{i}]', np.asarray(example))
            ids[i, : len(example)] = example
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, EOS at the end."""
        if self.vocabulary is None:
            raise ValueError(
                'this checkpoint brings no vocabulary: texts need one: infer.load(..., vocabulary=PATH) with a '
                "SentencePiece model, vocabulary='bytes' for ByT5"
            )
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ValueError(
                    f'{_shortened(text)} has half a character (a surrogate): give text of Unicode'
                ) from None
        return [[*ids, EOS_ID] for ids in self.vocabulary.encode(texts, glued_sentinels=True)]

    def _check_values(self, name: str, x: np.ndarray) -> None:
        """Raise ValueError for values that a feature may not have."""
        if name not in SEGMENTS:
            self._check_ids(name, x)
        elif int(x.min()) < 0 or int(x.max()) >= 2**31:
            raise ValueError(
                f'{name} has {x.min()} to {x.max()}: must be int32, 1 or more, and 0 for padding'
            )

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        """Raise ValueError for ids that the model has no embedding of."""
        vocab_size = self.config.vocab_size
        for i in (int(ids.min()), int(ids.max())):
            if not 0 <= i < vocab_size:
                raise ValueError(
                    f'{name} has id {i}: model.vocab_size={vocab_size} has no such rows, only 0 to '
                    f'{vocab_size - 1}: use its own vocabulary'
                )


# What one device computes, inside of `jax.shard_map`. model.py defines the suffixes.


def _logits(config: model.T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    return model.apply(lambda: model.logits(config, batch), params)


def _scores(config: model.T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    logits_bTv = _logits(config, params, batch)
    targets_bT = batch['decoder_target_tokens']
    nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
    return -(nats_bT * (targets_bT > 0)).sum(axis=-1)


def _tokens(
    config: model.T5Config, params: Mapping, inputs_bM: jax.Array, prompt_bT: jax.Array
) -> jax.Array:
    max_length = prompt_bT.shape[1]
    cache = model.apply(lambda: model.start_decoding(config, inputs_bM, max_length), params)

    def step(tokens_b, cache):
        return model.apply(lambda: model.decode_step(config, tokens_b, cache), params)

    return decode.greedy(step, cache, prompt_bT, EOS_ID)


# What users give.


def _check_names(batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless a batch has the features that it needs, and no unknown one."""
    if not isinstance(batch, Mapping):
        raise ValueError(f'a {type(batch).__name__} is no batch: give a dict of T5X features')
    missing = [name for name in SEQUENCES if name not in batch]
    if missing:
        raise ValueError(f'the batch has {sorted(map(str, batch))}: it needs {", ".join(missing)}')
    for name in batch:
        if name not in (*FEATURES, *IGNORED_FEATURES):
            raise ValueError(
                f'the batch has {name!r}: the features are {", ".join((*FEATURES, *IGNORED_FEATURES))}'
            )
    if ('encoder_segment_ids' in batch) != ('decoder_segment_ids' in batch):
        raise ValueError(f'the batch has only one of {", ".join(SEGMENTS)}: give both or none')


def _check_shape(name: str, arrays: Mapping[str, Any]) -> None:
    """Raise ValueError unless a feature has the rows of the batch and the length of its stack."""
    like = 'encoder_input_tokens'
    if name.startswith('decoder'):
        like = 'decoder_input_tokens'
    num_rows = arrays['encoder_input_tokens'].shape[0]
    expected = (num_rows, *arrays[like].shape[1:])
    if arrays[name].shape != expected:
        raise ValueError(
            f'{name} has shape {list(arrays[name].shape)}: must be {list(expected)}, with the rows of '
            f'encoder_input_tokens and the length of {like}'
        )


def _checked_dtype(dtype: Any) -> str:
    """Return the name of a dtype of parameters, which may be a type such as jnp.bfloat16."""
    name = dtype
    if not isinstance(dtype, str | None):
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = _shortened(dtype)
    choices = settings.CHOICES['restore.dtype']
    if name not in choices:
        raise ValueError(f'dtype={name!r}: must be one of {", ".join(map(repr, choices))}')
    return name


def _to_ids(name: str, example: Any) -> np.ndarray:
    """Return an example that is given as ids. Raises ValueError for anything else."""
    ids = np.asarray(_to_array(example))
    is_integer = ids.dtype.kind in 'iu'
    if ids.dtype == object:  # integers beyond int64
        is_integer = all(type(i) is int for i in ids.flat)
    if ids.ndim != 1 or (ids.size and not is_integer):
        raise ValueError(
            f'{name}={_shortened(example)} is neither a text nor a list of ids: give one of them'
        )
    if not ids.any():
        raise ValueError(
            f'{name}={_shortened(example)} has no ids but padding: give one or more, 1 is EOS'
        )
    return ids


def _to_array(value: Any) -> Any:
    """Return `value` as an array; an array of None where it is lists of several lengths."""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except (ValueError, TypeError):
        return np.asarray(None)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _shortened(value: Any) -> str:
    """Return `value` as an error message shows it, in one line of at most 60 characters."""
    text = ' '.join(repr(value).split())
    if len(text) > 60:
        return f'{text[:57]}...'
    return text
