"""A checkpoint as a model that one can call: `load` returns a T5 with `logits`, `score`, `generate` and `encode`.

    t5 = infer.load('runs/small')
    t5.generate(['The <extra_id_0> walks in <extra_id_1> park.'])

The modes and the task metrics pass tokenized examples to `in_batches`.
Source: T5X t5x/models.py.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
import loss
import model
import partition
from configs import check
from decode import Decoding
from messages import Refused
from model import T5Config
from paths import AnyPath
from vocabulary import EOS_ID, UNK_ID, Vocabulary

# T5X's features, int32 [batch, length].
SEQUENCES = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
SEGMENTS = ('encoder_segment_ids', 'decoder_segment_ids')
FEATURES = (*SEQUENCES, *SEGMENTS)
IGNORED_FEATURES = ('decoder_loss_weights', 'encoder_positions', 'decoder_positions')

LENGTH_MULTIPLE = 32  # for padding, because each length is compiled
MAX_INPUT_LENGTH = 512  # T5's, used if the checkpoint does not say
OPTIONS = tuple(field.name for field in dataclasses.fields(Decoding))
NO_WORD = -2  # pads lists of words: no token is one
EXAMPLES_PER_CHUNK = 4096  # examples that `in_batches` sorts by length at a time

Array = NDArray | jax.Array
Numbers = float | Sequence[float]
Inputs = Sequence[str] | Sequence[Sequence[int]] | Sequence[Array] | Array
Ids = Sequence[int] | NDArray
Prompts = Sequence[str | Sequence[int] | None] | Array
Parameters = Mapping[str, jax.Array]
DecodingParameters = Mapping[str, jax.Array | kernels.Columns]
Batch = Mapping[str, jax.Array]

Result = TypeVar('Result')


def load(
    path: str | AnyPath,
    vocabulary: str | AnyPath | None = None,
    config: T5Config | None = None,
    mesh: Mesh | None = None,
    dtype: str = 'float32',
    step: int | str = '',
    part: str = '',
) -> 'T5':
    """Open a checkpoint as a model. Reads its parameters alone, or their average if a run keeps one.

    `path`: a workdir (its newest checkpoint), a T5X checkpoint directory, a Mesh-TF checkpoint (its prefix or folder)
    or a Hugging Face folder, also of peft's adapters; on a disk or in a bucket. An encoder alone may be a single
    safetensors file.
    `step`: another checkpoint of a workdir: a number, or 'best', by its `save.best_metric`.
    `vocabulary`: 'bytes', a SentencePiece model, or a folder that has one; by default the checkpoint's or its run's.
    `config`: the sizes; by default the checkpoint's own config, else its shapes.
    `mesh`: from partition.make_mesh; its 'fsdp' splits inputs alone. By default one device.
    `dtype` of the parameters: 'float32', 'bfloat16', 'float16', or '' for the stored one.
    `part`: 'encoder' does not read the decoder, 'whole' refuses an encoder.

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
    found = formats.vocabulary.find_vocabulary(opened.directory, vocabulary)
    specs = opened.config.family.specs_in_use(opened.config, model.shapes(opened.config))
    shardings = {f'target/{name}': x for name, x in partition.shardings(mesh, specs).items()}
    leaves = {name: leaf for name, leaf in opened.leaves.items() if name in shardings}
    arrays = checkpoint.restore(leaves, shardings, dtype)
    params = {name: jnp.asarray(x) for name, x in checkpoint.parameters(arrays).items()}
    t5 = T5(opened.config, params, mesh, found)
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
    """A checkpoint that one can call. `load` makes it.

    `config`: sizes. `arrays`: parameters, {T5X's path: array}; others of the same shapes may be assigned, and nothing
    is compiled again. `params`: the same as nested dicts. `vocabulary`: None if the checkpoint brings none. `mesh`: its
    devices. `max_input_length`: most tokens of a text in `generate` and `encode`, EOS included.

    Inputs and targets are texts, to which EOS is added, or lists of token ids, taken as they are. All methods refuse
    other values, and ids without an embedding.
    """

    def __init__(
        self, config: T5Config, arrays: Parameters, mesh: Mesh, vocabulary: Vocabulary | None = None
    ):
        # A scan over layers is for training: it copies the parameters.
        self.config = dataclasses.replace(config, scan_layers=False)
        self.mesh = mesh
        self.vocabulary = vocabulary
        self.max_input_length = MAX_INPUT_LENGTH
        self._process = os.getpid()
        self._arrays = arrays
        self._decoding_arrays: DecodingParameters = {}
        self._logits = self._compile(_logits, arrays, P(partition.BATCH_AXES, None, 'model'))
        self._scores = self._compile(_scores, arrays)
        self._encodings = self._compile(_encodings, arrays)
        self._generators: dict[Decoding, jax.stages.Wrapped] = {}
        self._words: tuple[tuple, dict[str, NDArray]] = ((), {})  # the last ones, by their texts

    @property
    def arrays(self) -> Parameters:
        is_own = os.getpid() == self._process
        assert is_own, "JAX hangs after a fork: start processes with multiprocessing's 'spawn'"
        return self._arrays

    @arrays.setter
    def arrays(self, arrays: Parameters) -> None:
        if self.mesh.shape['fsdp'] > 1:  # gather once for all calls
            arrays = jax.device_put(arrays, partition.shardings(self.mesh, self._specs(arrays)))
        self._arrays = arrays
        self._decoding_arrays = {}

    @property
    def params(self) -> dict:
        return checkpoint.unflatten(self.arrays)

    def logits(self, batch: Mapping[str, Array]) -> jax.Array:
        """Return teacher-forced logits, float32 [batch, target length, vocab].

        `batch` has T5X's features as integers [batch, length]: `SEQUENCES`, and `SEGMENTS` if it is packed. Its
        size must divide by the mesh's 'data' * 'fsdp'.
        """
        self._check_decoder()
        return self._logits(self.arrays, self._features(batch))

    def score(self, inputs: Inputs, targets: Inputs) -> NDArray:
        """Return the log-likelihood of each target given its input, in nats, float32 [examples]: T5X's score_batch."""
        self._check_decoder()
        of_inputs = self._ids('inputs', inputs)
        of_targets = self._ids('targets', targets)
        _check_one_each('targets', of_targets, of_inputs)
        examples = [Example(ids, [of_targets[i]]) for i, ids in enumerate(of_inputs)]
        return np.concatenate(list(score_batch(self, examples)))

    def encode(
        self, inputs: Inputs, *, trim: bool = False, batch_size: int = 32
    ) -> tuple[NDArray, NDArray]:
        """Return the encoder's outputs, float32 [examples, length, emb_dim], and their mask, bool [examples, length].

        EOS has an output, too. Outputs are 0 where the mask is False. A text of more than `max_input_length` tokens is
        refused; `trim` cuts it. `batch_size` inputs are encoded at once.
        """
        encoded = self._inputs(inputs, trim)
        mask_bM = np.zeros((len(encoded), max(map(len, encoded))), bool)
        outputs_bMD = np.zeros((*mask_bM.shape, self.config.emb_dim), np.float32)
        examples = [Example(ids) for ids in encoded]
        encode_some = functools.partial(encode_batch, self)
        for i, outputs_MD in enumerate(in_batches(encode_some, examples, batch_size)):
            mask_bM[i, : len(encoded[i])] = encoded[i] > 0
            outputs_bMD[i, : len(encoded[i])] = outputs_MD
        return outputs_bMD, mask_bM

    def generate(
        self,
        inputs: Inputs,
        max_length: int = 128,  # tokens per answer, EOS included
        *,
        beam_size: int = 1,  # above 1, search for the most likely answers
        alpha: float = 0.6,  # exponent of the brevity penalty of beams
        temperature: Numbers = 0.0,  # above 0, draw tokens; one number, or one for each input
        top_k: int = 0,  # draw from this many of the most likely tokens; 0 for all
        top_p: float = 0.0,  # draw from the most likely tokens with this total probability; 0 for all
        min_p: float = 0.0,  # draw from tokens with this share of the largest probability; 0 for all
        seed: int = 0,  # the same seed draws the same answers
        num_return: int = 1,  # answers for each input: the best beams, or samples
        prompts: Prompts | None = None,  # begin the answers
        repetition_penalty: float = 1.0,  # above 1, make tokens that have occurred less likely
        no_repeat_ngram_size: int = 0,  # size of n-grams that may occur once; 0 for any
        min_length: int = 0,  # tokens after the prompt, EOS not included
        bad_words: decode.Text | Sequence[decode.Text] = (),  # texts or ids banned from answers
        allowed: decode.Text | Sequence = (),  # the only answers, or a list for each input
        stop: str | Sequence[str] = (),  # texts that end an answer, not part of it
        filters: Sequence[decode.Filter] = (),  # your own: see decode.filtered
        return_scores: bool = False,  # return `Answers`
        trim: bool = False,  # cut texts of more than `max_input_length` tokens
        **unknown: object,
    ) -> Generated:
        """Return the model's answers: texts if the inputs are texts, else lists of ids without EOS.

        By default an answer has the most likely token at each position. With `num_return` above 1, return a list of
        answers for each input, the best first; fewer if a beam search finds fewer, and -inf for their scores.
        `return_scores` returns `Answers`: texts, tokens and scores. A score
        is the log-likelihood of an answer in nats, as `score` has it, without its prompt; a beam search divides it by
        T5X's brevity penalty, ((5 + length) / 6)^`alpha`. `prompts` has a text, ids or None for each input.
        Filters, from `repetition_penalty` to `filters`, change the choice in transformers' order. They change the
        scores of beams, but no others.
        """
        arguments = locals()
        for name in unknown:
            from formats.hugging_face import ARGUMENTS_OF_GENERATE

            remedy = ARGUMENTS_OF_GENERATE.get(name, f'use {", ".join(OPTIONS)}, prompts or trim')
            raise Refused(f'{name} is not an argument of generate: {remedy}')
        decoding = Decoding(**{name: arguments[name] for name in OPTIONS})
        examples = self._examples(decoding, inputs, prompts, trim)
        found = list(answer_batch(self, decoding, examples))
        texts = None
        if self.vocabulary is not None:
            texts = _one_or_all([answer.texts for answer in found], num_return)
        without_eos: list[list[list[int]]] = []
        for answer in found:
            without_eos.append([[i for i in ids if i > EOS_ID] for ids in answer.tokens])
        tokens = _one_or_all(without_eos, num_return)
        if return_scores:
            scores_bn = np.full((len(found), num_return), -np.inf, np.float32)
            for i, answer in enumerate(found):
                scores_bn[i, : len(answer.scores)] = answer.scores
            if num_return == 1:
                scores_bn = scores_bn[:, 0]
            return Answers(texts, tokens, scores_bn)
        if texts is not None and _are_texts(inputs):
            return texts
        return tokens

    # The user's values, as the model takes them.

    def _examples(
        self, decoding: Decoding, inputs: Inputs, prompts: Prompts | None, trim: bool
    ) -> list['Example']:
        """Return the inputs to answer, with their prompts."""
        self._check_decoder()
        check_decoding(decoding)
        ids = self._inputs(inputs, trim)
        if isinstance(decoding.temperature, tuple):
            _check_one_each('temperature', decoding.temperature, ids)
        if decoding.is_allowed_per_input:
            _check_one_each('allowed', decoding.allowed, ids)
        prompts = [None] * len(ids) if prompts is None else prompts
        if isinstance(prompts, list | tuple):
            nothing = '' if any(isinstance(prompt, str) for prompt in prompts) else ()
            prompts = [nothing if prompt is None else prompt for prompt in prompts]
        of_prompts = [np.trim_zeros(x, 'b') for x in self._ids('prompts', prompts, is_prompt=True)]
        _check_one_each('prompts', of_prompts, ids)
        for i, prompt in enumerate(of_prompts):
            if not prompt.all() or len(prompt) > decoding.max_length:
                raise Refused(f'prompts[{i}] must have at most max_length ids, none of them 0')
            if decoding.allowed and len(prompt):
                allowed_bnA = self._words_of(decoding)['allowed_bnA']
                allowed_nA = allowed_bnA[i % len(allowed_bnA)]
                begins = allowed_nA[:, : len(prompt)]
                if begins.shape[1] < len(prompt) or not (begins == prompt).all(axis=1).any():
                    raise Refused(f'prompts[{i}]: begins none of the answers that are allowed')
        return [Example(x, prompt=of_prompts[i], number=i) for i, x in enumerate(ids)]

    def _inputs(self, inputs: Inputs, trim: bool) -> list[NDArray]:
        """Return the ids of inputs; a text has at most `max_input_length` tokens."""
        encoded = self._ids('inputs', inputs)
        if not _are_texts(inputs):
            return encoded
        for i, ids in enumerate(encoded):
            if len(ids) > self.max_input_length and not trim:
                limit = f'max_input_length={self.max_input_length}'
                raise Refused(f'inputs[{i}] has {len(ids)} tokens, above {limit}: use trim=True')
        return [np.append(ids[:-1][: self.max_input_length - 1], EOS_ID) for ids in encoded]

    def _ids(self, name: str, examples: Inputs | Prompts, is_prompt: bool = False) -> list[NDArray]:
        """Return the ids of each example; a prompt gets no EOS and may be empty."""
        if _are_texts(examples):
            texts = list(map(str, examples))
            ''.join(texts).encode()  # refuses a surrogate, which SentencePiece does not name
            end = [] if is_prompt else [EOS_ID]
            examples = [[*x, *end] for x in _encode(self.vocabulary, texts)]
        if isinstance(examples, str) or not len(examples):
            raise Refused(f'{name}={_shortened(examples)}: must be a list of texts or of ids')
        encoded = []
        # Texts come last: an example that is neither text nor ids is the one to name.
        for i, example in sorted(enumerate(examples), key=lambda item: isinstance(item[1], str)):
            ids = np.asarray(example)
            is_list = ids.ndim == 1 and (ids.dtype.kind in 'iu' or not ids.size)
            if not is_list or not (is_prompt or ids.any()):
                raise Refused(f'{name}[{i}]={_shortened(example)}: must be ids, or all be texts')
            self._check_ids(f'{name}[{i}]', ids)
            encoded.append(ids)
        return encoded

    def _features(self, batch: Mapping[str, Array]) -> dict[str, jax.Array]:
        """Return the features that the model reads, int32."""
        names = batch.keys() - set(IGNORED_FEATURES)
        if names not in (set(SEQUENCES), set(FEATURES)):
            raise Refused(f'the batch has {[*names]}, not {SEQUENCES}, if packed also {SEGMENTS}')
        features: dict[str, jax.Array] = {}
        for name in sorted(names, key=FEATURES.index):
            x = batch[name]
            if not isinstance(x, jax.Array):
                x = np.asarray(x)
            inputs = features.get('encoder_input_tokens', x)
            stack_inputs = features.get(f'{name.split("_")[0]}_input_tokens', x)
            fits = x.ndim == 2 and x.shape == (inputs.shape[0], stack_inputs.shape[1])
            if not fits or not x.size or x.dtype.kind not in 'iu':
                raise Refused(f'{name} is {x.dtype} {x.shape}: must be integers [batch, length]')
            rows = f'{name}: batch size'
            partition.check_divides(rows, x.shape[0], partition.BATCH_AXES, self.mesh)
            if not isinstance(x, jax.core.Tracer):  # a traced function has no values
                self._check_ids(name, np.asarray(x))
            features[name] = jnp.asarray(x, jnp.int32)
        return features

    def _check_decoder(self) -> None:
        if self.config.num_decoder_layers == 0:
            raise Refused('this model is an encoder alone: call encode, or load it all')

    def _check_ids(self, name: str, ids: NDArray) -> None:
        """Refuse ids without an embedding, and segments beyond int32."""
        end = 2**31 if name in SEGMENTS else self.config.vocab_size
        if ids.size and not 0 <= ids.min() <= ids.max() < end:
            raise Refused(f'{name} has ids {ids.min()} to {ids.max()}: must be 0 to {end - 1}')

    # Programs and their arguments.

    def _words_of(self, decoding: Decoding) -> dict[str, NDArray]:
        texts = (decoding.bad_words, decoding.allowed, decoding.stop)
        key = (*texts, decoding.max_length, self.vocabulary)
        if self._words[0] != key:
            self._words = (key, words_of(decoding, self.vocabulary, self.config.vocab_size))
        return self._words[1]

    def _compile(
        self,
        device_function: Callable,
        arrays: DecodingParameters,
        out_specs: P = partition.BATCH,
    ) -> jax.stages.Wrapped:
        """Return (parameters, batch) -> output: each process gets all rows, unless `out_specs` is given."""
        replicated = NamedSharding(self.mesh, P()) if out_specs == partition.BATCH else None
        mapped = jax.shard_map(
            functools.partial(device_function, self.config),
            mesh=self.mesh,
            in_specs=(self._specs(arrays), partition.BATCH),
            out_specs=out_specs,
        )
        return jax.jit(mapped, out_shardings=replicated)

    def _specs(self, arrays: DecodingParameters) -> dict[str, P]:
        return kernels.specs_of(arrays, self.config.family.specs_in_use(self.config, arrays))

    def _rows(self, ids: Sequence[Ids], num_rows: int = 0) -> NDArray:
        """Return ids as int32 [rows, length], padded with 0 to sizes of `next_size`."""
        num_rows = max(len(ids), num_rows)
        num_rows = next_size(num_rows, partition.axes_size(self.mesh, partition.BATCH_AXES))
        rows = np.zeros((num_rows, next_size(max(map(len, ids)), LENGTH_MULTIPLE)), np.int32)
        for i, of_row in enumerate(ids):
            rows[i, : len(of_row)] = of_row
        return rows


