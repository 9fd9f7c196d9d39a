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

import checkpoint
import decode
import formats.open
import kernels
import loss
import model
import partition
from configs import check
from formats import own_model
from model import T5Config
from vocabulary import EOS_ID, find_vocabulary

# T5X's features, int32 [batch, length].
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
FEATURES = (*SEQUENCES, *SEGMENTS)
IGNORED_FEATURES = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')

LENGTH_MULTIPLE = 32  # lengths are padded to a multiple, because each length is compiled
SHORTEST_ROOM = 64  # tokens of an answer that the smallest program has room for
MAX_INPUT_LENGTH = 512  # of a text, in tokens, where the checkpoint does not say: T5's
EXAMPLES_PER_CHUNK = 4096  # that `in_batches` sorts by length at a time


def room_for(length: int) -> int:
    """Return the positions that programs have for answers of `length` tokens: a power of two."""
    return max(SHORTEST_ROOM, 1 << (length - 1).bit_length())


def next_size(n: int, multiple: int) -> int:
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
    config: T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
    step: int | str = '',
    part: str = '',
) -> 'T5':
    """Open a checkpoint as a model. Only its parameters are read; their average, where a run has one.

    `path`: a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its
    prefix or folder) or a Hugging Face folder, on a disk or in a bucket; also of an encoder alone,
    which may be a single safetensors file with Hugging Face's names.
    `step`: another checkpoint of a workdir: a number, or 'best', by its `save.best_metric`.
    `vocabulary`: 'bytes', a SentencePiece model, or a folder that has one, such as a run or a
    checkpoint; by default the checkpoint's or its run's.
    `config`: the sizes; by default the checkpoint's own config, else its shapes.
    `mesh`: of partition.make_mesh, whose 'fsdp' splits inputs alone; by default one device has all.
    `dtype` of the parameters: 'float32', 'bfloat16', 'float16', or '' for the stored one.
    `part`: 'encoder' reads nothing of the decoder, 'whole' refuses an encoder.

    Raises ValueError for what is no such checkpoint and for arguments that do not fit it, and
    OSError for files that may not be read.
    """
    dtype = getattr(dtype, '__name__', getattr(dtype, 'name', dtype))  # such as jnp.bfloat16
    _check_choice('dtype', dtype, check.declared()['restore.dtype'].choices)
    _check_choice('part', part, formats.open.PARTS)
    if mesh is None:
        mesh = partition.make_mesh(data=1)
    if not isinstance(mesh, Mesh) or set(mesh.axis_names) != set(partition.MESH_AXES):
        raise ValueError(
            f'mesh={_shortened(mesh)}: must have the axes {", ".join(partition.MESH_AXES)}: use '
            'partition.make_mesh(data=4, model=2)'
        )
    if config is not None:
        config = own_model.complete(config)
    opened = formats.open.open_model(path, config, str(step), part)
    model.check_mesh(opened.config, mesh)
    found = find_vocabulary(opened.directory, vocabulary)
    specs = partition.gathered(model.param_specs(opened.config))
    shardings = {f'target/{name}': x for name, x in partition.shardings(mesh, specs).items()}
    leaves = {name: leaf for name, leaf in opened.leaves.items() if name in shardings}
    arrays = checkpoint.restore(leaves, shardings, dtype)
    t5 = T5(opened.config, checkpoint.parameters(arrays), mesh, found)
    lengths = check.read_stored(opened.directory).get('data', {}).get('lengths', {})
    t5.max_input_length = lengths.get('inputs', MAX_INPUT_LENGTH)
    if opened.note:
        logging.warning(opened.note)
    return t5


