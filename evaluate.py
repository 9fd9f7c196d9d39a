"""Checkpoints as models: load one, ask it for logits; run a model over an evaluation set.

Source: T5X t5x/models.py, t5x/trainer.py (train-eval).
"""

import copy
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import checkpoint
import convert
import data
import decode
import loss
import model
import partition
import paths
from configs import base

SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
UNREAD = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')  # T5X's other features
DTYPES = ('float32', 'bfloat16', 'float16', '')  # of restored parameters; '' is as stored
MAX_LENGTH = 2**15  # of an answer; a larger cache of keys and values fits no device
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
FEATURES = (*SEQUENCES, 'encoder_segment_ids', 'decoder_segment_ids')  # what the model reads
UNIGRAM_TOKENS = 1_000_000  # positions of training targets that the unigram baseline counts


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

            return decode.greedy(step, model.apply(start, params), prompt_bT, data.EOS_ID)

        def sharded(f, num_inputs, out_specs):
            in_specs = (specs, *[partition.BATCH] * num_inputs)
            return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))

        self._logits = sharded(device_logits, 1, P(partition.BATCH_AXES, None, 'model'))
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
        return [[int(i) for i in tokens_T if i > data.EOS_ID] for tokens_T in tokens_bT]

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
            partition.check_divides(
                f'{name}: batch size', x.shape[0], partition.BATCH_AXES, self.mesh
            )
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
        most = max(map(len, encoded))
        num_rows = partition.axes_size(self.mesh, partition.BATCH_AXES)
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
        return [[*ids, data.EOS_ID] for ids in self.vocabulary.encode(texts, glued_sentinels=True)]

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
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != set(partition.MESH_AXES):
        raise ValueError(
            f"mesh={_shortened(mesh)}: must have the axes 'data' and 'model': use partition.make_mesh(4, 2)"
        )
    directory, config, index = open_model(path, config)
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


def open_model(
    path: str | Path, config: model.T5Config | None = None
) -> tuple[Any, model.T5Config, dict[str, Any]]:
    """Where the checkpoint of `load` lies, its config and its index. ValueError unless the checkpoint is whole
    and its parameters are those of the config."""
    directory, index, own_config = find_checkpoint(path)
    shapes = checkpoint.shapes(checkpoint.parameters(index))
    config = config or own_config or config_from_shapes(shapes)
    try:
        checkpoint.compare(model.shapes(config), shapes)
    except ValueError as error:
        raise ValueError(f'{directory}: {error}') from None
    return directory, config, index


def find_checkpoint(path: str | Path) -> tuple[Any, dict[str, Any], model.T5Config | None]:
    """Where the checkpoint of `load` lies, its index, and the config beside it if there is one. ValueError
    where it is damaged."""
    directory = paths.to_path(path)
    step = checkpoint.newest(directory)
    if step is not None:
        directory /= f'checkpoint_{step}'
    elif directory.name == 'checkpoint' and paths.is_file(directory):
        directory = directory.parent
    checkpoint.verify(directory)
    if convert.is_hugging_face(directory):
        config, entries = convert.hugging_face_index(directory)
        return directory, dict(entries), config
    index, sizes = checkpoint.read_index(directory), read_settings(directory).get('model')
    try:
        if not sizes:
            return directory, index, None
        # What the config.json of an older version lacks has its default.
        return directory, index, model.T5Config(**(base.get_config().model.to_dict() | sizes))
    except (ValueError, TypeError) as error:
        raise ValueError(f'{directory}/config.json: {error}') from error


def read_settings(directory: Any) -> dict[str, Any]:
    """config.json of a checkpoint of ours; where there is none only what its vocabulary is then."""
    file = directory / 'config.json'
    settings = convert.read_json(file) if paths.is_file(file) else {}
    is_ours = all(isinstance(settings.get(name, {}), dict) for name in ('model', 'data'))
    settings = settings if is_ours and 'model' in settings else {}
    return settings | {'data': {'extra_ids': 100, 'vocabulary': ''} | settings.get('data', {})}