def next_size(n: int, multiple: int) -> int:
    """Return `multiple` times the first of 1, 2, 3, 4, 6, 8, 12, 16 ... that reaches `n`: little is padding."""
    size = multiple
    while size < n:
        if size + size // 2 >= n and size > multiple:
            return size + size // 2
        size *= 2
    return size


# Any number of examples.


class Example(NamedTuple):
    """Ids to answer or to score, EOS included."""

    inputs: Ids
    targets: Sequence | NDArray = ()  # to score: ids, or the ids of each choice
    number: int = 0  # samples depend on the seed and on this number
    prompt: Ids = ()  # begins the answers


class Answer(NamedTuple):
    """The answers to an example, the best first."""

    tokens: list[list[int]]  # EOS included, padding not
    texts: list[str]  # empty without a vocabulary
    scores: list[float]  # empty without return_scores


def in_batches(
    compute: Callable[[Sequence[Example], int], Iterable[Result]],
    examples: Iterable[Example],
    batch_size: int,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Result]:
    """Yield the results of `compute(batch, number of rows)`, in the order of the examples.

    A chunk of examples is held at a time and sorted by length, for little padding; the longest come
    first, because they need the most memory. All batches of a chunk have the same number of rows, so
    few programs are compiled. `progress` is called with the number of examples of each batch.
    """

    def lengths(i: int) -> tuple[int, int, int]:
        num_inputs = len(chunk[i].inputs)
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


