"""T5Gemma and T5Gemma 2: names of parameters and config.json, and T5Gemma's Flax arrays.

hugging_face.py and write_hugging_face.py read and write the files of a folder. Source: transformers (5.24)
models/{t5gemma,t5gemma2}; google-deepmind/gemma research/t5gemma.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

import checkpoint
import model
import paths
from configs import check, setting
from configs.setting import check_allowed
from formats import own_model
from formats.names import inverse, translate
from messages import Refused
from paths import AnyPath
from vocabulary import EOS_ID

T5GEMMA = 't5gemma'  # model_type, and the family
T5GEMMA2 = 't5gemma2'
ARCHITECTURES = {
    T5GEMMA: 'T5GemmaForConditionalGeneration',
    T5GEMMA2: 'T5Gemma2ForConditionalGeneration',
}
IMAGES = re.compile(r'(model\.)?(encoder\.)?(vision_tower|multi_modal_projector)\..+')
PREFIX = re.compile(r'(model\.)?(encoder|decoder)\.(text_model\.)?')
LM_HEAD = 'lm_head.out_proj'
# Stack, our name and transformers' name of each attention.
ATTENTIONS = (
    ('encoder', 'attention', 'self_attn'),
    ('decoder', 'self_attention', 'self_attn'),
    ('decoder', 'encoder_decoder_attention', 'cross_attn'),
)
# Within a layer: our path -> transformers' name.
NAMES = {
    'attention/query/kernel': 'attn.q_proj',
    'attention/key/kernel': 'attn.k_proj',
    'attention/value/kernel': 'attn.v_proj',
    'attention/out/kernel': 'attn.o_proj',
    'attention/query_norm/scale': 'attn.q_norm',
    'attention/key_norm/scale': 'attn.k_norm',
    'attention/post_layer_norm/scale': 'post_attn_layernorm',
    'pre_mlp_layer_norm/scale': 'pre_feedforward_layernorm',
    'mlp/wi_0/kernel': 'mlp.gate_proj',
    'mlp/wi_1/kernel': 'mlp.up_proj',
    'mlp/wo/kernel': 'mlp.down_proj',
    'mlp/post_layer_norm/scale': 'post_feedforward_layernorm',
}
LAYER_TYPES = ('sliding_attention', 'full_attention')
# Settings of a stack: our option -> transformers' name.
OPTIONS = {
    'attention_cap': 'attn_logit_softcapping',
    'logits_cap': 'final_logit_softcapping',
    'window': 'sliding_window',
    'full_every': 'sliding_window_pattern',
}
FLAX_ATTENTIONS = {'attn': 'self_attn', 'cross_attn': 'cross_attn'}
FLAX_NORMS = {
    'pre_attention_norm': 'pre_self_attn',
    'post_attention_norm': 'post_self_attn',
    'pre_cross_attention_norm': 'pre_cross_attn',
    'post_cross_attention_norm': 'post_cross_attn',
    'pre_ffw_norm': 'pre_feedforward',
    'post_ffw_norm': 'post_feedforward',
}


def parameter_names(config: model.T5Config, prefix: str = '') -> dict[str, str]:
    """Return {our path: transformers' name without .weight}, with * for a layer's number: see names.py."""
    table = {'decoder/logits_dense/kernel': LM_HEAD}
    for stack, attention, attn in ATTENTIONS:
        table[f'{stack}/{stack}_norm/scale'] = f'{prefix}{stack}.norm'
        pre_norm = attention.replace('encoder_decoder', 'cross')
        table[f'{stack}/layers_*/pre_{pre_norm}_layer_norm/scale'] = (
            f'{prefix}{stack}.layers.*.pre_{attn}_layernorm'
        )
        for path, name in NAMES.items():
            path = path.replace('attention', attention, 1)
            name = name.replace('attn', attn, 1)
            table[f'{stack}/layers_*/{path}'] = f'{prefix}{stack}.layers.*.{name}'
    tables = {'token_embedder/embedding': 'encoder.embed_tokens'}
    if config.module == T5GEMMA2:
        tables['token_embedder/eoi_embedding'] = 'encoder.embed_tokens.eoi_embedding'
    elif config.num_decoder_layers:
        tables['token_embedder/embedding'] = 'decoder.embed_tokens'
        tables['encoder/token_embedder/embedding'] = 'encoder.embed_tokens'
    return table | {path: f'{prefix}{name}' for path, name in tables.items()}


def read(
    settings: Mapping, entries: Mapping[str, Any], is_encoder: bool, ends: Mapping[str, Any] = {}
) -> tuple[model.T5Config, dict[str, Any], str]:
    """Return the config, the arrays by the names of `parameter_names`, and a note on ignored arrays, or ''.

    `settings`: config.json; `entries`: {transformers' name: array not read yet}; `ends`: see `ends_of`. Raises Refused
    if they disagree.
    """
    images = [name for name in entries if IMAGES.fullmatch(name)]
    arrays = {}
    for name in entries.keys() - images:
        arrays[PREFIX.sub(r'\2.', name, count=1)] = entries[name]
    is_encoder |= not any(name.startswith('decoder.layers.') for name in arrays)
    if is_encoder:
        arrays = {name: x for name, x in arrays.items() if name.startswith('encoder.')}
    is_tied = is_encoder or settings.get('tie_word_embeddings', True)
    # Tied arrays may be stored twice.
    table = 'decoder.embed_tokens'
    copies = {}
    if settings['model_type'] == T5GEMMA2:
        for name in ('weight', 'eoi_embedding'):
            copies[f'{table}.{name}'] = f'encoder.embed_tokens.{name}'
        table = 'encoder.embed_tokens'
    if is_tied:
        copies[f'{LM_HEAD}.weight'] = f'{table}.weight'
    for copy, original in copies.items():
        if copy in arrays and not np.array_equal(arrays.pop(copy).read(), arrays[original].read()):
            raise Refused(f'{copy} differs from {original}, to which it is tied: remove one')
    note = ''
    if images:
        note = f'{len(images)} arrays of images, such as {images[0]}, are ignored'
    return _config(settings, arrays, is_encoder, is_tied, ends), arrays, note


def _config(
    settings: Mapping, arrays: Mapping, is_encoder: bool, is_tied: bool, ends: Mapping
) -> model.T5Config:
    """Return the T5Config of the arrays and of config.json. Raises Refused if these disagree."""
    module = settings['model_type']
    encoder = settings.get('encoder') or {}
    options = dict(ends)
    if module == T5GEMMA2:
        options['eoi_id'] = encoder.get('eoi_token_index', 256_000)
        encoder = encoder.get('text_config') or {}
    stacks = {'encoder': encoder}
    if not is_encoder:
        stacks['decoder'] = settings.get('decoder') or {}
    # Sizes come from the arrays, and options of both stacks from the encoder's settings.
    sizes = {stack: _sizes(stack, section, arrays) for stack, section in stacks.items()}
    num_layers = {f'num_{stack}_layers': x.pop('num_layers') for stack, x in sizes.items()}
    main = sizes.get('decoder', sizes['encoder'])
    for name, size in sizes['encoder'].items():
        if size != main[name]:
            options[f'encoder_{name}'] = size
    options['num_kv_heads'] = main.pop('num_kv_heads')
    for option, name in OPTIONS.items():
        if name in encoder:
            options[option] = encoder[name] or 0
    scalars = {x: section.get('query_pre_attn_scalar', 256) for x, section in stacks.items()}
    if scalars != {stack: x['head_dim'] for stack, x in sizes.items()}:
        options['query_pre_attn_scalar'] = scalars['encoder']
    if LAYER_TYPES[True] in (encoder.get('layer_types') or ()):
        options['full_every'] = encoder['layer_types'].index(LAYER_TYPES[True]) + 1
    ropes = [_rope(module, section) for section in stacks.values()]
    config = model.T5Config(
        **{'num_decoder_layers': 0, **num_layers},
        **main,
        dtype='float32',
        mlp_activations=('gelu', 'linear'),
        dropout_rate=settings.get('dropout_rate', 0.0),
        logits_via_embedding=is_tied,
        float32_attention_logits=False,
        relpos_bias_per_layer=False,
    )
    config = own_model.as_family(config, module, options | ropes[0])
    # All other settings must equal those that we would write.
    expected = stacks_of(config)
    for stack, section in stacks.items():
        for name in section.keys() & expected[stack].keys() - {'rope_parameters'}:
            value = expected[stack][name]
            if section[name] != value and not (name == 'layer_types' and section[name] is None):
                raise Refused(f'{stack}.{name}={section[name]!r}: must be {value!r}')
    if ropes[0] != ropes[-1]:
        raise Refused(f'the stacks have the periods {ropes}: must be equal')
    return config


def ends_of(folder: AnyPath, settings: Mapping) -> dict[str, Any]:
    """Return the options of the special ids around inputs and answers, from the files next to config.json."""
    files = {}
    for name in ('tokenizer', 'generation'):
        file = folder / f'{name}_config.json'
        files[name] = paths.read_json(file) if paths.is_file(file) else {}
    eos = files['generation'].get('eos_token_id') or settings.get('eos_token_id') or EOS_ID
    return {
        'bos': files['tokenizer'].get('add_bos_token', True),
        'eos': files['tokenizer'].get('add_eos_token', False),
        'more_ends': [i for i in np.atleast_1d(eos).tolist() if i != EOS_ID],
    }


def _sizes(stack: str, settings: Mapping, arrays: Mapping) -> dict[str, Any]:
    """Return {our name: size} of a stack."""
    head_dim = settings.get('head_dim', 256)
    check_allowed(f'{stack}.head_dim', head_dim, 256, setting.SIZE)
    table = f'{stack}.embed_tokens.weight'
    if table not in arrays:  # T5Gemma 2 has one table
        table = 'encoder.embed_tokens.weight'
    sources = [table]
    for name in ('self_attn.q_proj', 'self_attn.k_proj', 'mlp.gate_proj'):
        sources.append(f'{stack}.layers.0.{name}.weight')
    for name in sources:
        if name not in arrays:
            raise Refused(f'the folder has no {name}: copy it again')
    (V, D), (num_queries, _), (num_keys, _), (F, _) = [arrays[name].shape for name in sources]
    layers = {name.split('.')[2] for name in arrays if name.startswith(f'{stack}.layers.')}
    return {
        'vocab_size': V,
        'emb_dim': D,
        'mlp_dim': F,
        'head_dim': head_dim,
        'num_heads': num_queries // head_dim,
        'num_kv_heads': num_keys // head_dim,
        'num_layers': len(layers),
    }


def _rope(module: str, settings: Mapping) -> dict[str, float]:
    """Return the options of rotary positions, which transformers 4 and 5 write differently."""
    rope = settings.get('rope_parameters') or {}
    theta = 'rope_theta'
    options = {}
    if module == T5GEMMA2:
        full = rope.get('full_attention') or settings.get('rope_scaling') or {}
        kind = full.get('rope_type', 'default')
        check_allowed('rope_type', kind, '', None, ('default', 'linear'))
        options['full_rope_theta'] = full.get('rope_theta', settings.get('rope_theta', 1e6))
        options['full_rope_factor'] = full.get('factor', 1.0)
        rope = rope.get('sliding_attention') or {}
        theta = 'rope_local_base_freq'
    check_allowed('rope_type', rope.get('rope_type', 'default'), '', None, ('default',))
    return options | {'rope_theta': rope.get('rope_theta', settings.get(theta, 1e4))}


def encoder_alone(
    config: model.T5Config, leaves: Mapping[str, checkpoint.Leaf]
) -> tuple[model.T5Config, dict[str, checkpoint.Leaf]]:
    """Return config and leaves without the decoder. The encoder's sizes and token table become the model's."""
    leaves = dict(leaves)
    table = f'{checkpoint.PARAMETER_PREFIX}encoder/token_embedder/embedding'
    if table in leaves:
        leaves[table.replace('encoder/', '')] = leaves.pop(table)
    config = config.family.encoder_config(config)
    return dataclasses.replace(config, num_decoder_layers=0, logits_via_embedding=True), leaves


def settings_of(config: model.T5Config) -> dict:
    """Return the content of config.json."""
    is_tied = config.logits_via_embedding
    is_supported = config.num_decoder_layers and (is_tied or config.module == T5GEMMA)
    if config.mlp_activations != ('gelu', 'linear') or not is_supported:
        raise Refused(
            f'mlp_activations={config.mlp_activations}, num_decoder_layers={config.num_decoder_layers}, '
            f'logits_via_embedding={is_tied}: transformers cannot open this {config.module}: use --format=t5x'
        )
    stacks = stacks_of(config)
    settings = {
        'architectures': [ARCHITECTURES[config.module]],
        'model_type': config.module,
        'tie_word_embeddings': is_tied,
    }
    for name in ('vocab_size', 'dropout_rate', 'attention_dropout'):
        settings[name] = stacks['decoder'][name]
    if config.module == T5GEMMA2:
        eoi_id = own_model.as_dict(config.options)['eoi_id']
        images = {'eoi_token_index': eoi_id, 'image_token_index': eoi_id + 1}
        settings |= images
        stacks['encoder'] = {
            'boi_token_index': eoi_id - 1,
            'model_type': 't5gemma2_encoder',
            'text_config': stacks['encoder'],
            # transformers always makes one.
            'vision_config': {'model_type': 'siglip_vision_model', 'num_hidden_layers': 1},
            **images,
        }
    return settings | stacks


def stacks_of(config: model.T5Config) -> dict[str, dict]:
    """Return the settings in config.json of each stack."""
    stacks = {}
    num_layers = {'encoder': config.num_encoder_layers, 'decoder': config.num_decoder_layers}
    for stack, c in (('encoder', config.family.encoder_config(config)), ('decoder', config)):
        o: Any = c.options
        layers = range(1, num_layers[stack] + 1)
        rope = {'rope_theta': o.rope_theta, 'rope_type': 'default'}
        model_type = 't5_gemma_module'
        if config.module == T5GEMMA2:
            full = {'rope_theta': o.full_rope_theta, 'rope_type': 'default'}
            if o.full_rope_factor != 1:
                full |= {'rope_type': 'linear', 'factor': o.full_rope_factor}
            rope = {'full_attention': full, 'sliding_attention': rope}
            model_type = 't5gemma2_text' if stack == 'encoder' else 't5gemma2_decoder'
        stacks[stack] = {
            'attention_bias': False,
            'attention_dropout': c.dropout_rate,
            'attn_logit_softcapping': o.attention_cap or None,
            'bos_token_id': 2,
            'dropout_rate': c.dropout_rate,
            'final_logit_softcapping': o.logits_cap or None,
            'head_dim': c.head_dim,
            'hidden_activation': 'gelu_pytorch_tanh',
            'hidden_size': c.emb_dim,
            'intermediate_size': c.mlp_dim,
            'layer_types': [LAYER_TYPES[i % o.full_every == 0] for i in layers],
            'model_type': model_type,
            'num_attention_heads': c.num_heads,
            'num_hidden_layers': num_layers[stack],
            'num_key_value_heads': o.num_kv_heads,
            'query_pre_attn_scalar': o.query_pre_attn_scalar or c.head_dim,
            'rms_norm_eps': 1e-6,
            'rope_parameters': rope,
            'sliding_window': o.window,
            'vocab_size': c.vocab_size,
        }
    return stacks


def from_flax(
    tree: Mapping, vocab_size: int = 256_000
) -> tuple[model.T5Config, dict[str, np.ndarray]]:
    """Return the config and the parameters of a T5Gemma from google-deepmind/gemma, nested dicts of arrays.

    A token table of the release has 256,128 rows. Rows after `vocab_size` belong to no token and are dropped.
    """
    entries = {}
    settings: dict[str, Any] = {'model_type': T5GEMMA, 'encoder': {}, 'decoder': {}}
    for path, x in check.flatten(tree).items():
        stack, place, *names = path.split('/')
        layer = f'{stack}.{place.replace("layer_", "layers.")}'
        if place == 'embedder':
            entries[f'{stack}.embed_tokens'] = x[:vocab_size]
        elif place == 'final_norm':
            entries[f'{stack}.norm'] = x
        elif names[-1] == 'scale':
            entries[f'{layer}.{FLAX_NORMS[names[0]]}_layernorm'] = x
        elif names[-1] == 'linear':
            entries[f'{layer}.mlp.down_proj'] = x.T
        elif names[-1] == 'gating_einsum':
            if x.shape[1] == len(tree[stack]['final_norm']['scale']):  # except in 9b
                x = x.swapaxes(1, 2)
            entries[f'{layer}.mlp.gate_proj'], entries[f'{layer}.mlp.up_proj'] = x
        elif names[1] == 'attn_vec_einsum':
            head_dim = x.shape[1]
            settings[stack] = {'head_dim': head_dim, 'query_pre_attn_scalar': head_dim}
            entries[f'{layer}.{FLAX_ATTENTIONS[names[0]]}.o_proj'] = x.reshape(-1, x.shape[2]).T
        else:
            letters = names[1].removesuffix('_einsum')  # q, kv or qkv
            for letter, x_NDH in zip(
                letters, x.reshape(len(letters), -1, *x.shape[-2:]), strict=True
            ):
                x_NHD = x_NDH.swapaxes(1, 2)
                name = f'{layer}.{FLAX_ATTENTIONS[names[0]]}.{letter}_proj'
                entries[name] = x_NHD.reshape(-1, x_NHD.shape[2])
    with_suffix = {f'{name}.weight': x for name, x in entries.items()}
    config, by_name, _ = read(settings, with_suffix, is_encoder=False)
    paths = inverse(parameter_names(config))
    arrays = {}
    for name, x in by_name.items():
        path = translate(name.removesuffix('.weight'), paths)
        arrays[path] = x.T if path.endswith('/kernel') else x
    return config, arrays
