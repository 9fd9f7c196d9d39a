"""Hugging Face's folders as T5X's tree: safetensors or Flax's msgpack, no torch, no pickle.

    config.json, spiece.model               sizes, vocabulary
    model.safetensors                       arrays by name; large models in several files and an index

torch's Linear stores kernels transposed; token table and norms have the same shape in both. Source: transformers
(4.57, 5.24) models/{t5,mt5,umt5,longt5,switch_transformers}.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import model
import paths
from answers.options import OPTIONS
from formats import flax, gemma, own_model
from formats.names import NAMES, inverse, names_of, translate
from messages import Refused, first_ten, named

WEIGHTS = 'model.safetensors'
WEIGHTS_INDEX = 'model.safetensors.index.json'
FLAX_WEIGHTS = 'flax_model*.msgpack'  # read in a folder without safetensors
OTHER_FILES = ('.bin', '.pt', '.pth', '.h5', '.gguf')  # weights that are not read
FOLDER_SUFFIXES = ('.json', '.model', '.safetensors', '.msgpack')  # read together with other files
SAVE_AGAIN = (
    'if you trust it, convert it to safetensors: load it with transformers (GGUF with gguf_file=NAME; TensorFlow with '
    'version 4 and from_tf=True) or torch.load(FILE, weights_only=True)'
)
ARCHITECTURES = {
    't5': 'T5ForConditionalGeneration',
    'mt5': 'MT5ForConditionalGeneration',
    'umt5': 'UMT5ForConditionalGeneration',
    'longt5': 'LongT5ForConditionalGeneration',
    'switch_transformers': 'SwitchTransformersForConditionalGeneration',
    **gemma.ARCHITECTURES,
}
# The beginnings of their classes' names: models, encoders, classifiers.
T5_CLASSES = re.compile('(Long|U?M)?T5|SwitchTransformers')

# config.json: Hugging Face's name of each size -> the field of T5Config.
SIZES = {
    'vocab_size': 'vocab_size',
    'd_model': 'emb_dim',
    'num_heads': 'num_heads',
    'num_layers': 'num_encoder_layers',
    'num_decoder_layers': 'num_decoder_layers',
    'd_kv': 'head_dim',
    'd_ff': 'mlp_dim',
}
# Fields of T5Config that have the same name and default in config.json.
BUCKETS = ('relative_attention_num_buckets', 'relative_attention_max_distance')
# config.json: settings that model.py and data.py support with one value only. Padding is never read, whatever its id.
FIXED_SETTINGS = {
    'layer_norm_epsilon': 1e-6,
    'decoder_start_token_id': 0,
}

# Arguments of its `generate` -> their equivalents in `infer.T5.generate`.
ARGUMENTS_OF_GENERATE = {
    'num_beams': 'use beam_size',
    'do_sample': 'use temperature: above 0, it draws tokens',
    'max_new_tokens': 'use max_length, the tokens of an answer, EOS included',
    'num_return_sequences': 'use num_return',
    'length_penalty': (
        'use alpha: as in T5X, scores are divided by ((5 + length) / 6)^alpha, where Hugging Face divides by '
        'length^length_penalty'
    ),
    'min_new_tokens': 'use min_length, the tokens after the prompt, EOS not included',
    'bad_words_ids': 'use bad_words, with texts or ids',
    'stop_strings': 'use stop',
    'prefix_allowed_tokens_fn': 'use allowed, with the answers, or a function in filters',
    'logits_processor': 'use filters, with functions (logits_rv, tokens_rT, ids_v) -> logits_rv',
    'max_length': 'use max_length, one less, because transformers counts the start token',
    'min_length': 'use min_length, one less, because transformers counts the start token',
    'eos_token_id': 'use stop, with texts',
}
# generation_config.json: settings that change no answer, that matter only in a beam search, or only in sampling; and our
# defaults that are not None, false, 0 or empty.
IRRELEVANT_SETTINGS = (
    r'_.*|transformers_version|bos_token_id|(use|output|return|cache)_.*|.*(assistant|lookbehind).*'
)
BEAM_SETTINGS = {'length_penalty', 'early_stopping', 'num_beam_groups', 'diversity_penalty'}
SAMPLING = {'temperature', 'top_k', 'top_p', 'min_p', 'typical_p', 'eta_cutoff', 'epsilon_cutoff'}
GENERATION_DEFAULTS = {
    **dict.fromkeys(('max_length', 'max_new_tokens'), 128),
    **dict.fromkeys(('num_beams', 'num_beam_groups', 'num_return_sequences', 'guidance_scale'), 1),
    **dict.fromkeys(('repetition_penalty', 'encoder_repetition_penalty', 'top_p', 'typical_p'), 1),
    'length_penalty': None,
    'pad_token_id': 0,  # these three unless config.json has others
    'eos_token_id': 1,
    'decoder_start_token_id': 0,
}

# config.json: feed_forward_proj -> mlp_activations, whose first is dense_act_fn; gelu_new is the tanh form.
FEED_FORWARDS = {
    'relu': ('relu',),
    'gated-gelu': ('gelu', 'linear'),
    'gated-silu': ('silu', 'linear'),
}
DENSE_ACT_FNS = {'relu': 'relu', 'gelu': 'gelu_new', 'silu': 'silu'}

LONG_T5 = 'long_t5'  # the family
# The option encoder_attention -> encoder_attention_type, and the name of the encoder's attention.
LONG_T5_ATTENTIONS = {
    'local': ('local', 'LocalSelfAttention'),
    'transient_global': ('transient-global', 'TransientGlobalSelfAttention'),
}

SWITCH = 'switch'  # the family
CAPACITY_FACTORS = ('train_expert_capacity_factor', 'eval_expert_capacity_factor')
# config.json of the families: Hugging Face's name -> the option, and the default. expert_capacity counts places per row
# and expert.
FAMILY_SETTINGS: dict[str, dict[str, tuple[str, float]]] = {
    LONG_T5: {
        'local_radius': ('local_radius', 127),
        'global_block_size': ('tokens_per_block', 16),
    },
    SWITCH: {
        'num_experts': ('num_experts', 8),
        'expert_capacity': ('min_expert_capacity', 64),
        'router_aux_loss_coef': ('aux_loss_factor', 0.001),
        'router_z_loss_coef': ('router_z_loss_factor', 0.001),
    },
}
# The matrix of one expert. Our array stacks all experts, under the name without `expert_N`.
EXPERT = re.compile(r'(.+\.experts\.)expert_(0|[1-9]\d{0,4})\.(.+)')

TOKEN_TABLE = 'shared.weight'
# A folder has the token table under one of these names, or equal copies under several.
TOKEN_TABLES = (TOKEN_TABLE, 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
LM_HEAD = 'lm_head.weight'
BIAS_OF_UMT5 = 'encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight'
# Old folders store this array, which no model reads.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'

T5_NAMES = re.compile(r'(shared|lm_head)\.weight|(encoder|decoder)\..+')
DTYPES = {
    'F64': np.dtype(np.float64),
    'F32': np.dtype(np.float32),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype(np.float16),
}


def parameter_names(config: model.T5Config) -> dict[str, str]:
    """Return {our path: Hugging Face's name without .weight}, with * for a layer's number: see names.py."""
    if config.module in gemma.ARCHITECTURES:
        return gemma.parameter_names(config, prefix='model.' if config.num_decoder_layers else '')
    table = names_of(config.relpos_bias_per_layer)
    options = own_model.as_dict(config.options)
    if config.module == LONG_T5:
        _, attention = LONG_T5_ATTENTIONS[options['encoder_attention']]
        for path, name in table.items():
            if path.startswith('encoder/'):
                table[path] = name.replace('.SelfAttention.', f'.{attention}.')
        layer = f'encoder.block.*.layer.0.{attention}'
        table['encoder/layers_*/attention/T5LayerNorm_0/scale'] = f'{layer}.global_input_layer_norm'
        bias = f'{layer}.global_relative_attention_bias'
        table['encoder/side_relpos_bias/rel_embedding'] = bias.replace('*', '0')
    if config.module == SWITCH:
        for path, name in NAMES.items():
            mlp, is_mlp, kernel = name.partition('.DenseReluDense.')
            if is_mlp:
                table[path] = f'{mlp}.mlp.{kernel}'
                table[path.replace('/mlp/', '/mlp/expert/')] = f'{mlp}.mlp.experts.{kernel}'
                layer = path.partition('/mlp/')[0]
                router = f'{layer}/mlp/router/router_weights/w/kernel'
                table[router] = f'{mlp}.mlp.router.classifier'
    return table


def is_transposed(path: str) -> bool:
    """Return whether Hugging Face stores the parameter at our `path` transposed."""
    return path.endswith(('/kernel', '/rel_embedding'))


class SafetensorsEntry(NamedTuple):
    """An array in a safetensors file, with its shape in our tree: a `checkpoint.LazyArray`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stored_dtype: str  # safetensors' name
    transposed: bool = False
    experts: tuple['SafetensorsEntry', ...] = ()  # the matrices of [experts, ...]
    array: np.ndarray | None = None  # Flax's, already read

    def read(self) -> np.ndarray:
        """Return the array in its `dtype`, with its shape in our tree."""
        if self.experts:
            return np.stack([expert.read() for expert in self.experts])
        if self.array is not None:
            x = self.array
        else:
            with safetensors.safe_open(self.file, framework='numpy') as file:
                x = file.get_tensor(self.name)
        if self.transposed:
            return transpose(x)
        return x

    @property
    def T(self) -> 'SafetensorsEntry':  # noqa: N802
        if self.experts:
            return stacked([expert.T for expert in self.experts])
        return self._replace(shape=self.shape[::-1], transposed=True)


def stacked(experts: Sequence[SafetensorsEntry]) -> SafetensorsEntry:
    """Return the matrices of a layer's experts as one array."""
    shape = (len(experts), *experts[0].shape)
    return experts[0]._replace(shape=shape, experts=tuple(experts))


class StoredArrays(NamedTuple):
    """The arrays of a folder by Hugging Face's names.

    The token table appears once, as shared.weight. If `has_own_lm_head` is False, because the folder has no lm_head or
    an equal one, `lm_head.weight` is the same entry.
    """

    entries: dict[str, SafetensorsEntry]
    has_own_lm_head: bool

    @property
    def has_decoder(self) -> bool:
        return any(name.startswith('decoder.') for name in self.entries)


def is_folder(folder: paths.AnyPath) -> bool:
    """Return whether a folder has weights under one of transformers' names, or a config.json with a model_type."""
    if any(paths.is_file(folder / name) for name in (WEIGHTS, WEIGHTS_INDEX)):
        return True
    try:
        return 'model_type' in paths.read_json(folder / 'config.json')
    except Refused:
        return False


def is_single_file(file: paths.AnyPath) -> bool:
    """Return whether `file` is safetensors without a config.json in its folder."""
    if file.suffix != '.safetensors' or not paths.is_file(file):
        return False
    return not paths.is_file(file.parent / 'config.json')


def check_file(file: paths.AnyPath, is_adapter: bool) -> None:
    """Raise Refused if `file` belongs to a folder, or has weights in a format that is not read."""
    remedy = SAVE_AGAIN if file.suffix in OTHER_FILES else ''
    in_folder = file.suffix in FOLDER_SUFFIXES and is_folder(file.parent)
    if is_adapter or (in_folder and not is_single_file(file)):
        remedy = f'name its folder, {file.parent}'
    if remedy:
        raise Refused(f'{file} is not read: {remedy}')


def on_disk(folder: paths.AnyPath) -> Path:
    """Return `folder`. Raises Refused if it is not on a disk."""
    if not isinstance(folder, Path):
        raise Refused(f'{folder}: safetensors are read from a disk only: copy the folder')
    return folder


def read_index(
    folder: str | paths.AnyPath, is_encoder: bool = False
) -> tuple[model.T5Config, dict[str, SafetensorsEntry], str]:
    """Return the config, dtype float32, {'target/' + our path: entry}, and an assumption to report, or ''.

    Reads only headers and copies of the token table. With `is_encoder`, or without a decoder, the config has no decoder
    layers. The caller compares paths and shapes.
    """
    folder = on_disk(paths.to_path(folder))
    config_file = folder / 'config.json'
    settings = paths.read_json(config_file)
    model_type = str(settings.get('model_type'))
    if model_type not in ARCHITECTURES:  # before the arrays, which other models have differently
        raise Refused(f'{config_file}: model_type={model_type}: use {", ".join(ARCHITECTURES)}')
    for name in settings.get('architectures') or ():
        if not T5_CLASSES.match(name):  # such as Chronos-Bolt, whose inputs are patches of a series
            raise Refused(
                f'{config_file}: architectures={name}: not a {model_type}, such as {ARCHITECTURES[model_type]}: use the '
                'program that wrote it'
            )
    files = _weight_files(folder)
    if model_type in gemma.ARCHITECTURES:
        entries = _read_entries(files)
        for entry in entries.values():
            check_array(entry)
        with named(str(config_file)):
            ends = gemma.ends_of(folder, settings)
            config, by_name, note = gemma.read(settings, entries, is_encoder, ends)
        notes = [note]
        if config.num_decoder_layers:
            notes += _notes_of_generation(folder, settings, {'eos_token_id'})
        targets = _by_path(folder, by_name, gemma.parameter_names(config))
        return config, targets, '; '.join(filter(None, notes))
    arrays = _read_headers(folder, files)
    if is_encoder or not settings.get('is_encoder_decoder', True) or not arrays.has_decoder:
        entries = {}
        for name, entry in arrays.entries.items():
            if not name.startswith('decoder.') and name != LM_HEAD:
                entries[name] = entry
        arrays = StoredArrays(entries, has_own_lm_head=False)
    with named(str(config_file)):
        config = _config(settings, arrays)
    notes = []
    if config.num_decoder_layers:
        notes += _notes_of_generation(folder, settings)
    entries = dict(arrays.entries)
    if config.logits_via_embedding:
        entries.pop(LM_HEAD, None)
    targets = _by_path(folder, entries, parameter_names(config))
    if not (config.logits_via_embedding or arrays.has_own_lm_head):
        notes.append(
            f'{folder} has no {LM_HEAD} of its own: its logits come from the token table, not divided by '
            'sqrt(d_model), as in transformers 5'
        )
    return config, targets, '; '.join(notes)


def read_single_file(file: paths.AnyPath) -> dict[str, SafetensorsEntry]:
    """Return {'target/' + our path: entry} of a file; read only its header and copies of the token table."""
    file = on_disk(file)
    arrays = _read_headers(file, _weight_files(file))
    if not arrays.has_own_lm_head:
        del arrays.entries[LM_HEAD]
    return _by_path(file, arrays.entries, names_of(is_per_layer=BIAS_OF_UMT5 in arrays.entries))


def _by_path(
    folder: Path, entries: Mapping[str, SafetensorsEntry], names: Mapping[str, str]
) -> dict[str, SafetensorsEntry]:
    """Return {'target/' + our path: entry} of the arrays. `names`: {our path: Hugging Face's name}."""
    paths_of_names = inverse(names)
    by_path = {}
    unknown = []
    for name, entry in entries.items():
        path = translate(name.removesuffix('.weight'), paths_of_names)
        by_path[f'target/{path}'] = entry.T if is_transposed(path) else entry
        if not path:
            unknown.append(name)
    if unknown:
        raise Refused(f'{folder} has arrays that its model lacks: {first_ten(sorted(unknown))}')
    return by_path


def _notes_of_generation(folder: Path, config: Mapping, skip: Set[str] = frozenset()) -> list[str]:
    """Name the settings of generation_config.json, without those in `skip`, that change our default answers."""
    file = folder / 'generation_config.json'
    if not paths.is_file(file):
        return []
    settings = paths.read_json(file)
    ignored = set(skip)
    if settings.get('num_beams') in (None, 1):
        ignored |= BEAM_SETTINGS
    if settings.get('do_sample'):
        settings = {'temperature': 1.0, 'top_k': 50, **settings}  # its defaults
    else:
        ignored |= SAMPLING
    if settings.get('max_new_tokens'):
        ignored.add('max_length')
    differences = []
    for name, value in settings.items():
        default = GENERATION_DEFAULTS.get(name, False)
        if name.endswith('_token_id'):
            default = config.get(name) or default
        is_same = value in (None, [], {}, default, [default])
        if not (is_same or name in ignored or re.fullmatch(IRRELEVANT_SETTINGS, name)):
            remedy = f'use {name}' if name in OPTIONS else 'not supported'
            remedy = ARGUMENTS_OF_GENERATE.get(name, remedy)
            differences.append(f'{name}={json.dumps(value):.40} ({remedy})')
    if not differences:
        return []
    return [
        f'{file} is not read; for its answers, set in generate or in config.decode: {first_ten(differences, "; ")}'
    ]


def _config(settings: Mapping, arrays: StoredArrays) -> model.T5Config:
    """Return the T5Config of config.json."""
    for name, value in FIXED_SETTINGS.items():
        if settings.get(name) not in (None, value):
            raise Refused(f'{name}={settings[name]}: must be {value}')
    sizes: dict = {field: settings.get(name) for name, field in SIZES.items()}
    if sizes['num_decoder_layers'] is None or not arrays.has_decoder:
        sizes['num_decoder_layers'] = sizes['num_encoder_layers']
    if not arrays.has_decoder:
        sizes['num_decoder_layers'] = 0
    for name in BUCKETS:
        if settings.get(name) is not None:
            sizes[name] = settings[name]
    default = 'gated-gelu' if settings['model_type'] in ('mt5', 'umt5') else 'relu'
    name = settings.get('feed_forward_proj', default)
    activations = FEED_FORWARDS.get(str(name), ('',))
    dense_act_fn = settings.get('dense_act_fn', DENSE_ACT_FNS.get(activations[0]))
    if dense_act_fn is None or dense_act_fn != DENSE_ACT_FNS.get(activations[0]):
        raise Refused(f'feed_forward_proj={name}, dense_act_fn={dense_act_fn}: no T5 has these')
    config = model.T5Config(
        **sizes,
        dtype='float32',
        mlp_activations=activations,
        dropout_rate=settings.get('dropout_rate', 0.1),
        logits_via_embedding=not arrays.has_decoder or _is_tied(settings, arrays.has_own_lm_head),
        float32_attention_logits=False,
        relpos_bias_per_layer=settings['model_type'] == 'umt5',
    )
    own_model.check_values(config)
    family = {'longt5': LONG_T5, 'switch_transformers': SWITCH}.get(settings['model_type'])
    if family is None:
        return config
    options = {}
    for name, (option, default_value) in FAMILY_SETTINGS[family].items():
        options[option] = settings.get(name, default_value)
    if family == LONG_T5:
        kind = str(settings.get('encoder_attention_type', 'local'))
        kinds = {name: option for option, (name, _) in LONG_T5_ATTENTIONS.items()}
        if kind not in kinds:
            raise Refused(f'encoder_attention_type={kind}: use one of {", ".join(kinds)}')
        options['encoder_attention'] = kinds[kind]
    else:
        options |= dict.fromkeys(CAPACITY_FACTORS, 0.0) | {'zero_padding': False}
        options['sparse_step'] = _sparse_step(settings, config)
    return own_model.as_family(config, family, options)


def _sparse_step(settings: Mapping, config: model.T5Config) -> int:
    """Return the sparse_step of both stacks."""
    step = settings.get('encoder_sparse_step')
    decoder_step = settings.get('decoder_sparse_step') if config.num_decoder_layers else step
    num_layers = min(config.num_encoder_layers, config.num_decoder_layers or 2)
    # Our experts are in the last layer of a step, transformers' in the second: the same for steps of 1 and 2.
    if step not in (1, 2) or decoder_step != step or step > num_layers:
        raise Refused(
            f'encoder_sparse_step={step}, decoder_sparse_step={decoder_step}: must be 1, or 2, in both stacks'
        )
    return int(step)


def _is_tied(settings: Mapping, has_own_lm_head: bool) -> bool:
    """Return whether the logits come from the token table, divided by sqrt(emb_dim).

    An lm_head of its own overrides the settings, because transformers 5 writes tie_word_embeddings=true for every model.
    Its T5 and umT5 also have scale_decoder_outputs.
    """
    is_tied = not has_own_lm_head and settings.get('tie_word_embeddings', True)
    is_rescaled = bool(settings.get('scale_decoder_outputs', is_tied))
    if is_rescaled and (has_own_lm_head or settings['model_type'] == 'mt5'):
        # transformers 4 divides the logits of such an mt5, transformers 5 does not.
        remedy = 'set tie_word_embeddings=false to load it as transformers 5 does'
        if has_own_lm_head:
            remedy = 'multiply lm_head by 1/sqrt(d_model), and set scale_decoder_outputs=false'
        raise Refused(f'logits divided by sqrt(d_model): {remedy}')
    return is_rescaled


def _read_headers(folder: Path, files: Sequence[Path]) -> StoredArrays:
    """Return the arrays in the headers of the folder's files."""
    entries = _read_entries(files)
    others = sorted(name for name in entries if not T5_NAMES.fullmatch(name))
    if others:
        raise Refused(
            f"{folder} has arrays that are not T5's: {first_ten(others)}: save its T5 or encoder alone with "
            "transformers' save_pretrained, and name that folder"
        )
    for entry in entries.values():
        check_array(entry)
    entries.pop(UNUSED, None)
    tables = [entries.pop(name) for name in TOKEN_TABLES if name in entries]
    if not tables or not all(_are_equal(tables[0], other) for other in tables[1:]):
        raise Refused(f'{folder} must have one of {", ".join(TOKEN_TABLES)}, or equal copies')
    entries[TOKEN_TABLE] = tables[0]
    has_own_lm_head = LM_HEAD in entries and not _are_equal(tables[0], entries[LM_HEAD])
    if not has_own_lm_head:
        entries[LM_HEAD] = tables[0]
    experts: dict[str, dict[int, str]] = {}
    for name in entries:
        expert = EXPERT.fullmatch(name)
        if expert:
            experts.setdefault(expert[1] + expert[3], {})[int(expert[2])] = name
    for name, by_number in experts.items():
        entries[name] = stacked([entries.pop(by_number[i]) for i in sorted(by_number)])
    return StoredArrays(entries, has_own_lm_head)


def _read_entries(files: Sequence[Path]) -> dict[str, SafetensorsEntry]:
    entries: dict[str, SafetensorsEntry] = {}
    for file in files:
        entries |= read_header(file)
    return entries


def read_header(file: Path) -> dict[str, SafetensorsEntry]:
    """Return the arrays in the header of a file. `check_array` checks their dtypes."""
    entries = {}
    if file.suffix == '.msgpack':
        stored_names = {str(dtype): name for name, dtype in DTYPES.items()}
        for name, x in flax.read_file(file).items():
            stored_dtype = stored_names.get(str(x.dtype), str(x.dtype))
            entries[name] = SafetensorsEntry(file, name, x.shape, x.dtype, stored_dtype, array=x)
        return entries
    try:
        with safetensors.safe_open(file, framework='numpy') as arrays:
            for name in arrays.keys():
                header = arrays.get_slice(name)
                stored_dtype = header.get_dtype()
                dtype = DTYPES.get(stored_dtype, DTYPES['F32'])
                shape = tuple(header.get_shape())
                entries[name] = SafetensorsEntry(file, name, shape, dtype, stored_dtype)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise Refused(f'{file} cannot be read ({error}): copy it again') from error
    return entries


def check_array(entry: SafetensorsEntry) -> None:
    """Raise Refused for an array of a dtype that is not supported."""
    if entry.stored_dtype not in DTYPES:
        fault = f'{entry.file}: {entry.name} is {entry.stored_dtype}'
        raise Refused(f'{fault}: save it as one of {", ".join(DTYPES)}')


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights."""
    if is_single_file(folder):
        return [paths.own_file(folder)]
    if paths.is_file(folder / WEIGHTS):  # first, as in transformers
        return [paths.own_file(folder / WEIGHTS)]
    if paths.is_file(folder / WEIGHTS_INDEX):
        weight_map = paths.read_json(folder / WEIGHTS_INDEX)['weight_map']
        return [paths.own_file(folder / name) for name in sorted({*weight_map.values()})]
    flax_files = sorted(folder.glob(FLAX_WEIGHTS))
    if flax_files:
        return [paths.own_file(file) for file in flax_files]
    raise Refused(
        f'{folder} has no {WEIGHTS}: copy it, or give a variant this name; other files are not read: {SAVE_AGAIN}'
    )


def _are_equal(a: SafetensorsEntry, b: SafetensorsEntry) -> bool:
    return a.shape == b.shape and np.array_equal(a.read(), b.read())


def transpose(x: np.ndarray) -> np.ndarray:
    """Return a transposed copy, made 16 rows at a time: five times faster than numpy's."""
    y = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, len(x), 16):
        y[:, i : i + 16] = x[i : i + 16].T
    return y