def answer_batch(
    t5: T5, decoding: Decoding, examples: Sequence[Example], num_rows: int = 0
) -> Iterator[Answer]:
    """Yield the answers to examples, in a batch of at least `num_rows` rows."""
    inputs_bM = t5._rows([example.inputs for example in examples], num_rows)
    num_rows = len(inputs_bM)
    batch = {
        'inputs_bM': inputs_bM,
        'prompt_bT': np.zeros((num_rows, decoding.room), np.int32),
        'lengths_b': np.zeros(num_rows, np.int32),  # rows of padding take no token
        'temperature_b': np.ones(num_rows, np.float32),
        'seed_b': np.full(num_rows, decoding.seed, np.uint32),
        'example_b': np.zeros(num_rows, np.int32),
    }
    batch['lengths_b'][: len(examples)] = decoding.max_length
    batch['temperature_b'][: len(examples)] = decoding.temperature
    for i, example in enumerate(examples):
        batch['prompt_bT'][i, : len(example.prompt)] = example.prompt
        batch['example_b'][i] = example.number
    for name, words in t5._words_of(decoding).items():
        batch[name] = np.full((num_rows, *words.shape[1:]), NO_WORD, np.int32)
        batch[name][: len(examples)] = words  # one for all, or one for each
    arrays = t5.arrays
    if not t5._decoding_arrays:  # with kernels in the form that a step of decoding reads fastest
        dtypes = model.step_kernels(t5.config, arrays)
        t5._decoding_arrays = {**arrays, **kernels.for_decoding(t5.mesh, arrays, dtypes)}
    program = decoding.program
    if program not in t5._generators:
        answers = functools.partial(_answers, program)
        t5._generators[program] = t5._compile(answers, t5._decoding_arrays)
    placed = partition.place_batch(t5.mesh, batch)
    found = t5._generators[program](t5._decoding_arrays, placed)
    tokens_bnT, scores_bn = jax.tree.map(np.asarray, found)
    for i in range(len(examples)):
        num_found = decoding.num_return
        if decoding.beam_size > 1:
            num_found = min(num_found, max(1, (scores_bn[i] > decode.MISSING).sum()))
        best_first = slice(-1, -1 - num_found, -1)
        tokens = [np.trim_zeros(ids, 'b').tolist() for ids in tokens_bnT[i, best_first]]
        texts = []
        if t5.vocabulary is not None:
            for k, ids in enumerate(tokens):
                text, tokens[k] = _before_stop(t5.vocabulary, ids, examples[i].prompt, decoding)
                texts.append(text)
        scores = []
        if decoding.return_scores:
            scores = scores_bn[i, best_first].tolist()
        yield Answer(tokens, texts, scores)


