"""A checkpoint as a model that one can call: `load`, `logits`, `score`, `generate`, `encode`.

    t5 = infer.load('runs/small')
    t5.generate(['The <extra_id_0> walks in <extra_id_1> park.'])

`predict_all`, `score_all` and `encode_all` take any number of examples. Source: T5X t5x/models.py.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

import checkpoint
import convert
import decode
import loss
import model
import own_model
import partition
import settings
from configs import base
from vocabulary import EOS_ID, PAD_ID, find_vocabulary, read_settings

# T5X's features, int32 [batch, length].
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
FEATURES = (*SEQUENCES, *SEGMENTS)
HUGGING_FACE_PADDING = -100  # of labels, which its loss leaves out
IGNORED_FEATURES = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')

MAX_LENGTH = 2**15  # of an answer; no device holds a larger cache of keys and values
LENGTH_MULTIPLE = 32  # lengths are padded to a multiple, because each length is compiled
SHORTEST_ROOM = 64  # tokens of an answer that the smallest program has room for; others double it
MAX_INPUT_LENGTH = 512  # of a text, in tokens, where the checkpoint does not say: T5's
RUN_SETTINGS = ('model.', 'data.', 'decode.', 'infer_eval.')  # that a run's checkpoint is used with
EXAMPLES_PER_CHUNK = 4096  # that `in_batches` sorts by length at a time


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _next_size(n: int, multiple: int) -> int:
    """Return `multiple` times the first of 1, 2, 3, 4, 6, 8, 12, 16 ... that reaches `n`.

    So there are few sizes to compile for, and at most a third is padding.
    """
    size = multiple
    while size < n:
        if size + size // 2 >= n and size > multiple:
            return size + size // 2
        size *= 2
    return size


def load(
    path: str | Path,
    vocabulary: str | Path | None = None,
    config: model.T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
    step: int | str = '',
    part: str = '',
) -> 'T5':
    """Open a checkpoint as a model.

    `path` is a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its prefix or
    folder) or a Hugging Face folder, on a disk or in a bucket; also of an encoder alone, which may be a single
    safetensors file with Hugging Face's names.
    `step` names another checkpoint of a workdir: a number, or 'best', by its `save.best_metric`.
    `vocabulary` is 'bytes', a SentencePiece model, or a folder that has one, such as a run or a checkpoint; else
    the checkpoint's or its run's counts, if there is one.
    `config` has the sizes; else the checkpoint's own config counts, else its shapes.
    `mesh` has the axes 'data' and 'model'; else one device has all.
    `dtype` is that of the parameters: 'float32', 'bfloat16', 'float16', or '' for the stored one.
    `part` 'encoder' opens the encoder alone: of the decoder nothing is read. 'whole' refuses an encoder.

    Only parameters are read: their moving average, where a run has computed one (`optimizer.ema_decay`). Raises ValueError, in one line, for what is no such checkpoint and for arguments
    that do not fit it, and OSError for files that may not be read.
    """
    dtype = _checked_dtype(dtype)
    if mesh is None:
        mesh = partition.make_mesh(1, 1, jax.devices()[:1])
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != set(partition.MESH_AXES):
        raise ValueError(
            f"mesh={_shortened(mesh)}: must have the axes 'data' and 'model': use partition.make_mesh(4, 2)"
        )
    if part not in convert.PARTS:
        raise ValueError(
            f"part={_shortened(part)}: must be 'encoder', 'whole', or '' for what the checkpoint has"
        )
    opened = convert.open_model(path, config, str(step), part)
    model = own_model.of(opened.config)
    model.check_mesh(opened.config, mesh)
    found = find_vocabulary(opened.directory, vocabulary)
    specs = partition.param_specs(model.PARAMETER_SPECS, model.shapes(opened.config))
    shardings = {}
    for name, sharding in partition.shardings(mesh, specs).items():
        shardings[f'target/{name}'] = sharding
    leaves = {name: leaf for name, leaf in opened.leaves.items() if name in shardings}
    arrays = checkpoint.restore(leaves, shardings, dtype)
    t5 = T5(opened.config, checkpoint.parameters(arrays), mesh, found)
    t5.max_input_length = input_length_of(opened.directory)
    if opened.note:
        logging.warning(opened.note)
    return t5


def input_length_of(directory: Any) -> int:
    """Return data.lengths.inputs of the run that saved a checkpoint, else T5's."""
    lengths = read_settings(directory)['data'].get('lengths', {})
    return lengths.get('inputs', MAX_INPUT_LENGTH)