class T5:
    """A checkpoint that one can call. `load` makes it.

    `config` has its sizes, `arrays` its parameters as {T5X's path: array}, `params` the same as nested
    dicts.

    Inputs and targets are texts, to which EOS is added, or lists of token ids, which are taken as
    they are. All methods raise ValueError for what is neither, for ids that the model has no
    embedding of, and for texts where the checkpoint brings no vocabulary. `max_input_length` is the
    number of tokens, EOS included, that `generate` and `encode` take of a text.
    """

    def __init__(
        self,
        config: T5Config,
        arrays: Mapping[str, Any],
        mesh: Mesh,
        vocabulary: Any = None,
    ):
        # A scan over layers is for training: it copies the parameters.
        self.config = dataclasses.replace(config, scan_layers=False)
        self.mesh = mesh
        self.vocabulary = vocabulary
        self.max_input_length = MAX_INPUT_LENGTH
        self._hold(arrays)
        logits_spec = P(partition.BATCH_AXES, None, 'model')
        self._logits = self._compile(_logits, out_specs=logits_spec, out_shardings=None)
        self._scores = self._compile(_scores)
        self._encodings = self._compile(_encodings)
        self._generators: dict[Decoding, Callable] = {}

    def set_parameters(self, arrays: Mapping[str, Any]) -> None:
        """Take other parameters of the same shapes, for which nothing is compiled again.

        They are gathered over 'fsdp', once for all calls.
        """
        if self.mesh.shape['fsdp'] > 1:
            arrays = jax.device_put(arrays, partition.shardings(self.mesh, self._specs(arrays)))
        self._hold(arrays)

    def _hold(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays
        self.params = checkpoint.unflatten(arrays)
        self._decoding_arrays: Mapping[str, Any] = {}

    def _specs(self, arrays: Mapping[str, Any]) -> dict[str, P]:
        specs = partition.param_specs(dict(self.config.modules.specs), arrays)
        return kernels.specs_of(arrays, partition.gathered(specs))

    def _compile(
        self,
        device_function: Callable,
        in_specs: tuple = (partition.BATCH,),
        out_specs: P = partition.BATCH,
        **options: Any,
    ) -> Callable:
        """Return (parameters, *inputs) -> output on the mesh; each process has the whole output."""
        param_specs = self._specs(self._decoding_arrays or self.arrays)
        mapped = jax.shard_map(
            functools.partial(device_function, self.config),
            mesh=self.mesh,
            in_specs=(param_specs, *in_specs),
            out_specs=out_specs,
        )
        options = {'out_shardings': NamedSharding(self.mesh, P())} | options
        return jax.jit(mapped, **options)

    def logits(self, batch: Mapping[str, Any]) -> jax.Array:
        """Return teacher-forced logits, float32 [batch, target length, vocab].

        `batch` has T5X's features as integers [batch, length]: `SEQUENCES`, and `SEGMENTS` if it is packed. Its
        size must divide by the mesh's 'data' * 'fsdp'. Raises ValueError for features that do not fit together.
        """
        self._check_decoder()
        return self._logits(self.arrays, self._features(batch))

    def score(self, inputs: Sequence, targets: Sequence) -> np.ndarray:
        """Return the log-likelihood of each target given its input, in nats, float32 [examples].

        It is T5X's score_batch without length normalization.
        """
        self._check_decoder()
        inputs = self._id_lists('inputs', inputs)
        targets = self._id_lists('targets', targets)
        _check_one_each('targets', targets, inputs)
        return np.concatenate(self.score_choices(inputs, [[ids] for ids in targets]))

    def score_choices(
        self, inputs: Sequence, choices: Sequence[Sequence], num_rows: int = 0
    ) -> list[np.ndarray]:
        """Return the log-likelihoods of several targets of each input, which is encoded once.

        They are those of `score`: nats, float32 [choices] for each input. The batch has at least
        `num_rows` inputs, so that batches of that size and less share a program.
        """
        self._check_decoder()
        inputs_bM = self._ids('inputs', inputs, num_rows=num_rows)
        _check_one_each('choices', choices, inputs)
        counts = np.array([len(of_input) for of_input in choices])
        targets_cT = self._ids('choices', list(itertools.chain(*choices)))
        num_choices = next_size(int(counts.max()), 1)
        is_choice_bc = np.arange(num_choices) < counts[:, None]
        targets_bcT = np.zeros((len(inputs_bM), num_choices, targets_cT.shape[1]), np.int32)
        targets_bcT[: len(inputs)][is_choice_bc] = targets_cT[: counts.sum()]
        targets_rT = targets_bcT.reshape(-1, targets_cT.shape[1])
        batch = {
            'encoder_input_tokens': inputs_bM,
            'decoder_input_tokens': np.pad(targets_rT[:, :-1], ((0, 0), (1, 0))),
            'decoder_target_tokens': targets_rT,
        }
        scores_r = self._scores(self.arrays, partition.place_batch(self.mesh, batch))
        scores_bc = np.asarray(scores_r).reshape(-1, num_choices)
        return [scores_bc[i, :count] for i, count in enumerate(counts)]

    def encode(
        self, inputs: Sequence, *, trim: bool = False, batch_size: int = 32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the encoder's outputs of any number of inputs, in their order, and their mask.

        Outputs are float32 [examples, length, emb_dim], with EOS's, and 0 where the mask, bool [examples, length], is
        False. A text of more than `max_input_length` tokens is refused; `trim` cuts it.
        """
        encoded = self._id_lists('inputs', self._within_length(inputs, trim))
        mask_bM = np.zeros((len(encoded), max(map(len, encoded))), bool)
        outputs_bMD = np.zeros((*mask_bM.shape, self.config.emb_dim), np.float32)
        examples = [Example(ids) for ids in encoded]
        for i, outputs_MD in enumerate(encode_all(self, examples, batch_size)):
            mask_bM[i, : len(encoded[i])] = encoded[i] > 0
            outputs_bMD[i, : len(encoded[i])] = outputs_MD
        return outputs_bMD, mask_bM

    def generate(
        self,
        inputs: Sequence,
        max_length: int = 128,
        *,
        return_scores: bool = False,
        trim: bool = False,
        **options: Any,
    ) -> Any:
        """Return the model's answers, each of at most `max_length` tokens.

        They are texts if the inputs are texts, else lists of ids without EOS. By default an answer
        has the most likely token at each position. The options and their defaults:

        `beam_size` (1) above 1 searches for the most likely answers with so many beams. Their
        scores are divided by T5X's brevity penalty, ((5 + length) / 6)^`alpha` (0.6).
        `temperature` (0.0) above 0 draws each token at this temperature, a number or one for each
        input, where `top_k` (0) keeps the k most likely tokens, or `top_p` (0.0) the most likely
        ones that together have at least this probability; 0 keeps all. The same `seed` (0) gives
        the same answers.
        `num_return` (1) above 1 gives a list of so many answers for each input, the best first: of
        the beams, or as many samples.
        `prompts` has a text or ids for each input that its answers begin with, or None.
        `return_scores` gives a pair (answers, scores): float32 [examples] or [examples,
        num_return], the log-likelihood of each answer in nats as `score` has it, without that of
        its prompt; of a beam search, divided by the penalty.
        A text of more than `max_input_length` tokens is refused; `trim` cuts it.
        """
        are_texts = _are_texts(inputs)
        ids = self._within_length(inputs, trim)
        tokens_bnT, scores_bn = self.generate_tokens(
            ids, max_length, return_scores=return_scores, **options
        )

        def answer(tokens_T: np.ndarray) -> Any:
            if are_texts:
                return self.vocabulary.decode(tokens_T)
            return tokens_T[tokens_T > EOS_ID].tolist()

        answers: list[Any] = [list(map(answer, tokens_nT)) for tokens_nT in tokens_bnT]
        is_single = tokens_bnT.shape[1] == 1
        if is_single:
            answers = [of_input[0] for of_input in answers]
        if scores_bn is None:
            return answers
        if is_single:
            scores_bn = scores_bn[:, 0]
        return answers, scores_bn

    def generate_tokens(
        self,
        inputs: Sequence,
        max_length: int = 128,
        *,
        temperature: float | Sequence[float] = 0.0,
        seed: int = 0,
        prompts: Sequence | None = None,
        numbers: Sequence[int] | None = None,
        num_rows: int = 0,
        **options: Any,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the tokens of the answers that `generate` gives, and their scores.

        Tokens are int32 [examples, num_return, length], with EOS and 0 after it. Scores are float32
        [examples, num_return]; without `return_scores` they are None, which is a little faster.
        What is drawn for an input depends on the seed and on its number: `numbers`, by default 0, 1,
        2 ... The batch has at least `num_rows` rows, so that those of that size and less share a program.
        """
        self._check_decoder()
        _check_number('max_length', max_length)
        _check_number('seed', seed)
        temperatures = np.ravel(_to_array(temperature))
        for value in temperatures.tolist():
            _check_number('temperature', value)
        decoding = Decoding(is_random=bool((temperatures > 0).any()), **options)
        inputs_bM = self._ids('inputs', inputs, num_rows=num_rows)
        temperature_b = np.ones(len(inputs_bM), np.float32)
        if np.ndim(temperature):
            _check_one_each('temperature', temperatures, inputs)
        temperature_b[: len(inputs)] = temperatures
        row_b = np.arange(len(inputs_bM), dtype=np.int32)
        example_b = row_b.copy()
        if numbers is not None:
            example_b[: len(inputs)] = numbers
        arguments = {
            'inputs_bM': inputs_bM,
            'prompt_bT': self._prompts(prompts, inputs, len(row_b), int(max_length)),
            # Padding rows take no token.
            'lengths_b': np.where(row_b < len(inputs), max_length, 0).astype(np.int32),
            'temperature_b': temperature_b,
            'example_b': example_b,
        }
        if not self._decoding_arrays:
            dtypes = model.step_kernels(self.config, self.arrays)
            columns = kernels.for_decoding(self.mesh, self.arrays, dtypes)
            self._decoding_arrays = {**self.arrays, **columns}
        if decoding not in self._generators:
            device_generate = functools.partial(_generate, decoding)
            specs = (P(), partition.BATCH)
            self._generators[decoding] = self._compile(device_generate, specs)
        placed = partition.place_batch(self.mesh, arguments)
        decoded = self._generators[decoding](self._decoding_arrays, np.uint32(seed), placed)
        best_first = jax.tree.map(lambda x: np.asarray(x)[:, ::-1], decoded)
        return jax.tree.map(lambda x: x[: len(inputs), : decoding.num_return], best_first)

    def _prompts(
        self, prompts: Sequence | None, inputs: Sequence, num_rows: int, length: int
    ) -> np.ndarray:
        """Return the prompts as int32 [num_rows, room for `length`], padded with zeros."""
        prompt_bT = np.zeros((num_rows, room_for(length)), np.int32)
        if prompts is None:
            return prompt_bT
        if isinstance(prompts, list | tuple):
            has_texts = any(isinstance(prompt, str) for prompt in prompts)
            nothing: Any = '' if has_texts else []
            prompts = [nothing if prompt is None else prompt for prompt in prompts]
        ids = self._ids('prompts', prompts, is_prompt=True)
        _check_one_each('prompts', prompts, inputs)
        has_gap = ((ids[:, :-1] == 0) & (ids[:, 1:] > 0)).any(axis=1)
        if has_gap.any():
            raise ValueError(
                f'prompts[{has_gap.argmax()}]: 0 is padding, so leave it out before a token'
            )
        longest = int((ids > 0).sum(axis=1).max())
        if longest > length:
            raise ValueError(
                f'max_length={length}: must be at least {longest}, the tokens of the longest prompt'
            )
        prompt_bT[: len(ids), :longest] = ids[:, :longest]
        return prompt_bT

    def _within_length(self, inputs: Sequence, trim: bool) -> Sequence:
        """Return texts as ids, each of at most `max_input_length`; anything else as it is."""
        if not _are_texts(inputs):
            return inputs
        encoded = self._encode(inputs)
        for i, ids in enumerate(encoded):
            if len(ids) > self.max_input_length and not trim:
                raise ValueError(
                    f'inputs[{i}] has {len(ids)} tokens, EOS included, and max_input_length='
                    f'{self.max_input_length}: cut it with trim=True, or set t5.max_input_length'
                )
        return [[*ids[:-1][: self.max_input_length - 1], EOS_ID] for ids in encoded]

    def _ids(
        self, name: str, examples: Sequence, is_prompt: bool = False, num_rows: int = 0
    ) -> np.ndarray:
        """Return examples as int32 [rows, length], padded with 0 to sizes that `next_size` gives."""
        encoded = self._id_lists(name, examples, is_prompt)
        num_rows = max(len(encoded), num_rows)
        num_rows = next_size(num_rows, partition.axes_size(self.mesh, partition.BATCH_AXES))
        length = next_size(max(map(len, encoded)), LENGTH_MULTIPLE)
        ids = np.zeros((num_rows, length), np.int32)
        for i, example in enumerate(encoded):
            ids[i, : len(example)] = example
        return ids

    def _id_lists(self, name: str, examples: Any, is_prompt: bool = False) -> list[np.ndarray]:
        """Return the ids of each example; a prompt gets no EOS and may be empty. Raises ValueError."""
        if _are_texts(examples):
            examples = self._encode(examples)
            if is_prompt:
                examples = [ids[:-1] for ids in examples]
        is_list = isinstance(examples, list | tuple | np.ndarray | jax.Array)
        if not is_list or not getattr(examples, 'ndim', 1) or not len(examples):
            raise ValueError(
                f'{name}={_shortened(examples)}: must be a list of one or more texts or lists of ids'
            )
        encoded = []
        for i, example in enumerate(examples):
            ids = np.asarray(_to_array(example))
            is_list = ids.ndim == 1 and (ids.dtype.kind in 'iu' or not ids.size)
            if not is_list or not (is_prompt or ids.any()):
                raise ValueError(
                    f'{name}[{i}]={_shortened(example)}: must be ids, not all padding (0), or texts all'
                )
            self._check_ids(f'{name}[{i}]', ids)
            encoded.append(ids)
        return encoded

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, EOS at the end."""
        if self.vocabulary is None:
            raise ValueError(
                "this checkpoint brings no vocabulary for texts: infer.load(..., vocabulary=PATH or 'bytes')"
            )
        ''.join(texts).encode()  # a surrogate is a ValueError here, not named by SentencePiece
        encoded = self.vocabulary.encode(list(map(str, texts)), glued_sentinels=True)
        return [[*ids, EOS_ID] for ids in encoded]

    def _features(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the features that the model reads, int32. Raises ValueError where they do not fit together."""
        names = set()
        if isinstance(batch, Mapping):
            names = set(batch) - set(IGNORED_FEATURES)
        if names not in (set(SEQUENCES), set(FEATURES)):
            raise ValueError(
                f'the batch has {sorted(map(str, names))}: it must be a dict of {", ".join(SEQUENCES)}, if packed '
                f"also {', '.join(SEGMENTS)}: of Hugging Face's take encoder_input_tokens=input_ids, "
                'decoder_target_tokens=np.where(labels == -100, 0, labels), and these moved right by one'
            )
        features: dict[str, Any] = {}
        for name in sorted(names, key=FEATURES.index):
            x = _to_array(batch[name])
            inputs = features.get('encoder_input_tokens', x)
            stack_inputs = features.get(f'{name.split("_")[0]}_input_tokens', x)
            fits = x.ndim == 2 and x.shape == (inputs.shape[0], stack_inputs.shape[1])
            if not fits or not x.size or x.dtype.kind not in 'iu':
                raise ValueError(
                    f'{name} is {x.dtype} {list(x.shape)}: must be integers [batch, length] as the input tokens'
                )
            rows = f'{name}: batch size'
            partition.check_divides(rows, x.shape[0], partition.BATCH_AXES, self.mesh)
            if not isinstance(x, jax.core.Tracer):  # inside of another function values are unknown
                self._check_ids(name, np.asarray(x))
            features[name] = jnp.asarray(x, jnp.int32)
        return features

    def _check_decoder(self) -> None:
        if self.config.num_decoder_layers == 0:
            raise ValueError(
                "this model is an encoder alone: call encode, or load a whole checkpoint without part='encoder'"
            )

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        """Raise ValueError for ids that the model has no embedding of, and for segments beyond int32."""
        end = self.config.vocab_size
        if name in SEGMENTS:
            end = 2**31
        for i in (ids.min(initial=0), ids.max(initial=0)):
            if not 0 <= i < end:
                raise ValueError(
                    f'{name} has {i}: must be 0, which is padding, to {end - 1}: use the vocabulary of the '
                    "checkpoint, and 0 for Hugging Face's -100"
                )


# Any number of examples.


class Example(NamedTuple):
    """What is predicted or scored: ids, EOS included."""

    inputs: Sequence[int] | np.ndarray
    targets: Sequence[Any] | np.ndarray = ()  # that are scored; or the ids of several choices
    number: int = 0  # what is drawn depends on the seed and on this number


class Answer(NamedTuple):
    """The answers to an example, the best first."""

    tokens: list[list[int]]  # with EOS if they have one, without the padding at their ends
    scores: list[float]  # none without return_scores


Result = TypeVar('Result')


def predict_all(
    t5: T5,
    examples: Iterable[Example],
    batch_size: int,
    options: Mapping[str, Any],
    progress: Callable[[int], Any] = lambda count: None,
) -> Iterator[Answer]:
    """Yield the answers to examples, in their order; `options` are those of `T5.generate_tokens`.

    `progress` is called with the number of examples of each batch. See `in_batches`.
    """

    def predict(batch: Sequence[Example], num_rows: int) -> Iterator[Answer]:
        tokens_bnT, scores_bn = t5.generate_tokens(
            [example.inputs for example in batch],
            numbers=[example.number for example in batch],
            num_rows=num_rows,
            **options,
        )
        if scores_bn is None:
            scores_bn = np.zeros([len(batch), 0])
        for i, tokens_nT in enumerate(tokens_bnT):
            tokens = [np.trim_zeros(ids, 'b').tolist() for ids in tokens_nT]
            yield Answer(tokens, scores_bn[i].tolist())

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
        targets = [[example.targets] for example in batch]
        for [score] in t5.score_choices(inputs, targets, num_rows):
            yield float(score)

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
        inputs = [example.inputs for example in batch]
        inputs_bM = t5._ids('inputs', inputs, num_rows=num_rows)
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

    Chunks of examples, all that is held, are sorted by length, so that a batch has little padding;
    the longest come first, because they need the most memory. All batches of a chunk have the same
    number of rows, so that few programs are compiled.
    """

    def lengths(i: int) -> tuple[int, int, int]:
        num_inputs = len(chunk[i].inputs)  # is compiled for as the next size
        return next_size(num_inputs, LENGTH_MULTIPLE), len(chunk[i].targets), num_inputs

    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, EXAMPLES_PER_CHUNK)):
        order = sorted(range(len(chunk)), key=lengths, reverse=True)
        num_rows = min(batch_size, len(chunk))
        results: dict[int, Result] = {}
        for start in range(0, len(chunk), batch_size):
            indices = order[start : start + batch_size]
            computed = compute([chunk[i] for i in indices], num_rows)
            results.update(zip(indices, computed, strict=True))
            progress(len(indices))
        for i in range(len(chunk)):
            yield results[i]


# What one device computes, inside of `jax.shard_map`. model.py defines the suffixes.


def _logits(config: T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    return model.apply(lambda: model.logits(config, batch)[0], params)


def _scores(config: T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    logits_bTv = _logits(config, params, batch)
    targets_bT = batch['decoder_target_tokens']
    nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
    return -(nats_bT * (targets_bT > 0)).sum(axis=-1)


def _encodings(config: T5Config, params: Mapping, batch: Mapping) -> jax.Array:
    inputs_bM = batch['encoder_input_tokens']
    encoded_bMD, _, _ = model.apply(lambda: model.encode(config, inputs_bM), params)
    encoded_bMD = encoded_bMD[:, -inputs_bM.shape[1] :]  # without what an own model puts before
    return jnp.where(inputs_bM[..., None] > 0, encoded_bMD.astype(jnp.float32), 0)


def _generate(
    decoding: 'Decoding',
    config: T5Config,
    params: Mapping,
    seed: jax.Array,
    arguments: Mapping,
) -> tuple[jax.Array, jax.Array | None]:
    """Return tokens_bnT and scores_bn, the best last; without `return_scores` None for scores."""
    num_decodes = max(decoding.beam_size, decoding.num_return)
    is_beam_search = decoding.beam_size > 1
    inputs_bM = arguments['inputs_bM']
    cache = model.apply(
        lambda: model.start_decoding(config, inputs_bM, 0, num_decodes, is_beam_search), params
    )

    def step(tokens_r, cache):
        return model.apply(lambda: model.decode_step(config, tokens_r, cache), params)

    if is_beam_search:
        tokens_bnT, scores_bn = decode.beam_search(
            step,
            decode.reorder_beams,
            cache,
            arguments['prompt_bT'],
            num_beams=num_decodes,
            alpha=decoding.alpha,
            lengths_b=arguments['lengths_b'],
            grow=decode.grow_cache,
        )
    else:
        rows = {name: jnp.repeat(x, num_decodes, axis=0) for name, x in arguments.items()}
        choose: decode.Choose = decode.most_likely
        if decoding.is_random:
            # A key for each row: of its example and its decode.
            fold_in_each = jax.vmap(jax.random.fold_in, (None, 0))
            keys_r = fold_in_each(jax.random.key(seed), rows['example_b'])
            decode_r = jnp.arange(len(keys_r)) % num_decodes
            keys_r = jax.vmap(jax.random.fold_in)(keys_r, decode_r)
            choose = decode.random_tokens(
                keys_r,
                rows['temperature_b'],
                top_k=decoding.top_k,
                top_p=decoding.top_p,
            )
        tokens_rT, scores_r = decode.sample(
            step, cache, rows['prompt_bT'], choose, rows['lengths_b'], grow=decode.grow_cache
        )
        tokens_bnT = tokens_rT.reshape(-1, num_decodes, tokens_rT.shape[1])
        scores_bn = scores_r.reshape(-1, num_decodes)
        if num_decodes > 1:
            scores_bn, order_bn = decode.best_last(scores_bn, num_decodes)
            tokens_bnT = decode.pick(tokens_bnT, order_bn)
    if not decoding.return_scores:
        return tokens_bnT, None  # XLA leaves the scores out of all steps
    return tokens_bnT, scores_bn


# What users give.


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The options of `T5.generate` that a program is compiled for. Raises ValueError."""

    is_random: bool  # a temperature is above 0
    beam_size: int = 1
    top_k: int = 0
    top_p: float = 0.0
    num_return: int = 1
    alpha: float = 0.6
    return_scores: bool = True

    @classmethod
    def of_settings(cls, config: Any) -> 'Decoding':
        """Return the options that config.decode sets. Raises ValueError where they do not fit."""
        names = {field.name for field in dataclasses.fields(cls)} & set(config)
        options = {name: config[name] for name in names}
        return cls(is_random=config.temperature > 0, **options)

    def __post_init__(self):
        for name in ('beam_size', 'top_k', 'top_p', 'num_return', 'alpha'):
            _check_number(name, getattr(self, name))
        if self.beam_size > 1 and self.is_random:
            raise ValueError(
                f'beam_size={self.beam_size} draws nothing: set temperature=0.0, or beam_size=1 to sample'
            )
        if self.num_return > self.beam_size and not self.is_random:
            raise ValueError(
                f'num_return={self.num_return} with temperature=0.0: must be at most beam_size='
                f'{self.beam_size}: set a larger beam_size to search, or temperature=1.0 to sample'
            )
        for name in ('top_k', 'top_p'):
            value = getattr(self, name)
            if value and not (self.is_random and self.top_k * self.top_p == 0):
                raise ValueError(
                    f'{name}={value} with temperature=0.0, or top_k with top_p: one of them limits what is '
                    f'drawn: set temperature=1.0 and the other one to 0, or {name}=0'
                )


def decoding_options(config: Any) -> dict[str, Any]:
    """Return the arguments of `T5.generate_tokens` that config.decode sets."""
    options = config.to_dict()
    del options['batch_size']
    return options


def _check_number(name: str, value: Any) -> None:
    """Raise ValueError unless an option is a number of the type and range of its setting."""
    setting = check.declared()[f'decode.{name}']
    limits = setting.range
    kind = type(setting.default)
    types: Any = {int: (int, np.integer), float: (int, float, np.number)}[kind]
    if (
        isinstance(value, bool)
        or not isinstance(value, types)
        or not (limits and limits.holds(value))
    ):
        raise ValueError(f'{name}={_shortened(value)}: must be {check.KINDS[kind]}, {limits}')


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        names = ', '.join(map(repr, choices))
        raise ValueError(f'{name}={_shortened(value)}: must be one of {names}')


def _check_one_each(name: str, values: Any, inputs: Sequence) -> None:
    if len(values) != len(inputs):
        raise ValueError(f'{name} has {len(values)} for {len(inputs)} inputs: give one for each')


def _are_texts(examples: Any) -> bool:
    """Return whether examples are a list of one or more texts."""
    is_list = isinstance(examples, list | tuple) or getattr(examples, 'ndim', 0) == 1
    return is_list and len(examples) > 0 and all(isinstance(x, str) for x in examples)


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
    return f'{" ".join(repr(value).split()):.60}'
