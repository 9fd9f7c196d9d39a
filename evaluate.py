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

        self._logits = sharded(device_logits, 1, P('data', None, 'model'))
        self._scores = sharded(device_scores, 1, partition.BATCH)
        self._tokens = sharded(device_tokens, 2, partition.BATCH)

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Teacher-forced logits, float32 [batch, target length, vocab], of T5X's features (int32
        [batch, length] each; packed when there are segment ids). The batch must divide by 'data'."""
        if missing := [name for name in SEQUENCES if name not in batch]:
            raise ValueError(f'the batch has {sorted(batch)}: it needs {", ".join(missing)}')
        features = {name: jnp.asarray(batch[name], jnp.int32) for name in FEATURES if name in batch}
        for name, x in features.items():
            partition.check_divides(f'{name}: batch size', x.shape[0], 'data', self.mesh)
        return self._logits(self.arrays, features)

    def score(self, inputs: Sequence, targets: Sequence) -> np.ndarray:
        """The log-likelihood of each target given its input, in nats, float32 [examples]. (T5X's score_batch
        without length normalization.)"""
        inputs_bM, targets_bT = self._ids(inputs), self._ids(targets)
        if len(inputs) != len(targets):
            raise ValueError(f'{len(inputs)} inputs for {len(targets)} targets: give one for each')
        shifted_bT = np.pad(targets_bT[:, :-1], ((0, 0), (1, 0)))
        batch = dict(zip(SEQUENCES, (inputs_bM, shifted_bT, targets_bT), strict=True))
        return np.asarray(self._scores(self.arrays, batch))[: len(inputs)]

    def generate(self, inputs: Sequence, max_length: int = 128) -> list:
        """What the model answers, greedily, in at most `max_length` tokens: texts for texts, else lists of
        ids without EOS."""
        inputs_bM = self._ids(inputs)
        prompt_bT = np.zeros((len(inputs_bM), max_length), np.int32)
        tokens_bT = np.asarray(self._tokens(self.arrays, inputs_bM, prompt_bT))[: len(inputs)]
        if isinstance(inputs[0], str):
            return [self.vocabulary.decode(tokens_T) for tokens_T in tokens_bT]
        return [[int(i) for i in tokens_T if i > data.EOS_ID] for tokens_T in tokens_bT]

    def _ids(self, examples: Sequence) -> np.ndarray:
        """int32 [rows, length]: padded to rows that divide by 'data' and to a length of which there are few,
        because each is compiled."""
        if not len(examples) or isinstance(examples, str):
            raise ValueError(f'{examples!r} is no list of texts or of ids: give one or more')
        if isinstance(examples[0], str):
            if self.vocabulary is None:
                raise ValueError('this checkpoint brings no vocabulary: load(..., vocabulary=PATH)')
            examples = [[*ids, data.EOS_ID] for ids in self.vocabulary.encode(list(examples))]
        most, num_rows = max(map(len, examples)), self.mesh.shape['data']
        ids = np.zeros((-(-len(examples) // num_rows) * num_rows, -(-most // 32) * 32), np.int32)
        for row, example in zip(ids, examples, strict=False):
            row[: len(example)] = example
        if ids.min() < 0 or ids.max() >= self.config.vocab_size:
            words = f'ids from {ids.min()} to {ids.max()}'
            raise ValueError(f'{words}: model.vocab_size={self.config.vocab_size} has no such rows')
        return ids


def load(
    path: str | Path,
    vocabulary: str | Path | None = None,
    config: model.T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
) -> T5:
    """Opens a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its prefix
    or folder) or a Hugging Face folder; parameters only, in `dtype`, on one device if no mesh. Sizes come
    from `config`, else from the checkpoint's own config, else from its shapes; the vocabulary ('bytes', a
    SentencePiece model or its folder) from the workdir or the folder, else there is none."""
    directory, config, index = open_model(path, config)
    mesh = mesh or partition.make_mesh(1, 1, jax.devices()[:1])
    model.check_mesh(config, mesh)
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(config))
    placed = {f'target/{p}': x for p, x in partition.shardings(mesh, specs).items()}
    arrays = checkpoint.restore(
        {path: index[path] for path in index if path in placed}, placed, dtype
    )
    return T5(config, checkpoint.parameters(arrays), mesh, find_vocabulary(directory, vocabulary))


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
    step, directory = checkpoint.newest(path), paths.to_path(path)
    if step is not None:
        directory /= f'checkpoint_{step}'
    elif directory.name == 'checkpoint' and directory.is_file():
        directory = directory.parent
    checkpoint.verify(directory)
    if convert.is_hugging_face(directory):
        config, entries = convert.hugging_face_index(directory)
        return directory, dict(entries), config
    index, sizes = checkpoint.read_index(directory), read_settings(directory).get('model')
    try:
        return directory, index, model.T5Config(**sizes) if sizes else None
    except (ValueError, TypeError) as error:
        raise ValueError(f'{directory}/config.json: {error}') from error


def read_settings(directory: Any) -> dict[str, Any]:
    """config.json of a checkpoint of ours; where there is none only what its vocabulary is then."""
    file = directory / 'config.json'
    settings = convert.read_json(file) if file.is_file() else {}
    is_ours = all(isinstance(settings.get(name, {}), dict) for name in ('model', 'data'))
    settings = settings if is_ours and 'model' in settings else {}
    return settings | {'data': {'extra_ids': 100, 'vocabulary': ''} | settings.get('data', {})}


def find_vocabulary(directory: Any, name: str | Path | None = None) -> Any:
    """The one that `name` names ('bytes', a SentencePiece model or its folder), else the one beside a
    checkpoint, else None."""
    settings = read_settings(directory)['data']
    if 'bytes' in (name, not name and settings['vocabulary']):
        return data.ByteVocabulary()
    if name and not (file := data.vocabulary_file(paths.to_path(name))):
        words = "no file, nor a folder with spiece.model, nor 'bytes'"
        raise ValueError(f'vocabulary={str(name)!r}: {words}')
    if not name:
        beside = [directory / 'spiece.model', directory.parent / 'vocabulary.model']
        file = next((paths.own_file(file) for file in beside if file.is_file()), None)
    return data.SentencePieceVocabulary(file.read_bytes(), settings['extra_ids']) if file else None


def convert_checkpoint(source: str | Path, target: str | Path, form: str) -> Path:
    """Writes what `load` would open at `source` to the folder `target`, in its dtypes: 't5x' with whatever
    optimizer state there is, as `target`/checkpoint_STEP, or 'hf', parameters alone. Returns its path. Arrays
    are read as they are written."""
    target = paths.disk_path(target)
    directory, config, index = open_model(source)
    vocabulary = find_vocabulary(directory)
    pieces = vocabulary.model if vocabulary else b''
    if form == 'hf':
        arrays = checkpoint.parameters(index)
        convert.write_hugging_face(target, config, arrays, pieces or None)
        return target
    kept = target / 'vocabulary.model'
    if (target / 'lock').exists() or (kept.exists() and kept.read_bytes() != pieces):
        raise ValueError(f"{target} is a run's, or has another vocabulary: name another folder")
    tree = {'state/step': np.int32(0)} | index
    own = {name: read_settings(directory)['data'][name] for name in ('extra_ids', 'vocabulary')}
    files = {'config.json': json.dumps({'model': dataclasses.asdict(config), 'data': own}).encode()}
    written = checkpoint.save(target, int(convert.read_leaf(tree['state/step'])), tree, files)
    if pieces:
        kept.write_bytes(pieces)
    return written


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
    depths = (layers.count('encoder'), layers.count('decoder'))
    sizes = (emb_dim, num_heads, *depths, joined // num_heads, mlp_dim)
    return model.T5Config(
        *(vocab_size, 'float32', *sizes),
        mlp_activations=activations,
        logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
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
        self.first_sentinel = validation.first_sentinel
        c, factor = model.T5Config(**config.model), config.loss.loss_normalizing_factor
        normalizing_factor = loss.parse_normalizing_factor(factor)
        specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(c))

        def device_sums(params, batch):
            """loss.weighted_sums, and nats (no z-loss, no smoothing) of all targets and of those that
            are text: no sentinel, EOS or padding; each summed over the global batch."""
            weights_bT, divisor = loss.weights_and_divisor(batch, normalizing_factor)

            def part_sums(part):
                batch, weights_bT = part
                logits_bTv = model.apply(lambda: model.logits(c, batch), params)
                sums = loss.weighted_sums(logits_bTv, batch, weights_bT, divisor, config.loss)
                targets_bT = batch['decoder_target_tokens']
                nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
                text_bT = (targets_bT > data.EOS_ID) & (targets_bT < self.first_sentinel)
                sums['target_nats'] = (nats_bT * (targets_bT > 0)).sum()
                sums['text_nats'], sums['text_tokens'] = (nats_bT * text_bT).sum(), text_bT.sum()
                return sums

            sums = lax.map(part_sums, partition.cut_rows((batch, weights_bT), num_microbatches))
            return lax.psum(jax.tree.map(lambda x: x.sum(axis=0), sums), 'data')

        in_specs = (specs, partition.BATCH)
        self.sums = jax.jit(jax.shard_map(device_sums, mesh=mesh, in_specs=in_specs, out_specs=P()))

    def __call__(
        self, params: Mapping[str, jax.Array], stop: Callable[[int], int] = lambda count: 0
    ) -> dict[str, float] | None:
        """Return T5X's metrics, and nats per token of text and of all targets beside their unigram baselines.

        `stop` is called with the number of batches so far, alike in all processes. None where it gives anything
        but 0: the evaluation ended there.
        """
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

    @functools.cached_property
    def batches(self) -> list[dict[str, np.ndarray]]:
        """This process's rows. Made when first asked for: a small split of a large corpus takes a while."""
        batches = list(itertools.islice(self.validation, self.config.eval.steps))
        del self.validation  # and with it the documents that its lanes hold
        # Lanes end apart, but all processes must take the same number of steps.
        most = int(partition.from_processes(np.array([len(batches)])).max())
        empty = {name: np.zeros_like(x) for name, x in batches[0].items()}
        return batches + [empty] * (most - len(batches))

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