def settings_of(directory: Any, changes: Mapping[str, Any]) -> ConfigDict:
    """Return the settings of the run that saved a checkpoint, else the defaults, with `changes`.

    `changes`: {'data.task': value}. The mesh and all that concerns training are not the run's. Nor
    is data.vocabulary, which the checkpoint brings.
    """
    config = base.get_config()
    stored = checkpoint.flatten(read_settings(directory))
    for key, _ in settings.leaves(config):
        name = key.replace('.', '/')
        if key.startswith(RUN_SETTINGS) and key != 'data.vocabulary' and name in stored:
            config.update_from_flattened_dict({key: stored[name]})
    config.update_from_flattened_dict(dict(changes))
    return config


class T5:
    """A checkpoint that one can call. `load` makes it.

    `config` has its sizes, `arrays` its parameters as {T5X's path: array}, `params` the same as nested dicts.

    Inputs and targets are either texts, to which EOS is added, or lists of token ids, which are taken as they
    are. All methods raise ValueError, in one line, for what is neither, for ids that the model has no embedding
    of, and for texts where the checkpoint brings no vocabulary.

    `max_input_length` is the number of tokens, EOS included, that `generate` takes of a text.
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
        self.max_input_length = MAX_INPUT_LENGTH
        self._logits = jax.jit(
            self._on_mesh(_logits, out_specs=P(partition.BATCH_AXES, None, 'model'))
        )
        # Each process has all scores and answers.
        self._everywhere = NamedSharding(mesh, P())
        self._scores = jax.jit(
            self._on_mesh(_scores, out_specs=partition.BATCH), out_shardings=self._everywhere
        )
        self._encodings = jax.jit(
            self._on_mesh(_encodings, out_specs=partition.BATCH), out_shardings=self._everywhere
        )
        self._generators: dict[Decoding, Callable] = {}
        # Only on a CPU it is worth the memory. An own model may read its kernels in other ways.
        self._is_transposed = mesh.devices.flat[0].platform == 'cpu' and not config.module
        self._step_arrays: Mapping[str, Any] = {}

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Return teacher-forced logits, float32 [batch, target length, vocab].

        `batch` has T5X's features as integers [batch, length]: `SEQUENCES`, and `SEGMENTS` if it is packed. Its
        size must divide by the mesh's 'data'. Raises ValueError for features that do not fit together.
        """
        self._check_decoder()
        return self._logits(self.arrays, self._features(batch))

    def score(self, inputs: Sequence, targets: Sequence) -> np.ndarray:
        """Return the log-likelihood of each target given its input, in nats, float32 [examples].

        It is T5X's score_batch without length normalization.
        """
        return self._score(inputs, targets)

    def _score(
        self,
        inputs: Sequence,
        targets: Sequence,
        num_rows: int = 0,
        round_up: Callable[[int, int], int] = _round_up,
    ) -> np.ndarray:
        """Return what `score` does, of a batch of at least `num_rows`."""
        self._check_decoder()
        inputs_bM = self._ids('inputs', inputs, num_rows=num_rows, round_up=round_up)
        targets_bT = self._ids('targets', targets, num_rows=num_rows, round_up=round_up)
        if len(inputs) != len(targets):
            raise ValueError(f'{len(inputs)} inputs for {len(targets)} targets: give one for each')
        batch = {
            'encoder_input_tokens': inputs_bM,
            'decoder_input_tokens': np.pad(targets_bT[:, :-1], ((0, 0), (1, 0))),
            'decoder_target_tokens': targets_bT,
        }
        scores_b = np.asarray(self._scores(self.arrays, partition.place_batch(self.mesh, batch)))
        return scores_b[: len(inputs)]  # without the padding rows

    def score_choices(
        self, inputs: Sequence, choices: Sequence[Sequence], num_rows: int = 0
    ) -> list[np.ndarray]:
        """Return the log-likelihoods of several targets of each input, which is encoded once.

        They are those of `score`: nats, float32 [choices] for each input. The batch has at least
        `num_rows` inputs, so that batches of that size and less share a program.
        """
        self._check_decoder()
        if len(inputs) != len(choices) or not all(map(len, choices)):
            raise ValueError(
                f'{len(inputs)} inputs and the choices of {len(choices)}: give each input one or more'
            )
        inputs_bM = self._ids('inputs', inputs, num_rows=num_rows, round_up=_next_size)
        num_choices = _next_size(max(map(len, choices)), 1)
        padded: list[Any] = []
        for of_input in choices:
            padded += [*of_input, *[of_input[0]] * (num_choices - len(of_input))]
        targets_cT = self._ids('choices', padded, round_up=_next_size)
        targets_rT = np.zeros((len(inputs_bM) * num_choices, targets_cT.shape[1]), np.int32)
        targets_rT[: len(padded)] = targets_cT[: len(padded)]
        batch = {
            'encoder_input_tokens': inputs_bM,
            'decoder_input_tokens': np.pad(targets_rT[:, :-1], ((0, 0), (1, 0))),
            'decoder_target_tokens': targets_rT,
        }
        scores_r = np.asarray(self._scores(self.arrays, partition.place_batch(self.mesh, batch)))
        found = []
        for i, of_input in enumerate(choices):
            first = i * num_choices
            found.append(scores_r[first : first + len(of_input)])
        return found

    def encode(
        self, inputs: Sequence, *, trim: bool = False, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the encoder's outputs of any number of inputs, in their order, and their mask.

        Outputs are float32 [examples, length, emb_dim], for the tokens with EOS, and 0 where the mask, bool
        [examples, length], is False: for padding. `batch_size` inputs of similar lengths are encoded at a time. A
        text of more than `max_input_length` tokens is refused; `trim` cuts it.
        """
        encoded = self._id_lists('inputs', self._within_length(inputs, trim))
        lengths = [len(ids) for ids in encoded]
        mask_bM = np.zeros((len(encoded), max(lengths)), bool)
        outputs_bMD = np.zeros((*mask_bM.shape, self.config.emb_dim), np.float32)
        examples = [Example(ids) for ids in encoded]
        for i, outputs_MD in enumerate(encode_all(self, examples, batch_size)):
            mask_bM[i, : lengths[i]] = np.asarray(encoded[i]) > 0
            outputs_bMD[i, : lengths[i]] = outputs_MD
        return outputs_bMD, mask_bM

    def _check_decoder(self) -> None:
        if self.config.num_decoder_layers == 0:
            raise ValueError(
                'this model is an encoder alone: it has no decoder to generate, score or compute logits with: call '
                "encode, or load a whole checkpoint, without part='encoder'"
            )

    def set_parameters(self, arrays: Mapping[str, Any]) -> None:
        """Take other parameters of the same shapes, for which nothing is compiled again."""
        self.arrays = arrays
        self.params = checkpoint.unflatten(arrays)
        self._step_arrays = {}

    def generate(
        self,
        inputs: Sequence,
        max_length: int = 128,
        *,
        beam_size: int = 1,
        temperature: float | Sequence[float] = 0.0,
        top_k: int = 0,
        top_p: float = 0.0,
        num_return: int = 1,
        alpha: float = 0.6,
        seed: int = 0,
        return_scores: bool = False,
        prompts: Sequence | None = None,
        trim: bool = False,
    ) -> Any:
        """Return the model's answers, each of at most `max_length` tokens.

        They are texts if the inputs are texts, else lists of ids without EOS. By default an answer
        has the most likely token at each position.

        `beam_size` above 1 searches for the most likely answers with so many beams. Their scores
        are divided by T5X's brevity penalty, ((5 + length) / 6)^`alpha`.
        `temperature` above 0 draws each token at this temperature, a number or one for each input,
        where `top_k` keeps the k most likely tokens, or `top_p` the most likely ones that together
        have at least this probability; 0 keeps all. The same `seed` gives the same answers.
        `num_return` above 1 gives a list of so many answers for each input, the best first: of the
        beams, or as many samples.
        `prompts` has a text or ids for each input that its answers begin with, None for one without.
        `return_scores` gives a pair (answers, scores): float32 [examples] or [examples,
        num_return], the log-likelihood of each answer in nats as `score` has it, without that of
        its prompt; of a beam search, divided by the penalty.
        A text of more than `max_input_length` tokens is refused; `trim` cuts it.
        """
        self._check_decoder()
        answers_per_example, scores = self.generate_tokens(
            self._within_length(inputs, trim),
            max_length,
            beam_size=beam_size,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            num_return=num_return,
            alpha=alpha,
            seed=seed,
            return_scores=return_scores,
            prompts=prompts,
        )
        answers = []
        for tokens_nT in answers_per_example:
            answers.append([self._answer(tokens_T, inputs[0]) for tokens_T in tokens_nT])
        if num_return == 1:
            answers = [of_example[0] for of_example in answers]
        if scores is None:
            return answers
        if num_return == 1:
            scores = scores[:, 0]
        return answers, scores

    def generate_tokens(
        self,
        inputs: Sequence,
        max_length: int = 128,
        *,
        beam_size: int = 1,
        temperature: float | Sequence[float] = 0.0,
        top_k: int = 0,
        top_p: float = 0.0,
        num_return: int = 1,
        alpha: float = 0.6,
        seed: int = 0,
        return_scores: bool = True,
        prompts: Sequence | None = None,
        numbers: Sequence[int] | None = None,
        num_rows: int = 0,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens of the answers that `generate` gives, and their scores.

        Tokens are int32 [examples, num_return, length], with EOS and 0 after it. Scores are float32
        [examples, num_return]; without `return_scores` they are None, which is a little faster. What
        is drawn for an input depends on the seed and on its number: `numbers` are those of the
        inputs, by default 0, 1, 2 ... The batch has at least `num_rows` rows, so that batches of that
        size and less share a program.
        """
        self._check_decoder()
        length = _checked_length(max_length)
        temperatures = _checked_temperatures(temperature)
        decoding = Decoding(
            beam_size=beam_size,
            is_random=bool((temperatures > 0).any()),
            top_k=top_k,
            top_p=top_p,
            num_return=num_return,
            alpha=alpha,
            return_scores=return_scores,
        )
        if top_k > self.config.vocab_size:
            raise ValueError(
                f'top_k={top_k}: must be at most model.vocab_size={self.config.vocab_size}; 0 keeps all'
            )
        _check_seed(seed)
        inputs_bM = self._ids('inputs', inputs, num_rows=num_rows, round_up=_next_size)
        row_b = np.arange(len(inputs_bM), dtype=np.int32)
        example_b = row_b.copy()
        if numbers is not None:
            example_b[: len(inputs)] = numbers
        arguments = {
            'inputs_bM': inputs_bM,
            'prompt_bT': self._prompts(prompts, len(inputs), len(row_b), length),
            # Padding rows take no token.
            'lengths_b': np.where(row_b < len(inputs), length, 0).astype(np.int32),
            'temperature_b': _temperatures_of_rows(temperatures, len(inputs), len(row_b)),
            'example_b': example_b,
        }
        decoded = self._decode(decoding, seed, arguments)
        # Without the padding rows.
        return jax.tree.map(lambda x: x[: len(inputs), :num_return], decoded)

    def _decode(
        self, decoding: 'Decoding', seed: int, arguments: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Run the program of `decoding`. Return tokens_bnT and scores_bn, the best first."""
        if self._is_transposed and not self._step_arrays:
            self._step_arrays = self._transpose(self.arrays)
        if decoding not in self._generators:
            self._generators[decoding] = self._compile_generator(decoding)
        generator = self._generators[decoding]
        placed = partition.place_batch(self.mesh, arguments)
        decoded = generator(self.arrays, self._step_arrays, np.uint32(seed), placed)
        return jax.tree.map(lambda x: np.asarray(x)[:, ::-1], decoded)

    def _within_length(self, inputs: Sequence, trim: bool) -> Sequence:
        """Return texts as ids, each of at most `max_input_length`; anything else as it is."""
        if not _are_texts(inputs):
            return inputs
        encoded = self._encode([str(text) for text in inputs])
        for i, ids in enumerate(encoded):
            if len(ids) <= self.max_input_length:
                continue
            if not trim:
                raise ValueError(
                    f'inputs[{i}] has {len(ids)} tokens, EOS included, and max_input_length={self.max_input_length}: '
                    'shorten it, cut it with trim=True, or set t5.max_input_length'
                )
            encoded[i] = [*ids[: self.max_input_length - 1], EOS_ID]
        return encoded

    def _answer(self, tokens_T: np.ndarray, example: Any) -> Any:
        """Return generated tokens in the form of an example: a text, or ids without EOS and padding."""
        if isinstance(example, str):
            return self.vocabulary.decode(tokens_T)
        return [int(i) for i in tokens_T if i > EOS_ID]

    def _prompts(
        self, prompts: Sequence | None, num_inputs: int, num_rows: int, length: int
    ) -> np.ndarray:
        """Return the prompts as int32 [num_rows, room for `length`], padded with zeros."""
        room = SHORTEST_ROOM
        while room < length:
            room *= 2
        prompt_bT = np.zeros((num_rows, room), np.int32)
        if prompts is None:
            return prompt_bT
        if isinstance(prompts, list | tuple):
            has_texts = any(isinstance(prompt, str) for prompt in prompts)
            nothing: Any = '' if has_texts else []
            prompts = [nothing if prompt is None else prompt for prompt in prompts]
        ids = self._ids('prompts', prompts, add_eos=False)
        if len(prompts) != num_inputs:
            raise ValueError(f'{len(prompts)} prompts for {num_inputs} inputs: give one for each')
        longest = int((ids > 0).sum(axis=1).max())
        if longest > length:
            raise ValueError(
                f'max_length={length}: must be at least {longest}, the tokens of the longest prompt'
            )
        prompt_bT[: len(ids), :longest] = ids[:, :longest]
        return prompt_bT

    @functools.cached_property
    def _transpose(self) -> Callable:
        """Return parameters -> the decoder's arrays with the kernels of a step transposed."""
        model = own_model.of(self.config)
        specs = model.step_specs(partition.param_specs(model.PARAMETER_SPECS, self.arrays))
        transpose = functools.partial(model.transpose_for_steps, self.config)
        return jax.jit(transpose, out_shardings=partition.shardings(self.mesh, specs))

    def _compile_generator(self, decoding: 'Decoding') -> Callable:
        """Return (parameters, parameters of steps, seed, arguments by rows) -> tokens, scores."""
        model = own_model.of(self.config)
        specs = partition.param_specs(model.PARAMETER_SPECS, self.arrays)
        step_specs = model.step_specs(specs) if self._is_transposed else {}
        mapped = jax.shard_map(
            functools.partial(_generate, self.config, decoding),
            mesh=self.mesh,
            in_specs=(specs, step_specs, P(), partition.BATCH),
            out_specs=partition.BATCH,
        )
        return jax.jit(own_model.traced(self.config, mapped), out_shardings=self._everywhere)

    def _on_mesh(self, device_function: Callable, out_specs: P) -> Callable:
        """Return `device_function` on the mesh: (parameters, batch split by rows) -> output."""
        model = own_model.of(self.config)
        param_specs = partition.param_specs(model.PARAMETER_SPECS, self.arrays)
        mapped = jax.shard_map(
            functools.partial(device_function, self.config),
            mesh=self.mesh,
            in_specs=(param_specs, partition.BATCH),
            out_specs=out_specs,
        )
        return own_model.traced(self.config, mapped)

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

    def _ids(
        self,
        name: str,
        examples: Sequence,
        add_eos: bool = True,
        num_rows: int = 0,
        round_up: Callable[[int, int], int] = _round_up,
    ) -> np.ndarray:
        """Return examples as int32 [rows, length], padded with zeros, of `num_rows` or more.

        The rows divide by the mesh's 'data', the length by LENGTH_MULTIPLE: `round_up(n, multiple)`
        says how many there are.
        """
        encoded = self._id_lists(name, examples, add_eos)
        num_rows = max(len(encoded), num_rows)
        num_rows = round_up(num_rows, partition.axes_size(self.mesh, partition.BATCH_AXES))
        length = round_up(max(map(len, encoded)), LENGTH_MULTIPLE)
        ids = np.zeros((num_rows, length), np.int32)
        for i, example in enumerate(encoded):
            ids[i, : len(example)] = example
        return ids

    def _id_lists(self, name: str, examples: Sequence, add_eos: bool = True) -> list[Any]:
        """Return the ids of each example. Raises ValueError for what is no list of texts or of ids."""
        is_list = isinstance(examples, list | tuple | np.ndarray | jax.Array)
        if not is_list or not getattr(examples, 'ndim', 1) or not len(examples):
            raise ValueError(
                f'{name}={_shortened(examples)} is no list of texts or of ids: give one or more'
            )
        encoded: list[Any]
        is_text = [isinstance(example, str) for example in examples]
        if all(is_text):
            encoded = self._encode([str(text) for text in examples])
            if not add_eos:
                encoded = [ids[:-1] for ids in encoded]
        elif any(is_text):
            raise ValueError(
                f'{name}[{is_text.index(True)}] is a text, {name}[{is_text.index(False)}] is not: give either '
                'texts or ids'
            )
        else:
            encoded = [_to_ids(f'{name}[{i}]', example) for i, example in enumerate(examples)]
        for i, ids in enumerate(encoded):
            if np.any(ids):
                self._check_ids(f'{name}[{i}]', np.asarray(ids))
            elif add_eos:  # a prompt may be empty
                raise ValueError(
                    f'{name}[{i}]={_shortened(examples[i])} has no ids but padding: give one or more, 1 is EOS'
                )
        return encoded

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
        if (ids == HUGGING_FACE_PADDING).any():
            raise ValueError(
                f'{name} has {HUGGING_FACE_PADDING}, with which Hugging Face pads labels: padding is 0 here: '
                f'give np.where(labels == {HUGGING_FACE_PADDING}, 0, labels)'
            )
        for i in (int(ids.min()), int(ids.max())):
            if not 0 <= i < vocab_size:
                raise ValueError(
                    f'{name} has id {i}: model.vocab_size={vocab_size} has no such rows, only 0 to '
                    f'{vocab_size - 1}: use its own vocabulary'
                )


# Any number of examples.


class Example(NamedTuple):
    """What is predicted or scored: ids, EOS included."""

    inputs: Sequence[int] | np.ndarray
    targets: Sequence[Any] | np.ndarray = ()  # that are scored; or the ids of several choices
    number: int = 0  # what is drawn depends on the seed and on this number


class Answer(NamedTuple):
    """The answers to an example, the best first: their ids, with EOS if they have one, and scores.

    `scores` is empty where the options of decoding have return_scores=False.
    """

    tokens: list[list[int]]
    scores: list[float]


Result = TypeVar('Result')


def predict_all(
    t5: T5,
    examples: Iterable[Example],
    batch_size: int,
    options: Mapping[str, Any],
    progress: Callable[[int], Any] = lambda count: None,
) -> Iterator[Answer]:
    """Yield the answers to examples, in their order.

    `options` are arguments of `T5.generate_tokens`. `progress` is called with the number of examples
    of each batch. See `in_batches`.
    """

    def predict(batch: Sequence[Example], num_rows: int) -> Iterator[Answer]:
        tokens_bnT, scores_bn = t5.generate_tokens(
            [example.inputs for example in batch],
            numbers=[example.number for example in batch],
            num_rows=num_rows,
            **options,
        )
        for i, tokens_nT in enumerate(tokens_bnT):
            yield Answer(
                tokens=[before_padding(tokens_T) for tokens_T in tokens_nT],
                scores=[] if scores_bn is None else scores_bn[i].tolist(),
            )

    return in_batches(predict, examples, batch_size, progress)


def score_all(
    t5: T5,
    examples: Iterable[Example],
    batch_size: int,
    progress: Callable[[int], Any] = lambda count: None,
) -> Iterator[float]:
    """Yield the log-likelihood of the targets of examples, as `T5.score` has it, in their order."""

    def score(batch: Sequence[Example], num_rows: int) -> Iterator[float]:
        inputs = [example.inputs for example in batch]
        targets = [example.targets for example in batch]
        yield from t5._score(inputs, targets, num_rows, round_up=_next_size).tolist()

    return in_batches(score, examples, batch_size, progress)


def encode_all(
    t5: T5,
    examples: Iterable[Example],
    batch_size: int,
    pool: str = 'none',
    progress: Callable[[int], Any] = lambda count: None,
) -> Iterator[np.ndarray]:
    """Yield the encoder's outputs of the inputs of examples, in their order: float32 [tokens, emb_dim].

    `pool='mean'` yields their mean over the tokens that are not padding, EOS included, [emb_dim].
    """

    def encode(batch: Sequence[Example], num_rows: int) -> Iterator[np.ndarray]:
        inputs_bM = t5._ids(
            'inputs',
            [example.inputs for example in batch],
            num_rows=num_rows,
            round_up=_next_size,
        )
        placed = partition.place_batch(t5.mesh, {'encoder_input_tokens': inputs_bM})
        encoded_bMD = np.asarray(t5._encodings(t5.arrays, placed))
        for i, example in enumerate(batch):
            if pool == 'mean':
                yield encoded_bMD[i, inputs_bM[i] > 0].mean(axis=0)
            else:
                yield encoded_bMD[i, : len(example.inputs)].copy()  # without the padding

    return in_batches(encode, examples, batch_size, progress)


def in_batches(
    compute: Callable[[Sequence[Example], int], Iterable[Result]],
    examples: Iterable[Example],
    batch_size: int,
    progress: Callable[[int], Any],
) -> Iterator[Result]:
    """Yield the results of `compute(batch, number of rows)`, in the order of the examples.

    Chunks of examples are sorted by length, so that a batch has little padding; the longest come
    first, because they need the most memory. A chunk is all that is held. Of a chunk of one batch or
    more, all batches have the same number of rows, so that few programs are compiled.
    """
    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, EXAMPLES_PER_CHUNK)):
        order = sorted(range(len(chunk)), key=lambda i: _length_key(chunk[i]), reverse=True)
        num_rows = min(batch_size, len(chunk))
        results: dict[int, Result] = {}
        for start in range(0, len(chunk), batch_size):
            indices = order[start : start + batch_size]
            computed = compute([chunk[i] for i in indices], num_rows)
            results.update(zip(indices, computed, strict=True))
            progress(len(indices))
        for i in range(len(chunk)):
            yield results[i]


