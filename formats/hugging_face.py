"""Hugging Face's folders as T5X's tree: safetensors only, no torch, no pickle.

    config.json, spiece.model               sizes, vocabulary
    model.safetensors                       arrays by name; large models in several files and an index

torch's Linear keeps a kernel transposed; token table and norms have the same shape in both. Source: transformers
(4.57, 5.24) models/{t5,mt5,umt5,longt5,switch_transformers}.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

import model
import paths
from answers.options import OPTIONS
from formats import default_ids, own_model, own_options
from messages import Refused, first_ten, named

WEIGHTS = 'model.safetensors'
WEIGHTS_INDEX = 'model.safetensors.index.json'
TRAINERS = re.compile(r'checkpoint-\d+')  # a checkpoint of transformers' Trainer
# Weights that are not read, by name and by suffix: how to write safetensors from them.
SAVE_AGAIN = 'load it with transformers, if you trust it, and save_pretrained it as safetensors'
OTHER_WEIGHTS = {
    'pytorch_model.bin': SAVE_AGAIN,
    'pytorch_model.bin.index.json': SAVE_AGAIN,
    'flax_model.msgpack': f'{SAVE_AGAIN} (from_flax=True, transformers 4 and flax)',
    'tf_model.h5': f'{SAVE_AGAIN} (from_tf=True, transformers 4 and tensorflow)',
}
PICKLE = 'a pickle can run code: write safetensors from torch.load(FILE, weights_only=True)'
OTHER_FILES = {
    '.gguf': 'load it with transformers (gguf_file=NAME), and write safetensors.torch.save_model',
    '.pt': PICKLE,
    '.pth': PICKLE,
    '.bin': PICKLE,
}
ARCHITECTURES = {
    't5': 'T5ForConditionalGeneration',
    'mt5': 'MT5ForConditionalGeneration',
    'umt5': 'UMT5ForConditionalGeneration',
    'longt5': 'LongT5ForConditionalGeneration',
    'switch_transformers': 'SwitchTransformersForConditionalGeneration',
}

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
# config.json: settings that model.py and data.py support with one value only.
FIXED_SETTINGS = {
    'layer_norm_epsilon': 1e-6,
    'relative_attention_num_buckets': 32,
    'relative_attention_max_distance': 128,
    **default_ids.T5_IDS,
}

# Arguments of its `generate` of other names, and what `infer.T5.generate` has instead.
ARGUMENTS_OF_GENERATE = {
    'num_beams': 'use beam_size',
    'do_sample': 'use temperature, which draws tokens if it is above 0',
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
# generation_config.json: settings that change no answer; that count in a beam search or if tokens are drawn; and the
# values that are our defaults, where this is not None, false, 0 or empty.
NOT_OF_ANSWERS = (
    r'_.*|transformers_version|bos_token_id|(use|output|return|cache)_.*|.*(assistant|lookbehind).*'
)
OF_BEAMS = {'length_penalty', 'early_stopping', 'num_beam_groups', 'diversity_penalty'}
OF_DRAWING = {'temperature', 'top_k', 'top_p', 'min_p', 'typical_p', 'eta_cutoff', 'epsilon_cutoff'}
OURS_OF_GENERATION = {
    **dict.fromkeys(('max_length', 'max_new_tokens'), 128),
    **dict.fromkeys(('num_beams', 'num_beam_groups', 'num_return_sequences', 'guidance_scale'), 1),
    **dict.fromkeys(('repetition_penalty', 'encoder_repetition_penalty', 'top_p', 'typical_p'), 1),
    'length_penalty': None,
}


class FeedForward(NamedTuple):
    """An activation of the MLP: `dense_act_fn` of config.json, and T5Config's `mlp_activations`."""

    dense_act_fn: str
    mlp_activations: tuple[str, ...]


# config.json: feed_forward_proj. gelu_new is the tanh form.
FEED_FORWARDS = {
    'relu': FeedForward('relu', ('relu',)),
    'gated-gelu': FeedForward('gelu_new', ('gelu', 'linear')),
    'gated-silu': FeedForward('silu', ('silu', 'linear')),
}


LONG_T5 = 'long_t5'  # the family
# The option encoder_attention -> encoder_attention_type, and the name of the encoder's attention.
LONG_T5_ATTENTIONS = {
    'local': ('local', 'LocalSelfAttention'),
    'transient_global': ('transient-global', 'TransientGlobalSelfAttention'),
}