def find_vocabulary(directory: Any, name: str | Path | None = None) -> Any:
    """Return the vocabulary that `name` names ('bytes', a SentencePiece model, or a folder that has one), else
    the one of a checkpoint or of its run, else None."""
    settings = read_settings(directory)['data']
    if name == 'bytes':
        return data.ByteVocabulary()
    file: Any = None
    if name:
        place = paths.to_path(name)
        if read_settings(place)['data']['vocabulary'] == 'bytes':
            return data.ByteVocabulary()
        file = place if paths.is_file(place) else place.is_dir() and vocabulary_file(place)
        if not file:
            raise ValueError(
                f"vocabulary={str(name)!r}: no file, nor a folder with {' or '.join(data.VOCABULARY_NAMES)}, nor 'bytes'"
            )
        if isinstance(file, Path):
            paths.check_not_lfs(file)  # a link of the user's own may lead anywhere
    elif settings['vocabulary'] == 'bytes':
        return data.ByteVocabulary()
    elif file := vocabulary_file(directory):
        file = paths.own_file(file)
    if file is None:
        return None
    try:
        return data.SentencePieceVocabulary(file.read_bytes(), settings['extra_ids'])
    except ValueError as error:
        raise ValueError(f'{file}: {error}: name another vocabulary') from None


def vocabulary_file(directory: Any) -> Any:
    """Return the SentencePiece model in the folder of a checkpoint or a run, else in the run's of a checkpoint,
    else in that of a Mesh-TF prefix; None where there is none."""
    folders = [directory]
    if directory.name.startswith('checkpoint_') or not directory.is_dir():
        folders.append(directory.parent)
    files = [folder / name for folder in folders for name in data.VOCABULARY_NAMES]
    return next((file for file in files if paths.is_file(file)), None)


def convert_checkpoint(source: str | Path, target: str | Path, form: str) -> Path:
    """Write what `load` would open at `source` to the folder `target`, in its dtypes; return its path.

    `form` is 't5x', with whatever optimizer state there is, as `target`/checkpoint_STEP, or 'hf', parameters
    alone. Arrays are read as they are written. All or nothing: an error leaves `target` as it was. Raises
    ValueError for a target that has other files or lies in the source, and warns where there is no vocabulary.
    """
    if form not in ('t5x', 'hf'):
        raise ValueError(f"format={form!r}: must be 't5x' or 'hf'")
    target = paths.disk_path(target)
    convert.check_new(target)
    place = paths.to_path(source)
    if isinstance(place, Path) and target.resolve().is_relative_to(place.resolve()):
        raise ValueError(f'{target} is or lies in {place}, which is read: name a folder elsewhere')
    directory, config, index = open_model(place)
    vocabulary = find_vocabulary(directory)
    pieces = vocabulary.model if vocabulary else b''
    if form == 'hf':
        arrays = checkpoint.parameters(index)
        convert.write_hugging_face(target, config, arrays, pieces or None)
        written = target
    else:
        written = _write_t5x(target, directory, config, index, pieces)
    if not pieces and (form == 'hf' or not vocabulary):
        logging.warning(
            '%s brings no vocabulary file, so %s has none: pass vocabulary=... to load it, '
            'or copy spiece.model into it',
            *(directory, written),
        )
    return written


def _write_t5x(
    target: Path, directory: Any, config: model.T5Config, index: Mapping[str, Any], pieces: bytes
) -> Path:
    """Write `index` as `target`/checkpoint_STEP, with the vocabulary in it and beside it."""
    tree = {'state/step': np.int32(0), **index}
    step = int(convert.read_leaf(tree['state/step']))
    final, kept = target / f'checkpoint_{step}', target / 'vocabulary.model'
    if (target / 'lock').exists() or (kept.exists() and kept.read_bytes() != pieces):
        raise ValueError(f"{target} is a run's, or has another vocabulary: name another folder")
    names = sorted(file.name for file in target.iterdir()) if target.exists() else []
    if others := [x for x in names if x != kept.name and not x.startswith('checkpoint_')]:
        raise ValueError(f'{target} holds {others[0]}: name a new folder, or one of checkpoints')
    if final.exists():
        raise ValueError(f'{final} exists: remove it or name another folder')
    own = {name: read_settings(directory)['data'][name] for name in ('extra_ids', 'vocabulary')}
    settings = {'model': dataclasses.asdict(config), 'data': own}
    files = {'config.json': json.dumps(settings).encode()}
    if pieces:
        files['vocabulary.model'] = pieces
    with convert.unfinished(final) as whole:
        try:
            checkpoint.save(whole, step, tree, files).rename(final)
        except OSError as error:  # the folder that it names is gone soon
            cause = error.__cause__ or error
            if isinstance(cause, ValueError):
                raise cause from None
            raise OSError(f'{final} is not written ({cause}): see to the disk') from error
        if pieces and not names:  # checkpoints of others must not find it
            (whole / kept.name).write_bytes(pieces)
            (whole / kept.name).rename(kept)
    return final


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> model.T5Config:
    """T5Config of a parameter tree; what shapes cannot tell (gelu or silu, dtype) is T5 1.1's."""
    layers = [name.split('/')[0] for name in shapes if name.endswith('/mlp/wo/kernel')]
    per_layer = 'encoder/layers_0/relpos_bias/rel_embedding' in shapes
    bias = f'encoder/{"layers_0/" if per_layer else ""}relpos_bias/rel_embedding'
    try:
        vocab_size, emb_dim = shapes['token_embedder/embedding']
        num_heads, _ = shapes[bias]
        mlp_dim, _ = shapes['encoder/layers_0/mlp/wo/kernel']
        joined, _ = shapes['encoder/layers_0/attention/out/kernel']
    except KeyError as missing:
        raise ValueError(f'not a T5 of T5X: the checkpoint has no parameter {missing}') from None
    activations = ('gelu', 'linear') if 'encoder/layers_0/mlp/wi_0/kernel' in shapes else ('relu',)
    return model.T5Config(
        vocab_size=vocab_size,
        dtype='float32',
        emb_dim=emb_dim,
        num_heads=num_heads,
        num_encoder_layers=layers.count('encoder'),
        num_decoder_layers=layers.count('decoder'),
        head_dim=joined // num_heads,
        mlp_dim=mlp_dim,
        mlp_activations=activations,
        dropout_rate=0.1,
        logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
        float32_attention_logits=False,
        relpos_bias_per_layer=per_layer,
    )