def _length_key(example: Example) -> tuple[int, int, int]:
    """Return what examples are sorted by: first the length of the inputs that is compiled for."""
    compiled_length = _next_size(len(example.inputs), LENGTH_MULTIPLE)
    return compiled_length, len(example.targets), len(example.inputs)


def before_padding(tokens_T: np.ndarray) -> list[int]:
    """Return ids up to the first padding."""
    return list(itertools.takewhile(lambda i: i != PAD_ID, tokens_T.tolist()))


# What one device computes, inside of `jax.shard_map`. model.py defines the suffixes.


def _logits(config: model.T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    model = own_model.of(config)
    return model.apply(lambda: model.logits(config, batch), params)


def _scores(config: model.T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    logits_bTv = _logits(config, params, batch)
    targets_bT = batch['decoder_target_tokens']
    nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
    return -(nats_bT * (targets_bT > 0)).sum(axis=-1)


def _encodings(config: model.T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    model = own_model.of(config)
    inputs_bM = batch['encoder_input_tokens']
    encoded_bMD = model.apply(lambda: model.encode(config, inputs_bM), params)
    return jnp.where(inputs_bM[..., None] > 0, encoded_bMD.astype(jnp.float32), 0)


def _generate(
    config: model.T5Config,
    decoding: 'Decoding',
    params: Mapping,
    step_params: Mapping,
    seed: jax.Array,
    arguments: Mapping,
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens_bnT and scores_bn, the best last; without `return_scores` None for scores."""
    num_decodes = max(decoding.beam_size, decoding.num_return)
    is_beam_search = decoding.beam_size > 1
    inputs_bM = arguments['inputs_bM']
    model = own_model.of(config)
    cache = model.apply(
        lambda: model.start_decoding(config, inputs_bM, 0, num_decodes, is_beam_search), params
    )

    def step(tokens_r, cache):
        if step_params:
            f = functools.partial(model.decode_step, config, tokens_r, cache, transposed=True)
            return model.apply(f, step_params)
        return model.apply(lambda: model.decode_step(config, tokens_r, cache), params)

    if is_beam_search:
        tokens_bnT, scores_bn = decode.beam_search(
            step,
            model.reorder_beams,
            cache,
            arguments['prompt_bT'],
            num_beams=num_decodes,
            alpha=decoding.alpha,
            lengths_b=arguments['lengths_b'],
            eos_id=EOS_ID,
            grow=model.grow_cache,
        )
        return tokens_bnT, scores_bn if decoding.return_scores else None
    rows = {name: jnp.repeat(x, num_decodes, axis=0) for name, x in arguments.items()}
    choose: decode.Choose = decode.most_likely
    if decoding.is_random:
        choose = _random_choice(decoding, seed, rows, num_decodes)
    tokens_rT, scores_r = decode.sample(
        step,
        cache,
        rows['prompt_bT'],
        choose,
        lengths_r=rows['lengths_b'],
        eos_id=EOS_ID,
        grow=model.grow_cache,
    )
    tokens_bnT = tokens_rT.reshape(-1, num_decodes, tokens_rT.shape[1])
    scores_bn = scores_r.reshape(-1, num_decodes)
    if num_decodes > 1:
        scores_bn, order_bn = decode.best_last(scores_bn, num_decodes)
        tokens_bnT = decode.pick(tokens_bnT, order_bn)
    # XLA leaves scores that are not returned out of all steps.
    return tokens_bnT, scores_bn if decoding.return_scores else None


def _random_choice(
    decoding: 'Decoding', seed: jax.Array, rows: Mapping, num_decodes: int
) -> decode.Choose:
    """Return the function that draws tokens, with a key for each row: of its example and decode."""
    decode_r = jnp.arange(len(rows['example_b'])) % num_decodes
    fold_in = jax.vmap(jax.random.fold_in)
    keys_b = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), rows['example_b'])
    return decode.random_tokens(
        fold_in(keys_b, decode_r),
        rows['temperature_b'],
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        rescale_log_probs=False,
    )


# What users give.


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The options of `T5.generate` that a program is compiled for. Raises ValueError."""

    beam_size: int
    is_random: bool  # a temperature is above 0
    top_k: int
    top_p: float
    num_return: int
    alpha: float
    return_scores: bool

    @classmethod
    def of_settings(cls, config: Any) -> 'Decoding':
        """Return the options that config.decode sets. Raises ValueError where they do not fit."""
        return cls(
            beam_size=config.beam_size,
            is_random=config.temperature > 0,
            top_k=config.top_k,
            top_p=config.top_p,
            num_return=config.num_return,
            alpha=config.alpha,
            return_scores=config.return_scores,
        )

    def __post_init__(self):
        for name in ('beam_size', 'top_k', 'top_p', 'num_return', 'alpha'):
            value = getattr(self, name)
            limits = settings.RANGES[f'decode.{name}']
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not is_number or not limits.holds(value):
                raise ValueError(f'{name}={_shortened(value)}: must be {limits}')
        for name in ('beam_size', 'top_k', 'num_return'):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer):
                raise ValueError(f'{name}={value}: must be a whole number')
        if self.beam_size > 1 and self.is_random:
            raise ValueError(
                f'beam_size={self.beam_size} with a temperature above 0: a beam search draws nothing: set '
                'temperature=0.0 to search, or beam_size=1 to sample'
            )
        for name in ('top_k', 'top_p'):
            if getattr(self, name) and not self.is_random:
                raise ValueError(
                    f'{name}={getattr(self, name)} with temperature=0.0: it limits what is drawn, and nothing is: '
                    f'set temperature=1.0 to sample, or {name}=0'
                )
        if self.top_k and self.top_p:
            raise ValueError(
                f'top_k={self.top_k} with top_p={self.top_p}: only one of them may limit what is drawn: set the '
                'other to 0'
            )
        if self.beam_size > 1 and self.num_return > self.beam_size:
            raise ValueError(
                f'num_return={self.num_return}: must be at most beam_size={self.beam_size}, the answers that a '
                'search finds: set a larger beam_size'
            )
        if self.num_return > 1 and self.beam_size == 1 and not self.is_random:
            raise ValueError(
                f'num_return={self.num_return} with beam_size=1 and temperature=0.0: all answers would be alike: '
                f'set beam_size={self.num_return} to search, or temperature=1.0 to sample'
            )


def decoding_options(config: Any) -> dict[str, Any]:
    """Return the arguments of `T5.generate_tokens` that config.decode sets."""
    options = config.to_dict()
    del options['batch_size']
    return options


def _checked_length(max_length: Any) -> int:
    """Return a valid max_length."""
    is_number = isinstance(max_length, int | np.integer) and not isinstance(max_length, bool)
    if not is_number or not 1 <= max_length <= MAX_LENGTH:
        raise ValueError(
            f'max_length={max_length!r}: must be a number of tokens from 1 to {MAX_LENGTH}'
        )
    return int(max_length)


def _check_seed(seed: Any) -> None:
    limits = settings.RANGES['decode.seed']
    is_number = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_number or not limits.holds(seed):
        raise ValueError(f'seed={_shortened(seed)}: must be a whole number, {limits}')


def _checked_temperatures(temperature: Any) -> np.ndarray:
    """Return a temperature, [], or one for each input, [examples]; float32."""
    values = np.asarray(_to_array(temperature))
    limits = settings.RANGES['decode.temperature']
    is_number = values.dtype.kind in 'iuf' and values.ndim <= 1 and values.size > 0
    if not is_number or not all(limits.holds(float(x)) for x in values.flat):
        raise ValueError(
            f'temperature={_shortened(temperature)}: must be a number, or one for each input, {limits}'
        )
    return values.astype(np.float32)


def _temperatures_of_rows(temperatures: np.ndarray, num_inputs: int, num_rows: int) -> np.ndarray:
    """Return the temperature of each row, float32 [rows]."""
    if temperatures.ndim == 1 and len(temperatures) != num_inputs:
        raise ValueError(
            f'{len(temperatures)} temperatures for {num_inputs} inputs: give one for each, or a number'
        )
    temperature_b = np.ones(num_rows, np.float32)
    temperature_b[:num_inputs] = temperatures
    return temperature_b


def _check_names(batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless a batch has the features that it needs, and no unknown one."""
    if not isinstance(batch, Mapping):
        raise ValueError(f'a {type(batch).__name__} is no batch: give a dict of T5X features')
    if 'labels' in batch:
        raise ValueError(
            "the batch has 'labels', as Hugging Face's have: the features are T5X's: give "
            'encoder_input_tokens=input_ids, decoder_target_tokens=np.where(labels == -100, 0, labels), and as '
            'decoder_input_tokens these targets moved right by one, a 0 in front'
        )
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


def _are_texts(examples: Any) -> bool:
    """Return whether examples are a list of texts."""
    if isinstance(examples, np.ndarray):
        return examples.ndim == 1 and examples.dtype.kind == 'U'
    return isinstance(examples, list | tuple) and all(isinstance(x, str) for x in examples)


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
    return ids


def _to_array(value: Any) -> Any:
    """Return `value` as an array; an array of None where it is lists of several lengths."""
    if isinstance(value, jax.Array):
        return value
    try:
        return np.asarray(value)
    except (ValueError, TypeError):
        return np.asarray(None)


def _shortened(value: Any) -> str:
    """Return `value` as an error message shows it, in one line of at most 60 characters."""
    text = ' '.join(repr(value).split())
    if len(text) > 60:
        return f'{text[:57]}...'
    return text