SWITCH = 'switch'  # the family
CAPACITY_FACTORS = ('train_expert_capacity_factor', 'eval_expert_capacity_factor')
# config.json of the families: Hugging Face's name -> the option, and the default. The capacity counts the places for
# a row and expert.
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
# The matrix of one expert. Ours has those of all experts, under the name without `expert_N`.
EXPERT = re.compile(r'(.+\.experts\.)expert_(0|[1-9]\d{0,4})\.(.+)')


# The parts of a layer, in Hugging Face's order, which numbers them: our norm, our module behind it, their module.
SUBLAYERS = {
    'encoder': [
        ('pre_attention_layer_norm', 'attention', 'SelfAttention'),
        ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
    ],
    'decoder': [
        ('pre_self_attention_layer_norm', 'self_attention', 'SelfAttention'),
        ('pre_cross_attention_layer_norm', 'encoder_decoder_attention', 'EncDecAttention'),
        ('pre_mlp_layer_norm', 'mlp', 'DenseReluDense'),
    ],
}
ATTENTION_KERNELS = {'query': 'q', 'key': 'k', 'value': 'v', 'out': 'o'}
TOKEN_TABLE = 'shared.weight'
# A folder has the token table under one of these names, or equal copies.
TOKEN_TABLES = (TOKEN_TABLE, 'encoder.embed_tokens.weight', 'decoder.embed_tokens.weight')
LM_HEAD = 'lm_head.weight'
# Old folders store this array, which no model reads.
UNUSED = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'

# The names of a T5's arrays, in a folder or a single file.
T5_NAMES = re.compile(r'(shared|lm_head)\.weight|(encoder|decoder)\..+')
# The factor of an array in FP8, stored next to it; and other arrays of such files, which are not weights.
SCALES = ('scale_weight', 'weight_scale')
NO_WEIGHTS = ('scaled_fp8', 'scale_input', 'input_scale', 'comfy_quant')

FLOAT8 = {
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
}
DTYPES = {
    'F64': np.dtype(np.float64),
    'F32': np.dtype(np.float32),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F16': np.dtype(np.float16),
}


def parameter_names(config: model.T5Config) -> dict[str, str]:
    """Return {our path: Hugging Face's name} of every parameter."""
    names = {'token_embedder/embedding': TOKEN_TABLE}
    depths = {'encoder': config.num_encoder_layers}
    if config.num_decoder_layers:
        depths['decoder'] = config.num_decoder_layers
    mlp_kernels = {'wi': 'wi', 'wo': 'wo'}
    if len(config.mlp_activations) > 1:
        mlp_kernels = {'wi_0': 'wi_0', 'wi_1': 'wi_1', 'wo': 'wo'}
    for stack, depth in depths.items():
        names[f'{stack}/{stack}_norm/scale'] = f'{stack}.final_layer_norm.weight'
        for i in range(depth):
            layer = f'{stack}/layers_{i}'
            block = f'{stack}.block.{i}.layer'
            for j, (norm, module, their_module) in enumerate(SUBLAYERS[stack]):
                names[f'{layer}/{norm}/scale'] = f'{block}.{j}.layer_norm.weight'
                kernels = mlp_kernels if module == 'mlp' else ATTENTION_KERNELS
                for kernel, their_kernel in kernels.items():
                    path = f'{layer}/{module}/{kernel}/kernel'
                    names[path] = f'{block}.{j}.{their_module}.{their_kernel}.weight'
            bias = f'{block}.0.SelfAttention.relative_attention_bias.weight'
            if config.relpos_bias_per_layer:
                names[f'{layer}/relpos_bias/rel_embedding'] = bias
            elif i == 0:
                names[f'{stack}/relpos_bias/rel_embedding'] = bias
    if config.num_decoder_layers and not config.logits_via_embedding:
        names['decoder/logits_dense/kernel'] = LM_HEAD
    if config.module == LONG_T5:
        names |= _long_t5_names(config, names)
    if config.module == SWITCH:
        names = _switch_names(config, names)
    return names