class Evaluation:
    """A model's losses on the validation split, on the same batches every time, and the unigram baseline.
    Differs from T5X: the first `eval.steps` batches of one pass; T5X repeats a small split."""

    def __init__(
        self,
        config: Any,
        mesh: Mesh,
        training: data.Stream,
        validation: data.Stream,
        num_microbatches: int = 1,
    ):
        self.config, self.mesh, self.training, self.validation = config, mesh, training, validation
        self.batches: list[dict[str, np.ndarray]] = []
        self._are_read = False
        self.first_sentinel = validation.first_sentinel
        self.sums = make_sums(
            model.T5Config(**config.model),
            mesh,
            z_loss=config.loss.z_loss,
            label_smoothing=config.loss.label_smoothing,
            normalizing_factor=loss.parse_normalizing_factor(config.loss.loss_normalizing_factor),
            first_sentinel=self.first_sentinel,
            num_microbatches=num_microbatches,
        )

    def __call__(
        self, params: Mapping[str, jax.Array], stop: Callable[[int], int] = lambda count: 0
    ) -> dict[str, float] | None:
        """Return T5X's metrics, and nats per token of text and of all targets beside their unigram baselines.

        `stop` is called with the number of batches so far, alike in all processes. None where it gives anything
        but 0: the evaluation ended there.
        """
        if not self._read_batches(stop):
            return None
        steps = []
        for count, batch in enumerate(self.batches, start=1):
            steps.append(self.sums(params, partition.place_rows(self.mesh, batch)))
            jax.block_until_ready(steps[-2:-1])  # one batch is queued while another is computed
            if stop(count):
                return None
        steps = jax.device_get(steps)
        total = {name: sum(float(sums[name]) for sums in steps) for name in steps[0]}
        values = summarize(steps, self.config)
        values['nats_per_text_token'] = total['text_nats'] / total['text_tokens']
        values['nats_per_target_token'] = total['target_nats'] / total['decoder_tokens']
        return values | self.unigram_baselines

    def _read_batches(self, stop: Callable[[int], int]) -> bool:
        """Read this process's rows, once: a small split of a large corpus takes a while.

        Return False where `stop` ended it; several processes read at their own pace and do not ask.
        """
        if self._are_read:
            return True
        for batch in self.validation:
            self.batches.append(batch)
            if len(self.batches) == self.config.eval.steps:
                break
            if jax.process_count() == 1 and stop(0):
                return False
        del self.validation  # and with it the documents that its lanes hold
        # Lanes end apart, but all processes must take the same number of steps.
        most = int(partition.from_processes(np.array([len(self.batches)])).max())
        empty = {name: np.zeros_like(x) for name, x in self.batches[0].items()}
        self.batches += [empty] * (most - len(self.batches))
        self._are_read = True
        return True

    @functools.cached_property
    def unigram_baselines(self) -> dict[str, float]:
        """The cross entropy of the validation targets under the unigram of the training targets, in nats: what
        token frequencies alone would pay.

        Counted are the first UNIGRAM_TOKENS positions of the training targets, or their first epoch if that is
        shorter, whatever the number of steps; each token once more than it occurs.
        """
        training_counts = np.zeros(self.config.model.vocab_size, np.int64)
        validation_counts = np.zeros_like(training_counts)
        training = copy.copy(self.training)
        training.num_epochs = 1
        training.seek(np.zeros_like(training.position))
        positions_per_batch = self.config.train.batch_size * self.config.data.lengths.targets
        num_batches = math.ceil(UNIGRAM_TOKENS / positions_per_batch)
        for batch in itertools.islice(training, num_batches):
            np.add.at(training_counts, batch['decoder_target_tokens'], 1)
        for batch in self.batches:
            np.add.at(validation_counts, batch['decoder_target_tokens'], 1)
        counts = np.stack([training_counts, validation_counts])
        training_counts, validation_counts = partition.from_processes(counts).sum(axis=0)

        def baseline(first: int, stop: int | None) -> float:
            q = training_counts[first:stop] + 1
            p = validation_counts[first:stop]
            return float(-(p * np.log(q / q.sum())).sum() / p.sum())

        return {
            'unigram_nats_per_text_token': baseline(data.EOS_ID + 1, self.first_sentinel),
            'unigram_nats_per_target_token': baseline(data.EOS_ID, None),
        }