def _before_stop(
    vocabulary: Vocabulary, tokens: list[int], prompt: Ids, decoding: Decoding
) -> tuple[str, list[int]]:
    """Return the text of an answer up to the first stop text after its prompt, and its tokens."""
    text = vocabulary.decode(tokens)
    if not decoding.stop:
        return text, tokens
    start = len(vocabulary.decode(prompt))
    ends = [text.index(end, start) for end in map(str, decoding.stop) if end in text[start:]]
    if ends:
        text = text[: min(ends)]
        while tokens and vocabulary.decode(tokens[:-1]).startswith(text):
            tokens = tokens[:-1]
    return text, tokens


def score_batch(t5: T5, examples: Sequence[Example], num_rows: int = 0) -> Iterator[NDArray]:
    """Yield the log-likelihoods of the targets of each example, whose inputs are encoded once.

    They are those of `T5.score`: nats, float32 [targets]. The batch has at least `num_rows` inputs.
    """
    inputs_bM = t5._rows([example.inputs for example in examples], num_rows)
    counts = np.array([len(example.targets) for example in examples])
    targets_cT = t5._rows(list(itertools.chain(*(example.targets for example in examples))))
    num_choices = next_size(int(counts.max()), 1)
    is_choice_bc = np.arange(num_choices) < counts[:, None]
    targets_bcT = np.zeros((len(inputs_bM), num_choices, targets_cT.shape[1]), np.int32)
    targets_bcT[: len(examples)][is_choice_bc] = targets_cT[: counts.sum()]
    targets_rT = targets_bcT.reshape(-1, targets_cT.shape[1])
    batch = {
        'encoder_input_tokens': inputs_bM,
        'decoder_input_tokens': np.pad(targets_rT[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets_rT,
    }
    scores_r = t5._scores(t5.arrays, partition.place_batch(t5.mesh, batch))
    scores_bc = np.asarray(scores_r).reshape(-1, num_choices)
    for i, count in enumerate(counts):
        yield scores_bc[i, :count]


def encode_batch(t5: T5, examples: Sequence[Example], num_rows: int = 0) -> Iterator[NDArray]:
    """Yield the encoder's outputs of the inputs of each example: float32 [tokens, emb_dim]."""
    inputs_bM = t5._rows([example.inputs for example in examples], num_rows)
    placed = partition.place_batch(t5.mesh, {'encoder_input_tokens': inputs_bM})
    encoded_bMD = np.asarray(t5._encodings(t5.arrays, placed))
    for i, example in enumerate(examples):
        yield encoded_bMD[i, : len(example.inputs)].copy()  # without the padding


# The computation of one device, inside `jax.shard_map`. model.py defines the suffixes.


def _logits(config: T5Config, params: Parameters, batch: Batch) -> jax.Array:
    return model.apply(model.logits, params, config, batch)[0]


def _scores(config: T5Config, params: Parameters, batch: Batch) -> jax.Array:
    logits_bTv = _logits(config, params, batch)
    targets_bT = batch['decoder_target_tokens']
    nats_bT, _ = loss.cross_entropy(logits_bTv, targets_bT)
    return -(nats_bT * (targets_bT > 0)).sum(axis=-1)


def _encodings(config: T5Config, params: Parameters, batch: Batch) -> jax.Array:
    inputs_bM = batch['encoder_input_tokens']
    encoded_bMD, _, _ = model.apply(model.encode, params, config, inputs_bM)
    encoded_bMD = encoded_bMD[:, -inputs_bM.shape[1] :]  # without the prompt of an own model
    return jnp.where(inputs_bM[..., None] > 0, encoded_bMD.astype(jnp.float32), 0)


def _answers(
    decoding: Decoding, config: T5Config, params: Parameters, batch: Batch
) -> tuple[jax.Array, jax.Array | None]:
    def step(tokens_r: jax.Array, cache: decode.Cache) -> tuple[jax.Array, decode.Cache]:
        return model.apply(model.decode_step, params, config, tokens_r, cache)

    sizes = (0, decoding.num_decodes, decoding.beam_size > 1)
    cache = model.apply(model.start_decoding, params, config, batch['inputs_bM'], *sizes)
    return decode.decode(decoding, step, cache, batch)


# The options of decoding.


def check_decoding(decoding: Decoding) -> None:
    """Refuse options of `T5.generate` that are wrong, each or together."""
    for name in OPTIONS:
        setting = check.declared().get(f'decode.{name}')
        given = getattr(decoding, name)
        if setting is not None and setting.range is not None:
            for value in given if isinstance(given, tuple) else [given]:
                check.check_allowed(name, value, setting.default, setting.range)
    if decoding.beam_size > 1 and decoding.is_random:
        raise Refused(f'beam_size={decoding.beam_size} draws nothing: set temperature=0.0')
    if decoding.num_return > decoding.beam_size and not decoding.is_random:
        raise Refused(f'num_return={decoding.num_return}: set beam_size or temperature=1.0, too')
    for name in ('top_k', 'top_p', 'min_p'):
        if getattr(decoding, name) and not decoding.is_random:
            raise Refused(f'{name}={getattr(decoding, name)} is for samples: set temperature=1.0')
    if decoding.min_length >= decoding.max_length:
        raise Refused(f'min_length={decoding.min_length}: must be below max_length')


def words_of(
    decoding: Decoding, vocabulary: Vocabulary | None, vocab_size: int
) -> dict[str, NDArray]:
    """Return the texts of `decoding` as `decode.decode` takes them, with b = 1 if they are the same for all inputs.

    Their number and length are powers of two, because each shape is compiled.
    """

    def ids_of(name: str, text: decode.Text, may_be_unknown: bool = False) -> list[int]:
        ids = _encode(vocabulary, [text])[0] if isinstance(text, str) else text
        is_list = isinstance(ids, tuple | list) and all(isinstance(i, int) for i in ids)
        if not is_list or not ids or not 0 < min(ids) <= max(ids) < vocab_size:
            raise Refused(f'{name}={text!r}: must be text or ids, 1 to {vocab_size - 1}')
        if isinstance(text, str) and UNK_ID in ids and not may_be_unknown:
            lacking = [x for x in dict.fromkeys(text) if UNK_ID in _encode(vocabulary, [x])[0]]
            raise Refused(f'{name}={text!r}: the vocabulary lacks {lacking}: use another text')
        return [*ids]

    bad_words = [ids_of(f'bad_words[{i}]', text) for i, text in enumerate(decoding.bad_words)]
    stop = []
    for i, text in enumerate(decoding.stop):
        ids = ids_of(f'stop[{i}]', text, may_be_unknown=True)
        assert vocabulary is not None, 'stop has ids: it must be text'
        # Its ids, unless the vocabulary changes the text, and every token that contains it. `_before_stop` finds
        # other occurrences.
        if vocabulary.decode(ids) == text:
            stop.append(ids)
        stop += [[k] for k in range(vocabulary.size) if text in vocabulary.decode([k])]
    lists = {'allowed': decoding.allowed}
    if decoding.is_allowed_per_input:
        lists = {f'allowed[{i}]': texts for i, texts in enumerate(decoding.allowed)}
    allowed = []
    for name, texts in lists.items():
        if isinstance(texts, str):
            texts = (texts,)
        rows = []
        for k, text in enumerate(texts):
            rows.append([*ids_of(f'{name}[{k}]', text), EOS_ID])
            if len(rows[k]) > decoding.max_length:
                raise Refused(f'{name}[{k}]={text!r}: set max_length={len(rows[k])} or more')
        allowed.append(rows)
    return {
        'bad_words_bnW': _padded([bad_words], on_left=True),
        'allowed_bnA': _padded(allowed, on_left=False),
        'stop_bnW': _padded([stop], on_left=True),
    }


def _padded(lists: Sequence[Sequence[Sequence[int]]], on_left: bool) -> NDArray:
    """Return lists of ids as int32 [b, n, W], padded with -1; further rows are NO_WORD."""
    num_words = decode.next_power(max(map(len, lists)))
    width = decode.next_power(max((len(ids) for rows in lists for ids in rows), default=1))
    padded = np.full((len(lists), num_words, width), NO_WORD, np.int32)
    for b, rows in enumerate(lists):
        for n, ids in enumerate(rows):
            start = (width - len(ids)) * on_left
            padded[b, n] = -1
            padded[b, n, start : start + len(ids)] = ids
    return padded


def _check_one_each(name: str, values: Sequence, inputs: Sequence[Ids]) -> None:
    if len(values) != len(inputs):
        raise Refused(f'{name} has {len(values)} for {len(inputs)} inputs: give one for each')


def _encode(vocabulary: Vocabulary | None, texts: list[str]) -> list[list[int]]:
    if vocabulary is None:
        raise Refused("the checkpoint has no vocabulary: load it with vocabulary=PATH or 'bytes'")
    return vocabulary.encode(texts, glued_sentinels=True)


def _are_texts(examples: Inputs | Prompts) -> bool:
    """Return whether examples are a list of one or more texts."""
    is_list = isinstance(examples, list | tuple) or getattr(examples, 'ndim', 0) == 1
    return is_list and len(examples) > 0 and all(isinstance(x, str) for x in examples)


def _shortened(value: object) -> str:
    """Return `value` as an error message shows it, in one line of at most 60 characters."""
    return f'{" ".join(repr(value).split()):.60}'


def _one_or_all(answers: list[list[Result]], num_return: int) -> list[Result] | list[list[Result]]:
    """Return the answers to each input, without a list if one is asked for."""
    if num_return > 1:
        return answers
    return [answer for [answer] in answers]