def _long_t5_names(config: model.T5Config, names: Mapping[str, str]) -> dict[str, str]:
    """Return the part of `parameter_names` that differs in LongT5: the encoder's attention."""
    kind = own_options.as_dict(config.options)['encoder_attention']
    _, attention = LONG_T5_ATTENTIONS[kind]
    changed = {}
    for path, name in names.items():
        if path.startswith('encoder/'):
            changed[path] = name.replace('.SelfAttention.', f'.{attention}.')
    if kind == 'transient_global':
        for i in range(config.num_encoder_layers):
            path = f'encoder/layers_{i}/attention/T5LayerNorm_0/scale'
            changed[path] = f'encoder.block.{i}.layer.0.{attention}.global_input_layer_norm.weight'
        bias = f'encoder.block.0.layer.0.{attention}.global_relative_attention_bias.weight'
        changed['encoder/side_relpos_bias/rel_embedding'] = bias
    return changed


def _switch_names(config: model.T5Config, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of a Switch Transformer, from those of a T5 of its sizes. All experts have one name."""
    step = own_options.as_dict(config.options)['sparse_step']
    changed = {}
    for path, name in names.items():
        name = name.replace('.DenseReluDense.', '.mlp.')
        kernel = re.fullmatch(r'(.+/layers_(\d+)/mlp)/(.+)', path)
        if kernel and int(kernel[2]) % step == step - 1:
            mlp = name.partition('.mlp.')[0] + '.mlp'
            changed[f'{kernel[1]}/router/router_weights/w/kernel'] = (
                f'{mlp}.router.classifier.weight'
            )
            path = f'{kernel[1]}/expert/{kernel[3]}'
            name = name.replace('.mlp.', '.mlp.experts.')
        changed[path] = name
    return changed


def is_transposed(path: str) -> bool:
    """Return whether Hugging Face stores the parameter at our `path` transposed."""
    return path.endswith(('/kernel', '/rel_embedding'))


class SafetensorsEntry(NamedTuple):
    """An array in a safetensors file, with its shape in our tree: a `checkpoint.LazyArray`."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stored_dtype: str  # safetensors' name; FP8 is read as float32
    transposed: bool = False
    experts: tuple['SafetensorsEntry', ...] = ()  # the matrices of [experts, ...]
    scale: 'SafetensorsEntry | None' = None  # a factor of its values, or of its rows in the file
    first_rows: tuple[int, ...] = ()  # in the file, in the order in which they are read

    def read(self) -> np.ndarray:
        """Return the array in its `dtype`, with its shape in our tree."""
        if self.experts:
            return np.stack([expert.read() for expert in self.experts])
        if self.stored_dtype in FLOAT8:  # safetensors does not read these as NumPy's
            with self.file.open('rb') as stream:
                header_bytes = int.from_bytes(stream.read(8), 'little')
                header = json.loads(stream.read(header_bytes))[self.name]
                begin, end = header['data_offsets']
                stream.seek(begin, 1)
                content = stream.read(end - begin)
            x = np.frombuffer(content, FLOAT8[self.stored_dtype]).reshape(header['shape'])
            x = x.astype(np.float32)
        else:
            with safetensors.safe_open(self.file, framework='numpy') as file:
                x = file.get_tensor(self.name)
        if self.scale is not None:
            x = x.astype(np.float32) * self.scale.read()
        if self.first_rows:
            x = np.concatenate([x[list(self.first_rows)], x[len(self.first_rows) :]])
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

    The token table is there once, as shared.weight. `lm_head.weight` is that same entry where `has_own_lm_head`
    is False: where the folder has no lm_head, or an equal one.
    """

    entries: dict[str, SafetensorsEntry]
    has_own_lm_head: bool

    @property
    def has_decoder(self) -> bool:
        return any(name.startswith('decoder.') for name in self.entries)


def is_folder(folder: paths.AnyPath) -> bool:
    """Return whether a folder has weights under one of transformers' names, or a config.json with a model_type."""
    if any(paths.is_file(folder / name) for name in (WEIGHTS, WEIGHTS_INDEX, *OTHER_WEIGHTS)):
        return True
    try:
        return 'model_type' in paths.read_json(folder / 'config.json')
    except Refused:
        return False


def is_single_file(file: paths.AnyPath) -> bool:
    """Return whether `file` has all weights of a model, and no config.json beside it."""
    if file.suffix != '.safetensors' or not paths.is_file(file):
        return False
    return not paths.is_file(file.parent / 'config.json')


def check_file(file: paths.AnyPath, is_adapter: bool) -> None:
    """Raise Refused if `file` is one of a folder, or has weights that are not read."""
    remedy = OTHER_WEIGHTS.get(file.name) or OTHER_FILES.get(file.suffix)
    is_of_folder = file.suffix in ('.json', '.model', '.safetensors') and is_folder(file.parent)
    if is_adapter or (is_of_folder and not is_single_file(file)):
        remedy = f'name its folder, {file.parent}'
    if remedy:
        raise Refused(f'{file} is not read: {remedy}')


def check_folder(folder: paths.AnyPath) -> None:
    """Raise Refused for a folder of checkpoints of transformers' Trainer."""
    saved = [path.name for path in paths.list_folder(folder) if TRAINERS.fullmatch(path.name)]
    if saved and not is_folder(folder):
        raise Refused(
            f'{folder} holds checkpoints of a Trainer: name one, {first_ten(sorted(saved))}'
        )


def on_disk(folder: paths.AnyPath) -> Path:
    """Return `folder`, from which safetensors can be read."""
    if not isinstance(folder, Path):
        raise Refused(f'{folder}: safetensors are read from a disk only: copy the folder')
    return folder


def read_index(
    folder: str | paths.AnyPath, is_encoder: bool = False
) -> tuple[model.T5Config, dict[str, SafetensorsEntry], str]:
    """Return what a folder or single file has, without its arrays; read only headers and copies of the token table.

    It is the config, dtype float32, {'target/' + our path: entry}, and an assumption to report, or ''. With
    `is_encoder`, or without a decoder, the config has no decoder layers. The caller compares shapes.
    """
    folder = on_disk(paths.to_path(folder))
    files = _weight_files(folder)
    if is_single_file(folder):
        config_file = folder
        arrays = _read_headers(folder, files)
        settings = _settings_of_shapes(folder, arrays)
    else:
        config_file = folder / 'config.json'
        settings = paths.read_json(config_file)
        model_type = str(settings.get('model_type'))
        if model_type not in ARCHITECTURES:  # first: other models have other arrays
            raise Refused(f'{config_file}: model_type={model_type}: use {", ".join(ARCHITECTURES)}')
        arrays = _read_headers(folder, files)
    if is_encoder or not settings.get('is_encoder_decoder', True) or not arrays.has_decoder:
        entries = {}
        for name, entry in arrays.entries.items():
            if not name.startswith('decoder.') and name != LM_HEAD:
                entries[name] = entry
        arrays = StoredArrays(entries, has_own_lm_head=False)
    first_rows = {}
    token_ids = {name: settings.get(name) or id for name, id in default_ids.T5_IDS.items()}
    with named(str(config_file)):
        if default_ids.has_default_ids(settings):
            is_tied = arrays.has_decoder and not arrays.has_own_lm_head
            first_rows[TOKEN_TABLE] = default_ids.rows_of_tokens(settings, is_tied)
            first_rows[LM_HEAD] = default_ids.ROWS_OF_LOGITS
            settings = {**settings, **default_ids.T5_IDS}
        config = _config(settings, arrays)
    notes = []
    if config.num_decoder_layers:
        notes += _notes_of_generation(folder, token_ids)
    stored = dict(arrays.entries)
    if config.logits_via_embedding:
        stored.pop(LM_HEAD, None)
    for name in first_rows.keys() & stored.keys():
        stored[name] = stored[name]._replace(first_rows=first_rows[name])
    names = parameter_names(config)
    differences = [f'{name} is missing' for name in names.values() if name not in stored]
    differences += [f'{name} is not of it' for name in sorted(set(stored) - set(names.values()))]
    if differences:
        raise Refused(f'{folder} is not what its config says: {first_ten(differences, "; ")}')
    targets: dict[str, SafetensorsEntry] = {}
    for path, name in names.items():
        targets[f'target/{path}'] = stored[name].T if is_transposed(path) else stored[name]
    if paths.is_file(folder / '2_Dense' / 'config.json'):
        notes.append(
            f'{folder} is of sentence-transformers: a vector is the mean of its tokens (--pool=mean), and is still to '
            'be multiplied by the matrix in 2_Dense and divided by its length'
        )
    if not (config.logits_via_embedding or arrays.has_own_lm_head):
        notes.append(
            f'{folder} has no {LM_HEAD} of its own: its logits are those of the token table, not divided by '
            'sqrt(d_model), as transformers 5 has them'
        )
    return config, targets, '; '.join(notes)


def _notes_of_generation(folder: Path, token_ids: Mapping[str, int]) -> list[str]:
    """Name the settings of generation_config.json that give other answers than our defaults."""
    file = folder / 'generation_config.json'
    if not paths.is_file(file):
        return []
    try:
        settings = paths.read_json(file)
    except (Refused, OSError) as error:  # the model does not need it
        return [f'{file} is not read: {paths.reason(error)}']
    ignored: set[str] = set()
    if settings.get('num_beams') in (None, 1):
        ignored |= OF_BEAMS
    if settings.get('do_sample'):
        settings = {'temperature': 1.0, 'top_k': 50, **settings}  # its defaults
    else:
        ignored |= OF_DRAWING
    if settings.get('max_new_tokens'):
        ignored.add('max_length')
    differences = []
    for name, value in settings.items():
        ours = {**OURS_OF_GENERATION, **token_ids}.get(name, False)
        is_same = value in (None, [], {}, ours, [ours])
        if not (is_same or name in ignored or re.fullmatch(NOT_OF_ANSWERS, name)):
            same = f'use {name}' if name in OPTIONS else 'not supported'
            remedy = ARGUMENTS_OF_GENERATE.get(name, same)
            differences.append(f'{name}={json.dumps(value):.40} ({remedy})')
    if not differences:
        return []
    return [
        f'{file} is not read; its answers need, in generate or below config.decode: {first_ten(differences, "; ")}'
    ]


def _config(settings: Mapping, arrays: StoredArrays) -> model.T5Config:
    """Return the T5Config of config.json."""
    for name, value in FIXED_SETTINGS.items():
        if settings.get(name) not in (None, value):
            raise Refused(f'{name}={settings[name]}: must be {value}')
    sizes: dict = {ours: settings.get(theirs) for theirs, ours in SIZES.items()}
    if sizes['num_decoder_layers'] is None or not arrays.has_decoder:
        sizes['num_decoder_layers'] = sizes['num_encoder_layers']
    # A config.json may claim any number of layers.
    largest = max(max(x.shape, default=0) for x in arrays.entries.values())
    limits = {theirs: largest for theirs in SIZES}
    limits['num_layers'] = _count_layers(arrays, 'encoder')
    limits['num_decoder_layers'] = _count_layers(
        arrays, 'decoder' if arrays.has_decoder else 'encoder'
    )
    for theirs, ours in SIZES.items():
        size = sizes[ours]
        if type(size) is not int or not 1 <= size <= limits[theirs]:
            raise Refused(f'{theirs}={size}: must be an integer from 1 to {limits[theirs]}')
    if not arrays.has_decoder:
        sizes['num_decoder_layers'] = 0
    default = 'gated-gelu' if settings['model_type'] in ('mt5', 'umt5') else 'relu'
    name = settings.get('feed_forward_proj', default)
    feed_forward = FEED_FORWARDS.get(str(name))
    dense_act_fn = settings.get('dense_act_fn', feed_forward and feed_forward.dense_act_fn)
    if feed_forward is None or dense_act_fn != feed_forward.dense_act_fn:
        raise Refused(f'feed_forward_proj={name}, dense_act_fn={dense_act_fn}: no T5 has these')
    config = model.T5Config(
        **sizes,
        dtype='float32',
        mlp_activations=feed_forward.mlp_activations,
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
    for name, (option, missing) in FAMILY_SETTINGS[family].items():
        options[option] = settings.get(name, missing)
    if family == LONG_T5:
        kind = str(settings.get('encoder_attention_type', 'local'))
        kinds = {theirs: ours for ours, (theirs, _) in LONG_T5_ATTENTIONS.items()}
        if kind not in kinds:
            raise Refused(f'encoder_attention_type={kind}: use one of {", ".join(kinds)}')
        options['encoder_attention'] = kinds[kind]
    else:
        options |= dict.fromkeys(CAPACITY_FACTORS, 0.0) | {'zero_padding': False}
        options['sparse_step'] = _sparse_step(settings, config)
    return own_model.as_family(config, family, options)


def _sparse_step(settings: Mapping, config: model.T5Config) -> int:
    """Return how many layers have one with experts."""
    step = settings.get('encoder_sparse_step')
    other = settings.get('decoder_sparse_step') if config.num_decoder_layers else step
    num_layers = min(config.num_encoder_layers, config.num_decoder_layers or 2)
    # We put the experts into the last layer of a step, transformers into the second: the same for steps of 1 and 2.
    if step not in (1, 2) or other != step or step > num_layers:
        raise Refused(
            f'encoder_sparse_step={step}, decoder_sparse_step={other}: must be 1, or 2, in both stacks'
        )
    return int(step)


def _settings_of_shapes(file: Path, arrays: StoredArrays) -> dict:
    """Return what a config.json would say of a single file."""
    layer = 'encoder.block.0.layer'
    bias = f'{layer}.0.SelfAttention.relative_attention_bias.weight'
    out = f'{layer}.0.SelfAttention.o.weight'
    mlp = f'{layer}.1.DenseReluDense'
    experts: dict = {}
    for i in range(_count_layers(arrays, 'encoder')):
        router = arrays.entries.get(f'encoder.block.{i}.layer.1.mlp.router.classifier.weight')
        if router is not None and router.shape:
            mlp = f'encoder.block.{i}.layer.1.mlp.experts'
            experts = {'model_type': 'switch_transformers', 'num_experts': router.shape[0]}
            experts |= {f'{stack}_sparse_step': i + 1 for stack in ('encoder', 'decoder')}
            break
    wo = f'{mlp}.wo.weight'
    for name in (TOKEN_TABLE, bias, out, wo):
        num_dimensions = 3 if experts and name == wo else 2
        if name not in arrays.entries or len(arrays.entries[name].shape) != num_dimensions:
            raise Refused(f'{file} has no matrix {name}: it holds no T5')
    vocab_size, d_model = arrays.entries[TOKEN_TABLE].shape
    num_heads = arrays.entries[bias].shape[1]
    is_gated = f'{mlp}.wi_0.weight' in arrays.entries
    return {
        'model_type': 'umt5' if bias.replace('block.0', 'block.1') in arrays.entries else 't5',
        'vocab_size': vocab_size,
        'd_model': d_model,
        'num_heads': num_heads,
        'd_kv': arrays.entries[out].shape[1] // num_heads,
        'd_ff': arrays.entries[wo].shape[-1],
        'num_layers': _count_layers(arrays, 'encoder'),
        'num_decoder_layers': _count_layers(arrays, 'decoder'),
        'feed_forward_proj': 'gated-gelu' if is_gated else 'relu',
        **experts,
    }


def _count_layers(arrays: StoredArrays, stack: str) -> int:
    blocks = [re.match(rf'{stack}\.block\.\d+\.', name) for name in arrays.entries]
    return len({block[0] for block in blocks if block})


def _is_tied(settings: Mapping, has_own_lm_head: bool) -> bool:
    """Return whether the logits are those of the token table, divided by sqrt(emb_dim).

    An lm_head of its own decides before the settings do, because transformers 5 writes tie_word_embeddings=true
    for every model. Its T5 and umT5 have scale_decoder_outputs beside it.
    """
    is_tied = not has_own_lm_head and settings.get('tie_word_embeddings', True)
    is_rescaled = bool(settings.get('scale_decoder_outputs', is_tied))
    if is_rescaled and (has_own_lm_head or settings['model_type'] == 'mt5'):
        # Of such an mt5 transformers 4 divides the logits, transformers 5 does not.
        remedy = 'set tie_word_embeddings=false to load it as transformers 5 does'
        if has_own_lm_head:
            remedy = 'multiply lm_head by 1/sqrt(d_model), and set scale_decoder_outputs=false'
        raise Refused(f'logits divided by sqrt(d_model): {remedy}')
    return is_rescaled


def _read_headers(folder: Path, files: Sequence[Path]) -> StoredArrays:
    """Return the arrays that the headers of the folder's files name."""
    entries: dict[str, SafetensorsEntry] = {}
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                raise Refused(f'{file}: {name} is there twice: copy it again')
            if name.rpartition('.')[2] not in NO_WEIGHTS:
                entries[name] = entry
    others = sorted(name for name in entries if not T5_NAMES.fullmatch(name))
    if others:
        raise Refused(
            f"{folder} has arrays that are not T5's: {first_ten(others)}: save its T5 or encoder alone with "
            "transformers' save_pretrained, and name that folder"
        )
    for entry in entries.values():
        check_array(entry)
    for name in list(entries):
        owner, _, suffix = name.rpartition('.')
        array = entries.get(f'{owner}.weight')
        if suffix in SCALES and array is not None:
            # One factor, or one of each row. A scale of another shape is left, and is not of the model.
            if entries[name].shape in ((), (1,), (*array.shape[:1], 1)):
                scaled = array._replace(scale=entries.pop(name), dtype=DTYPES['F32'])
                entries[f'{owner}.weight'] = scaled
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
        kinds = {(entries[x].shape, entries[x].dtype) for x in by_number.values()}
        # Experts with gaps or of several shapes are left, and are not of the model.
        if len(kinds) == 1 and sorted(by_number) == list(range(len(by_number))):
            entries[name] = stacked([entries.pop(by_number[i]) for i in sorted(by_number)])
    return StoredArrays(entries, has_own_lm_head)


def read_header(file: Path) -> dict[str, SafetensorsEntry]:
    """Return the arrays that the header of a file names, of any dtype: see `check_array`."""
    entries = {}
    try:
        with safetensors.safe_open(file, framework='numpy') as arrays:
            for name in arrays.keys():
                header = arrays.get_slice(name)
                stored = header.get_dtype()
                dtype = DTYPES.get(stored, DTYPES['F32'])
                shape = tuple(header.get_shape())
                entries[name] = SafetensorsEntry(file, name, shape, dtype, stored_dtype=stored)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise Refused(f'{file} cannot be read ({error}): copy it again') from error
    return entries


def check_array(entry: SafetensorsEntry) -> None:
    """Raise Refused for an array that is empty or of a dtype that is not read."""
    known = [*DTYPES, *FLOAT8]
    if entry.stored_dtype not in known or 0 in entry.shape:
        found = f'{entry.file}: {entry.name} is {entry.stored_dtype} {entry.shape}'
        raise Refused(f'{found}: must be an array of {", ".join(known)}, and not empty')


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder."""
    if is_single_file(folder):
        paths.check_not_lfs(folder)  # a link of the user's own may lead anywhere
        return [folder]
    if paths.is_file(folder / WEIGHTS):  # first, as transformers has it
        return [paths.own_file(folder / WEIGHTS)]
    remedy = 'copy it, or its parts and their index'
    for file in sorted(folder.glob('*.safetensors')):
        remedy = f'rename {file.name}, if it is a variant of it'
    for name, save_again in OTHER_WEIGHTS.items():
        if paths.is_file(folder / name):
            remedy = f'{name} is not read: {save_again}'
    index_file = folder / WEIGHTS_INDEX
    if paths.is_file(index_file):
        weight_map = paths.read_json(index_file).get('weight_map')
        names = ['no weight_map']
        if isinstance(weight_map, dict):
            names = sorted({str(name) for name in weight_map.values()})
        if all(re.fullmatch(r'[\w.-]+\.safetensors', name) for name in names):
            return [paths.own_file(folder / name) for name in names]
        remedy = f'{WEIGHTS_INDEX} must name safetensors in its folder, not {first_ten(names)}'
    raise Refused(f'{folder} has no {WEIGHTS}: {remedy}')


def _are_equal(a: SafetensorsEntry, b: SafetensorsEntry) -> bool:
    """Return whether two stored matrices are equal. Reads a block of rows at a time."""
    if a.shape != b.shape or len(a.shape) != 2:
        return False
    if FLOAT8.keys() & {a.stored_dtype, b.stored_dtype} or a.scale or b.scale:
        return np.array_equal(a.read(), b.read())
    num_rows = a.shape[0]
    open_file = functools.partial(safetensors.safe_open, framework='numpy')
    with open_file(a.file) as file_a, open_file(b.file) as file_b:
        rows_of_a = file_a.get_slice(a.name)
        rows_of_b = file_b.get_slice(b.name)
        for i in range(0, num_rows, 4096):
            block = slice(i, min(i + 4096, num_rows))
            if not np.array_equal(rows_of_a[block], rows_of_b[block]):
                return False
    return True


def transpose(x: np.ndarray) -> np.ndarray:
    """Return a transposed copy. Copies 16 rows at a time, because numpy's own way is five times slower."""
    y = np.empty(x.shape[::-1], x.dtype)
    for i in range(0, len(x), 16):
        y[:, i : i + 16] = x[i : i + 16].T
    return y