@functools.lru_cache(maxsize=16)
def make_sums(
    config: model.T5Config,
    mesh: Mesh,
    z_loss: float,
    label_smoothing: float,
    normalizing_factor: float | str,
    first_sentinel: int,
    num_microbatches: int,
) -> Callable:
    """Return a compiled function (params, batch) -> loss.weighted_sums of the global batch, and nats (no z-loss,
    no smoothing) of all targets and of those that are text: no sentinel, EOS or padding.

    Kept: two runs in one process with the same model compile it once.
    """
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(config))

    def device_sums(params, batch):
        weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)

        def part_sums(part):
            batch, weights_bT = part
            logits_bTv = model.apply(lambda: model.logits(config, batch), params)
            sums = loss.weighted_sums(
                logits_bTv, batch, weights_bT, divisor, z_loss, label_smoothing
            )
            targets_bT = batch['decoder_target_tokens']
            nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
            text_bT = (targets_bT > data.EOS_ID) & (targets_bT < first_sentinel)
            sums['target_nats'] = (nats_bT * (targets_bT > 0)).sum()
            sums['text_nats'] = (nats_bT * text_bT).sum()
            sums['text_tokens'] = text_bT.sum()
            return sums

        sums = lax.map(part_sums, partition.cut_rows((batch, weights_bT), num_microbatches))
        return lax.psum(jax.tree.map(lambda x: x.sum(axis=0), sums), partition.BATCH_AXES)

    return jax.jit(
        jax.shard_map(
            device_sums,
            mesh=mesh,
            in_specs=(specs, partition.BATCH),
            out_specs=P(),
        )
    )


def summarize(steps: list, config: Any) -> dict[str, float]:
    """T5X's metrics (t5x/models.py) from each step's sums, and 'nats_per_token': the cross entropy
    without z-loss, whatever the normalization."""
    sums = {name: sum(float(s[name]) for s in steps) for name in steps[0]}
    rows, lengths = len(steps) * config.train.batch_size, config.data.lengths
    inputs, targets = rows * lengths.inputs, rows * lengths.targets  # positions, padding included
    weights, tokens = max(sums['weights'], 1e-9), sums['encoder_tokens'] + sums['decoder_tokens']
    metrics = {
        'nats_per_token': sums['nats'] / weights,
        'accuracy': sums['correct'] / weights,
        'loss_per_nonpadding_target_token': sums['loss'] / weights,
        'non_padding_fraction/loss_weights': sums['weights'] / targets,
        'non_padding_fraction/encoder_input_tokens': sums['encoder_tokens'] / inputs,
        'non_padding_fraction/decoder_target_tokens': sums['decoder_tokens'] / targets,
        'non_padding_fraction/overall': tokens / (inputs + targets),
    }
    sums['cross_ent_loss'] = sums['loss'] - sums['z_loss']
    for name in ('loss', 'z_loss', 'cross_ent_loss'):
        metrics |= {name: sums[name] / len(steps)}
        metrics |= {f'{name}_per_all_target_tokens': sums[name] / targets}
    return metrics
