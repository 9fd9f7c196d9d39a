"""Load a checkpoint as a model in Python: a T5 with `logits`, `score`, `generate` and `encode`.

    t5 = infer.load('runs/small')
    t5.generate(['The <extra_id_0> walks in <extra_id_1> park.'])

The modes and the task metrics pass tokenized questions to `in_batches`. Source: T5X t5x/models.py.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

import checkpoint
import decode
import kernels
import model
import partition
from answers import batches, programs, words
from answers.batches import Answer, Ids, Numbers, Question, in_batches, next_size, padded_rows
from answers.options import OPTIONS, Decoding
from answers.words import Array, Inputs, Prompts, are_texts, check_one_each
from configs import check
from messages import Refused
from model import T5Config
from paths import AnyPath
from vocabulary import EOS_ID, PAD_ID, Ends, Vocabulary

# T5X's features, int32 [batch, length].
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
FEATURES = (*SEQUENCES, *SEGMENTS)
IGNORED_FEATURES = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')

LOGITS = P(partition.BATCH_AXES, None, 'model')
MAX_INPUT_LENGTH = 512  # T5's, used if the checkpoint does not say

Parameters = Mapping[str, jax.Array]
StepParameters = Mapping[str, jax.Array | kernels.Columns]


def load(
    path: str | AnyPath,
    vocabulary: str | AnyPath | None = None,
    config: T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
    step: int | str = '',
    part: str = '',
) -> 'T5':
    """Open a checkpoint as a model. Reads only the parameters, or their moving average if the run has one.

    `path`: a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its prefix or folder)
    or a Hugging Face folder, also of peft's adapters; on a disk, in a bucket, or hf://ORG/NAME[@REVISION]. A model
    with only an encoder may be a single safetensors file.
    `step`: another checkpoint of a workdir: a number, or 'best', by its `save.best_metric`.
    `vocabulary`: 'bytes', a SentencePiece model, or a folder that has one; by default the checkpoint's or its run's.
    `config`: the sizes; by default from the checkpoint's config, else from its shapes.
    `mesh`: from partition.make_mesh; its 'fsdp' splits only inputs. By default one device.
    `dtype` of the parameters: 'float32', 'bfloat16', 'float16', or '' for the stored one.
    `part`: 'encoder' skips the decoder, 'whole' refuses a model without one.

    Raises Refused if `path` is not a supported checkpoint or an argument does not match it.
    """
    import formats.open  # late: a model made by a program needs no format
    import formats.vocabulary

    dtype = getattr(dtype, '__name__', getattr(dtype, 'name', dtype))  # such as jnp.bfloat16
    check.check_allowed('dtype', dtype, 'float32', None, check.declared()['restore.dtype'].choices)
    check.check_allowed('part', part, '', None, formats.open.PARTS)
    if mesh is None:
        mesh = partition.make_mesh(data=1)
    opened = formats.open.open_model(path, config, str(step), part)
    opened.config.family.check_mesh(opened.config, mesh)
    tokenizer = formats.vocabulary.find_vocabulary(opened.directory, vocabulary)
    specs = opened.config.family.specs_in_use(opened.config, model.shapes(opened.config))
    shardings = {f'target/{name}': x for name, x in partition.shardings(mesh, specs).items()}
    leaves = {name: leaf for name, leaf in opened.leaves.items() if name in shardings}
    arrays = checkpoint.restore(leaves, shardings, dtype)
    params = {name: jnp.asarray(x) for name, x in checkpoint.parameters(arrays).items()}
    t5 = T5(opened.config, params, mesh, tokenizer)
    lengths = check.read_stored(opened.directory).get('data', {}).get('lengths', {})
    t5.max_input_length = lengths.get('inputs', MAX_INPUT_LENGTH)
    if opened.note:
        logging.warning(opened.note)
    return t5


class Answers(NamedTuple):
    """The result of `T5.generate` with `return_scores`: for each input an answer, or a list of `num_return`."""

    texts: 'Texts | None'  # None without a vocabulary
    tokens: list[list[int]] | list[list[list[int]]]  # ids without EOS
    scores: NDArray  # nats, float32 [examples] or [examples, num_return]


Texts = list[str] | list[list[str]]
Generated = Texts | list[list[int]] | list[list[list[int]]] | Answers


class T5:
    """A model with its parameters. `load` reads one from a checkpoint.

    `config`: sizes. `arrays`: parameters, {T5X's path: array}; assign others of the same shapes without recompiling.
    `params`: the same as nested dicts. `vocabulary`: None if the checkpoint has none. `mesh`: its devices.
    `max_input_length`: the most tokens of a text in `generate` and `encode`, EOS included. `ends`: special ids.

    Inputs and targets are texts, which get `ends`, or lists of token ids, used unchanged. All methods refuse other
    values, and ids without an embedding.
    """

    def __init__(
        self, config: T5Config, arrays: Parameters, mesh: Mesh, vocabulary: Vocabulary | None = None
    ):
        # A scan over layers is for training: it copies the parameters.
        self.config = dataclasses.replace(config, scan_layers=False)
        self.mesh = mesh
        self.vocabulary = vocabulary
        ends = getattr(vocabulary, 'own_ends', Ends((EOS_ID,), ((), (EOS_ID,))))
        self.ends: Ends = config.family.ends(config, ends)
        if vocabulary is not None:
            vocabulary.ends = self.ends
        self.max_input_length = MAX_INPUT_LENGTH
        self._process = os.getpid()
        self._arrays = arrays
        self._step_arrays: StepParameters = {}
        self._program = functools.cache(self._compile)
        self._words = functools.lru_cache(maxsize=1)(words.words_of)

    @property
    def arrays(self) -> Parameters:
        is_fork = os.getpid() != self._process
        assert not is_fork, "JAX hangs after a fork: use multiprocessing's 'spawn'"
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Parameters) -> None:
        if self.mesh.shape['fsdp'] > 1:  # gather once for all calls
            specs = self.config.family.specs_in_use(self.config, arrays)
            arrays = jax.device_put(arrays, partition.shardings(self.mesh, specs))
        self._arrays = arrays
        self._step_arrays = {}

    @property
    def params(self) -> dict:
        return checkpoint.unflatten(self.arrays)

    def logits(self, batch: Mapping[str, Array]) -> jax.Array:
        """Return teacher-forced logits, float32 [batch, target length, vocab].

        `batch` has T5X's features as integers [batch, length]: `SEQUENCES`, and `SEGMENTS` if it is packed. Its
        size must be a multiple of the mesh's 'data' * 'fsdp'.
        """
        self._check_decoder()
        return self._program(programs.logits)(self.arrays, self._features(batch))

    def score(self, inputs: Inputs, targets: Inputs, numbers: Numbers = None) -> NDArray:
        """Return the log-likelihood of each target given its input, in nats, float32 [examples]: T5X's score_batch."""
        self._check_decoder()
        input_ids = self._ids('inputs', inputs)
        target_ids = self._ids('targets', targets)
        check_one_each('targets', target_ids, input_ids)
        questions = [Question(ids, [target_ids[i]]) for i, ids in enumerate(input_ids)]
        questions = words.with_numbers(questions, numbers)
        return np.concatenate(list(score_batch(self, questions)))

    def encode(
        self, inputs: Inputs, *, trim: bool = False, batch_size: int = 32, numbers: Numbers = None
    ) -> tuple[NDArray, NDArray]:
        """Return the encoder's outputs, float32 [examples, length, emb_dim], and their mask, bool [examples, length].

        EOS also has an output. Outputs are 0 where the mask is False. A text of more than `max_input_length` tokens is
        refused; `trim` cuts it. `batch_size` inputs are encoded at once.
        """
        all_ids = self._inputs(inputs, trim)
        mask_bM = np.zeros((len(all_ids), max(map(len, all_ids))), bool)
        emb_dim = self.config.family.encoder_config(self.config).emb_dim
        outputs_bMD = np.zeros((*mask_bM.shape, emb_dim), np.float32)
        questions = words.with_numbers([Question(ids) for ids in all_ids], numbers)
        outputs = in_batches(functools.partial(encode_batch, self), questions, batch_size)
        for i, outputs_MD in enumerate(outputs):
            mask_bM[i, : len(all_ids[i])] = all_ids[i] > 0
            outputs_bMD[i, : len(all_ids[i])] = outputs_MD
        return outputs_bMD, mask_bM

    def generate(
        self,
        inputs: Inputs,
        options: Decoding = Decoding(),
        *,
        prompts: Prompts | None = None,
        allowed: str | Sequence | None = None,
        trim: bool = False,
        numbers: Numbers = None,
        **changes: object,
    ) -> Generated:
        """Return the model's answers: texts if the inputs are texts, else lists of ids without EOS.

        `options` and `changes` of its fields, such as beam_size=4, choose the method; by default, each token is the
        most likely one. `prompts`, a text, ids or None for each input, begin the answers. `allowed` lists the only
        possible answers, once or for each input. `trim` cuts texts of more than `max_input_length` tokens. `numbers`,
        {name: a number for each input}, are for a user's model that reads them.

        With `num_return` above 1, return a list of answers for each input, best first. A beam search may find fewer;
        missing ones have score -inf. `return_scores` returns `Answers`: texts, tokens and scores. A score is the
        log-likelihood of an answer in nats, as in `score`, without its prompt; a beam search divides it by T5X's
        brevity penalty.
        """
        assert isinstance(options, Decoding), f'write max_length={options}'
        for name in changes.keys() - OPTIONS.keys():
            from formats.hugging_face import ARGUMENTS_OF_GENERATE

            if name in ARGUMENTS_OF_GENERATE:
                raise Refused(f"{name} is transformers' option: {ARGUMENTS_OF_GENERATE[name]}")
        if allowed is not None:
            changes['allowed'] = allowed
        decoding = dataclasses.replace(options, **changes)  # type: ignore[arg-type]
        questions = self._questions(decoding, inputs, prompts, trim)
        questions = words.with_numbers(questions, numbers)
        texts: list = []
        tokens: list = []
        scores = np.full((len(questions), decoding.num_return), -np.inf, np.float32)
        ends = (PAD_ID, *self.ends.answers)
        for i, answer in enumerate(answer_batch(self, decoding, questions)):
            texts.append(answer.texts)
            tokens.append([[k for k in ids if k not in ends] for ids in answer.tokens])
            scores[i, : len(answer.scores)] = answer.scores
        if decoding.num_return == 1:  # an answer, not a list of one
            texts = list(itertools.chain(*texts))
            tokens = list(itertools.chain(*tokens))
            scores = scores[:, 0]
        if decoding.return_scores:
            return Answers(None if self.vocabulary is None else texts, tokens, scores)
        if self.vocabulary is not None and are_texts(inputs):
            return texts
        return tokens

    def _questions(
        self, decoding: Decoding, inputs: Inputs, prompts: Prompts | None, trim: bool
    ) -> list[Question]:
        """Return the inputs to answer, with their prompts."""
        self._check_decoder()
        decoding.check()
        ids = self._inputs(inputs, trim)
        if isinstance(decoding.temperature, tuple):
            check_one_each('temperature', decoding.temperature, ids)
        if decoding.is_allowed_per_input:
            check_one_each('allowed', decoding.allowed, ids)
        if prompts is None:
            prompts = [None] * len(ids)
        prompt_ids = self._ids('prompts', prompts, is_prompt=True)
        check_one_each('prompts', prompt_ids, ids)
        questions = []
        for i, prompt in enumerate(prompt_ids):
            prompt = np.trim_zeros(prompt, 'b')
            if not prompt.all() or len(prompt) > decoding.max_length:
                raise Refused(f'prompts[{i}] must have at most max_length ids, none of them 0')
            questions.append(Question(ids[i], prompt=prompt, number=i))
            if decoding.allowed and len(prompt):
                vocab_size = self.config.vocab_size
                allowed_bnA = self._words(decoding, self.vocabulary, vocab_size)['allowed_bnA']
                begins_nT = allowed_bnA[i % len(allowed_bnA), :, : len(prompt)]
                if not any(np.array_equal(begin_T, prompt) for begin_T in begins_nT):
                    raise Refused(f'prompts[{i}]: begins none of the allowed answers')
        return questions

    def _inputs(self, inputs: Inputs, trim: bool) -> list[NDArray]:
        """Return the ids of inputs; a text has at most `max_input_length` tokens."""
        all_ids = self._ids('inputs', inputs)
        if not are_texts(inputs):
            return all_ids
        for i, ids in enumerate(all_ids):
            if len(ids) > self.max_input_length and not trim:
                limit = f'max_input_length={self.max_input_length}'
                raise Refused(f'inputs[{i}] has {len(ids)} tokens, above {limit}: use trim=True')
        end = self.ends.inputs[1]
        most = self.max_input_length
        return [np.array([*ids[: min(len(ids), most) - len(end)], *end]) for ids in all_ids]

    def _ids(self, name: str, examples: Inputs | Prompts, is_prompt: bool = False) -> list[NDArray]:
        return words.ids_of(name, examples, self.vocabulary, self.config.vocab_size, is_prompt)

    def _features(self, batch: Mapping[str, Array]) -> dict[str, jax.Array]:
        """Return the features of a batch that the model reads, int32."""
        names = batch.keys() - set(IGNORED_FEATURES)
        if names not in (set(SEQUENCES), set(FEATURES)):
            raise Refused(f'the batch has {[*names]}: use {SEQUENCES}, if packed also {SEGMENTS}')
        features: dict[str, jax.Array] = {}
        for name in sorted(names, key=FEATURES.index):
            x = batch[name]
            if not isinstance(x, jax.Array):
                x = np.asarray(x)
            if x.ndim != 2 or not x.size or x.dtype.kind not in 'iu':
                raise Refused(f'{name} is {x.dtype} {x.shape}: must be integers [batch, length]')
            partition.check_divides(f'{name}: rows', len(x), partition.BATCH_AXES, self.mesh)
            if name in SEQUENCES and not isinstance(x, jax.core.Tracer):  # tracers have no values
                words.check_ids(name, np.asarray(x), self.config.vocab_size)
            features[name] = jnp.asarray(x, jnp.int32)
        return features

    def _check_decoder(self) -> None:
        if self.config.num_decoder_layers == 0:
            raise Refused('this model has only an encoder: call encode, or load the full model')

    # Programs and their arguments.

    def _rows(self, ids: Sequence[Ids], num_rows: int = 0) -> NDArray:
        return padded_rows(ids, num_rows, partition.axes_size(self.mesh, partition.BATCH_AXES))

    def _compute(self, kind: Callable, batch: Mapping[str, NDArray], *options: Decoding | Ends):
        """Return the output of a program for a batch of padded rows: all of it, in every process."""
        rows = NamedSharding(self.mesh, partition.BATCH)
        shapes = {name: x.shape for name, x in batch.items()}  # every process has all rows
        placed = jax.make_array_from_process_local_data(rows, dict(batch), shapes)
        output = self._program(kind, *options)(self._arrays_of(kind), placed)
        return jax.tree.map(np.asarray, output)

    def _compile(self, kind: Callable, *options: Decoding | Ends) -> jax.stages.Wrapped:
        """Return (parameters, batch) -> output of `kind`, a function of one device. Logits stay on their devices."""
        arrays = self._arrays_of(kind)
        specs = kernels.specs_of(arrays, self.config.family.specs_in_use(self.config, arrays))
        has_logits = kind is programs.logits
        mapped = jax.shard_map(
            functools.partial(kind, self.config, *options),
            mesh=self.mesh,
            in_specs=(specs, partition.BATCH),
            out_specs=LOGITS if has_logits else partition.BATCH,
        )
        return jax.jit(mapped, out_shardings=None if has_logits else NamedSharding(self.mesh, P()))

    def _arrays_of(self, kind: Callable) -> StepParameters:
        """Return the parameters; for answers, kernels have the form that a step of decoding reads fastest."""
        arrays = self.arrays
        if kind is not programs.answers:
            return arrays
        if not self._step_arrays:
            dtypes = programs.step_kernels(self.config, arrays)
            self._step_arrays = {**arrays, **kernels.for_decoding(self.mesh, arrays, dtypes)}
        return self._step_arrays


# Batches of questions, of at least `num_rows` rows.


def answer_batch(
    t5: T5, decoding: Decoding, questions: Sequence[Question], num_rows: int = 0
) -> Iterator[Answer]:
    """Yield the answers to questions."""
    inputs_bM = t5._rows([question.inputs for question in questions], num_rows)
    num_rows = len(inputs_bM)
    room = max(decode.FIRST_ROOM, 1 << (decoding.max_length - 1).bit_length())  # a power of two
    batch = {
        'inputs_bM': inputs_bM,
        'prompt_bT': np.zeros((num_rows, room), np.int32),
        'lengths_b': np.zeros(num_rows, np.int32),  # rows of padding take no token
        **batches.numbers_of(questions, inputs_bM),
    }
    batch['lengths_b'][: len(questions)] = decoding.max_length
    for i, question in enumerate(questions):
        batch['prompt_bT'][i, : len(question.prompt)] = question.prompt
    if decoding.is_random:
        numbers = [question.number for question in questions]
        batch['temperature_b'] = np.resize(np.array(decoding.temperature, np.float32), num_rows)
        batch['seed_b'] = np.full(num_rows, decoding.seed, np.uint32)
        batch['example_b'] = np.resize(np.array(numbers, np.int32), num_rows)
    for name, array in t5._words(decoding, t5.vocabulary, t5.config.vocab_size).items():
        batch[name] = np.resize(array, (num_rows, *array.shape[1:]))
    tokens_bnT, scores_bn = t5._compute(programs.answers, batch, decoding.program, t5.ends)
    for i, question in enumerate(questions):
        num_found = decoding.num_return
        if decoding.beam_size > 1:
            num_found = min(num_found, max(1, (scores_bn[i] > decode.MISSING).sum()))
        best_first = slice(-1, -1 - num_found, -1)
        tokens = [np.trim_zeros(ids, 'b').tolist() for ids in tokens_bnT[i, best_first]]
        texts = []
        if t5.vocabulary is not None:
            for k, ids in enumerate(tokens):
                text, tokens[k] = words.before_stop(
                    t5.vocabulary, ids, question.prompt, decoding.stop
                )
                texts.append(text)
        scores = []
        if decoding.return_scores:
            scores = scores_bn[i, best_first].tolist()
        yield Answer(tokens, texts, scores)


def score_batch(t5: T5, questions: Sequence[Question], num_rows: int = 0) -> Iterator[NDArray]:
    """Yield the scores of each question's targets, as in `T5.score`, float32 [targets]. Inputs are encoded once."""
    inputs_bM = t5._rows([question.inputs for question in questions], num_rows)
    num_choices = next_size(max(len(question.targets) for question in questions), 1)
    targets: list[Ids] = []
    for question in questions:
        targets += [*question.targets, *[()] * (num_choices - len(question.targets))]
    targets_rT = padded_rows(targets, 0, multiple=len(inputs_bM) * num_choices)
    batch = {
        'encoder_input_tokens': inputs_bM,
        'decoder_input_tokens': np.pad(targets_rT[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets_rT,
        **batches.numbers_of(questions, inputs_bM),
    }
    scores_bc = t5._compute(programs.scores, batch).reshape(-1, num_choices)
    for i, question in enumerate(questions):
        yield scores_bc[i, : len(question.targets)]


def encode_batch(t5: T5, questions: Sequence[Question], num_rows: int = 0) -> Iterator[NDArray]:
    """Yield the encoder's outputs of the inputs of each question: float32 [tokens, emb_dim]."""
    inputs_bM = t5._rows([question.inputs for question in questions], num_rows)
    batch = {'encoder_input_tokens': inputs_bM, **batches.numbers_of(questions, inputs_bM)}
    encoded_bMD = t5._compute(programs.encodings, batch)
    for i, question in enumerate(questions):
        yield encoded_bMD[i, : len(question.inputs)].copy()  # without the padding
